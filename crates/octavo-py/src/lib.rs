//! `octavo._octavo`: speaks Python and text.
//!
//! | module | holds |
//! | --- | --- |
//! | `tokenizer` | text to token ids and back; control tokens only where they are wanted |
//! | `text` | token ids to text as they arrive |
//! | `stop` | where a stop string ends a text, and what of it has to wait |
//! | `reader` | what a request's outputs give to read |
//! | `device` | from a checkpoint to a running engine |
//! | `engine` | the engine as Python sees it: load, submit, abort, count, close |
//! | `host` | the machine and its limits |
//! | `export` | a checkpoint as a Hugging Face folder |
//! | `sampling` | draws without a model |
//! | `inbox` | where Python finds what its requests gained |
//! | `tokenizer_class` | the tokenizer as Python sees it |
//! | `grammar` | what outputs have to follow, as masks over the vocabulary |
//! | `grammar_class` | a compiled grammar as Python sees it |
//! | `errors` | the one table from Rust errors to Python exceptions |
//!
//! Invariant: whatever waits or computes releases the GIL, and the engine's thread never takes it.

mod device;
mod engine;
mod errors;
mod export;
mod grammar;
mod grammar_class;
mod host;
mod inbox;
mod reader;
mod sampling;
mod stop;
mod text;
mod tokenizer;
mod tokenizer_class;

use pyo3::prelude::*;

/// The engine and the tokenizer, written in Rust.
#[pymodule]
mod _octavo {
    #[pymodule_export]
    use super::{
        engine::Core,
        export::{export_model, export_tokenizer},
        grammar_class::GrammarClass,
        host::{host_facts, measure_dot_peak, measure_read_bandwidth, memory_plan, probe_cuda},
        inbox::{Delta, InboxClass, StoryClass},
        sampling::draw_many,
        tokenizer_class::TokenizerClass,
    };

    /// The version of this build.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
