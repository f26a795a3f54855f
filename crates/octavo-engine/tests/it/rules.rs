//! Rules of a draw, grammars, reports on prompts, deadlines: what they do to a request, and that they keep the law.

use std::sync::Arc;

use octavo_backend::{Backend, LEAST_LOGPROB, Reference, TokenLogprobs, TokenMask};
use octavo_cpu::{CpuBackend, CpuOptions};
use octavo_engine::{
    BeamParams, Engine, EngineConfig, EngineHandle, Extras, FinishReason, Grammar, GrammarError, GrammarState, Inbox,
    Output, Pooling, PrefixCaching, RequestId, SamplingParams, Submission, TokenId,
};
use octavo_sched::Request;

use crate::common::{tiny_config, tiny_engine, tiny_model};

const EOS: TokenId = 2;
const VOCAB_SIZE: u32 = 120;
/// The tiny model's last token, after which its logits are no numbers.
const NO_NUMBER: u32 = 119;

fn reference(budget: usize) -> Engine<Reference> {
    tiny_engine(Reference::exact(), tiny_config(budget))
}

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap()
}

fn request(id: u64, prompt: Vec<TokenId>, params: SamplingParams) -> Request {
    Request { id: RequestId(id), prompt, params, arrival: 0, deadline: None }
}

/// Everything that came of a continuation.
#[derive(Debug, Clone, Default, PartialEq)]
struct Whole {
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
    pooled: Vec<f32>,
    reason: Option<FinishReason>,
}

/// Runs requests together; what came of each continuation, by request and choice.
fn run<B: Backend>(engine: &mut Engine<B>, requests: &[(Request, Extras)]) -> Vec<Whole> {
    for (request, extras) in requests {
        engine.add_with(request.clone(), extras.clone()).unwrap();
    }
    let mut found: std::collections::BTreeMap<(RequestId, u32), Whole> = Default::default();
    while engine.has_work() {
        for output in engine.step().unwrap() {
            let Output { request, choice, tokens, logprobs, prompt_logprobs, pooled, finish, .. } = output;
            let whole = found.entry((request, choice)).or_default();
            whole.tokens.extend(tokens);
            whole.logprobs.extend(logprobs);
            whole.prompt_logprobs.extend(prompt_logprobs);
            whole.pooled.extend(pooled);
            whole.reason = finish.map(|finish| finish.reason);
        }
    }
    let stats = engine.stats().scheduler;
    assert_eq!(stats.blocks_free, stats.blocks_total, "all blocks come home");
    found.into_values().collect()
}

fn run_one<B: Backend>(engine: &mut Engine<B>, request: Request, extras: Extras) -> Whole {
    run(engine, &[(request, extras)]).remove(0)
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::default() }
}

/// Tokens below 60 and above by turns. It may end after four tokens and must after eight.
struct ByTurns;

struct Turn {
    tokens: u32,
}

impl Grammar for ByTurns {
    fn start(&self) -> Box<dyn GrammarState> {
        Box::new(Turn { tokens: 0 })
    }
}

impl GrammarState for Turn {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), GrammarError> {
        let half = if self.tokens.is_multiple_of(2) { 3..60 } else { 60..NO_NUMBER };
        half.filter(|_| self.tokens < 8).for_each(|token| mask.insert(token));
        Ok(())
    }

    fn may_end(&mut self) -> Result<bool, GrammarError> {
        Ok(self.tokens >= 4)
    }

    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError> {
        if (token < 60) != self.tokens.is_multiple_of(2) {
            return Err(GrammarError(format!("token {token} after {} tokens", self.tokens)));
        }
        self.tokens += 1;
        Ok(())
    }
}

/// Allows five tokens and then fails.
struct Faulty(u32);

impl Grammar for Faulty {
    fn start(&self) -> Box<dyn GrammarState> {
        Box::new(Faulty(0))
    }
}

impl GrammarState for Faulty {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), GrammarError> {
        if self.0 == 5 {
            return Err(GrammarError("it is too much work".into()));
        }
        (3..NO_NUMBER).for_each(|token| mask.insert(token));
        Ok(())
    }

    fn may_end(&mut self) -> Result<bool, GrammarError> {
        Ok(false)
    }

    fn advance(&mut self, _: TokenId) -> Result<(), GrammarError> {
        self.0 += 1;
        Ok(())
    }
}

