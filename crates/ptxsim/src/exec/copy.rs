//! `cp.async`: copies from global to shared memory that are not there until their thread has waited.

use crate::fault::{AccessKind, FaultKind, SpaceName};
use crate::isa::AsyncCopy;
use crate::registers::{Doubles, LANES, lanes};
use crate::warp::Warp;

use super::access::{addresses, count, count_shared, resolve};
use super::{Machine, Outcome, trouble};

/// A warp's copies in flight.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pending: Vec<Pending>,
    /// How many groups each lane has committed; copies belong to the group that is open.
    groups: [u32; LANES],
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    lane: u8,
    bytes: u8,
    group: u32,
    address: u64,
}

impl Copies {
    /// The lanes close their groups.
    pub fn commit(&mut self, mask: u32) {
        for lane in lanes(mask) {
            self.groups[lane] += 1;
        }
    }

    /// Another block begins.
    pub fn reset(&mut self) {
        self.pending.clear();
        self.groups = [0; LANES];
    }
}

/// Starts a copy in each lane.
pub(super) fn start(warp: &mut Warp, machine: &mut Machine<'_>, pc: usize, copy: &AsyncCopy, mask: u32) -> Outcome {
    let (to, from) = (addresses(&warp.registers, copy.to), addresses(&warp.registers, copy.from));
    let lengths = source_lengths(warp, copy);
    machine.shared.check(AccessKind::AsyncCopy, mask, &to, copy.bytes)?;
    machine.shared.begin_instruction();
    for lane in lanes(mask) {
        let address = to[lane];
        machine.shared.launch_copy(&warp.clock, lane, address, copy.bytes)?;
        let (group, bytes) = (warp.copies.groups[lane], copy.bytes as u8);
        warp.copies.pending.push(Pending { lane: lane as u8, bytes, group, address });
        machine.shared.data[to[lane] as usize..][..copy.bytes as usize].fill(0);
    }
    count_shared(machine, mask, &to, copy.bytes);
    let with =
        |test: &dyn Fn(u32) -> bool| lanes(mask).filter(|lane| test(lengths[*lane])).fold(0, |m, lane| m | 1 << lane);
    copy_whole(machine, pc, copy.bytes, (&to, &from), with(&|length| length == copy.bytes))?;
    for lane in lanes(with(&|length| length > 0 && length < copy.bytes)) {
        copy_part(machine, copy.bytes, lengths[lane], (to[lane], from[lane]), lane)?;
    }
    Ok(())
}

/// How many bytes each lane reads.
fn source_lengths(warp: &Warp, copy: &AsyncCopy) -> [u32; LANES] {
    let mut lengths = match copy.source_bytes {
        Some(slot) => warp.registers.word(slot).map(|length| length.min(copy.bytes)),
        None => [copy.bytes; LANES],
    };
    if let Some((slot, flip)) = copy.ignore {
        for lane in lanes(warp.registers.predicate(slot) ^ flip) {
            lengths[lane] = 0;
        }
    }
    lengths
}

/// Lanes that read all their bytes.
fn copy_whole(
    machine: &mut Machine<'_>,
    pc: usize,
    bytes: u32,
    (to, from): (&Doubles, &Doubles),
    mask: u32,
) -> Outcome {
    let mut rest = mask;
    while rest != 0 {
        let part = resolve(machine, pc, AccessKind::AsyncCopy, bytes, from, rest)?;
        let source = &machine.memory.buffer(part.buffer).data;
        for lane in lanes(part.mask) {
            let bytes = bytes as usize;
            let target = &mut machine.shared.data[to[lane] as usize..][..bytes];
            target.copy_from_slice(&source[part.starts[lane]..][..bytes]);
        }
        machine.report.async_copy_bytes += u64::from(part.mask.count_ones() * bytes);
        count(machine, AccessKind::AsyncCopy, &part, from, bytes, rest == mask);
        rest &= !part.mask;
    }
    Ok(())
}

/// A lane that reads fewer bytes than it writes: counted in bytes only, since it is a tail.
fn copy_part(machine: &mut Machine<'_>, width: u32, length: u32, (to, from): (u64, u64), lane: usize) -> Outcome {
    let access = AccessKind::AsyncCopy;
    if from % u64::from(width) != 0 {
        let space = SpaceName::Global;
        return Err(trouble(lane, FaultKind::Misaligned { space, access, bytes: width, address: from }));
    }
    let Some(source) = machine.memory.read(from, length as usize) else {
        let nearest = machine.memory.nearest(from).map(|index| {
            let buffer = machine.memory.buffer(index);
            (buffer.base, buffer.bytes)
        });
        return Err(trouble(lane, FaultKind::GlobalOutOfBounds { access, bytes: length, address: from, nearest }));
    };
    machine.shared.data[to as usize..][..length as usize].copy_from_slice(source);
    machine.report.async_copy_bytes += u64::from(length);
    Ok(())
}

/// Waits until at most `groups` of a lane's committed groups are in flight, or with none given for all its copies.
pub(super) fn wait(warp: &mut Warp, machine: &mut Machine<'_>, groups: Option<u32>, mask: u32) {
    let committed = warp.copies.groups;
    let clock = &warp.clock;
    machine.shared.begin_instruction();
    warp.copies.pending.retain(|pending| {
        let lane = usize::from(pending.lane);
        let done = groups.is_none_or(|groups| pending.group.saturating_add(groups) < committed[lane]);
        if mask >> lane & 1 == 0 || !done {
            return true;
        }
        machine.shared.land_copy(clock, lane, pending.address, u32::from(pending.bytes));
        false
    });
}
