//! The driver's error codes.

use std::ffi::CStr;

/// A `CUresult`.
pub type Code = i32;

/// Nothing is wrong.
pub const SUCCESS: Code = 0;
/// An argument cannot be.
pub const INVALID_VALUE: Code = 1;
/// No room.
pub const OUT_OF_MEMORY: Code = 2;
/// No such device.
pub const INVALID_DEVICE: Code = 101;
/// The calling thread has no context.
pub const INVALID_CONTEXT: Code = 201;
/// A binary, which cannot run here.
pub const NO_BINARY_FOR_GPU: Code = 209;
/// PTX that cannot be parsed.
pub const INVALID_PTX: Code = 218;
/// A handle of nothing.
pub const INVALID_HANDLE: Code = 400;
/// No kernel of this name.
pub const NOT_FOUND: Code = 500;
/// Work is not done.
pub const NOT_READY: Code = 600;
/// A kernel did what it must not.
pub const LAUNCH_FAILED: Code = 719;
/// Not in this driver.
pub const NOT_SUPPORTED: Code = 801;
/// Not while a graph is captured.
pub const STREAM_CAPTURE_UNSUPPORTED: Code = 900;

/// The driver's name of a code and what it says about it.
pub fn words(code: Code) -> (&'static CStr, &'static CStr) {
    match code {
        SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"no context is bound to this thread"),
        NO_BINARY_FOR_GPU => (c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"this driver runs PTX and no binaries"),
        INVALID_PTX => (c"CUDA_ERROR_INVALID_PTX", c"the PTX cannot be parsed"),
        INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        NOT_READY => (c"CUDA_ERROR_NOT_READY", c"work is not done"),
        LAUNCH_FAILED => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported by this driver"),
        STREAM_CAPTURE_UNSUPPORTED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing")
        }
        _ => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
    }
}
