//! Tokens that may be kept, as keys whose order is the order of the filters.

/// Orders candidates: larger logits have smaller keys, equal ones (0 and -0 are equal) are ordered by token.
pub(super) fn key(logit: f32, token: u32) -> u64 {
    // Adding 0 turns -0 into 0 and changes nothing else.
    let bits = (logit + 0.0).to_bits();
    let ascending = bits ^ ((bits as i32 >> 31) as u32 | 0x8000_0000);
    u64::from(!ascending) << 32 | u64::from(token)
}

/// Whose key it is.
pub(super) fn token_of(key: u64) -> u32 {
    key as u32
}

/// Moves the `count` first of `keys` to the front, in any order.
pub(super) fn select_first(keys: &mut [u64], count: usize) {
    if 0 < count && count < keys.len() {
        keys.select_nth_unstable(count - 1);
    }
}

/// Where a row's candidates are kept while it is sampled from.
#[derive(Debug)]
pub struct Scratch<'a> {
    /// A key for each token.
    pub keys: &'a mut [u64],
    /// [`num_maxima`] of the row.
    pub maxima: &'a mut [f32],
}

/// Logits of the smallest groups whose largest are compared first.
pub(super) const FINE: usize = 256;

/// Logits of the largest such groups.
pub(super) const COARSE: usize = 1024;

/// Places for the maxima of a row of `num_tokens`.
pub fn num_maxima(num_tokens: usize) -> usize {
    num_tokens.div_ceil(FINE) * 16
}

/// A [`Scratch`] of its own.
#[derive(Debug)]
pub struct OwnedScratch {
    keys: Vec<u64>,
    maxima: Vec<f32>,
}

impl OwnedScratch {
    /// For rows of up to `num_tokens`.
    pub fn new(num_tokens: usize) -> OwnedScratch {
        OwnedScratch { keys: vec![0; num_tokens], maxima: vec![0.0; num_maxima(num_tokens)] }
    }

    /// To be used for one row after another.
    pub fn borrow(&mut self) -> Scratch<'_> {
        Scratch { keys: &mut self.keys, maxima: &mut self.maxima }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_logits_do_and_equal_ones_by_token() {
        let descending = [f32::MAX, 1.5, 1e-40, 0.0, -1e-40, -1.5, f32::MIN, f32::NEG_INFINITY];
        for pair in descending.windows(2) {
            assert!(key(pair[0], 9) < key(pair[1], 3), "{pair:?}");
        }
        assert!(key(-0.0, 1) < key(0.0, 2) && key(0.0, 1) < key(-0.0, 2));
        assert_eq!(token_of(key(-3.0, u32::MAX)), u32::MAX);
    }
}
