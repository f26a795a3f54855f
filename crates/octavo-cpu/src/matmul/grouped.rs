//! How the groups of a tile lie in memory, for the kernels that read them.

use super::kernels::{Int4, Q4_0, Q4_1, Q4K, Q6K, Q8_0};
use crate::{
    pack::{GROUP, SCALED_GROUPS, TILE_ROWS},
    simd::Simd,
};

/// A format of codes in groups.
pub(super) trait Grouped: 'static {
    /// Bits of a code.
    const BITS: usize;
    /// A minimum follows the scales.
    const HAS_MINIMA: bool;
    /// What a stored code is above its value; of 4-bit codes 0 or 8.
    const ZERO: u8;
    /// Bytes after the codes of a group of a tile.
    const TAIL: usize;
    /// Groups of a block.
    const GROUPS: usize = 1;
    /// Bytes of a tile before the groups of a block.
    const HEADER: usize = 0;
    /// Scales of a group; they are of as many columns each.
    const LINES: usize = 1;
    /// Of the codes of a group of a tile.
    const CODE_BYTES: usize = GROUP * TILE_ROWS * Self::BITS / 8;
    /// Of a group of a tile: codes, scales, minima.
    const BYTES: usize = Self::CODE_BYTES + Self::TAIL;
    /// Of a block of a tile.
    const BLOCK_BYTES: usize = Self::HEADER + Self::GROUPS * Self::BYTES;

    /// Where a group's header begins in a tile.
    #[inline(always)]
    fn header(group: usize) -> usize {
        group / Self::GROUPS * Self::BLOCK_BYTES
    }

    /// Where a group begins in a tile.
    #[inline(always)]
    fn start(group: usize) -> usize {
        Self::header(group) + Self::HEADER + group % Self::GROUPS * Self::BYTES
    }

    /// The scales of a group's line `line`, and the minima, which are 0 in formats without.
    ///
    /// # Safety
    /// They are a header and a group of the format.
    unsafe fn scales<S: Simd>(simd: S, header: *const u8, group: *const u8, line: usize) -> (S::F, S::F);
}

/// Half-precision scales, and minima where there are any, behind the codes.
macro_rules! grouped {
    ($format:ident, $bits:literal, $zero:literal, $has_minima:literal) => {
        impl Grouped for $format {
            const BITS: usize = $bits;
            const HAS_MINIMA: bool = $has_minima;
            const ZERO: u8 = $zero;
            const TAIL: usize = 2 * TILE_ROWS * (1 + $has_minima as usize);

            #[inline(always)]
            unsafe fn scales<S: Simd>(simd: S, _: *const u8, group: *const u8, _: usize) -> (S::F, S::F) {
                // SAFETY: the caller's.
                unsafe {
                    let scales = group.add(Self::CODE_BYTES);
                    let minima = match $has_minima {
                        true => simd.load_f16(scales.add(2 * TILE_ROWS).cast()),
                        false => simd.splat(0.0),
                    };
                    (simd.load_f16(scales.cast()), minima)
                }
            }
        }
    };
}

grouped!(Q4_0, 4, 8, false);
grouped!(Q4_1, 4, 0, true);
grouped!(Q8_0, 8, 128, false);

impl Grouped for Q4K {
    const BITS: usize = 4;
    const HAS_MINIMA: bool = true;
    const ZERO: u8 = 0;
    const TAIL: usize = 2 * TILE_ROWS;
    const GROUPS: usize = SCALED_GROUPS;
    const HEADER: usize = 4 * TILE_ROWS;

    /// Products of 11 and 6 bits, which are exact.
    #[inline(always)]
    unsafe fn scales<S: Simd>(simd: S, header: *const u8, group: *const u8, _: usize) -> (S::F, S::F) {
        // SAFETY: the caller's.
        unsafe {
            let tail = group.add(Self::CODE_BYTES).cast::<i8>();
            let scales = simd.int_to_float(simd.load_i8(tail));
            let minima = simd.int_to_float(simd.load_i8(tail.add(TILE_ROWS)));
            let factors = (simd.load_f16(header.cast()), simd.load_f16(header.add(2 * TILE_ROWS).cast()));
            (simd.mul(factors.0, scales), simd.mul(factors.1, minima))
        }
    }
}

impl<const GROUPS: usize> Grouped for Int4<GROUPS> {
    const BITS: usize = 4;
    const HAS_MINIMA: bool = true;
    const ZERO: u8 = 0;
    const TAIL: usize = 0;
    const GROUPS: usize = GROUPS;
    const HEADER: usize = 3 * TILE_ROWS;

    /// Minima are exact products of 11 bits and the zero points, which are negated already.
    #[inline(always)]
    unsafe fn scales<S: Simd>(simd: S, header: *const u8, _: *const u8, _: usize) -> (S::F, S::F) {
        // SAFETY: the caller's.
        unsafe {
            let scales = simd.load_f16(header.cast());
            (scales, simd.mul(scales, simd.int_to_float(simd.load_i8(header.add(2 * TILE_ROWS).cast()))))
        }
    }
}

/// As it lies where inputs are bfloat16 in chains, a byte a code.
impl Grouped for Q6K {
    const BITS: usize = 8;
    const HAS_MINIMA: bool = false;
    const ZERO: u8 = 32;
    const TAIL: usize = 2 * TILE_ROWS;
    const GROUPS: usize = SCALED_GROUPS;
    const HEADER: usize = 2 * TILE_ROWS;
    const LINES: usize = 2;

    /// Products of 11 and 8 bits, which are exact.
    #[inline(always)]
    unsafe fn scales<S: Simd>(simd: S, header: *const u8, group: *const u8, line: usize) -> (S::F, S::F) {
        // SAFETY: the caller's.
        unsafe {
            let scales = simd.load_i8(group.add(Self::CODE_BYTES + line * TILE_ROWS).cast());
            (simd.mul(simd.load_f16(header.cast()), simd.int_to_float(scales)), simd.splat(0.0))
        }
    }
}
