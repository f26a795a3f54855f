//! Attention on the matrix unit ([`crate::amx`]): up to 16 rows at once, heads whose size is a multiple of 32.

pub(super) mod integers;

use std::{arch::x86_64::*, ops::Range};

use super::{
    chunk::{
        ChunkTask, GROUP, Group, MAX_TILE, Rows, SCORED_DIMENSIONS, SUB_BLOCKS, seen_by_any, visible_in_group,
        visible_in_sub_block,
    },
    merge::state_len,
};
use crate::{
    amx::AttentionTiles,
    kv::SUB_BLOCK,
    simd::{Avx512, LANES},
};

/// Sums that the unit holds at once.
const SUMS: usize = 4;
const _: () = assert!(SUMS == SUB_BLOCKS);

/// True when this kernel takes heads of this size.
pub(super) fn takes(head_size: usize) -> bool {
    head_size.is_multiple_of(SCORED_DIMENSIONS)
}

/// Attends the task's rows to the positions of one chunk; their queries are bfloat16, `[rows][head_size]`.
///
/// # Safety
/// [`Isa::Amx`](crate::isa::Isa::Amx) is supported. The task's pointers are as [`ChunkTask`] says and used by no one
/// else; the visible positions lie in one chunk, have entries in the table, and nobody writes their slots.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn attend_chunk(task: &ChunkTask<'_>) {
    // SAFETY: by the contract.
    unsafe {
        let simd = Avx512::new_unchecked();
        let head_size = task.layer.head_size();
        let tiles = AttentionTiles::configure(task.rows);
        let mut rows = Rows::new(simd);
        let seen = seen_by_any(&task.visible[..task.rows]);
        std::ptr::write_bytes(task.states, 0, task.rows * state_len(head_size));
        let mut start = seen.start / GROUP * GROUP;
        let mut next = task.sub_blocks(start, &seen);
        while start < seen.end {
            let sub_blocks = std::mem::replace(&mut next, task.sub_blocks_after(start, &seen));
            let group = Group { sub_blocks, next, visible: visible_in_group(&task.visible, start) };
            scores(&tiles, task, &group, &mut rows);
            let changes = rows.softmax::<true>(simd, task.rows, &group.visible);
            values(&tiles, task, &group, &mut rows);
            Rows::add_sums(simd, task, task.rows, &changes);
            start += GROUP;
        }
        rows.finish(simd, task, task.rows);
    }
}

/// # Safety
/// That of [`attend_chunk`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn scores(tiles: &AttentionTiles, task: &ChunkTask<'_>, group: &Group, rows: &mut Rows<Avx512>) {
    let head_size = task.layer.head_size();
    let queries: *const u16 = task.queries.cast();
    let keys = group.sub_blocks;
    // SAFETY: by the contract: keys are `[head_size / 2][16][2]`.
    unsafe {
        tiles.clear();
        for at in (0..head_size).step_by(SCORED_DIMENSIONS) {
            tiles.load_queries(queries.add(at), head_size * 2);
            let key = |index: usize| keys[index].add(at * SUB_BLOCK);
            macro_rules! add {
                ($($index:literal)*) => { $(
                    if !keys[$index].is_null() {
                        tiles.add_scores::<$index>(key($index));
                    }
                )* };
            }
            add!(0 1 2 3);
        }
        let to = rows.scores.as_mut_ptr().cast::<f32>();
        macro_rules! store {
            ($($index:literal)*) => { $(
                if !keys[$index].is_null() {
                    tiles.store::<$index>(to.add($index * SUB_BLOCK), GROUP * 4);
                }
            )* };
        }
        store!(0 1 2 3);
    }
}

