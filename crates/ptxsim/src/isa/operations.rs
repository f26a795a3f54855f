//! What instructions do, and the operands of those that have many.

use super::types::{Format, Register, Rounding, Slot, Type};

/// Integer operations with two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntegerOp {
    Add,
    AddSaturating,
    Sub,
    SubSaturating,
    MulLow,
    MulHighSigned,
    MulHighUnsigned,
    DivSigned,
    DivUnsigned,
    RemSigned,
    RemUnsigned,
    MinSigned,
    MinUnsigned,
    MaxSigned,
    MaxUnsigned,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRightSigned,
    ShiftRightUnsigned,
}

/// Integer operations with one operand. The counts and positions give a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntegerUnaryOp {
    Neg,
    Abs,
    Not,
    BitReverse,
    PopulationCount,
    LeadingZeros,
    FindSigned,
    FindUnsigned,
    FindShiftSigned,
    FindShiftUnsigned,
}

/// Additions and multiply-additions that read or write the carry flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CarryOp {
    Add,
    Sub,
    MadLow,
    MadHighSigned,
    MadHighUnsigned,
}

/// One link of a carry chain.
#[derive(Debug, Clone)]
pub(crate) struct Carry {
    pub op: CarryOp,
    pub double: bool,
    pub reads: bool,
    pub writes: bool,
    pub d: Slot,
    pub a: Slot,
    pub b: Slot,
    pub c: Slot,
}

/// Floating-point operations with two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatOp {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    /// Minimum and maximum that give NaN if an operand is NaN.
    MinNan,
    MaxNan,
}

/// Floating-point operations with one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatUnaryOp {
    Neg,
    Abs,
    Sqrt,
    Reciprocal,
    ReciprocalSqrt,
    Exp2,
    Log2,
    Sin,
    Cos,
    Tanh,
}

/// What the modifiers of a floating-point operation ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FloatFlags {
    /// `.ftz`: subnormal operands and results are zero (f32 only).
    pub flush: bool,
    /// `.sat`: the result is clamped to 0..1, NaN becomes 0.
    pub saturate: bool,
    /// `.relu`: negative results and NaN become 0.
    pub relu: bool,
}

/// A comparison. The unordered forms are true when an operand is NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Test {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    EqualUnordered,
    NotEqualUnordered,
    LessUnordered,
    LessEqualUnordered,
    GreaterUnordered,
    GreaterEqualUnordered,
    Ordered,
    Unordered,
}

/// How a comparison's result meets another predicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PredicateOp {
    And,
    Or,
    Xor,
}

/// `setp` and `set`.
#[derive(Debug, Clone)]
pub(crate) struct Compare {
    pub test: Test,
    pub of: Type,
    pub flush: bool,
    pub a: Slot,
    pub b: Slot,
    pub combine: Option<(PredicateOp, Slot, u32)>,
    pub target: CompareTarget,
}

/// Where a comparison's result goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompareTarget {
    /// A predicate and the predicate of its complement.
    Predicates(Slot, Slot),
    /// All ones or zero.
    Mask(Slot),
    /// 1.0f or 0.
    Float(Slot),
}

/// `cvt` with one source.
#[derive(Debug, Clone)]
pub(crate) struct Convert {
    pub from: Type,
    pub to: Type,
    /// Rounding of the result; for float to float of one format only with `whole`.
    pub rounding: Rounding,
    /// Round to a whole number.
    pub whole: bool,
    pub flags: FloatFlags,
    pub d: Register,
    pub a: Register,
}

/// A state space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// An address operand: a register and a distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub double: bool,
    pub base: Slot,
    pub offset: i64,
}

/// How a loaded element fills a register that is wider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extend {
    Zero,
    /// Sign-extended to 16 bits, in a word whose upper half is zero.
    SignToHalf,
    Sign,
}

/// A load or a store.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub space: Space,
    pub address: Address,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element: u32,
    pub extend: Extend,
    /// True if the registers are doubles.
    pub double: bool,
    /// One register an element: 1, 2, 4 or 8.
    pub registers: Vec<Slot>,
}

/// What an atomic does with the old value and the operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

/// `atom` and `red`.
#[derive(Debug, Clone)]
pub(crate) struct Atomic {
    pub op: AtomicOp,
    pub of: Type,
    pub space: Space,
    pub address: Address,
    pub d: Option<Slot>,
    pub b: Slot,
    pub c: Slot,
}

/// Where a lane of `shfl` reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// `shfl.sync`.
#[derive(Debug, Clone)]
pub(crate) struct Shuffle {
    pub mode: ShuffleMode,
    pub d: Slot,
    pub in_range: Slot,
    pub a: Slot,
    pub b: Slot,
    pub c: Slot,
    pub members: Slot,
}

/// What `vote.sync` gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uniform,
    Ballot,
}

/// `vote.sync`: `d` is a word for a ballot and a predicate otherwise.
#[derive(Debug, Clone)]
pub(crate) struct Vote {
    pub mode: VoteMode,
    pub d: Slot,
    pub a: Slot,
    pub flip: u32,
    pub members: Slot,
}

/// `match.sync`.
#[derive(Debug, Clone)]
pub(crate) struct Match {
    pub all: bool,
    pub double: bool,
    pub d: Slot,
    pub same: Slot,
    pub a: Slot,
    pub members: Slot,
}

/// `redux.sync`.
#[derive(Debug, Clone)]
pub(crate) struct Reduce {
    pub op: IntegerOp,
    pub d: Slot,
    pub a: Slot,
    pub members: Slot,
}

/// What a barrier computes over the block's threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BarrierReduction {
    None,
    /// `bar.red.popc`: how many predicates are true; the target is a word.
    Count,
    All,
    Any,
}

/// `bar.sync`, `barrier.sync` and `bar.red`.
#[derive(Debug, Clone)]
pub(crate) struct Barrier {
    pub reduction: BarrierReduction,
    pub d: Slot,
    pub a: Slot,
    pub flip: u32,
    /// Barrier number.
    pub number: Slot,
    /// Number of threads, if given.
    pub threads: Option<Slot>,
}

/// `mma.sync` with f32 accumulators, 16 rows and 8 columns.
#[derive(Debug, Clone)]
pub(crate) struct Mma {
    /// `Format::Bf16` or `Format::F16`.
    pub format: Format,
    pub d: [Slot; 4],
    /// 4 registers for a depth of 16, 2 for a depth of 8.
    pub a: Vec<Slot>,
    pub b: Vec<Slot>,
    pub c: [Slot; 4],
}

/// `ldmatrix`.
#[derive(Debug, Clone)]
pub(crate) struct LoadMatrix {
    pub transposed: bool,
    pub space: Space,
    pub address: Address,
    pub d: Vec<Slot>,
}

/// `cp.async`.
#[derive(Debug, Clone)]
pub(crate) struct AsyncCopy {
    pub to: Address,
    pub from: Address,
    /// 4, 8 or 16.
    pub bytes: u32,
    /// How many bytes are read; the rest is filled with zeros.
    pub source_bytes: Option<Slot>,
    /// A predicate and its flip: where true, nothing is read.
    pub ignore: Option<(Slot, u32)>,
}
