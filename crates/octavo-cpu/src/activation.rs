//! The inputs of a matmul, rounded as its weights' formats ask, in the layout that the kernels read.
//!
//! Layout of one rounding: `[row block of 8][group of 32 columns][8 rows]` records. So a kernel reaches the same group
//! of up to eight rows at constant distances from one pointer. Places of rows beyond the last, and of columns beyond the
//! last, hold zeros.

use octavo_backend::{
    BackendError, InputRounding,
    numerics::{ACTIVATION_GROUP, ActivationGroup, rms_factor},
};

use crate::{
    arena::AlignedBytes,
    isa::Isa,
    simd::{LANES, Simd, simd_shells},
};

/// Rows that lie together; no kernel call crosses the border between two blocks.
pub const ROW_BLOCK: usize = 8;

/// 32 activations in 8 bits, with what the kernels need to know of them beforehand.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub(crate) struct Int8Record {
    /// As [`ActivationGroup::codes`].
    pub codes: [i8; ACTIVATION_GROUP],
    /// As [`ActivationGroup::scale`].
    pub scale: f32,
    /// `scale * sum of codes`, rounded once.
    pub scaled_sum: f32,
    /// -8 times the sum of the codes: takes the zero point of 4-bit codes off a dot product.
    pub nibble_correction: i32,
    /// -128 times the sum of the codes: takes the bias of 8-bit codes off a dot product.
    pub biased_correction: i32,
}

/// Bytes from one record to the next.
pub(crate) const INT8_RECORD: usize = size_of::<Int8Record>();
/// Bytes from one record to the next.
pub(crate) const BF16_RECORD: usize = ACTIVATION_GROUP * 2;
/// Bytes from one record to the next.
pub(crate) const F32_RECORD: usize = ACTIVATION_GROUP * 4;

/// A set of ways to round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RoundingSet(u8);

impl RoundingSet {
    /// True when `rounding` is in the set.
    pub fn contains(self, rounding: InputRounding) -> bool {
        self.0 & bit(rounding) != 0
    }

    /// The set of all that are in either.
    pub fn union(self, other: RoundingSet) -> RoundingSet {
        RoundingSet(self.0 | other.0)
    }
}

impl FromIterator<InputRounding> for RoundingSet {
    fn from_iter<I: IntoIterator<Item = InputRounding>>(roundings: I) -> RoundingSet {
        RoundingSet(roundings.into_iter().fold(0, |set, rounding| set | bit(rounding)))
    }
}

fn bit(rounding: InputRounding) -> u8 {
    match rounding {
        InputRounding::None => 1,
        InputRounding::Bf16 => 2,
        InputRounding::Int8Group32 => 4,
    }
}

/// An RMSNorm to apply to a row on its way into [`Activations`].
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// One weight a column.
    pub weight: &'a [f32],
    /// Added to the mean of the squares.
    pub epsilon: f32,
}

/// Rows of activations in one or several roundings, written by many workers and read by the matmul kernels.
#[derive(Debug)]
pub struct Activations {
    columns: usize,
    rows: usize,
    writers: Writers,
    int8: Option<AlignedBytes>,
    bf16: Option<AlignedBytes>,
    f32: Option<AlignedBytes>,
}

impl Activations {
    /// Memory for `rows` rows of `columns` values in each of the roundings.
    ///
    /// # Errors
    /// Memory that cannot be had, or a number of columns that does not divide into groups where groups are asked for.
    pub fn new(isa: Isa, roundings: RoundingSet, columns: usize, rows: usize) -> Result<Activations, BackendError> {
        if roundings.contains(InputRounding::Int8Group32) && !columns.is_multiple_of(ACTIVATION_GROUP) {
            return Err(BackendError::Unsupported {
                what: "columns of a matmul with 8-bit activations",
                found: columns.to_string(),
                expected: format!("a multiple of {ACTIVATION_GROUP}"),
            });
        }
        let plane = |rounding, record: usize| -> Result<Option<AlignedBytes>, BackendError> {
            if !roundings.contains(rounding) {
                return Ok(None);
            }
            let bytes = rows
                .checked_next_multiple_of(ROW_BLOCK)
                .and_then(|rows| rows.checked_mul(columns.div_ceil(ACTIVATION_GROUP)))
                .and_then(|records| records.checked_mul(record));
            AlignedBytes::zeroed("activations", bytes.unwrap_or(usize::MAX)).map(Some)
        };
        Ok(Activations {
            columns,
            rows,
            writers: Writers::new(isa),
            int8: plane(InputRounding::Int8Group32, INT8_RECORD)?,
            bf16: plane(InputRounding::Bf16, BF16_RECORD)?,
            f32: plane(InputRounding::None, F32_RECORD)?,
        })
    }

