//! Packed weights times rounded activations: `output[row][n] = sum over k of W[n][k] * activation[row][k]`.
//!
//! The arithmetic of one output, columns ascending:
//! - 4-, 6- and 8-bit formats, for each group of 32: `dot` = exact integer sum of (code - zero) * activation code;
//!   `t = dot * activation scale`, `f = fma(t, scale, f)`; formats with minima then `f = fma(minimum, activation scaled sum, f)`.
//!   Of activations rounded twice, the product of what the first rounding leaves is computed the same way and added, last of all.
//!   In Q4_K and int4 scales and minima are exact products; in Q6_K the 8-bit scale of a code belongs to the code.
//! - the same formats and BF16 in chains, for each 32 columns: `e` = the products of the even ones, each fused, from 0;
//!   `o` = those of the odd ones; `f = f + (e + o)`. Quantised weights are widened to bfloat16 first.
//! - BF16, for each pair of columns: the odd product, then the even one, each `f = fma(w, x, f)`.
//! - F16, F32: `f = fma(w, x, f)`.
//!
//! Invariant (row invariance): nothing of this depends on how many rows or tiles a call computes, on the thread, or on
//! the instruction set (BF16 subnormals apart, see [`Isa`]). Kernels of several widths exist only to
//! reuse weights while they are in registers.

mod chains;
mod grouped;
mod kernels;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod matrix_unit;
#[cfg(test)]
pub(crate) mod samples;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod twin;

use std::ops::Range;

use octavo_backend::{InputRounding, WeightFormat};

pub(crate) use self::kernels::EARLY_DISTANCE;
use self::{
    chains::Chains,
    kernels::{Bf16, F16, F32, Int4, Q4_0, Q4_1, Q4K, Q6K, Q8_0, Weights, select_tile},
};
use crate::{
    activation::{Activations, Plane, ROW_BLOCK},
    isa::Isa,
    pack::{PackedMatrix, Part, TILE_ROWS},
    simd::Simd,
};

/// Rows whose activations stay in the second-level cache while all tiles pass by: 256 rows of 1536 values are 0.6 MB in
/// 8 bits and 0.8 MB in 16.
const CACHED_ROWS: usize = 256;

/// Rows that the widest kernel takes at once.
const ROWS_AT_ONCE: usize = 8;

/// What to do with a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Write it.
    Store,
    /// Add it to what is there (a residual stream).
    Add,
}

/// Where the results go: output `n` of row `r` is element `r * stride + n`.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Output 0 of row 0.
    pub start: *mut f32,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Whether to write or to add.
    pub mode: Mode,
}

impl Output {
    /// A window of all outputs: the memory at `start` is for rows from `first_row` and outputs from `first_output` on.
    pub fn window(start: *mut f32, stride: usize, first_row: usize, first_output: usize, mode: Mode) -> Output {
        Output { start: start.wrapping_sub(first_row * stride + first_output), stride, mode }
    }
}

// SAFETY: an address; whoever runs a matmul vouches for the memory behind it.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// One tile times a few rows.
#[derive(Debug, Clone, Copy)]
struct TileJob {
    weights: *const u8,
    activations: *const u8,
    columns: usize,
    out: *mut f32,
    stride: usize,
    /// Outputs of the tile that exist.
    lanes: usize,
    mode: Mode,
}

impl TileJob {
    /// A tile, counted within its part, for row 0, still without activations.
    fn new(matrix: &PackedMatrix, part: &Part, tile: usize, output: Output) -> TileJob {
        TileJob {
            weights: matrix.tile(part, tile),
            activations: std::ptr::null(),
            columns: matrix.columns(),
            out: output.start.wrapping_add(part.first_row + tile * TILE_ROWS),
            stride: output.stride,
            lanes: TILE_ROWS.min(part.rows - tile * TILE_ROWS),
            mode: output.mode,
        }
    }

    /// This job, made for row 0, from row `row` on.
    fn at(self, part: &Part, inputs: Inputs<'_>, row: usize) -> TileJob {
        let Some(first) = inputs.activations.row(inputs.plane, row) else {
            panic!("activations have no rounding for {} weights", part.format)
        };
        TileJob { activations: first, out: self.out.wrapping_add(row * self.stride), ..self }
    }
}

/// The activations of a matmul, in one of their planes.
#[derive(Debug, Clone, Copy)]
struct Inputs<'a> {
    activations: &'a Activations,
    plane: Plane,
}

