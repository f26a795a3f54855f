//! A block pool together with what it has promised to running sequences.

use crate::block::{BlockPool, BlockTable};
use crate::config::{GroupConfig, SchedulerConfig, most_blocks_in_window};

/// The blocks of one layer group.
///
/// A sequence is promised, when it is admitted, every block that it could come to need, as a count; ids are taken from
/// the pool only when a step is about to write to them. Orca (Yu et al., OSDI'22) reserves for the same reason: KV
/// memory is freed only when a request ends, so running requests that each wait for one more block would wait forever.
///
/// Invariant: `promised` is the sum of the promises of the running sequences and never exceeds the free blocks, so
/// that a running sequence never fails to get one.
#[derive(Debug)]
pub(crate) struct Group {
    pool: BlockPool,
    window: Option<usize>,
    max_chunk: usize,
    promised: usize,
}

/// How far a sequence is and where it can end at most: all that its need for blocks depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    /// Positions computed.
    pub computed: usize,
    /// Positions known and not computed.
    pub pending: usize,
    /// Length at which the sequence ends, prompt and output.
    pub final_len: usize,
}

impl Group {
    pub(crate) fn new(config: &SchedulerConfig, group: &GroupConfig) -> Self {
        Self {
            pool: BlockPool::new(group.num_blocks, config.block_size),
            window: group.window,
            max_chunk: config.max_num_batched_tokens,
            promised: 0,
        }
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub(crate) fn promised(&self) -> usize {
        self.promised
    }

    /// Whether everything that a sequence without blocks could come to need is still to be had.
    pub(crate) fn can_admit(&self, progress: Progress) -> bool {
        self.peak(0, progress) <= self.pool.num_free() - self.promised
    }

    /// Promises it, and gives the promise.
    pub(crate) fn admit(&mut self, progress: Progress) -> usize {
        let promise = self.peak(0, progress);
        self.promised += promise;
        promise
    }

    /// Takes the blocks for the positions below `num_tokens` out of the promise.
    pub(crate) fn reserve(&mut self, table: &mut BlockTable, promise: &mut usize, num_tokens: usize) {
        let held = table.num_held();
        let reserved = table.reserve(&mut self.pool, num_tokens);
        let taken = table.num_held() - held;
        assert!(reserved && taken <= *promise, "a running sequence needs more blocks than it was promised");
        *promise -= taken;
        self.promised -= taken;
    }

    /// Sends home the blocks that no later position can see, and renews the promise for what is still to come.
    pub(crate) fn settle(&mut self, table: &mut BlockTable, promise: &mut usize, progress: Progress) {
        if let Some(window) = self.window {
            table.release_before(&mut self.pool, (progress.computed + 1).saturating_sub(window));
        }
        let renewed = self.peak(table.num_vacant(), progress) - table.num_held();
        self.promised = self.promised - *promise + renewed;
        *promise = renewed;
    }

    /// Takes back all blocks of a sequence and the promise to it.
    pub(crate) fn release(&mut self, table: &mut BlockTable, promise: usize) {
        table.release(&mut self.pool);
        self.promised -= promise;
    }

    /// Most blocks that a sequence can hold at any one time from now on. The token at the end is never computed.
    ///
    /// It only falls as a sequence moves on, because chunks get no longer and vacancies no fewer: so a renewed promise
    /// never exceeds what the sequence gave back.
    fn peak(&self, num_vacant: usize, progress: Progress) -> usize {
        let to_the_end = (progress.final_len - 1).div_ceil(self.pool.block_size()) - num_vacant;
        self.window.map_or(to_the_end, |window| {
            let chunk = progress.pending.min(self.max_chunk);
            to_the_end.min(most_blocks_in_window(window, chunk, self.pool.block_size()))
        })
    }
}
