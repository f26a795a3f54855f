//! The executable specification: the decoder, operation by operation, in naive `f32`, one row after another.
//!
//! [`Reference::exact`] rounds nowhere. [`Reference::mirror`] rounds where another backend says it does, so that what
//! is defined bit for bit in [`crate::numerics`] compares by `==`.

mod operations;

use crate::{
    AttentionSpec, Backend, BackendError, DecoderSpec, Footprint, GroupInputs, KvGeometry, LayerSpec, Matrix, MlpSpec,
    Numerics, SpanInput, StepInputs, StepLimits, StepResult, WeightId, WeightRounding, WeightSource, numerics, sampling,
};
use operations::{attend, matmul, rotate, silu};

/// Rows of logits that are held at once.
const HEAD_ROWS: usize = 64;

/// The plain backend.
#[derive(Debug, Clone, Copy)]
pub struct Reference {
    numerics: Numerics,
}

/// A model loaded by [`Reference`].
pub struct ReferencePlan {
    spec: DecoderSpec,
    limits: StepLimits,
    geometry: KvGeometry,
    embedding: Vec<Matrix<'static>>,
    layers: Vec<LayerWeights>,
    final_norm: Vec<f32>,
    head: Option<Vec<Matrix<'static>>>,
    caches: Vec<LayerCache>,
}

struct LayerWeights {
    attention_norm: Vec<f32>,
    qkv: Vec<Matrix<'static>>,
    attention_output: Vec<Matrix<'static>>,
    mlp_norm: Vec<f32>,
    gate_up: Vec<Matrix<'static>>,
    down: Vec<Matrix<'static>>,
}

/// Keys and values of one layer: `[slots, num_kv_heads, head_size]` each. Slots never written hold NaN.
struct LayerCache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Reference {
    /// Plain `f32`, rounded nowhere.
    pub fn exact() -> Reference {
        Reference { numerics: Numerics::EXACT }
    }

    /// Rounds weights, activations, keys and values as another backend does.
    pub fn mirror(numerics: Numerics) -> Reference {
        Reference { numerics }
    }

    /// The head alone: the logits, `[rows, vocab_size]`, of rows as [`StepResult::hidden`] has them.
    pub fn logits(&self, plan: &ReferencePlan, hidden: &[f32]) -> Vec<f32> {
        plan.logits(self.numerics, hidden)
    }
}

impl Backend for Reference {
    type Plan = ReferencePlan;

    fn load(
        &self,
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        limits: &StepLimits,
    ) -> Result<ReferencePlan, BackendError> {
        spec.head.check(spec.vocab_size)?;
        let rounding = self.numerics.weights;
        let mut matrices = |id| -> Result<Vec<Matrix<'static>>, BackendError> {
            Ok(rounding.apply(id, weights.weight(id)?.into_matrices(id, &spec.weight_shape(id))?))
        };
        let embedding = matrices(WeightId::Embedding)?;
        let head = if spec.head.tied { None } else { Some(matrices(WeightId::Head)?) };
        let mut vector = |id| weights.weight(id)?.into_vector(id, &spec.weight_shape(id));
        let final_norm = vector(WeightId::FinalNorm)?;
        let layers = (0..spec.layers.len()).map(|index| LayerWeights::load(spec, weights, rounding, index));
        let layers = layers.collect::<Result<_, _>>()?;
        let geometry = spec.kv_geometry(limits.block_size);
        let mut caches: Vec<LayerCache> = Vec::new();
        for (index, layer) in spec.layers.iter().enumerate() {
            let group = geometry.group_of(index);
            let elements = limits.num_blocks[group] * limits.block_size * layer.attention.kv_rows();
            caches.push(LayerCache { keys: vec![f32::NAN; elements], values: vec![f32::NAN; elements] });
        }
        let (spec, limits) = (spec.clone(), limits.clone());
        Ok(ReferencePlan { spec, limits, geometry, embedding, layers, final_norm, head, caches })
    }

    fn run(&mut self, plan: &mut ReferencePlan, inputs: &StepInputs) -> Result<StepResult, BackendError> {
        inputs.check(plan.spec.vocab_size, &plan.geometry, &plan.limits)?;
        plan.copy_blocks(inputs);
        let mut hidden = plan.embed(inputs);
        for index in 0..plan.layers.len() {
            plan.attention(self.numerics, index, inputs, &mut hidden);
            plan.mlp(self.numerics, index, &mut hidden);
        }
        Ok(plan.head(self.numerics, inputs, &hidden))
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn footprint(&self, spec: &DecoderSpec, limits: &StepLimits) -> Footprint {
        let geometry = spec.kv_geometry(limits.block_size);
        let slots = limits.num_blocks.iter().map(|blocks| blocks * limits.block_size);
        let kv: usize = geometry.groups.iter().zip(slots).map(|(group, slots)| group.elements_per_token * slots).sum();
        let widest = spec.layers.iter().map(LayerSpec::widest).max().unwrap_or(0).max(2 * spec.hidden_size);
        let arena = limits.max_rows * 2 * widest + HEAD_ROWS * spec.vocab_size;
        Footprint { kv_bytes: kv * size_of::<f32>(), arena_bytes: arena * size_of::<f32>() }
    }
}

