//! Sixteen lanes as plain arrays: the definition of every operation, and the code of machines without a faster set.

use half::f16;
use octavo_backend::numerics::fold_lanes;

use super::{LANES, Simd};

/// The token of plain Rust.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

type Floats = [f32; LANES];
type Ints = [i32; LANES];

#[inline(always)]
fn zip_floats(a: Floats, b: Floats, operation: impl Fn(f32, f32) -> f32) -> Floats {
    let mut out = a;
    for (out, b) in out.iter_mut().zip(b) {
        *out = operation(*out, b);
    }
    out
}

#[inline(always)]
fn map_ints(a: Ints, operation: impl Fn(i32) -> i32) -> Ints {
    let mut out = a;
    for out in &mut out {
        *out = operation(*out);
    }
    out
}

#[inline(always)]
fn zip_ints(a: Ints, b: Ints, operation: impl Fn(i32, i32) -> i32) -> Ints {
    let mut out = a;
    for (out, b) in out.iter_mut().zip(b) {
        *out = operation(*out, b);
    }
    out
}

#[inline(always)]
fn round_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    if value.is_nan() {
        return f32::from_bits((bits | 0x0040_0000) & 0xffff_0000);
    }
    // Adding just under half, or half when the kept part is odd, carries into it exactly when rounding up is due.
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

