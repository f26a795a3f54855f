//! Random requests, steps and aborts over tiny pools, with every invariant checked after each operation.

use std::collections::BTreeMap;

use octavo_sched::{
    FinishReason, GroupConfig, Rejected, Request, RequestId, SamplingParams, Scheduler, SchedulerConfig, SeqId,
    StepOutput, StepPlan, StepRun, TokenId, VACANT_BLOCK,
};
use proptest::prelude::*;

const BLOCK_SIZE: usize = 2;
const EOS: TokenId = 0;
const VOCAB: u64 = 6;

#[derive(Debug, Clone)]
enum Operation {
    Add {
        prompt_len: usize,
        max_tokens: Option<usize>,
        stop: Option<TokenId>,
        ignore_eos: bool,
    },
    Step,
    /// Between schedule and commit, the request at this index (counted round) is aborted.
    StepWithAbort(usize),
    Abort(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    let add = (0..10_usize, prop::option::of(1..8_usize), prop::option::of(0..VOCAB as TokenId), any::<bool>());
    prop_oneof![
        3 => add.prop_map(|(prompt_len, max_tokens, stop, ignore_eos)| Operation::Add {
            prompt_len, max_tokens, stop, ignore_eos
        }),
        6 => Just(Operation::Step),
        1 => any::<usize>().prop_map(Operation::StepWithAbort),
        1 => any::<usize>().prop_map(Operation::Abort),
    ]
}

fn config() -> impl Strategy<Value = SchedulerConfig> {
    let window = prop::option::of((1..6_usize, 2..6_usize));
    (window, 3..12_usize, 1..4_usize, 1..7_usize).prop_map(|(window, max_model_len, max_num_seqs, budget)| {
        let mut groups = vec![GroupConfig { num_blocks: 4, window: None }];
        groups.extend(window.map(|(window, num_blocks)| GroupConfig { num_blocks, window: Some(window) }));
        SchedulerConfig {
            block_size: BLOCK_SIZE,
            groups,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens: budget,
            eos_token_ids: vec![EOS],
        }
    })
}

/// A model that knows nothing but the request and the position.
fn sample(request: RequestId, position: usize) -> TokenId {
    let mixed = (request.0 * 1_000_003 + position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed >> 40) % VOCAB) as TokenId
}

/// What a request must generate, found by following it alone.
fn expected_output(request: &Request, limit: usize) -> (Vec<TokenId>, FinishReason) {
    let mut output = vec![];
    loop {
        let token = sample(request.id, request.prompt.len() + output.len());
        output.push(token);
        if request.params.stop_token_ids.contains(&token) || (token == EOS && !request.params.ignore_eos) {
            return (output, FinishReason::Stop);
        }
        if Some(output.len()) == request.params.max_tokens || request.prompt.len() + output.len() == limit {
            return (output, FinishReason::Length);
        }
    }
}

/// What the scheduler is expected to hold of one request.
struct Shadow {
    request: Request,
    computed: usize,
    output: Vec<TokenId>,
}

/// The scheduler beside a plain account of what it should be doing.
struct Checked {
    config: SchedulerConfig,
    limit: usize,
    scheduler: Scheduler,
    live: BTreeMap<SeqId, Shadow>,
    num_added: u64,
}

