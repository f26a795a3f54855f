//! Integer arithmetic. Everything wraps; division by zero gives all ones, as the hardware does.

use crate::isa::{Carry, CarryOp, IntegerOp, IntegerUnaryOp, Slot, Type, Width};
use crate::registers::{LANES, Registers};

/// Runs a body once for each variant of an enumeration, with the variant a constant there, so that each gets a loop of its own.
macro_rules! specialise {
    ($value:expr, $type:ident { $($variant:ident),* $(,)? }, $constant:ident => $body:expr) => {
        match $value {
            $($type::$variant => {
                let $constant = $type::$variant;
                $body
            })*
        }
    };
}
pub(super) use specialise;

/// One operation on words.
#[inline(always)]
pub(super) fn word(op: IntegerOp, a: u32, b: u32) -> u32 {
    let (x, y) = (a as i32, b as i32);
    match op {
        IntegerOp::Add => a.wrapping_add(b),
        IntegerOp::AddSaturating => x.saturating_add(y) as u32,
        IntegerOp::Sub => a.wrapping_sub(b),
        IntegerOp::SubSaturating => x.saturating_sub(y) as u32,
        IntegerOp::MulLow => a.wrapping_mul(b),
        IntegerOp::MulHighSigned => (i64::from(x).wrapping_mul(i64::from(y)) >> 32) as u32,
        IntegerOp::MulHighUnsigned => (u64::from(a).wrapping_mul(u64::from(b)) >> 32) as u32,
        IntegerOp::DivSigned if b == 0 => u32::MAX,
        IntegerOp::DivSigned => x.wrapping_div(y) as u32,
        IntegerOp::DivUnsigned => a.checked_div(b).unwrap_or(u32::MAX),
        IntegerOp::RemSigned if b == 0 => a,
        IntegerOp::RemSigned => x.wrapping_rem(y) as u32,
        IntegerOp::RemUnsigned => a.checked_rem(b).unwrap_or(a),
        IntegerOp::MinSigned => x.min(y) as u32,
        IntegerOp::MinUnsigned => a.min(b),
        IntegerOp::MaxSigned => x.max(y) as u32,
        IntegerOp::MaxUnsigned => a.max(b),
        IntegerOp::And => a & b,
        IntegerOp::Or => a | b,
        IntegerOp::Xor => a ^ b,
        IntegerOp::ShiftLeft => a.checked_shl(b).unwrap_or(0),
        IntegerOp::ShiftRightSigned => (x >> b.min(31)) as u32,
        IntegerOp::ShiftRightUnsigned => a.checked_shr(b).unwrap_or(0),
    }
}

/// One operation on doubles; a shift's distance is in the lower half of `b`.
#[inline(always)]
pub(super) fn double(op: IntegerOp, a: u64, b: u64) -> u64 {
    let (x, y) = (a as i64, b as i64);
    match op {
        IntegerOp::Add => a.wrapping_add(b),
        IntegerOp::AddSaturating => x.saturating_add(y) as u64,
        IntegerOp::Sub => a.wrapping_sub(b),
        IntegerOp::SubSaturating => x.saturating_sub(y) as u64,
        IntegerOp::MulLow => a.wrapping_mul(b),
        IntegerOp::MulHighSigned => (i128::from(x).wrapping_mul(i128::from(y)) >> 64) as u64,
        IntegerOp::MulHighUnsigned => (u128::from(a).wrapping_mul(u128::from(b)) >> 64) as u64,
        IntegerOp::DivSigned if b == 0 => u64::MAX,
        IntegerOp::DivSigned => x.wrapping_div(y) as u64,
        IntegerOp::DivUnsigned => a.checked_div(b).unwrap_or(u64::MAX),
        IntegerOp::RemSigned if b == 0 => a,
        IntegerOp::RemSigned => x.wrapping_rem(y) as u64,
        IntegerOp::RemUnsigned => a.checked_rem(b).unwrap_or(a),
        IntegerOp::MinSigned => x.min(y) as u64,
        IntegerOp::MinUnsigned => a.min(b),
        IntegerOp::MaxSigned => x.max(y) as u64,
        IntegerOp::MaxUnsigned => a.max(b),
        IntegerOp::And => a & b,
        IntegerOp::Or => a | b,
        IntegerOp::Xor => a ^ b,
        IntegerOp::ShiftLeft => a.checked_shl(b as u32).unwrap_or(0),
        IntegerOp::ShiftRightSigned => (x >> (b as u32).min(63)) as u64,
        IntegerOp::ShiftRightUnsigned => a.checked_shr(b as u32).unwrap_or(0),
    }
}

fn sign16(a: u32) -> u32 {
    i32::from(a as i16) as u32
}

