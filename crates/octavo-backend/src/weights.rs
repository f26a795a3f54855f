//! Weights as a checkpoint holds them, handed out in the groups in which a backend wants to pack them.

use std::{borrow::Cow, fmt};

use half::{bf16, f16};

use crate::{BackendError, WeightShape};

/// Values that share a scale in the GGUF formats octavo reads; also the step in which blocks are handed out.
pub const GGUF_BLOCK: usize = 32;

/// Values of one block in the formats whose scales have a scale.
const SUPER_BLOCK: usize = 256;

/// A place in the decoder that holds weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightId {
    /// `[vocab_size, hidden_size]`.
    Embedding,
    /// `[hidden_size]`.
    FinalNorm,
    /// `[vocab_size, hidden_size]`; not asked for when the head is tied to the embedding.
    Head,
    /// `[hidden_size]`.
    AttentionNorm(usize),
    /// Query, key and value stacked: `[qkv_rows, hidden_size]` in three parts.
    Qkv(usize),
    /// `[hidden_size, num_heads * head_size]`.
    AttentionOutput(usize),
    /// `[hidden_size]`.
    MlpNorm(usize),
    /// Gate and up stacked: `[2 * intermediate_size, hidden_size]` in two parts.
    GateUp(usize),
    /// `[hidden_size, intermediate_size]`.
    Down(usize),
}

impl fmt::Display for WeightId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightId::Embedding => write!(f, "embedding"),
            WeightId::FinalNorm => write!(f, "final norm"),
            WeightId::Head => write!(f, "head"),
            WeightId::AttentionNorm(i) => write!(f, "layer {i} attention norm"),
            WeightId::Qkv(i) => write!(f, "layer {i} query, key, value"),
            WeightId::AttentionOutput(i) => write!(f, "layer {i} attention output"),
            WeightId::MlpNorm(i) => write!(f, "layer {i} MLP norm"),
            WeightId::GateUp(i) => write!(f, "layer {i} gate, up"),
            WeightId::Down(i) => write!(f, "layer {i} down"),
        }
    }
}

/// A checkpoint, seen from a backend.
pub trait WeightSource {
    /// The weights of one place.
    ///
    /// # Errors
    /// [`BackendError::Source`] with the checkpoint's own words.
    fn weight(&mut self, id: WeightId) -> Result<WeightGroup<'_>, BackendError>;

    /// Says that the weights of a place have been packed: memory that holds them may be let go of.
    fn release(&mut self, id: WeightId) {
        let _ = id;
    }
}

/// What belongs to one place.
#[derive(Debug, Clone)]
pub enum WeightGroup<'a> {
    /// A norm's weights.
    Vector(Vec<f32>),
    /// Matrices with the same number of columns, stacked by rows; parts may differ in format.
    Matrices(Vec<Matrix<'a>>),
}

impl<'a> WeightGroup<'a> {
    /// The shape of what was handed out.
    pub fn shape(&self) -> WeightShape {
        match self {
            WeightGroup::Vector(values) => WeightShape::Vector(values.len()),
            WeightGroup::Matrices(parts) => WeightShape::Matrices {
                parts: parts.iter().map(|part| part.rows).collect(),
                columns: parts.first().map_or(0, |part| part.columns),
            },
        }
    }

    /// The norm's weights.
    ///
    /// # Errors
    /// [`BackendError::Weight`] unless the group has the `expected` shape of a vector.
    pub fn into_vector(self, id: WeightId, expected: &WeightShape) -> Result<Vec<f32>, BackendError> {
        match self {
            WeightGroup::Vector(values) if *expected == WeightShape::Vector(values.len()) => Ok(values),
            other => Err(mismatch(id, &other.shape(), expected)),
        }
    }

