//! A beam search on a model: beside the definition, teacher-forced, and under everything that must not change it.

use octavo_backend::Reference;
use octavo_engine::{Engine, EngineConfig, FinishReason, PrefixCaching, RequestId, SamplingParams, TokenId};
use octavo_sched::{BeamParams, Request};

use crate::common::{tiny_config, tiny_engine, tiny_model, tiny_requests};

const EOS: TokenId = 2;

/// Tokens, the sum of their log-probabilities, and why it ended.
type Found = (Vec<TokenId>, f64, FinishReason);

fn search(width: u32, max_tokens: usize) -> Request {
    let params = SamplingParams {
        beam: Some(BeamParams { width, length_penalty: 1.0 }),
        temperature: 0.0,
        max_tokens: Some(max_tokens),
        ..SamplingParams::default()
    };
    Request { id: RequestId(99), prompt: tiny_model().tokens(21, 5), params, arrival: 0, deadline: None }
}

/// Runs what is queued, and gives what the search found.
fn found(engine: &mut Engine<Reference>) -> Vec<Found> {
    let mut found = vec![];
    while engine.has_work() {
        for output in engine.step().unwrap().into_iter().filter(|output| output.request == RequestId(99)) {
            assert_eq!((output.choice as usize, output.tokens.len()), (found.len(), output.logprobs.len()));
            let sum = output.cumulative_logprob.unwrap();
            let sum_of_all: f64 = output.logprobs.iter().map(|report| f64::from(report.logprob)).sum();
            assert_eq!(sum, sum_of_all);
            found.push((output.tokens, sum, output.finish.unwrap().reason));
        }
    }
    found
}

/// The likeliest tokens after some others: a draw with its alternatives.
fn likeliest(engine: &mut Engine<Reference>, tokens: &[TokenId], count: u32) -> Vec<(TokenId, f32)> {
    let params = SamplingParams { temperature: 0.0, max_tokens: Some(1), logprobs: Some(count), ..Default::default() };
    let request = Request { id: RequestId(1), prompt: tokens.to_vec(), params, arrival: 0, deadline: None };
    engine.add(request).unwrap();
    let mut outputs = engine.step().unwrap();
    while engine.has_work() {
        outputs.extend(engine.step().unwrap());
    }
    outputs.remove(0).logprobs.remove(0).top
}

/// The definition, a request for each partial output at each step.
fn by_definition(engine: &mut Engine<Reference>, width: usize, max_tokens: usize) -> Vec<Found> {
    let prompt = search(1, 1).prompt;
    let mut live: Vec<(Vec<TokenId>, f64)> = vec![(vec![], 0.0)];
    let mut complete: Vec<(f64, Found)> = vec![];
    for _ in 0..max_tokens {
        let mut next = vec![];
        for (tokens, sum) in &live {
            for (token, logprob) in likeliest(engine, &[&prompt[..], tokens].concat(), 2 * width as u32) {
                let longer = ([&tokens[..], &[token]].concat(), sum + f64::from(logprob));
                if token == EOS {
                    let score = longer.1 / (prompt.len() + tokens.len()) as f64;
                    complete.push((score, (longer.0, longer.1, FinishReason::Stop)));
                } else {
                    next.push(longer);
                }
            }
        }
        next.sort_by(|one: &(Vec<TokenId>, f64), other| other.1.total_cmp(&one.1));
        next.truncate(width);
        live = next;
    }
    let score = |(tokens, sum): (Vec<TokenId>, f64)| {
        (sum / (prompt.len() + tokens.len()) as f64, (tokens, sum, FinishReason::Length))
    };
    complete.extend(live.into_iter().map(score));
    complete.sort_by(|one, other| other.0.total_cmp(&one.0));
    complete.into_iter().take(width).map(|(_, found)| found).collect()
}

#[test]
fn a_search_finds_what_single_requests_find_step_by_step() {
    let mut engine = tiny_engine(Reference::exact(), tiny_config(64));
    for width in [1, 3, 5] {
        let expected = by_definition(&mut engine, width, 7);
        engine.add(search(width as u32, 7)).unwrap();
        assert_eq!(found(&mut engine), expected, "width {width}");
    }
}

#[test]
fn a_search_finds_the_same_in_any_chunks_beside_others_and_from_the_cache() {
    let mut alone = tiny_engine(Reference::exact(), tiny_config(64));
    alone.add(search(4, 30)).unwrap();
    let expected = found(&mut alone);
    assert_eq!(expected.len(), 4);
    for (budget, prefix_cache) in [(5, PrefixCaching::Off), (24, PrefixCaching::On)] {
        let mut engine = tiny_engine(Reference::exact(), EngineConfig { prefix_cache, ..tiny_config(budget) });
        for turn in 0..2 {
            let mut requests = tiny_requests();
            requests.insert(9, search(4, 30));
            requests.into_iter().for_each(|request| engine.add(request).unwrap());
            assert_eq!(found(&mut engine), expected, "budget {budget}, turn {turn}");
        }
    }
}

#[test]
fn a_search_finds_the_same_after_preemptions() {
    let mut alone = tiny_engine(Reference::exact(), tiny_config(64));
    alone.add(search(4, 30)).unwrap();
    let expected = found(&mut alone);
    for (budget, prefix_cache) in [(9, PrefixCaching::Off), (30, PrefixCaching::On)] {
        // Three blocks more than the earlier request needs at its end, and than the search may need.
        let config = EngineConfig { block_size: 4, num_blocks: vec![40, 40], prefix_cache, ..tiny_config(budget) };
        let mut engine = tiny_engine(Reference::exact(), config);
        let plain = |id, prompt_len, max_tokens| {
            let params = SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..Default::default() };
            let prompt = tiny_model().tokens(prompt_len, id);
            Request { id: RequestId(id), prompt, params, arrival: 0, deadline: None }
        };
        // After many outputs of one token, requests are admitted with room for a block more.
        for id in 100..400 {
            engine.add(plain(id, 1, 1)).unwrap();
        }
        found(&mut engine);
        engine.add(plain(1, 100, 48)).unwrap();
        engine.add(search(4, 30)).unwrap();
        assert_eq!(found(&mut engine), expected, "budget {budget}");
        assert!(engine.stats().scheduler.preemptions > 0, "budget {budget}");
    }
}

#[test]
fn a_search_leaves_others_as_they_are() {
    let run = |with_search: bool| {
        let mut engine = tiny_engine(Reference::exact(), tiny_config(40));
        if with_search {
            engine.add(search(6, 20)).unwrap();
        }
        for request in tiny_requests().into_iter().take(8) {
            engine.add(request).unwrap();
        }
        let mut tokens = vec![vec![]; 8];
        while engine.has_work() {
            for output in engine.step().unwrap().into_iter().filter(|output| output.request != RequestId(99)) {
                tokens[output.request.0 as usize].extend(output.tokens);
            }
        }
        tokens
    };
    assert_eq!(run(true), run(false));
}
