//! Random requests, steps, aborts, forks and resets over tiny pools, with every invariant checked after each operation.
//!
//! | module | holds |
//! | --- | --- |
//! | `operation` | what may happen |
//! | `model` | a model that knows nothing but the seed, the choice and the position |
//! | `history` | names for the beginnings of sequences |
//! | `memory` | what the KV cache of a backend would hold |
//! | `account` | what each request must generate |
//! | `checked` | a scheduler beside its account and a memory |
//! | `plan` | what must hold of every plan |
//! | `hits` | what a request must find in the prefix cache |
//! | `room` | how much fits, and that it is let in |
//! | `execution` | a plan carried out in the memory |
//! | `state` | what must hold at any time |
//! | `pool` | a pool of blocks alone |

mod account;
mod checked;
mod execution;
mod history;
mod hits;
mod memory;
mod model;
mod operation;
mod plan;
mod pool;
mod room;
mod state;

use proptest::prelude::*;

use checked::{Checked, Visits};
use operation::{Draw, Operation};

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
    assert!(visits.all().into_iter().all(|number| number > 500), "it comes by everything: {visits:?}");
}
