//! int4 matrices: the tensors that each is packed into, and its rows unpacked.
//!
//! What is stored is `scale * (code - zero)`, with a scale and a zero point for each group of inputs of an output. Formats of
//! a backend keep that bit for bit ([`WeightFormat::is_int4`]); where none can (groups of odd sizes, inputs of a group that do
//! not lie beside each other, scales that are no half-precision numbers), the values are unpacked to `f32`.

use std::{collections::BTreeMap, path::Path};

use half::{bf16, f16};
use octavo_backend::WeightFormat;

use super::{
    Folder,
    quantization::{Packing, Quantization},
    safetensors::{Element, StoredTensor},
};
use crate::{
    ModelError, Shape,
    mapped::MappedFile,
    tensors::{Place, Tensor, TensorSource, TensorTable},
};

/// Codes in a 32-bit number.
const CODES: usize = 8;

/// Where in a number AWQ keeps each of eight outputs.
const AWQ_NIBBLES: [usize; CODES] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A matrix `[rows, columns]` in the tensors that hold it.
#[derive(Debug, Clone)]
pub(crate) struct PackedInt4 {
    packing: Packing,
    rows: usize,
    columns: usize,
    /// Inputs that share a scale.
    group_size: usize,
    codes: Place,
    scales: (Place, WeightFormat),
    zeros: Option<Place>,
    /// The group of each input, unless they follow each other.
    groups: Option<Place>,
}

/// The tensors of a folder, packed ones as the matrices that they stand for.
pub(super) fn table(
    folder: &Folder,
    files: Vec<MappedFile>,
    mut stored: BTreeMap<String, StoredTensor>,
) -> Result<TensorTable, ModelError> {
    let mut tensors = BTreeMap::new();
    if let Some(quantization) = folder.quantization {
        let suffix = quantization.packing.codes();
        let modules: Vec<String> =
            stored.keys().filter_map(|name| name.strip_suffix(suffix)).map(str::to_owned).collect();
        for module in modules {
            let tensor = Parts { files: &files, stored: &mut stored, module: &module }.matrix(quantization)?;
            if stored.contains_key(&tensor.name) {
                let file = files[tensor_file(&tensor)].path().to_owned();
                return Err(ModelError::LeftOverTensor {
                    file,
                    found: "the matrix twice".to_owned(),
                    expected: format!("either this or {module}{suffix}"),
                    tensor: tensor.name,
                });
            }
            tensors.insert(tensor.name.clone(), tensor);
        }
        warn_of_wide(folder, &tensors);
    }
    for (name, StoredTensor { shape, element, place, .. }) in stored {
        let Element::Weight(format) = element else {
            let (file, what) = (files[place.file].path(), format!("tensor {name}, dtype"));
            let expected = match folder.quantization {
                Some(_) => "F32, F16 or BF16, or a part of an int4 matrix",
                None => "F32, F16 or BF16, since config.json has no quantization_config",
            };
            return Err(ModelError::unsupported(file, &what, element, expected));
        };
        tensors.insert(name.clone(), Tensor { name, shape, format, source: TensorSource::Stored(place) });
    }
    Ok(TensorTable { files, tensors })
}

/// Says that matrices take eight times the memory that their codes do.
fn warn_of_wide(folder: &Folder, tensors: &BTreeMap<String, Tensor>) {
    let wide: Vec<&str> = tensors.values().filter(|one| !one.format.is_int4()).map(|one| one.name.as_str()).collect();
    if let Some(first) = wide.first() {
        log::warn!(
            "{}: {} int4 matrices, the first {first}: their groups or scales fit no int4 format, so that each weight takes 32 \
             bits",
            folder.path.display(),
            wide.len()
        );
    }
}

fn tensor_file(tensor: &Tensor) -> usize {
    match &tensor.source {
        TensorSource::Stored(place) => place.file,
        TensorSource::Packed(packed) => packed.codes.file,
    }
}

impl Packing {
    /// What the name of a module's codes ends with.
    fn codes(self) -> &'static str {
        match self {
            Packing::Awq | Packing::Gptq { .. } => ".qweight",
            Packing::PackQuantized { .. } => ".weight_packed",
        }
    }
}

