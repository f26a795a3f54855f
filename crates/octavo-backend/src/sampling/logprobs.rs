//! Log-probabilities of a row: its log-softmax, at one token and at the likeliest ones.

use super::{
    filters::by_logit,
    mass::{MassSum, mass},
};
use crate::{LEAST_LOGPROB, TokenId, TokenLogprobs};

/// Turns logits of a row into log-probabilities.
#[derive(Debug, Clone, Copy)]
pub struct LogSoftmax {
    largest: f64,
    log_sum: f64,
}

impl LogSoftmax {
    /// From the largest logit and the sum of `exp(logit - largest)` over the row.
    pub fn new(largest: f32, sum: f64) -> LogSoftmax {
        LogSoftmax { largest: f64::from(largest), log_sum: sum.ln() }
    }

    /// The natural logarithm of a token's probability, at least [`LEAST_LOGPROB`].
    pub fn at(&self, logit: f32) -> f32 {
        ((f64::from(logit) - self.largest - self.log_sum) as f32).max(LEAST_LOGPROB)
    }
}

/// What is reported of a token and the `count` likeliest ones. A token beyond the row is as unlikely as can be.
pub(super) fn token_logprobs(logits: &[f32], largest: f32, token: TokenId, count: usize) -> TokenLogprobs {
    let mut sum = MassSum::default();
    logits.iter().enumerate().for_each(|(id, &logit)| sum.add(id, mass(logit - largest)));
    let softmax = LogSoftmax::new(largest, sum.total());
    let mut ids: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    let count = count.min(ids.len());
    if count > 0 && count < ids.len() {
        ids.select_nth_unstable_by(count - 1, by_logit(logits));
    }
    ids.truncate(count);
    ids.sort_unstable_by(by_logit(logits));
    let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    TokenLogprobs {
        logprob: softmax.at(own),
        rank: 1 + logits.iter().filter(|&&logit| logit > own).count() as u32,
        top: ids.into_iter().map(|id| (id, softmax.at(logits[id as usize]))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::tests::logits;

    #[test]
    fn logprobs_are_those_of_a_log_softmax_in_double_precision() {
        for (count, seed) in [(1, 0), (2, 1), (70, 2), (1000, 3), (49_152, 4)] {
            for spread in [0.0, 1e-3, 1.0, 3.0] {
                let logits: Vec<f32> = logits(count, seed).iter().map(|logit| spread * logit + 7.0).collect();
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                let report = token_logprobs(&logits, largest, 0, count);
                assert_eq!(report.top.len(), count);
                for (id, logprob) in report.top {
                    let exact = f64::from(logits[id as usize]) - sum.ln();
                    // Half a unit of the last place of the result itself is not ours to win back.
                    let bound = 5e-7 + exact.abs() * f64::from(f32::EPSILON) / 2.0;
                    assert!((f64::from(logprob) - exact).abs() < bound, "{count} tokens, {id}: {logprob}, {exact}");
                }
            }
        }
    }

    #[test]
    fn what_cannot_happen_has_the_least_logprob_and_the_last_rank() {
        let never = f32::NEG_INFINITY;
        let report = token_logprobs(&[1.0, never, 2.0, never], 2.0, 3, 9);
        assert_eq!((report.logprob, report.rank), (LEAST_LOGPROB, 3));
        assert_eq!(report.top.iter().map(|top| top.0).collect::<Vec<_>>(), [2, 0, 1, 3]);
        assert_eq!(report.top[3].1, LEAST_LOGPROB);
        let beyond = token_logprobs(&[1.0, 2.0], 2.0, 7, 0);
        assert_eq!((beyond.logprob, beyond.rank), (LEAST_LOGPROB, 3));
        let far = token_logprobs(&[0.0, -1e9], 0.0, 1, 0);
        assert_eq!((far.logprob, far.rank), (LEAST_LOGPROB, 2));
    }
}
