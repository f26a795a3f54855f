//! Draws, rules and log-probabilities as the kernels of `kernels/sampling.cu` take them, and what they give back.
//!
//! Everything here is plain numbers: each list is an array that a kernel reads, in the order of its parameters.

use octavo_backend::{
    LogitRules, SampleError, SampleRow, Sampled, ScoreRow, TokenId, TokenLogprobs,
    sampling::{GREEDY_BELOW, LogSoftmax, inverse_temperature, least_scaled},
};

/// The most likeliest tokens that a report can have, unless the vocabulary is smaller.
pub const MOST_TOP: usize = 1024;

/// 32-bit words of an entry of `apply_rules`.
pub const RULES_WORDS: usize = 11;
/// 32-bit words of an entry of `sample`.
pub const DRAW_WORDS: usize = 10;
/// 32-bit words of an entry of `logprobs`.
pub const REPORT_WORDS: usize = 5;
/// Bytes of what `logprobs` gives for an entry.
pub const REPORTED_BYTES: usize = 24;

/// No index.
const NONE: u32 = u32::MAX;

/// The entries of one tile of logits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Entries {
    /// [`RULES_WORDS`] for each row that `apply_rules` makes.
    pub rules: Vec<u32>,
    /// Tokens of all rows' bias, with [`Entries::bias_values`].
    pub bias_tokens: Vec<u32>,
    /// Added to the logits of these tokens.
    pub bias_values: Vec<f32>,
    /// Masks, one after the other.
    pub allowed: Vec<u32>,
    /// Banned tokens.
    pub banned: Vec<u32>,
    /// Pairs of a token and how often the output has it.
    pub seen: Vec<u32>,
    /// [`DRAW_WORDS`] for each draw.
    pub draws: Vec<u32>,
    /// [`REPORT_WORDS`] for each report.
    pub reports: Vec<u32>,
    /// Places for likeliest tokens of each report: the largest count of any.
    pub most_top: usize,
    /// What each report is of.
    counts: Vec<usize>,
    /// The report of each draw that has one.
    reports_of_draws: Vec<Option<usize>>,
    /// The report of each score.
    reports_of_scores: Vec<usize>,
}

/// What the kernels gave for [`Entries`].
#[derive(Debug, Clone, Copy)]
pub struct Results<'a> {
    /// Of each draw.
    pub tokens: &'a [u32],
    /// Of each draw: 0, or why there is no token.
    pub states: &'a [u32],
    /// [`REPORTED_BYTES`] for each report.
    pub reported: &'a [u8],
    /// [`Entries::most_top`] for each report.
    pub top_tokens: &'a [u32],
    /// As many.
    pub top_logits: &'a [f32],
}

impl Entries {
    /// Adds a draw from row `row` of the tile, of a vocabulary of `num_tokens`.
    pub fn push_sample(&mut self, sample: &SampleRow, row: usize, num_tokens: usize) {
        let ruled = sample.rules.as_deref().map_or(NONE, |rules| self.push_rules(rules, row));
        let is_random = sample.temperature >= GREEDY_BELOW;
        let inverse = if is_random { inverse_temperature(sample.temperature) } else { 0.0 };
        let draw = self.num_draws();
        self.draws.extend([
            row as u32,
            ruled,
            sample.position,
            sample.choice,
            sample.seed as u32,
            (sample.seed >> 32) as u32,
            inverse.to_bits(),
            least_scaled(sample.min_p).to_bits(),
            sample.top_k,
            sample.top_p.to_bits(),
        ]);
        let report = sample.logprobs.map(|count| {
            let count = (count as usize).min(num_tokens);
            self.push_report([row as u32, ruled, NONE, draw as u32, count as u32])
        });
        self.reports_of_draws.push(report);
    }

    /// Adds a known token after row `row` of the tile, of a vocabulary of `num_tokens`.
    pub fn push_score(&mut self, score: &ScoreRow, row: usize, num_tokens: usize) {
        let count = (score.top as usize).min(num_tokens);
        let report = self.push_report([row as u32, NONE, score.token, NONE, count as u32]);
        self.reports_of_scores.push(report);
    }