/// The tensors of one module, on the way to a matrix.
struct Parts<'a> {
    files: &'a [MappedFile],
    stored: &'a mut BTreeMap<String, StoredTensor>,
    module: &'a str,
}

impl Parts<'_> {
    fn matrix(mut self, quantization: Quantization) -> Result<Tensor, ModelError> {
        let packing = quantization.packing;
        let codes = self.required(packing.codes(), &[Element::I32], None)?;
        let (outer, inner) = match codes.shape[..] {
            [outer, inner] => (outer, inner),
            _ => {
                let (field, found) = (format!("tensor {}", codes.name), format!("shape {:?}", codes.shape));
                return Err(ModelError::corrupt(self.path(&codes), &field, found, "two dimensions"));
            }
        };
        let [rows, columns] = match packing {
            Packing::Awq => [inner.saturating_mul(CODES), outer],
            Packing::Gptq { .. } => [inner, outer.saturating_mul(CODES)],
            Packing::PackQuantized { .. } => [outer, inner.saturating_mul(CODES)],
        };
        let group_size = quantization.group_size.unwrap_or(columns);
        if rows == 0 || columns == 0 || !rows.is_multiple_of(CODES) || !columns.is_multiple_of(group_size) {
            let field = format!("tensor {}", codes.name);
            let expected =
                format!("outputs in multiples of {CODES}, inputs in multiples of {group_size}, the size of a group");
            let found = format!("{rows} outputs of {columns} inputs");
            return Err(ModelError::unsupported(self.path(&codes), &field, found, expected));
        }
        let groups = columns / group_size;
        let scales = self.scales(packing, rows, groups)?;
        let zeros = self.zeros(packing, rows, groups)?;
        let order = self.order(packing, columns, group_size)?;
        self.check_stated_shape(packing, [rows, columns])?;
        self.drop_empty_bias(rows);
        let kept = order.is_none() && scales_are_halves(scales.0.bytes(self.files), scales.1);
        let format = if kept { block_format(group_size) } else { None };
        let packed =
            PackedInt4 { packing, rows, columns, group_size, codes: codes.place, scales, zeros, groups: order };
        Ok(Tensor {
            name: format!("{}.weight", self.module),
            shape: vec![rows, columns],
            format: format.unwrap_or(WeightFormat::F32),
            source: TensorSource::Packed(packed),
        })
    }

    fn scales(&mut self, packing: Packing, rows: usize, groups: usize) -> Result<(Place, WeightFormat), ModelError> {
        let (suffix, shape) = match packing {
            Packing::Awq | Packing::Gptq { .. } => (".scales", [groups, rows]),
            Packing::PackQuantized { .. } => (".weight_scale", [rows, groups]),
        };
        let formats = [WeightFormat::F16, WeightFormat::Bf16, WeightFormat::F32];
        let scales = self.required(suffix, &formats.map(Element::Weight), Some(&shape))?;
        let format = formats.into_iter().find(|format| scales.element == Element::Weight(*format));
        Ok((scales.place, format.unwrap_or(WeightFormat::F32)))
    }

    fn zeros(&mut self, packing: Packing, rows: usize, groups: usize) -> Result<Option<Place>, ModelError> {
        let (suffix, shape) = match packing {
            Packing::Awq | Packing::Gptq { .. } => (".qzeros", [groups, rows / CODES]),
            Packing::PackQuantized { has_zeros: true } => (".weight_zero_point", [rows / CODES, groups]),
            Packing::PackQuantized { has_zeros: false } => return Ok(None),
        };
        self.required(suffix, &[Element::I32], Some(&shape)).map(|zeros| Some(zeros.place))
    }

    /// The group of each input, unless they follow each other.
    fn order(&mut self, packing: Packing, columns: usize, group_size: usize) -> Result<Option<Place>, ModelError> {
        let suffix = match packing {
            Packing::Awq => return Ok(None),
            Packing::Gptq { .. } => ".g_idx",
            Packing::PackQuantized { .. } => ".weight_g_idx",
        };
        if !self.has(suffix) {
            return Ok(None);
        }
        let order = self.required(suffix, &[Element::I32], Some(&[columns]))?;
        let groups = order.place.bytes(self.files).as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        if let Some(group) = groups.clone().find(|group| *group as usize >= columns / group_size) {
            let (field, expected) = (format!("tensor {}", order.name), format!("below {}", columns / group_size));
            return Err(ModelError::corrupt(self.path(&order), &field, format!("group {}", group as i32), expected));
        }
        let follow = groups.enumerate().all(|(column, group)| group as usize == column / group_size);
        Ok((!follow).then_some(order.place))
    }

    /// Pack-quantised modules say what shape they had.
    fn check_stated_shape(&mut self, packing: Packing, shape: [usize; 2]) -> Result<(), ModelError> {
        if !matches!(packing, Packing::PackQuantized { .. }) {
            return Ok(());
        }
        let stated = self.required(".weight_shape", &[Element::I64, Element::I32], Some(&[2]))?;
        let bytes = stated.place.bytes(self.files);
        let sizes: Vec<usize> = match stated.element {
            Element::I64 => bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes) as usize).collect(),
            _ => bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize).collect(),
        };
        if sizes == shape {
            return Ok(());
        }
        let field = format!("tensor {}", stated.name);
        Err(ModelError::corrupt(self.path(&stated), &field, Shape(sizes), format!("{shape:?}, as its codes have it")))
    }

    /// Some writers store biases of models that have none.
    fn drop_empty_bias(&mut self, rows: usize) {
        let name = format!("{}.bias", self.module);
        let is_empty = |bias: &StoredTensor| bias.place.bytes(self.files).iter().all(|byte| *byte == 0);
        if self.stored.get(&name).is_some_and(|bias| bias.shape == [rows] && is_empty(bias)) {
            self.stored.remove(&name);
        }
    }

    fn has(&self, suffix: &str) -> bool {
        self.stored.contains_key(&format!("{}{suffix}", self.module))
    }

    /// Takes a part of the module out of the stored tensors.
    fn required(
        &mut self,
        suffix: &str,
        elements: &[Element],
        shape: Option<&[usize]>,
    ) -> Result<StoredTensor, ModelError> {
        let name = format!("{}{suffix}", self.module);
        let Some(part) = self.stored.remove(&name) else {
            return Err(ModelError::MissingTensor { file: self.files[0].path().to_owned(), tensor: name });
        };
        if !elements.contains(&part.element) {
            let expected: Vec<String> = elements.iter().map(Element::to_string).collect();
            let field = format!("tensor {name}, dtype");
            return Err(ModelError::unsupported(self.path(&part), &field, part.element, expected.join(", ")));
        }
        match shape {
            Some(shape) if part.shape != shape => Err(self.misshapen(&part, shape)),
            _ => Ok(part),
        }
    }

    fn path(&self, part: &StoredTensor) -> &Path {
        self.files[part.place.file].path()
    }

    fn misshapen(&self, part: &StoredTensor, expected: &[usize]) -> ModelError {
        ModelError::Shape {
            file: self.path(part).to_owned(),
            tensor: part.name.clone(),
            found: Shape(part.shape.clone()),
            expected: Shape(expected.to_vec()),
        }
    }
}

