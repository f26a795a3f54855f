//! Weights in the order in which the kernels read them.
//!
//! A matrix is cut into tiles of 16 rows; a tile is one sequential stream, scales inline. With `r` a row of the tile and
//! `k` a column, the streams are:
//!
//! | format | for each 32 columns (4- and 8-bit formats), or as a whole |
//! | --- | --- |
//! | Q4_1 | 4 x 64 B codes, 16 f16 scales, 16 f16 minima |
//! | Q4_0 | 4 x 64 B codes (with the zero point 8 still in), 16 f16 scales |
//! | Q8_0 | 8 x 64 B codes + 128, 16 f16 scales |
//! | Q4_K | 4 x 64 B codes, 16 B scales, 16 B minima; before 8 groups, 16 f16 factors of scales, 16 of minima, negated |
//! | Q6_K | 4 x 64 B low bits, 2 x 64 B high bits, 2 x 16 B scales; before 8 groups, 16 f16 factors |
//! | int4 | 4 x 64 B codes; before 1, 2 or 4 groups, 16 f16 scales, 16 B zero points, negated |
//! | BF16 | `[k / 2][r][2]`, a last odd column paired with zeros |
//! | F16, F32 | `[k][r]` |
//!
//! 64 bytes of codes are `[16 rows][4 bytes]`. In 8 bits, vector `i` holds columns `4i..4i + 4`; in 4 bits its low
//! nibbles hold columns `8i..8i + 4` and its high nibbles `8i + 4..8i + 8`. Byte `b` of the high bits' vector `h` holds two
//! bits of each of the columns `16h + b`, `16h + 4 + b`, `16h + 8 + b` and `16h + 12 + b`. So one register is 16 rows, each
//! lane takes four products with the same four activations, and nothing is ever shuffled.
//!
//! Quantised matrices whose inputs are bfloat16 in chains keep their groups, but a lane of 4 bytes belongs to a row and to
//! the even or the odd columns, rows 0 to 7 in one vector and 8 to 15 in the next: what is widened from two such vectors is
//! 16 rows of pairs. In 4 bits a lane's nibbles, lowest first, are eight columns two apart, in 8 bits its bytes four. Codes of
//! 6 bits have bytes of their own there.

mod groups;

use half::{bf16, f16};
use octavo_backend::{BackendError, InputRounding, Matrix, WeightFormat};

use self::groups::GroupLayout;
use crate::{
    activation::RoundingSet,
    arena::{AlignedBytes, Arena},
    options::ActivationType,
    pool::for_each_once,
};

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;

/// Columns that share scales.
pub const GROUP: usize = octavo_backend::numerics::ACTIVATION_GROUP;

/// Bytes of one vector of codes.
const VECTOR: usize = 64;
/// Groups of a block of a format whose scales have a scale.
pub(crate) const SCALED_GROUPS: usize = 8;

/// Bytes of one tile.
fn tile_bytes(format: WeightFormat, rounding: InputRounding, columns: usize) -> usize {
    match GroupLayout::of(format, rounding) {
        Some(layout) => layout.tile_bytes(columns),
        None if format == WeightFormat::Bf16 => columns.div_ceil(2) * VECTOR,
        None if format == WeightFormat::F16 => columns * TILE_ROWS * 2,
        None => columns * TILE_ROWS * 4,
    }
}

/// How the input of a matmul with weights of this format is rounded.
fn input_rounding(format: WeightFormat, activations: ActivationType) -> InputRounding {
    match format {
        WeightFormat::Bf16 => activations.bf16_input(),
        WeightFormat::F16 | WeightFormat::F32 => InputRounding::None,
        _ => activations.quantized_input(),
    }
}

/// Matrices stacked by rows, packed; each keeps its format.
#[derive(Debug)]
pub struct PackedMatrix {
    columns: usize,
    parts: Vec<Part>,
    data: AlignedBytes,
}

/// One of the stacked matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Of the weights.
    pub format: WeightFormat,
    /// Of the inputs.
    pub rounding: InputRounding,
    /// Rows, without the padding of the last tile.
    pub rows: usize,
    /// Its first row in the stack.
    pub first_row: usize,
    /// Its first tile in the stack.
    pub first_tile: usize,
    /// Bytes of each of its tiles.
    pub tile_bytes: usize,
    /// Bytes before its first tile.
    pub offset: usize,
}

