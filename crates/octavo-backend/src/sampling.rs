//! Drawing a token: Gumbel-max over the filtered distribution with counter-based noise.
//!
//! The token drawn is `argmax over kept t of (logit(t) - max) / temperature + noise(seed, position, choice, t)`. The
//! noise depends on its four keys alone, so a draw does not depend on batch, chunk, thread or device. The definition has
//! a version ([`VERSION`]); another version gives other tokens for the same seed.
//!
//! Filters act on the distribution after temperature, in the order min_p, top_k, top_p; each only decides membership.
//! Equal logits are ordered by id.
//!
//! Sources: Philox4x32-10 (Salmon et al., SC'11); Gumbel-max with shared noise (Daliri, Musco, Suresh, arXiv 2408.07978).

use std::cmp::Ordering;

use crate::{SampleError, SampleRow, Sampled, TokenId, TokenLogprobs};

/// Changes whenever the same seed would draw other tokens.
pub const VERSION: u32 = 1;

/// Temperatures below this are greedy: the reciprocal would overflow, and no two logits differ by less in practice.
pub const GREEDY_BELOW: f32 = 1e-5;

/// No noise value exceeds this ([`noise`] of the hash 0 is 22.8739).
const LARGEST_NOISE: f32 = 22.8741;

/// Tokens that share one skip test; four Philox calls for each 16 of them.
const SKIP_BLOCK: usize = 64;

/// Draws the token that follows one row of logits, `[vocab_size]`.
///
/// # Errors
/// [`SampleError::NotFinite`] if a logit is NaN or positive infinity, or if none is finite.
pub fn sample(logits: &[f32], row: &SampleRow) -> Result<Sampled, SampleError> {
    let (best, largest) = argmax(logits)?;
    let token = if row.temperature < GREEDY_BELOW {
        best
    } else {
        let draw = Draw { logits, largest, inverse: 1.0 / row.temperature, noise: Noise::new(row) };
        match kept(&draw, row) {
            Some(ids) => draw.among(&ids),
            None => draw.among_all(),
        }
    };
    let logprobs = row.logprobs.map(|count| token_logprobs(logits, largest, token, count as usize));
    Ok(Sampled { token, logprobs })
}

/// The id of the largest logit (the lowest on ties) and its value.
fn argmax(logits: &[f32]) -> Result<(TokenId, f32), SampleError> {
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
    if best.1 == f32::NEG_INFINITY { Err(SampleError::NotFinite) } else { Ok(best) }
}

/// One draw's fixed parts.
struct Draw<'a> {
    logits: &'a [f32],
    largest: f32,
    inverse: f32,
    noise: Noise,
}

