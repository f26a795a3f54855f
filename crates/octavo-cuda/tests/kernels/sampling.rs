//! Draws, rules and log-probabilities: the same bits as the definition, always.

use std::sync::Arc;

use octavo_backend::{
    LogitRules, Penalties, SampleError, SampleRow, Sampled, ScoreRow, SeenToken, TokenLogprobs, TokenMask,
    numerics::exp,
    sampling::{
        self,
        noise::{Noise as Gumbels, gumbel},
    },
};
use octavo_cuda::entries::{Entries, REPORTED_BYTES, Results};
use ptxsim::Report;

use crate::device::{Arguments, Device, Element, Extent, Noise, kernel_of};

const NEVER: f32 = f32::NEG_INFINITY;

impl Element for u32 {
    fn append_to(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_le_bytes());
    }
    fn from_bytes(bytes: &[u8]) -> Self {
        u32::from_le_bytes(bytes.try_into().unwrap())
    }
}

/// Rows of logits, and what is wanted of them.
#[derive(Default)]
struct Case {
    rows: Vec<Vec<f32>>,
    samples: Vec<SampleRow>,
    scores: Vec<ScoreRow>,
}

/// What the kernels gave, and what each counted.
struct Outcome {
    sampled: Vec<Result<Sampled, SampleError>>,
    scores: Vec<Result<TokenLogprobs, SampleError>>,
    rules: Report,
    sample: Report,
    logprobs: Report,
    logits: u64,
}

impl Case {
    fn new(rows: Vec<Vec<f32>>) -> Case {
        Case { rows, ..Case::default() }
    }

    /// One row and its draws.
    fn of(logits: Vec<f32>, samples: impl IntoIterator<Item = SampleRow>) -> Case {
        Case { rows: vec![logits], samples: samples.into_iter().collect(), scores: vec![] }
    }

    fn run(&self) -> Outcome {
        let num_tokens = self.rows[0].len();
        let mut entries = Entries::default();
        self.samples.iter().for_each(|sample| entries.push_sample(sample, sample.row, num_tokens));
        self.scores.iter().for_each(|score| entries.push_score(score, score.row, num_tokens));
        let mut device = Device::new();
        let stride = num_tokens.next_multiple_of(4);
        // What fills up a row is better than any logit, and is not to be looked at.
        let padded: Vec<f32> =
            self.rows.iter().flat_map(|row| row.iter().copied().chain(vec![1e30; stride - num_tokens])).collect();
        let logits = device.upload(&padded);
        let ruled = device.poisoned::<f32>((entries.num_ruled() * stride).max(1));
        let ruled_states = device.poisoned::<u32>(entries.num_ruled().max(1));
        let sizes = |arguments: Arguments| arguments.with(stride as i64).with(num_tokens as i32);
        let extent = |entries: usize| Extent { grid: [entries as u32, 1, 1], block: 1024, shared: 0 };
        let [mut rules, mut sample, mut logprobs] = [(); 3].map(|()| Report::default());
        if entries.num_ruled() > 0 {
            let lists = [
                upload(&mut device, &entries.rules),
                upload(&mut device, &entries.bias_tokens),
                upload(&mut device, &entries.bias_values),
                upload(&mut device, &entries.allowed),
                upload(&mut device, &entries.banned),
                upload(&mut device, &entries.seen),
            ];
            let arguments = sizes(Arguments::default().all(&[ruled, ruled_states, logits]).all(&lists));
            let kernel = kernel_of("sampling", "apply_rules");
            rules = device.run(kernel, extent(entries.num_ruled()), &arguments).unwrap();
        }
        let draws = entries.num_draws().max(1);
        let (tokens, states) = (device.poisoned::<u32>(draws), device.poisoned::<u32>(draws));
        if entries.num_draws() > 0 {
            let list = device.upload(&entries.draws);
            let arguments = Arguments::default().all(&[tokens, states, logits, ruled, ruled_states, list]);
            sample = device.run(kernel_of("sampling", "sample"), extent(draws), &sizes(arguments)).unwrap();
        }
        let reports = entries.num_reports().max(1);
        let reported = device.poisoned::<u8>(REPORTED_BYTES * reports);
        let places = (reports * entries.most_top).max(1);
        let (top_tokens, top_logits) = (device.poisoned::<u32>(places), device.poisoned::<f32>(places));
        if entries.num_reports() > 0 {
            let list = device.upload(&entries.reports);
            let outputs = [reported, top_tokens, top_logits];
            let arguments = Arguments::default().all(&outputs).all(&[logits, ruled, ruled_states, tokens, list]);
            let arguments = sizes(arguments).with(entries.most_top as i32);
            logprobs = device.run(kernel_of("sampling", "logprobs"), extent(reports), &arguments).unwrap();
        }
        let results = Results {
            tokens: &device.download(tokens, draws),
            states: &device.download(states, draws),
            reported: &device.download(reported, REPORTED_BYTES * reports),
            top_tokens: &device.download(top_tokens, places),
            top_logits: &device.download(top_logits, places),
        };
        let (sampled, scores) = (entries.sampled(&results), entries.scores(&results));
        Outcome { sampled, scores, rules, sample, logprobs, logits }
    }

