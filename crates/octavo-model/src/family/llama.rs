//! The Llama family (Touvron et al., 2023): pre-norm, rotary, grouped queries, gated SiLU, no biases.

use super::{Dimensions, FieldNames, HeadPlace, Outline, RowOrder, TensorNames};
use crate::{
    ModelError,
    gguf::{self, Metadata},
    huggingface::{self, Folder, JsonFile},
    rope::{self, Rope, RopeScaling},
};

const ARCHITECTURE: &str = "llama";

static GGUF_NAMES: TensorNames = TensorNames {
    embedding: "token_embd.weight",
    final_norm: "output_norm.weight",
    head: "output.weight",
    layer_prefix: "blk.",
    attention_norm: "attn_norm.weight",
    query: "attn_q.weight",
    key: "attn_k.weight",
    value: "attn_v.weight",
    attention_output: "attn_output.weight",
    mlp_norm: "ffn_norm.weight",
    gate: "ffn_gate.weight",
    up: "ffn_up.weight",
    down: "ffn_down.weight",
    rope_factors: Some("rope_freqs.weight"),
    derived: &[],
};

pub(super) static FOLDER_NAMES: TensorNames = TensorNames {
    embedding: "model.embed_tokens.weight",
    final_norm: "model.norm.weight",
    head: "lm_head.weight",
    layer_prefix: "model.layers.",
    attention_norm: "input_layernorm.weight",
    query: "self_attn.q_proj.weight",
    key: "self_attn.k_proj.weight",
    value: "self_attn.v_proj.weight",
    attention_output: "self_attn.o_proj.weight",
    mlp_norm: "post_attention_layernorm.weight",
    gate: "mlp.gate_proj.weight",
    up: "mlp.up_proj.weight",
    down: "mlp.down_proj.weight",
    rope_factors: None,
    derived: &["self_attn.rotary_emb.inv_freq"],
};

const BLOCK_COUNT: &str = "llama.block_count";
const CONTEXT_LENGTH: &str = "llama.context_length";
const EMBEDDING_LENGTH: &str = "llama.embedding_length";
const FEED_FORWARD_LENGTH: &str = "llama.feed_forward_length";
const HEAD_COUNT: &str = "llama.attention.head_count";
const HEAD_COUNT_KV: &str = "llama.attention.head_count_kv";
const KEY_LENGTH: &str = "llama.attention.key_length";
const VALUE_LENGTH: &str = "llama.attention.value_length";
const EPSILON: &str = "llama.attention.layer_norm_rms_epsilon";
const FREQUENCY_BASE: &str = "llama.rope.freq_base";
const DIMENSION_COUNT: &str = "llama.rope.dimension_count";
const SCALING_TYPE: &str = "llama.rope.scaling.type";
const SCALING_FACTOR: &str = "llama.rope.scaling.factor";
const SCALE_LINEAR: &str = "llama.rope.scale_linear";
const VOCAB_SIZE: &str = "llama.vocab_size";

/// Every `llama.` field that is understood; the last ones say nothing that changes a result.
const UNDERSTOOD: [&str; 18] = [
    BLOCK_COUNT,
    CONTEXT_LENGTH,
    EMBEDDING_LENGTH,
    FEED_FORWARD_LENGTH,
    HEAD_COUNT,
    HEAD_COUNT_KV,
    KEY_LENGTH,
    VALUE_LENGTH,
    EPSILON,
    FREQUENCY_BASE,
    DIMENSION_COUNT,
    SCALING_TYPE,
    SCALING_FACTOR,
    SCALE_LINEAR,
    VOCAB_SIZE,
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.finetuned",
    "llama.tensor_data_layout",
];

/// Fields of variants, with the value that leaves this family's arithmetic as it is.
const NEUTRAL: [(&str, f64); 3] =
    [("llama.expert_count", 0.0), ("llama.expert_used_count", 0.0), ("llama.logit_scale", 1.0)];

