//! The arithmetic of attention: one chunk of positions for a tile of rows.
//!
//! Invariant (row invariance): what is computed for a row, and in which order, follows from its own range of positions.
//! The other rows of its tile only share loads with it.

use std::ops::Range;

use octavo_backend::KvType;

use super::merge::{STATE_HEADER, state_len};
use crate::{
    kv::{KvLayer, SUB_BLOCK},
    simd::{LANES, Simd, exp, first_lanes, simd_shells},
};

/// Positions are cut into chunks at multiples of this; a chunk's partial result is complete before it is merged.
pub const CHUNK: usize = 256;

/// Positions of one softmax group: scored, then rescaled once.
pub(super) const GROUP: usize = 64;

/// Sub-blocks of a group.
const SUB_BLOCKS: usize = GROUP / SUB_BLOCK;

/// Rows of the largest tile.
pub const MAX_TILE: usize = 8;

/// What a chunk's kernel needs. Rows are query heads of one or several tokens that read the same KV head.
pub struct ChunkTask<'a> {
    /// The layer's cache.
    pub layer: KvLayer<'a>,
    /// The sequence's block table.
    pub table: &'a [u32],
    /// The KV head.
    pub head: usize,
    /// Queries, scaled and rounded, `[head_size / 2][rows][2]`.
    pub queries: *const u16,
    /// The positions that each row sees in this chunk; a range may be empty.
    pub visible: [Range<usize>; MAX_TILE],
    /// Where the rows' states go, `[rows][state_len]`.
    pub states: *mut f32,
    /// Space for one pair of values, `[head_size]`.
    pub half_pair: *mut u32,
    /// Space for one group of an 8-bit cache in bfloat16, `[4][2 * 16 * head_size]`.
    pub widened: *mut u16,
}

simd_shells! {
    /// Attends `R` rows to the positions of one chunk.
    pub fn chunk_kernel[const R: usize][R] = attend_chunk(task: &ChunkTask<'_>);
}

/// The accumulators that a kernel may keep in registers at once.
const fn accumulators<S: Simd>() -> usize {
    // The instruction sets with 32 registers of 16 lanes take 8 rows; the others have 16 half registers.
    if S::ROWS >= 8 { 16 } else { 4 }
}

/// One softmax group: 64 positions from `start`.
struct Group<'a, const R: usize> {
    /// The keys of each sub-block, the values behind them; null where no row sees anything.
    sub_blocks: [*const u16; SUB_BLOCKS],
    /// Where the next group's keys are, fetched ahead while this group's values are added.
    next: [*const u16; SUB_BLOCKS],
    /// What each row sees, relative to the group.
    visible: [Range<usize>; R],
    head_size: usize,
    task: &'a ChunkTask<'a>,
    /// Of the keys and of the values, when they are 8-bit codes.
    scales: Option<&'a Scales>,
}

/// The scales of a group's keys and of its values.
struct Scales {
    keys: [f32; GROUP],
    values: [f32; GROUP],
}

/// What one group's rows look like between scores and values.
struct Rows<const R: usize> {
    scores: [[f32; GROUP]; R],
    /// Probabilities against the largest score so far, as bfloat16.
    probabilities: [[u16; GROUP]; R],
}

