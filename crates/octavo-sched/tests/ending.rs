//! How requests end before they are done: taken back, stopped by their text, or out of time.
#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

use octavo_sched::{
    FinishReason, GroupConfig, PrefixCaching, Request, RequestId, SamplingParams, Scheduler, SchedulerConfig, SeqId,
    SeqSpan, StepOutput, StepPlan, StepRun, VictimOrder,
};

/// So many blocks of two tokens; plenty of everything else.
fn config(num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        block_size: 2,
        groups: vec![GroupConfig { num_blocks, window: None }],
        max_model_len: 100,
        max_num_seqs: 8,
        max_num_batched_tokens: 100,
        eos_token_ids: vec![],
        prefix_cache: PrefixCaching::Off,
        victims: VictimOrder::LeastLostWork,
    }
}

fn request(id: u64, n: u32, prompt: &[u32], max_tokens: usize) -> Request {
    let params = SamplingParams { n, max_tokens: Some(max_tokens), ..Default::default() };
    Request { id: RequestId(id), prompt: prompt.to_vec(), params, arrival: 0, deadline: None }
}

fn due(deadline: u64, request: Request) -> Request {
    Request { deadline: Some(deadline), ..request }
}

/// Samples the tokens 50, 51, ... by choice.
fn commit(scheduler: &mut Scheduler, plan: &StepPlan) -> Vec<StepOutput> {
    let choices = |span: &SeqSpan| (span.seq.choice..).take(span.samples);
    let runs: Vec<_> = plan.spans.iter().flat_map(choices).map(|choice| StepRun::Tokens(vec![50 + choice])).collect();
    let outputs = scheduler.commit(plan, &runs);
    assert_eq!(scheduler.audit(), Ok(()));
    outputs
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.schedule(0);
    assert_eq!(scheduler.audit(), Ok(()));
    commit(scheduler, &plan);
    plan
}

fn drain(scheduler: &mut Scheduler) {
    for _ in 0..1000 {
        if !scheduler.has_work() {
            let stats = scheduler.stats();
            assert_eq!(stats.blocks_free, stats.blocks_total);
            return;
        }
        step(scheduler);
    }
    panic!("not at the end after 1000 steps: {scheduler:?}");
}

/// A request for two continuations that waits, its blocks taken by an earlier one.
fn preempted_pair(prefix_cache: PrefixCaching) -> (Scheduler, SeqId) {
    let mut scheduler = Scheduler::new(SchedulerConfig { prefix_cache, max_num_batched_tokens: 3, ..config(12) });
    // After many outputs of one token, requests are admitted with room for one more block each.
    for id in 0..300 {
        scheduler.add(request(id, 1, &[9], 1)).unwrap();
        step(&mut scheduler);
    }
    scheduler.add(request(0, 1, &[1, 2, 3, 4, 5, 6, 7, 8], 12)).unwrap();
    let first = scheduler.add(request(1, 2, &[3, 4, 5, 6, 7], 8)).unwrap();
    while scheduler.stats().preemptions == 0 {
        step(&mut scheduler);
    }
    (scheduler, first)
}

