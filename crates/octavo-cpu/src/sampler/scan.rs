//! One look at every logit of a row: the largest, masks, ranks, and what lies above a threshold.
//!
//! Rows are read in blocks of 64; what is missing of the last block counts as negative infinity.

use super::{ScaledRow, candidates::key};
use crate::simd::{LANES, Simd, first_lanes, simd_shells};

/// Logits that are looked at together.
pub(super) const BLOCK: usize = 64;

/// Logits whose largest is found where they are computed, and within which the first largest of a row is found again.
pub const SPAN: usize = 256;

/// The largest logit of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Largest {
    /// No logit is NaN or positive infinity.
    pub sound: bool,
    /// Negative infinity if all are.
    pub value: f32,
    /// The first that has it.
    pub token: u32,
}

simd_shells! {
    /// The largest of a span of logits; NaN if one is NaN or positive infinity.
    pub(super) fn span_maximum_kernel[][] = span_maximum(logits: &[f32]) -> f32;
    /// The largest logit, by way of the largest of each [`SPAN`] if these are known, else (none is given) of all logits.
    pub(super) fn find_largest[][] = largest(logits: &[f32], maxima: &[f32]) -> Largest;
    /// Makes the tokens whose bits are not set impossible.
    pub(super) fn keep_only_kernel[][] = keep_only(logits: &mut [f32], words: &[u32]);
    /// How many logits are larger than a value.
    pub(super) fn count_above_kernel[][] = count_above(logits: &[f32], value: f32) -> u32;
    /// The largest of each lane over groups of `spacing` logits, a multiple of 64; gives their number.
    pub(super) fn group_maxima_kernel[][] = group_maxima(logits: &[f32], spacing: usize, out: &mut [f32]) -> usize;
    /// The keys of all tokens whose scaled logit is at least `least`, ascending by token; gives their number.
    pub(super) fn gather_kernel[][] = gather(row: &ScaledRow<'_>, least: f32, out: &mut [u64]) -> usize;
}

/// The 16 logits from `at` on.
///
/// # Safety
/// The instruction set is on.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(simd: S, logits: &[f32], at: usize) -> S::F {
    let left = logits.len().saturating_sub(at);
    // SAFETY: no more is read than is left.
    unsafe {
        if left >= LANES {
            simd.load(logits.as_ptr().add(at))
        } else {
            let some = simd.load_first(logits.as_ptr().wrapping_add(at), left);
            simd.select(first_lanes(left), some, simd.splat(f32::NEG_INFINITY))
        }
    }
}

/// The block of 64 logits from `at` on.
///
/// # Safety
/// The instruction set is on.
#[inline(always)]
pub(super) unsafe fn load_block<S: Simd>(simd: S, logits: &[f32], at: usize) -> [S::F; 4] {
    let mut block = [simd.splat(f32::NEG_INFINITY); 4];
    if at + BLOCK <= logits.len() {
        for (index, vector) in block.iter_mut().enumerate() {
            // SAFETY: the whole block is there.
            *vector = unsafe { simd.load(logits.as_ptr().add(at + index * LANES)) };
        }
    } else {
        for (index, vector) in block.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *vector = unsafe { load(simd, logits, at + index * LANES) };
        }
    }
    block
}

#[inline(always)]
pub(super) fn largest_of<S: Simd>(simd: S, block: [S::F; 4]) -> S::F {
    simd.max(simd.max(block[0], block[1]), simd.max(block[2], block[3]))
}

#[inline(always)]
unsafe fn span_maximum<S: Simd>(simd: S, logits: &[f32]) -> f32 {
    let (never, infinity) = (simd.splat(f32::NEG_INFINITY), simd.splat(f32::INFINITY));
    let mut sound = [simd.less(never, infinity); 4];
    let mut most = [never; 4];
    for at in (0..logits.len()).step_by(BLOCK) {
        // SAFETY: the instruction set is on.
        let block = unsafe { load_block(simd, logits, at) };
        for index in 0..4 {
            most[index] = simd.max(block[index], most[index]);
            sound[index] = simd.both(sound[index], simd.less(block[index], infinity));
        }
    }
    let sound = simd.both(simd.both(sound[0], sound[1]), simd.both(sound[2], sound[3]));
    if simd.mask_bits(sound) == u16::MAX { simd.fold_max(largest_of(simd, most)) } else { f32::NAN }
}

