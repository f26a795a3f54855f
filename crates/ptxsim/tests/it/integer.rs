//! Integer instructions against Rust's own integers.

use crate::common::{check_doubles, check_words, doubles, edges, lanes, words};

fn pairs() -> [(Vec<u32>, Vec<u32>); 2] {
    [edges(), (words(1), words(2))]
}

#[test]
fn arithmetic_wraps_in_32_bits() {
    for (a, b) in pairs() {
        let check = |text: &str, expected: fn(u32, u32) -> u32| {
            check_words(&format!("{text} %r20, %r10, %r11;"), [&a, &b], |[a, b]| expected(a, b));
        };
        check("add.s32", u32::wrapping_add);
        check("sub.s32", u32::wrapping_sub);
        check("mul.lo.s32", u32::wrapping_mul);
        check("mul.hi.u32", |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32);
        check("mul.hi.s32", |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
        check("add.sat.s32", |a, b| (a as i32).saturating_add(b as i32) as u32);
        check("min.s32", |a, b| (a as i32).min(b as i32) as u32);
        check("max.u32", u32::max);
        check("and.b32", |a, b| a & b);
        check("or.b32", |a, b| a | b);
        check("xor.b32", |a, b| a ^ b);
        check("div.u32", |a, b| a.checked_div(b).unwrap_or(u32::MAX));
        check("rem.u32", |a, b| if b == 0 { a } else { a % b });
        check("div.s32", |a, b| if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 });
        check("rem.s32", |a, b| if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 });
    }
}

#[test]
fn shifts_by_the_width_or_more_leave_nothing_or_the_sign() {
    for (a, b) in pairs() {
        check_words("shl.b32 %r20, %r10, %r11;", [&a, &b], |[a, b]| if b > 31 { 0 } else { a << b });
        check_words("shr.u32 %r20, %r10, %r11;", [&a, &b], |[a, b]| if b > 31 { 0 } else { a >> b });
        check_words("shr.s32 %r20, %r10, %r11;", [&a, &b], |[a, b]| ((a as i32) >> b.min(31)) as u32);
        check_words("shf.l.wrap.b32 %r20, %r10, %r11, %r12;", [&a, &b, &words(5)], |[low, high, by]| {
            ((u64::from(high) << 32 | u64::from(low)) << (by & 31) >> 32) as u32
        });
        check_words("shf.r.clamp.b32 %r20, %r10, %r11, %r12;", [&a, &b, &edges().0], |[low, high, by]| {
            ((u64::from(high) << 32 | u64::from(low)) >> by.min(32)) as u32
        });
    }
}

#[test]
fn multiply_and_add_keeps_the_half_it_names() {
    let (a, b, c) = (words(3), words(4), words(5));
    check_words("mad.lo.s32 %r20, %r10, %r11, %r12;", [&a, &b, &c], |[a, b, c]| a.wrapping_mul(b).wrapping_add(c));
    check_words("mad.hi.u32 %r20, %r10, %r11, %r12;", [&a, &b, &c], |[a, b, c]| {
        (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)
    });
}

#[test]
fn wide_products_have_twice_the_width() {
    let (a, b, c) = (words(6), words(7), doubles(8));
    let (_, product) = lanes(&[&a, &b], &[&c], "mul.wide.s32 %rd20, %r10, %r11;");
    let (_, sum) = lanes(&[&a, &b], &[&c], "mad.wide.u32 %rd20, %r10, %r11, %rd10;");
    let (short, _) =
        lanes(&[&a, &b], &[&c], "cvt.u16.u32 %rs1, %r10;\ncvt.u16.u32 %rs2, %r11;\nmul.wide.s16 %r20, %rs1, %rs2;");
    for lane in 0..32 {
        assert_eq!(product[lane], (i64::from(a[lane] as i32) * i64::from(b[lane] as i32)) as u64);
        assert_eq!(sum[lane], (u64::from(a[lane]) * u64::from(b[lane])).wrapping_add(c[lane]));
        assert_eq!(short[lane], (i32::from(a[lane] as i16) * i32::from(b[lane] as i16)) as u32);
    }
}