/// # Safety
/// Queries, states and `half_pair` are as long as [`ChunkTask`] says and used by no one else; the visible positions lie in one
/// chunk, have entries in the table, and nobody writes their slots.
#[inline(always)]
unsafe fn attend_chunk<S: Simd, const R: usize>(simd: S, task: &ChunkTask<'_>) {
    let head_size = task.layer.head_size();
    let stride = state_len(head_size);
    let mut largest = [f32::NEG_INFINITY; R];
    let mut sums = [simd.splat(0.0); R];
    let mut rows = Rows { scores: [[0.0; GROUP]; R], probabilities: [[0; GROUP]; R] };
    let mut scales = Scales { keys: [0.0; GROUP], values: [0.0; GROUP] };
    let is_int8 = task.layer.kind() == KvType::Int8;
    let seen = seen_by_any(&task.visible[..R]);
    // SAFETY: by the contract.
    unsafe {
        std::ptr::write_bytes(task.states, 0, R * stride);
        let mut start = seen.start / GROUP * GROUP;
        let mut next = sub_blocks_at(task, start, &seen);
        while start < seen.end {
            let mut sub_blocks = std::mem::replace(&mut next, sub_blocks_at(task, start + GROUP, &seen));
            if is_int8 {
                widen(simd, task, &mut sub_blocks, &next, &mut scales);
            }
            let visible = visible_in_group(&task.visible, start);
            let scales = is_int8.then_some(&scales);
            let group = Group { sub_blocks, next, visible, head_size, task, scales };
            scores::<S, R>(simd, &group, &mut rows);
            let scales = softmax::<S, R>(simd, &group, &mut rows, &mut largest, &mut sums);
            for (row, scale) in scales[..R].iter().enumerate() {
                rescale(simd, task.states.add(row * stride + STATE_HEADER), *scale, head_size);
            }
            values::<S, R>(simd, &group, &rows);
            start += GROUP;
        }
        for row in 0..R {
            *task.states.add(row * stride) = largest[row];
            *task.states.add(row * stride + 1) = simd.fold(sums[row]);
        }
    }
}

/// From the first to the last position that any row sees.
#[inline(always)]
fn seen_by_any(visible: &[Range<usize>]) -> Range<usize> {
    let (mut start, mut end) = (usize::MAX, 0);
    for visible in visible {
        if !visible.is_empty() {
            (start, end) = (start.min(visible.start), end.max(visible.end));
        }
    }
    start.min(end)..end
}

/// Looks up the sub-blocks of a group that any row sees.
#[inline(always)]
fn sub_blocks_at(task: &ChunkTask<'_>, start: usize, seen: &Range<usize>) -> [*const u16; SUB_BLOCKS] {
    let block_size = task.layer.block_size();
    let mut sub_blocks = [std::ptr::null(); SUB_BLOCKS];
    for (index, pointer) in sub_blocks.iter_mut().enumerate() {
        let position = start + index * SUB_BLOCK;
        if position < seen.end && position + SUB_BLOCK > seen.start {
            let block = task.table[position / block_size] as usize;
            *pointer = task.layer.sub_block(block, task.head, position % block_size).cast_const().cast();
        }
    }
    sub_blocks
}

/// Turns the codes of a group into bfloat16, which holds them exactly, and collects their scales; the pointers then lead
/// to the copies. What comes next is fetched ahead.
///
/// # Safety
/// That of [`attend_chunk`]; the elements are 8-bit codes.
#[inline(always)]
unsafe fn widen<S: Simd>(
    simd: S,
    task: &ChunkTask<'_>,
    sub_blocks: &mut [*const u16; SUB_BLOCKS],
    next: &[*const u16; SUB_BLOCKS],
    scales: &mut Scales,
) {
    let elements = 2 * SUB_BLOCK * task.layer.head_size();
    for (index, (pointer, next)) in sub_blocks.iter_mut().zip(next).enumerate() {
        if pointer.is_null() {
            continue;
        }
        // SAFETY: a sub-block has as many codes and then the scales of 16 keys and of 16 values.
        unsafe {
            let (from, to) = (pointer.cast::<i8>(), task.widened.add(index * elements));
            for at in (0..elements).step_by(2 * LANES) {
                simd.prefetch(next.cast::<u8>().wrapping_add(at));
                simd.widen_codes(from.add(at), to.add(at));
            }
            let found: *const u16 = from.add(elements).cast();
            simd.store(scales.keys.as_mut_ptr().add(index * SUB_BLOCK), simd.load_bf16(found));
            simd.store(scales.values.as_mut_ptr().add(index * SUB_BLOCK), simd.load_bf16(found.add(SUB_BLOCK)));
            *pointer = to;
        }
    }
}

