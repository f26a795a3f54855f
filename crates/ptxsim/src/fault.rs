//! What stops a launch.

use std::fmt;

use thiserror::Error;

/// An error of a kernel or of its launch: what happened, and where.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub struct Fault {
    /// The kernel's name.
    pub kernel: String,
    /// Line of the PTX, from 1; 0 if the launch itself is wrong.
    pub line: u32,
    /// The statement; empty if the launch itself is wrong.
    pub instruction: String,
    /// The block in the grid.
    pub block: [u32; 3],
    /// The thread in the block, counted along x, then y, then z.
    pub thread: u32,
    /// What happened.
    pub kind: FaultKind,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}: {}", self.kernel, self.kind)?;
        if self.line > 0 {
            let [x, y, z] = self.block;
            write!(f, " (PTX line {}: `{}`, block {x},{y},{z}, thread {})", self.line, self.instruction, self.thread)?;
        }
        Ok(())
    }
}

/// A kind of access to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    /// A load.
    Load,
    /// A store.
    Store,
    /// An atomic operation or reduction.
    Atomic,
    /// `cp.async`, on either side.
    AsyncCopy,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Load => "load",
            Self::Store => "store",
            Self::Atomic => "atomic",
            Self::AsyncCopy => "asynchronous copy",
        })
    }
}

/// A state space, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpaceName {
    /// Device memory.
    Global,
    /// A block's shared memory.
    Shared,
    /// A thread's stack.
    Local,
    /// The kernel's parameters.
    Parameter,
    /// The module's constants.
    Constant,
}

impl fmt::Display for SpaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Global => "global",
            Self::Shared => "shared",
            Self::Local => "local",
            Self::Parameter => "parameter",
            Self::Constant => "constant",
        })
    }
}

