//! Tiles of weights times up to 16 rows at once on the matrix unit ([`crate::amx`]).
//!
//! The unit computes the exact integer sums of a block; scaling them is the same as in [`super::block`], operation by
//! operation, so that an output has the same bits whichever kernel computes it. The codes of two tiles are unpacked once
//! for many rows.

use std::{arch::x86_64::*, cell::RefCell, ops::Range};

use octavo_backend::{InputRounding, WeightFormat, block::BLOCK};

use super::{
    Mode, Output, TileJob,
    block::{BlockFormat, load_folds},
    kernels::{Q4_0, Q4_1, Q8_0},
};
use crate::{
    activation::{Activations, INT16_RECORD, Int16Record, ROW_BLOCK},
    amx::{PRODUCT, Planes, TILE_COLUMNS, TILE_ROWS, Tiles},
    pack::{
        GROUP, PackedMatrix, Part,
        block::{BLOCK_SCALES, group_bytes},
    },
    simd::{Avx512, LANES, Simd},
};

const _: () = assert!(ROW_BLOCK == TILE_ROWS && BLOCK == 2 * TILE_COLUMNS);

/// Fewer rows than this of a block are faster without the unit.
const LEAST_ROWS: usize = 4;
/// Rows that share unpacked codes, at most: their activations stay in the second-level cache.
const UNIT_ROWS: usize = super::CACHED_ROWS;
/// Blocks that are unpacked at a time: their codes, with what else the loop touches, stay in the first-level cache.
const BLOCKS: usize = 4;
/// Bytes of a block's codes, one a byte.
const CODES: usize = LANES * BLOCK;

/// Some blocks of a tile, unpacked.
#[repr(C, align(64))]
struct Unpacked {
    /// `[column / 4][output][column % 4]`, signed.
    codes: [[i8; CODES]; BLOCKS],
    scales: [[f32; LANES]; BLOCKS],
}

/// What a thread needs besides registers.
#[repr(C, align(64))]
struct Workspace {
    unpacked: [Unpacked; 2],
    /// Exact sums of both planes for both tiles, `[row][output]` each; those of one block are scaled while those of the
    /// next are computed.
    products: [[i32; 4 * PRODUCT]; 2],
    /// Outputs so far, `[row block][tile][row][output]`.
    sums: [[[[f32; LANES]; ROW_BLOCK]; 2]; UNIT_ROWS / ROW_BLOCK],
}

thread_local! {
    /// Too large to be cleared for every call.
    static WORKSPACE: RefCell<Box<Workspace>> = RefCell::new(Box::new(Workspace {
        unpacked: [const { Unpacked { codes: [[0; CODES]; BLOCKS], scales: [[0.0; LANES]; BLOCKS] } }; 2],
        products: [[0; 4 * PRODUCT]; 2],
        sums: [[[[0.0; LANES]; ROW_BLOCK]; 2]; UNIT_ROWS / ROW_BLOCK],
    }));
}

/// The unit, ready on this thread for some rows.
pub(super) struct Unit {
    tiles: Tiles,
    rows: Range<usize>,
}

impl Unit {
    /// Prepares the unit if these rows (at most [`UNIT_ROWS`]) are worth it: they begin a block of rows and are enough.
    ///
    /// # Safety
    /// [`Isa::Amx`](crate::isa::Isa::Amx) is supported and this thread has no other `Unit`.
    pub unsafe fn for_rows(rows: &Range<usize>) -> Option<Unit> {
        let rest = rows.len() % ROW_BLOCK;
        let taken = if rest < LEAST_ROWS { rows.len() - rest } else { rows.len() };
        if taken == 0 || !rows.start.is_multiple_of(ROW_BLOCK) {
            return None;
        }
        // SAFETY: the caller's.
        let tiles = unsafe { Tiles::configure(taken.min(TILE_ROWS)) };
        Some(Unit { tiles, rows: rows.start..rows.start + taken })
    }

