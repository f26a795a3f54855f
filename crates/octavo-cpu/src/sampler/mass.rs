//! Sums of masses, with the bits of [`octavo_backend::sampling::MassSum`].

use octavo_backend::sampling::{MASS_BLOCK, MassSum, mass_units};

use super::{ScaledRow, candidates::token_of, scan::BLOCK};
use crate::simd::{LANES, Simd, exp_from, exp_up_to_88, simd_shells};

simd_shells! {
    /// The mass of all tokens whose scaled logit is at least `least`.
    pub(super) fn mass_kernel[][] = mass(row: &ScaledRow<'_>, least: f32) -> f64;
    /// The mass of some tokens, ascending.
    pub(super) fn mass_among_kernel[][] = mass_among(row: &ScaledRow<'_>, keys: &[u64]) -> f64;
    /// The mass of some tokens, in any order, in whole units.
    pub(super) fn units_kernel[][] = units_among(row: &ScaledRow<'_>, keys: &[u64]) -> u64;
}

#[inline(always)]
unsafe fn mass<S: Simd>(simd: S, row: &ScaledRow<'_>, least: f32) -> f64 {
    let least = simd.splat(least.max(-87.0));
    let mut total = 0.0;
    for start in (0..row.logits.len()).step_by(MASS_BLOCK) {
        let mut lanes = simd.splat(0.0);
        for at in (start..row.logits.len().min(start + MASS_BLOCK)).step_by(BLOCK) {
            // SAFETY: the instruction set is on.
            for scaled in unsafe { row.scaled_block(simd, at) } {
                lanes = simd.add(lanes, exp_from(simd, scaled, least));
            }
        }
        total += f64::from(simd.fold(lanes));
    }
    total
}

/// The masses of up to 16 candidates.
///
/// # Safety
/// The instruction set is on.
#[inline(always)]
unsafe fn masses<S: Simd>(simd: S, row: &ScaledRow<'_>, keys: &[u64]) -> [f32; LANES] {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for (lane, &key) in lanes.iter_mut().zip(keys) {
        *lane = row.logits[token_of(key) as usize];
    }
    // SAFETY: 16 floats.
    unsafe {
        let scaled = row.scaled(simd, simd.load(lanes.as_ptr()));
        simd.store(lanes.as_mut_ptr(), exp_up_to_88(simd, scaled));
    }
    lanes
}

#[inline(always)]
unsafe fn mass_among<S: Simd>(simd: S, row: &ScaledRow<'_>, keys: &[u64]) -> f64 {
    let mut sum = MassSum::default();
    for keys in keys.chunks(LANES) {
        // SAFETY: the instruction set is on.
        let masses = unsafe { masses(simd, row, keys) };
        keys.iter().zip(masses).for_each(|(&key, mass)| sum.add(token_of(key) as usize, mass));
    }
    sum.total()
}

#[inline(always)]
unsafe fn units_among<S: Simd>(simd: S, row: &ScaledRow<'_>, keys: &[u64]) -> u64 {
    let mut units = 0;
    for keys in keys.chunks(LANES) {
        // SAFETY: the instruction set is on. Places without a key weigh nothing.
        units += unsafe { masses(simd, row, keys) }.into_iter().map(mass_units).sum::<u64>();
    }
    units
}
