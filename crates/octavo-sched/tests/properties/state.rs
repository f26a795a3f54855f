//! What must hold of a scheduler at any time.

use std::collections::{HashMap, HashSet};

use octavo_sched::{BlockState, PrefixCaching, SchedulerStats, SeqId, Sequence, VACANT_BLOCK};

use crate::account::Live;
use crate::checked::Checked;

impl Checked {
    pub(crate) fn check_state(&mut self) {
        assert_eq!(self.scheduler.audit(), Ok(()));
        let map = self.scheduler.block_map();
        if let Some(twin) = &self.twin {
            assert_eq!((twin.audit(), twin.block_map()), (Ok(()), map.clone()), "hashes make no difference");
            assert_eq!(twin.stats(), self.scheduler.stats(), "hashes make no difference");
        }
        for (&arrival, live) in &self.live {
            let ids = live.continuations.keys().map(|&choice| SeqId { arrival, choice });
            ids.for_each(|seq| self.check_sequence(seq, live, &map));
            assert!(
                live.is_search()
                    || (1..=live.unborn).all(|choice| self.scheduler.sequence(SeqId { arrival, choice }).is_none())
            );
        }
        self.check_stats(&map);
        self.check_late();
        self.check_promises();
        self.note_cached();
    }

    pub(crate) fn sequences(&self) -> impl Iterator<Item = (&Sequence, &Live)> {
        self.live.iter().flat_map(move |(&arrival, live)| {
            let sequence = move |&choice: &u32| (self.sequence(SeqId { arrival, choice }), live);
            live.continuations.keys().map(sequence)
        })
    }

    fn check_sequence(&self, seq: SeqId, live: &Live, map: &[Vec<BlockState>]) {
        let (sequence, continuation) = (self.sequence(seq), &live.continuations[&seq.choice]);
        let computed = continuation.computed;
        assert_eq!((sequence.tokens(), sequence.final_len()), (&continuation.tokens[..], live.final_len));
        assert_eq!(sequence.computed(), computed, "positions are computed by spans, or found");
        assert!(computed < continuation.tokens.len(), "the last token is always left to compute");
        let block_size = self.config.block_size;
        let end = self.planned.get(&seq).map_or(computed, |span| span.end());
        let age = continuation.histories.first().map(|&history| self.histories.age(history));
        let is_published = self.config.prefix_cache == PrefixCaching::On && age == Some(Some(self.age));
        for ((group, table), states) in self.config.groups.iter().zip(sequence.tables()).zip(map) {
            let hidden = group.window.map_or(0, |window| (computed + 1).saturating_sub(window) / block_size);
            assert_eq!(table.blocks().len(), end.div_ceil(block_size), "no block is taken before it is needed");
            let is_vacant = |(index, &block): (usize, &u32)| (block == VACANT_BLOCK) == (index < hidden);
            assert!(table.blocks().iter().enumerate().all(is_vacant), "{hidden} are hidden: {:?}", table.blocks());
            // Since the cache has each but once, those that begin alike share.
            let mut full = table.blocks()[..computed / block_size].iter().skip(hidden);
            assert!(full.all(|&block| states[block as usize].cached == is_published), "{seq:?}: {states:?}");
        }
        if live.runs {
            self.check_visible(seq, computed, computed);
        } else {
            assert_eq!(computed, 0, "what waits holds nothing");
        }
    }

