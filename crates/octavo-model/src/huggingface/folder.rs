//! The JSON files of a folder, and what they say about text and sampling.

use std::path::{Path, PathBuf};

use octavo_backend::TokenId;
use serde_json::Value;

use super::{
    json::{JsonFile, read_text},
    quantization::Quantization,
};
use crate::{GenerationDefaults, ModelError, TokenizerSource};

/// A folder with a `config.json`.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) path: PathBuf,
    pub(crate) config: JsonFile,
    pub(crate) quantization: Option<Quantization>,
    generation: Option<JsonFile>,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Result<Folder, ModelError> {
        let config_path = path.join("config.json");
        let config = JsonFile::read(&config_path)?.ok_or(ModelError::NotFound {
            path: config_path,
            expected: "the configuration of a Hugging Face folder",
        })?;
        let generation = JsonFile::read(&path.join("generation_config.json"))?;
        let quantization = Quantization::read(path, &config)?;
        Ok(Folder { path: path.to_owned(), config, quantization, generation })
    }

    /// Both files may name tokens that end an output.
    pub(crate) fn eos_token_ids(&self, vocab_size: usize) -> Result<Vec<TokenId>, ModelError> {
        let mut ids = self.config.token_ids("eos_token_id", vocab_size)?;
        if let Some(generation) = &self.generation {
            ids.extend(generation.token_ids("eos_token_id", vocab_size)?);
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    pub(crate) fn bos_token_id(&self, vocab_size: usize) -> Result<Option<TokenId>, ModelError> {
        for file in [Some(&self.config), self.generation.as_ref()].into_iter().flatten() {
            if let Some(id) = file.token_ids("bos_token_id", vocab_size)?.first() {
                return Ok(Some(*id));
            }
        }
        Ok(None)
    }

    pub(crate) fn generation_defaults(&self) -> Result<GenerationDefaults, ModelError> {
        let Some(file) = &self.generation else { return Ok(GenerationDefaults::default()) };
        let number = |key: &str| Ok::<_, ModelError>(file.number(key)?.map(|number| number as f32));
        Ok(GenerationDefaults {
            do_sample: file.flag("do_sample")?,
            temperature: number("temperature")?,
            // Zero and below keep all tokens.
            top_k: file.number("top_k")?.map(|number| number as u32),
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        })
    }

    pub(crate) fn tokenizer(&self) -> TokenizerSource {
        let path = self.path.join("tokenizer.json");
        if path.is_file() { TokenizerSource::File(path) } else { TokenizerSource::Missing }
    }

    /// `chat_template.jinja`, which newer writers prefer, or the field of `tokenizer_config.json`.
    pub(crate) fn chat_template(&self) -> Result<Option<String>, ModelError> {
        if let Some(text) = read_text(&self.path.join("chat_template.jinja"))? {
            return Ok(Some(text));
        }
        const FIELD: &str = "chat_template";
        let Some(file) = JsonFile::read(&self.path.join("tokenizer_config.json"))? else { return Ok(None) };
        match file.value(FIELD) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(Value::Array(list)) => {
                let named = |entry: &&Value| entry["name"] == "default";
                let text = list.iter().find(named).and_then(|entry| entry["template"].as_str());
                let found = format!("{} templates, none of them", list.len());
                text.map(|text| Some(text.to_owned()))
                    .ok_or_else(|| file.corrupt(FIELD, found, "one with the name \"default\""))
            }
            Some(_) => Err(file.corrupt(FIELD, "another kind of value", "a text, or a list with names")),
        }
    }
}
