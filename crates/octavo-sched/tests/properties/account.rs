//! A plain account of the requests that a scheduler has: what each must generate, and what it may hold.

use std::collections::BTreeMap;

use octavo_sched::{FinishReason, Request, SeqId, SeqSpan, StepOutput, StepRun, TokenId};

use crate::history::{Histories, History};
use crate::model;
use crate::search::Search;

/// A request that has not ended.
#[derive(Debug)]
pub struct Live {
    pub request: Request,
    /// The length at which each continuation ends, if nothing stops it before.
    pub final_len: usize,
    /// Those that have not ended, by choice.
    pub continuations: BTreeMap<u32, Continuation>,
    /// Choices of the request that are to part from the first continuation when its first token is drawn; of a search,
    /// beams that may come yet.
    pub unborn: u32,
    /// Choices given out so far.
    pub num_choices: u32,
    /// It has left the queue, and has not been put back.
    pub runs: bool,
    pub was_admitted: bool,
    /// Steps in which it had a span.
    pub iterations: usize,
    /// The most iterations of any request that came later, ended or not.
    pub most_later: usize,
    pub search: Option<Search>,
}

#[derive(Debug, Clone)]
pub struct Continuation {
    pub tokens: Vec<TokenId>,
    /// The history up to each of the tokens.
    pub histories: Vec<History>,
    /// How many of them are computed.
    pub computed: usize,
}

impl Continuation {
    pub fn push(&mut self, token: TokenId, histories: &mut Histories) {
        let before = *self.histories.last().expect("a prompt has a token");
        self.histories.push(histories.then(before, token));
        self.tokens.push(token);
    }
}

impl Live {
    pub fn new(request: Request, final_len: usize) -> Self {
        let tokens = request.prompt.clone();
        let n = request.params.n;
        let beam = request.params.beam;
        Self {
            request,
            final_len,
            continuations: BTreeMap::from([(0, Continuation { tokens, histories: vec![], computed: 0 })]),
            unborn: beam.map_or(n, |beam| beam.width) - 1,
            num_choices: n,
            runs: false,
            was_admitted: false,
            iterations: 0,
            most_later: 0,
            search: beam.map(|beam| Search::new(beam.width as usize, beam.length_penalty)),
        }
    }

    /// Sequences that it is, or will be once others have parted from the first.
    pub fn num_seats(&self) -> usize {
        self.continuations.len() + self.unborn as usize
    }

    /// The choices that have not ended.
    pub fn choices(&self) -> Vec<u32> {
        if self.is_search() {
            return vec![0];
        }
        self.continuations.keys().copied().chain(1..=self.unborn).collect()
    }

    /// Those of the continuations begin anew in an age of the cache.
    pub fn enter_age(&mut self, age: u32, histories: &mut Histories, begins: impl Fn(&u32) -> bool) {
        let root = histories.root(&self.request.params.cache_salt, age);
        for (_, continuation) in self.continuations.iter_mut().filter(|(choice, _)| begins(choice)) {
            continuation.histories = histories.along(root, &continuation.tokens);
        }
    }

    /// What the model would give after the span of a sequence that samples.
    pub fn draw(&self, span: &SeqSpan) -> Vec<StepRun> {
        let seed = self.request.params.seed;
        let choices = (span.seq.choice..).take(span.samples);
        if let Some(beam) = self.request.params.beam {
            let tokens = |choice| &self.continuations[&choice].tokens;
            let propose = |choice| StepRun::Candidates(model::propose(seed, tokens(choice), 2 * beam.width as usize));
            return choices.map(propose).collect();
        }
        choices.map(|choice| StepRun::Tokens(vec![model::sample(seed, choice, span.end())])).collect()
    }

    /// Takes a span as computed, appends what was drawn after it, and gives the outputs to expect for it: none if its
    /// sequence has ended since.
    pub fn take(&mut self, span: &SeqSpan, runs: &[StepRun], histories: &mut Histories) -> Vec<StepOutput> {
        let seq = span.seq;
        let Some(continuation) = self.continuations.get_mut(&seq.choice) else { return vec![] };
        continuation.computed = span.end();
        if runs.is_empty() || self.search.is_some() {
            return vec![];
        }
        let parent = continuation.clone();
        for choice in (seq.choice..).skip(1).take(runs.len() - 1) {
            assert_eq!(self.continuations.insert(choice, parent.clone()).map(|_| choice), None, "born twice");
        }
        self.unborn = 0;
        (seq.choice..).zip(runs).map(|(choice, run)| self.take_one(SeqId { choice, ..seq }, run, histories)).collect()
    }

    fn take_one(&mut self, seq: SeqId, run: &StepRun, histories: &mut Histories) -> StepOutput {
        let continuation = self.continuations.get_mut(&seq.choice).expect("its sample was drawn");
        let (tokens, finish) = match run {
            StepRun::Failed | StepRun::Candidates(_) => (vec![], Some(FinishReason::Error)),
            StepRun::Tokens(tokens) => {
                for &token in tokens {
                    continuation.push(token, histories);
                }
                (tokens.clone(), model::finish(&self.request.params, &continuation.tokens, self.final_len))
            }
        };
        let stop_token = tokens.last().copied().filter(|_| finish == Some(FinishReason::Stop));
        StepOutput { request: self.request.id, seq, tokens, finish, stop_token, last: false, hypothesis: None }
    }
}
