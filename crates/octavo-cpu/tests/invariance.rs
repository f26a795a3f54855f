//! A row's bits depend on its tokens and positions alone: not on the chunk it came in, its neighbours, or the threads.

use octavo_backend::{
    Backend, BackendError, GroupInputs, RopeSpec, SampleRow, Sampled, SpanInput, StepInputs, StepLimits, WeightFormat,
    conformance::{TinyModel, TinyShape},
};
use octavo_cpu::{CpuBackend, CpuOptions, CpuPlan, isa::Isa};

/// Long enough for the second chunk of attention, with a window that ends inside a group.
const LEN: usize = 300;
const TABLE: [u32; 19] = [17, 3, 30, 4, 9, 1, 22, 12, 39, 25, 0, 7, 14, 33, 2, 19, 11, 28, 5];
const STRANGERS: [[u32; 4]; 2] = [[6, 8, 10, 13], [15, 16, 18, 20]];

fn model(format: WeightFormat) -> TinyModel {
    let shape = TinyShape {
        num_layers: 2,
        group_size: 3,
        head_size: 32,
        window: Some(100),
        tied: format != WeightFormat::F32,
        format,
        ..TinyShape::default()
    };
    // A tied head would otherwise give every row the NaN of the poisoned embedding.
    TinyModel::new(shape, 77).with_finite_embedding()
}

fn limits(model: &TinyModel) -> StepLimits {
    let groups = model.spec.kv_geometry(16).groups.len();
    StepLimits { max_rows: LEN + 16, max_spans: 3, max_positions: LEN, block_size: 16, num_blocks: vec![40; groups] }
}

struct Machine {
    backend: CpuBackend,
    plan: CpuPlan,
    groups: usize,
    vocab_size: u32,
}

impl Machine {
    fn new(model: &TinyModel, isa: Isa, threads: usize) -> Machine {
        let backend = CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() })
            .expect("a backend");
        let limits = limits(model);
        let plan = backend.load(&model.spec, &mut model.clone(), &limits).expect("a plan");
        Machine { backend, plan, groups: limits.num_blocks.len(), vocab_size: model.spec.vocab_size as u32 }
    }

    /// Runs spans of (tokens, start, block table); only the one at `reported` is sampled, at every row.
    fn step(&mut self, spans: &[(&[u32], usize, &[u32])], reported: usize) -> Vec<Sampled> {
        let inputs = self.inputs(spans, reported);
        let result = self.backend.run(&mut self.plan, &inputs).expect("a step");
        result.sampled.into_iter().map(|row| row.expect("a row")).collect()
    }

    fn inputs(&self, spans: &[(&[u32], usize, &[u32])], reported: usize) -> StepInputs {
        let mut inputs = StepInputs::default();
        let mut group = GroupInputs { table_starts: vec![0], ..GroupInputs::default() };
        for (index, (tokens, start, table)) in spans.iter().enumerate() {
            let first_row = inputs.tokens.len();
            inputs.spans.push(SpanInput { first_row, len: tokens.len(), start: *start });
            inputs.tokens.extend(*tokens);
            group.tables.extend(*table);
            group.table_starts.push(group.tables.len());
            if index == reported {
                inputs.samples.extend((0..tokens.len()).map(|offset| SampleRow {
                    seed: 9,
                    temperature: 0.8,
                    top_p: 0.95,
                    logprobs: Some(self.vocab_size),
                    ..SampleRow::greedy(first_row + offset, (start + offset + 1) as u32)
                }));
            }
        }
        inputs.groups = vec![group; self.groups];
        inputs
    }
}

/// Everything that is drawn and every log-probability, as bits.
fn bits(sampled: &[Sampled]) -> Vec<(u32, Vec<(u32, u32)>)> {
    let row = |sampled: &Sampled| {
        let top = &sampled.logprobs.as_ref().expect("logprobs").top;
        (sampled.token, top.iter().map(|(id, logprob)| (*id, logprob.to_bits())).collect())
    };
    sampled.iter().map(row).collect()
}

