//! The law where blocks are shared: between requests that begin alike, between the continuations of one, and when a request
//! loses its blocks and computes them again. Bit for bit against each request alone in an engine that shares nothing.

use octavo_backend::{Backend, Reference};
use octavo_cpu::{CpuBackend, CpuOptions};
use octavo_engine::{Engine, EngineConfig, PrefixCaching, RequestId, SamplingParams};
use octavo_sched::Request;

use crate::common::{
    Answer, assert_same, params, run, run_alone, run_with_stories, tiny_config, tiny_engine, tiny_model,
};

const CACHES: [PrefixCaching; 3] = [PrefixCaching::Off, PrefixCaching::On, PrefixCaching::Colliding];

/// A backend, and a block size that suits it.
struct Setting<F> {
    backend: F,
    block_size: usize,
}

impl<B: Backend, F: Fn() -> B> Setting<F> {
    /// An engine with so many blocks in each of its two layer groups.
    fn engine(&self, num_blocks: usize, prefix_cache: PrefixCaching) -> Engine<B> {
        let config = EngineConfig {
            block_size: self.block_size,
            num_blocks: vec![num_blocks; 2],
            prefix_cache,
            max_num_batched_tokens: 24,
            ..tiny_config(24)
        };
        tiny_engine((self.backend)(), config)
    }

    fn alone(&self, requests: &[Request]) -> Vec<Answer> {
        run_alone(&mut self.engine(400, PrefixCaching::Off), requests)
    }
}

fn reference() -> Setting<fn() -> Reference> {
    Setting { backend: Reference::exact, block_size: 4 }
}

fn cpu() -> Setting<fn() -> CpuBackend> {
    let backend = || CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    Setting { backend, block_size: 16 }
}

/// Requests of which each begins like the one before it, up to a place that is rarely a block's end; greedy and seeded.
fn related_requests(count: usize, n: u32) -> Vec<Request> {
    let (model, mut prompt) = (tiny_model(), vec![]);
    (0..count)
        .map(|index| {
            prompt.truncate(index * 29 % 41);
            prompt.extend(model.tokens(3 + index * 7 % 23, index as u64));
            let params = SamplingParams { n, ..params(index, 20 + index * 7 % 41) };
            Request { id: RequestId(index as u64), prompt: prompt.clone(), params, arrival: 0, deadline: None }
        })
        .collect()
}

fn a_prefix_hit_changes_nothing<B: Backend>(setting: Setting<impl Fn() -> B>) {
    let requests = related_requests(12, 1);
    let alone = setting.alone(&requests);
    let mut colliding = vec![];
    for cache in [PrefixCaching::On, PrefixCaching::Colliding] {
        let mut engine = setting.engine(400, cache);
        assert_same("cold", &run(&mut engine, &requests), &alone);
        let warm = run_with_stories(&mut engine, &requests);
        for (request, (_, story)) in requests.iter().zip(&warm) {
            // All of the prompt is known by now: what is not cached is the rest of its last block, at least one token.
            let expected = (request.prompt.len() - 1) / setting.block_size * setting.block_size;
            assert_eq!(story.cached_tokens, expected);
            assert!(story.first_difference.is_none_or(|position| position >= expected));
        }
        let answers: Vec<Answer> = warm.into_iter().map(|(answer, _)| answer).collect();
        assert_same("warm", &answers, &alone);
        colliding.push(engine.stats().scheduler);
    }
    assert_eq!(
        (colliding[0].prefix_hits, colliding[0].blocks_cached, colliding[0].steps),
        (colliding[1].prefix_hits, colliding[1].blocks_cached, colliding[1].steps),
        "equal hashes change nothing"
    );
}

#[test]
fn a_prefix_hit_changes_no_answer_on_reference() {
    a_prefix_hit_changes_nothing(reference());
}

#[test]
fn a_prefix_hit_changes_no_answer_on_the_cpu() {
    a_prefix_hit_changes_nothing(cpu());
}

/// After many outputs of one token, requests are admitted with next to no room kept for the running ones.
fn expect_short_outputs<B: Backend>(engine: &mut Engine<B>) {
    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::default() };
    let request =
        |id| Request { id: RequestId(id), prompt: vec![7], params: params.clone(), arrival: 0, deadline: None };
    run(engine, &(1000..1200).map(request).collect::<Vec<_>>());
}

fn preemption_changes_nothing<B: Backend>(setting: Setting<impl Fn() -> B>, pools: [(u32, usize); 2]) {
    for (n, num_blocks) in pools {
        let requests = related_requests(12, n);
        let alone = setting.alone(&requests);
        for cache in CACHES {
            let mut engine = setting.engine(num_blocks, cache);
            expect_short_outputs(&mut engine);
            let answers = run_with_stories(&mut engine, &requests);
            let stats = engine.stats().scheduler;
            assert!(stats.preemptions > 0, "n = {n}, {cache:?}: the pool is too large to be a test");
            let told: u32 = answers.iter().step_by(n as usize).map(|(_, story)| story.preemptions).sum();
            assert!(u64::from(told) <= stats.preemptions && told > 0, "stories tell of them");
            let answers: Vec<Answer> = answers.into_iter().map(|(answer, _)| answer).collect();
            assert_same(&format!("n = {n}, {cache:?}, {} preemptions", stats.preemptions), &answers, &alone);
        }
    }
}

#[test]
fn preemption_changes_no_answer_on_reference() {
    preemption_changes_nothing(reference(), [(1, 40), (3, 64)]);
}

#[test]
fn preemption_changes_no_answer_on_the_cpu() {
    preemption_changes_nothing(cpu(), [(1, 9), (3, 17)]);
}

fn continuations_are_independent<B: Backend>(setting: Setting<impl Fn() -> B>) {
    let single = related_requests(12, 1);
    let alone = setting.alone(&single);
    let several = related_requests(12, 4);
    for cache in CACHES {
        let mut engine = setting.engine(400, cache);
        let answers = run(&mut engine, &several);
        let first: Vec<Answer> = answers.iter().step_by(4).cloned().collect();
        assert_same("the first continuation", &first, &alone);
        assert_same("the others", &answers, &setting.alone(&several));
        let drawn = several.iter().zip(answers.chunks(4)).filter(|(request, _)| request.params.temperature > 0.5);
        let differing = drawn.filter(|(_, answers)| answers[0] != answers[1] && answers[1] != answers[2]).count();
        assert!(differing > 4, "each continuation has noise of its own");
        let stats = engine.stats().scheduler;
        assert!(stats.blocks_copied > 0 && stats.blocks_copied <= 2 * 3 * 12, "{}", stats.blocks_copied);
    }
}

#[test]
fn each_continuation_is_what_it_is_alone_on_reference() {
    continuations_are_independent(reference());
}

#[test]
fn each_continuation_is_what_it_is_alone_on_the_cpu() {
    continuations_are_independent(cpu());
}