#[test]
fn arithmetic_in_64_bits() {
    for (a, b) in [(doubles(1), doubles(2)), (vec![0, 1, u64::MAX, 1 << 63, 7], vec![0, u64::MAX, u64::MAX, 2, 0])] {
        let check = |text: &str, expected: fn(u64, u64) -> u64| {
            check_doubles(&format!("{text} %rd20, %rd10, %rd11;"), [&a, &b], |[a, b]| expected(a, b));
        };
        check("add.s64", u64::wrapping_add);
        check("sub.s64", u64::wrapping_sub);
        check("mul.lo.s64", u64::wrapping_mul);
        check("mul.hi.u64", |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64);
        check("min.s64", |a, b| (a as i64).min(b as i64) as u64);
        check("max.u64", u64::max);
        check("xor.b64", |a, b| a ^ b);
        check("div.s64", |a, b| if b == 0 { u64::MAX } else { (a as i64).wrapping_div(b as i64) as u64 });
        check("rem.u64", |a, b| if b == 0 { a } else { a % b });
    }
    let distances: Vec<u32> = (0..32).map(|lane| lane * 3).collect();
    let (_, right) = lanes(&[&distances], &[&doubles(9)], "shr.s64 %rd20, %rd10, %r10;");
    for (lane, result) in right.into_iter().enumerate() {
        assert_eq!(result, ((doubles(9)[lane] as i64) >> distances[lane].min(63)) as u64);
    }
}

#[test]
fn arithmetic_in_16_bits_leaves_the_upper_half_empty() {
    let (a, b) = (words(11), words(12));
    let check = |text: &str, expected: fn(u16, u16) -> u16| {
        let body = format!(
            "cvt.u16.u32 %rs1, %r10;\ncvt.u16.u32 %rs2, %r11;\n{text} %rs3, %rs1, %rs2;\ncvt.u32.u16 %r20, %rs3;"
        );
        check_words(&body, [&a, &b], |[a, b]| u32::from(expected(a as u16, b as u16)));
    };
    check("add.s16", u16::wrapping_add);
    check("mul.lo.s16", u16::wrapping_mul);
    check("min.s16", |a, b| (a as i16).min(b as i16) as u16);
    check("max.u16", u16::max);
    check("sub.s16", u16::wrapping_sub);
    check_words("cvt.u16.u32 %rs1, %r10;\nshr.s16 %rs3, %rs1, 3;\ncvt.u32.u16 %r20, %rs3;", [&a], |[a]| {
        u32::from(((a as i16) >> 3) as u16)
    });
}

#[test]
fn bits_are_counted_found_and_reversed() {
    for (a, _) in pairs() {
        check_words("popc.b32 %r20, %r10;", [&a], |[a]| a.count_ones());
        check_words("clz.b32 %r20, %r10;", [&a], |[a]| a.leading_zeros());
        check_words("brev.b32 %r20, %r10;", [&a], |[a]| a.reverse_bits());
        check_words("not.b32 %r20, %r10;", [&a], |[a]| !a);
        check_words("neg.s32 %r20, %r10;", [&a], |[a]| a.wrapping_neg());
        check_words("abs.s32 %r20, %r10;", [&a], |[a]| (a as i32).unsigned_abs());
        check_words("bfind.u32 %r20, %r10;", [&a], |[a]| if a == 0 { u32::MAX } else { a.ilog2() });
        check_words("bfind.shiftamt.u32 %r20, %r10;", [&a], |[a]| if a == 0 { u32::MAX } else { 31 - a.ilog2() });
        check_words("bfind.s32 %r20, %r10;", [&a], |[a]| {
            let a = if (a as i32) < 0 { !a } else { a };
            if a == 0 { u32::MAX } else { a.ilog2() }
        });
    }
    let (counted, _) = lanes(&[], &[&doubles(3)], "popc.b64 %r20, %rd10;");
    let (zeros, _) = lanes(&[], &[&[0, 1, 1 << 40]], "clz.b64 %r20, %rd10;");
    assert_eq!(counted, doubles(3).iter().map(|value| value.count_ones()).collect::<Vec<_>>());
    assert_eq!(zeros[..3], [64, 63, 23]);
}

