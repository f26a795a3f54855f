//! Drawing a token, sixteen logits at a time, with the bits of [`octavo_backend::sampling`].
//!
//! | module | holds |
//! | --- | --- |
//! | `scan` | one look at every logit: the largest, masks, ranks, thresholds |
//! | `mass` | sums of exponentials |
//! | `noise` | hashes, Gumbel noise, and the winner |
//! | `candidates` | the tokens that filters choose from, and memory for them |
//!
//! The vocabulary is never sorted. The k largest are found above a bound that groups of logits give; top_p looks at the
//! tokens near the largest and goes further down only while their mass is too little.

mod candidates;
mod mass;
mod noise;
mod scan;
#[cfg(test)]
mod tests;

use octavo_backend::{
    LogitRules, SampleError, SampleRow, Sampled, ScoreRow, TokenId, TokenLogprobs,
    sampling::{GREEDY_BELOW, LogSoftmax, inverse_temperature, least_scaled, noise::Noise, reaches},
};

use crate::{isa::Isa, simd::Simd};
use candidates::{COARSE, FINE, select_first, token_of};
pub use candidates::{OwnedScratch, Scratch, num_maxima};
use noise::KeptRange;
use scan::Largest;
pub use scan::SPAN;

/// The candidates of top_p are first looked for this far below the largest scaled logit, then further down.
const REACHES: [f32; 5] = [5.0, 8.0, 11.0, 16.0, f32::MAX];

/// So few keys are sorted rather than split.
const FEW: usize = 64;

/// More candidates than this are drawn from by going through all logits: noise is cheaper for tokens side by side.
const MANY: usize = 512;

/// A row of logits, and how they are scaled: `(logit - largest) * inverse`.
#[derive(Debug, Clone, Copy)]
struct ScaledRow<'a> {
    logits: &'a [f32],
    largest: f32,
    inverse: f32,
}

impl ScaledRow<'_> {
    #[inline(always)]
    fn scaled<S: Simd>(&self, simd: S, logits: S::F) -> S::F {
        simd.mul(simd.sub(logits, simd.splat(self.largest)), simd.splat(self.inverse))
    }

    #[inline(always)]
    fn score<S: Simd>(&self, simd: S, logits: S::F, noise: S::F) -> S::F {
        simd.fma(simd.sub(logits, simd.splat(self.largest)), simd.splat(self.inverse), noise)
    }

    /// # Safety
    /// The instruction set is on.
    #[inline(always)]
    unsafe fn scaled_block<S: Simd>(&self, simd: S, at: usize) -> [S::F; 4] {
        // SAFETY: the caller's.
        let mut block = unsafe { scan::load_block(simd, self.logits, at) };
        for logits in &mut block {
            *logits = self.scaled(simd, *logits);
        }
        block
    }
}

/// What a row is drawn among.
#[derive(Debug, Clone, Copy)]
enum Kept {
    /// All tokens of a range.
    Range(KeptRange),
    /// The first so many candidates in the scratch memory.
    Candidates(usize),
}

