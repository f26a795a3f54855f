//! One tile of 16 outputs times 1 to 8 rows of bfloat16, 32 columns in a chain of even and a chain of odd ones: what a
//! matrix unit does, on vector registers.
#![allow(clippy::needless_range_loop, reason = "`m` counts registers, and several arrays of them at once")]

use std::marker::PhantomData;

use super::{
    grouped::Grouped,
    kernels::{Bf16, Weights, prefetch},
};
use crate::{
    activation::{BF16_RECORD, ROW_BLOCK},
    pack::GROUP,
    simd::Simd,
};

/// A format whose products are chains.
pub(super) struct Chains<W>(PhantomData<W>);

/// What a code in the mantissa of a float is above its value.
const fn zero<W: Grouped>() -> f32 {
    W::ZERO as f32 + (1 << W::BITS) as f32
}

/// Factors and offsets of a group: `weight = float * factor + offset`, where `float` has the code in its mantissa.
pub(super) struct Line<S: Simd> {
    /// Of rows 0 to 7, each twice.
    pub low: (S::F, S::F),
    /// Of rows 8 to 15.
    pub high: (S::F, S::F),
}

impl<S: Simd> Line<S> {
    /// Those of column `column` of a group.
    ///
    /// # Safety
    /// They are a header and a group of the format.
    #[inline(always)]
    pub unsafe fn load<W: Grouped>(simd: S, header: *const u8, group: *const u8, column: usize) -> Line<S> {
        // SAFETY: the caller's.
        unsafe {
            let (factor, minimum) = W::scales(simd, header, group, column * W::LINES / GROUP);
            let offset = simd.fma(factor, simd.splat(-zero::<W>()), minimum);
            let (factors, offsets) = (simd.double_lanes(factor), simd.double_lanes(offset));
            Line { low: (factors.0, offsets.0), high: (factors.1, offsets.1) }
        }
    }
}

/// The float with code `index` of each lane in its mantissa.
#[inline(always)]
pub(super) fn code_floats<S: Simd, W: Grouped>(simd: S, words: S::I, index: usize) -> S::F {
    if W::BITS == 4 { simd.nibble_floats(words, index) } else { simd.byte_floats(words, index) }
}

impl<W: Grouped> Weights for Chains<W> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        weights: *const u8,
        mut activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        let codes = const { 32 / W::BITS };
        let mut sums = [simd.splat(0.0); M];
        for group in 0..columns / GROUP {
            let header = weights.wrapping_add(W::header(group));
            let group = weights.wrapping_add(W::start(group));
            let (mut low, mut high) = ([simd.splat(0.0); M], [simd.splat(0.0); M]);
            // SAFETY: the caller's: a group is 16 pairs of columns, then scales and minima.
            unsafe {
                let mut line = Line::load::<W>(simd, header, group, 0);
                for vector in 0..GROUP / 2 / codes {
                    if W::LINES > 1 && 2 * codes * vector == GROUP / 2 {
                        line = Line::load::<W>(simd, header, group, GROUP / 2);
                    }
                    let words = group.add(vector * 128);
                    prefetch(simd, words);
                    prefetch(simd, words.add(64));
                    let words = (simd.load_bytes(words), simd.load_bytes(words.add(64)));
                    for index in 0..codes {
                        let floats =
                            (code_floats::<S, W>(simd, words.0, index), code_floats::<S, W>(simd, words.1, index));
                        let lower = simd.round_bf16(simd.fma(floats.0, line.low.0, line.low.1));
                        let upper = simd.round_bf16(simd.fma(floats.1, line.high.0, line.high.1));
                        for m in 0..M {
                            let x = activations.add(m * BF16_RECORD + (vector * codes + index) * 4);
                            let x = simd.alternate_bf16(simd.broadcast_bytes(x));
                            low[m] = simd.fma(lower, x, low[m]);
                            high[m] = simd.fma(upper, x, high[m]);
                        }
                    }
                }
            }
            for m in 0..M {
                sums[m] = simd.add(sums[m], simd.add_pairs(low[m], high[m]));
            }
            activations = activations.wrapping_add(ROW_BLOCK * BF16_RECORD);
        }
        sums
    }
}

impl Weights for Chains<Bf16> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        weights: *const u8,
        activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        let mut sums = [simd.splat(0.0); M];
        for first in (0..columns.div_ceil(2)).step_by(GROUP / 2) {
            let activations = activations.wrapping_add(first / (GROUP / 2) * ROW_BLOCK * BF16_RECORD);
            let (mut even, mut odd) = ([simd.splat(0.0); M], [simd.splat(0.0); M]);
            for pair in first..columns.div_ceil(2).min(first + GROUP / 2) {
                // SAFETY: the caller's: a pair of columns is 64 bytes; a record has 16 pairs.
                unsafe {
                    prefetch(simd, weights.add(pair * 64));
                    let weights = simd.split_bf16(simd.load_bytes(weights.add(pair * 64)));
                    for m in 0..M {
                        let x = simd.broadcast_bytes(activations.add(m * BF16_RECORD + (pair - first) * 4));
                        let x = simd.split_bf16(x);
                        even[m] = simd.fma(weights.0, x.0, even[m]);
                        odd[m] = simd.fma(weights.1, x.1, odd[m]);
                    }
                }
            }
            for m in 0..M {
                sums[m] = simd.add(sums[m], simd.add(even[m], odd[m]));
            }
        }
        sums
    }
}