    /// Runs and compares with the definition.
    fn check(&self) -> Outcome {
        let outcome = self.run();
        for (index, (sample, found)) in self.samples.iter().zip(&outcome.sampled).enumerate() {
            let expected = sampling::sample(&mut self.rows[sample.row].clone(), sample);
            assert_eq!(found, &expected, "draw {index} of {} tokens: {sample:?}", self.rows[0].len());
        }
        for (score, found) in self.scores.iter().zip(&outcome.scores) {
            assert_eq!(found, &sampling::score(&self.rows[score.row], score), "{score:?}");
        }
        assert_eq!((outcome.sampled.len(), outcome.scores.len()), (self.samples.len(), self.scores.len()));
        outcome
    }
}

/// An array, also an empty one.
fn upload<T: Element>(device: &mut Device, values: &[T]) -> u64 {
    if values.is_empty() { device.poisoned::<T>(1) } else { device.upload(values) }
}

/// Logits as a model's: many unlikely ones and a few likely ones.
fn logits(count: usize, seed: u64) -> Vec<f32> {
    let mut noise = Noise::new(seed);
    (0..count).map(|_| 4.0 * noise.next() + 3.0 * noise.next() + 12.0 * noise.next().powi(9)).collect()
}

fn random(row: usize) -> SampleRow {
    SampleRow { seed: 0x1234_5678_9abc_def0, temperature: 1.0, ..SampleRow::greedy(row, row as u32 + 1) }
}

/// The settings of the backends' conformance.
fn conformance_sample(row: usize) -> SampleRow {
    SampleRow {
        temperature: 0.25 * (row % 7) as f32,
        top_k: [0, 1, 5, 400][row % 4],
        top_p: [1.0, 0.9, 0.3][row % 3],
        min_p: [0.0, 0.02][row % 2],
        logprobs: row.is_multiple_of(5).then_some(3),
        ..random(row)
    }
}

#[test]
fn hashes_and_noise_have_the_known_answers() {
    let answers: [(u64, [u32; 3], u32, u32); 4] = [
        (0, [0, 0, 0], 0xcc52_14c5, 0xbef0_ae0b),
        (12345, [0, 0, 0], 0x70b5_51bc, 0x3f0b_51ed),
        (12345, [7, 3, 49151], 0xeac6_d834, 0xbf69_8d75),
        (0xfedc_ba98_7654_3210, [4095, 1, 151_935], 0x0f57_bc05, 0x4032_29af),
    ];
    let mut device = Device::new();
    let seeds = device.upload(&answers.map(|answer| answer.0));
    let keys = [0, 1, 2].map(|key| device.upload(&answers.map(|answer| answer.1[key])));
    let (hashes, noise) = (device.poisoned::<u32>(4), device.poisoned::<u32>(4));
    let arguments = Arguments::default().with(seeds).all(&keys).all(&[hashes, noise]);
    let extent = Extent { grid: [4, 1, 1], block: 1, shared: 0 };
    device.run(kernel_of("sampling", "noise_known_answers"), extent, &arguments).unwrap();
    assert_eq!(device.download::<u32>(hashes, 4), answers.map(|answer| answer.2));
    assert_eq!(device.download::<u32>(noise, 4), answers.map(|answer| answer.3));
    let noise = Gumbels { seed: 12345, position: 7, choice: 3 };
    assert_eq!(noise.hash(49151), answers[2].2, "the definition has them too");
}

