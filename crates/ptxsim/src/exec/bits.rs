//! Bit fields, tables of three operands, permutations of bytes.

use crate::isa::{Slot, Type};
use crate::registers::{LANES, Registers};

/// `lop3`: the table is cut in halves three times, each cut a choice by one operand.
pub(super) fn lop3(registers: &mut Registers, mask: u32, table: u8, d: Slot, sources: (Slot, Slot, Slot)) {
    let bit = |index: u8| if table >> index & 1 == 1 { u32::MAX } else { 0 };
    let t: [u32; 8] = std::array::from_fn(|index| bit(index as u8));
    let choose = |by: u32, one: u32, zero: u32| zero ^ by & (one ^ zero);
    registers.zip3_words(d, mask, sources, |a, b, c| {
        let high = choose(b, choose(c, t[7], t[6]), choose(c, t[5], t[4]));
        let low = choose(b, choose(c, t[3], t[2]), choose(c, t[1], t[0]));
        choose(a, high, low)
    });
}

/// `prmt`: each nibble of `selector` names one of the eight bytes of `a` and `b`, or with its top bit that byte's sign.
pub(super) fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    let mut result = 0;
    for place in 0..4 {
        let nibble = selector >> (4 * place) & 15;
        let byte = (bytes >> (8 * (nibble & 7))) as u32 & 0xff;
        let byte = if nibble & 8 == 0 { byte } else { (byte >> 7) * 0xff };
        result |= byte << (8 * place);
    }
    result
}

/// `shf`: a shift of the 64 bits `b:a`, of which one half is kept.
pub(super) fn funnel(
    registers: &mut Registers,
    mask: u32,
    (left, clamp): (bool, bool),
    d: Slot,
    sources: (Slot, Slot, Slot),
) {
    registers.zip3_words(d, mask, sources, |a, b, c| {
        let distance = if clamp { c.min(32) } else { c & 31 };
        let both = u64::from(b) << 32 | u64::from(a);
        if left { (both << distance >> 32) as u32 } else { (both >> distance) as u32 }
    });
}

/// `bfe`
pub(super) fn extract(registers: &mut Registers, mask: u32, of: Type, d: Slot, (a, b, c): (Slot, Slot, Slot)) {
    let (position, length) = (*registers.word(b), *registers.word(c));
    let signed = of.is_signed();
    if of.bytes() == 4 {
        let values = *registers.word(a);
        let result = std::array::from_fn(|lane| {
            field(u64::from(values[lane]), (position[lane], length[lane]), 32, signed) as u32
        });
        registers.put_words(d, mask, &result);
    } else {
        let values = *registers.double(a);
        let result = std::array::from_fn(|lane| field(values[lane], (position[lane], length[lane]), 64, signed));
        registers.put_doubles(d, mask, &result);
    }
}

/// The field of `length` bits from `position`. Beyond the top it is filled with zeros, or with the sign: that is bit
/// `position + length - 1`, or the top bit if the field reaches further.
fn field(value: u64, (position, length): (u32, u32), bits: u32, signed: bool) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    let sign_bit = (position + length - 1).min(bits - 1);
    let negative = signed && value >> sign_bit & 1 == 1;
    let shifted = value.checked_shr(position).unwrap_or(0);
    let available = bits.saturating_sub(position).min(length);
    let kept = ones(available);
    if negative { shifted & kept | !kept } else { shifted & kept }
}

fn ones(count: u32) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// `bfi`: the lower bits of `a` put into `b`.
pub(super) fn insert(registers: &mut Registers, mask: u32, double: bool, d: Slot, [a, b, position, length]: [Slot; 4]) {
    let (position, length) = (*registers.word(position), *registers.word(length));
    let place = |lane: usize, value: u64, into: u64| {
        let position = position[lane] & 0xff;
        let field = ones(length[lane] & 0xff).checked_shl(position).unwrap_or(0);
        into & !field | value.checked_shl(position).unwrap_or(0) & field
    };
    if double {
        let (values, into) = (*registers.double(a), *registers.double(b));
        let result: [u64; LANES] = std::array::from_fn(|lane| place(lane, values[lane], into[lane]));
        registers.put_doubles(d, mask, &result);
    } else {
        let (values, into) = (*registers.word(a), *registers.word(b));
        let result = std::array::from_fn(|lane| place(lane, u64::from(values[lane]), u64::from(into[lane])) as u32);
        registers.put_words(d, mask, &result);
    }
}
