//! Everything that can be wrong with a checkpoint, or with the memory asked for it.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// Why a checkpoint cannot be used. Each message says where, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No such file or folder.
    #[error("{}: not found, expected {expected}", path.display())]
    NotFound {
        /// The path that was tried.
        path: PathBuf,
        /// What should be there.
        expected: &'static str,
    },
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// A file ends before what it announces.
    #[error("{}: {what}: found {found} bytes, expected {expected}: the file is cut short or corrupt", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The part that lies beyond its end.
        what: String,
        /// Bytes that are there.
        found: u64,
        /// Bytes that the part needs.
        expected: u64,
    },
    /// A value contradicts the format, or another value.
    #[error("{}: {field}: found {found}, expected {expected}", file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// The field or tensor.
        field: String,
        /// Its value.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A sound checkpoint that octavo cannot run.
    #[error("{}: {what}: found {found}, which is not supported; expected {expected}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The field or tensor.
        what: String,
        /// Its value.
        found: String,
        /// What is supported.
        expected: String,
    },
    /// The model needs a tensor that the checkpoint lacks.
    #[error("{}: tensor {tensor}: not found", file.display())]
    MissingTensor {
        /// The file or folder.
        file: PathBuf,
        /// The tensor's name in the checkpoint.
        tensor: String,
    },
    /// The checkpoint holds a tensor that the model has no place for.
    #[error("{}: tensor {tensor}: found {found}, expected {expected}", file.display())]
    LeftOverTensor {
        /// The file.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Its shape and format.
        found: String,
        /// Who should have named it.
        expected: String,
    },
    /// A tensor has another shape than its place in the model.
    #[error("{}: tensor {tensor}: found shape {found}, expected {expected}", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Its shape, outermost dimension first.
        found: Shape,
        /// The shape that the configuration asks for.
        expected: Shape,
    },
    /// A memory request that contradicts the model or itself.
    #[error("{what}: found {found}, expected {expected}")]
    Request {
        /// The option.
        what: &'static str,
        /// Its value.
        found: String,
        /// Its bounds.
        expected: String,
    },
    /// The model does not fit.
    #[error(
        "memory: weights {weight_bytes} + KV cache {kv_bytes} + work memory {arena_bytes} bytes exceed the limit of \
         {memory_limit}; lower max_model_len (now {max_model_len}), the KV cache's size, or max_num_batched_tokens"
    )]
    Memory {
        /// Bytes of the weights.
        weight_bytes: usize,
        /// Bytes of the KV cache.
        kv_bytes: usize,
        /// Bytes of work memory.
        arena_bytes: usize,
        /// Bytes that may be taken.
        memory_limit: usize,
        /// Positions of the longest sequence.
        max_model_len: usize,
    },
}

impl ModelError {
    pub(crate) fn corrupt(file: &Path, field: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::Corrupt {
            file: file.to_owned(),
            field: field.to_owned(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    pub(crate) fn unsupported(file: &Path, what: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::Unsupported {
            file: file.to_owned(),
            what: what.to_owned(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    pub(crate) fn truncated(file: &Path, what: &str, found: usize, expected: u64) -> ModelError {
        ModelError::Truncated { file: file.to_owned(), what: what.to_owned(), found: found as u64, expected }
    }
}

/// A tensor's dimensions, outermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape(pub Vec<usize>);

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}