#[test]
fn noise_has_the_bits_of_the_definition_for_hashes_everywhere() {
    let near = |hash: u32| (0..40).map(move |i| hash.wrapping_sub(20).wrapping_add(i));
    let hashes: Vec<u32> =
        [0, 0x4AFB_0CCD, 0x8000_0000].into_iter().flat_map(near).chain((0..u32::MAX).step_by(1_048_573)).collect();
    let mut device = Device::new();
    let (from, to) = (device.upload(&hashes), device.poisoned::<u32>(hashes.len()));
    let arguments = Arguments::default().all(&[from, to]).with(hashes.len() as i32);
    let extent = Extent { grid: [hashes.len().div_ceil(256) as u32, 1, 1], block: 256, shared: 0 };
    device.run(kernel_of("sampling", "gumbel_known_answers"), extent, &arguments).unwrap();
    for (hash, bits) in hashes.iter().zip(device.download::<u32>(to, hashes.len())) {
        assert_eq!(bits, gumbel(*hash).to_bits(), "hash {hash:08x}");
    }
}

#[test]
fn draws_equal_the_definition_for_the_settings_of_the_conformance() {
    let mut case = Case::new((0..70).map(|row| logits(500, row)).collect());
    case.samples = (0..70).map(conformance_sample).collect();
    case.check();
}

#[test]
fn every_mix_of_filters_keeps_the_tokens_of_the_definition() {
    for num_tokens in [1, 33, 500, 1025] {
        let mut samples = Vec::new();
        for top_k in [0, 1, 20, 499, 5000] {
            for top_p in [1.0, 0.999_999, 0.9, 0.5, 1e-9, 0.0] {
                for min_p in [0.0, 1e-45, 0.05, 1.0] {
                    let index = samples.len() as u32;
                    let temperature = [0.3, 1.0, 4.0][index as usize % 3];
                    samples.push(SampleRow {
                        temperature,
                        top_k,
                        top_p,
                        min_p,
                        position: index,
                        choice: index,
                        ..random(0)
                    });
                }
            }
        }
        Case::of(logits(num_tokens, 3), samples).check();
    }
}

#[test]
fn a_large_vocabulary_draws_the_tokens_of_the_definition() {
    let samples = [
        SampleRow::greedy(0, 3),
        random(0),
        SampleRow { top_p: 0.95, logprobs: Some(20), ..random(0) },
        SampleRow { top_k: 50, top_p: 0.9, temperature: 0.7, ..random(0) },
        SampleRow { min_p: 0.1, ..random(0) },
        // More than there are candidates.
        SampleRow { top_k: 20_000, ..random(0) },
    ];
    let beyond = (0..6).map(|position| SampleRow { top_p: 0.5, temperature: 30.0, position, ..random(0) });
    Case::of(logits(49_152, 5), samples.into_iter().chain(beyond)).check();
}

#[test]
fn the_cut_of_top_p_is_exact_to_the_token() {
    for (temperature, counts) in [(8.0, &[2, 7, 60, 250, 480][..]), (2.0, &[30, 60])] {
        let row = logits(500, 8);
        let mut masses: Vec<f64> = row.iter().map(|logit| (f64::from(*logit) / f64::from(temperature)).exp()).collect();
        masses.sort_by(|a, b| b.total_cmp(a));
        let total: f64 = masses.iter().sum();
        // Keeps the `count` likeliest.
        let share = |count: usize| (masses[..count - 1].iter().sum::<f64>() + masses[count - 1] / 2.0) / total;
        let sample = |count, position| SampleRow { top_p: share(count) as f32, temperature, position, ..random(0) };
        let drawn = |count, position| sampling::sample(&mut row.clone(), &sample(count, position)).unwrap().token;
        let mut samples = Vec::new();
        // Draws that one token more or less would change.
        for count in counts {
            for more in [*count, count + 1] {
                let is_decided = |position: &u32| drawn(more, *position) != drawn(more - 1, *position);
                let position = (0..50_000).find(is_decided).unwrap();
                samples.push(sample(*count, position));
            }
        }
        Case::of(row.clone(), samples).check();
    }
}

