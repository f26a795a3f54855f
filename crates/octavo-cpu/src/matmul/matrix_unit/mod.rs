//! Tiles of weights times blocks of 16 rows on the matrix unit ([`crate::amx`]).

mod chains;
mod integers;

use std::{arch::x86_64::*, ops::Range};

use octavo_backend::InputRounding;

use super::{Inputs, Mode, Output, TileJob};
use crate::{
    activation::ROW_BLOCK,
    amx::{STEP_COLUMNS, TILE_ROWS},
    pack::{GROUP, PackedMatrix, Part},
};

const _: () = assert!(ROW_BLOCK == TILE_ROWS && GROUP == STEP_COLUMNS);

/// Computes tiles, counted within their part, for the first of some rows, at most [`super::CACHED_ROWS`], and returns how
/// many rows they were: none if the rows do not begin a block or the part is not for the unit.
///
/// # Safety
/// As [`super::Matmul::run`]; [`Isa::Amx`](crate::isa::Isa::Amx) is supported.
pub(super) unsafe fn run(
    matrix: &PackedMatrix,
    part: &Part,
    inputs: Inputs<'_>,
    rows: Range<usize>,
    tiles: Range<usize>,
    output: Output,
) -> usize {
    // A last step that is not whole would read beyond its tile.
    if tiles.is_empty() || !rows.start.is_multiple_of(ROW_BLOCK) || !matrix.columns().is_multiple_of(STEP_COLUMNS) {
        return 0;
    }
    let first = TileJob::new(matrix, part, tiles.start, output).at(part, inputs, rows.start);
    let output = Output { start: output.start.wrapping_add(rows.start * output.stride), ..output };
    let job = |tile| TileJob { activations: first.activations, ..TileJob::new(matrix, part, tile, output) };
    let count = match part.rounding {
        InputRounding::Bf16Chains => rows.len(),
        InputRounding::Int8Group32 | InputRounding::Int8Twice => integers::worthwhile(part.format, rows.len()),
        InputRounding::Bf16 | InputRounding::None => 0,
    };
    if count > 0 {
        // SAFETY: the caller's.
        unsafe {
            match part.rounding {
                InputRounding::Bf16Chains => chains::run(part.format, tiles, count, job),
                _ => integers::run(part.format, tiles, count, job),
            }
        }
    }
    count
}

/// Stores the outputs of a tile for row `row` of its job.
///
/// # Safety
/// AVX-512 is there; the job's outputs of that row are as in [`super::Matmul::run`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(job: &TileJob, row: usize, sums: __m512) {
    // SAFETY: the caller's: `lanes` outputs of the row are there.
    unsafe {
        let lanes = crate::simd::first_lanes(job.lanes);
        let to = job.out.add(row * job.stride);
        let value = match job.mode {
            Mode::Store => sums,
            Mode::Add => _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sums),
        };
        _mm512_mask_storeu_ps(to, lanes, value);
    }
}
