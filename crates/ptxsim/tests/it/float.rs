//! Floating-point instructions and conversions against Rust's own floats, and against f64 where Rust has no such format.

use crate::common::{check_doubles, check_words, doubles, floats, lanes, words};
use half::{bf16, f16};
use std::cmp::Ordering;

const NAN: u32 = 0x7fff_ffff;

/// The bits of a result, every NaN alike.
fn bits(value: f32) -> u32 {
    if value.is_nan() { NAN } else { value.to_bits() }
}

fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

#[test]
fn single_precision_rounds_each_operation_once() {
    for seed in 0..8 {
        let (a, b) = (floats(seed), floats(seed + 50));
        let check = |text: &str, expected: fn(f32, f32) -> f32| {
            check_words(&format!("{text} %r20, %r10, %r11;"), [&a, &b], |[a, b]| {
                bits(expected(f32::from_bits(a), f32::from_bits(b)))
            });
        };
        check("add.f32", |a, b| a + b);
        check("add.rn.f32", |a, b| a + b);
        check("sub.f32", |a, b| a - b);
        check("mul.f32", |a, b| a * b);
        check("div.rn.f32", |a, b| a / b);
        check("div.full.f32", |a, b| a / b);
        check("add.ftz.f32", |a, b| flushed(flushed(a) + flushed(b)));
        check("mul.ftz.f32", |a, b| flushed(flushed(a) * flushed(b)));
        check("mul.sat.f32", |a, b| if (a * b).is_nan() { 0.0 } else { (a * b).clamp(0.0, 1.0).abs() });
    }
}

#[test]
fn a_product_is_not_fused_with_the_sum_behind_it() {
    let body = "mul.f32 %r30, %r10, %r11;\nadd.f32 %r20, %r30, %r12;";
    let (a, c) = (1.0f32 + f32::EPSILON, -1.0 - 2.0 * f32::EPSILON);
    let (results, _) = lanes(&[&[a.to_bits()], &[a.to_bits()], &[c.to_bits()]], &[], body);
    assert_eq!(f32::from_bits(results[0]), 0.0);
    assert_eq!(a.mul_add(a, c), f32::EPSILON * f32::EPSILON);
}

#[test]
fn fma_rounds_once_also_at_ties_and_below_the_normal_numbers() {
    for seed in 0..20 {
        let (a, b, c) = (words(seed), words(seed + 100), words(seed + 200));
        check_words("fma.rn.f32 %r20, %r10, %r11, %r12;", [&a, &b, &c], |[a, b, c]| {
            bits(f32::from_bits(a).mul_add(f32::from_bits(b), f32::from_bits(c)))
        });
        check_words(
            "fma.rn.f32 %r20, %r10, %r11, %r12;",
            [&floats(seed), &floats(seed + 9), &floats(seed + 30)],
            |[a, b, c]| bits(f32::from_bits(a).mul_add(f32::from_bits(b), f32::from_bits(c))),
        );
    }
    // An odd float and 2^-24 less 2^-70: nearly a tie, which 53 bits cannot tell from one, and which goes up. Each row has an instruction of
    // its own, since one lane in doubt sends all of them the slow way.
    let (up, down) = (1.0 + f32::EPSILON, 1.0 - f32::EPSILON);
    let false_tie = (0.5f32.powi(24) * up, down, up);
    for (a, b, c) in [false_tie, (up, up, 1e-30), (1e-23, 1e-20, 1e-44)] {
        let inputs = [a, b, c].map(|value| [value.to_bits()]);
        let (results, _) = lanes(&[&inputs[0], &inputs[1], &inputs[2]], &[], "fma.rn.f32 %r20, %r10, %r11, %r12;");
        assert_eq!(f32::from_bits(results[0]), a.mul_add(b, c), "{a:e} * {b:e} + {c:e}");
    }
    let in_doubles = f64::from(false_tie.0) * f64::from(down) + f64::from(up);
    assert_ne!(in_doubles as f32, false_tie.0.mul_add(down, up));
}

