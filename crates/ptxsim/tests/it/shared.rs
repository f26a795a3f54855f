//! Shared memory: what counts as written, and which accesses a barrier must separate.

use crate::common::{fault_of, ptx, run_body, run_ptx, upload_words, words};
use ptxsim::{AccessKind, Fault, FaultKind, Memory};

/// `%r1` the thread, `%r2` its word in shared memory, `%r3` its neighbour's (thread ^ 1), `%r4` that of thread ^ 32.
const ADDRESSES: &str = "mov.u32 %r1, %tid.x;\nmov.u32 %r9, dynamic;\nmad.lo.s32 %r2, %r1, 4, %r9;\nxor.b32 %r3, %r2, 4;\nxor.b32 %r4, %r2, 128;\n";

fn run(body: &str, threads: u32) -> Result<(), FaultKind> {
    run_body(&format!("{ADDRESSES}{body}"), threads).map(|_| ()).map_err(|fault| fault.kind)
}

/// The kinds of the two accesses, whichever of them ran first.
fn hazard(body: &str, threads: u32) -> [AccessKind; 2] {
    match run(body, threads) {
        Err(FaultKind::SharedHazard { access, earlier, .. }) if access == AccessKind::Load => [access, earlier],
        Err(FaultKind::SharedHazard { access, earlier, .. }) => [earlier, access],
        other => panic!("{other:?} where a hazard was planted"),
    }
}

#[test]
fn a_word_that_nobody_wrote_cannot_be_read() {
    let kind =
        run("setp.ne.s32 %p1, %r1, 5;\n@%p1 st.shared.u32 [%r2], 0;\nbar.sync 0;\nld.shared.u32 %r5, [%r2];", 32)
            .unwrap_err();
    assert_eq!(kind, FaultKind::UninitialisedShared { access: AccessKind::Load, bytes: 4, address: 20 });
}

#[test]
fn a_block_does_not_see_what_an_older_block_wrote() {
    let text = ptx(
        0,
        "mov.u32 %r1, %ctaid.x;\nsetp.eq.s32 %p1, %r1, 0;\n@%p1 st.shared.u32 [dynamic], 1;\nld.shared.u32 %r2, [dynamic];",
    );
    let module = ptxsim::Module::parse(&text).unwrap();
    let kernel = module.kernel("k").unwrap();
    let launch = ptxsim::Launch { kernel, grid: [2, 1, 1], block: [1, 1, 1], dynamic_shared: 4, params: &[] };
    let fault: Fault = launch.run(&mut Memory::new(1)).expect_err("a fault");
    assert_eq!(fault.block, [1, 0, 0]);
    assert!(matches!(fault.kind, FaultKind::UninitialisedShared { .. }), "{fault}");
}

#[test]
fn a_barrier_orders_the_warps_and_without_it_there_is_a_hazard() {
    assert_eq!(run("st.shared.u32 [%r2], 0;\nbar.sync 0;\nld.shared.u32 %r5, [%r4];", 64), Ok(()));
    assert_eq!(
        hazard("st.shared.u32 [%r2], 0;\nbar.sync 0;\nst.shared.u32 [%r2], 1;\nld.shared.u32 %r5, [%r4];", 64),
        [AccessKind::Load, AccessKind::Store]
    );
}

#[test]
fn a_write_after_a_read_of_another_thread_needs_a_barrier() {
    let read = "st.shared.u32 [%r2], 0;\nbar.sync 0;\nld.shared.u32 %r5, [%r4];\n";
    assert_eq!(hazard(&format!("{read}st.shared.u32 [%r2], 1;"), 64), [AccessKind::Load, AccessKind::Store]);
    assert_eq!(run(&format!("{read}bar.sync 0;\nst.shared.u32 [%r2], 1;"), 64), Ok(()));
    let many = "st.shared.u32 [%r2], 0;\nbar.sync 0;\nld.shared.u32 %r5, [dynamic];\nsetp.eq.s32 %p1, %r1, 63;\n";
    assert_eq!(hazard(&format!("{many}@%p1 st.shared.u32 [dynamic], 1;"), 64), [AccessKind::Load, AccessKind::Store]);
}

#[test]
fn lanes_of_a_warp_need_their_own_barrier() {
    let exchange = |between: &str| format!("st.shared.u32 [%r2], %r1;\n{between}ld.shared.u32 %r5, [%r3];");
    assert_eq!(hazard(&exchange(""), 32), [AccessKind::Load, AccessKind::Store]);
    assert_eq!(
        hazard(&exchange("shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1;\n"), 32),
        [AccessKind::Load, AccessKind::Store]
    );
    assert_eq!(run(&exchange("bar.warp.sync -1;\n"), 32), Ok(()));
    assert_eq!(run(&exchange("bar.sync 0;\n"), 32), Ok(()));
    // Synchronising within the warp says nothing about another warp.
    let across = "st.shared.u32 [%r2], %r1;\nbar.sync 0;\nst.shared.u32 [%r2], %r1;\nbar.warp.sync -1;\nld.shared.u32 %r5, [%r4];";
    assert_eq!(hazard(across, 64), [AccessKind::Load, AccessKind::Store]);
}

