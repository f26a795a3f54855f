//! What can be seen of a scheduler from outside.

use crate::sequence::Sequence;
use crate::stats::{BlockState, SchedulerStats};
use crate::table::BlockTable;

use super::Scheduler;

impl Scheduler {
    /// Counts as they are now. O(running).
    pub fn stats(&self) -> SchedulerStats {
        let blocks_total = self.cache.sum(|pool| pool.num_blocks());
        let blocks_free = self.cache.sum(|pool| pool.num_free());
        let slots_allocated = (blocks_total - blocks_free) * self.config.block_size;
        let slots_used = self.cache.sum(|pool| pool.counts().used);
        let slots_internal: usize = self.running.iter().map(|sequence| self.never_filled(sequence)).sum();
        let external = if self.is_short_of_blocks && !self.waiting.is_empty() { blocks_free } else { 0 };
        SchedulerStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            blocks_total,
            blocks_free,
            blocks_cached: self.cache.sum(|pool| pool.counts().cached),
            blocks_shared: self.cache.sum(|pool| pool.counts().shared),
            blocks_saved: self.cache.sum(|pool| pool.counts().saved),
            blocks_promised: (0..self.cache.num_groups()).map(|group| self.promised(group)).sum(),
            slots_allocated,
            slots_used,
            slots_reserved: slots_allocated - slots_used - slots_internal,
            slots_internal,
            slots_external: external * self.config.block_size,
            ..self.totals
        }
    }

    /// The state of every block, group by group. O(blocks).
    pub fn block_map(&self) -> Vec<Vec<BlockState>> {
        self.cache.block_map()
    }

    /// Verifies every invariant of pools, tree and queues. O(blocks + sequences), for tests.
    ///
    /// # Errors
    /// A sentence about the first contradiction found.
    pub fn audit(&self) -> Result<(), String> {
        self.cache.audit(self.running.iter().chain(&self.waiting).map(|sequence| &sequence.blocks))?;
        let ids = |sequences: &mut dyn Iterator<Item = &Sequence>| sequences.map(Sequence::id).collect::<Vec<_>>();
        let (running, waiting) = (ids(&mut self.running.iter()), ids(&mut self.waiting.iter()));
        if !running.is_sorted() || !waiting.is_sorted() {
            return Err(format!("running {running:?} or waiting {waiting:?} are not sorted by arrival"));
        }
        let mut arrivals: Vec<_> = running.iter().chain(&waiting).map(|id| id.arrival).collect();
        arrivals.sort_unstable();
        arrivals.dedup();
        let mut requests: Vec<_> = self.requests.values().map(|place| place.arrival).collect();
        requests.sort_unstable();
        if arrivals != requests {
            return Err(format!("requests {requests:?} are known, but sequences of {arrivals:?} are queued"));
        }
        self.audit_searches()?;
        match self.waiting.iter().find(|sequence| sequence.computed() > 0 || !sequence.tables()[0].blocks().is_empty())
        {
            Some(sequence) => Err(format!("{:?} waits and holds blocks", sequence.id())),
            None => Ok(()),
        }
    }

    /// Each search has a sequence for each of its beams, and seats for all that may come.
    fn audit_searches(&self) -> Result<(), String> {
        for place in self.requests.values() {
            let Some(search) = &place.search else { continue };
            let all = self.running.iter().chain(&self.waiting);
            let family: Vec<_> = all.filter(|sequence| sequence.id().arrival == place.arrival).collect();
            let mut choices: Vec<_> = search.choices().collect();
            choices.sort_unstable();
            let unborn: Vec<_> = family.iter().map(|sequence| sequence.unborn).collect();
            let is_whole = family.iter().map(|sequence| sequence.id().choice).eq(choices.iter().copied());
            if !is_whole || unborn[0] != search.num_vacant() || unborn[1..].iter().any(|&unborn| unborn > 0) {
                let arrival = place.arrival;
                return Err(format!("request {arrival} searches with beams {choices:?}, but has {family:?}"));
            }
        }
        Ok(())
    }

    /// Slots in the last block of a sequence that lie beyond its end, in all layer groups. What is shared counts for
    /// nobody: whoever writes first gets a copy.
    fn never_filled(&self, sequence: &Sequence) -> usize {
        // The last token is never computed.
        let last = sequence.final_len() - 1;
        let beyond = |(group, table): (usize, &BlockTable)| {
            let end = table.blocks().len() * self.config.block_size;
            let is_shared = end > 0 && self.cache.is_shared(group, &sequence.blocks, end - 1);
            if is_shared || table.num_held() == 0 { 0 } else { end.saturating_sub(last.max(sequence.computed())) }
        };
        sequence.tables().iter().enumerate().map(beyond).sum()
    }
}
