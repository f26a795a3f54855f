//! How blocks are shared, between requests and within one, and how they are taken away, on inputs small enough to follow by
//! hand.
#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

use octavo_sched::{
    Admitted, BlockCopy, FinishReason, GroupConfig, PrefixCaching, Request, RequestId, SamplingParams, Scheduler,
    SchedulerConfig, SeqId, SeqSpan, StepOutput, StepPlan, StepRun, VACANT_BLOCK, VictimOrder,
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
        prefix_cache: PrefixCaching::On,
        victims: VictimOrder::LeastLostWork,
    }
}

fn request(id: u64, prompt: &[u32], max_tokens: usize) -> Request {
    let params = SamplingParams { max_tokens: Some(max_tokens), ..Default::default() };
    Request { id: RequestId(id), prompt: prompt.to_vec(), params, arrival: 0, deadline: None }
}

fn for_n(n: u32, request: Request) -> Request {
    Request { params: SamplingParams { n, ..request.params.clone() }, ..request }
}

/// Samples for each span the tokens 50, 51, ... by choice.
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

/// Runs a request to its end and gives what its admission found.
fn run(scheduler: &mut Scheduler, request: Request) -> Admitted {
    scheduler.add(request).unwrap();
    let admitted = step(scheduler).admitted[0];
    drain(scheduler);
    admitted
}

fn drain(scheduler: &mut Scheduler) {
    for _ in 0..1000 {
        if !scheduler.has_work() {
            return;
        }
        step(scheduler);
    }
    panic!("not at the end after 1000 steps: {scheduler:?}");
}

/// After many outputs of one token, requests are admitted with room for one more block each.
fn expect_short_outputs(scheduler: &mut Scheduler) {
    for id in 0..300 {
        run(scheduler, request(id, &[9], 1));
    }
}

fn blocks(scheduler: &Scheduler, seq: SeqId) -> Vec<u32> {
    scheduler.sequence(seq).unwrap().tables()[0].blocks().to_vec()
}

#[test]
fn a_hit_never_covers_the_last_token() {
    let mut scheduler = Scheduler::new(config(10));
    for (len, cached) in [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4)] {
        let prompt = &[1, 2, 3, 4, 5][..len];
        for _ in 0..2 {
            run(&mut scheduler, request(0, prompt, 1));
        }
        assert_eq!(run(&mut scheduler, request(0, prompt, 1)).cached_tokens, cached, "{len} tokens");
    }
}

#[test]
fn a_block_is_found_only_once_it_has_been_computed() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_batched_tokens: 5, ..config(20) });
    let prompt = [1, 2, 3, 4, 5];
    for id in 0..3 {
        scheduler.add(request(id, &prompt[..4], 1)).unwrap();
    }
    let plan = scheduler.schedule(0);
    // The second begins in the step in which the first computes the same tokens.
    assert_eq!(plan.admitted.iter().map(|admitted| admitted.cached_tokens).collect::<Vec<_>>(), [0, 0]);
    assert_eq!(scheduler.stats().blocks_cached, 0);
    commit(&mut scheduler, &plan);
    assert_eq!(step(&mut scheduler).admitted[0].cached_tokens, 2);
}

#[test]
fn generated_tokens_are_found_like_those_of_a_prompt() {
    let mut scheduler = Scheduler::new(config(10));
    run(&mut scheduler, request(0, &[1, 2, 3], 4));
    // The prompt, three tokens that were generated and computed, and the one that was not.
    let next_turn = [1, 2, 3, 50, 50, 50, 50, 8];
    assert_eq!(run(&mut scheduler, request(1, &next_turn, 1)).cached_tokens, 6);
}

#[test]
fn the_first_token_that_differs_is_told() {
    let mut scheduler = Scheduler::new(config(20));
    let first_difference = |scheduler: &mut Scheduler, prompt: &[u32]| {
        let Admitted { cached_tokens, first_difference, .. } = run(scheduler, request(1, prompt, 1));
        (cached_tokens, first_difference)
    };
    assert_eq!(first_difference(&mut scheduler, &[1, 2, 3, 4]), (0, None), "there is nothing to differ from");
    assert_eq!(first_difference(&mut scheduler, &[1, 2, 3, 9, 5]), (2, Some(3)));
    assert_eq!(first_difference(&mut scheduler, &[7, 2, 3, 4]), (0, Some(0)));
    assert_eq!(first_difference(&mut scheduler, &[1, 2, 3, 4]), (2, None), "it is there, but for the last token");
}

