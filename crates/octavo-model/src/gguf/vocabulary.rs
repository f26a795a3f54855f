//! What a GGUF file says about text and sampling.

use octavo_backend::TokenId;

use super::Metadata;
use crate::{GenerationDefaults, GgufVocabulary, ModelError, TokenizerSource};

const TOKENS: &str = "tokenizer.ggml.tokens";

/// The tables that a tokenizer is built from.
pub(crate) fn tokenizer(metadata: &Metadata<'_>, vocab_size: usize) -> Result<TokenizerSource, ModelError> {
    let Some(tokens) = metadata.texts(TOKENS)? else { return Ok(TokenizerSource::Missing) };
    if tokens.len() > vocab_size {
        return Err(metadata.corrupt(TOKENS, format!("{} tokens", tokens.len()), format!("at most {vocab_size}")));
    }
    let model = metadata.text("tokenizer.ggml.model")?.ok_or_else(|| metadata.missing("tokenizer.ggml.model"))?;
    let pre = metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let token_types = metadata.integers("tokenizer.ggml.token_type")?.unwrap_or_default();
    if !token_types.is_empty() && token_types.len() != tokens.len() {
        let found = format!("{} types", token_types.len());
        return Err(metadata.corrupt("tokenizer.ggml.token_type", found, format!("one for each of {}", tokens.len())));
    }
    let special = |name: &str| special_token(metadata, name, vocab_size);
    let flag = |name: &str| metadata.flag(&format!("tokenizer.ggml.{name}"));
    Ok(TokenizerSource::Vocabulary(GgufVocabulary {
        merges: metadata.texts("tokenizer.ggml.merges")?.unwrap_or_default(),
        bos_token_id: special("bos")?,
        eos_token_id: special("eos")?,
        eot_token_id: special("eot")?,
        unknown_token_id: special("unknown")?,
        padding_token_id: special("padding")?,
        add_bos: flag("add_bos_token")?.unwrap_or_else(|| adds_bos(model, pre)),
        add_eos: flag("add_eos_token")?.unwrap_or(false),
        add_space_prefix: flag("add_space_prefix")?.unwrap_or(model == "llama"),
        model: model.to_owned(),
        pre: pre.to_owned(),
        tokens,
        token_types,
    }))
}

/// What files that leave the flag out mean: SentencePiece vocabularies and Llama 3's begin each text with BOS.
fn adds_bos(model: &str, pre: &str) -> bool {
    model == "llama" || matches!(pre, "llama3" | "llama-v3" | "llama-bpe")
}

pub(crate) fn chat_template(metadata: &Metadata<'_>) -> Result<Option<String>, ModelError> {
    Ok(metadata.text("tokenizer.chat_template")?.map(str::to_owned))
}

pub(crate) fn generation_defaults(metadata: &Metadata<'_>) -> Result<GenerationDefaults, ModelError> {
    let number = |name: &str| -> Result<Option<f32>, ModelError> {
        Ok(metadata.number(&format!("general.sampling.{name}"))?.map(|number| number as f32))
    };
    Ok(GenerationDefaults {
        do_sample: None,
        temperature: number("temp")?,
        // Zero and below keep all tokens.
        top_k: number("top_k")?.map(|number| number as u32),
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        repetition_penalty: number("penalty_repeat")?,
    })
}

/// Rows of the embedding: the family's own field, or the number of tokens.
pub(crate) fn vocab_size(metadata: &Metadata<'_>, key: &str) -> Result<usize, ModelError> {
    if let Some(size) = metadata.size(key)? {
        return Ok(size);
    }
    match metadata.array(TOKENS)? {
        Some(tokens) if tokens.len() > 0 => Ok(tokens.len()),
        _ => Err(metadata.missing(key)),
    }
}

/// `tokenizer.ggml.NAME_token_id`, which must be in the vocabulary.
pub(crate) fn special_token(
    metadata: &Metadata<'_>,
    name: &str,
    vocab_size: usize,
) -> Result<Option<TokenId>, ModelError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.token_id(&key)? {
        Some(id) if id as usize >= vocab_size => Err(metadata.corrupt(&key, id, format!("below {vocab_size}"))),
        id => Ok(id),
    }
}
