//! 4-bit weights in the layout of `kernels/int4_matmul.cu`.
//!
//! With k columns in groups of G and N rows, rounded up to a multiple of 64 by rows of zeros:
//!
//! * `codes`, `[N / 16][k / 64][32 lanes][4]` words. With lane = 4 g + t and r = 16 * tile, word w of a chunk of 64 columns
//!   that starts at c has the codes of rows r + g and r + g + 8 at the four columns from c + 32 (w / 2) + 8 t + 4 (w % 2) on.
//!   Bits 4i.. and 16 + 4i.. (i = 0 to 3) are the first and the second of two neighbours: i = 0 the first two columns of row
//!   r + g, i = 1 of row r + g + 8, i = 2 the last two columns of row r + g, i = 3 of row r + g + 8.
//! * `scales`, `[k / G][N / 32][8][4]`: those of rows 32 * tile + g + 8 i at `[g][i]`.
//! * `zeros`, the same with a byte each, below 128.

use half::f16;
use octavo_backend::{Matrix, WeightFormat};

/// Columns of a tile of codes: the width of a matrix is a multiple of it (and of the group).
pub const COLUMNS: usize = 64;

/// Rows are rounded up to a multiple of this.
pub const ROW_MULTIPLE: usize = 64;

const TILE: usize = 16;
const WORDS: usize = 128;
/// Rows whose scales lie together.
const STRIPE: usize = 32;
/// The largest zero point: 128 more than it is still a whole number in bfloat16.
const LARGEST_ZERO: u8 = 127;

/// Weights that the kernels can multiply.
#[derive(Debug, Clone, PartialEq)]
pub struct Int4Matrix {
    /// Columns that share a scale and a zero point: 32, 64 or 128.
    pub group: usize,
    /// Rows of the matrices, stacked, without those that fill up.
    pub rows: usize,
    /// Rows with those that fill up.
    pub padded_rows: usize,
    /// Columns.
    pub columns: usize,
    /// Half a byte a weight.
    pub codes: Vec<u32>,
    /// For each group of each row.
    pub scales: Vec<f16>,
    /// For each group of each row.
    pub zeros: Vec<u8>,
}

/// Why matrices cannot be packed for the int4 kernels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Int4Error {
    /// There is no matrix.
    #[error("no matrix to pack")]
    Nothing,
    /// Matrices of other formats are multiplied otherwise.
    #[error("part {part} of the stacked matrices is {found}; the int4 kernels take {expected}")]
    Format {
        /// Index of the matrix.
        part: usize,
        /// Its format.
        found: WeightFormat,
        /// That of the first part, or any with 4-bit groups.
        expected: &'static str,
    },
    /// The width does not come out even.
    #[error("{columns} columns; the int4 kernels take a multiple of {multiple}")]
    Columns {
        /// The width of a matrix.
        columns: usize,
        /// What it must be a multiple of, or the width of the first part.
        multiple: usize,
    },
    /// A part is not as wide as the first.
    #[error("part {part} of the stacked matrices has {found} columns, the first {expected}")]
    Width {
        /// Index of the matrix.
        part: usize,
        /// Its columns.
        found: usize,
        /// Columns of the first part.
        expected: usize,
    },
    /// A zero point that no checkpoint of 4-bit codes needs.
    #[error("row {row} has the zero point {found} in group {group}; the int4 kernels take up to 127")]
    Zero {
        /// Row of the stacked matrices.
        row: usize,
        /// Group of columns.
        group: usize,
        /// The zero point.
        found: u8,
    },
}

