//! The arithmetic of the matmul kernels once more, one output at a time, from the contract's types alone.

use half::bf16;
use octavo_backend::{InputRounding, Matrix, WeightFormat, numerics::ActivationGroup};

/// Output `n` of a matrix for one row of unrounded activations, in the order that [`super`] defines.
pub(super) fn output(matrix: &Matrix, rounding: InputRounding, n: usize, activations: &[f32]) -> f32 {
    match matrix.data.format {
        _ if rounding == InputRounding::Bf16Chains => in_chains(matrix, n, activations),
        format if format.is_quantized() => {
            let product = quantized(matrix, n, activations);
            if rounding != InputRounding::Int8Twice {
                return product;
            }
            let groups = activations.as_chunks().0.iter();
            let rest: Vec<f32> = groups.flat_map(|values| ActivationGroup::round(values).rest(values)).collect();
            product + quantized(matrix, n, &rest)
        }
        WeightFormat::Bf16 => in_pairs(matrix, n, activations),
        _ => {
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
        if matrix.data.format.has_minima() {
            sum = codes.minimum.mul_add(group.scale * group.sum() as f32, sum);
        }
    }
    sum
}

/// The weights of a row as bfloat16.
fn widened(matrix: &Matrix, n: usize) -> Vec<f32> {
    if matrix.data.format.is_quantized() {
        let blocks = (0..matrix.columns / 32).map(|block| matrix.codes(n, block).to_bf16());
        return blocks.flatten().map(bf16::to_f32).collect();
    }
    let mut weights = vec![0.0; matrix.columns];
    matrix.dequantize_row(n, &mut weights);
    weights
}

fn in_chains(matrix: &Matrix, n: usize, activations: &[f32]) -> f32 {
    let mut sum = 0.0f32;
    for (weights, values) in widened(matrix, n).chunks(32).zip(activations.chunks(32)) {
        let mut chains = [0.0f32; 2];
        for (k, (w, x)) in weights.iter().zip(values).enumerate() {
            chains[k % 2] = w.mul_add(bf16::from_f32(*x).to_f32(), chains[k % 2]);
        }
        sum += chains[0] + chains[1];
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
pub(super) fn exact_output(matrix: &Matrix, rounding: InputRounding, n: usize, activations: &[f32]) -> (f64, f64) {
    let mut weights = vec![0.0f32; matrix.columns];
    let mut terms: Vec<f64> = Vec::new();
    match matrix.data.format {
        _ if rounding == InputRounding::Bf16Chains => {
            for (w, x) in widened(matrix, n).iter().zip(activations) {
                terms.push(f64::from(*w) * f64::from(bf16::from_f32(*x).to_f32()));
            }
        }
        format if format.is_quantized() => {
            for (block, values) in activations.as_chunks().0.iter().enumerate() {
                let (group, codes) = (ActivationGroup::round(values), matrix.codes(n, block));
                let rest = ActivationGroup::round(&group.rest(values));
                let twice = f64::from(u8::from(rounding == InputRounding::Int8Twice));
                for (w, (x, rest_code)) in codes.codes.iter().zip(group.codes.into_iter().zip(rest.codes)) {
                    let rest = twice * f64::from(rest.scale) * f64::from(rest_code);
                    let x = f64::from(group.scale) * f64::from(x) + rest;
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
