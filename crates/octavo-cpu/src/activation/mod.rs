//! The inputs of a matmul, rounded as its weights' formats ask, in the layout that the kernels read.
//!
//! Layout of one rounding: `[row block of 16][group of 32 columns][16 rows]` records. So a kernel reaches the same
//! group of up to 16 rows at constant distances from one pointer. Places of rows beyond the last, and of columns beyond
//! the last, hold zeros.

#[cfg(test)]
mod tests;
mod write;

use octavo_backend::{
    BackendError, InputRounding,
    numerics::{ACTIVATION_GROUP, rms_factor},
};

use self::write::{Normalized, Plain, RowWriters, Source, Writers};
use crate::{arena::AlignedBytes, isa::Isa};

/// Rows that lie together; no kernel call crosses the border between two blocks.
pub const ROW_BLOCK: usize = 16;

/// 32 activations in 8 bits, with what the kernels need to know of them beforehand.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub(crate) struct Int8Record {
    /// As [`octavo_backend::numerics::ActivationGroup`] has them.
    pub codes: [i8; ACTIVATION_GROUP],
    /// Of the group; not finite when a value was not.
    pub scale: f32,
    /// `scale * sum of codes`, rounded once.
    pub scaled_sum: f32,
    /// -8 times the sum of the codes: takes the zero point of 4-bit codes off a dot product.
    pub nibble_correction: i32,
    /// -32 times the sum of the first 16 codes: takes the zero point of 6-bit codes off the product with these.
    pub half_correction: i32,
}

impl Int8Record {
    /// -128 times the sum of the codes: takes the bias of 8-bit codes off a dot product.
    #[inline(always)]
    pub fn biased_correction(&self) -> i32 {
        16 * self.nibble_correction
    }

    /// As [`Int8Record::half_correction`], of the last 16 codes.
    #[inline(always)]
    pub fn second_half_correction(&self) -> i32 {
        4 * self.nibble_correction - self.half_correction
    }
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
        InputRounding::Bf16 | InputRounding::Bf16Chains => 2,
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
        let plane = |rounding| -> Result<Option<AlignedBytes>, BackendError> {
            if !roundings.contains(rounding) {
                return Ok(None);
            }
            let bytes = rows
                .checked_next_multiple_of(ROW_BLOCK)
                .and_then(|rows| rows.checked_mul(columns.div_ceil(ACTIVATION_GROUP)))
                .and_then(|records| records.checked_mul(record_bytes(rounding)));
            AlignedBytes::zeroed("activations", bytes.unwrap_or(usize::MAX)).map(Some)
        };
        Ok(Activations {
            columns,
            rows,
            writers: Writers::new(isa),
            int8: plane(InputRounding::Int8Group32)?,
            bf16: plane(InputRounding::Bf16)?,
            f32: plane(InputRounding::None)?,
        })
    }

    /// Bytes that [`Activations::new`] takes.
    pub fn footprint(roundings: RoundingSet, columns: usize, rows: usize) -> usize {
        let records = rows.next_multiple_of(ROW_BLOCK) * columns.div_ceil(ACTIVATION_GROUP);
        let planes = [InputRounding::None, InputRounding::Bf16, InputRounding::Int8Group32];
        planes.into_iter().filter(|plane| roundings.contains(*plane)).map(|plane| records * record_bytes(plane)).sum()
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
        // SAFETY: the caller's.
        unsafe { self.write_columns(row, 0, values) }
    }

    /// As [`Activations::write_row`], of the columns from `first` on: whole groups of 32, unless they are the last.
    ///
    /// # Panics
    /// If the row or the columns do not exist or are not cut that way.
    ///
    /// # Safety
    /// As [`Activations::write_row`], for the same row and columns.
    pub unsafe fn write_columns(&self, row: usize, first: usize, values: &[f32]) {
        let end = first + values.len();
        assert!(row < self.rows && end <= self.columns, "row {row}, columns {first}..{end}");
        assert!([first, end].iter().all(|at| at.is_multiple_of(ACTIVATION_GROUP) || *at == self.columns));
        let source = Plain { values: values.as_ptr() };
        // SAFETY: `values` has as many elements; the rest is the caller's.
        unsafe { self.write(row, first, values.len(), &self.writers.plain, source) }
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
        unsafe { self.write(row, 0, self.columns, &self.writers.normalized, source) }
    }

    /// # Safety
    /// As [`Activations::write_columns`]; `source` has `count` values.
    unsafe fn write<V: Source>(&self, row: usize, first: usize, count: usize, writers: &RowWriters<V>, source: V) {
        let planes = [
            (&self.int8, writers.int8, InputRounding::Int8Group32),
            (&self.bf16, writers.bf16, InputRounding::Bf16),
            (&self.f32, writers.f32, InputRounding::None),
        ];
        for (plane, writer, rounding) in planes {
            if let Some(plane) = plane {
                let offset = self.offset(row, first / ACTIVATION_GROUP, record_bytes(rounding));
                // SAFETY: the records of a row that exists are inside the plane, `ROW_BLOCK` records apart.
                unsafe { writer(source, count, plane.shared_ptr().add(offset)) }
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
        let plane = match rounding {
            InputRounding::Int8Group32 => &self.int8,
            InputRounding::Bf16 | InputRounding::Bf16Chains => &self.bf16,
            InputRounding::None => &self.f32,
        };
        // SAFETY: the record of a row that exists is inside the plane.
        plane.as_ref().map(|plane| unsafe { plane.as_ptr().add(self.offset(row, 0, record_bytes(rounding))) })
    }
}

/// Bytes of one record.
fn record_bytes(rounding: InputRounding) -> usize {
    match rounding {
        InputRounding::Int8Group32 => INT8_RECORD,
        InputRounding::Bf16 | InputRounding::Bf16Chains => BF16_RECORD,
        InputRounding::None => F32_RECORD,
    }
}
