//! What two computations of the same rows must have in common.

use super::driver::{Tolerance, assert_close, assert_same_bits};
use crate::{SampleError, Sampled, StepResult, Sums, TokenLogprobs};

/// How far log-probabilities may be apart where sums have no fixed order: one quantum of a rounded activation can fall the
/// other way, in a whole layer's input at worst.
const FREE: Tolerance = Tolerance { most: 5e-2, mean: 3e-3 };

/// Of so many draws one may fall on the other side of an edge between two tokens.
const DRAWS_FOR_ONE_OTHER: usize = 20;

/// Places by which a rank may differ: tokens of almost equal logits change places.
const RANKS: u32 = 3;

/// Asserts that rows computed in two ways are equal: bit for bit, or within a tolerance where sums are free.
pub(super) fn assert_same_rows(what: &str, sums: Sums, found: &[Vec<f32>], expected: &[Vec<f32>]) {
    match sums {
        Sums::Fixed => assert_same_bits(what, found, expected),
        Sums::Free => assert_close(what, found, expected, FREE),
    }
}

/// Asserts that draws computed in two ways are equal, or where sums are free all but a few of them.
pub(super) fn assert_same_draws(
    what: &str,
    sums: Sums,
    found: &[Result<Sampled, SampleError>],
    expected: &[Result<Sampled, SampleError>],
) {
    assert_eq!(found.len(), expected.len(), "{what}: draws");
    let mut others = 0;
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        if sums == Sums::Fixed {
            assert_eq!(found, expected, "{what}: row {row}");
        }
        let (Ok(found), Ok(expected)) = (found, expected) else {
            assert_eq!(found, expected, "{what}: row {row}");
            continue;
        };
        if found.token != expected.token {
            others += 1;
            continue;
        }
        assert_eq!(found.logprobs.is_some(), expected.logprobs.is_some(), "{what}: row {row}");
        if let (Some(found), Some(expected)) = (&found.logprobs, &expected.logprobs) {
            assert_close_logprobs(&format!("{what}: row {row}"), found, expected);
        }
    }
    let most = found.len().div_ceil(DRAWS_FOR_ONE_OTHER);
    assert!(others <= most, "{what}: {others} of {} draws are others", found.len());
}

/// Asserts that two results of one step are equal, or where sums are free within a tolerance.
pub(super) fn assert_same_results(what: &str, sums: Sums, found: &StepResult, expected: &StepResult) {
    if sums == Sums::Fixed {
        assert_eq!(found, expected, "{what}");
        return;
    }
    assert_same_draws(what, sums, &found.sampled, &expected.sampled);
    assert_eq!(found.scores.len(), expected.scores.len(), "{what}: scores");
    for (index, (found, expected)) in found.scores.iter().zip(&expected.scores).enumerate() {
        match (found, expected) {
            (Ok(found), Ok(expected)) => assert_close_logprobs(&format!("{what}: score {index}"), found, expected),
            _ => assert_eq!(found, expected, "{what}: score {index}"),
        }
    }
    assert_close(what, std::slice::from_ref(&found.hidden), std::slice::from_ref(&expected.hidden), FREE);
}

fn assert_close_logprobs(what: &str, found: &TokenLogprobs, expected: &TokenLogprobs) {
    let is_close = |found: f32, expected: f32| (found - expected).abs() <= FREE.most;
    assert!(is_close(found.logprob, expected.logprob), "{what}: {} and {}", found.logprob, expected.logprob);
    assert!(found.rank.abs_diff(expected.rank) <= RANKS, "{what}: ranks {} and {}", found.rank, expected.rank);
    assert_eq!(found.top.len(), expected.top.len(), "{what}: likeliest tokens");
    for (place, (found, expected)) in found.top.iter().zip(&expected.top).enumerate() {
        assert!(is_close(found.1, expected.1), "{what}: place {place}: {found:?} and {expected:?}");
    }
    assert!(found.top.is_sorted_by(|a, b| a.1 >= b.1), "{what}: not descending: {:?}", found.top);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(token: u32, logprob: f32) -> Result<Sampled, SampleError> {
        Ok(Sampled { token, logprobs: Some(TokenLogprobs { logprob, rank: 1, top: vec![(token, logprob)] }) })
    }

    #[test]
    fn free_sums_may_be_apart_a_little_and_fixed_ones_not_at_all() {
        let same = |sums, found: f32| {
            std::panic::catch_unwind(|| assert_same_draws("draws", sums, &[draw(3, found)], &[draw(3, -1.0)])).is_ok()
        };
        assert!(same(Sums::Fixed, -1.0) && same(Sums::Free, -1.001));
        assert!(!same(Sums::Fixed, -1.001) && !same(Sums::Free, -1.2));
    }

    #[test]
    fn of_free_draws_one_in_twenty_may_be_another_token_and_none_may_fail() {
        let expected: Vec<_> = (0..40).map(|token| draw(token, -1.0)).collect();
        let same = |others: usize| {
            let mut found = expected.clone();
            found[..others].fill(draw(99, -1.0));
            std::panic::catch_unwind(|| assert_same_draws("draws", Sums::Free, &found, &expected)).is_ok()
        };
        assert!(same(2) && !same(3));
        let mut failed = expected.clone();
        failed[7] = Err(SampleError::NotFinite);
        let failed = std::panic::catch_unwind(|| assert_same_draws("draws", Sums::Free, &failed, &expected));
        assert!(failed.is_err());
    }
}