impl LayerWeights {
    fn load(
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        rounding: WeightRounding,
        index: usize,
    ) -> Result<LayerWeights, BackendError> {
        let mut matrices = |id| -> Result<Vec<Matrix<'static>>, BackendError> {
            Ok(rounding.apply(id, weights.weight(id)?.into_matrices(id, &spec.weight_shape(id))?))
        };
        let qkv = matrices(WeightId::Qkv(index))?;
        let attention_output = matrices(WeightId::AttentionOutput(index))?;
        let gate_up = matrices(WeightId::GateUp(index))?;
        let down = matrices(WeightId::Down(index))?;
        let mut vector = |id| weights.weight(id)?.into_vector(id, &spec.weight_shape(id));
        let attention_norm = vector(WeightId::AttentionNorm(index))?;
        let mlp_norm = vector(WeightId::MlpNorm(index))?;
        Ok(LayerWeights { attention_norm, qkv, attention_output, mlp_norm, gate_up, down })
    }
}

impl ReferencePlan {
    fn copy_blocks(&mut self, inputs: &StepInputs) {
        for (index, cache) in self.caches.iter_mut().enumerate() {
            let block = self.limits.block_size * self.spec.layers[index].attention.kv_rows();
            for copy in &inputs.groups[self.geometry.group_of(index)].copies {
                let from = copy.from as usize * block;
                for store in [&mut cache.keys, &mut cache.values] {
                    store.copy_within(from..from + block, copy.to as usize * block);
                }
            }
        }
    }

    fn embed(&self, inputs: &StepInputs) -> Vec<f32> {
        let width = self.spec.hidden_size;
        let mut hidden = vec![0.0; inputs.tokens.len() * width];
        for (row, &token) in hidden.chunks_exact_mut(width).zip(&inputs.tokens) {
            self.embedding[0].dequantize_row(token as usize, row);
            row.iter_mut().for_each(|value| *value *= self.spec.embedding_scale);
        }
        hidden
    }

    fn attention(&mut self, numerics: Numerics, index: usize, inputs: &StepInputs, hidden: &mut [f32]) {
        let layer = &self.spec.layers[index];
        let attention = &layer.attention;
        let weights = &self.layers[index];
        let normed = norm_rows(hidden, &weights.attention_norm, layer.attention_norm.epsilon);
        let mut qkv = matmul(&weights.qkv, numerics, &normed);
        let group = &inputs.groups[self.geometry.group_of(index)];
        let slots = Slots { group, block_size: self.limits.block_size };
        // All of the step's keys and values are stored before any row reads them.
        for_each_row(inputs, |span, row, position| {
            let row = &mut qkv[row * attention.qkv_rows()..][..attention.qkv_rows()];
            rotate(attention, position, row);
            let (queries, keys_values) = row.split_at_mut(attention.num_heads * attention.head_size);
            for query in queries {
                *query = numerics.kv.round_operand(*query * attention.scale);
            }
            keys_values.chunks_exact_mut(attention.head_size).for_each(|head| numerics.kv.round_head(head));
            let (keys, values) = keys_values.split_at(attention.kv_rows());
            let at = slots.of(span, position) * attention.kv_rows();
            let cache = &mut self.caches[index];
            cache.keys[at..at + keys.len()].copy_from_slice(keys);
            cache.values[at..at + values.len()].copy_from_slice(values);
        });
        let width = attention.num_heads * attention.head_size;
        let mut attended = vec![0.0; inputs.tokens.len() * width];
        let cache = &self.caches[index];
        for_each_row(inputs, |span, row, position| {
            let queries = &qkv[row * attention.qkv_rows()..][..width];
            let first = attention.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let seen: Vec<usize> = (first..=position).map(|position| slots.of(span, position)).collect();
            attend(
                attention,
                numerics.kv,
                queries,
                &cache.keys,
                &cache.values,
                &seen,
                &mut attended[row * width..][..width],
            );
        });
        add(hidden, &matmul(&weights.attention_output, numerics, &attended));
    }

