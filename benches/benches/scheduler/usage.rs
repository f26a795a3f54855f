//! How full the KV cache is, over the steps of a run.

use octavo_sched::SchedulerStats;

/// Sums over the steps in which a request waited for room, and the counts at the end.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    noted: u64,
    used: u64,
    allocated: u64,
    saved: u64,
    owned: u64,
    running: u64,
    /// As of the last step noted, whether a request waited or not.
    last: SchedulerStats,
}

impl Usage {
    /// Takes in the state after a step.
    pub fn note(&mut self, stats: SchedulerStats) {
        self.last = stats;
        if stats.waiting > 0 {
            self.noted += 1;
            self.used += stats.slots_used as u64;
            self.allocated += stats.slots_allocated as u64;
            self.saved += stats.blocks_saved as u64;
            self.owned += (stats.blocks_total - stats.blocks_free) as u64;
            self.running += stats.running as u64;
        }
    }

    /// Slots that hold a token, as a share of the slots in blocks that have an owner.
    pub fn slots_used(&self) -> f64 {
        self.used as f64 / self.allocated as f64
    }

    /// `1 - blocks / sum of the lengths of all tables`.
    pub fn blocks_saved(&self) -> f64 {
        self.saved as f64 / (self.saved + self.owned) as f64
    }

    /// Blocks that have an owner, as a share of the pool.
    pub fn pool_owned(&self) -> f64 {
        self.owned as f64 / (self.noted * self.last.blocks_total as u64) as f64
    }

    /// Mean number of running sequences.
    pub fn running(&self) -> f64 {
        self.running as f64 / self.noted as f64
    }

    /// Preemptions for each request that left the queue.
    pub fn preemptions_a_request(&self) -> f64 {
        self.last.preemptions as f64 / self.last.admitted as f64
    }

    /// The counts after the last step.
    pub fn last(&self) -> &SchedulerStats {
        &self.last
    }
}
