//! Counters on patterns whose traffic is known.

use crate::common::{ptx, run_ptx};
use ptxsim::{Launch, Memory, Module, Report, SharedTraffic, Traffic};

/// One load in each of `threads` threads, `stride` bytes apart.
fn load(kind: &str, stride: usize, threads: u32) -> Report {
    let mut memory = Memory::new(1 << 20);
    let address = memory.allocate(stride * threads as usize + 64).unwrap();
    let body = format!(
        "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmad.wide.u32 %rd2, %r1, {stride}, %rd1;\n{kind}, [%rd2];\n"
    );
    let report = run_ptx(&mut memory, &ptx(1, &body), threads, 0, &[address]).unwrap();
    assert_eq!(report.buffers[&address].loads, report.global_loads);
    report
}

#[test]
fn a_coalesced_load_moves_four_sectors_a_request_and_uses_them_whole() {
    let float = load("ld.global.f32 %r2", 4, 128).global_loads;
    assert_eq!(float, Traffic { requests: 4, sectors: 16, bytes: 512 });
    let vector = load("ld.global.v4.f32 {%r2, %r3, %r4, %r5}", 16, 32).global_loads;
    assert_eq!(vector, Traffic { requests: 1, sectors: 16, bytes: 512 });
    let half = load("ld.global.u16 %rs2", 2, 32).global_loads;
    assert_eq!(half, Traffic { requests: 1, sectors: 2, bytes: 64 });
}

#[test]
fn strided_and_repeated_loads_waste_or_share_sectors() {
    assert_eq!(load("ld.global.u32 %r2", 8, 32).global_loads, Traffic { requests: 1, sectors: 8, bytes: 128 });
    assert_eq!(load("ld.global.u32 %r2", 32, 32).global_loads, Traffic { requests: 1, sectors: 32, bytes: 128 });
    assert_eq!(load("ld.global.u32 %r2", 0, 32).global_loads, Traffic { requests: 1, sectors: 1, bytes: 4 });
}

#[test]
fn sectors_are_counted_in_any_order_and_only_for_active_lanes() {
    let count = |body: &str| {
        let mut memory = Memory::new(1 << 20);
        let address = memory.allocate(4096).unwrap();
        let body = format!("ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\n{body}");
        run_ptx(&mut memory, &ptx(1, &body), 32, 0, &[address]).unwrap().global_stores
    };
    let reversed = "sub.s32 %r2, 31, %r1;\nmad.wide.u32 %rd2, %r2, 4, %rd1;\nst.global.u32 [%rd2], %r1;\n";
    assert_eq!(count(reversed), Traffic { requests: 1, sectors: 4, bytes: 128 });
    let scattered = "mul.lo.s32 %r2, %r1, 5;\nand.b32 %r2, %r2, 31;\nmad.wide.u32 %rd2, %r2, 4, %rd1;\nst.global.u32 [%rd2], %r1;\n";
    assert_eq!(count(scattered), Traffic { requests: 1, sectors: 4, bytes: 128 });
    let few = "setp.lt.u32 %p1, %r1, 3;\nmad.wide.u32 %rd2, %r1, 64, %rd1;\n@%p1 st.global.u32 [%rd2], %r1;\n";
    assert_eq!(count(few), Traffic { requests: 1, sectors: 3, bytes: 12 });
    let none = "setp.lt.u32 %p1, %r1, 0;\n@%p1 st.global.u32 [%rd1], %r1;\n";
    assert_eq!(count(none), Traffic::default());
}

#[test]
fn bank_conflicts_are_the_passes_beyond_the_least() {
    let store = |kind: &str, stride: u32| {
        let body = format!("mov.u32 %r1, %tid.x;\nmul.lo.s32 %r2, %r1, {stride};\nst.shared.{kind};\n");
        let text = ptx(0, &body);
        run_ptx(&mut Memory::new(1), &text, 32, 8192, &[]).unwrap().shared
    };
    assert_eq!(store("u32 [%r2], %r1", 4), SharedTraffic { requests: 1, wavefronts: 1, conflicts: 0 });
    assert_eq!(store("u32 [%r2], %r1", 8), SharedTraffic { requests: 1, wavefronts: 2, conflicts: 1 });
    assert_eq!(store("u32 [%r2], %r1", 128), SharedTraffic { requests: 1, wavefronts: 32, conflicts: 31 });
    assert_eq!(store("v2.u32 [%r2], {%r1, %r1}", 8), SharedTraffic { requests: 1, wavefronts: 2, conflicts: 0 });
    assert_eq!(
        store("v4.u32 [%r2], {%r1, %r1, %r1, %r1}", 16),
        SharedTraffic { requests: 1, wavefronts: 4, conflicts: 0 }
    );
    assert_eq!(
        store("v4.u32 [%r2], {%r1, %r1, %r1, %r1}", 32),
        SharedTraffic { requests: 1, wavefronts: 8, conflicts: 4 }
    );
}

#[test]
fn instructions_are_counted_once_a_warp_and_reports_add_up() {
    let text = ptx(0, "mov.u32 %r1, %tid.x;\nadd.s32 %r2, %r1, 1;\n");
    let module = Module::parse(&text).unwrap();
    let kernel = module.kernel("k").unwrap();
    let launch = Launch { kernel, grid: [3, 2, 1], block: [64, 1, 1], dynamic_shared: 0, params: &[] };
    let report = launch.run(&mut Memory::new(1)).unwrap();
    assert_eq!((report.blocks, report.warp_instructions), (6, 6 * 2 * 3));
    let mut sum = report.clone();
    sum += &report;
    sum += load("ld.global.f32 %r2", 4, 32);
    assert_eq!((sum.blocks, sum.global_loads.sectors, sum.buffers.len()), (13, 4, 1));
}

#[test]
fn divergence_is_counted_where_lanes_part() {
    let body = "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 8;\n@%p1 bra $a;\nadd.s32 %r2, %r1, 1;\n$a:\nsetp.lt.u32 %p1, %r1, 80;\n@%p1 bra $b;\nadd.s32 %r2, %r1, 1;\n$b:\n";
    let report = run_ptx(&mut Memory::new(1), &ptx(0, body), 32, 0, &[]).unwrap();
    assert_eq!((report.divergent_branches, report.warp_instructions), (1, 7));
}
