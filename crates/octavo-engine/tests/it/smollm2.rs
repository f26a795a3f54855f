//! SmolLM2-135M-Instruct against an independent engine's float32 results, and the law on a real model.

use std::path::PathBuf;

use octavo_backend::{Backend, KvType, Reference, SampleRow, SpanInput, StepInputs, StepLimits};
use octavo_backend::{DecoderSpec, GroupInputs};
use octavo_cpu::{ActivationType, CpuBackend, CpuOptions, Projections};
use octavo_engine::{Engine, EngineConfig, PrefixCaching, RequestId, SamplingParams, TokenId};
use octavo_model::Checkpoint;
use octavo_sched::Request;
use serde_json::Value;

use crate::common::{assert_same, params, run, run_alone};

/// The pulled checkpoint.
pub fn checkpoint() -> Checkpoint {
    let home = std::env::var_os("OCTAVO_HOME")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache").join("octavo"));
    let path = home.join("models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf");
    Checkpoint::open(&path).unwrap_or_else(|error| panic!("{error}; `octavo pull smollm2-135m` fetches the model"))
}

fn cpu(threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap()
}

/// One prompt of tests/data/reference_greedy.json and what the independent engine said of it.
pub struct Recorded {
    pub prompt: Vec<TokenId>,
    pub tokens: Vec<TokenId>,
    /// Distance between the two largest logits at each generated position.
    pub gaps: Vec<f64>,
    /// The 32 largest log-probabilities at each generated position.
    pub top: Vec<Vec<(TokenId, f64)>>,
}

pub fn recorded() -> Vec<Recorded> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/reference_greedy.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let numbers =
        |value: &Value| -> Vec<f64> { value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect() };
    let tokens = |value: &Value| -> Vec<TokenId> { numbers(value).into_iter().map(|v| v as TokenId).collect() };
    let top = |value: &Value| tokens(&value["ids"]).into_iter().zip(numbers(&value["logprobs"])).collect();
    let prompts = file["prompts"].as_array().unwrap().iter();
    prompts
        .map(|prompt| Recorded {
            prompt: tokens(&prompt["prompt_ids"]),
            tokens: tokens(&prompt["tokens"]),
            gaps: numbers(&prompt["top2_gap"]),
            top: prompt["top32"].as_array().unwrap().iter().map(top).collect(),
        })
        .collect()
}

/// What a backend says at each generated position, given the recorded tokens.
pub struct Forced {
    /// The most likely token.
    pub token: TokenId,
    /// Log-probabilities of the whole vocabulary, by id.
    pub logprobs: Vec<f32>,
}

/// Computes prompt and recorded tokens in one span and reports every generated position.
pub fn teacher_forced<B: Backend>(mut backend: B, prompts: &[Recorded]) -> Vec<Vec<Forced>> {
    let mut checkpoint = checkpoint();
    let spec = checkpoint.config().spec.clone();
    let limits = StepLimits { max_rows: 128, max_spans: 1, max_positions: 128, block_size: 16, num_blocks: vec![8] };
    let mut plan = backend.load(&spec, &mut checkpoint, &limits).unwrap();
    let mut forced = |recorded: &Recorded| -> Vec<Forced> {
        let result = backend.run(&mut plan, &inputs(&spec, recorded)).unwrap();
        let report = |sampled: octavo_backend::Sampled| {
            let mut logprobs = vec![f32::NAN; spec.vocab_size];
            for (id, logprob) in sampled.logprobs.unwrap().top {
                logprobs[id as usize] = logprob;
            }
            Forced { token: sampled.token, logprobs }
        };
        result.sampled.into_iter().map(|row| report(row.unwrap())).collect()
    };
    prompts.iter().map(&mut forced).collect()
}

fn inputs(spec: &DecoderSpec, recorded: &Recorded) -> StepInputs {
    let tokens: Vec<TokenId> = recorded.prompt.iter().chain(&recorded.tokens).copied().collect();
    let rows = tokens.len() - 1;
    let logprobs = Some(spec.vocab_size as u32);
    let sample = |row| SampleRow { logprobs, ..SampleRow::greedy(row, row as u32 + 1) };
    StepInputs {
        tokens: tokens[..rows].to_vec(),
        spans: vec![SpanInput { first_row: 0, len: rows, start: 0 }],
        groups: vec![GroupInputs { tables: (0..8).collect(), table_starts: vec![0, 8], copies: Vec::new() }],
        samples: (recorded.prompt.len() - 1..rows).map(sample).collect(),
        ..StepInputs::default()
    }
}

