//! Sixteen lanes as two 256-bit registers: lanes 0 to 7, then 8 to 15.

use std::arch::x86_64::*;

use super::{
    Simd,
    ymm::{
        add_pairs, alternate_bf16, dot_bf16, dot_biased, dot_bytes, dot_nibbles, finish_nibbles, high_nibbles,
        keep_upper, less, less_unsigned, low_nibbles, magnitude_bits, mantissa_floats, merge_even, pow2, round_bf16,
        unsigned_to_float,
    },
};
use crate::isa::Isa;

/// The token of AVX2, FMA and F16C.
pub type Avx2 = Ymm<false>;

/// The token of [`Avx2`] with the integer dot product of AVX-VNNI.
pub type AvxVnni = Ymm<true>;

/// The token of AVX2, FMA and F16C; with the integer dot product if `VNNI`.
#[derive(Debug, Clone, Copy)]
pub struct Ymm<const VNNI: bool>(());

impl<const VNNI: bool> Ymm<VNNI> {
    /// The token, where this machine has the instruction set.
    pub fn detect() -> Option<Ymm<VNNI>> {
        let isa = if VNNI { Isa::AvxVnni } else { Isa::Avx2 };
        isa.is_supported().then_some(Ymm(()))
    }

    /// The token.
    ///
    /// # Safety
    /// This machine has the instruction set.
    #[inline(always)]
    pub unsafe fn new_unchecked() -> Ymm<VNNI> {
        Ymm(())
    }
}

type Floats = [__m256; 2];
type Ints = [__m256i; 2];

/// Methods whose body is the same expression on both halves.
macro_rules! halves {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty = $operation:expr;)*) => { $(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: the token proves the instruction set.
            unsafe { [$operation($($arg[0]),*), $operation($($arg[1]),*)] }
        }
    )* };
}

/// Bits of the first `n` lanes all set.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn first_lanes(n: usize) -> Ints {
    // SAFETY: the caller's.
    unsafe {
        let n = _mm256_set1_epi32(n.min(16) as i32);
        [
            _mm256_cmpgt_epi32(n, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            _mm256_cmpgt_epi32(n, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)),
        ]
    }
}