/// Packs matrices of one format, stacked by rows.
///
/// # Errors
/// [`Int4Error`] if the formats or widths differ, the width is no multiple of [`COLUMNS`] and of the group, or a zero point is
/// above 127.
///
/// # Panics
/// If a matrix has fewer bytes than its shape and format say; loaders check.
pub fn repack(parts: &[Matrix<'_>]) -> Result<Int4Matrix, Int4Error> {
    let (format, columns) = check(parts)?;
    let rows: Vec<&[u8]> = parts.iter().flat_map(|part| (0..part.rows).map(|row| part.row_bytes(row))).collect();
    let (scales, zeros) = pack_groups(&rows, format, columns)?;
    let codes = pack_codes(&rows, format, columns);
    let padded_rows = rows.len().next_multiple_of(ROW_MULTIPLE);
    Ok(Int4Matrix { group: format.block(), rows: rows.len(), padded_rows, columns, codes, scales, zeros })
}

fn check(parts: &[Matrix<'_>]) -> Result<(WeightFormat, usize), Int4Error> {
    let first = parts.first().ok_or(Int4Error::Nothing)?;
    let (format, columns) = (first.data.format, first.columns);
    let expected = match format {
        WeightFormat::Int4Group32 => "int4 in groups of 32, as the first part is",
        WeightFormat::Int4Group64 => "int4 in groups of 64, as the first part is",
        WeightFormat::Int4Group128 => "int4 in groups of 128, as the first part is",
        found => return Err(Int4Error::Format { part: 0, found, expected: "int4 in groups of 32, 64 or 128" }),
    };
    for (index, part) in parts.iter().enumerate() {
        if part.data.format != format {
            return Err(Int4Error::Format { part: index, found: part.data.format, expected });
        }
        if part.columns != columns {
            return Err(Int4Error::Width { part: index, found: part.columns, expected: columns });
        }
    }
    let multiple = format.block().max(COLUMNS);
    if columns.is_multiple_of(multiple) { Ok((format, columns)) } else { Err(Int4Error::Columns { columns, multiple }) }
}

/// Scales and zero points.
fn pack_groups(rows: &[&[u8]], format: WeightFormat, columns: usize) -> Result<(Vec<f16>, Vec<u8>), Int4Error> {
    let padded = rows.len().next_multiple_of(ROW_MULTIPLE);
    let groups = columns / format.block();
    let mut scales = vec![f16::ZERO; groups * padded];
    let mut zeros = vec![0; groups * padded];
    for (row, bytes) in rows.iter().enumerate() {
        let place = row / STRIPE * STRIPE + row % 8 * 4 + row % STRIPE / 8;
        for (group, bytes) in bytes.chunks_exact(format.block_bytes()).enumerate() {
            if bytes[2] > LARGEST_ZERO {
                return Err(Int4Error::Zero { row, group, found: bytes[2] });
            }
            scales[group * padded + place] = f16::from_le_bytes([bytes[0], bytes[1]]);
            zeros[group * padded + place] = bytes[2];
        }
    }
    Ok((scales, zeros))
}

fn pack_codes(rows: &[&[u8]], format: WeightFormat, columns: usize) -> Vec<u32> {
    let padded = rows.len().next_multiple_of(ROW_MULTIPLE);
    let chunks = columns / COLUMNS;
    let mut codes = vec![0; padded / TILE * chunks * WORDS];
    for (index, words) in codes.chunks_exact_mut(WORDS).enumerate() {
        let (tile, chunk) = (index / chunks, index % chunks);
        let nibbles: [[u8; COLUMNS / 2]; TILE] = std::array::from_fn(|row| {
            rows.get(tile * TILE + row).map_or([0; COLUMNS / 2], |bytes| chunk_of(bytes, format, chunk))
        });
        for (at, word) in words.iter_mut().enumerate() {
            let (lane, w) = (at / 4, at % 4);
            let (g, t) = (lane / 4, lane % 4);
            let byte = w / 2 * 16 + t * 4 + w % 2 * 2;
            let four = |row: usize| u32::from(u16::from_le_bytes([nibbles[row][byte], nibbles[row][byte + 1]]));
            let (upper, lower) = (four(g), four(g + 8));
            let first = |four: u32| four & 0x0f0f;
            let second = |four: u32| four >> 4 & 0x0f0f;
            *word = first(upper) | first(lower) << 4 | second(upper) << 16 | second(lower) << 20;
        }
    }
    codes
}

/// The codes of 64 columns of a row, two a byte.
fn chunk_of(row: &[u8], format: WeightFormat, chunk: usize) -> [u8; COLUMNS / 2] {
    let run = format.block().min(COLUMNS);
    let mut codes = [0; COLUMNS / 2];
    for (index, to) in codes.chunks_exact_mut(run / 2).enumerate() {
        let column = chunk * COLUMNS + index * run;
        let from = column / format.block() * format.block_bytes() + 3 + column % format.block() / 2;
        to.copy_from_slice(&row[from..from + run / 2]);
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::*;
    use octavo_backend::WeightData;

    const FORMATS: [WeightFormat; 3] =
        [WeightFormat::Int4Group32, WeightFormat::Int4Group64, WeightFormat::Int4Group128];

    fn matrix(format: WeightFormat, rows: usize, columns: usize, seed: usize) -> Matrix<'static> {
        let mut state = seed as u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let mut bytes = Vec::new();
        for _ in 0..rows * columns / format.block() {
            bytes.extend(f16::from_f32(next() as f32 / 65536.0 - 0.5).to_le_bytes());
            bytes.push((next() % 17) as u8);
            bytes.extend((0..format.block() / 2).map(|_| next() as u8));
        }
        Matrix { rows, columns, data: WeightData { format, bytes: bytes.into() } }
    }

    /// The module's own words, the other way round.
    fn unpacked(packed: &Int4Matrix, row: usize, column: usize) -> f32 {
        let (tile, g) = (row / 16, row % 8);
        let (chunk, within) = (column / 64, column % 64);
        let (t, w) = (within % 32 / 8, within / 32 * 2 + within % 8 / 4);
        let word = packed.codes[((tile * (packed.columns / 64) + chunk) * 32 + 4 * g + t) * 4 + w];
        let i = row % 16 / 8 + 2 * (within % 4 / 2);
        let code = word >> (16 * (within % 2) + 4 * i) & 15;
        let place = column / packed.group * packed.padded_rows + row / 32 * 32 + g * 4 + row % 32 / 8;
        packed.scales[place].to_f32() * (code as f32 - f32::from(packed.zeros[place]))
    }

    #[test]
    fn packed_weights_are_the_stacked_matrices() {
        for format in FORMATS {
            let columns = 3 * format.block().max(COLUMNS);
            let parts = [matrix(format, 17, columns, 1), matrix(format, 1, columns, 2), matrix(format, 53, columns, 3)];
            let packed = repack(&parts).unwrap();
            assert_eq!((packed.rows, packed.padded_rows, packed.group), (71, 128, format.block()));
            let mut expected = vec![0.0; columns];
            let rows = parts.iter().flat_map(|part| (0..part.rows).map(move |row| (part, row)));
            for (index, (part, row)) in rows.enumerate() {
                part.dequantize_row(row, &mut expected);
                for (column, expected) in expected.iter().enumerate() {
                    assert_eq!(unpacked(&packed, index, column), *expected, "{format}, row {index}, column {column}");
                }
            }
            for row in 71..128 {
                assert!((0..columns).all(|column| unpacked(&packed, row, column) == 0.0), "row {row} only fills up");
            }
        }
    }

    #[test]
    fn packed_weights_take_no_more_room_than_the_rows_they_come_from() {
        for format in FORMATS {
            let packed = repack(&[matrix(format, 64, 256, 1)]).unwrap();
            let bytes = 4 * packed.codes.len() + 2 * packed.scales.len() + packed.zeros.len();
            assert_eq!(bytes, 64 * format.row_bytes(256).unwrap());
        }
    }

    #[test]
    fn what_the_kernels_cannot_multiply_is_refused_with_its_place() {
        let group32 = |rows, columns| matrix(WeightFormat::Int4Group32, rows, columns, 1);
        assert_eq!(repack(&[]), Err(Int4Error::Nothing));
        assert_eq!(repack(&[group32(2, 96)]), Err(Int4Error::Columns { columns: 96, multiple: 64 }));
        let found = WeightFormat::Int4Group64;
        let mixed = [group32(1, 64), matrix(found, 1, 64, 1)];
        assert!(matches!(repack(&mixed), Err(Int4Error::Format { part: 1, .. })));
        let widths = [group32(1, 64), group32(1, 128)];
        assert_eq!(repack(&widths), Err(Int4Error::Width { part: 1, found: 128, expected: 64 }));
        let dense = Matrix {
            rows: 1,
            columns: 64,
            data: WeightData { format: WeightFormat::Bf16, bytes: vec![0; 128].into() },
        };
        assert!(matches!(repack(&[dense]), Err(Int4Error::Format { part: 0, .. })));
        let mut large_zero = group32(3, 64);
        large_zero.data.bytes.to_mut()[5 * 19 + 2] = 128;
        assert_eq!(repack(&[large_zero]), Err(Int4Error::Zero { row: 2, group: 1, found: 128 }));
    }
}
