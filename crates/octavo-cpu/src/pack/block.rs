//! Blocks of 128 columns with one scale, in 8-bit codes or in nibbles that become such codes.
//!
//! A block is one group of 32 columns after another, the last block as many as there are, then 16 `f32` scales. A group
//! of an 8-bit format is as in [`super`], 8 x 64 B. A group of a 4-bit format is 4 x 64 B of nibbles, 16 factors and, if
//! the format has minima, 16 offsets ([`octavo_backend::block::Fold`]), 2 bytes each.
//!
//! Vector `i` of a group's nibbles holds columns `8i..8i + 8`, four bytes a row, in the order in which
//! [`crate::simd::Simd::fold_nibbles`] gives back columns `8i..8i + 4` and `8i + 4..8i + 8`: the first two bytes hold
//! columns 0, 1, 4, 5 of them, the others 2, 3, 6, 7.

use octavo_backend::{
    Matrix, WeightFormat,
    block::{BLOCK, Fold, WeightBlock, byte_code},
};

use super::{GROUP, SCALES, TILE_ROWS, VECTOR};

/// Bytes of a block's scales.
pub(crate) const BLOCK_SCALES: usize = TILE_ROWS * 4;

/// How blocks of one format lie in a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockLayout {
    format: WeightFormat,
    columns: usize,
}

impl BlockLayout {
    pub fn new(format: WeightFormat, columns: usize) -> BlockLayout {
        BlockLayout { format, columns }
    }

    pub fn tile_bytes(self) -> usize {
        self.columns / GROUP * self.group_bytes() + self.columns.div_ceil(BLOCK) * BLOCK_SCALES
    }

    fn is_byte(self) -> bool {
        self.format == WeightFormat::Q8_0
    }

    fn group_bytes(self) -> usize {
        group_bytes(self.format)
    }

    /// Groups of a block.
    fn groups(self, block: usize) -> usize {
        (self.columns / GROUP).min((block + 1) * BLOCK / GROUP) - block * BLOCK / GROUP
    }

    /// The first byte of a block.
    fn start(self, block: usize) -> usize {
        block * (BLOCK / GROUP * self.group_bytes() + BLOCK_SCALES)
    }

    /// The byte and the shift at which a row's code of one column lies.
    fn place(self, block: usize, row: usize, column: usize) -> (usize, usize) {
        let group = self.start(block) + column / GROUP * self.group_bytes();
        let (lane, column) = (row * 4, column % GROUP);
        if self.is_byte() {
            return (group + column / 4 * VECTOR + lane + column % 4, 0);
        }
        let word = column / 2 % 2;
        let nibble = column % 2 + column / 4 % 2 * 2;
        (group + column / 8 * VECTOR + lane + word * 2 + nibble / 2, nibble % 2 * 4)
    }

    fn fold_place(self, block: usize, row: usize, group: usize) -> usize {
        self.start(block) + group * self.group_bytes() + GROUP * TILE_ROWS / 2 + row * 2
    }

    fn scale_place(self, block: usize, row: usize) -> usize {
        self.start(block) + self.groups(block) * self.group_bytes() + row * 4
    }

    /// Writes one row of `matrix` as row `row` of the tile, whose bytes are still zeros.
    pub fn write_row(self, tile: &mut [u8], row: usize, matrix: &Matrix<'_>, from: usize) {
        for block in 0..self.columns.div_ceil(BLOCK) {
            let (scale, groups) = matrix.block_scale(from, block);
            for (index, group) in groups.iter().enumerate() {
                for (column, code) in group.codes.into_iter().enumerate() {
                    let code = match self.format {
                        WeightFormat::Q8_0 => byte_code(code, group.scale, scale) as u8 ^ 0x80,
                        WeightFormat::Q4_0 => (code + 8) as u8,
                        _ => code as u8,
                    };
                    let (byte, shift) = self.place(block, row, index * GROUP + column);
                    tile[byte] |= code << shift;
                }
                if !self.is_byte() {
                    let fold = Fold::new(self.format, group, scale);
                    let at = self.fold_place(block, row, index);
                    tile[at..at + 2].copy_from_slice(&fold.factor.to_le_bytes());
                    if self.format == WeightFormat::Q4_1 {
                        tile[at + SCALES..at + SCALES + 2].copy_from_slice(&fold.offset.to_le_bytes());
                    }
                }
            }
            let at = self.scale_place(block, row);
            tile[at..at + 4].copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// A row of the tile, as it is used.
    pub fn read_block(self, tile: &[u8], row: usize, block: usize) -> WeightBlock {
        let mut codes = [0; BLOCK];
        let word = |at: usize| u16::from_le_bytes([tile[at], tile[at + 1]]);
        for (column, out) in codes[..self.groups(block) * GROUP].iter_mut().enumerate() {
            let (byte, shift) = self.place(block, row, column);
            *out = if self.is_byte() {
                (tile[byte] ^ 0x80) as i8
            } else {
                let at = self.fold_place(block, row, column / GROUP);
                let factor = word(at);
                let offset = match self.format {
                    WeightFormat::Q4_0 => 128u16.wrapping_sub(factor.wrapping_mul(8)),
                    _ => word(at + SCALES),
                };
                Fold { factor, offset }.apply(tile[byte] >> shift & 15)
            };
        }
        let at = self.scale_place(block, row);
        WeightBlock { scale: f32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]), codes }
    }
}

/// Bytes of one group of 16 rows.
pub(crate) const fn group_bytes(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Q4_0 => GROUP * TILE_ROWS / 2 + SCALES,
        WeightFormat::Q4_1 => GROUP * TILE_ROWS / 2 + 2 * SCALES,
        _ => GROUP * TILE_ROWS,
    }
}
