//! What a checkpoint says about its model, in octavo's terms.

use std::path::PathBuf;

use octavo_backend::{DecoderSpec, TokenId, WeightFormat};

/// A model, apart from its weights and its text.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family's name in the checkpoint (`llama`).
    pub architecture: String,
    /// The model's own name, when the checkpoint gives one.
    pub name: Option<String>,
    /// The decoder.
    pub spec: DecoderSpec,
    /// Positions that the model was made for.
    pub context_length: usize,
    /// Begins a text. Whether a tokenizer adds it is another question.
    pub bos_token_id: Option<TokenId>,
    /// Each of them ends an output; ascending.
    pub eos_token_ids: Vec<TokenId>,
    /// How the model's makers would sample from it.
    pub generation: GenerationDefaults,
    /// Bytes of weights in each format, the largest first.
    pub weight_formats: Vec<(WeightFormat, usize)>,
}

/// The sampling that a checkpoint recommends; what it leaves open is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GenerationDefaults {
    /// False recommends greedy decoding.
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Keep the k likeliest; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set that reaches this probability.
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the likeliest.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens already seen.
    pub repetition_penalty: Option<f32>,
}

/// What a tokenizer can be built from.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizerSource {
    /// A `tokenizer.json`.
    File(PathBuf),
    /// The tables of a GGUF file.
    Vocabulary(GgufVocabulary),
    /// The checkpoint has none: token ids only.
    Missing,
}

/// The `tokenizer.ggml.*` fields of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufVocabulary {
    /// Kind of tokenizer; `gpt2` is byte-level BPE.
    pub model: String,
    /// How text is split before merging, such as `smollm`; `default` when the file does not say.
    pub pre: String,
    /// Token `i` is `tokens[i]`.
    pub tokens: Vec<String>,
    /// GGUF's numbers: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty or one a token.
    pub token_types: Vec<i32>,
    /// `left right`, best first.
    pub merges: Vec<String>,
    /// Begins a text.
    pub bos_token_id: Option<TokenId>,
    /// Ends a text.
    pub eos_token_id: Option<TokenId>,
    /// Ends a turn.
    pub eot_token_id: Option<TokenId>,
    /// Stands for what has no token.
    pub unknown_token_id: Option<TokenId>,
    /// Fills batches.
    pub padding_token_id: Option<TokenId>,
    /// Encoding puts the BOS token first.
    pub add_bos: bool,
    /// Encoding puts the EOS token last.
    pub add_eos: bool,
    /// Encoding puts a space first.
    pub add_space_prefix: bool,
}

/// No dimension, count or length of a model is larger; the product of two fits 64 bits.
pub(crate) const LARGEST_SIZE: usize = i32::MAX as usize;
