//! The fast sampler has the bits of the plain one on every instruction set.

use std::sync::Arc;

use octavo_backend::{
    LogitRules, Penalties, SampleError, SampleRow, Sampled, ScoreRow, SeenToken, TokenMask,
    sampling::{
        self,
        noise::{LARGEST_NOISE, Noise, gumbel},
    },
};

use super::{OwnedScratch, SPAN, Sampler, noise};
use crate::{
    isa::Isa,
    simd::{LANES, random_bits},
};

const SIZES: [usize; 4] = [512, 1000, 4099, 49_152];

/// Shapes of rows that a sampler could stumble over.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Even,
    Peaked,
    Constant,
    Ties,
    Forbidden,
    Zeros,
}

const SHAPES: [Shape; 6] = [Shape::Even, Shape::Peaked, Shape::Constant, Shape::Ties, Shape::Forbidden, Shape::Zeros];

fn logits(shape: Shape, count: usize, seed: u64) -> Vec<f32> {
    let mut bits = random_bits(seed + 1);
    let mut uniform = move || bits() as f32 / u32::MAX as f32;
    let mut logit = move || match shape {
        Shape::Even => uniform() * 20.0 - 10.0,
        // Like a model's: most lie far below a few.
        Shape::Peaked => -(uniform().max(1e-6).ln() * 0.1).abs() * 20.0 + uniform().powi(40) * 30.0,
        Shape::Constant => -3.25,
        Shape::Ties => (uniform() * 6.0).floor() - 2.0,
        Shape::Forbidden => {
            if uniform() < 0.7 {
                f32::NEG_INFINITY
            } else {
                uniform() * 5.0
            }
        }
        Shape::Zeros => [0.0, -0.0, -1e-40, 1e-40][(uniform() * 3.999) as usize],
    };
    let mut row: Vec<f32> = (0..count).map(|_| logit()).collect();
    // One finite logit at least, somewhere.
    row[seed as usize * 31 % count] = 4.0;
    row
}

/// Every combination of filters, at temperatures from greedy to flat.
fn settings(seed: u64) -> Vec<SampleRow> {
    let mut rows = Vec::new();
    let temperatures = [0.0, 1e-5, 0.01, 0.7, 1.0, 2.5, 1e4, 1e38];
    for (index, &temperature) in temperatures.iter().enumerate() {
        for top_k in [0, 1, 7, 50, 300, 2000] {
            for top_p in [1.0, 0.999_999, 0.9, 0.3, 0.0] {
                for min_p in [0.0, 1e-7, 0.05, 1.0] {
                    let choice = rows.len();
                    rows.push(SampleRow {
                        seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                        choice: choice as u32,
                        temperature,
                        top_k,
                        top_p,
                        min_p,
                        logprobs: [None, Some(0), Some(5), Some(100_000), None][(choice + index) % 5],
                        ..SampleRow::greedy(0, seed as u32)
                    });
                }
            }
        }
    }
    rows
}

fn assert_equal(isa: Isa, sampler: &Sampler, logits: &[f32], row: &SampleRow, expected: &Result<Sampled, SampleError>) {
    let mut scratch = OwnedScratch::new(logits.len());
    for maxima in [Vec::new(), maxima(sampler, logits)] {
        let found = sampler.sample(&mut logits.to_vec(), &maxima, row, &mut scratch.borrow());
        assert_eq!(bits(&found), bits(expected), "{isa}, {} tokens, {row:?}", logits.len());
    }
}

/// Of each span, as whoever computes the logits finds them.
fn maxima(sampler: &Sampler, logits: &[f32]) -> Vec<f32> {
    logits.chunks(SPAN).map(|span| sampler.span_maximum(span)).collect()
}

/// Comparable bit for bit.
fn bits(result: &Result<Sampled, SampleError>) -> String {
    match result {
        Err(error) => format!("{error:?}"),
        Ok(Sampled { token, logprobs: None }) => token.to_string(),
        Ok(Sampled { token, logprobs: Some(report) }) => {
            let top: Vec<(u32, u32)> = report.top.iter().map(|top| (top.0, top.1.to_bits())).collect();
            format!("{token} {:08x} {} {top:x?}", report.logprob.to_bits(), report.rank)
        }
    }
}