fn by_turns() -> Extras {
    Extras { grammar: Some(Arc::new(ByTurns)), pooling: None }
}

/// Every rule alone and several together, greedy and seeded, for one and three continuations.
fn ruled_requests() -> Vec<(Request, Extras)> {
    let model = tiny_model();
    let plain = |index: u64| SamplingParams {
        temperature: [0.0, 1.0, 1.5][index as usize % 3],
        top_k: [0, 20][index as usize % 2],
        seed: 90 + index,
        max_tokens: Some(40),
        logprobs: Some(5),
        n: if index.is_multiple_of(5) { 3 } else { 1 },
        ..SamplingParams::default()
    };
    (0..20)
        .map(|index| {
            let plain = plain(index);
            let (params, extras) = match index % 10 {
                0 => (SamplingParams { repetition_penalty: 1.8, ..plain }, Extras::default()),
                1 => (SamplingParams { presence_penalty: 2.0, frequency_penalty: -0.5, ..plain }, Extras::default()),
                2 => (SamplingParams { logit_bias: vec![(7, 3.0), (4, -100.0)], ..plain }, Extras::default()),
                3 => (SamplingParams { allowed_token_ids: Some((10..40).collect()), ..plain }, Extras::default()),
                4 => (SamplingParams { min_tokens: 9, logit_bias: vec![(EOS, 20.0)], ..plain }, Extras::default()),
                5 => (plain, by_turns()),
                6 => (SamplingParams { prompt_logprobs: Some(2), ..plain }, Extras::default()),
                7 => (
                    SamplingParams { bad_words: (3..60).map(|token| vec![token]).collect(), ..plain },
                    Extras::default(),
                ),
                8 => (plain, Extras { grammar: None, pooling: Some(Pooling::Mean) }),
                _ => {
                    let allowed_token_ids = Some((0..90).collect());
                    let params = SamplingParams { allowed_token_ids, frequency_penalty: 1.0, min_tokens: 6, ..plain };
                    (params, Extras { pooling: Some(Pooling::Last), ..by_turns() })
                }
            };
            let prompt = model.tokens([1, 17, 40, 70][index as usize % 4], index / 2);
            (request(index, prompt, params), extras)
        })
        .collect()
}

fn law_holds<B: Backend>(backend: impl Fn() -> B) {
    let requests = ruled_requests();
    let engine = |num_blocks: usize, budget, prefix_cache| {
        let num_blocks = vec![num_blocks; 2];
        tiny_engine(backend(), EngineConfig { num_blocks, prefix_cache, ..tiny_config(budget) })
    };
    let mut alone = Vec::new();
    for request in &requests {
        alone.extend(run(&mut engine(120, 512, PrefixCaching::Off), std::slice::from_ref(request)));
    }
    for (num_blocks, budget, prefix_cache) in
        [(120, 512, PrefixCaching::Off), (120, 16, PrefixCaching::On), (13, 48, PrefixCaching::On)]
    {
        let mut engine = engine(num_blocks, budget, prefix_cache);
        for round in 0..2 {
            let found = run(&mut engine, &requests);
            assert_eq!(found, alone, "round {round} with {num_blocks} blocks in steps of {budget}");
        }
        assert_eq!(engine.stats().scheduler.preemptions > 0, num_blocks < 120);
    }
}

#[test]
fn rules_keep_the_law_on_reference() {
    law_holds(Reference::exact);
}

#[test]
fn rules_keep_the_law_on_the_cpu() {
    law_holds(cpu);
}

#[test]
fn a_scored_prompt_says_what_the_draws_of_its_tokens_said() {
    let prompt = tiny_model().tokens(23, 5);
    let params = SamplingParams { logprobs: Some(4), ..greedy(40) };
    let drawn = run_one(&mut reference(512), request(0, prompt.clone(), params), Extras::default());
    let whole: Vec<TokenId> = prompt.iter().chain(&drawn.tokens).copied().collect();
    for budget in [16, 50, 512] {
        let params = SamplingParams { prompt_logprobs: Some(4), ..greedy(1) };
        let scored = run_one(&mut reference(budget), request(0, whole.clone(), params), Extras::default());
        assert_eq!(scored.prompt_logprobs.len(), whole.len() - 1);
        assert_eq!(scored.prompt_logprobs[prompt.len() - 1..], drawn.logprobs, "in steps of {budget}");
    }
}

