//! What can be chosen about the CPU backend; everything else is read from the host.

use octavo_backend::KvType;

use crate::isa::Isa;

/// How [`crate::CpuBackend`] computes. The defaults suit the host; threads change no result, and instruction sets none
/// beyond what [`crate::simd::Simd::dot_bf16`] says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Workers, the calling thread included; `None` takes [`crate::host::available_threads`].
    pub threads: Option<usize>,
    /// The instruction set; `None` takes the fastest that the machine has.
    pub isa: Option<Isa>,
    /// What the KV cache keeps: [`KvType::Bf16`], the default, or [`KvType::Int8`], half the memory.
    pub kv: KvType,
}
