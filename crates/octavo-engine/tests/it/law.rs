//! The law of octavo: a request's tokens depend on the model, the request and its seed, and on nothing else. Bit for
//! bit, ids and log-probabilities, on a tiny model.

use crate::common::{Answer, assert_same, run, run_alone, tiny_config, tiny_engine, tiny_requests};
use octavo_backend::{Backend, KvType, Reference};
use octavo_cpu::{CpuBackend, CpuOptions};

fn holds<B: Backend>(make: impl Fn() -> B) -> Vec<Answer> {
    let requests = tiny_requests();
    let alone = run_alone(&mut tiny_engine(make(), tiny_config(512)), &requests);
    assert!(alone.iter().any(|answer| answer.tokens.len() > 10), "the answers are long enough to differ");
    let reversed: Vec<_> = requests.iter().rev().cloned().collect();
    for budget in [16, 64, 512] {
        let mut engine = tiny_engine(make(), tiny_config(budget));
        assert_same(&format!("a batch of 24 in steps of {budget}"), &run(&mut engine, &requests), &alone);
        assert_same(&format!("reversed, in steps of {budget}"), &run(&mut engine, &reversed), &alone);
    }
    alone
}

#[test]
fn the_law_holds_on_reference() {
    holds(Reference::exact);
}

#[test]
fn the_law_holds_on_the_cpu_with_one_and_two_threads() {
    let cpu =
        |threads| move || CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap();
    let one = holds(cpu(1));
    let two = holds(cpu(2));
    assert_same("two threads against one", &two, &one);
}

#[test]
fn the_law_holds_with_an_8_bit_cache() {
    let cpu = |threads| {
        move || {
            let options = CpuOptions { threads: Some(threads), kv: KvType::Int8, ..CpuOptions::default() };
            CpuBackend::new(options).unwrap()
        }
    };
    let one = holds(cpu(1));
    let two = holds(cpu(2));
    assert_same("two threads against one", &two, &one);
}
