//! Branches, loops, barriers and collectives: who runs together, and who must.

use crate::common::{fault_of, lanes, ptx, read_words, run_body, run_ptx, words};
use ptxsim::{BarrierDivergence, FaultKind, Memory};

const THREAD: &str = "mov.u32 %r1, %tid.x;\n";

fn fault(body: &str, threads: u32) -> FaultKind {
    fault_of(&format!("{THREAD}{body}"), threads)
}

#[test]
fn lanes_part_at_a_branch_and_meet_behind_it() {
    let body = "setp.lt.u32 %p1, %r1, 10;\n@%p1 bra $low;\nadd.s32 %r20, %r1, 100;\nbra.uni $end;\n$low:\nmul.lo.s32 %r20, %r1, 2;\n$end:\n\
        activemask.b32 %r30;\ncvt.u64.u32 %rd20, %r30;\n";
    let (results, masks) = lanes(&[], &[], body);
    let expected: Vec<u32> = (0..32).map(|lane| if lane < 10 { lane * 2 } else { lane + 100 }).collect();
    assert_eq!((results, masks), (expected, vec![0xffff_ffff; 32]));
}

#[test]
fn a_loop_ends_for_each_lane_in_its_own_round() {
    let body = "mov.b32 %r30, 0;\n$loop:\nsetp.ge.u32 %p1, %r30, %r1;\n@%p1 bra $done;\nadd.s32 %r20, %r20, %r30;\nadd.s32 %r30, %r30, 1;\nbra $loop;\n$done:\n\
        activemask.b32 %r31;\ncvt.u64.u32 %rd20, %r31;\n";
    let (results, masks) = lanes(&[], &[], body);
    let expected: Vec<u32> = (0..32u32).map(|lane| lane * lane.saturating_sub(1) / 2).collect();
    assert_eq!((results, masks), (expected, vec![0xffff_ffff; 32]));
}

#[test]
fn nested_divergence_and_guards() {
    let body = "and.b32 %r30, %r1, 1;\nand.b32 %r31, %r1, 2;\nsetp.eq.s32 %p1, %r30, 0;\nsetp.eq.s32 %p2, %r31, 0;\n@!%p1 bra $odd;\n\
        @%p2 bra $zero;\nmov.b32 %r20, 2;\nbra $end;\n$zero:\nmov.b32 %r20, 0;\nbra $end;\n$odd:\n@%p2 mov.b32 %r20, 1;\n@!%p2 mov.b32 %r20, 3;\n$end:\n";
    assert_eq!(lanes(&[], &[], body).0, (0..32).map(|lane| lane % 4).collect::<Vec<_>>());
}

#[test]
fn names_in_braces_are_their_own() {
    let body = "mov.b32 %r20, 1;\n{ .reg .b32 value; .reg .pred p; mov.b32 value, 5; setp.eq.s32 p, %r1, 3; @p add.s32 %r20, value, 2; }\n\
        { .reg .b32 value; mov.b32 value, 1; add.s32 %r20, %r20, value; }\n";
    assert_eq!(lanes(&[], &[], body).0, (0..32).map(|lane| if lane == 3 { 8 } else { 2 }).collect::<Vec<_>>());
}

#[test]
fn special_registers_say_where_a_thread_is() {
    let text = ptx(
        1,
        "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmov.u32 %r2, %tid.y;\nmov.u32 %r3, %tid.z;\nmov.u32 %r4, %ctaid.y;\n\
        mad.lo.s32 %r5, %r3, %ntid.y, %r2;\nmad.lo.s32 %r5, %r5, %ntid.x, %r1;\nmov.u32 %r6, %nctaid.y;\nmad.lo.s32 %r7, %r4, 48, %r5;\nmad.wide.u32 %rd2, %r7, 4, %rd1;\n\
        mov.u32 %r8, %laneid;\nmad.lo.s32 %r8, %r8, 100, %r6;\nst.global.u32 [%rd2], %r8;\n",
    );
    let module = ptxsim::Module::parse(&text).unwrap();
    let mut memory = Memory::new(1 << 20);
    let out = memory.allocate(48 * 4 * 3).unwrap();
    let params = out.to_le_bytes();
    let kernel = module.kernel("k").unwrap();
    ptxsim::Launch { kernel, grid: [1, 3, 1], block: [4, 6, 2], dynamic_shared: 0, params: &params }
        .run(&mut memory)
        .unwrap();
    let expected: Vec<u32> = (0..144).map(|index| index % 48 % 32 * 100 + 3).collect();
    assert_eq!(read_words(&memory, out, 144), expected);
}

