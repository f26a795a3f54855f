//! Operations of one 256-bit register that are more than an instruction.

use std::arch::x86_64::*;

/// The bits of each value with the lower half still to be dropped.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn round_bf16(value: __m256) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm256_castps_si256(value);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        _mm256_blendv_epi8(rounded, quiet, is_nan)
    }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn pow2(n: __m256i) -> __m256 {
    // SAFETY: the caller's.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127)))) }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn less(a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
    // SAFETY: the caller's.
    unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
}

/// Both halves of the integer are exact floats, so that only their sum is rounded.
///
/// # Safety
/// AVX2 and FMA.
#[inline(always)]
pub(super) unsafe fn unsigned_to_float(value: __m256i) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let upper = _mm256_cvtepi32_ps(_mm256_srli_epi32::<16>(value));
        let lower = _mm256_cvtepi32_ps(_mm256_and_si256(value, _mm256_set1_epi32(0xffff)));
        _mm256_fmadd_ps(upper, _mm256_set1_ps(65_536.0), lower)
    }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn less_unsigned(a: __m256i, b: __m256i) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let sign = _mm256_set1_epi32(i32::MIN);
        _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_xor_si256(b, sign), _mm256_xor_si256(a, sign)))
    }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn merge_even(even: __m256i, odd: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_blend_epi32::<0b1010_1010>(even, _mm256_shuffle_epi32::<0b10_10_00_00>(odd)) }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn magnitude_bits(value: __m256) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fff_ffff)) }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn keep_upper(value: __m256i) -> __m256 {
    // SAFETY: the caller's.
    unsafe { _mm256_castsi256_ps(_mm256_and_si256(value, _mm256_set1_epi32(0xffff_0000_u32 as i32))) }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn low_nibbles(bytes: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_and_si256(bytes, _mm256_set1_epi8(15)) }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn high_nibbles(bytes: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), _mm256_set1_epi8(15)) }
}

/// Eight products of a nibble and an activation lie within 2 * 8 * 15 * 128 = 30720: the 16-bit sums are exact.
///
/// # Safety
/// AVX2, and AVX-VNNI if `VNNI`.
#[inline(always)]
pub(super) unsafe fn dot_nibbles<const VNNI: bool>(sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if VNNI {
            _mm256_dpbusd_avx_epi32(sum, weights, activations)
        } else {
            _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, activations))
        }
    }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn finish_nibbles<const VNNI: bool>(sum: __m256i, correction: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { if VNNI { sum } else { _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), correction) } }
}

/// Biased weights reach 255, and two products of 255 * 127 saturate 16 bits; magnitudes reach 128, and two products
/// of 128 * 127 do not. So the sign goes from the weight to the activation first.
///
/// # Safety
/// AVX2, and AVX-VNNI if `VNNI`.
#[inline(always)]
pub(super) unsafe fn dot_biased<const VNNI: bool>(sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if VNNI {
            _mm256_dpbusd_avx_epi32(sum, weights, activations)
        } else {
            let signed = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
            let products = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(activations, signed));
            _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))
        }
    }
}

/// # Safety
/// AVX2, and AVX-VNNI if `VNNI`.
#[inline(always)]
pub(super) unsafe fn dot_bytes<const VNNI: bool>(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if VNNI {
            _mm256_dpbusd_avx_epi32(sum, unsigned, signed)
        } else {
            let products = _mm256_maddubs_epi16(unsigned, signed);
            _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))
        }
    }
}

/// # Safety
/// AVX2 and FMA.
#[inline(always)]
pub(super) unsafe fn dot_bf16(sum: __m256, weights: __m256i, activations: __m256i) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let even_weights = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(weights));
        let even_activations = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(activations));
        let sum = _mm256_fmadd_ps(keep_upper(weights), keep_upper(activations), sum);
        _mm256_fmadd_ps(even_weights, even_activations, sum)
    }
}

/// Shifts left by `shift`, or right if it is negative, and sets the bits of `mantissa` into the float `base`.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn mantissa_floats(words: __m256i, shift: i32, mantissa: i32, base: i32) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let placed = if shift >= 0 {
            _mm256_sll_epi32(words, _mm_cvtsi32_si128(shift))
        } else {
            _mm256_srl_epi32(words, _mm_cvtsi32_si128(-shift))
        };
        let bits = _mm256_and_si256(placed, _mm256_set1_epi32(mantissa));
        _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(base)))
    }
}

/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn alternate_bf16(pair: __m256i) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let odd = _mm256_and_si256(pair, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        _mm256_castsi256_ps(_mm256_blend_epi32::<0b1010_1010>(_mm256_slli_epi32::<16>(pair), odd))
    }
}

/// The sums of the four pairs of lanes of `a`, then of `b`.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn add_pairs(a: __m256, b: __m256) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
        let odd = _mm256_shuffle_ps::<0b11_01_11_01>(a, b);
        // The shuffles work within 128-bit parts; the permutation puts them in order again.
        let sums = _mm256_castps_pd(_mm256_add_ps(even, odd));
        _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(sums))
    }
}
