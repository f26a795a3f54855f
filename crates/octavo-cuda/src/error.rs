//! Why there is no GPU to use, or why it failed.

use cudarc::driver::DriverError;
use octavo_backend::BackendError;

use crate::images::KERNELS_VARIABLE;

/// What went wrong between this process and an NVIDIA GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not on this machine.
    #[error("no NVIDIA driver: the loader finds no libcuda.so.1 ({reason})")]
    NoDriver {
        /// The loader's words.
        reason: String,
    },
    /// The driver knows less than the kernels need.
    #[error("the NVIDIA driver is too old: found CUDA {found}, needed CUDA {needed} (driver 525 or newer)")]
    OldDriver {
        /// Version of CUDA that the driver supports.
        found: String,
        /// The least that will do.
        needed: String,
    },
    /// The driver runs, and sees no such GPU.
    #[error("no NVIDIA GPU: found {found}, wanted number {wanted}")]
    NoDevice {
        /// How many the driver sees.
        found: usize,
        /// Which was asked for, from 0.
        wanted: usize,
    },
    /// The GPU is of an older generation than the kernels are made for.
    #[error("{name} has compute capability {}.{}, needed at least 8.0", found.0, found.1)]
    OldDevice {
        /// The GPU.
        name: String,
        /// Its compute capability.
        found: (u32, u32),
    },
    /// This program was built without them.
    #[error(
        "this build has no CUDA kernels: build octavo-cuda with its feature `kernels`, \
         or set {KERNELS_VARIABLE} to a folder of compiled ones"
    )]
    NoKernels,
    /// The folder that [`KERNELS_VARIABLE`] names does not have them.
    #[error("{KERNELS_VARIABLE}: found {found}, expected the folder that `python kernels/build.py` writes")]
    KernelsFolder {
        /// The folder, and what is wrong with it.
        found: String,
    },
    /// There is neither a binary of a source file for this GPU nor PTX.
    #[error("no compiled kernels of {module} suit this GPU: found no cubin for it and no PTX")]
    NoImage {
        /// The source file's name.
        module: &'static str,
    },
    /// A kernel that should be in the module of its source file is not.
    #[error("kernel {kernel} is not in module {module}")]
    NoKernel {
        /// Its name.
        kernel: String,
        /// The source file's name.
        module: &'static str,
    },
    /// The library of matrix products is not on this machine.
    #[error("cuBLASLt was not found; looked at {}", looked.join(", "))]
    NoCublasLt {
        /// Files that were tried, in order.
        looked: Vec<String>,
    },
    /// The library of matrix products refused a call.
    #[error("{call} failed with status {status}")]
    CublasLt {
        /// The function.
        call: &'static str,
        /// Its `cublasStatus_t`.
        status: i32,
    },
    /// Memory could not be taken.
    #[error("{what}: could not take {bytes} bytes")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
    },
    /// The driver refused a call, or a kernel that was launched before it has failed.
    #[error("{what} failed: {name} ({text})")]
    Driver {
        /// What was being done.
        what: String,
        /// The driver's name of the error.
        name: String,
        /// The driver's words.
        text: String,
    },
}

impl CudaError {
    /// An error of the driver, with its own words.
    pub(crate) fn driver(what: impl Into<String>, error: DriverError) -> CudaError {
        let text = |found: Result<&std::ffi::CStr, DriverError>| {
            found.map_or_else(|_| format!("error {}", error.0 as i32), |text| text.to_string_lossy().into_owned())
        };
        CudaError::Driver { what: what.into(), name: text(error.error_name()), text: text(error.error_string()) }
    }
}

impl From<CudaError> for BackendError {
    fn from(error: CudaError) -> BackendError {
        match error {
            CudaError::Memory { what, bytes } => BackendError::Memory { what, bytes },
            other => BackendError::Kernel(other.to_string()),
        }
    }
}

/// Says what was being done when a call of the driver failed.
pub(crate) trait Doing<T> {
    /// The result, with its context if it is an error.
    fn doing(self, what: &'static str) -> Result<T, CudaError>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, what: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::driver(what, error))
    }
}
