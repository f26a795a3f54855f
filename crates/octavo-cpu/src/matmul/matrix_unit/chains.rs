//! Pairs of tiles of weights times blocks of 16 rows in bfloat16.
//!
//! The unit computes what [`crate::matmul::chains`] defines. Quantised weights are widened once for many rows; bfloat16 ones
//! lie in memory as the unit loads them.

use std::{arch::x86_64::*, cell::RefCell, ops::Range};

use octavo_backend::WeightFormat;

use super::super::{
    TileJob,
    chains::{Line, code_floats},
    grouped::Grouped,
    kernels::{Int4, Q4_0, Q4_1, Q4K, Q6K, Q8_0, prefetch},
};
use crate::{
    activation::{BF16_RECORD, ROW_BLOCK},
    amx::{STEP_COLUMNS, TILE_ROWS, Tiles},
    pack::GROUP,
    simd::{Avx512, LANES, Simd},
};

/// Rows that share widened weights, at most: their activations stay in the second-level cache.
const UNIT_ROWS: usize = super::super::CACHED_ROWS;
/// Steps whose weights are widened at a time: with the activations of 32 rows they about fill the first-level cache.
const STEPS: usize = 12;
/// Bytes of a step's weights of one tile.
const STEP: usize = 1024;
/// Bytes of a step's activations of one block of rows.
const ROWS: usize = ROW_BLOCK * BF16_RECORD;

/// What a thread needs besides registers.
#[repr(C, align(64))]
struct Workspace {
    /// Of each tile, `[column / 2][output][2]`.
    widened: [[[u8; STEP]; STEPS]; 2],
    /// Outputs so far, `[row block][tile][row][output]`.
    sums: [[[[f32; LANES]; ROW_BLOCK]; 2]; UNIT_ROWS / ROW_BLOCK],
}

thread_local! {
    /// Too large to be cleared for every call.
    static WORKSPACE: RefCell<Box<Workspace>> = RefCell::new(Box::new(Workspace {
        widened: [[[0; STEP]; STEPS]; 2],
        sums: [[[[0.0; LANES]; ROW_BLOCK]; 2]; UNIT_ROWS / ROW_BLOCK],
    }));
}

/// Computes tiles for at most [`UNIT_ROWS`] rows; the jobs are those of the first row, which begins a block.
///
/// # Safety
/// As [`super::run`], for a part in chains.
pub(super) unsafe fn run(format: WeightFormat, tiles: Range<usize>, rows: usize, job: impl Fn(usize) -> TileJob) {
    // SAFETY: the caller's.
    let unit = Unit { tiles: unsafe { Tiles::configure(rows.min(TILE_ROWS)) }, rows };
    WORKSPACE.with_borrow_mut(|workspace| {
        for tile in tiles.clone().step_by(2) {
            let jobs = [job(tile), job((tile + 1).min(tiles.end - 1))];
            let jobs = &jobs[..2.min(tiles.end - tile)];
            // SAFETY: the caller's; the whole block of a row that exists is in the activations.
            unsafe {
                macro_rules! multiply {
                    ($weights:ty) => {
                        match jobs.len() {
                            1 => unit.multiply::<$weights, false>(workspace, jobs),
                            _ => unit.multiply::<$weights, true>(workspace, jobs),
                        }
                    };
                }
                match format {
                    WeightFormat::Q4_0 => multiply!(Packed<Q4_0>),
                    WeightFormat::Q4_1 => multiply!(Packed<Q4_1>),
                    WeightFormat::Q8_0 => multiply!(Packed<Q8_0>),
                    WeightFormat::Q4K => multiply!(Packed<Q4K>),
                    WeightFormat::Q6K => multiply!(Packed<Q6K>),
                    WeightFormat::Int4Group32 => multiply!(Packed<Int4<1>>),
                    WeightFormat::Int4Group64 => multiply!(Packed<Int4<2>>),
                    WeightFormat::Int4Group128 => multiply!(Packed<Int4<4>>),
                    _ => multiply!(Plain),
                }
            }
        }
    });
}

/// The unit, ready on this thread for some rows.
struct Unit {
    tiles: Tiles,
    rows: usize,
}

impl Unit {
    /// Computes one or (`PAIR`) two tiles for the unit's rows.
    ///
    /// # Safety
    /// AVX-512 and the unit are there; the jobs' weights are tiles of the format, their activations the first record of a
    /// block of rows; activations and outputs as in [`super::run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
    unsafe fn multiply<W: Source, const PAIR: bool>(&self, workspace: &mut Workspace, jobs: &[TileJob]) {
        let steps = jobs[0].columns / STEP_COLUMNS;
        let row_blocks = self.rows.div_ceil(ROW_BLOCK);
        let Workspace { widened, sums } = workspace;
        let places = widened.each_mut().map(|tile| tile.as_mut_ptr().cast::<u8>());
        for first in (0..steps).step_by(STEPS) {
            let count = STEPS.min(steps - first);
            let weights = [jobs[0].weights, jobs[jobs.len() - 1].weights];
            let steps_now = first..first + count;
            for row_block in (0..row_blocks).step_by(2) {
                let are_two = row_block + 1 < row_blocks;
                let rows = [row_block, row_block + usize::from(are_two)];
                let rows = rows.map(|block| jobs[0].activations.wrapping_add((block * steps + first) * ROWS));
                // SAFETY: the caller's: steps are inside their tile and row block.
                unsafe {
                    let own = sums.as_mut_ptr().cast::<f32>().add(row_block * 2 * ROW_BLOCK * LANES);
                    if first == 0 {
                        self.tiles.clear();
                    } else {
                        self.tiles.load(own, PAIR, are_two);
                    }
                    match (are_two, row_block == 0) {
                        (false, false) => self.steps::<W, PAIR, false, false>(weights, places, rows, steps_now.clone()),
                        (false, true) => self.steps::<W, PAIR, false, true>(weights, places, rows, steps_now.clone()),
                        (true, false) => self.steps::<W, PAIR, true, false>(weights, places, rows, steps_now.clone()),
                        (true, true) => self.steps::<W, PAIR, true, true>(weights, places, rows, steps_now.clone()),
                    }
                    self.tiles.store(own, PAIR, are_two);
                    if first + count == steps {
                        self.finish(jobs, row_block, &sums[row_block]);
                        if are_two {
                            self.finish(jobs, row_block + 1, &sums[row_block + 1]);
                        }
                    }
                }
            }
        }
    }

