//! Token ids to text as they arrive.
//!
//! Invariant: the joined pieces are what [`Tokenizer::decode`] gives for all ids at once, and no piece ends inside a
//! character. Only the bytes of a character that is not complete are held back, at most three. Where a vocabulary has no
//! bytes of its own for each token, this holds for valid UTF-8: such a decoder can turn a character that was complete
//! into replacements when a stray byte follows, and what is given out cannot be taken back.

use crate::tokenizer::{ControlTokensIn, Tokenizer};

/// Tokens that a vocabulary without bytes of its own may need to complete a character; more than this is no character.
const LONGEST_CHARACTER: usize = 8;

/// The text of one sequence.
pub struct TextStream {
    control: ControlTokensIn,
    state: State,
}

enum State {
    /// Tokens have bytes of their own.
    Bytes(Utf8Stream),
    /// A text is decoded again from the last place that was whole.
    Window(Window),
}

impl TextStream {
    /// The empty text.
    pub fn new(tokenizer: &Tokenizer, control: ControlTokensIn) -> TextStream {
        let state = match tokenizer.token_bytes(0) {
            Some(_) => State::Bytes(Utf8Stream::default()),
            None => State::Window(Window::default()),
        };
        TextStream { control, state }
    }

    /// Appends to `text` what the next token completes.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        if self.control == ControlTokensIn::Skipped && tokenizer.is_control(id) {
            return;
        }
        match &mut self.state {
            State::Bytes(stream) => stream.push(tokenizer.token_bytes(id).unwrap_or_default(), text),
            State::Window(window) => window.push(tokenizer, id, text),
        }
    }

    /// Appends what is still held back: U+FFFD for a character that was never completed.
    pub fn finish(&mut self, tokenizer: &Tokenizer, text: &mut String) {
        match &mut self.state {
            State::Bytes(stream) => stream.finish(text),
            State::Window(window) => window.finish(tokenizer, text),
        }
    }
}

/// Bytes to text, as `String::from_utf8_lossy` would do it with all of them at once.
#[derive(Default)]
struct Utf8Stream {
    /// The beginning of a character.
    held: Vec<u8>,
}

impl Utf8Stream {
    fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.held.is_empty()
            && let Ok(whole) = std::str::from_utf8(bytes)
        {
            text.push_str(whole);
            return;
        }
        self.held.extend_from_slice(bytes);
        let mut rest = self.held.as_slice();
        while !rest.is_empty() {
            let error = match std::str::from_utf8(rest) {
                Ok(whole) => {
                    text.push_str(whole);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = after;
            match error.error_len() {
                Some(invalid) => {
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[invalid..];
                }
                None => break,
            }
        }
        let done = self.held.len() - rest.len();
        self.held.drain(..done);
    }

    fn finish(&mut self, text: &mut String) {
        if !self.held.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.held.clear();
        }
    }
}

/// The tokens whose text may still change, behind some whose text is known.
#[derive(Default)]
struct Window {
    ids: Vec<u32>,
    /// The first `known` ids are given out already; they are there because a token's text can depend on the one before.
    known: usize,
}

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        self.ids.push(id);
        let whole = tokenizer.decode(&self.ids, ControlTokensIn::Kept);
        if !whole.ends_with(char::REPLACEMENT_CHARACTER) || self.ids.len() - self.known > LONGEST_CHARACTER {
            self.give_out(tokenizer, &whole, text);
        }
    }

    fn finish(&mut self, tokenizer: &Tokenizer, text: &mut String) {
        if self.ids.len() > self.known {
            let whole = tokenizer.decode(&self.ids, ControlTokensIn::Kept);
            self.give_out(tokenizer, &whole, text);
        }
    }

    fn give_out(&mut self, tokenizer: &Tokenizer, whole: &str, text: &mut String) {
        let known = tokenizer.decode(&self.ids[..self.known], ControlTokensIn::Kept);
        match whole.strip_prefix(known.as_str()) {
            Some(new) => text.push_str(new),
            // What came out before cannot be taken back; only the new tokens count.
            None => text.push_str(&tokenizer.decode(&self.ids[self.known..], ControlTokensIn::Kept)),
        }
        self.ids.drain(..self.known);
        self.known = self.ids.len();
    }
}
