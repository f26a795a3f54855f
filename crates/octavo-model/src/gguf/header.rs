//! The header: what the file says about its tensors, compared with how long the file is.

use std::collections::BTreeMap;

use octavo_backend::WeightFormat;

use super::{Metadata, cursor::Cursor, value::Value};
use crate::{
    ModelError,
    mapped::MappedFile,
    tensors::{Place, Tensor, TensorSource},
};

/// Largest number of dimensions in the format.
const MOST_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: usize = 32;
const SUPPORTED_TYPES: &str = "F32, F16, BF16, Q8_0, Q6_K, Q4_K, Q4_0 or Q4_1";

/// A checked header.
#[derive(Debug)]
pub(crate) struct Header<'a> {
    pub(crate) metadata: Metadata<'a>,
    /// All in file 0.
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

/// A tensor's description as it stands in the header.
struct Description<'a> {
    name: &'a str,
    shape: Vec<usize>,
    format: WeightFormat,
    size: usize,
    offset: u64,
}

impl<'a> Header<'a> {
    /// Reads and checks everything but the tensors' values.
    pub(crate) fn read(file: &'a MappedFile) -> Result<Header<'a>, ModelError> {
        let mut cursor = Cursor::new(file.path(), file.bytes());
        let magic: [u8; 4] = cursor.array("magic number")?;
        if &magic != b"GGUF" {
            let found = format!("bytes {magic:02x?}");
            return Err(cursor.corrupt("magic number", found, "\"GGUF\" (a GGUF file or a Hugging Face folder)"));
        }
        let version = cursor.u32("format version")?;
        if !(2..=3).contains(&version) {
            return Err(ModelError::unsupported(file.path(), "format version", version, "2 or 3, little-endian"));
        }
        let num_tensors = cursor.u64("number of tensors")?;
        let num_fields = cursor.u64("number of metadata fields")?;
        let metadata = Metadata::new(file.path(), read_fields(&mut cursor, num_fields)?);
        refuse_kinds(&metadata)?;
        let descriptions = read_descriptions(&mut cursor, num_tensors)?;
        let alignment = alignment(&metadata)?;
        let data_start = (cursor.position() as u64).next_multiple_of(alignment as u64);
        let tensors = place(file, descriptions, data_start, alignment)?;
        Ok(Header { metadata, tensors })
    }
}

fn read_fields<'a>(cursor: &mut Cursor<'a>, count: u64) -> Result<BTreeMap<&'a str, Value<'a>>, ModelError> {
    cursor.check_count(count, 8 + 4 + 1, "metadata fields")?;
    let mut fields = BTreeMap::new();
    for index in 0..count {
        let key = cursor.text(&format!("name of metadata field {index}"))?;
        let value = Value::read(cursor, key)?;
        if fields.insert(key, value).is_some() {
            return Err(cursor.corrupt(key, "the field twice", "each field once"));
        }
    }
    Ok(fields)
}

/// Files that are not one whole model, or that store blocks as GGUF's predecessors did.
fn refuse_kinds(metadata: &Metadata<'_>) -> Result<(), ModelError> {
    if let Some(kind) = metadata.text("general.type")?
        && kind != "model"
    {
        return Err(metadata.unsupported("general.type", format!("{kind:?}"), "\"model\""));
    }
    match metadata.number("split.count")? {
        Some(count) if count > 1.0 => {
            return Err(metadata.unsupported("split.count", count, "a model in one file"));
        }
        _ => {}
    }
    const VERSION: &str = "general.quantization_version";
    match metadata.number(VERSION)? {
        Some(version) if version != 2.0 => return Err(metadata.unsupported(VERSION, version, 2)),
        _ => {}
    }
    Ok(())
}

fn read_descriptions<'a>(cursor: &mut Cursor<'a>, count: u64) -> Result<Vec<Description<'a>>, ModelError> {
    cursor.check_count(count, 8 + 4 + 8 + 4 + 8, "tensor descriptions")?;
    (0..count)
        .map(|index| {
            let name = cursor.text(&format!("name of tensor {index}"))?;
            read_description(cursor, name)
        })
        .collect()
}

