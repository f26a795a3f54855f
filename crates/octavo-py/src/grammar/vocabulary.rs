//! A vocabulary as a tree of bytes.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use llguidance::{
    ParserFactory,
    api::ParserLimits,
    earley::SlicedBiasComputer,
    toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie},
};

use super::CompileError;
use crate::tokenizer::Tokenizer;

/// A longer token is left out.
const LONGEST_TOKEN: usize = 512;

/// What one output may cost. All of these count work and not time, so that equal outputs meet them at equal tokens.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// What grammars of one model are compiled with.
pub(super) struct Vocabulary {
    pub factory: ParserFactory,
    /// Tokens that can stand in a text, control tokens included; end tokens, holes and padding are not among them.
    pub usable: Arc<SimpleVob>,
}

impl Vocabulary {
    /// Of a model that knows `vocab_size` tokens, some of which end an output.
    ///
    /// # Errors
    /// A vocabulary that the library cannot hold, or without an end.
    pub(super) fn new(tokenizer: &Tokenizer, vocab_size: usize, ends: &[u32]) -> Result<Vocabulary, CompileError> {
        catch_unwind(AssertUnwindSafe(|| Vocabulary::build(tokenizer, vocab_size, ends)))
            .unwrap_or_else(|_| Err(CompileError::Source("the vocabulary cannot be made a tree".to_owned())))
    }

    fn build(tokenizer: &Tokenizer, vocab_size: usize, ends: &[u32]) -> Result<Vocabulary, CompileError> {
        let size = u32::try_from(vocab_size).map_err(|error| CompileError::Source(error.to_string()))?;
        // What lies beyond the tokenizer's vocabulary is padding, and never drawn.
        let drawn = vocab_size.min(tokenizer.id_bound());
        if !ends.iter().any(|&end| (end as usize) < drawn) {
            return Err(CompileError::NoEnd);
        }
        let words: Vec<Vec<u8>> =
            (0..size).map(|id| if ends.contains(&id) { Vec::new() } else { word(tokenizer, id) }).collect();
        // End tokens are the engine's.
        let trie = TokTrie::from(&TokRxInfo::new(size, INVALID_TOKEN), &words);
        let mut usable = trie.alloc_token_set();
        for (id, _) in (0..size).zip(&words).filter(|(_, word)| !word.is_empty()) {
            usable.allow_token(id);
        }
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(CompileError::library)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Vocabulary { factory, usable: Arc::new(usable) })
    }
}

/// The bytes of a token; none for one that never stands in a text.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let Some(spelling) = tokenizer.token(id) else { return Vec::new() };
    if tokenizer.is_control(id) {
        // The marker keeps a control token apart from a text that spells it.
        return [&[TokTrie::SPECIAL_TOKEN_MARKER], spelling.as_bytes()].concat();
    }
    let bytes = match tokenizer.token_bytes(id) {
        Some(bytes) => bytes.to_vec(),
        None => piece(&spelling),
    };
    let is_text = bytes.len() <= LONGEST_TOKEN && bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER);
    if is_text { bytes } else { Vec::new() }
}

/// A piece of a vocabulary that writes a space as U+2581, and a byte that is no character as `<0xNN>`.
fn piece(spelling: &str) -> Vec<u8> {
    let byte = spelling.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|digits| digits.len() == 2);
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => spelling.replace('\u{2581}', " ").into_bytes(),
    }
}
