//! What must hold of every plan, and what comes of carrying it out.

use std::collections::HashSet;

use octavo_sched::{Admitted, PrefixCaching, SeqId, StepPlan, VictimOrder};

use crate::account::Live;
use crate::checked::Checked;
use crate::history::History;

impl Checked {
    pub(crate) fn check_plan(&mut self, plan: &StepPlan) {
        assert_eq!(plan.spans.is_empty(), self.live.is_empty(), "there is a step exactly when there is work");
        let first = self.live.iter().find(|(_, live)| live.runs).map(|(&arrival, _)| arrival);
        let before = self.cached.clone();
        self.planned = plan.spans.iter().map(|span| (span.seq, *span)).collect();
        self.take_preempted(plan, first);
        self.note_cached();
        plan.admitted.iter().for_each(|admitted| self.take_admitted(admitted, plan, &before));
        self.take_joined(&before);
        self.check_spans(plan);
        if let Some(first) = first.or(self.live.keys().next().copied()) {
            assert!(plan.spans.iter().any(|span| span.seq.arrival == first), "the first always goes on");
        }
        self.check_short_of_blocks(plan);
        self.check_room_kept(plan, plan.admitted.len() + usize::from(first.is_some()));
        self.count_iterations(plan);
        self.totals.steps += u64::from(!plan.spans.is_empty());
        self.totals.tokens_scheduled += plan.spans.iter().map(|span| span.len as u64).sum::<u64>();
        self.totals.blocks_copied += plan.copies.len() as u64;
        self.visits.copies += plan.copies.len() as u64;
    }

    /// Whole requests give way, never the first, and under [`VictimOrder::LatestArrival`] the last ones.
    fn take_preempted(&mut self, plan: &StepPlan, first: Option<u64>) {
        let arrivals: HashSet<_> = plan.preempted.iter().map(|seq| seq.arrival).collect();
        for &arrival in &arrivals {
            let live = self.live.get_mut(&arrival).expect("what is preempted has not ended");
            assert!(live.runs && Some(arrival) != first, "the earliest that runs is never preempted");
            let family: Vec<_> = plan.preempted.iter().filter(|seq| seq.arrival == arrival).collect();
            assert!(family.iter().map(|seq| &seq.choice).eq(live.continuations.keys()), "{family:?}");
            assert!(plan.spans.iter().all(|span| span.seq.arrival != arrival));
            assert!(plan.admitted.iter().all(|admitted| admitted.request != live.request.id));
            self.visits.preempted_families += u64::from(live.continuations.len() > 1);
            self.visits.preempted_searches += u64::from(live.continuations.len() > 1 && live.is_search());
            live.runs = false;
            live.continuations.values_mut().for_each(|continuation| continuation.computed = 0);
        }
        if self.config.victims == VictimOrder::LatestArrival {
            let goes_on = |(&arrival, live): (&u64, &Live)| live.runs.then_some(arrival);
            let last = self.live.iter().filter_map(goes_on).next_back();
            assert!(arrivals.iter().all(|&arrival| last.is_none_or(|last| last < arrival)), "the latest give way");
        }
        self.totals.preemptions += arrivals.len() as u64;
        self.visits.preempted += arrivals.len() as u64;
    }

    fn take_admitted(&mut self, admitted: &Admitted, plan: &StepPlan, before: &[HashSet<History>]) {
        let mut waiting = self.live.iter_mut().filter(|(_, live)| !live.runs);
        let (&arrival, live) = waiting.next().expect("what is admitted has been waiting");
        assert_eq!(live.request.id, admitted.request, "first come, first served");
        live.runs = true;
        live.enter_age(self.age, &mut self.histories, |_| true);
        let is_first_time = !std::mem::replace(&mut live.was_admitted, true);
        if is_first_time {
            self.totals.admitted += 1;
            self.totals.queue_time += self.now - live.request.arrival;
        }
        self.visits.hits += u64::from(admitted.cached_tokens > 0);
        self.visits.resumed_hits += u64::from(admitted.cached_tokens > 0 && !is_first_time);
        let (&choice, leader) = live.continuations.iter_mut().next().expect("it has not ended");
        leader.computed = admitted.cached_tokens;
        assert!(self.planned.contains_key(&SeqId { arrival, choice }), "what is admitted gets a span at once");
        let live = &self.live[&arrival];
        let leader = &live.continuations[&choice];
        if !self.reads_cache(live) {
            assert_eq!((admitted.cached_tokens, admitted.first_difference), (0, None));
            return;
        }
        if is_first_time {
            self.totals.prefix_queries += leader.tokens.len() as u64;
            self.totals.prefix_hits += admitted.cached_tokens as u64;
        }
        // Several continuations find at first only what they share.
        let is_alone = live.continuations.len() == 1;
        let limit = if is_alone { leader.tokens.len() - 1 } else { self.shared_len(live) };
        // A beam computes something before the last tokens of all go together.
        let limit = if live.is_search() && !is_alone { limit.min(leader.tokens.len() - 2) } else { limit };
        // While a plan is made blocks are only lost to the cache.
        let [most, least] = [before, &self.cached].map(|cached| self.longest_hit(&leader.histories, 0, limit, cached));
        let found = admitted.cached_tokens;
        assert!((least..=most).contains(&found), "{found} tokens cached, expected {least}..={most}: {plan:?}");
        self.check_first_difference(admitted, &leader.histories, limit);
    }

