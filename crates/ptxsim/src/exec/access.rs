//! Loads and stores: addresses, checks, counters, and the bytes between memory and registers.

use crate::banks::wavefronts;
use crate::fault::{AccessKind, FaultKind, SpaceName};
use crate::isa::{Access, Address, Space};
use crate::registers::{Doubles, LANES, Registers, lanes};
use crate::report::Traffic;
use crate::warp::Warp;

use super::bytes::{Part, gather, scatter};
use super::{Machine, Outcome, trouble, window};

/// The address of every lane.
pub(super) fn addresses(registers: &Registers, address: Address) -> Doubles {
    let offset = address.offset as u64;
    let mut result = [0; LANES];
    if address.double {
        let base = registers.double(address.base);
        for lane in 0..LANES {
            result[lane] = base[lane].wrapping_add(offset);
        }
    } else {
        let base = registers.word(address.base);
        for lane in 0..LANES {
            result[lane] = u64::from(base[lane].wrapping_add(offset as u32));
        }
    }
    result
}

/// True if every address lies in `space` itself.
fn is_plain(machine: &Machine<'_>, space: Space) -> bool {
    match space {
        Space::Generic => false,
        Space::Global => machine.kernel.constants.is_empty(),
        _ => true,
    }
}

/// The lanes of `mask` whose address lies in each space, with the addresses in that space. A global address may be that of a constant.
pub(super) fn split(machine: &Machine<'_>, space: Space, addresses: &Doubles, mask: u32) -> [(Space, u32, Doubles); 4] {
    let mut split = [(space, 0, *addresses); 4];
    if is_plain(machine, space) {
        split[3].1 = mask;
        return split;
    }
    let windows = [(Space::Const, window::CONST), (Space::Shared, window::SHARED), (Space::Local, window::LOCAL)];
    let num_windows = if space == Space::Generic { 3 } else { 1 };
    let mut rest = mask;
    for (index, (within, base)) in windows.into_iter().take(num_windows).enumerate() {
        let inside = lanes(mask).filter(|lane| addresses[*lane].wrapping_sub(base) < window::SIZE);
        let part = inside.fold(0, |part, lane| part | 1 << lane);
        rest &= !part;
        // Constants keep their window: that is how every address of them is written.
        let origin = if within == Space::Const { 0 } else { base };
        split[index] = (within, part, addresses.map(|address| address.wrapping_sub(origin)));
    }
    split[3] = (Space::Global, rest, *addresses);
    split
}

/// `ld`
pub(super) fn load(warp: &mut Warp, machine: &mut Machine<'_>, pc: usize, access: &Access, mask: u32) -> Outcome {
    let addresses = addresses(&warp.registers, access.address);
    if is_plain(machine, access.space) {
        return load_from(warp, machine, (pc, access.space), access, &addresses, mask);
    }
    for (space, part, addresses) in split(machine, access.space, &addresses, mask) {
        if part != 0 {
            load_from(warp, machine, (pc, space), access, &addresses, part)?;
        }
    }
    Ok(())
}

fn load_from(
    warp: &mut Warp,
    machine: &mut Machine<'_>,
    (pc, space): (usize, Space),
    access: &Access,
    addresses: &Doubles,
    mask: u32,
) -> Outcome {
    let bytes = access.element * access.registers.len() as u32;
    let kind = AccessKind::Load;
    match space {
        Space::Global | Space::Generic => {
            let mut rest = mask;
            while rest != 0 {
                let part = resolve(machine, pc, kind, bytes, addresses, rest)?;
                let data = &machine.memory.buffer(part.buffer).data;
                gather(&mut warp.registers, access, data, &part);
                count(machine, kind, &part, addresses, bytes, rest == mask);
                rest &= !part.mask;
            }
        }
        Space::Shared => {
            machine.shared.check(kind, mask, addresses, bytes)?;
            machine.shared.read(&warp.clock, mask, addresses, bytes)?;
            count_shared(machine, mask, addresses, bytes);
            gather(&mut warp.registers, access, &machine.shared.data, &Part::whole(mask, addresses));
        }
        Space::Local => {
            let part = local_part(warp, machine, kind, bytes, addresses, mask)?;
            gather(&mut warp.registers, access, &warp.local, &part);
        }
        Space::Param => {
            check_fixed(SpaceName::Parameter, machine.params.len(), bytes, addresses, mask)?;
            gather(&mut warp.registers, access, machine.params, &Part::whole(mask, addresses));
        }
        Space::Const => {
            let addresses = addresses.map(|address| address.wrapping_sub(window::CONST));
            check_fixed(SpaceName::Constant, machine.kernel.constants.len(), bytes, &addresses, mask)?;
            gather(&mut warp.registers, access, &machine.kernel.constants, &Part::whole(mask, &addresses));
        }
    }
    Ok(())
}

/// `st`
pub(super) fn store(warp: &mut Warp, machine: &mut Machine<'_>, pc: usize, access: &Access, mask: u32) -> Outcome {
    let addresses = addresses(&warp.registers, access.address);
    if is_plain(machine, access.space) {
        return store_to(warp, machine, (pc, access.space), access, &addresses, mask);
    }
    for (space, part, addresses) in split(machine, access.space, &addresses, mask) {
        if part != 0 {
            store_to(warp, machine, (pc, space), access, &addresses, part)?;
        }
    }
    Ok(())
}

