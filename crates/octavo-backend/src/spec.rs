//! A decoder as plain data: built once from a checkpoint's configuration, executed by any backend.

use crate::{BackendError, WeightId};

/// A decoder-only transformer. Oddities of families are folded into these numbers when it is built.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Factor on each embedding row (1 for most families).
    pub embedding_scale: f32,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// What follows the last layer.
    pub head: HeadSpec,
}

/// One layer: `x += attention(norm(x)); x += mlp(norm(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// The norm before attention.
    pub attention_norm: NormSpec,
    /// Self-attention over the KV cache.
    pub attention: AttentionSpec,
    /// The norm before the MLP.
    pub mlp_norm: NormSpec,
    /// The feed-forward part.
    pub mlp: MlpSpec,
}

/// RMSNorm (Zhang and Sennrich, 2019): `x * weight / sqrt(mean(x^2) + epsilon)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Grouped-query attention (Ainslie et al., EMNLP'23): query head `h` reads KV head `h / (num_heads / num_kv_heads)`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub num_heads: usize,
    /// KV heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_size: usize,
    /// Factor on the scores, usually `1 / sqrt(head_size)`.
    pub scale: f32,
    /// Rotary embedding of queries and keys.
    pub rope: RopeSpec,
    /// Position `p` sees positions `> p - window`; `None` sees all.
    pub window: Option<usize>,
}

/// Rotary position embedding (Su et al., 2021), the two halves of a head paired: `(x[i], x[i + rotated / 2])`.
///
/// A checkpoint that pairs neighbours instead has its rows reordered when it is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// One inverse frequency a pair, in radians a position; scaling rules are already folded in.
    pub inverse_frequencies: Vec<f64>,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum MlpSpec {
    /// `down(activation(gate(x)) * up(x))` (Shazeer, 2020).
    Gated {
        /// Width between the two projections.
        intermediate_size: usize,
        /// Applied to the gate.
        activation: Activation,
    },
}

/// A pointwise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// The last norm and the projection to the vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadSpec {
    /// The norm before the projection.
    pub norm: NormSpec,
    /// The projection is the embedding itself.
    pub tied: bool,
    /// Factor on the logits (1 for most families).
    pub logit_scale: f32,
    /// Tokens that can be drawn: those below this. Rows of the vocabulary beyond it are padding, which no tokenizer knows.
    pub num_tokens: usize,
}

/// The KV cache's shape: groups of layers that share one block table a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGeometry {
    /// Tokens in a block.
    pub block_size: usize,
    /// All global layers are one group; all layers of one window are another.
    pub groups: Vec<KvGroup>,
}

/// The layers of one window (or of none) and the width of what they keep for a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroup {
    /// Indices into [`DecoderSpec::layers`], ascending.
    pub layers: Vec<usize>,
    /// The layers' window.
    pub window: Option<usize>,
    /// Elements of K and V together that the group keeps for one token, over all its layers.
    pub elements_per_token: usize,
    /// Keys and values of single heads that one token has in the layers of this group.
    pub heads_per_token: usize,
}

/// What a place in the decoder expects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightShape {
    /// A norm's weights: this many.
    Vector(usize),
    /// Matrices of `columns` inputs stacked by rows.
    Matrices {
        /// Rows of each part, in order.
        parts: Vec<usize>,
        /// Inputs.
        columns: usize,
    },
}

impl DecoderSpec {
    /// Every place that holds weights, in the order of execution.
    pub fn weight_ids(&self) -> Vec<WeightId> {
        let mut ids = vec![WeightId::Embedding];
        for layer in 0..self.layers.len() {
            ids.extend([
                WeightId::AttentionNorm(layer),
                WeightId::Qkv(layer),
                WeightId::AttentionOutput(layer),
                WeightId::MlpNorm(layer),
                WeightId::GateUp(layer),
                WeightId::Down(layer),
            ]);
        }
        ids.push(WeightId::FinalNorm);
        if !self.head.tied {
            ids.push(WeightId::Head);
        }
        ids
    }

