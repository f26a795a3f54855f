//! Draws follow the exact filtered distribution.
//!
//! The distribution is computed here from its definition, in double precision and with a full sort, and draws are compared
//! with it by Pearson's chi-square test.

use octavo_backend::{SampleRow, TokenId, sampling};
use octavo_cpu::{isa::Isa, sampler::Sampler};

const DRAWS: u32 = 200_000;

/// Bins in which fewer draws are expected are counted together.
const LEAST_EXPECTED: f64 = 10.0;

/// Logits like a model's: a few tokens stand out, the rest tail off. Normal noise by the sum of twelve uniform numbers.
fn logits(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    (0..count).map(|_| ((0..12).map(|_| uniform()).sum::<f64>() - 6.0) as f32 * 1.5).collect()
}

/// The probability of each token after temperature, min_p, top_k and top_p.
fn distribution(logits: &[f32], row: &SampleRow) -> Vec<f64> {
    let scaled = |token: usize| f64::from(logits[token]) / f64::from(row.temperature);
    let largest = (0..logits.len()).map(scaled).fold(f64::NEG_INFINITY, f64::max);
    let mut left: Vec<(usize, f64)> = (0..logits.len()).map(|token| (token, (scaled(token) - largest).exp())).collect();
    left.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    left.retain(|(_, weight)| *weight >= f64::from(row.min_p));
    if row.top_k > 0 {
        left.truncate(row.top_k as usize);
    }
    let wanted = left.iter().map(|left| left.1).sum::<f64>() * f64::from(row.top_p);
    let mut reached = 0.0;
    let enough = left.iter().position(|left| {
        reached += left.1;
        reached >= wanted * (1.0 - 1e-12)
    });
    left.truncate(enough.map_or(left.len(), |last| last + 1));
    let total: f64 = left.iter().map(|left| left.1).sum();
    let mut probabilities = vec![0.0; logits.len()];
    left.into_iter().for_each(|(token, weight)| probabilities[token] = weight / total);
    probabilities
}

/// The probability that draws from `probabilities` are at least as far from them as these; 0 if one of them is impossible.
fn p_value(draws: &[TokenId], probabilities: &[f64]) -> f64 {
    let mut counts = vec![0u32; probabilities.len()];
    draws.iter().for_each(|&token| counts[token as usize] += 1);
    let mut bins: Vec<(f64, f64)> = Vec::new();
    let mut pooled = (0.0, 0.0);
    for (&count, probability) in counts.iter().zip(probabilities) {
        let (count, expected) = (f64::from(count), probability * draws.len() as f64);
        if expected == 0.0 && count > 0.0 {
            return 0.0;
        }
        if expected >= LEAST_EXPECTED {
            bins.push((count, expected));
        } else {
            pooled = (pooled.0 + count, pooled.1 + expected);
        }
    }
    if pooled.1 >= LEAST_EXPECTED {
        bins.push(pooled);
    }
    if bins.len() < 2 {
        return 1.0;
    }
    let chi_square: f64 = bins.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum();
    upper_gamma((bins.len() - 1) as f64 / 2.0, chi_square / 2.0)
}

/// The regularised upper incomplete gamma function: by its series below the mean, by its continued fraction above
/// (Abramowitz and Stegun, 6.5.29 and 6.5.31).
fn upper_gamma(a: f64, x: f64) -> f64 {
    let scale = (a * x.max(1e-300).ln() - x - log_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum) = (1.0 / a, 1.0 / a);
        for n in 1..10_000 {
            term *= x / (a + f64::from(n));
            sum += term;
        }
        1.0 - sum * scale
    } else {
        let fraction =
            (1..5_000).rev().map(f64::from).fold(0.0, |tail, n| n * (a - n) / (x + 2.0 * n + 1.0 - a + tail));
        scale / (x + 1.0 - a + fraction)
    }
}

/// Stirling's series, from an argument where it is exact enough.
fn log_gamma(x: f64) -> f64 {
    if x < 10.0 {
        return log_gamma(x + 1.0) - x.ln();
    }
    let square = x * x;
    let series = (1.0 / 12.0 - (1.0 / 360.0 - 1.0 / (1260.0 * square)) / square) / x;
    (x - 0.5) * x.ln() - x + std::f64::consts::TAU.ln() / 2.0 + series
}

/// All eight combinations of the three filters, each with a seed of its own, so that the series are independent.
fn combinations(seed: u64) -> Vec<SampleRow> {
    let row = SampleRow { temperature: 0.8, ..SampleRow::greedy(0, 1) };
    (0..8)
        .map(|bits| SampleRow {
            seed: seed * 8 + bits,
            min_p: if bits & 1 > 0 { 0.01 } else { 0.0 },
            top_k: if bits & 2 > 0 { 20 } else { 0 },
            top_p: if bits & 4 > 0 { 0.9 } else { 1.0 },
            ..row.clone()
        })
        .collect()
}

#[test]
fn the_tail_of_chi_square_has_known_values() {
    // Critical values of the usual tables.
    for (degrees, critical, tail) in
        [(1.0, 10.828, 0.001), (3.0, 7.815, 0.05), (10.0, 18.307, 0.05), (100.0, 149.449, 0.001)]
    {
        let found = upper_gamma(degrees / 2.0, critical / 2.0);
        assert!((found / tail - 1.0).abs() < 2e-3, "{degrees} degrees of freedom: {found}");
    }
}

#[test]
fn every_combination_of_filters_draws_from_its_distribution() {
    let sampler = Sampler::new(Isa::detect());
    for (vocab_size, seed) in [(8, 1), (64, 2), (300, 3), (1000, 4)] {
        let logits = logits(vocab_size, seed);
        for row in combinations(seed) {
            let draws = sampler.draw_many(&logits, &row, DRAWS).unwrap();
            let p = p_value(&draws, &distribution(&logits, &row));
            assert!(p > 0.001, "{vocab_size} tokens, p = {p}: {row:?}");
            assert!(draws == sampler.draw_many(&logits, &row, DRAWS).unwrap(), "the same seed again: {row:?}");
            assert!(draws[..2000] == sampling::draw_many(&logits, &row, 2000).unwrap(), "the plain sampler: {row:?}");
        }
    }
}

#[test]
fn a_distribution_that_is_slightly_off_is_noticed() {
    let logits = logits(300, 3);
    let row = &combinations(9)[0];
    let draws = Sampler::new(Isa::detect()).draw_many(&logits, row, DRAWS).unwrap();
    let warmer = SampleRow { temperature: 0.82, ..row.clone() };
    assert!(p_value(&draws, &distribution(&logits, &warmer)) < 1e-6);
    let cut = SampleRow { top_p: 0.99, ..row.clone() };
    assert_eq!(p_value(&draws, &distribution(&logits, &cut)), 0.0, "tokens that must not be drawn");
}
