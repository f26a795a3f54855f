//! Which registers an instruction reads and writes.

use super::{
    Access, Address, Bank, Barrier, BarrierReduction, CarryOp, Compare, CompareTarget, Format, IntegerOp,
    IntegerUnaryOp, Op, Register, Slot, VoteMode, Width,
};

/// A bank of registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum File {
    Words,
    Doubles,
    Predicates,
}

/// What happens to a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Read,
    Write,
}

use File::{Doubles, Predicates, Words};
use Role::{Read, Write};

fn wide(double: bool) -> File {
    if double { Doubles } else { Words }
}

fn of_width(width: Width) -> File {
    wide(width == Width::Double)
}

fn of_format(format: Format) -> File {
    wide(format == Format::F64)
}

fn of_register(register: &Register) -> File {
    match register.bank {
        Bank::Predicate => Predicates,
        Bank::Half | Bank::Word => Words,
        Bank::Double => Doubles,
    }
}

impl Op {
    /// Shows every register to `visit`, the sources before the targets.
    pub fn visit(&mut self, visit: &mut dyn FnMut(File, Role, &mut Slot)) {
        match self {
            Op::Nop | Op::Trap | Op::Branch { .. } | Op::Exit | Op::AsyncCommit | Op::AsyncWait { .. } => {}
            Op::Integer { op, width, d, a, b } => {
                use IntegerOp::{ShiftLeft, ShiftRightSigned, ShiftRightUnsigned};
                let shifts = matches!(op, ShiftLeft | ShiftRightSigned | ShiftRightUnsigned);
                let file = of_width(*width);
                visit(file, Read, a);
                visit(if shifts { Words } else { file }, Read, b);
                visit(file, Write, d);
            }
            Op::IntegerUnary { op, width, d, a } => {
                use IntegerUnaryOp::{Abs, BitReverse, Neg, Not};
                let keeps_width = matches!(op, Abs | BitReverse | Neg | Not);
                visit(of_width(*width), Read, a);
                visit(if keeps_width { of_width(*width) } else { Words }, Write, d);
            }
            Op::Mad { width, d, a, b, c, .. } => all(visit, of_width(*width), [a, b, c], [d]),
            Op::MulWide { from, d, a, b, c } => {
                let file = wide(from.bytes() == 4);
                all(visit, Words, [a, b], []);
                c.iter_mut().for_each(|c| visit(file, Read, c));
                visit(file, Write, d);
            }
            Op::Carry(link) => {
                let file = wide(link.double);
                all(visit, file, [&mut link.a, &mut link.b], []);
                if !matches!(link.op, CarryOp::Add | CarryOp::Sub) {
                    visit(file, Read, &mut link.c);
                }
                visit(file, Write, &mut link.d);
            }
            Op::Lop3 { d, a, b, c, .. } | Op::Permute { d, a, b, c } | Op::Funnel { d, a, b, c, .. } => {
                all(visit, Words, [a, b, c], [d]);
            }
            Op::BitExtract { of, d, a, b, c } => {
                all(visit, Words, [b, c], []);
                all(visit, wide(of.bytes() == 8), [a], [d]);
            }
            Op::BitInsert { double, d, a, b, position, length } => {
                all(visit, Words, [position, length], []);
                all(visit, wide(*double), [a, b], [d]);
            }
            Op::Float { format, d, a, b, .. } => all(visit, of_format(*format), [a, b], [d]),
            Op::FloatUnary { format, d, a, .. } => all(visit, of_format(*format), [a], [d]),
            Op::Fma { format, d, a, b, c, .. } => all(visit, of_format(*format), [a, b, c], [d]),
            Op::Compare(compare) => visit_compare(compare, visit),
            Op::Select { double, d, a, b, p } => {
                visit(Predicates, Read, p);
                all(visit, wide(*double), [a, b], [d]);
            }
            Op::Predicate { d, a, b, .. } => all(visit, Predicates, [a, b], [d]),
            Op::Move { double, d, a } | Op::ToGeneric { double, d, a, .. } | Op::FromGeneric { double, d, a, .. } => {
                all(visit, wide(*double), [a], [d]);
            }
            _ => self.visit_moved(visit),
        }
    }

