//! Beam searches: their beams go on together, share blocks, and give their outputs at the end.
#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

use octavo_sched::{
    BeamParams, BlockCopy, Candidate, FinishReason, GroupConfig, PrefixCaching, Request, RequestId, SamplingParams,
    Scheduler, SchedulerConfig, SeqId, SeqSpan, StepOutput, StepPlan, StepRun, TokenId, VictimOrder,
};

const EOS: TokenId = 0;

/// So many blocks of two tokens; plenty of everything else.
fn config(num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        block_size: 2,
        groups: vec![GroupConfig { num_blocks, window: None }],
        max_model_len: 100,
        max_num_seqs: 8,
        max_num_batched_tokens: 100,
        eos_token_ids: vec![EOS],
        prefix_cache: PrefixCaching::On,
        victims: VictimOrder::LeastLostWork,
    }
}

fn request(id: u64, prompt: &[TokenId], max_tokens: usize) -> Request {
    let params = SamplingParams { max_tokens: Some(max_tokens), ..Default::default() };
    Request { id: RequestId(id), prompt: prompt.to_vec(), params, arrival: 0, deadline: None }
}

fn search(width: u32, request: Request) -> Request {
    let beam = Some(BeamParams { width, length_penalty: 1.0 });
    Request { params: SamplingParams { beam, ..request.params.clone() }, ..request }
}

fn candidates(logprobs: &[(TokenId, f32)]) -> StepRun {
    let candidate = |(rank, &(token, logprob)): (u32, _)| Candidate { token, logprob, rank };
    StepRun::Candidates((1..).zip(logprobs).map(candidate).collect())
}

/// A model of seven tokens that knows only all that went before; the likeliest, equal ones by id.
fn propose(tokens: &[TokenId], count: usize) -> StepRun {
    let mut state =
        tokens.iter().fold(7, |state: u64, &token| (state + u64::from(token) + 1).wrapping_mul(0x2545_F491));
    let mut draw = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (state >> 40) % 16
    };
    // An end is less likely than the others.
    let mut all: Vec<_> =
        (EOS..7).map(|token| (token, -0.25 * draw() as f32 - if token == EOS { 2.0 } else { 0.0 })).collect();
    all.sort_by(|one, other| other.1.total_cmp(&one.1));
    all.truncate(count);
    candidates(&all)
}

fn commit(scheduler: &mut Scheduler, plan: &StepPlan) -> Vec<StepOutput> {
    let run = |span: &SeqSpan| {
        let sequence = scheduler.sequence(span.seq)?;
        let beam = sequence.params().beam;
        let run = beam.map(|beam| propose(sequence.tokens(), 2 * beam.width as usize));
        Some(run.unwrap_or(StepRun::Tokens(vec![5])))
    };
    let sampled = plan.spans.iter().filter(|span| span.samples == 1);
    let runs: Vec<_> = sampled.map(|span| run(span).unwrap()).collect();
    let outputs = scheduler.commit(plan, &runs);
    assert_eq!(scheduler.audit(), Ok(()));
    outputs
}

fn schedule(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.schedule(0);
    assert_eq!(scheduler.audit(), Ok(()));
    plan
}

fn step(scheduler: &mut Scheduler) -> Vec<StepOutput> {
    let plan = schedule(scheduler);
    commit(scheduler, &plan)
}

/// Steps until nothing is left; gives the outputs of searches.
fn drain(scheduler: &mut Scheduler) -> Vec<StepOutput> {
    let mut found = vec![];
    for _ in 0..1000 {
        if !scheduler.has_work() {
            let stats = scheduler.stats();
            assert_eq!((stats.blocks_free, stats.blocks_promised), (stats.blocks_total, 0), "all blocks come home");
            return found;
        }
        found.extend(step(scheduler).into_iter().filter(|output| output.hypothesis.is_some()));
    }
    panic!("not at the end after 1000 steps: {scheduler:?}");
}