    /// Once the first has computed what they share, the continuations of a preempted request part, and each looks for more.
    fn take_joined(&mut self, before: &[HashSet<History>]) {
        let running = self.live.iter().filter(|(_, live)| live.runs);
        let all = running
            .flat_map(|(&arrival, live)| live.continuations.keys().map(move |&choice| SeqId { arrival, choice }));
        for seq in all.collect::<Vec<_>>() {
            let (live, computed) = (&self.live[&seq.arrival], self.sequence(seq).computed());
            let (continuation, shared) = (&live.continuations[&seq.choice], self.shared_len(live));
            if continuation.computed == computed {
                continue;
            }
            let is_first = live.continuations.keys().next() == Some(&seq.choice);
            let expected = if is_first { shared } else { 0 };
            assert!(live.continuations.len() > 1 && continuation.computed == expected, "{seq:?}: {continuation:?}");
            let num_left = 1 + usize::from(live.is_search());
            let limit = if self.reads_cache(live) { continuation.tokens.len() - num_left } else { shared };
            let hit = |cached| self.longest_hit(&continuation.histories, shared, limit, cached);
            let [most, least] = [before, &self.cached].map(hit);
            assert!((least..=most).contains(&computed), "{seq:?} has {computed}, expected {least}..={most}");
            self.visits.joins += u64::from(!is_first);
            let live = self.live.get_mut(&seq.arrival).expect("it runs");
            live.continuations.entry(seq.choice).and_modify(|continuation| continuation.computed = computed);
        }
    }

    fn reads_cache(&self, live: &Live) -> bool {
        self.config.prefix_cache != PrefixCaching::Off && !live.request.params.skip_reading_prefix_cache
    }

    /// Tokens in full blocks of the prompt.
    fn shared_len(&self, live: &Live) -> usize {
        live.request.prompt.len() / self.config.block_size * self.config.block_size
    }

    fn check_spans(&self, plan: &StepPlan) {
        let budget = self.config.max_num_batched_tokens;
        let num_tokens: usize = plan.spans.iter().map(|span| span.len).sum();
        assert!(num_tokens <= budget && plan.spans.len() <= self.config.max_num_seqs);
        assert!(plan.spans.is_sorted_by(|a, b| a.seq < b.seq), "one span a sequence, in order of arrival");
        for span in &plan.spans {
            let live = &self.live[&span.seq.arrival];
            let continuation = &live.continuations[&span.seq.choice];
            let num_tokens_known = continuation.tokens.len();
            assert!(live.runs && span.len > 0 && span.drafts == 0 && span.end() <= num_tokens_known);
            assert_eq!(span.start, continuation.computed, "positions are computed once and in order");
            let continuations = if live.is_search() { 1 } else { 1 + live.unborn as usize };
            let samples = if span.end() == num_tokens_known { continuations } else { 0 };
            assert_eq!(span.samples, samples);
            let parts = live.continuations.len() > 1 && span.end() == self.shared_len(live);
            // The last token of a beam waits for those of the others.
            let waits = live.is_search() && !live.is_level() && span.end() + 1 == num_tokens_known;
            let is_cut = span.end() < num_tokens_known && !parts && !waits;
            // A victim leaves a budget behind that was spoken for.
            assert!(
                !is_cut || num_tokens == budget || !plan.preempted.is_empty(),
                "{span:?} is shorter than it need be"
            );
        }
        self.check_beams(plan);
        let waits =
            |(arrival, live): (&u64, &Live)| live.runs && plan.spans.iter().all(|span| span.seq.arrival != *arrival);
        let is_full = num_tokens == budget || self.is_closed(plan);
        assert!(is_full || !plan.preempted.is_empty() || !self.live.iter().any(waits));
    }

    /// The last tokens of all beams of a search are in the plan, or none.
    fn check_beams(&self, plan: &StepPlan) {
        for (&arrival, live) in self.live.iter().filter(|(_, live)| live.is_search()) {
            let spans = plan.spans.iter().filter(|span| span.seq.arrival == arrival);
            let num_last = spans.filter(|span| span.samples > 0).count();
            assert!(num_last == 0 || num_last == live.continuations.len(), "{plan:?}");
            assert!(num_last == 0 || live.is_level());
        }
    }

    /// Whether a search found less budget than it has beams, so that nobody later gets it.
    pub(crate) fn is_closed(&self, plan: &StepPlan) -> bool {
        let left = self.config.max_num_batched_tokens - plan.spans.iter().map(|span| span.len).sum::<usize>();
        self.live.iter().any(|(&arrival, live)| {
            let is_left_out = plan.spans.iter().all(|span| span.seq.arrival < arrival);
            live.runs && live.is_search() && is_left_out && live.is_level() && left < live.continuations.len()
        })
    }

    /// Iterations are shared out in order of arrival (Orca: Yu et al., OSDI'22), if the latest give way.
    fn count_iterations(&mut self, plan: &StepPlan) {
        let served: HashSet<_> = plan.spans.iter().map(|span| span.seq.arrival).collect();
        let mut most_later = 0;
        for (arrival, live) in self.live.iter_mut().rev() {
            live.iterations += usize::from(served.contains(arrival));
            live.most_later = live.most_later.max(most_later);
            most_later = live.iterations.max(live.most_later);
            if self.config.victims == VictimOrder::LatestArrival {
                assert!(
                    live.iterations >= live.most_later,
                    "request {arrival} is behind one that came later: {live:?}"
                );
            }
        }
    }
}