    /// Adds `count` steps; the weights are widened into `places` if they are `NEW`, one step ahead of their use.
    ///
    /// # Safety
    /// As [`Unit::multiply`]; `places` have [`STEP`] bytes for each step.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
    unsafe fn steps<W: Source, const PAIR: bool, const TWO: bool, const NEW: bool>(
        &self,
        weights: [*const u8; 2],
        places: [*mut u8; 2],
        rows: [*const u8; 2],
        steps: Range<usize>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            for step in 0..steps.len() + usize::from(NEW) {
                if NEW && step < steps.len() {
                    W::widen(weights[0], steps.start + step, places[0].add(step * STEP));
                    if PAIR {
                        W::widen(weights[1], steps.start + step, places[1].add(step * STEP));
                    }
                }
                // What has just been written would be waited for.
                let Some(step) = step.checked_sub(usize::from(NEW)) else { continue };
                let rows = [rows[0].add(step * ROWS), rows[1].add(step * ROWS)];
                let weights = [0, 1].map(|tile| match W::STORED {
                    true => weights[tile].add((steps.start + step) * STEP),
                    false => places[tile].add(step * STEP).cast_const(),
                });
                self.tiles.multiply::<PAIR, TWO>(rows, weights);
            }
        }
    }

    /// Stores the outputs of one block of rows.
    ///
    /// # Safety
    /// As [`Unit::multiply`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn finish(&self, jobs: &[TileJob], row_block: usize, sums: &[[[f32; LANES]; ROW_BLOCK]; 2]) {
        let first = row_block * ROW_BLOCK;
        for row in 0..ROW_BLOCK.min(self.rows - first) {
            for (job, sums) in jobs.iter().zip(sums) {
                // SAFETY: the caller's: `lanes` outputs of the row are there.
                unsafe { super::store(job, first + row, _mm512_loadu_ps(sums[row].as_ptr())) }
            }
        }
    }
}

/// Where the unit's weights come from.
trait Source {
    /// They lie in memory as the unit loads them.
    const STORED: bool;

    /// Widens a step of a tile if it is not [stored](Source::STORED) already.
    ///
    /// # Safety
    /// AVX-512 with bfloat16; the tile is one of the format, and `to` has [`STEP`] bytes.
    unsafe fn widen(tile: *const u8, step: usize, to: *mut u8);
}

/// bfloat16, as it is in memory.
struct Plain;

impl Source for Plain {
    const STORED: bool = true;

    #[inline(always)]
    unsafe fn widen(_tile: *const u8, _step: usize, _to: *mut u8) {}
}

/// A quantised format.
struct Packed<W>(std::marker::PhantomData<W>);

impl<W: Grouped> Source for Packed<W> {
    const STORED: bool = false;

    #[inline(always)]
    unsafe fn widen(tile: *const u8, step: usize, to: *mut u8) {
        // SAFETY: the caller's.
        unsafe { widen::<W>(tile.add(W::header(step)), tile.add(W::start(step)), to) }
    }
}

/// Widens a group, with the bits of [`octavo_backend::Codes::to_bf16`].
///
/// # Safety
/// They are a header and a group of the format, and `to` has [`STEP`] bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn widen<W: Grouped>(header: *const u8, group: *const u8, to: *mut u8) {
    let codes = const { 32 / W::BITS };
    // SAFETY: the caller's.
    unsafe {
        let simd = Avx512::new_unchecked();
        let mut line = Line::load::<W>(simd, header, group, 0);
        for vector in 0..GROUP / 2 / codes {
            if W::LINES > 1 && 2 * codes * vector == GROUP / 2 {
                line = Line::load::<W>(simd, header, group, GROUP / 2);
            }
            let words = group.add(vector * 128);
            prefetch(simd, words);
            prefetch(simd, words.wrapping_add(64));
            let words = (simd.load_bytes(words), simd.load_bytes(words.add(64)));
            for index in 0..codes {
                let low = _mm512_fmadd_ps(code_floats::<_, W>(simd, words.0, index), line.low.0, line.low.1);
                let high = _mm512_fmadd_ps(code_floats::<_, W>(simd, words.1, index), line.high.0, line.high.1);
                let pairs = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.add((vector * codes + index) * 64).cast(), pairs);
            }
        }
    }
}
