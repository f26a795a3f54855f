//! Turns a checkpoint into a [`octavo_backend::DecoderSpec`] and its weights, and says what running it will take.
//!
//! A [`Checkpoint`] is opened from a `.gguf` file or a Hugging Face folder. Everything that can be wrong with it is
//! found then: each count, length and offset is compared with the file before it is used, each tensor's shape with the
//! spec. What remains are views of mapped files that a backend packs ([`octavo_backend::WeightSource`]).
//!
//! A family (`family/`) is a function from metadata to a spec, and a row of tensor names. Formats belong to tensors,
//! not to models. Nothing in this crate knows requests, threads or who owns a KV block.
#![deny(unsafe_code)]

mod checkpoint;
mod config;
mod error;
mod export;
mod family;
mod gguf;
mod huggingface;
#[allow(unsafe_code)]
mod mapped;
mod memory;
mod rope;
mod tensors;

pub use checkpoint::Checkpoint;
pub use config::{GenerationDefaults, GgufVocabulary, ModelConfig, TokenizerSource};
pub use error::{ModelError, Shape};
pub use memory::{MemoryPlan, MemoryRequest, memory_plan};
