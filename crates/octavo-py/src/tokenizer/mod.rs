//! Text to token ids and back.
//!
//! A control token (`<|im_end|>` and its like) is an atom only where the caller says so. Text from outside is encoded as
//! [`ControlText::Ordinary`], in which the spelling of a control token is a piece of text like any other. A chat prompt
//! is both at once: the template's control tokens are atoms, those spelled in a message are not. For that, every
//! spelling in a message is broken with a marker ([`Tokenizer::mark`]) before the template is rendered, and
//! [`Tokenizer::encode_marked`] takes whole spellings for atoms and the marker out of everything else.

mod control;
mod error;
mod file;
mod gguf;
mod guard;
mod pieces;

use std::path::Path;

use tokenizers::{Encoding, PreTokenizerWrapper, Token, pre_tokenizers::metaspace::PrependScheme};

pub use error::TokenizerError;

use control::ControlTokens;
use guard::{guarded, unpanicked};
use pieces::Pieces;

/// How the spelling of a control token is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlText {
    /// As text like any other.
    Ordinary,
    /// As the control token.
    Atomic,
}

/// Whether a text gets the tokens that the tokenizer puts around a whole one, such as BOS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edges {
    /// Nothing is added.
    Bare,
    /// What the tokenizer asks for is added.
    Added,
}

/// What decoding does with control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlTokensIn {
    /// They are spelled out.
    Kept,
    /// They give no text.
    Skipped,
}

/// Ids may have gaps, but tables go up to the largest: it must stay below this, or below a few times their number.
const MOST_IDS: usize = 1 << 20;
const IDS_FOR_EACH_TOKEN: usize = 4;

/// Of each kind of character, so that a fault in the file shows when it is loaded.
const TRIAL: &str = "Trial 1, \u{e9}\u{65e5}\u{1f600}\n";

/// A tokenizer; every method may be called from several threads at once.
pub struct Tokenizer {
    /// Control tokens are ordinary text to it.
    encoder: tokenizers::Tokenizer,
    /// For text that does not begin a prompt, where the encoder would put a space before any first word.
    continuation: Option<tokenizers::Tokenizer>,
    control: ControlTokens,
    pieces: Pieces,
    /// BOS, when the vocabulary asks for it and not the encoder's own post-processor.
    leading: Vec<u32>,
    /// EOS, likewise.
    trailing: Vec<u32>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// A file that cannot be read, or that is no tokenizer.
    pub fn from_file(path: &Path) -> Result<Tokenizer, TokenizerError> {
        let bytes = std::fs::read(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
        guarded(|| tokenizers::Tokenizer::from_bytes(&bytes)).and_then(Tokenizer::new).map_err(|error| match error {
            TokenizerError::Rules(reason) => TokenizerError::Format { path: path.to_owned(), reason },
            other => other,
        })
    }

    fn new(mut encoder: tokenizers::Tokenizer) -> Result<Tokenizer, TokenizerError> {
        // A length cut or filled in the file would silently change prompts.
        encoder.with_truncation(None).map_err(TokenizerError::library)?;
        encoder.with_padding(None);
        encoder.set_encode_special_tokens(true);
        check_ids(&encoder)?;
        let tokenizer = Tokenizer {
            continuation: continuation(&encoder),
            control: ControlTokens::of(&encoder)?,
            pieces: Pieces::of(&encoder),
            encoder,
            leading: Vec::new(),
            trailing: Vec::new(),
        };
        tokenizer.try_out()?;
        Ok(tokenizer)
    }

    /// Does once what requests will do. A vocabulary need not have the trial's characters, so encoding may refuse them.
    fn try_out(&self) -> Result<(), TokenizerError> {
        let mut ids = Vec::new();
        for encoder in [Some(&self.encoder), self.continuation.as_ref()].into_iter().flatten() {
            if let Ok(encoding) = unpanicked(|| encoder.encode_fast(TRIAL, false))? {
                ids = encoding.get_ids().to_vec();
            }
        }
        ids = self.add_edges(ids.into_iter().map(|id| Token::new(id, String::new(), (0, 0))).collect())?;
        unpanicked(|| self.encoder.decode(&ids, false)).map(|_| ())
    }

    /// The ids of `text`.
    ///
    /// # Errors
    /// The tokenizer's own rules can fail on a text.
    pub fn encode(&self, text: &str, edges: Edges, control: ControlText) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Vec::new();
        match control {
            ControlText::Ordinary => self.encode_segment(text, 0, &mut tokens)?,
            ControlText::Atomic => self.encode_split(text, None, &mut tokens)?,
        }
        match edges {
            Edges::Bare => Ok(tokens.into_iter().map(|token| token.id).collect()),
            Edges::Added => self.add_edges(tokens),
        }
    }

    /// `text` with `marker` in or beside everything that could become a control token once a template has put other
    /// text around it. Taking the markers out gives `text` again.
    pub fn mark(&self, text: &str, marker: char) -> String {
        self.control.mark(text, marker)
    }