    /// Draws.
    pub fn num_draws(&self) -> usize {
        self.draws.len() / DRAW_WORDS
    }

    /// Reports.
    pub fn num_reports(&self) -> usize {
        self.reports.len() / REPORT_WORDS
    }

    /// Rows that rules change.
    pub fn num_ruled(&self) -> usize {
        self.rules.len() / RULES_WORDS
    }

    /// What became of each draw.
    pub fn sampled(&self, results: &Results<'_>) -> Vec<Result<Sampled, SampleError>> {
        let draw = |(draw, report): (usize, &Option<usize>)| {
            outcome(results.states[draw])?;
            let logprobs = report.map(|report| self.report(report, results)).transpose()?;
            Ok(Sampled { token: results.tokens[draw], logprobs })
        };
        self.reports_of_draws.iter().enumerate().map(draw).collect()
    }

    /// What became of each score.
    pub fn scores(&self, results: &Results<'_>) -> Vec<Result<TokenLogprobs, SampleError>> {
        self.reports_of_scores.iter().map(|&report| self.report(report, results)).collect()
    }

    fn push_rules(&mut self, rules: &LogitRules, row: usize) -> u32 {
        let index = self.num_ruled() as u32;
        let (bias_start, banned_start, seen_start) = (self.bias_tokens.len(), self.banned.len(), self.seen.len() / 2);
        self.bias_tokens.extend(rules.bias.iter().map(|bias| bias.0));
        self.bias_values.extend(rules.bias.iter().map(|bias| bias.1));
        let mask = rules.allowed.as_ref().map_or(NONE, |allowed| {
            self.allowed.extend_from_slice(allowed.words());
            (self.allowed.len() - allowed.words().len()) as u32
        });
        self.banned.extend_from_slice(&rules.banned);
        let mut factors = [1.0f32, 0.0, 0.0];
        if let Some(penalties) = &rules.penalties {
            self.seen.extend(penalties.seen.iter().flat_map(|seen| [seen.token, seen.in_output]));
            factors = [penalties.repetition, penalties.frequency, penalties.presence];
        }
        let lists =
            [bias_start, self.bias_tokens.len(), banned_start, self.banned.len(), seen_start, self.seen.len() / 2];
        let [bias_start, bias_end, banned_start, banned_end, seen_start, seen_end] = lists.map(|at| at as u32);
        self.rules.extend([row as u32, bias_start, bias_end, mask, banned_start, banned_end, seen_start, seen_end]);
        self.rules.extend(factors.map(f32::to_bits));
        index
    }

    fn push_report(&mut self, words: [u32; REPORT_WORDS]) -> usize {
        let count = words[4] as usize;
        self.most_top = self.most_top.max(count);
        self.counts.push(count);
        self.reports.extend(words);
        self.counts.len() - 1
    }

    fn report(&self, index: usize, results: &Results<'_>) -> Result<TokenLogprobs, SampleError> {
        let bytes = &results.reported[index * REPORTED_BYTES..(index + 1) * REPORTED_BYTES];
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        outcome(word(20))?;
        let sum = f64::from_bits(u64::from(word(0)) | u64::from(word(4)) << 32);
        let softmax = LogSoftmax::new(f32::from_bits(word(8)), sum);
        let places = index * self.most_top..index * self.most_top + self.counts[index];
        let top = results.top_tokens[places.clone()].iter().zip(&results.top_logits[places]);
        Ok(TokenLogprobs {
            logprob: softmax.at(f32::from_bits(word(12))),
            rank: word(16),
            top: top.map(|(&token, &logit)| (token as TokenId, softmax.at(logit))).collect(),
        })
    }
}

/// The meaning of a state.
fn outcome(state: u32) -> Result<(), SampleError> {
    match state {
        0 => Ok(()),
        2 => Err(SampleError::NothingAllowed),
        _ => Err(SampleError::NotFinite),
    }
}
