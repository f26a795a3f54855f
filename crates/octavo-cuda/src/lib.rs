//! An NVIDIA GPU as a backend. Needs its driver and cuBLASLt when it runs, and no CUDA at all when it is built.
//!
//! | module | holds |
//! | --- | --- |
//! | `probe`, `error` | [`probe`]: what this machine has, and what is missing |
//! | `backend`, `plan`, `weights` | [`CudaBackend`], a loaded model |
//! | `step`, `forward`, `sampler`, `entries` | one step: its description, the layers, draws |
//! | `kernels`, `products`, `int4` | the kernels as functions, matrix products, the layout of 4-bit weights |
//! | `cublaslt` | our bindings of NVIDIA's library of products |
//! | `device`, `arena`, `staging`, `images` | the GPU's memory and modules, what goes there and comes back |
//!
//! Sums are added up in the order that suits the shape of a step: results are equal within a tolerance.

pub mod arena;
mod backend;
pub mod cublaslt;
pub mod device;
pub mod entries;
mod error;
mod forward;
pub mod images;
pub mod int4;
pub mod kernels;
mod plan;
mod probe;
pub mod products;
pub mod sampler;
pub mod staging;
mod step;
pub mod weights;

pub use backend::CudaBackend;
pub use error::CudaError;
pub use plan::CudaPlan;
pub use probe::{CudaOptions, DeviceInfo, probe, probe_with};