    /// Bytes that [`Activations::new`] takes.
    pub fn footprint(roundings: RoundingSet, columns: usize, rows: usize) -> usize {
        let records = rows.next_multiple_of(ROW_BLOCK) * columns.div_ceil(ACTIVATION_GROUP);
        let size = |rounding, record| if roundings.contains(rounding) { records * record } else { 0 };
        size(InputRounding::Int8Group32, INT8_RECORD)
            + size(InputRounding::Bf16, BF16_RECORD)
            + size(InputRounding::None, F32_RECORD)
    }

    /// Values in a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Rows there is room for.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rounds `values` into row `row`, bit for bit as [`octavo_backend::numerics`] defines.
    ///
    /// # Panics
    /// If the row does not exist or `values` has another length than [`Activations::columns`].
    ///
    /// # Safety
    /// No other thread writes or reads the same row at the same time. Different rows may be written at once.
    pub unsafe fn write_row(&self, row: usize, values: &[f32]) {
        assert!(row < self.rows && values.len() == self.columns, "row {row} of {} values", values.len());
        let source = Plain { values: values.as_ptr() };
        // SAFETY: `values` has `columns` elements; the rest is the caller's.
        unsafe { self.write(row, &self.writers.plain, source) }
    }

    /// As [`Activations::write_row`], of the row after [`octavo_backend::numerics::rms_norm`].
    ///
    /// # Panics
    /// If the row does not exist or `values` or the norm's weight has another length than [`Activations::columns`].
    ///
    /// # Safety
    /// As [`Activations::write_row`].
    pub unsafe fn write_normalized_row(&self, row: usize, values: &[f32], norm: Norm) {
        assert!(row < self.rows && values.len() == self.columns, "row {row} of {} values", values.len());
        assert_eq!(norm.weight.len(), self.columns, "weights of a norm");
        // SAFETY: the pointer and length are of one slice.
        let sum = unsafe { (self.writers.sum_of_squares)(values.as_ptr(), values.len()) };
        let factor = rms_factor(sum, values.len(), norm.epsilon);
        let source = Normalized { values: values.as_ptr(), weight: norm.weight.as_ptr(), factor };
        // SAFETY: both slices have `columns` elements; the rest is the caller's.
        unsafe { self.write(row, &self.writers.normalized, source) }
    }

    /// # Safety
    /// As [`Activations::write_row`]; `source` has `columns` values.
    unsafe fn write<V: Source>(&self, row: usize, writers: &RowWriters<V>, source: V) {
        let planes = [
            (&self.int8, writers.int8, INT8_RECORD),
            (&self.bf16, writers.bf16, BF16_RECORD),
            (&self.f32, writers.f32, F32_RECORD),
        ];
        for (plane, writer, record) in planes {
            if let Some(plane) = plane {
                // SAFETY: the records of a row that exists are inside the plane, `ROW_BLOCK` records apart.
                unsafe { writer(source, self.columns, plane.shared_ptr().add(self.offset(row, 0, record))) }
            }
        }
    }

    /// Bytes before the record of one row and group.
    fn offset(&self, row: usize, group: usize, record: usize) -> usize {
        let groups = self.columns.div_ceil(ACTIVATION_GROUP);
        ((row / ROW_BLOCK * groups + group) * ROW_BLOCK + row % ROW_BLOCK) * record
    }

    /// The first record of a row in one rounding; none when the set does not contain it.
    ///
    /// The record of the next row in the same block is one record further, the next group's `ROW_BLOCK` records.
    pub(crate) fn row(&self, rounding: InputRounding, row: usize) -> Option<*const u8> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let (plane, record) = match rounding {
            InputRounding::Int8Group32 => (&self.int8, INT8_RECORD),
            InputRounding::Bf16 => (&self.bf16, BF16_RECORD),
            InputRounding::None => (&self.f32, F32_RECORD),
        };
        // SAFETY: the record of a row that exists is inside the plane.
        plane.as_ref().map(|plane| unsafe { plane.as_ptr().add(self.offset(row, 0, record)) })
    }
}

/// Where a row's values come from.
trait Source: Copy + Send + Sync + 'static {
    /// The first `n` values from `at` on, the other lanes 0.
    ///
    /// # Safety
    /// The row has `at + n` values.
    unsafe fn load<S: Simd>(self, simd: S, at: usize, n: usize) -> S::F;
}

#[derive(Debug, Clone, Copy)]
struct Plain {
    values: *const f32,
}