impl Part {
    fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// One past its last tile in the stack.
    pub fn end_tile(&self) -> usize {
        self.first_tile + self.tiles()
    }
}

impl PackedMatrix {
    /// Packs matrices of equal width into memory of their own.
    ///
    /// # Errors
    /// Widths that differ, a width or an amount of data that does not fit a format, memory that cannot be had.
    pub fn pack(parts: &[Matrix], activations: ActivationType) -> Result<PackedMatrix, BackendError> {
        PackedMatrix::pack_in(&mut Arena::sized_exactly(), parts, activations, 1)
    }

    /// Packs matrices of equal width into an arena, after what is there already, for inputs of the given type, with so many
    /// threads.
    ///
    /// # Errors
    /// As [`PackedMatrix::pack`].
    pub fn pack_in(
        arena: &mut Arena,
        matrices: &[Matrix],
        activations: ActivationType,
        threads: usize,
    ) -> Result<PackedMatrix, BackendError> {
        let columns = matrices.first().map_or(0, |matrix| matrix.columns);
        let mut parts = Vec::with_capacity(matrices.len());
        let (mut first_row, mut first_tile, mut offset) = (0, 0, 0usize);
        for matrix in matrices {
            check(matrix, columns)?;
            let format = matrix.data.format;
            let rounding = input_rounding(format, activations);
            let part = Part {
                format,
                rounding,
                rows: matrix.rows,
                first_row,
                first_tile,
                tile_bytes: tile_bytes(format, rounding, columns),
                offset,
            };
            first_row += part.rows;
            first_tile = part.end_tile();
            // Each part starts on a cache line.
            offset += (part.tiles() * part.tile_bytes).next_multiple_of(VECTOR);
            parts.push(part);
        }
        let mut data = arena.take("packed weights", offset)?;
        let mut shares = Vec::new();
        let mut rest = data.elements_mut::<u8>();
        for (part, matrix) in parts.iter().zip(matrices) {
            let bytes = part.tiles() * part.tile_bytes;
            let (own, after) = std::mem::take(&mut rest).split_at_mut(bytes.next_multiple_of(VECTOR));
            rest = after;
            let tiles = part.tiles().div_ceil(threads.max(1)).max(1);
            let cuts = own[..bytes].chunks_mut((tiles * part.tile_bytes).max(1)).enumerate();
            shares.extend(cuts.map(|(index, bytes)| Share { matrix, part, first_tile: index * tiles, bytes }));
        }
        for_each_once(shares, threads, Share::pack);
        Ok(PackedMatrix { columns, parts, data })
    }

    /// Outputs: the rows of all parts, without padding.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Tiles of all parts; the unit in which workers share a matmul.
    pub fn tiles(&self) -> usize {
        self.parts.last().map_or(0, Part::end_tile)
    }

    /// Packed size: what one pass reads.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// The roundings that the inputs of a matmul with this matrix need.
    pub fn input_roundings(&self) -> RoundingSet {
        self.parts.iter().map(|part| part.rounding).collect()
    }