#[test]
fn shuffles_read_their_lane_and_say_if_it_was_in_range() {
    let shuffle = |mode: &str, by: u32, clamp: u32| {
        lanes(
            &[&words(1)],
            &[],
            &format!("shfl.sync.{mode}.b32 %r20|%p1, %r10, {by}, {clamp}, -1;\nselp.b64 %rd20, 1, 0, %p1;"),
        )
    };
    let check = |(results, valid): (Vec<u32>, Vec<u64>), source: &dyn Fn(usize) -> Option<usize>| {
        for lane in 0..32 {
            assert_eq!(results[lane], words(1)[source(lane).unwrap_or(lane)]);
            assert_eq!(valid[lane], u64::from(source(lane).is_some()));
        }
    };
    check(shuffle("bfly", 5, 31), &|lane| Some(lane ^ 5));
    check(shuffle("down", 3, 31), &|lane| (lane + 3 < 32).then_some(lane + 3));
    check(shuffle("up", 3, 0), &|lane| lane.checked_sub(3));
    check(shuffle("idx", 7, 31), &|_| Some(7));
    // Segments of 8 lanes: the control word has 24 in its second byte.
    check(shuffle("down", 3, 0x181f), &|lane| (lane % 8 + 3 < 8).then_some(lane + 3));
    check(shuffle("up", 3, 0x1800), &|lane| (lane % 8 >= 3).then(|| lane - 3));
    check(shuffle("idx", 6, 0x181f), &|lane| Some(lane / 8 * 8 + 6));
}

#[test]
fn votes_count_the_members() {
    let body = "setp.lt.u32 %p1, %r10, 0x80000000;\nvote.sync.ballot.b32 %r20, %p1, -1;\nvote.sync.any.pred %p2, %p1, -1;\nvote.sync.all.pred %p3, %p1, -1;\n\
        vote.sync.all.pred %p4, !%p1, -1;\nselp.b64 %rd20, 1, 0, %p2;\nselp.b64 %rd21, 2, 0, %p3;\nselp.b64 %rd22, 4, 0, %p4;\nadd.s64 %rd20, %rd20, %rd21;\nadd.s64 %rd20, %rd20, %rd22;\n";
    let (results, flags) = lanes(&[&words(1)], &[], body);
    let ballot = (0..32).fold(0, |ballot, lane| ballot | u32::from(words(1)[lane] < 1 << 31) << lane);
    assert_eq!((results, flags), (vec![ballot; 32], vec![1; 32]));
    let (_, flags) = lanes(&[&[5; 32]], &[], body);
    assert_eq!(flags, vec![3; 32]);
}

#[test]
fn lanes_match_and_reduce() {
    let values: Vec<u32> = (0..32).map(|lane| lane % 3).collect();
    let (alike, _) = lanes(&[&values], &[], "match.any.sync.b32 %r20, %r10, -1;");
    let (all, same) = lanes(&[&values], &[], "match.all.sync.b32 %r20|%p1, %r10, -1;\nselp.b64 %rd20, 1, 0, %p1;");
    let members = |rest: u32| (0..32).filter(|lane| lane % 3 == rest).fold(0, |mask, lane| mask | 1 << lane);
    assert_eq!(alike, values.iter().map(|value| members(*value)).collect::<Vec<_>>());
    assert_eq!((all, same), (vec![0; 32], vec![0; 32]));
    let reduced = |text: &str| lanes(&[&words(4)], &[], text).0;
    assert_eq!(
        reduced("redux.sync.add.u32 %r20, %r10, -1;"),
        vec![words(4).into_iter().fold(0, u32::wrapping_add); 32]
    );
    assert_eq!(
        reduced("redux.sync.min.s32 %r20, %r10, -1;"),
        vec![words(4).into_iter().map(|w| w as i32).min().unwrap() as u32; 32]
    );
    assert_eq!(reduced("redux.sync.xor.b32 %r20, %r10, -1;"), vec![words(4).into_iter().fold(0, |a, b| a ^ b); 32]);
}