#[test]
fn a_share_missed_by_less_than_a_unit_of_mass_takes_another_token() {
    // Two tokens, of masses 1 and b in blocks of their own, and a share of both that is 1 and less than 2^-40 more.
    let logit = |i: u32| -0.2 + i as f32 * 1e-7;
    let share = |i: u32| (1.0 / (1.0 + f64::from(exp(logit(i))))) as f32;
    let excess = |i: u32| (1.0 + f64::from(exp(logit(i)))) * f64::from(share(i)) - 1.0;
    let i = (0..1_000_000).find(|&i| excess(i) > 0.0 && excess(i) < 0.9 / (1u64 << 40) as f64).unwrap();
    let mut row = vec![NEVER; 300];
    (row[0], row[260]) = (0.0, logit(i));
    let samples = (0..8).map(|position| SampleRow { top_p: share(i), position, ..random(0) });
    let outcome = Case::of(row, samples).check();
    assert!(outcome.sampled.iter().flatten().any(|sampled| sampled.token == 260));
}

#[test]
fn a_vocabulary_beyond_one_round_of_sums_draws_the_tokens_of_the_definition() {
    let samples = [SampleRow { top_p: 0.8, ..random(0) }, SampleRow { logprobs: Some(2), ..SampleRow::greedy(0, 1) }];
    Case::of(logits(262_144 + 700, 6), samples).check();
}

#[test]
fn equal_logits_are_cut_by_id() {
    let mut steps: Vec<f32> = (0..3000).map(|id| -((id * 7919 % 3000 / 300) as f32)).collect();
    steps[1234] = 0.0;
    steps[77] = -0.0;
    let mut samples = Vec::new();
    for top_k in [1, 2, 299, 300, 301, 302, 450, 2999] {
        for top_p in [1.0, 0.999, 0.7, 0.5, 0.01] {
            let position = samples.len() as u32;
            samples.push(SampleRow { top_k, top_p, position, logprobs: (top_k < 500).then_some(top_k), ..random(0) });
        }
    }
    samples.extend([1.0, 0.999, 0.7, 0.5, 0.01].map(|top_p| SampleRow { top_p, ..random(0) }));
    samples.push(SampleRow::greedy(0, 0));
    Case::of(steps, samples.clone()).check();
    Case::of(vec![2.5; 300], samples).check();
}

#[test]
fn a_row_with_more_near_equals_than_candidates_is_cut_where_the_definition_cuts() {
    let narrow: Vec<f32> = logits(6000, 9).iter().map(|logit| 3.0 + logit * 1e-4).collect();
    let flat = vec![-7.25; 6000];
    for row in [narrow, flat] {
        let samples = [(0, 0.5), (100, 1.0), (5000, 1.0), (5000, 0.4), (5000, 0.999_99), (0, 0.0), (4500, 1e-9)];
        let samples = samples.map(|(top_k, top_p)| SampleRow { top_k, top_p, logprobs: Some(5), ..random(0) });
        Case::of(row, samples).check();
    }
}

#[test]
fn impossible_tokens_are_never_drawn_and_faults_are_found() {
    let mut holes = logits(700, 2);
    holes.iter_mut().skip(1).step_by(2).for_each(|logit| *logit = NEVER);
    let mut one = vec![NEVER; 700];
    one[699] = -1e30;
    let mut faults = vec![logits(700, 1); 3];
    faults[0][0] = f32::NAN;
    faults[1][699] = f32::INFINITY;
    faults[2] = vec![NEVER; 700];
    let mut case = Case::new([vec![holes, one], faults].concat());
    for row in 0..5 {
        case.samples.push(SampleRow { logprobs: Some(4), ..SampleRow::greedy(row, 0) });
        case.samples.push(SampleRow { logprobs: Some(700), ..random(row) });
        case.samples.push(SampleRow { top_k: 600, top_p: 0.99, temperature: 3.0, ..random(row) });
        case.scores.push(ScoreRow { row, token: 5, top: 2 });
    }
    let outcome = case.check();
    assert_eq!(outcome.sampled.iter().filter(|sampled| sampled.is_err()).count(), 9);
}

