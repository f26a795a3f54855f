//! A beam search as its definition has it: every list kept whole, sorted anew at each step.

use octavo_sched::{Candidate, FinishReason, Hypothesis, StepRun, TokenId};

use crate::account::{Continuation, Live};
use crate::history::Histories;
use crate::model;

#[derive(Debug)]
pub struct Search {
    width: usize,
    penalty: f64,
    /// The partial outputs, the likeliest first.
    standing: Vec<Beam>,
    /// With their scores, in the order in which they were completed.
    complete: Vec<(f64, Found)>,
}

#[derive(Debug)]
struct Beam {
    choice: u32,
    output: Vec<Candidate>,
    sum: f64,
}

#[derive(Debug, Clone)]
pub struct Found {
    pub hypothesis: Hypothesis,
    pub finish: FinishReason,
}

impl Found {
    pub fn tokens(&self) -> Vec<TokenId> {
        self.hypothesis.tokens.iter().map(|candidate| candidate.token).collect()
    }
}

impl Search {
    pub fn new(width: usize, penalty: f32) -> Self {
        let prompt = Beam { choice: 0, output: vec![], sum: 0.0 };
        Self { width, penalty: f64::from(penalty), standing: vec![prompt], complete: vec![] }
    }

    fn score(&self, sum: f64, len: usize) -> f64 {
        sum / (len as f64).powf(self.penalty)
    }

    fn add(&mut self, len: usize, output: Vec<Candidate>, sum: f64, finish: FinishReason) {
        let hypothesis = Hypothesis { cumulative_logprob: sum, tokens: output };
        self.complete.push((self.score(sum, len), Found { hypothesis, finish }));
    }

    fn best(&self) -> Vec<(f64, Found)> {
        let mut all = self.complete.clone();
        all.sort_by(|one, other| other.0.total_cmp(&one.0));
        all.truncate(self.width);
        all
    }
}

impl Live {
    pub fn is_search(&self) -> bool {
        self.search.is_some()
    }

    /// Takes one step of the search; gives what it has found if it has ended, nothing if it failed.
    pub fn advance(&mut self, runs: &[(u32, &StepRun)], histories: &mut Histories) -> Option<Vec<Found>> {
        let mut search = self.search.take().expect("it is a search");
        let (prompt_len, final_len) = (self.request.prompt.len(), self.final_len);
        let proposed = |choice: u32| match runs.iter().find(|(of, _)| *of == choice).expect("all go together").1 {
            StepRun::Candidates(candidates) => candidates.clone(),
            _ => vec![],
        };
        assert_eq!(runs.len(), search.standing.len(), "no other beam goes on");
        let standing = std::mem::take(&mut search.standing);
        let len = prompt_len + standing[0].output.len();
        let mut following = vec![];
        for (place, beam) in standing.iter().enumerate() {
            for candidate in proposed(beam.choice) {
                let (output, sum) =
                    ([&beam.output[..], &[candidate]].concat(), beam.sum + f64::from(candidate.logprob));
                if model::is_end(&self.request.params, candidate.token) {
                    search.add(len, output, sum, FinishReason::Stop);
                } else {
                    following.push((place, output, sum));
                }
            }
        }
        if following.is_empty() && standing.iter().all(|beam| proposed(beam.choice).is_empty()) {
            return Some(vec![]);
        }
        // Beams and candidates stand in order, so that equal ones do afterwards.
        following.sort_by(|one, other| other.2.total_cmp(&one.2));
        following.truncate(search.width);
        if len + 1 == final_len {
            following.drain(..).for_each(|(_, output, sum)| search.add(len + 1, output, sum, FinishReason::Length));
        }
        let best = search.best();
        let reach = |sum| search.score(sum, len + 1).max(search.score(sum, final_len));
        let may_improve = |(_, _, sum): &(usize, Vec<Candidate>, f64)| {
            best.len() < search.width || best.iter().any(|(score, _)| *score < reach(*sum))
        };
        if !following.iter().any(may_improve) {
            return Some(best.into_iter().map(|(_, found)| found).collect());
        }
        let parents = std::mem::take(&mut self.continuations);
        let mut taken = vec![];
        for (place, output, sum) in following {
            let parent = standing[place].choice;
            let choice = if taken.contains(&place) { self.num_choices } else { parent };
            self.num_choices += u32::from(taken.contains(&place));
            taken.push(place);
            let mut continuation: Continuation = parents[&parent].clone();
            continuation.push(output[output.len() - 1].token, histories);
            assert!(self.continuations.insert(choice, continuation).is_none(), "a number is used again");
            search.standing.push(Beam { choice, output, sum });
        }
        self.unborn = (search.width - search.standing.len()) as u32;
        self.search = Some(search);
        None
    }

    /// Whether all beams can propose what comes next once their last tokens are computed.
    pub fn is_level(&self) -> bool {
        let is_level = |beam: &Continuation| beam.computed + 1 == beam.tokens.len();
        self.continuations.len() == 1 || self.continuations.values().all(is_level)
    }
}
