//! Where arithmetic is rounded, and the orders of summation that every backend shares.
//!
//! A backend declares its [`Numerics`]; [`crate::Reference`] in mirror mode rounds at the same places. What is defined
//! here bit for bit (activation groups, the order of a block-quantised dot product, RMSNorm) compares by `==` between
//! backends; attention and the pointwise functions compare within a tolerance.

use half::bf16;

use crate::{Matrix, WeightId};

/// Values that share one scale when activations are rounded to 8 bits.
pub const ACTIVATION_GROUP: usize = 32;

/// How a matmul's input is rounded before it is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputRounding {
    /// Not at all.
    None,
    /// To bfloat16, to nearest, ties to even.
    Bf16,
    /// To signed 8-bit integers with one `f32` scale for each 32 values ([`ActivationGroup`]).
    Int8Group32,
    /// As [`InputRounding::Int8Group32`], and what that leaves ([`ActivationGroup::rest`]) once more: about 15 bits. The
    /// product is the sum of both rounded inputs' products.
    Int8Twice,
    /// As [`InputRounding::Bf16`]; quantised weights are rounded to it as well ([`crate::Codes::to_bf16`]). A product of 32
    /// columns is one chain of fused multiply-adds of the even ones from 0, one of the odd ones, and their sum.
    Bf16Chains,
}

impl InputRounding {
    /// Every way.
    pub const ALL: [InputRounding; 5] = [
        InputRounding::None,
        InputRounding::Bf16,
        InputRounding::Int8Group32,
        InputRounding::Int8Twice,
        InputRounding::Bf16Chains,
    ];
}

/// What the cache keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element.
    #[default]
    Bf16,
    /// 1 byte an element, and a bfloat16 scale for each token and KV head's key, another for its value.
    Int8,
}

impl KvType {
    /// Bytes of `heads` keys or values with `elements` elements in all.
    pub fn bytes(self, elements: usize, heads: usize) -> usize {
        match self {
            KvType::F32 => 4 * elements,
            KvType::Bf16 => 2 * elements,
            KvType::Int8 => elements + heads * size_of::<bf16>(),
        }
    }

    /// Turns one head's key or value into what the cache will give back.
    pub fn round_head(self, head: &mut [f32]) {
        match self {
            KvType::F32 => {}
            KvType::Bf16 => head.iter_mut().for_each(|value| *value = kv_bf16(*value).to_f32()),
            KvType::Int8 => {
                let (inverse, scale) = kv_scale(head);
                head.iter_mut().for_each(|value| *value = scale.to_f32() * f32::from(int8_code(*value, inverse)));
            }
        }
    }

    /// A scaled query or a probability as attention uses it, at the coarsest: with [`KvType::Int8`] a backend may keep more bits.
    pub fn round_operand(self, value: f32) -> f32 {
        match self {
            KvType::F32 => value,
            KvType::Bf16 | KvType::Int8 => kv_bf16(value).to_f32(),
        }
    }
}

/// The smallest magnitude in attention with a rounded cache, 2^-40: keys, values, scaled queries, probabilities and the
/// scales of 8-bit heads below it are zeros.
///
/// Products are then whole multiples of 2^-94, and so are their sums, rounded or not: none is ever subnormal, and hardware
/// that takes such numbers for zeros gives the same bits as hardware that does not.
pub const SMALLEST_KV: f32 = 1.0 / (1u64 << 40) as f32;

/// Rounds an operand of attention to bfloat16, to nearest, ties to even; what is below [`SMALLEST_KV`] to zero.
pub fn kv_bf16(value: f32) -> bf16 {
    if value.abs() < SMALLEST_KV { bf16::ZERO } else { bf16::from_f32(value) }
}

/// For a head of an 8-bit cache: what its values are multiplied by before they are rounded to codes ([`int8_code`]), and
/// the scale that codes are multiplied by to have them back: largest magnitude / 127, rounded to bfloat16, so that a
/// probability of 1 times the scale is exact, and by [`kv_bf16`]. The scale is not finite when a value is not, so that the fault is not lost.
pub fn kv_scale(head: &[f32]) -> (f32, bf16) {
    let scale = kv_bf16(largest_magnitude(head) * (1.0 / 127.0));
    let is_usable = scale.is_finite() && scale > bf16::ZERO;
    (if is_usable { 1.0 / scale.to_f32() } else { 0.0 }, scale)
}

