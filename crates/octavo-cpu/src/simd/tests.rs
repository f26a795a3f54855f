//! Every operation gives the bits of plain Rust on every instruction set of this machine.

use half::{bf16, f16};
use octavo_backend::numerics::{self, fold_lanes};

use super::*;
use crate::isa::Isa;

/// What the test kernel reads and writes.
struct Operands {
    a: [f32; 16],
    b: [f32; 16],
    c: [f32; 16],
    bytes: [u8; 64],
    halves: [u16; 16],
    activations: [[i8; 4]; 8],
}

/// Float results, then integer results.
#[derive(Default)]
struct Results {
    floats: Vec<f32>,
    ints: Vec<i32>,
}

#[inline(always)]
unsafe fn push<S: Simd>(simd: S, out: &mut Results, value: S::F) {
    let mut lanes = [0.0; 16];
    // SAFETY: 16 floats.
    unsafe { simd.store(lanes.as_mut_ptr(), value) };
    out.floats.extend_from_slice(&lanes);
}

#[inline(always)]
unsafe fn push_int<S: Simd>(simd: S, out: &mut Results, value: S::I) {
    let mut lanes = [0; 16];
    // SAFETY: 16 integers.
    unsafe { simd.store_int(lanes.as_mut_ptr(), value) };
    out.ints.extend_from_slice(&lanes);
}

#[inline(always)]
unsafe fn float_operations<S: Simd>(simd: S, operands: &Operands, out: &mut Results) {
    // SAFETY: all arrays hold at least what is read or written.
    unsafe {
        let (a, b, c) =
            (simd.load(operands.a.as_ptr()), simd.load(operands.b.as_ptr()), simd.load(operands.c.as_ptr()));
        push(simd, out, simd.add(a, b));
        push(simd, out, simd.sub(a, b));
        push(simd, out, simd.mul(a, b));
        push(simd, out, simd.div(a, b));
        push(simd, out, simd.fma(a, b, c));
        push(simd, out, simd.max(a, b));
        push(simd, out, simd.select_less(a, b, b, c));
        push(simd, out, simd.select(0b1010_0110_1100_0101, a, b));
        let (below, above) = (simd.less(a, b), simd.less(b, a));
        out.ints.extend([below, above, simd.both(below, simd.less(b, c))].map(|m| i32::from(simd.mask_bits(m))));
        push(simd, out, simd.choose(below, b, c));
        push_int(simd, out, simd.float_bits(c));
        push(simd, out, simd.bits_to_float(simd.float_bits(b)));
        push(simd, out, simd.round_bf16(a));
        push(simd, out, exp(simd, a));
        push(simd, out, exp(simd, c));
        out.floats.extend([simd.fold(c), simd.fold_max(a), simd.fold_max(c)]);
        push_int(simd, out, simd.round_to_int(a));
        push_int(simd, out, simd.magnitude_bits(a));
        push(simd, out, simd.load_f16(operands.halves.as_ptr()));
        push(simd, out, simd.load_bf16(operands.halves.as_ptr()));
        let mut words = [0u16; 16];
        simd.store_bf16(words.as_mut_ptr(), a);
        out.ints.extend(words.map(i32::from));
        for n in [0, 1, 7, 8, 9, 15, 16] {
            push(simd, out, simd.load_first(operands.c.as_ptr(), n));
            let mut lanes = [7.0; 16];
            simd.store_first(lanes.as_mut_ptr(), n, c);
            out.floats.extend(lanes);
            push(simd, out, simd.select(first_lanes(n), a, c));
        }
    }
}

