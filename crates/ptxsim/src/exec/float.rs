//! Floating-point arithmetic: each operation rounds once, to nearest even; only `fma` fuses.

use crate::isa::{FloatFlags, FloatOp, FloatUnaryOp, Format, Rounding, Slot};
use crate::numeric::{
    NAN16, NAN32, add_to_odd, bf16_bits, bf16_value, canonical, decode, encode, f16_bits, f16_value, flush_bits,
};
use crate::registers::{LANES, Registers};

use super::integer::specialise;

#[inline(always)]
fn single(op: FloatOp, a: u32, b: u32) -> u32 {
    let (x, y) = (f32::from_bits(a), f32::from_bits(b));
    match op {
        FloatOp::Add => canonical(x + y),
        FloatOp::Sub => canonical(x - y),
        FloatOp::Mul => canonical(x * y),
        FloatOp::Div => canonical(x / y),
        // Equal operands differ at most in the sign of zero, of which the minimum keeps the negative.
        FloatOp::Min if x == y => a | b,
        FloatOp::Max if x == y => a & b,
        FloatOp::Min => canonical(if x < y || y.is_nan() { x } else { y }),
        FloatOp::Max => canonical(if x > y || y.is_nan() { x } else { y }),
        FloatOp::MinNan | FloatOp::MaxNan if x.is_nan() || y.is_nan() => NAN32,
        FloatOp::MinNan => single(FloatOp::Min, a, b),
        FloatOp::MaxNan => single(FloatOp::Max, a, b),
    }
}

#[inline(always)]
fn double(op: FloatOp, a: u64, b: u64) -> u64 {
    let (x, y) = (f64::from_bits(a), f64::from_bits(b));
    match op {
        FloatOp::Add => (x + y).to_bits(),
        FloatOp::Sub => (x - y).to_bits(),
        FloatOp::Mul => (x * y).to_bits(),
        FloatOp::Div => (x / y).to_bits(),
        FloatOp::Min if x == y => a | b,
        FloatOp::Max if x == y => a & b,
        FloatOp::Min => (if x < y || y.is_nan() { x } else { y }).to_bits(),
        FloatOp::Max => (if x > y || y.is_nan() { x } else { y }).to_bits(),
        FloatOp::MinNan | FloatOp::MaxNan if x.is_nan() || y.is_nan() => f64::NAN.to_bits(),
        FloatOp::MinNan => double(FloatOp::Min, a, b),
        FloatOp::MaxNan => double(FloatOp::Max, a, b),
    }
}

/// One operation in f16 or bf16. Sums are exact or rounded to odd and products exact as doubles, so the encoding is the one rounding.
fn small(op: FloatOp, format: Format, a: u32, b: u32) -> u32 {
    let (x, y) = (decode(u64::from(a), format), decode(u64::from(b), format));
    let value = match op {
        FloatOp::Add => add_to_odd(x, y),
        FloatOp::Sub => add_to_odd(x, -y),
        FloatOp::Mul => x * y,
        FloatOp::Div => x / y,
        FloatOp::Min | FloatOp::Max | FloatOp::MinNan | FloatOp::MaxNan => {
            f64::from_bits(double(op, x.to_bits(), y.to_bits()))
        }
    };
    encode(value, format, Rounding::Nearest) as u32
}

/// `f` on both halves of packed operands.
#[inline(always)]
fn both_halves(a: u32, b: u32, f: impl Fn(u32, u32) -> u32) -> u32 {
    f(a & 0xffff, b & 0xffff) | f(a >> 16, b >> 16) << 16
}

/// The sums of both halves.
pub(super) fn packed_sum(format: Format, a: u32, b: u32) -> u32 {
    both_halves(a, b, |a, b| small(FloatOp::Add, format, a, b))
}

/// Saturation and `.relu` of a result in f32.
#[inline(always)]
fn finish(flags: FloatFlags, bits: u32) -> u32 {
    let bits = if flags.flush { flush_bits(bits) } else { bits };
    let value = f32::from_bits(bits);
    if flags.saturate {
        return if value.is_nan() { 0 } else { value.clamp(0.0, 1.0).to_bits() & 0x7fff_ffff };
    }
    if flags.relu && !value.is_nan() && value < 0.0 { 0 } else { bits }
}

/// Saturation and `.relu` of a result in f16 or bf16.
fn finish_small(format: Format, flags: FloatFlags, bits: u32) -> u32 {
    if !flags.saturate && !flags.relu {
        return bits;
    }
    let value = decode(u64::from(bits), format);
    if flags.saturate {
        let clamped = if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) };
        return encode(clamped, format, Rounding::Nearest) as u32 & 0x7fff;
    }
    if value < 0.0 { 0 } else { bits }
}

