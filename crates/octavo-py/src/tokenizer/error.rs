//! Why a tokenizer could not be made or could not read a text.

use std::{io, path::PathBuf};

/// What went wrong, and where.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is no tokenizer.
    #[error("{}: not a tokenizer.json that can be used: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// A vocabulary inside a GGUF file cannot be used.
    #[error("tokenizer.ggml.{field}: found {found}, expected {expected}")]
    Vocabulary {
        /// The metadata field.
        field: &'static str,
        /// Its value.
        found: String,
        /// What can be used.
        expected: String,
    },
    /// The tokenizer's own rules failed.
    #[error("tokenizer: {0}")]
    Rules(String),
}

impl TokenizerError {
    pub(super) fn library(error: tokenizers::Error) -> TokenizerError {
        TokenizerError::Rules(error.to_string())
    }
}
