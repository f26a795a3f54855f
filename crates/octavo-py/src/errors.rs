//! The one table from Rust errors to Python exceptions.
//!
//! There are three kinds: the caller's mistake (`InvalidRequest`, a `ValueError`), a model that cannot be loaded
//! (`ModelLoadError`, or `FileNotFoundError`), and an engine that has ended (`EngineDeadError`).

use std::io;

use octavo_engine::{EngineDead, SubmitError};
use octavo_model::ModelError;
use pyo3::{PyErr, exceptions::PyFileNotFoundError, import_exception};

use crate::{device::StartError, tokenizer::TokenizerError};

import_exception!(octavo.errors, EngineDeadError);
import_exception!(octavo.errors, InvalidRequest);
import_exception!(octavo.errors, ModelLoadError);

/// What can go wrong between a path and a running engine.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Its tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The device or its memory.
    #[error(transparent)]
    Start(#[from] StartError),
}

impl From<LoadError> for PyErr {
    fn from(error: LoadError) -> PyErr {
        match error {
            LoadError::Model(error) | LoadError::Start(StartError::Model(error)) => model(&error),
            // A tokenizer that fails while a model is loaded is never the text's fault.
            LoadError::Tokenizer(error @ TokenizerError::Rules(_)) => ModelLoadError::new_err(error.to_string()),
            LoadError::Tokenizer(error) => error.into(),
            LoadError::Start(error @ StartError::Device(_)) => InvalidRequest::new_err(error.to_string()),
            LoadError::Start(error) => ModelLoadError::new_err(error.to_string()),
        }
    }
}

fn model(error: &ModelError) -> PyErr {
    match error {
        ModelError::NotFound { .. } => PyFileNotFoundError::new_err(error.to_string()),
        ModelError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            PyFileNotFoundError::new_err(error.to_string())
        }
        ModelError::Request { .. } => InvalidRequest::new_err(error.to_string()),
        _ => ModelLoadError::new_err(error.to_string()),
    }
}

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

/// An orphan rule keeps these two from being `From`.
pub(crate) fn dead(error: &EngineDead) -> PyErr {
    EngineDeadError::new_err(error.to_string())
}

/// See [`dead`].
pub(crate) fn submit(error: &SubmitError) -> PyErr {
    match error {
        SubmitError::Dead(error) => dead(error),
        _ => InvalidRequest::new_err(error.to_string()),
    }
}
