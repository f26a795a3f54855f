//! Model families: each is a function from metadata to an [`Outline`] and a row of tensor names.

mod binding;
mod llama;

use std::path::Path;

use octavo_backend::{
    Activation, AttentionSpec, DecoderSpec, HeadSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec, TokenId, WeightId,
};

pub(crate) use self::binding::{Part, RowOrder, Weights, bind};
use crate::{GenerationDefaults, ModelError, gguf::Metadata, huggingface::Folder, rope::Rope};

/// A model as its checkpoint's metadata describes it, before any tensor has been looked at.
#[derive(Debug)]
pub(crate) struct Outline {
    pub(crate) architecture: &'static str,
    pub(crate) name: Option<String>,
    pub(crate) dimensions: Dimensions,
    pub(crate) epsilon: f32,
    pub(crate) rope: Rope,
    pub(crate) head: HeadPlace,
    pub(crate) context_length: usize,
    pub(crate) bos_token_id: Option<TokenId>,
    pub(crate) eos_token_ids: Vec<TokenId>,
    pub(crate) generation: GenerationDefaults,
    pub(crate) names: &'static TensorNames,
    /// Which rows of a query or key head the checkpoint turns together.
    pub(crate) rope_rows: RowOrder,
}

/// Sizes that decide the tensors' shapes; each is from 1 to [`crate::config::LARGEST_SIZE`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dimensions {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_size: usize,
    pub(crate) intermediate_size: usize,
}

/// Where the projection to the vocabulary is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadPlace {
    /// It is the embedding. A tensor of its own may be there all the same, if it holds the same bytes.
    Embedding,
    /// A tensor of its own.
    Own,
    /// A tensor of its own if there is one, else the embedding.
    OwnIfPresent,
}

/// A family's tensor names in one kind of checkpoint; those of layers follow `layer_prefix` and `N.`.
#[derive(Debug)]
pub(crate) struct TensorNames {
    pub(crate) embedding: &'static str,
    pub(crate) final_norm: &'static str,
    pub(crate) head: &'static str,
    pub(crate) layer_prefix: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    pub(crate) attention_output: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// Divides the rotary frequencies, one number a pair.
    pub(crate) rope_factors: Option<&'static str>,
    /// In layers: follows from the configuration, so it need not be read.
    pub(crate) derived: &'static [&'static str],
}

/// What a checkpoint calls the fields that [`Dimensions::check`] compares.
pub(crate) struct FieldNames {
    pub(crate) num_kv_heads: &'static str,
    pub(crate) head_size: &'static str,
}

/// The outline of a GGUF file.
pub(crate) fn from_gguf(metadata: &Metadata<'_>) -> Result<Outline, ModelError> {
    const KEY: &str = "general.architecture";
    match metadata.text(KEY)? {
        Some("llama") => llama::from_gguf(metadata),
        Some(other) => Err(metadata.unsupported(KEY, format!("{other:?}"), "\"llama\"")),
        None => Err(metadata.missing(KEY)),
    }
}

/// The outline of a Hugging Face folder.
pub(crate) fn from_folder(folder: &Folder) -> Result<Outline, ModelError> {
    const KEY: &str = "model_type";
    match folder.config.text(KEY)? {
        Some("llama") => llama::from_folder(folder),
        Some(other) => Err(folder.config.unsupported(KEY, format!("{other:?}"), "\"llama\"")),
        None => Err(folder.config.missing(KEY)),
    }
}

/// What the tensors are called in a Hugging Face folder.
pub(crate) fn folder_names() -> &'static TensorNames {
    &llama::FOLDER_NAMES
}

impl TensorNames {
    /// The tensors of one place, in the order in which the decoder stacks them.
    pub(crate) fn of(&self, id: WeightId) -> Vec<String> {
        let of_layer =
            |layer, names: &[&str]| names.iter().map(|name| format!("{}{layer}.{name}", self.layer_prefix)).collect();
        match id {
            WeightId::Embedding => vec![self.embedding.to_owned()],
            WeightId::AttentionNorm(layer) => of_layer(layer, &[self.attention_norm]),
            WeightId::Qkv(layer) => of_layer(layer, &[self.query, self.key, self.value]),
            WeightId::AttentionOutput(layer) => of_layer(layer, &[self.attention_output]),
            WeightId::MlpNorm(layer) => of_layer(layer, &[self.mlp_norm]),
            WeightId::GateUp(layer) => of_layer(layer, &[self.gate, self.up]),
            WeightId::Down(layer) => of_layer(layer, &[self.down]),
            WeightId::FinalNorm => vec![self.final_norm.to_owned()],
            WeightId::Head => vec![self.head.to_owned()],
        }
    }
}

impl Dimensions {
    /// The head size of a checkpoint that does not name it.
    pub(crate) fn default_head_size(
        hidden_size: usize,
        num_heads: usize,
        file: &Path,
        field: &str,
    ) -> Result<usize, ModelError> {
        if hidden_size.is_multiple_of(num_heads) {
            return Ok(hidden_size / num_heads);
        }
        Err(ModelError::corrupt(file, field, num_heads, format!("a divisor of the hidden size {hidden_size}")))
    }

    pub(crate) fn check(&self, file: &Path, fields: &FieldNames) -> Result<(), ModelError> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("a divisor of the {} query heads", self.num_heads);
            return Err(ModelError::corrupt(file, fields.num_kv_heads, self.num_kv_heads, expected));
        }
        if !self.head_size.is_multiple_of(2) {
            return Err(ModelError::corrupt(file, fields.head_size, self.head_size, "an even number"));
        }
        Ok(())
    }

    pub(crate) fn query_rows(&self) -> usize {
        self.num_heads * self.head_size
    }

    pub(crate) fn kv_rows(&self) -> usize {
        self.num_kv_heads * self.head_size
    }
}

impl Outline {
    /// The decoder. Called once the tensors have confirmed the dimensions, so that nothing here is larger than they are.
    fn spec(&self, rope: RopeSpec, tied: HeadTying) -> DecoderSpec {
        let sizes = &self.dimensions;
        let norm = NormSpec { epsilon: self.epsilon };
        let layer = LayerSpec {
            attention_norm: norm,
            attention: AttentionSpec {
                num_heads: sizes.num_heads,
                num_kv_heads: sizes.num_kv_heads,
                head_size: sizes.head_size,
                scale: (1.0 / (sizes.head_size as f64).sqrt()) as f32,
                rope,
                window: None,
            },
            mlp_norm: norm,
            mlp: MlpSpec::Gated { intermediate_size: sizes.intermediate_size, activation: Activation::Silu },
        };
        DecoderSpec {
            vocab_size: sizes.vocab_size,
            hidden_size: sizes.hidden_size,
            embedding_scale: 1.0,
            layers: vec![layer; sizes.num_layers],
            head: HeadSpec { norm, tied: tied == HeadTying::Tied, logit_scale: 1.0, num_tokens: sizes.vocab_size },
        }
    }
}

/// Whether the head turned out to be the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadTying {
    Tied,
    Own,
}

/// The number that norms add; required, finite and not negative.
fn epsilon(value: Option<f64>, file: &Path, field: &str) -> Result<f32, ModelError> {
    match value {
        Some(epsilon) if (0.0..1.0).contains(&epsilon) => Ok(epsilon as f32),
        Some(epsilon) => Err(ModelError::corrupt(file, field, epsilon, "a number from 0 to 1")),
        None => Err(ModelError::corrupt(file, field, "nothing", "the field")),
    }
}
