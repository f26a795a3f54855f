//! Tiny models through the whole engine: batches, chunks, a prefix cache, preemption, several continuations, a grammar. What
//! comes out is compared with Reference, request by request.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use octavo_backend::{
    Backend, Reference, StepLimits, TokenLogprobs, TokenMask, WeightFormat,
    conformance::{TinyModel, TinyShape},
};
use octavo_cuda::{CudaBackend, CudaOptions};
use octavo_engine::{
    Engine, EngineConfig, Extras, Grammar, GrammarError, GrammarState, PrefixCaching, RequestId, SamplingParams,
    TokenId,
};
use octavo_sched::Request;

/// Log-probabilities of the same token may be this far apart, in nats: as conformance allows a backend whose sums are free.
const MARGIN: f32 = 5e-2;

/// Of so many tokens one may be another: weights are random, and many tokens are about as likely as each other.
const TOKENS_FOR_ONE_OTHER: usize = 50;

/// The tiny model's last token, after which its logits are no numbers.
const NO_NUMBER: TokenId = 119;

fn model(format: WeightFormat) -> TinyModel {
    let shape = TinyShape { vocab_size: 120, num_layers: 2, group_size: 3, head_size: 32, ..TinyShape::default() };
    TinyModel::new(TinyShape { window: Some(20), hidden_size: 128, intermediate_size: 128, format, ..shape }, 41)
}

/// Room for `blocks` blocks, of two groups of layers.
fn config(blocks: usize, max_num_batched_tokens: usize, prefix_cache: PrefixCaching) -> EngineConfig {
    EngineConfig {
        block_size: 16,
        num_blocks: vec![blocks, blocks],
        max_model_len: 128,
        max_num_seqs: 16,
        max_num_batched_tokens,
        eos_token_ids: vec![2],
        seed: 0,
        mask_threads: 1,
        prefix_cache,
    }
}

/// Any token by turns with one of the upper half, so that a mask is asked for at every draw.
struct ByTurns;

struct Turn(u32);

impl Grammar for ByTurns {
    fn start(&self) -> Box<dyn GrammarState> {
        Box::new(Turn(0))
    }
}

impl GrammarState for Turn {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), GrammarError> {
        let first = if self.0.is_multiple_of(2) { 3 } else { 60 };
        (first..NO_NUMBER).for_each(|token| mask.insert(token));
        Ok(())
    }

    fn may_end(&mut self) -> Result<bool, GrammarError> {
        Ok(false)
    }

    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError> {
        if !self.0.is_multiple_of(2) && token < 60 {
            return Err(GrammarError(format!("token {token} after {} tokens", self.0)));
        }
        self.0 += 1;
        Ok(())
    }
}

/// Twelve requests: greedy ones and every filter, three of two continuations, two with a grammar, prompts that begin alike.
fn requests(model: &TinyModel, max_tokens: usize) -> Vec<(Request, Extras)> {
    let common = model.tokens(90, 1);
    let request = |index: usize| {
        let own = model.tokens(7, 100 + index as u64);
        let prompt: Vec<TokenId> = common[..[1, 20, 40, 64][index % 4]].iter().chain(&own).copied().collect();
        let params = SamplingParams {
            n: if index % 4 == 3 { 2 } else { 1 },
            temperature: [0.0, 0.7, 0.0, 1.2][index % 4],
            top_k: [0, 20, 0][index % 3],
            top_p: [1.0, 0.9][index % 2],
            min_p: [0.0, 0.02, 0.0][index / 2 % 3],
            seed: 1000 + index as u64,
            max_tokens: Some(max_tokens + index),
            logprobs: Some(2),
            ignore_eos: true,
            allowed_token_ids: Some((3..NO_NUMBER).collect()),
            ..SamplingParams::default()
        };
        let grammar = (index % 5 == 2).then(|| Arc::new(ByTurns) as Arc<dyn Grammar>);
        let request = Request { id: RequestId(index as u64), prompt, params, arrival: 0, deadline: None };
        (request, Extras { grammar, pooling: None })
    };
    (0..12).map(request).collect()
}

/// After many short outputs the scheduler expects short ones, and lets in more than can stay.
fn short_requests() -> Vec<(Request, Extras)> {
    let params = SamplingParams { max_tokens: Some(1), ignore_eos: true, ..SamplingParams::default() };
    let request =
        |id| Request { id: RequestId(id), prompt: vec![1], params: params.clone(), arrival: 0, deadline: None };
    (1000..1200).map(|id| (request(id), Extras::default())).collect()
}

#[derive(Debug, Default)]
struct Answer {
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
}

type Answers = BTreeMap<(RequestId, u32), Answer>;

