//! Modules, functions and launches.
//!
//! SAFETY of the whole module: as for the one above it.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::Arc,
};

use ptxsim::Module;

use super::{Handle, exported, give, with_context};
use crate::{
    codes::{self, Code},
    state::{Function, MOST_SHARED_BYTES, Operation, QueuedLaunch, SHARED_BYTES},
};

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
