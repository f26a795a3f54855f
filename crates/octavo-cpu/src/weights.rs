//! A decoder's weights, packed.

use octavo_backend::{BackendError, DecoderSpec, WeightId, WeightSource};

use crate::{arena::Arena, options::CpuOptions, pack::PackedMatrix};

/// All weights of a decoder.
pub struct Weights {
    /// `[vocab_size, hidden_size]`; also the head when that is tied.
    pub embedding: PackedMatrix,
    /// First to last.
    pub layers: Vec<LayerWeights>,
    /// Of the last norm.
    pub final_norm: Vec<f32>,
    untied_head: Option<PackedMatrix>,
}

/// The weights of one layer.
pub struct LayerWeights {
    /// Of the norm before attention.
    pub attention_norm: Vec<f32>,
    /// Queries, keys and values stacked.
    pub qkv: PackedMatrix,
    /// Back to the residual stream.
    pub output: PackedMatrix,
    /// Of the norm before the MLP.
    pub mlp_norm: Vec<f32>,
    /// Gate and up stacked.
    pub gate_up: PackedMatrix,
    /// Back to the residual stream.
    pub down: PackedMatrix,
}

impl Weights {
    /// Takes the weights of each place from `source`, one place at a time, packs them for inputs of the types chosen with
    /// so many threads, and lets go of them.
    ///
    /// # Errors
    /// What the source says; a shape or format that does not fit; memory that cannot be had.
    pub fn load(
        spec: &DecoderSpec,
        source: &mut dyn WeightSource,
        options: CpuOptions,
        threads: usize,
    ) -> Result<Weights, BackendError> {
        let mut loader = Loader { spec, source, options, threads, arena: Arena::new() };
        let embedding = loader.matrix(WeightId::Embedding)?;
        let mut layers = Vec::with_capacity(spec.layers.len());
        for index in 0..spec.layers.len() {
            layers.push(LayerWeights {
                attention_norm: loader.vector(WeightId::AttentionNorm(index))?,
                qkv: loader.matrix(WeightId::Qkv(index))?,
                output: loader.matrix(WeightId::AttentionOutput(index))?,
                mlp_norm: loader.vector(WeightId::MlpNorm(index))?,
                gate_up: loader.matrix(WeightId::GateUp(index))?,
                down: loader.matrix(WeightId::Down(index))?,
            });
        }
        let final_norm = loader.vector(WeightId::FinalNorm)?;
        let untied_head = if spec.head.tied { None } else { Some(loader.matrix(WeightId::Head)?) };
        Ok(Weights { embedding, layers, final_norm, untied_head })
    }

    /// The projection to the vocabulary.
    pub fn head(&self) -> &PackedMatrix {
        self.untied_head.as_ref().unwrap_or(&self.embedding)
    }
}

struct Loader<'a> {
    spec: &'a DecoderSpec,
    source: &'a mut dyn WeightSource,
    options: CpuOptions,
    threads: usize,
    /// In the order of execution, so that a step reads forwards.
    arena: Arena,
}

impl Loader<'_> {
    fn matrix(&mut self, id: WeightId) -> Result<PackedMatrix, BackendError> {
        let parts = self.source.weight(id)?.into_matrices(id, &self.spec.weight_shape(id))?;
        let packed = PackedMatrix::pack_in(&mut self.arena, &parts, self.options.activations_of(id), self.threads)?;
        self.source.release(id);
        Ok(packed)
    }

    fn vector(&mut self, id: WeightId) -> Result<Vec<f32>, BackendError> {
        self.source.weight(id)?.into_vector(id, &self.spec.weight_shape(id))
    }
}