/// For each token of `whole`'s output, the model's own log-probabilities of all tokens there.
fn unruled(prompt: &[TokenId], whole: &Whole) -> Vec<Vec<f32>> {
    let tokens = prompt.iter().chain(&whole.tokens).copied().collect();
    let params = SamplingParams { prompt_logprobs: Some(VOCAB_SIZE), ..greedy(1) };
    let scored = run_one(&mut reference(512), request(0, tokens, params), Extras::default());
    let rows = &scored.prompt_logprobs[prompt.len() - 1..];
    rows.iter().map(by_token).collect()
}

fn by_token(report: &TokenLogprobs) -> Vec<f32> {
    let mut row = vec![f32::NAN; VOCAB_SIZE as usize];
    report.top.iter().for_each(|&(token, logprob)| row[token as usize] = logprob);
    row
}

/// Asserts that `whole` was drawn from the model's distribution with `change(tokens before, token, logit)` applied.
fn assert_ruled(prompt: &[TokenId], whole: &Whole, change: impl Fn(&[TokenId], TokenId, f64) -> f64) {
    assert!(whole.tokens.len() > 4);
    for (index, (row, report)) in unruled(prompt, whole).iter().zip(&whole.logprobs).enumerate() {
        let changed = |token: u32| change(&whole.tokens[..index], token, f64::from(row[token as usize]));
        let logits: Vec<f64> = (0..VOCAB_SIZE).map(changed).collect();
        let log_sum = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        for (token, found) in by_token(report).iter().enumerate() {
            let expected = (logits[token] - log_sum).max(f64::from(LEAST_LOGPROB));
            assert!((f64::from(*found) - expected).abs() < 1e-4, "token {token} at {index}: {found}, not {expected}");
        }
        assert_eq!(report.logprob, by_token(report)[whole.tokens[index] as usize]);
    }
}

fn ruled(prompt: &[TokenId], params: SamplingParams) -> Whole {
    let params = SamplingParams { logprobs: Some(VOCAB_SIZE), ..params };
    run_one(&mut reference(512), request(0, prompt.to_vec(), params), Extras::default())
}

#[test]
fn bias_and_masks_come_before_the_distribution() {
    let prompt = tiny_model().tokens(9, 1);
    let logit_bias = vec![(70, 1.5), (5, -2.0)];
    let whole = ruled(&prompt, SamplingParams { logit_bias, ..greedy(12) });
    let bias =
        |token| [(70, 1.5), (5, -2.0)].iter().find(|(biased, _)| *biased == token).map_or(0.0, |(_, bias)| *bias);
    assert_ruled(&prompt, &whole, |_, token, logit| logit + bias(token));

    let whole = ruled(&prompt, SamplingParams { allowed_token_ids: Some(vec![9, 11, 50]), ..greedy(12) });
    let allowed = |token| [9, 11, 50].contains(&token);
    assert_ruled(&prompt, &whole, |_, token, logit| if allowed(token) { logit } else { f64::NEG_INFINITY });
    assert!(whole.tokens.iter().all(|&token| allowed(token)));
}

#[test]
fn presence_and_frequency_count_the_output_alone() {
    let prompt = tiny_model().tokens(30, 2);
    let whole = ruled(&prompt, SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.25, ..greedy(25) });
    assert_ruled(&prompt, &whole, |before, token, logit| {
        let count = before.iter().filter(|&&one| one == token).count() as f64;
        logit - 0.25 * count - if count > 0.0 { 0.5 } else { 0.0 }
    });
}

#[test]
fn a_bad_word_is_never_completed_and_its_beginning_is_free() {
    let prompt = tiny_model().tokens(9, 3);
    let free = ruled(&prompt, greedy(20)).tokens;
    let bad_words = vec![free[3..6].to_vec(), vec![free[10]]];
    let whole = ruled(&prompt, SamplingParams { bad_words: bad_words.clone(), ..greedy(20) });
    assert_eq!(whole.tokens[..5], free[..5], "until the word's last token");
    assert_ne!(whole.tokens[5], free[5]);
    assert!(bad_words.iter().all(|word| !whole.tokens.windows(word.len()).any(|window| window == word)));
}