#[test]
fn salts_share_nothing_and_reading_can_be_skipped() {
    let mut scheduler = Scheduler::new(config(20));
    let prompt = [1, 2, 3, 4, 5];
    let salted = |salt: &[u8]| {
        let params = SamplingParams { cache_salt: salt.to_vec(), ..request(0, &prompt, 1).params };
        Request { params, ..request(0, &prompt, 1) }
    };
    assert_eq!(run(&mut scheduler, salted(b"")).cached_tokens, 0);
    assert_eq!(run(&mut scheduler, salted(b"a")).cached_tokens, 0);
    assert_eq!(run(&mut scheduler, salted(b"b")).cached_tokens, 0);
    assert_eq!(run(&mut scheduler, salted(b"a")).cached_tokens, 4);
    let params = SamplingParams { skip_reading_prefix_cache: true, ..request(0, &prompt, 1).params };
    let skipping = Request { params, ..request(0, &prompt, 1) };
    assert_eq!(
        run(&mut scheduler, skipping),
        Admitted { request: RequestId(0), cached_tokens: 0, first_difference: None }
    );
}

#[test]
fn what_was_computed_before_a_reset_is_not_found_after_it() {
    let mut scheduler = Scheduler::new(config(20));
    run(&mut scheduler, request(0, &[1, 2, 3], 1));
    let seq = scheduler.add(request(1, &[5, 6, 7, 8], 20)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.reset_prefix_cache(), 3);
    assert_eq!(scheduler.stats().blocks_cached, 0);
    step(&mut scheduler);
    step(&mut scheduler);
    assert_eq!(scheduler.sequence(seq).unwrap().computed(), 6, "it goes on, with its blocks");
    assert_eq!(scheduler.stats().blocks_cached, 0, "and its next block stands on one from before");
    scheduler.add(request(2, &[5, 6, 7, 8], 1)).unwrap();
    assert_eq!(step(&mut scheduler).admitted[0].cached_tokens, 0);
    assert_eq!(scheduler.stats().blocks_cached, 2, "what is computed since can be found");
}

#[test]
fn the_end_of_a_sequence_is_given_away_before_its_beginning() {
    let mut scheduler = Scheduler::new(config(4));
    run(&mut scheduler, request(0, &[1, 2, 3, 4, 5, 6], 1));
    // Takes the empty block and one more.
    run(&mut scheduler, request(1, &[9, 9, 9, 9], 1));
    assert_eq!(run(&mut scheduler, request(2, &[1, 2, 3, 4, 5, 6, 7], 1)).cached_tokens, 4);
}

#[test]
fn two_that_run_at_once_share_the_blocks_of_their_beginning() {
    let mut scheduler = Scheduler::new(config(20));
    let first = scheduler.add(request(0, &[1, 2, 3, 4, 5], 9)).unwrap();
    step(&mut scheduler);
    let second = scheduler.add(request(1, &[1, 2, 3, 4, 8], 9)).unwrap();
    step(&mut scheduler);
    assert_eq!(blocks(&scheduler, first)[..2], blocks(&scheduler, second)[..2]);
    let stats = scheduler.stats();
    assert_eq!((stats.blocks_shared, stats.blocks_saved, stats.blocks_copied), (2, 2, 0));
    // Six tokens of the first, one of the second that it does not share.
    assert_eq!((stats.slots_allocated, stats.slots_used), (8, 7));
}

#[test]
fn equal_prompts_that_were_computed_at_the_same_time_share_afterwards() {
    let mut scheduler = Scheduler::new(config(20));
    let prompt = [1, 2, 3, 4, 5];
    let [first, second] = [0, 1].map(|id| scheduler.add(request(id, &prompt, 9)).unwrap());
    let plan = scheduler.schedule(0);
    assert_ne!(blocks(&scheduler, first)[..2], blocks(&scheduler, second)[..2]);
    commit(&mut scheduler, &plan);
    assert_eq!(blocks(&scheduler, first)[..2], blocks(&scheduler, second)[..2]);
    let stats = scheduler.stats();
    assert_eq!((stats.blocks_free, stats.blocks_saved, stats.slots_used), (16, 2, 6));
    drain(&mut scheduler);
    assert_eq!(scheduler.stats().blocks_free, 20);
}