#[test]
fn a_table_of_three_operands_is_looked_up_bit_by_bit() {
    let inputs = [words(1), words(2), words(3)];
    for table in [0xea_u32, 0x96, 0xe8, 0xca, 0x01, 0x80, 0x3c] {
        let text = format!("lop3.b32 %r20, %r10, %r11, %r12, {table:#x};");
        check_words(&text, [&inputs[0], &inputs[1], &inputs[2]], |[a, b, c]| {
            (0..32).fold(0, |result, bit| {
                let index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1;
                result | (table >> index & 1) << bit
            })
        });
    }
}

#[test]
fn bytes_are_permuted_and_their_signs_spread() {
    check_words("prmt.b32 %r20, %r10, %r11, %r12;", [&words(1), &words(2), &words(3)], |[a, b, selector]| {
        let bytes = [a.to_le_bytes(), b.to_le_bytes()].concat();
        let pick = |place: u32| {
            let nibble = selector >> (4 * place) & 15;
            let byte = bytes[nibble as usize & 7];
            if nibble > 7 { (byte as i8 >> 7) as u8 } else { byte }
        };
        u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
    });
}

#[test]
fn bit_fields_are_taken_out_and_put_in() {
    let positions: Vec<u32> = (0..32).collect();
    let lengths: Vec<u32> = (0..32).map(|lane| lane * 7 % 33).collect();
    let values = words(9);
    check_words("bfe.u32 %r20, %r10, %r11, %r12;", [&values, &positions, &lengths], |[a, position, length]| {
        (u64::from(a) >> position & ((1u64 << length) - 1)) as u32
    });
    check_words("bfe.s32 %r20, %r10, %r11, %r12;", [&values, &positions, &lengths], |[a, position, length]| {
        let field = (i64::from(a as i32) >> position) as u64 & ((1u64 << length) - 1);
        let negative = length > 0 && field >> (length - 1) & 1 == 1;
        if negative { (field | !((1u64 << length) - 1)) as u32 } else { field as u32 }
    });
    check_words("bfi.b32 %r20, %r10, %r1, %r11, %r12;", [&values, &positions, &lengths], |[a, position, length]| {
        let mask = ((1u64 << length) - 1) << position;
        let lane = u64::from(position);
        (lane & !mask | u64::from(a) << position & mask) as u32
    });
}

#[test]
fn carries_run_through_a_chain() {
    let (a, b) = (doubles(4), doubles(5));
    let split = "mov.b64 {%r30, %r31}, %rd10;\nmov.b64 {%r32, %r33}, %rd11;\n";
    let join = "mov.b64 %rd20, {%r40, %r41};";
    let (_, sums) =
        lanes(&[], &[&a, &b], &format!("{split}add.cc.u32 %r40, %r30, %r32;\naddc.u32 %r41, %r31, %r33;\n{join}"));
    let (_, differences) =
        lanes(&[], &[&a, &b], &format!("{split}sub.cc.u32 %r40, %r30, %r32;\nsubc.u32 %r41, %r31, %r33;\n{join}"));
    let product =
        "mul.lo.u32 %r40, %r30, %r32;\nmad.lo.cc.u32 %r40, %r30, %r32, 0;\nmadc.hi.u32 %r41, %r30, %r32, 0;\n";
    let (_, products) = lanes(&[], &[&a, &b], &format!("{split}{product}{join}"));
    for lane in 0..32 {
        assert_eq!(sums[lane], a[lane].wrapping_add(b[lane]));
        assert_eq!(differences[lane], a[lane].wrapping_sub(b[lane]));
        assert_eq!(products[lane], (a[lane] & 0xffff_ffff) * (b[lane] & 0xffff_ffff));
    }
    let overflow = "add.cc.u64 %rd30, %rd10, %rd11;\naddc.u64 %rd20, 0, 0;";
    check_doubles(overflow, [&a, &b], |[a, b]| u64::from(a.checked_add(b).is_none()));
}