#[test]
fn minimum_and_maximum_pass_over_nan_unless_told_not_to() {
    let values = [f32::NAN, 0.0, -0.0, 1.0, -1.0, f32::INFINITY];
    let (a, b): (Vec<u32>, Vec<u32>) =
        (0..32).map(|lane| (values[lane % 6].to_bits(), values[lane / 6 % 6].to_bits())).unzip();
    let order = |a: f32, b: f32| a < b || (a == b && a.is_sign_negative());
    check_words("min.f32 %r20, %r10, %r11;", [&a, &b], |[a, b]| {
        let (x, y) = (f32::from_bits(a), f32::from_bits(b));
        bits(if x.is_nan() {
            y
        } else if y.is_nan() || order(x, y) {
            x
        } else {
            y
        })
    });
    check_words("max.f32 %r20, %r10, %r11;", [&a, &b], |[a, b]| {
        let (x, y) = (f32::from_bits(a), f32::from_bits(b));
        bits(if x.is_nan() {
            y
        } else if y.is_nan() || !order(x, y) {
            x
        } else {
            y
        })
    });
    check_words("max.NaN.f32 %r20, %r10, %r11;", [&a, &b], |[a, b]| {
        let (x, y) = (f32::from_bits(a), f32::from_bits(b));
        if x.is_nan() || y.is_nan() { NAN } else { bits(if order(x, y) { y } else { x }) }
    });
}

#[test]
fn comparisons_know_the_unordered_forms() {
    let (a, b) = (floats(3), floats(4));
    let check = |name: &str, expected: fn(f32, f32) -> bool| {
        let body = format!("setp.{name}.f32 %p1, %r10, %r11;\nselp.b32 %r20, 1, 0, %p1;");
        check_words(&body, [&a, &b], |[a, b]| u32::from(expected(f32::from_bits(a), f32::from_bits(b))));
        check_words(&body, [&a, &a], |[a, b]| u32::from(expected(f32::from_bits(a), f32::from_bits(b))));
    };
    check("eq", |a, b| a == b);
    check("ne", |a, b| a.partial_cmp(&b).is_some_and(Ordering::is_ne));
    check("lt", |a, b| a < b);
    check("ge", |a, b| a >= b);
    check("equ", |a, b| a.partial_cmp(&b).is_none_or(Ordering::is_eq));
    check("neu", |a, b| a.partial_cmp(&b).is_none_or(Ordering::is_ne));
    check("ltu", |a, b| a.partial_cmp(&b).is_none_or(Ordering::is_lt));
    check("leu", |a, b| a.partial_cmp(&b).is_none_or(Ordering::is_le));
    check("gtu", |a, b| a.partial_cmp(&b).is_none_or(Ordering::is_gt));
    check("geu", |a, b| a.partial_cmp(&b).is_none_or(Ordering::is_ge));
    check("num", |a, b| !a.is_nan() && !b.is_nan());
    check("nan", |a, b| a.is_nan() || b.is_nan());
}

#[test]
fn functions_are_near_the_truth_and_exact_where_they_say_so() {
    let positive: Vec<u32> = floats(7).into_iter().map(|bits| bits & 0x7fff_ffff).collect();
    check_words("sqrt.rn.f32 %r20, %r10;", [&positive], |[a]| bits(f32::from_bits(a).sqrt()));
    check_words("rcp.rn.f32 %r20, %r10;", [&positive], |[a]| bits(1.0 / f32::from_bits(a)));
    let near = |text: &str, truth: fn(f64) -> f64| {
        let (results, _) = lanes(
            &[&words(5).iter().map(|w| (1.0 + (w % 1000) as f32 / 300.0).to_bits()).collect::<Vec<_>>()],
            &[],
            text,
        );
        for (lane, result) in results.into_iter().enumerate() {
            let x = f64::from(1.0 + (words(5)[lane] % 1000) as f32 / 300.0);
            let error = (f64::from(f32::from_bits(result)) - truth(x)).abs();
            assert!(error <= 3e-7 * truth(x).abs().max(0.1), "{text} of {x}: {} ", f32::from_bits(result));
        }
    };
    near("ex2.approx.ftz.f32 %r20, %r10;", f64::exp2);
    near("lg2.approx.f32 %r20, %r10;", f64::log2);
    near("rsqrt.approx.f32 %r20, %r10;", |x| 1.0 / x.sqrt());
    near("rcp.approx.ftz.f32 %r20, %r10;", |x| 1.0 / x);
    near("sqrt.approx.f32 %r20, %r10;", f64::sqrt);
    near("sin.approx.f32 %r20, %r10;", f64::sin);
    near("cos.approx.f32 %r20, %r10;", f64::cos);
    near("tanh.approx.f32 %r20, %r10;", f64::tanh);
    let edges = [f32::NEG_INFINITY.to_bits(), 0, (-200f32).to_bits(), 200f32.to_bits()];
    let (results, _) = lanes(&[&edges], &[], "ex2.approx.ftz.f32 %r20, %r10;");
    assert_eq!(results[..4], [0, 1.0f32.to_bits(), 0, f32::INFINITY.to_bits()]);
}

