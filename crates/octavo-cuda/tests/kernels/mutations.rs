//! Faults planted in the PTX of the kernels: each must be noticed, by the simulator, which says where, or by its result.
//!
//! | number | fault | noticed as |
//! | --- | --- | --- |
//! | 1 | a barrier forgotten, such as the one before a reduction | a hazard |
//! | 2 | a barrier that half of the warps reach | a divergent barrier |
//! | 3 | positions beyond the end not masked | wrong numbers |
//! | 4 | one row too many of shared memory | out of bounds |
//! | 5 | an address that is not aligned to the 16 bytes of its access | misaligned |
//! | 6 | no wait for an asynchronous copy | a copy in flight |
//! | 7 | a shuffle of the whole warp in a branch that half of it takes | lanes that are elsewhere |
//! | 8 | a stage of the pipeline refilled while it is read | a hazard |
//! | 9 | a slot of shared memory never written | uninitialised |
//! | 10 | blocks that write the same row | wrong numbers |
//! | 11 | the last barrier missing | a hazard |
//! | 12 | a mask of a shuffle that leaves lanes out | lanes that are not in the mask |
//! | 13 | lanes that exchange through shared memory without a barrier of the warp | a hazard |
//! | 14 | rows or columns past the end written | out of bounds |

use half::bf16;
use octavo_backend::WeightFormat;
use ptxsim::{Fault, Kernel, Module};

use crate::{
    case::{Case, Shape, bits, spans},
    device::{Arguments, Device, Extent, ptx_of},
    int4,
};

/// A kernel and a problem for it.
struct Subject {
    stem: &'static str,
    kernel: &'static str,
    /// Threads of a block.
    threads: u32,
    /// Runs a kernel in this one's place; gives the bits of what it wrote.
    run: fn(&Kernel) -> Result<Vec<u32>, Fault>,
}

const DECODE: Subject = Subject {
    stem: "attention",
    kernel: "attention_decode_d64",
    threads: 128,
    run: |kernel| attention().decode_with(kernel).map(|outcome| widened(&outcome.out)),
};
const PREFILL: Subject = Subject {
    stem: "attention",
    kernel: "attention_prefill_d64",
    threads: 128,
    run: |kernel| attention().prefill_with(kernel).map(|outcome| widened(&outcome.out)),
};
const GEMM: Subject = Subject {
    stem: "int4_matmul",
    kernel: "int4_gemm_g64",
    threads: 128,
    // Rows and columns that fill no tile; five stages of ten chunks, of which the last lies where the sums are joined.
    run: |kernel| {
        let outcome = int4::Case::new(WeightFormat::Int4Group64, 5, 72, 640).gemm_with(kernel, 1)?;
        Ok(outcome.values.iter().map(|value| value.to_bits()).collect())
    },
};
const NORM: Subject = Subject { stem: "pointwise", kernel: "norm_f32", threads: 256, run: norm };
const SILU: Subject = Subject { stem: "pointwise", kernel: "silu_and_mul", threads: 128, run: silu };
const ATTENTION: [Subject; 2] = [DECODE, PREFILL];
const STAGED: [Subject; 3] = [DECODE, PREFILL, GEMM];

/// Three chunks of positions, the last one not full.
fn attention() -> Case {
    Case::new(Shape::plain(2, 1, 64), &spans(&[(590, 20)]))
}

fn widened(values: &[bf16]) -> Vec<u32> {
    bits(values).into_iter().map(u32::from).collect()
}

fn norm(kernel: &Kernel) -> Result<Vec<u32>, Fault> {
    let mut device = Device::new();
    let out = device.poisoned::<f32>(1024);
    let pointers = [out, device.upload(&[1.0f32; 1024]), 0, device.upload(&[1.0f32; 1024])];
    let arguments = Arguments::default().all(&pointers).with(1024i32).with(1e-5f32);
    device.run(kernel, Extent { grid: [1, 1, 1], block: 256, shared: 0 }, &arguments)?;
    Ok(device.download(out, 1024))
}

fn silu(kernel: &Kernel) -> Result<Vec<u32>, Fault> {
    let mut device = Device::new();
    let (out, input) = (device.poisoned::<bf16>(2 * 24), device.upload(&[1.0f32; 2 * 48]));
    let arguments = Arguments::default().all(&[out, input]).with(24i32);
    device.run(kernel, Extent { grid: [2, 1, 1], block: 128, shared: 0 }, &arguments)?;
    Ok(widened(&device.download(out, 2 * 24)))
}

impl Subject {
    fn ptx(&self) -> String {
        ptx_of(self.stem, self.kernel)
    }

    fn outcome(&self, ptx: &str) -> Result<Vec<u32>, Fault> {
        (self.run)(Module::parse(ptx).unwrap().kernel(self.kernel).unwrap())
    }