    /// What packs, converts or touches memory.
    fn visit_moved(&mut self, visit: &mut dyn FnMut(File, Role, &mut Slot)) {
        match self {
            Op::PackHalves { d, low, high } => all(visit, Words, [low, high], [d]),
            Op::UnpackHalves { low, high, a } => all(visit, Words, [a], [low, high]),
            Op::PackWords { d, low, high } => {
                all(visit, Words, [low, high], []);
                visit(Doubles, Write, d);
            }
            Op::UnpackWords { low, high, a } => {
                visit(Doubles, Read, a);
                all(visit, Words, [], [low, high]);
            }
            Op::PackQuarters { d, parts } => {
                parts.iter_mut().for_each(|part| visit(Words, Read, part));
                visit(Doubles, Write, d);
            }
            Op::UnpackQuarters { parts, a } => {
                visit(Doubles, Read, a);
                parts.iter_mut().for_each(|part| visit(Words, Write, part));
            }
            Op::Convert(convert) => {
                visit(of_register(&convert.a), Read, &mut convert.a.slot);
                visit(of_register(&convert.d), Write, &mut convert.d.slot);
            }
            Op::ConvertPair { d, high, low, .. } => all(visit, Words, [high, low], [d]),
            Op::Load(access) => visit_access(access, Write, visit),
            Op::Store(access) => visit_access(access, Read, visit),
            Op::Atomic(atomic) => {
                let file = wide(atomic.of.bytes() == 8);
                visit_address(&mut atomic.address, visit);
                all(visit, file, [&mut atomic.b, &mut atomic.c], []);
                atomic.d.iter_mut().for_each(|d| visit(file, Write, d));
            }
            Op::LoadMatrix(load) => {
                visit_address(&mut load.address, visit);
                load.d.iter_mut().for_each(|d| visit(Words, Write, d));
            }
            Op::AsyncCopy(copy) => {
                visit_address(&mut copy.to, visit);
                visit_address(&mut copy.from, visit);
                copy.source_bytes.iter_mut().for_each(|slot| visit(Words, Read, slot));
                copy.ignore.iter_mut().for_each(|(slot, _)| visit(Predicates, Read, slot));
            }
            _ => self.visit_collective(visit),
        }
    }

    /// What lanes do together.
    fn visit_collective(&mut self, visit: &mut dyn FnMut(File, Role, &mut Slot)) {
        match self {
            Op::Barrier(barrier) => visit_barrier(barrier, visit),
            Op::SyncWarp { members } => visit(Words, Read, members),
            Op::Shuffle(shuffle) => {
                let sources = [&mut shuffle.a, &mut shuffle.b, &mut shuffle.c, &mut shuffle.members];
                all(visit, Words, sources, [&mut shuffle.d]);
                visit(Predicates, Write, &mut shuffle.in_range);
            }
            Op::Vote(vote) => {
                visit(Predicates, Read, &mut vote.a);
                visit(Words, Read, &mut vote.members);
                let file = if vote.mode == VoteMode::Ballot { Words } else { Predicates };
                visit(file, Write, &mut vote.d);
            }
            Op::Match(matching) => {
                visit(wide(matching.double), Read, &mut matching.a);
                all(visit, Words, [&mut matching.members], [&mut matching.d]);
                visit(Predicates, Write, &mut matching.same);
            }
            Op::Reduce(reduce) => all(visit, Words, [&mut reduce.a, &mut reduce.members], [&mut reduce.d]),
            Op::ActiveMask { d } => visit(Words, Write, d),
            Op::Mma(mma) => {
                mma.a.iter_mut().for_each(|slot| visit(Words, Read, slot));
                mma.b.iter_mut().for_each(|slot| visit(Words, Read, slot));
                mma.c.iter_mut().for_each(|slot| visit(Words, Read, slot));
                mma.d.iter_mut().for_each(|slot| visit(Words, Write, slot));
            }
            other => unreachable!("{other:?} has no registers to show"),
        }
    }
}

fn all<const R: usize, const W: usize>(
    visit: &mut dyn FnMut(File, Role, &mut Slot),
    file: File,
    sources: [&mut Slot; R],
    targets: [&mut Slot; W],
) {
    sources.into_iter().for_each(|slot| visit(file, Read, slot));
    targets.into_iter().for_each(|slot| visit(file, Write, slot));
}

fn visit_address(address: &mut Address, visit: &mut dyn FnMut(File, Role, &mut Slot)) {
    visit(wide(address.double), Read, &mut address.base);
}

fn visit_access(access: &mut Access, role: Role, visit: &mut dyn FnMut(File, Role, &mut Slot)) {
    visit_address(&mut access.address, visit);
    access.registers.iter_mut().for_each(|slot| visit(wide(access.double), role, slot));
}

fn visit_compare(compare: &mut Compare, visit: &mut dyn FnMut(File, Role, &mut Slot)) {
    all(visit, wide(compare.of.bytes() == 8), [&mut compare.a, &mut compare.b], []);
    compare.combine.iter_mut().for_each(|(_, slot, _)| visit(Predicates, Read, slot));
    match &mut compare.target {
        CompareTarget::Predicates(d, inverse) => all(visit, Predicates, [], [d, inverse]),
        CompareTarget::Mask(d) | CompareTarget::Float(d) => visit(Words, Write, d),
    }
}

fn visit_barrier(barrier: &mut Barrier, visit: &mut dyn FnMut(File, Role, &mut Slot)) {
    visit(Words, Read, &mut barrier.number);
    barrier.threads.iter_mut().for_each(|slot| visit(Words, Read, slot));
    if barrier.reduction != BarrierReduction::None {
        visit(Predicates, Read, &mut barrier.a);
        let file = if barrier.reduction == BarrierReduction::Count { Words } else { Predicates };
        visit(file, Write, &mut barrier.d);
    }
}
