//! What a long context costs a decoding stream, with keys and values in bfloat16 and in 8 bits: SmolLM2-135M after
//! prompts of 32 and of 4,096 tokens. The bytes of cache that a token reads stand beside the read bandwidth of memory.
//!
//! All four are measured in turn; medians with spread.

use std::time::{Duration, Instant};

use octavo_backend::KvType;
use octavo_benches::{series::Series, smollm2};
use octavo_cpu::{
    CpuBackend, CpuOptions, host,
    isa::Isa,
    limits::{MEMORY_BYTES, ReadBuffer},
};
use octavo_engine::{Engine, EngineConfig, RequestId, SamplingParams};
use octavo_sched::{PrefixCaching, Request};

const TURNS: usize = 7;
const PROMPTS: [usize; 2] = [32, 4096];
const DECODED: usize = 64;
const KINDS: [KvType; 2] = [KvType::Bf16, KvType::Int8];

fn main() {
    let mut engines = KINDS.map(engine);
    let (isa, threads) = (Isa::detect(), host::available_threads().count);
    let memory = ReadBuffer::new(threads, MEMORY_BYTES).expect("memory to read");
    let (mut rates, mut bandwidth): ([[Vec<f64>; 2]; 2], Vec<f64>) = Default::default();
    for turn in 0..=TURNS {
        for (engine, rates) in engines.iter_mut().zip(&mut rates) {
            for (prompt, rates) in PROMPTS.into_iter().zip(rates) {
                let rate = decode_rate(engine, turn, prompt);
                // The first turn warms up and does not count.
                if turn > 0 {
                    rates.push(rate);
                }
            }
        }
        bandwidth.push(memory.bandwidth(isa, Duration::from_millis(100)));
    }
    let bandwidth = Series::of(bandwidth);
    println!("SmolLM2-135M, {threads} threads; medians of {TURNS} turns [least to most]");
    println!("read 1 GiB  {} GB/s", bandwidth.scaled(1e-9));
    let spec = smollm2::open().config().spec.clone();
    for (kind, rates) in KINDS.into_iter().zip(rates) {
        let [short, long] = rates.map(Series::of);
        let group = &spec.kv_geometry(16).groups[0];
        let bytes = kind.bytes(group.elements_per_token, group.heads_per_token) * (PROMPTS[1] + DECODED / 2);
        let seconds = 1.0 / long.median - 1.0 / short.median;
        println!(
            "{kind:?}: {} tokens/s after {}, {} after {}: {:.0}%; the cache is read at {:.1} GB/s, {:.0}% of memory's",
            short.scaled(1.0),
            PROMPTS[0],
            long.scaled(1.0),
            PROMPTS[1],
            100.0 * long.median / short.median,
            1e-9 * bytes as f64 / seconds,
            100.0 * bytes as f64 / seconds / bandwidth.median,
        );
    }
}

fn engine(kv: KvType) -> Engine<CpuBackend> {
    let mut checkpoint = smollm2::open();
    let config = EngineConfig {
        block_size: 16,
        num_blocks: vec![(PROMPTS[1] + DECODED).div_ceil(16) + 1],
        max_model_len: PROMPTS[1] + DECODED + 1,
        max_num_seqs: 1,
        max_num_batched_tokens: 512,
        eos_token_ids: Vec::new(),
        seed: 0,
        mask_threads: 1,
        prefix_cache: PrefixCaching::Off,
    };
    let backend = CpuBackend::new(CpuOptions { kv, ..CpuOptions::default() }).expect("a CPU backend");
    let spec = checkpoint.config().spec.clone();
    Engine::load(backend, &spec, &mut checkpoint, config).expect("the model loads")
}

/// Decoded tokens a second after the first.
fn decode_rate(engine: &mut Engine<CpuBackend>, turn: usize, prompt: usize) -> f64 {
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(1 + DECODED),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    // Ids spread over the vocabulary, others in each turn.
    let prompt = (0..prompt).map(|i| ((i + turn * 1013) * 7919 % 49_000) as u32).collect::<Vec<_>>();
    let steps = prompt.len().div_ceil(512);
    engine.add(Request { id: RequestId(0), prompt, params, arrival: 0, deadline: None }).expect("a request that fits");
    for _ in 0..steps {
        engine.step().expect("a step of the prompt");
    }
    let start = Instant::now();
    while engine.has_work() {
        engine.step().expect("a step");
    }
    DECODED as f64 / start.elapsed().as_secs_f64()
}
