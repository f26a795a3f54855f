//! The scheduler's limits, and the one function that checks a request against them.

use crate::block::VACANT_BLOCK;
use crate::rejected::{InvalidParam, Limit, Rejected};
use crate::request::{SamplingParams, TokenId};

/// What the scheduler has to work with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Token slots in a block.
    pub block_size: usize,
    /// One entry for each group of layers that share block tables.
    pub groups: Vec<GroupConfig>,
    /// Most tokens of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// Most sequences that run at once.
    pub max_num_seqs: usize,
    /// Most tokens computed in one step; also the longest chunk of a prompt.
    pub max_num_batched_tokens: usize,
    /// The model's own end-of-sequence tokens.
    pub eos_token_ids: Vec<TokenId>,
    /// Whether requests find the blocks of others that begin alike.
    pub prefix_cache: PrefixCaching,
    /// Who loses its blocks when there are too few.
    pub victims: VictimOrder,
}

/// Whether a request finds the blocks of others that begin with the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefixCaching {
    /// Every request computes all its tokens.
    Off,
    /// A block is found once it has been computed, until it is needed for something else.
    #[default]
    On,
    /// The same, but all blocks hash alike, so that only the comparison of tokens tells them apart: for tests.
    Colliding,
}

/// Which of the running requests gives way when there are too few blocks; never the one that arrived first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VictimOrder {
    /// The one with the fewest tokens to compute again, among equals the latest; one whose blocks others hold too, so
    /// that none would become free, comes last.
    #[default]
    LeastLostWork,
    /// The latest, so that no request ever gets more steps than one that arrived before it.
    LatestArrival,
}

/// A group of layers whose keys and values live in the same blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Blocks in the group's pool.
    pub num_blocks: usize,
    /// With a window of `w`, position `p` sees the positions above `p - w`. A windowed group bounds the length of a
    /// sequence only if its pool cannot hold one window and one chunk of `max_num_batched_tokens` together.
    pub window: Option<usize>,
}

impl SchedulerConfig {
    /// Checks every number for its range.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), InvalidParam> {
        at_least("block_size", self.block_size, 1, "at least 1")?;
        at_least("groups", self.groups.len(), 1, "at least 1 group")?;
        for group in &self.groups {
            at_least("groups.num_blocks", group.num_blocks, 1, "at least 1")?;
            at_least("groups.window", group.window.unwrap_or(1), 1, "at least 1, or none")?;
            if group.num_blocks >= VACANT_BLOCK as usize {
                let found = group.num_blocks.to_string();
                return Err(InvalidParam { field: "groups.num_blocks", found, expected: "fewer than 2^32 - 1" });
            }
        }
        at_least("max_model_len", self.max_model_len, 2, "at least 2, a prompt token and a generated one")?;
        at_least("max_num_seqs", self.max_num_seqs, 1, "at least 1")?;
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, "at least 1")
    }

    /// The limits that each request has to meet.
    pub fn limits(&self) -> AdmissionLimits {
        let pool = |group: &GroupConfig| PoolLimit {
            num_blocks: group.num_blocks,
            window_blocks: group
                .window
                .map(|window| most_blocks_in_window(window, self.max_num_batched_tokens, self.block_size)),
        };
        AdmissionLimits {
            context: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            block_size: self.block_size,
            pools: self.groups.iter().map(pool).collect(),
        }
    }
}

/// Most blocks touched by a chunk together with what its first position sees: `window + chunk - 1` positions in a row,
/// of which the first may be the last of its block. Both are at least 1.
pub(crate) fn most_blocks_in_window(window: usize, chunk: usize, block_size: usize) -> usize {
    ((window - 1).saturating_add(chunk - 1)).div_ceil(block_size) + 1
}

fn at_least(field: &'static str, found: usize, least: usize, expected: &'static str) -> Result<(), InvalidParam> {
    if found >= least { Ok(()) } else { Err(InvalidParam { field, found: found.to_string(), expected }) }
}

/// What a request must meet to be admitted at some time: a value to give to the threads at which requests come in.
///
/// The length of a sequence counts prompt and output. The last token is sampled but never computed, so it needs no slot
/// of its own: a sequence that ends at the pool's limit leaves one slot of the pool unused. That slot is given up so
/// that the limit is the plain capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Most tokens that the model is served with.
    context: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    block_size: usize,
    pools: Vec<PoolLimit>,
}

/// What one layer group has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PoolLimit {
    num_blocks: usize,
    /// Most blocks that a sequence holds at a time if a window hides the others.
    window_blocks: Option<usize>,
}

impl AdmissionLimits {
    /// Most tokens of a sequence, prompt and output together.
    pub fn max_len(&self) -> usize {
        self.context.min(self.pool_len(0, 1))
    }

