//! Device memory, pinned host memory, and copies.
//!
//! SAFETY of the whole module: as for the one above it.

use std::{
    ffi::{c_uint, c_void},
    sync::Arc,
};

use super::{DevicePointer, Handle, code, exported, give, with_context};
use crate::{
    codes::{self, Code},
    state::{Operation, State, device},
};

exported! {
    /// Takes device memory.
    fn cuMemAlloc_v2(address: *mut DevicePointer, bytes: usize) -> Code {
        with_context(|state| {
            if bytes == 0 {
                return Err(codes::INVALID_VALUE);
            }
            let found = state.memory.allocate(bytes).ok_or(codes::OUT_OF_MEMORY)?;
            // SAFETY: see the module.
            unsafe { give(address, found) }
        })
    }

    /// Gives device memory back, once everything queued is done.
    fn cuMemFree_v2(address: DevicePointer) -> Code {
        with_context(|state| {
            state.drain_all()?;
            if state.memory.free(address) { Ok(()) } else { Err(codes::INVALID_VALUE) }
        })
    }

    /// Takes host memory that copies use when their turn comes.
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Code {
        with_context(|state| {
            if bytes == 0 {
                return Err(codes::INVALID_VALUE);
            }
            let found = state.allocate_pinned(bytes)?;
            // SAFETY: see the module.
            unsafe { give(address, found as *mut c_void) }
        })
    }

    /// Gives it back.
    fn cuMemFreeHost(address: *mut c_void) -> Code {
        // Also after an error: the memory is the host's.
        code(device().free_pinned(address as usize))
    }

    /// Fills memory when its turn comes.
    fn cuMemsetD8Async(to: DevicePointer, value: u8, bytes: usize, stream: Handle) -> Code {
        with_context(|state| {
            state.check_range(to, bytes)?;
            state.enqueue(stream as usize, Operation::Fill { to, value, bytes })
        })
    }

    /// Fills memory.
    fn cuMemsetD8_v2(to: DevicePointer, value: u8, bytes: usize) -> Code {
        with_context(|state| {
            state.check_range(to, bytes)?;
            state.enqueue(crate::state::NULL_STREAM, Operation::Fill { to, value, bytes })
        })
    }

    /// Copies from the host when its turn comes; from memory that is not pinned, what it holds now.
    fn cuMemcpyHtoDAsync_v2(to: DevicePointer, from: *const c_void, bytes: usize, stream: Handle) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { upload(state, to, from, bytes, stream as usize) })
    }

    /// Copies from the host.
    fn cuMemcpyHtoD_v2(to: DevicePointer, from: *const c_void, bytes: usize) -> Code {
        with_context(|state| {
            // SAFETY: see the module.
            unsafe { upload(state, to, from, bytes, crate::state::NULL_STREAM)? };
            state.drain(crate::state::NULL_STREAM)
        })
    }

    /// Copies to the host: to pinned memory when its turn comes, to other memory now, after all before it.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: DevicePointer, bytes: usize, stream: Handle) -> Code {
        with_context(|state| download(state, to as usize, from, bytes, stream as usize))
    }

    /// Copies to the host.
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: DevicePointer, bytes: usize) -> Code {
        with_context(|state| {
            download(state, to as usize, from, bytes, crate::state::NULL_STREAM)?;
            state.drain(crate::state::NULL_STREAM)
        })
    }

    /// Copies on the device when its turn comes.
    fn cuMemcpyDtoDAsync_v2(to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle) -> Code {
        with_context(|state| {
            state.check_range(to, bytes)?;
            state.check_range(from, bytes)?;
            state.enqueue(stream as usize, Operation::Copy { to, from, bytes })
        })
    }
}

/// # Safety
/// As for the driver's copies.
unsafe fn upload(
    state: &mut State,
    to: DevicePointer,
    from: *const c_void,
    bytes: usize,
    stream: usize,
) -> Result<(), Code> {
    state.check_range(to, bytes)?;
    if state.is_pinned(from as usize, bytes) || state.is_capturing(stream)? {
        return state.enqueue(stream, Operation::UploadPinned { to, from: from as usize, bytes });
    }
    let copy: Arc<[u8]> = match bytes {
        0 => Arc::new([]),
        // SAFETY: by the contract.
        _ => unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.into(),
    };
    state.enqueue(stream, Operation::Upload { to, bytes: copy })
}

fn download(state: &mut State, to: usize, from: DevicePointer, bytes: usize, stream: usize) -> Result<(), Code> {
    state.check_range(from, bytes)?;
    state.enqueue(stream, Operation::Download { to, from, bytes })?;
    if state.is_pinned(to, bytes) || state.is_capturing(stream)? { Ok(()) } else { state.drain(stream) }
}
