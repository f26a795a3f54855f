//! The noise of a draw: a hash of seed, position, choice and token, turned into a standard Gumbel variate.
//!
//! Every step is one rounding, and no product feeds a plain sum, so that each instruction set and compiler gives the same
//! bits. Source: Philox4x32-10 (Salmon et al., SC'11).

use crate::{SampleRow, TokenId};

/// No noise value exceeds this ([`gumbel`] of the hash 0 is 22.8739).
pub const LARGEST_NOISE: f32 = 22.8741;

/// The last word of every counter: what the hash is for.
pub const DOMAIN: u32 = 0x5341_4D50;

/// Hashes below this take the logarithm near 1.
pub const NEAR_ONE: u32 = 0x4AFB_0CCD;

/// The bits of the square root of 1/2: where [`natural_log`] splits a number.
pub const SPLIT: u32 = 0x3F35_04F3;

/// Coefficients of [`log1p_scaled`], highest power first.
#[allow(clippy::excessive_precision, reason = "the definition gives nine digits")]
pub const LOG_TERMS: [f32; 9] = [
    0.0703768358,
    -0.115146101,
    0.116769984,
    -0.124201410,
    0.142493233,
    -0.166680574,
    0.200007141,
    -0.249999940,
    0.333333313,
];

/// ln 2 as the definition has it.
#[allow(clippy::excessive_precision, clippy::approx_constant, reason = "the definition gives nine digits")]
pub const LN_2: f32 = 0.693147182;

/// One over the number of hashes.
pub const HASH_SCALE: f32 = 1.0 / 4_294_967_296.0;

/// The noise of one row: everything but the token is fixed.
#[derive(Debug, Clone, Copy)]
pub struct Noise {
    /// The request's seed.
    pub seed: u64,
    /// The absolute index of the token that is drawn.
    pub position: u32,
    /// Which of a request's outputs this is.
    pub choice: u32,
}

impl Noise {
    /// The noise of a draw.
    pub fn new(row: &SampleRow) -> Noise {
        Noise { seed: row.seed, position: row.position, choice: row.choice }
    }

    /// The hash of one token.
    pub fn hash(&self, token: TokenId) -> u32 {
        self.block((token >> 6) * 16 + (token & 15))[(token >> 4) as usize & 3]
    }

    /// The hashes of tokens `start + column + 16 * (0, 1, 2, 3)`; `start` is a multiple of 64, `column` below 16.
    pub fn column(&self, start: usize, column: usize) -> [u32; 4] {
        self.block(((start >> 6) * 16 + column) as u32)
    }

    fn block(&self, counter: u32) -> [u32; 4] {
        philox([counter, self.position, self.choice, DOMAIN], self.seed)
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
pub fn gumbel(hash: u32) -> f32 {
    -natural_log(exponential(hash))
}

/// `-ln(1 - u)`-like exponential variate: small hashes through `ln(1 - v)`, large ones through `ln(w)`, `w = 1 - v`.
fn exponential(hash: u32) -> f32 {
    if hash < NEAR_ONE {
        let v = (hash as f32).mul_add(HASH_SCALE, HASH_SCALE / 2.0);
        -log1p_scaled(-v, 0.0)
    } else {
        let w = (!hash as f32).mul_add(HASH_SCALE, HASH_SCALE / 2.0);
        -natural_log(w)
    }
}

/// `ln(x)` of a positive normal number: `x = m * 2^e` with m in [sqrt(1/2), sqrt(2)).
pub fn natural_log(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits.wrapping_sub(SPLIT) as i32) >> 23;
    let mantissa = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23));
    log1p_scaled(mantissa - 1.0, exponent as f32)
}

/// `ln(1 + f) + exponent * ln 2`.
fn log1p_scaled(f: f32, exponent: f32) -> f32 {
    let square = f * f;
    let polynomial = LOG_TERMS[1..].iter().fold(LOG_TERMS[0], |sum, &term| sum.mul_add(f, term));
    let y = (polynomial * square).mul_add(f, -0.5 * square) + f;
    exponent.mul_add(LN_2, y)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
