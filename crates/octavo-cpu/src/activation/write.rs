//! The kernels that round one row.

use octavo_backend::numerics::{ACTIVATION_GROUP, ActivationGroup};

use super::{BF16_RECORD, F32_RECORD, INT8_RECORD, Int8Record, Plane, ROW_BLOCK};
use crate::{
    isa::Isa,
    simd::{LANES, Simd, simd_shells},
};

/// Where a row's values come from.
pub(super) trait Source: Copy + Send + Sync + 'static {
    /// The first `n` values from `at` on, the other lanes 0.
    ///
    /// # Safety
    /// The row has `at + n` values.
    unsafe fn load<S: Simd>(self, simd: S, at: usize, n: usize) -> S::F;
}

/// Values as they are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    pub values: *const f32,
}

/// `(value * factor) * weight`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Normalized {
    pub values: *const f32,
    pub weight: *const f32,
    pub factor: f32,
}

// SAFETY: both live only for one call, on the thread of the slices they come from.
unsafe impl Send for Plain {}
// SAFETY: as above.
unsafe impl Sync for Plain {}
// SAFETY: as above.
unsafe impl Send for Normalized {}
// SAFETY: as above.
unsafe impl Sync for Normalized {}

#[inline(always)]
unsafe fn load_some<S: Simd>(simd: S, from: *const f32, n: usize) -> S::F {
    // SAFETY: the caller's.
    unsafe { if n >= LANES { simd.load(from) } else { simd.load_first(from, n) } }
}

impl Source for Plain {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, at: usize, n: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe { load_some(simd, self.values.add(at), n) }
    }
}

impl Source for Normalized {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, at: usize, n: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe {
            let value = load_some(simd, self.values.add(at), n);
            let weight = load_some(simd, self.weight.add(at), n);
            simd.mul(simd.mul(value, simd.splat(self.factor)), weight)
        }
    }
}

/// The scale and the codes of 32 values, in registers; none if the largest magnitude is not finite, or so small that its
/// inverse is not: then they are what the definition says.
#[inline(always)]
fn round_group<S: Simd>(simd: S, low: S::F, high: S::F) -> Option<(f32, S::I, S::I)> {
    let bits = simd.fold_max_int(simd.max_int(simd.magnitude_bits(low), simd.magnitude_bits(high)));
    let largest = f32::from_bits(bits as u32);
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    if !(largest.is_finite() && inverse.is_finite()) {
        return None;
    }
    let inverse = simd.splat(inverse);
    // No clamp: |value * inverse| is at most 127 and two roundings.
    let low = simd.round_to_int(simd.mul(low, inverse));
    let high = simd.round_to_int(simd.mul(high, inverse));
    Some((largest * (1.0 / 127.0), low, high))
}

#[inline(always)]
fn to_array<S: Simd>(simd: S, low: S::F, high: S::F) -> [f32; ACTIVATION_GROUP] {
    let mut values = [0.0; ACTIVATION_GROUP];
    // SAFETY: the array has two vectors.
    unsafe {
        simd.store(values.as_mut_ptr(), low);
        simd.store(values.as_mut_ptr().add(LANES), high);
    }
    values
}

/// Writes 32 values as one record.
#[inline(always)]
unsafe fn write_int8_group<S: Simd>(simd: S, low: S::F, high: S::F, record: *mut Int8Record) {
    let rounded = round_group(simd, low, high);
    // SAFETY: the caller's: the record is writable.
    unsafe {
        let Some((scale, low, high)) = rounded else {
            return write_unusual_group(&to_array(simd, low, high), record);
        };
        let codes = (&raw mut (*record).codes).cast::<i8>();
        simd.store_i8(codes, low);
        simd.store_i8(codes.add(LANES), high);
        finish_record(record, scale, simd.fold_int(low), simd.fold_int(high));
    }
}

/// Writes what rounding 32 values leaves as one record.
#[inline(always)]
unsafe fn write_rest_group<S: Simd>(simd: S, low: S::F, high: S::F, record: *mut Int8Record) {
    let rounded = round_group(simd, low, high);
    // SAFETY: the caller's: the record is writable.
    unsafe {
        let Some((scale, low_codes, high_codes)) = rounded else {
            let values = to_array(simd, low, high);
            return write_unusual_group(&ActivationGroup::round(&values).rest(&values), record);
        };
        let scale = simd.splat(-scale);
        let low = simd.fma(scale, simd.int_to_float(low_codes), low);
        let high = simd.fma(scale, simd.int_to_float(high_codes), high);
        write_int8_group(simd, low, high, record);
    }
}

