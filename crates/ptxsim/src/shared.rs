//! A block's shared memory, and who touched which part of it since the last barrier.
//!
//! Memory is divided into cells of the kernel's narrowest shared access, at most 4 bytes. A cell remembers its last writer and its readers
//! with two clocks: the block's epoch, which every barrier advances, and the warp's, which `bar.warp.sync` advances. Two accesses of different
//! threads are ordered if a barrier lies between, or if both are in one warp and it was synchronised since. Clocks run on from block to
//! block of a launch, so that a cell of an older block is known as unwritten without being cleared.

use std::ops::Range;

use crate::exec::{Outcome, trouble};
use crate::fault::{AccessKind, FaultKind, SpaceName};
use crate::registers::{Doubles, LANES, lanes};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Written,
    Atomic,
}

/// The epoch of a write that has not landed: later than every other, so that nobody may read it.
const IN_FLIGHT: u32 = u32::MAX;

/// Who has read a cell in the epoch of its last read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readers {
    One,
    /// More than one lane of the warp of the reader that is remembered.
    Warp,
    Many,
}

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    write_epoch: u32,
    write_warp_epoch: u32,
    /// Serial number of the writing instruction.
    write_serial: u32,
    writer: u16,
    state: State,
    /// The epoch in the upper half, the first reader above the kind of `Readers` in the lower: one number that most readers leave as it is.
    read: u64,
    read_warp_epoch: u32,
}

impl Cell {
    fn read_epoch(&self) -> u32 {
        (self.read >> 32) as u32
    }

    fn reader(&self) -> u32 {
        (self.read >> 8) as u32 & 0xffff
    }

    fn readers(&self) -> Readers {
        match self.read & 0xff {
            0 => Readers::One,
            1 => Readers::Warp,
            _ => Readers::Many,
        }
    }

    /// True if the cell's write of this epoch came from a lane that has met `lane` since.
    fn ordered_write(&self, clock: &WarpClock, epoch: u32, lane: usize) -> bool {
        self.write_epoch == epoch && clock.ordered(u32::from(self.writer), self.write_warp_epoch, lane)
    }

    /// Another reader in the epoch of the last.
    fn add_reader(&mut self, clock: &WarpClock) {
        let same_warp = self.reader() & !31 == clock.first_thread && self.readers() != Readers::Many;
        self.read = self.read & !0xff | if same_warp { 1 } else { 2 };
    }
}

