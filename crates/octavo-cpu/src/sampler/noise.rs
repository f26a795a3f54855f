//! The draw itself: noise for sixteen tokens at once, and the winner among all tokens or among some.
//!
//! Few tokens can win, and most of them show it early: a block whose largest scaled logit lies further below the best
//! score so far than any noise reaches is not even hashed, and a hash bounds the noise, so that its logarithms are taken
//! only where they can matter. Both bounds are exact; the winner is the one of the plain sampler.

use octavo_backend::sampling::noise::{
    DOMAIN, HASH_SCALE, LARGEST_NOISE, LN_2, LOG_TERMS, NEAR_ONE, Noise, SPLIT, gumbel as plain_gumbel,
};

use super::{
    ScaledRow,
    candidates::{key, token_of},
    scan::{BLOCK, largest_of, load},
};
use crate::simd::{LANES, Simd, simd_shells};

/// Covers what a bound on the noise loses to rounding.
pub(super) const MARGIN: f32 = 1e-4;

simd_shells! {
    /// The winner among all tokens of `range`; `first` is one of them.
    pub(super) fn draw_all_kernel[][] = draw_all(row: &ScaledRow<'_>, noise: &Noise, range: KeptRange, first: u32) -> u32;
    /// The winner among some tokens.
    pub(super) fn draw_among_kernel[][] = draw_among(row: &ScaledRow<'_>, noise: &Noise, keys: &[u64]) -> u32;
}

#[cfg(test)]
simd_shells! {
    /// The noise of 16 hashes, and the bounds on it.
    pub(super) fn noise_kernel[][] = noise_of(hashes: &[u32; LANES], noise: &mut [f32; LANES], bounds: &mut [f32; LANES]);
}

/// The tokens that are kept: a head of the order of keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptRange {
    /// Their scaled logits are at least this.
    pub least: f32,
    /// Their keys are at most this.
    pub last: u64,
}

/// The best score so far and whose it is.
struct Best {
    score: f32,
    token: u32,
}

impl Best {
    fn of(row: &ScaledRow<'_>, noise: &Noise, token: u32) -> Best {
        let logit = row.logits[token as usize];
        Best { score: (logit - row.largest).mul_add(row.inverse, plain_gumbel(noise.hash(token))), token }
    }

    /// Larger scores win, equal ones of lower tokens.
    #[inline(always)]
    fn challenge(&mut self, score: f32, token: u32) -> bool {
        let wins = score > self.score || (score == self.score && token < self.token);
        if wins {
            (self.score, self.token) = (score, token);
        }
        wins
    }

    /// The scores of 16 tokens from `at` on, of which those with keys up to `last` may win.
    #[inline(always)]
    fn challenge_all(&mut self, row: &ScaledRow<'_>, last: u64, at: usize, scores: &[f32; LANES]) -> bool {
        let mut won = false;
        for (lane, &score) in scores.iter().enumerate() {
            let token = at + lane;
            if score >= self.score && key(row.logits[token], token as u32) <= last {
                won |= self.challenge(score, token as u32);
            }
        }
        won
    }
}

#[inline(always)]
unsafe fn draw_all<S: Simd>(simd: S, row: &ScaledRow<'_>, noise: &Noise, range: KeptRange, first: u32) -> u32 {
    let mut best = Best::of(row, noise, first);
    // SAFETY: 16 integers.
    let lane_numbers = unsafe { simd.load_bytes(LANE_NUMBERS.as_ptr().cast()) };
    let mut hopeless = simd.splat(range.least.max(best.score - LARGEST_NOISE));
    let mut worth_it = simd.splat(best.score - MARGIN);
    for start in (0..row.logits.len()).step_by(BLOCK) {
        // SAFETY: the instruction set is on; so in all that follow.
        let scaled = unsafe { row.scaled_block(simd, start) };
        if simd.mask_bits(simd.less(largest_of(simd, scaled), hopeless)) == u16::MAX {
            continue;
        }
        let counters = simd.add_int(lane_numbers, simd.splat_int((start / BLOCK * LANES) as i32));
        let hashes = philox(simd, counters, noise);
        for index in 0..BLOCK / LANES {
            let reachable = simd.add(scaled[index], noise_bound(simd, hashes[index]));
            if simd.mask_bits(simd.less(reachable, worth_it)) == u16::MAX {
                continue;
            }
            let mut scores = [0.0; LANES];
            // SAFETY: 16 floats.
            unsafe {
                let logits = load(simd, row.logits, start + index * LANES);
                let score = row.score(simd, logits, gumbel(simd, hashes[index]));
                let below = simd.less(scaled[index], simd.splat(range.least));
                simd.store(scores.as_mut_ptr(), simd.choose(below, simd.splat(f32::NEG_INFINITY), score));
            }
            if best.challenge_all(row, range.last, start + index * LANES, &scores) {
                hopeless = simd.splat(range.least.max(best.score - LARGEST_NOISE));
                worth_it = simd.splat(best.score - MARGIN);
            }
        }
    }
    best.token
}

#[inline(always)]
unsafe fn draw_among<S: Simd>(simd: S, row: &ScaledRow<'_>, noise: &Noise, keys: &[u64]) -> u32 {
    let mut best = Best { score: f32::NEG_INFINITY, token: u32::MAX };
    for keys in keys.chunks(LANES) {
        let mut logits = [f32::NEG_INFINITY; LANES];
        let mut counters = [0; LANES];
        for (lane, &key) in keys.iter().enumerate() {
            let token = token_of(key);
            logits[lane] = row.logits[token as usize];
            counters[lane] = (token >> 6) * 16 + (token & 15);
        }
        // SAFETY: all arrays have 16 elements.
        let scores = unsafe {
            let logits = simd.load(logits.as_ptr());
            let scaled = row.scaled(simd, logits);
            if simd.mask_bits(simd.less(scaled, simd.splat(best.score - LARGEST_NOISE))) == u16::MAX {
                continue;
            }
            let words = philox(simd, simd.load_bytes(counters.as_ptr().cast()), noise);
            let hashes = chosen_words(simd, words, keys);
            let mut scores = [0.0; LANES];
            let noise = gumbel(simd, simd.load_bytes(hashes.as_ptr().cast()));
            simd.store(scores.as_mut_ptr(), row.score(simd, logits, noise));
            scores
        };
        for (&key, &score) in keys.iter().zip(&scores) {
            best.challenge(score, token_of(key));
        }
    }
    best.token
}

/// Of the four words of each counter's block, the one of its token.
///
/// # Safety
/// The instruction set is on.
#[inline(always)]
unsafe fn chosen_words<S: Simd>(simd: S, words: [S::I; 4], keys: &[u64]) -> [i32; LANES] {
    let mut all = [[0; LANES]; 4];
    for (words, all) in words.into_iter().zip(&mut all) {
        // SAFETY: 16 integers.
        unsafe { simd.store_int(all.as_mut_ptr(), words) };
    }
    let mut hashes = [0; LANES];
    for (lane, &key) in keys.iter().enumerate() {
        hashes[lane] = all[(token_of(key) >> 4) as usize & 3][lane];
    }
    hashes
}

const LANE_NUMBERS: [i32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Philox4x32 with 10 rounds on 16 counters: the four words of each.
#[inline(always)]
fn philox<S: Simd>(simd: S, counters: S::I, noise: &Noise) -> [S::I; 4] {
    let (mut key0, mut key1) = (noise.seed as u32, (noise.seed >> 32) as u32);
    let words = [
        counters,
        simd.splat_int(noise.position as i32),
        simd.splat_int(noise.choice as i32),
        simd.splat_int(DOMAIN as i32),
    ];
    // Products are twice as wide as lanes, so the words of even and odd lanes go separate ways, both in even lanes; what the
    // odd ones hold meanwhile does not matter.
    let (mut even, mut odd) = (words, words);
    odd[0] = simd.odd_lanes(counters);
    for _ in 0..10 {
        even = philox_round(simd, even, key0, key1);
        odd = philox_round(simd, odd, key0, key1);
        key0 = key0.wrapping_add(0x9E37_79B9);
        key1 = key1.wrapping_add(0xBB67_AE85);
    }
    for (even, odd) in even.iter_mut().zip(odd) {
        *even = simd.merge_even(*even, odd);
    }
    even
}

#[inline(always)]
fn philox_round<S: Simd>(simd: S, words: [S::I; 4], key0: u32, key1: u32) -> [S::I; 4] {
    let a = simd.mul_even(words[0], 0xD251_1F53);
    let b = simd.mul_even(words[2], 0xCD9E_8D57);
    [
        simd.xor(simd.xor(simd.odd_lanes(b), words[1]), simd.splat_int(key0 as i32)),
        b,
        simd.xor(simd.xor(simd.odd_lanes(a), words[3]), simd.splat_int(key1 as i32)),
        a,
    ]
}

/// At least the noise of each hash, but for [`MARGIN`].
///
/// The noise is at most `-ln(v)` with `v = (hash + 1/2) / 2^32`, and the bits of a float, read as an integer and divided by
/// 2^23, are its binary logarithm and 127, or less: the mantissa `m` stands for `log2(1 + m)`, which is more.
#[inline(always)]
fn noise_bound<S: Simd>(simd: S, hashes: S::I) -> S::F {
    const LOG_OF_BIT: f32 = std::f32::consts::LN_2 / 8_388_608.0;
    let bits = simd.int_to_float(simd.float_bits(simd.unsigned_to_float(hashes)));
    simd.fma(bits, simd.splat(-LOG_OF_BIT), simd.splat(159.0 * std::f32::consts::LN_2))
}

/// The noise of each hash.
#[inline(always)]
fn gumbel<S: Simd>(simd: S, hashes: S::I) -> S::F {
    negated(simd, natural_log(simd, exponential(simd, hashes)))
}

#[inline(always)]
fn exponential<S: Simd>(simd: S, hashes: S::I) -> S::F {
    let (scale, half) = (simd.splat(HASH_SCALE), simd.splat(HASH_SCALE / 2.0));
    let v = simd.fma(simd.unsigned_to_float(hashes), scale, half);
    let w = simd.fma(simd.unsigned_to_float(simd.xor(hashes, simd.splat_int(-1))), scale, half);
    let (f, exponent) = split(simd, w);
    let near_one = simd.less_unsigned(hashes, simd.splat_int(NEAR_ONE as i32));
    let f = simd.choose(near_one, negated(simd, v), f);
    let exponent = simd.choose(near_one, simd.splat(0.0), exponent);
    negated(simd, log1p_scaled(simd, f, exponent))
}

#[inline(always)]
fn natural_log<S: Simd>(simd: S, x: S::F) -> S::F {
    let (f, exponent) = split(simd, x);
    log1p_scaled(simd, f, exponent)
}

/// `x = (1 + f) * 2^exponent`, with `1 + f` in [sqrt(1/2), sqrt(2)).
#[inline(always)]
fn split<S: Simd>(simd: S, x: S::F) -> (S::F, S::F) {
    let bits = simd.float_bits(x);
    let exponent = simd.exponent_of(simd.sub_int(bits, simd.splat_int(SPLIT as i32)));
    let mantissa = simd.bits_to_float(simd.sub_int(bits, simd.exponent_bits(exponent)));
    (simd.sub(mantissa, simd.splat(1.0)), simd.int_to_float(exponent))
}

#[inline(always)]
fn log1p_scaled<S: Simd>(simd: S, f: S::F, exponent: S::F) -> S::F {
    let square = simd.mul(f, f);
    let mut polynomial = simd.splat(LOG_TERMS[0]);
    for term in &LOG_TERMS[1..] {
        polynomial = simd.fma(polynomial, f, simd.splat(*term));
    }
    let y = simd.fma(simd.mul(polynomial, square), f, simd.mul(simd.splat(-0.5), square));
    simd.fma(exponent, simd.splat(LN_2), simd.add(y, f))
}

#[inline(always)]
fn negated<S: Simd>(simd: S, x: S::F) -> S::F {
    simd.bits_to_float(simd.xor(simd.float_bits(x), simd.splat_int(i32::MIN)))
}

#[cfg(test)]
#[inline(always)]
unsafe fn noise_of<S: Simd>(simd: S, hashes: &[u32; LANES], noise: &mut [f32; LANES], bounds: &mut [f32; LANES]) {
    // SAFETY: all arrays have 16 elements.
    unsafe {
        let hashes = simd.load_bytes(hashes.as_ptr().cast());
        simd.store(noise.as_mut_ptr(), gumbel(simd, hashes));
        simd.store(bounds.as_mut_ptr(), noise_bound(simd, hashes));
    }
}