    /// The range of outputs that a range of tiles computes.
    ///
    /// # Panics
    /// If the tiles do not exist.
    pub fn rows_of_tiles(&self, tiles: std::ops::Range<usize>) -> std::ops::Range<usize> {
        assert!(tiles.start <= tiles.end && tiles.end <= self.tiles(), "tiles {tiles:?} of {}", self.tiles());
        let start_of = |tile: usize| match self.parts.iter().find(|part| tile < part.end_tile()) {
            Some(part) => part.first_row + (tile - part.first_tile) * TILE_ROWS,
            None => self.rows(),
        };
        start_of(tiles.start)..start_of(tiles.end)
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The first byte of a part's tile, counted within the part.
    pub(crate) fn tile(&self, part: &Part, tile: usize) -> *const u8 {
        let start = part.offset + tile * part.tile_bytes;
        self.data.elements::<u8>()[start..start + part.tile_bytes].as_ptr()
    }

    /// One row as `f32`: the same as [`Matrix::dequantize_row`] of the matrix it came from.
    ///
    /// # Panics
    /// If the row does not exist or `output` is shorter than [`PackedMatrix::columns`].
    pub fn dequantize_row(&self, row: usize, output: &mut [f32]) {
        let part = self.parts.iter().find(|part| (part.first_row..part.first_row + part.rows).contains(&row));
        let Some(part) = part else { panic!("row {row} of {}", self.rows()) };
        let (tile, row) = ((row - part.first_row) / TILE_ROWS, (row - part.first_row) % TILE_ROWS);
        let start = part.offset + tile * part.tile_bytes;
        let bytes = &self.data.elements::<u8>()[start..start + part.tile_bytes];
        let output = &mut output[..self.columns];
        if let Some(layout) = GroupLayout::of(part.format, part.rounding) {
            for (group, out) in output.chunks_exact_mut(GROUP).enumerate() {
                out.copy_from_slice(&layout.read(bytes, row, group));
            }
            return;
        }
        for (column, out) in output.iter_mut().enumerate() {
            *out = dense_element(part.format, bytes, row, column);
        }
    }
}

/// The byte at which a dense tile holds one element.
fn dense_place(format: WeightFormat, row: usize, column: usize) -> usize {
    match format {
        WeightFormat::Bf16 => column / 2 * VECTOR + row * 4 + column % 2 * 2,
        WeightFormat::F16 => (column * TILE_ROWS + row) * 2,
        _ => (column * TILE_ROWS + row) * 4,
    }
}

fn dense_element(format: WeightFormat, tile: &[u8], row: usize, column: usize) -> f32 {
    let b = &tile[dense_place(format, row, column)..];
    match format {
        WeightFormat::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        WeightFormat::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
    }
}

fn check(matrix: &Matrix, columns: usize) -> Result<(), BackendError> {
    let format = matrix.data.format;
    if matrix.columns != columns {
        return Err(BackendError::Unsupported {
            what: "columns of stacked matrices",
            found: matrix.columns.to_string(),
            expected: format!("{columns} as in the first"),
        });
    }
    let bytes = format.row_bytes(columns).and_then(|row| row.checked_mul(matrix.rows));
    match bytes {
        None => Err(BackendError::Unsupported {
            what: "columns of a block-quantised matrix",
            found: format!("{columns} in {format}"),
            expected: format!("a multiple of {}", format.block()),
        }),
        Some(expected) if expected != matrix.data.bytes.len() => Err(BackendError::Unsupported {
            what: "size of a matrix",
            found: format!("{} bytes", matrix.data.bytes.len()),
            expected: format!("{expected} bytes for {} x {columns} in {format}", matrix.rows),
        }),
        Some(_) => Ok(()),
    }
}

/// Some tiles of a part, for one thread to pack.
struct Share<'a> {
    matrix: &'a Matrix<'a>,
    part: &'a Part,
    first_tile: usize,
    bytes: &'a mut [u8],
}

impl Share<'_> {
    fn pack(self) {
        for (tile, bytes) in self.bytes.chunks_mut(self.part.tile_bytes.max(1)).enumerate() {
            pack_tile(self.matrix, self.part.rounding, self.first_tile + tile, bytes);
        }
    }
}

