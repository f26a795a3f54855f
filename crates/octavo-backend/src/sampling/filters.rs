//! Which tokens a draw is among.
//!
//! min_p, then top_k, then top_p, each on what the one before left. All keep a head of one order, larger logits first and
//! equal ones by id; none renormalises anything.

use std::cmp::Ordering;

use super::{
    Draw,
    mass::{MassSum, mass, mass_units, reaches},
    noise::natural_log,
};
use crate::{SampleRow, TokenId};

/// The least a token's scaled logit may be under `min_p`; negative infinity when it is off.
pub fn least_scaled(min_p: f32) -> f32 {
    if min_p > 0.0 { natural_log(min_p.max(f32::MIN_POSITIVE)) } else { f32::NEG_INFINITY }
}

/// The tokens that the filters leave; `None` when they leave all.
pub(super) fn kept(draw: &Draw<'_>, row: &SampleRow) -> Option<Vec<TokenId>> {
    let vocab_size = draw.logits.len();
    let top_k = if row.top_k == 0 { vocab_size } else { (row.top_k as usize).min(vocab_size) };
    if row.min_p <= 0.0 && top_k == vocab_size && row.top_p >= 1.0 {
        return None;
    }
    let least = least_scaled(row.min_p);
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
    let mut sum = MassSum::default();
    let mass = |id: TokenId| mass(draw.scaled(id as usize));
    ids.iter().for_each(|&id| sum.add(id as usize, mass(id)));
    let wanted = sum.total() * f64::from(top_p);
    let (mut units, mut sorted) = (0, 0);
    // Sorting ever larger heads finds the cut without sorting the vocabulary.
    while sorted < ids.len() {
        let head = (sorted * 4).max(64).min(ids.len());
        if head < ids.len() {
            ids[sorted..].select_nth_unstable_by(head - sorted - 1, by_logit(draw.logits));
        }
        ids[sorted..head].sort_unstable_by(by_logit(draw.logits));
        for (at, &id) in ids.iter().enumerate().take(head).skip(sorted) {
            units += mass_units(mass(id));
            if reaches(units, wanted) {
                ids.truncate(at + 1);
                return;
            }
        }
        sorted = head;
    }
}

/// Larger logits first, equal ones (0 and -0 are equal) by id; no logit is NaN.
pub(super) fn by_logit(logits: &[f32]) -> impl Fn(&TokenId, &TokenId) -> Ordering {
    |&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{
        noise::Noise,
        tests::{logits, row},
    };

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
        assert_eq!(keep(SampleRow { min_p: 1e-45, ..row(0) }), Some(vec![0, 1, 2, 3]));
        // top_p counts the mass that top_k left: 0.4 of 0.7 is more than half.
        assert_eq!(keep(SampleRow { top_k: 2, top_p: 0.55, ..row(0) }), Some(vec![0]));
        // And the mass that min_p left: 0.7 of 0.9 is more than three quarters.
        assert_eq!(keep(SampleRow { min_p: 0.4, top_p: 0.76, ..row(0) }), Some(vec![0, 1]));
    }

    #[test]
    fn top_p_finds_the_cut_of_a_full_sort_in_a_large_vocabulary() {
        for seed in 0..10 {
            let logits = logits(5000, seed);
            let row = SampleRow { top_p: 0.9, temperature: 5.0, ..row(0) };
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let draw = Draw { logits: &logits, largest, inverse: 0.2, noise: Noise::new(&row) };
            let mut sorted: Vec<TokenId> = (0..5000).collect();
            sorted.sort_by(by_logit(&logits));
            let mass = |id: TokenId| f64::from(draw.scaled(id as usize)).exp();
            let wanted = (0..5000).map(mass).sum::<f64>() * f64::from(0.9f32);
            let mut reached = 0.0;
            let cut = sorted.iter().position(|&id| {
                reached += mass(id);
                reached >= wanted
            });
            assert_eq!(kept(&draw, &row).unwrap(), sorted[..=cut.unwrap()]);
        }
    }
}
