//! Sixteen lanes as one 512-bit register.

use std::arch::x86_64::*;

use super::Simd;
use crate::isa::Isa;

/// The token of AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

/// The token of [`Avx512`] with the bfloat16 dot product.
#[derive(Debug, Clone, Copy)]
pub struct Avx512Bf16(());

macro_rules! tokens {
    ($($token:ident),*) => { $(
        impl $token {
            /// The token, where this machine has the instruction set.
            pub fn detect() -> Option<$token> {
                Isa::$token.is_supported().then_some($token(()))
            }

            /// The token.
            ///
            /// # Safety
            /// This machine has the instruction set.
            #[inline(always)]
            pub unsafe fn new_unchecked() -> $token {
                $token(())
            }
        }
    )* };
}
tokens!(Avx512, Avx512Bf16);

/// Of a ternary function: `(a & b) | c`.
const AND_OR: i32 = 0b1110_1010;

/// The operations of both tokens; they differ in `dot_bf16`.
///
/// SAFETY of all register operations: a token exists only where the instruction set does. SAFETY of loads and stores:
/// the caller keeps the trait's contract.
macro_rules! operations {
    ($token:ident, $dot_bf16:ident) => {
        impl Simd for $token {
            type F = __m512;
            type I = __m512i;
            type Partial = __m512i;
            type M = __mmask16;
            const ROWS: usize = 8;

            operations! { memory:
                fn load(from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
                fn load_first(from: *const f32, n: usize) -> __m512 {
                    _mm512_maskz_loadu_ps(super::first_lanes(n), from)
                }
                fn store(to: *mut f32, value: __m512) -> () { _mm512_storeu_ps(to, value) }
                fn store_first(to: *mut f32, n: usize, value: __m512) -> () {
                    _mm512_mask_storeu_ps(to, super::first_lanes(n), value)
                }
                fn load_bytes(from: *const u8) -> __m512i { _mm512_loadu_si512(from.cast()) }
                fn store_int(to: *mut i32, value: __m512i) -> () { _mm512_storeu_si512(to.cast(), value) }
                fn store_i8(to: *mut i8, value: __m512i) -> () {
                    _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(value))
                }
                fn load_i8(from: *const i8) -> __m512i { _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())) }
                fn load_f16(from: *const u16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
                fn load_bf16(from: *const u16) -> __m512 {
                    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                }
                fn store_bf16(to: *mut u16, value: __m512) -> () {
                    let bits = _mm512_srli_epi32::<16>(round_bf16(value));
                    _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(bits))
                }
                fn store_rounded_bf16(to: *mut u16, value: __m512) -> () {
                    let bits = _mm512_srli_epi32::<16>(_mm512_castps_si512(value));
                    _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(bits))
                }
                fn broadcast_bytes(from: *const u8) -> __m512i {
                    _mm512_set1_epi32(from.cast::<i32>().read_unaligned())
                }
            }
            operations! { registers:
                fn prefetch(at: *const u8) -> () { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
                fn prefetch_early(at: *const u8) -> () { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
                fn splat(value: f32) -> __m512 { _mm512_set1_ps(value) }
                fn splat_int(value: i32) -> __m512i { _mm512_set1_epi32(value) }
                fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
                fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
                fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
                fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
                fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
                fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
                fn select_less(a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
                    _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes)
                }
                fn select(mask: u16, yes: __m512, no: __m512) -> __m512 { _mm512_mask_blend_ps(mask, no, yes) }
                fn int_to_float(value: __m512i) -> __m512 { _mm512_cvtepi32_ps(value) }
                fn round_to_int(value: __m512) -> __m512i { _mm512_cvtps_epi32(value) }
                fn magnitude_bits(value: __m512) -> __m512i {
                    _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fff_ffff))
                }
                fn pow2(n: __m512i) -> __m512 {
                    let biased = _mm512_add_epi32(n, _mm512_set1_epi32(127));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
                }
                fn round_bf16(value: __m512) -> __m512 {
                    let bits = _mm512_and_si512(round_bf16(value), _mm512_set1_epi32(0xffff_0000_u32 as i32));
                    _mm512_castsi512_ps(bits)
                }
                fn split_bf16(pairs: __m512i) -> (__m512, __m512) {
                    let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                    (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd))
                }
                fn add_int(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
                fn max_int(a: __m512i, b: __m512i) -> __m512i { _mm512_max_epi32(a, b) }
                fn shift_up(a: __m512i, bits: u32) -> __m512i { _mm512_sll_epi32(a, _mm_cvtsi32_si128(bits as i32)) }
                fn shift_down(a: __m512i, bits: u32) -> __m512i { _mm512_sra_epi32(a, _mm_cvtsi32_si128(bits as i32)) }
                fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
                fn dot_bytes(sum: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
                    _mm512_dpbusd_epi32(sum, unsigned, signed)
                }
                fn sub_int(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
                fn xor(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
                fn mul_even(a: __m512i, b: u32) -> __m512i { _mm512_mul_epu32(a, _mm512_set1_epi32(b as i32)) }
                fn odd_lanes(a: __m512i) -> __m512i { _mm512_shuffle_epi32::<0b11_11_01_01>(a) }
                fn merge_even(even: __m512i, odd: __m512i) -> __m512i {
                    _mm512_mask_blend_epi32(0xaaaa, even, _mm512_shuffle_epi32::<0b10_10_00_00>(odd))
                }
                fn unsigned_to_float(value: __m512i) -> __m512 { _mm512_cvtepu32_ps(value) }
                fn float_bits(value: __m512) -> __m512i { _mm512_castps_si512(value) }
                fn bits_to_float(bits: __m512i) -> __m512 { _mm512_castsi512_ps(bits) }
                fn exponent_of(bits: __m512i) -> __m512i { _mm512_srai_epi32::<23>(bits) }
                fn exponent_bits(exponent: __m512i) -> __m512i { _mm512_slli_epi32::<23>(exponent) }
                fn less(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
                fn less_unsigned(a: __m512i, b: __m512i) -> __mmask16 { _mm512_cmplt_epu32_mask(a, b) }
                fn both(a: __mmask16, b: __mmask16) -> __mmask16 { a & b }
                fn mask_bits(mask: __mmask16) -> u16 { mask }
                fn choose(mask: __mmask16, yes: __m512, no: __m512) -> __m512 { _mm512_mask_blend_ps(mask, no, yes) }
                fn fold(value: __m512) -> f32 {
                    let a = _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps::<1>(value));
                    let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                    let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
                    _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
                }
                fn fold_max(value: __m512) -> f32 {
                    let a = _mm256_max_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps::<1>(value));
                    let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                    let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
                    _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
                }
                fn fold_int(value: __m512i) -> i32 { _mm512_reduce_add_epi32(value) }
                fn fold_max_int(value: __m512i) -> i32 { _mm512_reduce_max_epi32(value) }
                fn low_nibbles(bytes: __m512i) -> __m512i { _mm512_and_si512(bytes, _mm512_set1_epi8(15)) }
                fn high_nibbles(bytes: __m512i) -> __m512i {
                    _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(15))
                }
                fn dot_nibbles(sum: __m512i, weights: __m512i, activations: __m512i) -> __m512i {
                    _mm512_dpbusd_epi32(sum, weights, activations)
                }
                fn dot_biased(sum: __m512i, weights: __m512i, activations: __m512i) -> __m512i {
                    _mm512_dpbusd_epi32(sum, weights, activations)
                }
                fn nibble_floats(words: __m512i, index: usize) -> __m512 {
                    // Bits 19 to 22 are the upper four of a mantissa.
                    let placed = match 4 * index as i32 {
                        at @ ..20 => _mm512_sll_epi32(words, _mm_cvtsi32_si128(19 - at)),
                        at => _mm512_srl_epi32(words, _mm_cvtsi32_si128(at - 19)),
                    };
                    let (mantissa, sixteen) = (_mm512_set1_epi32(0x0078_0000), _mm512_set1_epi32(0x4180_0000));
                    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<AND_OR>(placed, mantissa, sixteen))
                }
                fn byte_floats(words: __m512i, index: usize) -> __m512 {
                    // Bits 15 to 22 are the upper eight of a mantissa.
                    let placed = match 8 * index as i32 {
                        at @ ..16 => _mm512_sll_epi32(words, _mm_cvtsi32_si128(15 - at)),
                        at => _mm512_srl_epi32(words, _mm_cvtsi32_si128(at - 15)),
                    };
                    let (mantissa, offset) = (_mm512_set1_epi32(0x007f_8000), _mm512_set1_epi32(0x4380_0000));
                    _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<AND_OR>(placed, mantissa, offset))
                }
                fn double_lanes(value: __m512) -> (__m512, __m512) {
                    let low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
                    let high = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
                    (_mm512_permutexvar_ps(low, value), _mm512_permutexvar_ps(high, value))
                }
                fn add_pairs(low: __m512, high: __m512) -> __m512 {
                    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                    let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
                    let even = _mm512_permutex2var_ps(low, even, high);
                    _mm512_add_ps(even, _mm512_permutex2var_ps(low, odd, high))
                }
                fn alternate_bf16(pair: __m512i) -> __m512 {
                    let odd = _mm512_and_si512(pair, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                    _mm512_castsi512_ps(_mm512_mask_slli_epi32::<16>(odd, 0x5555, pair))
                }
                fn dot_bf16(sum: __m512, weights: __m512i, activations: __m512i) -> __m512 {
                    $dot_bf16(sum, weights, activations)
                }
            }

            #[inline(always)]
            fn start_nibbles(self, correction: __m512i) -> __m512i {
                correction
            }
            #[inline(always)]
            fn finish_nibbles(self, sum: __m512i, _correction: __m512i) -> __m512i {
                sum
            }
            #[inline(always)]
            fn start_biased(self, correction: __m512i) -> __m512i {
                correction
            }
        }
    };
    (memory: $(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => { $(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: the token proves the instruction set, the caller vouches for the memory.
            unsafe { $body }
        }
    )* };
    (registers: $(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => { $(
        #[inline(always)]
        #[allow(unused_unsafe)]
        fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: the token proves the instruction set.
            unsafe { $body }
        }
    )* };
}
operations!(Avx512, dot_bf16_by_fma);
operations!(Avx512Bf16, dot_bf16_native);

/// The bits of each value with the lower half still to be dropped.
///
/// The native conversion would flush subnormals.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn round_bf16(value: __m512) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm512_castps_si512(value);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value), rounded, quiet)
    }
}

/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn dot_bf16_by_fma(sum: __m512, weights: __m512i, activations: __m512i) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let odd_weights = _mm512_castsi512_ps(_mm512_and_si512(weights, upper));
        let odd_activations = _mm512_castsi512_ps(_mm512_and_si512(activations, upper));
        let even_weights = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(weights));
        let even_activations = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(activations));
        let sum = _mm512_fmadd_ps(odd_weights, odd_activations, sum);
        _mm512_fmadd_ps(even_weights, even_activations, sum)
    }
}

/// # Safety
/// AVX-512 BF16.
#[inline(always)]
unsafe fn dot_bf16_native(sum: __m512, weights: __m512i, activations: __m512i) -> __m512 {
    // SAFETY: the caller's; both types are 64 bytes that may hold any bits.
    unsafe {
        let weights = std::mem::transmute::<__m512i, __m512bh>(weights);
        _mm512_dpbf16_ps(sum, weights, std::mem::transmute::<__m512i, __m512bh>(activations))
    }
}
