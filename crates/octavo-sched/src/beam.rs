//! Beam search: which partial outputs go on, which are complete, and when nothing can change any more.
//!
//! At each step every beam proposes the tokens that are likeliest to follow it, twice as many as the search is wide.
//! With an end token an output is complete. Of all the others, the likeliest `width` go on: by the sum of their
//! log-probabilities, then by that of the beam they come from, then by the lower token. What reaches the final length is
//! complete too.
//!
//! The score of a complete output is its log-probability, the end token's included, divided by its length, prompt
//! included and end token not, to the power of `length_penalty`. The best `width` are given; equal ones in the order in
//! which they were completed. Sums and scores are of 64 bits.

use std::cmp::Ordering;

use crate::plan::{Candidate, FinishReason, Hypothesis};
use crate::request::{BeamParams, TokenId};

/// The state of one search: no block and no sequence, only what was proposed and what became of it.
#[derive(Debug)]
pub(crate) struct Search {
    width: usize,
    length_penalty: f64,
    final_len: usize,
    /// Length of all that is live, prompt and output.
    len: usize,
    /// Partial outputs that go on, the likeliest first, none longer than another.
    live: Vec<Beam>,
    /// The best so far, no more than `width`.
    completed: Vec<Completed>,
}

/// A partial output, and the choice that its sequence goes by.
#[derive(Debug)]
struct Beam {
    choice: u32,
    hypothesis: Hypothesis,
}

/// A complete output.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Completed {
    score: f64,
    pub hypothesis: Hypothesis,
    /// The token that ended it; otherwise its length did.
    pub stop_token: Option<TokenId>,
}

impl Completed {
    pub(crate) fn finish(&self) -> FinishReason {
        if self.stop_token.is_some() { FinishReason::Stop } else { FinishReason::Length }
    }
}

/// What one beam proposes; nothing if its row could not be computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proposal<'a> {
    pub choice: u32,
    pub candidates: &'a [Candidate],
}

/// A beam that goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Survivor {
    /// The choice that it comes from.
    pub parent: u32,
    /// The same for the likeliest that comes from there, a new one for each other.
    pub choice: u32,
    pub token: TokenId,
}

/// What came of a step.
#[derive(Debug, PartialEq)]
pub(crate) enum Progress {
    /// These go on, the likeliest first.
    GoesOn(Vec<Survivor>),
    /// The outputs, best first.
    Ended(Vec<Completed>),
    /// No beam had anything to propose.
    Failed,
}

/// A continuation of a beam: the beam's place among the live ones, and what follows it.
struct Continuation {
    parent: usize,
    candidate: Candidate,
    cumulative: f64,
}

impl Search {
    /// A search that begins with the prompt, as choice 0.
    pub(crate) fn new(params: BeamParams, prompt_len: usize, final_len: usize) -> Self {
        let hypothesis = Hypothesis { cumulative_logprob: 0.0, tokens: vec![] };
        Self {
            width: params.width as usize,
            length_penalty: f64::from(params.length_penalty),
            final_len,
            len: prompt_len,
            live: vec![Beam { choice: 0, hypothesis }],
            completed: vec![],
        }
    }

    /// How many more beams there may be than there are.
    pub(crate) fn num_vacant(&self) -> usize {
        self.width - self.live.len()
    }

    /// The choices of the live beams, the likeliest first.
    pub(crate) fn choices(&self) -> impl Iterator<Item = u32> {
        self.live.iter().map(|beam| beam.choice)
    }

