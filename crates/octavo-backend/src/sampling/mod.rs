//! Drawing a token: Gumbel-max over the filtered distribution with counter-based noise.
//!
//! The token drawn is `argmax over kept t of (logit(t) - max) / temperature + noise(seed, position, choice, t)`. The
//! noise depends on its four keys alone, so a draw does not depend on batch, chunk, thread or device. The definition has
//! a version ([`VERSION`]); another version gives other tokens for the same seed.
//!
//! The order of everything: the model's logits are checked, [`crate::LogitRules`] act on them, log-probabilities are read
//! off; then temperature, min_p, top_k, top_p, and the draw. Filters only decide membership. Equal logits are ordered by
//! id. Rows of the head beyond the tokens are padding and never come here.
//!
//! Here everything is done in the plainest way. A faster sampler must give the same bits.
//!
//! Source: Gumbel-max with shared noise (Daliri, Musco, Suresh, arXiv 2408.07978).

mod filters;
mod logprobs;
mod mass;
pub mod noise;
mod rules;

pub use filters::least_scaled;
pub use logprobs::LogSoftmax;
pub use mass::{MASS_BLOCK, MassSum, mass_units, reaches};

use crate::{SampleError, SampleRow, Sampled, ScoreRow, TokenId, TokenLogprobs};
use filters::kept;
use logprobs::token_logprobs;
use noise::{LARGEST_NOISE, Noise, gumbel};

/// Changes whenever the same seed would draw other tokens.
pub const VERSION: u32 = 1;

/// Temperatures below this are greedy: the reciprocal would overflow, and no two logits differ by less in practice.
pub const GREEDY_BELOW: f32 = 1e-5;

/// Tokens that share one skip test; four Philox calls for each 16 of them.
const SKIP_BLOCK: usize = 64;

/// Draws the token that follows one row of logits, `[num_tokens]`, to which its rules are applied in place.
///
/// # Errors
/// [`SampleError::NotFinite`] if a logit is NaN or positive infinity, or if none is finite;
/// [`SampleError::NothingAllowed`] if none is finite after the rules.
pub fn sample(logits: &mut [f32], row: &SampleRow) -> Result<Sampled, SampleError> {
    let (best, largest) = prepare(logits, row)?;
    let token = match Draw::new(logits, largest, row) {
        None => best,
        Some(draw) => draw.winner(kept(&draw, row).as_deref()),
    };
    let logprobs = row.logprobs.map(|count| token_logprobs(logits, largest, token, count as usize));
    Ok(Sampled { token, logprobs })
}

/// The log-probability of a known token after one row of logits, `[num_tokens]`.
///
/// # Errors
/// [`SampleError::NotFinite`] as [`sample`].
pub fn score(logits: &[f32], row: &ScoreRow) -> Result<TokenLogprobs, SampleError> {
    let (_, largest) = largest_logit(logits)?.ok_or(SampleError::NotFinite)?;
    Ok(token_logprobs(logits, largest, row.token, row.top as usize))
}

/// Draws `draws` tokens from one row of logits: the first as `row` says, each of the others at the next position.
///
/// # Errors
/// As [`sample`].
pub fn draw_many(logits: &[f32], row: &SampleRow, draws: u32) -> Result<Vec<TokenId>, SampleError> {
    let mut logits = logits.to_vec();
    let (best, largest) = prepare(&mut logits, row)?;
    let Some(mut draw) = Draw::new(&logits, largest, row) else { return Ok(vec![best; draws as usize]) };
    let kept = kept(&draw, row);
    let at = |draw_index: u32| {
        draw.noise.position = row.position.wrapping_add(draw_index);
        draw.winner(kept.as_deref())
    };
    Ok((0..draws).map(at).collect())
}

/// Checks the logits, applies the rules and finds the largest: its id and its value.
fn prepare(logits: &mut [f32], row: &SampleRow) -> Result<(TokenId, f32), SampleError> {
    let found = largest_logit(logits)?.ok_or(SampleError::NotFinite)?;
    let Some(rules) = &row.rules else { return Ok(found) };
    rules.apply(logits);
    largest_logit(logits)?.ok_or(SampleError::NothingAllowed)
}

/// The id of the largest logit (the lowest on ties) and its value; `None` if all are negative infinity.
fn largest_logit(logits: &[f32]) -> Result<Option<(TokenId, f32)>, SampleError> {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        // NaN fails every comparison, so it is looked for by name.
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SampleError::NotFinite);
        }
        if logit > best.1 {
            best = (id as TokenId, logit);
        }
    }
    Ok((best.1 > f32::NEG_INFINITY).then_some(best))
}

/// One over a temperature that is not greedy. Never subnormal, so that no product with it is lost where subnormals are.
pub fn inverse_temperature(temperature: f32) -> f32 {
    (1.0 / temperature).max(f32::MIN_POSITIVE)
}

/// One draw's fixed parts.
struct Draw<'a> {
    logits: &'a [f32],
    largest: f32,
    inverse: f32,
    noise: Noise,
}

