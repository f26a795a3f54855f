//! Matrix products: dense ones by cuBLASLt, those with 4-bit codes by our kernels.

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;

use crate::{
    cublaslt::{CublasLt, Product},
    device::{Device, Extent, Kernel, Slice},
    error::CudaError,
    kernels::{arguments, int},
    weights::{Dense, Int4Weights, Projection},
};

/// Everything that multiplies.
pub struct Products {
    cublaslt: Mutex<CublasLt>,
    int4: [Int4Kernels; 3],
    sum_splits: Kernel,
    multiprocessors: usize,
}

/// Where a dense product goes.
#[derive(Clone, Copy)]
pub struct DenseOutput {
    /// `[rows, stride]`.
    pub sums: Slice<f32>,
    /// From one row to the next.
    pub stride: usize,
    /// On every sum.
    pub factor: f32,
}

/// The kernels for codes whose scales are shared by `group` values.
struct Int4Kernels {
    group: usize,
    gemv: Kernel,
    gemm: Kernel,
}

/// Most rows of an input that are multiplied with each byte of the weights read once, and by every thread.
const GEMV_ROWS: usize = 8;

/// Rows and columns of the output that a block of the larger kernel computes, and columns of the weights at a time.
const GEMM_ROWS: usize = 64;
const GEMM_COLUMNS: usize = 64;
const GEMM_STAGES: usize = 4;
const STAGE_DEPTH: usize = 128;

/// Of the weights' columns a block should have so many steps, or the sums of its neighbours cost more than they save.
const STEPS_A_SPLIT: usize = 4;

impl Products {
    /// Loads kernels and takes hold of cuBLASLt.
    ///
    /// # Errors
    /// A kernel is missing; the driver's.
    pub fn new(device: &Arc<Device>, cublaslt: CublasLt) -> Result<Products, CudaError> {
        let module = device.load("int4_matmul")?;
        let kernels = |group: usize| -> Result<Int4Kernels, CudaError> {
            Ok(Int4Kernels {
                group,
                gemv: module.kernel(&format!("int4_gemv_g{group}"), 0)?,
                gemm: module.kernel(&format!("int4_gemm_g{group}"), gemm_shared_bytes(group, GEMM_ROWS))?,
            })
        };
        Ok(Products {
            cublaslt: Mutex::new(cublaslt),
            int4: [kernels(32)?, kernels(64)?, kernels(128)?],
            sum_splits: module.kernel("int4_sum_splits", 0)?,
            multiprocessors: device.info().multiprocessors,
        })
    }

    /// `output[row] = weights input[row]` for `rows` rows; `scratch` is for sums that are added up later.
    ///
    /// # Errors
    /// The driver's or the library's.
    pub fn run(
        &self,
        weights: &Projection,
        input: Slice<bf16>,
        output: Slice<f32>,
        rows: usize,
        scratch: Slice<f32>,
    ) -> Result<(), CudaError> {
        match weights {
            Projection::Dense(dense) => {
                self.dense(dense, input, DenseOutput { sums: output, stride: dense.outputs, factor: 1.0 }, rows)
            }
            Projection::Int4(codes) => self.int4(codes, input, output, rows, scratch),
        }
    }

    /// `output[row] = factor * weights input[row]`.
    ///
    /// # Errors
    /// The library's.
    pub fn dense(
        &self,
        dense: &Dense,
        input: Slice<bf16>,
        output: DenseOutput,
        rows: usize,
    ) -> Result<(), CudaError> {
        let Dense { weights, outputs, inputs } = *dense;
        let DenseOutput { sums: output, stride, factor } = output;
        let product = Product { weights, input, output, outputs, inputs, stride, rows, factor };
        // A panic while it was held leaves at worst an algorithm that was not remembered.
        self.cublaslt.lock().unwrap_or_else(PoisonError::into_inner).run(&product)
    }

    fn int4(
        &self,
        codes: &Int4Weights,
        input: Slice<bf16>,
        output: Slice<f32>,
        rows: usize,
        scratch: Slice<f32>,
    ) -> Result<(), CudaError> {
        let Some(kernels) = self.int4.iter().find(|kernels| kernels.group == codes.group) else {
            return Err(CudaError::NoKernel { kernel: format!("int4_gemv_g{}", codes.group), module: "int4_matmul" });
        };
        assert!(input.len >= rows * codes.inputs && output.len >= rows * codes.outputs);
        let launch = |kernel: &Kernel, extent: Extent, output: u64| {
            let arguments = arguments![
                output,
                input.address,
                codes.codes.address,
                codes.scales.address,
                codes.zeros.address,
                int(rows),
                int(codes.outputs),
                int(codes.inputs),
            ];
            // SAFETY: the arguments of the kernel's signature, in its order; slices as long as the weights say.
            unsafe { kernel.launch(extent, arguments) }
        };
        if rows <= GEMV_ROWS {
            let extent = Extent { grid: [codes.outputs.div_ceil(32), rows.min(1), 1], block: 256, shared_bytes: 0 };
            return launch(&kernels.gemv, extent, output.address);
        }
        let splits = self.splits(codes, rows, scratch.len);
        let extent = Extent {
            grid: [codes.outputs.div_ceil(GEMM_COLUMNS), rows.div_ceil(GEMM_ROWS), splits],
            block: 128,
            shared_bytes: gemm_shared_bytes(codes.group, rows),
        };
        if splits == 1 {
            return launch(&kernels.gemm, extent, output.address);
        }
        launch(&kernels.gemm, extent, scratch.address)?;
        let count = rows * codes.outputs;
        let extent = Extent { grid: [count.div_ceil(256), 1, 1], block: 256, shared_bytes: 0 };
        let arguments = arguments![output.address, scratch.address, count as i64, int(splits)];
        // SAFETY: as above; the scratch has `splits` times as many sums as the output.
        unsafe { self.sum_splits.launch(extent, arguments) }
    }

    /// Parts of the weights' columns, so that every multiprocessor has two blocks.
    fn splits(&self, codes: &Int4Weights, rows: usize, scratch: usize) -> usize {
        let blocks = codes.outputs.div_ceil(GEMM_COLUMNS) * rows.div_ceil(GEMM_ROWS);
        let wanted = (2 * self.multiprocessors).div_ceil(blocks);
        let useful = codes.inputs.div_ceil(STAGE_DEPTH) / STEPS_A_SPLIT;
        wanted.min(useful).min(scratch / (rows * codes.outputs)).max(1)
    }
}

/// Of `rows` rows of input, rounded up to 8; of the codes; of scales and zero points.
fn gemm_shared_bytes(group: usize, rows: usize) -> usize {
    let rows = rows.min(GEMM_ROWS).next_multiple_of(8);
    let groups_of_chunk = if group < 64 { 64 / group } else { 1 };
    GEMM_STAGES * (rows * STAGE_DEPTH * 2 + GEMM_COLUMNS * STAGE_DEPTH / 2 + 4 * 96 * groups_of_chunk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_of_the_larger_int4_kernel_follows_rows_and_group() {
        assert_eq!(gemm_shared_bytes(128, 9), 4 * (16 * 256 + 4096 + 384));
        assert_eq!(gemm_shared_bytes(32, 700), 4 * (64 * 256 + 4096 + 768));
    }
}