impl Draw<'_> {
    fn scaled(&self, id: usize) -> f32 {
        (self.logits[id] - self.largest) * self.inverse
    }

    fn score(&self, id: usize, hash: u32) -> f32 {
        (self.logits[id] - self.largest).mul_add(self.inverse, gumbel(hash))
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

/// The tokens that the filters leave; `None` when they leave all.
fn kept(draw: &Draw<'_>, row: &SampleRow) -> Option<Vec<TokenId>> {
    let vocab_size = draw.logits.len();
    let top_k = if row.top_k == 0 { vocab_size } else { (row.top_k as usize).min(vocab_size) };
    if row.min_p <= 0.0 && top_k == vocab_size && row.top_p >= 1.0 {
        return None;
    }
    let least = if row.min_p > 0.0 { row.min_p.ln() } else { f32::NEG_INFINITY };
    let mut ids: Vec<TokenId> = (0..vocab_size as TokenId).filter(|&id| draw.scaled(id as usize) >= least).collect();
    if top_k < ids.len() {
        ids.select_nth_unstable_by(top_k - 1, by_logit(draw.logits));
        ids.truncate(top_k);
    }
    if row.top_p < 1.0 {
        keep_top_p(draw, row.top_p, &mut ids);
    }
    Some(ids)
}

/// Cuts `ids` to the smallest set of most likely tokens whose share of the mass reaches `top_p`; never empty.
fn keep_top_p(draw: &Draw<'_>, top_p: f32, ids: &mut Vec<TokenId>) {
    ids.sort_unstable();
    let mass = |id: TokenId| f64::from(draw.scaled(id as usize)).exp();
    let wanted = ids.iter().map(|&id| mass(id)).sum::<f64>() * f64::from(top_p);
    let (mut reached, mut sorted) = (0.0, 0);
    // Sorting ever larger heads finds the cut without sorting the vocabulary.
    while sorted < ids.len() {
        let head = (sorted * 4).max(64).min(ids.len());
        if head < ids.len() {
            ids[sorted..].select_nth_unstable_by(head - sorted - 1, by_logit(draw.logits));
        }
        ids[sorted..head].sort_unstable_by(by_logit(draw.logits));
        for (at, &id) in ids.iter().enumerate().take(head).skip(sorted) {
            reached += mass(id);
            if reached >= wanted {
                ids.truncate(at + 1);
                return;
            }
        }
        sorted = head;
    }
}

/// Larger logits first, equal ones (0 and -0 are equal) by id; no logit is NaN.
fn by_logit(logits: &[f32]) -> impl Fn(&TokenId, &TokenId) -> Ordering {
    |&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// Log-softmax of the row at the drawn token and at the `count` likeliest ones.
fn token_logprobs(logits: &[f32], largest: f32, token: TokenId, count: usize) -> TokenLogprobs {
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let log_sum = sum.ln();
    let logprob = |id: TokenId| (f64::from(logits[id as usize] - largest) - log_sum) as f32;
    let mut ids: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    let count = count.min(ids.len());
    if count > 0 && count < ids.len() {
        ids.select_nth_unstable_by(count - 1, by_logit(logits));
    }
    ids.truncate(count);
    ids.sort_unstable_by(by_logit(logits));
    TokenLogprobs {
        logprob: logprob(token),
        rank: 1 + logits.iter().filter(|&&logit| logit > logits[token as usize]).count() as u32,
        top: ids.into_iter().map(|id| (id, logprob(id))).collect(),
    }
}

/// The noise of one row: everything but the token is fixed.
#[derive(Debug, Clone, Copy)]
struct Noise {
    seed: u64,
    position: u32,
    choice: u32,
}

impl Noise {
    fn new(row: &SampleRow) -> Noise {
        Noise { seed: row.seed, position: row.position, choice: row.choice }
    }

    /// The hash of one token.
    fn hash(&self, token: TokenId) -> u32 {
        self.block((token >> 6) * 16 + (token & 15))[(token >> 4) as usize & 3]
    }

    /// The hashes of tokens `start + column + 16 * (0, 1, 2, 3)`; `start` is a multiple of 64, `column` below 16.
    fn column(&self, start: usize, column: usize) -> [u32; 4] {
        self.block(((start >> 6) * 16 + column) as u32)
    }

    fn block(&self, counter: u32) -> [u32; 4] {
        philox([counter, self.position, self.choice, 0x5341_4D50], self.seed)
    }
}

/// Philox4x32 with 10 rounds.
fn philox(mut counter: [u32; 4], seed: u64) -> [u32; 4] {
    let (mut key0, mut key1) = (seed as u32, (seed >> 32) as u32);
    for round in 0..10 {
        if round > 0 {
            key0 = key0.wrapping_add(0x9E37_79B9);
            key1 = key1.wrapping_add(0xBB67_AE85);
        }
        let a = 0xD251_1F53_u64 * u64::from(counter[0]);
        let b = 0xCD9E_8D57_u64 * u64::from(counter[2]);
        counter = [(b >> 32) as u32 ^ counter[1] ^ key0, b as u32, (a >> 32) as u32 ^ counter[3] ^ key1, a as u32];
    }
    counter
}

/// The standard Gumbel variate of a hash: `-ln(-ln(u))` with `u = (hash + 1/2) / 2^32`, accurate in both tails.
fn gumbel(hash: u32) -> f32 {
    -natural_log(exponential(hash))
}

/// `-ln(1 - u)`-like exponential variate: small hashes through `ln(1 - v)`, large ones through `ln(w)`, `w = 1 - v`.
fn exponential(hash: u32) -> f32 {
    const SCALE: f32 = 1.0 / 4_294_967_296.0;
    if hash < 0x4AFB_0CCD {
        let v = (hash as f32).mul_add(SCALE, SCALE / 2.0);
        -log1p_scaled(-v, 0.0)
    } else {
        let w = (!hash as f32).mul_add(SCALE, SCALE / 2.0);
        -natural_log(w)
    }
}

/// `ln(x)` of a positive normal number: `x = m * 2^e` with m in [sqrt(1/2), sqrt(2)).
fn natural_log(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits.wrapping_sub(0x3F35_04F3) as i32) >> 23;
    let mantissa = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23));
    log1p_scaled(mantissa - 1.0, exponent as f32)
}

