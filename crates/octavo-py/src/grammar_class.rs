//! A compiled grammar as Python sees it.

use std::{fmt, sync::Arc};

use octavo_engine::Grammar;
use pyo3::prelude::*;

use crate::{
    errors::InvalidRequest,
    grammar::{GrammarCompiler, GrammarSource},
};

/// What an output has to follow, compiled for one vocabulary.
#[pyclass(name = "Grammar", module = "octavo._octavo", frozen, from_py_object)]
#[derive(Clone)]
pub struct GrammarClass {
    pub(crate) inner: Arc<dyn Grammar>,
    kind: &'static str,
    source: Arc<str>,
}

#[pymethods]
impl GrammarClass {
    fn __repr__(&self) -> String {
        format!("<Grammar {}: {:?}>", self.kind, self.source)
    }
}

impl GrammarClass {
    /// `kind` is a field of `StructuredOutputsParams`; the source of a choice is a JSON list of texts.
    pub(crate) fn compiled(compiler: &GrammarCompiler, kind: &str, source: String) -> PyResult<GrammarClass> {
        let text: Arc<str> = source.as_str().into();
        let (kind, source) = match kind {
            "json" => ("json", GrammarSource::JsonSchema(source)),
            "json_object" => ("json_object", GrammarSource::JsonObject),
            "regex" => ("regex", GrammarSource::Regex(source)),
            "choice" => match serde_json::from_str(&source) {
                Ok(texts) => ("choice", GrammarSource::Choice(texts)),
                Err(error) => return Err(wrong(kind, &error)),
            },
            "grammar" => ("grammar", GrammarSource::Lark(source)),
            _ => return Err(wrong(kind, &"there is no such kind of grammar")),
        };
        let inner = compiler.compile(&source).map_err(|error| wrong(kind, &error))?;
        Ok(GrammarClass { inner, kind, source: text })
    }
}

impl fmt::Debug for GrammarClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.__repr__())
    }
}

fn wrong(kind: &str, reason: &dyn fmt::Display) -> PyErr {
    InvalidRequest::new_err(format!("structured_outputs.{kind}: {reason}"))
}
