//! The contract between the engine and a device.

use crate::{BackendError, DecoderSpec, Numerics, StepInputs, StepResult, WeightSource};

/// A device that can execute a decoder.
///
/// Invariant (row invariance): the bits of a row's result depend on its tokens, positions and cached keys and values,
/// and on nothing else: not on the other rows, the chunk it came in, or the number of threads.
pub trait Backend: Sized + Send + 'static {
    /// Packed weights, KV cache and work memory: all that a model needs, taken at load.
    type Plan: Send;

    /// Takes all memory and packs the weights. Pages of the KV cache may come with their first use.
    ///
    /// # Errors
    /// A weight that does not fit the spec, a spec that the backend cannot run, or memory that cannot be had.
    fn load(
        &self,
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        limits: &StepLimits,
    ) -> Result<Self::Plan, BackendError>;

    /// Runs one step: block copies, forward, sampling.
    ///
    /// # Errors
    /// Inputs beyond the limits or contradicting each other; a failed kernel.
    fn run(&mut self, plan: &mut Self::Plan, inputs: &StepInputs) -> Result<StepResult, BackendError>;

    /// Where this backend rounds, so that [`crate::Reference`] can round there too.
    fn numerics(&self) -> Numerics;

    /// Bytes that [`Backend::load`] will take beyond the weights, known before anything is loaded.
    fn footprint(&self, spec: &DecoderSpec, limits: &StepLimits) -> Footprint;
}

/// The largest step a plan must be able to run; all work memory is sized by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows in a step.
    pub max_rows: usize,
    /// Spans in a step.
    pub max_spans: usize,
    /// Positions in a sequence.
    pub max_positions: usize,
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Blocks of each KV group, in the order of [`DecoderSpec::kv_geometry`].
    pub num_blocks: Vec<usize>,
}

/// Memory that does not depend on the checkpoint's formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// The KV cache.
    pub kv_bytes: usize,
    /// Work memory for the largest step.
    pub arena_bytes: usize,
}
