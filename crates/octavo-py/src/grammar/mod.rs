//! Grammars that outputs follow: JSON schemas, regular expressions, lists of texts, and grammars in Lark's notation.
//!
//! | module | holds |
//! | --- | --- |
//! | `compiler` | from a source to a grammar: bounds, and the grammars made before |
//! | `json` | JSON schemas as rules |
//! | `rules` | rules over regular expressions |
//! | `lark` | what is not taken in Lark's notation |
//! | `regex` | what may be wrong with a regular expression |
//! | `vocabulary` | a vocabulary as a tree of bytes |
//! | `state` | how far an output has come |
//! | `work` | the work of one schema, counted |
//! | `error` | what may be wrong with a source |
//!
//! The llguidance library walks the vocabulary with a grammar; what a schema means is worked out here.
//!
//! Invariant: nothing here looks at a clock once a grammar is compiled, and no source can end the process.

mod compiler;
mod error;
mod json;
mod lark;
mod regex;
mod rules;
mod state;
mod vocabulary;
mod work;

pub use compiler::{GrammarCompiler, GrammarSource};
pub use error::CompileError;