    /// Most tokens of each of `n` continuations of a prompt, prompt and output together, that have the whole pool to
    /// themselves. They share the full blocks of the prompt and nothing else.
    fn pool_len(&self, prompt_len: usize, n: usize) -> usize {
        let shared = prompt_len / self.block_size;
        let most = |pool: &PoolLimit| {
            if pool.window_blocks.is_some_and(|blocks| blocks.saturating_mul(n) <= pool.num_blocks) {
                return usize::MAX;
            }
            let shared = shared.min(pool.num_blocks);
            (shared + (pool.num_blocks - shared) / n.max(1)) * self.block_size
        };
        self.pools.iter().map(most).min().unwrap_or(0)
    }

    /// The length at which each of `n` continuations ends, if nothing stops it before.
    pub fn final_len(&self, prompt_len: usize, params: &SamplingParams) -> usize {
        let limit = self.context.min(self.pool_len(prompt_len, params.num_sequences()));
        params.max_tokens.map_or(limit, |tokens| prompt_len.saturating_add(tokens).min(limit))
    }

    /// Whether the pool holds `n` continuations up to `final_len`.
    pub(crate) fn holds(&self, prompt_len: usize, final_len: usize, n: usize) -> bool {
        final_len <= self.pool_len(prompt_len, n)
    }

