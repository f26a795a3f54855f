//! SIMD written once: kernels are generic over [`Simd`], sixteen lanes of `f32` or `i32` (or 64 bytes), and
//! `simd_shells!` makes one copy of a kernel for each instruction set.
//!
//! A kernel is an `#[inline(always)]` function that takes a token; the shell around it switches the instruction set on.
//! Kernels use no closures over vectors (`array::from_fn`, `map`): a closure is a function of its own, without the
//! instruction set.
//!
//! Invariant: every operation gives the same bits on every instruction set, except the bits of a NaN and what
//! [`Simd::dot_bf16`] names.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod ymm;

#[cfg(target_arch = "x86_64")]
pub use avx2::{Avx2, AvxVnni};
#[cfg(target_arch = "x86_64")]
pub use avx512::{Avx512, Avx512Bf16};
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use scalar::Scalar;
#[cfg(test)]
pub(crate) use tests::random_bits;

use octavo_backend::numerics::exp_terms::{COEFFICIENTS, LN2_HIGH, LN2_LOW};

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Sixteen lanes of one instruction set. A value is a token: it can exist only where the instruction set does, which is
/// what makes the register operations safe to call.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen `i32`, or 64 bytes.
    type I: Copy;
    /// An unfinished sum of products with unsigned nibbles.
    type Partial: Copy;
    /// A truth value for each lane.
    type M: Copy;

    /// Rows of activations that a kernel should keep in registers at once against one vector of weights.
    const ROWS: usize;

    /// Reads 16 floats, at any alignment.
    ///
    /// # Safety
    /// 16 floats are readable at `from`.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// Reads `n` (at most 16) floats; the other lanes are 0.
    ///
    /// # Safety
    /// `n` floats are readable at `from`; memory beyond them is not accessed.
    unsafe fn load_first(self, from: *const f32, n: usize) -> Self::F;
    /// Writes 16 floats.
    ///
    /// # Safety
    /// 16 floats are writable at `to`.
    unsafe fn store(self, to: *mut f32, value: Self::F);
    /// Writes the first `n` (at most 16) lanes.
    ///
    /// # Safety
    /// `n` floats are writable at `to`; memory beyond them is not accessed.
    unsafe fn store_first(self, to: *mut f32, n: usize, value: Self::F);
    /// Reads 64 bytes.
    ///
    /// # Safety
    /// 64 bytes are readable at `from`.
    unsafe fn load_bytes(self, from: *const u8) -> Self::I;
    /// Writes 16 integers.
    ///
    /// # Safety
    /// 16 integers are writable at `to`.
    unsafe fn store_int(self, to: *mut i32, value: Self::I);
    /// Writes the low byte of each lane; the lanes must be in -128..=127.
    ///
    /// # Safety
    /// 16 bytes are writable at `to`.
    unsafe fn store_i8(self, to: *mut i8, value: Self::I);
    /// Reads 16 signed bytes, one into each lane.
    ///
    /// # Safety
    /// 16 bytes are readable at `from`.
    unsafe fn load_i8(self, from: *const i8) -> Self::I;
    /// Reads 16 half-precision floats.
    ///
    /// # Safety
    /// 16 values are readable at `from`.
    unsafe fn load_f16(self, from: *const u16) -> Self::F;
    /// Reads 16 bfloat16.
    ///
    /// # Safety
    /// 16 values are readable at `from`.
    unsafe fn load_bf16(self, from: *const u16) -> Self::F;
    /// Writes 16 bfloat16, rounded as [`Simd::round_bf16`].
    ///
    /// # Safety
    /// 16 values are writable at `to`.
    unsafe fn store_bf16(self, to: *mut u16, value: Self::F);
    /// Writes 16 floats that are bfloat16 already.
    ///
    /// # Safety
    /// 16 values are writable at `to`.
    unsafe fn store_rounded_bf16(self, to: *mut u16, value: Self::F);
    /// Four bytes (a pair of bfloat16, four codes) in every lane, from memory at any alignment.
    ///
    /// # Safety
    /// 4 bytes are readable at `from`.
    unsafe fn broadcast_bytes(self, from: *const u8) -> Self::I;

    /// Asks for the cache line at `at`, which need not be valid.
    fn prefetch(self, at: *const u8);
    /// The same, into the second-level cache: what is needed later than the first level, which waits for fewer lines at
    /// once, could hold it.
    fn prefetch_early(self, at: *const u8);

    /// `value` in every lane.
    fn splat(self, value: f32) -> Self::F;
    /// `value` in every lane.
    fn splat_int(self, value: i32) -> Self::I;
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a` where `a > b`, else `b` (so also where either is NaN).
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `yes` where `a < b`, else `no` (so also where either is NaN).
    fn select_less(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// `yes` where bit `lane` of the mask is set, else `no`.
    fn select(self, mask: u16, yes: Self::F, no: Self::F) -> Self::F;
    /// The nearest float of each integer.
    fn int_to_float(self, value: Self::I) -> Self::F;
    /// The nearest integer, ties to even; `i32::MIN` for NaN and what does not fit.
    fn round_to_int(self, value: Self::F) -> Self::I;
    /// The bits of the magnitudes; they order as the magnitudes do, with infinity and NaN above all numbers.
    fn magnitude_bits(self, value: Self::F) -> Self::I;
    /// `2^n`, for -126..=127.
    fn pow2(self, n: Self::I) -> Self::F;
    /// Each lane to bfloat16, to nearest, ties to even, and back.
    fn round_bf16(self, value: Self::F) -> Self::F;
    /// The even (lower) bfloat16 of each lane, and the odd one.
    fn split_bf16(self, pairs: Self::I) -> (Self::F, Self::F);
    /// `a + b`, wrapping.
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// The larger signed integer.
    fn max_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a * 2^bits`, wrapping.
    fn shift_up(self, a: Self::I, bits: u32) -> Self::I;
    /// `a / 2^bits`, rounded down.
    fn shift_down(self, a: Self::I, bits: u32) -> Self::I;
    /// The bits that both have.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;

    /// `a - b`, wrapping.
    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// The bits that differ.
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// The unsigned products of the even lanes, 64 bits each: the lower half in the even lane, the upper in the odd one.
    fn mul_even(self, a: Self::I, b: u32) -> Self::I;
    /// Each odd lane, in both lanes of its pair.
    fn odd_lanes(self, a: Self::I) -> Self::I;
    /// The even lanes of `even`, and beside each of them the one of `odd`.
    fn merge_even(self, even: Self::I, odd: Self::I) -> Self::I;
    /// The nearest float of each unsigned integer, ties to even.
    fn unsigned_to_float(self, value: Self::I) -> Self::F;
    /// The bits of each float.
    fn float_bits(self, value: Self::F) -> Self::I;
    /// The floats of these bits.
    fn bits_to_float(self, bits: Self::I) -> Self::F;
    /// From the bits of a float to its exponent's place: shifted down by 23, with the sign.
    fn exponent_of(self, bits: Self::I) -> Self::I;
    /// From an exponent to its place in a float: shifted up by 23.
    fn exponent_bits(self, exponent: Self::I) -> Self::I;

    /// Where `a < b`; nowhere that either is NaN.
    fn less(self, a: Self::F, b: Self::F) -> Self::M;
    /// Where `a < b` as unsigned integers.
    fn less_unsigned(self, a: Self::I, b: Self::I) -> Self::M;
    /// Where both hold.
    fn both(self, a: Self::M, b: Self::M) -> Self::M;
    /// Bit `lane` is set where it holds.
    fn mask_bits(self, mask: Self::M) -> u16;
    /// `yes` where it holds, else `no`.
    fn choose(self, mask: Self::M, yes: Self::F, no: Self::F) -> Self::F;

    /// The sum of all lanes, added by halves as [`octavo_backend::numerics::fold_lanes`].
    fn fold(self, value: Self::F) -> f32;
    /// The largest lane, by [`Simd::max`] of halves.
    fn fold_max(self, value: Self::F) -> f32;
    /// The sum of all lanes, wrapping.
    fn fold_int(self, value: Self::I) -> i32;
    /// The largest lane.
    fn fold_max_int(self, value: Self::I) -> i32;

    /// The low four bits of each byte.
    fn low_nibbles(self, bytes: Self::I) -> Self::I;
    /// The high four bits of each byte.
    fn high_nibbles(self, bytes: Self::I) -> Self::I;

    /// Begins a sum of [`Simd::dot_nibbles`] that shall end `correction` higher.
    fn start_nibbles(self, correction: Self::I) -> Self::Partial;
    /// Adds, in each lane, the products of its four bytes: weights 0..=15, activations -128..=127 (four bytes, the same
    /// in each lane). At most 8 times between start and finish, which is where AVX2's 16-bit sums still hold.
    fn dot_nibbles(self, sum: Self::Partial, weights: Self::I, activations: Self::I) -> Self::Partial;
    /// Ends the sum; `correction` is the one given at the start.
    fn finish_nibbles(self, sum: Self::Partial, correction: Self::I) -> Self::I;

    /// Begins a sum of [`Simd::dot_biased`]; `correction` is -128 times the sum of all activations.
    ///
    /// Instruction sets that multiply the biased weights as they are start there; those that take the bias off each
    /// weight start at 0.
    fn start_biased(self, correction: Self::I) -> Self::I;
    /// Adds the products of four signed weights, stored with 128 added, and four activations in -127..=127.
    fn dot_biased(self, sum: Self::I, weights: Self::I, activations: Self::I) -> Self::I;

    /// Adds, in each lane, the products of four unsigned and four signed bytes. Those of two neighbours must together fit
    /// in 16 bits, which is all that AVX2 keeps of them.
    fn dot_bytes(self, sum: Self::I, unsigned: Self::I, signed: Self::I) -> Self::I;

    /// `16 + nibble` for the nibble of each lane that begins at bit `4 * index`.
    fn nibble_floats(self, words: Self::I, index: usize) -> Self::F;
    /// `256 + byte` for the byte of each lane that begins at bit `8 * index`.
    fn byte_floats(self, words: Self::I, index: usize) -> Self::F;
    /// The first eight lanes, each twice, and the last eight.
    fn double_lanes(self, value: Self::F) -> (Self::F, Self::F);
    /// The sum of each pair of lanes: those of `low`, then those of `high`.
    fn add_pairs(self, low: Self::F, high: Self::F) -> Self::F;
    /// Turns the same pair of bfloat16 in all lanes into its even (lower) element in even lanes, the odd one in odd lanes.
    fn alternate_bf16(self, pair: Self::I) -> Self::F;

    /// Adds the products of a pair of bfloat16 in each lane: the odd (upper) one first, then the even one, each by a
    /// fused multiply-add.
    ///
    /// [`Avx512Bf16`] takes subnormal inputs for zeros and flushes subnormal sums to zero; the others do not.
    fn dot_bf16(self, sum: Self::F, weights: Self::I, activations: Self::I) -> Self::F;
}

