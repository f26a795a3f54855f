//! Loads, stores, atomics, stacks and constants, and the faults of their addresses.

use crate::common::{fault_of, lanes, ptx, read_doubles, read_words, run_ptx, upload, upload_words, words};
use ptxsim::{AccessKind, Fault, FaultKind, Memory, Report, SpaceName};

/// Runs `body` on a buffer of `bytes` bytes whose address is in `%rd1`, the thread in `%r1`.
fn on_buffer(bytes: usize, body: &str, threads: u32) -> (Memory, u64, Result<Report, Fault>) {
    let mut memory = Memory::new(1 << 20);
    let address = memory.allocate(bytes).unwrap();
    let text = ptx(1, &format!("ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\n{body}"));
    let result = run_ptx(&mut memory, &text, threads, 0, &[address]);
    (memory, address, result)
}

fn fault_on_buffer(bytes: usize, body: &str) -> Fault {
    on_buffer(bytes, body, 32).2.expect_err("a fault")
}

#[test]
fn elements_of_every_width_are_loaded_and_stored() {
    let mut memory = Memory::new(1 << 20);
    let bytes: Vec<u8> = (0..1024).map(|index| (index * 37 + index / 11) as u8).collect();
    let (source, target) = (upload(&mut memory, &bytes), memory.allocate(8 * 32 * 8).unwrap());
    let body = "ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\nmov.u32 %r1, %tid.x;\n\
        mul.wide.u32 %rd3, %r1, 16;\nadd.s64 %rd4, %rd1, %rd3;\nmul.wide.u32 %rd5, %r1, 64;\nadd.s64 %rd6, %rd2, %rd5;\n\
        ld.global.s8 %r2, [%rd4+3];\nst.global.u32 [%rd6], %r2;\n\
        ld.global.u8 %rs1, [%rd4+5];\nst.global.u16 [%rd6+4], %rs1;\nst.global.u8 [%rd6+6], %rs1;\nst.global.u8 [%rd6+7], 9;\n\
        ld.global.nc.u16 %rs2, [%rd4+6];\nst.global.v2.u16 [%rd6+8], {%rs2, %rs1};\nld.global.s16 %r3, [%rd4+6];\nst.global.u32 [%rd6+12], %r3;\n\
        ld.global.nc.L1::no_allocate.v4.u32 {%r4, %r5, %r6, %r7}, [%rd4];\nst.global.v4.b32 [%rd6+16], {%r7, %r6, %r5, %r4};\n\
        ld.global.v2.u64 {%rd7, %rd8}, [%rd4];\nst.global.v2.u64 [%rd6+32], {%rd8, %rd7};\n\
        ld.global.s32 %rd9, [%rd4+4];\nst.global.u64 [%rd6+48], %rd9;\nld.u32 %r8, [%rd4+8];\nst.u32 [%rd6+56], %r8;\n";
    run_ptx(&mut memory, &ptx(2, body), 32, 0, &[source, target]).unwrap();
    for lane in 0..32 {
        let input = &bytes[lane * 16..][..16];
        let output = memory.read(target + lane as u64 * 64, 64).unwrap();
        let word = |index: usize| u32::from_le_bytes(output[index..index + 4].try_into().unwrap());
        assert_eq!(word(0), i32::from(input[3] as i8) as u32);
        assert_eq!(output[4..8], [input[5], 0, input[5], 9]);
        assert_eq!(output[8..12], [input[6], input[7], input[5], 0]);
        assert_eq!(word(12), i32::from(i16::from_le_bytes([input[6], input[7]])) as u32);
        assert_eq!(output[16..32], [&input[12..16], &input[8..12], &input[4..8], &input[0..4]].concat());
        assert_eq!(output[32..48], [&input[8..16], &input[0..8]].concat());
        let signed = i32::from_le_bytes(input[4..8].try_into().unwrap());
        assert_eq!(output[48..56], i64::from(signed).to_le_bytes());
        assert_eq!(output[56..60], input[8..12]);
    }
}

#[test]
fn an_access_past_a_buffer_is_named_with_line_block_and_thread() {
    let fault = fault_on_buffer(124, "mad.wide.u32 %rd2, %r1, 4, %rd1;\nst.global.u32 [%rd2], %r1;\n");
    let FaultKind::GlobalOutOfBounds { access: AccessKind::Store, bytes: 4, address, nearest: Some((base, 124)) } =
        fault.kind
    else {
        panic!("{fault}");
    };
    assert_eq!((address - base, fault.thread, fault.block), (124, 31, [0; 3]));
    let text = fault.to_string();
    assert!(text.contains("kernel k: out-of-bounds global store of 4 bytes"), "{text}");
    assert!(text.contains(": `st.global.u32 [%rd2], %r1`, block 0,0,0, thread 31)"), "{text}");
    let source = ptx(
        1,
        "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nst.global.u32 [%rd2], %r1;\n",
    );
    assert!(source.lines().nth(fault.line as usize - 1).unwrap().starts_with("st.global"));
}

