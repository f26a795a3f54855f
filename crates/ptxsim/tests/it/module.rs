//! What a module says of its kernels, what it refuses, and what a launch refuses.

use crate::common::{ptx, run_ptx};
use ptxsim::{FaultKind, Launch, Memory, Module, Param, ParseError};

#[test]
fn a_module_knows_its_kernels_parameters_and_bounds() {
    let text = "\
.version 8.8
.target sm_90a, debug
.address_size 64
\t// .globl\tfirst
.file 1 \"first.cu\"
.visible .entry first(
\t.param .u64 .ptr .align 1 first_param_0,
\t.param .u32 first_param_1,
\t.param .align 8 .b8 first_param_2[24],
\t.param .f32 first_param_3
)
.maxntid 128, 2, 1
.minnctapersm 4
{
\t.loc 1 10 0, function_name $L__info_string0, inlined_at 1 3 4
\t.shared .align 16 .b8 tile[1000];
\t.pragma \"nounroll\";
$L__BB0_1:
\tret;
}
.visible .entry second()
.reqntid 64
{
\texit;
}
.section\t.debug_str
{
$L__info_string0:
.b8 95,90
}
\0";
    let module = Module::parse(text).unwrap();
    assert_eq!(module.kernels().map(|kernel| kernel.name()).collect::<Vec<_>>(), ["first", "second"]);
    let first = module.kernel("first").unwrap();
    let param = |offset, bytes| Param { offset, bytes };
    assert_eq!(first.params(), [param(0, 8), param(8, 4), param(16, 24), param(40, 4)]);
    assert_eq!((first.param_bytes(), first.static_shared_bytes(), first.max_threads()), (44, 1000, Some(256)));
    assert_eq!(module.kernel("second").unwrap().max_threads(), Some(64));
    assert!(module.kernel("third").is_none());
}

fn rejected(statement: &str) -> (u32, String, String) {
    match Module::parse(&ptx(0, statement)) {
        Err(ParseError::Instruction { line, text, reason }) => (line, text, reason),
        other => panic!("{statement}: {other:?}"),
    }
}

#[test]
fn an_unknown_opcode_or_form_is_an_error_with_line_and_text() {
    let (line, text, reason) = rejected("mov.u32 %r1, 0;\nsust.b.1d.b32 %r1, %r2;");
    assert!(line > 5 && text == "sust.b.1d.b32 %r1, %r2" && reason.contains("sust"), "{line} {text} {reason}");
    assert!(
        rejected("tex.2d.v4.f32.f32 {%r1,%r2,%r3,%r4}, [%rd1, {%r1,%r2}];").1.starts_with("tex.2d.v4.f32.f32 {%r1")
    );
    assert!(rejected("call.uni (retval0), helper, (param0);").1.starts_with("call.uni"));
    assert!(rejected("add.s32 %r1 %r2;").2.contains("expected ,"));
    for statement in [
        "add.rz.f32 %r1, %r2, %r3;",
        "add.s32 %r1, %r2;",
        "add.s32 %r1, %rd2, %r3;",
        "add.s32 %r1, %r99, %r3;",
        "add.s128 %r1, %r2, %r3;",
        "mul.s32 %r1, %r2, %r3;",
        "cvt.rn.e4m3x2.f32 %rs1, %r1, %r2;",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r1,%r2,%r3,%r4};",
        "ldmatrix.sync.aligned.m8n16.x4.shared.b16 {%r1,%r2,%r3,%r4}, [%r5];",
        "ld.global.u64 %r1, [%rd1];",
        "ld.global.L2::cache_hint.u32 %r1, [%rd1], %rd2;",
        "shfl.bfly.b32 %r1, %r2, 1, 31;",
        "bar.arrive 1, 64;",
        "rcp.approx.ftz.f64 %rd1, %rd2;",
        "lop3.b32 %r1, %r2, %r3, %r4, %r5;",
    ] {
        let (_, text, _) = rejected(statement);
        assert_eq!(text, statement.trim_end_matches(';').replace(",%", ", %"));
    }
}

#[test]
fn a_broken_text_is_an_error() {
    let missing = Module::parse(&ptx(0, "bra $nowhere;"));
    assert!(matches!(missing, Err(ParseError::Label { ref label, .. }) if label == "$nowhere"), "{missing:?}");
    assert!(matches!(Module::parse(".visible .entry k( .param .u64 a"), Err(ParseError::UnexpectedEnd { .. })));
    assert!(matches!(Module::parse(".func helper() { ret; }"), Err(ParseError::Directive { .. })));
    assert!(matches!(
        Module::parse(".visible .entry k() .cluster { ret; }"),
        Err(ParseError::Directive { line: 1, .. })
    ));
    assert!(matches!(Module::parse(".visible k( .param .u64 a)"), Err(ParseError::Directive { .. })));
}

