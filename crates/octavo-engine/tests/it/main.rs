//! The engine as a whole, on a tiny random model and on SmolLM2-135M (`octavo pull smollm2-135m`).
#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

mod beams;
mod common;
mod handle;
mod law;
#[cfg(feature = "long-tests")]
mod long;
mod rules;
mod sharing;
mod smollm2;