#[inline(always)]
unsafe fn largest<S: Simd>(simd: S, logits: &[f32], maxima: &[f32]) -> Largest {
    let (mut sound, mut best, mut best_span) = (true, f32::NEG_INFINITY, 0);
    for (index, span) in logits.chunks(SPAN).enumerate() {
        let most = match maxima.get(index) {
            Some(known) => *known,
            // SAFETY: the instruction set is on.
            None => unsafe { span_maximum(simd, span) },
        };
        sound &= !most.is_nan();
        if most > best {
            (best, best_span) = (most, index * SPAN);
        }
    }
    let mut token = best_span;
    for at in (best_span..logits.len()).step_by(LANES) {
        // SAFETY: the instruction set is on.
        let below = simd.mask_bits(simd.less(unsafe { load(simd, logits, at) }, simd.splat(best)));
        if below != u16::MAX {
            token = at + below.trailing_ones() as usize;
            break;
        }
    }
    Largest { sound, value: best, token: token as u32 }
}

#[inline(always)]
unsafe fn keep_only<S: Simd>(simd: S, logits: &mut [f32], words: &[u32]) {
    let never = simd.splat(f32::NEG_INFINITY);
    for (index, logits) in logits.chunks_mut(2 * LANES).enumerate() {
        let word = words.get(index).copied().unwrap_or(0);
        for (half, logits) in logits.chunks_mut(LANES).enumerate() {
            let mask = (word >> (half * LANES)) as u16;
            // SAFETY: no more is read and written than there is.
            unsafe {
                if logits.len() == LANES {
                    simd.store(logits.as_mut_ptr(), simd.select(mask, simd.load(logits.as_ptr()), never));
                } else {
                    let kept = simd.select(mask, simd.load_first(logits.as_ptr(), logits.len()), never);
                    simd.store_first(logits.as_mut_ptr(), logits.len(), kept);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn count_above<S: Simd>(simd: S, logits: &[f32], value: f32) -> u32 {
    let value = simd.splat(value);
    let mut count = 0;
    for at in (0..logits.len()).step_by(BLOCK) {
        // SAFETY: the instruction set is on.
        for vector in unsafe { load_block(simd, logits, at) } {
            count += simd.mask_bits(simd.less(value, vector)).count_ones();
        }
    }
    count
}

#[inline(always)]
unsafe fn group_maxima<S: Simd>(simd: S, logits: &[f32], spacing: usize, out: &mut [f32]) -> usize {
    let mut count = 0;
    for (start, out) in (0..logits.len()).step_by(spacing).zip(out.chunks_exact_mut(LANES)) {
        let mut most = [simd.splat(f32::NEG_INFINITY); 4];
        for at in (start..logits.len().min(start + spacing)).step_by(BLOCK) {
            // SAFETY: the instruction set is on.
            let block = unsafe { load_block(simd, logits, at) };
            for index in 0..4 {
                most[index] = simd.max(block[index], most[index]);
            }
        }
        // SAFETY: a group has 16 places.
        unsafe { simd.store(out.as_mut_ptr(), largest_of(simd, most)) };
        count += LANES;
    }
    count
}

#[inline(always)]
unsafe fn gather<S: Simd>(simd: S, row: &ScaledRow<'_>, least: f32, out: &mut [u64]) -> usize {
    let least = simd.splat(least);
    let mut count = 0;
    for start in (0..row.logits.len()).step_by(BLOCK) {
        // SAFETY: the instruction set is on.
        let block = unsafe { row.scaled_block(simd, start) };
        if simd.mask_bits(simd.less(largest_of(simd, block), least)) == u16::MAX {
            continue;
        }
        for (index, vector) in block.into_iter().enumerate() {
            let at = start + index * LANES;
            let there = first_lanes(row.logits.len().saturating_sub(at));
            let mut lanes = !simd.mask_bits(simd.less(vector, least)) & there;
            while lanes != 0 {
                let token = at + lanes.trailing_zeros() as usize;
                out[count] = key(row.logits[token], token as u32);
                count += 1;
                lanes &= lanes - 1;
            }
        }
    }
    count
}
