//! What this machine can do at best, measured: the limits that benchmarks are printed beside.
//!
//! Every function measures one thread; a machine's limit is the sum over all its threads, measured at once.

use std::{
    borrow::Cow,
    hint::black_box,
    time::{Duration, Instant},
};

use octavo_backend::{BackendError, Matrix, WeightData, WeightFormat};

use crate::{
    activation::Activations,
    isa::Isa,
    matmul::{EARLY_DISTANCE, Matmul, Mode, Output},
    options::ActivationType,
    pack::PackedMatrix,
    simd::{Simd, simd_shells},
};

/// Dot steps of one accumulator in one call.
const STEPS: usize = 2048;

/// Outputs, columns and rows of the product that is measured: all of it fits in most second-level caches.
const OUTPUTS: usize = 128;
const COLUMNS: usize = 512;
const ROWS: usize = 256;

/// Operations of one dot step: 64 multiplications and 64 additions.
const OPERATIONS: usize = 128;

/// Independent sums: enough to hide the latency of the dot product instruction where it issues twice a cycle, and few
/// enough for 16 registers where a vector takes two, or 32 where it takes four.
fn accumulators(isa: Isa) -> usize {
    match isa {
        Isa::Scalar | Isa::Avx2 | Isa::AvxVnni | Isa::Neon => 3,
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => 12,
    }
}

/// Integer dot product throughput of the calling thread, in operations a second (a multiplication and an addition are
/// two): the best call within `time`.
pub fn dot_peak(isa: Isa, time: Duration) -> f64 {
    let run = if accumulators(isa) == 12 { select_dots::<12>(isa) } else { select_dots::<3>(isa) };
    let operations = STEPS * accumulators(isa) * OPERATIONS;
    let operands = black_box([1u8; STEPS * 4]);
    // SAFETY: the array has as many bytes as the kernel reads.
    best_rate(operations, time, || unsafe { run(operands.as_ptr()) })
}

/// Read bandwidth of the calling thread, in bytes a second: the best pass over `buffer` within `time`,
/// fetching as far ahead as the matmul kernels do.
///
/// Memory bandwidth takes a buffer several times as large as the last-level cache.
pub fn read_bandwidth(isa: Isa, buffer: &[u8], time: Duration) -> f64 {
    let run = select_read(isa);
    // SAFETY: pointer and length of one slice.
    best_rate(buffer.len(), time, || unsafe { run(buffer.as_ptr(), buffer.len()) })
}

/// Operations a second of the calling thread's matmul over cached weights of a format: the best call within `time`. It is what
/// the weights' kernels allow where memory does not matter, as in prefill.
///
/// # Errors
/// Memory that cannot be had.
pub fn product_rate(
    isa: Isa,
    format: WeightFormat,
    activations: ActivationType,
    time: Duration,
) -> Result<f64, BackendError> {
    let bytes = vec![0; OUTPUTS * format.row_bytes(COLUMNS).unwrap_or(0)];
    let matrix = Matrix { rows: OUTPUTS, columns: COLUMNS, data: WeightData { format, bytes: Cow::Owned(bytes) } };
    let packed = PackedMatrix::pack(&[matrix], activations)?;
    let inputs = Activations::new(isa, packed.input_roundings(), COLUMNS, ROWS)?;
    let values: Vec<f32> = (0..COLUMNS).map(|i| (i % 101) as f32 - 50.0).collect();
    // SAFETY: nobody else uses the activations.
    (0..ROWS).for_each(|row| unsafe { inputs.write_row(row, &values) });
    let mut outputs = vec![0.0f32; ROWS * OUTPUTS];
    let output = Output { start: outputs.as_mut_ptr(), stride: OUTPUTS, mode: Mode::Store };
    let kernels = Matmul::new(isa);
    Ok(best_rate(2 * ROWS * OUTPUTS * COLUMNS, time, || {
        // SAFETY: `outputs` has all rows and outputs, and outlives the call.
        unsafe { kernels.run(&packed, &inputs, 0..ROWS, 0..packed.tiles(), output) };
        0
    }))
}

/// Calls `run` until `time` has passed, at least twice, and returns amount / shortest duration.
fn best_rate(amount: usize, time: Duration, run: impl Fn() -> i32) -> f64 {
    let start = Instant::now();
    let mut shortest = f64::INFINITY;
    let mut calls = 0;
    while calls < 2 || start.elapsed() < time {
        let begin = Instant::now();
        black_box(run());
        shortest = shortest.min(begin.elapsed().as_secs_f64());
        calls += 1;
    }
    amount as f64 / shortest
}

/// Every step has other activations, from the first-level cache as in a matmul, and every sum other weights: equal
/// products would be computed once.
///
/// # Safety
/// `STEPS * 4` bytes are readable at `operands`.
#[inline(always)]
unsafe fn dots<S: Simd, const N: usize>(simd: S, operands: *const u8) -> i32 {
    let zero = simd.splat_int(0);
    let mut weights = [zero; N];
    for (i, weight) in weights.iter_mut().enumerate() {
        // SAFETY: the caller's: `N` vectors are less than that.
        *weight = unsafe { simd.load_bytes(operands.add(i * 64)) };
    }
    let mut sums = [simd.start_nibbles(zero); N];
    for step in 0..STEPS {
        // SAFETY: the caller's.
        let activations = unsafe { simd.broadcast_bytes(operands.add(step * 4)) };
        for i in 0..N {
            sums[i] = simd.dot_nibbles(sums[i], weights[i], activations);
        }
    }
    let mut total = zero;
    for sum in sums {
        total = simd.add_int(total, simd.finish_nibbles(sum, zero));
    }
    simd.fold_int(total)
}

#[inline(always)]
unsafe fn read<S: Simd>(simd: S, from: *const u8, len: usize) -> i32 {
    let mut sums = [simd.splat_int(0); 4];
    for at in (0..len / 256 * 256).step_by(256) {
        for (i, sum) in sums.iter_mut().enumerate() {
            simd.prefetch_early(from.wrapping_add(at + i * 64 + EARLY_DISTANCE));
            // SAFETY: the caller's: `len` bytes are readable.
            *sum = simd.add_int(*sum, unsafe { simd.load_bytes(from.add(at + i * 64)) });
        }
    }
    let total = simd.add_int(simd.add_int(sums[0], sums[1]), simd.add_int(sums[2], sums[3]));
    simd.fold_int(total)
}

simd_shells! {
    fn select_dots[const N: usize][N] = dots(operands: *const u8) -> i32;
    fn select_read[][] = read(from: *const u8, len: usize) -> i32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_positive_and_finite_on_every_instruction_set() {
        let buffer = vec![1u8; 1 << 16];
        for isa in Isa::supported() {
            let products = WeightFormat::ALL.map(|format| {
                product_rate(isa, format, ActivationType::Int8, Duration::ZERO).expect("memory for a product")
            });
            let others = [dot_peak(isa, Duration::ZERO), read_bandwidth(isa, &buffer, Duration::ZERO)];
            for limit in products.into_iter().chain(others) {
                assert!(limit.is_finite() && limit > 1e6, "{isa}: {limit}");
            }
        }
    }

    #[test]
    fn a_pass_reads_the_whole_buffer() {
        let buffer: Vec<i32> = (0..1024).collect();
        for isa in Isa::supported() {
            // SAFETY: pointer and length of one slice.
            let sum = unsafe { select_read(isa)(buffer.as_ptr().cast(), 4096) };
            assert_eq!(sum, 1023 * 512, "{isa}");
        }
    }
}
