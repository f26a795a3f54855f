//! An NVIDIA GPU as a backend.

pub mod entries;
pub mod int4;
