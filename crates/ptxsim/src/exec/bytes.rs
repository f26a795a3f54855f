//! The bytes of loads and stores between a piece of memory and registers.

use crate::isa::{Access, Extend};
use crate::registers::{Doubles, LANES, Registers, lanes};

/// Lanes of one access that lie in one piece of memory.
pub(super) struct Part {
    pub buffer: usize,
    pub mask: u32,
    /// Where each lane's bytes begin in the piece.
    pub starts: [usize; LANES],
    /// All 32 lanes, one behind the other.
    pub contiguous: bool,
}

impl Part {
    /// Addresses that are offsets already.
    pub fn whole(mask: u32, addresses: &Doubles) -> Self {
        Self { buffer: 0, mask, starts: addresses.map(|address| address as usize), contiguous: false }
    }
}

/// A little-endian number of `N` bytes at `start`, which lies inside.
#[inline(always)]
fn bytes_at<const N: usize>(data: &[u8], start: usize) -> [u8; N] {
    data[start..].first_chunk().copied().unwrap_or([0; N])
}

/// Bytes into registers.
pub(super) fn gather(registers: &mut Registers, access: &Access, data: &[u8], part: &Part) {
    let element = access.element as usize;
    match (element, access.double, access.registers.len()) {
        (4, false, 1) => gather_words::<1>(registers, access, data, part),
        (4, false, 2) => gather_words::<2>(registers, access, data, part),
        (4, false, 4) => gather_words::<4>(registers, access, data, part),
        _ => gather_any(registers, access, data, part),
    }
}

/// Vectors of `N` words, of which each lane's lie one behind the other.
fn gather_words<const N: usize>(registers: &mut Registers, access: &Access, data: &[u8], part: &Part) {
    let mut values = [[0; LANES]; N];
    if part.contiguous {
        let window = &data[part.starts[0]..][..LANES * N * 4];
        for lane in 0..LANES {
            for (index, values) in values.iter_mut().enumerate() {
                values[lane] = u32::from_le_bytes(bytes_at(window, (lane * N + index) * 4));
            }
        }
    } else {
        for lane in lanes(part.mask) {
            let vector = &data[part.starts[lane]..][..N * 4];
            for (index, values) in values.iter_mut().enumerate() {
                values[lane] = u32::from_le_bytes(bytes_at(vector, index * 4));
            }
        }
    }
    for (slot, values) in access.registers.iter().zip(&values) {
        registers.put_words(*slot, part.mask, values);
    }
}

fn gather_any(registers: &mut Registers, access: &Access, data: &[u8], part: &Part) {
    let element = access.element as usize;
    for (index, slot) in access.registers.iter().enumerate() {
        let skip = index * element;
        for lane in lanes(part.mask) {
            let start = part.starts[lane] + skip;
            if element == 8 {
                registers.doubles[*slot as usize][lane] = u64::from_le_bytes(bytes_at(data, start));
                continue;
            }
            let value = extended(data, start, element, access.extend);
            if access.double {
                registers.doubles[*slot as usize][lane] = value;
            } else {
                registers.words[*slot as usize][lane] = value as u32;
            }
        }
    }
}

/// An element narrower than its register.
fn extended(data: &[u8], start: usize, element: usize, extend: Extend) -> u64 {
    let (value, signed) = match element {
        1 => (u64::from(data[start]), i64::from(data[start] as i8)),
        2 => {
            let value = u16::from_le_bytes(bytes_at(data, start));
            (u64::from(value), i64::from(value as i16))
        }
        _ => {
            let value = u32::from_le_bytes(bytes_at(data, start));
            (u64::from(value), i64::from(value as i32))
        }
    };
    match extend {
        Extend::Zero => value,
        Extend::SignToHalf => signed as u64 & 0xffff,
        Extend::Sign => signed as u64,
    }
}

/// Registers into bytes.
pub(super) fn scatter(registers: &Registers, access: &Access, data: &mut [u8], part: &Part) {
    let element = access.element as usize;
    for (index, slot) in access.registers.iter().enumerate() {
        let skip = index * element;
        if access.double {
            let values = registers.double(*slot);
            for lane in lanes(part.mask) {
                let bytes = values[lane].to_le_bytes();
                data[part.starts[lane] + skip..][..element].copy_from_slice(&bytes[..element]);
            }
            continue;
        }
        let values = registers.word(*slot);
        if part.contiguous && element == 4 && access.registers.len() == 1 {
            let window = &mut data[part.starts[0]..][..LANES * 4];
            for (bytes, value) in window.chunks_exact_mut(4).zip(values) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            continue;
        }
        for lane in lanes(part.mask) {
            let bytes = values[lane].to_le_bytes();
            data[part.starts[lane] + skip..][..element].copy_from_slice(&bytes[..element]);
        }
    }
}