    /// The stacked matrices.
    ///
    /// # Errors
    /// [`BackendError::Weight`] unless the group has the `expected` shape and each part as many bytes as its shape
    /// and format say.
    pub fn into_matrices(self, id: WeightId, expected: &WeightShape) -> Result<Vec<Matrix<'a>>, BackendError> {
        let shape = self.shape();
        let WeightGroup::Matrices(parts) = self else { return Err(mismatch(id, &shape, expected)) };
        if shape != *expected || parts.iter().any(|part| Some(part.columns) != parts.first().map(|p| p.columns)) {
            return Err(mismatch(id, &shape, expected));
        }
        for part in &parts {
            let bytes = part.data.format.row_bytes(part.columns).and_then(|row| row.checked_mul(part.rows));
            if bytes != Some(part.data.bytes.len()) {
                return Err(BackendError::Weight {
                    id,
                    found: format!("{} bytes of {}", part.data.bytes.len(), part.data.format),
                    expected: format!("{bytes:?} bytes for {} x {}", part.rows, part.columns),
                });
            }
        }
        Ok(parts)
    }
}

fn mismatch(id: WeightId, found: &WeightShape, expected: &WeightShape) -> BackendError {
    BackendError::Weight { id, found: format!("{found:?}"), expected: format!("{expected:?}") }
}

/// A row-major matrix: `y = W x`.
#[derive(Debug, Clone)]
pub struct Matrix<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// The elements.
    pub data: WeightData<'a>,
}

/// Elements in one format, as bytes in the checkpoint's own order (little-endian, row after row).
#[derive(Debug, Clone)]
pub struct WeightData<'a> {
    /// What the bytes mean.
    pub format: WeightFormat,
    /// `rows * row_bytes` of them.
    pub bytes: Cow<'a, [u8]>,
}

/// How elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element.
    F16,
    /// 2 bytes an element.
    Bf16,
    /// GGUF: 32 values in 18 bytes, `d * (code - 8)`.
    Q4_0,
    /// GGUF: 32 values in 20 bytes, `d * code + m`.
    Q4_1,
    /// GGUF: 32 values in 34 bytes, `d * code`.
    Q8_0,
    /// GGUF: 256 values in 144 bytes, for each 32 of them `(d * s) * code - dmin * m` with 6 bits for `s` and `m`.
    Q4K,
    /// GGUF: 256 values in 210 bytes, for each 16 of them `d * s * (code - 32)` with 8 bits for `s`, 6 for a code.
    Q6K,
    /// AWQ and GPTQ, row by row: 32 values in 19 bytes, `s * (code - zero)`; `s` in half precision, `zero` a byte, then codes,
    /// the even ones in low nibbles.
    Int4Group32,
    /// The same with 64 values in 35 bytes.
    Int4Group64,
    /// The same with 128 values in 67 bytes.
    Int4Group128,
}

impl WeightFormat {
    /// Every format.
    pub const ALL: [WeightFormat; 11] = [
        WeightFormat::F32,
        WeightFormat::F16,
        WeightFormat::Bf16,
        WeightFormat::Q4_0,
        WeightFormat::Q4_1,
        WeightFormat::Q8_0,
        WeightFormat::Q4K,
        WeightFormat::Q6K,
        WeightFormat::Int4Group32,
        WeightFormat::Int4Group64,
        WeightFormat::Int4Group128,
    ];

    /// Values that are stored together: the width of a matrix is a multiple of it.
    pub fn block(self) -> usize {
        match self {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => 1,
            WeightFormat::Q4_0 | WeightFormat::Q4_1 | WeightFormat::Q8_0 => GGUF_BLOCK,
            WeightFormat::Q4K | WeightFormat::Q6K => SUPER_BLOCK,
            WeightFormat::Int4Group32 => 32,
            WeightFormat::Int4Group64 => 64,
            WeightFormat::Int4Group128 => 128,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            WeightFormat::F32 => 4,
            WeightFormat::F16 | WeightFormat::Bf16 => 2,
            WeightFormat::Q4_0 => 18,
            WeightFormat::Q4_1 => 20,
            WeightFormat::Q8_0 => 34,
            WeightFormat::Q4K => 144,
            WeightFormat::Q6K => 210,
            WeightFormat::Int4Group32 | WeightFormat::Int4Group64 | WeightFormat::Int4Group128 => 3 + self.block() / 2,
        }
    }