#[cold]
#[inline(never)]
unsafe fn write_unusual_group(values: &[f32; ACTIVATION_GROUP], record: *mut Int8Record) {
    let group = ActivationGroup::round(values);
    // SAFETY: the caller's: the record is writable.
    unsafe {
        (*record).codes = group.codes;
        let first: i32 = group.codes[..LANES].iter().map(|code| i32::from(*code)).sum();
        finish_record(record, group.scale, first, group.sum() - first);
    }
}

#[inline(always)]
unsafe fn finish_record(record: *mut Int8Record, scale: f32, first: i32, second: i32) {
    // SAFETY: the caller's: the record is writable.
    unsafe {
        (*record).scale = scale;
        (*record).scaled_sum = scale * (first + second) as f32;
        (*record).nibble_correction = -8 * (first + second);
        (*record).half_correction = -32 * first;
    }
}

/// Writes what rounding leaves if it is the `REST`, else the values.
#[inline(always)]
unsafe fn write_int8<S: Simd, V: Source, const REST: bool>(simd: S, source: V, columns: usize, to: *mut u8) {
    for group in 0..columns / ACTIVATION_GROUP {
        // SAFETY: the caller's: the row has `columns` values and as many records as groups.
        unsafe {
            let low = source.load(simd, group * ACTIVATION_GROUP, LANES);
            let high = source.load(simd, group * ACTIVATION_GROUP + LANES, LANES);
            let record = to.add(group * ROW_BLOCK * INT8_RECORD).cast();
            if REST {
                write_rest_group(simd, low, high, record);
            } else {
                write_int8_group(simd, low, high, record);
            }
        }
    }
}

#[inline(always)]
unsafe fn write_bf16<S: Simd, V: Source>(simd: S, source: V, columns: usize, to: *mut u8) {
    for at in (0..columns).step_by(LANES) {
        let place = at / ACTIVATION_GROUP * ROW_BLOCK * BF16_RECORD + at % ACTIVATION_GROUP * 2;
        // SAFETY: the caller's: the row has `columns` values and as many records as groups; a record is whole, so
        // that 16 elements may be written where fewer are left.
        unsafe { simd.store_bf16(to.add(place).cast(), source.load(simd, at, LANES.min(columns - at))) }
    }
}

#[inline(always)]
unsafe fn write_f32<S: Simd, V: Source>(simd: S, source: V, columns: usize, to: *mut u8) {
    for at in (0..columns).step_by(LANES) {
        let place = at / ACTIVATION_GROUP * ROW_BLOCK * F32_RECORD + at % ACTIVATION_GROUP * 4;
        // SAFETY: as in `write_bf16`.
        unsafe { simd.store(to.add(place).cast(), source.load(simd, at, LANES.min(columns - at))) }
    }
}

#[inline(always)]
unsafe fn sum_of_squares<S: Simd>(simd: S, values: *const f32, len: usize) -> f32 {
    let mut lanes = simd.splat(0.0);
    for at in (0..len).step_by(LANES) {
        // SAFETY: the caller's: `len` values are readable. A lane without a value adds 0 * 0, which changes no sum.
        let value = unsafe { load_some(simd, values.add(at), LANES.min(len - at)) };
        lanes = simd.fma(value, value, lanes);
    }
    simd.fold(lanes)
}

simd_shells! {
    fn select_int8[V: Source, const REST: bool][V, REST] = write_int8(source: V, columns: usize, to: *mut u8);
    fn select_bf16[V: Source][V] = write_bf16(source: V, columns: usize, to: *mut u8);
    fn select_f32[V: Source][V] = write_f32(source: V, columns: usize, to: *mut u8);
    fn select_sum_of_squares[][] = sum_of_squares(values: *const f32, len: usize) -> f32;
}

/// Source, columns, first record.
type RowWriter<V> = unsafe fn(V, usize, *mut u8);

/// The writer of each plane, in the order of [`Plane::ALL`].
pub(super) type RowWriters<V> = [RowWriter<V>; Plane::ALL.len()];

fn row_writers<V: Source>(isa: Isa) -> RowWriters<V> {
    Plane::ALL.map(|plane| match plane {
        Plane::F32 => select_f32(isa),
        Plane::Bf16 => select_bf16(isa),
        Plane::Int8 => select_int8::<V, false>(isa),
        Plane::Rest => select_int8::<V, true>(isa),
    })
}

/// The kernels of one instruction set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writers {
    pub plain: RowWriters<Plain>,
    pub normalized: RowWriters<Normalized>,
    pub sum_of_squares: unsafe fn(*const f32, usize) -> f32,
}

impl Writers {
    pub fn new(isa: Isa) -> Writers {
        Writers { plain: row_writers(isa), normalized: row_writers(isa), sum_of_squares: select_sum_of_squares(isa) }
    }
}
