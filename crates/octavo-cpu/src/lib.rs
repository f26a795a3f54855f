//! (under construction)

pub mod activation;
mod affinity;
pub mod arena;
pub mod host;
pub mod isa;
pub mod limits;
pub mod matmul;
pub mod pack;
pub mod peak;
pub mod pool;
pub mod simd;
pub mod attention;
mod check;
pub mod kv;
pub mod options;
mod rope;
pub mod work;
mod backend;
mod forward;
mod plan;
mod pointwise;
mod weights;

pub use backend::CpuBackend;
pub use options::CpuOptions;
pub use plan::CpuPlan;
