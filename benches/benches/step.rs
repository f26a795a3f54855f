//! The engine on SmolLM2-135M beside what the machine allows: one stream's decode of 128 tokens after 32 against the read
//! bandwidth, of memory and of as many bytes as the weights have (a large cache keeps part of them between steps), prefill
//! of 512 and the decode of several streams together against the peak of the dot-product instruction, and prefill against the
//! kernels of the layers' weights, which are cached then.
//!
//! Model and limits are measured in turn, so that all see the same minutes of a shared machine; medians with spread.

use std::time::{Duration, Instant};

use octavo_backend::{DecoderSpec, WeightFormat, WeightId, WeightShape};
use octavo_benches::{series::Series, smollm2};
use octavo_cpu::{
    ActivationType, CpuBackend, CpuOptions, host,
    isa::Isa,
    limits::{MEMORY_BYTES, ReadBuffer, dot_peak_of, product_rate_of},
};
use octavo_engine::{Engine, EngineConfig, RequestId, SamplingParams};
use octavo_sched::{PrefixCaching, Request};

const TURNS: usize = 9;
const PROMPT: usize = 32;
const DECODED: usize = 128;
const PREFILLED: usize = 512;
const STREAMS: [usize; 3] = [8, 16, 32];

fn main() {
    let mut checkpoint = smollm2::open();
    let spec = checkpoint.config().spec.clone();
    let (read_bytes, layer_products) = (checkpoint.weight_bytes(), layer_products(&spec));
    let formats: Vec<WeightFormat> = checkpoint.config().weight_formats.iter().map(|(format, _)| *format).collect();
    let layer_format = smollm2::layer_format(&mut checkpoint);
    let threads = host::available_threads().count;
    let isa = std::env::var("OCTAVO_ISA").map_or_else(|_| Isa::detect(), |name| name.parse().expect("OCTAVO_ISA"));
    let activations = match std::env::var("OCTAVO_DTYPE").as_deref() {
        Ok("bfloat16") => ActivationType::Bf16,
        Ok("auto") | Err(_) => ActivationType::Int8,
        Ok(other) => panic!("OCTAVO_DTYPE: found {other}, expected auto or bfloat16"),
    };
    println!(
        "SmolLM2-135M {formats:?}, {threads} threads, {isa}, {activations:?} activations; medians of {TURNS} turns [least to \
         most]"
    );

    let options = CpuOptions { threads: Some(threads), isa: Some(isa), activations, ..CpuOptions::default() };
    let backend = CpuBackend::new(options).expect("a CPU backend");
    let mut engine = Engine::load(backend, &spec, &mut checkpoint, config()).expect("the model loads");
    drop(checkpoint);
    let buffer = |bytes| ReadBuffer::new(threads, bytes).expect("memory to read");
    let (memory, weights) = (buffer(MEMORY_BYTES), buffer(read_bytes));
    let limit_time = Duration::from_millis(100);
    let mut figures: [Vec<f64>; 6 + STREAMS.len()] = Default::default();
    for turn in 0..=TURNS {
        let (decode, prefill) = (decode_rate(&mut engine, turn, 1), prefill_rate(&mut engine, turn));
        let together = STREAMS.map(|streams| decode_rate(&mut engine, turn, streams));
        let (memory, weights) = (memory.bandwidth(isa, limit_time), weights.bandwidth(isa, limit_time));
        let dots = dot_peak_of(threads, isa, limit_time);
        let products = product_rate_of(threads, isa, layer_format, activations, limit_time).expect("memory");
        // The first turn warms up and does not count.
        if turn > 0 {
            let single = [decode, prefill, memory, weights, dots, products];
            for (series, value) in figures.iter_mut().zip(single.into_iter().chain(together)) {
                series.push(value);
            }
        }
    }
    let [decode, prefill, memory, weights, dots, products, together @ ..] = figures.map(Series::of);
    let decode_limits = [memory.median / read_bytes as f64, weights.median / read_bytes as f64];
    let kernel_limit = products.median / (2 * layer_products) as f64;
    let prefill_limit = dots.median / (2 * layer_products) as f64;
    println!("read 1 GiB           {} GB/s", memory.scaled(1e-9));
    println!("read {:.1} MB again   {} GB/s", read_bytes as f64 * 1e-6, weights.scaled(1e-9));
    println!("dot products         {} Gop/s", dots.scaled(1e-9));
    println!("{layer_format} kernels        {} Gop/s", products.scaled(1e-9));
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
        "prefill {PREFILLED}          {} tokens/s; {:.0}% of {prefill_limit:.0}, which dot products allow, {:.0}% of {:.0}, which the \
         kernels allow ({:.0} million operations a token)",
        prefill.scaled(1.0),
        100.0 * prefill.median / prefill_limit,
        100.0 * prefill.median / kernel_limit,
        kernel_limit,
        2e-6 * layer_products as f64,
    );
    let batch_limit = dots.median / (2 * (layer_products + spec.vocab_size * spec.hidden_size)) as f64;
    for (streams, rate) in STREAMS.into_iter().zip(together) {
        println!(
            "decode of {streams:<2} streams {} tokens/s; {:.0}% of {batch_limit:.0}, which dot products allow",
            rate.scaled(1.0),
            100.0 * rate.median / batch_limit,
        );
    }
}

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 16,
        num_blocks: vec![STREAMS[2] * (PROMPT + DECODED + 16) / 16],
        max_model_len: 1024,
        max_num_seqs: STREAMS[2],
        max_num_batched_tokens: PROMPT * STREAMS[2],
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

/// Decoded tokens a second of all streams together after the first of each.
fn decode_rate(engine: &mut Engine<CpuBackend>, turn: usize, streams: usize) -> f64 {
    for stream in 0..streams {
        submit(engine, turn, stream, PROMPT, 1 + DECODED);
    }
    engine.step().expect("the prompts' step");
    let start = Instant::now();
    finish(engine);
    (streams * DECODED) as f64 / start.elapsed().as_secs_f64()
}

/// Prompt tokens a second, the first output token's head included.
fn prefill_rate(engine: &mut Engine<CpuBackend>, turn: usize) -> f64 {
    submit(engine, turn, 0, PREFILLED, 1);
    let start = Instant::now();
    finish(engine);
    PREFILLED as f64 / start.elapsed().as_secs_f64()
}

fn submit(engine: &mut Engine<CpuBackend>, turn: usize, stream: usize, prompt_len: usize, max_tokens: usize) {
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    // Ids spread over the vocabulary, others in each turn and stream.
    let prompt = (0..prompt_len).map(|i| ((i + turn * 1013 + stream * 31) * 7919 % 49_000) as u32).collect();
    let id = RequestId(stream as u64);
    engine.add(Request { id, prompt, params, arrival: 0, deadline: None }).expect("a request that fits");
}

fn finish(engine: &mut Engine<CpuBackend>) {
    while engine.has_work() {
        engine.step().expect("a step");
    }
}
