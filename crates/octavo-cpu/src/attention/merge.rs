//! A row's state after some of its positions, and how the states of successive chunks become its output.

use crate::simd::{LANES, Simd, exp, simd_shells};

/// Floats before the output in a row's state: the largest score, the sum of probabilities, and space up to a cache line.
pub const STATE_HEADER: usize = 16;

/// Floats of one row's state: header and output, `[STATE_HEADER + head_size]`.
pub fn state_len(head_size: usize) -> usize {
    STATE_HEADER + head_size
}

simd_shells! {
    /// Merges the state of a later chunk into that of the earlier ones.
    pub fn merge_kernel[][] = merge(into: *mut f32, from: *const f32, head_size: usize);
    /// Divides a state's output by its sum and writes it out.
    pub fn finish_kernel[][] = finish(state: *const f32, output: *mut f32, head_size: usize);
}

/// # Safety
/// Both states are `[state_len(head_size)]`, do not overlap, and nobody else uses them.
#[inline(always)]
unsafe fn merge<S: Simd>(simd: S, into: *mut f32, from: *const f32, head_size: usize) {
    // SAFETY: by the contract.
    unsafe {
        // A chunk in which the row sees nothing. The sum of any other is at least 1: its largest score adds that.
        if *from.add(1) == 0.0 {
            return;
        }
        if *into.add(1) == 0.0 {
            std::ptr::copy_nonoverlapping(from, into, state_len(head_size));
            return;
        }
        let (before, after) = (*into, *from);
        let largest = if before > after { before } else { after };
        let old = exp(simd, simd.splat(before - largest));
        let new = exp(simd, simd.splat(after - largest));
        for at in (0..head_size).step_by(LANES) {
            let output = into.add(STATE_HEADER + at);
            let sum = simd.mul(simd.load(output), old);
            simd.store(output, simd.fma(simd.load(from.add(STATE_HEADER + at)), new, sum));
        }
        let mut weights = [0.0; LANES];
        let sum = simd.mul(simd.splat(*into.add(1)), old);
        simd.store(weights.as_mut_ptr(), simd.fma(simd.splat(*from.add(1)), new, sum));
        *into = largest;
        *into.add(1) = weights[0];
    }
}

/// # Safety
/// The state is `[state_len(head_size)]`, the output `[head_size]`.
#[inline(always)]
unsafe fn finish<S: Simd>(simd: S, state: *const f32, output: *mut f32, head_size: usize) {
    // SAFETY: by the contract.
    unsafe {
        let inverse = simd.splat(1.0 / *state.add(1));
        for at in (0..head_size).step_by(LANES) {
            simd.store(output.add(at), simd.mul(simd.load(state.add(STATE_HEADER + at)), inverse));
        }
    }
}