#[test]
fn groups_of_a_warp_may_shuffle_each_for_itself() {
    let body = "setp.lt.u32 %p1, %r1, 16;\nselp.b32 %r30, 0xffff, 0xffff0000, %p1;\nshfl.sync.bfly.b32 %r20, %r1, 1, 31, %r30;\n";
    assert_eq!(lanes(&[], &[], body).0, (0..32).map(|lane| lane ^ 1).collect::<Vec<_>>());
}

#[test]
fn lanes_that_come_late_to_a_collective_are_waited_for() {
    // The upper half takes a detour that lies behind the shuffle and jumps back to it.
    let body = "mov.b32 %r30, %r1;\nsetp.ge.u32 %p1, %r1, 16;\n@%p1 bra $detour;\n$meet:\nshfl.sync.bfly.b32 %r20, %r30, 16, 31, -1;\nbra $end;\n\
        $detour:\nadd.s32 %r30, %r1, 1000;\nbra $meet;\n$end:\n";
    let expected: Vec<u32> = (0..32).map(|lane| if lane < 16 { lane + 16 + 1000 } else { lane - 16 }).collect();
    assert_eq!(lanes(&[], &[], body).0, expected);
}

#[test]
fn a_shuffle_in_a_divergent_branch_must_name_only_who_comes() {
    let kind =
        fault("setp.lt.u32 %p1, %r1, 16;\n@!%p1 bra $end;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n$end:\n", 32);
    assert_eq!(kind, FaultKind::MemberMask { mask: u32::MAX, arrived: 0xffff });
    let kind = fault("shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffff;", 32);
    assert_eq!(kind, FaultKind::MemberMask { mask: 0xffff, arrived: u32::MAX });
    let kind =
        fault("setp.eq.s32 %p2, %r1, 0;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 vote.sync.any.pred %p3, %p2, -1;\n", 32);
    assert_eq!(kind, FaultKind::MemberMask { mask: u32::MAX, arrived: 0xffff });
    let kind = fault("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", 20);
    assert_eq!(kind, FaultKind::MemberMask { mask: u32::MAX, arrived: 0xf_ffff });
}

#[test]
fn a_shuffle_cannot_read_a_lane_that_does_not_take_part() {
    let kind = fault("setp.lt.u32 %p1, %r1, 16;\n@%p1 shfl.sync.bfly.b32 %r2, %r1, 16, 31, 0xffff;", 32);
    assert_eq!(kind, FaultKind::InactiveSource { source_lane: 16, arrived: 0xffff });
}

#[test]
fn a_matrix_instruction_needs_the_whole_warp() {
    let body = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r10,%r11,%r12,%r13}, {%r2,%r3,%r4,%r5}, {%r6,%r7}, {%r10,%r11,%r12,%r13};\n";
    assert!(run_body(body, 32).is_ok());
    assert_eq!(fault(&format!("setp.ne.s32 %p1, %r1, 3;\n@%p1 {body}"), 32), FaultKind::PartialWarp { arrived: !8 });
    assert_eq!(fault(body, 16), FaultKind::PartialWarp { arrived: 0xffff });
}