fn blocks(scheduler: &Scheduler, seq: SeqId) -> Vec<u32> {
    scheduler.sequence(seq).unwrap().tables()[0].blocks().to_vec()
}

fn tokens(scheduler: &Scheduler, seq: SeqId) -> Vec<TokenId> {
    scheduler.sequence(seq).unwrap().tokens().to_vec()
}

/// The spans of a plan: whose they are, where they start and end, and what is sampled.
fn spans(plan: &StepPlan) -> Vec<(SeqId, usize, usize, usize)> {
    plan.spans.iter().map(|span| (span.seq, span.start, span.end(), span.samples)).collect()
}

#[test]
fn a_search_gives_its_outputs_at_its_end_the_best_first() {
    let mut scheduler = Scheduler::new(config(20));
    let first = scheduler.add(search(2, request(7, &[1, 2, 3], 3))).unwrap();
    let second = SeqId { choice: 1, ..first };
    let plan = schedule(&mut scheduler);
    assert_eq!(spans(&plan), [(first, 0, 3, 1)]);
    assert_eq!(scheduler.commit(&plan, &[candidates(&[(5, -0.5), (4, -1.0), (6, -2.0), (EOS, -6.0)])]), []);
    let plan = schedule(&mut scheduler);
    assert_eq!(spans(&plan), [(first, 3, 4, 1), (second, 3, 4, 1)]);
    // The best of the second is worse than both of the first; its end scores -1.25 over four.
    let runs = [candidates(&[(5, -0.25), (6, -0.5)]), candidates(&[(EOS, -0.25), (6, -1.0)])];
    assert_eq!(scheduler.commit(&plan, &runs), []);
    let third = SeqId { choice: 2, ..first };
    assert!(scheduler.sequence(second).is_none());
    assert_eq!([first, third].map(|seq| tokens(&scheduler, seq)), [[1, 2, 3, 5, 5], [1, 2, 3, 5, 6]]);
    let plan = schedule(&mut scheduler);
    let runs = [candidates(&[(EOS, -2.0), (5, -3.0)]), candidates(&[(4, -0.5), (6, -0.75)])];
    let outputs = scheduler.commit(&plan, &runs);
    // -1.5 over six and -1.75 over six, before -1.25 over four and -2.75 over five.
    let ends: Vec<_> =
        outputs.iter().map(|output| (output.seq.choice, output.finish, output.stop_token, output.last)).collect();
    let length = Some(FinishReason::Length);
    assert_eq!(ends, [(0, length, None, false), (1, length, None, true)]);
    assert_eq!(outputs.iter().map(|output| &output.tokens[..]).collect::<Vec<_>>(), [[5, 6, 4], [5, 6, 6]]);
    let hypothesis = outputs[0].hypothesis.clone().unwrap();
    assert_eq!(hypothesis.cumulative_logprob, -1.5);
    let candidate = |token, logprob, rank| Candidate { token, logprob, rank };
    assert_eq!(hypothesis.tokens, [candidate(5, -0.5, 1), candidate(6, -0.5, 2), candidate(4, -0.5, 1)]);
    let stats = scheduler.stats();
    assert_eq!((scheduler.has_work(), stats.blocks_free, stats.finished.length), (false, 20, 2));
}

