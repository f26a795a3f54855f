//! Requests with known lengths, and the tokens with which they end there.

use octavo_benches::lengths::{Lengths, Random};
use octavo_sched::{BeamParams, Request, RequestId, SamplingParams, TokenId};

/// Ends an output. Nothing else draws it.
pub const END: TokenId = 0;

/// Prompts are made of the ids from 1 up to here.
const LARGEST_TOKEN: u64 = 49_000;

/// Requests, named by their place in the list.
///
/// A request may generate up to `max_tokens`. That its outputs end before is not known to the scheduler: they draw
/// [`END`] once they have their length.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Their lengths.
    pub jobs: Vec<Job>,
    /// What every request may generate at most.
    pub max_tokens: usize,
    /// They are searches.
    pub beams: Option<Beams>,
}

/// What is searched, and where.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beams {
    /// Beams of a search.
    pub width: u32,
    /// Of the logits of the table that stands for a model, where there is none: the larger, the surer it is of what
    /// follows.
    pub deviation: f64,
}

/// The lengths of one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Of its prompt.
    pub prompt: usize,
    /// Of each of its continuations, [`END`] included.
    pub outputs: Vec<usize>,
}

impl Workload {
    /// `count` requests for `n` continuations each.
    pub fn draw(lengths: Lengths, n: usize, count: usize) -> Workload {
        let mut random = Random::new(n as u64);
        let job = |_| Job {
            prompt: lengths.prompt.draw(&mut random),
            outputs: (0..n).map(|_| lengths.output.draw(&mut random)).collect(),
        };
        let max_tokens = octavo_benches::lengths::LONGEST;
        Workload { jobs: (0..count).map(job).collect(), max_tokens, beams: None }
    }

    /// Requests for one continuation, with these prompts, that go on to `max_tokens`.
    pub fn of_prompts(prompts: impl Iterator<Item = usize>, max_tokens: usize) -> Workload {
        let jobs = prompts.map(|prompt| Job { prompt, outputs: vec![usize::MAX] }).collect();
        Workload { jobs, max_tokens, beams: None }
    }

    /// `count` searches. A search ends when all its beams have the drawn length.
    pub fn draw_searches(lengths: Lengths, beams: Beams, count: usize) -> Workload {
        Workload { beams: Some(beams), ..Workload::draw(lengths, 1, count) }
    }

    /// A request with random tokens, hence with a prompt unlike all others.
    pub fn request(&self, index: usize) -> Request {
        let job = &self.jobs[index];
        let mut random = Random::new(index as u64);
        let prompt = (0..job.prompt).map(|_| 1 + random.below(LARGEST_TOKEN) as TokenId).collect();
        let params = SamplingParams {
            n: job.outputs.len() as u32,
            seed: index as u64,
            max_tokens: Some(self.max_tokens),
            beam: self.beams.map(|beams| BeamParams { width: beams.width, length_penalty: 1.0 }),
            ..SamplingParams::default()
        };
        Request { id: RequestId(index as u64), prompt, params, arrival: 0, deadline: None }
    }

    /// What may follow in a search: of `top` all but [`END`], or [`END`] alone if the output has its length with it.
    pub fn following(&self, index: usize, position: usize, top: &[(TokenId, f32)]) -> Vec<(TokenId, f32)> {
        if self.token(index, 0, position, END + 1) == END {
            return vec![(END, 0.0)];
        }
        top.iter().copied().filter(|(token, _)| *token != END).collect()
    }

    /// What a continuation draws at a position, counted from the start of the prompt: `drawn`, or [`END`] if it has its
    /// length with it.
    pub fn token(&self, index: usize, choice: usize, position: usize, drawn: TokenId) -> TokenId {
        let job = &self.jobs[index];
        if position + 1 == job.outputs[choice].saturating_add(job.prompt) { END } else { drawn.max(END + 1) }
    }
}
