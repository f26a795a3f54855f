//! (under construction)

pub mod activation;
pub mod arena;
pub mod host;
pub mod isa;
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