/// `ln(1 + f) + exponent * ln 2`. Every step is one rounding, so that each instruction set gives the same bits.
#[allow(clippy::excessive_precision, reason = "the definition gives nine digits")]
fn log1p_scaled(f: f32, exponent: f32) -> f32 {
    const TERMS: [f32; 8] =
        [-0.115146101, 0.116769984, -0.124201410, 0.142493233, -0.166680574, 0.200007141, -0.249999940, 0.333333313];
    let square = f * f;
    let polynomial = TERMS.iter().fold(0.0703768358f32, |sum, &term| sum.mul_add(f, term));
    let y = (polynomial * square).mul_add(f, -0.5 * square) + f;
    exponent.mul_add(0.693147182, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: SampleRow = SampleRow::greedy(0, 0);

    fn row(seed: u64) -> SampleRow {
        SampleRow { seed, temperature: 1.0, ..GREEDY }
    }

    /// Logits from a small generator of its own, so that the noise under test is not used to make its input.
    fn logits(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 16_777_216.0 * 20.0 - 10.0
            })
            .collect()
    }

    #[test]
    fn noise_has_the_known_answers() {
        let answers = [
            (0, 0, 0, 0, 0xcc52_14c5, 0xbef0_ae0b_u32),
            (12345, 0, 0, 0, 0x70b5_51bc, 0x3f0b_51ed),
            (12345, 7, 3, 49151, 0xeac6_d834, 0xbf69_8d75),
            (0xfedc_ba98_7654_3210, 4095, 1, 151_935, 0x0f57_bc05, 0x4032_29af),
        ];
        for (seed, position, choice, token, hash, bits) in answers {
            let noise = Noise { seed, position, choice };
            assert_eq!(noise.hash(token), hash);
            assert_eq!(gumbel(hash).to_bits(), bits);
        }
        for (hash, bits) in [(0, 0x41b6_fda9), (1, 0x41ae_33b4), (0x8000_0000, 0x3ebb_a795), (u32::MAX, 0xc048_51d5)] {
            assert_eq!(gumbel(hash).to_bits(), bits);
        }
    }

    #[test]
    fn noise_is_bounded_by_the_leading_zeros_of_its_hash() {
        for hash in (0..u32::MAX).step_by(65_521).chain(0..4096) {
            let bound = (hash.leading_zeros() + 1) as f32 * std::f32::consts::LN_2;
            assert!(gumbel(hash) <= bound + 1e-4 && gumbel(hash) <= LARGEST_NOISE, "hash {hash:08x}");
        }
    }

    #[test]
    fn skipping_hopeless_tokens_never_changes_the_winner() {
        for seed in 0..40 {
            let logits = logits(1000 + seed as usize, seed);
            for temperature in [0.05, 0.7, 1.0, 3.0] {
                let row = SampleRow { temperature, position: seed, ..row(u64::from(seed)) };
                let draw = Draw {
                    logits: &logits,
                    largest: argmax(&logits).unwrap().1,
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
            counts[sample(&logits, &SampleRow { position, ..row(7) }).unwrap().token as usize] += 1;
        }
        let chi_square: f64 = probabilities
            .iter()
            .zip(counts)
            .map(|(p, count)| (f64::from(count) - p * f64::from(draws)).powi(2) / (p * f64::from(draws)))
            .sum();
        assert!(chi_square < 16.27, "three degrees of freedom, one in a thousand: {chi_square}");
    }

    #[test]
    fn each_filter_keeps_exactly_its_set() {
        let logits: Vec<f32> = [0.4f64, 0.3, 0.2, 0.1].iter().map(|p| p.ln() as f32).collect();
        let keep = |row: SampleRow| {
            let draw = Draw { logits: &logits, largest: logits[0], inverse: 1.0, noise: Noise::new(&row) };
            kept(&draw, &row).map(|mut ids| {
                ids.sort_unstable();
                ids
            })
        };
        assert_eq!(keep(row(0)), None);
        assert_eq!(keep(SampleRow { top_k: 2, ..row(0) }), Some(vec![0, 1]));
        assert_eq!(keep(SampleRow { top_k: 99, ..row(0) }), None);
        assert_eq!(keep(SampleRow { top_p: 0.65, ..row(0) }), Some(vec![0, 1]));
        assert_eq!(keep(SampleRow { top_p: 0.75, ..row(0) }), Some(vec![0, 1, 2]));
        assert_eq!(keep(SampleRow { top_p: 1e-9, ..row(0) }), Some(vec![0]));
        assert_eq!(keep(SampleRow { min_p: 0.6, ..row(0) }), Some(vec![0, 1]));
        assert_eq!(keep(SampleRow { min_p: 1.0, ..row(0) }), Some(vec![0]));
        // top_p counts the mass that top_k left: 0.4 of 0.7 is more than half.
        assert_eq!(keep(SampleRow { top_k: 2, top_p: 0.55, ..row(0) }), Some(vec![0]));
    }

    #[test]
    fn top_p_finds_the_cut_of_a_full_sort_in_a_large_vocabulary() {
        for seed in 0..10 {
            let logits = logits(5000, seed);
            let row = SampleRow { top_p: 0.9, temperature: 5.0, ..row(0) };
            let draw =
                Draw { logits: &logits, largest: argmax(&logits).unwrap().1, inverse: 0.2, noise: Noise::new(&row) };
            let mut sorted: Vec<TokenId> = (0..5000).collect();
            sorted.sort_by(by_logit(&logits));
            let mass = |id: &TokenId| f64::from(draw.scaled(*id as usize)).exp();
            let wanted = (0..5000).map(|id| mass(&id)).sum::<f64>() * f64::from(0.9f32);
            let mut reached = 0.0;
            let cut = sorted.iter().position(|id| {
                reached += mass(id);
                reached >= wanted
            });
            assert_eq!(kept(&draw, &row).unwrap(), sorted[..=cut.unwrap()]);
        }
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        let mut logits = vec![1.0; 200];
        logits[0] = 0.0;
        assert_eq!(sample(&logits, &GREEDY).unwrap().token, 1);
        let row = SampleRow { top_k: 3, ..row(3) };
        let draw = Draw { logits: &logits, largest: 1.0, inverse: 1.0, noise: Noise::new(&row) };
        let mut ids = kept(&draw, &row).unwrap();
        ids.sort_unstable();
        assert_eq!(ids, [1, 2, 3]);
        let zeros = [-0.0, 0.0];
        assert_eq!(sample(&zeros, &SampleRow { top_k: 1, ..row }).unwrap().token, 0, "as greedy does");
    }

    #[test]
    fn tiny_temperatures_are_greedy_and_never_fail() {
        let logits = logits(3000, 5);
        let greedy = sample(&logits, &GREEDY).unwrap().token;
        for temperature in [1e-38, 1e-12, 1e-5, 1e-4, 1e-3] {
            assert_eq!(sample(&logits, &SampleRow { temperature, ..row(1) }).unwrap().token, greedy);
        }
        sample(&logits, &SampleRow { temperature: 1e6, ..row(1) }).unwrap();
    }

    #[test]
    fn rows_that_are_not_finite_are_refused() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.0; 10];
            logits[7] = bad;
            assert_eq!(sample(&logits, &GREEDY), Err(SampleError::NotFinite));
        }
        assert_eq!(sample(&[f32::NEG_INFINITY; 3], &GREEDY), Err(SampleError::NotFinite));
        assert_eq!(sample(&[f32::NEG_INFINITY, -3.0], &row(1)).unwrap().token, 1);
    }

    #[test]
    fn logprobs_are_the_log_softmax_before_temperature() {
        let logits = [1.0f32, 3.0, 2.0, 3.0];
        let sampled = sample(&logits, &SampleRow { logprobs: Some(3), temperature: 0.5, ..row(11) }).unwrap();
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
}
