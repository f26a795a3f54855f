//! What the scheduler decides, on inputs small enough to follow by hand.

use octavo_sched::{
    FinishReason, GroupConfig, Limit, PrefixCaching, Rejected, Request, RequestId, SamplingParams, Scheduler,
    SchedulerConfig, SeqId, SeqSpan, StepOutput, StepPlan, StepRun, VACANT_BLOCK, VictimOrder,
};

const EOS: u32 = 99;

/// Four blocks of two tokens, four tokens a step, four sequences at once.
fn tiny() -> SchedulerConfig {
    SchedulerConfig {
        block_size: 2,
        groups: vec![GroupConfig { num_blocks: 4, window: None }],
        max_model_len: 100,
        max_num_seqs: 4,
        max_num_batched_tokens: 4,
        eos_token_ids: vec![EOS],
        prefix_cache: PrefixCaching::Off,
        victims: VictimOrder::LeastLostWork,
    }
}

fn request(id: u64, prompt_len: usize, max_tokens: usize) -> Request {
    let params = SamplingParams { max_tokens: Some(max_tokens), ..Default::default() };
    Request { id: RequestId(id), prompt: vec![1; prompt_len], params, arrival: 0, deadline: None }
}

fn span(seq: SeqId, start: usize, len: usize, samples: usize) -> SeqSpan {
    SeqSpan { seq, start, len, drafts: 0, samples }
}

/// Commits a plan as if `token` had been sampled for every span that samples.
fn commit(scheduler: &mut Scheduler, plan: &StepPlan, token: u32) -> Vec<StepOutput> {
    let runs: Vec<_> = plan.spans.iter().flat_map(|s| vec![StepRun::Tokens(vec![token]); s.samples]).collect();
    let outputs = scheduler.commit(plan, &runs);
    assert_eq!(scheduler.audit(), Ok(()));
    outputs
}

fn step(scheduler: &mut Scheduler) -> Vec<SeqSpan> {
    let plan = scheduler.schedule(0);
    commit(scheduler, &plan, 5);
    plan.spans
}

/// Steps until nothing is left; gives each output that ended a request.
fn run_to_the_end(scheduler: &mut Scheduler) -> Vec<StepOutput> {
    let mut ended = vec![];
    for _ in 0..1000 {
        let plan = scheduler.schedule(0);
        ended.extend(commit(scheduler, &plan, 5).into_iter().filter(|output| output.finish.is_some()));
        if !scheduler.has_work() {
            return ended;
        }
    }
    panic!("not at the end after 1000 steps: {scheduler:?}");
}

#[test]
fn without_requests_the_plan_is_empty() {
    let mut scheduler = Scheduler::new(tiny());
    assert!(!scheduler.has_work());
    assert_eq!(scheduler.schedule(0), StepPlan::default());
    assert_eq!(scheduler.stats().steps, 0);
}

#[test]
fn a_prompt_is_computed_at_once_and_then_one_token_a_step() {
    let mut scheduler = Scheduler::new(tiny());
    let seq = scheduler.add(request(0, 3, 2)).unwrap();
    assert_eq!(step(&mut scheduler), [span(seq, 0, 3, 1)]);
    assert_eq!(scheduler.sequence(seq).unwrap().tokens(), [1, 1, 1, 5]);
    assert_eq!(step(&mut scheduler), [span(seq, 3, 1, 1)]);
    assert!(!scheduler.has_work());
    assert!(scheduler.sequence(seq).is_none());
}

#[test]
fn a_long_prompt_goes_in_chunks_and_only_the_last_one_samples() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_batched_tokens: 2, ..tiny() });
    let seq = scheduler.add(request(0, 5, 1)).unwrap();
    assert_eq!(step(&mut scheduler), [span(seq, 0, 2, 0)]);
    assert_eq!(step(&mut scheduler), [span(seq, 2, 2, 0)]);
    assert_eq!(step(&mut scheduler), [span(seq, 4, 1, 1)]);
}

#[test]
fn running_sequences_take_from_the_budget_before_waiting_ones() {
    let mut scheduler = Scheduler::new(tiny());
    let first = scheduler.add(request(0, 2, 2)).unwrap();
    step(&mut scheduler);
    let second = scheduler.add(request(1, 4, 1)).unwrap();
    assert_eq!(step(&mut scheduler), [span(first, 2, 1, 1), span(second, 0, 3, 0)]);
    assert_eq!(step(&mut scheduler), [span(second, 3, 1, 1)]);
}