#[test]
fn double_precision() {
    let spread =
        |seed| -> Vec<u64> { doubles(seed).iter().map(|value| ((*value as i64 as f64) * 1e-12).to_bits()).collect() };
    let (a, b, c) = (spread(1), spread(2), spread(3));
    let check = |text: &str, expected: fn(f64, f64, f64) -> f64| {
        check_doubles(text, [&a, &b, &c], |[a, b, c]| {
            expected(f64::from_bits(a), f64::from_bits(b), f64::from_bits(c)).to_bits()
        });
    };
    check("add.f64 %rd20, %rd10, %rd11;", |a, b, _| a + b);
    check("sub.f64 %rd20, %rd10, %rd11;", |a, b, _| a - b);
    check("mul.f64 %rd20, %rd10, %rd11;", |a, b, _| a * b);
    check("div.rn.f64 %rd20, %rd10, %rd11;", |a, b, _| if a == 0.0 && b == 0.0 { -f64::NAN } else { a / b });
    check("fma.rn.f64 %rd20, %rd10, %rd11, %rd12;", |a, b, c| a.mul_add(b, c));
    check("abs.f64 %rd30, %rd10;\nsqrt.rn.f64 %rd20, %rd30;", |a, _, _| a.abs().sqrt());
    check("max.f64 %rd20, %rd10, %rd11;", |a, b, _| a.max(b));
    check("mul.f64 %rd20, %rd10, 0d4000000000000000;", |a, _, _| a * 2.0);
    check("setp.lt.f64 %p1, %rd10, %rd11;\nselp.f64 %rd20, %rd10, %rd11, %p1;", |a, b, _| if a < b { a } else { b });
}

#[test]
fn sixteen_bit_floats_round_once() {
    let (a, b, c) = (words(21), words(22), words(23));
    let value = |bits: u32| bf16::from_bits(bits as u16).to_f64();
    let packed = |f: &dyn Fn(u32) -> u32| f(0) | f(16) << 16;
    // Operands of ordinary size: all sums of such are exact as doubles.
    let near = |bits: Vec<u32>| -> Vec<u32> { bits.into_iter().map(|bits| bits & 0x83ff_83ff | 0x3c00_3c00).collect() };
    let (a, b, c) = (near(a), near(b), near(c));
    let rounded = |exact: f64| u32::from(bf16::from_f64(exact).to_bits());
    check_words("fma.rn.bf16x2 %r20, %r10, %r11, %r12;", [&a, &b, &c], |[a, b, c]| {
        packed(&|shift| rounded(value(a >> shift) * value(b >> shift) + value(c >> shift)))
    });
    check_words("mul.bf16x2 %r20, %r10, %r11;", [&a, &b], |[a, b]| {
        packed(&|shift| rounded(value(a >> shift) * value(b >> shift)))
    });
    check_words("add.rn.bf16x2 %r20, %r10, %r11;", [&a, &b], |[a, b]| {
        packed(&|shift| rounded(value(a >> shift) + value(b >> shift)))
    });
    check_words("sub.bf16x2 %r20, %r10, %r11;", [&a, &b], |[a, b]| {
        packed(&|shift| rounded(value(a >> shift) - value(b >> shift)))
    });
    let small = |bits: u32| f16::from_bits(bits as u16).to_f64();
    let rounded = |exact: f64| u32::from(f16::from_f64(exact).to_bits());
    check_words("fma.rn.f16x2 %r20, %r10, %r11, %r12;", [&a, &b, &c], |[a, b, c]| {
        packed(&|shift| rounded(small(a >> shift) * small(b >> shift) + small(c >> shift)))
    });
    check_words("mul.f16x2 %r20, %r10, %r11;", [&a, &b], |[a, b]| {
        packed(&|shift| rounded(small(a >> shift) * small(b >> shift)))
    });
}