impl<const VNNI: bool> Simd for Ymm<VNNI> {
    type F = Floats;
    type I = Ints;
    type Partial = Ints;
    type M = Floats;
    // Sums that wait for the end of a group may leave the registers; the products of plain AVX2 need room of their own.
    const ROWS: usize = if VNNI { 4 } else { 2 };

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Floats {
        // SAFETY: the token proves the instruction set, the caller vouches for the memory; so in all that follow.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, n: usize) -> Floats {
        // SAFETY: as in `load`; masked lanes are not accessed.
        unsafe {
            let mask = first_lanes(n);
            [_mm256_maskload_ps(from, mask[0]), _mm256_maskload_ps(from.wrapping_add(8), mask[1])]
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Floats) {
        // SAFETY: as in `load`.
        unsafe {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize, value: Floats) {
        // SAFETY: as in `load_first`.
        unsafe {
            let mask = first_lanes(n);
            _mm256_maskstore_ps(to, mask[0], value[0]);
            _mm256_maskstore_ps(to.wrapping_add(8), mask[1], value[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> Ints {
        // SAFETY: as in `load`.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn store_int(self, to: *mut i32, value: Ints) {
        // SAFETY: as in `load`.
        unsafe {
            _mm256_storeu_si256(to.cast(), value[0]);
            _mm256_storeu_si256(to.add(8).cast(), value[1]);
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8, value: Ints) {
        // SAFETY: as in `load`.
        unsafe {
            // Packing works within 128-bit parts; the permutation puts them in order again.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(value[0], value[1]));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Ints {
        // SAFETY: as in `load`.
        unsafe {
            let (low, high) = (_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast()));
            [_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Floats {
        // SAFETY: as in `load`.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast()))] }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Floats {
        // SAFETY: as in `load`.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))]
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, value: Floats) {
        // SAFETY: as in `load`.
        unsafe {
            let low = _mm256_srli_epi32::<16>(round_bf16(value[0]));
            let high = _mm256_srli_epi32::<16>(round_bf16(value[1]));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast(), words);
        }
    }
    #[inline(always)]
    unsafe fn store_rounded_bf16(self, to: *mut u16, value: Floats) {
        // SAFETY: as in `load`.
        unsafe {
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(value[0]));
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(value[1]));
            // Packing works within 128-bit parts; the permutation puts them in order again.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast(), words);
        }
    }
    #[inline(always)]
    unsafe fn broadcast_bytes(self, from: *const u8) -> Ints {
        // SAFETY: as in `load`.
        unsafe { [_mm256_set1_epi32(from.cast::<i32>().read_unaligned()); 2] }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: the token proves the instruction set; so in all that follow. A prefetch cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    fn prefetch_early(self, at: *const u8) {
        // SAFETY: as in `prefetch`.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Floats {
        // SAFETY: as in `prefetch`.
        unsafe { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    fn splat_int(self, value: i32) -> Ints {
        // SAFETY: as in `prefetch`.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }
    halves! {
        fn add(a: Floats, b: Floats) -> Floats = _mm256_add_ps;
        fn sub(a: Floats, b: Floats) -> Floats = _mm256_sub_ps;
        fn mul(a: Floats, b: Floats) -> Floats = _mm256_mul_ps;
        fn div(a: Floats, b: Floats) -> Floats = _mm256_div_ps;
        fn fma(a: Floats, b: Floats, c: Floats) -> Floats = _mm256_fmadd_ps;
        fn max(a: Floats, b: Floats) -> Floats = _mm256_max_ps;
        fn select_less(a: Floats, b: Floats, yes: Floats, no: Floats) -> Floats = less;
        fn int_to_float(value: Ints) -> Floats = _mm256_cvtepi32_ps;
        fn round_to_int(value: Floats) -> Ints = _mm256_cvtps_epi32;
        fn magnitude_bits(value: Floats) -> Ints = magnitude_bits;
        fn pow2(n: Ints) -> Floats = pow2;
        fn add_int(a: Ints, b: Ints) -> Ints = _mm256_add_epi32;
        fn max_int(a: Ints, b: Ints) -> Ints = _mm256_max_epi32;
        fn and(a: Ints, b: Ints) -> Ints = _mm256_and_si256;
        fn dot_bytes(sum: Ints, unsigned: Ints, signed: Ints) -> Ints = dot_bytes::<VNNI>;
        fn sub_int(a: Ints, b: Ints) -> Ints = _mm256_sub_epi32;
        fn xor(a: Ints, b: Ints) -> Ints = _mm256_xor_si256;
        fn odd_lanes(a: Ints) -> Ints = _mm256_shuffle_epi32::<0b11_11_01_01>;
        fn merge_even(even: Ints, odd: Ints) -> Ints = merge_even;
        fn unsigned_to_float(value: Ints) -> Floats = unsigned_to_float;
        fn float_bits(value: Floats) -> Ints = _mm256_castps_si256;
        fn bits_to_float(bits: Ints) -> Floats = _mm256_castsi256_ps;
        fn exponent_of(bits: Ints) -> Ints = _mm256_srai_epi32::<23>;
        fn exponent_bits(exponent: Ints) -> Ints = _mm256_slli_epi32::<23>;
        fn less(a: Floats, b: Floats) -> Floats = _mm256_cmp_ps::<_CMP_LT_OQ>;
        fn less_unsigned(a: Ints, b: Ints) -> Floats = less_unsigned;
        fn both(a: Floats, b: Floats) -> Floats = _mm256_and_ps;
        fn low_nibbles(bytes: Ints) -> Ints = low_nibbles;
        fn high_nibbles(bytes: Ints) -> Ints = high_nibbles;
        fn dot_nibbles(sum: Ints, weights: Ints, activations: Ints) -> Ints = dot_nibbles::<VNNI>;
        fn finish_nibbles(sum: Ints, correction: Ints) -> Ints = finish_nibbles::<VNNI>;
        fn dot_biased(sum: Ints, weights: Ints, activations: Ints) -> Ints = dot_biased::<VNNI>;
        fn dot_bf16(sum: Floats, weights: Ints, activations: Ints) -> Floats = dot_bf16;
        fn alternate_bf16(pair: Ints) -> Floats = alternate_bf16;
    }
    #[inline(always)]
    fn nibble_floats(self, words: Ints, index: usize) -> Floats {
        // SAFETY: as in `prefetch`. Bits 19 to 22 are the upper four of a mantissa.
        unsafe {
            [
                mantissa_floats(words[0], 19 - 4 * index as i32, 0x0078_0000, 0x4180_0000),
                mantissa_floats(words[1], 19 - 4 * index as i32, 0x0078_0000, 0x4180_0000),
            ]
        }
    }
    #[inline(always)]
    fn byte_floats(self, words: Ints, index: usize) -> Floats {
        // SAFETY: as in `prefetch`. Bits 15 to 22 are the upper eight of a mantissa.
        unsafe {
            [
                mantissa_floats(words[0], 15 - 8 * index as i32, 0x007f_8000, 0x4380_0000),
                mantissa_floats(words[1], 15 - 8 * index as i32, 0x007f_8000, 0x4380_0000),
            ]
        }
    }
    #[inline(always)]
    fn double_lanes(self, value: Floats) -> (Floats, Floats) {
        // SAFETY: as in `prefetch`.
        unsafe {
            let first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
            let last = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
            (
                [_mm256_permutevar8x32_ps(value[0], first), _mm256_permutevar8x32_ps(value[0], last)],
                [_mm256_permutevar8x32_ps(value[1], first), _mm256_permutevar8x32_ps(value[1], last)],
            )
        }
    }
    #[inline(always)]
    fn add_pairs(self, low: Floats, high: Floats) -> Floats {
        // SAFETY: as in `prefetch`.
        unsafe { [add_pairs(low[0], low[1]), add_pairs(high[0], high[1])] }
    }
    #[inline(always)]
    fn split_bf16(self, pairs: Ints) -> (Floats, Floats) {
        // SAFETY: as in `prefetch`.
        unsafe {
            let even = [_mm256_slli_epi32::<16>(pairs[0]), _mm256_slli_epi32::<16>(pairs[1])];
            ([_mm256_castsi256_ps(even[0]), _mm256_castsi256_ps(even[1])], [keep_upper(pairs[0]), keep_upper(pairs[1])])
        }
    }
    #[inline(always)]
    fn mul_even(self, a: Ints, b: u32) -> Ints {
        // SAFETY: as in `prefetch`.
        unsafe {
            let b = _mm256_set1_epi32(b as i32);
            [_mm256_mul_epu32(a[0], b), _mm256_mul_epu32(a[1], b)]
        }
    }
    #[inline(always)]
    fn mask_bits(self, mask: Floats) -> u16 {
        // SAFETY: as in `prefetch`.
        unsafe { (_mm256_movemask_ps(mask[0]) | _mm256_movemask_ps(mask[1]) << 8) as u16 }
    }
    #[inline(always)]
    fn choose(self, mask: Floats, yes: Floats, no: Floats) -> Floats {
        // SAFETY: as in `prefetch`.
        unsafe { [_mm256_blendv_ps(no[0], yes[0], mask[0]), _mm256_blendv_ps(no[1], yes[1], mask[1])] }
    }
    #[inline(always)]
    fn start_nibbles(self, correction: Ints) -> Ints {
        if VNNI { correction } else { self.splat_int(0) }
    }
    #[inline(always)]
    fn shift_up(self, a: Ints, bits: u32) -> Ints {
        // SAFETY: as in `prefetch`.
        unsafe {
            let bits = _mm_cvtsi32_si128(bits as i32);
            [_mm256_sll_epi32(a[0], bits), _mm256_sll_epi32(a[1], bits)]
        }
    }
    #[inline(always)]
    fn shift_down(self, a: Ints, bits: u32) -> Ints {
        // SAFETY: as in `prefetch`.
        unsafe {
            let bits = _mm_cvtsi32_si128(bits as i32);
            [_mm256_sra_epi32(a[0], bits), _mm256_sra_epi32(a[1], bits)]
        }
    }
    #[inline(always)]
    fn start_biased(self, correction: Ints) -> Ints {
        if VNNI { correction } else { self.splat_int(0) }
    }
    #[inline(always)]
    fn select(self, mask: u16, yes: Floats, no: Floats) -> Floats {
        // SAFETY: as in `prefetch`.
        unsafe {
            let mask = _mm256_set1_epi32(i32::from(mask));
            let low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let high = _mm256_slli_epi32::<8>(low);
            let low = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(mask, low), low));
            let high = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(mask, high), high));
            [_mm256_blendv_ps(no[0], yes[0], low), _mm256_blendv_ps(no[1], yes[1], high)]
        }
    }
    #[inline(always)]
    fn round_bf16(self, value: Floats) -> Floats {
        // SAFETY: as in `prefetch`.
        unsafe { [keep_upper(round_bf16(value[0])), keep_upper(round_bf16(value[1]))] }
    }

    #[inline(always)]
    fn fold(self, value: Floats) -> f32 {
        // SAFETY: as in `prefetch`.
        unsafe {
            let a = _mm256_add_ps(value[0], value[1]);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    fn fold_max(self, value: Floats) -> f32 {
        // SAFETY: as in `prefetch`.
        unsafe {
            let a = _mm256_max_ps(value[0], value[1]);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
    }
    #[inline(always)]
    fn fold_int(self, value: Ints) -> i32 {
        // SAFETY: as in `prefetch`.
        unsafe {
            let a = _mm256_add_epi32(value[0], value[1]);
            let a = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_add_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a)))
        }
    }
    #[inline(always)]
    fn fold_max_int(self, value: Ints) -> i32 {
        // SAFETY: as in `prefetch`.
        unsafe {
            let a = _mm256_max_epi32(value[0], value[1]);
            let a = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_max_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a)))
        }
    }
}