fn compare(shape: Shape, count: usize, seed: u64, stride: usize) {
    let logits = logits(shape, count, seed);
    for row in settings(seed).iter().skip(seed as usize % stride).step_by(stride) {
        let expected = sampling::sample(&mut logits.to_vec(), row);
        for isa in Isa::supported() {
            assert_equal(isa, &Sampler::new(isa), &logits, row, &expected);
        }
    }
}

#[test]
fn small_rows_of_every_size_equal_the_plain_sampler() {
    for count in 1..=70 {
        for (index, shape) in SHAPES.into_iter().enumerate() {
            compare(shape, count, (count * 6 + index) as u64, 41);
        }
    }
}

#[test]
fn large_rows_equal_the_plain_sampler() {
    for count in SIZES {
        for (index, shape) in SHAPES.into_iter().enumerate() {
            let stride = if count > 10_000 { 211 } else { 23 };
            (0..2).for_each(|seed| compare(shape, count, seed * 7 + index as u64, stride));
        }
    }
}

#[test]
fn wide_nuclei_equal_the_plain_sampler() {
    for (count, shape) in
        [(4099, Shape::Ties), (4099, Shape::Forbidden), (49_152, Shape::Even), (49_152, Shape::Constant)]
    {
        let logits = logits(shape, count, 12);
        for (temperature, top_p, min_p) in [(1.0, 0.95, 0.0), (5.0, 0.5, 0.0), (1e4, 0.9, 0.5), (3.0, 0.999, 1e-3)] {
            let row = SampleRow { temperature, top_p, min_p, seed: 3, ..SampleRow::greedy(0, 2) };
            let expected = sampling::draw_many(&logits, &row, 20).unwrap();
            for isa in Isa::supported() {
                let found = Sampler::new(isa).draw_many(&logits, &row, 20).unwrap();
                assert_eq!(found, expected, "{isa}, {shape:?}, {row:?}");
            }
        }
    }
}

#[test]
fn many_full_draws_equal_the_plain_sampler() {
    for shape in [Shape::Even, Shape::Peaked] {
        let logits = logits(shape, 49_152, 3);
        for temperature in [0.5, 1.0, 1.5] {
            let row = SampleRow { temperature, seed: 99, ..SampleRow::greedy(0, 5) };
            let expected = sampling::draw_many(&logits, &row, 40).unwrap();
            for isa in Isa::supported() {
                assert_eq!(Sampler::new(isa).draw_many(&logits, &row, 40).unwrap(), expected, "{isa}, {shape:?}");
            }
        }
    }
}

#[test]
fn rules_equal_the_plain_ones() {
    for (index, count) in [1usize, 5, 31, 32, 33, 64, 65, 1000].into_iter().enumerate() {
        let mut bits = random_bits(index as u64 + 50);
        for turn in 0..30 {
            let mut pick = |share: u32| -> Vec<u32> { (0..count as u32).filter(|_| bits() % 100 < share).collect() };
            let mut allowed = TokenMask::none(if turn % 7 == 0 { count.div_ceil(2) } else { count });
            let limit = allowed.words().len() as u32 * 32;
            pick(60).into_iter().filter(|&token| token < limit).for_each(|token| allowed.insert(token));
            let seen = pick(50).into_iter().map(|token| SeenToken { token, in_output: token % 3 }).collect();
            let penalties = Penalties { repetition: 1.2, frequency: 0.3, presence: 0.5, seen: Arc::new(seen) };
            let rules = LogitRules {
                bias: pick(20).into_iter().map(|token| (token, token as f32 * 0.1 - 2.0)).collect(),
                allowed: (turn % 2 == 0).then(|| Arc::new(allowed)),
                banned: if turn % 3 == 0 { pick(30) } else { Vec::new() },
                penalties: (turn % 5 < 3).then_some(penalties),
            };
            let row = SampleRow {
                temperature: [0.0, 1.0][turn % 2],
                logprobs: Some(4),
                rules: Some(Box::new(rules)),
                ..SampleRow::greedy(0, turn as u32)
            };
            let logits = logits(SHAPES[turn % 6], count, turn as u64);
            let expected = sampling::sample(&mut logits.to_vec(), &row);
            for isa in Isa::supported() {
                assert_equal(isa, &Sampler::new(isa), &logits, &row, &expected);
            }
        }
    }
}