#[test]
fn registers_are_packed_and_unpacked() {
    let (a, b) = (words(1), words(2));
    let swap = "mov.b32 {%rs1, %rs2}, %r10;\nmov.b32 %r20, {%rs2, %rs1};\n";
    check_words(swap, [&a], |[a]| a.rotate_left(16));
    let sink = "mov.b32 {_, %rs2}, %r10;\ncvt.u32.u16 %r20, %rs2;\n";
    check_words(sink, [&a], |[a]| a >> 16);
    let (_, doubles_packed) = lanes(&[&a, &b], &[], "mov.b64 %rd20, {%r11, %r10};");
    let quarters = "mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd10;\nmov.b64 %rd20, {%rs4, %rs3, %rs2, %rs1};";
    let (_, reversed) = lanes(&[], &[&doubles(3)], quarters);
    for lane in 0..32 {
        assert_eq!(doubles_packed[lane], u64::from(a[lane]) << 32 | u64::from(b[lane]));
        let value = doubles(3)[lane];
        let expected = (0..4).fold(0, |result, index| result | (value >> (16 * index) & 0xffff) << (48 - 16 * index));
        assert_eq!(reversed[lane], expected);
    }
}

#[test]
fn comparisons_set_predicates_and_combine_them() {
    for (a, b) in pairs() {
        let check = |text: &str, expected: fn(u32, u32) -> bool| {
            let body = format!("{text};\nselp.b32 %r20, 1, 0, %p1;");
            check_words(&body, [&a, &b], |[a, b]| u32::from(expected(a, b)));
        };
        check("setp.lt.s32 %p1, %r10, %r11", |a, b| (a as i32) < b as i32);
        check("setp.lt.u32 %p1, %r10, %r11", |a, b| a < b);
        check("setp.ne.b32 %p1, %r10, %r11", |a, b| a != b);
        check("setp.hs.u32 %p1, %r10, %r11", |a, b| a >= b);
        check("setp.eq.s32 %p2, %r10, 1;\nsetp.gt.or.u32 %p1, %r10, %r11, %p2", |a, b| a > b || a == 1);
        check("setp.eq.s32 %p2, %r10, 1;\nsetp.gt.and.u32 %p1|%p3, %r10, %r11, !%p2", |a, b| a > b && a != 1);
        check("setp.eq.s32 %p2, %r10, 1;\nsetp.gt.and.u32 %p3|%p1, %r10, %r11, !%p2", |a, b| a <= b && a != 1);
        check("setp.gt.u32 %p2, %r10, %r11;\nnot.pred %p1, %p2", |a, b| a <= b);
        check("setp.gt.u32 %p2, %r10, %r11;\nsetp.eq.u32 %p3, %r11, 1;\nxor.pred %p1, %p2, %p3", |a, b| {
            (a > b) ^ (b == 1)
        });
    }
    let (chosen, _) =
        lanes(&[], &[&doubles(1), &doubles(2)], "setp.lt.s64 %p1, %rd10, %rd11;\nset.lt.u32.u64 %r20, %rd10, %rd11;");
    for (lane, result) in chosen.into_iter().enumerate() {
        assert_eq!(result, if doubles(1)[lane] < doubles(2)[lane] { u32::MAX } else { 0 });
    }
}
