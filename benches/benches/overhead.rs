//! What a step takes besides the model: scheduling, the step's inputs, what becomes of its tokens. 8 streams of SmolLM2-135M
//! decode 128 tokens each after 32, with prefix caching; the time inside the backend is subtracted, step by step.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use octavo_backend::{Backend, StepInputs};
use octavo_benches::{around::Around, series::Series, smollm2};
use octavo_cpu::{CpuBackend, CpuOptions, CpuPlan};
use octavo_engine::{Engine, EngineConfig, RequestId, SamplingParams};
use octavo_sched::{PrefixCaching, Request};

const TURNS: usize = 7;
const STREAMS: usize = 8;
const PROMPT: usize = 32;
const DECODED: usize = 128;

fn main() {
    let mut checkpoint = smollm2::open();
    let spec = checkpoint.config().spec.clone();
    // Nanoseconds that the last step took inside the backend.
    let last = Arc::new(AtomicU64::new(0));
    let backend = CpuBackend::new(CpuOptions::default()).expect("a CPU backend");
    let inside = Arc::clone(&last);
    let step = move |backend: &mut CpuBackend, plan: &mut CpuPlan, inputs: &StepInputs| {
        let start = Instant::now();
        let result = backend.run(plan, inputs);
        inside.store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    };
    let mut engine = Engine::load(Around { backend, step }, &spec, &mut checkpoint, config()).expect("the model loads");
    let (mut medians, mut late, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..=TURNS {
        for stream in 0..STREAMS {
            engine.add(request(turn, stream)).expect("a request that fits");
        }
        engine.step().expect("the prompts' step");
        let (mut around, mut inside) = (Vec::new(), 0.0);
        while engine.has_work() {
            let start = Instant::now();
            engine.step().expect("a step");
            let backend = last.load(Ordering::Relaxed) as f64;
            around.push(start.elapsed().as_nanos() as f64 - backend);
            inside += backend;
        }
        // The first turn warms up and does not count.
        if turn > 0 {
            shares.push(100.0 * around.iter().sum::<f64>() / inside);
            around.sort_by(f64::total_cmp);
            medians.push(around[around.len() / 2]);
            late.push(around[around.len() * 95 / 100]);
        }
    }
    let steps = format!("{DECODED} steps of {STREAMS} streams");
    println!("besides the model, {steps}: medians of {TURNS} turns [least to most]");
    println!("a step's median        {} us", Series::of(medians).scaled(1e-3));
    println!("19 of 20 steps within  {} us", Series::of(late).scaled(1e-3));
    println!("of the backend's time  {} %", Series::of(shares).scaled(1.0));
}

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 16,
        num_blocks: vec![STREAMS * (PROMPT + DECODED + 16) / 16],
        max_model_len: 1024,
        max_num_seqs: STREAMS,
        max_num_batched_tokens: PROMPT * STREAMS,
        eos_token_ids: Vec::new(),
        seed: 0,
        mask_threads: 1,
        prefix_cache: PrefixCaching::On,
    }
}

fn request(turn: usize, stream: usize) -> Request {
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(1 + DECODED),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let prompt = (0..PROMPT).map(|i| ((i + turn * 1013 + stream * 31) * 7919 % 49_000) as u32).collect();
    Request { id: RequestId(stream as u64), prompt, params, arrival: 0, deadline: None }
}