#[inline(always)]
fn visible_in_group<const R: usize>(visible: &[Range<usize>; MAX_TILE], start: usize) -> [Range<usize>; R] {
    let mut relative = [const { 0..0 }; R];
    for (relative, absolute) in relative.iter_mut().zip(visible) {
        *relative = absolute.start.saturating_sub(start).min(GROUP)..absolute.end.saturating_sub(start).min(GROUP);
    }
    relative
}

/// Scores of all sub-blocks that are there, as many at a time as the registers hold.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn scores<S: Simd, const R: usize>(simd: S, group: &Group<'_, R>, rows: &mut Rows<R>) {
    let at_once = const { accumulators::<S>() / R };
    let whole = group.sub_blocks.iter().all(|pointer| !pointer.is_null());
    // SAFETY: by the contract.
    unsafe {
        if whole && at_once >= 4 {
            scores_of::<S, R, 4>(simd, group, 0, rows);
        } else if whole && at_once >= 2 {
            scores_of::<S, R, 2>(simd, group, 0, rows);
            scores_of::<S, R, 2>(simd, group, 2, rows);
        } else {
            for (index, pointer) in group.sub_blocks.iter().enumerate() {
                if !pointer.is_null() {
                    scores_of::<S, R, 1>(simd, group, index, rows);
                }
            }
        }
    }
}

/// Scores of `N` sub-blocks from `first` on: one chain of dot products over the head for each row and position.
///
/// # Safety
/// That of [`attend_chunk`]; the sub-blocks are there.
#[inline(always)]
unsafe fn scores_of<S: Simd, const R: usize, const N: usize>(
    simd: S,
    group: &Group<'_, R>,
    first: usize,
    rows: &mut Rows<R>,
) {
    let mut sums = [[simd.splat(0.0); N]; R];
    let queries: *const u8 = group.task.queries.cast();
    for pair in 0..group.head_size / 2 {
        let mut keys = [simd.splat_int(0); N];
        for (index, keys) in keys.iter_mut().enumerate() {
            // SAFETY: keys are [head_size / 2][16][2]; the values behind them are as long.
            unsafe {
                let from = group.sub_blocks[first + index].add(pair * 2 * SUB_BLOCK);
                *keys = simd.load_bytes(from.cast());
                simd.prefetch(from.add(SUB_BLOCK * group.head_size).cast());
            }
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: queries are [head_size / 2][R][2].
            let query = unsafe { simd.broadcast_bytes(queries.add((pair * R + row) * 4)) };
            for (sum, keys) in sums.iter_mut().zip(keys) {
                *sum = simd.dot_bf16(*sum, keys, query);
            }
        }
    }
    for (sums, scores) in sums.into_iter().zip(&mut rows.scores) {
        for (index, sum) in sums.into_iter().enumerate() {
            // SAFETY: a score row has 4 sub-blocks of 16 lanes.
            unsafe { simd.store(scores.as_mut_ptr().add((first + index) * SUB_BLOCK), sum) };
        }
    }
}

