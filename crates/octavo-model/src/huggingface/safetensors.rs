//! One safetensors file: a length, a JSON header of that length, then the tensors' bytes without gaps.
//!
//! Read here and not by the format's own crate, so that a damaged file's error names the tensor and both sizes.

use std::{fmt, path::Path};

use octavo_backend::WeightFormat;
use serde_json::Value;

use super::json::{LARGEST_JSON, parse_object};
use crate::{ModelError, mapped::MappedFile, tensors::Place};

const LENGTH_BYTES: usize = 8;

/// A tensor as a file has it.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    /// Outermost dimension first; the last one is contiguous.
    pub(super) shape: Vec<usize>,
    pub(super) element: Element,
    /// Invariant: exactly as many bytes as the shape takes.
    pub(super) place: Place,
}

/// What a tensor consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Weight(WeightFormat),
    /// Codes, eight to a number, or indices.
    I32,
    /// Sizes.
    I64,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Element::Weight(format) => format.block_bytes(),
            Element::I32 => 4,
            Element::I64 => 8,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::Weight(format) => format.fmt(f),
            Element::I32 => f.write_str("I32"),
            Element::I64 => f.write_str("I64"),
        }
    }
}

/// The tensors of a file in order of their offsets; `index` becomes [`Place::file`].
pub(super) fn read(file: &MappedFile, index: usize) -> Result<Vec<StoredTensor>, ModelError> {
    let (path, bytes) = (file.path(), file.bytes());
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(ModelError::truncated(path, "header length", bytes.len(), LENGTH_BYTES as u64));
    };
    let length = u64::from_le_bytes(*length);
    if length > LARGEST_JSON {
        return Err(ModelError::corrupt(path, "header length", length, format!("at most {LARGEST_JSON}")));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(ModelError::truncated(path, "header", rest.len(), length));
    };
    let text = str::from_utf8(header).map_err(|error| ModelError::corrupt(path, "header", error, "UTF-8 text"))?;
    let mut entries = Vec::new();
    for (name, entry) in parse_object(text, path, "header")? {
        if name != "__metadata__" {
            entries.push(Entry::parse(path, name, &entry)?);
        }
    }
    let data_start = LENGTH_BYTES + header.len();
    place(path, entries, index, data_start..data_start + data.len())
}

struct Entry {
    name: String,
    shape: Vec<usize>,
    element: Element,
    begin: usize,
    end: usize,
}

impl Entry {
    fn parse(path: &Path, name: String, value: &Value) -> Result<Entry, ModelError> {
        let field = |key: &str| format!("tensor {name}, {key}");
        let wrong = |key: &str, expected: &str| ModelError::corrupt(path, &field(key), &value[key], expected);
        let element = match value["dtype"].as_str() {
            Some("F32") => Element::Weight(WeightFormat::F32),
            Some("F16") => Element::Weight(WeightFormat::F16),
            Some("BF16") => Element::Weight(WeightFormat::Bf16),
            // Of quantised checkpoints; what they cannot be is said by who looks for them.
            Some("I32") => Element::I32,
            Some("I64") => Element::I64,
            Some(other) => {
                return Err(ModelError::unsupported(path, &field("dtype"), other, "F32, F16 or BF16"));
            }
            None => return Err(wrong("dtype", "a text")),
        };
        let shape = sizes(&value["shape"]).ok_or_else(|| wrong("shape", "a list of sizes"))?;
        let [begin, end] = sizes(&value["data_offsets"])
            .and_then(|offsets| <[usize; 2]>::try_from(offsets).ok())
            .ok_or_else(|| wrong("data_offsets", "two offsets"))?;
        Ok(Entry { name, shape, element, begin, end })
    }
}

fn sizes(value: &Value) -> Option<Vec<usize>> {
    value.as_array()?.iter().map(|size| usize::try_from(size.as_u64()?).ok()).collect()
}

/// Checks that the tensors fill the data part, each with as many bytes as its shape takes.
fn place(
    path: &Path,
    mut entries: Vec<Entry>,
    index: usize,
    data: std::ops::Range<usize>,
) -> Result<Vec<StoredTensor>, ModelError> {
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    let mut tensors = Vec::new();
    let mut filled = 0;
    for Entry { name, shape, element, begin, end } in entries {
        let what = format!("tensor {name}");
        if end > data.len() {
            return Err(ModelError::truncated(path, &format!("{what}, data"), data.len(), end as u64));
        }
        if begin != filled || end < begin {
            let found = format!("data_offsets {begin} to {end}");
            return Err(ModelError::corrupt(path, &what, found, format!("a range that begins at {filled}")));
        }
        // A shape without dimensions is a single number.
        let size = shape.iter().try_fold(element.bytes(), |size, dimension| size.checked_mul(*dimension));
        if size != Some(end - begin) {
            let found = format!("{} bytes for shape {shape:?} in {element}", end - begin);
            return Err(ModelError::corrupt(path, &what, found, format!("{size:?} bytes")));
        }
        filled = end;
        let range = data.start + begin..data.start + end;
        tensors.push(StoredTensor { name, shape, element, place: Place { file: index, range } });
    }
    if filled != data.len() {
        return Err(ModelError::corrupt(
            path,
            "data",
            format!("{} bytes", data.len()),
            format!("{filled}, as the header says"),
        ));
    }
    Ok(tensors)
}
