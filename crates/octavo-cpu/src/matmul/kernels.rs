//! One tile of 16 outputs times 1 to 8 rows of activations, in each format.
//!
//! Invariant: an output's operations and their order depend on the format and the number of columns alone.
#![allow(clippy::needless_range_loop, reason = "`m` counts registers, and several arrays of them at once")]

use super::{Mode, TileJob, grouped::Grouped};
use crate::{
    activation::{BF16_RECORD, F32_RECORD, INT8_RECORD, Int8Record, ROW_BLOCK},
    pack::{GROUP, SCALED_GROUPS, TILE_ROWS},
    simd::{LANES, Simd, simd_shells},
};

/// Rows from which an integer tile is computed slower than memory delivers it, so that fetching into the first-level cache
/// pays. Dense tiles wait on one chain of additions from the first row on.
const PREFETCH_ROWS: usize = 3;
/// How far ahead of their use weights are fetched into the first-level cache, in bytes.
const PREFETCH_DISTANCE: usize = 4096;
/// How far ahead into the second-level cache: as far as a core has to look to keep memory busy.
pub(crate) const EARLY_DISTANCE: usize = 16384;

/// A packed format.
pub(super) trait Weights: 'static {
    /// The 16 outputs of a tile for each of `M` rows.
    ///
    /// # Safety
    /// `weights` is a tile and `activations` the first record of `M` rows of one block, both of `columns` columns.
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        weights: *const u8,
        activations: *const u8,
        columns: usize,
    ) -> [S::F; M];
}

/// Runs one job.
///
/// # Safety
/// As [`Weights::tile`]; `job.lanes` floats are writable at each of the `M` rows of the output.
#[inline(always)]
unsafe fn run<S: Simd, W: Weights, const M: usize>(simd: S, job: &TileJob) {
    // Wider than this instruction set's register tile: never called, not worth its code.
    if M > S::ROWS {
        unreachable!("{M} rows at once");
    }
    // SAFETY: the caller's.
    unsafe {
        let sums = W::tile::<S, M>(simd, job.weights, job.activations, job.columns);
        for (m, sum) in sums.into_iter().enumerate() {
            let to = job.out.add(m * job.stride);
            match (job.mode, job.lanes == LANES) {
                (Mode::Store, true) => simd.store(to, sum),
                (Mode::Store, false) => simd.store_first(to, job.lanes, sum),
                (Mode::Add, true) => simd.store(to, simd.add(simd.load(to), sum)),
                (Mode::Add, false) => {
                    simd.store_first(to, job.lanes, simd.add(simd.load_first(to, job.lanes), sum));
                }
            }
        }
    }
}

simd_shells! {
    /// The kernel for `M` rows at once.
    pub(super) fn select_tile[W: Weights, const M: usize][W, M] = run(job: &TileJob);
}

/// The field of the record of row `m`.
macro_rules! field {
    ($activations:expr, $m:expr, $field:ident $($call:tt)*) => {
        (*$activations.add($m * INT8_RECORD).cast::<Int8Record>()).$field $($call)*
    };
}

#[inline(always)]
pub(super) fn prefetch<S: Simd>(simd: S, weights: *const u8) {
    simd.prefetch(weights.wrapping_add(PREFETCH_DISTANCE));
    simd.prefetch_early(weights.wrapping_add(EARLY_DISTANCE));
}

#[inline(always)]
fn prefetch_for_rows<S: Simd, const M: usize>(simd: S, weights: *const u8) {
    if M >= PREFETCH_ROWS {
        simd.prefetch(weights.wrapping_add(PREFETCH_DISTANCE));
    }
    simd.prefetch_early(weights.wrapping_add(EARLY_DISTANCE));
}