fn store_to(
    warp: &mut Warp,
    machine: &mut Machine<'_>,
    (pc, space): (usize, Space),
    access: &Access,
    addresses: &Doubles,
    mask: u32,
) -> Outcome {
    let bytes = access.element * access.registers.len() as u32;
    let kind = AccessKind::Store;
    match space {
        Space::Shared => store_shared(warp, machine, access, addresses, mask)?,
        Space::Local => {
            let part = local_part(warp, machine, kind, bytes, addresses, mask)?;
            scatter(&warp.registers, access, &mut warp.local, &part);
        }
        Space::Param | Space::Const => {
            let lane = mask.trailing_zeros() as usize;
            return Err(trouble(lane, FaultKind::ConstantWrite { access: kind, address: addresses[lane] }));
        }
        Space::Global | Space::Generic => {
            let mut rest = mask;
            while rest != 0 {
                let part = resolve(machine, pc, kind, bytes, addresses, rest)?;
                let data = &mut machine.memory.buffer_mut(part.buffer).data;
                scatter(&warp.registers, access, data, &part);
                count(machine, kind, &part, addresses, bytes, rest == mask);
                rest &= !part.mask;
            }
        }
    }
    Ok(())
}

fn store_shared(
    warp: &mut Warp,
    machine: &mut Machine<'_>,
    access: &Access,
    addresses: &Doubles,
    mask: u32,
) -> Outcome {
    let bytes = access.element * access.registers.len() as u32;
    machine.shared.check(AccessKind::Store, mask, addresses, bytes)?;
    machine.shared.begin_instruction();
    match (access.element, access.double, access.registers.as_slice()) {
        (4, false, [a]) => {
            let a = warp.registers.word(*a);
            for lane in lanes(mask) {
                machine.shared.write(&warp.clock, lane, addresses[lane], &a[lane].to_le_bytes())?;
            }
        }
        (4, false, [a, b, c, d]) => {
            let sources = [a, b, c, d].map(|slot| warp.registers.word(*slot));
            for lane in lanes(mask) {
                let mut values = [0; 16];
                for (place, source) in values.chunks_exact_mut(4).zip(sources) {
                    place.copy_from_slice(&source[lane].to_le_bytes());
                }
                machine.shared.write(&warp.clock, lane, addresses[lane], &values)?;
            }
        }
        _ => {
            for lane in lanes(mask) {
                let values = lane_bytes(&warp.registers, access, lane);
                machine.shared.write(&warp.clock, lane, addresses[lane], &values[..bytes as usize])?;
            }
        }
    }
    count_shared(machine, mask, addresses, bytes);
    Ok(())
}

/// What a lane stores, in the first bytes of the result.
fn lane_bytes(registers: &Registers, access: &Access, lane: usize) -> [u8; 32] {
    let element = access.element as usize;
    let mut values = [0; 32];
    for (index, slot) in access.registers.iter().enumerate() {
        let value = if access.double { registers.double(*slot)[lane] } else { u64::from(registers.word(*slot)[lane]) };
        values[index * element..][..element].copy_from_slice(&value.to_le_bytes()[..element]);
    }
    values
}

/// The lanes of `mask` whose bytes lie in the same buffer as those of the first, checked.
pub(super) fn resolve(
    machine: &mut Machine<'_>,
    pc: usize,
    kind: AccessKind,
    bytes: u32,
    addresses: &Doubles,
    mask: u32,
) -> Result<Part, Box<super::Trouble>> {
    let first = mask.trailing_zeros() as usize;
    let guess = machine.last_buffer[pc] as usize;
    let known = guess < machine.memory.num_buffers() && machine.memory.buffer(guess).contains(addresses[first]);
    let index = if known { Some(guess) } else { machine.memory.find(addresses[first]) };
    let width = u64::from(bytes);
    let fault = |lane: usize, kind: FaultKind| Err(trouble(lane, kind));
    let Some(index) = index else {
        return fault(first, out_of_bounds(machine, kind, bytes, addresses[first]));
    };
    machine.last_buffer[pc] = index as u32;
    let buffer = machine.memory.buffer(index);
    if buffer.freed {
        let (address, base, length) = (addresses[first], buffer.base, buffer.bytes);
        return fault(first, FaultKind::UseAfterFree { access: kind, bytes, address, base, length });
    }
    let start = addresses[first] - buffer.base;
    let mut apart = u64::from(mask != u32::MAX) | (start % width);
    for lane in 0..LANES {
        apart |= addresses[lane] ^ addresses[0].wrapping_add(lane as u64 * width);
    }
    if apart == 0 && start + width * LANES as u64 <= buffer.bytes {
        let starts = std::array::from_fn(|lane| start as usize + lane * bytes as usize);
        return Ok(Part { buffer: index, mask, starts, contiguous: true });
    }
    let mut part = Part { buffer: index, mask: 0, starts: [0; LANES], contiguous: false };
    for lane in lanes(mask) {
        let offset = addresses[lane].wrapping_sub(buffer.base);
        if offset >= buffer.bytes {
            continue;
        }
        if !offset.is_multiple_of(width) {
            let (space, address) = (SpaceName::Global, addresses[lane]);
            return fault(lane, FaultKind::Misaligned { space, access: kind, bytes, address });
        }
        if offset + width > buffer.bytes {
            return fault(lane, out_of_bounds(machine, kind, bytes, addresses[lane]));
        }
        part.mask |= 1 << lane;
        part.starts[lane] = offset as usize;
    }
    Ok(part)
}

