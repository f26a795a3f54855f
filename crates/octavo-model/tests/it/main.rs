//! Checkpoints written by these tests, whole and damaged, opened through the public interface.
#![allow(clippy::unwrap_used)] // clippy excuses test functions only, not what they share

mod folder;
mod gguf;
mod gguf_damage;
mod int4;
mod memory;
mod oracle;
mod rope;
mod shards;
mod support;
