//! One step as flat arrays: what goes into a backend and what comes out.

use std::{ops::Range, sync::Arc};

use crate::{BackendError, KvGeometry, StepLimits, TokenId};

/// The tokens of one step, span after span, and where their KV lives.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepInputs {
    /// Tokens to compute, `[rows]`.
    pub tokens: Vec<TokenId>,
    /// One span a sequence; together they cover all rows in order.
    pub spans: Vec<SpanInput>,
    /// One entry a KV group of [`crate::KvGeometry`].
    pub groups: Vec<GroupInputs>,
    /// The draws, ascending by row. A row may be drawn from several times, by requests for several choices.
    pub samples: Vec<SampleRow>,
    /// Tokens that are known already and whose log-probability is wanted, ascending by row.
    pub scores: Vec<ScoreRow>,
    /// Rows whose hidden state, after the last norm, is wanted, ascending.
    pub hidden: Vec<usize>,
}

/// Consecutive positions of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanInput {
    /// Its first row in [`StepInputs::tokens`].
    pub first_row: usize,
    /// Number of rows.
    pub len: usize,
    /// The absolute position of its first row; positions `0..start` are already in the cache.
    pub start: usize,
}

/// The block tables of one KV group, and the blocks to copy before the step reads or writes any.
///
/// Tables may share blocks that no span of the step writes to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupInputs {
    /// The spans' block tables one after another: position `p` lives in block `table[p / block_size]`, slot
    /// `p % block_size`. An entry that lies wholly before a window may hold any value and is not read.
    pub tables: Vec<u32>,
    /// Span `i` owns `tables[table_starts[i]..table_starts[i + 1]]`.
    pub table_starts: Vec<usize>,
    /// Whole-block copies, done first and in any order: no block is the destination of two, or of one and the source of
    /// another.
    pub copies: Vec<BlockCopy>,
}

/// One block's content goes to another block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Source block.
    pub from: u32,
    /// Destination block.
    pub to: u32,
}

/// How to draw the token that follows one row (the definition is in [`crate::sampling`]).
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// The row whose logits are used.
    pub row: usize,
    /// The absolute index, in prompt and output, of the token that is drawn.
    pub position: u32,
    /// Which of a request's outputs this is; output 0 equals the only output of a request with one.
    pub choice: u32,
    /// The request's seed.
    pub seed: u64,
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k largest; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this.
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the likeliest.
    pub min_p: f32,
    /// Also report the token's log-probability and those of this many most likely tokens.
    pub logprobs: Option<u32>,
    /// What is done to the logits first; nothing for most rows.
    pub rules: Option<Box<LogitRules>>,
}

/// What is done to a row's logits before anything else, in this order: bias, masks, penalties.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogitRules {
    /// Added to the logits of these tokens, ascending by token, none twice.
    pub bias: Arc<[(TokenId, f32)]>,
    /// The tokens that may be drawn; all if there is none.
    pub allowed: Option<Arc<TokenMask>>,
    /// Tokens that are not drawn.
    pub banned: Vec<TokenId>,
    /// What tokens lose that are there already.
    pub penalties: Option<Penalties>,
}

/// What tokens lose that are there already: a seen token's logit is divided by `repetition` if it is positive and
/// multiplied by it otherwise; then `frequency` times its count in the output is subtracted, and `presence` if the
/// output has it at all.
#[derive(Debug, Clone, PartialEq)]
pub struct Penalties {
    /// Acts on the tokens of prompt and output; 1 does nothing.
    pub repetition: f32,
    /// Acts on the tokens of the output; 0 does nothing.
    pub frequency: f32,
    /// Acts on the tokens of the output; 0 does nothing.
    pub presence: f32,
    /// The tokens of prompt and output, none twice, in any order.
    pub seen: Arc<Vec<SeenToken>>,
}

/// A token that a sequence has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenToken {
    /// Its id.
    pub token: TokenId,
    /// How often the output has it; 0 for one that is only in the prompt.
    pub in_output: u32,
}

/// A set of tokens: bit `t % 32` of word `t / 32` stands for token `t`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

/// A token that is known, whose log-probability after one row is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreRow {
    /// The row whose logits are used, as they are.
    pub row: usize,
    /// The token that follows it.
    pub token: TokenId,
    /// Also report this many most likely tokens.
    pub top: u32,
}