/// Four vectors of nibbles against 32 activations of each row; exact.
///
/// # Safety
/// As [`Weights::tile`], for one group.
#[inline(always)]
unsafe fn dot_nibble_group<S: Simd, const M: usize>(
    simd: S,
    weights: *const u8,
    activations: *const u8,
    corrections: [S::I; M],
) -> [S::I; M] {
    // SAFETY: the caller's: a group is 256 bytes of codes, a record begins with 32 codes.
    unsafe {
        let mut sums = [simd.start_nibbles(corrections[0]); M];
        for m in 0..M {
            sums[m] = simd.start_nibbles(corrections[m]);
        }
        for i in 0..GROUP / 8 {
            prefetch_for_rows::<S, M>(simd, weights.add(i * 64));
            let bytes = simd.load_bytes(weights.add(i * 64));
            let (low, high) = (simd.low_nibbles(bytes), simd.high_nibbles(bytes));
            for m in 0..M {
                let x = activations.add(m * INT8_RECORD + i * 8);
                sums[m] = simd.dot_nibbles(sums[m], low, simd.broadcast_bytes(x));
            }
            for m in 0..M {
                let x = activations.add(m * INT8_RECORD + i * 8 + 4);
                sums[m] = simd.dot_nibbles(sums[m], high, simd.broadcast_bytes(x));
            }
        }
        let mut out = corrections;
        for m in 0..M {
            out[m] = simd.finish_nibbles(sums[m], corrections[m]);
        }
        out
    }
}

/// Adds `scale * (activation scale * dot)`.
///
/// # Safety
/// As [`Weights::tile`], for one group.
#[inline(always)]
unsafe fn add_scaled<S: Simd, const M: usize>(
    simd: S,
    sums: &mut [S::F; M],
    dots: [S::I; M],
    scales: S::F,
    activations: *const u8,
) {
    // SAFETY: the caller's.
    unsafe {
        for m in 0..M {
            let scaled = simd.mul(simd.int_to_float(dots[m]), simd.splat(field!(activations, m, scale)));
            sums[m] = simd.fma(scaled, scales, sums[m]);
        }
    }
}

/// 4-bit codes with scale; the zero point is 8.
pub(super) struct Q4_0;
/// 4-bit codes with scale and minimum.
pub(super) struct Q4_1;
/// The same, with scales that have a scale.
pub(super) struct Q4K;
/// AWQ's and GPTQ's 4-bit codes, `GROUPS` times 32 of them with a scale and a zero point.
pub(super) struct Int4<const GROUPS: usize>;

/// A tile of 4-bit codes.
///
/// # Safety
/// As [`Weights::tile`].
#[inline(always)]
unsafe fn nibble_tile<S: Simd, W: Grouped, const M: usize>(
    simd: S,
    mut weights: *const u8,
    mut activations: *const u8,
    columns: usize,
) -> [S::F; M] {
    let mut sums = [simd.splat(0.0); M];
    for _ in 0..columns / GROUP / W::GROUPS {
        let header = weights;
        weights = weights.wrapping_add(W::HEADER);
        for _ in 0..W::GROUPS {
            // SAFETY: the caller's: a group is codes, scales and minima.
            unsafe {
                let mut corrections = [simd.splat_int(0); M];
                for m in 0..M {
                    if W::ZERO != 0 {
                        corrections[m] = simd.splat_int(field!(activations, m, nibble_correction));
                    }
                }
                let dots = dot_nibble_group::<S, M>(simd, weights, activations, corrections);
                prefetch_for_rows::<S, M>(simd, weights.add(W::CODE_BYTES));
                let (scales, minima) = W::scales(simd, header, weights, 0);
                add_scaled(simd, &mut sums, dots, scales, activations);
                for m in 0..M {
                    if W::HAS_MINIMA {
                        sums[m] = simd.fma(minima, simd.splat(field!(activations, m, scaled_sum)), sums[m]);
                    }
                }
                weights = weights.add(W::BYTES);
                activations = activations.wrapping_add(ROW_BLOCK * INT8_RECORD);
            }
        }
    }
    sums
}