fn read_description<'a>(cursor: &mut Cursor<'a>, name: &'a str) -> Result<Description<'a>, ModelError> {
    let what = format!("tensor {name}");
    let num_dimensions = cursor.u32(&what)?;
    if num_dimensions == 0 || num_dimensions > MOST_DIMENSIONS {
        return Err(cursor.corrupt(&what, format!("{num_dimensions} dimensions"), "1 to 4"));
    }
    let mut shape = Vec::new();
    for _ in 0..num_dimensions {
        // The file lists the contiguous dimension first.
        shape.insert(0, cursor.u64(&what)? as usize);
    }
    let number = cursor.u32(&what)?;
    let offset = cursor.u64(&what)?;
    let Some(format) = weight_format(number) else {
        return Err(ModelError::unsupported(cursor.file(), &what, type_name(number), SUPPORTED_TYPES));
    };
    match Tensor::size(&shape, format) {
        Some(size) if size > 0 => Ok(Description { name, shape, format, size, offset }),
        _ => Err(cursor.corrupt(
            &what,
            format!("shape {shape:?} in {format}"),
            "dimensions above 0 whose product can be addressed, rows of whole blocks",
        )),
    }
}

/// Turns offsets into ranges of the file; no range may leave the file or touch another.
fn place(
    file: &MappedFile,
    mut descriptions: Vec<Description<'_>>,
    data_start: u64,
    alignment: usize,
) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let corrupt = |name: &str, found: String, expected: String| {
        ModelError::corrupt(file.path(), &format!("tensor {name}"), found, expected)
    };
    descriptions.sort_by_key(|description| description.offset);
    let mut tensors = BTreeMap::new();
    let mut free_from = 0;
    for Description { name, shape, format, size, offset } in descriptions {
        let start = data_start.saturating_add(offset);
        let end = start.saturating_add(size as u64);
        if end > file.bytes().len() as u64 {
            return Err(ModelError::truncated(
                file.path(),
                &format!("tensor {name} at offset {offset}, file size"),
                file.bytes().len(),
                end,
            ));
        }
        if !offset.is_multiple_of(alignment as u64) {
            return Err(corrupt(name, format!("offset {offset}"), format!("a multiple of {alignment}")));
        }
        if offset < free_from {
            let expected = format!("{free_from} or more, where the tensor before it ends");
            return Err(corrupt(name, format!("offset {offset}"), expected));
        }
        free_from = offset + size as u64;
        let source = TensorSource::Stored(Place { file: 0, range: start as usize..end as usize });
        let tensor = Tensor { name: name.to_owned(), shape, format, source };
        if tensors.insert(name.to_owned(), tensor).is_some() {
            return Err(corrupt(name, "the tensor twice".to_owned(), "each tensor once".to_owned()));
        }
    }
    Ok(tensors)
}

fn alignment(metadata: &Metadata<'_>) -> Result<usize, ModelError> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.size(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() {
        return Ok(alignment);
    }
    Err(metadata.corrupt(KEY, alignment, "a power of two"))
}

fn weight_format(number: u32) -> Option<WeightFormat> {
    Some(match number {
        0 => WeightFormat::F32,
        1 => WeightFormat::F16,
        2 => WeightFormat::Q4_0,
        3 => WeightFormat::Q4_1,
        8 => WeightFormat::Q8_0,
        12 => WeightFormat::Q4K,
        14 => WeightFormat::Q6K,
        30 => WeightFormat::Bf16,
        _ => return None,
    })
}

/// What people call the types that octavo cannot read.
fn type_name(number: u32) -> String {
    const NAMES: [(u32, &str); 26] = [
        (6, "Q5_0"),
        (7, "Q5_1"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (13, "Q5_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
        (41, "Q1_0"),
    ];
    match NAMES.iter().find(|(known, _)| *known == number) {
        Some((_, name)) => format!("type {name}"),
        None => format!("type {number}"),
    }
}
