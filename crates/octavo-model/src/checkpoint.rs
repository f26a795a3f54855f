//! An opened checkpoint.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use octavo_backend::{BackendError, WeightGroup, WeightId, WeightSource};

use crate::{
    ModelConfig, ModelError, TokenizerSource,
    family::{self, Outline, Part, Weights},
    gguf,
    huggingface::{self, Folder},
    mapped::MappedFile,
    rope::Rope,
    tensors::TensorTable,
};

/// A checkpoint whose metadata, tensor shapes and file sizes have been found to agree; its weights stay in mapped files.
///
/// The files must not be changed or shortened while it is open.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    tokenizer: TokenizerSource,
    chat_template: Option<String>,
    /// The spec's frequencies come from it, and from divisors where a file has them.
    pub(crate) rope: Rope,
    pub(crate) table: TensorTable,
    pub(crate) weights: Weights,
}

impl Checkpoint {
    /// Opens a `.gguf` file or a Hugging Face folder.
    ///
    /// # Errors
    /// Whatever would keep the weights from being handed out later: a file that is missing, cut short or corrupt, a
    /// model or format that is not supported, a tensor that is missing, misshapen or left over.
    pub fn open(path: &Path) -> Result<Checkpoint, ModelError> {
        let metadata = fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => {
                ModelError::NotFound { path: path.to_owned(), expected: "a GGUF file or a Hugging Face folder" }
            }
            _ => ModelError::Io { path: path.to_owned(), source },
        })?;
        if metadata.is_dir() { open_folder(path) } else { open_gguf(path) }
    }

    /// The file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model, apart from its weights and its text.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What a tokenizer can be built from.
    pub fn tokenizer(&self) -> &TokenizerSource {
        &self.tokenizer
    }

    /// The Jinja template that turns messages into a prompt.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Bytes of all tensors as stored.
    pub fn weight_bytes(&self) -> usize {
        self.config.weight_formats.iter().map(|(_, bytes)| bytes).sum()
    }

    fn assemble(path: &Path, outline: Outline, table: TensorTable, text: Text) -> Result<Checkpoint, ModelError> {
        let (spec, weights) = family::bind(&outline, &table, path)?;
        let config = ModelConfig {
            architecture: outline.architecture.to_owned(),
            name: outline.name,
            spec,
            context_length: outline.context_length,
            bos_token_id: outline.bos_token_id,
            eos_token_ids: outline.eos_token_ids,
            generation: outline.generation,
            weight_formats: table.format_bytes(),
        };
        let Text { tokenizer, chat_template } = text;
        let rope = outline.rope;
        Ok(Checkpoint { path: path.to_owned(), config, tokenizer, chat_template, rope, table, weights })
    }
}

impl WeightSource for Checkpoint {
    /// Weights as stored, except that query and key rows come in the order that the decoder's rotary embedding pairs.
    fn weight(&mut self, id: WeightId) -> Result<WeightGroup<'_>, BackendError> {
        match self.weights.get(&id) {
            Some(parts) => Ok(Part::group(parts, &self.table)),
            None => Err(BackendError::Source {
                id,
                reason: format!("{}: the model has no such weight", self.path.display()),
            }),
        }
    }

    /// Pages of the files that hold these weights leave the process; they are read again when they are asked for again.
    fn release(&mut self, id: WeightId) {
        for part in self.weights.get(&id).into_iter().flatten() {
            self.table.release(&part.tensor);
        }
    }
}

struct Text {
    tokenizer: TokenizerSource,
    chat_template: Option<String>,
}

fn open_gguf(path: &Path) -> Result<Checkpoint, ModelError> {
    let file = MappedFile::open(path, "a GGUF file or a Hugging Face folder")?;
    let gguf::Header { metadata, tensors } = gguf::Header::read(&file)?;
    let outline = family::from_gguf(&metadata)?;
    let text = Text {
        tokenizer: gguf::tokenizer(&metadata, outline.dimensions.vocab_size)?,
        chat_template: gguf::chat_template(&metadata)?,
    };
    Checkpoint::assemble(path, outline, TensorTable { files: vec![file], tensors }, text)
}

fn open_folder(path: &Path) -> Result<Checkpoint, ModelError> {
    let folder = Folder::open(path)?;
    let outline = family::from_folder(&folder)?;
    let text = Text { tokenizer: folder.tokenizer(), chat_template: folder.chat_template()? };
    Checkpoint::assemble(path, outline, huggingface::read_tensors(&folder)?, text)
}