/// `e^x`, with the bits of [`octavo_backend::numerics::exp`].
#[inline(always)]
pub fn exp<S: Simd>(simd: S, x: S::F) -> S::F {
    simd.select_less(simd.splat(88.0), x, simd.splat(f32::INFINITY), exp_up_to_88(simd, x))
}

/// As [`exp`], for arguments of at most 88.
#[inline(always)]
pub fn exp_up_to_88<S: Simd>(simd: S, x: S::F) -> S::F {
    exp_from(simd, x, simd.splat(-87.0))
}

/// As [`exp`], for arguments of at most 88; 0 below `least`, which is at least -87.
#[inline(always)]
pub fn exp_from<S: Simd>(simd: S, x: S::F, least: S::F) -> S::F {
    let n = simd.round_to_int(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    let n_float = simd.int_to_float(n);
    let r = simd.fma(n_float, simd.splat(-LN2_HIGH), x);
    let r = simd.fma(n_float, simd.splat(-LN2_LOW), r);
    let mut p = simd.splat(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        p = simd.fma(p, r, simd.splat(*coefficient));
    }
    simd.select_less(x, least, simd.splat(0.0), simd.mul(p, simd.pow2(n)))
}

/// The mask of the first `n` lanes, for [`Simd::select`].
#[inline(always)]
pub fn first_lanes(n: usize) -> u16 {
    if n >= LANES { u16::MAX } else { (1 << n) - 1 }
}

/// Makes a function that picks a kernel's copy for an instruction set.
///
/// `simd_shells! { /// Doc. pub fn select[W: Weights, const M: usize][W, M] = kernel(a: *const u8, n: usize) -> f32; }`
/// needs `#[inline(always)] unsafe fn kernel<S: Simd, W: Weights, const M: usize>(simd: S, a: *const u8, n: usize)`
/// and gives `pub fn select<W, const M: usize>(isa: Isa) -> unsafe fn(*const u8, usize) -> f32`, which panics when the
/// machine lacks the instruction set. The pointer's safety contract is the kernel's.
macro_rules! simd_shells {
    ($($(#[$meta:meta])* $vis:vis fn $select:ident [$($declare:tt)*][$($pass:tt)*] =
        $kernel:ident ($($arg:ident : $type:ty),* $(,)?) $(-> $result:ty)?;)*) => { $(
        $(#[$meta])*
        $vis fn $select<$($declare)*>(isa: $crate::isa::Isa) -> unsafe fn($($type),*) $(-> $result)? {
            unsafe fn scalar<$($declare)*>($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller keeps the kernel's contract.
                unsafe { $kernel::<$crate::simd::Scalar, $($pass)*>($crate::simd::Scalar, $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($declare)*>($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller keeps the kernel's contract; the features are on in this function.
                unsafe {
                    $kernel::<$crate::simd::Avx2, $($pass)*>($crate::simd::Avx2::new_unchecked(), $($arg),*)
                }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avxvnni,avx2,fma,f16c")]
            unsafe fn avx_vnni<$($declare)*>($($arg: $type),*) $(-> $result)? {
                // SAFETY: as above.
                unsafe {
                    $kernel::<$crate::simd::AvxVnni, $($pass)*>($crate::simd::AvxVnni::new_unchecked(), $($arg),*)
                }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            unsafe fn avx512<$($declare)*>($($arg: $type),*) $(-> $result)? {
                // SAFETY: as above.
                unsafe {
                    $kernel::<$crate::simd::Avx512, $($pass)*>($crate::simd::Avx512::new_unchecked(), $($arg),*)
                }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
            unsafe fn avx512_bf16<$($declare)*>($($arg: $type),*) $(-> $result)? {
                // SAFETY: as above.
                unsafe {
                    $kernel::<$crate::simd::Avx512Bf16, $($pass)*>(
                        $crate::simd::Avx512Bf16::new_unchecked(), $($arg),*
                    )
                }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            unsafe fn neon<$($declare)*>($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller keeps the kernel's contract; the features are on in this function.
                unsafe {
                    $kernel::<$crate::simd::Neon, $($pass)*>($crate::simd::Neon::new_unchecked(), $($arg),*)
                }
            }
            assert!(isa.is_supported(), "this machine has no {isa}");
            match isa {
                $crate::isa::Isa::Scalar => scalar::<$($pass)*>,
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx2 => avx2::<$($pass)*>,
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::AvxVnni => avx_vnni::<$($pass)*>,
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx512 | $crate::isa::Isa::Amx => avx512::<$($pass)*>,
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx512Bf16 => avx512_bf16::<$($pass)*>,
                #[cfg(target_arch = "aarch64")]
                $crate::isa::Isa::Neon => neon::<$($pass)*>,
                _ => unreachable!("checked above"),
            }
        }
    )* };
}
pub(crate) use simd_shells;
