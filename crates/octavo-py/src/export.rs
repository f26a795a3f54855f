//! Writes the files of a Hugging Face folder.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use octavo_model::{Checkpoint, GgufVocabulary, ModelError, TokenizerSource};
use pyo3::{exceptions::PyOSError, prelude::*};
use serde_json::{Map, Value};

use crate::{
    errors::{LoadError, ModelLoadError},
    tokenizer::{Tokenizer, TokenizerError},
};

/// How much is written at a time; signals are looked for in between.
const CHUNK: usize = 4 << 20;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// What a folder may have besides its `tokenizer.json`.
const COMPANIONS: [&str; 4] = [TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", CHAT_TEMPLATE];

/// Why a folder could not be written.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("{}: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: TokenizerError },
    #[error("{}: tokenizer: found none, expected tokenizer.json or the tables of a GGUF file", .0.display())]
    NoTokenizer(PathBuf),
    #[error("{}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl From<ExportError> for PyErr {
    fn from(error: ExportError) -> PyErr {
        match error {
            ExportError::Model(error) => LoadError::from(error).into(),
            // What a signal raised.
            ExportError::Write { source, .. } if source.get_ref().is_some_and(|inner| inner.is::<PyErr>()) => {
                source.into()
            }
            ExportError::Write { .. } => PyOSError::new_err(error.to_string()),
            ExportError::Tokenizer { .. } | ExportError::NoTokenizer(_) => ModelLoadError::new_err(error.to_string()),
        }
    }
}

/// Write the checkpoint `model` to the existing `folder`: configuration, weights in bfloat16, and its tokenizer if it
/// has one.
#[pyfunction]
pub fn export_model(py: Python<'_>, model: PathBuf, folder: PathBuf) -> PyResult<()> {
    py.detach(|| -> Result<(), ExportError> {
        let checkpoint = Checkpoint::open(&model)?;
        write(&folder, "config.json", &checkpoint.folder_config()?)?;
        write(&folder, "generation_config.json", &checkpoint.folder_generation_config())?;
        if *checkpoint.tokenizer() != TokenizerSource::Missing {
            write_tokenizer(&checkpoint, &folder)?;
        }
        write_weights(&checkpoint, &folder.join("model.safetensors"))
    })
    .map_err(PyErr::from)
}

/// Write the tokenizer of the checkpoint `model` to the existing `folder`.
#[pyfunction]
pub fn export_tokenizer(py: Python<'_>, model: PathBuf, folder: PathBuf) -> PyResult<()> {
    py.detach(|| write_tokenizer(&Checkpoint::open(&model)?, &folder)).map_err(PyErr::from)
}

fn write_weights(checkpoint: &Checkpoint, path: &Path) -> Result<(), ExportError> {
    let written = File::create(path).and_then(|file| {
        let mut sink = BufWriter::with_capacity(CHUNK, Interruptible(file));
        checkpoint.write_safetensors(&mut sink)?;
        sink.flush()?;
        sink.get_ref().0.sync_all()
    });
    written.map_err(|source| ExportError::Write { path: path.to_owned(), source })
}

fn write_tokenizer(checkpoint: &Checkpoint, folder: &Path) -> Result<(), ExportError> {
    let unusable = |reason| ExportError::Tokenizer { path: checkpoint.path().to_owned(), reason };
    match checkpoint.tokenizer() {
        TokenizerSource::Vocabulary(vocabulary) => {
            let text = Tokenizer::from_vocabulary(vocabulary).and_then(|built| built.to_file_text());
            write(folder, TOKENIZER, &text.map_err(unusable)?)?;
            write(folder, TOKENIZER_CONFIG, &tokenizer_config(checkpoint, Some(vocabulary)))
        }
        TokenizerSource::File(file) => {
            Tokenizer::from_file(file).map_err(unusable)?;
            copy(file, &folder.join(TOKENIZER))?;
            for name in COMPANIONS {
                let companion = file.with_file_name(name);
                if companion.is_file() {
                    copy(&companion, &folder.join(name))?;
                }
            }
            if folder.join(TOKENIZER_CONFIG).exists() {
                return Ok(());
            }
            write(folder, TOKENIZER_CONFIG, &tokenizer_config(checkpoint, None))
        }
        TokenizerSource::Missing => Err(ExportError::NoTokenizer(checkpoint.path().to_owned())),
    }
}

/// The text of a `tokenizer_config.json`: special tokens as they are spelled, and the chat template.
fn tokenizer_config(checkpoint: &Checkpoint, vocabulary: Option<&GgufVocabulary>) -> String {
    let mut fields = Map::new();
    fields.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
    fields.insert("model_max_length".to_owned(), checkpoint.config().context_length.into());
    fields.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    if let Some(vocabulary) = vocabulary {
        let named = [
            ("bos_token", vocabulary.bos_token_id),
            ("eos_token", vocabulary.eos_token_id),
            ("unk_token", vocabulary.unknown_token_id),
            ("pad_token", vocabulary.padding_token_id),
        ];
        for (name, id) in named {
            if let Some(token) = id.and_then(|id| vocabulary.tokens.get(id as usize)) {
                fields.insert(name.to_owned(), token.as_str().into());
            }
        }
        fields.insert("add_bos_token".to_owned(), vocabulary.add_bos.into());
        fields.insert("add_eos_token".to_owned(), vocabulary.add_eos.into());
    }
    if let Some(template) = checkpoint.chat_template() {
        fields.insert("chat_template".to_owned(), template.into());
    }
    format!("{:#}\n", Value::Object(fields))
}

fn write(folder: &Path, name: &str, text: &str) -> Result<(), ExportError> {
    let path = folder.join(name);
    fs::write(&path, text).map_err(|source| ExportError::Write { path, source })
}

fn copy(from: &Path, to: &Path) -> Result<(), ExportError> {
    let copied = fs::read(from).and_then(|bytes| fs::write(to, bytes));
    copied.map_err(|source| ExportError::Write { path: to.to_owned(), source })
}

/// A file whose writer stops when a signal's handler raises, as that of Ctrl-C does.
struct Interruptible(File);

impl Write for Interruptible {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Python::attach(|py| py.check_signals()).map_err(io::Error::other)?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
