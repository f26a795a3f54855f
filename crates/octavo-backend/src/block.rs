//! 128 columns of a matmul with one scale: activations in 16 bits against weights in 8.
//!
//! This is the arithmetic of [`crate::InputRounding::Int16Block128`]. A product of two blocks is one exact integer sum:
//! below 127 * 16319 * 128 it fits 32 bits, whatever the order of its terms.

use crate::{Codes, Matrix, WeightFormat, weights::GGUF_BLOCK};

/// Columns that share a scale.
pub const BLOCK: usize = 128;

/// Largest magnitude of an activation's code: `127 * 128 + 63`, so that it is `high * 128 + low` with `high` in
/// -127..=127 and `low` in -64..=63.
pub const LARGEST_CODE: i16 = 16_319;

/// Up to 128 activations: `value = scale * code`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivationBlock {
    /// Largest magnitude / 16319. Infinite or NaN when a value was, so that the fault is not lost.
    pub scale: f32,
    /// In -16319..=16319; 0 where there is no value.
    pub codes: [i16; BLOCK],
}

impl ActivationBlock {
    /// Rounds at most 128 values: `code = round_ties_even(value * (16319 / max|value|))`.
    ///
    /// # Panics
    /// If there are more values.
    pub fn round(values: &[f32]) -> ActivationBlock {
        let limit = f32::from(LARGEST_CODE);
        let largest = crate::numerics::largest_magnitude(values);
        let inverse = if largest > 0.0 && largest.is_finite() { limit / largest } else { 0.0 };
        let mut codes = [0; BLOCK];
        for (code, value) in codes[..values.len()].iter_mut().zip(values) {
            *code = (value * inverse).round_ties_even().clamp(-limit, limit) as i16;
        }
        ActivationBlock { scale: largest * (1.0 / limit), codes }
    }

    /// The codes in two signed bytes: `code = high * 128 + low`.
    pub fn planes(&self) -> ([i8; BLOCK], [i8; BLOCK]) {
        let high = self.codes.map(|code| ((code + 64) >> 7) as i8);
        let mut low = [0; BLOCK];
        for ((low, code), high) in low.iter_mut().zip(self.codes).zip(high) {
            *low = (code - i16::from(high) * 128) as i8;
        }
        (high, low)
    }
}

/// A row's weights of up to 128 columns: `value = scale * code`, up to the rounding of the codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightBlock {
    /// Largest magnitude / 127. Not finite when a weight is not.
    pub scale: f32,
    /// In -127..=127; 0 where there is no weight.
    pub codes: [i8; BLOCK],
}

/// How 4-bit codes of one group become 8-bit ones: `(nibble * factor + offset) >> 8`, all in 16 bits, wrapping.
///
/// The nibble is what the format stores, so that of Q4_0 is 8 higher than its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fold {
    /// `round(256 * scale of the group / scale of the block)`.
    pub factor: u16,
    /// `round(256 * minimum / scale of the block) + 128`; of Q4_0 `128 - 8 * factor`.
    pub offset: u16,
}

impl Fold {
    /// Of one group of a 4-bit format in a block with this scale.
    pub fn new(format: WeightFormat, codes: &Codes, scale: f32) -> Fold {
        if !(scale > 0.0 && scale.is_finite()) {
            return Fold { factor: 0, offset: 128 };
        }
        let fixed = |value: f32| (256.0 * f64::from(value) / f64::from(scale)).round_ties_even() as i64 as u16;
        let factor = fixed(codes.scale);
        let minimum =
            if format == WeightFormat::Q4_0 { factor.wrapping_mul(8).wrapping_neg() } else { fixed(codes.minimum) };
        Fold { factor, offset: minimum.wrapping_add(128) }
    }

    /// The 8-bit code of a nibble.
    pub fn apply(self, nibble: u8) -> i8 {
        (u16::from(nibble).wrapping_mul(self.factor).wrapping_add(self.offset) >> 8) as i8
    }
}

impl Matrix<'_> {
    /// The scale of block `block` of a row, and its groups of 32 columns; the format must be quantised.
    pub fn block_scale(&self, row: usize, block: usize) -> (f32, Vec<Codes>) {
        let groups = BLOCK / GGUF_BLOCK;
        let last = (self.columns / GGUF_BLOCK).min((block + 1) * groups);
        let groups: Vec<Codes> = (block * groups..last).map(|group| self.codes(row, group)).collect();
        let mut largest = 0u32;
        for group in &groups {
            for code in group.codes {
                let value = group.scale * f32::from(code) + group.minimum;
                // By the bits, so that NaN beats infinity and infinity beats all numbers.
                largest = largest.max(value.to_bits() & 0x7fff_ffff);
            }
        }
        (f32::from_bits(largest) * (1.0 / 127.0), groups)
    }

    /// Block `block` of a row: of 4-bit formats by [`Fold`], of Q8_0 `round_ties_even(value / scale)`.
    pub fn weight_block(&self, row: usize, block: usize) -> WeightBlock {
        let (scale, groups) = self.block_scale(row, block);
        let mut codes = [0; BLOCK];
        for (group, out) in groups.iter().zip(codes.as_chunks_mut::<GGUF_BLOCK>().0) {
            *out = match self.data.format {
                WeightFormat::Q8_0 => group.codes.map(|code| byte_code(code, group.scale, scale)),
                format => {
                    let zero = if format == WeightFormat::Q4_0 { 8 } else { 0 };
                    let fold = Fold::new(format, group, scale);
                    group.codes.map(|code| fold.apply((code + zero) as u8))
                }
            };
        }
        WeightBlock { scale, codes }
    }
}

