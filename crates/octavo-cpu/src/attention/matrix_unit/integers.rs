//! Attention over 8-bit keys and values on the matrix unit; the sums are those of [`super::super::integers`].

use std::mem::MaybeUninit;

use super::super::{
    chunk::{ChunkTask, GROUP, Group, MAX_TILE, Rows, SUB_BLOCKS, Scales, Weights, seen_by_any, visible_in_group},
    merge::{STATE_HEADER, state_len},
};
use crate::{
    amx::IntegerAttentionTiles,
    heads::PLANE_BITS,
    kv::SUB_BLOCK,
    simd::{Avx512, LANES, Simd},
};

/// Sums of the higher and of the lower planes of all rows, for 64 positions or dimensions.
#[repr(C, align(64))]
struct Sums([[[i32; GROUP]; MAX_TILE]; 2]);

/// Attends the task's rows to the positions of one chunk; their queries are `[2 planes][rows][head_size]`.
///
/// # Safety
/// As the kernel over bfloat16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn attend_chunk(task: &ChunkTask<'_>) {
    // SAFETY: by the contract.
    unsafe {
        let simd = Avx512::new_unchecked();
        let head_size = task.layer.head_size();
        let tiles = IntegerAttentionTiles::configure(task.rows, head_size);
        let mut rows = Rows::new(simd);
        let mut weights = Weights::new();
        let mut sums = MaybeUninit::<Sums>::uninit();
        let sums = sums.as_mut_ptr().cast::<i32>();
        let seen = seen_by_any(&task.visible[..task.rows]);
        std::ptr::write_bytes(task.states, 0, task.rows * state_len(head_size));
        let mut start = seen.start / GROUP * GROUP;
        let mut next = task.sub_blocks(start, &seen);
        while start < seen.end {
            let sub_blocks = std::mem::replace(&mut next, task.sub_blocks_after(start, &seen));
            let group = Group { sub_blocks, next, visible: visible_in_group(&task.visible, start) };
            let scales = Scales::of(simd, &sub_blocks, head_size);
            scores(&tiles, task, &group, &scales, &mut rows, sums);
            let changes = rows.weigh(simd, task.rows, &group.visible, &scales, &mut weights);
            values(&tiles, task, &group, &weights, &changes, sums);
            start += GROUP;
        }
        rows.finish(simd, task, task.rows);
    }
}

/// Where the sums of a plane and row begin.
fn place(plane: usize, row: usize) -> usize {
    (plane * MAX_TILE + row) * GROUP
}

/// The whole sums of 16 columns from `at` on, as floats.
///
/// # Safety
/// The sums of both planes are there.
#[inline(always)]
unsafe fn combined(simd: Avx512, sums: *const i32, row: usize, at: usize, add: i32) -> <Avx512 as Simd>::F {
    // SAFETY: by the contract.
    unsafe {
        let high = simd.load_bytes(sums.add(place(0, row) + at).cast());
        let low = simd.load_bytes(sums.add(place(1, row) + at).cast());
        let low = simd.add_int(low, simd.splat_int(add));
        simd.int_to_float(simd.add_int(simd.shift_up(high, PLANE_BITS), low))
    }
}

/// # Safety
/// That of [`attend_chunk`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn scores(
    tiles: &IntegerAttentionTiles,
    task: &ChunkTask<'_>,
    group: &Group,
    scales: &Scales,
    rows: &mut Rows<Avx512>,
    sums: *mut i32,
) {
    let head_size = task.layer.head_size();
    let keys = group.sub_blocks.map(|keys| keys.cast::<u8>());
    // SAFETY: by the contract: keys are `[head_size / 4][16][4]`.
    unsafe {
        let simd = Avx512::new_unchecked();
        for plane in 0..2 {
            let queries = task.queries.cast::<u8>().add(plane * task.rows * head_size);
            tiles.clear();
            for at in (0..head_size).step_by(tiles.dimensions()) {
                tiles.load_queries(queries.add(at), head_size);
                macro_rules! add {
                    ($($index:literal)*) => { $(
                        if !keys[$index].is_null() {
                            tiles.add_scores::<$index>(keys[$index].add(at * SUB_BLOCK));
                        }
                    )* };
                }
                add!(0 1 2 3);
            }
            let to = sums.add(place(plane, 0));
            macro_rules! store {
                ($($index:literal)*) => { $( tiles.store::<$index>(to.add($index * SUB_BLOCK), GROUP * 4); )* };
            }
            store!(0 1 2 3);
        }
        for row in 0..task.rows {
            let [factor, sum] = task.query_scales[row];
            for at in (0..GROUP).step_by(LANES) {
                // Keys have 128 added to them.
                let dot = combined(simd, sums, row, at, -128 * sum as i32);
                let score = simd.mul(simd.mul(dot, simd.splat(factor)), simd.load(scales.keys.as_ptr().add(at)));
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
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn values(
    tiles: &IntegerAttentionTiles,
    task: &ChunkTask<'_>,
    group: &Group,
    weights: &Weights,
    changes: &[f32; MAX_TILE],
    sums: *mut i32,
) {
    let head_size = task.layer.head_size();
    // SAFETY: by the contract: values are `[4][head_size][4]`, behind the keys.
    unsafe {
        let simd = Avx512::new_unchecked();
        for first in (0..head_size).step_by(SUB_BLOCKS * LANES) {
            let count = SUB_BLOCKS.min((head_size - first) / LANES);
            for plane in 0..2 {
                tiles.clear();
                for (index, keys) in group.sub_blocks.iter().enumerate().filter(|(_, keys)| !keys.is_null()) {
                    let codes = weights.planes.as_ptr().cast::<u8>().add(plane * GROUP + index * SUB_BLOCK);
                    tiles.load_weights(codes, 2 * GROUP);
                    let value = keys.cast::<u8>().add(SUB_BLOCK * head_size + 4 * first);
                    macro_rules! add {
                        ($($vector:literal)*) => { $(
                            if $vector < count {
                                tiles.add_values::<$vector>(value.add(4 * $vector * LANES), head_size * 4);
                            }
                        )* };
                    }
                    add!(0 1 2 3);
                }
                let to = sums.add(place(plane, 0));
                macro_rules! store {
                    ($($vector:literal)*) => { $( tiles.store::<$vector>(to.add($vector * LANES), GROUP * 4); )* };
                }
                store!(0 1 2 3);
            }
            for row in (0..task.rows).filter(|row| !group.visible[*row].is_empty()) {
                let (change, factor) = (simd.splat(changes[row]), simd.splat(weights.factors[row]));
                let output = task.states.add(row * state_len(head_size) + STATE_HEADER + first);
                for at in (0..count * LANES).step_by(LANES) {
                    let sum = simd.mul(combined(simd, sums, row, at, 0), factor);
                    simd.store(output.add(at), simd.fma(simd.load(output.add(at)), change, sum));
                }
            }
        }
    }
}
