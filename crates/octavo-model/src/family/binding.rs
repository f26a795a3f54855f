//! Finds each place of the decoder its tensors, and leaves none over.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    path::Path,
};

use octavo_backend::{DecoderSpec, Matrix, WeightData, WeightGroup, WeightId};

use super::{HeadPlace, HeadTying, Outline};
use crate::{
    ModelError, Shape,
    tensors::{Tensor, TensorTable},
};

/// The tensors of each place. Invariant: shapes agree with the spec, so that handing a weight out cannot fail.
pub(crate) type Weights = HashMap<WeightId, Vec<Part>>;

/// A tensor in a place.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) tensor: Tensor,
    pub(crate) order: RowOrder,
}

/// How rows have to be moved before they are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Not at all.
    AsStored,
    /// Within each head, row `2i` goes to `i` and row `2i + 1` to `i + head_size / 2`: the rotary embedding of
    /// llama.cpp's Llama files pairs neighbours, the decoder's pairs halves.
    NeighbourPairs {
        /// Rows of one head.
        head_size: usize,
    },
}

/// Gives every place of `outline` its tensors.
///
/// # Errors
/// A tensor that is missing, has another shape, or has no place.
pub(crate) fn bind(
    outline: &Outline,
    table: &TensorTable,
    checkpoint: &Path,
) -> Result<(DecoderSpec, Weights), ModelError> {
    let left = table.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut binding = Binding { table, checkpoint, left, weights: HashMap::new() };
    let (sizes, names) = (&outline.dimensions, outline.names);
    binding.place(WeightId::Embedding, names.embedding, &[sizes.vocab_size, sizes.hidden_size])?;
    binding.place(WeightId::FinalNorm, names.final_norm, &[sizes.hidden_size])?;
    let tying = binding.head(outline)?;
    for layer in 0..sizes.num_layers {
        binding.layer(outline, layer)?;
    }
    let mut rope = outline.rope.spec(sizes.head_size);
    if let Some(tensor) = names.rope_factors.and_then(|name| binding.left.remove(name)) {
        let factors = rope_factors(table, tensor, sizes.head_size / 2)?;
        for (frequency, factor) in rope.inverse_frequencies.iter_mut().zip(factors) {
            *frequency /= f64::from(factor);
        }
    }
    binding.finish(outline)?;
    Ok((outline.spec(rope, tying), binding.weights))
}

struct Binding<'t> {
    table: &'t TensorTable,
    checkpoint: &'t Path,
    /// Tensors without a place so far.
    left: BTreeMap<&'t str, &'t Tensor>,
    weights: Weights,
}

impl<'t> Binding<'t> {
    fn layer(&mut self, outline: &Outline, layer: usize) -> Result<(), ModelError> {
        let (sizes, names) = (&outline.dimensions, outline.names);
        let name = |name: &str| format!("{}{layer}.{name}", names.layer_prefix);
        let (hidden, inner) = (sizes.hidden_size, sizes.intermediate_size);
        self.place(WeightId::AttentionNorm(layer), &name(names.attention_norm), &[hidden])?;
        let query = self.part(&name(names.query), &[sizes.query_rows(), hidden], outline.rope_rows)?;
        let key = self.part(&name(names.key), &[sizes.kv_rows(), hidden], outline.rope_rows)?;
        let value = self.part(&name(names.value), &[sizes.kv_rows(), hidden], RowOrder::AsStored)?;
        self.weights.insert(WeightId::Qkv(layer), vec![query, key, value]);
        self.place(WeightId::AttentionOutput(layer), &name(names.attention_output), &[hidden, sizes.query_rows()])?;
        self.place(WeightId::MlpNorm(layer), &name(names.mlp_norm), &[hidden])?;
        let gate = self.part(&name(names.gate), &[inner, hidden], RowOrder::AsStored)?;
        let up = self.part(&name(names.up), &[inner, hidden], RowOrder::AsStored)?;
        self.weights.insert(WeightId::GateUp(layer), vec![gate, up]);
        self.place(WeightId::Down(layer), &name(names.down), &[hidden, inner])?;
        for derived in names.derived {
            self.left.remove(name(derived).as_str());
        }
        Ok(())
    }