/// What a step brings back: one entry for each of [`StepInputs::samples`], in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepResult {
    /// A row that cannot be drawn from fails alone.
    pub sampled: Vec<Result<Sampled, SampleError>>,
    /// One entry for each of [`StepInputs::scores`], in order.
    pub scores: Vec<Result<TokenLogprobs, SampleError>>,
    /// The hidden states asked for by [`StepInputs::hidden`], `[rows, hidden_size]`.
    pub hidden: Vec<f32>,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: TokenId,
    /// Present when asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// A log-probability is never less than this, so that every format of numbers can carry it.
pub const LEAST_LOGPROB: f32 = -9999.0;

/// Natural log-probabilities of the row, after [`LogitRules`] and before temperature and filters; none is below
/// [`LEAST_LOGPROB`].
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the drawn token.
    pub logprob: f32,
    /// Place of the drawn token among all, 1 the likeliest; tokens of equal log-probability share the better place.
    pub rank: u32,
    /// The likeliest tokens, descending, equal ones by id.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a row could not be drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN or positive infinity, or all are negative infinity.
    #[error("the logits of this row are not finite")]
    NotFinite,
    /// The rules leave no token.
    #[error("no token is allowed after this row")]
    NothingAllowed,
}

impl StepInputs {
    /// Checks everything that a backend would otherwise index by: rows, tokens, spans, tables, copies and samples.
    ///
    /// # Errors
    /// [`BackendError::Inputs`] naming the first field that is out of bounds.
    pub fn check(&self, vocab_size: usize, geometry: &KvGeometry, limits: &StepLimits) -> Result<(), BackendError> {
        at_most("rows", self.tokens.len(), limits.max_rows)?;
        at_most("spans", self.spans.len(), limits.max_spans)?;
        for &token in &self.tokens {
            below("token", token as usize, vocab_size)?;
        }
        let mut row = 0;
        for span in &self.spans {
            equal("first row of a span", span.first_row, row)?;
            at_most("positions of a span", span.start.saturating_add(span.len), limits.max_positions)?;
            row += span.len;
        }
        equal("rows of all spans", row, self.tokens.len())?;
        equal("KV groups", self.groups.len(), limits.num_blocks.len())?;
        for ((group, shape), &num_blocks) in self.groups.iter().zip(&geometry.groups).zip(&limits.num_blocks) {
            group.check_tables(&self.spans, shape.window, limits.block_size, num_blocks)?;
            group.check_copies(num_blocks)?;
        }
        self.check_rows("sampled row", self.samples.iter().map(|sample| sample.row))?;
        self.check_rows("scored row", self.scores.iter().map(|score| score.row))?;
        self.check_rows("row whose hidden state is wanted", self.hidden.iter().copied())?;
        for score in &self.scores {
            below("scored token", score.token as usize, vocab_size)?;
        }
        for rules in self.samples.iter().filter_map(|sample| sample.rules.as_deref()) {
            rules.check(vocab_size)?;
        }
        Ok(())
    }

    fn check_rows(&self, what: &'static str, rows: impl Iterator<Item = usize>) -> Result<(), BackendError> {
        let mut next = 0;
        for row in rows {
            below(what, row, self.tokens.len())?;
            at_most("order of rows", next, row)?;
            next = row;
        }
        Ok(())
    }
}

impl LogitRules {
    fn check(&self, vocab_size: usize) -> Result<(), BackendError> {
        let biased = self.bias.iter().map(|&(token, _)| token);
        let seen = self.penalties.iter().flat_map(|penalties| penalties.seen.iter().map(|seen| seen.token));
        for token in biased.chain(self.banned.iter().copied()).chain(seen) {
            below("token of a rule", token as usize, vocab_size)?;
        }
        match &self.allowed {
            Some(allowed) => equal("words of a token mask", allowed.words.len(), vocab_size.div_ceil(32)),
            None => Ok(()),
        }
    }
}

impl TokenMask {
    /// The empty set of tokens below `vocab_size`.
    pub fn none(vocab_size: usize) -> TokenMask {
        TokenMask { words: vec![0; vocab_size.div_ceil(32)] }
    }

