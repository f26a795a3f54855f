//! Control tokens: finding their spellings in a text, and breaking them.

use std::collections::{BTreeMap, BTreeSet};

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::AddedToken;

use super::TokenizerError;

/// The control tokens of one vocabulary.
pub(super) struct ControlTokens {
    tokens: Vec<(u32, AddedToken)>,
    by_id: BTreeMap<u32, usize>,
    /// Whole spellings, the longest where several begin.
    whole: AhoCorasick,
    /// Every spelling, overlapping ones too.
    every: AhoCorasick,
}

/// A control token in a text, with the blank space that it takes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub id: u32,
    pub start: usize,
    pub end: usize,
}

impl ControlTokens {
    pub(super) fn of(encoder: &tokenizers::Tokenizer) -> Result<ControlTokens, TokenizerError> {
        let mut tokens: Vec<(u32, AddedToken)> = encoder
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special && !token.content.is_empty())
            .collect();
        tokens.sort_by_key(|(id, _)| *id);
        let automaton = |kind| {
            AhoCorasick::builder()
                .match_kind(kind)
                .build(tokens.iter().map(|(_, token)| &token.content))
                .map_err(|error| TokenizerError::Rules(error.to_string()))
        };
        Ok(ControlTokens {
            whole: automaton(MatchKind::LeftmostLongest)?,
            every: automaton(MatchKind::Standard)?,
            by_id: tokens.iter().enumerate().map(|(index, (id, _))| (*id, index)).collect(),
            tokens,
        })
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        self.tokens.iter().map(|(id, token)| (*id, token.content.as_str()))
    }

    /// The control tokens in `text` from left to right, without overlaps. One whose spelling is a single character counts
    /// only when no marker follows it.
    pub(super) fn find(&self, text: &str, marker: Option<char>) -> Vec<Found> {
        let mut found = Vec::new();
        let mut free = 0;
        for spelling in self.whole.find_iter(text) {
            let (id, token) = &self.tokens[spelling.pattern().as_usize()];
            let (before, after) = (&text[..spelling.start()], &text[spelling.end()..]);
            if spelling.start() < free
                || marker.is_some_and(|marker| after.starts_with(marker) && is_one_character(spelling_of(token)))
                || (token.single_word && (before.ends_with(is_word) || after.starts_with(is_word)))
            {
                continue;
            }
            let start = if token.lstrip { before.trim_end().len().max(free) } else { spelling.start() };
            let end = if token.rstrip { text.len() - after.trim_start().len() } else { spelling.end() };
            found.push(Found { id: *id, start, end });
            free = end;
        }
        found
    }

    /// Puts the marker after the first character of every spelling, and at an end of the text that could be completed to
    /// a spelling by what a template puts beside it.
    pub(super) fn mark(&self, text: &str, marker: char) -> String {
        let mut places: BTreeSet<usize> = self
            .every
            .find_overlapping_iter(text)
            .map(|spelling| spelling.start() + first_character(&text[spelling.start()..]))
            .collect();
        if self.iter().any(|(_, spelling)| parts(spelling).any(|at| text.starts_with(&spelling[at..]))) {
            places.insert(0);
        }
        if self.iter().any(|(_, spelling)| parts(spelling).any(|at| text.ends_with(&spelling[..at]))) {
            places.insert(text.len());
        }
        let mut marked = String::with_capacity(text.len() + places.len() * marker.len_utf8());
        let mut start = 0;
        for place in places {
            marked.push_str(&text[start..place]);
            marked.push(marker);
            start = place;
        }
        marked.push_str(&text[start..]);
        marked
    }
}

fn spelling_of(token: &AddedToken) -> &str {
    &token.content
}

fn is_one_character(text: &str) -> bool {
    first_character(text) == text.len()
}

/// Bytes of the first character.
fn first_character(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

/// The places inside a spelling where it can be cut in two.
fn parts(spelling: &str) -> impl Iterator<Item = usize> {
    spelling.char_indices().map(|(at, _)| at).skip(1)
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}