/// Reads the metadata of a GGUF file.
pub(super) fn from_gguf(metadata: &Metadata<'_>) -> Result<Outline, ModelError> {
    refuse_variants(metadata)?;
    let num_heads = metadata.required_size(HEAD_COUNT)?;
    let hidden_size = metadata.required_size(EMBEDDING_LENGTH)?;
    let file = metadata.file();
    let head_size = match metadata.size(KEY_LENGTH)? {
        Some(size) => size,
        None => Dimensions::default_head_size(hidden_size, num_heads, file, HEAD_COUNT)?,
    };
    for key in [VALUE_LENGTH, DIMENSION_COUNT] {
        match metadata.size(key)? {
            Some(size) if size != head_size => {
                return Err(metadata.unsupported(key, size, format!("the head size, {head_size}")));
            }
            _ => {}
        }
    }
    let dimensions = Dimensions {
        vocab_size: gguf::vocab_size(metadata, VOCAB_SIZE)?,
        hidden_size,
        num_layers: metadata.required_size(BLOCK_COUNT)?,
        num_heads,
        num_kv_heads: metadata.size(HEAD_COUNT_KV)?.unwrap_or(num_heads),
        head_size,
        intermediate_size: metadata.required_size(FEED_FORWARD_LENGTH)?,
    };
    let fields = FieldNames { num_kv_heads: HEAD_COUNT_KV, head_size: KEY_LENGTH };
    dimensions.check(file, &fields)?;
    let special = |name: &str| gguf::special_token(metadata, name, dimensions.vocab_size);
    let mut eos_token_ids: Vec<_> = special("eos")?.into_iter().chain(special("eot")?).collect();
    eos_token_ids.sort_unstable();
    eos_token_ids.dedup();
    Ok(Outline {
        architecture: ARCHITECTURE,
        name: metadata.text("general.name")?.map(str::to_owned),
        dimensions,
        epsilon: super::epsilon(metadata.number(EPSILON)?, file, EPSILON)?,
        rope: gguf_rope(metadata)?,
        head: HeadPlace::OwnIfPresent,
        context_length: metadata.required_size(CONTEXT_LENGTH)?,
        bos_token_id: special("bos")?,
        eos_token_ids,
        generation: gguf::generation_defaults(metadata)?,
        names: &GGUF_NAMES,
        rope_rows: RowOrder::NeighbourPairs { head_size },
    })
}

fn refuse_variants(metadata: &Metadata<'_>) -> Result<(), ModelError> {
    for (key, value) in metadata.iter().filter(|(key, _)| key.starts_with("llama.")) {
        match NEUTRAL.iter().find(|(known, _)| *known == key) {
            Some((_, neutral)) if metadata.number(key)? == Some(*neutral) => {}
            Some((_, neutral)) => return Err(metadata.unsupported(key, value, neutral)),
            None if UNDERSTOOD.contains(&key) => {}
            None if key == "llama.attention.causal" && metadata.flag(key)? == Some(true) => {}
            None => return Err(metadata.unsupported(key, value, "no such field in a plain Llama model")),
        }
    }
    Ok(())
}

fn gguf_rope(metadata: &Metadata<'_>) -> Result<Rope, ModelError> {
    let base = rope::base(metadata.number(FREQUENCY_BASE)?, metadata.file(), FREQUENCY_BASE)?;
    let factor_key = if metadata.number(SCALING_FACTOR)?.is_some() { SCALING_FACTOR } else { SCALE_LINEAR };
    // Zero is how some writers say that there is none.
    let factor = metadata.number(factor_key)?.filter(|factor| *factor != 0.0);
    let scaling = match (metadata.text(SCALING_TYPE)?, factor) {
        (None | Some("none" | "linear"), None | Some(1.0)) => RopeScaling::Plain,
        (None | Some("linear"), Some(factor)) => {
            RopeScaling::Linear { factor: rope::factor(factor, metadata.file(), factor_key)? }
        }
        (Some("none"), Some(factor)) => {
            return Err(metadata.corrupt(factor_key, factor, format!("no factor, since {SCALING_TYPE} is \"none\"")));
        }
        (Some(other), _) => {
            return Err(metadata.unsupported(SCALING_TYPE, format!("{other:?}"), "\"none\" or \"linear\""));
        }
    };
    Ok(Rope { base, scaling })
}