/// KL divergence of ours from the recorded distribution, all tokens but the 32 recorded ones in one bucket.
fn divergence(recorded: &[(TokenId, f64)], ours: &[f32]) -> f64 {
    let mut rest = (1.0, 1.0);
    let mut sum = 0.0;
    for &(id, logprob) in recorded {
        let own = f64::from(ours[id as usize]);
        sum += logprob.exp() * (logprob - own);
        rest = (rest.0 - logprob.exp(), rest.1 - own.exp());
    }
    if rest.0 > 0.0 { sum + rest.0 * (rest.0 / f64::max(rest.1, 1e-12)).ln() } else { sum }
}

#[test]
fn cpu_agrees_with_the_recorded_float32_run_along_its_tokens() {
    assert_agrees(cpu(2), Bounds { divergence: 0.004, gap: 0.4 });
}

#[test]
fn an_8_bit_cache_agrees_with_the_recorded_float32_run_along_its_tokens() {
    let options = CpuOptions { threads: Some(2), kv: KvType::Int8, ..CpuOptions::default() };
    assert_agrees(CpuBackend::new(options).unwrap(), Bounds { divergence: 0.005, gap: 0.6 });
}

#[test]
fn bfloat16_activations_agree_with_the_recorded_float32_run_along_its_tokens() {
    let options = CpuOptions { threads: Some(2), activations: ActivationType::Bf16, ..CpuOptions::default() };
    assert_agrees(CpuBackend::new(options).unwrap(), Bounds { divergence: 0.0005, gap: 0.1 });
}

#[test]
fn activations_in_16_bits_agree_with_the_recorded_float32_run_along_its_tokens() {
    let options = CpuOptions { threads: Some(2), int16_activations: Projections::ALL, ..CpuOptions::default() };
    assert_agrees(CpuBackend::new(options).unwrap(), Bounds { divergence: 0.0002, gap: 0.1 });
}

#[test]
fn some_projections_in_16_bits_agree_with_the_recorded_float32_run_along_its_tokens() {
    let some = Projections::named(&["down", "head"]).unwrap();
    let options = CpuOptions { threads: Some(2), int16_activations: some, ..CpuOptions::default() };
    assert_agrees(CpuBackend::new(options).unwrap(), Bounds { divergence: 0.002, gap: 0.4 });
}

struct Bounds {
    /// Of the mean KL divergence.
    divergence: f64,
    /// Of the distance between the two largest logits where the largest is another one.
    gap: f64,
}

fn assert_agrees(backend: CpuBackend, bounds: Bounds) {
    let prompts = recorded();
    let (mut positions, mut agreed, mut kl, mut widest) = (0, 0, 0.0, 0.0f64);
    for (recorded, forced) in prompts.iter().zip(teacher_forced(backend, &prompts)) {
        assert_eq!(forced.len(), recorded.tokens.len());
        for (at, forced) in forced.iter().enumerate() {
            positions += 1;
            kl += divergence(&recorded.top[at], &forced.logprobs);
            if forced.token == recorded.tokens[at] {
                agreed += 1;
            } else {
                widest = widest.max(recorded.gaps[at]);
            }
        }
    }
    let agreement = f64::from(agreed) / f64::from(positions);
    let kl = kl / f64::from(positions);
    println!("{positions} positions: top-1 agreement {agreement:.4}, mean KL {kl:.5}, widest gap missed {widest:.4}");
    assert_eq!(positions, 512);
    assert!(widest <= bounds.gap, "the argmax differs where the two best are {widest} apart");
    assert!(agreement >= 0.96, "top-1 agreement {agreement}");
    assert!(kl <= bounds.divergence, "mean KL {kl}");
}