/// Turns scores into probabilities against the largest score so far; returns the factors on what was summed before.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn softmax<S: Simd, const R: usize>(
    simd: S,
    group: &Group<'_, R>,
    rows: &mut Rows<R>,
    largest: &mut [f32; R],
    sums: &mut [S::F; R],
) -> [f32; LANES] {
    let nothing = simd.splat(f32::NEG_INFINITY);
    let mut changes = [0.0f32; LANES];
    for row in 0..R {
        if group.visible[row].is_empty() {
            continue;
        }
        let mut most = simd.splat(largest[row]);
        for index in 0..SUB_BLOCKS {
            // SAFETY: in bounds; what was not scored is masked.
            let scores = unsafe {
                let place = rows.scores[row].as_mut_ptr().add(index * LANES);
                let mut scores = simd.load(place);
                if let Some(scales) = group.scales {
                    scores = simd.mul(scores, simd.load(scales.keys.as_ptr().add(index * LANES)));
                    simd.store(place, scores);
                }
                scores
            };
            most = simd.max(simd.select(mask(&group.visible[row], index), scores, nothing), most);
        }
        let most = simd.fold_max(most);
        changes[row] = largest[row] - most;
        largest[row] = most;
    }
    // SAFETY: 16 floats.
    unsafe {
        let scales = exp(simd, simd.load(changes.as_ptr()));
        simd.store(changes.as_mut_ptr(), scales);
    }
    for row in 0..R {
        if group.visible[row].is_empty() {
            continue;
        }
        let most = simd.splat(largest[row]);
        let mut sum = simd.mul(sums[row], simd.splat(changes[row]));
        for index in 0..SUB_BLOCKS {
            // SAFETY: in bounds.
            unsafe {
                let scores = simd.load(rows.scores[row].as_ptr().add(index * LANES));
                let probabilities = exp(simd, simd.sub(scores, most));
                let (seen, zero) = (mask(&group.visible[row], index), simd.splat(0.0));
                let mut probabilities = simd.select(seen, probabilities, zero);
                if let Some(scales) = group.scales {
                    sum = simd.add(sum, probabilities);
                    let values = simd.load(scales.values.as_ptr().add(index * LANES));
                    // What is not seen may have any scale.
                    probabilities = simd.select(seen, simd.mul(probabilities, values), zero);
                } else {
                    probabilities = simd.round_bf16(probabilities);
                    sum = simd.add(sum, probabilities);
                }
                simd.store_bf16(rows.probabilities[row].as_mut_ptr().add(index * LANES), probabilities);
            }
        }
        sums[row] = sum;
    }
    changes
}

/// The lanes of sub-block `index` that lie in a range of the group.
#[inline(always)]
fn mask(visible: &Range<usize>, index: usize) -> u16 {
    let lane = |position: usize| position.saturating_sub(index * SUB_BLOCK).min(LANES);
    first_lanes(lane(visible.end)) & !first_lanes(lane(visible.start))
}

/// # Safety
/// `head_size` floats at `output`.
#[inline(always)]
unsafe fn rescale<S: Simd>(simd: S, output: *mut f32, scale: f32, head_size: usize) {
    if scale == 1.0 {
        return;
    }
    for at in (0..head_size).step_by(LANES) {
        // SAFETY: by the contract.
        unsafe { simd.store(output.add(at), simd.mul(simd.load(output.add(at)), simd.splat(scale))) };
    }
}

/// Adds the group's values, weighted by the probabilities, to the rows' outputs.
///
/// Pairs of positions that every row sees whole are done for all rows at once. A row's other pairs follow or precede
/// them for that row alone: what a row does not see may hold anything and must not even be multiplied by zero.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn values<S: Simd, const R: usize>(simd: S, group: &Group<'_, R>, rows: &Rows<R>) {
    let mut shared = 0..GROUP / 2;
    for visible in &group.visible {
        shared = shared.start.max(visible.start.div_ceil(2))..shared.end.min(visible.end / 2);
    }
    if shared.is_empty() {
        shared = GROUP / 2..GROUP / 2;
    }
    // SAFETY: by the contract.
    unsafe {
        for row in 0..R {
            row_values(simd, group, rows, row, 0..shared.start);
        }
        let at_once = const { accumulators::<S>() / R };
        let mut at = 0;
        if !shared.is_empty() {
            while at_once >= 4 && at + 4 * LANES <= group.head_size {
                shared_values::<S, R, 4>(simd, group, rows, &shared, at);
                at += 4 * LANES;
            }
            while at_once >= 2 && at + 2 * LANES <= group.head_size {
                shared_values::<S, R, 2>(simd, group, rows, &shared, at);
                at += 2 * LANES;
            }
            while at < group.head_size {
                shared_values::<S, R, 1>(simd, group, rows, &shared, at);
                at += LANES;
            }
        }
        for row in 0..R {
            row_values(simd, group, rows, row, shared.end..GROUP / 2);
        }
    }
}

