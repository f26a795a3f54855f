//! Heads on their way to attention: rotated, and rounded as the cache and the queries have them.
//!
//! Bit for bit what [`octavo_backend::numerics`] defines, on every instruction set.

use octavo_backend::numerics::SMALLEST_KV;

use crate::{
    isa::Isa,
    simd::{LANES, Simd, simd_shells},
};

/// The kernels of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct HeadKernels {
    rotate: unsafe fn(*mut f32, *const f32, *const f32, usize),
    to_bf16: unsafe fn(*const f32, f32, *mut u16, usize),
    to_codes: unsafe fn(*const f32, f32, *mut i8, usize),
    to_planes: unsafe fn(*const f32, f32, *mut i8, usize) -> [f32; 2],
}

/// Bits of the lower plane of codes in two bytes: `code = 64 * high + low`. The higher one is in -64..=64, so that products with
/// bytes of up to 255 fit in 16 bits by twos.
pub(crate) const PLANE_BITS: u32 = 6;

/// The largest code of a query.
const LARGEST_CODE: f32 = 4095.0;

impl HeadKernels {
    /// The kernels for `isa`.
    ///
    /// # Panics
    /// If this machine lacks it.
    pub fn new(isa: Isa) -> HeadKernels {
        HeadKernels {
            rotate: rotate_kernel(isa),
            to_bf16: bf16_kernel(isa),
            to_codes: codes_kernel(isa),
            to_planes: planes_kernel(isa),
        }
    }

    /// Rotates the first `2 * cosines.len()` elements of one head in place, the two halves paired; the rest stays.
    ///
    /// `(a, b)` becomes `(a cos - b sin, b cos + a sin)`, every operation rounded once.
    ///
    /// # Panics
    /// If there are not as many sines as cosines, or the head has fewer elements than they rotate.
    pub fn rotate(&self, head: &mut [f32], cosines: &[f32], sines: &[f32]) {
        assert!(cosines.len() == sines.len() && 2 * cosines.len() <= head.len());
        // SAFETY: as many elements are there.
        unsafe { (self.rotate)(head.as_mut_ptr(), cosines.as_ptr(), sines.as_ptr(), cosines.len()) }
    }

    /// `kv_bf16(value * scale)` of every value.
    ///
    /// # Panics
    /// If the lengths differ or are no multiple of 16.
    pub fn to_bf16(&self, values: &[f32], scale: f32, rounded: &mut [u16]) {
        assert!(values.len() == rounded.len() && values.len().is_multiple_of(LANES));
        // SAFETY: as many elements are there.
        unsafe { (self.to_bf16)(values.as_ptr(), scale, rounded.as_mut_ptr(), values.len()) }
    }

    /// `int8_code(value, inverse)` of every value, where `inverse` comes from `kv_scale` of a head with these values.
    ///
    /// # Panics
    /// If the lengths differ or are no multiple of 16.
    pub fn to_codes(&self, values: &[f32], inverse: f32, codes: &mut [i8]) {
        assert!(values.len() == codes.len() && values.len().is_multiple_of(LANES));
        if inverse == 0.0 {
            return codes.fill(0);
        }
        // SAFETY: as many elements are there.
        unsafe { (self.to_codes)(values.as_ptr(), inverse, codes.as_mut_ptr(), values.len()) }
    }

    /// Rounds `value * scale` of every value to codes in -4095..=4095; returns what they are to be multiplied by, and their
    /// sum. Codes are parted in two planes, `[2][values.len()]`, higher parts first.
    ///
    /// Values are zeros if the largest is below [`SMALLEST_KV`]; if one is not finite, the factor is not and codes are zeros.
    ///
    /// # Panics
    /// If the planes do not have two bytes for each value, or there are values that are no multiple of 16.
    pub fn to_planes(&self, values: &[f32], scale: f32, planes: &mut [i8]) -> [f32; 2] {
        assert!(2 * values.len() == planes.len() && values.len().is_multiple_of(LANES));
        // SAFETY: as many elements are there.
        unsafe { (self.to_planes)(values.as_ptr(), scale, planes.as_mut_ptr(), values.len()) }
    }
}

simd_shells! {
    fn rotate_kernel[][] = rotate(head: *mut f32, cosines: *const f32, sines: *const f32, pairs: usize);
    fn bf16_kernel[][] = to_bf16(values: *const f32, scale: f32, rounded: *mut u16, len: usize);
    fn codes_kernel[][] = to_codes(values: *const f32, inverse: f32, codes: *mut i8, len: usize);
    fn planes_kernel[][] = to_planes(values: *const f32, scale: f32, planes: *mut i8, len: usize) -> [f32; 2];
}