/// Runs requests together to their end.
fn run<B: Backend>(engine: &mut Engine<B>, requests: &[(Request, Extras)]) -> Answers {
    for (request, extras) in requests {
        engine.add_with(request.clone(), extras.clone()).expect("a request that fits");
    }
    let (mut answers, mut ended) = (Answers::new(), BTreeSet::new());
    while engine.has_work() {
        for output in engine.step().expect("a step") {
            let answer = answers.entry((output.request, output.choice)).or_default();
            answer.tokens.extend(output.tokens);
            answer.logprobs.extend(output.logprobs);
            if output.last {
                ended.insert(output.request);
            }
        }
    }
    assert_eq!(ended.len(), requests.len(), "each request has a last output");
    let stats = engine.stats().scheduler;
    assert_eq!(stats.blocks_free, stats.blocks_total, "all blocks come home");
    answers
}

/// Asserts that answers agree up to a first token that lies within the margin of another; says how many go other ways from
/// there on.
///
/// A greedy draw may differ only where both tokens are as likely, within the margin. Of drawn tokens the noise decides, and
/// only few may differ.
fn assert_agree(what: &str, requests: &[(Request, Extras)], found: &Answers, expected: &Answers) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}: continuations");
    let (mut others, mut compared) = (0usize, 0usize);
    for (key, found) in found {
        let expected = &expected[key];
        let params = &requests[key.0.0 as usize].0.params;
        assert_eq!(Some(found.tokens.len()), params.max_tokens, "{what}: length of {key:?}");
        for (at, token) in found.tokens.iter().enumerate() {
            compared += 1;
            let (mine, other) = (&found.logprobs[at], &expected.logprobs[at]);
            if *token == expected.tokens[at] {
                let apart = (mine.logprob - other.logprob).abs();
                assert!(apart <= MARGIN, "{what}: {key:?} at {at}: {} and {}", mine.logprob, other.logprob);
                continue;
            }
            let apart = (mine.logprob - other.logprob).abs();
            assert!(
                params.temperature > 0.0 || apart <= 2.0 * MARGIN,
                "{what}: {key:?} at {at}: {mine:?} and {other:?}"
            );
            others += 1;
            break;
        }
    }
    println!("{what}: of {compared} tokens {others} are others than Reference's");
    assert!(others <= compared.div_ceil(TOKENS_FOR_ONE_OTHER), "{what}: {others} of {compared}");
}

fn generates(format: WeightFormat) {
    let model = model(format);
    let [short, long] = [6, 44].map(|max_tokens| requests(&model, max_tokens));
    let backend = CudaBackend::new(&CudaOptions::default()).expect("a GPU, or the fake driver");
    let reference = Reference::mirror(backend.numerics());
    let load = |config: EngineConfig| {
        Engine::load(backend.clone(), &model.spec, &mut model.clone(), config).expect("an engine")
    };
    let plain = config(64, 128, PrefixCaching::Off);
    let mut plain_reference =
        Engine::load(reference, &model.spec, &mut model.clone(), plain.clone()).expect("the reference");
    let expected: Answers = long.iter().flat_map(|one| run(&mut plain_reference, std::slice::from_ref(one))).collect();
    // Alone, in one batch of small steps, and in a pool that holds only a few of them, with a prefix cache.
    let mut engine = load(plain);
    let alone: Answers = short.iter().flat_map(|one| run(&mut engine, std::slice::from_ref(one))).collect();
    assert_agree(&format!("{format}, alone"), &short, &alone, &expected);
    let mut engine = load(config(64, 24, PrefixCaching::Off));
    assert_agree(&format!("{format}, a batch in small steps"), &short, &run(&mut engine, &short), &expected);
    let mut engine = load(config(14, 64, PrefixCaching::On));
    run(&mut engine, &short_requests());
    let scarce = run(&mut engine, &long);
    let stats = engine.stats().scheduler;
    assert!(stats.preemptions > 0 && stats.prefix_hits > 0, "{stats:?}");
    assert_agree(&format!("{format}, preempted, with a prefix cache"), &long, &scarce, &expected);
}

#[test]
fn a_model_in_bfloat16_generates_as_reference_does() {
    generates(WeightFormat::Bf16);
}

#[test]
fn a_model_with_4_bit_weights_generates_as_reference_does() {
    generates(WeightFormat::Int4Group64);
}

#[test]
fn heads_of_a_size_without_kernels_are_refused_with_the_sizes_there_are() {
    let backend = CudaBackend::new(&CudaOptions::default()).unwrap();
    let mut model = TinyModel::new(TinyShape { head_size: 144, ..TinyShape::default() }, 41);
    let limits = StepLimits { max_rows: 16, max_spans: 1, max_positions: 64, block_size: 16, num_blocks: vec![4] };
    let error = backend.load(&model.spec.clone(), &mut model, &limits).err().unwrap().to_string();
    assert!(
        error.contains("head size: found 144") && error.contains("one of 16, 32") && error.contains("160"),
        "{error}"
    );
}
