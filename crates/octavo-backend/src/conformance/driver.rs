//! Runs steps on a backend from plain token lists and block tables.

use super::TinyModel;
use crate::{
    Backend, BackendError, GroupInputs, Numerics, SampleError, SampleRow, Sampled, SpanInput, StepInputs, StepLimits, StepResult,
};

/// Rows that one step of a [`Driver`] may have.
const MAX_ROWS: usize = 512;

/// Spans that one step of a [`Driver`] may have.
const MAX_SPANS: usize = 32;

/// A backend with a model loaded and every slot of its cache holding NaN.
pub struct Driver<B: Backend> {
    backend: B,
    plan: B::Plan,
    groups: usize,
    vocab_size: usize,
}

/// One span of a step: tokens at positions `start..`, in the blocks of `table` (the same ids in every KV group).
#[derive(Debug, Clone)]
pub struct Feed<'a> {
    /// Tokens to compute.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub start: usize,
    /// Blocks of positions `0..`.
    pub table: &'a [u32],
    /// Whether its rows are reported.
    pub rows: Rows,
}

/// Which rows of a [`Feed`] are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// None.
    None,
    /// Every row.
    All,
}

impl<B: Backend> Driver<B> {
    /// Loads `model` with a pool of `num_blocks` blocks and writes NaN into each of its slots.
    pub fn new(backend: B, model: &TinyModel, block_size: usize, num_blocks: usize) -> Driver<B> {
        let mut driver = Driver::load(backend, model, block_size, num_blocks);
        // Each block is the first of a sequence of its own, so that little is attended to.
        let tokens = vec![model.poison(); block_size];
        let blocks: Vec<[u32; 1]> = (0..num_blocks as u32).map(|block| [block]).collect();
        for blocks in blocks.chunks(MAX_SPANS.min(MAX_ROWS / block_size)) {
            let feeds: Vec<Feed<'_>> =
                blocks.iter().map(|block| Feed { tokens: &tokens, start: 0, table: block, rows: Rows::None }).collect();
            driver.step(&feeds);
        }
        driver
    }

    /// Loads a model that has no layers, hence no cache.
    pub fn without_poison(backend: B, model: &TinyModel) -> Driver<B> {
        Driver::load(backend, model, 16, 32)
    }

    fn load(backend: B, model: &TinyModel, block_size: usize, num_blocks: usize) -> Driver<B> {
        let limits = StepLimits {
            max_rows: MAX_ROWS,
            max_spans: MAX_SPANS,
            max_positions: block_size * num_blocks,
            block_size,
            num_blocks: vec![num_blocks; model.spec.kv_geometry(block_size).groups.len()],
        };
        Driver::within(backend, model, &limits)
    }

    /// Loads `model` for steps within `limits`; the cache holds whatever the backend leaves in it.
    pub fn within(backend: B, model: &TinyModel, limits: &StepLimits) -> Driver<B> {
        let plan =
            backend.load(&model.spec, &mut model.clone(), limits).unwrap_or_else(|error| panic!("load: {error}"));
        Driver { backend, plan, groups: limits.num_blocks.len(), vocab_size: model.spec.vocab_size }
    }