#[test]
fn what_comes_of_one_beam_shares_its_blocks_and_copies_at_most_one_for_each() {
    let mut scheduler = Scheduler::new(config(20));
    let first = scheduler.add(search(3, request(0, &[1, 2, 3], 9))).unwrap();
    let choices = [0, 1, 2].map(|choice| SeqId { choice, ..first });
    let plan = schedule(&mut scheduler);
    scheduler.commit(&plan, &[candidates(&[(5, -0.5), (4, -1.0), (6, -2.0)])]);
    assert_eq!(choices.map(|seq| blocks(&scheduler, seq)), [[0, 1], [0, 1], [0, 1]]);
    let plan = schedule(&mut scheduler);
    assert_eq!(plan.copies, [BlockCopy { group: 0, from: 1, to: 2 }, BlockCopy { group: 0, from: 1, to: 3 }]);
    assert_eq!(choices.map(|seq| blocks(&scheduler, seq)), [[0, 2], [0, 3], [0, 1]], "the last writes in place");
    let weak = candidates(&[(5, -9.0)]);
    let outputs = scheduler.commit(&plan, &[weak.clone(), candidates(&[(5, -1.0), (6, -2.0), (4, -3.0)]), weak]);
    assert_eq!((outputs, scheduler.audit()), (vec![], Ok(())));
    // Blocks 1 and 2 were those of beams that nothing came of, and full blocks need no copy.
    let choices = [1, 3, 4].map(|choice| SeqId { choice, ..first });
    assert_eq!(choices.map(|seq| blocks(&scheduler, seq)), [[0, 3], [0, 3], [0, 3]]);
    assert_eq!((scheduler.stats().blocks_free, scheduler.stats().blocks_saved), (18, 4));
    let plan = schedule(&mut scheduler);
    assert_eq!(plan.copies, []);
    commit(&mut scheduler, &plan);
    drain(&mut scheduler);
}

#[test]
fn the_last_tokens_of_all_beams_go_together_and_what_is_left_of_a_step_goes_to_nobody_later() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_batched_tokens: 3, ..config(40) });
    let earlier = scheduler.add(request(0, &[1], 4)).unwrap();
    let first = scheduler.add(search(3, request(1, &[1, 2], 4))).unwrap();
    assert_eq!(spans(&schedule_and_commit(&mut scheduler)), [(earlier, 0, 1, 1), (first, 0, 2, 1)]);
    let later = scheduler.add(request(2, &[1], 4)).unwrap();
    for position in 1..4 {
        let plan = schedule_and_commit(&mut scheduler);
        assert_eq!(spans(&plan), [(earlier, position, position + 1, 1)], "two are left, and three beams");
    }
    let beams = [0, 1, 2].map(|choice| (SeqId { choice, ..first }, 2, 3, 1));
    assert_eq!(spans(&schedule_and_commit(&mut scheduler)), beams);
    assert!(scheduler.sequence(later).is_some());
    drain(&mut scheduler);
}

fn schedule_and_commit(scheduler: &mut Scheduler) -> StepPlan {
    let plan = schedule(scheduler);
    commit(scheduler, &plan);
    plan
}

/// A scheduler in which an early request has more than half of so many blocks, takes more of them at each step, and never
/// gives way. Requests are admitted with room for one more block each, as after many outputs of one token.
fn crowded(num_blocks: usize, config: SchedulerConfig) -> Scheduler {
    let mut scheduler =
        Scheduler::new(SchedulerConfig { groups: vec![GroupConfig { num_blocks, window: None }], ..config });
    for id in 2..300 {
        scheduler.add(request(id, &[9], 1)).unwrap();
        step(&mut scheduler);
    }
    let prompt: Vec<_> = (0..num_blocks as TokenId * 6 / 5).map(|position| 10 + position).collect();
    let seq = scheduler.add(request(0, &prompt, 2 * num_blocks - prompt.len())).unwrap();
    while tokens(&scheduler, seq).len() == prompt.len() {
        step(&mut scheduler);
    }
    scheduler
}

