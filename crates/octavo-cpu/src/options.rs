//! What can be chosen about the CPU backend; everything else is read from the host.

use octavo_backend::{InputRounding, KvType};

use crate::isa::Isa;

/// How [`crate::CpuBackend`] computes. The defaults suit the host; threads change no result, and instruction sets none
/// beyond what [`Isa`] says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Workers, the calling thread included; `None` takes [`crate::host::available_threads`].
    pub threads: Option<usize>,
    /// The instruction set; `None` takes the fastest that the machine has.
    pub isa: Option<Isa>,
    /// What the KV cache keeps: [`KvType::Bf16`], the default, or [`KvType::Int8`], half the memory.
    pub kv: KvType,
    /// What matmuls with quantised and bfloat16 weights make of their inputs.
    pub activations: ActivationType,
}

/// Type of the inputs of matmuls with quantised and bfloat16 weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ActivationType {
    /// [`InputRounding::Int8Group32`] for quantised weights, [`InputRounding::Bf16`] for bfloat16 ones.
    #[default]
    Int8,
    /// [`InputRounding::Bf16Chains`] for both: closer to the checkpoint. On a processor with a matrix unit
    /// ([`Isa::Amx`]) much faster where many rows are computed together, and slower for a few; slower elsewhere.
    Bf16,
}

impl ActivationType {
    /// The rounding of the inputs of quantised weights.
    pub fn quantized_input(self) -> InputRounding {
        match self {
            ActivationType::Int8 => InputRounding::Int8Group32,
            ActivationType::Bf16 => InputRounding::Bf16Chains,
        }
    }

    /// The rounding of the inputs of bfloat16 weights.
    pub fn bf16_input(self) -> InputRounding {
        match self {
            ActivationType::Int8 => InputRounding::Bf16,
            ActivationType::Bf16 => InputRounding::Bf16Chains,
        }
    }
}