/// `d = a op b`
pub(super) fn binary(
    registers: &mut Registers,
    mask: u32,
    (op, format, flags): (FloatOp, Format, FloatFlags),
    d: Slot,
    sources: (Slot, Slot),
) {
    match format {
        Format::F32 if flags == FloatFlags::default() => {
            specialise!(op, FloatOp { Add, Sub, Mul, Div, Min, Max, MinNan, MaxNan },
                known => registers.zip_words(d, mask, sources, |a, b| single(known, a, b)));
        }
        Format::F32 => {
            let input = |bits: u32| if flags.flush { flush_bits(bits) } else { bits };
            registers.zip_words(d, mask, sources, |a, b| finish(flags, single(op, input(a), input(b))));
        }
        Format::F64 => specialise!(op, FloatOp { Add, Sub, Mul, Div, Min, Max, MinNan, MaxNan },
            known => registers.zip_doubles(d, mask, sources, |a, b| double(known, a, b))),
        Format::F16 | Format::Bf16 => {
            registers.zip_words(d, mask, sources, |a, b| finish_small(format, flags, small(op, format, a, b)))
        }
        Format::F16x2 | Format::Bf16x2 => registers.zip_words(d, mask, sources, |a, b| {
            both_halves(a, b, |a, b| finish_small(format, flags, small(op, format, a, b)))
        }),
    }
}

/// `d = a * b + c`, rounded once.
pub(super) fn fma(
    registers: &mut Registers,
    mask: u32,
    (format, flags): (Format, FloatFlags),
    d: Slot,
    sources: (Slot, Slot, Slot),
) {
    match format {
        Format::F32 if flags == FloatFlags::default() => single_fma(registers, mask, d, sources),
        Format::F32 => registers.zip3_words(d, mask, sources, |a, b, c| {
            let input = |bits: u32| f32::from_bits(if flags.flush { flush_bits(bits) } else { bits });
            finish(flags, canonical(input(a).mul_add(input(b), input(c))))
        }),
        Format::F64 => registers.zip3_doubles(d, mask, sources, |a, b, c| {
            f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c)).to_bits()
        }),
        Format::F16 => {
            registers.zip3_words(d, mask, sources, |a, b, c| finish_small(format, flags, small_fma(format, a, b, c)))
        }
        Format::Bf16 => {
            registers.zip3_words(d, mask, sources, |a, b, c| finish_small(format, flags, small_fma(format, a, b, c)));
        }
        Format::Bf16x2 if flags == FloatFlags::default() => bf16x2_fma(registers, mask, d, sources),
        Format::F16x2 | Format::Bf16x2 => registers.zip3_words(d, mask, sources, |a, b, c| {
            let one = |shift: u32| {
                let (a, b, c) = (a >> shift & 0xffff, b >> shift & 0xffff, c >> shift & 0xffff);
                finish_small(format, flags, small_fma(format, a, b, c))
            };
            one(0) | one(16) << 16
        }),
    }
}

/// 32 lanes of f32 at once. The product is exact as a double and the sum rounds to 53 bits; rounding that again is wrong only if it lies
/// just between two floats, or below the normal floats, where the rounding is coarser. Then all lanes go the slow way.
fn single_fma(registers: &mut Registers, mask: u32, d: Slot, (a, b, c): (Slot, Slot, Slot)) {
    let (x, y, z) = (registers.word(a), registers.word(b), registers.word(c));
    let mut values = [0; LANES];
    let mut doubtful = 0;
    for lane in 0..LANES {
        let value = |bits: u32| f64::from(f32::from_bits(bits));
        let sum = value(x[lane]) * value(y[lane]) + value(z[lane]);
        values[lane] = canonical(sum as f32);
        let tie = sum.to_bits() as u32 & 0x1fff_ffff == 0x1000_0000;
        let tiny = sum.abs() < f64::from(f32::MIN_POSITIVE) && sum != 0.0;
        doubtful |= u32::from(tie) | u32::from(tiny);
    }
    if doubtful != 0 {
        for lane in 0..LANES {
            let value = f32::from_bits(x[lane]).mul_add(f32::from_bits(y[lane]), f32::from_bits(z[lane]));
            values[lane] = canonical(value);
        }
    }
    registers.put_words(d, mask, &values);
}

fn small_fma(format: Format, a: u32, b: u32, c: u32) -> u32 {
    let value = |bits: u32| decode(u64::from(bits), format);
    encode(add_to_odd(value(a) * value(b), value(c)), format, Rounding::Nearest) as u32
}