    /// All counts, from the tables and the account alone.
    fn check_stats(&mut self, map: &[Vec<BlockState>]) {
        let stats = self.scheduler.stats();
        let block_size = self.config.block_size;
        let (mut counted, mut held) = (SchedulerStats::default(), 0);
        for (group, states) in map.iter().enumerate() {
            let mut owned: HashMap<u32, (u32, usize)> = HashMap::new();
            let mut tails = vec![];
            for (sequence, live) in self.sequences() {
                let table = &sequence.tables()[group];
                let (computed, stored) = (sequence.computed(), live.final_len - 1);
                for (index, &block) in table.blocks().iter().enumerate().skip(table.num_vacant()) {
                    let filled = computed.saturating_sub(index * block_size).min(block_size);
                    let entry = owned.entry(block).or_default();
                    *entry = (entry.0 + 1, entry.1.max(filled));
                    let past_the_end = ((index + 1) * block_size).saturating_sub(stored.max(index * block_size));
                    tails.push((block, past_the_end.min(block_size)));
                }
                held += table.num_held();
            }
            for (block, state) in states.iter().enumerate() {
                let (owners, filled) = owned.get(&(block as u32)).copied().unwrap_or_default();
                assert_eq!(state.owners, owners, "block {block} of group {group}");
                assert!(if owners > 0 { state.filled as usize == filled } else { state.filled == 0 || state.cached });
            }
            counted.blocks_total += states.len();
            counted.blocks_free += states.len() - owned.len();
            counted.blocks_cached += states.iter().filter(|state| state.cached).count();
            counted.blocks_shared += owned.values().filter(|(owners, _)| *owners > 1).count();
            counted.slots_used += owned.values().map(|(_, filled)| filled).sum::<usize>();
            // What is shared will be copied by whoever writes to it.
            let sole = tails.iter().filter(|(block, _)| owned[block].0 == 1);
            counted.slots_internal += sole.map(|(_, past_the_end)| past_the_end).sum::<usize>();
        }
        counted.blocks_saved = held - (counted.blocks_total - counted.blocks_free);
        counted.slots_allocated = (counted.blocks_total - counted.blocks_free) * block_size;
        counted.slots_reserved = counted.slots_allocated - counted.slots_used - counted.slots_internal;
        counted.running = self.sequences().filter(|(_, live)| live.runs).count();
        counted.waiting = self.sequences().count() - counted.running;
        // What is expected has no exact account.
        counted.blocks_promised = stats.blocks_promised;
        counted.slots_external = stats.slots_external;
        assert_eq!(stats, self.with_totals(counted));
        let external = [0, if counted.waiting > 0 { stats.blocks_free * block_size } else { 0 }];
        assert!(external.contains(&stats.slots_external), "{stats:?}");
        assert_eq!(self.scheduler.has_work(), !self.live.is_empty());
    }

    /// Those whose time is up, the earliest deadline first.
    fn check_late(&self) {
        for now in [self.now, self.now + 20] {
            let deadline = |(&arrival, live): (&u64, &Live)| Some((live.request.deadline?, arrival, live.request.id));
            let mut late: Vec<_> = self.live.iter().filter_map(deadline).filter(|late| late.0 <= now).collect();
            late.sort_unstable();
            assert_eq!(self.scheduler.expired(now), late.into_iter().map(|(.., id)| id).collect::<Vec<_>>());
        }
    }

    fn with_totals(&self, counted: SchedulerStats) -> SchedulerStats {
        SchedulerStats {
            steps: self.totals.steps,
            tokens_scheduled: self.totals.tokens_scheduled,
            admitted: self.totals.admitted,
            preemptions: self.totals.preemptions,
            prefix_queries: self.totals.prefix_queries,
            prefix_hits: self.totals.prefix_hits,
            blocks_copied: self.totals.blocks_copied,
            queue_time: self.totals.queue_time,
            finished: self.totals.finished,
            ..counted
        }
    }

    /// What can be found is computed, whole, of this age, and there once.
    pub(crate) fn note_cached(&mut self) {
        for (group, states) in self.scheduler.block_map().iter().enumerate() {
            let mut found = HashSet::new();
            for (block, _) in states.iter().enumerate().filter(|(_, state)| state.cached) {
                let slots = self.memory.block(group, block as u32);
                let whole: Option<Vec<_>> = slots.iter().copied().collect();
                let whole =
                    whole.unwrap_or_else(|| panic!("block {block} of group {group} is not computed: {slots:?}"));
                let last = whole[whole.len() - 1];
                assert!(self.histories.back_from(last).take(whole.len()).eq(whole.iter().rev().copied()));
                assert_eq!(self.histories.len(last) % whole.len(), 0, "block {block} is not aligned");
                assert_eq!(self.histories.age(last), Some(self.age), "block {block} was reset, or made from what was");
                assert!(found.insert(last), "block {block} of group {group} is in the cache twice");
                self.known.extend(whole);
            }
            self.cached[group] = found;
        }
    }
}