#[test]
fn a_budget_smaller_than_the_batch_serves_the_earliest_arrivals() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_batched_tokens: 2, ..tiny() });
    let [first, second, third] = [0, 1, 2].map(|id| scheduler.add(request(id, 1, 2)).unwrap());
    assert_eq!(step(&mut scheduler), [span(first, 0, 1, 1), span(second, 0, 1, 1)]);
    assert_eq!(step(&mut scheduler), [span(first, 1, 1, 1), span(second, 1, 1, 1)]);
    assert_eq!(step(&mut scheduler), [span(third, 0, 1, 1)]);
}

#[test]
fn no_more_than_max_num_seqs_run_at_once() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_seqs: 1, ..tiny() });
    let first = scheduler.add(request(0, 1, 1)).unwrap();
    let second = scheduler.add(request(1, 1, 1)).unwrap();
    assert_eq!(step(&mut scheduler), [span(first, 0, 1, 1)]);
    assert_eq!(step(&mut scheduler), [span(second, 0, 1, 1)]);
}

#[test]
fn room_is_kept_for_what_running_requests_are_expected_to_write() {
    let mut scheduler = Scheduler::new(tiny());
    // Four tokens are stored, since the fifth is the last: two blocks.
    scheduler.add(request(0, 1, 4)).unwrap();
    let plan = scheduler.schedule(0);
    let stats = scheduler.stats();
    assert_eq!((stats.blocks_free, stats.blocks_promised), (3, 1));
    commit(&mut scheduler, &plan, 5);
    step(&mut scheduler);
    step(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!((stats.blocks_free, stats.blocks_promised), (2, 0));
}

#[test]
fn a_request_that_does_not_fit_yet_holds_up_those_behind_it() {
    let mut scheduler = Scheduler::new(tiny());
    scheduler.add(request(0, 1, 2)).unwrap();
    let large = scheduler.add(request(1, 1, 8)).unwrap();
    let small = scheduler.add(request(2, 1, 1)).unwrap();
    assert_eq!(step(&mut scheduler).len(), 1);
    assert!(scheduler.stats().slots_external > 0, "free slots, and a request that cannot have them");
    assert_eq!(step(&mut scheduler).len(), 1);
    assert_eq!(step(&mut scheduler), [span(large, 0, 1, 1)], "the small one would fit, but not with the large one");
    assert!(scheduler.sequence(small).is_some());
    assert_eq!(run_to_the_end(&mut scheduler).len(), 2);
}

#[test]
fn a_prompt_beyond_the_pool_is_refused_and_the_next_request_is_served() {
    let pool = vec![GroupConfig { num_blocks: 8, window: None }];
    let config = SchedulerConfig { block_size: 16, groups: pool, max_model_len: 512, ..tiny() };
    let mut scheduler = Scheduler::new(config);
    let refused = Rejected::PromptTooLong { tokens: 200, limit: 128, because: Limit::Pool, n: 1, field: "n" };
    assert_eq!(scheduler.add(request(0, 200, 10)), Err(refused.clone()));
    assert_eq!(scheduler.check(200, &SamplingParams::default()), Err(refused));
    scheduler.add(request(1, 10, 10)).unwrap();
    assert_eq!(run_to_the_end(&mut scheduler)[0].finish, Some(FinishReason::Length));
}

#[test]
fn output_beyond_the_pool_ends_with_length_at_the_limit() {
    let pool = vec![GroupConfig { num_blocks: 8, window: None }];
    let mut scheduler = Scheduler::new(SchedulerConfig { block_size: 16, groups: pool, max_model_len: 512, ..tiny() });
    for max_tokens in [Some(100), None] {
        let params = SamplingParams { max_tokens, ..Default::default() };
        scheduler.add(Request { params, ..request(0, 100, 1) }).unwrap();
        let mut tokens = 0;
        while scheduler.has_work() {
            let plan = scheduler.schedule(0);
            tokens += commit(&mut scheduler, &plan, 5).len();
        }
        assert_eq!(tokens, 28, "{max_tokens:?}");
    }
    assert_eq!(scheduler.stats().finished.length, 2);
}

#[test]
fn the_end_of_sequence_ends_a_request_and_names_the_token() {
    let mut scheduler = Scheduler::new(tiny());
    let seq = scheduler.add(request(7, 1, 4)).unwrap();
    let plan = scheduler.schedule(0);
    let (finish, stop_token) = (Some(FinishReason::Stop), Some(EOS));
    let (request, tokens, last, hypothesis) = (RequestId(7), vec![EOS], true, None);
    let expected = StepOutput { request, seq, tokens, finish, stop_token, last, hypothesis };
    assert_eq!(commit(&mut scheduler, &plan, EOS), [expected]);
    assert_eq!((scheduler.has_work(), scheduler.stats().blocks_free), (false, 4));
}

#[test]
fn a_failed_run_ends_its_request_and_no_other() {
    let mut scheduler = Scheduler::new(tiny());
    let failed = scheduler.add(request(0, 1, 2)).unwrap();
    let other = scheduler.add(request(1, 1, 2)).unwrap();
    let plan = scheduler.schedule(0);
    let outputs = scheduler.commit(&plan, &[StepRun::Failed, StepRun::Tokens(vec![5])]);
    assert_eq!(outputs[0].finish, Some(FinishReason::Error));
    assert_eq!(outputs[0].tokens, [0_u32; 0]);
    assert_eq!((outputs[1].seq, outputs[1].finish), (other, None));
    assert!(scheduler.sequence(failed).is_none());
    assert_eq!(scheduler.audit(), Ok(()));
}

#[test]
fn an_abort_frees_blocks_and_promises_at_once() {
    let mut scheduler = Scheduler::new(tiny());
    scheduler.add(request(0, 3, 5)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.end(RequestId(0), FinishReason::Abort), [0]);
    let stats = scheduler.stats();
    assert_eq!((stats.blocks_free, stats.blocks_promised, stats.finished.abort), (4, 0, 1));
    assert_eq!(scheduler.end(RequestId(0), FinishReason::Abort), [0_u32; 0]);
}

#[test]
fn a_waiting_request_can_be_aborted() {
    let mut scheduler = Scheduler::new(tiny());
    let seqs = [0, 1, 2].map(|id| scheduler.add(request(id, 1, 1)).unwrap());
    assert_eq!(scheduler.end(RequestId(1), FinishReason::Abort), [0]);
    assert_eq!(scheduler.audit(), Ok(()));
    assert_eq!(step(&mut scheduler), [span(seqs[0], 0, 1, 1), span(seqs[2], 0, 1, 1)]);
}

#[test]
fn a_plan_is_committed_without_the_requests_aborted_since() {
    let mut scheduler = Scheduler::new(tiny());
    scheduler.add(request(0, 1, 2)).unwrap();
    let other = scheduler.add(request(1, 1, 2)).unwrap();
    let plan = scheduler.schedule(0);
    scheduler.end(RequestId(0), FinishReason::Abort);
    scheduler.add(request(0, 1, 2)).unwrap();
    let outputs = scheduler.commit(&plan, &[StepRun::Tokens(vec![4]), StepRun::Tokens(vec![5])]);
    assert_eq!(outputs.len(), 1);
    assert_eq!((outputs[0].seq, &outputs[0].tokens[..]), (other, &[5][..]));
    assert_eq!(scheduler.audit(), Ok(()));
}

#[test]
fn an_id_can_be_used_again_only_after_its_request_has_ended() {
    let mut scheduler = Scheduler::new(tiny());
    let first = scheduler.add(request(0, 1, 1)).unwrap();
    assert_eq!(scheduler.add(request(0, 1, 1)), Err(Rejected::DuplicateId(RequestId(0))));
    step(&mut scheduler);
    assert_ne!(scheduler.add(request(0, 1, 1)).unwrap(), first);
}

#[test]
fn what_is_refused_changes_nothing() {
    let mut scheduler = Scheduler::new(tiny());
    assert_eq!(scheduler.add(request(0, 0, 1)), Err(Rejected::EmptyPrompt));
    assert!(matches!(scheduler.add(request(0, 1, 0)), Err(Rejected::Param(_))));
    assert!(!scheduler.has_work());
    assert_eq!(scheduler.audit(), Ok(()));
}

/// As [`tiny`], with a group of all blocks and one whose window of 3 is all that its pool is made for.
fn windowed() -> SchedulerConfig {
    let global = GroupConfig { num_blocks: 20, window: None };
    let local = GroupConfig { num_blocks: 4, window: Some(3) };
    SchedulerConfig { groups: vec![global, local], ..tiny() }
}

#[test]
fn blocks_before_the_window_go_home_while_the_sequence_runs() {
    let mut scheduler = Scheduler::new(windowed());
    let seq = scheduler.add(request(0, 5, 3)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    // Position 5 is next and sees 3, 4 and itself, so that positions 0 and 1 are out of sight.
    let sequence = scheduler.sequence(seq).unwrap();
    assert_eq!(sequence.tables()[0].blocks(), [0, 1, 2]);
    assert_eq!(sequence.tables()[1].blocks(), [VACANT_BLOCK, 1, 0], "the first went home and came back");
    let stats = scheduler.stats();
    assert_eq!((stats.slots_allocated, stats.slots_used, stats.slots_wasted()), (10, 8, 2));
}

#[test]
fn a_sequence_outgrows_the_pool_of_a_windowed_group() {
    let mut scheduler = Scheduler::new(windowed());
    scheduler.add(request(0, 5, 30)).unwrap();
    run_to_the_end(&mut scheduler);
    assert_eq!(scheduler.stats().finished.length, 1);
    assert_eq!(scheduler.stats().blocks_free, 24);
}

#[test]
fn a_windowed_promise_shrinks_once_the_prompt_is_computed() {
    let mut scheduler = Scheduler::new(windowed());
    scheduler.add(request(0, 4, 10)).unwrap();
    scheduler.add(request(1, 1, 10)).unwrap();
    // Window and chunk of the first prompt could need all 4 blocks of the windowed group, window and one token only 2.
    assert_eq!(step(&mut scheduler).len(), 1);
    assert_eq!(step(&mut scheduler).len(), 2);
}

#[test]
fn waste_is_what_is_allocated_and_not_used() {
    let mut scheduler = Scheduler::new(tiny());
    scheduler.add(request(0, 3, 2)).unwrap();
    step(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!((stats.slots_allocated, stats.slots_used, stats.slots_wasted()), (4, 3, 1));
}

#[test]
fn time_in_the_queue_is_counted_until_admission() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_seqs: 1, ..tiny() });
    scheduler.add(Request { arrival: 100, ..request(0, 1, 1) }).unwrap();
    scheduler.add(Request { arrival: 100, ..request(1, 1, 1) }).unwrap();
    for now in [130, 150] {
        let plan = scheduler.schedule(now);
        commit(&mut scheduler, &plan, 5);
    }
    let stats = scheduler.stats();
    assert_eq!((stats.admitted, stats.queue_time, stats.steps, stats.tokens_scheduled), (2, 80, 2, 2));
}

#[test]
#[should_panic(expected = "the plan before has not been committed")]
fn planning_twice_panics() {
    let mut scheduler = Scheduler::new(tiny());
    scheduler.add(request(0, 3, 2)).unwrap();
    scheduler.schedule(0);
    scheduler.schedule(0);
}

#[test]
#[should_panic(expected = "was committed before")]
fn committing_a_plan_twice_panics() {
    let mut scheduler = Scheduler::new(tiny());
    scheduler.add(request(0, 1, 4)).unwrap();
    let plan = scheduler.schedule(0);
    commit(&mut scheduler, &plan, 5);
    commit(&mut scheduler, &plan, 5);
}

#[test]
#[should_panic(expected = "a run is expected for each sample of the plan")]
fn committing_without_a_run_for_a_sampled_span_panics() {
    let mut scheduler = Scheduler::new(tiny());
    scheduler.add(request(0, 1, 1)).unwrap();
    let plan = scheduler.schedule(0);
    scheduler.commit(&plan, &[]);
}

#[test]
#[should_panic(expected = "block_size is 0, expected at least 1")]
fn a_scheduler_is_not_made_from_an_invalid_config() {
    Scheduler::new(SchedulerConfig { block_size: 0, ..tiny() });
}