#[test]
fn a_search_finds_the_same_in_chunks_beside_others_and_after_preemptions() {
    let prompt = [3, 1, 2, 6, 5];
    let found = |scheduler: &mut Scheduler| {
        let outputs = drain(scheduler).into_iter().filter(|output| output.request == RequestId(1));
        outputs.map(|output| (output.seq.choice, output.finish, output.hypothesis)).collect::<Vec<_>>()
    };
    let (mut preempted, mut copied) = (0, 0);
    for width in 1..=6 {
        let mut alone = Scheduler::new(config(200));
        alone.add(search(width, request(1, &prompt, 16))).unwrap();
        let expected = found(&mut alone);
        assert_eq!(expected.len(), width as usize);
        // The least that the door lets through.
        let num_blocks = 2 + 9 * width as usize;
        for (budget, prefix_cache) in
            [(7, PrefixCaching::On), (8, PrefixCaching::Off), (11, PrefixCaching::On), (100, PrefixCaching::Off)]
        {
            let limits = SchedulerConfig { max_num_batched_tokens: budget, prefix_cache, ..config(0) };
            let mut scheduler = crowded(num_blocks, limits);
            scheduler.add(search(width, request(1, &prompt, 16))).unwrap();
            scheduler.add(search(2, request(2, &prompt[..3], 5))).unwrap();
            assert_eq!(found(&mut scheduler), expected, "width {width}, {budget} tokens a step");
            preempted += usize::from(scheduler.stats().preemptions > 0);
            copied += scheduler.stats().blocks_copied;
        }
    }
    assert!(preempted > 16 && copied > 100, "{preempted} of 24 were preempted, {copied} blocks copied");
}

#[test]
fn beams_that_were_preempted_wait_for_each_other_one_token_before_their_end() {
    let limits = SchedulerConfig { max_num_batched_tokens: 4, prefix_cache: PrefixCaching::Off, ..config(0) };
    let mut scheduler = crowded(29, limits);
    let first = scheduler.add(search(3, request(1, &[3, 1, 2, 6, 5], 16))).unwrap();
    let (mut samples, mut chunks) = (vec![], 0);
    while scheduler.has_work() {
        let plan = schedule_and_commit(&mut scheduler);
        let spans: Vec<_> = plan.spans.iter().filter(|span| span.seq.arrival == first.arrival).collect();
        samples.push(spans.iter().map(|span| span.samples).sum());
        chunks += usize::from(scheduler.stats().preemptions > 0 && !spans.is_empty() && samples.ends_with(&[0]));
    }
    assert!(chunks > 3, "{chunks} steps to compute it again");
    let sampled: Vec<_> = samples.into_iter().filter(|&sampled: &usize| sampled > 0).collect();
    // At first there is one beam.
    assert!(sampled.len() > 3 && sampled[0] == 1 && sampled[1..].iter().all(|&sampled| sampled == 3), "{sampled:?}");
}

#[test]
fn seats_and_blocks_are_kept_for_all_beams_from_the_beginning() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_seqs: 4, max_num_batched_tokens: 4, ..config(40) });
    scheduler.add(search(3, request(0, &[1, 2, 3], 3))).unwrap();
    let first = scheduler.add(request(1, &[7], 9)).unwrap();
    let second = scheduler.add(request(2, &[7], 9)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.sequence(first).unwrap().tokens().len(), 2);
    assert_eq!(scheduler.sequence(second).unwrap().tokens().len(), 1, "the fourth seat is the last");
    // A beam writes at most two blocks that are its own: the one that the prompt leaves open, and one more.
    assert!(scheduler.stats().blocks_promised >= 3 * 2);
    drain(&mut scheduler);
}

#[test]
fn fewer_outputs_come_of_a_search_that_finds_no_more() {
    let mut scheduler = Scheduler::new(config(20));
    scheduler.add(search(4, request(0, &[1], 9))).unwrap();
    let plan = schedule(&mut scheduler);
    let outputs = scheduler.commit(&plan, &[candidates(&[(EOS, -0.5)])]);
    assert_eq!(outputs.len(), 1);
    assert_eq!(
        (outputs[0].finish, outputs[0].stop_token, outputs[0].last),
        (Some(FinishReason::Stop), Some(EOS), true)
    );
    assert!(!scheduler.has_work());
}

