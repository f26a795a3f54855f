//! One safetensors file: a length, a JSON header of that length, then the tensors' bytes without gaps.
//!
//! Read here and not by the format's own crate, so that a damaged file's error names the tensor and both sizes.

use std::path::Path;

use octavo_backend::WeightFormat;
use serde_json::Value;

use super::json::{LARGEST_JSON, parse_object};
use crate::{ModelError, mapped::MappedFile, tensors::Tensor};

const LENGTH_BYTES: usize = 8;

/// The tensors of a file in order of their offsets; `index` becomes [`Tensor::file`].
pub(super) fn read(file: &MappedFile, index: usize) -> Result<Vec<Tensor>, ModelError> {
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
    format: WeightFormat,
    begin: usize,
    end: usize,
}

impl Entry {
    fn parse(path: &Path, name: String, value: &Value) -> Result<Entry, ModelError> {
        let field = |key: &str| format!("tensor {name}, {key}");
        let wrong = |key: &str, expected: &str| ModelError::corrupt(path, &field(key), &value[key], expected);
        let format = match value["dtype"].as_str() {
            Some("F32") => WeightFormat::F32,
            Some("F16") => WeightFormat::F16,
            Some("BF16") => WeightFormat::Bf16,
            Some(other) => {
                return Err(ModelError::unsupported(path, &field("dtype"), other, "F32, F16 or BF16"));
            }
            None => return Err(wrong("dtype", "a text")),
        };
        let shape = sizes(&value["shape"]).ok_or_else(|| wrong("shape", "a list of sizes"))?;
        let [begin, end] = sizes(&value["data_offsets"])
            .and_then(|offsets| <[usize; 2]>::try_from(offsets).ok())
            .ok_or_else(|| wrong("data_offsets", "two offsets"))?;
        Ok(Entry { name, shape, format, begin, end })
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
) -> Result<Vec<Tensor>, ModelError> {
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    let mut tensors = Vec::new();
    let mut filled = 0;
    for Entry { name, shape, format, begin, end } in entries {
        let what = format!("tensor {name}");
        if end > data.len() {
            return Err(ModelError::truncated(path, &format!("{what}, data"), data.len(), end as u64));
        }
        if begin != filled || end < begin {
            let found = format!("data_offsets {begin} to {end}");
            return Err(ModelError::corrupt(path, &what, found, format!("a range that begins at {filled}")));
        }
        // A shape without dimensions is a single number.
        let size = if shape.is_empty() { format.row_bytes(1) } else { Tensor::size(&shape, format) };
        if size != Some(end - begin) {
            let found = format!("{} bytes for shape {shape:?} in {format}", end - begin);
            return Err(ModelError::corrupt(path, &what, found, format!("{size:?} bytes")));
        }
        filled = end;
        let range = data.start + begin..data.start + end;
        tensors.push(Tensor { name, shape, format, file: index, range });
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
