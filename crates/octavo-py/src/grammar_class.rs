//! A compiled grammar as Python sees it.

use std::{fmt, sync::Arc};

use octavo_engine::Grammar;
use pyo3::prelude::*;

/// What an output has to follow, compiled for one vocabulary.
#[pyclass(name = "Grammar", module = "octavo._octavo", frozen, from_py_object)]
#[derive(Clone)]
pub struct GrammarClass {
    pub(crate) inner: Arc<dyn Grammar>,
    /// The kind of grammar and its text.
    pub(crate) kind: String,
    pub(crate) source: Arc<str>,
}

#[pymethods]
impl GrammarClass {
    fn __repr__(&self) -> String {
        format!("<Grammar {}: {:?}>", self.kind, self.source)
    }
}

impl fmt::Debug for GrammarClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.__repr__())
    }
}