/// Where a pair's values are, `[head_size][2]`.
///
/// # Safety
/// The pair's sub-block is there.
#[inline(always)]
unsafe fn pair_values<const R: usize>(group: &Group<'_, R>, pair: usize) -> *const u16 {
    const PAIRS: usize = SUB_BLOCK / 2;
    // SAFETY: values follow the keys of 16 tokens, [8][head_size][2].
    unsafe { group.sub_blocks[pair / PAIRS].add((SUB_BLOCK + 2 * (pair % PAIRS)) * group.head_size) }
}

/// Adds pairs that all rows see to `N` vectors of their outputs from dimension `at` on.
///
/// # Safety
/// That of [`attend_chunk`]; all rows see all of the pairs.
#[inline(always)]
unsafe fn shared_values<S: Simd, const R: usize, const N: usize>(
    simd: S,
    group: &Group<'_, R>,
    rows: &Rows<R>,
    pairs: &Range<usize>,
    at: usize,
) {
    let stride = state_len(group.head_size);
    // SAFETY: by the contract.
    unsafe {
        let outputs = group.task.states.add(STATE_HEADER + at);
        let mut sums = [[simd.splat(0.0); N]; R];
        for (row, sums) in sums.iter_mut().enumerate() {
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum = simd.load(outputs.add(row * stride + index * LANES));
            }
        }
        for pair in pairs.clone() {
            if at == 0 {
                prefetch_next_keys(simd, group, pair);
            }
            let from = pair_values(group, pair).add(2 * at);
            let mut values = [simd.splat_int(0); N];
            for (index, values) in values.iter_mut().enumerate() {
                *values = simd.load_bytes(from.add(index * 2 * LANES).cast());
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let weight = simd.broadcast_bytes(rows.probabilities[row].as_ptr().add(2 * pair).cast());
                for (sum, values) in sums.iter_mut().zip(values) {
                    *sum = simd.dot_bf16(*sum, values, weight);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (index, sum) in sums.into_iter().enumerate() {
                simd.store(outputs.add(row * stride + index * LANES), sum);
            }
        }
    }
}

/// Fetches a 32nd of the next group's keys, so that the 32 pairs of this one fetch all.
#[inline(always)]
fn prefetch_next_keys<S: Simd, const R: usize>(simd: S, group: &Group<'_, R>, pair: usize) {
    for line in (pair..group.head_size / 2).step_by(GROUP / 2) {
        for keys in group.next {
            simd.prefetch(keys.wrapping_add(line * 2 * SUB_BLOCK).cast());
        }
    }
}

/// Adds those of a range of pairs that one row sees, ascending; of a pair that it sees half, the other half is zeroed.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline(always)]
unsafe fn row_values<S: Simd, const R: usize>(
    simd: S,
    group: &Group<'_, R>,
    rows: &Rows<R>,
    row: usize,
    pairs: Range<usize>,
) {
    let visible = &group.visible[row];
    if visible.is_empty() {
        return;
    }
    for pair in pairs.start.max(visible.start / 2)..pairs.end.min(visible.end.div_ceil(2)) {
        // SAFETY: by the contract; the row sees at least half of this pair.
        unsafe {
            let mut from = pair_values(group, pair);
            let keep = match (visible.contains(&(2 * pair)), visible.contains(&(2 * pair + 1))) {
                (true, false) => 0x0000_ffff,
                (false, true) => 0xffff_0000,
                _ => u32::MAX,
            };
            if keep != u32::MAX {
                for at in 0..group.head_size {
                    *group.task.half_pair.add(at) = from.cast::<u32>().add(at).read() & keep;
                }
                from = group.task.half_pair.cast_const().cast();
            }
            let weight = simd.broadcast_bytes(rows.probabilities[row].as_ptr().add(2 * pair).cast());
            let output = group.task.states.add(row * state_len(group.head_size) + STATE_HEADER);
            for at in (0..group.head_size).step_by(LANES) {
                let sum = simd.dot_bf16(simd.load(output.add(at)), simd.load_bytes(from.add(2 * at).cast()), weight);
                simd.store(output.add(at), sum);
            }
        }
    }
}
