//! How much memory serving a model takes, known before any of it is taken.

use octavo_backend::{Backend, Footprint, KvGeometry, KvType, StepLimits};

use crate::{ModelConfig, ModelError};

/// The default KV cache is at least one request of the longest length, else the smaller of these.
const DEFAULT_KV_BYTES: usize = 512 << 20;
const DEFAULT_KV_PERCENT: usize = 20;

/// What a caller asks for; the options bear their names in the Python interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRequest {
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Longest sequence; the model's own context length when `None`.
    pub max_model_len: Option<usize>,
    /// Sequences in a step.
    pub max_num_seqs: usize,
    /// Tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Size of the KV cache in bytes; not together with `num_kv_blocks`.
    pub kv_cache_memory_bytes: Option<usize>,
    /// Size of the KV cache in blocks.
    pub num_kv_blocks: Option<usize>,
    /// Bytes that weights, KV cache and work memory may take together.
    pub memory_limit: usize,
}

/// Where the memory goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The weights, as stored.
    pub weight_bytes: usize,
    /// The KV cache.
    pub kv_bytes: usize,
    /// Work memory for the largest step.
    pub arena_bytes: usize,
    /// KV bytes of one token over all layers.
    pub kv_bytes_per_token: usize,
    /// Blocks of each KV group, in the order of [`octavo_backend::DecoderSpec::kv_geometry`].
    pub num_blocks: Vec<usize>,
    /// Longest sequence.
    pub max_model_len: usize,
}

impl MemoryPlan {
    /// All of it.
    pub fn total(&self) -> usize {
        self.weight_bytes + self.kv_bytes + self.arena_bytes
    }
}

/// Sizes the KV cache and adds up what `backend` will take for `config` with `weight_bytes` of weights.
///
/// Every KV group gets the same number of blocks, so that block counts mean the same for all of them.
///
/// # Errors
/// [`ModelError::Request`] for options that contradict the model or each other, or a cache of less than one block;
/// [`ModelError::Memory`] when the sum exceeds the limit.
pub fn memory_plan<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    weight_bytes: usize,
    request: &MemoryRequest,
) -> Result<MemoryPlan, ModelError> {
    let max_model_len = check(config, request)?;
    let geometry = config.spec.kv_geometry(request.block_size);
    let kv_bytes_per_token = bytes_per_token(&geometry, backend.numerics().kv);
    let block_bytes = kv_bytes_per_token.saturating_mul(request.block_size);
    let num_blocks = num_blocks(request, block_bytes, max_model_len)?;
    let kv_floor = block_bytes.saturating_mul(num_blocks);
    // A step's rows of the residual stream alone; keeps absurd options from reaching the backend's own arithmetic.
    let rows = request.max_num_batched_tokens.max(request.max_num_seqs);
    let arena_floor = rows.saturating_mul(config.spec.hidden_size).saturating_mul(size_of::<f32>());
    let limit = Limit { weight_bytes, memory_limit: request.memory_limit, max_model_len };
    limit.check(Footprint { kv_bytes: kv_floor, arena_bytes: arena_floor })?;
    let limits = StepLimits {
        max_rows: request.max_num_batched_tokens,
        max_spans: request.max_num_seqs,
        max_positions: max_model_len,
        block_size: request.block_size,
        num_blocks: vec![num_blocks; geometry.groups.len()],
    };
    let footprint = backend.footprint(&config.spec, &limits);
    limit.check(footprint)?;
    Ok(MemoryPlan {
        weight_bytes,
        kv_bytes: footprint.kv_bytes,
        arena_bytes: footprint.arena_bytes,
        kv_bytes_per_token,
        num_blocks: limits.num_blocks,
        max_model_len,
    })
}

/// The options that need no arithmetic; returns the longest sequence's length.
fn check(config: &ModelConfig, request: &MemoryRequest) -> Result<usize, ModelError> {
    for (what, value) in [
        ("block_size", request.block_size),
        ("max_num_seqs", request.max_num_seqs),
        ("max_num_batched_tokens", request.max_num_batched_tokens),
    ] {
        if value == 0 {
            return Err(refused(what, value, "at least 1"));
        }
    }
    if let (Some(bytes), Some(_)) = (request.kv_cache_memory_bytes, request.num_kv_blocks) {
        return Err(refused("kv_cache_memory_bytes", bytes, "nothing, since num_kv_blocks is given"));
    }
    // A prompt and an answer have at least one token each.
    let (max_model_len, least) = request.max_model_len.map_or((config.context_length, 1), |given| (given, 2));
    if max_model_len < least || max_model_len > config.context_length {
        let expected = format!("from {least} to the model's context length, {}", config.context_length);
        return Err(refused("max_model_len", max_model_len, expected));
    }
    Ok(max_model_len)
}

fn bytes_per_token(geometry: &KvGeometry, kv: KvType) -> usize {
    geometry.groups.iter().map(|group| kv.bytes(group.elements_per_token, group.heads_per_token)).sum()
}

fn num_blocks(request: &MemoryRequest, block_bytes: usize, max_model_len: usize) -> Result<usize, ModelError> {
    match (request.num_kv_blocks, request.kv_cache_memory_bytes) {
        (Some(0), _) => Err(refused("num_kv_blocks", 0, "at least 1")),
        (Some(count), _) => Ok(count),
        (None, Some(bytes)) if bytes < block_bytes => {
            let expected = format!("at least {block_bytes}, one block of {} tokens", request.block_size);
            Err(refused("kv_cache_memory_bytes", bytes, expected))
        }
        (None, Some(bytes)) => Ok(bytes / block_bytes),
        (None, None) => {
            let share = DEFAULT_KV_BYTES.min(request.memory_limit / 100 * DEFAULT_KV_PERCENT);
            Ok((share / block_bytes).max(max_model_len.div_ceil(request.block_size)))
        }
    }
}

struct Limit {
    weight_bytes: usize,
    memory_limit: usize,
    max_model_len: usize,
}

impl Limit {
    fn check(&self, Footprint { kv_bytes, arena_bytes }: Footprint) -> Result<(), ModelError> {
        let Limit { weight_bytes, memory_limit, max_model_len } = *self;
        if weight_bytes.saturating_add(kv_bytes).saturating_add(arena_bytes) <= memory_limit {
            return Ok(());
        }
        Err(ModelError::Memory { weight_bytes, kv_bytes, arena_bytes, memory_limit, max_model_len })
    }
}

fn refused(what: &'static str, found: usize, expected: impl ToString) -> ModelError {
    ModelError::Request { what, found: found.to_string(), expected: expected.to_string() }
}
