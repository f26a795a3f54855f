//! What can be chosen about the CPU backend; everything else is read from the host.

use crate::isa::Isa;

/// How [`crate::CpuBackend`] computes. The defaults suit the host; no choice changes a result beyond what
/// [`crate::simd::Simd::dot_bf16`] says about instruction sets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Workers, the calling thread included; `None` takes [`crate::host::available_threads`].
    pub threads: Option<usize>,
    /// The instruction set; `None` takes the fastest that the machine has.
    pub isa: Option<Isa>,
}