/// # Safety
/// `2 * pairs` floats at the head, `pairs` at each of the others.
#[inline(always)]
unsafe fn rotate<S: Simd>(simd: S, head: *mut f32, cosines: *const f32, sines: *const f32, pairs: usize) {
    for at in (0..pairs).step_by(LANES) {
        let n = LANES.min(pairs - at);
        // SAFETY: by the contract.
        unsafe {
            let (first, second) = (head.add(at), head.add(pairs + at));
            let (a, b) = (simd.load_first(first, n), simd.load_first(second, n));
            let (cosine, sine) = (simd.load_first(cosines.add(at), n), simd.load_first(sines.add(at), n));
            simd.store_first(first, n, simd.sub(simd.mul(a, cosine), simd.mul(b, sine)));
            simd.store_first(second, n, simd.add(simd.mul(b, cosine), simd.mul(a, sine)));
        }
    }
}

/// # Safety
/// `len` elements at both, a multiple of 16.
#[inline(always)]
unsafe fn to_bf16<S: Simd>(simd: S, values: *const f32, scale: f32, rounded: *mut u16, len: usize) {
    let (zero, smallest) = (simd.splat(0.0), simd.splat(SMALLEST_KV));
    for at in (0..len).step_by(LANES) {
        // SAFETY: by the contract.
        unsafe {
            let value = simd.mul(simd.load(values.add(at)), simd.splat(scale));
            let magnitude = simd.bits_to_float(simd.magnitude_bits(value));
            simd.store_bf16(rounded.add(at), simd.select_less(magnitude, smallest, zero, value));
        }
    }
}

/// No clamp: the scale is off by one part in 512 at most, so that the largest code is nearer to 127 than to 128.
///
/// # Safety
/// `len` elements at both, a multiple of 16.
#[inline(always)]
unsafe fn to_codes<S: Simd>(simd: S, values: *const f32, inverse: f32, codes: *mut i8, len: usize) {
    for at in (0..len).step_by(LANES) {
        // SAFETY: by the contract.
        unsafe {
            let value = simd.mul(simd.load(values.add(at)), simd.splat(inverse));
            simd.store_i8(codes.add(at), simd.round_to_int(value));
        }
    }
}