    /// The ids of a rendered template: whole spellings of control tokens are atoms, markers are taken out.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_marked(&self, text: &str, marker: char) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Vec::new();
        self.encode_split(text, Some(marker), &mut tokens)?;
        Ok(tokens.into_iter().map(|token| token.id).collect())
    }

    /// The text of `ids`. Bytes that are no UTF-8 become U+FFFD; an id without a token gives nothing, and so does
    /// whatever [`Tokenizer::try_decode`] cannot read.
    pub fn decode(&self, ids: &[u32], control: ControlTokensIn) -> String {
        self.try_decode(ids, control).unwrap_or_default()
    }

    /// As [`Tokenizer::decode`].
    ///
    /// # Errors
    /// Rules that fail on these tokens; a vocabulary with bytes of its own has none.
    pub fn try_decode(&self, ids: &[u32], control: ControlTokensIn) -> Result<String, TokenizerError> {
        match &self.pieces {
            Pieces::Bytes(table) => {
                let mut bytes = Vec::new();
                for &id in ids.iter().filter(|&&id| control == ControlTokensIn::Kept || !self.is_control(id)) {
                    bytes.extend_from_slice(table.bytes(id));
                }
                let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                Ok(String::from_utf8(bytes).unwrap_or_else(|error| lossy(error.as_bytes())))
            }
            Pieces::Rules => guarded(|| self.encoder.decode(ids, control == ControlTokensIn::Skipped)),
        }
    }

    /// The bytes that a token stands for; `None` when only a whole text can be decoded.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        match &self.pieces {
            Pieces::Bytes(table) => Some(table.bytes(id)),
            Pieces::Rules => None,
        }
    }

    /// True for a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.control.contains(id)
    }

    /// The control tokens, by id.
    pub fn control_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.control.iter()
    }

    /// A token as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.encoder.id_to_token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.encoder.token_to_id(token)
    }

    /// Tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.encoder.get_vocab_size(true)
    }

    /// Every id of a token is below this; the model's vocabulary may go on with padding.
    pub fn id_bound(&self) -> usize {
        self.encoder.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// Splits `text` at whole control tokens and encodes what lies between them as ordinary text.
    fn encode_split(&self, text: &str, marker: Option<char>, tokens: &mut Vec<Token>) -> Result<(), TokenizerError> {
        let mut start = 0;
        for found in self.control.find(text, marker) {
            self.encode_between(&text[start..found.start], marker, start, tokens)?;
            tokens.push(Token::new(found.id, text[found.start..found.end].to_owned(), (0, 0)));
            start = found.end;
        }
        self.encode_between(&text[start..], marker, start, tokens)
    }

    fn encode_between(
        &self,
        segment: &str,
        marker: Option<char>,
        start: usize,
        tokens: &mut Vec<Token>,
    ) -> Result<(), TokenizerError> {
        match marker {
            Some(marker) if segment.contains(marker) => {
                self.encode_segment(&segment.replace(marker, ""), start, tokens)
            }
            _ => self.encode_segment(segment, start, tokens),
        }
    }

    /// Appends the tokens of a segment that begins at byte `start` of its text.
    fn encode_segment(&self, segment: &str, start: usize, tokens: &mut Vec<Token>) -> Result<(), TokenizerError> {
        if segment.is_empty() {
            return Ok(());
        }
        let encoder = match &self.continuation {
            Some(continuation) if start > 0 => continuation,
            _ => &self.encoder,
        };
        let encoding = guarded(|| encoder.encode_fast(segment, false))?;
        tokens.extend(encoding.get_ids().iter().map(|&id| Token::new(id, String::new(), (0, 0))));
        Ok(())
    }

    fn add_edges(&self, tokens: Vec<Token>) -> Result<Vec<u32>, TokenizerError> {
        let encoding = guarded(|| self.encoder.post_process(Encoding::from_tokens(tokens, 0), None, true))?;
        Ok([&self.leading, encoding.get_ids(), &self.trailing].concat())
    }
}

/// A copy of the encoder for text inside a prompt, if the encoder treats the first word of a prompt specially.
fn continuation(encoder: &tokenizers::Tokenizer) -> Option<tokenizers::Tokenizer> {
    let Some(PreTokenizerWrapper::Metaspace(metaspace)) = encoder.get_pre_tokenizer() else { return None };
    if metaspace.get_prepend_scheme() != PrependScheme::First {
        return None;
    }
    let mut inside = metaspace.clone();
    inside.set_prepend_scheme(PrependScheme::Never);
    let mut copy = encoder.clone();
    copy.with_pre_tokenizer(Some(inside));
    Some(copy)
}

fn check_ids(encoder: &tokenizers::Tokenizer) -> Result<(), TokenizerError> {
    let vocabulary = encoder.get_vocab(true);
    let bound = vocabulary.len().saturating_mul(IDS_FOR_EACH_TOKEN).max(MOST_IDS);
    match vocabulary.iter().max_by_key(|(_, id)| **id) {
        Some((token, &id)) if id as usize >= bound => {
            Err(TokenizerError::Rules(format!("token {token:?}: found id {id}, expected an id below {bound}")))
        }
        _ => Ok(()),
    }
}