macro_rules! nibble_tiles {
    ($($format:ty),*) => { $(
        impl Weights for $format {
            #[inline(always)]
            unsafe fn tile<S: Simd, const M: usize>(
                simd: S,
                weights: *const u8,
                activations: *const u8,
                columns: usize,
            ) -> [S::F; M] {
                // SAFETY: the caller's.
                unsafe { nibble_tile::<S, $format, M>(simd, weights, activations, columns) }
            }
        }
    )* };
}

nibble_tiles!(Q4_0, Q4_1, Q4K, Int4<1>, Int4<2>, Int4<4>);

/// 6-bit codes with scales that have a scale; the zero point is 32.
pub(super) struct Q6K;

impl Q6K {
    /// Of a group of a tile: low and high bits, scales.
    const PACKED: usize = GROUP * TILE_ROWS * 6 / 8 + 2 * TILE_ROWS;

    /// The products of 16 columns with each row, without the zero point; exact.
    ///
    /// # Safety
    /// As [`Weights::tile`]; the lower bits are two vectors.
    #[inline(always)]
    unsafe fn dot_half<S: Simd, const M: usize>(
        simd: S,
        low: *const u8,
        high: *const u8,
        activations: *const u8,
        mut dots: [S::I; M],
    ) -> [S::I; M] {
        // SAFETY: the caller's.
        unsafe {
            let high = simd.load_bytes(high);
            let mask = simd.splat_int(0x3030_3030);
            let high = [
                simd.and(simd.shift_up(high, 4), mask),
                simd.and(simd.shift_up(high, 2), mask),
                simd.and(high, mask),
                simd.and(simd.shift_down(high, 2), mask),
            ];
            for i in 0..2 {
                prefetch_for_rows::<S, M>(simd, low.add(i * 64));
                let bytes = simd.load_bytes(low.add(i * 64));
                let codes = [
                    simd.add_int(simd.low_nibbles(bytes), high[2 * i]),
                    simd.add_int(simd.high_nibbles(bytes), high[2 * i + 1]),
                ];
                for (part, codes) in codes.into_iter().enumerate() {
                    for m in 0..M {
                        let x = simd.broadcast_bytes(activations.add(m * INT8_RECORD + i * 8 + part * 4));
                        dots[m] = simd.dot_bytes(dots[m], codes, x);
                    }
                }
            }
        }
        dots
    }
}

impl Weights for Q6K {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        mut weights: *const u8,
        mut activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        let mut sums = [simd.splat(0.0); M];
        for _ in 0..columns / GROUP / SCALED_GROUPS {
            let header = weights;
            weights = weights.wrapping_add(2 * TILE_ROWS);
            for _ in 0..SCALED_GROUPS {
                // SAFETY: the caller's: a group is four vectors of low bits, two of high bits, and two rows of scales.
                unsafe {
                    let factors = simd.load_f16(header.cast());
                    let (high, tail) = (weights.add(256), weights.add(384).cast::<i8>());
                    let scales =
                        [simd.int_to_float(simd.load_i8(tail)), simd.int_to_float(simd.load_i8(tail.add(TILE_ROWS)))];
                    prefetch_for_rows::<S, M>(simd, high);
                    prefetch_for_rows::<S, M>(simd, high.add(64));
                    let (mut first, mut second) = ([simd.splat_int(0); M], [simd.splat_int(0); M]);
                    for m in 0..M {
                        let record = &*activations.add(m * INT8_RECORD).cast::<Int8Record>();
                        first[m] = simd.splat_int(record.half_correction);
                        second[m] = simd.splat_int(record.second_half_correction());
                    }
                    first = Q6K::dot_half::<S, M>(simd, weights, high, activations, first);
                    second = Q6K::dot_half::<S, M>(simd, weights.add(128), high.add(64), activations.add(16), second);
                    for m in 0..M {
                        // Integers below 2^24: nothing is rounded before the scale of the activations comes in.
                        let dot = simd.mul(simd.int_to_float(first[m]), scales[0]);
                        let dot = simd.fma(simd.int_to_float(second[m]), scales[1], dot);
                        let scaled = simd.mul(dot, simd.splat(field!(activations, m, scale)));
                        sums[m] = simd.fma(scaled, factors, sums[m]);
                    }
                    weights = weights.add(Q6K::PACKED);
                    activations = activations.wrapping_add(ROW_BLOCK * INT8_RECORD);
                }
            }
        }
        sums
    }
}

