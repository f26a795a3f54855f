//! Who gives way when there are too few blocks: whole requests, to be computed again (recompute of Kwon et al.,
//! SOSP'23).

use std::cmp::Reverse;
use std::ops::Range;

use crate::config::VictimOrder;
use crate::sequence::Sequence;

use super::{Draft, Scheduler};

impl Scheduler {
    /// Takes the blocks of one request for the sequence at `index`, which has too few. Gives the place at which to go
    /// on: that sequence, or what follows it if its own request is the one to give way.
    ///
    /// The request that came first is spared. All blocks that it does not hold are free or in a victim's hands, and it
    /// fits into the pool alone, so there is a victim whenever it is short of blocks.
    pub(super) fn make_room(&mut self, index: usize, draft: &mut Draft) -> Option<usize> {
        let victim = self.victim()?;
        let arrival = self.running[victim.start].id().arrival;
        self.preempt(arrival, draft);
        Some(if victim.start > index {
            index
        } else if victim.contains(&index) {
            victim.start
        } else {
            index - victim.len()
        })
    }

    /// The request to preempt, as its places in `running`.
    fn victim(&self) -> Option<Range<usize>> {
        let families = self.running.chunk_by(|one, next| one.id().arrival == next.id().arrival).skip(1);
        let victim = families.min_by_key(|family| {
            let blocks: Vec<_> = family.iter().map(|sequence| &sequence.blocks).collect();
            let lost_work: usize = match self.config.victims {
                VictimOrder::LeastLostWork => family.iter().map(Sequence::computed).sum(),
                VictimOrder::LatestArrival => 0,
            };
            // One whose blocks are all in use by others too is of no help.
            let is_useless = self.config.victims == VictimOrder::LeastLostWork && !self.cache.would_free(&blocks);
            (is_useless, lost_work, Reverse(family[0].id()))
        })?;
        Some(self.running_of(victim[0].id().arrival))
    }

    /// Sends the blocks of a running request home, takes its part out of the plan, and puts it back into the queue.
    fn preempt(&mut self, arrival: u64, draft: &mut Draft) {
        let mut family = self.take_out(arrival);
        for sequence in family.iter_mut().rev() {
            sequence.release(&mut self.cache);
            sequence.resumes = true;
        }
        // They share the full blocks of their prompt: the first computes them for all.
        family.iter_mut().skip(1).for_each(|sequence| sequence.follows = true);
        family[0].follows = false;
        let spans = draft.plan.spans.iter().filter(|span| span.seq.arrival == arrival);
        draft.budget += spans.map(|span| span.len).sum::<usize>();
        draft.plan.spans.retain(|span| span.seq.arrival != arrival);
        draft.copies.retain(|(seq, _)| seq.arrival != arrival);
        draft.plan.preempted.extend(family.iter().map(Sequence::id));
        self.totals.preemptions += 1;
        let place = self.waiting.partition_point(|sequence| sequence.id().arrival < arrival);
        for sequence in family.into_iter().rev() {
            self.waiting.insert(place, sequence);
        }
    }
}