#[test]
fn stop_tokens_end_an_output_and_end_tokens_only_if_they_are_not_ignored() {
    let mut scheduler = Scheduler::new(config(20));
    let ignoring = search(2, request(0, &[1], 2));
    let params = SamplingParams { ignore_eos: true, stop_token_ids: vec![6], ..ignoring.params.clone() };
    scheduler.add(Request { params, ..ignoring }).unwrap();
    let plan = schedule(&mut scheduler);
    assert_eq!(scheduler.commit(&plan, &[candidates(&[(6, -0.25), (EOS, -0.5), (5, -9.0)])]), []);
    let plan = schedule(&mut scheduler);
    let outputs = scheduler.commit(&plan, &[candidates(&[(EOS, -1.0)]), candidates(&[(EOS, -1.0)])]);
    let found: Vec<_> = outputs.into_iter().map(|output| (output.tokens, output.stop_token)).collect();
    // -0.25 over one, -1.5 over three.
    assert_eq!(found, [(vec![6], Some(6)), (vec![EOS, EOS], None)]);
}

#[test]
fn a_beam_that_fails_dies_and_a_search_without_beams_ends_with_an_error() {
    let mut scheduler = Scheduler::new(config(20));
    let first = scheduler.add(search(2, request(0, &[1, 2, 3], 9))).unwrap();
    step(&mut scheduler);
    let plan = schedule(&mut scheduler);
    assert_eq!(scheduler.commit(&plan, &[StepRun::Failed, candidates(&[(4, -1.0), (5, -2.0)])]), []);
    assert_eq!(scheduler.audit(), Ok(()));
    assert!(scheduler.sequence(first).is_none());
    let plan = schedule(&mut scheduler);
    let outputs = scheduler.commit(&plan, &[StepRun::Failed, StepRun::Failed]);
    let seq = SeqId { choice: 0, ..first };
    let (tokens, finish) = (vec![], Some(FinishReason::Error));
    let error =
        StepOutput { request: RequestId(0), seq, tokens, finish, stop_token: None, last: true, hypothesis: None };
    assert_eq!(outputs, [error]);
    let stats = scheduler.stats();
    assert_eq!((scheduler.has_work(), stats.blocks_free, stats.finished.error), (false, 20, 1));
}

#[test]
fn a_search_ends_whole_between_plan_and_commit_too() {
    let mut scheduler = Scheduler::new(config(40));
    let seq = scheduler.add(search(3, request(0, &[1, 2, 3], 9))).unwrap();
    let other = scheduler.add(request(1, &[4], 9)).unwrap();
    step(&mut scheduler);
    assert_eq!(scheduler.end_choice(RequestId(0), 0, FinishReason::Stop), None, "a beam is not an output");
    assert_eq!(scheduler.fork(seq), None);
    let plan = schedule(&mut scheduler);
    assert_eq!(scheduler.end(RequestId(0), FinishReason::Deadline), [0]);
    assert_eq!(scheduler.audit(), Ok(()));
    let run = propose(&[1], 6);
    let outputs = scheduler.commit(&plan, &[run.clone(), run.clone(), run, StepRun::Tokens(vec![5])]);
    assert_eq!(outputs.iter().map(|output| output.seq).collect::<Vec<_>>(), [other]);
    assert_eq!(scheduler.stats().finished.deadline, 1);
    drain(&mut scheduler);
}

#[test]
fn outputs_of_searches_stand_between_others_in_order_of_arrival() {
    let mut scheduler = Scheduler::new(config(40));
    scheduler.add(request(0, &[1], 9)).unwrap();
    scheduler.add(search(2, request(1, &[1], 1))).unwrap();
    scheduler.add(request(2, &[1], 9)).unwrap();
    let outputs = step(&mut scheduler);
    assert_eq!(outputs.iter().map(|output| output.request.0).collect::<Vec<_>>(), [0, 1, 1, 2]);
    drain(&mut scheduler);
}

#[test]
#[should_panic(expected = "expected candidates")]
fn tokens_for_a_beam_panic() {
    let mut scheduler = Scheduler::new(config(20));
    scheduler.add(search(2, request(0, &[1], 9))).unwrap();
    let plan = schedule(&mut scheduler);
    scheduler.commit(&plan, &[StepRun::Tokens(vec![5])]);
}
