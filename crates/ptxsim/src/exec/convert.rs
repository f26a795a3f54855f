//! `cvt`: between integers and floats of any width, with one rounding.

use crate::isa::{Bank, Convert, FloatFlags, Format, Register, Rounding, Slot, Type};
use crate::numeric::{bf16_bits, decode, encode, f16_bits, f16_value, flush_bits, round_whole};
use crate::registers::{Doubles, LANES, Registers};

/// `cvt` with one source.
pub(super) fn convert(registers: &mut Registers, mask: u32, convert: &Convert) {
    if frequent(registers, mask, convert) {
        return;
    }
    let sources = read(registers, convert.a);
    let mut values = [0; LANES];
    for lane in crate::registers::lanes(mask) {
        values[lane] = one(convert, sources[lane]);
    }
    write(registers, mask, convert.d, &values);
}

/// The forms that kernels are full of, in loops that become vector code. False if it is none of them.
fn frequent(registers: &mut Registers, mask: u32, convert: &Convert) -> bool {
    let (a, d) = (convert.a.slot, convert.d.slot);
    if convert.flags != FloatFlags::default() || convert.whole {
        return false;
    }
    match (convert.from, convert.to, convert.a.bank, convert.d.bank) {
        (Type::U32, Type::U64 | Type::S64, Bank::Word, _) => registers.widen(d, mask, a, u64::from),
        (Type::S32, Type::U64 | Type::S64, Bank::Word, _) => {
            registers.widen(d, mask, a, |a| i64::from(a as i32) as u64);
        }
        (Type::U64 | Type::S64, Type::U32 | Type::S32, _, Bank::Word) => registers.narrow(d, mask, a, |a| a as u32),
        (Type::U16, Type::U32 | Type::S32, Bank::Half, Bank::Word) => registers.map_words(d, mask, a, |a| a),
        (Type::U32 | Type::S32, Type::U16, Bank::Word, Bank::Half) => {
            registers.map_words(d, mask, a, |a| a & 0xffff);
        }
        (Type::Bf16, Type::F32, Bank::Half | Bank::Word, Bank::Word) => {
            registers.map_words(d, mask, a, |a| crate::numeric::canonical(f32::from_bits(a << 16)))
        }
        (Type::F16, Type::F32, Bank::Half | Bank::Word, Bank::Word) => {
            registers.map_words(d, mask, a, |a| crate::numeric::canonical(f16_value(a)));
        }
        _ if convert.rounding != Rounding::Nearest => return false,
        (Type::S32, Type::F32, Bank::Word, Bank::Word) => {
            registers.map_words(d, mask, a, |a| (a as i32 as f32).to_bits());
        }
        (Type::U32, Type::F32, Bank::Word, Bank::Word) => registers.map_words(d, mask, a, |a| (a as f32).to_bits()),
        (Type::F32, Type::Bf16, Bank::Word, Bank::Half | Bank::Word) => {
            registers.map_words(d, mask, a, |a| bf16_bits(f32::from_bits(a)));
        }
        (Type::F32, Type::F16, Bank::Word, Bank::Half | Bank::Word) => {
            registers.map_words(d, mask, a, |a| f16_bits(f32::from_bits(a)));
        }
        _ => return false,
    }
    true
}

fn read(registers: &Registers, register: Register) -> Doubles {
    match register.bank {
        Bank::Double => *registers.double(register.slot),
        _ => registers.word(register.slot).map(u64::from),
    }
}

fn write(registers: &mut Registers, mask: u32, register: Register, values: &Doubles) {
    match register.bank {
        Bank::Double => registers.put_doubles(register.slot, mask, values),
        Bank::Half => registers.put_words(register.slot, mask, &values.map(|value| value as u32 & 0xffff)),
        _ => registers.put_words(register.slot, mask, &values.map(|value| value as u32)),
    }
}

/// One value, from the bits of a register to those of a register of 64 bits.
fn one(convert: &Convert, bits: u64) -> u64 {
    let (from, to) = (convert.from, convert.to);
    match (from.format(), to.format()) {
        (None, None) => integer_to_integer(convert, integer_value(bits, from)),
        (None, Some(format)) => integer_to_float(integer_value(bits, from), format, convert.rounding, convert.flags),
        (Some(format), None) => float_to_integer(convert, float_value(bits, format, convert.flags)),
        (Some(source), Some(target)) => float_to_float(convert, bits, source, target),
    }
}