/// A first reader.
fn read_stamp(epoch: u32, thread: u32) -> u64 {
    u64::from(epoch) << 32 | u64::from(thread) << 8
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
        for lane in lanes(mask) {
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
    /// Cells whose copies nobody has waited for.
    in_flight: usize,
}

impl SharedMemory {
    /// `bytes` bytes in cells of `1 << grain`.
    pub fn new(bytes: usize, grain: u32) -> Self {
        let cells = (bytes >> grain) + 1;
        let data = vec![0xff; bytes];
        Self { data, cells: vec![Cell::default(); cells], grain, epoch: 1, first_epoch: 1, serial: 0, in_flight: 0 }
    }

    /// Another block begins: nothing is written yet.
    pub fn begin_block(&mut self) {
        if self.in_flight > 0 {
            self.cells.fill(Cell::default());
            self.in_flight = 0;
        }
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

    /// Bounds and alignment of the accesses of `mask`.
    pub fn check(&self, access: AccessKind, mask: u32, addresses: &Doubles, bytes: u32) -> Outcome {
        let (available, width) = (self.data.len() as u64, u64::from(bytes));
        let fits = |address: u64| address <= available.saturating_sub(width) && width <= available;
        for lane in lanes(mask) {
            let address = addresses[lane];
            let space = SpaceName::Shared;
            if !fits(address) {
                return Err(trouble(lane, FaultKind::OutOfBounds { space, access, bytes, address, available }));
            }
            if address & (width - 1) != 0 {
                return Err(trouble(lane, FaultKind::Misaligned { space, access, bytes, address }));
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn cell_range(&self, address: u64, bytes: u32) -> Range<usize> {
        (address >> self.grain) as usize..((address + u64::from(bytes) - 1) >> self.grain) as usize + 1
    }

    fn cell_address(&self, cell: usize) -> u64 {
        (cell << self.grain) as u64
    }

    /// The lanes of `mask` read checked bytes.
    pub fn read(&mut self, clock: &WarpClock, mask: u32, addresses: &Doubles, bytes: u32) -> Outcome {
        let (epoch, first_epoch) = (self.epoch, self.first_epoch);
        for lane in lanes(mask) {
            let me = clock.first_thread + lane as u32;
            let stamp = read_stamp(epoch, me);
            let range = self.cell_range(addresses[lane], bytes);
            let start = range.start;
            for (index, cell) in self.cells[range].iter_mut().enumerate() {
                let older = cell.write_epoch >= first_epoch && cell.write_epoch < epoch;
                let own = cell.write_epoch == epoch && u32::from(cell.writer) == me;
                if !older && !own && !cell.ordered_write(clock, epoch, lane) {
                    return Err(trouble(lane, self.read_fault(start + index, (addresses[lane], bytes))));
                }
                if cell.read_epoch() != epoch {
                    cell.read = stamp;
                } else if cell.read != stamp {
                    cell.add_reader(clock);
                }
                cell.read_warp_epoch = clock.epoch;
            }
        }
        Ok(())
    }

    fn read_fault(&self, index: usize, (address, bytes): (u64, u32)) -> FaultKind {
        let (cell, access) = (&self.cells[index], AccessKind::Load);
        if cell.write_epoch < self.first_epoch {
            return FaultKind::UninitialisedShared { access, bytes, address };
        }
        if cell.write_epoch == IN_FLIGHT {
            return FaultKind::InFlight { access, address: self.cell_address(index), writer: u32::from(cell.writer) };
        }
        self.hazard(access, index)
    }

    /// A lane writes `values` to checked bytes. Lanes of one instruction may write the same value to one place.
    #[inline(always)]
    pub fn write(&mut self, clock: &WarpClock, lane: usize, address: u64, values: &[u8]) -> Outcome {
        let place = address as usize..address as usize + values.len();
        for index in self.cell_range(address, values.len() as u32) {
            let cell = &self.cells[index];
            let again = cell.write_serial == self.serial && cell.write_epoch == self.epoch;
            let same = again && cell.state == State::Written && self.data[place.clone()] == *values;
            if !same {
                self.check_write(clock, lane, index, AccessKind::Store)?;
            }
            self.mark(clock, lane, index, State::Written);
        }
        self.data[place].copy_from_slice(values);
        Ok(())
    }

    /// A lane changes checked bytes atomically.
    pub fn atomic(&mut self, clock: &WarpClock, lane: usize, address: u64, bytes: u32) -> Outcome {
        let access = AccessKind::Atomic;
        for index in self.cell_range(address, bytes) {
            if self.cells[index].write_epoch < self.first_epoch {
                return Err(trouble(lane, FaultKind::UninitialisedShared { access, bytes, address }));
            }
            self.check_write(clock, lane, index, access)?;
            self.mark(clock, lane, index, State::Atomic);
        }
        Ok(())
    }

    /// A lane starts an asynchronous copy to checked bytes. They are written at once, but nobody may look at them before `land_copy`.
    pub fn launch_copy(&mut self, clock: &WarpClock, lane: usize, address: u64, bytes: u32) -> Outcome {
        for index in self.cell_range(address, bytes) {
            self.check_write(clock, lane, index, AccessKind::AsyncCopy)?;
            self.mark(clock, lane, index, State::Written);
            self.cells[index].write_epoch = IN_FLIGHT;
            self.in_flight += 1;
        }
        Ok(())
    }

    /// A lane has waited for its copy: from now on it is a write of that lane.
    pub fn land_copy(&mut self, clock: &WarpClock, lane: usize, address: u64, bytes: u32) {
        for index in self.cell_range(address, bytes) {
            self.mark(clock, lane, index, State::Written);
            self.in_flight -= 1;
        }
    }

    #[inline(always)]
    fn check_write(&self, clock: &WarpClock, lane: usize, index: usize, access: AccessKind) -> Outcome {
        let cell = &self.cells[index];
        // A write of this epoch or in flight, or a read of this epoch.
        let touched = cell.write_epoch >= self.epoch || cell.read_epoch() == self.epoch;
        if !touched {
            return Ok(());
        }
        self.check_touched(clock, lane, index, access)
    }

    /// A write to a cell that was touched since the last barrier, or is about to be.
    fn check_touched(&self, clock: &WarpClock, lane: usize, index: usize, access: AccessKind) -> Outcome {
        let cell = &self.cells[index];
        let me = clock.first_thread + lane as u32;
        let address = self.cell_address(index);
        if cell.write_epoch == IN_FLIGHT {
            let writer = u32::from(cell.writer);
            return Err(trouble(lane, FaultKind::InFlight { access, address, writer }));
        }
        let both_atomic = cell.state == State::Atomic && access == AccessKind::Atomic;
        let own = u32::from(cell.writer) == me;
        if cell.write_epoch == self.epoch && !own && !both_atomic && !cell.ordered_write(clock, self.epoch, lane) {
            return Err(trouble(lane, self.hazard(access, index)));
        }
        let (reader, since) = (cell.reader(), cell.read_warp_epoch);
        let ordered = match cell.readers() {
            _ if cell.read_epoch() != self.epoch => true,
            Readers::One => reader == me || clock.ordered(reader, since, lane),
            Readers::Warp => reader & !31 == clock.first_thread && since < clock.synchronised[lane],
            Readers::Many => false,
        };
        if ordered {
            return Ok(());
        }
        let earlier = AccessKind::Load;
        Err(trouble(lane, FaultKind::SharedHazard { access, address, earlier, other: reader }))
    }

    fn hazard(&self, access: AccessKind, index: usize) -> FaultKind {
        let cell = &self.cells[index];
        let earlier = if cell.state == State::Atomic { AccessKind::Atomic } else { AccessKind::Store };
        FaultKind::SharedHazard { access, address: self.cell_address(index), earlier, other: u32::from(cell.writer) }
    }

    #[inline(always)]
    fn mark(&mut self, clock: &WarpClock, lane: usize, index: usize, state: State) {
        let cell = &mut self.cells[index];
        cell.write_epoch = self.epoch;
        cell.write_warp_epoch = clock.epoch;
        cell.write_serial = self.serial;
        cell.writer = (clock.first_thread + lane as u32) as u16;
        cell.state = state;
        // Readers before this write are ordered before it, and so before all that is ordered after it.
        cell.read = 0;
    }
}
