//! What may happen to a scheduler: as strategies that shrink, and drawn by a small generator of our own.

use octavo_sched::{GroupConfig, PrefixCaching, SchedulerConfig, TokenId, VictimOrder};
use proptest::prelude::*;

use crate::model::{EOS, NUM_WORDS};

/// A request in a few small numbers.
#[derive(Debug, Clone, Default)]
pub struct NewRequest {
    pub n: u32,
    /// It is a search with `n` beams, and this penalty of length.
    pub penalty: Option<f32>,
    /// The prompt is the beginning of a word, with the token at `flipped` exchanged for the other one.
    pub word: usize,
    pub prompt_len: usize,
    pub flipped: Option<usize>,
    /// Chooses what the model answers.
    pub seed: u64,
    pub max_tokens: Option<usize>,
    pub stop: Option<TokenId>,
    pub ignore_eos: bool,
    pub is_salted: bool,
    pub skips_cache: bool,
    /// How long it may take.
    pub time: Option<u64>,
}

/// Indices count round over what there is at the time.
#[derive(Debug, Clone)]
pub enum Operation {
    Add(NewRequest),
    Step,
    /// A step in which the sample at this index fails.
    StepFailing(usize),
    /// A step with something else, not a step or a fork, between `schedule` and `commit`.
    StepAround(Box<Operation>),
    Abort(usize),
    /// One continuation ends: a stop string was found in its text.
    EndChoice(usize),
    /// Whatever is late ends.
    Expire,
    Fork(usize),
    ResetPrefixCache,
}

/// The first of the values is the simplest.
const BLOCK_SIZES: [usize; 2] = [2, 4];
const BLOCKS: std::ops::RangeInclusive<usize> = 4..=12;
const WINDOWS: std::ops::RangeInclusive<usize> = 2..=7;
const CONTEXT: std::ops::RangeInclusive<usize> = 6..=40;
const SEATS: [usize; 8] = [1, 2, 3, 4, 4, 4, 4, 4];
const BUDGET: std::ops::RangeInclusive<usize> = 1..=8;
const PROMPTS: [usize; 12] = [1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 12, 0];
const CONTINUATIONS: [u32; 6] = [1, 1, 1, 2, 2, 3];
const PENALTIES: [f32; 4] = [1.0, 1.0, 0.0, -1.0];
/// Mostly few, so that the scheduler expects few and is wrong about the others.
const MAX_TOKENS: [Option<usize>; 5] = [Some(2), Some(6), Some(9), Some(12), None];
/// In operations.
const TIMES: std::ops::RangeInclusive<u64> = 5..=60;
const CACHING: [PrefixCaching; 3] = [PrefixCaching::Off, PrefixCaching::On, PrefixCaching::On];
const VICTIMS: [VictimOrder; 2] = [VictimOrder::LatestArrival, VictimOrder::LeastLostWork];

/// Outputs of one token that ended before.
pub const ENDED: [usize; 3] = [0, 300, 300];

/// Which layer groups there are.
#[derive(Debug, Clone, Copy)]
enum Layers {
    Global,
    GlobalAndWindowed,
    Windowed,
    /// Two pools that differ in size, so that they evict different blocks.
    TwoGlobal,
}
const LAYERS: [Layers; 4] = [Layers::Global, Layers::GlobalAndWindowed, Layers::Windowed, Layers::TwoGlobal];

impl Layers {
    fn groups(self, num_blocks: [usize; 2], window: usize) -> Vec<GroupConfig> {
        let [global, other] = num_blocks.map(|num_blocks| GroupConfig { num_blocks, window: None });
        let windowed = GroupConfig { num_blocks: num_blocks[1], window: Some(window) };
        match self {
            Layers::Global => vec![global],
            Layers::GlobalAndWindowed => vec![global, windowed],
            Layers::Windowed => vec![windowed],
            Layers::TwoGlobal => vec![global, other],
        }
    }
}

pub fn config() -> impl Strategy<Value = SchedulerConfig> {
    let cache = (prop::sample::select(&BLOCK_SIZES[..]), prop::sample::select(&LAYERS[..]), [BLOCKS, BLOCKS], WINDOWS);
    let cache =
        cache.prop_map(|(block_size, layers, num_blocks, window)| (block_size, layers.groups(num_blocks, window)));
    let rules = (prop::sample::select(&CACHING[..]), prop::sample::select(&VICTIMS[..]));
    (cache, CONTEXT, prop::sample::select(&SEATS[..]), BUDGET, rules).prop_map(
        |(cache, max_model_len, max_num_seqs, budget, rules)| {
            let ((block_size, groups), (prefix_cache, victims)) = (cache, rules);
            SchedulerConfig {
                block_size,
                groups,
                max_model_len,
                max_num_seqs,
                max_num_batched_tokens: budget,
                eos_token_ids: vec![EOS],
                prefix_cache,
                victims,
            }
        },
    )
}