    fn head(&mut self, outline: &Outline) -> Result<HeadTying, ModelError> {
        let (sizes, names) = (&outline.dimensions, outline.names);
        let shape = [sizes.vocab_size, sizes.hidden_size];
        match (outline.head, self.left.get(names.head)) {
            (HeadPlace::Embedding | HeadPlace::OwnIfPresent, None) => Ok(HeadTying::Tied),
            (HeadPlace::Own, _) | (HeadPlace::OwnIfPresent, Some(_)) => {
                self.place(WeightId::Head, names.head, &shape)?;
                Ok(HeadTying::Own)
            }
            (HeadPlace::Embedding, Some(_)) => {
                let copy = self.part(names.head, &shape, RowOrder::AsStored)?.tensor;
                let embedding = &self.table.tensors[names.embedding];
                if copy.format != embedding.format || self.table.bytes(&copy) != self.table.bytes(embedding) {
                    return Err(ModelError::LeftOverTensor {
                        file: self.table.path(&copy).to_owned(),
                        tensor: copy.name,
                        found: "values that differ from the embedding's".to_owned(),
                        expected: "no such tensor or an equal one, since the configuration ties the two".to_owned(),
                    });
                }
                Ok(HeadTying::Tied)
            }
        }
    }

    fn place(&mut self, id: WeightId, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        let part = self.part(name, shape, RowOrder::AsStored)?;
        self.weights.insert(id, vec![part]);
        Ok(())
    }

    fn part(&mut self, name: &str, shape: &[usize], order: RowOrder) -> Result<Part, ModelError> {
        let Some(tensor) = self.left.remove(name) else {
            return Err(ModelError::MissingTensor { file: self.checkpoint.to_owned(), tensor: name.to_owned() });
        };
        self.table.check_shape(tensor, shape)?;
        Ok(Part { tensor: tensor.clone(), order })
    }

    fn finish(&self, outline: &Outline) -> Result<(), ModelError> {
        let Some(tensor) = self.left.values().next() else { return Ok(()) };
        Err(ModelError::LeftOverTensor {
            file: self.table.path(tensor).to_owned(),
            tensor: tensor.name.clone(),
            found: format!("shape {} in {}", Shape(tensor.shape.clone()), tensor.format),
            expected: format!(
                "only tensors of a {} model with {} layers",
                outline.architecture, outline.dimensions.num_layers
            ),
        })
    }
}

fn rope_factors(table: &TensorTable, tensor: &Tensor, pairs: usize) -> Result<Vec<f32>, ModelError> {
    table.check_shape(tensor, &[pairs])?;
    let factors = table.vector(tensor);
    match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
        None => Ok(factors),
        Some(factor) => Err(ModelError::corrupt(
            table.path(tensor),
            &format!("tensor {}", tensor.name),
            format!("factor {factor}"),
            "finite numbers above 0",
        )),
    }
}

impl Part {
    /// The tensor as a matrix of the decoder: borrowed when it is stored as it belongs, else a copy.
    pub(crate) fn matrix<'t>(&self, table: &'t TensorTable) -> Matrix<'t> {
        let (rows, columns) = (self.tensor.shape[0], self.tensor.shape[1]);
        let stored = table.bytes(&self.tensor);
        let bytes = match self.order {
            RowOrder::AsStored => stored,
            RowOrder::NeighbourPairs { head_size } => Cow::Owned(halves_from_pairs(&stored, rows, head_size)),
        };
        Matrix { rows, columns, data: WeightData { format: self.tensor.format, bytes } }
    }

    /// What belongs to one place, as a backend sees it.
    pub(crate) fn group<'t>(parts: &[Part], table: &'t TensorTable) -> WeightGroup<'t> {
        match parts {
            [part] if part.tensor.shape.len() == 1 => WeightGroup::Vector(table.vector(&part.tensor)),
            parts => WeightGroup::Matrices(parts.iter().map(|part| part.matrix(table)).collect()),
        }
    }
}

/// Reorders whole rows, so that any format with rows of whole blocks can be moved.
fn halves_from_pairs(stored: &[u8], rows: usize, head_size: usize) -> Vec<u8> {
    let row_bytes = stored.len() / rows;
    let mut moved = Vec::with_capacity(stored.len());
    for head in stored.chunks_exact(head_size * row_bytes) {
        for parity in 0..2 {
            for pair in head.chunks_exact(2 * row_bytes) {
                moved.extend_from_slice(&pair[parity * row_bytes..(parity + 1) * row_bytes]);
            }
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_each_head_become_halves() {
        let rows: Vec<u8> = (0..16).flat_map(|row| [row, 100 + row]).collect();
        let moved = halves_from_pairs(&rows, 16, 8);
        let order: Vec<u8> = moved.chunks(2).map(|row| row[0]).collect();
        assert_eq!(order, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]);
        assert!(moved.chunks(2).all(|row| row[1] == 100 + row[0]));
    }
}
