//! A position in a file's bytes that cannot leave them.

use std::path::Path;

use crate::ModelError;

/// Reads little-endian values one after another.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(file: &'a Path, bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { file, bytes, at: 0 }
    }

    pub(crate) fn file(&self) -> &'a Path {
        self.file
    }

    /// Bytes already read.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// The bytes between an earlier position and this one.
    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.at]
    }

    /// The next `length` bytes; `what` names them in the error.
    pub(crate) fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8], ModelError> {
        self.check_left(length, what)?;
        let start = self.at;
        self.at += length as usize;
        Ok(self.since(start))
    }

    /// Fails unless `count` items of at least `size` bytes each can follow. Called before anything is made for them.
    pub(crate) fn check_count(&self, count: u64, size: u64, what: &str) -> Result<(), ModelError> {
        self.check_left(count.saturating_mul(size), what)
    }

    fn check_left(&self, length: u64, what: &str) -> Result<(), ModelError> {
        let left = self.bytes.len() - self.at;
        if length <= left as u64 {
            return Ok(());
        }
        Err(ModelError::truncated(self.file, what, left, length))
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length and as many bytes of UTF-8.
    pub(crate) fn text(&mut self, what: &str) -> Result<&'a str, ModelError> {
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|error| {
            self.corrupt(what, format!("invalid UTF-8 after {} bytes", error.valid_up_to()), "UTF-8 text")
        })
    }

    pub(crate) fn corrupt(&self, field: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::corrupt(self.file, field, found, expected)
    }
}
