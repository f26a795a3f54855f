//! (under construction)

pub mod arena;
pub mod host;
pub mod isa;
pub mod pool;
pub mod simd;
