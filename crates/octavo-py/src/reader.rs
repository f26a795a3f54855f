//! From what the engine gives to what callers see of it: text, and where a stop string ends it.
//!
//! The engine knows no text. So a stop string is found here, the output ends here, and the engine is told; whatever it
//! computed meanwhile is never seen.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use octavo_engine::{FinishReason, Output};

use crate::{
    stop::{StopSearch, StopStrings, Stops},
    text::TextStream,
    tokenizer::{ControlTokensIn, Tokenizer},
};

/// What a caller wants to read.
pub struct ReadingRules {
    /// What becomes of control tokens; `None` if no text is wanted.
    pub control: Option<ControlTokensIn>,
    /// What ends an output; needs text.
    pub stop_strings: Arc<StopStrings>,
    /// A stop string that these first tokens of an output complete is text like any other.
    pub min_tokens: usize,
    /// The caller's own stop tokens.
    pub stop_token_ids: Vec<u32>,
    /// How many outputs there will be; read only with stop strings.
    pub num_choices: u32,
}

/// What has to be remembered of a request to read its outputs.
pub struct Reader {
    rules: ReadingRules,
    /// What every choice begins with; `None` if no text is wanted.
    beginning: Option<Choice>,
    /// Those that have begun and not ended.
    choices: BTreeMap<u32, Choice>,
    ended: BTreeSet<u32>,
}

/// One output as far as it has come.
#[derive(Clone)]
struct Choice {
    stream: TextStream,
    search: StopSearch,
    num_tokens: usize,
}

/// What one output of the engine gives to read.
#[derive(Debug, PartialEq)]
pub struct Reading {
    /// The text that became complete.
    pub text: String,
    /// Why the choice ended; `None` while it goes on.
    pub finish_reason: Option<FinishReason>,
    /// What of the caller's own stops ended it.
    pub stop_reason: Option<StopReason>,
    /// Whether nothing more comes for the request.
    pub last: bool,
    /// Whether the choice has ended here and the engine does not know.
    pub is_news: bool,
}

/// What of a caller's own stops ended a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of `stop`.
    Text(String),
}

impl Reader {
    /// A reader of what follows `prompt`. Without a tokenizer there is no text.
    pub fn new(rules: ReadingRules, tokenizer: Option<&Tokenizer>, prompt: &[u32]) -> Reader {
        let beginning = rules.control.zip(tokenizer).map(|(control, tokenizer)| Choice {
            stream: TextStream::after(tokenizer, prompt, control),
            search: StopSearch::default(),
            num_tokens: 0,
        });
        Reader { rules, beginning, choices: BTreeMap::new(), ended: BTreeSet::new() }
    }

    /// Reads the next output, and cuts its tokens behind the one that completes a stop string. `None` if the choice has
    /// ended before.
    pub fn read(&mut self, tokenizer: Option<&Tokenizer>, output: &mut Output) -> Option<Reading> {
        if self.ended.contains(&output.choice) {
            return None;
        }
        let mut text = String::new();
        let found = tokenizer.and_then(|tokenizer| self.take_in(tokenizer, output, &mut text));
        let by_engine = output.finish;
        if found.is_some() || by_engine.is_some() {
            self.choices.remove(&output.choice);
            self.ended.insert(output.choice);
        }
        // The engine may not know of all that have ended.
        let all_ended = !self.rules.stop_strings.is_empty() && self.ended.len() == self.rules.num_choices as usize;
        let own_token = |token: &u32| self.rules.stop_token_ids.contains(token);
        let stop_token = by_engine.and_then(|finish| finish.stop_token).filter(own_token);
        Some(Reading {
            text,
            finish_reason: if found.is_some() {
                Some(FinishReason::Stop)
            } else {
                by_engine.map(|finish| finish.reason)
            },
            stop_reason: match found {
                Some(index) => Some(StopReason::Text(self.rules.stop_strings.string(index).to_owned())),
                None => stop_token.map(StopReason::Token),
            },
            last: output.last || all_ended,
            is_news: found.is_some() && by_engine.is_none(),
        })
    }

    /// Appends the text that an output completes, and gives the stop string that ends it. A stop token has no text.
    fn take_in(&mut self, tokenizer: &Tokenizer, output: &mut Output, text: &mut String) -> Option<usize> {
        let beginning = self.beginning.as_ref()?;
        let choice = self.choices.entry(output.choice).or_insert_with(|| beginning.clone());
        let has_stopped = output.finish.is_some_and(|finish| finish.reason == FinishReason::Stop);
        let num_readable = output.tokens.len() - usize::from(has_stopped && !output.tokens.is_empty());
        let mut piece = String::new();
        for index in 0..num_readable {
            piece.clear();
            choice.stream.push(tokenizer, output.tokens[index], &mut piece);
            let stops = if choice.num_tokens < self.rules.min_tokens { Stops::Pass } else { Stops::Count };
            choice.num_tokens += 1;
            let found = choice.search.push(&self.rules.stop_strings, &piece, stops, text);
            if found.is_some() {
                output.tokens.truncate(index + 1);
                output.logprobs.truncate(index + 1);
                return found;
            }
        }
        if output.finish.is_some() {
            choice.search.finish(text);
            choice.stream.finish(tokenizer, text);
        }
        None
    }
}