    /// Bytes of one row of `columns` elements; `None` when the format cannot hold that many.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let blocks = columns.is_multiple_of(self.block()).then_some(columns / self.block());
        blocks?.checked_mul(self.block_bytes())
    }

    /// True when values share scales in blocks.
    pub fn is_quantized(self) -> bool {
        self.block() > 1
    }

    /// True when a minimum is added to each value.
    pub fn has_minima(self) -> bool {
        matches!(self, WeightFormat::Q4_1 | WeightFormat::Q4K) || self.is_int4()
    }

    /// True for AWQ's and GPTQ's.
    pub fn is_int4(self) -> bool {
        matches!(self, WeightFormat::Int4Group32 | WeightFormat::Int4Group64 | WeightFormat::Int4Group128)
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightFormat::F32 => "F32",
            WeightFormat::F16 => "F16",
            WeightFormat::Bf16 => "BF16",
            WeightFormat::Q4_0 => "Q4_0",
            WeightFormat::Q4_1 => "Q4_1",
            WeightFormat::Q8_0 => "Q8_0",
            WeightFormat::Q4K => "Q4_K",
            WeightFormat::Q6K => "Q6_K",
            WeightFormat::Int4Group32 => "int4 in groups of 32",
            WeightFormat::Int4Group64 => "int4 in groups of 64",
            WeightFormat::Int4Group128 => "int4 in groups of 128",
        })
    }
}

/// 32 weights as integers: `value = scale * code + minimum`.
///
/// Q4_0 codes are already shifted to -8..=7 and Q8_0 codes are signed; both have minimum 0. So have Q6_K codes, which are
/// multiplied with their scale of 8 bits already: -4096..=4096.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Codes {
    /// Factor on the codes.
    pub scale: f32,
    /// Added to each value.
    pub minimum: f32,
    /// The integers.
    pub codes: [i16; GGUF_BLOCK],
}

/// 32 weights of a format whose scales have a scale, as they are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaledCodes {
    /// Factor on the scales.
    pub factor: f16,
    /// Factor on the minimum; 0 in formats without.
    pub minimum_factor: f16,
    /// Of the first and of the last 16 codes.
    pub scales: [i8; 2],
    /// Subtracted from each value once it is multiplied by its factor.
    pub minimum: u8,
    /// Q4_K: 0..=15; Q6_K: -32..=31.
    pub codes: [i8; GGUF_BLOCK],
}

impl ScaledCodes {
    fn codes(&self, format: WeightFormat) -> Codes {
        let factor = self.factor.to_f32();
        let scaled = |index: usize| i16::from(self.scales[index / 16]) * i16::from(self.codes[index]);
        match format {
            WeightFormat::Q6K => Codes { scale: factor, minimum: 0.0, codes: std::array::from_fn(scaled) },
            _ => Codes {
                scale: factor * f32::from(self.scales[0]),
                minimum: -(self.minimum_factor.to_f32() * f32::from(self.minimum)),
                codes: self.codes.map(i16::from),
            },
        }
    }
}

impl Codes {
    /// The values in bfloat16: `scale * (code + 16) + (minimum - 16 * scale)`, both operations fused and rounded once, then
    /// to nearest, ties to even. The detour over 16 is that of a code set into the mantissa of a float.
    pub fn to_bf16(&self) -> [bf16; GGUF_BLOCK] {
        let offset = self.scale.mul_add(-16.0, self.minimum);
        self.codes.map(|code| bf16::from_f32(self.scale.mul_add(f32::from(code) + 16.0, offset)))
    }
}

