//! Faults planted in the PTX of the kernels: each must be noticed, by the simulator or by its result.

use ptxsim::Module;

use crate::{
    case::{Case, Shape, bits, spans},
    device::{Arguments, Device, Extent, ptx_of},
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
fn every_store_to_shared_memory_is_needed() {
    let ptx = ptx_of("attention", "attention_decode_d64");
    for index in 0..count(&ptx, "st.shared") {
        let outcome = outcome_of("decode", &replaced(&ptx, "st.shared", index, ""));
        assert!(outcome.contains("uninit"), "store {index}: {outcome}");
    }
}

#[test]
fn all_the_shared_memory_that_is_asked_for_is_used() {
    for size in [64, 256] {
        let mut case = Case::new(Shape::plain(2, 1, size), &spans(&[(300, 70)]));
        case.denied = 4;
        for (name, kernel) in [("decode", case.kernel("decode")), ("prefill", case.kernel("prefill"))] {
            let outcome = if name == "decode" { case.decode_with(kernel) } else { case.prefill_with(kernel) };
            let fault = outcome.err().unwrap_or_else(|| panic!("{name} of {size} needs less")).to_string();
            assert!(fault.contains("out-of-bounds shared"), "{name} of {size}: {fault}");
        }
    }
}

#[test]
fn the_barrier_of_a_norm_is_needed() {
    let mutant = Module::parse(&replaced(&ptx_of("pointwise", "norm_f32"), "bar.sync", 0, "")).unwrap();
    let mut device = Device::new();
    let pointers = [device.poisoned::<f32>(1024), device.upload(&[1.0f32; 1024]), 0, device.upload(&[1.0f32; 1024])];
    let arguments = Arguments::default().all(&pointers).with(1024i32).with(1e-5f32);
    let extent = Extent { grid: [1, 1, 1], block: 256, shared: 0 };
    let fault = device.run(mutant.kernel("norm_f32").unwrap(), extent, &arguments).unwrap_err().to_string();
    assert!(fault.contains("uninit") || fault.contains("hazard"), "{fault}");
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

#[test]
fn positions_that_are_not_masked_are_noticed() {
    for kernel in ["decode", "prefill"] {
        let ptx = ptx_of("attention", &format!("attention_{kernel}_d64"));
        let is_mask = |line: &&str| line.contains("selp.f32") && line.contains("0fFF800000");
        assert!(ptx.lines().filter(is_mask).count() >= 8, "{kernel}");
        let kept: Vec<&str> = ptx.lines().filter(|line| !is_mask(line)).collect();
        assert_eq!(outcome_of(kernel, &kept.join("\n")), "wrong", "{kernel}");
    }
}

#[test]
fn an_address_that_is_not_aligned_is_noticed() {
    for kernel in ["decode", "prefill"] {
        let ptx = ptx_of("attention", &format!("attention_{kernel}_d64"));
        let copy = "cp.async.cg.shared.global";
        let line = ptx.lines().find(|line| line.trim_start().starts_with(copy)).unwrap();
        let shifted = line.replacen("], 16", "+4], 16", 1);
        let outcome = outcome_of(kernel, &replaced(&ptx, copy, 0, &shifted));
        assert!(outcome.contains("misaligned"), "{kernel}: {outcome}");
    }
}

#[test]
fn blocks_that_write_the_same_chunk_are_noticed() {
    let ptx = ptx_of("attention", "attention_decode_d64").replace("%ctaid.z", "0");
    assert_eq!(outcome_of("decode", &ptx), "wrong");
}
