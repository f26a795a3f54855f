//! Counts of what the scheduler holds and has done: a snapshot, plain data.

use crate::plan::FinishReason;
use crate::request::Micros;

/// A snapshot of the scheduler. Blocks and slots are summed over the layer groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedulerStats {
    /// Sequences that hold or are promised blocks.
    pub running: usize,
    /// Requests not yet admitted.
    pub waiting: usize,
    /// Blocks in the pools.
    pub blocks_total: usize,
    /// Blocks without an owner, promised ones included.
    pub blocks_free: usize,
    /// Free blocks that running sequences may yet take.
    pub blocks_promised: usize,
    /// Token slots in blocks that have an owner.
    pub slots_allocated: usize,
    /// Token slots among them that hold a computed token.
    pub slots_used: usize,
    /// Plans made that had anything in them.
    pub steps: u64,
    /// Tokens in all those plans.
    pub tokens_scheduled: u64,
    /// Requests admitted from the queue so far.
    pub admitted: u64,
    /// Time that all admitted requests spent between arrival and admission.
    pub queue_time: Micros,
    /// Requests ended so far.
    pub finished: FinishCounts,
}

impl SchedulerStats {
    /// Token slots that are allocated and hold nothing: the waste that paging is to keep small (Kwon et al., SOSP'23).
    pub fn slots_wasted(&self) -> usize {
        self.slots_allocated - self.slots_used
    }
}

/// Requests ended, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FinishCounts {
    /// By a stop token.
    pub stop: u64,
    /// By length.
    pub length: u64,
    /// Taken back by the caller.
    pub abort: u64,
    /// For want of a token to sample.
    pub error: u64,
}

impl FinishCounts {
    /// Requests ended for any reason.
    pub fn total(&self) -> u64 {
        self.stop + self.length + self.abort + self.error
    }

    pub(crate) fn count(&mut self, reason: FinishReason) {
        *match reason {
            FinishReason::Stop => &mut self.stop,
            FinishReason::Length => &mut self.length,
            FinishReason::Abort => &mut self.abort,
            FinishReason::Error => &mut self.error,
        } += 1;
    }
}
