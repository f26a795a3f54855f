//! The engine on its thread: the door, the inboxes, and how it ends.

use std::time::{Duration, Instant};

use crate::common::{run_alone, tiny_config, tiny_engine, tiny_model, tiny_requests};
use octavo_backend::{
    Backend, BackendError, DecoderSpec, Footprint, Numerics, Reference, StepInputs, StepLimits, StepResult,
    WeightSource,
};
use octavo_engine::{
    EngineConfig, EngineHandle, Event, FinishReason, Inbox, Output, PrefixCaching, RequestId, SamplingParams,
    Submission, SubmitError,
};

fn handle() -> EngineHandle {
    EngineHandle::start(tiny_engine(Reference::exact(), tiny_config(64))).unwrap()
}

fn submission(prompt: &[u32], max_tokens: usize) -> Submission {
    let params = SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::default() };
    Submission { seed: Some(1), ..Submission::new(prompt.to_vec(), params) }
}

/// More than an engine does before the thread that submitted it has done its next thing.
fn much_work() -> Vec<Submission> {
    vec![submission(&[3, 4], 150); 200]
}

/// Outputs until `count` requests have finished or the engine has died.
fn collect(inbox: &Inbox, count: usize) -> Vec<Output> {
    let (mut outputs, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while outputs.iter().filter(|output: &&Output| output.finish.is_some()).count() < count {
        assert!(Instant::now() < deadline, "the engine answers within a minute");
        for event in inbox.recv(Duration::from_millis(100)) {
            match event {
                Event::Outputs(more) => outputs.extend(more),
                Event::Died(reason) => panic!("the engine died: {reason}"),
            }
        }
    }
    outputs
}

#[test]
fn answers_through_an_inbox_equal_those_of_a_stepped_engine() {
    let requests = tiny_requests();
    let expected = run_alone(&mut tiny_engine(Reference::exact(), tiny_config(64)), &requests);
    let (handle, inbox) = (handle(), Inbox::new());
    let submissions = requests
        .iter()
        .map(|r| Submission { seed: Some(r.params.seed), ..Submission::new(r.prompt.clone(), r.params.clone()) })
        .collect();
    let accepted = handle.submit(submissions, &inbox).unwrap();
    let outputs = collect(&inbox, requests.len());
    for (accepted, expected) in accepted.iter().zip(expected) {
        let mut own = outputs.iter().filter(|output| output.request == accepted.id);
        let tokens: Vec<u32> = own.clone().flat_map(|output| output.tokens.clone()).collect();
        assert_eq!(tokens, expected.tokens);
        let story = own.next_back().unwrap().story;
        assert!(Some(story.arrival) <= story.scheduled && story.scheduled <= story.first_token);
        assert!(story.first_token <= story.last_token);
    }
}

#[test]
fn one_bad_submission_refuses_the_list_and_queues_nothing() {
    let (handle, inbox) = (handle(), Inbox::new());
    let good = submission(&[3, 4], 2);
    for bad in [submission(&[], 2), submission(&[5; 160], 2), submission(&[3, 120], 2)] {
        assert!(handle.submit(vec![good.clone(), bad], &inbox).is_err());
    }
    let nan = SamplingParams { temperature: f32::NAN, ..SamplingParams::default() };
    let refused = handle.submit(vec![Submission { params: nan, ..good.clone() }], &inbox).unwrap_err();
    assert_eq!(refused.to_string(), "prompt 0: temperature is NaN, expected a finite number, at least 0");
    let many = SamplingParams { logprobs: Some(121), ..SamplingParams::default() };
    let refused = handle.submit(vec![Submission { params: many, ..good.clone() }], &inbox).unwrap_err();
    assert_eq!(refused.to_string(), "prompt 0: logprobs is 121, expected at most 120, the size of the vocabulary");
    let out_of_range = handle.submit(vec![submission(&[3, 120], 2)], &inbox).unwrap_err();
    assert_eq!(out_of_range.to_string(), "prompt 0: token id 120 at position 1, expected 0 to 119");
    let stats = handle.stats().unwrap();
    assert_eq!((stats.prompt_tokens, stats.scheduler.running, stats.scheduler.waiting), (0, 0, 0));
    handle.submit(vec![good], &inbox).unwrap();
    assert_eq!(collect(&inbox, 1).len(), 2);
}

#[test]
fn an_aborted_request_answers_once_more_and_its_blocks_come_home() {
    let (handle, inbox) = (handle(), Inbox::new());
    let short = handle.submit(vec![submission(&[5], 3)], &inbox).unwrap()[0].id;
    let long: Vec<RequestId> = handle.submit(much_work(), &inbox).unwrap().iter().map(|accepted| accepted.id).collect();
    handle.abort(&[&long[..], &[RequestId(999)]].concat());
    let outputs = collect(&inbox, 1 + long.len());
    let finish =
        |id| outputs.iter().filter(|o| o.request == id).filter_map(|o| o.finish).map(|f| f.reason).collect::<Vec<_>>();
    assert_eq!(finish(short), [FinishReason::Length]);
    assert!(long.iter().all(|&id| finish(id).len() == 1));
    assert_eq!(finish(long[199]), [FinishReason::Abort]);
    let stats = handle.stats().unwrap().scheduler;
    assert_eq!((stats.running, stats.blocks_free), (0, stats.blocks_total));
}

#[test]
fn a_caller_that_drops_its_inbox_leaves_nothing_running() {
    let (handle, inbox) = (handle(), Inbox::new());
    handle.submit(much_work(), &inbox).unwrap();
    drop(inbox);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let stats = handle.stats().unwrap().scheduler;
        if stats.running + stats.waiting == 0 {
            assert_eq!(stats.blocks_free, stats.blocks_total);
            assert!(stats.finished.length < 200, "the requests did not run to their end");
            return;
        }
        assert!(Instant::now() < deadline, "still running");
    }
}