#[test]
fn reference_agrees_with_the_recorded_float32_run_to_a_thousandth() {
    // Two prompts here; the long lane runs all eight.
    let prompts: Vec<Recorded> = recorded().into_iter().take(2).collect();
    assert_reference_agrees(&prompts);
}

pub fn assert_reference_agrees(prompts: &[Recorded]) {
    let mut furthest = 0.0f64;
    for (recorded, forced) in prompts.iter().zip(teacher_forced(Reference::exact(), prompts)) {
        for (at, forced) in forced.iter().enumerate() {
            assert!(forced.token == recorded.tokens[at] || recorded.gaps[at] < 1e-3, "token {at}");
            for &(id, logprob) in &recorded.top[at] {
                furthest = furthest.max((f64::from(forced.logprobs[id as usize]) - logprob).abs());
            }
        }
    }
    println!("{} prompts: furthest log-probability off by {furthest:.2e}", prompts.len());
    assert!(furthest <= 1e-3, "{furthest}");
}

/// An engine with SmolLM2 and a pool of 128 blocks.
pub fn engine<B: Backend>(backend: B, max_num_batched_tokens: usize) -> Engine<B> {
    let mut checkpoint = checkpoint();
    let config = EngineConfig {
        block_size: 16,
        num_blocks: vec![160],
        max_model_len: 512,
        max_num_seqs: 32,
        max_num_batched_tokens,
        eos_token_ids: checkpoint.config().eos_token_ids.clone(),
        seed: 0,
        mask_threads: 2,
        prefix_cache: PrefixCaching::Off,
    };
    let spec = checkpoint.config().spec.clone();
    Engine::load(backend, &spec, &mut checkpoint, config).unwrap()
}

/// Greedy and seeded requests over the recorded prompts.
pub fn requests(count: usize, max_tokens: usize) -> Vec<Request> {
    let prompts = recorded();
    (0..count)
        .map(|index| {
            let recorded = &prompts[index % prompts.len()];
            // The later rounds go on from further into the recorded text.
            let prompt = recorded.prompt.iter().chain(&recorded.tokens[..index / prompts.len() * 20]).copied();
            Request {
                id: RequestId(index as u64),
                prompt: prompt.collect(),
                params: params(index, max_tokens),
                arrival: 0,
                deadline: None,
            }
        })
        .collect()
}

#[test]
fn free_running_greedy_text_is_compared_with_the_recorded_one() {
    let prompts = recorded();
    let requests: Vec<Request> = prompts
        .iter()
        .zip(0..)
        .map(|(recorded, id)| Request {
            id: RequestId(id),
            prompt: recorded.prompt.clone(),
            params: SamplingParams { temperature: 0.0, max_tokens: Some(64), ignore_eos: true, ..Default::default() },
            arrival: 0,
            deadline: None,
        })
        .collect();
    let answers = run(&mut engine(cpu(2), 512), &requests);
    let equal: Vec<usize> = prompts
        .iter()
        .zip(&answers)
        .map(|(recorded, answer)| recorded.tokens.iter().zip(&answer.tokens).take_while(|(a, b)| a == b).count())
        .collect();
    println!("tokens equal to the float32 run before the first difference, of 64: {equal:?}");
    for ((recorded, answer), equal) in prompts.iter().zip(&answers).zip(equal) {
        assert_eq!(answer.tokens.len(), 64);
        // Along equal tokens this is the teacher-forced comparison, so the first difference must be a close call.
        assert!(equal == 64 || recorded.gaps[equal] <= 0.4, "left the text at {equal}");
    }
}

#[test]
fn the_law_holds_on_smollm2() {
    let requests = requests(24, 12);
    let reversed: Vec<Request> = requests.iter().rev().cloned().collect();
    let alone = run_alone(&mut engine(cpu(2), 512), &requests);
    assert_same("alone on one thread", &run_alone(&mut engine(cpu(1), 512), &requests), &alone);
    for threads in [1, 2] {
        for budget in [16, 64, 512] {
            let mut engine = engine(cpu(threads), budget);
            let what = format!("{threads} threads, steps of {budget}");
            assert_same(&what, &run(&mut engine, &requests), &alone);
            assert_same(&format!("{what}, reversed"), &run(&mut engine, &reversed), &alone);
        }
    }
}
