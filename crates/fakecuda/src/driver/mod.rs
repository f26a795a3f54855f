//! The driver's functions that a program needs which loads modules, copies memory, launches kernels and captures graphs.
//! The others are not there at all: what looks a function up when it calls it (cudarc) says which one it misses.
//!
//! SAFETY of the whole module: as for the driver's own functions; addresses that are given for results are valid, names and
//! images end with a zero, host memory lives as long as the driver says.

mod errors;
mod graphs;
mod launches;
mod memory;
mod streams;

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
};

use crate::{
    codes::{self, Code},
    state::{MEMORY_BYTES, MOST_SHARED_BYTES, SHARED_BYTES, State, device},
};
pub use errors::{KernelReport, fakecuda_last_fault};

type DevicePointer = u64;
type Handle = *mut c_void;

/// The only context.
const CONTEXT: usize = 0x10;
/// CUDA 12.4.
const VERSION: c_int = 12_040;
const NAME: &CStr = c"octavo fake GPU";

thread_local! {
    /// The context bound to this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

fn code(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(codes::SUCCESS)
}

/// A call that needs a context.
fn with_context(call: impl FnOnce(&mut State) -> Result<(), Code>) -> Code {
    if CURRENT.get() == 0 {
        return codes::INVALID_CONTEXT;
    }
    let mut state = device();
    code(state.check().and_then(|()| call(&mut state)))
}

/// Defines exported functions whose safety is that of the driver's.
macro_rules! exported {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> Code $body:block)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As for the driver's function of this name.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Code $body
    )*};
}
use exported;

/// Writes a result to where the caller wants it.
///
/// # Safety
/// The address is null or valid.
unsafe fn give<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: by the contract.
    unsafe { to.write(value) };
    Ok(())
}

exported! {
    /// Nothing to do.
    fn cuInit(_flags: c_uint) -> Code {
        codes::SUCCESS
    }

    /// The version of CUDA that this driver stands for.
    fn cuDriverGetVersion(version: *mut c_int) -> Code {
        // SAFETY: see the module.
        code(unsafe { give(version, VERSION) })
    }

    /// One.
    fn cuDeviceGetCount(count: *mut c_int) -> Code {
        // SAFETY: see the module.
        code(unsafe { give(count, 1) })
    }

    /// Its number is its handle.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
        if ordinal != 0 {
            return codes::INVALID_DEVICE;
        }
        // SAFETY: see the module.
        code(unsafe { give(device, 0) })
    }

    /// What it calls itself.
    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> Code {
        let bytes = NAME.to_bytes_with_nul();
        if (length as usize) < bytes.len() {
            return codes::INVALID_VALUE;
        }
        // SAFETY: see the module; there is room.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), name, bytes.len()) };
        codes::SUCCESS
    }

    /// Bytes of memory.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> Code {
        // SAFETY: see the module.
        code(unsafe { give(bytes, MEMORY_BYTES) })
    }

    /// What programs ask for; 0 for anything else.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> Code {
        let found = match attribute {
            1 => 1024,                      // threads of a block
            8 => SHARED_BYTES as c_int,     // shared memory of a block
            10 => 32,                       // lanes of a warp
            16 => 16,                       // multiprocessors
            18 => 1,                        // integrated
            75 => 8,                        // compute capability, major
            76 => 7,                        // and minor
            97 => MOST_SHARED_BYTES as c_int, // shared memory of a block that asks for more
            _ => 0,
        };
        // SAFETY: see the module.
        code(unsafe { give(value, found) })
    }

    /// One more user of the context.
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) -> Code {
        device().users += 1;
        // SAFETY: see the module.
        code(unsafe { give(context, CONTEXT as Handle) })
    }

    /// One user less; with the last one everything ends.
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Code {
        device().release();
        codes::SUCCESS
    }

    /// The context of this thread.
    fn cuCtxGetCurrent(context: *mut Handle) -> Code {
        // SAFETY: see the module.
        code(unsafe { give(context, CURRENT.get() as Handle) })
    }

    /// Binds the context to this thread.
    fn cuCtxSetCurrent(context: Handle) -> Code {
        CURRENT.set(context as usize);
        codes::SUCCESS
    }

    /// Runs everything that is queued.
    fn cuCtxSynchronize() -> Code {
        with_context(State::drain_all)
    }

    /// Free bytes, and bytes in all.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe {
            give(free, state.memory.free_bytes())?;
            give(total, state.memory.capacity())
        })
    }
}
