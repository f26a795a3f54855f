//! Benchmarks, in `benches/`: `step` measures the engine on SmolLM2 beside the limits of the machine, `kernels` the
//! parts of a step. `make bench` runs both.
