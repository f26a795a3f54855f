//! One tile of 16 outputs times 1 to 8 rows of 16-bit activations, weights in blocks of 128 columns.
//!
//! Both planes of an activation meet the same 8-bit codes; `high * 128 + low` of the two exact sums is the exact product.
#![allow(clippy::needless_range_loop, reason = "`m` counts registers, and several arrays of them at once")]

use std::marker::PhantomData;

use octavo_backend::{WeightFormat, block::BLOCK};

use super::kernels::{Q4_0, Q4_1, Q8_0, Weights, prefetch};
use crate::{
    activation::{INT16_RECORD, Int16Record, ROW_BLOCK},
    pack::{
        GROUP, TILE_ROWS,
        block::{BLOCK_SCALES, group_bytes},
    },
    simd::Simd,
};

/// Bytes of a group's nibbles.
const NIBBLES: usize = GROUP * TILE_ROWS / 2;

/// A format packed in blocks.
pub(super) struct Blocks<W>(PhantomData<W>);

/// What a format has in place of a group's scales.
pub(super) trait BlockFormat: 'static {
    const FORMAT: WeightFormat;
}

impl BlockFormat for Q4_0 {
    const FORMAT: WeightFormat = WeightFormat::Q4_0;
}

impl BlockFormat for Q4_1 {
    const FORMAT: WeightFormat = WeightFormat::Q4_1;
}

impl BlockFormat for Q8_0 {
    const FORMAT: WeightFormat = WeightFormat::Q8_0;
}

/// The field of the record of row `m`.
macro_rules! field {
    ($activations:expr, $m:expr, $field:ident) => {
        (*$activations.add($m * INT16_RECORD).cast::<Int16Record>()).$field
    };
}

/// The factors and offsets of a group of nibbles.
///
/// # Safety
/// `group` is one of `format`, a 4-bit one.
#[inline(always)]
pub(super) unsafe fn load_folds<S: Simd>(simd: S, format: WeightFormat, group: *const u8) -> (S::I, S::I) {
    // SAFETY: the caller's: factors follow the nibbles, offsets follow them.
    unsafe {
        let factors = simd.load_word_pairs(group.add(NIBBLES).cast());
        let offsets = match format {
            WeightFormat::Q4_0 => simd.zero_point_offsets(factors),
            _ => simd.load_word_pairs(group.add(NIBBLES + 2 * TILE_ROWS).cast()),
        };
        (factors, offsets)
    }
}

/// Adds the products of four columns to both sums of each row.
///
/// # Safety
/// `activations` are `M` records, `column + 4` is within them.
#[inline(always)]
unsafe fn dot_columns<S: Simd, const M: usize>(
    simd: S,
    codes: S::I,
    activations: *const u8,
    column: usize,
    high: &mut [S::I; M],
    low: &mut [S::I; M],
) {
    for m in 0..M {
        // SAFETY: the caller's: a record begins with both planes.
        unsafe {
            let x = activations.add(m * INT16_RECORD + column);
            high[m] = simd.dot_biased(high[m], codes, simd.broadcast_bytes(x));
            low[m] = simd.dot_biased(low[m], codes, simd.broadcast_bytes(x.add(BLOCK)));
        }
    }
}

impl<W: BlockFormat> Weights for Blocks<W> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        mut weights: *const u8,
        mut activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        let mut sums = [simd.splat(0.0); M];
        let bias = simd.splat_int(0x8000_8000_u32 as i32);
        let mut left = columns / GROUP;
        while left > 0 {
            let groups = left.min(BLOCK / GROUP);
            let (mut high, mut low) = ([simd.splat_int(0); M], [simd.splat_int(0); M]);
            // SAFETY: the caller's: a block is its groups and 16 scales, an activation's record one block.
            unsafe {
                for m in 0..M {
                    high[m] = simd.start_biased(simd.splat_int(field!(activations, m, high_correction)));
                    low[m] = simd.start_biased(simd.splat_int(field!(activations, m, low_correction)));
                }
                for group in 0..groups {
                    if W::FORMAT == WeightFormat::Q8_0 {
                        for i in 0..GROUP / 4 {
                            prefetch(simd, weights.add(i * 64));
                            let codes = simd.load_bytes(weights.add(i * 64));
                            dot_columns(simd, codes, activations, group * GROUP + i * 4, &mut high, &mut low);
                        }
                    } else {
                        prefetch(simd, weights.add(NIBBLES));
                        let (factors, offsets) = load_folds(simd, W::FORMAT, weights);
                        let offsets = simd.xor(offsets, bias);
                        for i in 0..GROUP / 8 {
                            prefetch(simd, weights.add(i * 64));
                            let words = simd.load_bytes(weights.add(i * 64));
                            let (first, second) = simd.fold_nibbles(words, factors, offsets);
                            let column = group * GROUP + i * 8;
                            dot_columns(simd, first, activations, column, &mut high, &mut low);
                            dot_columns(simd, second, activations, column + 4, &mut high, &mut low);
                        }
                    }
                    weights = weights.add(group_bytes(W::FORMAT));
                }
                let scales = simd.load(weights.cast());
                for m in 0..M {
                    let dot = simd.int_to_float(simd.join_planes(high[m], low[m]));
                    let scaled = simd.mul(dot, simd.splat(field!(activations, m, scale)));
                    sums[m] = simd.fma(scaled, scales, sums[m]);
                }
                weights = weights.add(BLOCK_SCALES);
            }
            activations = activations.wrapping_add(ROW_BLOCK * INT16_RECORD);
            left -= groups;
        }
        sums
    }
}