/// Fills one tile, which is all zeros. Rows beyond the last stay so; their outputs are never stored.
fn pack_tile(matrix: &Matrix, rounding: InputRounding, tile: usize, bytes: &mut [u8]) {
    let format = matrix.data.format;
    let first = tile * TILE_ROWS;
    for row in 0..TILE_ROWS.min(matrix.rows - first) {
        let source = matrix.row_bytes(first + row);
        if let Some(layout) = GroupLayout::of(format, rounding) {
            for group in 0..matrix.columns / GROUP {
                layout.write(bytes, row, group, source);
            }
            continue;
        }
        let size = if format == WeightFormat::F32 { 4 } else { 2 };
        for (column, element) in source.chunks_exact(size).enumerate() {
            let at = dense_place(format, row, column);
            bytes[at..at + size].copy_from_slice(element);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use octavo_backend::WeightData;

    use super::*;
    use crate::matmul::samples::random_matrix;

    #[test]
    fn threads_pack_what_one_packs() {
        let parts =
            [(WeightFormat::Q4_1, 100), (WeightFormat::Bf16, 5), (WeightFormat::Q8_0, 16), (WeightFormat::F32, 33)];
        let parts = parts.map(|(format, rows)| random_matrix(format, rows, 96, rows as u64));
        let pack = |threads| {
            PackedMatrix::pack_in(&mut Arena::sized_exactly(), &parts, ActivationType::Bf16, threads).unwrap()
        };
        let alone = pack(1);
        for threads in [0, 2, 3, 50] {
            assert!(pack(threads).data.elements::<u8>() == alone.data.elements::<u8>(), "{threads} threads");
        }
    }

    #[test]
    fn a_packed_row_reads_back_as_it_was() {
        let types = [ActivationType::Int8, ActivationType::Bf16];
        for (format, activations) in WeightFormat::ALL.into_iter().flat_map(|format| types.map(|kind| (format, kind))) {
            for (rows, columns) in [(1, 32usize), (5, 96), (16, 64), (33, 576)] {
                let columns = columns.next_multiple_of(format.block());
                let matrix = random_matrix(format, rows, columns, 11);
                let packed = PackedMatrix::pack(std::slice::from_ref(&matrix), activations).unwrap();
                assert_eq!((packed.rows(), packed.columns()), (rows, columns));
                let (mut found, mut expected) = (vec![0.0f32; columns], vec![0.0f32; columns]);
                for row in 0..rows {
                    packed.dequantize_row(row, &mut found);
                    matrix.dequantize_row(row, &mut expected);
                    let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&found), bits(&expected), "{format} {rows} x {columns}, row {row}");
                }
            }
        }
    }

    #[test]
    fn dense_formats_take_any_width() {
        for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16] {
            let matrix = random_matrix(format, 3, 43, 5);
            let packed = PackedMatrix::pack(std::slice::from_ref(&matrix), ActivationType::Int8).unwrap();
            let (mut found, mut expected) = ([0.0f32; 43], [0.0f32; 43]);
            packed.dequantize_row(2, &mut found);
            matrix.dequantize_row(2, &mut expected);
            assert_eq!(found, expected, "{format}");
        }
    }

    #[test]
    fn stacked_parts_start_on_tiles_of_their_own() {
        let parts = [
            random_matrix(WeightFormat::Q4_1, 5, 64, 1),
            random_matrix(WeightFormat::Q8_0, 17, 64, 2),
            random_matrix(WeightFormat::Bf16, 16, 64, 3),
        ];
        let packed = PackedMatrix::pack(&parts, ActivationType::Int8).unwrap();
        assert_eq!((packed.rows(), packed.tiles()), (38, 4));
        assert_eq!(packed.rows_of_tiles(0..1), 0..5);
        assert_eq!(packed.rows_of_tiles(1..3), 5..22);
        assert_eq!(packed.rows_of_tiles(3..4), 22..38);
        assert_eq!(packed.rows_of_tiles(4..4), 38..38);
        let mut found = [0.0; 64];
        let mut expected = [0.0; 64];
        packed.dequantize_row(21, &mut found);
        parts[1].dequantize_row(16, &mut expected);
        assert_eq!(found, expected);
    }

    #[test]
    fn a_group_takes_the_bytes_that_the_table_says() {
        for (format, bytes) in [
            (WeightFormat::Q4_1, 320),
            (WeightFormat::Q4_0, 288),
            (WeightFormat::Q8_0, 544),
            (WeightFormat::Bf16, 1024),
            (WeightFormat::F16, 1024),
            (WeightFormat::F32, 2048),
            (WeightFormat::Q4K, 296),
            (WeightFormat::Q6K, 420),
            (WeightFormat::Int4Group32, 304),
            (WeightFormat::Int4Group64, 280),
            (WeightFormat::Int4Group128, 268),
        ] {
            assert_eq!(tile_bytes(format, InputRounding::Int8Group32, 256), 8 * bytes, "{format}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers() {
        let mut short = random_matrix(WeightFormat::Q8_0, 2, 64, 1);
        short.data.bytes.to_mut().pop();
        let error = PackedMatrix::pack(&[short], ActivationType::Int8).unwrap_err().to_string();
        assert!(error.contains("135 bytes") && error.contains("136 bytes"), "{error}");
        let data = WeightData { format: WeightFormat::Q4_0, bytes: Cow::Borrowed(&[0; 27]) };
        let error =
            PackedMatrix::pack(&[Matrix { rows: 1, columns: 48, data }], ActivationType::Int8).unwrap_err().to_string();
        assert!(error.contains("48 in Q4_0"), "{error}");
        let parts = [random_matrix(WeightFormat::F32, 1, 32, 1), random_matrix(WeightFormat::F32, 1, 64, 1)];
        assert!(PackedMatrix::pack(&parts, ActivationType::Int8).unwrap_err().to_string().contains("64"));
    }
}
