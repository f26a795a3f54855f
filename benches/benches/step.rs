//! The engine on SmolLM2-135M, one stream, beside what the machine allows: decode of 128 tokens after 32 against the
//! read bandwidth, of memory and of as many bytes as the weights have (a large cache keeps part of them between steps),
//! prefill of 512 against the peak of the dot-product instruction.
//!
//! Model and limits are measured in turn, so that all see the same minutes of a shared machine; medians with spread.

use std::time::{Duration, Instant};

use octavo_backend::{DecoderSpec, WeightFormat, WeightId, WeightShape};
use octavo_benches::{series::Series, smollm2};
use octavo_cpu::{
    CpuBackend, CpuOptions, host,
    isa::Isa,
    limits::{MEMORY_BYTES, ReadBuffer, dot_peak_of},
};
use octavo_engine::{Engine, EngineConfig, RequestId, SamplingParams};
use octavo_sched::{PrefixCaching, Request};

const TURNS: usize = 9;
const PROMPT: usize = 32;
const DECODED: usize = 128;
const PREFILLED: usize = 512;

fn main() {
    let mut checkpoint = smollm2::open();
    let spec = checkpoint.config().spec.clone();
    let (read_bytes, layer_products) = (checkpoint.weight_bytes(), layer_products(&spec));
    let formats: Vec<WeightFormat> = checkpoint.config().weight_formats.iter().map(|(format, _)| *format).collect();
    let threads = host::available_threads().count;
    let isa = Isa::detect();
    println!("SmolLM2-135M {formats:?}, {threads} threads, {isa}; medians of {TURNS} turns [least to most]");

    let backend = CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa) }).expect("a CPU backend");
    let mut engine = Engine::load(backend, &spec, &mut checkpoint, config()).expect("the model loads");
    drop(checkpoint);
    let buffer = |bytes| ReadBuffer::new(threads, bytes).expect("memory to read");
    let (memory, weights) = (buffer(MEMORY_BYTES), buffer(read_bytes));
    let limit_time = Duration::from_millis(100);
    let mut figures: [Vec<f64>; 5] = Default::default();
    for turn in 0..=TURNS {
        let (decode, prefill) = (decode_rate(&mut engine, turn), prefill_rate(&mut engine, turn));
        let (memory, weights) = (memory.bandwidth(isa, limit_time), weights.bandwidth(isa, limit_time));
        let dots = dot_peak_of(threads, isa, limit_time);
        // The first turn warms up and does not count.
        if turn > 0 {
            for (series, value) in figures.iter_mut().zip([decode, prefill, memory, weights, dots]) {
                series.push(value);
            }
        }
    }
    let [decode, prefill, memory, weights, dots] = figures.map(Series::of);
    let decode_limits = [memory.median / read_bytes as f64, weights.median / read_bytes as f64];
    let prefill_limit = dots.median / (2 * layer_products) as f64;
    println!("read 1 GiB           {} GB/s", memory.scaled(1e-9));
    println!("read {:.1} MB again   {} GB/s", read_bytes as f64 * 1e-6, weights.scaled(1e-9));
    println!("dot products         {} Gop/s", dots.scaled(1e-9));
    println!(
        "decode {DECODED} after {PROMPT}  {} tokens/s; {:.0}% of {:.0}, which memory allows, {:.0}% of {:.0}, which re-reading \
         the weights allows",
        decode.scaled(1.0),
        100.0 * decode.median / decode_limits[0],
        decode_limits[0],
        100.0 * decode.median / decode_limits[1],
        decode_limits[1],
    );
    println!(
        "prefill {PREFILLED}          {} tokens/s; {:.0}% of {prefill_limit:.0}, which dot products allow ({:.0} million operations a token)",
        prefill.scaled(1.0),
        100.0 * prefill.median / prefill_limit,
        2e-6 * layer_products as f64,
    );
}

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 16,
        num_blocks: vec![64],
        max_model_len: 1024,
        max_num_seqs: 1,
        max_num_batched_tokens: PREFILLED,
        eos_token_ids: Vec::new(),
        seed: 0,
        mask_threads: 1,
        // Prompts of one turn begin alike.
        prefix_cache: PrefixCaching::Off,
    }
}

/// Weights of the layers: what each prompt token is multiplied with.
fn layer_products(spec: &DecoderSpec) -> usize {
    let is_layer = |id: &WeightId| !matches!(id, WeightId::Embedding | WeightId::Head | WeightId::FinalNorm);
    let products = |id| match spec.weight_shape(id) {
        WeightShape::Matrices { parts, columns } => parts.iter().sum::<usize>() * columns,
        WeightShape::Vector(_) => 0,
    };
    spec.weight_ids().into_iter().filter(is_layer).map(products).sum()
}

/// Decoded tokens a second after the first.
fn decode_rate(engine: &mut Engine<CpuBackend>, turn: usize) -> f64 {
    submit(engine, turn, PROMPT, 1 + DECODED);
    engine.step().expect("the prompt's step");
    let start = Instant::now();
    finish(engine);
    DECODED as f64 / start.elapsed().as_secs_f64()
}

/// Prompt tokens a second, the first output token's head included.
fn prefill_rate(engine: &mut Engine<CpuBackend>, turn: usize) -> f64 {
    submit(engine, turn, PREFILLED, 1);
    let start = Instant::now();
    finish(engine);
    PREFILLED as f64 / start.elapsed().as_secs_f64()
}

fn submit(engine: &mut Engine<CpuBackend>, turn: usize, prompt_len: usize, max_tokens: usize) {
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    // Ids spread over the vocabulary, others in each turn.
    let prompt = (0..prompt_len).map(|i| ((i + turn * 1013) * 7919 % 49_000) as u32).collect();
    engine.add(Request { id: RequestId(0), prompt, params, arrival: 0, deadline: None }).expect("a request that fits");
}

fn finish(engine: &mut Engine<CpuBackend>) {
    while engine.has_work() {
        engine.step().expect("a step");
    }
}