/// The sampler of one instruction set.
pub struct Sampler {
    span_maximum: unsafe fn(&[f32]) -> f32,
    largest: unsafe fn(&[f32], &[f32]) -> Largest,
    keep_only: unsafe fn(&mut [f32], &[u32]),
    count_above: unsafe fn(&[f32], f32) -> u32,
    group_maxima: unsafe fn(&[f32], usize, &mut [f32]) -> usize,
    gather: unsafe fn(&ScaledRow<'_>, f32, &mut [u64]) -> usize,
    mass: unsafe fn(&ScaledRow<'_>, f32) -> f64,
    mass_among: unsafe fn(&ScaledRow<'_>, &[u64]) -> f64,
    units: unsafe fn(&ScaledRow<'_>, &[u64]) -> u64,
    draw_all: unsafe fn(&ScaledRow<'_>, &Noise, KeptRange, u32) -> u32,
    draw_among: unsafe fn(&ScaledRow<'_>, &Noise, &[u64]) -> u32,
}

impl Sampler {
    /// The sampler of an instruction set that this machine has.
    ///
    /// # Panics
    /// If the machine lacks it.
    pub fn new(isa: Isa) -> Sampler {
        Sampler {
            span_maximum: scan::span_maximum_kernel(isa),
            largest: scan::find_largest(isa),
            keep_only: scan::keep_only_kernel(isa),
            count_above: scan::count_above_kernel(isa),
            group_maxima: scan::group_maxima_kernel(isa),
            gather: scan::gather_kernel(isa),
            mass: mass::mass_kernel(isa),
            mass_among: mass::mass_among_kernel(isa),
            units: mass::units_kernel(isa),
            draw_all: noise::draw_all_kernel(isa),
            draw_among: noise::draw_among_kernel(isa),
        }
    }

    /// The largest of some logits, at most [`SPAN`] of them: for whoever computes them, while they are at hand.
    pub fn span_maximum(&self, logits: &[f32]) -> f32 {
        // SAFETY: `new` checked the instruction set; so in all that follow.
        unsafe { (self.span_maximum)(logits) }
    }

    /// Draws the token that follows one row of logits, as [`octavo_backend::sampling::sample`]. `maxima` are
    /// [`Sampler::span_maximum`] of each [`SPAN`] of the logits, or none.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the scratch memory is for smaller rows.
    pub fn sample(
        &self,
        logits: &mut [f32],
        maxima: &[f32],
        row: &SampleRow,
        scratch: &mut Scratch<'_>,
    ) -> Result<Sampled, SampleError> {
        let best = self.prepare(logits, maxima, row)?;
        let token = if row.temperature < GREEDY_BELOW {
            best.token
        } else {
            let scaled = ScaledRow { logits, largest: best.value, inverse: inverse_temperature(row.temperature) };
            let kept = self.keep(&scaled, row, scratch);
            self.winner(&scaled, &Noise::new(row), best.token, kept, scratch)
        };
        let logprobs = row.logprobs.map(|count| self.logprobs(logits, best.value, token, count, scratch));
        Ok(Sampled { token, logprobs })
    }

    /// The log-probability of a known token, as [`octavo_backend::sampling::score`]; `maxima` as in [`Sampler::sample`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the scratch memory is for smaller rows.
    pub fn score(
        &self,
        logits: &[f32],
        maxima: &[f32],
        row: &ScoreRow,
        scratch: &mut Scratch<'_>,
    ) -> Result<TokenLogprobs, SampleError> {
        let best = self.largest(logits, maxima)?.ok_or(SampleError::NotFinite)?;
        Ok(self.logprobs(logits, best.value, row.token, row.top, scratch))
    }

    /// Draws `draws` tokens, as [`octavo_backend::sampling::draw_many`].
    ///
    /// # Errors
    /// As there.
    pub fn draw_many(&self, logits: &[f32], row: &SampleRow, draws: u32) -> Result<Vec<TokenId>, SampleError> {
        let mut logits = logits.to_vec();
        let best = self.prepare(&mut logits, &[], row)?;
        if row.temperature < GREEDY_BELOW {
            return Ok(vec![best.token; draws as usize]);
        }
        let inverse = inverse_temperature(row.temperature);
        let scaled = ScaledRow { logits: &logits, largest: best.value, inverse };
        let mut scratch = OwnedScratch::new(logits.len());
        let kept = self.keep(&scaled, row, &mut scratch.borrow());
        let mut noise = Noise::new(row);
        let draw = |index: u32| {
            noise.position = row.position.wrapping_add(index);
            self.winner(&scaled, &noise, best.token, kept, &scratch.borrow())
        };
        Ok((0..draws).map(draw).collect())
    }

    /// Checks the logits, applies the rules and finds the largest.
    fn prepare(&self, logits: &mut [f32], maxima: &[f32], row: &SampleRow) -> Result<Largest, SampleError> {
        let best = self.largest(logits, maxima)?.ok_or(SampleError::NotFinite)?;
        let Some(rules) = &row.rules else { return Ok(best) };
        self.apply(rules, logits);
        self.largest(logits, &[])?.ok_or(SampleError::NothingAllowed)
    }

    /// As [`LogitRules::apply`].
    fn apply(&self, rules: &LogitRules, logits: &mut [f32]) {
        rules.add_bias(logits);
        if let Some(allowed) = &rules.allowed {
            // SAFETY: as above.
            unsafe { (self.keep_only)(logits, allowed.words()) };
        }
        rules.ban(logits);
        rules.penalize(logits);
    }

    fn largest(&self, logits: &[f32], maxima: &[f32]) -> Result<Option<Largest>, SampleError> {
        // SAFETY: as above.
        let largest = unsafe { (self.largest)(logits, maxima) };
        if !largest.sound {
            return Err(SampleError::NotFinite);
        }
        Ok((largest.value > f32::NEG_INFINITY).then_some(largest))
    }

    /// What the filters leave.
    fn keep(&self, row: &ScaledRow<'_>, sample: &SampleRow, scratch: &mut Scratch<'_>) -> Kept {
        let num_tokens = row.logits.len();
        let top_k = if sample.top_k == 0 { num_tokens } else { (sample.top_k as usize).min(num_tokens) };
        let least = least_scaled(sample.min_p);
        if top_k == num_tokens && sample.top_p >= 1.0 {
            return Kept::Range(KeptRange { least, last: u64::MAX });
        }
        if top_k == num_tokens {
            return self.top_p_of_all(row, sample.top_p, least, scratch);
        }
        let mut count = self.top_k(row.logits, top_k, scratch);
        if sample.min_p > 0.0 {
            let keys = &mut scratch.keys[..count];
            count = retain(keys, |token| (row.logits[token as usize] - row.largest) * row.inverse >= least);
        }
        if sample.top_p < 1.0 {
            let keys = &mut scratch.keys[..count];
            keys.sort_unstable_by_key(|&key| token_of(key));
            // SAFETY: as above.
            let wanted = unsafe { (self.mass_among)(row, keys) } * f64::from(sample.top_p);
            count = self.cut(row, keys, wanted).unwrap_or(count);
        }
        Kept::Candidates(count)
    }

    /// What top_p keeps of all tokens from `least` on.
    fn top_p_of_all(&self, row: &ScaledRow<'_>, top_p: f32, least: f32, scratch: &mut Scratch<'_>) -> Kept {
        // SAFETY: as above.
        let wanted = unsafe { (self.mass)(row, least) } * f64::from(top_p);
        for reach in REACHES {
            let from = least.max(-reach);
            // SAFETY: as above.
            let found = unsafe { (self.gather)(row, from, scratch.keys) };
            let keys = &mut scratch.keys[..found];
            // SAFETY: as above.
            if reaches(unsafe { (self.units)(row, keys) }, wanted) {
                return self.cut_range(row, keys, wanted);
            }
            if from == least {
                break;
            }
        }
        Kept::Range(KeptRange { least, last: u64::MAX })
    }

    /// The first candidates that have the mass wanted together, which all of them have.
    fn cut_range(&self, row: &ScaledRow<'_>, keys: &mut [u64], wanted: f64) -> Kept {
        let count = self.cut(row, keys, wanted).unwrap_or(keys.len());
        if count <= MANY {
            return Kept::Candidates(count);
        }
        let last = keys[count - 1];
        let least = (row.logits[token_of(last) as usize] - row.largest) * row.inverse;
        Kept::Range(KeptRange { least, last })
    }

    /// How many of the first candidates have the mass wanted; `None` if all together have too little. Those are moved to the
    /// front, the last of them to its place.
    ///
    /// A search for the cut: a quarter of the candidates that it may lie in is split off and weighed.
    fn cut(&self, row: &ScaledRow<'_>, keys: &mut [u64], wanted: f64) -> Option<usize> {
        let (mut start, mut end, mut before) = (0, keys.len(), 0);
        while end - start > FEW {
            let middle = start + (end - start) / 4;
            select_first(&mut keys[start..end], middle - start);
            // SAFETY: as above.
            let units = before + unsafe { (self.units)(row, &keys[start..middle]) };
            if reaches(units, wanted) {
                end = middle;
            } else {
                (start, before) = (middle, units);
            }
        }
        keys[start..end].sort_unstable();
        for (index, key) in keys.iter().enumerate().take(end).skip(start) {
            // SAFETY: as above.
            before += unsafe { (self.units)(row, std::slice::from_ref(key)) };
            if reaches(before, wanted) {
                return Some(index + 1);
            }
        }
        None
    }

    /// Gathers the keys of the `count` largest logits, or of all that are finite if they are fewer, in any order; gives
    /// their number.
    fn top_k(&self, logits: &[f32], count: usize, scratch: &mut Scratch<'_>) -> usize {
        let from = self.bound_of_top(logits, count, scratch.maxima).max(f32::MIN);
        let row = ScaledRow { logits, largest: 0.0, inverse: 1.0 };
        // SAFETY: as above.
        let found = unsafe { (self.gather)(&row, from, scratch.keys) };
        select_first(&mut scratch.keys[..found], count);
        found.min(count)
    }

    /// At most the `count`-th largest logit: the `count`-th largest of the maxima of many groups.
    fn bound_of_top(&self, logits: &[f32], count: usize, maxima: &mut [f32]) -> f32 {
        let groups = |spacing: usize| logits.len().div_ceil(spacing) * 16;
        let spacing = match count {
            0 => return f32::NEG_INFINITY,
            _ if 4 * count <= groups(COARSE) => COARSE,
            _ if 2 * count <= groups(FINE) => FINE,
            _ => return f32::NEG_INFINITY,
        };
        // SAFETY: as above.
        let found = unsafe { (self.group_maxima)(logits, spacing, maxima) };
        *maxima[..found].select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
    }

    fn winner(&self, row: &ScaledRow<'_>, noise: &Noise, first: TokenId, kept: Kept, scratch: &Scratch<'_>) -> TokenId {
        // SAFETY: as above.
        unsafe {
            match kept {
                Kept::Range(range) => (self.draw_all)(row, noise, range, first),
                Kept::Candidates(count) => (self.draw_among)(row, noise, &scratch.keys[..count]),
            }
        }
    }

    fn logprobs(
        &self,
        logits: &[f32],
        largest: f32,
        token: TokenId,
        count: u32,
        scratch: &mut Scratch<'_>,
    ) -> TokenLogprobs {
        let row = ScaledRow { logits, largest, inverse: 1.0 };
        // SAFETY: as above.
        let softmax = LogSoftmax::new(largest, unsafe { (self.mass)(&row, f32::NEG_INFINITY) });
        let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        // SAFETY: as above.
        let rank = 1 + unsafe { (self.count_above)(logits, own) };
        TokenLogprobs { logprob: softmax.at(own), rank, top: self.top(logits, count, softmax, scratch) }
    }

    /// The `count` likeliest tokens.
    fn top(&self, logits: &[f32], count: u32, softmax: LogSoftmax, scratch: &mut Scratch<'_>) -> Vec<(TokenId, f32)> {
        let count = (count as usize).min(logits.len());
        if count == 0 {
            return Vec::new();
        }
        if self.top_k(logits, count, scratch) < count {
            // Even impossible tokens are asked for.
            let row = ScaledRow { logits, largest: 0.0, inverse: 1.0 };
            // SAFETY: as above.
            let found = unsafe { (self.gather)(&row, f32::NEG_INFINITY, scratch.keys) };
            select_first(&mut scratch.keys[..found], count);
        }
        let keys = &mut scratch.keys[..count];
        keys.sort_unstable();
        keys.iter().map(|&key| token_of(key)).map(|token| (token, softmax.at(logits[token as usize]))).collect()
    }
}

/// Moves the keys whose tokens are wanted to the front, in order; gives their number.
fn retain(keys: &mut [u64], wanted: impl Fn(TokenId) -> bool) -> usize {
    let mut kept = 0;
    for index in 0..keys.len() {
        if wanted(token_of(keys[index])) {
            keys[kept] = keys[index];
            kept += 1;
        }
    }
    kept
}
