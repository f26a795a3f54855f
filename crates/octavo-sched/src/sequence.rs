//! The tokens of one continuation, how many of them have been computed, and the blocks they live in.

use std::sync::Arc;

use crate::cache::{KvCache, SequenceBlocks};
use crate::plan::{FinishReason, StepOutput};
use crate::request::{Micros, Request, RequestId, SamplingParams, SeqId, TokenId};
use crate::table::BlockTable;

/// A prompt and its continuation so far.
///
/// There is no prefill and no decode phase: `computed` chases the tokens. A sequence is long behind when its prompt is
/// new, or when it lost its blocks to others, and one token behind otherwise.
#[derive(Debug)]
pub struct Sequence {
    id: SeqId,
    request: RequestId,
    params: Arc<SamplingParams>,
    arrival: Micros,
    tokens: Vec<TokenId>,
    prompt_len: usize,
    final_len: usize,
    computed: usize,
    pub(crate) blocks: SequenceBlocks,
    /// How many others are to part from it when its first token is drawn; of the first of a search, how many more beams
    /// than there are may come yet.
    pub(crate) unborn: usize,
    /// It has no blocks yet and waits until the first of its request's sequences has computed the part that they share.
    pub(crate) follows: bool,
    /// Its request has been admitted before, and was preempted since.
    pub(crate) resumes: bool,
}

impl Sequence {
    pub(crate) fn new(id: SeqId, request: Request, final_len: usize, blocks: SequenceBlocks) -> Self {
        Self {
            id,
            request: request.id,
            unborn: request.params.num_sequences() - 1,
            params: Arc::new(request.params),
            arrival: request.arrival,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            final_len,
            computed: 0,
            blocks,
            follows: false,
            resumes: false,
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

    /// The same, to keep.
    pub(crate) fn shared_params(&self) -> Arc<SamplingParams> {
        Arc::clone(&self.params)
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
        self.blocks.tables()
    }

    /// Tokens that are known and not computed.
    pub(crate) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether it is one of the partial outputs of a search.
    pub(crate) fn is_beam(&self) -> bool {
        self.params.beam.is_some()
    }

    /// Tokens generated.
    pub(crate) fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens in full blocks of the prompt: what the sequences of a request always share.
    pub(crate) fn shared_len(&self, block_size: usize) -> usize {
        self.prompt_len / block_size * block_size
    }

    /// Of one of several sequences, the tokens that may be found instead of being computed: all but the last. A beam leaves
    /// one more, so that whoever is admitted has something to compute before the last tokens of all go together.
    pub(crate) fn findable_len(&self) -> usize {
        self.tokens.len() - 1 - usize::from(self.is_beam())
    }

    /// The same tokens as far as they are computed, and the same blocks, as another of the request's continuations.
    pub(crate) fn fork(&self, choice: u32, cache: &mut KvCache) -> Self {
        Self {
            id: SeqId { choice, ..self.id },
            params: Arc::clone(&self.params),
            tokens: self.tokens.clone(),
            blocks: cache.fork(&self.blocks, self.computed),
            unborn: 0,
            ..*self
        }
    }

    /// Shares what `leader` has computed, and waits for nothing any more.
    pub(crate) fn part_from(&mut self, leader: &Sequence, cache: &mut KvCache) {
        self.blocks = cache.fork(&leader.blocks, leader.computed);
        self.computed = leader.computed;
        self.follows = false;
    }

    /// Takes over what the cache holds of the tokens before `limit`: gives how many that are, and the position of the
    /// first token that differs.
    pub(crate) fn adopt(&mut self, found: &crate::cache::Found, cache: &mut KvCache) -> usize {
        let cached = cache.adopt(&mut self.blocks, found);
        self.computed += cached;
        cached
    }

    /// Counts positions as computed. Those of wrong drafts are left out and get computed again with other tokens.
    pub(crate) fn advance(&mut self, computed: usize, cache: &mut KvCache) {
        cache.computed(&mut self.blocks, self.computed..computed, &self.params.cache_salt, &self.tokens);
        self.computed = computed;
    }

    /// Gives all blocks back, to be computed again from the first token on.
    pub(crate) fn release(&mut self, cache: &mut KvCache) {
        cache.release(&mut self.blocks);
        self.computed = 0;
    }

    /// Appends a token with which a beam goes on; the search knows when to end.
    pub(crate) fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
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
            if self.params.is_end(token, eos_token_ids) {
                (finish, stop_token) = (Some(FinishReason::Stop), Some(token));
            } else if self.tokens.len() >= self.final_len {
                finish = Some(FinishReason::Length);
            }
            if finish.is_some() {
                break;
            }
        }
        let tokens = self.tokens[before..].to_vec();
        StepOutput { request: self.request, seq: self.id, tokens, finish, stop_token, last: false, hypothesis: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: TokenId = 9;

    fn sequence(final_len: usize, params: SamplingParams) -> Sequence {
        let request = Request { id: RequestId(7), prompt: vec![1], params, arrival: 0, deadline: None };
        Sequence::new(SeqId { arrival: 0, choice: 0 }, request, final_len, SequenceBlocks::default())
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