/// How a barrier was divergent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BarrierDivergence {
    /// Lanes of one warp are elsewhere.
    #[error("lanes {arrived:#010x} of a warp arrived, its other lanes in {live:#010x} did not")]
    PartOfWarp {
        /// Lanes at the barrier.
        arrived: u32,
        /// Lanes that have not returned.
        live: u32,
    },
    /// Threads returned before it.
    #[error("{count} threads of the block returned without reaching it")]
    Returned {
        /// How many.
        count: u32,
    },
    /// Another warp waits at another barrier.
    #[error("warp {warp} waits at the barrier of PTX line {line}")]
    Elsewhere {
        /// The other warp.
        warp: u32,
        /// Line of its barrier.
        line: u32,
    },
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access to an address where no buffer is.
    #[error("out-of-bounds global {access} of {bytes} bytes at {address:#x}{}", nearest_text(*nearest, *address))]
    GlobalOutOfBounds {
        /// What was tried.
        access: AccessKind,
        /// How many bytes.
        bytes: u32,
        /// Where.
        address: u64,
        /// The buffer before it: address and bytes.
        nearest: Option<(u64, u64)>,
    },
    /// An access to a buffer that was freed.
    #[error(
        "use after free: global {access} of {bytes} bytes at {address:#x}, in a freed buffer of {length} bytes at {base:#x}"
    )]
    UseAfterFree {
        /// What was tried.
        access: AccessKind,
        /// How many bytes.
        bytes: u32,
        /// Where.
        address: u64,
        /// Where the buffer began.
        base: u64,
        /// The buffer's bytes.
        length: u64,
    },
    /// An address that is no multiple of the access's size.
    #[error("misaligned {space} {access} of {bytes} bytes at {address:#x}")]
    Misaligned {
        /// The space.
        space: SpaceName,
        /// What was tried.
        access: AccessKind,
        /// How many bytes.
        bytes: u32,
        /// Where.
        address: u64,
    },
    /// An access past the end of shared, local, parameter or constant memory.
    #[error("out-of-bounds {space} {access} of {bytes} bytes at {address:#x} ({available} bytes there)")]
    OutOfBounds {
        /// The space.
        space: SpaceName,
        /// What was tried.
        access: AccessKind,
        /// How many bytes.
        bytes: u32,
        /// Where.
        address: u64,
        /// The space's size in bytes.
        available: u64,
    },
    /// A store or atomic to a module's constant or initialised variable.
    #[error("{access} at {address:#x} in the module's constants, which cannot be written")]
    ConstantWrite {
        /// What was tried.
        access: AccessKind,
        /// Where.
        address: u64,
    },
    /// A read of shared memory that no thread of the block wrote.
    #[error("uninitialised shared memory: {access} of {bytes} bytes at {address:#x}")]
    UninitialisedShared {
        /// What was tried.
        access: AccessKind,
        /// How many bytes.
        bytes: u32,
        /// Where.
        address: u64,
    },
    /// An access to shared memory that `cp.async` is still writing.
    #[error(
        "uninitialised shared memory: {access} at {address:#x}, where an asynchronous copy of thread {writer} is in flight (no wait)"
    )]
    InFlight {
        /// What was tried.
        access: AccessKind,
        /// Where.
        address: u64,
        /// Who issued the copy.
        writer: u32,
    },
    /// Two accesses of different threads that nothing orders, at least one of them a write.
    #[error("shared-memory hazard: {access} at {address:#x} after a {earlier} by thread {other}, no barrier between")]
    SharedHazard {
        /// The later access.
        access: AccessKind,
        /// Where.
        address: u64,
        /// The earlier access.
        earlier: AccessKind,
        /// Who made it.
        other: u32,
    },
    /// A block-wide barrier that not every thread reaches.
    #[error("divergent barrier: {0}")]
    DivergentBarrier(BarrierDivergence),
    /// A barrier for a part of the block.
    #[error("a barrier of {threads} threads in a block of {block_threads} is not modelled")]
    PartialBarrier {
        /// Threads that the barrier names.
        threads: u32,
        /// Threads of the block.
        block_threads: u32,
    },
    /// A collective whose member mask names lanes that do not arrive, or leaves out one that does.
    #[error("member mask {mask:#010x}, but lanes {arrived:#010x} arrived")]
    MemberMask {
        /// The mask of the faulting lane.
        mask: u32,
        /// The lanes that run the instruction.
        arrived: u32,
    },
    /// A shuffle that reads a lane which does not take part.
    #[error("the shuffle reads lane {source_lane}, which does not take part (lanes {arrived:#010x})")]
    InactiveSource {
        /// The lane read.
        source_lane: u32,
        /// The lanes that run the instruction.
        arrived: u32,
    },
    /// A matrix instruction without all 32 lanes.
    #[error("a matrix instruction needs the whole warp, but only lanes {arrived:#010x} arrived")]
    PartialWarp {
        /// The lanes that run the instruction.
        arrived: u32,
    },
    /// No `ret` before the end of the kernel.
    #[error("the thread ran past the end of the kernel")]
    PastTheEnd,
    /// A warp ran longer than any kernel should.
    #[error("a warp ran {instructions} instructions without an end")]
    Budget {
        /// The budget.
        instructions: u64,
    },
    /// The kernel executed `trap`.
    #[error("trap")]
    Trap,
    /// The launch gave too many or too few bytes of parameters.
    #[error("the launch gives {found} bytes of parameters, the kernel has {expected}")]
    ParameterBytes {
        /// What the kernel declares.
        expected: usize,
        /// What the launch gave.
        found: usize,
    },
    /// A block of more threads than the kernel's launch bounds or the hardware allow, or of none.
    #[error("a block of {threads} threads, where {limit} are allowed")]
    BlockSize {
        /// Threads in the block.
        threads: u64,
        /// The most, or with `.reqntid` exactly, this many.
        limit: usize,
    },
    /// A grid without blocks, or too large.
    #[error("a grid of {0:?} blocks cannot be launched")]
    GridSize([u32; 3]),
    /// More shared memory than a block can have.
    #[error("{bytes} bytes of shared memory, where {limit} are allowed")]
    SharedSize {
        /// Static and dynamic bytes.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
}

fn nearest_text(nearest: Option<(u64, u64)>, address: u64) -> String {
    match nearest {
        Some((base, bytes)) => format!(", {} bytes into a buffer of {bytes} bytes at {base:#x}", address - base),
        None => String::from(", below every buffer"),
    }
}
