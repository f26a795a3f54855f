//! Faults planted in the PTX of the kernels: each must be noticed, by the simulator or by its result.

use ptxsim::Module;

use crate::{
    case::{Case, Shape, bits, spans},
    device::ptx_of,
};

/// The `index`-th statement that begins with `start`, replaced.
fn replaced(ptx: &str, start: &str, index: usize, by: &str) -> String {
    let mut seen = 0;
    let mut lines: Vec<String> = Vec::new();
    for line in ptx.lines() {
        let is_match = line.trim_start().starts_with(start);
        lines.push(if is_match && seen == index { by.to_owned() } else { line.to_owned() });
        seen += usize::from(is_match);
    }
    assert!(index < seen, "{seen} statements begin with {start:?}, no number {index}");
    lines.join("\n")
}

fn count(ptx: &str, start: &str) -> usize {
    ptx.lines().filter(|line| line.trim_start().starts_with(start)).count()
}

/// What becomes of a problem with three chunks when the kernel is as `ptx` says: the fault, or "wrong", or "unnoticed".
fn outcome_of(kernel: &str, ptx: &str) -> String {
    let mut case = Case::new(Shape::plain(2, 1, 64), &spans(&[(590, 20)]));
    let name = format!("attention_{kernel}_d64");
    let module = Module::parse(ptx).unwrap();
    let mutant = module.kernel(&name).unwrap();
    let (sound, found) = match kernel {
        "decode" => (case.decode().out, case.decode_with(mutant)),
        _ => (case.prefill().out, case.prefill_with(mutant)),
    };
    match found {
        Err(fault) => fault.to_string(),
        Ok(found) if bits(&found.out) != bits(&sound) => "wrong".to_owned(),
        Ok(_) => "unnoticed".to_owned(),
    }
}

#[test]
fn every_barrier_of_attention_is_needed() {
    for kernel in ["decode", "prefill"] {
        let ptx = ptx_of("attention", &format!("attention_{kernel}_d64"));
        for index in 0..count(&ptx, "bar.sync") {
            let outcome = outcome_of(kernel, &replaced(&ptx, "bar.sync", index, ""));
            assert!(outcome.contains("hazard") || outcome.contains("uninit"), "{kernel}, barrier {index}: {outcome}");
        }
    }
}

#[test]
fn every_wait_for_a_copy_is_needed() {
    for kernel in ["decode", "prefill"] {
        let ptx = ptx_of("attention", &format!("attention_{kernel}_d64"));
        for index in 0..count(&ptx, "cp.async.wait_group") {
            let outcome = outcome_of(kernel, &replaced(&ptx, "cp.async.wait_group", index, ""));
            assert!(outcome.contains("in flight"), "{kernel}, wait {index}: {outcome}");
        }
    }
}

#[test]
fn a_barrier_for_half_of_the_warps_is_noticed() {
    let ptx = ptx_of("attention", "attention_decode_d64");
    let half = "{ .reg .u32 t; .reg .pred p; mov.u32 t, %tid.x; setp.lt.u32 p, t, 64; @p bar.sync 0; }";
    let outcome = outcome_of("decode", &replaced(&ptx, "bar.sync", 1, half));
    assert!(outcome.contains("barrier") || outcome.contains("hazard"), "{outcome}");
}

#[test]
fn a_shuffle_that_leaves_lanes_out_is_noticed() {
    for kernel in ["decode", "prefill"] {
        let ptx = ptx_of("attention", &format!("attention_{kernel}_d64"));
        let line = ptx.lines().find(|line| line.contains("shfl.sync.bfly")).unwrap();
        let narrow = format!("{}, 65535;", line.rsplit_once(',').unwrap().0);
        let index = ptx.lines().filter(|l| l.trim_start().starts_with("shfl.sync")).position(|l| l == line).unwrap();
        let outcome = outcome_of(kernel, &replaced(&ptx, "shfl.sync", index, &narrow));
        assert!(outcome.contains("mask"), "{kernel}: {outcome}");
    }
}

#[test]
fn copies_that_ignore_nothing_are_noticed() {
    // With 16 source bytes always, what nobody sees is read: NaN of unused slots, entries beyond a table.
    let ptx = ptx_of("attention", "attention_decode_d64");
    let mut mutant = ptx.clone();
    for line in ptx.lines().filter(|line| line.trim_start().starts_with("cp.async.cg.shared.global")) {
        let (kept, _) = line.rsplit_once(',').unwrap();
        mutant = mutant.replacen(line, &format!("{kept};"), 1);
    }
    let outcome = outcome_of("decode", &mutant);
    assert_ne!(outcome, "unnoticed");
}
