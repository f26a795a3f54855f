//! What takes minutes (feature `long-tests`): all recorded prompts on Reference, and the law on Reference with SmolLM2.

use octavo_backend::Reference;

use crate::common::{assert_same, run, run_alone};
use crate::smollm2;

#[test]
fn reference_agrees_on_every_recorded_prompt() {
    smollm2::assert_reference_agrees(&smollm2::recorded());
}

#[test]
fn the_law_holds_on_reference_with_smollm2() {
    let requests = smollm2::requests(24, 3);
    let reversed: Vec<_> = requests.iter().rev().cloned().collect();
    let alone = run_alone(&mut smollm2::engine(Reference::exact(), 512), &requests);
    for budget in [16, 64, 512] {
        let mut engine = smollm2::engine(Reference::exact(), budget);
        assert_same(&format!("steps of {budget}"), &run(&mut engine, &requests), &alone);
        assert_same(&format!("steps of {budget}, reversed"), &run(&mut engine, &reversed), &alone);
    }
}