/// One operation on 16 bits: on words, with the operands extended as the operation wants them.
pub(super) fn half(op: IntegerOp, a: u32, b: u32) -> u32 {
    let result = match op {
        IntegerOp::MulHighUnsigned => a.wrapping_mul(b) >> 16,
        IntegerOp::MulHighSigned => sign16(a).wrapping_mul(sign16(b)) >> 16,
        IntegerOp::AddSaturating => i32::from((a as i16).saturating_add(b as i16)) as u32,
        IntegerOp::SubSaturating => i32::from((a as i16).saturating_sub(b as i16)) as u32,
        IntegerOp::ShiftRightSigned => word(op, sign16(a), b),
        IntegerOp::DivSigned | IntegerOp::RemSigned | IntegerOp::MinSigned | IntegerOp::MaxSigned => {
            word(op, sign16(a), sign16(b))
        }
        _ => word(op, a, b),
    };
    result & 0xffff
}

/// `d = a op b`
pub(super) fn binary(
    registers: &mut Registers,
    mask: u32,
    (op, width): (IntegerOp, Width),
    d: Slot,
    sources: (Slot, Slot),
) {
    macro_rules! every {
        ($constant:ident => $body:expr) => {
            specialise!(op, IntegerOp {
                Add, AddSaturating, Sub, SubSaturating, MulLow, MulHighSigned, MulHighUnsigned, DivSigned, DivUnsigned,
                RemSigned, RemUnsigned, MinSigned, MinUnsigned, MaxSigned, MaxUnsigned, And, Or, Xor, ShiftLeft,
                ShiftRightSigned, ShiftRightUnsigned,
            }, $constant => $body)
        };
    }
    let shifts = matches!(op, IntegerOp::ShiftLeft | IntegerOp::ShiftRightSigned | IntegerOp::ShiftRightUnsigned);
    match width {
        Width::Word => every!(known => registers.zip_words(d, mask, sources, |a, b| word(known, a, b))),
        Width::Half => registers.zip_words(d, mask, sources, |a, b| half(op, a, b)),
        Width::Double if shifts => {
            registers.zip_double_word(d, mask, sources, |a, b| double(op, a, u64::from(b)));
        }
        Width::Double => every!(known => registers.zip_doubles(d, mask, sources, |a, b| double(known, a, b))),
    }
}