type TileKernel = unsafe fn(&TileJob);

/// The kernel of each number of rows at once, from 1.
type TileKernels = [TileKernel; ROWS_AT_ONCE];

/// The matmul kernels of one instruction set.
#[derive(Debug, Clone)]
pub struct Matmul {
    /// Rows that a kernel takes at once, at most.
    rows_at_once: usize,
    /// There is a matrix unit, which takes what suits it.
    #[cfg_attr(
        not(all(target_arch = "x86_64", target_os = "linux")),
        expect(dead_code, reason = "for the matrix unit")
    )]
    matrix_unit: bool,
    q4_0: TileKernels,
    q4_1: TileKernels,
    q8_0: TileKernels,
    q4_k: TileKernels,
    q6_k: TileKernels,
    /// In groups of 32, 64 and 128.
    int4: [TileKernels; 3],
    q4_0_chains: TileKernels,
    q4_1_chains: TileKernels,
    q8_0_chains: TileKernels,
    q4_k_chains: TileKernels,
    q6_k_chains: TileKernels,
    int4_chains: [TileKernels; 3],
    bf16_chains: TileKernels,
    bf16: TileKernels,
    f16: TileKernels,
    f32: TileKernels,
}

impl Matmul {
    /// The kernels for `isa`.
    ///
    /// # Panics
    /// If this machine lacks it.
    pub fn new(isa: Isa) -> Matmul {
        Matmul {
            rows_at_once: rows_at_once(isa),
            matrix_unit: isa == Isa::Amx,
            q4_0: tile_kernels::<Q4_0>(isa),
            q4_1: tile_kernels::<Q4_1>(isa),
            q8_0: tile_kernels::<Q8_0>(isa),
            q4_k: tile_kernels::<Q4K>(isa),
            q6_k: tile_kernels::<Q6K>(isa),
            int4: [tile_kernels::<Int4<1>>(isa), tile_kernels::<Int4<2>>(isa), tile_kernels::<Int4<4>>(isa)],
            q4_0_chains: tile_kernels::<Chains<Q4_0>>(isa),
            q4_1_chains: tile_kernels::<Chains<Q4_1>>(isa),
            q8_0_chains: tile_kernels::<Chains<Q8_0>>(isa),
            q4_k_chains: tile_kernels::<Chains<Q4K>>(isa),
            q6_k_chains: tile_kernels::<Chains<Q6K>>(isa),
            int4_chains: [
                tile_kernels::<Chains<Int4<1>>>(isa),
                tile_kernels::<Chains<Int4<2>>>(isa),
                tile_kernels::<Chains<Int4<4>>>(isa),
            ],
            bf16_chains: tile_kernels::<Chains<Bf16>>(isa),
            bf16: tile_kernels::<Bf16>(isa),
            f16: tile_kernels::<F16>(isa),
            f32: tile_kernels::<F32>(isa),
        }
    }

    /// Computes the outputs of `tiles` for `rows`.
    ///
    /// Workers share a matmul by calling this on disjoint ranges of tiles or of rows; the cut changes no bit.
    ///
    /// # Panics
    /// If rows or tiles do not exist, widths differ, or the activations lack a rounding that the weights need.
    ///
    /// # Safety
    /// The outputs of these rows and tiles ([`PackedMatrix::rows_of_tiles`]) are valid for writes, and for reads with
    /// [`Mode::Add`]; no other thread accesses them, or writes the blocks of
    /// 16 rows of the activations in which these rows lie, meanwhile.
    pub unsafe fn run(
        &self,
        matrix: &PackedMatrix,
        activations: &Activations,
        rows: Range<usize>,
        tiles: Range<usize>,
        output: Output,
    ) {
        assert_eq!(matrix.columns(), activations.columns(), "columns of weights and activations");
        assert!(rows.end <= activations.rows(), "rows {rows:?} of {}", activations.rows());
        assert!(tiles.end <= matrix.tiles(), "tiles {tiles:?} of {}", matrix.tiles());
        for block in rows.clone().step_by(CACHED_ROWS) {
            let block = block..rows.end.min(block + CACHED_ROWS);
            for part in matrix.parts() {
                let first = tiles.start.max(part.first_tile);
                let tiles = first - part.first_tile..first.max(tiles.end.min(part.end_tile())) - part.first_tile;
                let first = Inputs { activations, plane: Plane::of(part.rounding) };
                if part.rounding != InputRounding::Int8Twice {
                    // SAFETY: the caller's; the tiles are in this part.
                    unsafe { self.run_part(matrix, part, first, block.clone(), tiles, output) };
                    continue;
                }
                // The weights of the first product are still cached for the second one.
                for start in tiles.clone().step_by(2) {
                    let tiles = start..tiles.end.min(start + 2);
                    let rest = Inputs { plane: Plane::Rest, ..first };
                    // SAFETY: as above.
                    unsafe {
                        self.run_part(matrix, part, first, block.clone(), tiles.clone(), output);
                        self.run_part(matrix, part, rest, block.clone(), tiles, Output { mode: Mode::Add, ..output });
                    }
                }
            }
        }
    }

