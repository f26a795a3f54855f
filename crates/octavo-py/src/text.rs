//! Token ids to text as they arrive.
//!
//! Invariant: an output's pieces, joined, are what its tokens add to the text of its prompt. No piece ends inside a
//! character, and only the bytes of a character that is not complete are held back, at most three. A character that the
//! prompt begins comes whole if the output completes it; if not, what is broken is the prompt's and gives nothing.
//!
//! Without a prompt that is what [`Tokenizer::decode`] gives for all ids at once. Where a vocabulary has no bytes of
//! its own for each token, it holds for valid UTF-8: such a decoder can turn a character that was complete into
//! replacements when a stray byte follows, and what is given out cannot be taken back.

use crate::tokenizer::{ControlTokensIn, Tokenizer};

/// Tokens that a vocabulary without bytes of its own may need to complete a character; more than this is no character.
const LONGEST_CHARACTER: usize = 8;

/// Tokens in whose text the place of the next one shows, if any do.
const LONGEST_CONTEXT: usize = 2 * LONGEST_CHARACTER;

/// Bytes of a character that is not complete, at most; and tokens, where each is a byte.
const LONGEST_BEGINNING: usize = 3;

/// The text of one sequence.
#[derive(Clone)]
pub struct TextStream {
    control: ControlTokensIn,
    state: State,
}

#[derive(Clone)]
enum State {
    /// Tokens have bytes of their own.
    Bytes(Utf8Stream),
    /// A text is decoded again from a place where it was whole.
    Window(Window),
}

