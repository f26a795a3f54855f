//! Attention on vector registers over 8-bit keys and values: every instruction set, up to 8 rows at once. Sums are exact, so
//! rows see only in their weights, which are zeros, what they do not see.
#![allow(clippy::needless_range_loop, reason = "`row` counts registers, and several arrays of them at once")]

use super::{
    chunk::{ChunkTask, GROUP, Group, Rows, SUB_BLOCKS, Scales, Weights, seen_by_any, visible_in_group},
    kernel::accumulators,
    merge::{STATE_HEADER, state_len},
};
use crate::{
    heads::PLANE_BITS,
    kv::SUB_BLOCK,
    simd::{LANES, Simd, simd_shells},
};

/// Codes in a lane.
const CODES: usize = 4;

simd_shells! {
    /// Attends `R` rows to the positions of one chunk; their queries are `[head_size / 4][R][2 planes][4]`.
    pub fn integer_chunk_kernel[const R: usize][R] = attend_chunk(task: &ChunkTask<'_>);
}

/// # Safety
/// As the kernel over bfloat16.
#[inline(always)]
unsafe fn attend_chunk<S: Simd, const R: usize>(simd: S, task: &ChunkTask<'_>) {
    let head_size = task.layer.head_size();
    let mut rows = Rows::new(simd);
    let mut weights = Weights::new();
    let seen = seen_by_any(&task.visible[..R]);
    // SAFETY: by the contract.
    unsafe {
        std::ptr::write_bytes(task.states, 0, R * state_len(head_size));
        let mut start = seen.start / GROUP * GROUP;
        let mut next = task.sub_blocks(start, &seen);
        while start < seen.end {
            let sub_blocks = std::mem::replace(&mut next, task.sub_blocks_after(start, &seen));
            let group = Group { sub_blocks, next, visible: visible_in_group(&task.visible, start) };
            let scales = Scales::of(simd, &sub_blocks, head_size);
            scores::<S, R>(simd, task, &group, &scales, &mut rows);
            let changes = rows.weigh(simd, R, &group.visible, &scales, &mut weights);
            values::<S, R>(simd, task, &group, &weights, &changes);
            start += GROUP;
        }
        rows.finish(simd, task, R);
    }
}

/// Scores of all sub-blocks that are there, as many at a time as the registers hold.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn scores<S: Simd, const R: usize>(
    simd: S,
    task: &ChunkTask<'_>,
    group: &Group,
    scales: &Scales,
    rows: &mut Rows<S>,
) {
    let at_once = const { accumulators::<S>() / R };
    let whole = group.sub_blocks.iter().all(|pointer| !pointer.is_null());
    // SAFETY: by the contract.
    unsafe {
        if whole && at_once >= 4 {
            scores_of::<S, R, 4>(simd, task, group, 0, scales, rows);
        } else if whole && at_once >= 2 {
            scores_of::<S, R, 2>(simd, task, group, 0, scales, rows);
            scores_of::<S, R, 2>(simd, task, group, 2, scales, rows);
        } else {
            for (index, pointer) in group.sub_blocks.iter().enumerate() {
                if !pointer.is_null() {
                    scores_of::<S, R, 1>(simd, task, group, index, scales, rows);
                }
            }
        }
    }
}

/// Scores of `N` sub-blocks from `first` on.
///
/// # Safety
/// That of [`attend_chunk`]; the sub-blocks are there.
#[inline(always)]
unsafe fn scores_of<S: Simd, const R: usize, const N: usize>(
    simd: S,
    task: &ChunkTask<'_>,
    group: &Group,
    first: usize,
    scales: &Scales,
    rows: &mut Rows<S>,
) {
    let queries: *const u8 = task.queries.cast();
    let (mut high, mut low) = ([[simd.splat_int(0); N]; R], [[simd.splat_int(0); N]; R]);
    for row in 0..R {
        // Keys have 128 added to them.
        low[row] = [simd.splat_int(-128 * task.query_scales[row][1] as i32); N];
    }
    for lane in 0..task.layer.head_size() / CODES {
        let mut keys = [simd.splat_int(0); N];
        for (index, keys) in keys.iter_mut().enumerate() {
            let at = lane * CODES * SUB_BLOCK;
            // SAFETY: keys are [head_size / 4][16][4].
            *keys = unsafe { simd.load_bytes(group.sub_blocks[first + index].cast::<u8>().add(at)) };
            simd.prefetch(group.next[first + index].cast::<u8>().wrapping_add(at));
        }
        for row in 0..R {
            // SAFETY: queries are [head_size / 4][R][2][4].
            let planes = unsafe {
                let planes = queries.add((lane * R + row) * 2 * CODES);
                (simd.broadcast_bytes(planes), simd.broadcast_bytes(planes.add(CODES)))
            };
            for index in 0..N {
                high[row][index] = simd.dot_bytes(high[row][index], keys[index], planes.0);
                low[row][index] = simd.dot_bytes(low[row][index], keys[index], planes.1);
            }
        }
    }
    for row in 0..R {
        let factor = simd.splat(task.query_scales[row][0]);
        for index in 0..N {
            let at = (first + index) * LANES;
            let dot = simd.add_int(simd.shift_up(high[row][index], PLANE_BITS), low[row][index]);
            // SAFETY: a row of scores and the scales have 4 sub-blocks of 16 lanes.
            unsafe {
                let score = simd.mul(simd.mul(simd.int_to_float(dot), factor), simd.load(scales.keys.as_ptr().add(at)));
                simd.store(rows.scores[row].as_mut_ptr().add(at), score);
            }
        }
    }
}