#[test]
fn an_address_below_every_buffer_is_out_of_bounds() {
    let fault = fault_on_buffer(16, "mov.b64 %rd2, 0;\nld.global.u32 %r2, [%rd2];\n");
    assert!(matches!(fault.kind, FaultKind::GlobalOutOfBounds { nearest: None, address: 0, .. }), "{fault}");
}

#[test]
fn a_misaligned_access_is_a_fault() {
    let fault =
        fault_on_buffer(1024, "mad.wide.u32 %rd2, %r1, 16, %rd1;\nld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd2+8];\n");
    let expected = (SpaceName::Global, AccessKind::Load, 16);
    assert!(
        matches!(fault.kind, FaultKind::Misaligned { space, access, bytes, .. } if (space, access, bytes) == expected),
        "{fault}"
    );
}

#[test]
fn a_freed_buffer_is_known_as_freed() {
    let mut memory = Memory::new(1 << 20);
    let address = memory.allocate(64).unwrap();
    assert!(memory.free(address));
    let text = ptx(1, "ld.param.u64 %rd1, [k_param_0];\nld.global.u32 %r2, [%rd1+4];\n");
    let fault = run_ptx(&mut memory, &text, 1, 0, &[address]).expect_err("a fault");
    assert!(matches!(fault.kind, FaultKind::UseAfterFree { bytes: 4, length: 64, .. }), "{fault}");
}

#[test]
fn lanes_may_reach_into_different_buffers() {
    let mut memory = Memory::new(1 << 20);
    let (first, second) = (upload_words(&mut memory, &words(1)), upload_words(&mut memory, &words(2)));
    let out = memory.allocate(128).unwrap();
    let body = "ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\nld.param.u64 %rd3, [k_param_2];\nmov.u32 %r1, %tid.x;\n\
        and.b32 %r2, %r1, 1;\nsetp.eq.s32 %p1, %r2, 0;\nselp.b64 %rd4, %rd1, %rd2, %p1;\nmul.wide.u32 %rd5, %r1, 4;\n\
        add.s64 %rd4, %rd4, %rd5;\nadd.s64 %rd3, %rd3, %rd5;\nld.global.u32 %r3, [%rd4];\nst.global.u32 [%rd3], %r3;\n";
    let report = run_ptx(&mut memory, &ptx(3, body), 32, 0, &[first, second, out]).unwrap();
    let expected: Vec<u32> = (0..32).map(|lane| if lane % 2 == 0 { words(1)[lane] } else { words(2)[lane] }).collect();
    assert_eq!(read_words(&memory, out, 32), expected);
    assert_eq!((report.global_loads.requests, report.global_loads.sectors), (1, 8));
    assert_eq!((report.buffers[&first].loads.sectors, report.buffers[&second].loads.bytes), (4, 64));
}

#[test]
fn atomics_act_lane_after_lane() {
    let body = "atom.global.add.u32 %r2, [%rd1], %r1;\nred.global.max.s32 [%rd1+4], %r1;\natom.global.exch.b32 %r3, [%rd1+8], %r1;\n\
        cvt.rn.f32.u32 %r4, %r1;\nred.global.add.f32 [%rd1+12], %r4;\natom.global.cas.b32 %r5, [%rd1+16], 7, 8;\n\
        cvt.u64.u32 %rd3, %r1;\natom.global.add.u64 %rd4, [%rd1+24], %rd3;\nred.global.or.b32 [%rd1+32], %r1;\n\
        mul.wide.u32 %rd5, %r1, 4;\nadd.s64 %rd6, %rd1, %rd5;\nst.global.u32 [%rd6+64], %r2;\n";
    let mut memory = Memory::new(1 << 20);
    let mut initial = vec![0u32; 48];
    initial[4] = 7;
    let address = upload_words(&mut memory, &initial);
    let text = ptx(1, &format!("ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\n{body}"));
    let report = run_ptx(&mut memory, &text, 32, 0, &[address]).unwrap();
    let result = read_words(&memory, address, 48);
    assert_eq!((result[0], result[1], result[2], result[3], result[4]), (496, 31, 31, 496f32.to_bits(), 8));
    assert_eq!((read_doubles(&memory, address + 24, 1)[0], result[8]), (496, 31));
    let sums: Vec<u32> = (0..32).map(|lane| lane * (lane.max(1) - 1) / 2).collect();
    assert_eq!(result[16..], sums);
    assert_eq!(report.global_atomics.requests, 7);
}