impl TextStream {
    /// The text that follows a prompt.
    pub fn after(tokenizer: &Tokenizer, prompt: &[u32], control: ControlTokensIn) -> TextStream {
        let is_visible = |id: &&u32| control == ControlTokensIn::Kept || !tokenizer.is_control(**id);
        let visible = prompt.iter().rev().filter(is_visible).copied();
        let state = match tokenizer.token_bytes(0) {
            Some(_) => State::Bytes(Utf8Stream::after(tokenizer, visible)),
            None => State::Window(Window::after(tokenizer, visible)),
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
#[derive(Clone, Default)]
struct Utf8Stream {
    /// The beginning of a character.
    held: Vec<u8>,
    /// Whether that character begins in the prompt.
    is_prompts: bool,
}

impl Utf8Stream {
    /// `visible` are the prompt's tokens, the last one first.
    fn after(tokenizer: &Tokenizer, visible: impl Iterator<Item = u32>) -> Utf8Stream {
        let bytes = visible.flat_map(|id| tokenizer.token_bytes(id).unwrap_or_default().iter().rev());
        let mut end: Vec<u8> = bytes.take(LONGEST_BEGINNING).copied().collect();
        end.reverse();
        let is_beginning = |start: &usize| match std::str::from_utf8(&end[*start..]) {
            Ok(_) => false,
            Err(error) => error.valid_up_to() == 0 && error.error_len().is_none(),
        };
        match (0..end.len()).find(is_beginning) {
            Some(start) => Utf8Stream { held: end.split_off(start), is_prompts: true },
            None => Utf8Stream::default(),
        }
    }

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
                    self.is_prompts = false;
                    break;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = after;
            self.is_prompts &= valid.is_empty();
            match error.error_len() {
                Some(invalid) => {
                    if !std::mem::take(&mut self.is_prompts) {
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                    rest = &rest[invalid..];
                }
                None => break,
            }
        }
        let done = self.held.len() - rest.len();
        self.held.drain(..done);
    }

    fn finish(&mut self, text: &mut String) {
        if !self.held.is_empty() && !self.is_prompts {
            text.push(char::REPLACEMENT_CHARACTER);
        }
        *self = Utf8Stream::default();
    }
}

/// The tokens whose text may still change, behind some whose text is known.
#[derive(Clone, Default)]
struct Window {
    ids: Vec<u32>,
    /// The text of the first `known` ids is not to come; they are there because a token's text depends on those before.
    known: usize,
    known_text: String,
    /// How many ids behind them are the prompt's, which ends inside a character with them.
    prompts: usize,
}

impl Window {
    /// `visible` are the prompt's tokens, the last one first.
    fn after(tokenizer: &Tokenizer, visible: impl Iterator<Item = u32>) -> Window {
        let mut ids: Vec<u32> = visible.take(LONGEST_CONTEXT).collect();
        ids.reverse();
        let text = |start: usize, end: usize| tokenizer.decode(&ids[start..end], ControlTokensIn::Kept);
        for end in (1..=ids.len()).rev() {
            let mut contexts = (0..end).rev().map(|start| (start, text(start, end)));
            if let Some((start, known_text)) = contexts.find(|(_, text)| is_whole(text)) {
                let prompts = beginning(&ids[end..]);
                let (known, num_prompts) = (end - start, prompts.len());
                return Window { ids: [&ids[start..end], prompts].concat(), known, known_text, prompts: num_prompts };
            }
        }
        // Nothing is known but that the first of them may have no text: a space that its place takes away.
        let known = (0..=ids.len()).rev().find(|end| text(0, *end).is_empty()).unwrap_or(0);
        let prompts = beginning(&ids[known..]);
        let num_prompts = prompts.len();
        Window { ids: [&ids[..known], prompts].concat(), known, prompts: num_prompts, ..Window::default() }
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        self.ids.push(id);
        let mut whole = tokenizer.decode(&self.ids, ControlTokensIn::Kept);
        if self.prompts > 0 && is_open(&whole) {
            // Unless the output goes well with the prompt's part of a character, it may do so without.
            let ids = [&self.ids[..self.known], &self.ids[self.old()..]].concat();
            let without = tokenizer.decode(&ids, ControlTokensIn::Kept);
            if !is_open(&without) {
                (self.ids, self.prompts, whole) = (ids, 0, without);
            }
        }
        if !is_open(&whole) || self.ids.len() - self.old() > LONGEST_CHARACTER {
            self.give_out(tokenizer, whole, text);
        }
    }

    fn finish(&mut self, tokenizer: &Tokenizer, text: &mut String) {
        if self.ids.len() > self.old() {
            let whole = tokenizer.decode(&self.ids, ControlTokensIn::Kept);
            self.give_out(tokenizer, whole, text);
        }
    }

    /// Ids that were there before those whose text is to come.
    fn old(&self) -> usize {
        self.known + self.prompts
    }

    fn give_out(&mut self, tokenizer: &Tokenizer, whole: String, text: &mut String) {
        let old = self.old();
        match whole.strip_prefix(self.known_text.as_str()) {
            Some(mut new) => {
                for _ in 0..self.prompts {
                    new = new.strip_prefix(char::REPLACEMENT_CHARACTER).unwrap_or(new);
                }
                text.push_str(new);
            }
            // What came out before cannot be taken back; only the new tokens count.
            None => text.push_str(&tokenizer.decode(&self.ids[old..], ControlTokensIn::Kept)),
        }
        if whole == self.known_text && is_whole(&whole) {
            self.ids.truncate(old);
            return;
        }
        let known_text = tokenizer.decode(&self.ids[old..], ControlTokensIn::Kept);
        if is_whole(&known_text) || self.ids.len() > LONGEST_CONTEXT {
            self.ids.drain(..old);
            self.known_text = known_text;
        } else {
            self.known_text = whole;
        }
        (self.known, self.prompts) = (self.ids.len(), 0);
    }
}

/// Whether the tokens of a text show how the next one is to be read: a word behind them keeps its space, and a byte
/// begins a character.
fn is_whole(text: &str) -> bool {
    !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER)
}

/// Tokens that a character may begin with; what is longer is broken for good.
fn beginning(ids: &[u32]) -> &[u32] {
    if ids.len() > LONGEST_BEGINNING { &[] } else { ids }
}

/// Whether a text may end inside a character.
fn is_open(text: &str) -> bool {
    text.ends_with(char::REPLACEMENT_CHARACTER)
}
