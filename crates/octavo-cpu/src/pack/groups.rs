//! Where the codes and scales of a quantised format's groups go.

use half::f16;
use octavo_backend::{InputRounding, WeightFormat};

use super::{GROUP, SCALED_GROUPS, TILE_ROWS, VECTOR};

/// Bytes of one lane of a vector of codes.
const LANE: usize = 4;
/// Bytes of 16 half-precision scales.
const SCALES: usize = 32;

/// How one packed format lays out its groups, as far as packing is concerned.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupLayout {
    format: WeightFormat,
    /// Bits of a code; with 6 of them the higher two lie behind the others.
    code_bits: usize,
    /// Added to a code to make it unsigned.
    bias: i32,
    /// Bytes after the codes: scales, then minima.
    tail: usize,
    /// Groups of a block.
    groups: usize,
    /// Bytes before the groups of a block.
    header: usize,
    /// Lanes hold the even or the odd columns of a row.
    in_pairs: bool,
}

impl GroupLayout {
    /// None for formats without groups.
    pub fn of(format: WeightFormat, rounding: InputRounding) -> Option<GroupLayout> {
        let in_pairs = rounding == InputRounding::Bf16Chains;
        let (code_bits, bias, tail, groups, header) = match format {
            WeightFormat::Q4_0 => (4, 8, SCALES, 1, 0),
            WeightFormat::Q4_1 => (4, 0, 2 * SCALES, 1, 0),
            WeightFormat::Q8_0 => (8, 128, SCALES, 1, 0),
            WeightFormat::Q4K => (4, 0, 2 * TILE_ROWS, SCALED_GROUPS, 2 * SCALES),
            WeightFormat::Q6K => (if in_pairs { 8 } else { 6 }, 32, 2 * TILE_ROWS, SCALED_GROUPS, SCALES),
            _ if format.is_int4() => (4, 0, 0, format.block() / GROUP, SCALES + TILE_ROWS),
            _ => return None,
        };
        Some(GroupLayout { format, code_bits, bias, tail, groups, header, in_pairs })
    }

    fn code_bytes(self) -> usize {
        TILE_ROWS * GROUP * self.code_bits / 8
    }

    /// Of a group.
    fn bytes(self) -> usize {
        self.code_bytes() + self.tail
    }

    /// Of all groups of a tile.
    pub fn tile_bytes(self, columns: usize) -> usize {
        columns / GROUP / self.groups * (self.header + self.groups * self.bytes())
    }

    /// Where the header of a group's block begins, and where the group.
    fn places(self, group: usize) -> (usize, usize) {
        let header = group / self.groups * (self.header + self.groups * self.bytes());
        (header, header + self.header + group % self.groups * self.bytes())
    }

    /// The byte and the shift at which a row's code of one column lies; of 6 bits, the lower four.
    fn place(self, row: usize, column: usize) -> (usize, usize) {
        if self.in_pairs {
            let codes = 32 / self.code_bits;
            let (half, lane, pair) = (row / 8, row % 8 * 2 + column % 2, column / 2);
            let vector = pair / codes * 2 + half;
            let bit = pair % codes * self.code_bits;
            return (vector * VECTOR + lane * LANE + bit / 8, bit % 8);
        }
        match self.code_bits {
            8 => (column / 4 * VECTOR + row * LANE + column % 4, 0),
            _ => (column / 8 * VECTOR + row * LANE + column % 4, column / 4 % 2 * 4),
        }
    }

    /// Of the higher two of 6 bits.
    fn high_place(self, row: usize, column: usize) -> (usize, usize) {
        (GROUP / 8 * VECTOR + column / 16 * VECTOR + row * LANE + column % 4, column / 4 % 4 * 2)
    }