/// The widest format whose blocks do not reach over a group.
fn block_format(group_size: usize) -> Option<WeightFormat> {
    [WeightFormat::Int4Group128, WeightFormat::Int4Group64, WeightFormat::Int4Group32]
        .into_iter()
        .find(|format| group_size.is_multiple_of(format.block()))
}

/// Whether scales lose nothing as half-precision numbers.
fn scales_are_halves(bytes: &[u8], format: WeightFormat) -> bool {
    let count = bytes.len() / format.block_bytes();
    format == WeightFormat::F16
        || (0..count).map(|at| scale_at(bytes, format, at)).all(|scale| f16::from_f32(scale).to_f32() == scale)
}

fn scale_at(bytes: &[u8], format: WeightFormat, at: usize) -> f32 {
    match format {
        WeightFormat::F16 => f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
        WeightFormat::Bf16 => bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
        _ => f32::from_bits(word_at(bytes, at)),
    }
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]])
}

fn nibble(word: u32, at: usize) -> u8 {
    (word >> (4 * at) & 15) as u8
}

impl PackedInt4 {
    /// Where its codes are.
    pub(crate) fn place(&self) -> &Place {
        &self.codes
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        [&self.codes, &self.scales.0].into_iter().chain(&self.zeros).chain(&self.groups)
    }