impl<'a> Draw<'a> {
    /// `None` for a greedy row.
    fn new(logits: &'a [f32], largest: f32, row: &SampleRow) -> Option<Draw<'a>> {
        let inverse = inverse_temperature(row.temperature);
        (row.temperature >= GREEDY_BELOW).then(|| Draw { logits, largest, inverse, noise: Noise::new(row) })
    }

    fn scaled(&self, id: usize) -> f32 {
        (self.logits[id] - self.largest) * self.inverse
    }

    fn score(&self, id: usize, hash: u32) -> f32 {
        (self.logits[id] - self.largest).mul_add(self.inverse, gumbel(hash))
    }

    fn winner(&self, kept: Option<&[TokenId]>) -> TokenId {
        kept.map_or_else(|| self.among_all(), |ids| self.among(ids))
    }

    /// The winner among all tokens. Blocks and tokens whose best possible score is below the best so far are skipped;
    /// the bounds are exact, so the winner is the one of [`Draw::among`] over all ids.
    fn among_all(&self) -> TokenId {
        let mut best = (f32::NEG_INFINITY, 0);
        // A good first guess makes the bounds bite from the first block on.
        if let Some(likely) = self.logits.iter().position(|&logit| logit == self.largest) {
            best = (self.score(likely, self.noise.hash(likely as TokenId)), likely);
        }
        for start in (0..self.logits.len()).step_by(SKIP_BLOCK) {
            let block = &self.logits[start..self.logits.len().min(start + SKIP_BLOCK)];
            let most = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if (most - self.largest) * self.inverse < best.0 - LARGEST_NOISE {
                continue;
            }
            for column in 0..16.min(block.len()) {
                let hashes = self.noise.column(start, column);
                for id in (start + column..start + block.len()).step_by(16) {
                    let hash = hashes[(id - start) / 16];
                    // gumbel(h) <= (leading zeros of h + 1) ln 2, within the margin.
                    let bound = (hash.leading_zeros() + 1) as f32 * std::f32::consts::LN_2;
                    if self.scaled(id) + bound < best.0 - 1e-4 {
                        continue;
                    }
                    let score = self.score(id, hash);
                    if score > best.0 || (score == best.0 && id < best.1) {
                        best = (score, id);
                    }
                }
            }
        }
        best.1 as TokenId
    }

    /// The winner among `ids`, in any order.
    fn among(&self, ids: &[TokenId]) -> TokenId {
        let mut best = (f32::NEG_INFINITY, TokenId::MAX);
        for &id in ids {
            let score = self.score(id as usize, self.noise.hash(id));
            if score > best.0 || (score == best.0 && id < best.1) {
                best = (score, id);
            }
        }
        best.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LogitRules;

    const GREEDY: SampleRow = SampleRow::greedy(0, 0);

    pub(super) fn row(seed: u64) -> SampleRow {
        SampleRow { seed, temperature: 1.0, ..GREEDY }
    }

    fn drawn(logits: &[f32], row: &SampleRow) -> Result<Sampled, SampleError> {
        sample(&mut logits.to_vec(), row)
    }

    /// Logits from a small generator of its own, so that the noise under test is not used to make its input.
    pub(super) fn logits(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 16_777_216.0 * 20.0 - 10.0
            })
            .collect()
    }

