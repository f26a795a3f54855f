//! A block's shared memory, and who touched which part of it since the last barrier.
//!
//! Memory is divided into cells of the kernel's narrowest shared access, at most 4 bytes. A cell remembers its last writer and its readers
//! with two clocks: the block's epoch, which every barrier advances, and the warp's, which `bar.warp.sync` advances. Two accesses of different
//! threads are ordered if a barrier lies between, or if both are in one warp and it was synchronised since. Clocks run on from block to
//! block of a launch, so that a cell of an older block is known as unwritten without being cleared.

use crate::fault::{AccessKind, FaultKind, SpaceName};
use crate::registers::LANES;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Written,
    Atomic,
    InFlight,
}

/// Who read a cell in the epoch of its last read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Readers {
    #[default]
    One,
    Warp,
    Many,
}

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    write_epoch: u32,
    write_warp_epoch: u32,
    /// Serial number of the writing instruction.
    write_serial: u32,
    read_epoch: u32,
    read_warp_epoch: u32,
    writer: u16,
    reader: u16,
    state: State,
    readers: Readers,
}

/// The clocks of the warp that makes an access.
#[derive(Debug, Clone)]
pub(crate) struct WarpClock {
    /// The first thread of the warp.
    pub first_thread: u32,
    /// Counts the warp's synchronisations.
    pub epoch: u32,
    /// `epoch` after the last synchronisation that a lane took part in.
    pub synchronised: [u32; LANES],
}

impl WarpClock {
    /// A warp that has not synchronised yet.
    pub fn new(first_thread: u32) -> Self {
        Self { first_thread, epoch: 0, synchronised: [0; LANES] }
    }

    /// The lanes of `mask` meet.
    pub fn synchronise(&mut self, mask: u32) {
        self.epoch += 1;
        for lane in crate::registers::lanes(mask) {
            self.synchronised[lane] = self.epoch;
        }
    }

    /// True if `thread` is of this warp and it and `lane` met after the warp's epoch `since`.
    fn ordered(&self, thread: u32, since: u32, lane: usize) -> bool {
        thread & !31 == self.first_thread
            && since < self.synchronised[lane]
            && since < self.synchronised[thread as usize & 31]
    }
}

/// Shared memory of one block after another.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    pub data: Vec<u8>,
    cells: Vec<Cell>,
    grain: u32,
    epoch: u32,
    first_epoch: u32,
    serial: u32,
}

impl SharedMemory {
    /// `bytes` bytes in cells of `1 << grain`.
    pub fn new(bytes: usize, grain: u32) -> Self {
        let cells = (bytes >> grain) + 1;
        Self {
            data: vec![0xff; bytes],
            cells: vec![Cell::default(); cells],
            grain,
            epoch: 1,
            first_epoch: 1,
            serial: 0,
        }
    }

    /// Another block begins: nothing is written yet.
    pub fn begin_block(&mut self) {
        self.epoch += 1;
        self.first_epoch = self.epoch;
    }

    /// All threads of the block met.
    pub fn barrier(&mut self) {
        self.epoch += 1;
    }

    /// Another instruction begins: its lanes act at once.
    pub fn begin_instruction(&mut self) {
        self.serial = self.serial.wrapping_add(1);
    }

    /// Bounds and alignment of an access.
    pub fn check(&self, access: AccessKind, address: u64, bytes: u32) -> Result<(), FaultKind> {
        let available = self.data.len() as u64;
        if address.checked_add(u64::from(bytes)).is_none_or(|end| end > available) {
            return Err(FaultKind::OutOfBounds { space: SpaceName::Shared, access, bytes, address, available });
        }
        if address % u64::from(bytes) != 0 {
            return Err(FaultKind::Misaligned { space: SpaceName::Shared, access, bytes, address });
        }
        Ok(())
    }

    fn cell_range(&self, address: u32, bytes: u32) -> std::ops::Range<usize> {
        (address >> self.grain) as usize..((address + bytes - 1) >> self.grain) as usize + 1
    }

    fn cell_address(&self, cell: usize) -> u64 {
        (cell << self.grain) as u64
    }

    /// A lane reads checked bytes.
    pub fn read(&mut self, clock: &WarpClock, lane: usize, address: u32, bytes: u32) -> Result<(), FaultKind> {
        let me = clock.first_thread + lane as u32;
        let (epoch, first_epoch) = (self.epoch, self.first_epoch);
        for index in self.cell_range(address, bytes) {
            let cell = &mut self.cells[index];
            let access = AccessKind::Load;
            if cell.write_epoch < first_epoch {
                return Err(FaultKind::UninitialisedShared { access, bytes, address: u64::from(address) });
            }
            let writer = u32::from(cell.writer);
            if cell.state == State::InFlight {
                return Err(FaultKind::InFlight { access, address: self.cell_address(index), writer });
            }
            if cell.write_epoch == epoch && writer != me && !clock.ordered(writer, cell.write_warp_epoch, lane) {
                return Err(self.hazard(access, index));
            }
            if cell.read_epoch != epoch {
                cell.read_epoch = epoch;
                cell.reader = me as u16;
                cell.readers = Readers::One;
            } else if u32::from(cell.reader) != me {
                let same_warp = u32::from(cell.reader) & !31 == clock.first_thread && cell.readers != Readers::Many;
                cell.readers = if same_warp { Readers::Warp } else { Readers::Many };
            }
            cell.read_warp_epoch = clock.epoch;
        }
        Ok(())
    }