    /// Computes tiles, counted within their part, for as many of the rows as the unit takes; returns the rest of `rows`.
    ///
    /// # Safety
    /// As [`super::Matmul::run`], for all rows of a block of which some are the unit's.
    pub unsafe fn run(
        &self,
        matrix: &PackedMatrix,
        part: &Part,
        activations: &Activations,
        rows: Range<usize>,
        tiles: Range<usize>,
        output: Output,
    ) -> Range<usize> {
        if part.rounding != InputRounding::Int16Block128 {
            return rows;
        }
        let job = |tile| TileJob::new(matrix, part, tile, output).at(part, activations, self.rows.start);
        WORKSPACE.with_borrow_mut(|workspace| {
            for tile in tiles.clone().step_by(2) {
                let is_pair = tile + 1 < tiles.end;
                let jobs = [job(tile), job(if is_pair { tile + 1 } else { tile })];
                // SAFETY: the caller's; the whole block of a row that exists is in the activations.
                unsafe {
                    match (part.format, is_pair) {
                        (WeightFormat::Q4_0, false) => self.multiply::<Q4_0, false>(workspace, jobs),
                        (WeightFormat::Q4_0, true) => self.multiply::<Q4_0, true>(workspace, jobs),
                        (WeightFormat::Q4_1, false) => self.multiply::<Q4_1, false>(workspace, jobs),
                        (WeightFormat::Q4_1, true) => self.multiply::<Q4_1, true>(workspace, jobs),
                        (_, false) => self.multiply::<Q8_0, false>(workspace, jobs),
                        (_, true) => self.multiply::<Q8_0, true>(workspace, jobs),
                    }
                }
            }
        });
        self.rows.end..rows.end
    }

    /// Computes one or two tiles for the unit's rows.
    ///
    /// # Safety
    /// AVX-512 and the unit are there; the jobs' weights are tiles of the format, their activations the first record of a
    /// block of rows; activations and outputs as in [`super::Matmul::run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<W: BlockFormat, const PAIR: bool>(&self, workspace: &mut Workspace, jobs: [TileJob; 2]) {
        let tiles = 1 + usize::from(PAIR);
        let (columns, blocks) = (jobs[0].columns, jobs[0].columns.div_ceil(BLOCK));
        let block_bytes = BLOCK / GROUP * group_bytes(W::FORMAT) + BLOCK_SCALES;
        let Workspace { unpacked, products, sums } = workspace;
        for first in (0..blocks).step_by(BLOCKS) {
            let last = blocks.min(first + BLOCKS);
            // SAFETY: the caller's: blocks and records are inside their tile and row block; there are four products in
            // each half.
            unsafe {
                for (unpacked, job) in unpacked.iter_mut().zip(jobs).take(tiles) {
                    for block in first..last {
                        let groups = (columns / GROUP - block * (BLOCK / GROUP)).min(BLOCK / GROUP);
                        unpack::<W>(unpacked, block - first, groups, job.weights.add(block * block_bytes));
                    }
                }
                let records = |item: Item| {
                    let records = (item.row_block * blocks + item.block) * ROW_BLOCK;
                    jobs[0].activations.add(records * INT16_RECORD)
                };
                // The unit works on one item while the sums of the one before are scaled, one tile after each step.
                let row_blocks = self.rows.len().div_ceil(ROW_BLOCK);
                let (mut previous, mut next) = (None::<Item>, Some(Item { row_block: 0, block: first }));
                let mut half = 0;
                while previous.is_some() || next.is_some() {
                    let (current, other) = (products[half].as_mut_ptr(), products[1 - half].as_ptr());
                    for step in 0..BLOCK / TILE_COLUMNS {
                        if let Some(item) = next
                            && step * TILE_COLUMNS < columns - item.block * BLOCK
                        {
                            if step == 0 {
                                self.tiles.clear::<PAIR>();
                            }
                            let start = records(item).add(step * TILE_COLUMNS);
                            let codes = unpacked.each_ref().map(|tile| tile.codes[item.block - first].as_ptr());
                            let weights = codes.map(|codes| codes.add(step * 1024).cast());
                            self.tiles.multiply::<PAIR>(Planes { start, stride: INT16_RECORD }, weights);
                        }
                        if let Some(item) = previous
                            && step < tiles
                        {
                            let sums = &mut sums[item.row_block][step];
                            let scales = &unpacked[step].scales[item.block - first];
                            let rows = self.rows.len().min(ROW_BLOCK);
                            let products = other.add(step * 2 * PRODUCT);
                            if item.block == 0 {
                                scale::<true>(products, scales, records(item), sums, rows);
                            } else {
                                scale::<false>(products, scales, records(item), sums, rows);
                            }
                        }
                    }
                    if next.is_some() {
                        self.tiles.store::<PAIR>(current);
                    }
                    if let Some(item) = previous
                        && item.block + 1 == blocks
                    {
                        self.finish(&jobs[..tiles], item.row_block, &sums[item.row_block]);
                    }
                    previous = next;
                    next = next.and_then(|item| item.next(first..last, row_blocks));
                    half = 1 - half;
                }
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
        for row in 0..ROW_BLOCK.min(self.rows.len() - first) {
            for (job, sums) in jobs.iter().zip(sums) {
                // SAFETY: the caller's: `lanes` outputs of the row are there.
                unsafe {
                    let lanes = crate::simd::first_lanes(job.lanes);
                    let to = job.out.add((first + row) * job.stride);
                    let sums = _mm512_loadu_ps(sums[row].as_ptr());
                    let value = match job.mode {
                        Mode::Store => sums,
                        Mode::Add => _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sums),
                    };
                    _mm512_mask_storeu_ps(to, lanes, value);
                }
            }
        }
    }
}