    /// The shape of the weights at `id`.
    ///
    /// # Panics
    /// If `id` names a layer that does not exist.
    pub fn weight_shape(&self, id: WeightId) -> WeightShape {
        let hidden = self.hidden_size;
        let matrices = |parts: &[usize], columns| WeightShape::Matrices { parts: parts.to_vec(), columns };
        match id {
            WeightId::Embedding | WeightId::Head => matrices(&[self.vocab_size], hidden),
            WeightId::FinalNorm | WeightId::AttentionNorm(_) | WeightId::MlpNorm(_) => WeightShape::Vector(hidden),
            WeightId::Qkv(layer) => {
                let attention = &self.layers[layer].attention;
                let kv_rows = attention.num_kv_heads * attention.head_size;
                matrices(&[attention.num_heads * attention.head_size, kv_rows, kv_rows], hidden)
            }
            WeightId::AttentionOutput(layer) => {
                let attention = &self.layers[layer].attention;
                matrices(&[hidden], attention.num_heads * attention.head_size)
            }
            WeightId::GateUp(layer) => {
                let MlpSpec::Gated { intermediate_size, .. } = self.layers[layer].mlp;
                matrices(&[intermediate_size, intermediate_size], hidden)
            }
            WeightId::Down(layer) => {
                let MlpSpec::Gated { intermediate_size, .. } = self.layers[layer].mlp;
                matrices(&[hidden], intermediate_size)
            }
        }
    }

    /// The shape of this decoder's KV cache, groups in order of their first layer.
    pub fn kv_geometry(&self, block_size: usize) -> KvGeometry {
        let mut groups: Vec<KvGroup> = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let attention = &layer.attention;
            let heads = 2 * attention.num_kv_heads;
            let elements = heads * attention.head_size;
            match groups.iter_mut().find(|group| group.window == attention.window) {
                Some(group) => {
                    group.layers.push(index);
                    group.elements_per_token += elements;
                    group.heads_per_token += heads;
                }
                None => groups.push(KvGroup {
                    layers: vec![index],
                    window: attention.window,
                    elements_per_token: elements,
                    heads_per_token: heads,
                }),
            }
        }
        KvGeometry { block_size, groups }
    }
}

impl HeadSpec {
    /// Refuses a number of tokens that the head's rows do not have.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] with the number.
    pub fn check(&self, vocab_size: usize) -> Result<(), BackendError> {
        if (1..=vocab_size).contains(&self.num_tokens) {
            return Ok(());
        }
        let (found, expected) = (self.num_tokens.to_string(), format!("1 to {vocab_size}"));
        Err(BackendError::Unsupported { what: "tokens that can be drawn", found, expected })
    }
}

impl AttentionSpec {
    /// Query heads that read one KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Rows of the stacked query, key and value projection.
    pub fn qkv_rows(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_size
    }
}

impl RopeSpec {
    /// The plain rotary embedding: `base^(-2i / rotated)` for each pair.
    pub fn plain(base: f64, rotated: usize) -> RopeSpec {
        let pairs = rotated / 2;
        RopeSpec { inverse_frequencies: (0..pairs).map(|i| base.powf(-2.0 * i as f64 / rotated as f64)).collect() }
    }

    /// Writes the cosine and sine of each pair's angle at `position` (both slices: one element a pair).
    ///
    /// The one definition for all backends: the product and the functions in `f64`, rounded once.
    pub fn angles(&self, position: usize, cosines: &mut [f32], sines: &mut [f32]) {
        for ((frequency, cosine), sine) in self.inverse_frequencies.iter().zip(cosines).zip(sines) {
            let (s, c) = (position as f64 * frequency).sin_cos();
            *cosine = c as f32;
            *sine = s as f32;
        }
    }
}
