//! Runs PTX, as NVRTC emits it, on a CPU: a warp of 32 lanes at a time, with the checks and the counters for which a GPU would need tools.
//!
//! - [`Module`] parses the text; each instruction is decoded once, so that running it looks nothing up by name.
//! - [`Memory`] is the device's memory: buffers at virtual addresses that no host mapping has.
//! - [`Launch`] runs a kernel over a grid and gives a [`Report`] of what it moved, or the [`Fault`] that stopped it.
//!
//! Always checked: bounds, alignment and lifetime of every access, shared memory that nobody wrote, shared-memory hazards between threads
//! that no barrier orders, divergent barriers, member masks of the collectives, and an end to every loop.
//! Not modelled: races between blocks, weak ordering of global memory, spin-waits between blocks, registers and occupancy, time.
//!
//! Blocks run one after another, in a block the warps in order from barrier to barrier, in a warp the lanes with the lowest program counter
//! first. Results are therefore the same in every run.
#![forbid(unsafe_code)]

mod banks;
mod error;
mod exec;
mod fault;
mod isa;
mod launch;
mod lexer;
mod memory;
mod module;
mod numeric;
mod parse;
mod registers;
mod report;
mod shared;
mod warp;

pub use error::ParseError;
pub use fault::{AccessKind, BarrierDivergence, Fault, FaultKind, SpaceName};
pub use launch::{DEFAULT_BUDGET, Launch, SHARED_LIMIT};
pub use memory::Memory;
pub use module::{Kernel, Module, Param};
pub use report::{BufferTraffic, Report, SharedTraffic, Traffic};