    /// The matrix, row after row, in `format`: an int4 format or `F32`.
    pub(crate) fn unpack(&self, files: &[MappedFile], format: WeightFormat) -> Vec<u8> {
        let view = View {
            packed: self,
            codes: self.codes.bytes(files),
            scales: self.scales.0.bytes(files),
            zeros: self.zeros.as_ref().map(|place| place.bytes(files)),
            groups: self.groups.as_ref().map(|place| place.bytes(files)),
        };
        let mut unpacked = Vec::with_capacity(Tensor::size(&[self.rows, self.columns], format).unwrap_or(0));
        let mut codes = vec![0; self.columns];
        for row in 0..self.rows {
            view.codes(row, &mut codes);
            if format.is_int4() {
                for (block, codes) in codes.chunks_exact(format.block()).enumerate() {
                    let group = block * format.block() / self.group_size;
                    unpacked.extend(f16::from_f32(view.scale(row, group)).to_le_bytes());
                    unpacked.push(view.zero(row, group));
                    unpacked.extend(codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4));
                }
            } else {
                for (column, code) in codes.iter().enumerate() {
                    let group = view.group(column);
                    let steps = i16::from(*code) - i16::from(view.zero(row, group));
                    unpacked.extend((f32::from(steps) * view.scale(row, group)).to_le_bytes());
                }
            }
        }
        unpacked
    }
}

/// A packed matrix and its bytes.
struct View<'a> {
    packed: &'a PackedInt4,
    codes: &'a [u8],
    scales: &'a [u8],
    zeros: Option<&'a [u8]>,
    groups: Option<&'a [u8]>,
}

impl View<'_> {
    /// The codes of an output.
    fn codes(&self, row: usize, codes: &mut [u8]) {
        let (rows, columns) = (self.packed.rows, self.packed.columns);
        match self.packed.packing {
            Packing::Awq => {
                let (words, place) = (rows / CODES, AWQ_NIBBLES[row % CODES]);
                for (column, code) in codes.iter_mut().enumerate() {
                    *code = nibble(word_at(self.codes, column * words + row / CODES), place);
                }
            }
            Packing::Gptq { .. } => {
                for (word, codes) in codes.chunks_exact_mut(CODES).enumerate() {
                    let word = word_at(self.codes, word * rows + row);
                    codes.iter_mut().enumerate().for_each(|(place, code)| *code = nibble(word, place));
                }
            }
            Packing::PackQuantized { .. } => {
                for (word, codes) in codes.chunks_exact_mut(CODES).enumerate() {
                    let word = word_at(self.codes, row * (columns / CODES) + word);
                    codes.iter_mut().enumerate().for_each(|(place, code)| *code = nibble(word, place));
                }
            }
        }
    }

    fn group(&self, column: usize) -> usize {
        match self.groups {
            Some(groups) => word_at(groups, column) as usize,
            None => column / self.packed.group_size,
        }
    }

    fn num_groups(&self) -> usize {
        self.packed.columns / self.packed.group_size
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        let at = match self.packed.packing {
            Packing::Awq | Packing::Gptq { .. } => group * self.packed.rows + row,
            Packing::PackQuantized { .. } => row * self.num_groups() + group,
        };
        scale_at(self.scales, self.packed.scales.1, at)
    }

    /// 0 to 16.
    fn zero(&self, row: usize, group: usize) -> u8 {
        let Some(zeros) = self.zeros else { return 8 };
        let words = self.packed.rows / CODES;
        let (word, place) = (row / CODES, row % CODES);
        match self.packed.packing {
            Packing::Awq => nibble(word_at(zeros, group * words + word), AWQ_NIBBLES[place]),
            Packing::Gptq { zero_offset } => nibble(word_at(zeros, group * words + word), place) + zero_offset,
            Packing::PackQuantized { .. } => nibble(word_at(zeros, word * self.num_groups() + group), place),
        }
    }
}