#[test]
fn a_choice_that_ends_leaves_the_others_and_the_last_one_ends_the_request() {
    let mut scheduler = Scheduler::new(config(20));
    let first = scheduler.add(request(0, 3, &[1, 2, 3], 9)).unwrap();
    let stop = |scheduler: &mut Scheduler, choice| scheduler.end_choice(RequestId(0), choice, FinishReason::Stop);
    assert_eq!(stop(&mut scheduler, 0), None, "it has no text yet");
    step(&mut scheduler);
    assert_eq!(stop(&mut scheduler, 1), Some(false));
    assert_eq!(stop(&mut scheduler, 1), None, "it has ended");
    assert_eq!(stop(&mut scheduler, 3), None, "there never was one");
    let plan = step(&mut scheduler);
    assert_eq!(plan.spans.iter().map(|span| span.seq.choice).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(stop(&mut scheduler, 0), Some(false));
    assert_eq!(scheduler.sequence(SeqId { choice: 2, ..first }).unwrap().tokens(), [1, 2, 3, 52, 52]);
    assert_eq!(stop(&mut scheduler, 2), Some(true));
    assert_eq!(stop(&mut scheduler, 2), None, "its request has ended");
    let stats = scheduler.stats();
    assert_eq!((scheduler.has_work(), stats.finished.stop, stats.blocks_free), (false, 3, 20));
}

#[test]
fn a_choice_may_end_between_plan_and_commit() {
    let mut scheduler = Scheduler::new(config(20));
    scheduler.add(request(0, 2, &[1, 2, 3], 9)).unwrap();
    step(&mut scheduler);
    let plan = scheduler.schedule(0);
    assert_eq!(scheduler.end_choice(RequestId(0), 0, FinishReason::Stop), Some(false));
    assert_eq!(scheduler.audit(), Ok(()));
    let outputs = commit(&mut scheduler, &plan);
    assert_eq!(outputs.iter().map(|output| output.seq.choice).collect::<Vec<_>>(), [1]);
    let plan = scheduler.schedule(0);
    assert_eq!(scheduler.end_choice(RequestId(0), 1, FinishReason::Stop), Some(true));
    assert_eq!(commit(&mut scheduler, &plan), []);
    assert_eq!((scheduler.has_work(), scheduler.stats().blocks_free), (false, 20));
}

#[test]
fn when_the_first_of_a_preempted_request_ends_in_the_queue_the_next_computes_what_others_wait_for() {
    let (mut scheduler, first) = preempted_pair(PrefixCaching::Off);
    assert_eq!(scheduler.end_choice(RequestId(1), 0, FinishReason::Stop), Some(false));
    assert_eq!(scheduler.audit(), Ok(()));
    let second = SeqId { choice: 1, ..first };
    while scheduler.sequence(second).unwrap().computed() == 0 {
        step(&mut scheduler);
    }
    drain(&mut scheduler);
    assert_eq!(scheduler.stats().finished.length, 302);
}

#[test]
fn when_the_first_of_a_preempted_request_ends_the_next_goes_on_from_what_it_computed() {
    for between in [false, true] {
        let (mut scheduler, first) = preempted_pair(PrefixCaching::Off);
        let second = SeqId { choice: 1, ..first };
        // It needs two steps for the two blocks that both wait for.
        while scheduler.sequence(first).unwrap().computed() == 0 {
            step(&mut scheduler);
        }
        assert_eq!(scheduler.sequence(first).unwrap().computed(), 3);
        assert_eq!(scheduler.sequence(second).unwrap().computed(), 0);
        let plan = if between { scheduler.schedule(0) } else { StepPlan::default() };
        assert_eq!(scheduler.end_choice(RequestId(1), 0, FinishReason::Stop), Some(false));
        assert_eq!(scheduler.audit(), Ok(()));
        assert_eq!(scheduler.sequence(second).unwrap().computed(), 3, "between plan and commit: {between}");
        commit(&mut scheduler, &plan);
        drain(&mut scheduler);
    }
}

#[test]
fn a_choice_that_waits_for_the_first_may_end() {
    let (mut scheduler, first) = preempted_pair(PrefixCaching::On);
    assert_eq!(scheduler.end_choice(RequestId(1), 1, FinishReason::Stop), Some(false));
    assert_eq!(scheduler.audit(), Ok(()));
    assert!(scheduler.sequence(first).is_some());
    drain(&mut scheduler);
}

#[test]
fn deadlines_pass_in_their_order_whether_a_request_runs_or_waits() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_seqs: 1, ..config(20) });
    scheduler.add(due(30, request(0, 1, &[1], 9))).unwrap();
    scheduler.add(due(20, request(1, 1, &[1], 9))).unwrap();
    scheduler.add(request(2, 1, &[1], 9)).unwrap();
    scheduler.add(due(20, request(3, 1, &[1], 9))).unwrap();
    step(&mut scheduler);
    let expired = |scheduler: &Scheduler, now| scheduler.expired(now).into_iter().map(|id| id.0).collect::<Vec<_>>();
    assert_eq!(expired(&scheduler, 19), [0_u64; 0]);
    assert_eq!(expired(&scheduler, 20), [1, 3]);
    assert_eq!(expired(&scheduler, 99), [1, 3, 0]);
    for id in [1, 0] {
        assert_eq!(scheduler.end(RequestId(id), FinishReason::Deadline), [0]);
    }
    assert_eq!(expired(&scheduler, 99), [3]);
    assert_eq!(scheduler.stats().finished.deadline, 2);
    drain(&mut scheduler);
    assert_eq!(expired(&scheduler, 99), [0_u64; 0], "it has ended in time");
    scheduler.add(request(3, 1, &[1], 9)).unwrap();
    assert_eq!(expired(&scheduler, 99), [0_u64; 0], "another of the same id");
}

#[test]
fn a_request_that_its_last_choice_ends_has_no_deadline_any_more() {
    let mut scheduler = Scheduler::new(config(20));
    scheduler.add(due(5, request(0, 2, &[1], 9))).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.end_choice(RequestId(0), 0, FinishReason::Stop), Some(false));
    assert_eq!(scheduler.expired(5), [RequestId(0)]);
    assert_eq!(scheduler.end_choice(RequestId(0), 1, FinishReason::Stop), Some(true));
    assert_eq!(scheduler.expired(5), []);
}

#[test]
fn the_prompt_of_a_request_that_skips_the_cache_is_computed_anew_after_a_preemption() {
    for n in [1, 2] {
        let mut scheduler = Scheduler::new(SchedulerConfig { prefix_cache: PrefixCaching::On, ..config(12) });
        for id in 0..300 {
            scheduler.add(request(id, 1, &[9], 1)).unwrap();
            step(&mut scheduler);
        }
        scheduler.add(request(0, 1, &[1, 2, 3, 4, 5, 6, 7, 8], 14)).unwrap();
        let skipping = request(1, n, &[3, 4, 5, 6, 7], 8);
        let params = SamplingParams { skip_reading_prefix_cache: true, ..skipping.params.clone() };
        let first = scheduler.add(Request { params, ..skipping }).unwrap();
        while scheduler.stats().preemptions == 0 {
            step(&mut scheduler);
        }
        let mut starts = vec![];
        while scheduler.sequence(first).is_some_and(|sequence| sequence.computed() < 5) {
            let plan = step(&mut scheduler);
            assert!(plan.admitted.iter().all(|admitted| admitted.cached_tokens == 0));
            starts.extend(plan.spans.iter().filter(|span| span.seq == first).map(|span| span.start));
        }
        assert_eq!(starts[0], 0, "{n} continuations");
        // Each other continuation goes on from where the first has come.
        drain(&mut scheduler);
    }
}
