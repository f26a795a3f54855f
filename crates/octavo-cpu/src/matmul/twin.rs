//! The arithmetic of the matmul kernels once more, one output at a time, from the contract's types alone.

use half::bf16;
use octavo_backend::{
    InputRounding, Matrix, WeightFormat,
    block::{ActivationBlock, BLOCK},
    numerics::ActivationGroup,
};

/// Output `n` of a matrix for one row of unrounded activations, in the order that [`super`] defines.
pub(super) fn output(matrix: &Matrix, quantized_input: InputRounding, n: usize, activations: &[f32]) -> f32 {
    match matrix.data.format {
        format if format.is_quantized() && quantized_input == InputRounding::Int16Block128 => {
            in_blocks(matrix, n, activations)
        }
        WeightFormat::Q4_0 | WeightFormat::Q4_1 | WeightFormat::Q8_0 => quantized(matrix, n, activations),
        WeightFormat::Bf16 => in_pairs(matrix, n, activations),
        WeightFormat::F16 | WeightFormat::F32 => {
            let mut weights = vec![0.0; matrix.columns];
            matrix.dequantize_row(n, &mut weights);
            weights.iter().zip(activations).fold(0.0, |sum, (w, x)| w.mul_add(*x, sum))
        }
    }
}

fn quantized(matrix: &Matrix, n: usize, activations: &[f32]) -> f32 {
    let mut sum = 0.0f32;
    for (block, values) in activations.as_chunks().0.iter().enumerate() {
        let group = ActivationGroup::round(values);
        let codes = matrix.codes(n, block);
        let dot: i32 = codes.codes.iter().zip(group.codes).map(|(w, x)| i32::from(*w) * i32::from(x)).sum();
        sum = (dot as f32 * group.scale).mul_add(codes.scale, sum);
        if matrix.data.format == WeightFormat::Q4_1 {
            sum = codes.minimum.mul_add(group.scale * group.sum() as f32, sum);
        }
    }
    sum
}

fn in_blocks(matrix: &Matrix, n: usize, activations: &[f32]) -> f32 {
    let mut sum = 0.0f32;
    for (index, values) in activations.chunks(BLOCK).enumerate() {
        let (weights, block) = (matrix.weight_block(n, index), ActivationBlock::round(values));
        let dot: i64 = weights.codes.iter().zip(block.codes).map(|(w, x)| i64::from(*w) * i64::from(x)).sum();
        sum = (dot as f32 * block.scale).mul_add(weights.scale, sum);
    }
    sum
}

fn in_pairs(matrix: &Matrix, n: usize, activations: &[f32]) -> f32 {
    let mut weights = vec![0.0; matrix.columns];
    matrix.dequantize_row(n, &mut weights);
    let mut sum = 0.0f32;
    for (w, x) in weights.chunks(2).zip(activations.chunks(2)) {
        if let ([_, w], [_, x]) = (w, x) {
            sum = w.mul_add(bf16::from_f32(*x).to_f32(), sum);
        }
        sum = w[0].mul_add(bf16::from_f32(x[0]).to_f32(), sum);
    }
    sum
}

/// The same output in `f64` on the same rounded operands, and the sum of the magnitudes of its terms.
pub(super) fn exact_output(
    matrix: &Matrix,
    quantized_input: InputRounding,
    n: usize,
    activations: &[f32],
) -> (f64, f64) {
    let mut weights = vec![0.0f32; matrix.columns];
    let mut terms: Vec<f64> = Vec::new();
    match matrix.data.format {
        format if format.is_quantized() && quantized_input == InputRounding::Int16Block128 => {
            for (index, values) in activations.chunks(BLOCK).enumerate() {
                let (weights, block) = (matrix.weight_block(n, index), ActivationBlock::round(values));
                for (w, x) in weights.codes.iter().zip(block.codes) {
                    let scales = f64::from(weights.scale) * f64::from(block.scale);
                    terms.push(f64::from(*w) * f64::from(x) * scales);
                }
            }
        }
        WeightFormat::Q4_0 | WeightFormat::Q4_1 | WeightFormat::Q8_0 => {
            for (block, values) in activations.as_chunks().0.iter().enumerate() {
                let (group, codes) = (ActivationGroup::round(values), matrix.codes(n, block));
                for (w, x) in codes.codes.iter().zip(group.codes) {
                    let x = f64::from(group.scale) * f64::from(x);
                    terms.push(f64::from(codes.scale) * f64::from(*w) * x);
                    terms.push(f64::from(codes.minimum) * x);
                }
            }
        }
        format => {
            matrix.dequantize_row(n, &mut weights);
            for (w, x) in weights.iter().zip(activations) {
                let x = if format == WeightFormat::Bf16 { bf16::from_f32(*x).to_f32() } else { *x };
                terms.push(f64::from(*w) * f64::from(x));
            }
        }
    }
    (terms.iter().sum(), terms.iter().map(|term| term.abs()).sum())
}
