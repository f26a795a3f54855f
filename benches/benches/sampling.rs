//! The draw of a token from SmolLM2's own rows of 49,152 logits, on one core, beside the time to merely read a row; and
//! what sampling adds to a step of eight sequences.
//!
//! All settings are measured in turn, so that all see the same minutes of a shared machine.

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use octavo_backend::{
    Backend, GroupInputs, LogitRules, Penalties, SampleRow, ScoreRow, SeenToken, SpanInput, StepInputs, StepLimits,
    TokenMask,
};
use octavo_benches::{series::Series, smollm2};
use octavo_cpu::{
    CpuBackend, CpuOptions, CpuPlan, host,
    isa::Isa,
    peak::read_bandwidth,
    sampler::{OwnedScratch, Sampler},
};

/// Tokens of the text whose rows are drawn from: what the model says at temperature 0.8.
const TEXT: usize = 48;
const TURNS: usize = 15;
/// Sequences of the step, each at the end of the text.
const BATCH: usize = 8;

const GREEDY: SampleRow = SampleRow::greedy(0, 1);

struct Machine {
    backend: CpuBackend,
    plan: CpuPlan,
    vocab_size: usize,
}

fn main() {
    let (threads, isa) = (host::available_threads().count, Isa::detect());
    let mut machine = Machine::new(threads, isa);
    let text = machine.text();
    let rows = machine.rows(&text);
    println!("{} tokens, {threads} threads, {isa}; medians [least to most]", machine.vocab_size);
    draws(isa, &rows);
    steps(&mut machine, &text);
}

/// What is measured: a name and how the row is drawn from.
fn settings(vocab_size: usize) -> Vec<(&'static str, SampleRow)> {
    let sampled = SampleRow { temperature: 1.0, ..GREEDY };
    let mut allowed = TokenMask::none(vocab_size);
    (0..vocab_size as u32).filter(|token| token % 3 != 0).for_each(|token| allowed.insert(token));
    let seen = (0..1000).map(|i| SeenToken { token: i * 47, in_output: i % 3 }).collect();
    let rules = LogitRules {
        allowed: Some(Arc::new(allowed)),
        penalties: Some(Penalties { repetition: 1.1, frequency: 0.2, presence: 0.1, seen: Arc::new(seen) }),
        ..LogitRules::default()
    };
    vec![
        ("greedy", GREEDY),
        ("temperature 1", sampled.clone()),
        ("temperature 0.7", SampleRow { temperature: 0.7, ..GREEDY }),
        ("top_k 50", SampleRow { top_k: 50, ..sampled.clone() }),
        ("top_p 0.9", SampleRow { top_p: 0.9, ..sampled.clone() }),
        ("min_p 0.05", SampleRow { min_p: 0.05, ..sampled.clone() }),
        ("top_k 50, top_p 0.9", SampleRow { top_k: 50, top_p: 0.9, ..sampled }),
        ("greedy, mask and 1000 seen", SampleRow { rules: Some(Box::new(rules)), ..GREEDY }),
        ("greedy, 5 logprobs", SampleRow { logprobs: Some(5), ..GREEDY }),
    ]
}

fn draws(isa: Isa, rows: &[Vec<f32>]) {
    let sampler = Sampler::new(isa);
    let settings = settings(rows[0].len());
    let mut times = vec![Vec::new(); settings.len()];
    let mut reads = Vec::new();
    let mut scratch = OwnedScratch::new(rows[0].len());
    let mut logits = rows[0].clone();
    for turn in 0..=TURNS {
        for (position, row) in rows.iter().enumerate() {
            for ((_, setting), times) in settings.iter().zip(&mut times) {
                // As the head leaves it: just written.
                logits.copy_from_slice(row);
                let setting = SampleRow { position: position as u32, ..setting.clone() };
                let start = Instant::now();
                let drawn = sampler.sample(black_box(&mut logits), &[], &setting, &mut scratch.borrow());
                let time = start.elapsed().as_secs_f64();
                drawn.expect("a token");
                if turn > 0 {
                    times.push(time);
                }
            }
        }
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        reads.push(bytes.len() as f64 / read_bandwidth(isa, &bytes, Duration::from_millis(2)));
    }
    println!("microseconds a row");
    println!("{:<28}{}", "reading it", Series::of(reads).scaled(1e6));
    for ((name, _), times) in settings.iter().zip(times) {
        println!("{name:<28}{}", Series::of_many(times).scaled(1e6));
    }
}