#[inline(always)]
unsafe fn int_operations<S: Simd>(simd: S, operands: &Operands, out: &mut Results) {
    // SAFETY: all arrays hold at least what is read or written.
    unsafe {
        let bytes = simd.load_bytes(operands.bytes.as_ptr());
        let (low, high) = (simd.low_nibbles(bytes), simd.high_nibbles(bytes));
        push_int(simd, out, low);
        push_int(simd, out, high);
        push_int(simd, out, simd.add_int(bytes, low));
        push_int(simd, out, simd.max_int(bytes, simd.splat_int(-5)));
        push(simd, out, simd.int_to_float(bytes));
        out.ints.extend([simd.fold_int(bytes), simd.fold_max_int(bytes)]);
        push_int(simd, out, simd.sub_int(bytes, low));
        push_int(simd, out, simd.xor(bytes, high));
        for factor in [0, 3, 0xd251_1f53, u32::MAX] {
            push_int(simd, out, simd.mul_even(bytes, factor));
        }
        push_int(simd, out, simd.odd_lanes(bytes));
        push_int(simd, out, simd.merge_even(bytes, low));
        push(simd, out, simd.unsigned_to_float(bytes));
        push(simd, out, simd.unsigned_to_float(simd.splat_int(-1)));
        push_int(simd, out, simd.exponent_of(bytes));
        push_int(simd, out, simd.exponent_bits(low));
        for (a, b) in [(bytes, low), (bytes, simd.splat_int(i32::MIN)), (low, low), (simd.splat_int(-1), bytes)] {
            out.ints.push(i32::from(simd.mask_bits(simd.less_unsigned(a, b))));
        }
        for bits in [0, 6, 31] {
            push_int(simd, out, simd.shift_up(bytes, bits));
            push_int(simd, out, simd.shift_down(bytes, bits));
        }
        push_int(simd, out, simd.and(bytes, simd.splat_int(0x1234_5678)));
        push_int(simd, out, simd.load_i8(operands.bytes.as_ptr().cast()));
        // Codes of up to 255 with parts of up to 64, the most that 16 bits allow, and of up to 127 with any code.
        push_int(simd, out, simd.dot_bytes(low, bytes, simd.splat_int(0x4040_c0c0)));
        let lowest = simd.and(bytes, simd.splat_int(0x7f7f_7f7f));
        push_int(simd, out, simd.dot_bytes(high, lowest, bytes));
        let (even, odd) = simd.split_bf16(bytes);
        push(simd, out, even);
        push(simd, out, odd);
        let mut words = [0u16; 16];
        simd.store_rounded_bf16(words.as_mut_ptr(), odd);
        out.ints.extend(words.map(i32::from));
        for index in 0..8 {
            push(simd, out, simd.nibble_floats(bytes, index));
            push(simd, out, simd.byte_floats(bytes, index % 4));
        }
        let (a, c) = (simd.load(operands.a.as_ptr()), simd.load(operands.c.as_ptr()));
        let (doubled_low, doubled_high) = simd.double_lanes(c);
        push(simd, out, doubled_low);
        push(simd, out, doubled_high);
        push(simd, out, simd.add_pairs(a, c));
        push(simd, out, simd.alternate_bf16(simd.splat_int(0x3f81_c0a5)));
        let sum: i32 = operands.activations.iter().flatten().map(|&v| i32::from(v)).sum();
        let correction = simd.splat_int(-8 * sum);
        let mut nibbles = simd.start_nibbles(correction);
        let biased_correction = simd.splat_int(-128 * sum);
        let mut biased = simd.start_biased(biased_correction);
        let mut floats = simd.splat(0.5);
        for x in &operands.activations {
            let x = simd.broadcast_bytes(x.as_ptr().cast());
            nibbles = simd.dot_nibbles(nibbles, low, x);
            biased = simd.dot_biased(biased, bytes, x);
        }
        let pairs = [bf16::from_f32(1.25), bf16::from_f32(-3.1)];
        let pair = simd.broadcast_bytes(pairs.as_ptr().cast());
        for _ in 0..3 {
            floats = simd.dot_bf16(floats, bytes, pair);
        }
        push_int(simd, out, simd.finish_nibbles(nibbles, correction));
        push_int(simd, out, biased);
        push(simd, out, floats);
        let mut codes = [0i8; 16];
        simd.store_i8(codes.as_mut_ptr(), low_bytes(simd, low));
        out.ints.extend(codes.map(i32::from));
    }
}

/// Integers in -127..=127 made of nibbles.
#[inline(always)]
fn low_bytes<S: Simd>(simd: S, nibbles: S::I) -> S::I {
    simd.round_to_int(simd.mul(simd.int_to_float(nibbles), simd.splat(127.0 / 252_645_135.0)))
}

#[inline(always)]
unsafe fn every_operation<S: Simd>(simd: S, operands: *const Operands, out: *mut Results) {
    // SAFETY: the caller passes references.
    unsafe {
        float_operations(simd, &*operands, &mut *out);
        int_operations(simd, &*operands, &mut *out);
    }
}

#[inline(always)]
unsafe fn pairs_from_zero<S: Simd>(simd: S, weights: *const [u16; 32], out: *mut [f32; 16]) {
    let pair = simd.splat_int(0x4060_bfa0);
    // SAFETY: the caller passes references.
    unsafe { simd.store(out.cast(), simd.dot_bf16(simd.splat(0.0), simd.load_bytes(weights.cast()), pair)) }
}

simd_shells! {
    fn select_every_operation[][] = every_operation(operands: *const Operands, out: *mut Results);
    fn select_pairs_from_zero[][] = pairs_from_zero(weights: *const [u16; 32], out: *mut [f32; 16]);
}

fn run(isa: Isa, operands: &Operands) -> (Vec<u32>, Vec<i32>) {
    let mut out = Results::default();
    // SAFETY: both are references to live values.
    unsafe { select_every_operation(isa)(operands, &mut out) };
    let bits = |v: &f32| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() };
    (out.floats.iter().map(bits).collect(), out.ints)
}

/// A fixed sequence of well-mixed bits (xorshift).
pub(crate) fn random_bits(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    }
}