fn new_request() -> impl Strategy<Value = NewRequest> {
    let prompt = (0..NUM_WORDS, prop::sample::select(&PROMPTS[..]), prop::option::weighted(0.3, 0..8_usize));
    let answer = (0..2_u64, prop::sample::select(&MAX_TOKENS[..]), prop::option::weighted(0.1, 1..=2_u32));
    let flags = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.1));
    let rest = (flags, prop::option::weighted(0.1, TIMES));
    let search = prop::option::weighted(0.2, prop::sample::select(&PENALTIES[..]));
    let number = (prop::sample::select(&CONTINUATIONS[..]), search);
    (number, prompt, answer, rest).prop_map(|((n, penalty), prompt, answer, rest)| {
        let ((word, prompt_len, flipped), (seed, max_tokens, stop)) = (prompt, answer);
        let ((ignore_eos, is_salted, skips_cache), time) = rest;
        let n = n + u32::from(penalty.is_some());
        NewRequest {
            n,
            penalty,
            word,
            prompt_len,
            flipped,
            seed,
            max_tokens,
            stop,
            ignore_eos,
            is_salted,
            skips_cache,
            time,
        }
    })
}

pub fn operation() -> impl Strategy<Value = Operation> {
    let index = || 0..8_usize;
    let between = prop_oneof![
        index().prop_map(Operation::Abort),
        index().prop_map(Operation::EndChoice),
        new_request().prop_map(Operation::Add),
        Just(Operation::ResetPrefixCache),
    ];
    prop_oneof![
        12 => Just(Operation::Step),
        6 => new_request().prop_map(Operation::Add),
        2 => (0..4_usize).prop_map(Operation::Fork),
        1 => index().prop_map(Operation::Abort),
        1 => index().prop_map(Operation::EndChoice),
        1 => Just(Operation::Expire),
        1 => index().prop_map(Operation::StepFailing),
        1 => between.prop_map(|operation| Operation::StepAround(Box::new(operation))),
        1 => Just(Operation::ResetPrefixCache),
    ]
}

/// SplitMix64 (Steele et al., OOPSLA'14): a walk is the same on every machine and with every version of any crate.
#[derive(Debug, Clone)]
pub struct Draw(pub u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        crate::model::mix(self.0)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() >> 32) as usize % end
    }

    fn within(&mut self, range: std::ops::RangeInclusive<usize>) -> usize {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }

    pub fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    pub fn config(&mut self) -> SchedulerConfig {
        let num_blocks = [self.within(BLOCKS), self.within(BLOCKS)];
        SchedulerConfig {
            block_size: self.of(&BLOCK_SIZES),
            groups: self.of(&LAYERS).groups(num_blocks, self.within(WINDOWS)),
            max_model_len: self.within(CONTEXT),
            max_num_seqs: self.of(&SEATS),
            max_num_batched_tokens: self.within(BUDGET),
            eos_token_ids: vec![EOS],
            prefix_cache: self.of(&CACHING),
            victims: self.of(&VICTIMS),
        }
    }

    fn new_request(&mut self) -> NewRequest {
        let penalty = self.one_in(4).then(|| self.of(&PENALTIES));
        NewRequest {
            n: self.of(&CONTINUATIONS) + u32::from(penalty.is_some()),
            penalty,
            word: self.below(NUM_WORDS),
            prompt_len: self.of(&PROMPTS),
            flipped: self.one_in(3).then(|| self.below(8)),
            seed: self.below(2) as u64,
            max_tokens: self.of(&MAX_TOKENS),
            stop: self.one_in(10).then(|| self.within(1..=2) as TokenId),
            ignore_eos: self.one_in(2),
            is_salted: self.one_in(5),
            skips_cache: self.one_in(10),
            time: self.one_in(8).then(|| self.within(5..=60) as u64),
        }
    }

    /// The next operation, where `num_live` requests have not ended; more than eight are not of use.
    pub fn operation(&mut self, num_live: usize) -> Operation {
        let operation = self.any_operation();
        if num_live >= 8 && matches!(operation, Operation::Add(_)) { Operation::Step } else { operation }
    }

    fn any_operation(&mut self) -> Operation {
        match self.below(1000) {
            0..620 => Operation::Step,
            620..820 => Operation::Add(self.new_request()),
            820..828 => Operation::EndChoice(self.below(8)),
            828..832 => Operation::StepAround(Box::new(Operation::EndChoice(self.below(8)))),
            832..840 => Operation::Expire,
            840..940 => Operation::Fork(self.below(4)),
            940..950 => Operation::Abort(self.below(8)),
            950..960 => Operation::StepFailing(self.below(8)),
            960..970 => Operation::StepAround(Box::new(Operation::Abort(self.below(8)))),
            970..990 => Operation::StepAround(Box::new(Operation::Add(self.new_request()))),
            990..995 => Operation::StepAround(Box::new(Operation::ResetPrefixCache)),
            _ => Operation::ResetPrefixCache,
        }
    }
}