#[test]
fn a_part_of_a_warp_that_meets_orders_only_itself() {
    let body = "and.b32 %r6, %r1, 1;\nst.shared.u32 [%r2], %r1;\nsetp.lt.u32 %p1, %r1, 16;\nmov.b32 %r7, 0xffff;\nmov.b32 %r8, 0xffff0000;\nselp.b32 %r7, %r7, %r8, %p1;\n\
        @%p1 bar.warp.sync 0xffff;\n@%p1 ld.shared.u32 %r5, [%r3];\n";
    assert_eq!(run(body, 32), Ok(()));
    let unsynchronised = body.replace("@%p1 ld.shared", "ld.shared");
    assert_eq!(hazard(&unsynchronised, 32), [AccessKind::Load, AccessKind::Store]);
}

#[test]
fn lanes_may_write_neighbouring_halves_of_a_word_and_equal_values_to_one_place() {
    let halves = "cvt.u16.u32 %rs1, %r1;\nshl.b32 %r5, %r1, 1;\nst.shared.u16 [%r5], %rs1;\nbar.warp.sync -1;\nxor.b32 %r5, %r5, 2;\nld.shared.u16 %rs2, [%r5];";
    assert_eq!(run(halves, 32), Ok(()));
    assert_eq!(run("st.shared.u32 [dynamic], 7;", 32), Ok(()));
    assert_eq!(hazard("st.shared.u32 [dynamic], %r1;", 32), [AccessKind::Store, AccessKind::Store]);
    assert_eq!(hazard("st.shared.u32 [dynamic], 7;", 64), [AccessKind::Store, AccessKind::Store]);
}

#[test]
fn atomics_do_not_disturb_each_other() {
    let count = "setp.eq.s32 %p1, %r1, 0;\n@%p1 st.shared.u32 [dynamic], 0;\nbar.sync 0;\natom.shared.add.u32 %r5, [dynamic], 1;\n";
    assert_eq!(run(count, 64), Ok(()));
    assert_eq!(run(&format!("{count}bar.sync 0;\nld.shared.u32 %r6, [dynamic];"), 64), Ok(()));
    assert_eq!(hazard(&format!("{count}ld.shared.u32 %r6, [dynamic];"), 64), [AccessKind::Load, AccessKind::Atomic]);
    assert!(matches!(
        run("red.shared.add.u32 [dynamic], 1;", 32),
        Err(FaultKind::UninitialisedShared { access: AccessKind::Atomic, .. })
    ));
}

/// A kernel that copies 16 bytes a thread and then does `rest`; the thread's 16 bytes are at `%r2`, its neighbour's at `%r3`.
fn copy(size: &str, rest: &str, threads: u32) -> Result<(Memory, u64, ptxsim::Report), FaultKind> {
    let mut memory = Memory::new(1 << 20);
    let source = upload_words(
        &mut memory,
        &[words(1), words(2), words(3), words(4), words(5), words(6), words(7), words(8)].concat(),
    );
    let out = memory.allocate(1024).unwrap();
    let body = format!(
        "ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\nmov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\nxor.b32 %r3, %r2, 16;\n\
         mul.wide.u32 %rd3, %r1, 16;\nadd.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\nsetp.lt.u32 %p1, %r1, 3;\nselp.b32 %r8, 16, 0, %p1;\n\
         cp.async.cg.shared.global.L2::128B [%r2], [%rd4], 16{size};\n{rest}"
    );
    let report = run_ptx(&mut memory, &ptx(2, &body), threads, 1024, &[source, out]).map_err(|fault| fault.kind)?;
    Ok((memory, out, report))
}

const READ_OWN: &str =
    "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2];\nst.global.v4.u32 [%rd5], {%r10, %r11, %r12, %r13};\n";