/// The code in a block of an 8-bit weight.
pub fn byte_code(code: i8, group_scale: f32, block_scale: f32) -> i8 {
    if !(block_scale > 0.0 && block_scale.is_finite()) {
        return 0;
    }
    (group_scale * f32::from(code) / block_scale).round_ties_even() as i8
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use half::f16;

    use super::*;
    use crate::WeightData;

    /// Pseudorandom bytes with scales and minima of ordinary size.
    fn matrix(format: WeightFormat, columns: usize) -> Matrix<'static> {
        let (block, floats) = match format {
            WeightFormat::Q4_0 => (18, 1),
            WeightFormat::Q4_1 => (20, 2),
            _ => (34, 1),
        };
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        let rows = 40;
        let mut bytes: Vec<u8> = Vec::new();
        for _ in 0..rows * columns / GGUF_BLOCK {
            for _ in 0..floats {
                let value = (next() as i32 as f32 / 2f32.powi(30) - 1.0) * 0.05;
                bytes.extend(f16::from_f32(value).to_le_bytes());
            }
            bytes.extend((2 * floats..block).map(|_| next() as u8));
        }
        Matrix { rows, columns, data: WeightData { format, bytes: Cow::Owned(bytes) } }
    }

    #[test]
    fn a_weight_is_kept_within_half_a_code_and_a_little() {
        for format in [WeightFormat::Q4_0, WeightFormat::Q4_1, WeightFormat::Q8_0] {
            let matrix = matrix(format, 288);
            let mut weights = [0.0; 288];
            for row in 0..matrix.rows {
                matrix.dequantize_row(row, &mut weights);
                for (index, weights) in weights.chunks(BLOCK).enumerate() {
                    let block = matrix.weight_block(row, index);
                    let largest = weights.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
                    assert!((block.scale * 127.0 / largest - 1.0).abs() < 1e-6, "{format}");
                    assert!(block.codes.iter().any(|code| code.unsigned_abs() == 127), "{format}");
                    assert!(block.codes[weights.len()..].iter().all(|code| *code == 0));
                    for (weight, code) in weights.iter().zip(block.codes) {
                        let error = (weight - block.scale * f32::from(code)).abs() / block.scale;
                        assert!(
                            error <= 0.5 + 16.0 / 512.0 + 1e-3,
                            "{format}: {weight} as {code}, off by {error} codes"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_group_of_one_far_code_still_lands_within_its_block() {
        // The scale of the group is far above what its weights need: only code 8, and a minimum that takes it back.
        let mut bytes = [f16::from_f32(100.0).to_le_bytes(), f16::from_f32(-800.5).to_le_bytes()].concat();
        bytes.extend([0x88; 16]);
        let data = WeightData { format: WeightFormat::Q4_1, bytes: Cow::Owned(bytes) };
        let matrix = Matrix { rows: 1, columns: 32, data };
        let mut weights = [0.0; 32];
        matrix.dequantize_row(0, &mut weights);
        let block = matrix.weight_block(0, 0);
        assert_eq!(block.codes[..32], [if weights[0] < 0.0 { -127 } else { 127 }; 32], "{weights:?}");
    }

    #[test]
    fn weights_of_zero_and_faults_have_codes_of_zero() {
        for (scale, expected) in [(0.0, 0.0), (f32::INFINITY, f32::INFINITY), (f32::NAN, f32::NAN)] {
            let mut bytes = f16::from_f32(scale).to_le_bytes().to_vec();
            bytes.extend([0x11; 16]);
            let data = WeightData { format: WeightFormat::Q4_0, bytes: Cow::Owned(bytes) };
            let block = Matrix { rows: 1, columns: 32, data }.weight_block(0, 0);
            assert!(block.scale == expected || block.scale.is_nan() && expected.is_nan(), "{scale}");
            assert_eq!(block.codes, [0; BLOCK], "{scale}");
        }
    }

    #[test]
    fn activations_reach_the_largest_code_and_come_back_from_their_planes() {
        let values: Vec<f32> = (0..100).map(|i| (i as f32 - 60.0) * 0.37).collect();
        let block = ActivationBlock::round(&values);
        assert_eq!(block.codes[0], -LARGEST_CODE);
        assert_eq!(block.codes[100..], [0; 28]);
        let (high, low) = block.planes();
        for ((code, high), low) in block.codes.iter().zip(high).zip(low) {
            assert_eq!(i32::from(*code), i32::from(high) * 128 + i32::from(low));
            assert!(high > -128 && (-64..64).contains(&low));
        }
        for (value, code) in values.iter().zip(block.codes) {
            assert!((value - block.scale * f32::from(code)).abs() <= 0.501 * block.scale);
        }
    }

    #[test]
    fn a_fault_among_activations_stays_visible_in_the_scale() {
        assert_eq!(ActivationBlock::round(&[1.0, f32::INFINITY]).scale, f32::INFINITY);
        assert!(ActivationBlock::round(&[f32::INFINITY, f32::NAN]).scale.is_nan());
        assert_eq!(ActivationBlock::round(&[0.0; 9]), ActivationBlock { scale: 0.0, codes: [0; BLOCK] });
    }
}
