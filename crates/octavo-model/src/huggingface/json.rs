//! One JSON file as an object, its fields read with the type that the reader of each expects.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use octavo_backend::TokenId;
use serde_json::{Map, Value};

use crate::{ModelError, config::LARGEST_SIZE};

/// No configuration, index or header is larger; parsed JSON takes many times its length.
pub(crate) const LARGEST_JSON: u64 = 16 << 20;

/// A JSON object and where it came from.
#[derive(Debug)]
pub(crate) struct JsonFile {
    path: PathBuf,
    /// In front of field names in errors, for objects inside the file.
    prefix: String,
    fields: Map<String, Value>,
}

/// A text file, or `None` when there is none.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, ModelError> {
    let failed = |source| ModelError::Io { path: path.to_owned(), source };
    let corrupt = |found: &str, expected: &str| ModelError::corrupt(path, "content", found, expected);
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
        // Opening a pipe would wait for its writer.
        Ok(metadata) if !metadata.is_file() => {
            return Err(corrupt("something other than a regular file", "a text file"));
        }
        Ok(_) => {}
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(LARGEST_JSON + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > LARGEST_JSON {
        return Err(corrupt("a longer file", &format!("at most {LARGEST_JSON} bytes")));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| corrupt(&error.utf8_error().to_string(), "UTF-8 text"))
}

/// Parses an object; `field` says which part of the file it is.
pub(crate) fn parse_object(text: &str, path: &Path, field: &str) -> Result<Map<String, Value>, ModelError> {
    let corrupt = |found: &str| ModelError::corrupt(path, field, found, "a JSON object");
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(corrupt(kind(&other))),
        Err(error) => Err(corrupt(&error.to_string())),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A value in an error message.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        other => other.to_string(),
    }
}

impl JsonFile {
    /// Reads a file, or `None` when there is none.
    pub(crate) fn read(path: &Path) -> Result<Option<JsonFile>, ModelError> {
        let Some(text) = read_text(path)? else { return Ok(None) };
        let fields = parse_object(&text, path, "content")?;
        Ok(Some(JsonFile { path: path.to_owned(), prefix: String::new(), fields }))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all fields.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.fields.keys().map(String::as_str)
    }

    /// A field that is there and not null.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// An object inside this one.
    pub(crate) fn object(&self, key: &str) -> Result<Option<JsonFile>, ModelError> {
        let inner = |fields: &Map<String, Value>| JsonFile {
            path: self.path.clone(),
            prefix: format!("{}{key}.", self.prefix),
            fields: fields.clone(),
        };
        self.read_field(key, "an object", |value| value.as_object().map(inner))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.read_field(key, "a text", Value::as_str)
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        self.read_field(key, "an array of texts", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read_field(key, "a boolean", Value::as_bool)
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read_field(key, "a finite number", |value| value.as_f64().filter(|number| number.is_finite()))
    }

    pub(crate) fn required_number(&self, key: &str) -> Result<f64, ModelError> {
        self.number(key)?.ok_or_else(|| self.missing(key))
    }

    /// A whole number from 1 to [`LARGEST_SIZE`].
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let expected = format!("a whole number from 1 to {LARGEST_SIZE}");
        self.read_field(key, &expected, |value| {
            value.as_u64().map(|size| size as usize).filter(|size| (1..=LARGEST_SIZE).contains(size))
        })
    }

    pub(crate) fn required_size(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// One token id or a list of them, each below `vocab_size`; none when the field is absent.
    pub(crate) fn token_ids(&self, key: &str, vocab_size: usize) -> Result<Vec<TokenId>, ModelError> {
        let one = |value: &Value| {
            value.as_u64().filter(|id| *id < vocab_size as u64).and_then(|id| TokenId::try_from(id).ok())
        };
        let expected = format!("token ids below {vocab_size}");
        let ids = self.read_field(key, &expected, |value| match value {
            Value::Array(values) => values.iter().map(one).collect(),
            value => one(value).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// Fails if the field is there with another text.
    pub(crate) fn expect_text(&self, key: &str, expected: &str) -> Result<(), ModelError> {
        match self.text(key)? {
            Some(found) if found != expected => {
                Err(self.unsupported(key, format!("{found:?}"), format!("{expected:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Fails if the field is there and true.
    pub(crate) fn expect_off(&self, key: &str) -> Result<(), ModelError> {
        match self.flag(key)? {
            Some(true) => Err(self.unsupported(key, true, false)),
            _ => Ok(()),
        }
    }

    pub(crate) fn corrupt(&self, key: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::corrupt(&self.path, &format!("{}{key}", self.prefix), found, expected)
    }

    pub(crate) fn unsupported(&self, key: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::unsupported(&self.path, &format!("{}{key}", self.prefix), found, expected)
    }

    pub(crate) fn missing(&self, key: &str) -> ModelError {
        self.corrupt(key, "nothing", "the field")
    }

    fn read_field<'s, T>(
        &'s self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'s Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.corrupt(key, shown(value), expected))
    }
}
