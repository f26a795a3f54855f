//! What can be chosen about the CPU backend; everything else is read from the host.

use octavo_backend::{InputRounding, KvType, WeightId};

use crate::isa::Isa;

/// How [`crate::CpuBackend`] computes. The defaults suit the host; threads change no result, and instruction sets none
/// beyond what [`Isa`] says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Workers, the calling thread included; `None` takes [`crate::host::available_threads`] and keeps them on
    /// one NUMA node.
    pub threads: Option<usize>,
    /// The instruction set; `None` takes the fastest that the machine has.
    pub isa: Option<Isa>,
    /// What the KV cache keeps: [`KvType::Bf16`], the default, or [`KvType::Int8`], half the memory.
    pub kv: KvType,
    /// What matmuls with quantised and bfloat16 weights make of their inputs.
    pub activations: ActivationType,
    /// Projections for which that is [`ActivationType::Int16`] instead of [`ActivationType::Int8`].
    pub int16_activations: Projections,
}

impl CpuOptions {
    /// The type of the inputs of one matrix; a tied embedding is the head.
    pub fn activations_of(self, id: WeightId) -> ActivationType {
        if self.int16_activations.contains(id) { ActivationType::Int16 } else { self.activations }
    }

    /// The types of the inputs of all matrices.
    pub fn activation_types(self) -> impl Iterator<Item = ActivationType> {
        let others = (!self.int16_activations.is_empty()).then_some(ActivationType::Int16);
        std::iter::once(self.activations).chain(others)
    }
}

/// A set of the projections of a decoder, of all its layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Projections(u8);

impl Projections {
    /// The names of the projections, in the order of their use.
    pub const NAMES: [&str; 5] = ["qkv", "output", "gate_up", "down", "head"];
    /// Every projection.
    pub const ALL: Projections = Projections(0b1_1111);

    /// The set of the projections named.
    ///
    /// # Errors
    /// The first name that is none of [`Projections::NAMES`].
    pub fn named<S: AsRef<str>>(names: &[S]) -> Result<Projections, &str> {
        names.iter().map(S::as_ref).try_fold(Projections::default(), |set, name| {
            let index = Projections::NAMES.iter().position(|known| *known == name).ok_or(name)?;
            Ok(Projections(set.0 | 1 << index))
        })
    }

    /// True when there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// True when the matrix is one of these projections.
    pub fn contains(self, id: WeightId) -> bool {
        let index = match id {
            WeightId::Qkv(_) => 0,
            WeightId::AttentionOutput(_) => 1,
            WeightId::GateUp(_) => 2,
            WeightId::Down(_) => 3,
            WeightId::Head | WeightId::Embedding => 4,
            WeightId::AttentionNorm(_) | WeightId::MlpNorm(_) | WeightId::FinalNorm => return false,
        };
        self.0 >> index & 1 == 1
    }
}

/// Type of the inputs of matmuls with quantised and bfloat16 weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ActivationType {
    /// [`InputRounding::Int8Group32`] for quantised weights, [`InputRounding::Bf16`] for bfloat16 ones.
    #[default]
    Int8,
    /// [`InputRounding::Int8Twice`] for quantised weights, [`InputRounding::Bf16`] for bfloat16 ones: twice the work of
    /// [`ActivationType::Int8`], next to none of its error.
    Int16,
    /// [`InputRounding::Bf16Chains`] for both: closer to the checkpoint. On a processor with a matrix unit
    /// ([`Isa::Amx`]) much faster where many rows are computed together, and slower for a few; slower elsewhere.
    Bf16,
}

impl ActivationType {
    /// The rounding of the inputs of quantised weights.
    pub fn quantized_input(self) -> InputRounding {
        match self {
            ActivationType::Int8 => InputRounding::Int8Group32,
            ActivationType::Int16 => InputRounding::Int8Twice,
            ActivationType::Bf16 => InputRounding::Bf16Chains,
        }
    }

    /// The rounding of the inputs of bfloat16 weights.
    pub fn bf16_input(self) -> InputRounding {
        match self {
            ActivationType::Int8 | ActivationType::Int16 => InputRounding::Bf16,
            ActivationType::Bf16 => InputRounding::Bf16Chains,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_are_known_by_name_and_hold_their_matrices() {
        assert_eq!(Projections::named(&Projections::NAMES), Ok(Projections::ALL));
        assert_eq!(Projections::named(&["down", "up"]), Err("up"));
        let some = Projections::named(&["down", "head"]).unwrap();
        assert!([WeightId::Down(3), WeightId::Head, WeightId::Embedding].iter().all(|id| some.contains(*id)));
        assert!(
            ![WeightId::Qkv(0), WeightId::AttentionOutput(0), WeightId::GateUp(9)].iter().any(|id| some.contains(*id))
        );
    }
}
