//! Matrix multiplication and matrix loads against plain loops.

use crate::common::{ptx, read_words, run_ptx, upload, upload_words};
use half::{bf16, f16};
use ptxsim::{FaultKind, Memory, Report};

/// Small multiples of 1/8, exact in every format, so that sums are exact in f32 too.
fn matrix(rows: usize, columns: usize, seed: usize) -> Vec<f32> {
    (0..rows * columns).map(|index| ((index * 37 + seed * 11) % 61) as f32 / 8.0 - 3.5).collect()
}

/// Two 16-bit numbers in a register, the first in the lower half.
fn pack(format: &str, low: f32, high: f32) -> u32 {
    let bits = |value: f32| match format {
        "bf16" => u32::from(bf16::from_f32(value).to_bits()),
        _ => u32::from(f16::from_f32(value).to_bits()),
    };
    bits(low) | bits(high) << 16
}

/// The fragments of `a` (16 by depth) and `b` (depth by 8) by lane, in the order that PTX gives.
fn check_mma(format: &str, depth: usize) {
    let (a, b, c) = (matrix(16, depth, 1), matrix(depth, 8, 2), matrix(16, 8, 3));
    let mut inputs = Vec::new();
    for lane in 0..32 {
        let (group, pair) = (lane / 4, lane % 4 * 2);
        for register in 0..depth / 4 {
            let (row, k) = (group + register % 2 * 8, pair + register / 2 * 8);
            inputs.push(pack(format, a[row * depth + k], a[row * depth + k + 1]));
        }
        for register in 0..depth / 8 {
            let k = pair + register * 8;
            inputs.push(pack(format, b[k * 8 + group], b[(k + 1) * 8 + group]));
        }
        for register in 0..4 {
            inputs.push(c[(group + register / 2 * 8) * 8 + pair + register % 2].to_bits());
        }
    }
    let count = depth / 4 + depth / 8 + 4;
    let loads: String =
        (0..count).map(|index| format!("ld.global.u32 %r{}, [%rd3+{}];\n", 10 + index, index * 4)).collect();
    let list = |from: usize, length: usize| {
        (from..from + length).map(|index| format!("%r{index}")).collect::<Vec<_>>().join(", ")
    };
    let c_list = list(10 + depth / 4 + depth / 8, 4);
    let body = format!(
        "ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\nmov.u32 %r1, %tid.x;\nmad.wide.u32 %rd3, %r1, {}, %rd1;\n{loads}\
         mma.sync.aligned.m16n8k{depth}.row.col.f32.{format}.{format}.f32 {{{c_list}}}, {{{}}}, {{{}}}, {{{c_list}}};\n\
         mad.wide.u32 %rd4, %r1, 16, %rd2;\nst.global.v4.b32 [%rd4], {{{c_list}}};\n",
        count * 4,
        list(10, depth / 4),
        list(10 + depth / 4, depth / 8),
    );
    let mut memory = Memory::new(1 << 20);
    let (input, out) = (upload_words(&mut memory, &inputs), memory.allocate(512).unwrap());
    let report = run_ptx(&mut memory, &ptx(2, &body), 32, 0, &[input, out]).unwrap();
    assert_eq!(report.mma, 1);
    let results = read_words(&memory, out, 128);
    for lane in 0..32 {
        for register in 0..4 {
            let (row, column) = (lane / 4 + register / 2 * 8, lane % 4 * 2 + register % 2);
            let sum: f64 = (0..depth).map(|k| f64::from(a[row * depth + k]) * f64::from(b[k * 8 + column])).sum();
            let expected = sum + f64::from(c[row * 8 + column]);
            assert_eq!(f64::from(f32::from_bits(results[lane * 4 + register])), expected, "row {row} column {column}");
        }
    }
}

#[test]
fn matrices_of_bf16_and_f16_are_multiplied() {
    for format in ["bf16", "f16"] {
        check_mma(format, 16);
        check_mma(format, 8);
    }
}

/// Loads `count` matrices of 8 rows from shared memory in which halfword `i` is `i`; rows lie `stride` bytes apart.
fn load_matrix(count: usize, transposed: &str, stride: usize) -> (Vec<u32>, Report) {
    let registers: Vec<_> = (0..count).map(|index| format!("%r{}", 20 + index)).collect();
    let stores: String = registers
        .iter()
        .enumerate()
        .map(|(index, name)| format!("st.global.u32 [%rd4+{}], {name};\n", index * 4))
        .collect();
    let body = format!(
        "ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\nmov.u32 %r1, %tid.x;\nmov.b32 %r2, 0;\n$fill:\nmad.lo.s32 %r3, %r2, 32, %r1;\nmul.wide.u32 %rd3, %r3, 16;\n\
         add.s64 %rd3, %rd1, %rd3;\nld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd3];\nshl.b32 %r8, %r3, 4;\nst.shared.v4.u32 [%r8], {{%r4, %r5, %r6, %r7}};\n\
         add.s32 %r2, %r2, 1;\nsetp.lt.s32 %p1, %r2, 9;\n@%p1 bra $fill;\nbar.sync 0;\nmul.lo.s32 %r9, %r1, {stride};\n\
         ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{}}}, [%r9];\nmad.wide.u32 %rd4, %r1, 16, %rd2;\n{stores}",
        registers.join(", ")
    );
    let mut memory = Memory::new(1 << 20);
    let halves: Vec<u8> = (0..4608 / 2u16).flat_map(|index| index.to_le_bytes()).collect();
    let (input, out) = (upload(&mut memory, &halves), memory.allocate(512).unwrap());
    let report = run_ptx(&mut memory, &ptx(2, &body), 32, 4608, &[input, out]).unwrap();
    (read_words(&memory, out, 128), report)
}

#[test]
fn matrices_are_loaded_row_by_row_or_transposed() {
    for count in [1, 2, 4] {
        for (transposed, name) in [(false, ""), (true, ".trans")] {
            let (results, _) = load_matrix(count, name, 144);
            for lane in 0..32 {
                for matrix in 0..count {
                    let at = |row: usize, column: usize| ((matrix * 8 + row) * 72 + column) as u32;
                    let (outer, inner) = (lane / 4, lane % 4 * 2);
                    let expected = match transposed {
                        false => at(outer, inner) | at(outer, inner + 1) << 16,
                        true => at(inner, outer) | at(inner + 1, outer) << 16,
                    };
                    assert_eq!(results[lane * 4 + matrix], expected, "x{count}{name} matrix {matrix} lane {lane}");
                }
            }
        }
    }
}

#[test]
fn rows_a_line_apart_collide_in_their_banks() {
    let (_, padded) = load_matrix(4, "", 144);
    let (_, plain) = load_matrix(4, "", 128);
    assert_eq!(padded.shared.conflicts, 0);
    assert_eq!(plain.shared.conflicts, 4 * 7);
}

#[test]
fn a_row_that_nobody_wrote_cannot_be_loaded() {
    let body = "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\nsetp.ne.s32 %p1, %r1, 9;\n@%p1 st.shared.v4.u32 [%r2], {%r1, %r1, %r1, %r1};\nbar.sync 0;\n\
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];\n";
    let fault = crate::common::run_body(body, 32).expect_err("a fault");
    assert!(matches!(fault.kind, FaultKind::UninitialisedShared { bytes: 16, address: 144, .. }), "{fault}");
    assert_eq!(fault.thread, 9);
}
