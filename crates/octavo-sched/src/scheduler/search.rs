//! Beam searches: the sequences of one go on in the same steps, and fork and fall away between them.
//!
//! A search is a family of sequences, a beam each. They share blocks like forks do: the likeliest that comes of a beam
//! keeps its blocks, any other holds the same ones until it writes, and what nothing comes of gives them home.

use std::ops::Range;

use crate::beam::{Completed, Progress, Proposal, Survivor};
use crate::plan::{Candidate, FinishReason, StepOutput, StepRun};
use crate::request::{RequestId, SeqId};
use crate::sequence::Sequence;

use super::{Draft, Scheduler};

/// A run, and the beam that it is for.
type BeamRun<'a> = (RequestId, SeqId, &'a StepRun);

impl Scheduler {
    /// Up to where a sequence can be computed now: to its end, but of a beam whose search has others that are behind not
    /// its last token. What is proposed is compared, so that all propose in the same step.
    pub(super) fn computable_end(&self, index: usize) -> usize {
        let sequence = &self.running[index];
        sequence.tokens().len() - usize::from(sequence.is_beam() && !self.is_level(self.family(index)))
    }

    /// Whether a beam cannot go on in this step: others of its search are behind, or the budget is too small for the last
    /// tokens of all. Then what is left of it goes to nobody, so that no request gets more steps than one before it.
    pub(super) fn waits_for_beams(&self, index: usize, draft: &mut Draft) -> bool {
        let sequence = &self.running[index];
        if !sequence.is_beam() || sequence.pending() > 1 {
            return false;
        }
        let family = self.family(index);
        if !self.is_level(family.clone()) {
            return true;
        }
        // Once the first has got its last token, there is enough for the others.
        let is_too_small = draft.budget < family.end - index;
        if is_too_small {
            draft.budget = 0;
        }
        is_too_small
    }

    /// Whether all beams of a search can propose what comes next once their last tokens are computed.
    fn is_level(&self, family: Range<usize>) -> bool {
        family.len() == 1 || self.running[family].iter().all(|beam| beam.pending() == 1)
    }

    /// Takes in what the beams of each search have to propose. The outputs are those of the searches that have ended.
    pub(super) fn advance_searches(&mut self, runs: &[BeamRun]) -> Vec<StepOutput> {
        runs.chunk_by(|one, next| one.0 == next.0).flat_map(|runs| self.advance_search(runs)).collect()
    }

    fn advance_search(&mut self, runs: &[BeamRun]) -> Vec<StepOutput> {
        let Some(&(request, seq, _)) = runs.first() else { return vec![] };
        let family = self.running_of(seq.arrival);
        let Some(place) = self.requests.get_mut(&request) else { return vec![] };
        let Some(search) = &mut place.search else { return vec![] };
        let proposals: Vec<_> = runs.iter().map(|(_, seq, run)| proposal(seq.choice, run)).collect();
        let params = self.running[family.start].shared_params();
        let is_end = |token| params.is_end(token, &self.config.eos_token_ids);
        let progress = search.advance(&proposals, is_end, &mut place.next_choice);
        let num_vacant = search.num_vacant();
        match progress {
            Progress::GoesOn(survivors) => {
                self.expected.generated(survivors.len());
                let beams: Vec<_> = self.running.drain(family.clone()).collect();
                let mut beams = self.go_on(beams, &survivors);
                beams[0].unborn = num_vacant;
                self.running.splice(family.start..family.start, beams);
                vec![]
            }
            Progress::Ended(completed) => self.end_search(request, seq, completed),
            Progress::Failed => self.end_search(request, seq, vec![]),
        }
    }

    /// The survivors of a step in the place of the beams that they come from, in the order of their ids.
    fn go_on(&mut self, beams: Vec<Sequence>, survivors: &[Survivor]) -> Vec<Sequence> {
        let mut next = Vec::with_capacity(survivors.len());
        for survivor in survivors.iter().filter(|survivor| survivor.choice != survivor.parent) {
            let parent = beams.iter().find(|beam| beam.id().choice == survivor.parent);
            next.extend(parent.map(|parent| parent.fork(survivor.choice, &mut self.cache)));
        }
        for mut beam in beams {
            if survivors.iter().any(|survivor| survivor.choice == beam.id().choice) {
                beam.unborn = 0;
                next.push(beam);
            } else {
                beam.release(&mut self.cache);
            }
        }
        next.sort_by_key(Sequence::id);
        for survivor in survivors {
            let place = next.binary_search_by_key(&survivor.choice, |beam| beam.id().choice);
            place.into_iter().for_each(|place| next[place].push(survivor.token));
        }
        next
    }

    /// Sends the blocks of a search home and gives what it found, or one output that says that it failed.
    fn end_search(&mut self, request: RequestId, seq: SeqId, completed: Vec<Completed>) -> Vec<StepOutput> {
        self.forget(request);
        for mut beam in self.take_out(seq.arrival) {
            beam.release(&mut self.cache);
            self.expected.generated(1);
            self.expected.ended();
        }
        let output = |choice| StepOutput {
            request,
            seq: SeqId { choice, ..seq },
            tokens: vec![],
            finish: Some(FinishReason::Error),
            stop_token: None,
            last: false,
            hypothesis: None,
        };
        let found = |(choice, found): (u32, Completed)| StepOutput {
            tokens: found.hypothesis.tokens.iter().map(|candidate| candidate.token).collect(),
            finish: Some(found.finish()),
            stop_token: found.stop_token,
            hypothesis: Some(found.hypothesis),
            ..output(choice)
        };
        let mut outputs: Vec<_> = (0..).zip(completed).map(found).collect();
        if outputs.is_empty() {
            outputs.push(output(0));
        }
        outputs.iter().filter_map(|output| output.finish).for_each(|reason| self.totals.finished.count(reason, 1));
        outputs.iter_mut().next_back().into_iter().for_each(|output| output.last = true);
        outputs
    }

    /// The places of the sequences of the same request.
    fn family(&self, index: usize) -> Range<usize> {
        self.running_of(self.running[index].id().arrival)
    }
}

fn proposal(choice: u32, run: &StepRun) -> Proposal<'_> {
    let candidates: &[Candidate] = match run {
        StepRun::Candidates(candidates) => candidates,
        StepRun::Failed => &[],
        StepRun::Tokens(tokens) => panic!("the tokens {tokens:?} for beam {choice}, expected candidates"),
    };
    Proposal { choice, candidates }
}
