//! The driver's functions that a program needs which loads modules, copies memory, launches kernels and captures graphs.
//! The others are not there at all: what looks a function up when it calls it (cudarc) says which one it misses.
//!
//! SAFETY of the whole module: as for the driver's own functions; addresses that are given for results are valid, names and
//! images end with a zero, host memory lives as long as the driver says.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::Arc,
};

use ptxsim::Module;

use crate::{
    codes::{self, Code},
    state::{Event, Function, MEMORY_BYTES, MOST_SHARED_BYTES, Operation, QueuedLaunch, SHARED_BYTES, State, device},
};

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

// ---- The device --------------------------------------------------------------------------------------------------------

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

// ---- Memory ------------------------------------------------------------------------------------------------------------

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

// ---- Streams and events ------------------------------------------------------------------------------------------------

exported! {
    /// A stream; all are alike.
    fn cuStreamCreate(stream: *mut Handle, _flags: c_uint) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(stream, state.create_stream() as Handle) })
    }

    /// A stream; priorities mean nothing.
    fn cuStreamCreateWithPriority(stream: *mut Handle, _flags: c_uint, _priority: c_int) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(stream, state.create_stream() as Handle) })
    }

    /// Ends a stream once all in it is done.
    fn cuStreamDestroy_v2(stream: Handle) -> Code {
        with_context(|state| state.destroy_stream(stream as usize))
    }

    /// Runs all that is queued in a stream.
    fn cuStreamSynchronize(stream: Handle) -> Code {
        with_context(|state| state.drain(stream as usize))
    }

    /// Nothing more of a stream before an event.
    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) -> Code {
        with_context(|state| match event_of(state, event)?.recorded {
            Some((other, upto)) if other != stream as usize => {
                state.enqueue(stream as usize, Operation::Wait { stream: other, upto })
            }
            _ => Ok(()),
        })
    }

    /// Keeps what is queued from now on for a graph.
    fn cuStreamBeginCapture_v2(stream: Handle, _mode: c_int) -> Code {
        with_context(|state| state.begin_capture(stream as usize))
    }

    /// The graph of what was kept.
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(graph, state.end_capture(stream as usize)? as Handle) })
    }

    /// Whether a stream is captured.
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int) -> Code {
        // SAFETY: see the module.
        with_context(|state| unsafe { give(status, c_int::from(state.is_capturing(stream as usize)?)) })
    }

    /// An event.
    fn cuEventCreate(event: *mut Handle, _flags: c_uint) -> Code {
        with_context(|state| {
            let handle = state.handle();
            state.events.insert(handle, Event::default());
            // SAFETY: see the module.
            unsafe { give(event, handle as Handle) }
        })
    }

    /// Ends an event.
    fn cuEventDestroy_v2(event: Handle) -> Code {
        with_context(|state| state.events.remove(&(event as usize)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
    }

    /// Marks where a stream's queue ends now.
    fn cuEventRecord(event: Handle, stream: Handle) -> Code {
        with_context(|state| {
            event_of(state, event)?;
            let upto = state.end_of(stream as usize)?;
            state.events.insert(event as usize, Event { recorded: Some((stream as usize, upto)) });
            Ok(())
        })
    }

    /// Runs a stream up to the mark.
    fn cuEventSynchronize(event: Handle) -> Code {
        with_context(|state| match event_of(state, event)?.recorded {
            Some((stream, upto)) => state.drain_to(stream, upto),
            None => Ok(()),
        })
    }

    /// Whether the mark is passed.
    fn cuEventQuery(event: Handle) -> Code {
        with_context(|state| match event_of(state, event)?.recorded {
            Some((stream, upto)) if !state.has_reached(stream, upto) => Err(codes::NOT_READY),
            _ => Ok(()),
        })
    }

    /// There is no time here.
    fn cuEventElapsedTime(milliseconds: *mut f32, _start: Handle, _end: Handle) -> Code {
        // SAFETY: see the module.
        code(unsafe { give(milliseconds, 0.0) })
    }
}

fn event_of(state: &State, event: Handle) -> Result<Event, Code> {
    state.events.get(&(event as usize)).copied().ok_or(codes::INVALID_HANDLE)
}

// ---- Modules and launches ----------------------------------------------------------------------------------------------

exported! {
    /// Loads PTX.
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Code {
        // SAFETY: see the module; an image of either kind is longer than four bytes.
        if unsafe { std::slice::from_raw_parts(image.cast::<u8>(), 4) } == b"\x7fELF" {
            eprintln!("fakecuda: a binary for a GPU cannot run here; load the PTX");
            return codes::NO_BINARY_FOR_GPU;
        }
        // SAFETY: see the module.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        with_context(|state| {
            let parsed = Module::parse(&text).map_err(|error| {
                eprintln!("fakecuda: {error}");
                codes::INVALID_PTX
            })?;
            let handle = state.handle();
            state.modules.insert(handle, Arc::new(parsed));
            // SAFETY: see the module.
            unsafe { give(module, handle as Handle) }
        })
    }

    /// Forgets a module.
    fn cuModuleUnload(module: Handle) -> Code {
        with_context(|state| state.modules.remove(&(module as usize)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
    }

    /// Looks a kernel up.
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> Code {
        // SAFETY: see the module.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        with_context(|state| {
            let module = state.modules.get(&(module as usize)).ok_or(codes::INVALID_HANDLE)?.clone();
            let kernel = module.kernel(&name).ok_or(codes::NOT_FOUND)?;
            let most_dynamic_shared = SHARED_BYTES.saturating_sub(kernel.static_shared_bytes());
            let handle = state.handle();
            state.functions.insert(handle, Function { module, name, most_dynamic_shared });
            // SAFETY: see the module.
            unsafe { give(function, handle as Handle) }
        })
    }

    /// Grants shared memory; other attributes mean nothing.
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) -> Code {
        with_context(|state| {
            let function = state.functions.get_mut(&(function as usize)).ok_or(codes::INVALID_HANDLE)?;
            if attribute == DYNAMIC_SHARED {
                let kernel = function.module.kernel(&function.name).ok_or(codes::INVALID_HANDLE)?;
                let value = usize::try_from(value).map_err(|_| codes::INVALID_VALUE)?;
                if kernel.static_shared_bytes() + value > MOST_SHARED_BYTES {
                    return Err(codes::INVALID_VALUE);
                }
                function.most_dynamic_shared = value;
            }
            Ok(())
        })
    }

    /// Threads and shared memory of a kernel; 0 for anything else.
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Handle) -> Code {
        with_context(|state| {
            let function = state.functions.get(&(function as usize)).ok_or(codes::INVALID_HANDLE)?;
            let kernel = function.module.kernel(&function.name).ok_or(codes::INVALID_HANDLE)?;
            let found = match attribute {
                0 => kernel.max_threads().unwrap_or(1024),
                1 => kernel.static_shared_bytes(),
                DYNAMIC_SHARED => function.most_dynamic_shared,
                _ => 0,
            };
            // SAFETY: see the module.
            unsafe { give(value, found as c_int) }
        })
    }

    /// Queues a kernel. Its arguments are read now.
    fn cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: Handle, params: *mut *mut c_void, _extra: *mut *mut c_void,
    ) -> Code {
        with_context(|state| {
            let function = state.functions.get(&(function as usize)).ok_or(codes::INVALID_HANDLE)?.clone();
            let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
            check_launch(&function, grid, block, shared_bytes as usize)?;
            let kernel = function.module.kernel(&function.name).ok_or(codes::INVALID_HANDLE)?;
            let bytes = kernel.params().iter().map(|param| param.offset + param.bytes).max().unwrap_or(0);
            let mut values = vec![0; bytes];
            for (index, param) in kernel.params().iter().enumerate() {
                // SAFETY: see the module; one address for each parameter.
                unsafe {
                    let from = (*params.add(index)).cast::<u8>();
                    std::ptr::copy_nonoverlapping(from, values[param.offset..].as_mut_ptr(), param.bytes);
                }
            }
            let dynamic_shared = shared_bytes as usize;
            let launch = QueuedLaunch { function, grid, block, dynamic_shared, params: values };
            state.enqueue(stream as usize, Operation::Launch(Arc::new(launch)))
        })
    }
}