fn out_of_bounds(machine: &Machine<'_>, access: AccessKind, bytes: u32, address: u64) -> FaultKind {
    let nearest = machine.memory.nearest(address).map(|index| {
        let buffer = machine.memory.buffer(index);
        (buffer.base, buffer.bytes)
    });
    FaultKind::GlobalOutOfBounds { access, bytes, address, nearest }
}

/// Bounds and alignment in a thread's stack; the stacks of a warp lie one behind the other.
fn local_part(
    warp: &Warp,
    machine: &mut Machine<'_>,
    access: AccessKind,
    bytes: u32,
    addresses: &Doubles,
    mask: u32,
) -> Result<Part, Box<super::Trouble>> {
    let stack = machine.kernel.local_bytes;
    debug_assert_eq!(warp.local.len(), stack * LANES);
    for lane in lanes(mask) {
        let (space, address) = (SpaceName::Local, addresses[lane]);
        if address.checked_add(u64::from(bytes)).is_none_or(|end| end > stack as u64) {
            let available = stack as u64;
            return Err(trouble(lane, FaultKind::OutOfBounds { space, access, bytes, address, available }));
        }
        if !address.is_multiple_of(u64::from(bytes)) {
            return Err(trouble(lane, FaultKind::Misaligned { space, access, bytes, address }));
        }
    }
    machine.report.local_requests += 1;
    let mut part = Part::whole(mask, addresses);
    for lane in 0..LANES {
        part.starts[lane] = part.starts[lane].wrapping_add(lane * stack);
    }
    Ok(part)
}

fn check_fixed(space: SpaceName, available: usize, bytes: u32, addresses: &Doubles, mask: u32) -> Outcome {
    let (access, available) = (AccessKind::Load, available as u64);
    for lane in lanes(mask) {
        let address = addresses[lane];
        if address.checked_add(u64::from(bytes)).is_none_or(|end| end > available) {
            return Err(trouble(lane, FaultKind::OutOfBounds { space, access, bytes, address, available }));
        }
        if !address.is_multiple_of(u64::from(bytes)) {
            return Err(trouble(lane, FaultKind::Misaligned { space, access, bytes, address }));
        }
    }
    Ok(())
}

/// Counts a request's part in one buffer; only the first part counts as a request.
pub(super) fn count(
    machine: &mut Machine<'_>,
    kind: AccessKind,
    part: &Part,
    addresses: &Doubles,
    bytes: u32,
    first: bool,
) {
    let (sectors, distinct) = if part.contiguous {
        let (start, end) = (addresses[0], addresses[LANES - 1] + u64::from(bytes) - 1);
        ((end >> 5) - (start >> 5) + 1, LANES as u64)
    } else {
        (distinct(part.mask, addresses, 5), distinct(part.mask, addresses, 0))
    };
    let traffic = Traffic { requests: 1, sectors, bytes: distinct * u64::from(bytes) };
    let whole = Traffic { requests: u64::from(first), ..traffic };
    let buffer = &mut machine.traffic[part.buffer];
    match kind {
        AccessKind::Load | AccessKind::AsyncCopy => {
            buffer.loads += traffic;
            machine.report.global_loads += whole;
        }
        AccessKind::Store => {
            buffer.stores += traffic;
            machine.report.global_stores += whole;
        }
        AccessKind::Atomic => {
            buffer.atomics += traffic;
            machine.report.global_atomics += whole;
        }
    }
}

/// How many distinct values `address >> shift` takes.
fn distinct(mask: u32, addresses: &Doubles, shift: u32) -> u64 {
    let (mut values, mut length) = ([0u64; LANES], 0);
    let mut ascending = true;
    for lane in lanes(mask) {
        let value = addresses[lane] >> shift;
        if length > 0 && values[length - 1] == value {
            continue;
        }
        ascending &= length == 0 || values[length - 1] < value;
        values[length] = value;
        length += 1;
    }
    if ascending {
        return length as u64;
    }
    let values = &mut values[..length];
    values.sort_unstable();
    1 + values.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64
}

/// Counts a request to shared memory.
pub(super) fn count_shared(machine: &mut Machine<'_>, mask: u32, addresses: &Doubles, bytes: u32) {
    let (passes, least) = wavefronts(mask, addresses, bytes);
    let shared = &mut machine.report.shared;
    shared.requests += 1;
    shared.wavefronts += u64::from(passes);
    shared.conflicts += u64::from(passes - least);
}