#[test]
fn continuations_part_after_the_prompt_and_copy_at_most_one_block() {
    let mut scheduler = Scheduler::new(config(20));
    let first = scheduler.add(for_n(3, request(0, &[1, 2, 3], 3))).unwrap();
    let plan = step(&mut scheduler);
    assert_eq!(plan.spans, [SeqSpan { seq: first, start: 0, len: 3, drafts: 0, samples: 3 }]);
    let choices = [0, 1, 2].map(|choice| SeqId { choice, ..first });
    let shared = choices.map(|seq| blocks(&scheduler, seq));
    assert_eq!(shared, [[0, 1], [0, 1], [0, 1]]);
    assert_eq!(choices.map(|seq| scheduler.sequence(seq).unwrap().tokens()[3]), [50, 51, 52]);
    // Whoever writes while others read takes a copy; the last has the block to itself.
    let plan = scheduler.schedule(0);
    assert_eq!(plan.copies, [BlockCopy { group: 0, from: 1, to: 2 }, BlockCopy { group: 0, from: 1, to: 3 }]);
    commit(&mut scheduler, &plan);
    assert_eq!(choices.map(|seq| blocks(&scheduler, seq)), [[0, 2], [0, 3], [0, 1]]);
    assert_eq!(step(&mut scheduler).copies, []);
    assert!(!scheduler.has_work());
}

#[test]
fn a_prompt_of_whole_blocks_needs_no_copy() {
    let mut scheduler = Scheduler::new(config(20));
    scheduler.add(for_n(4, request(0, &[1, 2, 3, 4], 3))).unwrap();
    drain(&mut scheduler);
    assert_eq!(scheduler.stats().blocks_copied, 0);
}

#[test]
fn each_continuation_has_an_end_and_the_request_has_one_last_output() {
    let mut scheduler = Scheduler::new(SchedulerConfig { eos_token_ids: vec![51], ..config(20) });
    scheduler.add(for_n(3, request(0, &[1], 2))).unwrap();
    let plan = scheduler.schedule(0);
    let ends = |outputs: Vec<StepOutput>| -> Vec<_> {
        outputs.into_iter().map(|output| (output.seq.choice, output.finish, output.last)).collect()
    };
    let outputs = commit(&mut scheduler, &plan);
    assert_eq!(ends(outputs), [(0, None, false), (1, Some(FinishReason::Stop), false), (2, None, false)]);
    let plan = scheduler.schedule(0);
    let length = Some(FinishReason::Length);
    assert_eq!(ends(commit(&mut scheduler, &plan)), [(0, length, false), (2, length, true)]);
    assert_eq!(scheduler.stats().finished.total(), 3);
}

#[test]
fn an_abort_before_they_part_ends_every_continuation() {
    let mut scheduler = Scheduler::new(config(20));
    scheduler.add(for_n(3, request(0, &[1], 2))).unwrap();
    assert_eq!(scheduler.end(RequestId(0), FinishReason::Abort), [0, 1, 2]);
    scheduler.add(for_n(3, request(0, &[1], 4))).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.end(RequestId(0), FinishReason::Abort), [0, 1, 2]);
    assert_eq!((scheduler.stats().finished.abort, scheduler.stats().blocks_free), (6, 20));
}

#[test]
fn seats_are_kept_for_continuations_that_are_to_come() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_seqs: 4, max_num_batched_tokens: 2, ..config(20) });
    scheduler.add(for_n(3, request(0, &[1, 2, 3], 3))).unwrap();
    step(&mut scheduler);
    let [first, second] = [1, 2].map(|id| scheduler.add(request(id, &[7], 1)).unwrap());
    let plan = step(&mut scheduler);
    assert_eq!(plan.spans.iter().map(|span| span.seq).collect::<Vec<_>>()[1..], [first]);
    assert!(scheduler.sequence(second).is_some());
}

#[test]
fn a_fork_shares_everything_until_either_writes() {
    let mut scheduler = Scheduler::new(config(20));
    let parent = scheduler.add(request(0, &[1, 2], 9)).unwrap();
    assert_eq!(scheduler.fork(parent), None, "it has not generated anything");
    step(&mut scheduler);
    step(&mut scheduler);
    let child = scheduler.fork(parent).unwrap();
    assert_eq!(child, SeqId { choice: 1, ..parent });
    assert_eq!(blocks(&scheduler, child), blocks(&scheduler, parent));
    let plan = step(&mut scheduler);
    assert_eq!((plan.copies.len(), plan.spans.len()), (1, 2));
    assert_eq!(scheduler.sequence(child).unwrap().tokens(), [1, 2, 50, 50, 51]);
    drain(&mut scheduler);
    assert_eq!(scheduler.stats().finished.length, 2);
}

