//! The one table from Rust errors to Python exceptions.

use std::io;

use pyo3::{PyErr, exceptions::PyFileNotFoundError, import_exception};

use crate::tokenizer::TokenizerError;

import_exception!(octavo.errors, EngineDeadError);
import_exception!(octavo.errors, InvalidRequest);
import_exception!(octavo.errors, ModelLoadError);

impl From<TokenizerError> for PyErr {
    fn from(error: TokenizerError) -> PyErr {
        match &error {
            TokenizerError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                PyFileNotFoundError::new_err(error.to_string())
            }
            TokenizerError::Rules(_) => InvalidRequest::new_err(error.to_string()),
            _ => ModelLoadError::new_err(error.to_string()),
        }
    }
}