/// # Safety
/// `len` values, a multiple of 16, and twice as many bytes.
#[inline(always)]
unsafe fn to_planes<S: Simd>(simd: S, values: *const f32, scale: f32, planes: *mut i8, len: usize) -> [f32; 2] {
    // SAFETY: by the contract.
    unsafe {
        let mut most = simd.splat_int(0);
        for at in (0..len).step_by(LANES) {
            let value = simd.mul(simd.load(values.add(at)), simd.splat(scale));
            most = simd.max_int(simd.magnitude_bits(value), most);
        }
        let largest = f32::from_bits(simd.fold_max_int(most) as u32);
        if largest < SMALLEST_KV || !largest.is_finite() {
            std::ptr::write_bytes(planes, 0, 2 * len);
            return [if largest < SMALLEST_KV { 0.0 } else { largest }, 0.0];
        }
        let inverse = LARGEST_CODE / largest;
        let (low_bits, mut sum) = (simd.splat_int((1 << PLANE_BITS) - 1), simd.splat_int(0));
        for at in (0..len).step_by(LANES) {
            let value = simd.mul(simd.load(values.add(at)), simd.splat(scale));
            let code = simd.round_to_int(simd.mul(value, simd.splat(inverse)));
            sum = simd.add_int(sum, code);
            simd.store_i8(planes.add(at), simd.shift_down(code, PLANE_BITS));
            simd.store_i8(planes.add(len + at), simd.and(code, low_bits));
        }
        [largest * (1.0 / LARGEST_CODE), simd.fold_int(sum) as f32]
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use octavo_backend::numerics::{int8_code, kv_bf16, kv_scale};

    use super::*;
    use crate::simd::random_bits;

    /// Values of all magnitudes, some of them at the borders and not finite.
    fn values(len: usize, seed: u64) -> Vec<f32> {
        let mut random = random_bits(seed);
        let special =
            [0.0, -0.0, SMALLEST_KV, -SMALLEST_KV, SMALLEST_KV * 0.999, 1e-45, f32::MAX, f32::NAN, f32::INFINITY];
        (0..len)
            .map(|index| match special.get(index / 2) {
                Some(value) if index % 2 == 0 => *value,
                _ => f32::from_bits(random()),
            })
            .collect()
    }

    /// Bits, all NaN alike.
    fn bits(values: impl IntoIterator<Item = f32>) -> Vec<u32> {
        values.into_iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
    }

    #[test]
    fn halves_are_paired_and_what_lies_beyond_them_stays() {
        for isa in Isa::supported() {
            let mut head = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
            HeadKernels::new(isa).rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
            assert_eq!(head, [-3.0, 2.0, 1.0, 4.0, 5.0, 6.0], "{isa}");
        }
    }

    #[test]
    fn every_instruction_set_rotates_as_defined() {
        for (isa, pairs) in Isa::supported().into_iter().flat_map(|isa| [1, 7, 16, 33, 64].map(|pairs| (isa, pairs))) {
            let (head, cosines, sines) = (values(2 * pairs + 3, 1), values(pairs, 2), values(pairs, 3));
            let mut found = head.clone();
            HeadKernels::new(isa).rotate(&mut found, &cosines, &sines);
            let mut expected = head.clone();
            for pair in 0..pairs {
                let (a, b) = (head[pair], head[pairs + pair]);
                expected[pair] = a * cosines[pair] - b * sines[pair];
                expected[pairs + pair] = b * cosines[pair] + a * sines[pair];
            }
            assert_eq!(bits(found), bits(expected), "{isa}, {pairs} pairs");
        }
    }

    #[test]
    fn every_instruction_set_rounds_as_defined() {
        for (isa, scale) in Isa::supported().into_iter().flat_map(|isa| [1.0, 0.125, 0.088_388].map(|s| (isa, s))) {
            let kernels = HeadKernels::new(isa);
            let head = values(256, 4);
            let mut rounded = vec![0; 256];
            kernels.to_bf16(&head, scale, &mut rounded);
            let found = rounded.into_iter().map(|bits| bf16::from_bits(bits).to_f32());
            assert_eq!(bits(found), bits(head.iter().map(|x| kv_bf16(x * scale).to_f32())), "{isa}, scale {scale}");
        }
    }

    #[test]
    fn every_instruction_set_finds_the_codes_as_defined() {
        let mut random = random_bits(5);
        for isa in Isa::supported() {
            let kernels = HeadKernels::new(isa);
            // Over all mantissas of the largest value the scale is rounded up and down.
            for step in 0..300 {
                let largest = 1.0 + step as f32 / 256.0;
                let mut head: Vec<f32> = (0..64).map(|_| random() as i32 as f32 / 2f32.powi(31) * largest).collect();
                head[7] = -largest;
                let inverse = kv_scale(&head).0;
                let mut codes = vec![1; 64];
                kernels.to_codes(&head, inverse, &mut codes);
                assert!(codes.iter().zip(&head).all(|(code, x)| *code == int8_code(*x, inverse)), "{isa}, {largest}");
            }
            for head in [[0.0; 16], [f32::NAN; 16], [f32::INFINITY; 16], [1e-20; 16]] {
                let mut codes = [1; 16];
                kernels.to_codes(&head, kv_scale(&head).0, &mut codes);
                assert_eq!(codes, [0; 16], "{isa}, {}", head[0]);
            }
        }
    }

    #[test]
    fn planes_hold_the_nearest_codes() {
        let mut random = random_bits(6);
        for isa in Isa::supported() {
            let kernels = HeadKernels::new(isa);
            for step in 0..300 {
                let largest = 1.0 + step as f32 / 256.0;
                let mut head: Vec<f32> = (0..64).map(|_| random() as i32 as f32 / 2f32.powi(31) * largest).collect();
                head[9] = -largest;
                let mut planes = [1; 128];
                let [factor, sum] = kernels.to_planes(&head, 0.125, &mut planes);
                let codes: Vec<i32> = (0..64).map(|i| 64 * i32::from(planes[i]) + i32::from(planes[64 + i])).collect();
                assert!((-64..64).contains(&planes[9]) && planes[64..].iter().all(|low| (0..64).contains(low)));
                assert_eq!((codes[9], codes.iter().sum::<i32>()), (-4095, sum as i32), "{isa}");
                assert_eq!(factor, largest * 0.125 * (1.0 / 4095.0), "{isa}");
                for (code, x) in codes.iter().zip(&head) {
                    let exact = f64::from(*x) / f64::from(largest) * 4095.0;
                    assert!((f64::from(*code) - exact).abs() < 0.501, "{isa}: {code} for {exact}");
                }
            }
            for (value, factor) in [(0.0, 0.0), (1e-13, 0.0), (f32::INFINITY, f32::INFINITY), (f32::NAN, f32::NAN)] {
                let (mut head, mut planes) = ([0.5; 16], [1; 32]);
                head[if value < 1.0 { 0..16 } else { 3..4 }].fill(value);
                let [found, sum] = kernels.to_planes(&head, 1.0, &mut planes);
                assert!(found.to_bits() == factor.to_bits() || (found.is_nan() && factor.is_nan()), "{isa}: {found}");
                assert_eq!((sum, planes), (0.0, [0; 32]), "{isa}: {value}");
            }
        }
    }
}