#[test]
fn no_end_token_comes_before_min_tokens() {
    let prompt = tiny_model().tokens(9, 4);
    let params = SamplingParams { ignore_eos: false, logit_bias: vec![(EOS, 100.0), (8, 90.0)], ..greedy(20) };
    assert_eq!(ruled(&prompt, params.clone()).tokens, [EOS]);
    let whole = ruled(&prompt, SamplingParams { min_tokens: 6, ..params.clone() });
    assert_eq!(whole.tokens, [8, 8, 8, 8, 8, 8, EOS]);
    let stop_token_ids = vec![8];
    let whole = ruled(&prompt, SamplingParams { min_tokens: 2, stop_token_ids, ignore_eos: true, ..params });
    assert_eq!(whole.tokens[..2], [EOS, EOS], "an end token that is ignored is a token like any other");
}

#[test]
fn an_output_follows_its_grammar_and_ends_with_it() {
    for seed in 0..20 {
        let params = SamplingParams { seed, max_tokens: Some(30), ..SamplingParams::default() };
        let requests = [(request(0, vec![5, 6], SamplingParams { n: 3, ..params.clone() }), by_turns())];
        for whole in run(&mut reference(64), &requests) {
            let (end, tokens) = whole.tokens.split_last().unwrap();
            assert_eq!((*end, whole.reason), (EOS, Some(FinishReason::Stop)));
            assert!((4..=8).contains(&tokens.len()));
            assert!(tokens.iter().enumerate().all(|(index, &token)| (token < 60) == index.is_multiple_of(2)));
        }
        for longer in
            [SamplingParams { min_tokens: 20, ..params.clone() }, SamplingParams { ignore_eos: true, ..params.clone() }]
        {
            let whole = run_one(&mut reference(64), request(0, vec![5, 6], longer), by_turns());
            assert_eq!(whole.tokens.len(), 9, "the grammar ends where nothing else can come");
            assert_eq!((whole.tokens[8], whole.reason), (EOS, Some(FinishReason::Stop)));
        }
    }
}

#[test]
fn a_grammar_that_fails_ends_its_own_output_alone() {
    let prompt = vec![5, 6, 7];
    let alone = run_one(&mut reference(64), request(0, prompt.clone(), greedy(20)), Extras::default());
    let faulty = Extras { grammar: Some(Arc::new(Faulty(0))), pooling: None };
    let requests =
        [(request(0, prompt.clone(), greedy(20)), Extras::default()), (request(1, prompt, greedy(20)), faulty)];
    let mut engine = reference(64);
    let found = run(&mut engine, &requests);
    assert_eq!(found[0], alone);
    assert_eq!((found[1].tokens.len(), found[1].reason), (5, Some(FinishReason::Error)));
}

#[test]
fn rules_that_leave_no_token_end_the_output_with_an_error() {
    let params = SamplingParams { allowed_token_ids: Some(vec![9]), bad_words: vec![vec![9, 9]], ..greedy(5) };
    let whole = run_one(&mut reference(64), request(0, vec![5], params), Extras::default());
    assert_eq!((whole.tokens, whole.reason), (vec![9], Some(FinishReason::Error)));
}

#[test]
fn a_pooled_hidden_state_does_not_depend_on_chunks() {
    let prompt = tiny_model().tokens(90, 6);
    for pooling in [Pooling::Last, Pooling::Mean] {
        let extras = Extras { pooling: Some(pooling), grammar: None };
        let pooled =
            |budget| run_one(&mut reference(budget), request(0, prompt.clone(), greedy(2)), extras.clone()).pooled;
        assert_eq!(pooled(512).len(), tiny_model().spec.hidden_size);
        assert_eq!(pooled(16), pooled(512));
    }
    let of_one = |pooling| {
        let extras = Extras { pooling: Some(pooling), grammar: None };
        run_one(&mut reference(64), request(0, vec![5], greedy(1)), extras).pooled
    };
    assert_eq!(of_one(Pooling::Last), of_one(Pooling::Mean), "one token is its own mean");
}

