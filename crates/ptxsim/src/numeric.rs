//! Exact rounding of floating-point values: one rounding per operation, whatever the format.

use half::f16;

use crate::isa::{Format, Rounding};

/// The quiet NaN that the hardware gives for f32.
pub(crate) const NAN32: u32 = 0x7fff_ffff;
/// The quiet NaN that the hardware gives for f16 and bf16.
pub(crate) const NAN16: u32 = 0x7fff;

/// What rounding needs to know of a binary format.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// Bits of the significand with the hidden one.
    precision: i32,
    /// Exponent of the smallest normal number.
    least: i32,
    largest: f64,
}

const F16: Shape = Shape { precision: 11, least: -14, largest: 65504.0 };
const BF16: Shape = Shape { precision: 8, least: -126, largest: 3.389_531_389_251_535_5e38 };
const F32: Shape = Shape { precision: 24, least: -126, largest: f32::MAX as f64 };

/// `value` rounded to a whole number.
pub(crate) fn round_whole(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// `value` rounded to `shape`, as a double. Powers of two scale without error, so the one rounding is that to a whole number of units.
fn round_to(value: f64, shape: Shape, rounding: Rounding) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let exponent = (((value.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(shape.least);
    let unit = exponent - (shape.precision - 1);
    let rounded = round_whole(value * power_of_two(-unit), rounding) * power_of_two(unit);
    if rounded.abs() <= shape.largest {
        return rounded;
    }
    let stays = match rounding {
        Rounding::Nearest => false,
        Rounding::Zero => true,
        Rounding::Down => value > 0.0,
        Rounding::Up => value < 0.0,
    };
    if stays { shape.largest.copysign(value) } else { f64::INFINITY.copysign(value) }
}

/// 2 to the power of `exponent`, for exponents of normal doubles.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The bits of `value` in `format`, rounded once.
pub(crate) fn encode(value: f64, format: Format, rounding: Rounding) -> u64 {
    match format {
        Format::F64 => value.to_bits(),
        Format::F32 if value.is_nan() => u64::from(NAN32),
        Format::F32 => u64::from((round_to(value, F32, rounding) as f32).to_bits()),
        _ if value.is_nan() => u64::from(NAN16),
        Format::F16 | Format::F16x2 => u64::from(f16::from_f32(round_to(value, F16, rounding) as f32).to_bits()),
        Format::Bf16 | Format::Bf16x2 => u64::from((round_to(value, BF16, rounding) as f32).to_bits() >> 16),
    }
}

/// The value of `bits` in `format`; exact for all formats. Of a packed pair it is the lower half.
pub(crate) fn decode(bits: u64, format: Format) -> f64 {
    match format {
        Format::F64 => f64::from_bits(bits),
        Format::F32 => f64::from(f32::from_bits(bits as u32)),
        Format::F16 | Format::F16x2 => f16::from_bits(bits as u16).to_f64(),
        Format::Bf16 | Format::Bf16x2 => f64::from(bf16_value(bits as u32)),
    }
}

/// The value of a bf16 in the lower half of a word.
#[inline(always)]
pub(crate) fn bf16_value(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// The bf16 nearest to `value`, ties to even.
#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    if value.is_nan() { NAN16 } else { bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16 }
}

/// The value of an f16 in the lower half of a word.
#[inline(always)]
pub(crate) fn f16_value(bits: u32) -> f32 {
    f16::from_bits(bits as u16).to_f32()
}

/// The f16 nearest to `value`, ties to even.
#[inline(always)]
pub(crate) fn f16_bits(value: f32) -> u32 {
    if value.is_nan() { NAN16 } else { u32::from(f16::from_f32(value).to_bits()) }
}

/// `x + y` rounded to odd: the nearest double towards zero or away whose last bit is one, if the sum is not exact. Rounding that to a
/// format with at least two bits less gives what rounding the exact sum would (Boldo and Melquiond, 2008).
pub(crate) fn add_to_odd(x: f64, y: f64) -> f64 {
    let sum = x + y;
    if !sum.is_finite() {
        return sum;
    }
    let part = sum - x;
    let error = (x - (sum - part)) + (y - part);
    if error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    // The exact sum lies between `sum` and its neighbour on the side of the error; that neighbour is odd.
    let outwards = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if outwards { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// `value` with a subnormal turned into a zero of its sign.
#[inline(always)]
pub(crate) fn flush(value: f32) -> f32 {
    f32::from_bits(flush_bits(value.to_bits()))
}

/// The same on bits.
#[inline(always)]
pub(crate) fn flush_bits(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits }
}

/// The bits of an f32, every NaN as the hardware's own.
#[inline(always)]
pub(crate) fn canonical(value: f32) -> u32 {
    if value.is_nan() { NAN32 } else { value.to_bits() }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn rounding_to_bf16_agrees_with_the_half_crate_and_with_the_integer_form() {
        let mut state = 1u32;
        for _ in 0..200_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(state);
            if value.is_nan() {
                continue;
            }
            let expected = u32::from(bf16::from_f32(value).to_bits());
            assert_eq!(bf16_bits(value), expected, "{value:e}");
            assert_eq!(encode(f64::from(value), Format::Bf16, Rounding::Nearest), u64::from(expected), "{value:e}");
            let f16_expected = u64::from(f16::from_f32(value).to_bits());
            assert_eq!(encode(f64::from(value), Format::F16, Rounding::Nearest), f16_expected, "{value:e}");
        }
    }

    #[test]
    fn directed_rounding_of_a_double_brackets_it() {
        for value in [1.0 + 1e-12, -1.0 - 1e-12, 1e-40 + 1e-50, 0.1, -0.1, 1e300, -1e300, 1e-60] {
            let bits = |rounding| f32::from_bits(encode(value, Format::F32, rounding) as u32);
            let (down, up, zero) = (bits(Rounding::Down), bits(Rounding::Up), bits(Rounding::Zero));
            assert!(f64::from(down) <= value && value <= f64::from(up), "{value:e}: {down:e} {up:e}");
            assert_eq!(down.next_up(), up, "{value:e}");
            assert_eq!(zero, if value > 0.0 { down } else { up }, "{value:e}");
            assert_eq!(bits(Rounding::Nearest), value as f32, "{value:e}");
        }
    }

    #[test]
    fn addition_to_odd_never_lands_on_a_false_tie() {
        // 1 + 2^-24 is a tie of f32; 2^-80 more must round up, and a plain double sum loses it.
        let tie = 1.0 + 2f64.powi(-24);
        assert_eq!(add_to_odd(tie, 2f64.powi(-80)) as f32, 1.0f32.next_up());
        assert_eq!(add_to_odd(tie, -(2f64.powi(-80))) as f32, 1.0);
        assert_eq!(add_to_odd(-tie, -(2f64.powi(-80))) as f32, -(1.0f32.next_up()));
        assert_eq!((tie + 2f64.powi(-80)) as f32, 1.0);
    }
}
