//! A tokenizer out of a GGUF file's metadata.

use ahash::AHashMap;
use octavo_model::GgufVocabulary;
use tokenizers::{
    AddedToken, DecoderWrapper, PreTokenizerWrapper,
    models::bpe::BPE,
    pre_tokenizers::{byte_level::ByteLevel, digits::Digits, sequence::Sequence},
};

use super::{Tokenizer, TokenizerError};

/// The kinds of pre-tokenizer that can be built.
const KNOWN_PRE: &[&str] = &["smollm"];

/// GGUF's number for a control token.
const CONTROL: i32 = 3;

/// GGUF's number for a token that is an atom in any text.
const USER_DEFINED: i32 = 4;

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes.
    ///
    /// # Errors
    /// A kind of vocabulary or of pre-tokenizer that is not known, or fields that contradict each other.
    pub fn from_vocabulary(vocabulary: &GgufVocabulary) -> Result<Tokenizer, TokenizerError> {
        if vocabulary.model != "gpt2" {
            return Err(fault("model", format!("{:?}", vocabulary.model), "\"gpt2\" (byte-level BPE)"));
        }
        let mut encoder = tokenizers::Tokenizer::new(model(vocabulary)?);
        encoder.with_pre_tokenizer(Some(pre_tokenizer(vocabulary)?));
        encoder.with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::default())));
        add_atoms(&mut encoder, vocabulary)?;
        let mut tokenizer = Tokenizer::new(encoder)?;
        if vocabulary.add_bos {
            tokenizer.leading.push(edge("bos_token_id", vocabulary.bos_token_id, vocabulary)?);
        }
        if vocabulary.add_eos {
            tokenizer.trailing.push(edge("eos_token_id", vocabulary.eos_token_id, vocabulary)?);
        }
        Ok(tokenizer)
    }
}

fn fault(field: &'static str, found: impl Into<String>, expected: impl Into<String>) -> TokenizerError {
    TokenizerError::Vocabulary { field, found: found.into(), expected: expected.into() }
}

fn model(vocabulary: &GgufVocabulary) -> Result<BPE, TokenizerError> {
    let mut ids = AHashMap::with_capacity(vocabulary.tokens.len());
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        let id = u32::try_from(id).map_err(|_| fault("tokens", "more than 2^32 of them", "ids of 32 bits"))?;
        if let Some(first) = ids.insert(token.clone(), id) {
            return Err(fault("tokens", format!("{token:?} at {first} and at {id}"), "each token once"));
        }
    }
    let merges = vocabulary.merges.iter().enumerate().map(|(index, merge)| match merge.split_once(' ') {
        Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
        None => Err(fault("merges", format!("{merge:?} at {index}"), "two tokens with a space between them")),
    });
    let merges = merges.collect::<Result<Vec<_>, _>>()?;
    BPE::builder()
        .vocab_and_merges(ids, merges)
        .build()
        .map_err(|reason| fault("merges", reason.to_string(), "pairs of tokens that join to a token"))
}

fn pre_tokenizer(vocabulary: &GgufVocabulary) -> Result<PreTokenizerWrapper, TokenizerError> {
    match vocabulary.pre.as_str() {
        // Each digit alone, then GPT-2's words.
        "smollm" => Ok(PreTokenizerWrapper::Sequence(Sequence::new(vec![
            PreTokenizerWrapper::Digits(Digits::new(true)),
            PreTokenizerWrapper::ByteLevel(ByteLevel::new(vocabulary.add_space_prefix, true, true)),
        ]))),
        other => Err(fault("pre", format!("{other:?}"), format!("one of {KNOWN_PRE:?}"))),
    }
}

fn add_atoms(encoder: &mut tokenizers::Tokenizer, vocabulary: &GgufVocabulary) -> Result<(), TokenizerError> {
    let (tokens, types) = (&vocabulary.tokens, &vocabulary.token_types);
    if !types.is_empty() && types.len() != tokens.len() {
        return Err(fault("token_type", format!("{} entries", types.len()), format!("{}, one a token", tokens.len())));
    }
    let of_type = |wanted: i32| {
        let tokens = tokens.iter().zip(types).filter(move |(_, found)| **found == wanted);
        tokens.map(move |(token, _)| AddedToken::from(token.as_str(), wanted == CONTROL).normalized(false))
    };
    encoder.add_special_tokens(&of_type(CONTROL).collect::<Vec<_>>());
    encoder.add_tokens(&of_type(USER_DEFINED).collect::<Vec<_>>());
    Ok(())
}

fn edge(field: &'static str, id: Option<u32>, vocabulary: &GgufVocabulary) -> Result<u32, TokenizerError> {
    match id {
        Some(id) if (id as usize) < vocabulary.tokens.len() => Ok(id),
        found => Err(fault(field, format!("{found:?}"), format!("an id below {}", vocabulary.tokens.len()))),
    }
}