/// The value of the lower bits, as `of` reads them.
fn integer_value(bits: u64, of: Type) -> i128 {
    match (of.bytes(), of.is_signed()) {
        (1, true) => i128::from(bits as i8),
        (1, false) => i128::from(bits as u8),
        (2, true) => i128::from(bits as i16),
        (2, false) => i128::from(bits as u16),
        (4, true) => i128::from(bits as i32),
        (4, false) => i128::from(bits as u32),
        (_, true) => i128::from(bits as i64),
        (_, false) => i128::from(bits),
    }
}

fn float_value(bits: u64, format: Format, flags: FloatFlags) -> f64 {
    let flushed = flags.flush && format == Format::F32;
    decode(if flushed { u64::from(flush_bits(bits as u32)) } else { bits }, format)
}

fn limits(of: Type) -> (i128, i128) {
    let bits = of.bytes() * 8;
    if of.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

fn integer_to_integer(convert: &Convert, value: i128) -> u64 {
    let (least, most) = limits(convert.to);
    let value = if convert.flags.saturate { value.clamp(least, most) } else { value };
    // What does not fit is cut off; a wider register gets the type's own extension.
    integer_value(value as u64, convert.to) as u64
}

fn integer_to_float(value: i128, format: Format, rounding: Rounding, flags: FloatFlags) -> u64 {
    let magnitude = value.unsigned_abs();
    let bits = 128 - magnitude.leading_zeros();
    let bits_exact = if bits <= 53 || format == Format::F64 {
        value as f64
    } else {
        // 53 bits with all that is cut off remembered in the last: enough for every format that is narrower.
        let shift = bits - 53;
        let sticky = u128::from(magnitude & ((1 << shift) - 1) != 0);
        let kept = ((magnitude >> shift | sticky) << shift) as f64;
        if value < 0 { -kept } else { kept }
    };
    encode(saturated(bits_exact, flags), format, rounding)
}

fn saturated(value: f64, flags: FloatFlags) -> f64 {
    if flags.saturate {
        return if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0).abs() };
    }
    if flags.relu && value < 0.0 { 0.0 } else { value }
}

fn float_to_integer(convert: &Convert, value: f64) -> u64 {
    let to = convert.to;
    if value.is_nan() {
        let wide = convert.from == Type::F64 || to.bytes() == 8;
        let special = if wide { 1u64 << (to.bytes() * 8 - 1) } else { 0 };
        return integer_value(special, to) as u64;
    }
    let (least, most) = limits(to);
    (round_whole(value, convert.rounding) as i128).clamp(least, most) as u64
}

fn float_to_float(convert: &Convert, bits: u64, source: Format, target: Format) -> u64 {
    let value = float_value(bits, source, convert.flags);
    let value = if convert.whole { round_whole(value, convert.rounding) } else { value };
    let encoded = encode(saturated(value, convert.flags), target, convert.rounding);
    let flushed = convert.flags.flush && target == Format::F32;
    if flushed { u64::from(flush_bits(encoded as u32)) } else { encoded }
}

/// `cvt` of two f32 into the halves of a word.
pub(super) fn pair(
    registers: &mut Registers,
    mask: u32,
    (format, rounding, flags): (Format, Rounding, FloatFlags),
    d: Slot,
    (high, low): (Slot, Slot),
) {
    if format == Format::Bf16x2 && rounding == Rounding::Nearest && flags == FloatFlags::default() {
        let float = f32::from_bits;
        registers.zip_words(d, mask, (high, low), |high, low| bf16_bits(float(high)) << 16 | bf16_bits(float(low)));
        return;
    }
    let one = |bits: u32| {
        let value = float_value(u64::from(bits), Format::F32, flags);
        encode(saturated(value, flags), format, rounding) as u32
    };
    registers.zip_words(d, mask, (high, low), |high, low| one(high) << 16 | one(low));
}