#[test]
fn a_launch_must_fit_the_kernel() {
    let text = ptx(1, "").replace("\n)\n{", "\n)\n.maxntid 64, 1, 1\n{\n.shared .align 4 .b8 tile[40000];");
    let module = Module::parse(&text).unwrap();
    let kernel = module.kernel("k").unwrap();
    let good =
        Launch { kernel, grid: [1, 1, 1], block: [64, 1, 1], dynamic_shared: 227 * 1024 - 40000, params: &[0; 8] };
    let mut memory = Memory::new(1);
    assert!(good.run(&mut memory).is_ok());
    let mut kind = |launch: Launch<'_>| launch.run(&mut memory).expect_err("a fault").kind;
    assert_eq!(kind(Launch { params: &[0; 4], ..good }), FaultKind::ParameterBytes { expected: 8, found: 4 });
    assert_eq!(kind(Launch { block: [33, 2, 1], ..good }), FaultKind::BlockSize { threads: 66, limit: 64 });
    assert_eq!(kind(Launch { block: [0, 1, 1], ..good }), FaultKind::BlockSize { threads: 0, limit: 64 });
    assert_eq!(kind(Launch { grid: [1, 0, 1], ..good }), FaultKind::GridSize([1, 0, 1]));
    assert_eq!(kind(Launch { grid: [1, 70000, 1], ..good }), FaultKind::GridSize([1, 70000, 1]));
    let bytes = 227 * 1024 + 16;
    assert_eq!(
        kind(Launch { dynamic_shared: bytes - 40000, ..good }),
        FaultKind::SharedSize { bytes, limit: 227 * 1024 }
    );
    let fault = Launch { params: &[], ..good }.run(&mut memory).expect_err("a fault");
    assert_eq!(fault.to_string(), "kernel k: the launch gives 0 bytes of parameters, the kernel has 8");
}

#[test]
fn dynamic_shared_memory_begins_behind_the_kernels_own() {
    let text = ptx(1, "ld.param.u64 %rd1, [k_param_0];\nmov.u32 %r1, dynamic;\nst.global.u32 [%rd1], %r1;\nmov.u32 %r2, tile;\nst.shared.u32 [%r2+36], 1;\nst.shared.u32 [dynamic+12], 2;\n")
        .replace("{\n.reg .pred", "{\n.shared .align 4 .b8 tile[40];\n.reg .pred");
    let mut memory = Memory::new(64);
    let out = memory.allocate(4).unwrap();
    run_ptx(&mut memory, &text, 1, 16, &[out]).unwrap();
    assert_eq!(crate::common::read_words(&memory, out, 1), [48]);
}

#[test]
fn registers_that_are_never_needed_together_share_a_slot() {
    let chain: String = (30..79).map(|index| format!("add.s32 %r{}, %r{index}, %r1;\n", index + 1)).collect();
    let body = format!(
        "mov.u32 %r1, %tid.x;\nmov.b32 %r30, 0;\n{chain}ld.param.u64 %rd1, [k_param_0];\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nst.global.u32 [%rd2], %r79;\n"
    );
    let text = ptx(1, &body);
    let words = Module::parse(&text).unwrap().kernel("k").unwrap().num_registers().0;
    assert!(words < 10, "{words} words for a chain of 50");
    let mut memory = Memory::new(1 << 10);
    let out = memory.allocate(128).unwrap();
    run_ptx(&mut memory, &text, 32, 0, &[out]).unwrap();
    assert_eq!(crate::common::read_words(&memory, out, 32), (0..32).map(|lane| lane * 49).collect::<Vec<_>>());
}

#[test]
fn a_shared_slot_keeps_what_is_carried_around_a_loop_and_over_a_branch() {
    // %r2 is set before the loop and read in it behind a branch that half of the lanes take; the temporaries must not lie on it.
    let body = "mov.u32 %r1, %tid.x;\nadd.s32 %r2, %r1, 100;\nmov.b32 %r3, 0;\nmov.b32 %r4, 0;\n$loop:\nand.b32 %r5, %r1, 1;\nsetp.eq.s32 %p1, %r5, 0;\n\
        @%p1 bra $even;\nmul.lo.s32 %r6, %r3, 3;\nadd.s32 %r7, %r6, 1;\nadd.s32 %r4, %r4, %r7;\nbra $join;\n$even:\nadd.s32 %r8, %r2, %r3;\nadd.s32 %r4, %r4, %r8;\n$join:\n\
        mul.lo.s32 %r10, %r3, 7;\nxor.b32 %r11, %r10, 5;\nmul.lo.s32 %r12, %r10, %r11;\nsub.s32 %r13, %r12, %r12;\nadd.s32 %r4, %r4, %r13;\n\
        add.s32 %r3, %r3, 1;\nsetp.lt.s32 %p2, %r3, 5;\n@%p2 bra $loop;\nmov.b32 %r9, %r4;\nsetp.gt.s32 %p3, %r1, 20;\n@%p3 add.s32 %r9, %r1, 100;\n\
        ld.param.u64 %rd1, [k_param_0];\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nst.global.u32 [%rd2], %r9;\n";
    let mut memory = Memory::new(1 << 10);
    let out = memory.allocate(128).unwrap();
    run_ptx(&mut memory, &ptx(1, body), 32, 0, &[out]).unwrap();
    let expected = |lane: u32| match lane {
        21.. => lane + 100,
        _ if lane.is_multiple_of(2) => (0..5).map(|round| lane + 100 + round).sum(),
        _ => (0..5).map(|round| round * 3 + 1).sum(),
    };
    assert_eq!(crate::common::read_words(&memory, out, 32), (0..32).map(expected).collect::<Vec<_>>());
}
