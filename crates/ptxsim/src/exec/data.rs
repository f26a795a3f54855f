//! Registers cut into parts and put together, and addresses moved between state spaces.

use crate::isa::{Op, Slot, Space};
use crate::registers::{LANES, Registers, Words};

use super::window;

/// `mov` with braces.
pub(super) fn repack(registers: &mut Registers, mask: u32, op: &Op) {
    match op {
        Op::PackHalves { d, low, high } => {
            registers.zip_words(*d, mask, (*low, *high), |low, high| low & 0xffff | high << 16);
        }
        Op::UnpackHalves { low, high, a } => {
            let values = *registers.word(*a);
            registers.put_words(*low, mask, &values.map(|value| value & 0xffff));
            registers.put_words(*high, mask, &values.map(|value| value >> 16));
        }
        Op::PackWords { d, low, high } => {
            let (low, high) = (registers.word(*low), registers.word(*high));
            let values = std::array::from_fn(|lane| u64::from(low[lane]) | u64::from(high[lane]) << 32);
            registers.put_doubles(*d, mask, &values);
        }
        Op::UnpackWords { low, high, a } => {
            let values = *registers.double(*a);
            registers.put_words(*low, mask, &values.map(|value| value as u32));
            registers.put_words(*high, mask, &values.map(|value| (value >> 32) as u32));
        }
        Op::PackQuarters { d, parts } => {
            let mut values = [0; LANES];
            for (index, part) in parts.iter().enumerate() {
                let part = registers.word(*part);
                for lane in 0..LANES {
                    values[lane] |= u64::from(part[lane] & 0xffff) << (16 * index);
                }
            }
            registers.put_doubles(*d, mask, &values);
        }
        Op::UnpackQuarters { parts, a } => {
            let values = *registers.double(*a);
            for (index, part) in parts.iter().enumerate() {
                let quarter: Words = values.map(|value| (value >> (16 * index)) as u32 & 0xffff);
                registers.put_words(*part, mask, &quarter);
            }
        }
        _ => {}
    }
}

fn window_of(space: Space) -> u64 {
    if space == Space::Shared { window::SHARED } else { window::LOCAL }
}

/// `cvta`
pub(super) fn to_generic(registers: &mut Registers, mask: u32, space: Space, double: bool, (d, a): (Slot, Slot)) {
    let base = window_of(space);
    if double {
        registers.map_doubles(d, mask, a, |a| a.wrapping_add(base));
    } else {
        registers.map_words(d, mask, a, |a| a);
    }
}

/// `cvta.to`
pub(super) fn from_generic(registers: &mut Registers, mask: u32, space: Space, double: bool, (d, a): (Slot, Slot)) {
    let base = window_of(space);
    if double {
        registers.map_doubles(d, mask, a, |a| a.wrapping_sub(base));
    } else {
        registers.map_words(d, mask, a, |a| a);
    }
}