#[test]
fn an_asynchronous_copy_is_there_after_the_wait_and_for_others_after_a_barrier() {
    let wait = "cp.async.commit_group;\ncp.async.wait_group 0;\n";
    let (memory, out, report) = copy("", &format!("{wait}{READ_OWN}"), 32).unwrap();
    assert_eq!(crate::common::read_words(&memory, out, 32), words(1));
    assert_eq!((report.async_copy_bytes, report.global_loads.sectors, report.global_loads.requests), (512, 16, 1));
    assert!(matches!(copy("", READ_OWN, 32), Err(FaultKind::InFlight { access: AccessKind::Load, writer: 0, .. })));
    assert!(
        matches!(copy("", &format!("cp.async.wait_group 0;\n{READ_OWN}"), 32), Err(FaultKind::InFlight { .. })),
        "nothing was committed"
    );
    assert!(copy("", &format!("cp.async.wait_all;\n{READ_OWN}"), 32).is_ok());
    let other = READ_OWN.replace("[%r2]", "[%r3]");
    assert!(matches!(copy("", &format!("{wait}{other}"), 32), Err(FaultKind::SharedHazard { .. })));
    assert!(copy("", &format!("{wait}bar.sync 0;\n{other}"), 32).is_ok());
    assert!(matches!(
        copy("", &format!("cp.async.commit_group;\nbar.sync 0;\n{READ_OWN}"), 32),
        Err(FaultKind::InFlight { .. })
    ));
}

#[test]
fn a_wait_leaves_the_newest_groups_in_flight() {
    let second = "add.s32 %r4, %r2, 512;\ncp.async.commit_group;\ncp.async.ca.shared.global [%r4], [%rd4], 8;\ncp.async.commit_group;\ncp.async.wait_group 1;\n";
    assert!(copy("", &format!("{second}{READ_OWN}"), 32).is_ok());
    let newest = format!("{second}ld.shared.u32 %r10, [%r4];");
    assert!(matches!(copy("", &newest, 32), Err(FaultKind::InFlight { address: 512, .. })));
}

#[test]
fn a_stage_that_others_still_read_cannot_be_refilled() {
    let read = "cp.async.wait_all;\nbar.sync 0;\nld.shared.u32 %r10, [%r3];\n";
    let refill = "cp.async.cg.shared.global [%r2], [%rd4], 16;\n";
    let kind = copy("", &format!("{read}{refill}"), 32).unwrap_err();
    assert!(
        matches!(kind, FaultKind::SharedHazard { access: AccessKind::AsyncCopy, earlier: AccessKind::Load, .. }),
        "{kind}"
    );
    assert!(copy("", &format!("{read}bar.sync 0;\n{refill}"), 32).is_ok());
    let twice = copy("", refill, 32).unwrap_err();
    assert!(matches!(twice, FaultKind::InFlight { access: AccessKind::AsyncCopy, .. }), "{twice}");
}

#[test]
fn a_copy_of_fewer_bytes_fills_up_with_zeros_and_reads_nothing_more() {
    let wait = format!("cp.async.wait_all;\n{READ_OWN}");
    let (memory, out, report) = copy(", %r8", &wait, 32).unwrap();
    let result = crate::common::read_words(&memory, out, 128);
    assert_eq!((&result[..12], &result[12..], report.async_copy_bytes), (&words(1)[..12], &[0; 116][..], 48));
    let (memory, out, _) = copy(", !%p1", &wait, 32).unwrap();
    let ignored = crate::common::read_words(&memory, out, 128);
    assert_eq!((&ignored[..12], &ignored[12..]), (&words(1)[..12], &[0; 116][..]));
    let (memory, out, _) = copy(", 6", &wait, 32).unwrap();
    assert_eq!(crate::common::read_words(&memory, out, 3), [words(1)[0], words(1)[1] & 0xffff, 0]);
}

#[test]
fn a_copy_checks_both_addresses() {
    let past = "add.s64 %rd6, %rd4, 1000;\ncp.async.cg.shared.global [%r2+512], [%rd6], 16;\n";
    assert!(matches!(copy("", past, 32), Err(FaultKind::Misaligned { access: AccessKind::AsyncCopy, .. })));
    let past = past.replace("1000", "1008");
    assert!(matches!(copy("", &past, 32), Err(FaultKind::GlobalOutOfBounds { access: AccessKind::AsyncCopy, .. })));
    let past = "cp.async.cg.shared.global [%r2+528], [%rd4], 16;\n";
    assert!(matches!(
        copy("", past, 32),
        Err(FaultKind::OutOfBounds { access: AccessKind::AsyncCopy, address: 1024, .. })
    ));
}

#[test]
fn the_module_gives_each_kernel_only_the_shared_variables_it_uses() {
    let text = ptx(0, "mov.u32 %r1, second;\nst.shared.u32 [%r1], 1;\nst.shared.u32 [%r1+12], 1;");
    let text =
        text.replace(".visible", ".shared .align 4 .b8 first[100];\n.shared .align 16 .b8 second[16];\n.visible");
    let module = ptxsim::Module::parse(&text).unwrap();
    assert_eq!(module.kernel("k").unwrap().static_shared_bytes(), 16);
    run_ptx(&mut Memory::new(1), &text, 1, 0, &[]).unwrap();
    let fault = fault_of("st.shared.u32 [dynamic+1024], 1;", 1);
    assert!(matches!(fault, FaultKind::OutOfBounds { .. }));
}
