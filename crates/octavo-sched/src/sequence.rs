//! The tokens of one request, how many of them have been computed, and the blocks they live in.

use crate::block::BlockTable;
use crate::group::{Group, Progress};
use crate::plan::{FinishReason, SeqSpan, StepOutput};
use crate::request::{Micros, Request, RequestId, SamplingParams, SeqId, TokenId};

/// A prompt and its continuation so far.
///
/// There is no prefill and no decode phase: `computed` chases the tokens. A sequence is long behind when its prompt is
/// new, and one token behind from then on.
#[derive(Debug)]
pub struct Sequence {
    id: SeqId,
    request: RequestId,
    params: SamplingParams,
    arrival: Micros,
    tokens: Vec<TokenId>,
    prompt_len: usize,
    final_len: usize,
    computed: usize,
    /// One table for each layer group; empty while the sequence waits.
    tables: Vec<BlockTable>,
    /// For each layer group, the free blocks that are kept for this sequence.
    promises: Vec<usize>,
}

impl Sequence {
    pub(crate) fn new(id: SeqId, request: Request, final_len: usize, num_groups: usize) -> Self {
        Self {
            id,
            request: request.id,
            params: request.params,
            arrival: request.arrival,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            final_len,
            computed: 0,
            tables: std::iter::repeat_with(BlockTable::new).take(num_groups).collect(),
            promises: vec![0; num_groups],
        }
    }

    /// The scheduler's name for it.
    pub fn id(&self) -> SeqId {
        self.id
    }

    /// The request that it continues.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// How to sample.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// When the request was handed in.
    pub fn arrival(&self) -> Micros {
        self.arrival
    }

    /// Prompt and output so far.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// How many of the tokens are the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// The length, prompt and output, at which the sequence ends if nothing stops it before.
    pub fn final_len(&self) -> usize {
        self.final_len
    }

    /// How many tokens, from the first on, have their keys and values in the blocks.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// One block table for each layer group.
    pub fn tables(&self) -> &[BlockTable] {
        &self.tables
    }

    pub(crate) fn promises(&self) -> &[usize] {
        &self.promises
    }

    /// Computed tokens whose slots the sequence still owns, over all layer groups.
    pub(crate) fn slots_used(&self, block_size: usize) -> usize {
        // Blocks go home only once all of their slots are computed, so this never goes below zero.
        self.tables.iter().map(|table| self.computed - table.num_vacant() * block_size).sum()
    }

    /// Gets a promise of all blocks to come from every group, or from none.
    pub(crate) fn admit(&mut self, groups: &mut [Group]) -> bool {
        let progress = self.progress();
        if !groups.iter().all(|group| group.can_admit(progress)) {
            return false;
        }
        for (group, promise) in groups.iter_mut().zip(&mut self.promises) {
            *promise = group.admit(progress);
        }
        true
    }

    /// Takes blocks for the next tokens, `budget` of them at most, and says which those are.
    pub(crate) fn next_span(&mut self, groups: &mut [Group], budget: usize) -> SeqSpan {
        let pending = self.tokens.len() - self.computed;
        let len = pending.min(budget);
        let (tables, promises) = (self.tables.iter_mut(), self.promises.iter_mut());
        for (group, (table, promise)) in groups.iter_mut().zip(tables.zip(promises)) {
            group.reserve(table, promise, self.computed + len);
        }
        SeqSpan { seq: self.id, start: self.computed, len, drafts: 0, samples: len == pending }
    }

    /// Counts positions as computed. Those of wrong drafts are left out and get computed again with other tokens.
    pub(crate) fn advance(&mut self, computed: usize) {
        self.computed = computed;
    }

    /// Appends sampled tokens one by one, up to the first that ends the sequence.
    ///
    /// A stop or end-of-sequence token counts before the length does, so that the last token that fits can still end
    /// the sequence with [`FinishReason::Stop`].
    pub(crate) fn append(&mut self, sampled: &[TokenId], eos_token_ids: &[TokenId]) -> StepOutput {
        let before = self.tokens.len();
        let (mut finish, mut stop_token) = (None, None);
        for &token in sampled {
            self.tokens.push(token);
            let is_eos = !self.params.ignore_eos && eos_token_ids.contains(&token);
            if is_eos || self.params.stop_token_ids.contains(&token) {
                (finish, stop_token) = (Some(FinishReason::Stop), Some(token));
            } else if self.tokens.len() >= self.final_len {
                finish = Some(FinishReason::Length);
            }
            if finish.is_some() {
                break;
            }
        }
        let tokens = self.tokens[before..].to_vec();
        StepOutput { request: self.request, seq: self.id, tokens, finish, stop_token, last: finish.is_some() }
    }

    /// Sends home what lies before each window, and renews the promises.
    pub(crate) fn settle(&mut self, groups: &mut [Group]) {
        let progress = self.progress();
        let (tables, promises) = (self.tables.iter_mut(), self.promises.iter_mut());
        for (group, (table, promise)) in groups.iter_mut().zip(tables.zip(promises)) {
            group.settle(table, promise, progress);
        }
    }

    /// Gives all blocks and promises back.
    pub(crate) fn release(&mut self, groups: &mut [Group]) {
        let (tables, promises) = (self.tables.iter_mut(), self.promises.iter_mut());
        for (group, (table, promise)) in groups.iter_mut().zip(tables.zip(promises)) {
            group.release(table, std::mem::take(promise));
        }
    }

    fn progress(&self) -> Progress {
        let pending = self.tokens.len() - self.computed;
        Progress { computed: self.computed, pending, final_len: self.final_len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: TokenId = 9;

    fn sequence(final_len: usize, params: SamplingParams) -> Sequence {
        let request = Request { id: RequestId(7), prompt: vec![1], params, arrival: 0 };
        Sequence::new(SeqId { arrival: 0, choice: 0 }, request, final_len, 0)
    }

    #[test]
    fn the_stopping_token_is_kept_and_what_follows_is_dropped() {
        let mut sequence = sequence(10, SamplingParams::default());
        let output = sequence.append(&[4, EOS, 5], &[EOS]);
        assert_eq!(output.tokens, [4, EOS]);
        assert_eq!((output.finish, output.stop_token), (Some(FinishReason::Stop), Some(EOS)));
        assert_eq!(sequence.tokens(), [1, 4, EOS]);
    }

    #[test]
    fn a_stop_token_at_the_length_limit_counts_as_stop() {
        let output = sequence(2, SamplingParams::default()).append(&[EOS], &[EOS]);
        assert_eq!(output.finish, Some(FinishReason::Stop));
    }

    #[test]
    fn tokens_past_the_length_limit_are_dropped() {
        let output = sequence(3, SamplingParams::default()).append(&[4, 5, 6], &[EOS]);
        assert_eq!((output.tokens, output.finish, output.stop_token), (vec![4, 5], Some(FinishReason::Length), None));
    }

    #[test]
    fn ignore_eos_generates_through_the_end_of_sequence() {
        let params = SamplingParams { ignore_eos: true, ..Default::default() };
        assert_eq!(sequence(10, params).append(&[EOS], &[EOS]).finish, None);
    }

    #[test]
    fn a_stop_token_of_the_caller_counts_even_with_ignore_eos() {
        let params = SamplingParams { ignore_eos: true, stop_token_ids: vec![EOS], ..Default::default() };
        assert_eq!(sequence(10, params).append(&[EOS], &[EOS]).stop_token, Some(EOS));
    }
}
