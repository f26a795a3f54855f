//! Executes one instruction in the active lanes of a warp. Control flow is the warp's own affair.

mod access;
mod atomic;
mod bits;
mod bytes;
mod collective;
mod compare;
mod convert;
mod copy;
mod data;
mod float;
mod integer;
mod tensor;

pub(crate) use collective::barrier_result;
pub(crate) use copy::Copies;

use crate::fault::FaultKind;
use crate::isa::{Op, Slot};
use crate::memory::Memory;
use crate::module::Kernel;
use crate::report::{BufferTraffic, Report};
use crate::shared::SharedMemory;
use crate::warp::Warp;

/// Generic addresses of what is not device memory. Each window holds 32-bit offsets.
pub(crate) mod window {
    pub const SHARED: u64 = 1 << 56;
    pub const LOCAL: u64 = 1 << 57;
    pub const CONST: u64 = 1 << 58;
    /// A window's number of addresses.
    pub const SIZE: u64 = 1 << 32;
}

/// What the warps of a block share.
pub(crate) struct Machine<'a> {
    pub kernel: &'a Kernel,
    pub params: &'a [u8],
    pub memory: &'a mut Memory,
    pub shared: SharedMemory,
    pub report: Report,
    /// Global traffic by buffer.
    pub traffic: Vec<BufferTraffic>,
    /// The buffer that each instruction touched last.
    pub last_buffer: Vec<u32>,
    /// The most instructions that a warp may run.
    pub budget: u64,
}

/// Why an instruction failed, and in which lane.
#[derive(Debug)]
pub(crate) struct Trouble {
    pub lane: usize,
    pub kind: FaultKind,
}

/// An instruction's end. The fault is boxed since it is rare and large.
pub(crate) type Outcome = Result<(), Box<Trouble>>;

/// A fault of one lane.
pub(crate) fn trouble(lane: usize, kind: FaultKind) -> Box<Trouble> {
    Box::new(Trouble { lane, kind })
}

/// Runs `op`, the instruction at `pc`, in the lanes of `mask`.
pub(crate) fn execute(warp: &mut Warp, machine: &mut Machine<'_>, pc: usize, op: &Op, mask: u32) -> Outcome {
    let registers = &mut warp.registers;
    match op {
        Op::Integer { op, width, d, a, b } => integer::binary(registers, mask, (*op, *width), *d, (*a, *b)),
        Op::Float { op, format, flags, d, a, b } => {
            float::binary(registers, mask, (*op, *format, *flags), *d, (*a, *b));
        }
        Op::Fma { format, flags, d, a, b, c } => float::fma(registers, mask, (*format, *flags), *d, (*a, *b, *c)),
        Op::Load(access) => return access::load(warp, machine, pc, access, mask),
        Op::Store(access) => return access::store(warp, machine, pc, access, mask),
        Op::Compare(compare) => compare::compare(registers, mask, compare),
        Op::Mad { op, width, d, a, b, c } => integer::mad(registers, mask, (*op, *width), *d, (*a, *b, *c)),
        Op::Move { double: false, d, a } => registers.map_words(*d, mask, *a, |a| a),
        Op::Move { double: true, d, a } => registers.map_doubles(*d, mask, *a, |a| a),
        Op::Select { double, d, a, b, p } => compare::select(registers, mask, *double, *d, (*a, *b, *p)),
        Op::Mma(mma) => tensor::mma(registers, &mut machine.report, mma),
        Op::LoadMatrix(load) => return tensor::load_matrix(warp, machine, load),
        Op::AsyncCopy(copy) => return copy::start(warp, machine, pc, copy, mask),
        Op::AsyncCommit => warp.copies.commit(mask),
        Op::AsyncWait { groups } => copy::wait(warp, machine, *groups, mask),
        Op::Atomic(atomic) => return atomic::atomic(warp, machine, pc, atomic, mask),
        Op::Shuffle(shuffle) => return collective::shuffle(registers, mask, shuffle),
        Op::Vote(vote) => collective::vote(registers, mask, vote),
        Op::Match(matching) => collective::matching(registers, mask, matching),
        Op::Reduce(reduce) => collective::reduce(registers, mask, reduce),
        Op::ActiveMask { d } => registers.put_words(*d, mask, &[mask; 32]),
        Op::SyncWarp { .. } => warp.clock.synchronise(mask),
        Op::Trap => return Err(trouble(mask.trailing_zeros() as usize, FaultKind::Trap)),
        Op::Nop | Op::Branch { .. } | Op::Exit | Op::Barrier(_) => {}
        _ => register_operation(warp, op, mask),
    }
    Ok(())
}

/// The less frequent instructions that touch nothing but registers.
fn register_operation(warp: &mut Warp, op: &Op, mask: u32) {
    let registers = &mut warp.registers;
    match op {
        Op::IntegerUnary { op, width, d, a } => integer::unary(registers, mask, (*op, *width), *d, *a),
        Op::MulWide { from, d, a, b, c } => integer::mul_wide(registers, mask, *from, *d, (*a, *b, *c)),
        Op::Carry(carry) => integer::carry(registers, mask, carry),
        Op::Lop3 { table, d, a, b, c } => bits::lop3(registers, mask, *table, *d, (*a, *b, *c)),
        Op::Permute { d, a, b, c } => registers.zip3_words(*d, mask, (*a, *b, *c), bits::permute),
        Op::Funnel { left, clamp, d, a, b, c } => bits::funnel(registers, mask, (*left, *clamp), *d, (*a, *b, *c)),
        Op::BitExtract { of, d, a, b, c } => bits::extract(registers, mask, *of, *d, (*a, *b, *c)),
        Op::BitInsert { double, d, a, b, position, length } => {
            let sources: [Slot; 4] = [*a, *b, *position, *length];
            bits::insert(registers, mask, *double, *d, sources);
        }
        Op::FloatUnary { op, format, flags, d, a } => float::unary(registers, mask, (*op, *format, *flags), *d, *a),
        Op::Predicate { op, d, a, b, flip } => {
            let (a, b) = (registers.predicate(*a), registers.predicate(*b) ^ flip);
            registers.put_predicate(*d, mask, compare::meet(*op, a, b));
        }
        Op::PackHalves { .. }
        | Op::UnpackHalves { .. }
        | Op::PackWords { .. }
        | Op::UnpackWords { .. }
        | Op::PackQuarters { .. }
        | Op::UnpackQuarters { .. } => data::repack(registers, mask, op),
        Op::ToGeneric { space, double, d, a } => data::to_generic(registers, mask, *space, *double, (*d, *a)),
        Op::FromGeneric { space, double, d, a } => data::from_generic(registers, mask, *space, *double, (*d, *a)),
        Op::Convert(convert) => convert::convert(registers, mask, convert),
        Op::ConvertPair { format, rounding, flags, d, high, low } => {
            convert::pair(registers, mask, (*format, *rounding, *flags), *d, (*high, *low));
        }
        _ => {}
    }
}