/// Adds the group's values, weighted, to the outputs of the rows that see any, after these were moved to the new largest
/// scores.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn values<S: Simd, const R: usize>(
    simd: S,
    task: &ChunkTask<'_>,
    group: &Group,
    weights: &Weights,
    changes: &[f32],
) {
    let head_size = task.layer.head_size();
    let at_once = const { accumulators::<S>() / R };
    let mut at = 0;
    // SAFETY: by the contract.
    unsafe {
        while at_once >= 4 && at + 4 * LANES <= head_size {
            values_from::<S, R, 4>(simd, task, group, weights, changes, at);
            at += 4 * LANES;
        }
        while at_once >= 2 && at + 2 * LANES <= head_size {
            values_from::<S, R, 2>(simd, task, group, weights, changes, at);
            at += 2 * LANES;
        }
        while at < head_size {
            values_from::<S, R, 1>(simd, task, group, weights, changes, at);
            at += LANES;
        }
    }
}

/// `N` vectors of the outputs, from dimension `at` on.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn values_from<S: Simd, const R: usize, const N: usize>(
    simd: S,
    task: &ChunkTask<'_>,
    group: &Group,
    weights: &Weights,
    changes: &[f32],
    at: usize,
) {
    let head_size = task.layer.head_size();
    let (mut high, mut low) = ([[simd.splat_int(0); N]; R], [[simd.splat_int(0); N]; R]);
    for index in 0..SUB_BLOCKS {
        if group.sub_blocks[index].is_null() {
            continue;
        }
        for lane in 0..SUB_BLOCK / CODES {
            let from = SUB_BLOCK * head_size + (lane * head_size + at) * CODES;
            let mut values = [simd.splat_int(0); N];
            for (vector, values) in values.iter_mut().enumerate() {
                let from = from + vector * LANES * CODES;
                // SAFETY: behind the keys are the values, [4][head_size][4].
                *values = unsafe { simd.load_bytes(group.sub_blocks[index].cast::<u8>().add(from)) };
                simd.prefetch(group.next[index].cast::<u8>().wrapping_add(from));
            }
            for row in 0..R {
                let place = index * SUB_BLOCK + lane * CODES;
                // SAFETY: 64 codes in a plane.
                let planes = unsafe {
                    let [high, low] = &weights.planes[row];
                    (simd.broadcast_bytes(high.as_ptr().add(place)), simd.broadcast_bytes(low.as_ptr().add(place)))
                };
                for vector in 0..N {
                    high[row][vector] = simd.dot_bytes(high[row][vector], planes.0, values[vector]);
                    low[row][vector] = simd.dot_bytes(low[row][vector], planes.1, values[vector]);
                }
            }
        }
    }
    for row in 0..R {
        if group.visible[row].is_empty() {
            continue;
        }
        let (change, factor) = (simd.splat(changes[row]), simd.splat(weights.factors[row]));
        for vector in 0..N {
            let dot = simd.add_int(simd.shift_up(high[row][vector], PLANE_BITS), low[row][vector]);
            // SAFETY: the states are those of `R` rows.
            unsafe {
                let output = task.states.add(row * state_len(head_size) + STATE_HEADER + at + vector * LANES);
                let sum = simd.mul(simd.int_to_float(dot), factor);
                simd.store(output, simd.fma(simd.load(output), change, sum));
            }
        }
    }
}
