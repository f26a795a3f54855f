//! Attention on vector registers over bfloat16: every instruction set, up to 8 rows at once.

use std::ops::Range;

use super::{
    chunk::{
        ChunkTask, GROUP, Group, Rows, SCORED_DIMENSIONS, SUB_BLOCKS, seen_by_any, visible_in_group,
        visible_in_sub_block,
    },
    merge::state_len,
};
use crate::{
    kv::SUB_BLOCK,
    simd::{LANES, Simd, simd_shells},
};

/// Rows of the largest tile of vector kernels.
pub(super) const VECTOR_TILE: usize = 8;

simd_shells! {
    /// Attends `R` rows to the positions of one chunk; their queries are `[head_size / 2][R][2]`.
    pub fn chunk_kernel[const R: usize][R] = attend_chunk(task: &ChunkTask<'_>);
}

/// The pairs of accumulators that a kernel may keep in registers at once.
pub(super) const fn accumulators<S: Simd>() -> usize {
    // The instruction sets with 32 registers of 16 lanes take 8 rows; the others have 16 half registers.
    if S::ROWS >= 8 { 12 } else { 3 }
}

/// # Safety
/// The task's pointers are as [`ChunkTask`] says and used by no one else; the visible positions lie in one chunk, have
/// entries in the table, and nobody writes their slots.
#[inline(always)]
unsafe fn attend_chunk<S: Simd, const R: usize>(simd: S, task: &ChunkTask<'_>) {
    let head_size = task.layer.head_size();
    let mut rows = Rows::new(simd);
    let seen = seen_by_any(&task.visible[..R]);
    // SAFETY: by the contract.
    unsafe {
        std::ptr::write_bytes(task.states, 0, R * state_len(head_size));
        let mut start = seen.start / GROUP * GROUP;
        let mut next = task.sub_blocks(start, &seen);
        while start < seen.end {
            let sub_blocks = std::mem::replace(&mut next, task.sub_blocks_after(start, &seen));
            let group = Group { sub_blocks, next, visible: visible_in_group(&task.visible, start) };
            scores::<S, R>(simd, task, &group, &mut rows);
            let changes = rows.softmax::<false>(simd, R, &group.visible);
            values::<S, R>(simd, task, &group, &rows);
            Rows::add_sums(simd, task, R, &changes);
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
unsafe fn scores<S: Simd, const R: usize>(simd: S, task: &ChunkTask<'_>, group: &Group, rows: &mut Rows<S>) {
    let at_once = const { accumulators::<S>() / R };
    let whole = group.sub_blocks.iter().all(|pointer| !pointer.is_null());
    // SAFETY: by the contract.
    unsafe {
        if whole && at_once >= 4 {
            scores_of::<S, R, 4>(simd, task, group, 0, rows);
        } else if whole && at_once >= 2 {
            scores_of::<S, R, 2>(simd, task, group, 0, rows);
            scores_of::<S, R, 2>(simd, task, group, 2, rows);
        } else {
            for (index, pointer) in group.sub_blocks.iter().enumerate() {
                if !pointer.is_null() {
                    scores_of::<S, R, 1>(simd, task, group, index, rows);
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
    rows: &mut Rows<S>,
) {
    let head_size = task.layer.head_size();
    let mut scores = [[simd.splat(0.0); N]; R];
    for start in (0..head_size / 2).step_by(SCORED_DIMENSIONS / 2) {
        let (mut even, mut odd) = ([[simd.splat(0.0); N]; R], [[simd.splat(0.0); N]; R]);
        for pair in start..(start + SCORED_DIMENSIONS / 2).min(head_size / 2) {
            let mut keys = [(simd.splat(0.0), simd.splat(0.0)); N];
            for (index, keys) in keys.iter_mut().enumerate() {
                // SAFETY: keys are [head_size / 2][16][2]; the values behind them are as long.
                unsafe {
                    let from = group.sub_blocks[first + index].add(pair * 2 * SUB_BLOCK);
                    *keys = simd.split_bf16(simd.load_bytes(from.cast()));
                    simd.prefetch(from.add(SUB_BLOCK * head_size).cast());
                }
            }
            for row in 0..R {
                // SAFETY: queries are [head_size / 2][R][2].
                let query = unsafe { task.queries.add((pair * R + row) * 2).cast::<[f32; 2]>().read() };
                let query = (simd.splat(query[0]), simd.splat(query[1]));
                for index in 0..N {
                    even[row][index] = simd.fma(keys[index].0, query.0, even[row][index]);
                    odd[row][index] = simd.fma(keys[index].1, query.1, odd[row][index]);
                }
            }
        }
        for row in 0..R {
            for index in 0..N {
                scores[row][index] = simd.add(scores[row][index], simd.add(even[row][index], odd[row][index]));
            }
        }
    }
    for (scores, row) in scores.into_iter().zip(&mut rows.scores) {
        for (index, scores) in scores.into_iter().enumerate() {
            // SAFETY: a score row has 4 sub-blocks of 16 lanes.
            unsafe { simd.store(row.as_mut_ptr().add((first + index) * SUB_BLOCK), scores) };
        }
    }
}

/// The group's values, weighted by the probabilities, as the rows' sums.
///
/// A sub-block that every row sees whole is done for all rows at once, any other for one row after another.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn values<S: Simd, const R: usize>(simd: S, task: &ChunkTask<'_>, group: &Group, rows: &Rows<S>) {
    let head_size = task.layer.head_size();
    let at_once = const { accumulators::<S>() / R };
    // SAFETY: by the contract.
    unsafe {
        std::ptr::write_bytes(task.sums, 0, R * head_size);
        let all_see_all = group.visible[..R].iter().all(|visible| visible.len() == GROUP);
        for index in 0..SUB_BLOCKS {
            let visible = |row: usize| visible_in_sub_block(&group.visible[row], index);
            if !all_see_all && (0..R).any(|row| visible(row).len() < SUB_BLOCK) {
                for row in 0..R {
                    row_values(simd, task, group, rows, index, row, visible(row));
                }
                continue;
            }
            let mut at = 0;
            while at_once >= 4 && at + 4 * LANES <= head_size {
                shared_values::<S, R, 4>(simd, task, group, rows, index, at);
                at += 4 * LANES;
            }
            while at_once >= 2 && at + 2 * LANES <= head_size {
                shared_values::<S, R, 2>(simd, task, group, rows, index, at);
                at += 2 * LANES;
            }
            while at < head_size {
                shared_values::<S, R, 1>(simd, task, group, rows, index, at);
                at += LANES;
            }
        }
    }
}

/// Where the values of pair `pair` of a sub-block are, `[head_size][2]`.
///
/// # Safety
/// The sub-block is there.
#[inline(always)]
unsafe fn pair_values(task: &ChunkTask<'_>, group: &Group, index: usize, pair: usize) -> *const u16 {
    // SAFETY: by the contract; the values lie behind the keys.
    unsafe { group.sub_blocks[index].add((SUB_BLOCK + 2 * pair) * task.layer.head_size()) }
}

/// Adds a sub-block to `N` vectors of every row's sums, from dimension `at` on.
///
/// # Safety
/// That of [`attend_chunk`]; every row sees the sub-block whole.
#[inline(always)]
unsafe fn shared_values<S: Simd, const R: usize, const N: usize>(
    simd: S,
    task: &ChunkTask<'_>,
    group: &Group,
    rows: &Rows<S>,
    index: usize,
    at: usize,
) {
    let head_size = task.layer.head_size();
    let (mut even, mut odd) = ([[simd.splat(0.0); N]; R], [[simd.splat(0.0); N]; R]);
    // SAFETY: by the contract.
    unsafe {
        for pair in 0..SUB_BLOCK / 2 {
            if at == 0 {
                prefetch_next_keys(simd, group, head_size, index * SUB_BLOCK / 2 + pair);
            }
            let from = pair_values(task, group, index, pair).add(2 * at);
            let mut values = [(simd.splat(0.0), simd.splat(0.0)); N];
            for (vector, values) in values.iter_mut().enumerate() {
                *values = simd.split_bf16(simd.load_bytes(from.add(vector * 2 * LANES).cast()));
            }
            for row in 0..R {
                let weights = rows.scores[row].as_ptr().add(index * SUB_BLOCK + 2 * pair);
                let weights = (simd.splat(*weights), simd.splat(*weights.add(1)));
                for vector in 0..N {
                    even[row][vector] = simd.fma(values[vector].0, weights.0, even[row][vector]);
                    odd[row][vector] = simd.fma(values[vector].1, weights.1, odd[row][vector]);
                }
            }
        }
        for row in 0..R {
            for vector in 0..N {
                let sum = task.sums.add(row * head_size + at + vector * LANES);
                simd.store(sum, simd.add(simd.load(sum), simd.add(even[row][vector], odd[row][vector])));
            }
        }
    }
}

/// Fetches a 32nd of the next group's keys, so that the 32 pairs of this one fetch all.
#[inline(always)]
fn prefetch_next_keys<S: Simd>(simd: S, group: &Group, head_size: usize, pair: usize) {
    for line in (pair..head_size / 2).step_by(GROUP / 2) {
        for keys in group.next {
            simd.prefetch(keys.wrapping_add(line * 2 * SUB_BLOCK).cast());
        }
    }
}

/// Adds what one row sees of a sub-block to its sums.
///
/// # Safety
/// That of [`attend_chunk`]; the row sees the positions `visible`, relative to the sub-block.
#[inline(always)]
unsafe fn row_values<S: Simd>(
    simd: S,
    task: &ChunkTask<'_>,
    group: &Group,
    rows: &Rows<S>,
    index: usize,
    row: usize,
    visible: Range<usize>,
) {
    if visible.is_empty() {
        return;
    }
    let head_size = task.layer.head_size();
    for at in (0..head_size).step_by(LANES) {
        // SAFETY: by the contract.
        unsafe {
            let (mut even, mut odd) = (simd.splat(0.0), simd.splat(0.0));
            for pair in visible.start / 2..visible.end.div_ceil(2) {
                let from = pair_values(task, group, index, pair).add(2 * at);
                let values = simd.split_bf16(simd.load_bytes(from.cast()));
                let weights = rows.scores[row].as_ptr().add(index * SUB_BLOCK + 2 * pair);
                if visible.contains(&(2 * pair)) {
                    even = simd.fma(values.0, simd.splat(*weights), even);
                }
                if visible.contains(&(2 * pair + 1)) {
                    odd = simd.fma(values.1, simd.splat(*weights.add(1)), odd);
                }
            }
            let sum = task.sums.add(row * head_size + at);
            simd.store(sum, simd.add(simd.load(sum), simd.add(even, odd)));
        }
    }
}