#[test]
fn scores_equal_the_plain_ones() {
    for count in [1, 17, 300, 5000] {
        for shape in SHAPES {
            let logits = logits(shape, count, 8);
            // The last of them is padding.
            for token in [0, count / 2, count - 1, count] {
                for top in [0, 1, 20, 5000] {
                    let row = ScoreRow { row: 0, token: token as u32, top };
                    let expected = sampling::score(&logits, &row);
                    for isa in Isa::supported() {
                        let (sampler, mut scratch) = (Sampler::new(isa), OwnedScratch::new(count));
                        for maxima in [Vec::new(), maxima(&sampler, &logits)] {
                            let found = sampler.score(&logits, &maxima, &row, &mut scratch.borrow());
                            assert_eq!(found, expected, "{isa}, {shape:?}, {count} tokens, {row:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn faults_are_found_wherever_they_are() {
    for isa in Isa::supported() {
        let sampler = Sampler::new(isa);
        for count in [1, 3, 16, 63, 64, 65, 1500] {
            let mut scratch = OwnedScratch::new(count);
            let mut sample = |logits: &[f32]| {
                let row = SampleRow { temperature: 1.0, ..SampleRow::greedy(0, 0) };
                sampler.sample(&mut logits.to_vec(), &[], &row, &mut scratch.borrow())
            };
            for at in (0..count).step_by(if count > 100 { 97 } else { 1 }) {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                    let mut logits = vec![0.5; count];
                    logits[at] = bad;
                    assert_eq!(sample(&logits), Err(SampleError::NotFinite), "{isa}, {bad} at {at} of {count}");
                }
            }
            assert_eq!(sample(&vec![f32::NEG_INFINITY; count]), Err(SampleError::NotFinite));
        }
    }
}

#[test]
fn noise_has_the_known_answers_on_every_instruction_set() {
    let answers = [
        (0, 0, 0, 0, 0xbef0_ae0b_u32),
        (12345, 0, 0, 0, 0x3f0b_51ed),
        (12345, 7, 3, 49_151, 0xbf69_8d75),
        (0xfedc_ba98_7654_3210, 4095, 1, 151_935, 0x4032_29af),
    ];
    let limits = [(0, 0x41b6_fda9_u32), (1, 0x41ae_33b4), (0x8000_0000, 0x3ebb_a795), (u32::MAX, 0xc048_51d5)];
    for isa in Isa::supported() {
        let noise_of = |hash: u32| {
            let (mut noise, mut bounds) = ([0.0; LANES], [0.0; LANES]);
            // SAFETY: this machine has the instruction set.
            unsafe { noise::noise_kernel(isa)(&[hash; LANES], &mut noise, &mut bounds) };
            noise[5].to_bits()
        };
        for (seed, position, choice, token, expected) in answers {
            assert_eq!(noise_of(Noise { seed, position, choice }.hash(token)), expected, "{isa}");
        }
        for (hash, expected) in limits {
            assert_eq!(noise_of(hash), expected, "{isa}");
        }
        // The winner among two tokens of equal logits is the one of the larger noise, through all of the machinery.
        for (seed, position, choice, token, _) in answers {
            let logits = vec![0.0; token as usize + 2];
            let row = SampleRow { seed, choice, temperature: 1.0, ..SampleRow::greedy(0, position) };
            let expected = sampling::sample(&mut logits.clone(), &row).unwrap().token;
            assert_eq!(Sampler::new(isa).draw_many(&logits, &row, 1).unwrap(), [expected], "{isa}");
        }
    }
}

#[test]
fn noise_has_the_plain_bits_and_stays_below_its_bound() {
    for isa in Isa::supported() {
        let kernel = noise::noise_kernel(isa);
        let mut next = 0u32;
        for turn in 0..200_000u32 {
            let mut hashes = [0; LANES];
            for hash in &mut hashes {
                *hash = next;
                next = next.wrapping_add(if turn < 100 { 1 } else { 1341 });
            }
            let (mut noise, mut bounds) = ([0.0; LANES], [0.0; LANES]);
            // SAFETY: this machine has the instruction set.
            unsafe { kernel(&hashes, &mut noise, &mut bounds) };
            for lane in 0..LANES {
                let plain = gumbel(hashes[lane]);
                assert_eq!(noise[lane].to_bits(), plain.to_bits(), "{isa}, hash {:08x}", hashes[lane]);
                let bound = bounds[lane] + noise::MARGIN / 2.0;
                assert!(plain <= bound && plain <= LARGEST_NOISE, "{isa}, hash {:08x}: {plain}", hashes[lane]);
            }
        }
    }
}
