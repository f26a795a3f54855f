//! Ends before the end: taken back, stopped by a text, or late.

use octavo_sched::{FinishReason, RequestId, SeqId};

use crate::account::Live;
use crate::checked::{Checked, has_blocks};

impl Checked {
    pub(crate) fn abort(&mut self, index: usize) {
        let Some(arrival) = self.live.keys().copied().nth(index % self.live.len().max(1)) else {
            assert_eq!(self.both(|scheduler| scheduler.end(RequestId(0), FinishReason::Abort)), [0_u32; 0]);
            return;
        };
        let count = self.end_whole(arrival, FinishReason::Abort);
        self.totals.finished.abort += count;
    }

    fn end_whole(&mut self, arrival: u64, reason: FinishReason) -> u64 {
        let live = self.end(arrival);
        let choices = live.choices();
        assert_eq!(self.both(|scheduler| scheduler.end(live.request.id, reason)), choices);
        self.planned.retain(|seq, _| seq.arrival != arrival);
        choices.len() as u64
    }

    pub(crate) fn end_choice(&mut self, index: usize) {
        let all = self
            .live
            .iter()
            .flat_map(|(&arrival, live)| live.continuations.keys().map(move |&choice| SeqId { arrival, choice }));
        let all: Vec<_> = all.collect();
        let Some(&seq) = all.get(index % all.len().max(1)) else { return };
        let is_awaited = self.live[&seq.arrival].runs && self.follows(seq, 1) && !self.follows(seq, 0);
        let live = self.live.get_mut(&seq.arrival).expect("it has not ended");
        let has_text = live.continuations[&seq.choice].tokens.len() > live.request.prompt.len() && !live.is_search();
        let id = live.request.id;
        let expected = has_text.then_some(live.continuations.len() == 1);
        if has_text {
            let ended = live.continuations.remove(&seq.choice).expect("it is there");
            if let Some((_, next)) = live.continuations.range_mut(seq.choice..).next().filter(|_| is_awaited) {
                next.computed = ended.computed;
            }
            self.planned.remove(&seq);
            self.totals.finished.stop += 1;
            self.visits.ended_choices += 1;
        }
        if expected == Some(true) {
            self.end(seq.arrival);
        }
        assert_eq!(self.both(|scheduler| scheduler.end_choice(id, seq.choice, FinishReason::Stop)), expected);
    }

    /// Whether the continuation so many places after one of a running request waits for the first of them.
    fn follows(&self, seq: SeqId, places: usize) -> bool {
        let live = &self.live[&seq.arrival];
        let (&first, _) = live.continuations.iter().next().expect("it has not ended");
        let later = live.continuations.range(seq.choice..).nth(places);
        later.is_some_and(|(&choice, _)| {
            let is_empty = !has_blocks(self.sequence(SeqId { choice, ..seq }));
            live.request.prompt.len() >= self.config.block_size && choice != first && is_empty
        })
    }

    /// Ends what is late, as an engine does.
    pub(crate) fn expire(&mut self) {
        let now = self.now;
        let late = self.both(|scheduler| scheduler.expired(now));
        self.visits.expired += late.len() as u64;
        for id in late {
            let is_it = |(_, live): &(&u64, &Live)| live.request.id == id;
            let arrival = *self.live.iter().find(is_it).expect("it has not ended").0;
            let count = self.end_whole(arrival, FinishReason::Deadline);
            self.totals.finished.deadline += count;
        }
    }
}
