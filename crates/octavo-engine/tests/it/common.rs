//! Requests for the law's tests, and an engine that runs them to their end.

use std::collections::{BTreeMap, BTreeSet};

use octavo_backend::conformance::{TinyModel, TinyShape};
use octavo_backend::{Backend, TokenLogprobs, WeightFormat};
use octavo_engine::{Engine, EngineConfig, PrefixCaching, RequestId, SamplingParams, Story, TokenId};
use octavo_sched::Request;

/// What a request came to.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<TokenLogprobs>,
}

/// A model small enough for Reference, with every oddity the law must survive: a window, grouped heads, int4 weights.
pub fn tiny_model() -> TinyModel {
    let shape = TinyShape {
        vocab_size: 120,
        num_layers: 2,
        group_size: 3,
        window: Some(20),
        format: WeightFormat::Q4_1,
        ..TinyShape::default()
    };
    TinyModel::new(shape, 41)
}

/// Sizes for `model` with a step budget.
pub fn tiny_config(max_num_batched_tokens: usize) -> EngineConfig {
    EngineConfig {
        block_size: 16,
        num_blocks: vec![120, 120],
        max_model_len: 160,
        max_num_seqs: 32,
        max_num_batched_tokens,
        eos_token_ids: vec![2],
        seed: 0,
        mask_threads: 2,
        prefix_cache: PrefixCaching::Off,
    }
}

/// An engine on `backend` with the tiny model.
pub fn tiny_engine<B: Backend>(backend: B, config: EngineConfig) -> Engine<B> {
    let model = tiny_model();
    Engine::load(backend, &model.spec, &mut model.clone(), config).unwrap()
}

/// How request `index` is drawn: greedy ones, seeded ones at several temperatures, each filter.
pub fn params(index: usize, max_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: [0.0, 0.7, 1.0, 1.5][index % 4],
        top_k: [0, 7, 0, 40][index / 4 % 4],
        top_p: [1.0, 0.9, 0.5][index % 3],
        min_p: [0.0, 0.0, 0.05][index / 2 % 3],
        seed: 1000 + index as u64,
        max_tokens: Some(max_tokens),
        logprobs: Some(3),
        ignore_eos: index.is_multiple_of(2),
        ..SamplingParams::default()
    }
}

/// 24 requests whose prompts are 1 to 100 tokens long.
pub fn tiny_requests() -> Vec<Request> {
    let model = tiny_model();
    (0..24)
        .map(|index| Request {
            id: RequestId(index as u64),
            prompt: model.tokens([1, 5, 16, 33, 64, 100][index % 6], index as u64),
            params: params(index, 3 + index % 12),
            arrival: 0,
            deadline: None,
        })
        .collect()
}

/// Runs `requests` together, in their order; the answers are in order of request id.
///
/// Of a request for several continuations, they follow one another in order of choice.
pub fn run<B: Backend>(engine: &mut Engine<B>, requests: &[Request]) -> Vec<Answer> {
    run_with_stories(engine, requests).into_iter().map(|(answer, _)| answer).collect()
}

/// The same, with what each continuation's last output tells of its request.
pub fn run_with_stories<B: Backend>(engine: &mut Engine<B>, requests: &[Request]) -> Vec<(Answer, Story)> {
    for request in requests {
        engine.add(request.clone()).unwrap();
    }
    let mut answers: BTreeMap<(RequestId, u32), (Answer, Story)> = BTreeMap::new();
    let mut ended = BTreeSet::new();
    while engine.has_work() {
        for output in engine.step().unwrap() {
            assert!(!ended.contains(&output.request), "nothing comes after a request's last output");
            let (answer, story) = answers.entry((output.request, output.choice)).or_default();
            answer.tokens.extend(output.tokens);
            answer.logprobs.extend(output.logprobs);
            *story = output.story;
            if output.last {
                ended.insert(output.request);
            }
        }
    }
    assert_eq!(ended.len(), requests.len(), "each request has a last output");
    let stats = engine.stats().scheduler;
    assert_eq!((stats.blocks_free, stats.blocks_promised), (stats.blocks_total, 0), "all blocks come home");
    answers.into_values().collect()
}

/// Runs each request on its own, one after another.
pub fn run_alone<B: Backend>(engine: &mut Engine<B>, requests: &[Request]) -> Vec<Answer> {
    requests.iter().flat_map(|request| run(engine, std::slice::from_ref(request))).collect()
}

/// Asserts that tokens and log-probabilities have the same bits.
pub fn assert_same(what: &str, found: &[Answer], expected: &[Answer]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.tokens, expected.tokens, "{what}: tokens of request {index}");
        let bits = |answer: &Answer| -> Vec<u32> {
            let of_one = |report: &TokenLogprobs| {
                let top = report.top.iter().flat_map(|(id, logprob)| [*id, logprob.to_bits()]);
                [report.logprob.to_bits(), report.rank].into_iter().chain(top).collect::<Vec<u32>>()
            };
            answer.logprobs.iter().flat_map(of_one).collect()
        };
        assert_eq!(bits(found), bits(expected), "{what}: log-probabilities of request {index}");
    }
}
