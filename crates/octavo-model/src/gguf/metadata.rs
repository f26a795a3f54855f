//! Metadata fields by key, with the type that the reader of each expects.

use std::{collections::BTreeMap, path::Path};

use octavo_backend::TokenId;

use super::value::{Array, Value};
use crate::{ModelError, config::LARGEST_SIZE};

/// The key-value part of a header.
#[derive(Debug)]
pub(crate) struct Metadata<'a> {
    file: &'a Path,
    fields: BTreeMap<&'a str, Value<'a>>,
}

impl<'a> Metadata<'a> {
    pub(crate) fn new(file: &'a Path, fields: BTreeMap<&'a str, Value<'a>>) -> Metadata<'a> {
        Metadata { file, fields }
    }

    pub(crate) fn file(&self) -> &'a Path {
        self.file
    }

    /// All fields by key.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'a str, &Value<'a>)> {
        self.fields.iter().map(|(key, value)| (*key, value))
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a text", |value| match value {
            Value::Text(text) => Some(*text),
            _ => None,
        })
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read(key, "a boolean", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A whole number from 1 to [`LARGEST_SIZE`].
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let expected = format!("a whole number from 1 to {LARGEST_SIZE}");
        self.read(key, &expected, |value| {
            whole(value).map(|number| number as usize).filter(|size| (1..=LARGEST_SIZE).contains(size))
        })
    }

    pub(crate) fn required_size(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A finite number.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read(key, "a finite number", |value| match value {
            Value::Float(number) => Some(*number).filter(|number| number.is_finite()),
            Value::Unsigned(number) => Some(*number as f64),
            Value::Signed(number) => Some(*number as f64),
            _ => None,
        })
    }

    pub(crate) fn token_id(&self, key: &str) -> Result<Option<TokenId>, ModelError> {
        self.read(key, "a token id", |value| TokenId::try_from(whole(value)?).ok())
    }

    pub(crate) fn array(&self, key: &str) -> Result<Option<&Array<'a>>, ModelError> {
        self.read(key, "an array", |value| match value {
            Value::Array(array) => Some(array),
            _ => None,
        })
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, ModelError> {
        self.elements(key, "an array of texts", |value| match value {
            Value::Text(text) => Some(text.to_owned()),
            _ => None,
        })
    }

    pub(crate) fn integers(&self, key: &str) -> Result<Option<Vec<i32>>, ModelError> {
        self.elements(key, "an array of 32-bit integers", |value| match value {
            Value::Signed(number) => i32::try_from(number).ok(),
            Value::Unsigned(number) => i32::try_from(number).ok(),
            _ => None,
        })
    }

    pub(crate) fn corrupt(&self, key: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::corrupt(self.file, key, found, expected)
    }

    pub(crate) fn unsupported(&self, key: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::unsupported(self.file, key, found, expected)
    }

    pub(crate) fn missing(&self, key: &str) -> ModelError {
        self.corrupt(key, "nothing", "the field")
    }

    fn read<'s, T>(
        &'s self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'s Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.fields.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.corrupt(key, value, expected))
    }

    fn elements<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        self.read(key, expected, |value| match value {
            Value::Array(array) => array.values().map(convert).collect(),
            _ => None,
        })
    }
}

fn whole(value: &Value<'_>) -> Option<u64> {
    match value {
        Value::Unsigned(number) => Some(*number),
        Value::Signed(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
