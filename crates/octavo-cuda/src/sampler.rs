//! Draws, scores and their log-probabilities: what `octavo_backend::sampling` gives for the same logits, bit for bit.
//!
//! SAFETY of the launches: as in [`crate::kernels`].

use std::sync::Arc;

use octavo_backend::{SampleError, SampleRow, Sampled, ScoreRow, StepInputs, TokenLogprobs, sampling};

use crate::{
    arena::{Arena, Layout, Place},
    device::{Device, Extent, Kernel, Slice},
    entries::{Entries, MOST_TOP, REPORTED_BYTES, Results},
    error::CudaError,
    kernels::{arguments, int},
    plan::HEAD_ROWS,
    staging::{Download, Upload},
};

/// Threads of a block of each of the sampler's kernels.
const BLOCK: usize = 1024;

/// From one row of logits to the next: the kernels read four at a time.
pub fn logit_stride(vocab_size: usize) -> usize {
    vocab_size.next_multiple_of(4)
}

/// The sampler's kernels.
pub struct Sampler {
    device: Arc<Device>,
    apply_rules: Kernel,
    sample: Kernel,
    logprobs: Kernel,
}

/// Where the sampler's work memory will be.
pub struct SamplerPlaces {
    ruled: Place<f32>,
    ruled_states: Place<u32>,
}

/// The sampler's work memory.
pub struct SamplerBuffers {
    /// Rows of logits to which rules were applied.
    ruled: Slice<f32>,
    ruled_states: Slice<u32>,
}

impl SamplerPlaces {
    /// For tiles of the head.
    pub fn new(layout: &mut Layout, vocab_size: usize) -> SamplerPlaces {
        let ruled = layout.place(HEAD_ROWS * logit_stride(vocab_size));
        SamplerPlaces { ruled, ruled_states: layout.place(HEAD_ROWS) }
    }

    /// The memory that was planned.
    pub fn buffers(&self, work: &Arena) -> SamplerBuffers {
        SamplerBuffers { ruled: work.slice(self.ruled), ruled_states: work.slice(self.ruled_states) }
    }
}

/// The logits of one tile of the head, and where all that belongs to them is.
pub struct TileLogits<'a> {
    /// `[rows, stride]`.
    pub logits: Slice<f32>,
    /// From one row to the next.
    pub stride: usize,
    /// Work memory.
    pub buffers: &'a SamplerBuffers,
    /// What was sent.
    pub upload: &'a Upload,
    /// What will be fetched.
    pub download: &'a Download,
}

/// The draws and scores of one tile of the head.
pub struct SamplerTile {
    entries: Entries,
    num_tokens: usize,
    rules: Place<u32>,
    bias_tokens: Place<u32>,
    bias_values: Place<f32>,
    allowed: Place<u32>,
    banned: Place<u32>,
    seen: Place<u32>,
    draws: Place<u32>,
    reports: Place<u32>,
    tokens: Place<u32>,
    states: Place<u32>,
    reported: Place<u8>,
    top_tokens: Place<u32>,
    top_logits: Place<f32>,
    whole: Vec<WholeRow>,
    num_samples: usize,
    num_scores: usize,
}

/// A draw or score that wants more than [`MOST_TOP`] likeliest tokens: its logits are brought back, and the host makes its
/// log-probabilities.
struct WholeRow {
    of: WholeOf,
    /// The row within the tile, or that of the rows to which rules were applied.
    row: usize,
    is_ruled: bool,
    logits: Place<f32>,
}

/// Which one it is, counted within the tile.
enum WholeOf {
    Sample(usize, u32),
    Score(usize, ScoreRow),
}

impl SamplerTile {
    /// Describes draws and scores of rows that lie in this order, and plans their results.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if the description does not fit and more memory cannot be had.
    pub fn prepare(
        samples: &[SampleRow],
        scores: &[ScoreRow],
        num_tokens: usize,
        upload: &mut Upload,
        results: &mut Layout,
    ) -> Result<SamplerTile, CudaError> {
        let (mut entries, mut whole) = (Entries::default(), Vec::new());
        let is_too_much = |count: u32| (count as usize).min(num_tokens) > MOST_TOP;
        for (row, sample) in samples.iter().enumerate() {
            let Some(count) = sample.logprobs.filter(|&count| is_too_much(count)) else {
                entries.push_sample(sample, row, num_tokens);
                continue;
            };
            entries.push_sample(&SampleRow { logprobs: None, ..sample.clone() }, row, num_tokens);
            let is_ruled = sample.rules.is_some();
            let (of, row) = (WholeOf::Sample(row, count), if is_ruled { entries.num_ruled() - 1 } else { row });
            whole.push(WholeRow { of, row, is_ruled, logits: results.place(num_tokens) });
        }
        for (index, score) in scores.iter().enumerate() {
            let row = samples.len() + index;
            let is_whole = is_too_much(score.top);
            entries.push_score(&ScoreRow { top: if is_whole { 0 } else { score.top }, ..*score }, row, num_tokens);
            if is_whole {
                let of = WholeOf::Score(index, *score);
                whole.push(WholeRow { of, row, is_ruled: false, logits: results.place(num_tokens) });
            }
        }
        let (draws, reports, top) = (samples.len(), entries.num_reports(), entries.most_top);
        Ok(SamplerTile {
            rules: upload.push(&entries.rules)?,
            bias_tokens: upload.push(&entries.bias_tokens)?,
            bias_values: upload.push(&entries.bias_values)?,
            allowed: upload.push(&entries.allowed)?,
            banned: upload.push(&entries.banned)?,
            seen: upload.push(&entries.seen)?,
            draws: upload.push(&entries.draws)?,
            reports: upload.push(&entries.reports)?,
            tokens: results.place(draws),
            states: results.place(draws),
            reported: results.place(reports * REPORTED_BYTES),
            top_tokens: results.place(reports * top),
            top_logits: results.place(reports * top),
            whole,
            num_samples: samples.len(),
            num_scores: scores.len(),
            entries,
            num_tokens,
        })
    }