impl Matrix<'_> {
    /// The same matrix with bytes of its own.
    pub fn into_owned(self) -> Matrix<'static> {
        let data = WeightData { format: self.data.format, bytes: Cow::Owned(self.data.bytes.into_owned()) };
        Matrix { rows: self.rows, columns: self.columns, data }
    }

    /// The same matrix in bfloat16, every value rounded to nearest, ties to even.
    pub fn to_bf16(&self) -> Matrix<'static> {
        let mut bytes = Vec::with_capacity(self.rows * self.columns * size_of::<bf16>());
        let mut values = vec![0.0; self.columns];
        for row in 0..self.rows {
            self.dequantize_row(row, &mut values);
            bytes.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()));
        }
        let data = WeightData { format: WeightFormat::Bf16, bytes: Cow::Owned(bytes) };
        Matrix { rows: self.rows, columns: self.columns, data }
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// If the row is out of range or the data is shorter than the shape; loaders check both.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let len = self.data.format.row_bytes(self.columns).unwrap_or(0);
        &self.data.bytes[row * len..(row + 1) * len]
    }

    /// One row as `f32`, `[columns]`: the definition of each format.
    pub fn dequantize_row(&self, row: usize, output: &mut [f32]) {
        let bytes = self.row_bytes(row);
        match self.data.format {
            WeightFormat::F32 => {
                for (out, b) in output.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            WeightFormat::F16 => {
                for (out, b) in output.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            WeightFormat::Bf16 => {
                for (out, b) in output.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = bf16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            _ => {
                for (block, out) in output.chunks_exact_mut(GGUF_BLOCK).enumerate() {
                    let codes = self.data.format.decode_block(bytes, block);
                    for (out, code) in out.iter_mut().zip(codes.codes) {
                        *out = codes.scale * f32::from(code) + codes.minimum;
                    }
                }
            }
        }
    }

    /// One block of 32 values of a row as integers; the format must be quantised.
    pub fn codes(&self, row: usize, block: usize) -> Codes {
        self.data.format.decode_block(self.row_bytes(row), block)
    }
}

impl WeightFormat {
    /// The integers of block `block` of a row's bytes.
    ///
    /// # Panics
    /// If the format is not quantised.
    pub fn decode_block(self, row: &[u8], block: usize) -> Codes {
        let half_at = |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        let mut codes = [0i16; GGUF_BLOCK];
        // The low nibbles of 16 bytes are values 0..16, the high ones 16..32.
        let nibbles = |codes: &mut [i16; GGUF_BLOCK], bytes: &[u8], shift: i16| {
            for (i, byte) in bytes.iter().enumerate() {
                codes[i] = i16::from(byte & 15) - shift;
                codes[i + 16] = i16::from(byte >> 4) - shift;
            }
        };
        match self {
            WeightFormat::Q4_0 => {
                let bytes = &row[block * 18..(block + 1) * 18];
                nibbles(&mut codes, &bytes[2..], 8);
                Codes { scale: half_at(bytes, 0), minimum: 0.0, codes }
            }
            WeightFormat::Q4_1 => {
                let bytes = &row[block * 20..(block + 1) * 20];
                nibbles(&mut codes, &bytes[4..], 0);
                Codes { scale: half_at(bytes, 0), minimum: half_at(bytes, 2), codes }
            }
            WeightFormat::Q8_0 => {
                let bytes = &row[block * 34..(block + 1) * 34];
                for (code, byte) in codes.iter_mut().zip(&bytes[2..]) {
                    *code = i16::from(*byte as i8);
                }
                Codes { scale: half_at(bytes, 0), minimum: 0.0, codes }
            }
            WeightFormat::Q4K | WeightFormat::Q6K => self.decode_scaled(row, block).codes(self),
            _ if self.is_int4() => {
                let steps = self.block() / GGUF_BLOCK;
                let bytes = &row[block / steps * self.block_bytes()..][..self.block_bytes()];
                let nibbles = &bytes[3 + block % steps * GGUF_BLOCK / 2..];
                let scale = half_at(bytes, 0);
                Codes {
                    scale,
                    minimum: scale * f32::from(-i16::from(bytes[2])),
                    codes: std::array::from_fn(|i| i16::from(nibbles[i / 2] >> (i % 2 * 4) & 15)),
                }
            }
            other => panic!("{other} has no blocks"),
        }
    }

    /// Values `32 * group` to `32 * (group + 1)` of a row's bytes, as they are stored.
    ///
    /// # Panics
    /// If the scales of the format have no scale.
    pub fn decode_scaled(self, row: &[u8], group: usize) -> ScaledCodes {
        let (block, group) = (group / (SUPER_BLOCK / GGUF_BLOCK), group % (SUPER_BLOCK / GGUF_BLOCK));
        let bytes = &row[block * self.block_bytes()..(block + 1) * self.block_bytes()];
        let half_at = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]);
        match self {
            WeightFormat::Q4K => {
                // Scales and minima of the first four groups have their 6 bits in a byte each; those of the last four have 4
                // bits in a byte together, and 2 above the former.
                let packed = &bytes[4..16];
                let (scale, minimum) = match group {
                    0..4 => (packed[group] & 63, packed[group + 4] & 63),
                    _ => (
                        packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
                        packed[group + 4] >> 4 | packed[group] >> 6 << 4,
                    ),
                };
                // 32 bytes hold two groups, the even one in their low nibbles.
                let nibbles = &bytes[16 + group / 2 * 32..][..GGUF_BLOCK];
                ScaledCodes {
                    factor: half_at(0),
                    minimum_factor: half_at(2),
                    scales: [scale as i8; 2],
                    minimum,
                    codes: std::array::from_fn(|i| (nibbles[i] >> (group % 2 * 4) & 15) as i8),
                }
            }
            WeightFormat::Q6K => {
                // Two halves of 128 values. Of one, 64 bytes hold low bits, groups 0 and 1 in the low nibbles, 2 and 3 in the
                // high ones; 32 bytes hold the high bits, two of each group.
                let (half, group) = (group / 4, group % 4);
                let low = &bytes[half * 64 + group % 2 * 32..][..GGUF_BLOCK];
                let high = &bytes[128 + half * 32..][..GGUF_BLOCK];
                let scales = &bytes[192 + half * 8 + group * 2..];
                let code = |i: usize| low[i] >> (group / 2 * 4) & 15 | (high[i] >> (group * 2) & 3) << 4;
                ScaledCodes {
                    factor: half_at(208),
                    minimum_factor: f16::ZERO,
                    scales: [scales[0] as i8, scales[1] as i8],
                    minimum: 0,
                    codes: std::array::from_fn(|i| code(i) as i8 - 32),
                }
            }
            other => panic!("the scales of {other} have no scale"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int4_values_are_codes_above_their_groups_zero_point_times_its_scale() {
        for format in [WeightFormat::Int4Group32, WeightFormat::Int4Group64, WeightFormat::Int4Group128] {
            let groups = [(0.5, 7u8), (-0.125, 16), (3.0, 0)];
            let codes: Vec<u8> = (0..3 * format.block()).map(|i| (i * 7 % 16) as u8).collect();
            let mut bytes = Vec::new();
            for ((scale, zero), codes) in groups.iter().zip(codes.chunks(format.block())) {
                bytes.extend(f16::from_f32(*scale).to_le_bytes());
                bytes.push(*zero);
                bytes.extend(codes.chunks(2).map(|pair| pair[0] | pair[1] << 4));
            }
            let columns = 3 * format.block();
            assert_eq!(format.row_bytes(columns), Some(bytes.len()));
            let matrix = Matrix { rows: 1, columns, data: WeightData { format, bytes: bytes.into() } };
            let mut found = vec![0.0; columns];
            matrix.dequantize_row(0, &mut found);
            for (i, found) in found.into_iter().enumerate() {
                let (scale, zero) = groups[i / format.block()];
                assert_eq!(found, scale * (f32::from(codes[i]) - f32::from(zero)), "{format}, value {i}");
            }
        }
    }
}
