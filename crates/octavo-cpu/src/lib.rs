//! The host's processor as a backend, at the speed of the hardware.
//!
//! | module | holds |
//! | --- | --- |
//! | `backend`, `options` | [`CpuBackend`]: the contract of `octavo-backend`, fulfilled |
//! | `plan`, `weights`, `check` | a loaded model, and the check of a step's inputs |
//! | `forward` | one step: every worker goes through all layers, regions end with barriers |
//! | `pool`, `affinity`, `host` | the workers, where they run, and what the host grants |
//! | `pack`, `activation`, `matmul` | weights in tiles, rounded inputs, and their products |
//! | `kv`, `attention`, `rope`, `pointwise` | the paged cache and what reads and writes it |
//! | `sampler` | the draw of a token from a row of logits |
//! | `simd`, `isa`, `amx` | sixteen lanes on every instruction set, and the matrix unit |
//! | `arena`, `work` | memory, taken at load |
//! | `peak`, `limits` | what the machine can do at best, measured |
//!
//! Invariant (row invariance): the bits of a row's result depend on its tokens, positions and cached keys and values
//! alone. Integer products are exact, sums along a row of weights have one order, attention is cut at fixed positions.

pub mod activation;
mod affinity;
pub mod amx;
pub mod arena;
pub mod attention;
mod backend;
mod check;
mod forward;
pub mod heads;
pub mod host;
pub mod isa;
pub mod kv;
pub mod limits;
pub mod matmul;
pub mod options;
pub mod pack;
pub mod peak;
mod plan;
mod pointwise;
pub mod pool;
mod rope;
pub mod sampler;
pub mod simd;
mod weights;
pub mod work;

pub use backend::CpuBackend;
pub use options::{ActivationType, CpuOptions, Projections};
pub use plan::CpuPlan;