    /// Checks what is known of a request before it is handed in. A prompt must leave room for one token.
    ///
    /// # Errors
    /// [`Rejected`], though never for a duplicate id, which only the scheduler knows of.
    pub fn check(&self, prompt_len: usize, params: &SamplingParams) -> Result<(), Rejected> {
        params.validate()?;
        if prompt_len == 0 {
            return Err(Rejected::EmptyPrompt);
        }
        let (n, field) = (params.num_sequences(), params.sequences_field());
        if n > self.max_num_seqs {
            return Err(Rejected::TooManyContinuations { n, field, limit: self.max_num_seqs });
        }
        if params.beam.is_some() && n > self.max_num_batched_tokens {
            return Err(Rejected::BeamTooWide { width: n, limit: self.max_num_batched_tokens });
        }
        let pool = self.pool_len(prompt_len, n);
        let limit = self.context.min(pool);
        if prompt_len >= limit {
            let because = if pool < self.context { Limit::Pool } else { Limit::Context };
            return Err(Rejected::PromptTooLong { tokens: prompt_len, limit, because, n, field });
        }
        // A single output may end at the pool's limit. Of several, each would end where the pool is divided, and the
        // first would not be what it is alone.
        let wanted = params.max_tokens.map_or(0, |tokens| prompt_len.saturating_add(tokens).min(self.context));
        if n > 1 && wanted > pool {
            return Err(Rejected::TooLongTogether { n, field, tokens: wanted, limit: pool });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::BeamParams;

    fn config(groups: &[(usize, Option<usize>)]) -> SchedulerConfig {
        SchedulerConfig {
            block_size: 2,
            groups: groups.iter().map(|&(num_blocks, window)| GroupConfig { num_blocks, window }).collect(),
            max_model_len: 100,
            max_num_seqs: 4,
            max_num_batched_tokens: 4,
            eos_token_ids: vec![],
            prefix_cache: PrefixCaching::On,
            victims: VictimOrder::LeastLostWork,
        }
    }

    #[test]
    fn the_window_bound_is_what_the_worst_alignment_needs() {
        for block_size in 1..5 {
            for window in 1..7 {
                for chunk in 1..7 {
                    let touched = |start: usize| {
                        (start + chunk - 1) / block_size - (start + 1_usize).saturating_sub(window) / block_size + 1
                    };
                    let worst = (0..40).map(touched).max().unwrap();
                    assert_eq!(
                        most_blocks_in_window(window, chunk, block_size),
                        worst,
                        "{block_size} {window} {chunk}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_smallest_pool_bounds_the_length() {
        assert_eq!(config(&[(4, None), (3, None)]).limits().max_len(), 6);
    }

    #[test]
    fn a_windowed_pool_bounds_the_length_only_if_it_cannot_hold_window_and_chunk() {
        // Window 3 and chunk 4 are 6 positions, which touch 4 blocks of 2 at worst.
        assert_eq!(config(&[(50, None), (4, Some(3))]).limits().max_len(), 100);
        assert_eq!(config(&[(50, None), (3, Some(3))]).limits().max_len(), 6);
    }

    #[test]
    fn a_prompt_must_leave_room_for_one_token() {
        let limits = config(&[(4, None)]).limits();
        let params = SamplingParams::default();
        assert_eq!(limits.check(7, &params), Ok(()));
        let refused = Rejected::PromptTooLong { tokens: 8, limit: 8, because: Limit::Pool, n: 1, field: "n" };
        assert_eq!(limits.check(8, &params), Err(refused));
        assert_eq!(limits.check(0, &params), Err(Rejected::EmptyPrompt));
    }

    #[test]
    fn the_context_is_named_when_it_is_the_tighter_limit() {
        let limits = SchedulerConfig { max_model_len: 8, ..config(&[(4, None)]) }.limits();
        let refused = Rejected::PromptTooLong { tokens: 9, limit: 8, because: Limit::Context, n: 1, field: "n" };
        assert_eq!(limits.check(9, &SamplingParams::default()), Err(refused));
    }

    #[test]
    fn a_length_without_bound_of_its_own_ends_at_the_limit() {
        let limits = config(&[(4, None)]).limits();
        let final_len = |max_tokens| limits.final_len(3, &SamplingParams { max_tokens, ..Default::default() });
        assert_eq!([final_len(Some(2)), final_len(Some(usize::MAX)), final_len(None)], [5, 8, 8]);
    }

    #[test]
    fn continuations_share_the_full_blocks_of_the_prompt_and_divide_the_rest() {
        let limits = config(&[(7, None)]).limits();
        let params = |n| SamplingParams { n, max_tokens: None, ..Default::default() };
        // One block of the prompt is full; six are left.
        assert_eq!([1, 2, 3].map(|n| limits.final_len(3, &params(n))), [14, 8, 6]);
        let refused = Rejected::PromptTooLong { tokens: 10, limit: 10, because: Limit::Pool, n: 3, field: "n" };
        assert_eq!(limits.check(10, &params(3)), Err(refused));
    }

    #[test]
    fn continuations_that_would_be_cut_short_by_each_other_are_refused() {
        let limits = config(&[(7, None)]).limits();
        let params = |n, max_tokens| SamplingParams { n, max_tokens, ..Default::default() };
        assert_eq!(limits.check(3, &params(2, Some(5))), Ok(()));
        let refused = Rejected::TooLongTogether { n: 2, field: "n", tokens: 9, limit: 8 };
        assert_eq!(limits.check(3, &params(2, Some(6))), Err(refused));
        assert_eq!(limits.check(3, &params(1, Some(60))), Ok(()), "a single one ends at the limit");
        assert_eq!(limits.check(3, &params(2, None)), Ok(()), "and so do several that ask for no length");
    }

    #[test]
    fn more_continuations_than_can_run_at_once_are_refused() {
        let params = SamplingParams { n: 5, ..Default::default() };
        let refused = Rejected::TooManyContinuations { n: 5, field: "n", limit: 4 };
        assert_eq!(config(&[(9, None)]).limits().check(1, &params), Err(refused));
    }

    #[test]
    fn a_search_is_held_to_the_same_limits_by_its_width_and_to_the_tokens_of_a_step() {
        let params = |width, max_tokens| {
            let beam = Some(BeamParams { width, length_penalty: 1.0 });
            SamplingParams { beam, max_tokens, ..Default::default() }
        };
        let limits = SchedulerConfig { max_num_batched_tokens: 3, ..config(&[(7, None)]) }.limits();
        let message = |width, max_tokens| limits.check(3, &params(width, max_tokens)).unwrap_err().to_string();
        assert_eq!(limits.check(3, &params(2, Some(5))), Ok(()));
        assert_eq!(limits.final_len(3, &params(2, None)), 8);
        assert_eq!(
            message(5, Some(5)),
            "beam_width is 5, expected at most 4, the sequences that can run at once (max_num_seqs)"
        );
        assert_eq!(
            message(4, Some(5)),
            "beam_width is 4, expected at most 3, the tokens of a step (max_num_batched_tokens), since all beams go on \
             in the same one"
        );
        assert_eq!(
            message(2, Some(6)),
            "beam_width is 2: prompt and max_tokens together are 9, expected at most 8, which the KV pool holds of each \
             of 2 continuations"
        );
        assert_eq!(message(0, Some(6)), "beam_width is 0, expected at least 1");
    }

    #[test]
    fn a_config_with_a_number_out_of_range_names_the_field() {
        assert_eq!(config(&[(4, None)]).validate(), Ok(()));
        for (bad, field) in [
            (config(&[]), "groups"),
            (config(&[(0, None)]), "groups.num_blocks"),
            (config(&[(u32::MAX as usize, None)]), "groups.num_blocks"),
            (config(&[(4, Some(0))]), "groups.window"),
            (SchedulerConfig { block_size: 0, ..config(&[(4, None)]) }, "block_size"),
            (SchedulerConfig { max_model_len: 1, ..config(&[(4, None)]) }, "max_model_len"),
            (SchedulerConfig { max_num_seqs: 0, ..config(&[(4, None)]) }, "max_num_seqs"),
            (SchedulerConfig { max_num_batched_tokens: 0, ..config(&[(4, None)]) }, "max_num_batched_tokens"),
        ] {
            assert_eq!(bad.validate().unwrap_err().field, field);
        }
    }
}
