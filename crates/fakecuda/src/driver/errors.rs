//! Errors in words, and what only this driver says: counters and faults.
//!
//! SAFETY of the whole module: as for the one above it.

use std::ffi::{CStr, c_char};

use super::{code, exported, give};
use crate::{
    codes::{self, Code},
    state::device,
};

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
