//! Who leaves the queue: the first, if there is room for it and for what the running ones are still expected to write.

use crate::cache::{Adoption, Found, Prospect};
use crate::config::PrefixCaching;
use crate::plan::Admitted;
use crate::request::Micros;
use crate::sequence::Sequence;

use super::{Draft, Scheduler};

impl Scheduler {
    /// Admits waiting requests, first come first served, and gives each its first span, while the budget lasts.
    pub(super) fn admit_waiting(&mut self, now: Micros, draft: &mut Draft) {
        if self.waiting.is_empty() {
            return;
        }
        let groups = 0..self.cache.num_groups();
        let mut seats_taken = self.num_seats_taken();
        let mut promised: Vec<usize> = groups.map(|group| self.promised(group)).collect();
        while draft.budget > 0 && !self.waiting.is_empty() {
            let family = self.first_waiting();
            seats_taken += self.waiting.iter().take(family).map(num_seats).sum::<usize>();
            if seats_taken > self.config.max_num_seqs {
                return;
            }
            let found = self.find_first_waiting(family);
            // Whoever has the pool to itself fits into it; that was checked when it came.
            if !self.running.is_empty() && !self.fits(family, found.as_ref(), &promised) {
                self.is_short_of_blocks = true;
                return;
            }
            let index = self.admit(family, found, now, draft);
            self.join_followers(index);
            if !self.plan_span(index, draft) {
                // What its continuations found in the cache took the room; the next step makes some.
                return;
            }
            for (group, promised) in promised.iter_mut().enumerate() {
                let admitted = &self.running[index..index + family];
                *promised += admitted.iter().map(|sequence| self.growth(group, sequence)).sum::<usize>();
            }
        }
    }

    /// Sequences that run or are to part from one that does.
    pub(super) fn num_seats_taken(&self) -> usize {
        self.running.iter().map(num_seats).sum()
    }

    /// Blocks of one layer group that the running sequences are expected to take yet.
    pub(super) fn promised(&self, group: usize) -> usize {
        self.running.iter().map(|sequence| self.growth(group, sequence)).sum()
    }

    /// Number of sequences, at the front of the queue, of the request that is first in it.
    fn first_waiting(&self) -> usize {
        let arrival = |sequence: &Sequence| sequence.id().arrival;
        let first = self.waiting.front().map(arrival);
        self.waiting.iter().take_while(|sequence| Some(arrival(sequence)) == first).count()
    }

    /// What the cache holds of the first waiting sequence, if it is to look. Where others wait for it, only what they
    /// share counts.
    fn find_first_waiting(&self, family: usize) -> Option<Found> {
        let first = self.waiting.front()?;
        if first.params().skip_reading_prefix_cache || self.config.prefix_cache == PrefixCaching::Off {
            return None;
        }
        let limit = if family > 1 {
            first.shared_len(self.config.block_size).min(first.findable_len())
        } else {
            first.tokens().len() - 1
        };
        Some(self.cache.find(&first.blocks, &first.params().cache_salt, first.tokens(), limit))
    }

    /// Whether the free blocks are enough for the first waiting request beside those promised to running ones.
    fn fits(&self, family: usize, found: Option<&Found>, promised: &[usize]) -> bool {
        let none = Adoption::default();
        (0..self.cache.num_groups()).all(|group| {
            let adoption = found.map_or(none, |found| self.cache.adoption(group, found));
            let needed: usize = self.waiting.iter().take(family).map(|sequence| self.growth(group, sequence)).sum();
            let taken = needed.saturating_sub(adoption.held) + adoption.unowned;
            taken + promised[group] <= self.cache.num_free(group)
        })
    }

    /// Blocks of one layer group that a sequence, and those that are to part from it, are expected to take yet.
    fn growth(&self, group: usize, sequence: &Sequence) -> usize {
        let block_size = self.config.block_size;
        let length = sequence.tokens().len() + self.expected.room(sequence, block_size);
        // The token at the end is never computed.
        let stored = length - 1;
        let total = self.cache.blocks_at(group, Prospect { stored, pending: sequence.pending() });
        // Behind a window the full blocks of the prompt, which continuations share, are soon out of sight.
        let is_hidden = total < stored.div_ceil(block_size);
        let own = if is_hidden { total } else { total - sequence.prompt_len() / block_size };
        if sequence.follows {
            return own;
        }
        let held = sequence.tables()[group].num_held();
        let copy = usize::from(self.cache.is_shared(group, &sequence.blocks, sequence.computed()));
        (total + copy).saturating_sub(held) + sequence.unborn * own
    }

    /// Moves the first waiting request over and gives the place of its first sequence.
    fn admit(&mut self, family: usize, found: Option<Found>, now: Micros, draft: &mut Draft) -> usize {
        let mut admitted: Vec<Sequence> = self.waiting.drain(..family).collect();
        let first = &mut admitted[0];
        let cached_tokens = found.as_ref().map_or(0, |found| first.adopt(found, &mut self.cache));
        if !first.resumes {
            self.totals.admitted += 1;
            self.totals.queue_time += now.saturating_sub(first.arrival());
            self.totals.prefix_queries += if found.is_some() { first.tokens().len() as u64 } else { 0 };
            self.totals.prefix_hits += cached_tokens as u64;
        }
        let first_difference = found.and_then(|found| found.first_difference);
        draft.plan.admitted.push(Admitted { request: first.request(), cached_tokens, first_difference });
        let id = first.id();
        let index = self.running.partition_point(|sequence| sequence.id() < id);
        self.running.splice(index..index, admitted);
        index
    }
}

/// Sequences that a sequence is, or will be once others have parted from it.
fn num_seats(sequence: &Sequence) -> usize {
    1 + sequence.unborn
}