impl Simd for Scalar {
    type F = Floats;
    type I = Ints;
    type Partial = Ints;
    type M = u16;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Floats {
        // SAFETY: the caller's.
        unsafe { from.cast::<Floats>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, n: usize) -> Floats {
        let mut out = [0.0; LANES];
        // SAFETY: the caller's; `n` is at most 16.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), n.min(LANES)) };
        out
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Floats) {
        // SAFETY: the caller's.
        unsafe { to.cast::<Floats>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize, value: Floats) {
        // SAFETY: the caller's; `n` is at most 16.
        unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to, n.min(LANES)) }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> Ints {
        // SAFETY: the caller's.
        let bytes = unsafe { from.cast::<[[u8; 4]; LANES]>().read_unaligned() };
        let mut out = [0; LANES];
        for (out, bytes) in out.iter_mut().zip(bytes) {
            *out = i32::from_le_bytes(bytes);
        }
        out
    }
    #[inline(always)]
    unsafe fn store_int(self, to: *mut i32, value: Ints) {
        // SAFETY: the caller's.
        unsafe { to.cast::<Ints>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8, value: Ints) {
        for (lane, value) in value.into_iter().enumerate() {
            // SAFETY: the caller's: 16 bytes are writable.
            unsafe { to.add(lane).write(value as i8) }
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Ints {
        let mut out = [0; LANES];
        for (lane, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller's: 16 bytes are readable.
            *out = i32::from(unsafe { from.add(lane).read() });
        }
        out
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Floats {
        let mut out = [0.0; LANES];
        for (lane, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller's: 16 values are readable.
            *out = f16::from_bits(u16::from_le(unsafe { from.add(lane).read_unaligned() })).to_f32();
        }
        out
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Floats {
        let mut out = [0.0; LANES];
        for (lane, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller's: 16 values are readable.
            *out = f32::from_bits(u32::from(u16::from_le(unsafe { from.add(lane).read_unaligned() })) << 16);
        }
        out
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, value: Floats) {
        for (lane, value) in value.into_iter().enumerate() {
            let bits = (round_bf16(value).to_bits() >> 16) as u16;
            // SAFETY: the caller's: 16 values are writable.
            unsafe { to.add(lane).write_unaligned(bits.to_le()) }
        }
    }
    #[inline(always)]
    unsafe fn broadcast_bytes(self, from: *const u8) -> Ints {
        // SAFETY: the caller's.
        [i32::from_le_bytes(unsafe { from.cast::<[u8; 4]>().read_unaligned() }); LANES]
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
    #[inline(always)]
    fn prefetch_early(self, _at: *const u8) {}

    #[inline(always)]
    fn splat(self, value: f32) -> Floats {
        [value; LANES]
    }
    #[inline(always)]
    fn splat_int(self, value: i32) -> Ints {
        [value; LANES]
    }
    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        zip_floats(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        zip_floats(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        zip_floats(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        zip_floats(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Floats, b: Floats, c: Floats) -> Floats {
        let mut out = c;
        for (lane, out) in out.iter_mut().enumerate() {
            *out = a[lane].mul_add(b[lane], *out);
        }
        out
    }
    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        zip_floats(a, b, larger)
    }
    #[inline(always)]
    fn select_less(self, a: Floats, b: Floats, yes: Floats, no: Floats) -> Floats {
        let mut out = no;
        for (lane, out) in out.iter_mut().enumerate() {
            if a[lane] < b[lane] {
                *out = yes[lane];
            }
        }
        out
    }
    #[inline(always)]
    fn select(self, mask: u16, yes: Floats, no: Floats) -> Floats {
        let mut out = no;
        for (lane, out) in out.iter_mut().enumerate() {
            if mask >> lane & 1 == 1 {
                *out = yes[lane];
            }
        }
        out
    }
    #[inline(always)]
    fn int_to_float(self, value: Ints) -> Floats {
        let mut out = [0.0; LANES];
        for (out, value) in out.iter_mut().zip(value) {
            *out = value as f32;
        }
        out
    }
    #[inline(always)]
    fn round_to_int(self, value: Floats) -> Ints {
        let mut out = [i32::MIN; LANES];
        for (out, value) in out.iter_mut().zip(value) {
            let rounded = value.round_ties_even();
            // 2^31 itself does not fit; a NaN compares false.
            if rounded < 2_147_483_648.0 {
                *out = rounded as i32;
            }
        }
        out
    }
    #[inline(always)]
    fn magnitude_bits(self, value: Floats) -> Ints {
        let mut out = [0; LANES];
        for (out, value) in out.iter_mut().zip(value) {
            *out = (value.to_bits() & 0x7fff_ffff) as i32;
        }
        out
    }
    #[inline(always)]
    fn pow2(self, n: Ints) -> Floats {
        let mut out = [0.0; LANES];
        for (out, n) in out.iter_mut().zip(n) {
            *out = f32::from_bits((n.wrapping_add(127) as u32) << 23);
        }
        out
    }
    #[inline(always)]
    fn round_bf16(self, value: Floats) -> Floats {
        let mut out = value;
        for out in &mut out {
            *out = round_bf16(*out);
        }
        out
    }
    #[inline(always)]
    fn add_int(self, a: Ints, b: Ints) -> Ints {
        zip_ints(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn max_int(self, a: Ints, b: Ints) -> Ints {
        zip_ints(a, b, i32::max)
    }
    #[inline(always)]
    fn shift_up(self, a: Ints, bits: u32) -> Ints {
        map_ints(a, |v| ((v as u32) << bits) as i32)
    }
    #[inline(always)]
    fn shift_down(self, a: Ints, bits: u32) -> Ints {
        map_ints(a, |v| v >> bits)
    }
    #[inline(always)]
    fn and(self, a: Ints, b: Ints) -> Ints {
        zip_ints(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn dot_bytes(self, sum: Ints, unsigned: Ints, signed: Ints) -> Ints {
        let mut out = sum;
        for (lane, out) in out.iter_mut().enumerate() {
            for (a, b) in unsigned[lane].to_le_bytes().into_iter().zip(signed[lane].to_le_bytes()) {
                *out += i32::from(a) * i32::from(b as i8);
            }
        }
        out
    }

    #[inline(always)]
    fn sub_int(self, a: Ints, b: Ints) -> Ints {
        zip_ints(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn xor(self, a: Ints, b: Ints) -> Ints {
        zip_ints(a, b, |a, b| a ^ b)
    }
    #[inline(always)]
    fn mul_even(self, a: Ints, b: u32) -> Ints {
        let mut out = [0; LANES];
        for lane in (0..LANES).step_by(2) {
            let product = u64::from(a[lane] as u32) * u64::from(b);
            (out[lane], out[lane + 1]) = (product as i32, (product >> 32) as i32);
        }
        out
    }
    #[inline(always)]
    fn odd_lanes(self, mut a: Ints) -> Ints {
        for lane in (0..LANES).step_by(2) {
            a[lane] = a[lane + 1];
        }
        a
    }
    #[inline(always)]
    fn merge_even(self, mut even: Ints, odd: Ints) -> Ints {
        for lane in (0..LANES).step_by(2) {
            even[lane + 1] = odd[lane];
        }
        even
    }
    #[inline(always)]
    fn unsigned_to_float(self, value: Ints) -> Floats {
        let mut out = [0.0; LANES];
        for (out, value) in out.iter_mut().zip(value) {
            *out = value as u32 as f32;
        }
        out
    }
    #[inline(always)]
    fn float_bits(self, value: Floats) -> Ints {
        let mut out = [0; LANES];
        for (out, value) in out.iter_mut().zip(value) {
            *out = value.to_bits() as i32;
        }
        out
    }
    #[inline(always)]
    fn bits_to_float(self, bits: Ints) -> Floats {
        let mut out = [0.0; LANES];
        for (out, bits) in out.iter_mut().zip(bits) {
            *out = f32::from_bits(bits as u32);
        }
        out
    }
    #[inline(always)]
    fn exponent_of(self, bits: Ints) -> Ints {
        map_ints(bits, |v| v >> 23)
    }
    #[inline(always)]
    fn exponent_bits(self, exponent: Ints) -> Ints {
        map_ints(exponent, |v| v << 23)
    }

    #[inline(always)]
    fn less(self, a: Floats, b: Floats) -> u16 {
        let mut mask = 0;
        for lane in 0..LANES {
            mask |= u16::from(a[lane] < b[lane]) << lane;
        }
        mask
    }
    #[inline(always)]
    fn less_unsigned(self, a: Ints, b: Ints) -> u16 {
        let mut mask = 0;
        for lane in 0..LANES {
            mask |= u16::from((a[lane] as u32) < b[lane] as u32) << lane;
        }
        mask
    }
    #[inline(always)]
    fn both(self, a: u16, b: u16) -> u16 {
        a & b
    }
    #[inline(always)]
    fn mask_bits(self, mask: u16) -> u16 {
        mask
    }
    #[inline(always)]
    fn choose(self, mask: u16, yes: Floats, no: Floats) -> Floats {
        self.select(mask, yes, no)
    }

    #[inline(always)]
    fn fold(self, value: Floats) -> f32 {
        fold_lanes(value)
    }
    #[inline(always)]
    fn fold_max(self, mut value: Floats) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                value[i] = larger(value[i], value[i + half]);
            }
        }
        value[0]
    }
    #[inline(always)]
    fn fold_int(self, value: Ints) -> i32 {
        value.into_iter().fold(0, i32::wrapping_add)
    }
    #[inline(always)]
    fn fold_max_int(self, value: Ints) -> i32 {
        value.into_iter().fold(i32::MIN, i32::max)
    }

    #[inline(always)]
    fn low_nibbles(self, bytes: Ints) -> Ints {
        map_ints(bytes, |v| v & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn high_nibbles(self, bytes: Ints) -> Ints {
        map_ints(bytes, |v| v >> 4 & 0x0f0f_0f0f)
    }

    #[inline(always)]
    fn start_nibbles(self, correction: Ints) -> Ints {
        correction
    }
    #[inline(always)]
    fn dot_nibbles(self, sum: Ints, weights: Ints, activations: Ints) -> Ints {
        let mut out = sum;
        for (lane, out) in out.iter_mut().enumerate() {
            for (weight, x) in weights[lane].to_le_bytes().into_iter().zip(activations[lane].to_le_bytes()) {
                *out += i32::from(weight) * i32::from(x as i8);
            }
        }
        out
    }
    #[inline(always)]
    fn finish_nibbles(self, sum: Ints, _correction: Ints) -> Ints {
        sum
    }

    #[inline(always)]
    fn start_biased(self, _correction: Ints) -> Ints {
        [0; LANES]
    }
    #[inline(always)]
    fn dot_biased(self, sum: Ints, weights: Ints, activations: Ints) -> Ints {
        let mut out = sum;
        for (lane, out) in out.iter_mut().enumerate() {
            for (weight, x) in weights[lane].to_le_bytes().into_iter().zip(activations[lane].to_le_bytes()) {
                *out += (i32::from(weight) - 128) * i32::from(x as i8);
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn store_rounded_bf16(self, to: *mut u16, value: Floats) {
        for (lane, value) in value.into_iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { to.add(lane).write_unaligned((value.to_bits() >> 16) as u16) };
        }
    }
    #[inline(always)]
    fn split_bf16(self, pairs: Ints) -> (Floats, Floats) {
        (self.bits_to_float(map_ints(pairs, |v| v << 16)), self.bits_to_float(map_ints(pairs, |v| v & !0xffff)))
    }
    #[inline(always)]
    fn nibble_floats(self, words: Ints, index: usize) -> Floats {
        let mut out = [0.0; LANES];
        for (out, word) in out.iter_mut().zip(words) {
            *out = (16 + (word >> (4 * index) & 15)) as f32;
        }
        out
    }
    #[inline(always)]
    fn byte_floats(self, words: Ints, index: usize) -> Floats {
        let mut out = [0.0; LANES];
        for (out, word) in out.iter_mut().zip(words) {
            *out = (256 + (word >> (8 * index) & 255)) as f32;
        }
        out
    }
    #[inline(always)]
    fn double_lanes(self, value: Floats) -> (Floats, Floats) {
        let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            low[lane] = value[lane / 2];
            high[lane] = value[LANES / 2 + lane / 2];
        }
        (low, high)
    }
    #[inline(always)]
    fn add_pairs(self, low: Floats, high: Floats) -> Floats {
        let mut out = [0.0; LANES];
        for lane in 0..LANES / 2 {
            out[lane] = low[2 * lane] + low[2 * lane + 1];
            out[LANES / 2 + lane] = high[2 * lane] + high[2 * lane + 1];
        }
        out
    }
    #[inline(always)]
    fn alternate_bf16(self, pair: Ints) -> Floats {
        let mut out = [0.0; LANES];
        for (lane, (out, pair)) in out.iter_mut().zip(pair).enumerate() {
            let bits = if lane % 2 == 0 { pair << 16 } else { pair & !0xffff };
            *out = f32::from_bits(bits as u32);
        }
        out
    }

    #[inline(always)]
    fn dot_bf16(self, sum: Floats, weights: Ints, activations: Ints) -> Floats {
        let mut out = sum;
        for (lane, out) in out.iter_mut().enumerate() {
            let (weight, x) = (weights[lane] as u32, activations[lane] as u32);
            *out = f32::from_bits(weight & 0xffff_0000).mul_add(f32::from_bits(x & 0xffff_0000), *out);
            *out = f32::from_bits(weight << 16).mul_add(f32::from_bits(x << 16), *out);
        }
        out
    }
}