    /// Runs tiles, counted within their part, for at most [`CACHED_ROWS`] rows.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn run_part(
        &self,
        matrix: &PackedMatrix,
        part: &Part,
        inputs: Inputs<'_>,
        rows: Range<usize>,
        tiles: Range<usize>,
        output: Output,
    ) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        let rows = match self.matrix_unit {
            // SAFETY: the caller's; the instruction set is supported.
            true => unsafe {
                let done = matrix_unit::run(matrix, part, inputs, rows.clone(), tiles.clone(), output);
                rows.start + done..rows.end
            },
            false => rows,
        };
        if rows.is_empty() {
            return;
        }
        for tile in tiles {
            let job = TileJob::new(matrix, part, tile, output);
            // SAFETY: as above.
            unsafe { self.run_rows(job, part, inputs, rows.clone()) }
        }
    }

    /// Runs a job, made for row 0, for each of the rows.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn run_rows(&self, job: TileJob, part: &Part, inputs: Inputs<'_>, rows: Range<usize>) {
        let kernels = self.kernels(part);
        let mut row = rows.start;
        while row < rows.end {
            let count = self.rows_at_once.min(ROW_BLOCK - row % ROW_BLOCK).min(rows.end - row);
            let job = job.at(part, inputs, row);
            // SAFETY: the tile and the records have `columns` columns, the rows lie in one block; outputs are the
            // caller's.
            unsafe { kernels[count - 1](&job) };
            row += count;
        }
    }

    fn kernels(&self, part: &Part) -> &TileKernels {
        let in_chains = part.rounding == InputRounding::Bf16Chains;
        let choose = |usual, chains| if in_chains { chains } else { usual };
        match part.format {
            WeightFormat::Q4_0 => choose(&self.q4_0, &self.q4_0_chains),
            WeightFormat::Q4_1 => choose(&self.q4_1, &self.q4_1_chains),
            WeightFormat::Q8_0 => choose(&self.q8_0, &self.q8_0_chains),
            WeightFormat::Q4K => choose(&self.q4_k, &self.q4_k_chains),
            WeightFormat::Q6K => choose(&self.q6_k, &self.q6_k_chains),
            WeightFormat::Int4Group32 => choose(&self.int4[0], &self.int4_chains[0]),
            WeightFormat::Int4Group64 => choose(&self.int4[1], &self.int4_chains[1]),
            WeightFormat::Int4Group128 => choose(&self.int4[2], &self.int4_chains[2]),
            WeightFormat::Bf16 => choose(&self.bf16, &self.bf16_chains),
            WeightFormat::F16 => &self.f16,
            WeightFormat::F32 => &self.f32,
        }
    }
}

fn rows_at_once(isa: Isa) -> usize {
    match isa {
        Isa::Scalar => crate::simd::Scalar::ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => crate::simd::Avx2::ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => crate::simd::AvxVnni::ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => crate::simd::Avx512::ROWS,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => crate::simd::Neon::ROWS,
        // Those of other architectures, which have no kernels here.
        _ => crate::simd::Scalar::ROWS,
    }
}

fn tile_kernels<W: Weights>(isa: Isa) -> TileKernels {
    [
        select_tile::<W, 1>(isa),
        select_tile::<W, 2>(isa),
        select_tile::<W, 3>(isa),
        select_tile::<W, 4>(isa),
        select_tile::<W, 5>(isa),
        select_tile::<W, 6>(isa),
        select_tile::<W, 7>(isa),
        select_tile::<W, 8>(isa),
    ]
}