/// 8-bit codes with scale.
pub(super) struct Q8_0;

impl Weights for Q8_0 {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        mut weights: *const u8,
        mut activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        let mut sums = [simd.splat(0.0); M];
        for _ in 0..columns / GROUP {
            // SAFETY: the caller's: a group is codes and 16 scales.
            unsafe {
                let mut dots = [simd.splat_int(0); M];
                for m in 0..M {
                    dots[m] = simd.start_biased(simd.splat_int(field!(activations, m, biased_correction())));
                }
                for i in 0..GROUP / 4 {
                    prefetch_for_rows::<S, M>(simd, weights.add(i * 64));
                    let codes = simd.load_bytes(weights.add(i * 64));
                    for m in 0..M {
                        let x = simd.broadcast_bytes(activations.add(m * INT8_RECORD + i * 4));
                        dots[m] = simd.dot_biased(dots[m], codes, x);
                    }
                }
                add_scaled(simd, &mut sums, dots, Self::scales(simd, weights, weights, 0).0, activations);
                weights = weights.add(Self::BYTES);
                activations = activations.wrapping_add(ROW_BLOCK * INT8_RECORD);
            }
        }
        sums
    }
}

/// Bfloat16 in pairs of columns.
pub(super) struct Bf16;

impl Weights for Bf16 {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        weights: *const u8,
        activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        let mut sums = [simd.splat(0.0); M];
        let pairs_in_record = GROUP / 2;
        for pair in 0..columns.div_ceil(2) {
            // SAFETY: the caller's: a pair of columns is 64 bytes; a record has 16 pairs.
            unsafe {
                prefetch(simd, weights.add(pair * 64));
                let codes = simd.load_bytes(weights.add(pair * 64));
                let x = activations.add(pair / pairs_in_record * ROW_BLOCK * BF16_RECORD + pair % pairs_in_record * 4);
                for m in 0..M {
                    sums[m] = simd.dot_bf16(sums[m], codes, simd.broadcast_bytes(x.add(m * BF16_RECORD)));
                }
            }
        }
        sums
    }
}

/// Half precision.
pub(super) struct F16;
/// Single precision.
pub(super) struct F32;

/// One column after another; `SIZE` is the size of a weight.
///
/// # Safety
/// As [`Weights::tile`].
#[inline(always)]
unsafe fn float_tile<S: Simd, const M: usize, const SIZE: usize>(
    simd: S,
    weights: *const u8,
    activations: *const u8,
    columns: usize,
) -> [S::F; M] {
    let mut sums = [simd.splat(0.0); M];
    for column in 0..columns {
        // SAFETY: the caller's: a column is 16 weights; a record has 32 columns.
        unsafe {
            let weights = weights.add(column * TILE_ROWS * SIZE);
            prefetch(simd, weights);
            let weights = if SIZE == 2 { simd.load_f16(weights.cast()) } else { simd.load(weights.cast()) };
            let x = activations.add(column / GROUP * ROW_BLOCK * F32_RECORD + column % GROUP * 4);
            for m in 0..M {
                sums[m] = simd.fma(weights, simd.splat(x.add(m * F32_RECORD).cast::<f32>().read()), sums[m]);
            }
        }
    }
    sums
}

impl Weights for F16 {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        weights: *const u8,
        activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        // SAFETY: the caller's.
        unsafe { float_tile::<S, M, 2>(simd, weights, activations, columns) }
    }
}

impl Weights for F32 {
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        simd: S,
        weights: *const u8,
        activations: *const u8,
        columns: usize,
    ) -> [S::F; M] {
        // SAFETY: the caller's.
        unsafe { float_tile::<S, M, 4>(simd, weights, activations, columns) }
    }
}
