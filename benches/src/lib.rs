//! Benchmarks, in `benches/`: `step` measures the engine on SmolLM2 beside the limits of the machine, `kernels` its
//! matmuls, `sampling` the draw of a token, `scheduler` what the scheduler costs and how well it keeps the KV cache filled,
//! `text` what reading an output costs, `overhead` what a step takes besides the model. `make bench` runs all.
//!
//! Here is what they share.

pub mod around;
pub mod lengths;
pub mod series;
pub mod smollm2;
