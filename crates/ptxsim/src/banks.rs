//! The 32 banks of shared memory, and how often a request has to go over them.

use crate::registers::{Doubles, LANES, lanes};

/// Passes over the 32 banks for the accesses of `mask`, each of `bytes` bytes at a multiple of them, and the least number of passes.
///
/// Up to 4 bytes the whole warp goes in one pass, 8 bytes in halves, 16 in quarters; within a pass a bank gives one word, to any number of
/// lanes. Accesses are aligned, so two of one size need the same banks entirely or not at all: they are counted in units of their size.
pub(crate) fn wavefronts(mask: u32, addresses: &Doubles, bytes: u32) -> (u32, u32) {
    let part_lanes = (128 / bytes.max(4)) as usize;
    let shift = bytes.max(4).trailing_zeros();
    let mut apart = u64::from(mask != u32::MAX);
    for lane in 0..LANES {
        apart |= addresses[lane] ^ addresses[0].wrapping_add(lane as u64 * u64::from(bytes));
    }
    if apart == 0 {
        let parts = (LANES / part_lanes) as u32;
        return (parts, parts);
    }
    let (mut passes, mut least) = (0, 0);
    for start in (0..LANES).step_by(part_lanes) {
        let part = if part_lanes == LANES { mask } else { mask >> start & ((1 << part_lanes) - 1) };
        if part != 0 {
            passes += part_passes(part, &addresses[start..start + part_lanes], shift);
            least += 1;
        }
    }
    (passes, least)
}

/// Passes of lanes that go together: the most distinct units that one group of banks has to give.
fn part_passes(part: u32, addresses: &[u64], shift: u32) -> u32 {
    let groups = addresses.len();
    let (mut given, mut unit_of_group) = (0u32, [0u64; LANES]);
    for lane in lanes(part) {
        let unit = addresses[lane] >> shift;
        let group = unit as usize % groups;
        if given >> group & 1 == 1 && unit_of_group[group] != unit {
            return conflicting_passes(part, addresses, shift);
        }
        given |= 1 << group;
        unit_of_group[group] = unit;
    }
    1
}

/// The same where some group has to give more than one: the distinct units of each group are chained.
fn conflicting_passes(part: u32, addresses: &[u64], shift: u32) -> u32 {
    const END: u8 = u8::MAX;
    let groups = addresses.len();
    let mut seen = [0u64; LANES];
    let (mut next, mut head) = ([END; LANES], [END; LANES]);
    let mut count = [0u32; LANES];
    let mut used = 0;
    for lane in lanes(part) {
        let unit = addresses[lane] >> shift;
        let group = unit as usize % groups;
        let mut link = head[group];
        while link != END && seen[link as usize] != unit {
            link = next[link as usize];
        }
        if link == END {
            seen[used] = unit;
            next[used] = head[group];
            head[group] = used as u8;
            count[group] += 1;
            used += 1;
        }
    }
    count.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(stride: u64) -> [u64; LANES] {
        std::array::from_fn(|lane| lane as u64 * stride)
    }

    #[test]
    fn a_stride_of_two_words_takes_two_passes_and_of_a_line_takes_32() {
        assert_eq!(wavefronts(u32::MAX, &strided(4), 4), (1, 1));
        assert_eq!(wavefronts(u32::MAX, &strided(8), 4), (2, 1));
        assert_eq!(wavefronts(u32::MAX, &strided(128), 4), (32, 1));
        assert_eq!(wavefronts(u32::MAX, &strided(132), 4), (1, 1));
        assert_eq!(wavefronts(u32::MAX, &strided(0), 4), (1, 1));
        assert_eq!(wavefronts(u32::MAX, &strided(2), 2), (1, 1));
    }

    #[test]
    fn wide_accesses_go_in_halves_and_quarters() {
        assert_eq!(wavefronts(u32::MAX, &strided(8), 8), (2, 2));
        assert_eq!(wavefronts(u32::MAX, &strided(16), 16), (4, 4));
        assert_eq!(wavefronts(u32::MAX, &strided(128), 16), (32, 4));
        assert_eq!(wavefronts(u32::MAX, &strided(144), 16), (4, 4));
        assert_eq!(wavefronts(0xff, &strided(128), 16), (8, 1));
    }
}