/// By the bits of the magnitudes, so that NaN beats infinity and infinity beats all numbers.
fn largest_magnitude(values: &[f32]) -> f32 {
    f32::from_bits(values.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

/// `round_ties_even(value * inverse)`, in -127..=127.
pub fn int8_code(value: f32, inverse: f32) -> i8 {
    (value * inverse).round_ties_even().clamp(-127.0, 127.0) as i8
}

/// How weights are rounded when they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightRounding {
    /// Not at all: what a format stands for is what is multiplied.
    None,
    /// To bfloat16, to nearest, ties to even: the embedding and the head, and all other matrices but those with 4-bit
    /// codes of AWQ and GPTQ. From then on they count as matrices with bfloat16 weights.
    Bf16,
}

impl WeightRounding {
    /// The matrices of one place as they are multiplied.
    pub fn apply(self, id: WeightId, parts: Vec<Matrix<'_>>) -> Vec<Matrix<'static>> {
        let is_table = matches!(id, WeightId::Embedding | WeightId::Head);
        let round = |part: Matrix<'_>| match self {
            WeightRounding::Bf16 if is_table || !part.data.format.is_int4() => part.to_bf16(),
            _ => part.into_owned(),
        };
        parts.into_iter().map(round).collect()
    }
}

/// What a backend promises of the sums that it adds up in parallel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// Each has the one order that [`crate::Reference`] has, whatever else is computed in the step: equal bits, always.
    Fixed,
    /// The order may depend on the shape of the step: equal within a tolerance.
    Free,
}

/// Where a backend rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numerics {
    /// Input of matmuls with block-quantised weights, at the coarsest.
    pub quantized_input: InputRounding,
    /// Input of matmuls with bfloat16 weights.
    pub bf16_input: InputRounding,
    /// Keys and values; scaled queries and the probabilities of attention are rounded as
    /// [`KvType::round_operand`] says.
    pub kv: KvType,
    /// Weights at load.
    pub weights: WeightRounding,
    /// The orders of sums.
    pub sums: Sums,
}

impl Numerics {
    /// No rounding anywhere: plain `f32`.
    pub const EXACT: Numerics = Numerics {
        quantized_input: InputRounding::None,
        bf16_input: InputRounding::None,
        kv: KvType::F32,
        weights: WeightRounding::None,
        sums: Sums::Fixed,
    };
}

/// 32 activations in 8 bits: `value = scale * code`, codes in -127..=127.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivationGroup {
    /// Largest magnitude / 127. Infinite or NaN when a value was, so that the fault is not lost.
    pub scale: f32,
    /// The codes.
    pub codes: [i8; ACTIVATION_GROUP],
}

impl ActivationGroup {
    /// Rounds 32 values: `code = round_ties_even(value * (127 / max|value|))`.
    pub fn round(values: &[f32; ACTIVATION_GROUP]) -> ActivationGroup {
        let largest = largest_magnitude(values);
        let inverse = if largest > 0.0 && largest.is_finite() { 127.0 / largest } else { 0.0 };
        ActivationGroup { scale: largest * (1.0 / 127.0), codes: values.map(|value| int8_code(value, inverse)) }
    }

    /// What rounding these values left: `fma(-scale, code, value)`.
    pub fn rest(&self, values: &[f32; ACTIVATION_GROUP]) -> [f32; ACTIVATION_GROUP] {
        let mut rest = *values;
        for (rest, code) in rest.iter_mut().zip(self.codes) {
            *rest = (-self.scale).mul_add(f32::from(code), *rest);
        }
        rest
    }

    /// The sum of the codes.
    pub fn sum(&self) -> i32 {
        self.codes.iter().map(|&code| i32::from(code)).sum()
    }
}

/// Sum of squares in the shared order: lane `i % 16` accumulates by fused multiply-add in ascending order, then lanes
/// are added by halves (8, 4, 2, 1). A length that is no multiple of 16 leaves the last lanes one term short.
pub fn sum_of_squares(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for chunk in values.chunks(16) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = value.mul_add(*value, *lane);
        }
    }
    fold_lanes(lanes)
}

/// Adds 16 lanes by halves: `lane[i] += lane[i + 8]`, then 4, 2 and 1.
pub fn fold_lanes(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// RMSNorm of one row: `output = (input * factor) * weight` with `factor = 1 / sqrt(sum_of_squares / n + epsilon)`.
pub fn rms_norm(input: &[f32], weight: &[f32], epsilon: f32, output: &mut [f32]) {
    let factor = rms_factor(sum_of_squares(input), input.len(), epsilon);
    for ((out, value), weight) in output.iter_mut().zip(input).zip(weight) {
        *out = (value * factor) * weight;
    }
}

/// `1 / sqrt(sum / n + epsilon)`, each operation rounded once.
pub fn rms_factor(sum_of_squares: f32, n: usize, epsilon: f32) -> f32 {
    1.0 / (sum_of_squares / n as f32 + epsilon).sqrt()
}

/// `e^x`: `2^n` times a polynomial of degree 6, within 2 units in the last place, with the same bits everywhere.
///
/// 0 below -87 and for negative infinity, infinity above 88, NaN for NaN. Each operation is one rounding, and nothing is
/// ever subnormal.
pub fn exp(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    if x > 88.0 {
        return f32::INFINITY;
    }
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-exp_terms::LN2_LOW, n.mul_add(-exp_terms::LN2_HIGH, x));
    let p = exp_terms::COEFFICIENTS.iter().fold(0.0f32, |p, &coefficient| p.mul_add(r, coefficient));
    p * f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23)
}