#[test]
fn temperatures_near_zero_and_far_from_it_never_fail() {
    let temperatures = [0.0, 1e-38, 1e-12, 9.99e-6, 1e-5, 1e-4, 1e-3, 50.0, 1e6, f32::MAX];
    let samples: Vec<SampleRow> = temperatures
        .into_iter()
        .flat_map(|temperature| {
            [(0, 1.0), (5, 0.8)].map(|(top_k, top_p)| SampleRow { temperature, top_k, top_p, ..random(0) })
        })
        .collect();
    Case::of(logits(3000, 5), samples.clone()).check();
    Case::of(vec![f32::MAX, f32::MIN, 0.0, 1e-39, -1e-39], samples).check();
}

fn with_rules(rules: LogitRules, sample: SampleRow) -> SampleRow {
    SampleRow { rules: Some(Box::new(rules)), logprobs: Some(3), ..sample }
}

fn mask(num_tokens: usize, is_allowed: impl Fn(usize) -> bool) -> Option<Arc<TokenMask>> {
    let mut mask = TokenMask::none(num_tokens);
    (0..num_tokens).filter(|&token| is_allowed(token)).for_each(|token| mask.insert(token as u32));
    Some(Arc::new(mask))
}

#[test]
fn rules_act_in_their_order_and_on_their_own_draw_alone() {
    for num_tokens in [3, 33, 500] {
        let last = num_tokens as u32 - 1;
        let bias: Arc<[(u32, f32)]> = Arc::from([(0, 5.0), (1, 30.0), (last, -2.0)]);
        let seen = [(0, 0), (1, 3), (last, 1)].map(|(token, in_output)| SeenToken { token, in_output });
        let penalties = Penalties { repetition: 1.3, frequency: 0.7, presence: 0.21, seen: Arc::new(seen.to_vec()) };
        let odd = || mask(num_tokens, |token| token % 2 == 0);
        let rules = [
            LogitRules { bias: bias.clone(), ..LogitRules::default() },
            LogitRules { bias: bias.clone(), allowed: odd(), ..LogitRules::default() },
            LogitRules { banned: vec![1, last], bias: bias.clone(), ..LogitRules::default() },
            LogitRules { banned: vec![0], allowed: odd(), ..LogitRules::default() },
            LogitRules { bias: Arc::from([(1, f32::INFINITY)]), allowed: odd(), ..LogitRules::default() },
            LogitRules { penalties: Some(penalties.clone()), ..LogitRules::default() },
            LogitRules { banned: vec![1], allowed: odd(), bias, penalties: Some(penalties) },
            LogitRules::default(),
        ];
        let mut case = Case::new(vec![logits(num_tokens, 1), logits(num_tokens, 2)]);
        for row in 0..2 {
            for rules in &rules {
                case.samples.push(with_rules(rules.clone(), SampleRow::greedy(row, 1)));
                case.samples.push(SampleRow { top_k: 9, ..random(row) });
                case.samples.push(with_rules(rules.clone(), SampleRow { choice: 2, top_p: 0.9, ..random(row) }));
            }
            case.scores.push(ScoreRow { row, token: 1, top: 3 });
        }
        case.check();
    }
}

#[test]
fn rules_that_leave_nothing_and_faults_before_and_after_them_have_their_own_names() {
    let banned = LogitRules { banned: vec![0, 1, 2], ..LogitRules::default() };
    let nothing = LogitRules { allowed: mask(3, |_| false), ..LogitRules::default() };
    let fault = LogitRules { banned: vec![1], ..LogitRules::default() };
    let overflow = LogitRules { bias: [(0, f32::MAX)].into(), ..LogitRules::default() };
    let rows = vec![vec![1.0, 3.0, 2.0], vec![1.0, f32::NAN, 2.0], vec![f32::MAX, 0.0, 1.0], vec![NEVER; 3]];
    let mut case = Case::new(rows);
    for row in 0..4 {
        for rules in [&banned, &nothing, &fault, &overflow] {
            case.samples.push(with_rules(rules.clone(), SampleRow::greedy(row, 0)));
            case.samples.push(with_rules(rules.clone(), random(row)));
        }
    }
    let outcome = case.check();
    assert_eq!(outcome.sampled[0], Err(SampleError::NothingAllowed));
    assert_eq!(outcome.sampled[12], Err(SampleError::NotFinite), "a fault cannot be banned");
    assert_eq!(outcome.sampled[22], Err(SampleError::NotFinite), "an overflow is a fault");
}