#[test]
fn a_bf16_fma_does_not_round_twice() {
    // 1.5 * 129/128 lies just between two bf16; 2^-40 less must round it down, which a sum in f32 forgets.
    let bits = |value: f32| u32::from(bf16::from_f32(value).to_bits());
    let operands = [1.5, 129.0 / 128.0, -(0.5f32.powi(40))].map(bits);
    let (results, _) =
        lanes(&[&[operands[0]], &[operands[1]], &[operands[2]]], &[], "fma.rn.bf16x2 %r20, %r10, %r11, %r12;");
    assert_eq!(results[0], bits(193.0 / 128.0));
    assert_eq!(bits(1.5 * 129.0 / 128.0 - 0.5f32.powi(40)), bits(194.0 / 128.0));
}

#[test]
fn conversions_between_floats() {
    for seed in 0..8 {
        let a = if seed < 4 { floats(seed) } else { words(seed) };
        let float = f32::from_bits;
        check_words("cvt.rn.bf16.f32 %rs1, %r10;\ncvt.u32.u16 %r20, %rs1;", [&a], |[a]| {
            if float(a).is_nan() { 0x7fff } else { u32::from(bf16::from_f32(float(a)).to_bits()) }
        });
        check_words("cvt.rn.f16.f32 %rs1, %r10;\ncvt.u32.u16 %r20, %rs1;", [&a], |[a]| {
            if float(a).is_nan() { 0x7fff } else { u32::from(f16::from_f32(float(a)).to_bits()) }
        });
        check_words("cvt.rz.bf16.f32 %rs1, %r10;\ncvt.u32.u16 %r20, %rs1;", [&a], |[a]| {
            if float(a).is_nan() { 0x7fff } else { a >> 16 }
        });
        check_words("cvt.rn.bf16x2.f32 %r20, %r10, %r11;", [&a, &floats(seed + 60)], |[a, b]| {
            let one = |a: u32| if float(a).is_nan() { 0x7fff } else { u32::from(bf16::from_f32(float(a)).to_bits()) };
            one(a) << 16 | one(b)
        });
        check_words("cvt.rn.f16x2.f32 %r20, %r10, %r11;", [&a, &floats(seed + 60)], |[a, b]| {
            let one = |a: u32| if float(a).is_nan() { 0x7fff } else { u32::from(f16::from_f32(float(a)).to_bits()) };
            one(a) << 16 | one(b)
        });
        check_words("cvt.u16.u32 %rs1, %r10;\ncvt.f32.f16 %r20, %rs1;", [&a], |[a]| {
            bits(f16::from_bits(a as u16).to_f32())
        });
        check_words("cvt.u16.u32 %rs1, %r10;\ncvt.f32.bf16 %r20, %rs1;", [&a], |[a]| {
            bits(bf16::from_bits(a as u16).to_f32())
        });
        check_words("cvt.rni.f32.f32 %r20, %r10;", [&a], |[a]| bits(float(a).round_ties_even()));
        check_words("cvt.rmi.f32.f32 %r20, %r10;", [&a], |[a]| bits(float(a).floor()));
        check_words("cvt.rzi.ftz.f32.f32 %r20, %r10;", [&a], |[a]| bits(flushed(float(a)).trunc()));
        check_words("cvt.sat.f32.f32 %r20, %r10;", [&a], |[a]| {
            if float(a).is_nan() { 0 } else { float(a).clamp(0.0, 1.0).abs().to_bits() }
        });
        check_words("cvt.f64.f32 %rd5, %r10;\ncvt.rn.f32.f64 %r20, %rd5;", [&a], |[a]| bits(float(a)));
    }
}