impl Checked {
    fn new(config: SchedulerConfig) -> Self {
        let scheduler = Scheduler::new(config.clone());
        Self { limit: scheduler.limits().max_len(), config, scheduler, live: BTreeMap::new(), num_added: 0 }
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Add { prompt_len, max_tokens, stop, ignore_eos } => {
                let stop_token_ids = stop.iter().copied().collect();
                let (max_tokens, ignore_eos) = (*max_tokens, *ignore_eos);
                let params = SamplingParams { max_tokens, ignore_eos, stop_token_ids, ..Default::default() };
                let id = RequestId(self.num_added);
                self.add(Request { id, prompt: vec![1; *prompt_len], params, arrival: 0 });
            }
            Operation::Step => self.step(None),
            Operation::StepWithAbort(index) => self.step(Some(*index)),
            Operation::Abort(index) => self.abort(*index),
        }
        assert_eq!(self.scheduler.audit(), Ok(()));
    }

    fn add(&mut self, request: Request) {
        match self.scheduler.add(request.clone()) {
            Ok(id) => {
                self.num_added += 1;
                self.live.insert(id, Shadow { request, computed: 0, output: vec![] });
            }
            Err(Rejected::EmptyPrompt) => assert!(request.prompt.is_empty()),
            Err(Rejected::PromptTooLong { tokens, limit, .. }) => {
                assert!(tokens == request.prompt.len() && limit == self.limit && tokens + 1 > limit);
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn abort(&mut self, index: usize) {
        match self.live.keys().copied().nth(index % self.live.len().max(1)) {
            Some(id) => {
                assert!(self.scheduler.abort(self.live[&id].request.id));
                self.live.remove(&id);
            }
            None => assert!(!self.scheduler.abort(RequestId(index as u64))),
        }
    }

    fn step(&mut self, abort: Option<usize>) {
        let plan = self.scheduler.schedule(0);
        assert_eq!(self.scheduler.audit(), Ok(()));
        self.check_plan(&plan);
        let sampling = plan.spans.iter().filter(|span| span.samples);
        let runs: Vec<_> =
            sampling.map(|span| StepRun::Tokens(vec![sample(self.live[&span.seq].request.id, span.end())])).collect();
        if let Some(index) = abort {
            self.abort(index);
        }
        for span in &plan.spans {
            if let Some(shadow) = self.live.get_mut(&span.seq) {
                shadow.computed = span.end();
            }
        }
        for output in self.scheduler.commit(&plan, &runs) {
            self.take_output(output);
        }
    }

    fn check_plan(&self, plan: &StepPlan) {
        assert_eq!(plan.spans.is_empty(), self.live.is_empty(), "there is a step exactly when there is work");
        assert!(plan.spans.iter().map(|span| span.len).sum::<usize>() <= self.config.max_num_batched_tokens);
        assert!(plan.spans.len() <= self.config.max_num_seqs);
        let served: Vec<_> = plan.spans.iter().map(|span| span.seq).collect();
        let earliest: Vec<_> = self.live.keys().copied().take(served.len()).collect();
        assert_eq!(served, earliest, "first come, first served");
        for span in &plan.spans {
            let shadow = &self.live[&span.seq];
            let known = shadow.request.prompt.len() + shadow.output.len();
            assert_eq!(span.start, shadow.computed, "positions are computed once and in order");
            assert!(span.len > 0 && span.end() <= known);
            assert_eq!(span.samples, span.end() == known);
            self.check_tables(span.seq, span.start, span.end());
        }
    }

    /// Every position that the span writes or sees has a block.
    fn check_tables(&self, seq: SeqId, start: usize, end: usize) {
        let sequence = self.scheduler.sequence(seq).expect("what is planned has not ended");
        for (group, table) in self.config.groups.iter().zip(sequence.tables()) {
            let visible = group.window.map_or(0, |window| (start + 1).saturating_sub(window));
            assert_eq!(table.blocks().len(), end.div_ceil(BLOCK_SIZE), "no block is taken before it is needed");
            for (index, &block) in table.blocks().iter().enumerate() {
                assert_eq!(block == VACANT_BLOCK, (index + 1) * BLOCK_SIZE <= visible, "{:?}", table.blocks());
            }
        }
    }

    fn take_output(&mut self, output: StepOutput) {
        let shadow = self.live.get_mut(&output.seq).expect("there is no output for what has ended");
        assert_eq!(output.request, shadow.request.id);
        shadow.output.extend(&output.tokens);
        let (tokens, finish) = expected_output(&shadow.request, self.limit);
        if shadow.output.len() < tokens.len() {
            assert_eq!(output.finish, None);
            assert_eq!(shadow.output, tokens[..shadow.output.len()]);
        } else {
            assert_eq!((&shadow.output, output.finish), (&tokens, Some(finish)));
            assert_eq!(output.stop_token, tokens.last().copied().filter(|_| finish == FinishReason::Stop));
            self.live.remove(&output.seq);
        }
    }

    /// Steps until every request has ended. Each step computes at least one of the finitely many tokens.
    fn drain(&mut self) {
        for _ in 0..self.live.len() * self.limit {
            self.apply(&Operation::Step);
        }
        assert!(self.live.is_empty() && !self.scheduler.has_work(), "every admitted request ends");
        let stats = self.scheduler.stats();
        assert_eq!((stats.blocks_free, stats.blocks_promised), (stats.blocks_total, 0), "all blocks come home");
        assert_eq!((stats.slots_allocated, stats.slots_used), (0, 0));
        assert_eq!(stats.finished.total(), self.num_added);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_requests_steps_and_aborts_keeps_every_invariant(
        config in config(),
        operations in prop::collection::vec(operation(), 1..60),
    ) {
        let mut checked = Checked::new(config);
        for operation in &operations {
            checked.apply(operation);
        }
        checked.drain();
    }
}

mod pool {
    use super::*;
    use octavo_sched::{BlockPool, BlockTable};

    proptest! {
        #[test]
        fn any_order_of_reserve_and_release_keeps_owners_and_free_list_in_step(
            operations in prop::collection::vec((0..3_usize, 0..4_usize, 0..12_usize), 1..60),
        ) {
            let mut pool = BlockPool::new(4, BLOCK_SIZE);
            let mut tables = [BlockTable::new(), BlockTable::new(), BlockTable::new()];
            for (index, action, position) in operations {
                let table = &mut tables[index];
                match action {
                    0 => table.release(&mut pool),
                    1 => table.release_before(&mut pool, position),
                    _ => {
                        let (free, before) = (pool.num_free(), table.blocks().to_vec());
                        let missing = position.div_ceil(BLOCK_SIZE).saturating_sub(before.len());
                        prop_assert_eq!(table.reserve(&mut pool, position), missing <= free);
                        prop_assert_eq!(&table.blocks()[..before.len()], &before[..]);
                    }
                }
                prop_assert_eq!(pool.check(tables.iter()), Ok(()));
                let held: usize = tables.iter().map(BlockTable::num_held).sum();
                prop_assert_eq!(held + pool.num_free(), pool.num_blocks());
            }
        }
    }
}