fn operands(seed: u64) -> Operands {
    let mut bits = random_bits(seed);
    let mut float = |scale: f32| (bits() as i32 as f32) / 2f32.powi(31) * scale;
    let c = [0.0; 16].map(|_: f32| float(20.0));
    let mut a = [0.0; 16].map(|_: f32| float(100.0));
    let b = [0.0; 16].map(|_: f32| float(3.0));
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 2.5, -3.5, 3e9, -3e9, 1e-40, -87.5, 88.5];
    if seed.is_multiple_of(2) {
        a[..special.len()].copy_from_slice(&special);
    }
    let mut bytes = [0u8; 64].map(|_: u8| bits() as u8);
    // As pairs of bfloat16 the bytes must be neither infinite nor subnormal.
    for upper in bytes.iter_mut().skip(1).step_by(2) {
        *upper = *upper & 0xbf | 0x20;
    }
    let halves = [0u16; 16].map(|_: u16| bits() as u16);
    let mut activations = [[0i8; 4]; 8];
    for x in activations.iter_mut().flatten() {
        *x = (bits() % 255) as i8;
        *x = (*x).max(-127);
    }
    Operands { a, b, c, bytes, halves, activations }
}

#[test]
fn every_instruction_set_gives_the_bits_of_plain_rust() {
    for seed in 0..200 {
        let operands = operands(seed);
        let expected = run(Isa::Scalar, &operands);
        for isa in Isa::supported() {
            assert_eq!(run(isa, &operands), expected, "{isa}, seed {seed}");
        }
    }
}

#[test]
fn all_but_the_bfloat16_instruction_keep_subnormals() {
    let mut random = random_bits(5);
    let weights = [0u16; 32].map(|_: u16| random() as u16 & 0x807f);
    let products = |isa| {
        let mut out = [0.0; 16];
        // SAFETY: both are references to live values.
        unsafe { select_pairs_from_zero(isa)(&weights, &mut out) };
        out.map(f32::to_bits)
    };
    let expected = products(Isa::Scalar);
    assert!(expected.iter().all(|bits| bits & 0x7fff_ffff != 0));
    for isa in Isa::supported().into_iter().filter(|isa| *isa != Isa::Avx512Bf16) {
        assert_eq!(products(isa), expected, "{isa}");
    }
}

#[test]
fn extreme_codes_do_not_saturate() {
    for (byte, x) in [(0, 127), (0, -127), (255, 127), (255, -127), (127, 127), (1, -127)] {
        let mut operands = operands(1);
        operands.bytes = [byte; 64];
        operands.activations = [[x; 4]; 8];
        for isa in Isa::supported() {
            let (_, ints) = run(isa, &operands);
            // From the end: 16 codes, 16 biased sums, 16 nibble sums.
            let (nibbles, biased) = (ints[ints.len() - 48], ints[ints.len() - 32]);
            let code = i32::from(byte) - 128;
            assert_eq!(biased, 32 * code * i32::from(x), "{isa}");
            assert_eq!(nibbles, 32 * (i32::from(byte & 15) - 8) * i32::from(x), "{isa}");
        }
    }
}

#[test]
fn the_scalar_operations_agree_with_the_formats_own_crate() {
    let mut bits = random_bits(7);
    for _ in 0..1000 {
        let values = [0.0; 16].map(|_: f32| f32::from_bits(bits()));
        let words = [0u16; 16].map(|_: u16| bits() as u16);
        let mut rounded = [0u16; 16];
        // SAFETY: 16 values each.
        let (half_floats, wide) = unsafe {
            Scalar.store_bf16(rounded.as_mut_ptr(), values);
            (Scalar.load_f16(words.as_ptr()), Scalar.load_bf16(words.as_ptr()))
        };
        assert_eq!(rounded, values.map(|v| bf16::from_f32(v).to_bits()));
        for i in 0..16 {
            let (a, b) = (f16::from_bits(words[i]).to_f32(), bf16::from_bits(words[i]).to_f32());
            assert!(half_floats[i] == a || (half_floats[i].is_nan() && a.is_nan()));
            assert!(wide[i] == b || (wide[i].is_nan() && b.is_nan()));
        }
        assert!(Scalar.fold(values).to_bits() == fold_lanes(values).to_bits() || fold_lanes(values).is_nan());
    }
}

#[test]
fn exp_has_the_bits_of_its_definition() {
    let bits = |v: f32| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() };
    let mut random = random_bits(11);
    for i in 0..100_000 {
        let x = if i % 4 == 0 { f32::from_bits(random()) } else { (random() as i32 as f32) * 5e-8 };
        assert_eq!(bits(exp(Scalar, [x; 16])[0]), bits(numerics::exp(x)), "{x}");
        if x <= 88.0 {
            assert_eq!(exp_up_to_88(Scalar, [x; 16])[3].to_bits(), numerics::exp(x).to_bits(), "{x}");
        }
    }
}