#[derive(Debug, Clone, Copy)]
struct Normalized {
    values: *const f32,
    weight: *const f32,
    factor: f32,
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

/// Writes 32 values as one record. The usual group runs in registers; one whose largest magnitude is not finite, or so
/// small that its inverse is not, takes the definition itself.
#[inline(always)]
unsafe fn write_int8_group<S: Simd>(simd: S, low: S::F, high: S::F, record: *mut Int8Record) {
    let bits = simd.fold_max_int(simd.max_int(simd.magnitude_bits(low), simd.magnitude_bits(high)));
    let largest = f32::from_bits(bits as u32);
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    // SAFETY: the caller's: the record is writable.
    unsafe {
        if !(largest.is_finite() && inverse.is_finite()) {
            let mut values = [0.0; ACTIVATION_GROUP];
            simd.store(values.as_mut_ptr(), low);
            simd.store(values.as_mut_ptr().add(LANES), high);
            return write_unusual_group(&values, record);
        }
        let inverse = simd.splat(inverse);
        // No clamp: |value * inverse| is at most 127 and two roundings.
        let low = simd.round_to_int(simd.mul(low, inverse));
        let high = simd.round_to_int(simd.mul(high, inverse));
        let codes = (&raw mut (*record).codes).cast::<i8>();
        simd.store_i8(codes, low);
        simd.store_i8(codes.add(LANES), high);
        finish_record(record, largest * (1.0 / 127.0), simd.fold_int(simd.add_int(low, high)));
    }
}

#[cold]
#[inline(never)]
unsafe fn write_unusual_group(values: &[f32; ACTIVATION_GROUP], record: *mut Int8Record) {
    let group = ActivationGroup::round(values);
    // SAFETY: the caller's: the record is writable.
    unsafe {
        (*record).codes = group.codes;
        finish_record(record, group.scale, group.sum());
    }
}

#[inline(always)]
unsafe fn finish_record(record: *mut Int8Record, scale: f32, sum: i32) {
    // SAFETY: the caller's: the record is writable.
    unsafe {
        (*record).scale = scale;
        (*record).scaled_sum = scale * sum as f32;
        (*record).nibble_correction = -8 * sum;
        (*record).biased_correction = -128 * sum;
    }
}

#[inline(always)]
unsafe fn write_int8<S: Simd, V: Source>(simd: S, source: V, columns: usize, to: *mut u8) {
    for group in 0..columns / ACTIVATION_GROUP {
        // SAFETY: the caller's: the row has `columns` values and as many records as groups.
        unsafe {
            let low = source.load(simd, group * ACTIVATION_GROUP, LANES);
            let high = source.load(simd, group * ACTIVATION_GROUP + LANES, LANES);
            write_int8_group(simd, low, high, to.add(group * ROW_BLOCK * INT8_RECORD).cast());
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
    fn select_int8[V: Source][V] = write_int8(source: V, columns: usize, to: *mut u8);
    fn select_bf16[V: Source][V] = write_bf16(source: V, columns: usize, to: *mut u8);
    fn select_f32[V: Source][V] = write_f32(source: V, columns: usize, to: *mut u8);
    fn select_sum_of_squares[][] = sum_of_squares(values: *const f32, len: usize) -> f32;
}

type RowWriter<V> = unsafe fn(V, usize, *mut u8);

#[derive(Debug, Clone, Copy)]
struct RowWriters<V> {
    int8: RowWriter<V>,
    bf16: RowWriter<V>,
    f32: RowWriter<V>,
}

impl<V: Source> RowWriters<V> {
    fn new(isa: Isa) -> RowWriters<V> {
        RowWriters { int8: select_int8(isa), bf16: select_bf16(isa), f32: select_f32(isa) }
    }
}

/// The kernels of one instruction set.
#[derive(Debug, Clone, Copy)]
struct Writers {
    plain: RowWriters<Plain>,
    normalized: RowWriters<Normalized>,
    sum_of_squares: unsafe fn(*const f32, usize) -> f32,
}

impl Writers {
    fn new(isa: Isa) -> Writers {
        Writers {
            plain: RowWriters::new(isa),
            normalized: RowWriters::new(isa),
            sum_of_squares: select_sum_of_squares(isa),
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use octavo_backend::numerics::rms_norm;

    use super::*;
    use crate::simd::random_bits;

    const ALL: [InputRounding; 3] = [InputRounding::None, InputRounding::Bf16, InputRounding::Int8Group32];

    fn record(activations: &Activations, row: usize, group: usize) -> Int8Record {
        let first = activations.row(InputRounding::Int8Group32, row).unwrap();
        // SAFETY: the tests ask for groups that exist.
        unsafe { first.add(group * ROW_BLOCK * INT8_RECORD).cast::<Int8Record>().read() }
    }

    fn element<T: Copy>(activations: &Activations, rounding: InputRounding, row: usize, column: usize) -> T {
        let first = activations.row(rounding, row).unwrap().cast::<T>();
        let place = column / ACTIVATION_GROUP * ROW_BLOCK * ACTIVATION_GROUP + column % ACTIVATION_GROUP;
        // SAFETY: the tests ask for columns that exist.
        unsafe { first.add(place).read() }
    }

    /// One row of values in each kind of difficulty.
    fn rows(columns: usize) -> Vec<Vec<f32>> {
        let mut bits = random_bits(3);
        let mut row =
            |scale: f32| -> Vec<f32> { (0..columns).map(|_| (bits() as i32 as f32) / 2f32.powi(31) * scale).collect() };
        let mut rows = vec![row(1.0), row(1e-38), row(1e-42), row(3e38), row(0.0)];
        for (special, at) in [(f32::NAN, 1), (f32::INFINITY, 17), (f32::NEG_INFINITY, 31), (1000.0, 0), (-0.0, 5)] {
            rows.push(row(1.0));
            rows.last_mut().unwrap()[at] = special;
        }
        rows.push((0..columns).map(|i| (i % 255) as f32 * 0.5 - 63.5).collect());
        rows
    }

    fn check_int8(activations: &Activations, row: usize, expected: &[f32]) {
        for (group, values) in expected.as_chunks::<ACTIVATION_GROUP>().0.iter().enumerate() {
            let (found, expected) = (record(activations, row, group), ActivationGroup::round(values));
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert_eq!(found.codes, expected.codes, "row {row}, group {group}");
            assert!(same(found.scale, expected.scale), "row {row}, group {group}");
            assert!(same(found.scaled_sum, expected.scale * expected.sum() as f32), "row {row}, group {group}");
            assert_eq!(found.nibble_correction, -8 * expected.sum());
            assert_eq!(found.biased_correction, -128 * expected.sum());
        }
    }

    #[test]
    fn rows_are_rounded_as_the_contract_defines_on_every_instruction_set() {
        let columns = 96;
        for isa in Isa::supported() {
            let rows = rows(columns);
            let activations = Activations::new(isa, ALL.into_iter().collect(), columns, rows.len()).unwrap();
            for (i, values) in rows.iter().enumerate() {
                // SAFETY: one thread.
                unsafe { activations.write_row(i, values) };
            }
            for (i, values) in rows.iter().enumerate() {
                check_int8(&activations, i, values);
                for (column, value) in values.iter().enumerate() {
                    let bf16_bits: u16 = element(&activations, InputRounding::Bf16, i, column);
                    assert_eq!(bf16_bits, bf16::from_f32(*value).to_bits(), "{isa}, row {i}, column {column}");
                    let plain: f32 = element(&activations, InputRounding::None, i, column);
                    assert_eq!(plain.to_bits(), value.to_bits());
                }
            }
        }
    }

    #[test]
    fn a_norm_on_the_way_in_gives_the_bits_of_the_norm_before() {
        for columns in [32, 64, 576] {
            let weight: Vec<f32> = (0..columns).map(|i| 0.5 + i as f32 * 0.01).collect();
            for isa in Isa::supported() {
                let rows = rows(columns);
                let activations = Activations::new(isa, ALL.into_iter().collect(), columns, rows.len()).unwrap();
                for (i, values) in rows.iter().enumerate() {
                    // SAFETY: one thread.
                    unsafe { activations.write_normalized_row(i, values, Norm { weight: &weight, epsilon: 1e-5 }) };
                    let mut expected = vec![0.0; columns];
                    rms_norm(values, &weight, 1e-5, &mut expected);
                    check_int8(&activations, i, &expected);
                }
            }
        }
    }

    #[test]
    fn columns_that_fill_no_group_are_padded_with_zeros() {
        let rounding: RoundingSet = [InputRounding::Bf16, InputRounding::None].into_iter().collect();
        for isa in Isa::supported() {
            let activations = Activations::new(isa, rounding, 43, 9).unwrap();
            for row in 0..9 {
                // SAFETY: one thread.
                unsafe { activations.write_row(row, &[1.5; 43]) };
            }
            for column in 0..64 {
                let expected = if column < 43 { 1.5f32 } else { 0.0 };
                assert_eq!(element::<f32>(&activations, InputRounding::None, 8, column), expected);
                let bits: u16 = element(&activations, InputRounding::Bf16, 3, column);
                assert_eq!(bf16::from_bits(bits).to_f32(), expected);
            }
        }
    }

    #[test]
    fn a_width_without_whole_groups_is_refused_for_8_bits() {
        let error = Activations::new(Isa::Scalar, [InputRounding::Int8Group32].into_iter().collect(), 48, 1);
        assert!(error.unwrap_err().to_string().contains("48"));
    }

    #[test]
    fn the_footprint_is_what_is_taken() {
        let set: RoundingSet = ALL.into_iter().collect();
        let activations = Activations::new(Isa::Scalar, set, 64, 9).unwrap();
        let taken: usize =
            [&activations.int8, &activations.bf16, &activations.f32].map(|p| p.as_ref().unwrap().len()).iter().sum();
        assert_eq!(Activations::footprint(set, 64, 9), taken);
    }
}