#[test]
fn the_request_with_the_least_lost_work_gives_way_and_never_the_first() {
    let mut scheduler = Scheduler::new(config(8));
    expect_short_outputs(&mut scheduler);
    // 1 + 3 + 1 blocks, and one more expected of each.
    let first = scheduler.add(request(0, &[1, 2], 8)).unwrap();
    let long = scheduler.add(request(1, &[3, 4, 5, 6, 7, 8], 6)).unwrap();
    let short = scheduler.add(request(2, &[11, 12], 8)).unwrap();
    step(&mut scheduler);
    step(&mut scheduler);
    step(&mut scheduler);
    let plan = step(&mut scheduler);
    assert_eq!(plan.preempted, [short], "the first has as little to lose, and the other more");
    assert_eq!(plan.spans.iter().map(|span| span.seq).collect::<Vec<_>>(), [first, long]);
    drain(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!((stats.finished.length, stats.admitted), (303, 303), "each is admitted once, as far as counts go");
}

#[test]
fn a_preempted_request_finds_its_own_blocks_and_emits_nothing_twice() {
    let mut scheduler = Scheduler::new(config(8));
    expect_short_outputs(&mut scheduler);
    scheduler.add(request(0, &[1, 2], 12)).unwrap();
    let victim = scheduler.add(request(1, &[3, 4, 5, 6], 6)).unwrap();
    let (mut emitted, mut readmitted) = (0, None);
    while scheduler.has_work() {
        let plan = scheduler.schedule(0);
        let again = plan.admitted.iter().find(|admitted| admitted.request == RequestId(1));
        if scheduler.stats().preemptions > 0 && again.is_some() {
            readmitted = again.copied();
        }
        emitted += commit(&mut scheduler, &plan).iter().filter(|output| output.seq == victim).count();
    }
    assert_eq!(scheduler.stats().preemptions, 1);
    assert!(readmitted.is_some_and(|admitted| admitted.cached_tokens >= 2), "{readmitted:?}");
    assert_eq!(emitted, 6);
}

#[test]
fn a_preempted_family_computes_its_prompt_once() {
    let mut scheduler = Scheduler::new(SchedulerConfig { prefix_cache: PrefixCaching::Off, ..config(12) });
    expect_short_outputs(&mut scheduler);
    scheduler.add(request(0, &[1, 2, 3, 4, 5, 6, 7, 8], 12)).unwrap();
    let first = scheduler.add(for_n(2, request(1, &[3, 4, 5], 8))).unwrap();
    let second = SeqId { choice: 1, ..first };
    while scheduler.stats().preemptions == 0 {
        step(&mut scheduler);
    }
    let len = scheduler.sequence(first).unwrap().tokens().len();
    while scheduler.sequence(first).unwrap().computed() == 0 {
        step(&mut scheduler);
    }
    // The first goes as far as they share a block, then both go on.
    assert_eq!(scheduler.sequence(first).unwrap().computed(), 2);
    let plan = step(&mut scheduler);
    let span = |seq| SeqSpan { seq, start: 2, len: len - 2, drafts: 0, samples: 1 };
    assert!(plan.spans.contains(&span(first)) && plan.spans.contains(&span(second)), "{:?}", plan.spans);
    assert_eq!(blocks(&scheduler, first)[0], blocks(&scheduler, second)[0]);
    drain(&mut scheduler);
}

#[test]
fn a_preempted_family_whose_prompt_fills_no_block_finds_what_it_generated() {
    let mut scheduler = Scheduler::new(config(12));
    expect_short_outputs(&mut scheduler);
    scheduler.add(request(0, &[1, 2, 3, 4, 5, 6, 7, 8], 14)).unwrap();
    let first = scheduler.add(for_n(2, request(1, &[3], 10))).unwrap();
    while scheduler.stats().preemptions == 0 {
        step(&mut scheduler);
    }
    while scheduler.sequence(first).unwrap().computed() == 0 {
        let plan = step(&mut scheduler);
        let starts: Vec<_> = plan.spans.iter().filter(|span| span.seq.arrival == first.arrival).collect();
        assert!(starts.iter().all(|span| span.start >= 2), "{starts:?}");
    }
    drain(&mut scheduler);
}

#[test]
fn a_window_needs_only_the_blocks_that_the_next_token_sees() {
    let local = GroupConfig { num_blocks: 12, window: Some(3) };
    let global = GroupConfig { num_blocks: 12, window: None };
    let mut scheduler =
        Scheduler::new(SchedulerConfig { groups: vec![global, local], max_num_batched_tokens: 2, ..config(12) });
    let prompt = [1, 2, 3, 4, 5, 6, 7];
    run(&mut scheduler, request(0, &prompt, 1));
    let seq = scheduler.add(request(1, &prompt, 1)).unwrap();
    let plan = scheduler.schedule(0);
    assert_eq!(plan.admitted[0].cached_tokens, 6);
    let sequence = scheduler.sequence(seq).unwrap();
    // Position 6 sees 4, 5 and itself.
    assert_eq!(sequence.tables()[1].blocks()[..2], [VACANT_BLOCK; 2]);
    assert_eq!((sequence.tables()[0].num_held(), sequence.tables()[1].num_held()), (4, 2));
    commit(&mut scheduler, &plan);
}
