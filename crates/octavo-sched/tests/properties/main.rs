//! Random requests, steps, aborts, forks and resets over tiny pools, with every invariant checked after each operation.
//!
//! | module | holds |
//! | --- | --- |
//! | `operation` | what may happen |
//! | `model` | a model that knows nothing but the seed, the choice and the position |
//! | `history` | names for the beginnings of sequences |
//! | `memory` | what the KV cache of a backend would hold |
//! | `account` | what each request must generate |
//! | `search` | what a beam search must find |
//! | `checked` | a scheduler beside its account and a memory |
//! | `ending` | ends before the end |
//! | `plan` | what must hold of every plan |
//! | `hits` | what a request must find in the prefix cache |
//! | `room` | how much fits, and that it is let in |
//! | `execution` | a plan carried out in the memory |
//! | `state` | what must hold at any time |
//! | `pool` | a pool of blocks alone |

mod account;
mod checked;
mod ending;
mod execution;
mod history;
mod hits;
mod memory;
mod model;
mod operation;
mod plan;
mod pool;
mod room;
mod search;
mod state;

use octavo_sched::{GroupConfig, PrefixCaching, SchedulerConfig, VictimOrder};
use proptest::prelude::*;

use checked::{Checked, Visits};
use operation::{Draw, NewRequest, Operation};

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_operations_keeps_every_invariant(
        config in operation::config(),
        num_ended in prop::sample::select(&operation::ENDED[..]),
        operations in prop::collection::vec(operation::operation(), 1..100),
    ) {
        let mut checked = Checked::new(config, num_ended);
        operations.iter().for_each(|operation| checked.apply(operation));
        checked.drain();
    }
}

/// Too rare to leave it to chance: only two outputs of one token each, computed again, come to this.
#[test]
fn no_sequence_parts_from_one_that_others_wait_for() {
    let config = SchedulerConfig {
        block_size: 2,
        groups: vec![GroupConfig { num_blocks: 4, window: None }],
        max_model_len: 9,
        max_num_seqs: 4,
        max_num_batched_tokens: 4,
        eos_token_ids: vec![],
        prefix_cache: PrefixCaching::Off,
        victims: VictimOrder::LatestArrival,
    };
    let request = |n, prompt_len| {
        let new = NewRequest { n, prompt_len, max_tokens: Some(2), ignore_eos: true, ..NewRequest::default() };
        Operation::Add(new)
    };
    let mut checked = Checked::new(config, 0);
    for operation in [request(1, 1), request(2, 2), Operation::Step, Operation::Fork(0), Operation::Step] {
        checked.apply(&operation);
    }
    assert_eq!(checked.visits.preempted_families, 1);
    checked.apply(&Operation::Step);
    assert!(checked.has_followers(1), "the prompt is computed again for both");
    checked.apply(&Operation::Fork(0));
    checked.drain();
}

/// Says, if it is dropped by a panic, how to come to the same place.
struct Episode {
    number: u64,
    operations: Vec<Operation>,
}

impl Drop for Episode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (number, len) = (self.number, self.operations.len());
            eprintln!("episode {number} failed at its operation {len}, {:?}", self.operations.last());
        }
    }
}

#[test]
fn a_walk_of_a_million_operations_keeps_every_invariant() {
    const EPISODES: u64 = 4000;
    const OPERATIONS: usize = 250;
    let mut visits = Visits::default();
    for number in 0..EPISODES {
        let mut draw = Draw(number << 32);
        let mut episode = Episode { number, operations: Vec::with_capacity(OPERATIONS) };
        let mut checked = Checked::new(draw.config(), draw.of(&operation::ENDED));
        checked.visits = visits;
        while episode.operations.len() < OPERATIONS {
            episode.operations.push(draw.operation(checked.num_live()));
            checked.apply(&episode.operations[episode.operations.len() - 1]);
        }
        checked.drain();
        visits = checked.visits;
    }
    assert!(visits.all().into_iter().all(|number| number > 200), "it comes by everything: {visits:?}");
}