    /// The mutant stops with a fault that one of `kinds` describes and that says where it is.
    fn assert_stops(&self, what: &str, mutant: &str, kinds: &[&str]) {
        let what = format!("{}, {what}", self.kernel);
        let Err(fault) = self.outcome(mutant) else { panic!("{what}: unnoticed") };
        let text = fault.to_string();
        assert!(kinds.iter().any(|kind| fault.kind.to_string().contains(kind)), "{what}: {text}");
        assert_eq!(fault.kernel, self.kernel, "{what}");
        let line = mutant.lines().nth(fault.line as usize - 1).unwrap();
        let opcode = fault.instruction.split_whitespace().find(|word| !word.starts_with('@')).unwrap();
        assert!(line.contains(opcode), "{what}: {text}, and the line is {line}");
        assert!(fault.thread < self.threads, "{what}: {text}");
        let [x, y, z] = fault.block;
        let place = format!("block {x},{y},{z}, thread {}", fault.thread);
        assert!(text.contains(&place) && text.contains(&format!("PTX line {}", fault.line)), "{what}: {text}");
    }

    /// The mutant runs to its end, and its numbers are others.
    fn assert_wrong(&self, what: &str, mutant: &str) {
        let found = self.outcome(mutant).unwrap_or_else(|fault| panic!("{}, {what}: {fault}", self.kernel));
        assert!(found != self.outcome(&self.ptx()).unwrap(), "{}, {what}: unnoticed", self.kernel);
    }
}

fn begins(line: &str, start: &str) -> bool {
    line.trim_start().starts_with(start)
}

fn count(ptx: &str, start: &str) -> usize {
    ptx.lines().filter(|line| begins(line, start)).count()
}

/// With something else in place of the `index`-th statement that begins with `start`.
fn changed(ptx: &str, start: &str, index: usize, change: impl Fn(&str) -> String) -> String {
    assert!(index < count(ptx, start), "no number {index} of the statements that begin with {start:?}");
    let mut seen = 0;
    let mut line_of = |line: &str| {
        seen += usize::from(begins(line, start));
        if begins(line, start) && seen == index + 1 { change(line) } else { line.to_owned() }
    };
    ptx.lines().map(&mut line_of).collect::<Vec<_>>().join("\n")
}

fn without(ptx: &str, start: &str, index: usize) -> String {
    changed(ptx, start, index, |_| String::new())
}

/// The statement, done by threads below `limit` alone.
fn only_below(statement: &str, special: &str, limit: u32) -> String {
    format!("{{ .reg .u32 t; .reg .pred p; mov.u32 t, {special}; setp.lt.u32 p, t, {limit}; @p {statement} }}")
}

#[test]
fn the_kernels_themselves_run() {
    for subject in [DECODE, PREFILL, GEMM, NORM, SILU] {
        assert!(subject.outcome(&subject.ptx()).is_ok(), "{}", subject.kernel);
    }
}

#[test]
fn faults_1_8_and_11_every_barrier_is_needed() {
    for subject in [DECODE, PREFILL, GEMM, NORM] {
        let ptx = subject.ptx();
        for index in 0..count(&ptx, "bar.sync") {
            let mutant = without(&ptx, "bar.sync", index);
            subject.assert_stops(&format!("barrier {index}"), &mutant, &["hazard", "uninit"]);
        }
    }
}

#[test]
fn fault_2_a_barrier_for_half_of_the_warps() {
    for subject in STAGED {
        let mutant = changed(&subject.ptx(), "bar.sync", 1, |line| only_below(line, "%tid.x", subject.threads / 2));
        subject.assert_stops("barrier 1", &mutant, &["barrier", "hazard"]);
    }
}

#[test]
fn fault_3_positions_that_are_not_masked() {
    for subject in ATTENTION {
        let ptx = subject.ptx();
        let is_mask = |line: &&str| line.contains("selp.f32") && line.contains("0fFF800000");
        assert!(ptx.lines().filter(is_mask).count() >= 8, "{}", subject.kernel);
        let kept: Vec<&str> = ptx.lines().filter(|line| !is_mask(line)).collect();
        subject.assert_wrong("without masks", &kept.join("\n"));
    }
}

#[test]
fn fault_4_one_row_too_many_of_shared_memory() {
    for size in [64, 256] {
        let mut case = Case::new(Shape::plain(2, 1, size), &spans(&[(300, 70)]));
        // The last row has no place any more.
        case.denied = 2 * size;
        for (name, kernel) in [("decode", case.kernel("decode")), ("prefill", case.kernel("prefill"))] {
            let outcome = if name == "decode" { case.decode_with(kernel) } else { case.prefill_with(kernel) };
            let fault = outcome.err().unwrap_or_else(|| panic!("{name} of {size} needs less"));
            assert!(fault.to_string().contains("out-of-bounds shared") && fault.line > 0, "{name} of {size}: {fault}");
        }
    }
    let far = |line: &str| line.replacen("], [", "+65536], [", 1);
    for subject in STAGED {
        let mutant = changed(&subject.ptx(), "cp.async.cg.shared.global", 0, far);
        subject.assert_stops("a row behind the last", &mutant, &["out-of-bounds shared"]);
    }
}