/// `d = a * b + c`, with one half of the product.
pub(super) fn mad(
    registers: &mut Registers,
    mask: u32,
    (op, width): (IntegerOp, Width),
    d: Slot,
    sources: (Slot, Slot, Slot),
) {
    match (width, op) {
        (Width::Word, IntegerOp::MulLow) => {
            registers.zip3_words(d, mask, sources, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
        }
        (Width::Word, _) => registers.zip3_words(d, mask, sources, |a, b, c| word(op, a, b).wrapping_add(c)),
        (Width::Half, _) => {
            registers.zip3_words(d, mask, sources, |a, b, c| half(op, a, b).wrapping_add(c) & 0xffff);
        }
        (Width::Double, _) => registers.zip3_doubles(d, mask, sources, |a, b, c| double(op, a, b).wrapping_add(c)),
    }
}

/// `d = a * b (+ c)` in twice the width.
pub(super) fn mul_wide(
    registers: &mut Registers,
    mask: u32,
    from: Type,
    d: Slot,
    (a, b, c): (Slot, Slot, Option<Slot>),
) {
    if from.bytes() == 2 {
        let signed = from.is_signed();
        let product = |a: u32, b: u32| if signed { sign16(a).wrapping_mul(sign16(b)) } else { a.wrapping_mul(b) };
        match c {
            None => registers.zip_words(d, mask, (a, b), product),
            Some(c) => registers.zip3_words(d, mask, (a, b, c), |a, b, c| product(a, b).wrapping_add(c)),
        }
        return;
    }
    let (x, y) = (registers.word(a), registers.word(b));
    let mut values = [0; LANES];
    if from.is_signed() {
        for lane in 0..LANES {
            values[lane] = i64::from(x[lane] as i32).wrapping_mul(i64::from(y[lane] as i32)) as u64;
        }
    } else {
        for lane in 0..LANES {
            values[lane] = u64::from(x[lane]).wrapping_mul(u64::from(y[lane]));
        }
    }
    if let Some(c) = c {
        let c = registers.double(c);
        for lane in 0..LANES {
            values[lane] = values[lane].wrapping_add(c[lane]);
        }
    }
    registers.put_doubles(d, mask, &values);
}

/// One link of a carry chain. A borrow is a carry of zero, as in hardware that adds the complement.
pub(super) fn carry(registers: &mut Registers, mask: u32, link: &Carry) {
    let ones = if link.double { u64::MAX } else { u64::from(u32::MAX) };
    let read = |registers: &Registers, slot: Slot, lane: usize| {
        if link.double { registers.double(slot)[lane] } else { u64::from(registers.word(slot)[lane]) }
    };
    let mut results = [0u64; LANES];
    let mut flags = registers.carry;
    for lane in crate::registers::lanes(mask) {
        let (a, b) = (read(registers, link.a, lane), read(registers, link.b, lane));
        let bits = if link.double { 64 } else { 32 };
        let (x, y) = match link.op {
            CarryOp::Add => (a, b),
            CarryOp::Sub => (a, !b & ones),
            CarryOp::MadLow => (a.wrapping_mul(b) & ones, read(registers, link.c, lane)),
            CarryOp::MadHighUnsigned => {
                let product = u128::from(a).wrapping_mul(u128::from(b));
                ((product >> bits) as u64 & ones, read(registers, link.c, lane))
            }
            CarryOp::MadHighSigned => {
                let signed = |value: u64| if link.double { value as i64 } else { i64::from(value as i32) };
                let product = i128::from(signed(a)).wrapping_mul(i128::from(signed(b)));
                ((product >> bits) as u64 & ones, read(registers, link.c, lane))
            }
        };
        let flag = registers.carry >> lane & 1;
        // A chain of subtractions begins with no borrow.
        let carried = if link.reads { flag } else { u32::from(link.op == CarryOp::Sub) };
        let sum = u128::from(x) + u128::from(y) + u128::from(carried);
        results[lane] = sum as u64 & ones;
        let out = u32::from(sum > u128::from(ones));
        flags = flags & !(1 << lane) | out << lane;
    }
    if link.writes {
        registers.carry = flags;
    }
    if link.double {
        registers.put_doubles(link.d, mask, &results);
    } else {
        registers.put_words(link.d, mask, &results.map(|value| value as u32));
    }
}

/// `d = op a`
pub(super) fn unary(registers: &mut Registers, mask: u32, (op, width): (IntegerUnaryOp, Width), d: Slot, a: Slot) {
    let counts =
        !matches!(op, IntegerUnaryOp::Neg | IntegerUnaryOp::Abs | IntegerUnaryOp::Not | IntegerUnaryOp::BitReverse);
    match width {
        Width::Word => registers.map_words(d, mask, a, |a| word_unary(op, a)),
        Width::Half => registers.map_words(d, mask, a, |a| half_unary(op, a)),
        Width::Double if counts => registers.narrow(d, mask, a, |a| double_unary(op, a) as u32),
        Width::Double => registers.map_doubles(d, mask, a, |a| double_unary(op, a)),
    }
}

fn half_unary(op: IntegerUnaryOp, a: u32) -> u32 {
    match op {
        IntegerUnaryOp::BitReverse => u32::from((a as u16).reverse_bits()),
        IntegerUnaryOp::Abs => word_unary(op, sign16(a)) & 0xffff,
        _ => word_unary(op, a) & 0xffff,
    }
}

#[inline(always)]
fn word_unary(op: IntegerUnaryOp, a: u32) -> u32 {
    match op {
        IntegerUnaryOp::Neg => a.wrapping_neg(),
        IntegerUnaryOp::Abs => (a as i32).wrapping_abs() as u32,
        IntegerUnaryOp::Not => !a,
        IntegerUnaryOp::BitReverse => a.reverse_bits(),
        IntegerUnaryOp::PopulationCount => a.count_ones(),
        IntegerUnaryOp::LeadingZeros => a.leading_zeros(),
        IntegerUnaryOp::FindUnsigned => 31u32.wrapping_sub(a.leading_zeros()),
        IntegerUnaryOp::FindSigned => 31u32.wrapping_sub((a ^ (((a as i32) >> 31) as u32)).leading_zeros()),
        IntegerUnaryOp::FindShiftUnsigned => shift_to_top(a.leading_zeros(), 32),
        IntegerUnaryOp::FindShiftSigned => shift_to_top((a ^ (((a as i32) >> 31) as u32)).leading_zeros(), 32),
    }
}

/// The shift that brings the bit found to the top; all ones if there is none.
fn shift_to_top(leading: u32, bits: u32) -> u32 {
    if leading == bits { u32::MAX } else { leading }
}

fn double_unary(op: IntegerUnaryOp, a: u64) -> u64 {
    let magnitude = a ^ (((a as i64) >> 63) as u64);
    let found = |value: u64| u64::from(63u32.wrapping_sub(value.leading_zeros()));
    match op {
        IntegerUnaryOp::Neg => a.wrapping_neg(),
        IntegerUnaryOp::Abs => (a as i64).wrapping_abs() as u64,
        IntegerUnaryOp::Not => !a,
        IntegerUnaryOp::BitReverse => a.reverse_bits(),
        IntegerUnaryOp::PopulationCount => u64::from(a.count_ones()),
        IntegerUnaryOp::LeadingZeros => u64::from(a.leading_zeros()),
        IntegerUnaryOp::FindUnsigned => found(a),
        IntegerUnaryOp::FindSigned => found(magnitude),
        IntegerUnaryOp::FindShiftUnsigned => u64::from(shift_to_top(a.leading_zeros(), 64)),
        IntegerUnaryOp::FindShiftSigned => u64::from(shift_to_top(magnitude.leading_zeros(), 64)),
    }
}