#[test]
fn a_stack_belongs_to_its_thread() {
    let text = ptx(
        1,
        "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmov.u64 %rd10, depot;\ncvta.local.u64 %rd11, %rd10;\n\
        st.local.u32 [%rd10+4], %r1;\nst.u32 [%rd11+8], 5;\nbar.warp.sync -1;\nld.local.v2.u32 {%r2, %r3}, [depot+0];\nld.u32 %r3, [%rd11+4];\n\
        ld.local.u32 %r4, [%rd10+8];\nadd.s32 %r3, %r3, %r4;\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nst.global.u32 [%rd2], %r3;\n",
    );
    let text = text.replace("{\n.reg .pred", "{\n.local .align 8 .b8 depot[16];\n.reg .pred");
    let mut memory = Memory::new(1 << 20);
    let out = memory.allocate(256).unwrap();
    let report = run_ptx(&mut memory, &text, 64, 0, &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 64), (5..69).collect::<Vec<_>>());
    assert_eq!(report.local_requests, 2 * 5);
    let past = text.replace("st.local.u32 [%rd10+4]", "st.local.u32 [%rd10+16]");
    let fault = run_ptx(&mut memory, &past, 64, 0, &[out]).expect_err("a fault");
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { space: SpaceName::Local, available: 16, .. }), "{fault}");
}

#[test]
fn constants_are_read_and_never_written() {
    let body = "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n\
        mov.u64 %rd4, table;\nadd.s64 %rd5, %rd4, %rd2;\nld.const.u32 %r2, [%rd5];\nld.global.u8 %r3, [bytes+1];\nadd.s32 %r2, %r2, %r3;\nst.global.u32 [%rd3], %r2;\n";
    let variables =
        ".const .align 4 .u32 table[4] = {10, 0x20, 30};\n.global .align 1 .b8 bytes[2] = {1, 200};\n.visible";
    let text = ptx(1, body).replace(".visible", variables);
    let mut memory = Memory::new(1 << 20);
    let out = memory.allocate(256).unwrap();
    run_ptx(&mut memory, &text, 4, 0, &[out]).unwrap();
    assert_eq!(read_words(&memory, out, 4), [210, 232, 230, 200]);
    let fault = run_ptx(&mut memory, &text.replace("st.global.u32 [%rd3]", "st.u32 [%rd5]"), 4, 0, &[out])
        .expect_err("a fault");
    assert!(matches!(fault.kind, FaultKind::ConstantWrite { access: AccessKind::Store, .. }), "{fault}");
    let fault = run_ptx(&mut memory, &text, 32, 0, &[out]).expect_err("a fault");
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { space: SpaceName::Constant, .. }), "{fault}");
}

#[test]
fn parameters_of_structures_are_read_by_offset() {
    let text = ptx(
        1,
        "mov.b64 %rd1, k_param_0;\nld.param.u32 %r2, [%rd1+4];\nld.param.v2.u32 {%r3, %r4}, [k_param_0+8];\nld.param.u64 %rd2, [k_param_1];\n\
        mov.u32 %r1, %tid.x;\nadd.s32 %r5, %r2, %r4;\nst.global.u32 [%rd2], %r5;\n",
    );
    let text = text.replace(
        ".param .u64 k_param_0",
        ".param .align 8 .b8 k_param_0[16],\n.param .u64 .ptr .global .align 16 k_param_1",
    );
    let mut memory = Memory::new(1 << 20);
    let out = memory.allocate(4).unwrap();
    run_ptx(&mut memory, &text, 1, 0, &[7 << 32, 5 << 32, out]).unwrap();
    assert_eq!(read_words(&memory, out, 1), [12]);
}

#[test]
fn a_generic_address_finds_shared_memory() {
    let body = "mov.u64 %rd30, dynamic;\ncvta.shared.u64 %rd31, %rd30;\nmad.wide.u32 %rd32, %r1, 4, %rd31;\nst.u32 [%rd32], %r10;\nld.u32 %r20, [%rd32];\n\
        cvta.to.shared.u64 %rd33, %rd32;\ncvt.u32.u64 %r30, %rd33;\nld.shared.u32 %r31, [%r30];\nadd.s32 %r20, %r20, %r31;\n";
    let fault = std::panic::catch_unwind(|| lanes(&[&words(1)], &[], body));
    assert!(fault.is_err(), "no dynamic shared memory was given");
    let text = ptx(0, &format!("mov.u32 %r1, %tid.x;\nmov.u32 %r10, %tid.x;\n{body}"));
    let report = run_ptx(&mut Memory::new(1), &text, 32, 128, &[]).unwrap();
    assert_eq!((report.shared.requests, report.global_loads.requests), (3, 0));
}

#[test]
fn shared_addresses_are_checked() {
    let past = fault_of("mov.u32 %r1, %tid.x;\nmad.lo.s32 %r2, %r1, 4, 900;\nst.shared.u32 [%r2], %r1;", 32);
    assert!(
        matches!(past, FaultKind::OutOfBounds { space: SpaceName::Shared, address: 1024, available: 1024, .. }),
        "{past}"
    );
    let odd = fault_of("mov.u32 %r1, %tid.x;\nmad.lo.s32 %r2, %r1, 4, 2;\nst.shared.u32 [%r2], %r1;", 32);
    assert!(matches!(odd, FaultKind::Misaligned { space: SpaceName::Shared, address: 2, .. }), "{odd}");
}