#[test]
fn a_barrier_in_a_part_of_the_block_is_divergent() {
    let part = fault("setp.lt.u32 %p1, %r1, 16;\n@!%p1 bra $end;\nbar.sync 0;\n$end:\nadd.s32 %r2, %r1, 1;\n", 32);
    assert_eq!(part, FaultKind::DivergentBarrier(BarrierDivergence::Returned { count: 16 }));
    let other =
        fault("setp.lt.u32 %p1, %r1, 16;\n@!%p1 bra $else;\nbar.sync 0;\nbra $end;\n$else:\nbar.sync 0;\n$end:\n", 32);
    assert!(matches!(other, FaultKind::DivergentBarrier(BarrierDivergence::PartOfWarp { .. })), "{other}");
    let returned = fault("setp.lt.u32 %p1, %r1, 32;\n@%p1 bar.sync 0;\n", 64);
    assert_eq!(returned, FaultKind::DivergentBarrier(BarrierDivergence::Returned { count: 32 }));
    let elsewhere =
        fault("setp.lt.u32 %p1, %r1, 32;\n@!%p1 bra $else;\nbar.sync 0;\nbra $end;\n$else:\nbar.sync 0;\n$end:\n", 64);
    assert!(
        matches!(elsewhere, FaultKind::DivergentBarrier(BarrierDivergence::Elsewhere { warp: 1, .. })),
        "{elsewhere}"
    );
    let stuck = fault(
        "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $wait;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n$wait:\nbar.sync 0;\n",
        32,
    );
    assert!(matches!(stuck, FaultKind::MemberMask { mask: u32::MAX, arrived: 0xffff_0000 }), "{stuck}");
}

#[test]
fn a_barrier_of_a_part_of_the_block_is_not_modelled_and_says_so() {
    assert_eq!(fault("bar.sync 1, 32;", 64), FaultKind::PartialBarrier { threads: 32, block_threads: 64 });
    assert!(run_body("bar.sync 1, 64;\nbarrier.sync.aligned 0;", 64).is_ok());
}

#[test]
fn barriers_reduce_over_the_block() {
    let text = ptx(
        1,
        "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 40;\nbar.red.popc.u32 %r2, 0, %p1;\n\
        barrier.sync.aligned 0;\nbar.red.and.pred %p2, 0, %p1;\nbarrier.red.or.pred %p3, 0, !%p1;\nselp.b32 %r3, 1000, 0, %p2;\nselp.b32 %r4, 2000, 0, %p3;\n\
        add.s32 %r2, %r2, %r3;\nadd.s32 %r2, %r2, %r4;\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nst.global.u32 [%rd2], %r2;\n",
    );
    let mut memory = Memory::new(1 << 20);
    let out = memory.allocate(256).unwrap();
    let report = run_ptx(&mut memory, &text, 64, 0, &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 64), vec![2040; 64]);
    assert_eq!(report.barriers, 4);
}

#[test]
fn an_endless_loop_a_trap_and_a_missing_return_are_faults() {
    assert_eq!(fault("$loop:\nadd.s32 %r2, %r2, 1;\nbra $loop;\n", 32), FaultKind::Budget { instructions: 1_000_000 });
    assert_eq!(fault("setp.eq.s32 %p1, %r1, 7;\n@%p1 trap;\n", 32), FaultKind::Trap);
    let text = ptx(0, "mov.u32 %r1, %tid.x;").replace("\nret;", "");
    let fault = run_ptx(&mut Memory::new(1), &text, 32, 0, &[]).expect_err("a fault");
    assert_eq!((fault.kind, fault.instruction.as_str()), (FaultKind::PastTheEnd, ""));
}

#[test]
fn threads_that_return_early_do_not_come_back() {
    let body = "mov.b32 %r20, 1;\nsetp.lt.u32 %p1, %r1, 8;\n@%p1 bra $low;\n@!%p1 bra $store;\n$low:\nmov.b32 %r20, 2;\n$store:\n";
    let (results, _) = lanes(&[], &[], body);
    assert_eq!(results, (0..32).map(|lane| if lane < 8 { 2 } else { 1 }).collect::<Vec<_>>());
    let text = ptx(
        1,
        "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nsetp.gt.u32 %p1, %r1, 8;\n@%p1 ret;\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nst.global.u32 [%rd2], %r1;\n",
    );
    let mut memory = Memory::new(1 << 20);
    let out = memory.allocate(36).unwrap();
    run_ptx(&mut memory, &text, 32, 0, &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 9), (0..9).collect::<Vec<_>>());
}
