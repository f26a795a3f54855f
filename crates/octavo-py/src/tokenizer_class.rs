//! The tokenizer as Python sees it.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use pyo3::prelude::*;

use crate::{
    errors::InvalidRequest,
    tokenizer::{ControlText, ControlTokensIn, Edges, Tokenizer},
};

/// Text to token ids and back; may be used from several threads at once.
#[pyclass(name = "Tokenizer", module = "octavo._octavo", frozen)]
pub struct TokenizerClass {
    pub(crate) inner: Arc<Tokenizer>,
}

#[pymethods]
impl TokenizerClass {
    /// Read a `tokenizer.json`.
    #[staticmethod]
    fn from_file(py: Python<'_>, path: PathBuf) -> PyResult<TokenizerClass> {
        let inner = py.detach(|| Tokenizer::from_file(&path))?;
        Ok(TokenizerClass { inner: Arc::new(inner) })
    }

    /// Tokens in the vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    /// The control tokens: spelling to id.
    #[getter]
    fn control_tokens(&self) -> BTreeMap<String, u32> {
        self.inner.control_tokens().map(|(id, spelling)| (spelling.to_owned(), id)).collect()
    }

    /// The ids of `text`. Control tokens that it spells are ordinary text unless `parse_special`.
    #[pyo3(signature = (text, *, add_special_tokens = true, parse_special = false))]
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool, parse_special: bool) -> PyResult<Vec<u32>> {
        let edges = if add_special_tokens { Edges::Added } else { Edges::Bare };
        let control = if parse_special { ControlText::Atomic } else { ControlText::Ordinary };
        Ok(py.detach(|| self.inner.encode(text, edges, control))?)
    }

    /// `text` with `marker` in or beside whatever could become a control token in a template.
    fn mark(&self, text: &str, marker: char) -> String {
        self.inner.mark(text, marker)
    }

    /// The ids of a rendered template in which only unmarked control tokens are control tokens.
    fn encode_marked(&self, py: Python<'_>, text: &str, marker: char) -> PyResult<Vec<u32>> {
        Ok(py.detach(|| self.inner.encode_marked(text, marker))?)
    }

    /// The text of `ids`.
    #[pyo3(signature = (ids, *, skip_special_tokens = true))]
    fn decode(&self, py: Python<'_>, ids: Vec<i64>, skip_special_tokens: bool) -> PyResult<String> {
        let ids = ids.into_iter().enumerate().map(|(position, id)| self.checked(position, id));
        let ids = ids.collect::<PyResult<Vec<u32>>>()?;
        let control = if skip_special_tokens { ControlTokensIn::Skipped } else { ControlTokensIn::Kept };
        Ok(py.detach(|| self.inner.try_decode(&ids, control))?)
    }

    /// A token as the vocabulary spells it.
    fn token(&self, token_id: u32) -> Option<String> {
        self.inner.token(token_id)
    }

    /// The id of a token as the vocabulary spells it.
    fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_id(token)
    }

    fn __repr__(&self) -> String {
        format!("Tokenizer(vocab_size={})", self.inner.vocab_size())
    }
}

impl TokenizerClass {
    fn checked(&self, position: usize, id: i64) -> PyResult<u32> {
        u32::try_from(id).map_err(|_| {
            InvalidRequest::new_err(format!("token id at {position}: found {id}, expected 0 to {}", u32::MAX))
        })
    }
}