/// A block of rows times a block of columns.
#[derive(Debug, Clone, Copy)]
struct Item {
    row_block: usize,
    block: usize,
}

impl Item {
    /// The next one, all of `blocks` for one block of rows after another.
    fn next(self, blocks: Range<usize>, row_blocks: usize) -> Option<Item> {
        if self.block + 1 < blocks.end {
            return Some(Item { block: self.block + 1, ..self });
        }
        let row_block = self.row_block + 1;
        (row_block < row_blocks).then_some(Item { row_block, block: blocks.start })
    }
}

/// Adds the exact sums of one block and tile to the outputs, which are 0 before the `FIRST` block:
/// `t = sum * activation scale`, `f = fma(t, scale, f)`.
///
/// # Safety
/// `products` are those of both planes, `records` one record for each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn scale<const FIRST: bool>(
    products: *const i32,
    scales: &[f32; LANES],
    records: *const u8,
    sums: &mut [[f32; LANES]; ROW_BLOCK],
    rows: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let scales = _mm512_loadu_ps(scales.as_ptr());
        let mut scale_row = |row: usize| {
            let record = &*records.add(row * INT16_RECORD).cast::<Int16Record>();
            let high = _mm512_loadu_si512(products.add(row * LANES).cast());
            let low = _mm512_loadu_si512(products.add(PRODUCT + row * LANES).cast());
            let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(high), low));
            let scaled = _mm512_mul_ps(dot, _mm512_set1_ps(record.scale));
            let sum = sums[row].as_mut_ptr();
            let before = if FIRST { _mm512_setzero_ps() } else { _mm512_loadu_ps(sum) };
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(scaled, scales, before));
        };
        // With a constant count the loop is unrolled.
        if rows == ROW_BLOCK {
            (0..ROW_BLOCK).for_each(&mut scale_row);
        } else {
            (0..rows).for_each(&mut scale_row);
        }
    }
}

/// # Safety
/// `packed` is a block of `groups` groups of the format.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<W: BlockFormat>(unpacked: &mut Unpacked, block: usize, groups: usize, packed: *const u8) {
    let to: *mut i8 = unpacked.codes[block].as_mut_ptr();
    // SAFETY: the caller's.
    unsafe {
        let simd = Avx512::new_unchecked();
        for group in 0..groups {
            let packed = packed.add(group * group_bytes(W::FORMAT));
            let to = to.add(group * LANES * GROUP);
            if W::FORMAT == WeightFormat::Q8_0 {
                for at in (0..LANES * GROUP).step_by(64) {
                    let codes = _mm512_loadu_si512(packed.add(at).cast());
                    _mm512_store_si512(to.add(at).cast(), _mm512_xor_si512(codes, _mm512_set1_epi8(-128)));
                }
            } else {
                let (factors, offsets) = load_folds(simd, W::FORMAT, packed);
                for i in 0..GROUP / 8 {
                    let (first, second) = simd.fold_nibbles(simd.load_bytes(packed.add(i * 64)), factors, offsets);
                    _mm512_store_si512(to.add(i * 128).cast(), first);
                    _mm512_store_si512(to.add(i * 128 + 64).cast(), second);
                }
            }
        }
        let scales = _mm512_loadu_ps(packed.add(groups * group_bytes(W::FORMAT)).cast());
        _mm512_store_ps(unpacked.scales[block].as_mut_ptr(), scales);
    }
}
