//! Sixteen lanes as four 128-bit registers, of four lanes each.

use std::arch::{aarch64::*, asm};

use super::{LANES, Simd};
use crate::isa::Isa;

/// The token of NEON with its integer dot product.
#[derive(Debug, Clone, Copy)]
pub struct Neon(());

impl Neon {
    /// The token, where this machine has the instruction set.
    pub fn detect() -> Option<Neon> {
        Isa::Neon.is_supported().then_some(Neon(()))
    }

    /// The token.
    ///
    /// # Safety
    /// This machine has the instruction set.
    #[inline(always)]
    pub unsafe fn new_unchecked() -> Neon {
        Neon(())
    }
}

type Floats = [float32x4_t; 4];
type Ints = [int32x4_t; 4];
type Masks = [uint32x4_t; 4];

/// Methods whose body is the same expression on all four registers.
macro_rules! quarters {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty = $operation:expr;)*) => { $(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: the token proves the instruction set.
            unsafe {
                [$operation($($arg[0]),*), $operation($($arg[1]),*), $operation($($arg[2]),*), $operation($($arg[3]),*)]
            }
        }
    )* };
}

/// Functions of one register, whose arguments and results are registers.
///
/// SAFETY of all: whoever calls one has a token, which proves the instruction set.
macro_rules! registers {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => { $(
        $(#[$meta])*
        ///
        /// # Safety
        /// NEON with its integer dot product.
        #[inline(always)]
        unsafe fn $name($($arg: $type),*) -> $result {
            // SAFETY: the caller's.
            unsafe { $body }
        }
    )* };
}

registers! {
    /// Adds, in each lane, the products of four signed bytes.
    fn dot(sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        // The compiler's own name for the instruction is not stable yet.
        let mut sum = sum;
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inlateout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
        sum
    }
    /// The bytes less 128, as signed ones; or back.
    fn flip(bytes: int32x4_t) -> int32x4_t {
        veorq_s32(bytes, vreinterpretq_s32_u8(vdupq_n_u8(128)))
    }
    /// The 128 that an unsigned byte lost on its way to a signed one come back as 128 times each signed byte: twice 64,
    /// for 128 is no signed byte. Where several products share the signed bytes, that sum is computed once.
    fn dot_bytes(sum: int32x4_t, unsigned: int32x4_t, signed: int32x4_t) -> int32x4_t {
        let half = vreinterpretq_s32_u8(vdupq_n_u8(64));
        let lost = dot(dot(vdupq_n_s32(0), signed, half), signed, half);
        vaddq_s32(dot(sum, flip(unsigned), signed), lost)
    }
    /// The products of biased weights.
    fn dot_biased(sum: int32x4_t, weights: int32x4_t, activations: int32x4_t) -> int32x4_t {
        dot(sum, flip(weights), activations)
    }
    /// The upper 16 bits of each lane.
    fn keep_upper(value: int32x4_t) -> float32x4_t {
        vreinterpretq_f32_s32(vandq_s32(value, vdupq_n_s32(0xffff_0000_u32 as i32)))
    }
    /// The lower 16 bits of each lane, in the place of the upper ones.
    fn raise_lower(value: int32x4_t) -> float32x4_t {
        vreinterpretq_f32_s32(vshlq_n_s32::<16>(value))
    }
    /// The odd product, then the even one.
    fn dot_bf16(sum: float32x4_t, weights: int32x4_t, activations: int32x4_t) -> float32x4_t {
        let sum = vfmaq_f32(sum, keep_upper(weights), keep_upper(activations));
        vfmaq_f32(sum, raise_lower(weights), raise_lower(activations))
    }
    /// `a * b + c`.
    fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }
    /// The instruction of that name has another result for NaN.
    fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vbslq_f32(vcgtq_f32(a, b), a, b)
    }
    /// `yes` where `a < b`, else `no`.
    fn select_less(a: float32x4_t, b: float32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t {
        vbslq_f32(vcltq_f32(a, b), yes, no)
    }
    /// The instruction has 0 for NaN and the largest integer for what is above.
    fn round_to_int(value: float32x4_t) -> int32x4_t {
        // A NaN compares false; the floats next to 2^31 are integers, so that none is rounded up to it.
        let fits = vcltq_f32(value, vdupq_n_f32(2_147_483_648.0));
        vbslq_s32(fits, vcvtnq_s32_f32(value), vdupq_n_s32(i32::MIN))
    }
    /// All bits but the sign.
    fn magnitude_bits(value: float32x4_t) -> int32x4_t {
        vandq_s32(vreinterpretq_s32_f32(value), vdupq_n_s32(0x7fff_ffff))
    }
    /// `2^n`.
    fn pow2(n: int32x4_t) -> float32x4_t {
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))))
    }
    /// The bits of each value with the lower half still to be dropped.
    fn round_bf16(value: float32x4_t) -> int32x4_t {
        let bits = vreinterpretq_s32_f32(value);
        let odd = vandq_s32(vreinterpretq_s32_u32(vshrq_n_u32::<16>(vreinterpretq_u32_f32(value))), vdupq_n_s32(1));
        let rounded = vaddq_s32(vaddq_s32(bits, vdupq_n_s32(0x7fff)), odd);
        let quiet = vorrq_s32(bits, vdupq_n_s32(0x0040_0000));
        vbslq_s32(vceqq_f32(value, value), rounded, quiet)
    }
    /// The upper halves of eight lanes.
    fn upper_words(low: int32x4_t, high: int32x4_t) -> uint16x8_t {
        vuzp2q_u16(vreinterpretq_u16_s32(low), vreinterpretq_u16_s32(high))
    }
    /// Four half-precision floats from each half of the register.
    fn widen_f16(halves: uint16x8_t) -> [float32x4_t; 2] {
        let (low, high): (float32x4_t, float32x4_t);
        asm!(
            "fcvtl {low:v}.4s, {halves:v}.4h",
            low = lateout(vreg) low, halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
        asm!(
            "fcvtl2 {high:v}.4s, {halves:v}.8h",
            high = lateout(vreg) high, halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
        [low, high]
    }
    /// Four bfloat16 from each half of the register.
    fn widen_bf16(halves: uint16x8_t) -> [float32x4_t; 2] {
        let low = vshll_n_u16::<16>(vget_low_u16(halves));
        [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(vshll_high_n_u16::<16>(halves))]
    }
    /// Each odd lane in both lanes of its pair.
    fn odd_lanes(a: int32x4_t) -> int32x4_t {
        vtrn2q_s32(a, a)
    }
    /// The nearest float of each unsigned integer.
    fn unsigned_to_float(value: int32x4_t) -> float32x4_t {
        vcvtq_f32_u32(vreinterpretq_u32_s32(value))
    }
    /// Where `a < b` as unsigned integers.
    fn less_unsigned(a: int32x4_t, b: int32x4_t) -> uint32x4_t {
        vcltq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b))
    }
    /// The low four bits of each byte.
    fn low_nibbles(bytes: int32x4_t) -> int32x4_t {
        vandq_s32(bytes, vreinterpretq_s32_u8(vdupq_n_u8(15)))
    }
    /// The high four bits of each byte.
    fn high_nibbles(bytes: int32x4_t) -> int32x4_t {
        vreinterpretq_s32_u8(vshrq_n_u8::<4>(vreinterpretq_u8_s32(bytes)))
    }
    /// The lower bfloat16 in even lanes, the upper one in odd lanes.
    fn alternate_bf16(pair: int32x4_t) -> float32x4_t {
        let even = vreinterpretq_u32_u64(vdupq_n_u64(0xffff_ffff));
        vbslq_f32(even, raise_lower(pair), keep_upper(pair))
    }
    /// The products of the even lanes.
    fn mul_even(a: int32x4_t, b: uint32x2_t) -> int32x4_t {
        let even = vmovn_u64(vreinterpretq_u64_s32(a));
        vreinterpretq_s32_u64(vmull_u32(even, b))
    }
    /// Shifts left by `shift`, or right if it is negative, and sets the bits of `mantissa` into the float `base`.
    fn mantissa_floats(words: int32x4_t, shift: i32, mantissa: u32, base: u32) -> float32x4_t {
        let placed = vshlq_u32(vreinterpretq_u32_s32(words), vdupq_n_s32(shift));
        vreinterpretq_f32_u32(vorrq_u32(vandq_u32(placed, vdupq_n_u32(mantissa)), vdupq_n_u32(base)))
    }
}