/// The numbers of [`exp`].
pub mod exp_terms {
    /// ln 2 in two parts, of which this one has few bits, so that `n * LN2_HIGH` is exact.
    pub const LN2_HIGH: f32 = 0.693_359_4;
    /// The rest of ln 2.
    pub const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Minimax on |r| <= ln(2) / 2 with the last two held at 1, highest power first: relative error 3e-9.
    pub const COEFFICIENTS: [f32; 7] =
        [0.001_381_459_9, 0.008_368_717, 0.041_668_39, 0.166_665_21, 0.499_999_94, 1.0, 1.0];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{WeightData, WeightFormat};

    #[test]
    fn rounded_weights_are_bfloat16_except_int4_codes_outside_of_tables() {
        let matrix = |format, bytes: Vec<u8>, columns| Matrix {
            rows: 1,
            columns,
            data: WeightData { format, bytes: bytes.into() },
        };
        let dense = || matrix(WeightFormat::F32, [1.0f32, 1.001, -3.3e-5].map(f32::to_le_bytes).concat(), 3);
        let codes = || matrix(WeightFormat::Int4Group32, [&[0, 0x3c, 0][..], &[0x21; 16]].concat(), 32);
        let formats = |rounding: WeightRounding, id| {
            rounding.apply(id, vec![dense(), codes()]).into_iter().map(|part| part.data.format).collect::<Vec<_>>()
        };
        use WeightFormat::{Bf16, F32, Int4Group32};
        assert_eq!(formats(WeightRounding::None, WeightId::Embedding), [F32, Int4Group32]);
        assert_eq!(formats(WeightRounding::Bf16, WeightId::Qkv(0)), [Bf16, Int4Group32]);
        assert_eq!(formats(WeightRounding::Bf16, WeightId::Head), [Bf16, Bf16]);
        let rounded = &WeightRounding::Bf16.apply(WeightId::Down(0), vec![dense()])[0];
        let mut values = [0.0; 3];
        rounded.dequantize_row(0, &mut values);
        assert_eq!(values, [1.0f32, 1.001, -3.3e-5].map(|value| bf16::from_f32(value).to_f32()));
    }

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        let mut worst = 0.0f64;
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            worst = worst.max((f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs());
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!([f32::NEG_INFINITY, -1e30, 0.0, 100.0].map(exp), [0.0, 0.0, 1.0, f32::INFINITY]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn activation_codes_reach_127_and_keep_their_sign() {
        let mut values = [0.0f32; 32];
        values[3] = -2.54;
        values[4] = 1.27;
        let group = ActivationGroup::round(&values);
        assert_eq!(group.codes[3], -127);
        assert_eq!(group.codes[4], 64, "63.5 goes to the even neighbour");
        assert_eq!(group.sum(), -63);
    }

    #[test]
    fn a_group_of_zeros_has_scale_zero() {
        let group = ActivationGroup::round(&[0.0; 32]);
        assert_eq!((group.scale, group.sum()), (0.0, 0));
    }

    #[test]
    fn a_fault_among_the_values_stays_visible_in_the_scale() {
        let mut values = [1.0f32; 32];
        values[9] = f32::INFINITY;
        assert_eq!(ActivationGroup::round(&values).scale, f32::INFINITY);
        values[10] = f32::NAN;
        assert!(ActivationGroup::round(&values).scale.is_nan());
    }

    #[test]
    fn attention_knows_no_operand_between_zero_and_its_smallest() {
        let below = f32::from_bits(SMALLEST_KV.to_bits() - 1);
        assert_eq!([below, -below, 1e-40, 0.0].map(|value| kv_bf16(value).to_f32()), [0.0; 4]);
        assert_eq!([SMALLEST_KV, -SMALLEST_KV].map(|value| kv_bf16(value).to_f32()), [SMALLEST_KV, -SMALLEST_KV]);
        assert_eq!(kv_scale(&[1e-13, -1e-12]), (0.0, bf16::ZERO));
        assert!(kv_bf16(f32::NAN).is_nan() && kv_scale(&[f32::NAN]).1.is_nan());
    }

    #[test]
    fn norm_of_a_constant_row_is_one() {
        let mut out = [0.0; 40];
        rms_norm(&[3.0; 40], &[1.0; 40], 0.0, &mut out);
        assert!(out.iter().all(|v| (v - 1.0).abs() < 1e-6));
    }
}
