//! `atom` and `red`: the lanes of a warp act one after another, from the lowest.

use crate::fault::AccessKind;
use crate::isa::{Atomic, AtomicOp, Format, IntegerOp, Space, Type};
use crate::numeric::canonical;
use crate::registers::{Doubles, lanes};
use crate::warp::Warp;

use super::access::{addresses, count, count_shared, resolve, split};
use super::{Machine, Outcome, integer};

/// `atom` or `red`
pub(super) fn atomic(warp: &mut Warp, machine: &mut Machine<'_>, pc: usize, atomic: &Atomic, mask: u32) -> Outcome {
    let addresses = addresses(&warp.registers, atomic.address);
    for (space, part, addresses) in split(machine, atomic.space, &addresses, mask) {
        match space {
            _ if part == 0 => {}
            Space::Shared => shared(warp, machine, atomic, &addresses, part)?,
            // A stack or a constant is no device memory, and is reported as such.
            _ => global(warp, machine, pc, atomic, &addresses, part)?,
        }
    }
    Ok(())
}

fn global(
    warp: &mut Warp,
    machine: &mut Machine<'_>,
    pc: usize,
    atomic: &Atomic,
    addresses: &Doubles,
    mask: u32,
) -> Outcome {
    let bytes = atomic.of.bytes();
    let mut rest = mask;
    while rest != 0 {
        let part = resolve(machine, pc, AccessKind::Atomic, bytes, addresses, rest)?;
        let data = &mut machine.memory.buffer_mut(part.buffer).data;
        for lane in lanes(part.mask) {
            apply(warp, atomic, lane, &mut data[part.starts[lane]..][..bytes as usize]);
        }
        count(machine, AccessKind::Atomic, &part, addresses, bytes, rest == mask);
        rest &= !part.mask;
    }
    Ok(())
}

fn shared(warp: &mut Warp, machine: &mut Machine<'_>, atomic: &Atomic, addresses: &Doubles, mask: u32) -> Outcome {
    let bytes = atomic.of.bytes();
    machine.shared.check(AccessKind::Atomic, mask, addresses, bytes)?;
    machine.shared.begin_instruction();
    for lane in lanes(mask) {
        let address = addresses[lane];
        machine.shared.atomic(&warp.clock, lane, address, bytes)?;
        apply(warp, atomic, lane, &mut machine.shared.data[address as usize..][..bytes as usize]);
    }
    count_shared(machine, mask, addresses, bytes);
    Ok(())
}

/// Changes the 4 or 8 bytes of `place` for one lane.
fn apply(warp: &mut Warp, atomic: &Atomic, lane: usize, place: &mut [u8]) {
    let double = atomic.of.bytes() == 8;
    let registers = &mut warp.registers;
    let operand = |slot| if double { registers.double(slot)[lane] } else { u64::from(registers.word(slot)[lane]) };
    let (b, c) = (operand(atomic.b), operand(atomic.c));
    let mut bytes = [0; 8];
    bytes[..place.len()].copy_from_slice(place);
    let old = u64::from_le_bytes(bytes);
    let new =
        if double { on_double(atomic, old, b, c) } else { u64::from(on_word(atomic, old as u32, b as u32, c as u32)) };
    place.copy_from_slice(&new.to_le_bytes()[..place.len()]);
    match atomic.d {
        None => {}
        Some(d) if double => registers.doubles[d as usize][lane] = old,
        Some(d) => registers.words[d as usize][lane] = old as u32,
    }
}

/// The integer operation of an atomic that is a plain one.
fn integer_op(op: AtomicOp, of: Type) -> IntegerOp {
    match (op, of.is_signed()) {
        (AtomicOp::Min, true) => IntegerOp::MinSigned,
        (AtomicOp::Min, false) => IntegerOp::MinUnsigned,
        (AtomicOp::Max, true) => IntegerOp::MaxSigned,
        (AtomicOp::Max, false) => IntegerOp::MaxUnsigned,
        (AtomicOp::And, _) => IntegerOp::And,
        (AtomicOp::Or, _) => IntegerOp::Or,
        (AtomicOp::Xor, _) => IntegerOp::Xor,
        _ => IntegerOp::Add,
    }
}

fn on_word(atomic: &Atomic, old: u32, b: u32, c: u32) -> u32 {
    match (atomic.op, atomic.of.format()) {
        (AtomicOp::Add, Some(Format::F32)) => canonical(f32::from_bits(old) + f32::from_bits(b)),
        (AtomicOp::Add, Some(format)) => super::float::packed_sum(format, old, b),
        (AtomicOp::Exchange, _) => b,
        (AtomicOp::CompareAndSwap, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
        (AtomicOp::Increment, _) => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        (AtomicOp::Decrement, _) => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
        (op, _) => integer::word(integer_op(op, atomic.of), old, b),
    }
}

fn on_double(atomic: &Atomic, old: u64, b: u64, c: u64) -> u64 {
    match (atomic.op, atomic.of.format()) {
        (AtomicOp::Add, Some(_)) => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        (AtomicOp::Exchange, _) => b,
        (AtomicOp::CompareAndSwap, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
        (op, _) => integer::double(integer_op(op, atomic.of), old, b),
    }
}