const DYNAMIC_SHARED: c_int = 8;

/// What a real driver refuses when a kernel is launched.
fn check_launch(function: &Function, grid: [u32; 3], block: [u32; 3], dynamic_shared: usize) -> Result<(), Code> {
    let kernel = function.module.kernel(&function.name).ok_or(codes::INVALID_HANDLE)?;
    let threads: u64 = block.iter().map(|&threads| u64::from(threads)).product();
    let most_threads = kernel.max_threads().unwrap_or(1024).min(1024) as u64;
    let refused = if grid.contains(&0) || block.contains(&0) {
        "an empty grid or block".to_owned()
    } else if grid[0] > i32::MAX as u32 || grid[1] > 65_535 || grid[2] > 65_535 {
        format!("a grid of {grid:?} blocks")
    } else if threads > most_threads || block[2] > 64 {
        format!("a block of {block:?} threads, {most_threads} at most")
    } else if dynamic_shared > function.most_dynamic_shared {
        format!("{dynamic_shared} bytes of dynamic shared memory, {} granted", function.most_dynamic_shared)
    } else {
        return Ok(());
    };
    eprintln!("fakecuda: launch of {} refused: {refused}", function.name);
    Err(codes::INVALID_VALUE)
}

// ---- Graphs ------------------------------------------------------------------------------------------------------------