    /// A lane writes `values` to checked bytes. Lanes of one instruction may write the same value to one place.
    pub fn write(&mut self, clock: &WarpClock, lane: usize, address: u32, values: &[u8]) -> Result<(), FaultKind> {
        let range = self.cell_range(address, values.len() as u32);
        for index in range.clone() {
            let cell = self.cells[index];
            if cell.write_serial == self.serial && cell.write_epoch == self.epoch {
                let start = address as usize;
                if self.data[start..start + values.len()] == *values && cell.state == State::Written {
                    continue;
                }
            }
            self.check_write(clock, lane, index, AccessKind::Store)?;
        }
        self.mark(clock, lane, range, State::Written);
        self.data[address as usize..address as usize + values.len()].copy_from_slice(values);
        Ok(())
    }

    /// A lane changes checked bytes atomically.
    pub fn atomic(&mut self, clock: &WarpClock, lane: usize, address: u32, bytes: u32) -> Result<(), FaultKind> {
        let (range, access) = (self.cell_range(address, bytes), AccessKind::Atomic);
        for index in range.clone() {
            if self.cells[index].write_epoch < self.first_epoch {
                return Err(FaultKind::UninitialisedShared { access, bytes, address: u64::from(address) });
            }
            self.check_write(clock, lane, index, access)?;
        }
        self.mark(clock, lane, range, State::Atomic);
        Ok(())
    }

    /// A lane starts an asynchronous copy to checked bytes. They are written at once, but nobody may look at them before `land`.
    pub fn launch_copy(&mut self, clock: &WarpClock, lane: usize, address: u32, bytes: u32) -> Result<(), FaultKind> {
        let range = self.cell_range(address, bytes);
        for index in range.clone() {
            self.check_write(clock, lane, index, AccessKind::AsyncCopy)?;
        }
        self.mark(clock, lane, range, State::InFlight);
        Ok(())
    }

    /// A lane has waited for its copy: from now on it is a write of that lane.
    pub fn land_copy(&mut self, clock: &WarpClock, lane: usize, address: u32, bytes: u32) {
        let range = self.cell_range(address, bytes);
        self.mark(clock, lane, range, State::Written);
    }

    fn check_write(&self, clock: &WarpClock, lane: usize, index: usize, access: AccessKind) -> Result<(), FaultKind> {
        let cell = &self.cells[index];
        let me = clock.first_thread + lane as u32;
        let writer = u32::from(cell.writer);
        if cell.write_epoch >= self.first_epoch && cell.state == State::InFlight {
            return Err(FaultKind::InFlight { access, address: self.cell_address(index), writer });
        }
        let both_atomic = cell.state == State::Atomic && access == AccessKind::Atomic;
        if cell.write_epoch == self.epoch
            && writer != me
            && !both_atomic
            && !clock.ordered(writer, cell.write_warp_epoch, lane)
        {
            return Err(self.hazard(access, index));
        }
        if cell.read_epoch == self.epoch {
            let reader = u32::from(cell.reader);
            let since = cell.read_warp_epoch;
            let ordered = match cell.readers {
                Readers::One => reader == me || clock.ordered(reader, since, lane),
                Readers::Warp => reader & !31 == clock.first_thread && since < clock.synchronised[lane],
                Readers::Many => false,
            };
            if !ordered {
                let address = self.cell_address(index);
                let earlier = AccessKind::Load;
                return Err(FaultKind::SharedHazard { access, address, earlier, other: reader });
            }
        }
        Ok(())
    }

    fn hazard(&self, access: AccessKind, index: usize) -> FaultKind {
        let cell = &self.cells[index];
        let earlier = if cell.state == State::Atomic { AccessKind::Atomic } else { AccessKind::Store };
        FaultKind::SharedHazard { access, address: self.cell_address(index), earlier, other: u32::from(cell.writer) }
    }

    fn mark(&mut self, clock: &WarpClock, lane: usize, range: std::ops::Range<usize>, state: State) {
        let (epoch, serial) = (self.epoch, self.serial);
        for cell in &mut self.cells[range] {
            cell.write_epoch = epoch;
            cell.write_warp_epoch = clock.epoch;
            cell.write_serial = serial;
            cell.writer = (clock.first_thread + lane as u32) as u16;
            cell.state = state;
            // Readers before this write are ordered before it, and so before all that is ordered after it.
            cell.read_epoch = 0;
        }
    }
}

/// Passes over the 32 banks for the accesses of `mask`, each of `bytes` bytes at a multiple of them, and the least number of passes.
///
/// Up to 4 bytes the whole warp goes in one pass, 8 bytes in halves, 16 in quarters; within a pass a bank gives one word, to any number of lanes.
pub(crate) fn wavefronts(mask: u32, addresses: &[u64; LANES], bytes: u32) -> (u32, u32) {
    let part_lanes = (128 / bytes.max(4)) as usize;
    let words = (bytes / 4).max(1) as u64;
    let (mut passes, mut least) = (0, 0);
    for start in (0..LANES).step_by(part_lanes) {
        let part = if part_lanes == LANES { mask } else { mask >> start & ((1 << part_lanes) - 1) };
        if part != 0 {
            passes += part_passes(part, &addresses[start..start + part_lanes], words);
            least += 1;
        }
    }
    (passes, least)
}

fn part_passes(part: u32, addresses: &[u64], words: u64) -> u32 {
    let mut seen = [0u64; LANES];
    let mut next = [u8::MAX; LANES];
    let mut head = [u8::MAX; LANES];
    let mut count = [0u32; LANES];
    let mut used = 0;
    for lane in crate::registers::lanes(part) {
        for word in (addresses[lane] >> 2)..(addresses[lane] >> 2) + words {
            let bank = word as usize % LANES;
            let mut link = head[bank];
            while link != u8::MAX && seen[link as usize] != word {
                link = next[link as usize];
            }
            if link == u8::MAX {
                seen[used] = word;
                next[used] = head[bank];
                head[bank] = used as u8;
                count[bank] += 1;
                used += 1;
            }
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