/// Reads `config.json` and `generation_config.json`.
pub(super) fn from_folder(folder: &Folder) -> Result<Outline, ModelError> {
    let config = &folder.config;
    refuse_config_variants(config)?;
    name_unknown_fields(config);
    let file = config.path();
    let num_heads = config.required_size("num_attention_heads")?;
    let hidden_size = config.required_size("hidden_size")?;
    let head_size = match config.size("head_dim")? {
        Some(size) => size,
        None => Dimensions::default_head_size(hidden_size, num_heads, file, "num_attention_heads")?,
    };
    let dimensions = Dimensions {
        vocab_size: config.required_size("vocab_size")?,
        hidden_size,
        num_layers: config.required_size("num_hidden_layers")?,
        num_heads,
        num_kv_heads: config.size("num_key_value_heads")?.unwrap_or(num_heads),
        head_size,
        intermediate_size: config.required_size("intermediate_size")?,
    };
    let fields = FieldNames { num_kv_heads: "num_key_value_heads", head_size: "head_dim" };
    dimensions.check(file, &fields)?;
    let tied = config.flag("tie_word_embeddings")?.unwrap_or(false);
    Ok(Outline {
        architecture: ARCHITECTURE,
        name: None,
        dimensions,
        epsilon: super::epsilon(Some(config.number("rms_norm_eps")?.unwrap_or(1e-6)), file, "rms_norm_eps")?,
        rope: huggingface::rope(config)?,
        head: if tied { HeadPlace::Embedding } else { HeadPlace::Own },
        context_length: config.required_size("max_position_embeddings")?,
        bos_token_id: folder.bos_token_id(dimensions.vocab_size)?,
        eos_token_ids: folder.eos_token_ids(dimensions.vocab_size)?,
        generation: folder.generation_defaults()?,
        names: &FOLDER_NAMES,
        rope_rows: RowOrder::AsStored,
    })
}

/// Fields of `config.json` that belong to other arithmetic.
const CONFIG_REFUSED: [&str; 8] = [
    "sliding_window",
    "layer_types",
    "num_experts",
    "num_local_experts",
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
];

const CONFIG_READ: [&str; 23] = [
    "architectures",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_interleaved",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Fields about training, other programs or storage.
const CONFIG_WITHOUT_EFFECT: [&str; 13] = [
    "_name_or_path",
    "attention_dropout",
    "dtype",
    "initializer_range",
    "is_llama_config",
    "pad_token_id",
    "pretraining_tp",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
];

/// Fields of `config.json` that would change the arithmetic if they had another value than this.
fn refuse_config_variants(config: &JsonFile) -> Result<(), ModelError> {
    config.expect_text("hidden_act", "silu")?;
    config.expect_off("attention_bias")?;
    config.expect_off("mlp_bias")?;
    config.expect_off("rope_interleaved")?;
    if let Some(classes) = config.texts("architectures")?
        && !classes.contains(&"LlamaForCausalLM")
    {
        return Err(config.unsupported("architectures", format!("{classes:?}"), "\"LlamaForCausalLM\""));
    }
    for field in CONFIG_REFUSED {
        if let Some(value) = config.value(field) {
            return Err(config.unsupported(field, value, "no such field in a plain Llama model"));
        }
    }
    match config.number("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => Err(config.unsupported("partial_rotary_factor", factor, 1)),
        _ => Ok(()),
    }
}

/// Says which fields of `config.json` nobody here knows; one of them may have been meant to matter.
fn name_unknown_fields(config: &JsonFile) {
    let unknown: Vec<&str> = config
        .keys()
        .filter(|key| !CONFIG_READ.contains(key) && !CONFIG_WITHOUT_EFFECT.contains(key) && config.value(key).is_some())
        .collect();
    if !unknown.is_empty() {
        log::warn!("{}: fields that are not known and have no effect: {}", config.path().display(), unknown.join(", "));
    }
}
