//! What an engine is set up with.

use octavo_backend::{DecoderSpec, StepLimits};
use octavo_sched::{GroupConfig, PrefixCaching, SchedulerConfig, TokenId, VictimOrder};

/// Sizes and limits of one engine; all memory follows from them.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Blocks of each KV group, in the order of [`DecoderSpec::kv_geometry`].
    pub num_blocks: Vec<usize>,
    /// Longest sequence, prompt and output together.
    pub max_model_len: usize,
    /// Most sequences that run at once.
    pub max_num_seqs: usize,
    /// Most tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Tokens that end a request unless it asks to go on.
    pub eos_token_ids: Vec<TokenId>,
    /// From it follow the seeds of requests that bring none.
    pub seed: u64,
    /// Threads that ask grammars for masks between two steps; at least 1, the engine's own.
    pub mask_threads: usize,
    /// Whether requests find the blocks of others that begin alike.
    pub prefix_cache: PrefixCaching,
}

impl EngineConfig {
    pub(crate) fn scheduler(&self, spec: &DecoderSpec) -> SchedulerConfig {
        let groups = spec.kv_geometry(self.block_size).groups;
        SchedulerConfig {
            block_size: self.block_size,
            groups: groups
                .iter()
                .zip(&self.num_blocks)
                .map(|(group, &num_blocks)| GroupConfig { num_blocks, window: group.window })
                .collect(),
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            eos_token_ids: self.eos_token_ids.clone(),
            prefix_cache: self.prefix_cache,
            victims: VictimOrder::default(),
        }
    }

    /// The largest step that this configuration can plan.
    pub fn step_limits(&self) -> StepLimits {
        StepLimits {
            max_rows: self.max_num_batched_tokens,
            max_spans: self.max_num_seqs,
            max_positions: self.max_model_len,
            block_size: self.block_size,
            num_blocks: self.num_blocks.clone(),
        }
    }
}