/// The same idea as in `single_fma`, with f32 in the place of doubles: products of bf16 are exact there, and sums are right unless they end
/// just between two bf16.
fn bf16x2_fma(registers: &mut Registers, mask: u32, d: Slot, (a, b, c): (Slot, Slot, Slot)) {
    let (x, y, z) = (registers.word(a), registers.word(b), registers.word(c));
    let mut values = [0u32; LANES];
    let mut doubtful = 0;
    // Zero, or far from where f32 itself rounds, overflows or is no number.
    let unsafe_exponent = |bits: u32| {
        let exponent = bits >> 23 & 0xff;
        u32::from(bits << 1 != 0) & (u32::from(exponent < 30) | u32::from(exponent > 250))
    };
    for lane in 0..LANES {
        for keep in [0xffff_0000u32, 0xffff] {
            let shift = keep.leading_zeros();
            let part = |bits: u32| f32::from_bits((bits & keep) << shift);
            let (x, y, z) = (part(x[lane]), part(y[lane]), part(z[lane]));
            let product = x * y;
            let sum = product + z;
            let (bits, tie) = (sum.to_bits(), sum.to_bits() & 0xffff == 0x8000);
            let vanished = (product == 0.0) & (x != 0.0) & (y != 0.0);
            doubtful |= unsafe_exponent(product.to_bits()) | unsafe_exponent(bits);
            doubtful |= u32::from(tie) | u32::from(vanished);
            values[lane] |= (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000) >> shift;
        }
    }
    if doubtful == 0 {
        registers.put_words(d, mask, &values);
        return;
    }
    registers.zip3_words(d, mask, (a, b, c), |a, b, c| {
        let one = |shift: u32| small_fma(Format::Bf16, a >> shift & 0xffff, b >> shift & 0xffff, c >> shift & 0xffff);
        one(0) | one(16) << 16
    });
}

/// `d = op a`
pub(super) fn unary(
    registers: &mut Registers,
    mask: u32,
    (op, format, flags): (FloatUnaryOp, Format, FloatFlags),
    d: Slot,
    a: Slot,
) {
    match format {
        Format::F32 => {
            specialise!(op, FloatUnaryOp {
                Neg, Abs, Sqrt, Reciprocal, ReciprocalSqrt, Exp2, Log2, Sin, Cos, Tanh,
            }, known => registers.map_words(d, mask, a, |a| {
                let a = if flags.flush { flush_bits(a) } else { a };
                finish(flags, single_unary(known, a))
            }));
        }
        Format::F64 => registers.map_doubles(d, mask, a, |a| double_unary(op, f64::from_bits(a)).to_bits()),
        Format::F16 | Format::Bf16 => registers.map_words(d, mask, a, |a| small_unary(op, format, a)),
        Format::F16x2 | Format::Bf16x2 => registers
            .map_words(d, mask, a, |a| small_unary(op, format, a & 0xffff) | small_unary(op, format, a >> 16) << 16),
    }
}

/// The approximate functions are computed by the host's, which are nearer to the truth than the hardware's.
#[inline(always)]
fn single_unary(op: FloatUnaryOp, a: u32) -> u32 {
    let x = f32::from_bits(a);
    canonical(match op {
        FloatUnaryOp::Neg => return if x.is_nan() { NAN32 } else { a ^ 0x8000_0000 },
        FloatUnaryOp::Abs => return if x.is_nan() { NAN32 } else { a & 0x7fff_ffff },
        FloatUnaryOp::Sqrt => x.sqrt(),
        FloatUnaryOp::Reciprocal => 1.0 / x,
        FloatUnaryOp::ReciprocalSqrt => (1.0 / f64::from(x).sqrt()) as f32,
        FloatUnaryOp::Exp2 => x.exp2(),
        FloatUnaryOp::Log2 => x.log2(),
        FloatUnaryOp::Sin => x.sin(),
        FloatUnaryOp::Cos => x.cos(),
        FloatUnaryOp::Tanh => x.tanh(),
    })
}

fn double_unary(op: FloatUnaryOp, x: f64) -> f64 {
    match op {
        FloatUnaryOp::Neg => -x,
        FloatUnaryOp::Abs => x.abs(),
        FloatUnaryOp::Sqrt => x.sqrt(),
        FloatUnaryOp::Reciprocal => 1.0 / x,
        FloatUnaryOp::ReciprocalSqrt => 1.0 / x.sqrt(),
        FloatUnaryOp::Exp2 => x.exp2(),
        FloatUnaryOp::Log2 => x.log2(),
        FloatUnaryOp::Sin => x.sin(),
        FloatUnaryOp::Cos => x.cos(),
        FloatUnaryOp::Tanh => x.tanh(),
    }
}

fn small_unary(op: FloatUnaryOp, format: Format, a: u32) -> u32 {
    let is_f16 = matches!(format, Format::F16 | Format::F16x2);
    let value = if is_f16 { f16_value(a) } else { bf16_value(a) };
    match op {
        _ if value.is_nan() => NAN16,
        FloatUnaryOp::Neg => a ^ 0x8000,
        FloatUnaryOp::Abs => a & 0x7fff,
        _ => {
            let result = f32::from_bits(single_unary(op, value.to_bits()));
            if is_f16 { f16_bits(result) } else { bf16_bits(result) }
        }
    }
}