#[test]
fn a_deadline_drops_what_waits_and_cuts_what_runs() {
    let prompt = tiny_model().tokens(40, 7);
    let full = run_one(&mut reference(16), request(0, prompt.clone(), greedy(100)), Extras::default()).tokens;
    let mut engine = reference(16);
    let late = Request { deadline: Some(0), ..request(0, prompt.clone(), SamplingParams { n: 2, ..greedy(100) }) };
    engine.add(late).unwrap();
    engine.add(request(1, prompt, greedy(100))).unwrap();
    let dropped = engine.step().unwrap();
    assert_eq!(dropped.iter().map(|output| (output.choice, output.last)).collect::<Vec<_>>(), [(0, false), (1, true)]);
    for output in dropped {
        assert_eq!((output.request, output.finish.unwrap().reason), (RequestId(0), FinishReason::Deadline));
        assert!(output.tokens.is_empty());
    }
    let mut tokens = Vec::new();
    while tokens.len() < 5 {
        tokens.extend(engine.step().unwrap().into_iter().flat_map(|output| output.tokens));
    }
    engine.end(RequestId(1), FinishReason::Abort);
    let deadline = Some(engine.now() + 30_000);
    engine.add(Request { deadline, ..request(2, tiny_model().tokens(40, 7), greedy(100)) }).unwrap();
    let (mut tokens, mut reason) = (Vec::new(), None);
    while reason.is_none() {
        // A hundred of these take longer than it has.
        std::thread::sleep(std::time::Duration::from_millis(1));
        for output in engine.step().unwrap() {
            tokens.extend(output.tokens);
            reason = output.finish.map(|finish| finish.reason);
        }
    }
    assert_eq!(reason, Some(FinishReason::Deadline));
    assert_eq!(tokens, full[..tokens.len()]);
    assert_eq!(engine.stats().scheduler.finished.deadline, 3);
}

#[test]
fn a_stopped_choice_ends_and_the_others_go_on() {
    let prompt = tiny_model().tokens(10, 8);
    let params = SamplingParams { n: 3, temperature: 1.0, ..greedy(12) };
    let requests = [(request(0, prompt.clone(), params.clone()), Extras::default())];
    let whole = run(&mut reference(64), &requests);
    let mut engine = reference(64);
    engine.add(request(0, prompt, params)).unwrap();
    engine.step().unwrap();
    engine.step().unwrap();
    let stopped = engine.stop(RequestId(0), 1).unwrap();
    assert_eq!((stopped.choice, stopped.last, stopped.finish.unwrap().reason), (1, false, FinishReason::Stop));
    assert!(engine.stop(RequestId(0), 1).is_none(), "it has ended");
    let rest = run(&mut engine, &[]);
    assert_eq!(rest[0].tokens, whole[0].tokens[2..]);
    assert_eq!(rest[1].tokens, whole[2].tokens[2..]);
    let stats = engine.stats().scheduler;
    assert_eq!((stats.finished.stop, stats.finished.length), (1, 2));
}

#[test]
fn what_a_step_could_not_carry_is_refused_at_the_door() {
    let (handle, inbox) = (EngineHandle::start(reference(64)).unwrap(), Inbox::new());
    let beyond = VOCAB_SIZE;
    let beam = Some(BeamParams { width: 2, length_penalty: 1.0 });
    let wrong = [
        ("stop_token_ids", SamplingParams { stop_token_ids: vec![3, beyond], ..greedy(2) }),
        ("logit_bias", SamplingParams { logit_bias: vec![(beyond, 1.0)], ..greedy(2) }),
        ("allowed_token_ids", SamplingParams { allowed_token_ids: Some(vec![beyond]), ..greedy(2) }),
        ("bad_words", SamplingParams { bad_words: vec![vec![4, beyond]], ..greedy(2) }),
        ("prompt_logprobs", SamplingParams { prompt_logprobs: Some(VOCAB_SIZE + 1), ..greedy(2) }),
        ("beam_width", SamplingParams { beam, ..greedy(2) }),
    ];
    let good = || Submission::new(vec![5], greedy(2));
    for (field, params) in wrong {
        let grammar: Option<Arc<dyn Grammar>> = if field == "beam_width" { Some(Arc::new(ByTurns)) } else { None };
        let bad = Submission { grammar, ..Submission::new(vec![5], params) };
        let error = handle.submit(vec![good(), bad], &inbox).unwrap_err().to_string();
        assert!(error.starts_with("prompt 1: ") && error.contains(field), "{field}: {error}");
    }
    assert_eq!(handle.stats().unwrap().prompt_tokens, 0, "nothing was queued");
    handle.submit(vec![good()], &inbox).unwrap();
    assert!(!inbox.recv(std::time::Duration::from_secs(10)).is_empty(), "the engine goes on");
}