#[test]
fn seeds_that_nobody_gave_differ_and_repeat_with_the_engine() {
    let seeds = || -> Vec<u64> {
        let (handle, inbox) = (handle(), Inbox::new());
        let unseeded = Submission { seed: None, ..submission(&[3], 1) };
        let accepted = handle.submit(vec![unseeded; 3], &inbox).unwrap();
        accepted.into_iter().map(|accepted| accepted.seed).collect()
    };
    let first = seeds();
    assert!(first[0] != first[1] && first[1] != first[2] && first[0] != first[2]);
    assert_eq!(first, seeds());
}

#[test]
fn a_closed_engine_tells_who_waits_and_refuses_who_comes() {
    let (handle, inbox) = (handle(), Inbox::new());
    handle.submit(much_work(), &inbox).unwrap();
    handle.close();
    handle.close();
    assert_eq!(deaths(&events_until_death(&inbox)), ["it was closed"]);
    let refused = handle.submit(vec![submission(&[3], 1)], &inbox).unwrap_err();
    assert_eq!(refused.to_string(), "the engine has ended: it was closed");
    assert!(handle.stats().is_err());
}

/// Events until the word that the engine has died.
fn events_until_death(inbox: &Inbox) -> Vec<Event> {
    let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while !matches!(events.last(), Some(Event::Died(_))) {
        assert!(Instant::now() < deadline, "no word of the end");
        events.extend(inbox.recv(Duration::from_millis(100)));
    }
    events
}

fn deaths(events: &[Event]) -> Vec<&str> {
    events
        .iter()
        .filter_map(|event| if let Event::Died(reason) = event { Some(reason.as_str()) } else { None })
        .collect()
}