    /// Adds a token.
    ///
    /// # Panics
    /// If the set is made for a smaller vocabulary.
    pub fn insert(&mut self, token: TokenId) {
        self.words[token as usize / 32] |= 1 << (token % 32);
    }

    /// Takes a token out.
    ///
    /// # Panics
    /// If the set is made for a smaller vocabulary.
    pub fn remove(&mut self, token: TokenId) {
        self.words[token as usize / 32] &= !(1 << (token % 32));
    }

    /// Whether a token is in the set.
    pub fn contains(&self, token: TokenId) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Whether no token is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Keeps what `other` has too.
    pub fn intersect(&mut self, other: &TokenMask) {
        let others = other.words.iter().chain(std::iter::repeat(&0));
        self.words.iter_mut().zip(others).for_each(|(word, other)| *word &= other);
    }

    /// The bits.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The bits, to write; those beyond the vocabulary stay 0.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }
}

impl SpanInput {
    /// The entries of the span's block table that a step reads or writes.
    ///
    /// Entries wholly before the window of the span's first row are left out: those blocks may have been given away.
    pub fn needed_entries(&self, window: Option<usize>, block_size: usize) -> Range<usize> {
        let first = window.map_or(0, |window| (self.start + 1).saturating_sub(window));
        first / block_size..(self.start + self.len).div_ceil(block_size)
    }
}

impl GroupInputs {
    /// The block table of span `index`.
    pub fn table(&self, index: usize) -> &[u32] {
        &self.tables[self.table_starts[index]..self.table_starts[index + 1]]
    }

    fn check_tables(
        &self,
        spans: &[SpanInput],
        window: Option<usize>,
        block_size: usize,
        num_blocks: usize,
    ) -> Result<(), BackendError> {
        equal("table starts", self.table_starts.len(), spans.len() + 1)?;
        for (index, span) in spans.iter().enumerate() {
            let (start, end) = (self.table_starts[index], self.table_starts[index + 1]);
            at_most("table end", end, self.tables.len())?;
            at_most("table start", start, end)?;
            at_most("blocks of a span", (span.start + span.len).div_ceil(block_size), end - start)?;
            for &block in &self.table(index)[span.needed_entries(window, block_size)] {
                below("block", block as usize, num_blocks)?;
            }
        }
        Ok(())
    }

    fn check_copies(&self, num_blocks: usize) -> Result<(), BackendError> {
        let mut destinations: Vec<u32> = self.copies.iter().map(|copy| copy.to).collect();
        destinations.sort_unstable();
        if let Some(twice) = destinations.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(bound(
                "destination of a copy",
                twice[0] as usize,
                "a block that nothing else is copied to".into(),
            ));
        }
        for copy in &self.copies {
            below("copied block", copy.from.max(copy.to) as usize, num_blocks)?;
            if destinations.binary_search(&copy.from).is_ok() {
                return Err(bound("source of a copy", copy.from as usize, "a block that nothing is copied to".into()));
            }
        }
        Ok(())
    }
}

impl SampleRow {
    /// The likeliest token of `row`, as the one at `position`; no log-probabilities.
    pub const fn greedy(row: usize, position: u32) -> SampleRow {
        SampleRow {
            row,
            position,
            choice: 0,
            seed: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            logprobs: None,
            rules: None,
        }
    }
}

fn bound(what: &'static str, found: usize, expected: String) -> BackendError {
    BackendError::Inputs { what, found: found.to_string(), expected }
}

fn at_most(what: &'static str, found: usize, limit: usize) -> Result<(), BackendError> {
    if found <= limit { Ok(()) } else { Err(bound(what, found, format!("at most {limit}"))) }
}

fn below(what: &'static str, found: usize, limit: usize) -> Result<(), BackendError> {
    if found < limit { Ok(()) } else { Err(bound(what, found, format!("below {limit}"))) }
}

fn equal(what: &'static str, found: usize, expected: usize) -> Result<(), BackendError> {
    if found == expected { Ok(()) } else { Err(bound(what, found, expected.to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_needs_only_the_blocks_it_reaches() {
        let span = SpanInput { first_row: 0, len: 3, start: 50 };
        assert_eq!(span.needed_entries(None, 16), 0..4);
        assert_eq!(span.needed_entries(Some(20), 16), 1..4);
        assert_eq!(span.needed_entries(Some(1000), 16), 0..4);
    }
}
