//! A decoder's weights on the GPU: dense and GGUF formats as bfloat16, 4-bit codes as they are.

use std::sync::Arc;

use half::bf16;
use octavo_backend::{BackendError, DecoderSpec, Matrix, WeightFormat, WeightId, WeightShape, WeightSource};

use crate::{
    arena::ALIGNMENT,
    device::{Device, DeviceMemory, Slice},
    error::CudaError,
    int4::{self, Int4Matrix},
};

/// Memory for weights is taken in pieces of this size, or of the whole model if that is less.
const PIECE_BYTES: usize = 256 << 20;

/// All weights of a decoder.
pub struct Weights {
    /// `[vocab_size, hidden_size]`.
    pub embedding: Dense,
    /// First to last.
    pub layers: Vec<LayerWeights>,
    /// Of the last norm.
    pub final_norm: Slice<f32>,
    /// The projection to the vocabulary: the embedding if that is tied.
    pub head: Dense,
    /// What all slices lie in.
    _memory: Pieces,
}

/// The weights of one layer.
pub struct LayerWeights {
    /// Of the norm before attention.
    pub attention_norm: Slice<f32>,
    /// Queries, keys and values stacked.
    pub qkv: Projection,
    /// Back to the residual stream.
    pub output: Projection,
    /// Of the norm before the MLP.
    pub mlp_norm: Slice<f32>,
    /// Gate and up stacked.
    pub gate_up: Projection,
    /// Back to the residual stream.
    pub down: Projection,
}

/// A matrix of bfloat16.
#[derive(Debug, Clone, Copy)]
pub struct Dense {
    /// `[outputs, inputs]`.
    pub weights: Slice<bf16>,
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
}

/// A matrix in the form in which it is multiplied.
pub enum Projection {
    /// By cuBLASLt.
    Dense(Dense),
    /// By the kernels for 4-bit codes.
    Int4(Int4Weights),
}

/// A matrix of 4-bit codes.
#[derive(Debug, Clone, Copy)]
pub struct Int4Weights {
    /// In the order of the kernels.
    pub codes: Slice<u32>,
    /// For each group of each row.
    pub scales: Slice<half::f16>,
    /// For each group of each row.
    pub zeros: Slice<u8>,
    /// Values that share a scale.
    pub group: usize,
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
}

impl Weights {
    /// Takes the weights of each place from `source`, one place at a time, brings them to the GPU, and lets go of them.
    ///
    /// # Errors
    /// What the source says; a shape or format that does not fit; memory that cannot be had.
    pub fn load(
        device: &Arc<Device>,
        spec: &DecoderSpec,
        source: &mut dyn WeightSource,
    ) -> Result<Weights, BackendError> {
        let pieces = Pieces { device: device.clone(), piece_bytes: dense_bytes(spec).min(PIECE_BYTES), pieces: vec![] };
        let mut loader = Loader { spec, source, pieces };
        let embedding = loader.table(WeightId::Embedding)?;
        let mut layers = Vec::with_capacity(spec.layers.len());
        for index in 0..spec.layers.len() {
            layers.push(LayerWeights {
                attention_norm: loader.vector(WeightId::AttentionNorm(index))?,
                qkv: loader.projection(WeightId::Qkv(index))?,
                output: loader.projection(WeightId::AttentionOutput(index))?,
                mlp_norm: loader.vector(WeightId::MlpNorm(index))?,
                gate_up: loader.projection(WeightId::GateUp(index))?,
                down: loader.projection(WeightId::Down(index))?,
            });
        }
        let final_norm = loader.vector(WeightId::FinalNorm)?;
        let head = if spec.head.tied { embedding } else { loader.table(WeightId::Head)? };
        Ok(Weights { embedding, layers, final_norm, head, _memory: loader.pieces })
    }
}

/// Bytes of all weights if every matrix is bfloat16.
fn dense_bytes(spec: &DecoderSpec) -> usize {
    let bytes = |id| match spec.weight_shape(id) {
        WeightShape::Vector(len) => len * size_of::<f32>(),
        WeightShape::Matrices { parts, columns } => parts.iter().sum::<usize>() * columns * size_of::<bf16>(),
    };
    spec.weight_ids().into_iter().map(|id| bytes(id).next_multiple_of(ALIGNMENT)).sum()
}