/// Eight sequences decode one token each; the same step again and again.
fn steps(machine: &mut Machine, text: &[u32]) {
    let cached = TEXT - 1;
    machine.run(&machine.inputs(&text[..cached].repeat(BATCH), cached, 0));
    let decode = machine.inputs(&text[cached..].repeat(BATCH), 1, cached);
    let settings: Vec<(&str, StepInputs)> = settings(machine.vocab_size)
        .into_iter()
        .map(|(name, row)| {
            let samples = (0..BATCH).map(|sequence| SampleRow { row: sequence, seed: sequence as u64, ..row.clone() });
            (name, StepInputs { samples: samples.collect(), ..decode.clone() })
        })
        .collect();
    let mut times = vec![Vec::new(); settings.len()];
    for turn in 0..=8 * TURNS {
        for ((_, inputs), times) in settings.iter().zip(&mut times) {
            let start = Instant::now();
            machine.run(inputs);
            if turn > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
    }
    println!("microseconds a step of {BATCH} sequences; against the greedy step of the same turn");
    let greedy = times[0].clone();
    for ((name, _), times) in settings.iter().zip(times) {
        let ratios = times.iter().zip(&greedy).map(|(time, greedy)| time / greedy).collect();
        println!("{name:<28}{}  {:.3}", Series::of_many(times).scaled(1e6), Series::of(ratios).median);
    }
}

impl Machine {
    fn new(threads: usize, isa: Isa) -> Machine {
        let mut checkpoint = smollm2::open();
        let spec = checkpoint.config().spec.clone();
        let backend = CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() })
            .expect("a CPU backend");
        let limits = StepLimits {
            max_rows: BATCH * TEXT,
            max_spans: BATCH,
            max_positions: 256,
            block_size: 16,
            num_blocks: vec![256; spec.kv_geometry(16).groups.len()],
        };
        let plan = backend.load(&spec, &mut checkpoint, &limits).expect("the model loads");
        Machine { backend, plan, vocab_size: spec.vocab_size }
    }

    fn run(&mut self, inputs: &StepInputs) -> octavo_backend::StepResult {
        self.backend.run(&mut self.plan, inputs).expect("a step")
    }

    /// Sequences of `len` tokens each from position `start` on, in blocks of their own.
    fn inputs(&self, tokens: &[u32], len: usize, start: usize) -> StepInputs {
        let mut group = GroupInputs { table_starts: vec![0], ..GroupInputs::default() };
        let mut spans = Vec::new();
        for sequence in 0..tokens.len() / len {
            spans.push(SpanInput { first_row: sequence * len, len, start });
            group.tables.extend((0..16).map(|block| (sequence * 16 + block) as u32));
            group.table_starts.push(group.tables.len());
        }
        StepInputs { tokens: tokens.to_vec(), spans, groups: vec![group], ..StepInputs::default() }
    }

    /// What the model writes.
    fn text(&mut self) -> Vec<u32> {
        let mut tokens = vec![504];
        for position in 0..TEXT - 1 {
            let mut inputs = self.inputs(&tokens[position..], 1, position);
            inputs.samples = vec![SampleRow { temperature: 0.8, seed: 1, ..SampleRow::greedy(0, position as u32 + 1) }];
            tokens.push(self.run(&inputs).sampled.remove(0).expect("a token").token);
        }
        tokens
    }

    /// The rows of logits of a text, up to a constant each: the logarithms of its probabilities.
    fn rows(&mut self, text: &[u32]) -> Vec<Vec<f32>> {
        let score = |row| ScoreRow { row, token: 0, top: self.vocab_size as u32 };
        let scores = (0..text.len()).map(score).collect();
        let inputs = StepInputs { scores, ..self.inputs(text, text.len(), 0) };
        let rows = self.run(&inputs).scores.into_iter().map(|row| row.expect("a row").top);
        rows.map(|top| {
            let mut logits = vec![0.0; top.len()];
            top.into_iter().for_each(|(token, logprob)| logits[token as usize] = logprob);
            logits
        })
        .collect()
    }
}