#[test]
fn a_panic_that_is_injected_reaches_each_inbox_once_however_many_requests_it_has() {
    let handle = EngineHandle::start(tiny_engine(Faulty(Reference::exact()), tiny_config(64))).unwrap();
    let inboxes: Vec<Inbox> = (0..8).map(|_| Inbox::new()).collect();
    for inbox in &inboxes {
        handle.submit(vec![submission(&[3, 4], 150); 3], inbox).unwrap();
    }
    handle.inject_panic("a kernel met a NaN");
    let began = Instant::now();
    for inbox in &inboxes {
        let mut events = events_until_death(inbox);
        events.extend(inbox.recv(Duration::ZERO));
        assert_eq!(deaths(&events), ["a panic: a kernel met a NaN"]);
    }
    assert!(began.elapsed() < Duration::from_secs(1));
    handle.inject_panic("again");
    let dead = "the engine has ended: a panic: a kernel met a NaN";
    assert_eq!(handle.submit(vec![submission(&[3], 1)], &Inbox::new()).unwrap_err().to_string(), dead);
    assert_eq!(handle.stats().unwrap_err().to_string(), dead);
    assert_eq!(handle.block_map().unwrap_err().to_string(), dead);
    assert_eq!(handle.reset_prefix_cache().unwrap_err().to_string(), dead);
}

#[test]
fn the_block_map_shows_what_a_reset_makes_the_engine_forget() {
    let config = EngineConfig { prefix_cache: PrefixCaching::On, ..tiny_config(64) };
    let handle = EngineHandle::start(tiny_engine(Reference::exact(), config)).unwrap();
    let inbox = Inbox::new();
    let cached = |handle: &EngineHandle| handle.block_map().unwrap()[0].iter().filter(|block| block.cached).count();
    assert_eq!(handle.block_map().unwrap().iter().map(Vec::len).collect::<Vec<_>>(), [120, 120]);
    // Two full blocks of 16 and a part of a third.
    let prompt: Vec<u32> = (3..43).collect();
    handle.submit(vec![submission(&prompt, 3)], &inbox).unwrap();
    collect(&inbox, 1);
    assert!(handle.block_map().unwrap().iter().flatten().all(|block| block.owners == 0));
    assert!(cached(&handle) >= 2);
    assert!(handle.reset_prefix_cache().unwrap() >= 2);
    assert_eq!((cached(&handle), handle.reset_prefix_cache().unwrap()), (0, 0));
}

/// Reference, but each step takes a while and the token 77 makes it panic: a kernel with a fault.
struct Faulty(Reference);

impl Backend for Faulty {
    type Plan = <Reference as Backend>::Plan;

    fn load(
        &self,
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        limits: &StepLimits,
    ) -> Result<Self::Plan, BackendError> {
        self.0.load(spec, weights, limits)
    }

    fn run(&mut self, plan: &mut Self::Plan, inputs: &StepInputs) -> Result<StepResult, BackendError> {
        assert!(!inputs.tokens.contains(&77), "token 77 is a fault");
        std::thread::sleep(Duration::from_millis(10));
        self.0.run(plan, inputs)
    }

    fn numerics(&self) -> Numerics {
        self.0.numerics()
    }

    fn footprint(&self, spec: &DecoderSpec, limits: &StepLimits) -> Footprint {
        self.0.footprint(spec, limits)
    }
}

#[test]
fn a_panic_in_a_kernel_reaches_every_caller_as_an_error() {
    let handle = EngineHandle::start(tiny_engine(Faulty(Reference::exact()), tiny_config(64))).unwrap();
    let (waiting, fatal) = (Inbox::new(), Inbox::new());
    handle.submit(vec![submission(&[3, 4], 150); 31], &waiting).unwrap();
    handle.submit(vec![submission(&[77], 1)], &fatal).unwrap();
    for inbox in [waiting, fatal] {
        assert_eq!(deaths(&events_until_death(&inbox)), ["a panic: token 77 is a fault"]);
    }
    assert!(matches!(handle.submit(vec![submission(&[3], 1)], &Inbox::new()), Err(SubmitError::Dead(_))));
}

#[test]
fn a_configuration_that_cannot_serve_is_refused_at_load() {
    let model = tiny_model();
    let config = EngineConfig { max_num_seqs: 0, ..tiny_config(64) };
    let error = octavo_engine::Engine::load(Reference::exact(), &model.spec, &mut model.clone(), config).err().unwrap();
    assert!(error.to_string().contains("max_num_seqs"), "{error}");
}
