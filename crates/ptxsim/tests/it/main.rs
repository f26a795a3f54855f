//! Hand-written PTX, run and compared with what Rust computes; every fault is planted once.
#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

mod common;
mod control;
mod counters;
mod float;
mod integer;
mod memory;
mod module;
mod shared;
mod tensor;
