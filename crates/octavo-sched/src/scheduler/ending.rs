//! How requests end, whole or one continuation at a time, and how their blocks come home.

use crate::plan::{FinishReason, StepOutput};
use crate::request::{Micros, RequestId, SeqId};
use crate::sequence::Sequence;

use super::{Place, Scheduler};

impl Scheduler {
    /// Ends a request and sends its blocks home at once. Gives the choices of it that had not ended, those included
    /// that were still to part from the first; none if the request has ended already, or never was. A search ends with
    /// one, choice 0, and what it has found is lost.
    ///
    /// It may come between `schedule` and `commit`. There is no output for the request after it.
    pub fn end(&mut self, id: RequestId, reason: FinishReason) -> Vec<u32> {
        let Some(Place { arrival, search, .. }) = self.forget(id) else { return vec![] };
        let mut choices = vec![];
        for mut sequence in self.take_out(arrival) {
            choices.push(sequence.id().choice);
            choices.extend((1..).take(sequence.unborn));
            self.let_go(&mut sequence);
        }
        if search.is_some() {
            choices = vec![0];
        }
        self.totals.finished.count(reason, choices.len());
        choices
    }

    /// Ends one continuation of a request, as [`end`](Self::end) does all: a stop string was found in its text. Gives
    /// whether the request has ended with it; `None`, and no change, if the continuation is not there or has no token, or
    /// is a beam of a search.
    pub fn end_choice(&mut self, id: RequestId, choice: u32, reason: FinishReason) -> Option<bool> {
        let seq = SeqId { arrival: self.requests.get(&id)?.arrival, choice };
        self.sequence(seq).filter(|sequence| sequence.output_len() > 0 && !sequence.is_beam())?;
        let (mut ended, next) = if let Ok(index) = self.running.binary_search_by_key(&seq, Sequence::id) {
            (self.running.remove(index), self.running.get_mut(index))
        } else {
            let index = self.waiting.binary_search_by_key(&seq, Sequence::id).ok()?;
            (self.waiting.remove(index)?, self.waiting.get_mut(index))
        };
        let waits_for_it = |next: &&mut Sequence| next.id().arrival == seq.arrival && next.follows && !ended.follows;
        if let Some(next) = next.filter(waits_for_it) {
            // It goes on where the ended one stood; the others wait for it.
            next.part_from(&ended, &mut self.cache);
        }
        self.finish(&mut ended, reason);
        let is_last = self.running_of(seq.arrival).is_empty() && self.waiting_of(seq.arrival).is_empty();
        if is_last {
            self.forget(id);
        }
        Some(is_last)
    }

    /// The requests whose deadline has passed, the earliest deadline first.
    pub fn expired(&self, now: Micros) -> Vec<RequestId> {
        let late = self.deadlines.iter().take_while(|(deadline, ..)| *deadline <= now);
        late.map(|&(.., id)| id).collect()
    }

    /// Sends the blocks of finished sequences home, and marks the output with which a request has ended.
    pub(super) fn end_finished(&mut self, outputs: &mut [StepOutput]) {
        let mut finished = outputs.iter().filter_map(|output| Some((output.seq, output.finish?))).peekable();
        if finished.peek().is_none() {
            return;
        }
        let mut running = std::mem::take(&mut self.running);
        running.retain_mut(|sequence| match finished.next_if(|(id, _)| *id == sequence.id()) {
            Some((_, reason)) => {
                self.finish(sequence, reason);
                false
            }
            None => true,
        });
        self.running = running;
        for output in outputs.iter_mut().rev().filter(|output| output.finish.is_some()) {
            if self.running_of(output.seq.arrival).is_empty() {
                // Of several, the one that comes last is seen first.
                output.last = self.forget(output.request).is_some();
            }
        }
    }

    /// Strikes a request that has ended from the list, if it is there.
    pub(super) fn forget(&mut self, id: RequestId) -> Option<Place> {
        let place = self.requests.remove(&id)?;
        if let Some(deadline) = place.deadline {
            self.deadlines.remove(&(deadline, place.arrival, id));
        }
        Some(place)
    }

    /// Counts the end of a sequence that is in no queue any more, and sends its blocks home.
    fn finish(&mut self, sequence: &mut Sequence, reason: FinishReason) {
        self.let_go(sequence);
        self.totals.finished.count(reason, 1);
    }

    /// Sends the blocks of a sequence home that is in no queue any more.
    fn let_go(&mut self, sequence: &mut Sequence) {
        sequence.release(&mut self.cache);
        if sequence.output_len() > 0 {
            self.expected.ended();
        }
    }
}
