//! The law of octavo: a request's tokens depend on the model, the request and its seed, and on nothing else. Bit for
//! bit, ids and log-probabilities, on a tiny model.

use crate::common::{Answer, assert_same, run, run_alone, tiny_config, tiny_engine, tiny_requests};
use octavo_backend::{Backend, KvType, Reference};
use octavo_cpu::{ActivationType, CpuBackend, CpuOptions, Projections, isa::Isa};

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

#[test]
fn the_law_holds_with_bfloat16_activations_and_across_instruction_sets() {
    let cpu = |threads, isa| {
        move || {
            let activations = ActivationType::Bf16;
            let options = CpuOptions { threads: Some(threads), isa: Some(isa), activations, ..CpuOptions::default() };
            CpuBackend::new(options).unwrap()
        }
    };
    let one = holds(cpu(1, Isa::detect()));
    let two = holds(cpu(2, Isa::detect()));
    assert_same("two threads against one", &two, &one);
    for isa in Isa::supported() {
        assert_same(&format!("{isa} against the fastest"), &holds(cpu(2, isa)), &one);
    }
}

#[test]
fn the_law_holds_with_some_activations_in_16_bits() {
    let int16_activations = Projections::named(&["down", "head"]).unwrap();
    let cpu = |threads, isa| {
        move || {
            let isa = Some(isa);
            let options = CpuOptions { threads: Some(threads), isa, int16_activations, ..CpuOptions::default() };
            CpuBackend::new(options).unwrap()
        }
    };
    let one = holds(cpu(1, Isa::detect()));
    let two = holds(cpu(2, Isa::detect()));
    assert_same("two threads against one", &two, &one);
    assert_same("plain code against the fastest", &holds(cpu(2, Isa::Scalar)), &one);
}

#[test]
fn the_law_holds_across_instruction_sets() {
    let cpu = |isa| move || CpuBackend::new(CpuOptions { isa: Some(isa), ..CpuOptions::default() }).unwrap();
    let expected = holds(cpu(Isa::detect()));
    for isa in Isa::supported() {
        assert_same(&format!("{isa} against the fastest"), &holds(cpu(isa)), &expected);
    }
}