    fn mlp(&self, numerics: Numerics, index: usize, hidden: &mut [f32]) {
        let layer = &self.spec.layers[index];
        let weights = &self.layers[index];
        let MlpSpec::Gated { intermediate_size, .. } = layer.mlp;
        let normed = norm_rows(hidden, &weights.mlp_norm, layer.mlp_norm.epsilon);
        let gate_up = matmul(&weights.gate_up, numerics, &normed);
        let mut inner = Vec::with_capacity(gate_up.len() / 2);
        for row in gate_up.chunks_exact(2 * intermediate_size) {
            let (gate, up) = row.split_at(intermediate_size);
            inner.extend(gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up));
        }
        add(hidden, &matmul(&weights.down, numerics, &inner));
    }

    /// Samples, then scores, in tiles of rows; and the hidden states that are wanted.
    fn head(&self, numerics: Numerics, inputs: &StepInputs, hidden: &[f32]) -> StepResult {
        let StepInputs { samples, scores, .. } = inputs;
        let mut result = StepResult::default();
        let rows: Vec<usize> =
            samples.iter().map(|sample| sample.row).chain(scores.iter().map(|score| score.row)).collect();
        for (tile, rows) in rows.chunks(HEAD_ROWS).enumerate() {
            let mut logits = self.logits(numerics, &self.final_norm(hidden, rows));
            for (offset, logits) in logits.chunks_exact_mut(self.spec.vocab_size).enumerate() {
                let logits = &mut logits[..self.spec.head.num_tokens];
                let index = tile * HEAD_ROWS + offset;
                match samples.get(index) {
                    Some(sample) => result.sampled.push(sampling::sample(logits, sample)),
                    None => result.scores.push(sampling::score(logits, &scores[index - samples.len()])),
                }
            }
        }
        result.hidden = self.final_norm(hidden, &inputs.hidden);
        result
    }

    fn final_norm(&self, hidden: &[f32], rows: &[usize]) -> Vec<f32> {
        let width = self.spec.hidden_size;
        let rows: Vec<f32> = rows.iter().flat_map(|row| &hidden[row * width..][..width]).copied().collect();
        norm_rows(&rows, &self.final_norm, self.spec.head.norm.epsilon)
    }

    fn logits(&self, numerics: Numerics, normed: &[f32]) -> Vec<f32> {
        let mut logits = matmul(self.head.as_ref().unwrap_or(&self.embedding), numerics, normed);
        logits.iter_mut().for_each(|logit| *logit *= self.spec.head.logit_scale);
        logits
    }
}

/// Where the positions of a span live.
struct Slots<'a> {
    group: &'a GroupInputs,
    block_size: usize,
}

impl Slots<'_> {
    fn of(&self, span: usize, position: usize) -> usize {
        let block = self.group.table(span)[position / self.block_size] as usize;
        block * self.block_size + position % self.block_size
    }
}

/// Calls `body(span index, row, position)` for every row of the step.
fn for_each_row(inputs: &StepInputs, mut body: impl FnMut(usize, usize, usize)) {
    for (index, &SpanInput { first_row, len, start }) in inputs.spans.iter().enumerate() {
        for offset in 0..len {
            body(index, first_row + offset, start + offset);
        }
    }
}

fn norm_rows(input: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut output = vec![0.0; input.len()];
    for (out, row) in output.chunks_exact_mut(weight.len()).zip(input.chunks_exact(weight.len())) {
        numerics::rms_norm(row, weight, epsilon, out);
    }
    output
}

fn add(hidden: &mut [f32], update: &[f32]) {
    for (value, update) in hidden.iter_mut().zip(update) {
        *value += update;
    }
}

impl KvGeometry {
    /// The group that keeps layer `index`.
    ///
    /// # Panics
    /// If no group has the layer.
    pub fn group_of(&self, index: usize) -> usize {
        let found = self.groups.iter().position(|group| group.layers.contains(&index));
        found.unwrap_or_else(|| panic!("no KV group has layer {index}"))
    }
}

impl AttentionSpec {
    /// Elements of the keys (or of the values) of one token.
    pub fn kv_rows(&self) -> usize {
        self.num_kv_heads * self.head_size
    }
}

impl LayerSpec {
    /// The widest row that the layer makes.
    fn widest(&self) -> usize {
        let MlpSpec::Gated { intermediate_size, .. } = self.mlp;
        self.attention.qkv_rows().max(2 * intermediate_size)
    }
}
