//! Tiles of weights times blocks of rows in 8-bit integers: the unit takes the sums over each group, which are exact, and
//! vector registers scale and add them in the order of [`crate::matmul::kernels`].

use std::{arch::x86_64::*, cell::RefCell, mem::MaybeUninit, ops::Range};

use octavo_backend::WeightFormat;

use super::super::{
    TileJob,
    grouped::Grouped,
    kernels::{Int4, Q4_0, Q4_1, Q4K, Q8_0, prefetch},
};
use crate::{
    activation::{INT8_RECORD, Int8Record, ROW_BLOCK},
    amx::{IntegerTiles, TILE_ROWS},
    pack::GROUP,
    simd::{Avx512, LANES},
};

/// Bytes of a group's weights of one tile in 8 bits.
const WIDE: usize = GROUP * LANES;
/// Bytes from one group's activations to the next.
const ROWS: usize = ROW_BLOCK * INT8_RECORD;
/// Fewer rows are sooner done by vector registers.
const LEAST_ROWS: usize = 12;
/// How many groups weights are widened ahead of their use: what has just been written would be waited for.
const AHEAD: usize = 4;

thread_local! {
    /// The weights of a tile in 8 bits, `[column / 4][output][4]`.
    static WIDENED: RefCell<Vec<Wide>> = const { RefCell::new(Vec::new()) };
}

/// A group's weights of one tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Wide([u8; WIDE]);

/// Products of a group, `[row][output]`.
#[repr(C, align(64))]
struct Products([i32; LANES * TILE_ROWS]);

/// How many of some rows the unit should take: none where a group has several scales, for which it would have to begin anew
/// within the group.
pub(super) fn worthwhile(format: WeightFormat, rows: usize) -> usize {
    if format == WeightFormat::Q6K {
        return 0;
    }
    let beyond = rows % ROW_BLOCK;
    if beyond < LEAST_ROWS { rows - beyond } else { rows }
}

/// Computes tiles for some rows; the jobs are those of the first row, which begins a block.
///
/// # Safety
/// As [`super::run`], for a part with 8-bit activations.
pub(super) unsafe fn run(format: WeightFormat, tiles: Range<usize>, rows: usize, job: impl Fn(usize) -> TileJob) {
    // SAFETY: the caller's.
    let unit = unsafe { IntegerTiles::configure() };
    WIDENED.with_borrow_mut(|widened| {
        for tile in tiles {
            let job = job(tile);
            let groups = job.columns / GROUP;
            if widened.len() < groups {
                widened.resize(groups, Wide([0; WIDE]));
            }
            // SAFETY: the caller's; the whole block of a row that exists is in the activations.
            unsafe {
                match format {
                    WeightFormat::Q4_0 => multiply::<Q4_0>(&unit, &job, rows, &mut widened[..groups]),
                    WeightFormat::Q4_1 => multiply::<Q4_1>(&unit, &job, rows, &mut widened[..groups]),
                    WeightFormat::Q4K => multiply::<Q4K>(&unit, &job, rows, &mut widened[..groups]),
                    WeightFormat::Int4Group32 => multiply::<Int4<1>>(&unit, &job, rows, &mut widened[..groups]),
                    WeightFormat::Int4Group64 => multiply::<Int4<2>>(&unit, &job, rows, &mut widened[..groups]),
                    WeightFormat::Int4Group128 => multiply::<Int4<4>>(&unit, &job, rows, &mut widened[..groups]),
                    _ => multiply::<Q8_0>(&unit, &job, rows, &mut widened[..groups]),
                }
            }
        }
    });
}

/// Computes one tile.
///
/// # Safety
/// AVX-512 and the unit are there; the job's weights are a tile of the format with as many groups as `widened`; activations
/// and outputs as in [`super::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<W: Grouped>(unit: &IntegerTiles, job: &TileJob, rows: usize, widened: &mut [Wide]) {
    for first in (0..rows).step_by(ROW_BLOCK) {
        let count = ROW_BLOCK.min(rows - first);
        // SAFETY: the caller's.
        unsafe {
            match first {
                0 => multiply_block::<W, true>(unit, job, first, count, widened),
                _ => multiply_block::<W, false>(unit, job, first, count, widened),
            }
        }
    }
}