#[test]
fn conversions_between_floats_and_integers() {
    for seed in 0..4 {
        let a = if seed < 2 { floats(seed) } else { words(seed) };
        let float = f32::from_bits;
        check_words("cvt.rzi.s32.f32 %r20, %r10;", [&a], |[a]| float(a) as i32 as u32);
        check_words("cvt.rni.s32.f32 %r20, %r10;", [&a], |[a]| float(a).round_ties_even() as i32 as u32);
        check_words("cvt.rmi.u32.f32 %r20, %r10;", [&a], |[a]| float(a).floor() as u32);
        check_words("cvt.rpi.s32.f32 %r20, %r10;", [&a], |[a]| float(a).ceil() as i32 as u32);
        check_words("cvt.rn.f32.s32 %r20, %r10;", [&a], |[a]| (a as i32 as f32).to_bits());
        check_words("cvt.rn.f32.u32 %r20, %r10;", [&a], |[a]| (a as f32).to_bits());
        check_words("cvt.rz.f32.u32 %r20, %r10;", [&a], |[a]| {
            let (nearest, exact) = (a as f32, f64::from(a));
            (if f64::from(nearest) > exact { nearest.next_down() } else { nearest }).to_bits()
        });
        let (_, long) = lanes(&[&a], &[], "cvt.rzi.s64.f32 %rd20, %r10;");
        for lane in 0..32 {
            let value = float(a[lane]);
            assert_eq!(long[lane], if value.is_nan() { 1 << 63 } else { value as i64 as u64 });
        }
    }
    check_doubles("cvt.rn.f64.u64 %rd20, %rd10;", [&doubles(1)], |[a]| (a as f64).to_bits());
    check_doubles("cvt.rn.f64.s64 %rd20, %rd10;", [&doubles(2)], |[a]| (a as i64 as f64).to_bits());
    let (single, _) = lanes(&[], &[&doubles(3)], "cvt.rn.f32.u64 %r20, %rd10;");
    assert_eq!(single, doubles(3).iter().map(|value| (*value as f32).to_bits()).collect::<Vec<_>>());
    let scaled: Vec<u64> = doubles(4).iter().map(|value| ((*value as i64 as f64) * 1.5e-3).to_bits()).collect();
    check_doubles("cvt.rzi.s64.f64 %rd20, %rd10;", [&scaled], |[a]| f64::from_bits(a) as i64 as u64);
    check_doubles("cvt.rni.u64.f64 %rd20, %rd10;", [&scaled], |[a]| f64::from_bits(a).round_ties_even() as u64);
}

#[test]
fn conversions_between_integers_extend_as_the_source_and_cut_as_the_target() {
    let a = words(31);
    check_words("cvt.s32.s8 %r20, %r10;", [&a], |[a]| i32::from(a as i8) as u32);
    check_words("cvt.u32.u8 %r20, %r10;", [&a], |[a]| a & 0xff);
    check_words("cvt.u16.u32 %rs1, %r10;\ncvt.s32.s16 %r20, %rs1;", [&a], |[a]| i32::from(a as i16) as u32);
    check_words("cvt.sat.u8.s32 %r20, %r10;", [&a], |[a]| (a as i32).clamp(0, 255) as u32);
    check_words("cvt.sat.s8.s32 %r20, %r10;", [&a], |[a]| (a as i32).clamp(-128, 127) as u32);
    let (_, signed) = lanes(&[&a], &[], "cvt.s64.s32 %rd20, %r10;");
    let (_, unsigned) = lanes(&[&a], &[], "cvt.u64.u32 %rd20, %r10;");
    let (low, _) = lanes(&[], &[&doubles(2)], "cvt.u32.u64 %r20, %rd10;");
    for lane in 0..32 {
        assert_eq!(signed[lane], i64::from(a[lane] as i32) as u64);
        assert_eq!(unsigned[lane], u64::from(a[lane]));
        assert_eq!(low[lane], doubles(2)[lane] as u32);
    }
}