/// The group's values, weighted by the probabilities, as the rows' sums.
///
/// # Safety
/// That of [`attend_chunk`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn values(tiles: &AttentionTiles, task: &ChunkTask<'_>, group: &Group, rows: &mut Rows<Avx512>) {
    let head_size = task.layer.head_size();
    // SAFETY: by the contract: values are `[8][head_size][2]`, behind the keys.
    unsafe {
        let mut values = [std::ptr::null(); SUB_BLOCKS];
        let all_see_all = group.visible[..task.rows].iter().all(|visible| visible.len() == GROUP);
        for (index, (values, keys)) in values.iter_mut().zip(group.sub_blocks).enumerate() {
            if keys.is_null() {
                continue;
            }
            *values = keys.add(SUB_BLOCK * head_size);
            let visible = |row: usize| visible_in_sub_block(&group.visible[row], index);
            if !all_see_all && (0..task.rows).any(|row| visible(row).len() < SUB_BLOCK) {
                *values = copy_visible(task, rows, index, *values, &visible);
            }
        }
        for first in (0..head_size).step_by(SUMS * LANES) {
            let count = SUMS.min((head_size - first) / LANES);
            tiles.clear();
            for (index, values) in values.iter().enumerate() {
                if values.is_null() {
                    continue;
                }
                let words = rows.probabilities.as_ptr().cast::<u16>().add(index * SUB_BLOCK);
                tiles.load_probabilities(words, GROUP * 2);
                let value = |vector: usize| values.add(2 * (first + vector * LANES));
                macro_rules! add {
                    ($($vector:literal)*) => { $(
                        if $vector < count {
                            tiles.add_values::<$vector>(value($vector), head_size * 4);
                        }
                    )* };
                }
                add!(0 1 2 3);
            }
            macro_rules! store {
                ($($vector:literal)*) => { $(
                    if $vector < count {
                        tiles.store::<$vector>(task.sums.add(first + $vector * LANES), head_size * 4);
                    }
                )* };
            }
            store!(0 1 2 3);
        }
    }
}

/// A copy of a sub-block's values in which those that no row sees are zeros, since the unit multiplies them by zero.
///
/// The same holds for a value that only some rows see if it is not finite. It becomes zero as well, and whoever sees it
/// gets the fault as a sum of probabilities that is NaN.
///
/// # Safety
/// That of [`attend_chunk`]; `values` are those of sub-block `index`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn copy_visible(
    task: &ChunkTask<'_>,
    rows: &mut Rows<Avx512>,
    index: usize,
    values: *const u16,
    visible: &dyn Fn(usize) -> Range<usize>,
) -> *const u16 {
    let head_size = task.layer.head_size();
    let mut seen = [false; SUB_BLOCK];
    for row in 0..task.rows {
        seen[visible(row)].fill(true);
    }
    // SAFETY: by the contract: a copy has space for keys and values.
    unsafe {
        let copy = task.copies.add((2 * index + 1) * SUB_BLOCK * head_size);
        let infinite = _mm512_set1_epi16(0x7f80);
        for pair in 0..SUB_BLOCK / 2 {
            let kept = |token: usize, bits: u32| if seen[2 * pair + token] { bits } else { 0 };
            let kept = _mm512_set1_epi32((kept(0, 0xffff) | kept(1, 0xffff_0000)) as i32);
            let mut faults = 0;
            for at in (0..head_size).step_by(LANES) {
                let place = (pair * head_size + at) * 2;
                let words = _mm512_and_si512(_mm512_loadu_si512(values.add(place).cast()), kept);
                faults |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, infinite), infinite);
                _mm512_storeu_si512(copy.add(place).cast(), words);
            }
            for token in 0..2 {
                if faults & (0x5555_5555 << token) != 0 {
                    for at in 0..head_size {
                        *copy.add((pair * head_size + at) * 2 + token) = 0;
                    }
                    for row in (0..task.rows).filter(|row| visible(*row).contains(&(2 * pair + token))) {
                        rows.totals[row] = _mm512_set1_ps(f32::NAN);
                    }
                }
            }
        }
        copy
    }
}

const _: () = assert!(MAX_TILE == crate::amx::TILE_ROWS);