#[test]
fn log_probabilities_have_the_bits_of_the_definition() {
    for num_tokens in [1, 33, 500, 3000] {
        let mut case = Case::new(vec![logits(num_tokens, 4), vec![0.0; num_tokens]]);
        for row in 0..2 {
            for top in [0, 1, 20, 1000] {
                let token = (num_tokens as u32 - 1) * top % 7 / 6;
                case.scores.push(ScoreRow { row, token, top });
                case.samples.push(SampleRow { logprobs: Some(top), temperature: 0.5, top_k: 7, ..random(row) });
            }
            case.scores.push(ScoreRow { row, token: num_tokens as u32 + 3, top: 1 });
        }
        case.check();
    }
}

#[test]
fn a_greedy_draw_reads_its_row_once() {
    let case = Case::of(logits(4096, 3), [SampleRow::greedy(0, 1)]);
    let outcome = case.check();
    let loads = outcome.sample.buffers[&outcome.logits].loads;
    assert_eq!((loads.bytes, loads.sectors), (4 * 4096, 4096 / 8));
}

/// How often a row of 4096 logits was read, going by its sectors.
fn passes(report: &Report, logits: u64) -> f64 {
    assert_eq!(report.local_requests, 0);
    report.buffers[&logits].loads.sectors as f64 / 512.0
}

#[test]
fn a_row_is_read_a_few_times_and_in_whole_sectors() {
    let row = || logits(4096, 3);
    let rules = LogitRules { banned: vec![7], ..LogitRules::default() };
    let outcome = Case::of(row(), [with_rules(rules, SampleRow::greedy(0, 1))]).check();
    assert_eq!(passes(&outcome.rules, outcome.logits), 1.0);
    // The row, the banned token once more, and the state.
    assert_eq!((outcome.rules.global_stores.sectors, outcome.rules.shared.conflicts), (4096 / 8 + 2, 0));
    let cases = [
        (random(0), 2.0),
        (SampleRow { top_k: 20, ..random(0) }, 4.0),
        (SampleRow { top_p: 0.9, ..random(0) }, 5.0),
        (SampleRow { top_k: 20, top_p: 0.9, min_p: 0.1, ..random(0) }, 5.0),
    ];
    for (sample, expected) in cases {
        let outcome = Case::of(row(), [sample.clone()]).check();
        assert_eq!(passes(&outcome.sample, outcome.logits), expected, "{sample:?}");
        let conflicts = outcome.sample.shared.conflicts;
        assert!(conflicts == 0 || sample.top_k > 0 || sample.top_p < 1.0, "{conflicts}: {sample:?}");
    }
    for (top, expected) in [(0, 2.0), (20, 4.0)] {
        let outcome = Case::of(row(), [SampleRow { logprobs: Some(top), ..SampleRow::greedy(0, 1) }]).check();
        // At most one sector for each warp that looks up the token, and for each of the likeliest.
        let more = passes(&outcome.logprobs, outcome.logits) - expected;
        assert!((0.0..=64.0 / 512.0).contains(&more), "{top} likeliest tokens: {more} passes more than {expected}");
    }
}

#[test]
fn a_draw_from_a_likely_few_hashes_only_them() {
    // One token holds nearly everything: a draw should not cost a hash for each of the others.
    let mut peaked = vec![-30.0; 65_536];
    peaked[40_000] = 0.0;
    let cost = |row: Vec<f32>| Case::of(row, [random(0)]).check().sample.warp_instructions;
    let (peaked, flat) = (cost(peaked), cost(vec![0.0; 65_536]));
    assert!(2 * peaked < flat, "{peaked} instructions with one likely token, {flat} with all");
}