/// Which lanes a mask names, a bit for each.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn bits_of_lanes() -> Masks {
    // SAFETY: the caller's; four lanes each.
    unsafe {
        let bits: [u32; LANES] = const {
            let mut bits = [0; LANES];
            let mut lane = 0;
            while lane < LANES {
                bits[lane] = 1 << lane;
                lane += 1;
            }
            bits
        };
        bits.as_ptr().cast::<Masks>().read_unaligned()
    }
}

impl Simd for Neon {
    type F = Floats;
    type I = Ints;
    type Partial = Ints;
    type M = Masks;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Floats {
        // SAFETY: the caller's.
        unsafe { from.cast::<Floats>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, n: usize) -> Floats {
        let mut lanes = [0f32; LANES];
        // SAFETY: the caller's; `n` is at most 16.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), n.min(LANES));
            self.load(lanes.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Floats) {
        // SAFETY: the caller's.
        unsafe { to.cast::<Floats>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize, value: Floats) {
        let mut lanes = [0f32; LANES];
        // SAFETY: the caller's; `n` is at most 16.
        unsafe {
            self.store(lanes.as_mut_ptr(), value);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, n.min(LANES));
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> Ints {
        // SAFETY: the caller's.
        unsafe { from.cast::<Ints>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_int(self, to: *mut i32, value: Ints) {
        // SAFETY: the caller's.
        unsafe { to.cast::<Ints>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8, value: Ints) {
        // SAFETY: the caller's; the token proves the instruction set; so in all that follow.
        unsafe {
            let low = vcombine_s16(vmovn_s32(value[0]), vmovn_s32(value[1]));
            let high = vcombine_s16(vmovn_s32(value[2]), vmovn_s32(value[3]));
            to.cast::<int8x16_t>().write_unaligned(vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Ints {
        // SAFETY: as in `store_i8`.
        unsafe {
            let bytes = from.cast::<int8x16_t>().read_unaligned();
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Floats {
        // SAFETY: as in `store_i8`.
        unsafe {
            let halves = from.cast::<[uint16x8_t; 2]>().read_unaligned();
            let (low, high) = (widen_f16(halves[0]), widen_f16(halves[1]));
            [low[0], low[1], high[0], high[1]]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Floats {
        // SAFETY: as in `store_i8`.
        unsafe {
            let halves = from.cast::<[uint16x8_t; 2]>().read_unaligned();
            let (low, high) = (widen_bf16(halves[0]), widen_bf16(halves[1]));
            [low[0], low[1], high[0], high[1]]
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, value: Floats) {
        // SAFETY: as in `store_i8`.
        unsafe {
            let low = upper_words(round_bf16(value[0]), round_bf16(value[1]));
            let high = upper_words(round_bf16(value[2]), round_bf16(value[3]));
            to.cast::<[uint16x8_t; 2]>().write_unaligned([low, high]);
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_bf16(self, to: *mut u16, value: Floats) {
        let bits = self.float_bits(value);
        // SAFETY: as in `store_i8`.
        unsafe {
            let words = [upper_words(bits[0], bits[1]), upper_words(bits[2], bits[3])];
            to.cast::<[uint16x8_t; 2]>().write_unaligned(words);
        }
    }
    #[inline(always)]
    unsafe fn broadcast_bytes(self, from: *const u8) -> Ints {
        // SAFETY: the caller's.
        self.splat_int(unsafe { from.cast::<i32>().read_unaligned() })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch cannot fault and changes nothing.
        unsafe { asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    fn prefetch_early(self, at: *const u8) {
        // SAFETY: as in `prefetch`.
        unsafe { asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Floats {
        // SAFETY: the token proves the instruction set; so in all that follow.
        unsafe { [vdupq_n_f32(value); 4] }
    }
    #[inline(always)]
    fn splat_int(self, value: i32) -> Ints {
        // SAFETY: as in `splat`.
        unsafe { [vdupq_n_s32(value); 4] }
    }
    quarters! {
        fn add(a: Floats, b: Floats) -> Floats = vaddq_f32;
        fn sub(a: Floats, b: Floats) -> Floats = vsubq_f32;
        fn mul(a: Floats, b: Floats) -> Floats = vmulq_f32;
        fn div(a: Floats, b: Floats) -> Floats = vdivq_f32;
        fn fma(a: Floats, b: Floats, c: Floats) -> Floats = fma;
        fn max(a: Floats, b: Floats) -> Floats = max;
        fn select_less(a: Floats, b: Floats, yes: Floats, no: Floats) -> Floats = select_less;
        fn int_to_float(value: Ints) -> Floats = vcvtq_f32_s32;
        fn round_to_int(value: Floats) -> Ints = round_to_int;
        fn magnitude_bits(value: Floats) -> Ints = magnitude_bits;
        fn pow2(n: Ints) -> Floats = pow2;
        fn add_int(a: Ints, b: Ints) -> Ints = vaddq_s32;
        fn max_int(a: Ints, b: Ints) -> Ints = vmaxq_s32;
        fn and(a: Ints, b: Ints) -> Ints = vandq_s32;
        fn dot_bytes(sum: Ints, unsigned: Ints, signed: Ints) -> Ints = dot_bytes;
        fn sub_int(a: Ints, b: Ints) -> Ints = vsubq_s32;
        fn xor(a: Ints, b: Ints) -> Ints = veorq_s32;
        fn odd_lanes(a: Ints) -> Ints = odd_lanes;
        fn merge_even(even: Ints, odd: Ints) -> Ints = vtrn1q_s32;
        fn unsigned_to_float(value: Ints) -> Floats = unsigned_to_float;
        fn float_bits(value: Floats) -> Ints = vreinterpretq_s32_f32;
        fn bits_to_float(bits: Ints) -> Floats = vreinterpretq_f32_s32;
        fn exponent_of(bits: Ints) -> Ints = vshrq_n_s32::<23>;
        fn exponent_bits(exponent: Ints) -> Ints = vshlq_n_s32::<23>;
        fn less(a: Floats, b: Floats) -> Masks = vcltq_f32;
        fn less_unsigned(a: Ints, b: Ints) -> Masks = less_unsigned;
        fn both(a: Masks, b: Masks) -> Masks = vandq_u32;
        fn choose(mask: Masks, yes: Floats, no: Floats) -> Floats = vbslq_f32;
        fn low_nibbles(bytes: Ints) -> Ints = low_nibbles;
        fn high_nibbles(bytes: Ints) -> Ints = high_nibbles;
        fn dot_nibbles(sum: Ints, weights: Ints, activations: Ints) -> Ints = dot;
        fn dot_biased(sum: Ints, weights: Ints, activations: Ints) -> Ints = dot_biased;
        fn dot_bf16(sum: Floats, weights: Ints, activations: Ints) -> Floats = dot_bf16;
        fn alternate_bf16(pair: Ints) -> Floats = alternate_bf16;
    }
    #[inline(always)]
    fn shift_up(self, a: Ints, bits: u32) -> Ints {
        // SAFETY: as in `splat`.
        unsafe {
            let bits = vdupq_n_s32(bits as i32);
            [vshlq_s32(a[0], bits), vshlq_s32(a[1], bits), vshlq_s32(a[2], bits), vshlq_s32(a[3], bits)]
        }
    }
    #[inline(always)]
    fn shift_down(self, a: Ints, bits: u32) -> Ints {
        // SAFETY: as in `splat`. A negative shift goes down.
        unsafe {
            let bits = vdupq_n_s32(-(bits as i32));
            [vshlq_s32(a[0], bits), vshlq_s32(a[1], bits), vshlq_s32(a[2], bits), vshlq_s32(a[3], bits)]
        }
    }
    #[inline(always)]
    fn mul_even(self, a: Ints, b: u32) -> Ints {
        // SAFETY: as in `splat`.
        unsafe {
            let b = vdup_n_u32(b);
            [mul_even(a[0], b), mul_even(a[1], b), mul_even(a[2], b), mul_even(a[3], b)]
        }
    }
    #[inline(always)]
    fn select(self, mask: u16, yes: Floats, no: Floats) -> Floats {
        // SAFETY: as in `splat`.
        unsafe {
            let (mask, bits) = (vdupq_n_u32(u32::from(mask)), bits_of_lanes());
            let mask = [
                vtstq_u32(mask, bits[0]),
                vtstq_u32(mask, bits[1]),
                vtstq_u32(mask, bits[2]),
                vtstq_u32(mask, bits[3]),
            ];
            self.choose(mask, yes, no)
        }
    }
    #[inline(always)]
    fn mask_bits(self, mask: Masks) -> u16 {
        // SAFETY: as in `splat`.
        unsafe {
            let bits = self.both(mask, bits_of_lanes());
            vaddvq_u32(vorrq_u32(vorrq_u32(bits[0], bits[1]), vorrq_u32(bits[2], bits[3]))) as u16
        }
    }
    #[inline(always)]
    fn round_bf16(self, value: Floats) -> Floats {
        // SAFETY: as in `splat`.
        unsafe {
            [
                keep_upper(round_bf16(value[0])),
                keep_upper(round_bf16(value[1])),
                keep_upper(round_bf16(value[2])),
                keep_upper(round_bf16(value[3])),
            ]
        }
    }
    #[inline(always)]
    fn split_bf16(self, pairs: Ints) -> (Floats, Floats) {
        // SAFETY: as in `splat`.
        unsafe {
            (
                [raise_lower(pairs[0]), raise_lower(pairs[1]), raise_lower(pairs[2]), raise_lower(pairs[3])],
                [keep_upper(pairs[0]), keep_upper(pairs[1]), keep_upper(pairs[2]), keep_upper(pairs[3])],
            )
        }
    }
    #[inline(always)]
    fn nibble_floats(self, words: Ints, index: usize) -> Floats {
        // Bits 19 to 22 are the upper four of a mantissa.
        let (shift, mantissa, base) = (19 - 4 * index as i32, 0x0078_0000, 0x4180_0000);
        // SAFETY: as in `splat`.
        unsafe {
            [
                mantissa_floats(words[0], shift, mantissa, base),
                mantissa_floats(words[1], shift, mantissa, base),
                mantissa_floats(words[2], shift, mantissa, base),
                mantissa_floats(words[3], shift, mantissa, base),
            ]
        }
    }
    #[inline(always)]
    fn byte_floats(self, words: Ints, index: usize) -> Floats {
        // Bits 15 to 22 are the upper eight of a mantissa.
        let (shift, mantissa, base) = (15 - 8 * index as i32, 0x007f_8000, 0x4380_0000);
        // SAFETY: as in `splat`.
        unsafe {
            [
                mantissa_floats(words[0], shift, mantissa, base),
                mantissa_floats(words[1], shift, mantissa, base),
                mantissa_floats(words[2], shift, mantissa, base),
                mantissa_floats(words[3], shift, mantissa, base),
            ]
        }
    }
    #[inline(always)]
    fn double_lanes(self, value: Floats) -> (Floats, Floats) {
        let [a, b, c, d] = value;
        // SAFETY: as in `splat`.
        unsafe {
            (
                [vzip1q_f32(a, a), vzip2q_f32(a, a), vzip1q_f32(b, b), vzip2q_f32(b, b)],
                [vzip1q_f32(c, c), vzip2q_f32(c, c), vzip1q_f32(d, d), vzip2q_f32(d, d)],
            )
        }
    }
    #[inline(always)]
    fn add_pairs(self, low: Floats, high: Floats) -> Floats {
        // SAFETY: as in `splat`.
        unsafe {
            [
                vpaddq_f32(low[0], low[1]),
                vpaddq_f32(low[2], low[3]),
                vpaddq_f32(high[0], high[1]),
                vpaddq_f32(high[2], high[3]),
            ]
        }
    }
    #[inline(always)]
    fn start_nibbles(self, correction: Ints) -> Ints {
        correction
    }
    #[inline(always)]
    fn finish_nibbles(self, sum: Ints, _correction: Ints) -> Ints {
        sum
    }
    #[inline(always)]
    fn start_biased(self, _correction: Ints) -> Ints {
        self.splat_int(0)
    }

    #[inline(always)]
    fn fold(self, value: Floats) -> f32 {
        // SAFETY: as in `splat`.
        unsafe {
            let a = vaddq_f32(vaddq_f32(value[0], value[2]), vaddq_f32(value[1], value[3]));
            let a = vadd_f32(vget_low_f32(a), vget_high_f32(a));
            vget_lane_f32::<0>(a) + vget_lane_f32::<1>(a)
        }
    }
    #[inline(always)]
    fn fold_max(self, value: Floats) -> f32 {
        // SAFETY: as in `splat`.
        unsafe {
            let a = max(max(value[0], value[2]), max(value[1], value[3]));
            let a = max(a, vextq_f32::<2>(a, a));
            vgetq_lane_f32::<0>(max(a, vextq_f32::<1>(a, a)))
        }
    }
    #[inline(always)]
    fn fold_int(self, value: Ints) -> i32 {
        // SAFETY: as in `splat`.
        unsafe { vaddvq_s32(vaddq_s32(vaddq_s32(value[0], value[1]), vaddq_s32(value[2], value[3]))) }
    }
    #[inline(always)]
    fn fold_max_int(self, value: Ints) -> i32 {
        // SAFETY: as in `splat`.
        unsafe { vmaxvq_s32(vmaxq_s32(vmaxq_s32(value[0], value[1]), vmaxq_s32(value[2], value[3]))) }
    }
}
