//! Counts of what the scheduler holds and has done: a snapshot, plain data.

use crate::plan::FinishReason;
use crate::request::Micros;

/// A snapshot of the scheduler. Blocks and slots are summed over the layer groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedulerStats {
    /// Sequences that run.
    pub running: usize,
    /// Sequences in the queue, new or preempted.
    pub waiting: usize,
    /// Blocks in the pools.
    pub blocks_total: usize,
    /// Blocks without an owner, those included whose content could be found again.
    pub blocks_free: usize,
    /// Blocks, with an owner or without, whose content is published: a new request finds it if it finds what precedes
    /// it.
    pub blocks_cached: usize,
    /// Blocks with more than one owner.
    pub blocks_shared: usize,
    /// Blocks that sharing saves: owners beyond the first, summed over all blocks.
    pub blocks_saved: usize,
    /// Blocks that running sequences are expected to take yet, free now or not; a new request is admitted beside them.
    pub blocks_promised: usize,
    /// Token slots in blocks that have an owner, each block counted once.
    pub slots_allocated: usize,
    /// Slots among them that hold a computed token.
    pub slots_used: usize,
    /// Slots among them that are empty and may be filled by the owner.
    pub slots_reserved: usize,
    /// Slots among them that are empty and will stay so: beyond the length at which the owner ends.
    pub slots_internal: usize,
    /// Slots in free blocks while a request waits that does not fit into them.
    pub slots_external: usize,
    /// Plans made that had anything in them.
    pub steps: u64,
    /// Tokens in all those plans.
    pub tokens_scheduled: u64,
    /// Requests admitted from the queue so far, each counted once.
    pub admitted: u64,
    /// Times that a request lost its blocks and went back to the queue.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Tokens found there.
    pub prefix_hits: u64,
    /// Blocks copied, since a sequence was to write where others read.
    pub blocks_copied: u64,
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

/// One block as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockState {
    /// Sequences that hold it.
    pub owners: u32,
    /// Slots that hold a computed token of an owner, or content that could be found again.
    pub filled: u32,
    /// Whether a new request could find the content.
    pub cached: bool,
}

/// Continuations ended, by reason; a request has one or more of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FinishCounts {
    /// By a stop token.
    pub stop: u64,
    /// By length.
    pub length: u64,
    /// Taken back by the caller.
    pub abort: u64,
    /// For want of time.
    pub deadline: u64,
    /// For want of a token to sample.
    pub error: u64,
}

impl FinishCounts {
    /// Requests ended for any reason.
    pub fn total(&self) -> u64 {
        self.stop + self.length + self.abort + self.deadline + self.error
    }

    pub(crate) fn count(&mut self, reason: FinishReason, number: usize) {
        *match reason {
            FinishReason::Stop => &mut self.stop,
            FinishReason::Length => &mut self.length,
            FinishReason::Abort => &mut self.abort,
            FinishReason::Deadline => &mut self.deadline,
            FinishReason::Error => &mut self.error,
        } += number as u64;
    }
}
