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
    for (index, slot) in access.registers.iter().enumerate() {
        let skip = index * element;
        match (element, access.double) {
            (4, false) if part.contiguous && access.registers.len() == 1 => {
                let window = &data[part.starts[0]..][..LANES * 4];
                let mut values = [0; LANES];
                for (value, bytes) in values.iter_mut().zip(window.chunks_exact(4)) {
                    *value = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
                registers.put_words(*slot, part.mask, &values);
            }
            (4, false) => {
                let target = &mut registers.words[*slot as usize];
                for lane in lanes(part.mask) {
                    target[lane] = u32::from_le_bytes(bytes_at(data, part.starts[lane] + skip));
                }
            }
            (8, _) => {
                let target = &mut registers.doubles[*slot as usize];
                for lane in lanes(part.mask) {
                    target[lane] = u64::from_le_bytes(bytes_at(data, part.starts[lane] + skip));
                }
            }
            (_, double) => {
                for lane in lanes(part.mask) {
                    let value = extended(data, part.starts[lane] + skip, element, access.extend);
                    if double {
                        registers.doubles[*slot as usize][lane] = value;
                    } else {
                        registers.words[*slot as usize][lane] = value as u32;
                    }
                }
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