exported! {
    /// A graph that can be launched.
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: u64) -> Code {
        with_context(|state| {
            let operations = state.graphs.get(&(graph as usize)).ok_or(codes::INVALID_HANDLE)?.clone();
            let handle = state.handle();
            state.graphs.insert(handle, operations);
            // SAFETY: see the module.
            unsafe { give(executable, handle as Handle) }
        })
    }

    /// Queues everything in a graph.
    fn cuGraphLaunch(executable: Handle, stream: Handle) -> Code {
        with_context(|state| {
            let operations = state.graphs.get(&(executable as usize)).ok_or(codes::INVALID_HANDLE)?.clone();
            operations.iter().try_for_each(|operation| state.enqueue(stream as usize, operation.clone()))
        })
    }

    /// Nothing to do.
    fn cuGraphUpload(_executable: Handle, _stream: Handle) -> Code {
        codes::SUCCESS
    }

    /// Forgets a graph.
    fn cuGraphDestroy(graph: Handle) -> Code {
        with_context(|state| state.graphs.remove(&(graph as usize)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
    }

    /// Forgets what could be launched.
    fn cuGraphExecDestroy(executable: Handle) -> Code {
        with_context(|state| state.graphs.remove(&(executable as usize)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
    }
}

// ---- Errors, and what only this driver says ----------------------------------------------------------------------------

/// What the launches of one kernel counted together.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KernelReport {
    /// Launches that came to their end.
    pub launches: u64,
    /// Blocks.
    pub blocks: u64,
    /// Instructions, once a warp.
    pub warp_instructions: u64,
    /// Loads from global memory.
    pub load_requests: u64,
    /// Sectors of 32 bytes that they touched.
    pub load_sectors: u64,
    /// Bytes that they wanted.
    pub load_bytes: u64,
    /// Stores to global memory.
    pub store_requests: u64,
    /// Sectors of 32 bytes that they touched.
    pub store_sectors: u64,
    /// Bytes that they wrote.
    pub store_bytes: u64,
    /// Accesses of shared memory.
    pub shared_requests: u64,
    /// Passes that they took beyond one each.
    pub shared_conflicts: u64,
    /// Matrix instructions.
    pub mma: u64,
}

exported! {
    /// The name of a code.
    fn cuGetErrorName(error: Code, name: *mut *const c_char) -> Code {
        // SAFETY: see the module.
        code(unsafe { give(name, codes::words(error).0.as_ptr()) })
    }

    /// What a code means; of a failed launch, what it did.
    fn cuGetErrorString(error: Code, text: *mut *const c_char) -> Code {
        let fault = if error == codes::LAUNCH_FAILED { device().last_fault } else { None };
        let words = fault.map_or(codes::words(error).1, |fault| fault.as_c_str());
        // SAFETY: see the module.
        code(unsafe { give(text, words.as_ptr()) })
    }

    /// The counters of a kernel; `CUDA_ERROR_NOT_FOUND` if no launch of it came to its end.
    fn fakecuda_report(kernel: *const c_char, report: *mut KernelReport) -> Code {
        // SAFETY: see the module.
        let kernel = unsafe { CStr::from_ptr(kernel) }.to_string_lossy();
        let state = device();
        let Some((launches, sum)) = state.report(&kernel) else { return codes::NOT_FOUND };
        let found = KernelReport {
            launches: *launches,
            blocks: sum.blocks,
            warp_instructions: sum.warp_instructions,
            load_requests: sum.global_loads.requests,
            load_sectors: sum.global_loads.sectors,
            load_bytes: sum.global_loads.bytes,
            store_requests: sum.global_stores.requests,
            store_sectors: sum.global_stores.sectors,
            store_bytes: sum.global_stores.bytes,
            shared_requests: sum.shared.requests,
            shared_conflicts: sum.shared.conflicts,
            mma: sum.mma,
        };
        // SAFETY: see the module.
        code(unsafe { give(report, found) })
    }
}

/// The last fault of a kernel, for as long as the process lives; null if there was none.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_last_fault() -> *const c_char {
    device().last_fault.map_or(std::ptr::null(), |fault| fault.as_ptr())
}