#[test]
fn fault_5_an_address_that_is_not_aligned() {
    for subject in STAGED {
        let shifted = |line: &str| line.replacen("], 16", "+4], 16", 1);
        let mutant = changed(&subject.ptx(), "cp.async.cg.shared.global", 0, shifted);
        subject.assert_stops("a copy", &mutant, &["misaligned"]);
    }
    let shifted = |line: &str| line.replacen("];", "+4];", 1);
    SILU.assert_stops("a load", &changed(&SILU.ptx(), "ld.global.nc.v4.f32", 0, shifted), &["misaligned"]);
}

#[test]
fn fault_6_no_wait_for_a_copy() {
    for subject in STAGED {
        let ptx = subject.ptx();
        // The last wait of the product is for stages that nobody fills.
        let waits = if subject.stem == "attention" { count(&ptx, "cp.async.wait_group") } else { 1 };
        for index in 0..waits {
            let mutant = without(&ptx, "cp.async.wait_group", index);
            subject.assert_stops(&format!("wait {index}"), &mutant, &["in flight"]);
        }
    }
}

#[test]
fn fault_7_a_shuffle_that_half_of_the_warp_reaches() {
    for subject in [DECODE, PREFILL, NORM] {
        let mutant = changed(&subject.ptx(), "shfl.sync", 0, |line| only_below(line, "%laneid", 16));
        subject.assert_stops("shuffle 0", &mutant, &["mask"]);
    }
}

#[test]
fn fault_9_a_slot_that_is_never_written() {
    for subject in [DECODE, NORM] {
        let ptx = subject.ptx();
        for index in 0..count(&ptx, "st.shared") {
            subject.assert_stops(&format!("store {index}"), &without(&ptx, "st.shared", index), &["uninit"]);
        }
    }
    for subject in STAGED {
        let mutant = without(&subject.ptx(), "cp.async.cg.shared.global", 0);
        subject.assert_stops("copy 0", &mutant, &["uninit"]);
    }
}

#[test]
fn fault_10_blocks_that_write_the_same_row() {
    DECODE.assert_wrong("the same chunk", &DECODE.ptx().replace("%ctaid.z", "0"));
    SILU.assert_wrong("the same row", &SILU.ptx().replace("%ctaid.x", "0"));
}

#[test]
fn fault_12_a_mask_that_leaves_lanes_out() {
    for subject in [DECODE, PREFILL, NORM] {
        let narrow = |line: &str| format!("{}, 65535;", line.rsplit_once(',').unwrap().0);
        subject.assert_stops("shuffle 0", &changed(&subject.ptx(), "shfl.sync", 0, narrow), &["mask"]);
    }
}

#[test]
fn fault_13_lanes_that_exchange_without_a_barrier() {
    let exchange = |barrier: &str| {
        let line = format!(
            "{{ .shared .align 8 .b8 exchange[1024]; .reg .u32 own, other; mov.u32 own, %tid.x; shl.b32 own, own, 2; \
             mov.u32 other, exchange; add.u32 own, own, other; xor.b32 other, own, 4; st.shared.u32 [own], own; \
             {barrier} ld.shared.u32 other, [other]; }}\n"
        );
        changed(&NORM.ptx(), "ld.param.u64", 0, |first| format!("{line}{first}"))
    };
    assert!(NORM.outcome(&exchange("bar.warp.sync -1;")).is_ok());
    NORM.assert_stops("an exchange", &exchange(""), &["hazard"]);
}

#[test]
fn fault_14_what_lies_past_the_end_is_written() {
    SILU.assert_stops("any column", &without(&SILU.ptx(), "@%p1 bra", 0), &["out-of-bounds global"]);
    let ptx = GEMM.ptx();
    let store = ptx.lines().position(|line| begins(line, "st.global")).unwrap();
    let guard = ptx.lines().take(store).filter(|line| begins(line, "@")).last().unwrap().trim_start();
    GEMM.assert_stops("any row", &without(&ptx, guard, 0), &["out-of-bounds global"]);
}

#[test]
fn copies_that_ignore_nothing_are_noticed() {
    // With 16 source bytes always, what nobody sees is read: NaN of unused slots, entries beyond a table.
    let ptx = DECODE.ptx();
    let mut mutant = ptx.clone();
    for line in ptx.lines().filter(|line| begins(line, "cp.async.cg.shared.global")) {
        let (kept, _) = line.rsplit_once(',').unwrap();
        mutant = mutant.replacen(line, &format!("{kept};"), 1);
    }
    assert_ne!(DECODE.outcome(&mutant).ok(), DECODE.outcome(&ptx).ok());
}