    /// Packs a group of a row.
    pub fn write(self, tile: &mut [u8], row: usize, group: usize, source: &[u8]) {
        let (header, start) = self.places(group);
        let tail = start + self.code_bytes();
        let mut put = |at: usize, value: f16| tile[at + row * 2..][..2].copy_from_slice(&value.to_le_bytes());
        if self.format.is_int4() {
            let codes = self.format.decode_block(source, group);
            put(header, f16::from_f32(codes.scale));
            let zero = source[group / self.groups * self.format.block_bytes() + 2];
            tile[header + SCALES + row] = zero.wrapping_neg();
            return self.write_codes(&mut tile[start..tail], row, &codes.codes);
        }
        if self.groups == 1 {
            let codes = self.format.decode_block(source, group);
            for (index, value) in [codes.scale, codes.minimum].into_iter().take(self.tail / SCALES).enumerate() {
                put(tail + index * SCALES, f16::from_f32(value));
            }
            return self.write_codes(&mut tile[start..tail], row, &codes.codes);
        }
        let codes = self.format.decode_scaled(source, group);
        put(header, codes.factor);
        let second = if self.format == WeightFormat::Q4K {
            put(header + SCALES, -codes.minimum_factor);
            codes.minimum
        } else {
            codes.scales[1] as u8
        };
        (tile[tail + row], tile[tail + TILE_ROWS + row]) = (codes.scales[0] as u8, second);
        self.write_codes(&mut tile[start..tail], row, &codes.codes.map(i16::from));
    }

    /// Codes go where [`GroupLayout::place`] says, a lane at a time.
    fn write_codes(self, group: &mut [u8], row: usize, codes: &[i16; GROUP]) {
        let code = |column: usize| u32::from((i32::from(codes[column]) + self.bias) as u8);
        let mut put = |vector: usize, lane: usize, bits: u32| {
            let at = vector * VECTOR + lane * LANE;
            group[at..at + LANE].copy_from_slice(&bits.to_le_bytes());
        };
        match (self.in_pairs, self.code_bits) {
            (true, bits) => {
                let count = 32 / bits;
                for (vectors, parity) in (0..GROUP / 2 / count).flat_map(|vectors| [(vectors, 0), (vectors, 1)]) {
                    let at = |index: usize| code(2 * (vectors * count + index) + parity) << (bits * index);
                    let bits = (0..count).fold(0, |bits, index| bits | at(index));
                    put(2 * vectors + row / 8, row % 8 * 2 + parity, bits);
                }
            }
            (false, 8) => {
                for vector in 0..GROUP / 4 {
                    put(vector, row, lane(|b| code(4 * vector + b)));
                }
            }
            (false, bits) => {
                for vector in 0..GROUP / 8 {
                    put(vector, row, lane(|b| code(8 * vector + b) & 15 | (code(8 * vector + 4 + b) & 15) << 4));
                }
                for half in (0..GROUP / 16).filter(|_| bits == 6) {
                    let pair = |b: usize, part: usize| (code(16 * half + 4 * part + b) >> 4) << (2 * part);
                    put(GROUP / 8 + half, row, lane(|b| pair(b, 0) | pair(b, 1) | pair(b, 2) | pair(b, 3)));
                }
            }
        }
    }

    /// The values of a group of a row.
    pub fn read(self, tile: &[u8], row: usize, group: usize) -> [f32; GROUP] {
        let (header, start) = self.places(group);
        let tail = start + self.code_bytes();
        let bits = |(byte, shift): (usize, usize), mask: i32| i32::from(tile[start + byte]) >> shift & mask;
        let code = |column: usize| {
            let code = match self.code_bits {
                6 => bits(self.place(row, column), 15) | bits(self.high_place(row, column), 3) << 4,
                bits_of => bits(self.place(row, column), (1 << bits_of) - 1),
            };
            (code - self.bias) as f32
        };
        let half = |at: usize| f16::from_le_bytes([tile[at + row * 2], tile[at + row * 2 + 1]]).to_f32();
        let byte = |index: usize| f32::from(tile[tail + index * TILE_ROWS + row] as i8);
        std::array::from_fn(|column| match self.format {
            WeightFormat::Q4K => half(header) * byte(0) * code(column) + half(header + SCALES) * byte(1),
            WeightFormat::Q6K => half(header) * (byte(column / 16) * code(column) + 0.0) + 0.0,
            format if format.is_int4() => {
                let zero = f32::from(tile[header + SCALES + row] as i8);
                half(header) * code(column) + half(header) * zero
            }
            _ if self.tail > SCALES => half(tail) * code(column) + half(tail + SCALES),
            _ => half(tail) * code(column) + 0.0,
        })
    }
}

/// Four bytes, the first one lowest.
#[inline(always)]
fn lane(byte: impl Fn(usize) -> u32) -> u32 {
    byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24
}
