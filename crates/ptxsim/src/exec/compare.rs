//! Comparisons and selections.

use crate::isa::{Compare, CompareTarget, PredicateOp, Slot, Test, Type};
use crate::numeric::{decode, flush};
use crate::registers::{LANE_BIT, LANES, Registers};

use super::integer::specialise;

/// One comparison; with NaN the plain forms are false and the unordered ones true.
#[inline(always)]
fn passes<T: PartialOrd>(test: Test, a: T, b: T) -> bool {
    #[allow(clippy::eq_op)]
    let unordered = a != a || b != b;
    match test {
        Test::Equal => a == b,
        Test::NotEqual => a != b && !unordered,
        Test::Less => a < b,
        Test::LessEqual => a <= b,
        Test::Greater => a > b,
        Test::GreaterEqual => a >= b,
        Test::EqualUnordered => a == b || unordered,
        Test::NotEqualUnordered => a != b,
        Test::LessUnordered => a < b || unordered,
        Test::LessEqualUnordered => a <= b || unordered,
        Test::GreaterUnordered => a > b || unordered,
        Test::GreaterEqualUnordered => a >= b || unordered,
        Test::Ordered => !unordered,
        Test::Unordered => unordered,
    }
}

macro_rules! every_test {
    ($test:expr, $constant:ident => $body:expr) => {
        specialise!($test, Test {
            Equal, NotEqual, Less, LessEqual, Greater, GreaterEqual, EqualUnordered, NotEqualUnordered, LessUnordered,
            LessEqualUnordered, GreaterUnordered, GreaterEqualUnordered, Ordered, Unordered,
        }, $constant => $body)
    };
}

/// The lanes in which the operands pass.
fn passed(registers: &Registers, compare: &Compare) -> u32 {
    let (test, sources) = (compare.test, (compare.a, compare.b));
    let float = f32::from_bits;
    match compare.of {
        Type::U32 | Type::B32 => {
            every_test!(test, known => registers.test_words(sources, |a, b| passes(known, a, b)))
        }
        Type::S32 => {
            every_test!(test, known => registers.test_words(sources, |a, b| passes(known, a as i32, b as i32)))
        }
        Type::F32 if compare.flush => {
            registers.test_words(sources, |a, b| passes(test, flush(float(a)), flush(float(b))))
        }
        Type::F32 => {
            every_test!(test, known => registers.test_words(sources, |a, b| passes(known, float(a), float(b))))
        }
        Type::U64 | Type::B64 => registers.test_doubles(sources, |a, b| passes(test, a, b)),
        Type::S64 => registers.test_doubles(sources, |a, b| passes(test, a as i64, b as i64)),
        Type::F64 => registers.test_doubles(sources, |a, b| passes(test, f64::from_bits(a), f64::from_bits(b))),
        Type::S16 => registers.test_words(sources, |a, b| passes(test, a as i16, b as i16)),
        Type::S8 => registers.test_words(sources, |a, b| passes(test, a as i8, b as i8)),
        Type::U8 | Type::B8 => registers.test_words(sources, |a, b| passes(test, a as u8, b as u8)),
        other => match other.format() {
            Some(format) => registers
                .test_words(sources, |a, b| passes(test, decode(u64::from(a), format), decode(u64::from(b), format))),
            None => registers.test_words(sources, |a, b| passes(test, a as u16, b as u16)),
        },
    }
}

/// Two predicates met by an operation.
pub(super) fn meet(op: PredicateOp, a: u32, b: u32) -> u32 {
    match op {
        PredicateOp::And => a & b,
        PredicateOp::Or => a | b,
        PredicateOp::Xor => a ^ b,
    }
}

/// `setp` and `set`
pub(super) fn compare(registers: &mut Registers, mask: u32, compare: &Compare) {
    let passed = passed(registers, compare);
    let combined = |result: u32| match compare.combine {
        None => result,
        Some((op, slot, flip)) => meet(op, result, registers.predicate(slot) ^ flip),
    };
    let (result, inverse) = (combined(passed), combined(!passed));
    let spread = |value: u32| -> [u32; LANES] {
        std::array::from_fn(|lane| if result & LANE_BIT[lane] == 0 { 0 } else { value })
    };
    match compare.target {
        CompareTarget::Predicates(d, d_inverse) => {
            registers.put_predicate(d, mask, result);
            if d_inverse != crate::isa::NEVER {
                registers.put_predicate(d_inverse, mask, inverse);
            }
        }
        CompareTarget::Mask(d) => registers.put_words(d, mask, &spread(u32::MAX)),
        CompareTarget::Float(d) => registers.put_words(d, mask, &spread(1.0f32.to_bits())),
    }
}

/// `selp`
pub(super) fn select(registers: &mut Registers, mask: u32, double: bool, d: Slot, (a, b, p): (Slot, Slot, Slot)) {
    let choice = registers.predicate(p);
    if double {
        let (a, b) = (registers.double(a), registers.double(b));
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = if choice & LANE_BIT[lane] == 0 { b[lane] } else { a[lane] };
        }
        registers.put_doubles(d, mask, &values);
        return;
    }
    let (a, b) = (registers.word(a), registers.word(b));
    let mut values = [0; LANES];
    for lane in 0..LANES {
        values[lane] = if choice & LANE_BIT[lane] == 0 { b[lane] } else { a[lane] };
    }
    registers.put_words(d, mask, &values);
}