#[test]
fn chunks_neighbours_and_threads_change_no_bit() {
    for format in [WeightFormat::Q4_1, WeightFormat::Q8_0, WeightFormat::Bf16, WeightFormat::F32] {
        let model = model(format);
        let tokens = model.tokens(LEN, 1);
        let stranger = model.tokens(60, 2);
        for isa in Isa::supported().into_iter().filter(|isa| *isa != Isa::Scalar) {
            let expected = bits(&Machine::new(&model, isa, 1).step(&[(&tokens, 0, &TABLE)], 0));
            for (chunk, threads) in [(LEN, 2), (LEN, 3), (1, 1), (1, 2), (3, 3), (16, 2), (100, 1)] {
                let mut machine = Machine::new(&model, isa, threads);
                let mut found = Vec::new();
                for (index, part) in tokens.chunks(chunk).enumerate() {
                    let own = (part, index * chunk, &TABLE[..]);
                    let at = index % stranger.len();
                    let before = (&stranger[at..at + 1], at, &STRANGERS[0][..]);
                    let behind = (&stranger[..7], 0, &STRANGERS[1][..]);
                    let spans = if index % 3 == 2 { vec![own] } else { vec![before, own, behind] };
                    found.extend(bits(&machine.step(&spans, spans.len() / 2)));
                }
                assert!(found == expected, "{format} on {isa}, chunks of {chunk}, {threads} threads");
            }
        }
    }
}

#[test]
fn plain_rust_is_invariant_too() {
    let model = model(WeightFormat::Q4_1);
    let tokens = model.tokens(LEN, 1);
    let expected = bits(&Machine::new(&model, Isa::Scalar, 1).step(&[(&tokens, 0, &TABLE)], 0));
    let mut machine = Machine::new(&model, Isa::Scalar, 2);
    let mut found = bits(&machine.step(&[(&tokens[..257], 0, &TABLE)], 0));
    found.extend(bits(&machine.step(&[(&tokens[257..], 257, &TABLE)], 0)));
    assert!(found == expected);
}

#[test]
fn a_step_that_is_refused_leaves_the_next_one_as_it_was() {
    let model = model(WeightFormat::Q4_1);
    let tokens = model.tokens(20, 1);
    let mut machine = Machine::new(&model, Isa::detect(), 2);
    let expected = bits(&machine.step(&[(&tokens, 0, &TABLE)], 0));
    let mut bad = machine.inputs(&[(&tokens, 0, &TABLE)], 0);
    bad.groups[1].tables[0] = 40;
    let error = machine.backend.run(&mut machine.plan, &bad).unwrap_err();
    assert!(matches!(error, BackendError::Inputs { .. }), "{error}");
    let bad = machine.inputs(&[(&tokens, 0, &TABLE), (&tokens, 0, &TABLE)], 0);
    let error = machine.backend.run(&mut machine.plan, &bad).unwrap_err().to_string();
    assert!(error.contains("written at two places"), "{error}");
    assert_eq!(bits(&machine.step(&[(&tokens, 0, &TABLE)], 0)), expected);
}

#[test]
fn a_step_without_rows_is_nothing() {
    let model = model(WeightFormat::Q4_1);
    let mut machine = Machine::new(&model, Isa::detect(), 2);
    assert!(machine.step(&[], 0).is_empty());
}

#[test]
fn what_the_machine_cannot_do_is_refused_by_name() {
    let refused = |options| CpuBackend::new(options).err().map(|error| error.to_string());
    let threads = refused(CpuOptions { threads: Some(0), ..CpuOptions::default() });
    assert_eq!(threads.as_deref(), Some("threads: found 0, expected at least 1"));
    if let Some(missing) = Isa::ALL.into_iter().find(|isa| !isa.is_supported()) {
        assert!(
            refused(CpuOptions { isa: Some(missing), ..CpuOptions::default() }).unwrap().contains("instruction set")
        );
    }
    let backend = CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
    let load = |model: &TinyModel, limits: &StepLimits| {
        backend.load(&model.spec, &mut model.clone(), limits).err().map(|error| error.to_string()).unwrap()
    };
    let model = model(WeightFormat::Q4_1);
    let odd_blocks = StepLimits { block_size: 24, ..limits(&model) };
    assert!(load(&model, &odd_blocks).contains("KV block size: found 24"));
    let mut odd_heads = model.clone();
    odd_heads.spec.layers[1].attention.head_size = 24;
    odd_heads.spec.layers[1].attention.rope = RopeSpec::plain(10_000.0, 24);
    assert!(load(&odd_heads, &limits(&model)).contains("head size: found 24"));
    let too_large = StepLimits { num_blocks: vec![usize::MAX / 1_000_000; 2], ..limits(&model) };
    assert!(load(&model, &too_large).contains("the KV cache: could not take"));
}

#[test]
fn the_footprint_is_known_before_loading() {
    let model = model(WeightFormat::Q4_1);
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let footprint = backend.footprint(&model.spec, &limits(&model));
    let elements: usize = model.spec.kv_geometry(16).groups.iter().map(|group| group.elements_per_token).sum();
    assert_eq!(footprint.kv_bytes, elements * 40 * 16 * 2);
    let logits = 64 * model.spec.vocab_size * 4;
    assert!(footprint.arena_bytes > logits && footprint.arena_bytes < 4 << 20, "{footprint:?}");
}
