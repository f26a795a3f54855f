//! A tokenizer as the text of a `tokenizer.json`.

use serde_json::{Map, Value, json};
use tokenizers::PostProcessorWrapper;

use super::{Tokenizer, TokenizerError};

impl Tokenizer {
    /// The text of a `tokenizer.json` that encodes and decodes as this tokenizer does.
    ///
    /// # Errors
    /// A token around whole texts that the vocabulary does not have.
    pub fn to_file_text(&self) -> Result<String, TokenizerError> {
        let mut encoder = self.encoder.clone();
        if !(self.leading.is_empty() && self.trailing.is_empty()) {
            encoder.with_post_processor(Some(self.edges()?));
        }
        encoder.to_string(true).map_err(TokenizerError::library)
    }

    /// What puts the vocabulary's own tokens around each text, and around both of a pair.
    fn edges(&self) -> Result<PostProcessorWrapper, TokenizerError> {
        let mut known = Map::new();
        for &id in self.leading.iter().chain(&self.trailing) {
            let token = self.spelling(id)?;
            known.insert(token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}));
        }
        let around = |text: &str, kind: u32| -> Result<Vec<Value>, TokenizerError> {
            let token = |id: &u32| Ok(json!({"SpecialToken": {"id": self.spelling(*id)?, "type_id": kind}}));
            let mut pieces = self.leading.iter().map(token).collect::<Result<Vec<_>, TokenizerError>>()?;
            pieces.push(json!({"Sequence": {"id": text, "type_id": kind}}));
            for id in &self.trailing {
                pieces.push(token(id)?);
            }
            Ok(pieces)
        };
        let single = around("A", 0)?;
        let pair = [single.clone(), around("B", 1)?].concat();
        let template = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known});
        serde_json::from_value(template).map_err(|error| TokenizerError::Rules(error.to_string()))
    }

    fn spelling(&self, id: u32) -> Result<String, TokenizerError> {
        let missing = || TokenizerError::Rules(format!("edges: found id {id}, expected a token of the vocabulary"));
        self.token(id).ok_or_else(missing)
    }
}