    /// Takes one step. New beams are numbered from `next_choice` on.
    ///
    /// # Panics
    /// If a live beam has no entry in `proposals`.
    pub(crate) fn advance(
        &mut self,
        proposals: &[Proposal],
        is_end: impl Fn(TokenId) -> bool,
        next_choice: &mut u32,
    ) -> Progress {
        if proposals.iter().all(|proposal| proposal.candidates.is_empty()) {
            return Progress::Failed;
        }
        let mut following = vec![];
        for (parent, beam) in self.live.iter().enumerate() {
            let proposal = proposals.iter().find(|proposal| proposal.choice == beam.choice);
            let Some(proposal) = proposal else { panic!("beam {} has proposed nothing", beam.choice) };
            following.extend(proposal.candidates.iter().map(|&candidate| {
                let cumulative = beam.hypothesis.cumulative_logprob + f64::from(candidate.logprob);
                Continuation { parent, candidate, cumulative }
            }));
        }
        let (ended, mut going): (Vec<_>, Vec<_>) = following.into_iter().partition(|next| is_end(next.candidate.token));
        for next in &ended {
            self.complete(self.hypothesis(next), self.len, Some(next.candidate.token));
        }
        going.sort_by(|one, other| one.order(other));
        going.truncate(self.width);
        self.len += 1;
        if self.len >= self.final_len || going.is_empty() || self.is_decided(going[0].cumulative) {
            if self.len >= self.final_len {
                going.iter().for_each(|next| self.complete(self.hypothesis(next), self.len, None));
            }
            return Progress::Ended(std::mem::take(&mut self.completed));
        }
        Progress::GoesOn(self.go_on(&going, next_choice))
    }

    fn hypothesis(&self, next: &Continuation) -> Hypothesis {
        let before = &self.live[next.parent].hypothesis.tokens;
        let tokens = before.iter().copied().chain([next.candidate]).collect();
        Hypothesis { cumulative_logprob: next.cumulative, tokens }
    }

    /// Keeps a complete output if it is among the best so far.
    fn complete(&mut self, hypothesis: Hypothesis, len: usize, stop_token: Option<TokenId>) {
        let score = self.score(hypothesis.cumulative_logprob, len);
        let place = self.completed.partition_point(|better| better.score.total_cmp(&score) != Ordering::Less);
        self.completed.insert(place, Completed { score, hypothesis, stop_token });
        self.completed.truncate(self.width);
    }

    fn score(&self, cumulative: f64, len: usize) -> f64 {
        // What is certain stays so at any length, were its power 0.
        if cumulative == 0.0 { 0.0 } else { cumulative / (len as f64).powf(self.length_penalty) }
    }

    /// Whether no output that is yet to come can be better than those to be given. Log-probabilities are at most 0, so
    /// that none gets a greater sum than the likeliest beam has, and with the same sum the score is greatest at one end
    /// of the lengths that are left.
    fn is_decided(&self, likeliest: f64) -> bool {
        let bound = self.score(likeliest, self.len).max(self.score(likeliest, self.final_len));
        self.completed.len() == self.width && self.completed.last().is_some_and(|worst| worst.score >= bound)
    }

    fn go_on(&mut self, going: &[Continuation], next_choice: &mut u32) -> Vec<Survivor> {
        let mut is_taken = vec![false; self.live.len()];
        let mut number = |next: &Continuation| {
            let parent = self.live[next.parent].choice;
            if !std::mem::replace(&mut is_taken[next.parent], true) {
                return Survivor { parent, choice: parent, token: next.candidate.token };
            }
            let choice = *next_choice;
            *next_choice += 1;
            Survivor { parent, choice, token: next.candidate.token }
        };
        let survivors: Vec<_> = going.iter().map(&mut number).collect();
        let beam = |(next, survivor): (&Continuation, &Survivor)| Beam {
            choice: survivor.choice,
            hypothesis: self.hypothesis(next),
        };
        self.live = going.iter().zip(&survivors).map(beam).collect();
        survivors
    }
}

impl Continuation {
    /// The likeliest first; live beams stand in that order already.
    fn order(&self, other: &Self) -> Ordering {
        let by_logprob = other.cumulative.total_cmp(&self.cumulative);
        by_logprob.then(self.parent.cmp(&other.parent)).then(self.candidate.token.cmp(&other.candidate.token))
    }
}

#[cfg(test)]
mod tests;