    /// Runs one step and gives back, for each reported row, the log-probabilities of the whole vocabulary by id.
    ///
    /// # Panics
    /// If the step or a reported row fails.
    pub fn step(&mut self, feeds: &[Feed<'_>]) -> Vec<Vec<f32>> {
        let inputs = self.reporting(feeds);
        self.report(&inputs)
    }

    /// Flat inputs for `feeds`; every reported row is drawn greedily with the log-probabilities of all tokens.
    pub fn reporting(&self, feeds: &[Feed<'_>]) -> StepInputs {
        self.inputs(feeds, |row| SampleRow { logprobs: Some(self.vocab_size as u32), ..SampleRow::greedy(row, 0) })
    }

    /// Runs [`Driver::reporting`] inputs as [`Driver::step`] does.
    ///
    /// # Panics
    /// If the step or a reported row fails.
    pub fn report(&mut self, inputs: &StepInputs) -> Vec<Vec<f32>> {
        self.run(inputs).iter().map(by_id).collect()
    }

    /// Flat inputs for `feeds`; every reported row is drawn as `sample` says.
    pub fn inputs(&self, feeds: &[Feed<'_>], sample: impl Fn(usize) -> SampleRow) -> StepInputs {
        let mut inputs = StepInputs::default();
        let mut group = GroupInputs { table_starts: vec![0], ..GroupInputs::default() };
        for feed in feeds {
            let first_row = inputs.tokens.len();
            inputs.spans.push(SpanInput { first_row, len: feed.tokens.len(), start: feed.start });
            inputs.tokens.extend(feed.tokens);
            group.tables.extend(feed.table);
            group.table_starts.push(group.tables.len());
            if feed.rows == Rows::All {
                inputs.samples.extend((first_row..inputs.tokens.len()).map(&sample));
            }
        }
        inputs.groups = vec![group; self.groups];
        inputs
    }

    /// Runs one step and gives back every reported row, failed or not.
    ///
    /// # Panics
    /// If the step fails.
    pub fn run_all_rows(&mut self, feeds: &[Feed<'_>]) -> Vec<Result<Sampled, SampleError>> {
        let inputs = self.inputs(feeds, |row| SampleRow { logprobs: Some(5), ..SampleRow::greedy(row, 0) });
        self.try_run(&inputs).unwrap_or_else(|error| panic!("step: {error}")).sampled
    }

    /// Runs one step, every sampled row of which must succeed.
    ///
    /// # Panics
    /// If the step or a row fails.
    pub fn run(&mut self, inputs: &StepInputs) -> Vec<Sampled> {
        let result = self.try_run(inputs).unwrap_or_else(|error| panic!("step: {error}"));
        let rows = result.sampled.into_iter().enumerate();
        rows.map(|(row, sampled)| sampled.unwrap_or_else(|error| panic!("sampled row {row}: {error}"))).collect()
    }

    /// The backend's numerics.
    pub fn numerics(&self) -> Numerics {
        self.backend.numerics()
    }

    /// Runs one step.
    ///
    /// # Errors
    /// Whatever the backend says.
    pub fn try_run(&mut self, inputs: &StepInputs) -> Result<StepResult, BackendError> {
        self.backend.run(&mut self.plan, inputs)
    }
}

fn by_id(sampled: &Sampled) -> Vec<f32> {
    let top = sampled.logprobs.as_ref().map_or(&[][..], |report| &report.top);
    let mut logprobs = vec![f32::NAN; top.len()];
    for &(id, logprob) in top {
        logprobs[id as usize] = logprob;
    }
    logprobs
}

/// Asserts that two reports have the same bits.
pub(super) fn assert_same_bits(what: &str, found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len(), "{what}: rows");
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (token, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(found.to_bits() == expected.to_bits(), "{what}: row {row}, token {token}: {found} and {expected}");
        }
    }
}

/// How far two reports may be apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    /// At any token.
    pub most: f32,
    /// On average.
    pub mean: f32,
}

/// Asserts that two reports are no further apart than `tolerance`.
pub(super) fn assert_close(what: &str, found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: Tolerance) {
    assert_eq!(found.len(), expected.len(), "{what}: rows");
    let (mut sum, mut count) = (0.0f64, 0);
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (token, (found, expected)) in found.iter().zip(expected).enumerate() {
            let difference = (found - expected).abs();
            assert!(difference <= tolerance.most, "{what}: row {row}, token {token}: {found} and {expected}");
            sum += f64::from(difference);
            count += 1;
        }
    }
    let mean = sum / f64::from(count.max(1));
    assert!(mean <= f64::from(tolerance.mean), "{what}: {mean} apart on average");
}