    #[test]
    fn skipping_hopeless_tokens_never_changes_the_winner() {
        for seed in 0..40 {
            let logits = logits(1000 + seed as usize, seed);
            for temperature in [0.05, 0.7, 1.0, 3.0] {
                let row = SampleRow { temperature, position: seed, ..row(u64::from(seed)) };
                let draw = Draw {
                    logits: &logits,
                    largest: largest_logit(&logits).unwrap().unwrap().1,
                    inverse: 1.0 / temperature,
                    noise: Noise::new(&row),
                };
                let all: Vec<TokenId> = (0..logits.len() as TokenId).collect();
                assert_eq!(draw.among_all(), draw.among(&all));
            }
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let probabilities = [0.5f64, 0.25, 0.15, 0.1];
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
        let mut counts = [0u32; 4];
        let draws = 40_000;
        for position in 0..draws {
            counts[drawn(&logits, &SampleRow { position, ..row(7) }).unwrap().token as usize] += 1;
        }
        let chi_square: f64 = probabilities
            .iter()
            .zip(counts)
            .map(|(p, count)| (f64::from(count) - p * f64::from(draws)).powi(2) / (p * f64::from(draws)))
            .sum();
        assert!(chi_square < 16.27, "three degrees of freedom, one in a thousand: {chi_square}");
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        let mut logits = vec![1.0; 200];
        logits[0] = 0.0;
        assert_eq!(drawn(&logits, &GREEDY).unwrap().token, 1);
        let row = SampleRow { top_k: 3, ..row(3) };
        let draw = Draw { logits: &logits, largest: 1.0, inverse: 1.0, noise: Noise::new(&row) };
        let mut ids = kept(&draw, &row).unwrap();
        ids.sort_unstable();
        assert_eq!(ids, [1, 2, 3]);
        let zeros = [-0.0, 0.0];
        assert_eq!(drawn(&zeros, &SampleRow { top_k: 1, ..row }).unwrap().token, 0, "as greedy does");
    }

    #[test]
    fn tiny_temperatures_are_greedy_and_never_fail() {
        let logits = logits(3000, 5);
        let greedy = drawn(&logits, &GREEDY).unwrap().token;
        for temperature in [1e-38, 1e-12, 1e-5, 1e-4, 1e-3] {
            assert_eq!(drawn(&logits, &SampleRow { temperature, ..row(1) }).unwrap().token, greedy);
        }
        drawn(&logits, &SampleRow { temperature: 1e6, ..row(1) }).unwrap();
    }

    #[test]
    fn rows_that_are_not_finite_are_refused() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.0; 10];
            logits[7] = bad;
            assert_eq!(drawn(&logits, &GREEDY), Err(SampleError::NotFinite));
        }
        assert_eq!(drawn(&[f32::NEG_INFINITY; 3], &GREEDY), Err(SampleError::NotFinite));
        assert_eq!(drawn(&[f32::NEG_INFINITY, -3.0], &row(1)).unwrap().token, 1);
    }

    #[test]
    fn logprobs_are_the_log_softmax_before_temperature() {
        let logits = [1.0f32, 3.0, 2.0, 3.0];
        let sampled = drawn(&logits, &SampleRow { logprobs: Some(3), temperature: 0.5, ..row(11) }).unwrap();
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let expected = |id: usize| (f64::from(logits[id]) - sum.ln()) as f32;
        let report = sampled.logprobs.unwrap();
        assert_eq!(report.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 2]);
        for (id, logprob) in &report.top {
            assert!((logprob - expected(*id as usize)).abs() < 1e-6);
        }
        assert!((report.logprob - expected(sampled.token as usize)).abs() < 1e-6);
        assert_eq!(report.rank, [4, 1, 3, 1][sampled.token as usize]);
    }

    #[test]
    fn rules_come_before_everything_and_their_failure_is_their_own() {
        let banned = |banned: &[TokenId]| {
            let rules = LogitRules { banned: banned.to_vec(), ..LogitRules::default() };
            SampleRow { rules: Some(Box::new(rules)), logprobs: Some(3), ..GREEDY }
        };
        let logits = [1.0, 3.0, 2.0];
        let sampled = drawn(&logits, &banned(&[1])).unwrap();
        let report = sampled.logprobs.unwrap();
        let first = 1.0 / (1.0 + (-1f64).exp());
        assert_eq!((sampled.token, report.rank), (2, 1));
        assert!((f64::from(report.logprob) - first.ln()).abs() < 1e-6, "the softmax is over what the rules left");
        assert_eq!(report.top[2], (1, crate::LEAST_LOGPROB));
        assert_eq!(drawn(&logits, &banned(&[0, 1, 2])), Err(SampleError::NothingAllowed));
        assert_eq!(
            drawn(&[1.0, f32::NAN, 2.0], &banned(&[1])),
            Err(SampleError::NotFinite),
            "a fault cannot be banned"
        );
        let overflow = LogitRules { bias: [(0, f32::MAX)].into(), ..LogitRules::default() };
        let overflow = SampleRow { rules: Some(Box::new(overflow)), ..GREEDY };
        assert_eq!(drawn(&[f32::MAX, 0.0], &overflow), Err(SampleError::NotFinite));
    }

    #[test]
    fn a_score_is_the_logprob_that_a_draw_of_the_token_would_have() {
        let logits = logits(300, 9);
        let best = largest_logit(&logits).unwrap().unwrap().0;
        let sampled = drawn(&logits, &SampleRow { logprobs: Some(4), ..GREEDY }).unwrap();
        let scored = score(&logits, &ScoreRow { row: 0, token: best, top: 4 });
        assert_eq!(scored.as_ref().ok(), sampled.logprobs.as_ref());
        let third = scored.unwrap().top[2];
        let scored = score(&logits, &ScoreRow { row: 0, token: third.0, top: 0 }).unwrap();
        assert_eq!((scored.logprob, scored.rank, scored.top.len()), (third.1, 3, 0));
        assert_eq!(score(&[f32::NAN], &ScoreRow { row: 0, token: 0, top: 0 }), Err(SampleError::NotFinite));
    }

    #[test]
    fn many_draws_are_the_draws_at_consecutive_positions() {
        let logits = logits(200, 4);
        for row in [GREEDY, row(5), SampleRow { top_p: 0.8, top_k: 30, position: u32::MAX - 3, ..row(6) }] {
            let one_by_one: Vec<TokenId> = (0..50)
                .map(|i| SampleRow { position: row.position.wrapping_add(i), ..row.clone() })
                .map(|row| drawn(&logits, &row).unwrap().token)
                .collect();
            assert_eq!(draw_many(&logits, &row, 50).unwrap(), one_by_one);
        }
        assert_eq!(draw_many(&[f32::NAN], &GREEDY, 3), Err(SampleError::NotFinite));
    }
}