/// One tile for the block of rows from `first` on, of which `count` exist; the weights are widened on the way if they are
/// `NEW`.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_block<W: Grouped, const NEW: bool>(
    unit: &IntegerTiles,
    job: &TileJob,
    first: usize,
    count: usize,
    widened: &mut [Wide],
) {
    let groups = widened.len();
    let widened = widened.as_mut_ptr();
    let mut products = [const { MaybeUninit::<Products>::uninit() }; 2];
    let places = products.each_mut().map(|place| place.as_mut_ptr().cast::<i32>());
    let mut sums = [_mm512_setzero_ps(); ROW_BLOCK];
    // SAFETY: the caller's: groups lie in their tile and block of rows.
    unsafe {
        let simd = Avx512::new_unchecked();
        let activations = job.activations.add(first * groups * INT8_RECORD);
        let widen = |group: usize| {
            if NEW && group < groups {
                widen::<W>(simd, job.weights.add(W::start(group)), widened.add(group).cast());
            }
        };
        let multiply = |group: usize| {
            if group < groups {
                let (rows, weights) = (activations.add(group * ROWS), widened.add(group).cast());
                match group % 2 {
                    0 => unit.multiply::<false>(rows, INT8_RECORD, weights, places[0]),
                    _ => unit.multiply::<true>(rows, INT8_RECORD, weights, places[1]),
                }
            }
        };
        for group in 0..AHEAD {
            widen(group);
        }
        multiply(0);
        for group in 0..groups {
            widen(group + AHEAD);
            multiply(group + 1);
            let (header, start) = (job.weights.add(W::header(group)), job.weights.add(W::start(group)));
            let (scales, minima) = W::scales(simd, header, start, 0);
            let records = activations.add(group * ROWS).cast::<Int8Record>();
            let products = places[group % 2];
            for (row, sum) in sums.iter_mut().enumerate() {
                let product = _mm512_cvtepi32_ps(_mm512_load_si512(products.add(row * LANES).cast()));
                let scaled = _mm512_mul_ps(product, _mm512_set1_ps((*records.add(row)).scale));
                *sum = _mm512_fmadd_ps(scaled, scales, *sum);
                if W::HAS_MINIMA {
                    *sum = _mm512_fmadd_ps(minima, _mm512_set1_ps((*records.add(row)).scaled_sum), *sum);
                }
            }
        }
        for (row, sum) in sums.into_iter().enumerate().take(count) {
            super::store(job, first + row, sum);
        }
    }
}

/// The weights of a group as signed integers of 8 bits.
///
/// # Safety
/// `group` is a group of the format, and `to` has [`WIDE`] bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn widen<W: Grouped>(simd: Avx512, group: *const u8, to: *mut u8) {
    let zero = _mm512_set1_epi8(W::ZERO as i8);
    for vector in 0..W::CODE_BYTES / 64 {
        // SAFETY: the caller's.
        unsafe {
            let codes = group.add(vector * 64);
            prefetch(simd, codes);
            let codes = _mm512_loadu_si512(codes.cast());
            let store = |index: usize, codes: __m512i| {
                // The zero point of 128 is 2 to the 7, where subtracting is the same as adding: both wrap.
                let codes = if W::ZERO == 0 { codes } else { _mm512_sub_epi8(codes, zero) };
                _mm512_store_si512(to.add(index * 64).cast(), codes);
            };
            if W::BITS == 4 {
                let nibble = _mm512_set1_epi8(15);
                store(vector * 2, _mm512_and_si512(codes, nibble));
                store(vector * 2 + 1, _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble));
            } else {
                store(vector, codes);
            }
        }
    }
}
