//! How much fits, and that what fits is let in, goes on, and is kept room for.

use octavo_sched::{SchedulerConfig, SeqId, StepPlan};

use crate::account::Live;
use crate::checked::Checked;

/// How long sequences may become, found by trying.
#[derive(Debug)]
pub struct Room {
    block_size: usize,
    context: usize,
    /// For each layer group its blocks, and how many of them one sequence holds at most if a window hides the others.
    pools: Vec<(usize, Option<usize>)>,
}

impl Room {
    pub fn new(config: &SchedulerConfig) -> Self {
        let (block_size, chunk) = (config.block_size, config.max_num_batched_tokens);
        let touched = |window: usize| {
            let first = |start: usize| (start + 1).saturating_sub(window) / block_size;
            (0..100).map(|start| (start + chunk - 1) / block_size - first(start) + 1).max()
        };
        Self {
            block_size,
            context: config.max_model_len,
            pools: config.groups.iter().map(|group| (group.num_blocks, group.window.and_then(touched))).collect(),
        }
    }

    /// Whether `n` sequences of that length, which share the full blocks of a prompt and nothing else, fit together.
    pub fn holds(&self, prompt_len: usize, len: usize, n: usize) -> bool {
        let (prompt, whole) = (prompt_len / self.block_size, len.div_ceil(self.block_size));
        self.pools.iter().all(|&(num_blocks, in_window)| {
            in_window.is_some_and(|blocks| blocks * n <= num_blocks)
                || prompt.min(whole) + n * whole.saturating_sub(prompt) <= num_blocks
        })
    }

    /// The most blocks of a layer group that a sequence of so many stored tokens holds at a time.
    pub fn most_blocks(&self, group: usize, stored: usize) -> usize {
        let whole = stored.div_ceil(self.block_size);
        self.pools[group].1.map_or(whole, |in_window| whole.min(in_window))
    }

    /// The most tokens of each of `n` continuations.
    pub fn limit(&self, prompt_len: usize, n: usize) -> usize {
        (0..=self.context).rev().find(|&len| self.holds(prompt_len, len, n)).unwrap_or(0)
    }
}

impl Checked {
    /// What is admitted beside others leaves them the room that they are expected to need. How much that is behind a window
    /// depends on the next chunk, so it may turn out to be more.
    pub(crate) fn check_room_kept(&self, plan: &StepPlan, num_requests: usize) {
        let (stats, mut groups) = (self.scheduler.stats(), self.config.groups.iter());
        if num_requests > 1 && !plan.admitted.is_empty() && groups.all(|group| group.window.is_none()) {
            assert!(stats.blocks_promised <= stats.blocks_free, "{stats:?}");
        }
    }

    /// The first in the queue is let in if there are seats and there is budget, unless there are too few blocks.
    pub(crate) fn check_short_of_blocks(&self, plan: &StepPlan) {
        let stats = self.scheduler.stats();
        let seats: usize = self.live.values().filter(|live| live.runs).map(Live::num_seats).sum();
        let num_tokens: usize = plan.spans.iter().map(|span| span.len).sum();
        let is_left_out = |first: &&Live| {
            let is_full = num_tokens == self.config.max_num_batched_tokens || self.is_closed(plan);
            !is_full && seats + first.num_seats() <= self.config.max_num_seqs
        };
        let is_preempting = !plan.preempted.is_empty();
        let first = self.live.values().find(|live| !live.runs).filter(|first| is_preempting || is_left_out(first));
        let is_short = first.is_some();
        assert_eq!(stats.slots_external, if is_short { stats.blocks_free * self.config.block_size } else { 0 });
        let is_certain = first.is_some_and(|first| !is_preempting && self.fits_for_certain(first));
        assert!(!is_certain, "there is room for everyone up to the end");
    }

    /// Whether the next step of all that runs is sure to find its blocks, so that nobody need give way.
    pub(crate) fn has_room_to_go_on(&self) -> bool {
        let (block_size, budget) = (self.config.block_size, self.config.max_num_batched_tokens);
        let map = self.scheduler.block_map();
        let running = || self.live.iter().filter(|(_, live)| live.runs);
        let needed = |group: usize, seq: SeqId, live: &Live| {
            let continuation = &live.continuations[&seq.choice];
            let known = continuation.tokens.len();
            // One of several may yet take over blocks that nobody has.
            let end = if live.continuations.len() > 1 { known } else { known.min(continuation.computed + budget) };
            end.div_ceil(block_size) + 1 - self.sequence(seq).tables()[group].blocks().len()
        };
        map.iter().enumerate().all(|(group, states)| {
            let of_all = |(&arrival, live): (&u64, &Live)| -> usize {
                live.continuations.keys().map(|&choice| needed(group, SeqId { arrival, choice }, live)).sum()
            };
            running().map(of_all).sum::<usize>() <= states.iter().filter(|state| state.owners == 0).count()
        })
    }

    /// Whether there are free blocks for all that can come, with nothing shared that is not shared now.
    pub(crate) fn fits_for_certain(&self, next: &Live) -> bool {
        let map = self.scheduler.block_map();
        (0..self.config.groups.len()).all(|group| {
            let whole = |live: &Live| self.room.most_blocks(group, live.final_len - 1);
            let growth = |(&arrival, live): (&u64, &Live)| {
                let held = |&choice: &u32| self.sequence(SeqId { arrival, choice }).tables()[group].num_held();
                let born: usize =
                    live.continuations.keys().map(|choice| whole(live) + 1 - held(choice).min(whole(live))).sum();
                born + live.unborn as usize * (whole(live) + 1)
            };
            let running: usize = self.live.iter().filter(|(_, live)| live.runs).map(growth).sum();
            let free = map[group].iter().filter(|block| block.owners == 0).count();
            running + next.num_seats() * (whole(next) + 1) <= free
        })
    }

    /// A running sequence is expected to go on for a block or to its end at least, and to its end at most.
    pub(crate) fn check_promises(&self) {
        let block_size = self.config.block_size;
        let (mut least, mut most) = (0, 0);
        for (sequence, live) in self.sequences().filter(|(_, live)| live.runs) {
            let known = sequence.tokens().len();
            let next = (known + block_size).min(live.final_len) - 1;
            let is_first = live.continuations.keys().next() == Some(&sequence.id().choice);
            let unborn = if is_first { live.unborn as usize } else { 0 };
            let shared = live.request.prompt.len() / block_size;
            for (group, table) in sequence.tables().iter().enumerate() {
                let whole = self.room.most_blocks(group, live.final_len - 1);
                most += (whole + 1).saturating_sub(table.num_held()) + unborn * whole;
                let follows = live.continuations.len() > 1 && table.blocks().is_empty();
                let own = next.div_ceil(block_size) - shared;
                least += match (self.config.groups[group].window, follows) {
                    (None, true) => own + unborn * own,
                    (None, false) => (shared + own).saturating_sub(table.num_held()) + unborn * own,
                    // A window may hide all but the block that is written to.
                    (Some(_), follows) => (unborn + usize::from(follows)) * own.min(1),
                };
            }
        }
        let promised = self.scheduler.stats().blocks_promised;
        assert!((least..=most).contains(&promised), "{promised} blocks promised, expected {least}..={most}");
    }
}
