//! What can be chosen about the CPU backend; everything else is read from the host.

use octavo_backend::{InputRounding, KvType};

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
    /// Bits of the inputs of quantised matrices.
    pub activations: ActivationBits,
}

/// Bits of the inputs of matmuls with quantised weights, the head apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ActivationBits {
    /// [`InputRounding::Int8Group32`].
    #[default]
    Eight,
    /// [`InputRounding::Int16Block128`]: closer to the checkpoint, and faster where the processor has a matrix unit
    /// ([`Isa::Amx`]) and several rows are computed together; slower elsewhere.
    Sixteen,
}

impl ActivationBits {
    /// The rounding that this stands for.
    pub fn rounding(self) -> InputRounding {
        match self {
            ActivationBits::Eight => InputRounding::Int8Group32,
            ActivationBits::Sixteen => InputRounding::Int16Block128,
        }
    }
}
