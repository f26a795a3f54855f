//! The operations of [`super::Reference`], each the plainest program that defines it.

use crate::{
    AttentionSpec, InputRounding, KvType, Matrix, Numerics, WeightFormat,
    numerics::{ACTIVATION_GROUP, ActivationGroup},
};
use half::bf16;

/// `output[row] = W input[row]` for a stack of matrices: `[rows, columns]` to `[rows, sum of the parts' rows]`.
///
/// Each part's input is rounded as its format asks. The order of every sum is fixed:
/// - 8-bit input: for each group of 32 in ascending order, the exact integer dot product times the activation's scale,
///   then one fused multiply-add with the weight's scale, and for formats with a minimum one more with
///   `minimum * (activation scale * sum of codes)`; of an input rounded twice, the sum of the two products;
/// - bfloat16 input in chains: for each group of 32 in ascending order, one fused chain of the even elements from 0 and one
///   of the odd ones, which are added, and their sum then to what there is;
/// - bfloat16 input: one accumulator, pairs ascending, the odd element of a pair before the even one, fused;
/// - otherwise: one accumulator, ascending, fused; when nothing is rounded at all, 16 lanes, which is quicker and as
///   accurate.
pub(super) fn matmul(parts: &[Matrix<'static>], numerics: Numerics, input: &[f32]) -> Vec<f32> {
    let columns = parts.first().map_or(1, |part| part.columns);
    let width: usize = parts.iter().map(|part| part.rows).sum();
    let rows = input.len() / columns;
    let mut output = vec![0.0; rows * width];
    let mut first = 0;
    for part in parts {
        let input = RoundedInput::new(numerics, part, input);
        let mut weights = vec![0.0; columns];
        for n in 0..part.rows {
            part.dequantize_row(n, &mut weights);
            if matches!(input, RoundedInput::Chains(_)) && part.data.format.is_quantized() {
                round_to_bf16(part, n, &mut weights);
            }
            for row in 0..rows {
                output[row * width + first + n] = match &input {
                    RoundedInput::Lanes(input) => dot_in_lanes(&weights, &input[row * columns..][..columns]),
                    RoundedInput::InOrder(input) => dot_in_order(&weights, &input[row * columns..][..columns]),
                    RoundedInput::Pairs(input) => dot_in_pairs(&weights, &input[row * columns..][..columns]),
                    RoundedInput::Groups(groups) => dot_in_groups(part, n, groups_of(groups, row, columns)),
                    RoundedInput::GroupsTwice(first, rest) => {
                        let first = dot_in_groups(part, n, groups_of(first, row, columns));
                        first + dot_in_groups(part, n, groups_of(rest, row, columns))
                    }
                    RoundedInput::Chains(input) => dot_in_chains(&weights, &input[row * columns..][..columns]),
                };
            }
        }
        first += part.rows;
    }
    output
}

enum RoundedInput<'a> {
    Lanes(&'a [f32]),
    InOrder(&'a [f32]),
    Pairs(Vec<f32>),
    Groups(Vec<ActivationGroup>),
    GroupsTwice(Vec<ActivationGroup>, Vec<ActivationGroup>),
    Chains(Vec<f32>),
}

impl<'a> RoundedInput<'a> {
    fn new(numerics: Numerics, matrix: &Matrix<'_>, input: &'a [f32]) -> RoundedInput<'a> {
        let rounding = match matrix.data.format {
            format if format.is_quantized() => numerics.quantized_input,
            WeightFormat::Bf16 => numerics.bf16_input,
            _ => InputRounding::None,
        };
        match rounding {
            InputRounding::None if numerics == Numerics::EXACT => RoundedInput::Lanes(input),
            InputRounding::None => RoundedInput::InOrder(input),
            InputRounding::Bf16 => {
                RoundedInput::Pairs(input.iter().map(|value| bf16::from_f32(*value).to_f32()).collect())
            }
            InputRounding::Int8Group32 => {
                let (groups, _) = input.as_chunks::<ACTIVATION_GROUP>();
                RoundedInput::Groups(groups.iter().map(ActivationGroup::round).collect())
            }
            InputRounding::Int8Twice => {
                let (groups, _) = input.as_chunks::<ACTIVATION_GROUP>();
                let twice = groups.iter().map(|values| {
                    let first = ActivationGroup::round(values);
                    (first, ActivationGroup::round(&first.rest(values)))
                });
                let (first, rest) = twice.unzip();
                RoundedInput::GroupsTwice(first, rest)
            }
            InputRounding::Bf16Chains => {
                RoundedInput::Chains(input.iter().map(|value| bf16::from_f32(*value).to_f32()).collect())
            }
        }
    }
}

/// The groups of one row.
fn groups_of(groups: &[ActivationGroup], row: usize, columns: usize) -> &[ActivationGroup] {
    let per_row = columns / ACTIVATION_GROUP;
    &groups[row * per_row..][..per_row]
}

fn dot_in_lanes(weights: &[f32], input: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (weights, input) in weights.chunks(16).zip(input.chunks(16)) {
        for ((lane, weight), value) in lanes.iter_mut().zip(weights).zip(input) {
            *lane += weight * value;
        }
    }
    crate::numerics::fold_lanes(lanes)
}

fn dot_in_order(weights: &[f32], input: &[f32]) -> f32 {
    weights.iter().zip(input).fold(0.0, |sum, (weight, value)| weight.mul_add(*value, sum))
}

fn dot_in_pairs(weights: &[f32], input: &[f32]) -> f32 {
    weights.chunks_exact(2).zip(input.chunks_exact(2)).fold(0.0, |sum, (weight, value)| {
        let odd = weight[1].mul_add(value[1], sum);
        weight[0].mul_add(value[0], odd)
    })
}

fn dot_in_groups(matrix: &Matrix<'_>, row: usize, groups: &[ActivationGroup]) -> f32 {
    let mut sum = 0.0f32;
    for (block, group) in groups.iter().enumerate() {
        let weights = matrix.codes(row, block);
        let dot: i32 = weights.codes.iter().zip(group.codes).map(|(&w, x)| i32::from(w) * i32::from(x)).sum();
        sum = (dot as f32 * group.scale).mul_add(weights.scale, sum);
        if matrix.data.format.has_minima() {
            sum = weights.minimum.mul_add(group.scale * group.sum() as f32, sum);
        }
    }
    sum
}

fn dot_in_chains(weights: &[f32], input: &[f32]) -> f32 {
    weights.chunks(ACTIVATION_GROUP).zip(input.chunks(ACTIVATION_GROUP)).fold(0.0, |sum, (weights, input)| {
        let chain = |parity: usize| {
            let terms = weights.iter().zip(input).skip(parity).step_by(2);
            terms.fold(0.0f32, |sum, (weight, value)| weight.mul_add(*value, sum))
        };
        sum + (chain(0) + chain(1))
    })
}

fn round_to_bf16(matrix: &Matrix<'_>, row: usize, weights: &mut [f32]) {
    for (block, weights) in weights.as_chunks_mut::<ACTIVATION_GROUP>().0.iter_mut().enumerate() {
        *weights = matrix.codes(row, block).to_bf16().map(bf16::to_f32);
    }
}

/// Rotates the queries and keys of one stacked row (queries, keys, values) to their position.
pub(super) fn rotate(attention: &AttentionSpec, position: usize, row: &mut [f32]) {
    let pairs = attention.rope.inverse_frequencies.len();
    let (mut cosines, mut sines) = (vec![0.0; pairs], vec![0.0; pairs]);
    attention.rope.angles(position, &mut cosines, &mut sines);
    let rotated = (attention.num_heads + attention.num_kv_heads) * attention.head_size;
    for head in row[..rotated].chunks_exact_mut(attention.head_size) {
        for i in 0..pairs {
            let (x, y) = (head[i], head[i + pairs]);
            head[i] = x * cosines[i] - y * sines[i];
            head[i + pairs] = y * cosines[i] + x * sines[i];
        }
    }
}

/// Softmax attention of one row over the slots it sees; `queries` are already scaled.
///
/// Probabilities are rounded like keys and values before they are used, and what is used is what is summed.
pub(super) fn attend(
    attention: &AttentionSpec,
    kv: KvType,
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    slots: &[usize],
    output: &mut [f32],
) {
    let size = attention.head_size;
    for (head, (query, output)) in queries.chunks_exact(size).zip(output.chunks_exact_mut(size)).enumerate() {
        let at = |slot: &usize| slot * attention.kv_rows() + head / attention.group_size() * size;
        let scores: Vec<f32> = slots
            .iter()
            .map(|slot| query.iter().zip(&keys[at(slot)..][..size]).map(|(query, key)| query * key).sum())
            .collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| kv.round_operand((score - largest).exp())).collect();
        let total: f32 = weights.iter().sum();
        output.fill(0.0);
        for (slot, weight) in slots.iter().zip(&weights) {
            for (out, value) in output.iter_mut().zip(&values[at(slot)..][..size]) {
                *out += weight * value;
            }
        }
        output.iter_mut().for_each(|out| *out /= total);
    }
}

/// `x / (1 + exp(-x))`.
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}