    /// All tiles of a step.
    ///
    /// # Errors
    /// As [`SamplerTile::prepare`].
    pub fn prepare_all(
        inputs: &StepInputs,
        num_tokens: usize,
        upload: &mut Upload,
        results: &mut Layout,
    ) -> Result<Vec<SamplerTile>, CudaError> {
        let (samples, scores) = (&inputs.samples, &inputs.scores);
        let tile = |first: usize| {
            let end = first + HEAD_ROWS;
            let samples_of = &samples[first.min(samples.len())..end.min(samples.len())];
            let within = |at: usize| at.saturating_sub(samples.len()).min(scores.len());
            SamplerTile::prepare(samples_of, &scores[within(first)..within(end)], num_tokens, upload, results)
        };
        (0..samples.len() + scores.len()).step_by(HEAD_ROWS).map(tile).collect()
    }

    /// Draws and scores: rows of logits.
    pub fn rows(&self) -> usize {
        self.num_samples + self.num_scores
    }

    /// The fetched draws and scores.
    pub fn results(&self, fetched: &Download) -> TileResults {
        let results = Results {
            tokens: fetched.values(self.tokens),
            states: fetched.values(self.states),
            reported: fetched.values(self.reported),
            top_tokens: fetched.values(self.top_tokens),
            top_logits: fetched.values(self.top_logits),
        };
        let (mut sampled, mut scores) = (self.entries.sampled(&results), self.entries.scores(&results));
        for whole in &self.whole {
            let logits = fetched.values(whole.logits);
            match whole.of {
                WholeOf::Score(index, score) => scores[index] = sampling::score(logits, &score),
                WholeOf::Sample(index, top) => {
                    sampled[index] = sampled[index].clone().and_then(|drawn| {
                        let logprobs = sampling::score(logits, &ScoreRow { row: 0, token: drawn.token, top })?;
                        Ok(Sampled { logprobs: Some(logprobs), ..drawn })
                    });
                }
            }
        }
        TileResults { sampled, scores }
    }
}

/// What became of a tile's draws and scores.
pub struct TileResults {
    /// Draws.
    pub sampled: Vec<Result<Sampled, SampleError>>,
    /// Scores.
    pub scores: Vec<Result<TokenLogprobs, SampleError>>,
}

impl Sampler {
    /// Loads the kernels.
    ///
    /// # Errors
    /// One is missing; the driver's.
    pub fn new(device: &Arc<Device>) -> Result<Sampler, CudaError> {
        let module = device.load("sampling")?;
        Ok(Sampler {
            device: device.clone(),
            apply_rules: module.kernel("apply_rules", 0)?,
            sample: module.kernel("sample", 0)?,
            logprobs: module.kernel("logprobs", 0)?,
        })
    }

    /// Queues the draws and scores of a tile.
    ///
    /// # Errors
    /// The driver's.
    pub fn run(&self, tile: &SamplerTile, at: &TileLogits<'_>) -> Result<(), CudaError> {
        let (ruled, states) = (at.buffers.ruled, at.buffers.ruled_states);
        let (stride, num_tokens) = (at.stride as i64, int(tile.num_tokens));
        let entries = &tile.entries;
        assert!(at.logits.len >= tile.rows() * at.stride && ruled.len >= entries.num_ruled() * at.stride);
        let extent = |count: usize| Extent { grid: [count, 1, 1], block: BLOCK, shared_bytes: 0 };
        let words = |place: Place<u32>| at.upload.slice(place).address;
        let out = |place: Place<u32>| at.download.slice(place).address;
        let arguments = arguments![
            ruled.address,
            states.address,
            at.logits.address,
            words(tile.rules),
            words(tile.bias_tokens),
            at.upload.slice(tile.bias_values).address,
            words(tile.allowed),
            words(tile.banned),
            words(tile.seen),
            stride,
            num_tokens,
        ];
        // SAFETY: see the module.
        unsafe { self.apply_rules.launch(extent(entries.num_ruled()), arguments)? };
        let arguments = arguments![
            out(tile.tokens),
            out(tile.states),
            at.logits.address,
            ruled.address,
            states.address,
            words(tile.draws),
            stride,
            num_tokens,
        ];
        // SAFETY: see the module.
        unsafe { self.sample.launch(extent(entries.num_draws()), arguments)? };
        let arguments = arguments![
            at.download.slice(tile.reported).address,
            out(tile.top_tokens),
            at.download.slice(tile.top_logits).address,
            at.logits.address,
            ruled.address,
            states.address,
            out(tile.tokens),
            words(tile.reports),
            stride,
            num_tokens,
            int(entries.most_top),
        ];
        // SAFETY: see the module.
        unsafe { self.logprobs.launch(extent(entries.num_reports()), arguments)? };
        for whole in &tile.whole {
            let from = if whole.is_ruled { ruled } else { at.logits };
            let logits = from.part(whole.row * at.stride..whole.row * at.stride + tile.num_tokens);
            self.device.copy(at.download.slice(whole.logits), logits)?;
        }
        Ok(())
    }
}
