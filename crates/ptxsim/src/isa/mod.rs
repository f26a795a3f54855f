//! The decoded form of instructions: every operand is a slot of a register bank, also immediates and special registers.
//!
//! Predicates are masks of 32 bits, one per lane. Registers of up to 32 bits live in the bank of words (`Invariant:` the upper half of a
//! 16-bit register is zero), those of 64 bits in the bank of doubles. Constants and special registers are slots that are filled once.

mod operations;
mod slots;
mod types;

pub(crate) use operations::*;
pub(crate) use slots::{File, Role};
pub(crate) use types::*;

/// A decoded instruction.
#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    pub op: Op,
    /// The instruction runs in the lanes where `guard ^ flip` is set.
    pub guard: Slot,
    pub flip: u32,
    pub line: u32,
}

/// What an instruction does. `d` is the target, `a`, `b`, `c` are the sources in PTX's order.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Nop,
    Trap,
    Integer {
        op: IntegerOp,
        width: Width,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    IntegerUnary {
        op: IntegerUnaryOp,
        width: Width,
        d: Slot,
        a: Slot,
    },
    Mad {
        op: IntegerOp,
        width: Width,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    MulWide {
        from: Type,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Option<Slot>,
    },
    Carry(Box<Carry>),
    Lop3 {
        table: u8,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Permute {
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Funnel {
        left: bool,
        clamp: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    BitExtract {
        of: Type,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    BitInsert {
        double: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        position: Slot,
        length: Slot,
    },
    Float {
        op: FloatOp,
        format: Format,
        flags: FloatFlags,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    FloatUnary {
        op: FloatUnaryOp,
        format: Format,
        flags: FloatFlags,
        d: Slot,
        a: Slot,
    },
    Fma {
        format: Format,
        flags: FloatFlags,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Compare(Box<Compare>),
    Select {
        double: bool,
        d: Slot,
        a: Slot,
        b: Slot,
        p: Slot,
    },
    Predicate {
        op: PredicateOp,
        d: Slot,
        a: Slot,
        b: Slot,
        flip: u32,
    },
    Move {
        double: bool,
        d: Slot,
        a: Slot,
    },
    PackHalves {
        d: Slot,
        low: Slot,
        high: Slot,
    },
    UnpackHalves {
        low: Slot,
        high: Slot,
        a: Slot,
    },
    PackWords {
        d: Slot,
        low: Slot,
        high: Slot,
    },
    UnpackWords {
        low: Slot,
        high: Slot,
        a: Slot,
    },
    PackQuarters {
        d: Slot,
        parts: Box<[Slot; 4]>,
    },
    UnpackQuarters {
        parts: Box<[Slot; 4]>,
        a: Slot,
    },
    Convert(Box<Convert>),
    ConvertPair {
        format: Format,
        rounding: Rounding,
        flags: FloatFlags,
        d: Slot,
        high: Slot,
        low: Slot,
    },
    ToGeneric {
        space: Space,
        double: bool,
        d: Slot,
        a: Slot,
    },
    FromGeneric {
        space: Space,
        double: bool,
        d: Slot,
        a: Slot,
    },
    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    Branch {
        target: u32,
    },
    Exit,
    Barrier(Box<Barrier>),
    SyncWarp {
        members: Slot,
    },
    Shuffle(Box<Shuffle>),
    Vote(Box<Vote>),
    Match(Box<Match>),
    Reduce(Box<Reduce>),
    ActiveMask {
        d: Slot,
    },
    Mma(Box<Mma>),
    LoadMatrix(Box<LoadMatrix>),
    AsyncCopy(Box<AsyncCopy>),
    AsyncCommit,
    /// Waits until at most `groups` of the committed groups are in flight; for everything if none is given.
    AsyncWait {
        groups: Option<u32>,
    },
}

/// A register that is filled when a warp starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread(u8),
    ThreadCount(u8),
    Block(u8),
    BlockCount(u8),
    Lane,
    Warp,
    WarpCount,
    LanesEqual,
    LanesLess,
    LanesLessEqual,
    LanesGreater,
    LanesGreaterEqual,
    /// Where the dynamic shared memory begins.
    DynamicShared,
    DynamicSharedBytes,
    TotalSharedBytes,
    /// 0 in every lane: what has one value here (`%smid`).
    Zero,
    /// 1 in every lane: what there is one of here (`%nsmid`).
    One,
}