/// Memory that is filled from front to back.
struct Pieces {
    device: Arc<Device>,
    piece_bytes: usize,
    /// Each with the bytes that are used.
    pieces: Vec<(DeviceMemory, usize)>,
}

impl Pieces {
    fn take<T>(&mut self, len: usize) -> Result<Slice<T>, CudaError> {
        let bytes = (len * size_of::<T>()).next_multiple_of(ALIGNMENT);
        if self.pieces.last().is_none_or(|(memory, used)| memory.bytes() - used < bytes) {
            let memory = DeviceMemory::new(&self.device, "weights", bytes.max(self.piece_bytes))?;
            self.pieces.push((memory, 0));
        }
        let Some((memory, used)) = self.pieces.last_mut() else { return Ok(Slice::none()) };
        let slice = Slice::at(memory.address() + *used as u64, len);
        *used += bytes;
        Ok(slice)
    }
}

struct Loader<'a> {
    spec: &'a DecoderSpec,
    source: &'a mut dyn WeightSource,
    pieces: Pieces,
}

impl Loader<'_> {
    fn vector(&mut self, id: WeightId) -> Result<Slice<f32>, BackendError> {
        let values = self.source.weight(id)?.into_vector(id, &self.spec.weight_shape(id))?;
        let slice = self.pieces.take(values.len())?;
        self.pieces.device.write(slice, &values)?;
        Ok(slice)
    }

    /// A matrix whose rows are looked up or that gives logits: always dense.
    fn table(&mut self, id: WeightId) -> Result<Dense, BackendError> {
        let parts = self.source.weight(id)?.into_matrices(id, &self.spec.weight_shape(id))?;
        let dense = dense(&mut self.pieces, &parts)?;
        self.source.release(id);
        Ok(dense)
    }

    fn projection(&mut self, id: WeightId) -> Result<Projection, BackendError> {
        let parts = self.source.weight(id)?.into_matrices(id, &self.spec.weight_shape(id))?;
        // What the kernels for 4-bit codes cannot multiply as it is, is multiplied as bfloat16.
        let projection = match int4::repack(&parts) {
            Ok(packed) => Projection::Int4(int4(&mut self.pieces, &packed)?),
            Err(_) => Projection::Dense(dense(&mut self.pieces, &parts)?),
        };
        self.source.release(id);
        Ok(projection)
    }
}

fn dense(pieces: &mut Pieces, parts: &[Matrix<'_>]) -> Result<Dense, CudaError> {
    let inputs = parts.first().map_or(0, |part| part.columns);
    let outputs = parts.iter().map(|part| part.rows).sum();
    let weights: Slice<bf16> = pieces.take(outputs * inputs)?;
    let mut first = 0;
    for part in parts {
        let slice = weights.part(first * inputs..(first + part.rows) * inputs);
        let bytes = Slice::<u8>::at(slice.address, slice.len * size_of::<bf16>());
        match part.data.format {
            WeightFormat::Bf16 => pieces.device.write(bytes, &part.data.bytes)?,
            _ => pieces.device.write(bytes, &part.to_bf16().data.bytes)?,
        }
        first += part.rows;
    }
    Ok(Dense { weights, outputs, inputs })
}

fn int4(pieces: &mut Pieces, packed: &Int4Matrix) -> Result<Int4Weights, CudaError> {
    let (codes, scales, zeros) =
        (pieces.take(packed.codes.len())?, pieces.take(packed.scales.len())?, pieces.take(packed.zeros.len())?);
    pieces.device.write(codes, &packed.codes)?;
    pieces.device.write(scales, &packed.scales)?;
    pieces.device.write(zeros, &packed.zeros)?;
    Ok(Int4Weights {
        codes,
        scales,
        zeros,
        group: packed.group,
        outputs: packed.rows,
        inputs: packed.columns,
    })
}
