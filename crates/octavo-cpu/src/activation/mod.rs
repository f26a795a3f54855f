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
        self.0 & bits(rounding) == bits(rounding)
    }

    /// The set of all that are in either.
    pub fn union(self, other: RoundingSet) -> RoundingSet {
        RoundingSet(self.0 | other.0)
    }
}

impl FromIterator<InputRounding> for RoundingSet {
    fn from_iter<I: IntoIterator<Item = InputRounding>>(roundings: I) -> RoundingSet {
        RoundingSet(roundings.into_iter().fold(0, |set, rounding| set | bits(rounding)))
    }
}

fn bits(rounding: InputRounding) -> u8 {
    match rounding {
        InputRounding::None => 1,
        InputRounding::Bf16 | InputRounding::Bf16Chains => 2,
        InputRounding::Int8Group32 => 4,
        // Both of its planes.
        InputRounding::Int8Twice => 4 | 8,
    }
}

/// Memory of rows rounded in one way. All planes have records of 32 columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plane {
    F32,
    Bf16,
    Int8,
    /// What [`Plane::Int8`] leaves, rounded in the same way.
    Rest,
}

impl Plane {
    const ALL: [Plane; 4] = [Plane::F32, Plane::Bf16, Plane::Int8, Plane::Rest];

    /// The only or the first plane of a rounding.
    pub fn of(rounding: InputRounding) -> Plane {
        match rounding {
            InputRounding::None => Plane::F32,
            InputRounding::Bf16 | InputRounding::Bf16Chains => Plane::Bf16,
            InputRounding::Int8Group32 | InputRounding::Int8Twice => Plane::Int8,
        }
    }

    /// A rounding that needs it.
    fn rounding(self) -> InputRounding {
        match self {
            Plane::F32 => InputRounding::None,
            Plane::Bf16 => InputRounding::Bf16,
            Plane::Int8 => InputRounding::Int8Group32,
            Plane::Rest => InputRounding::Int8Twice,
        }
    }

    /// Bytes from one record to the next.
    fn record(self) -> usize {
        match self {
            Plane::F32 => F32_RECORD,
            Plane::Bf16 => BF16_RECORD,
            Plane::Int8 | Plane::Rest => INT8_RECORD,
        }
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
    /// In the order of [`Plane::ALL`].
    planes: [Option<AlignedBytes>; Plane::ALL.len()],
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
        let mut planes = [const { None }; Plane::ALL.len()];
        for plane in Plane::ALL.into_iter().filter(|plane| roundings.contains(plane.rounding())) {
            let bytes = rows
                .checked_next_multiple_of(ROW_BLOCK)
                .and_then(|rows| rows.checked_mul(columns.div_ceil(ACTIVATION_GROUP)))
                .and_then(|records| records.checked_mul(plane.record()));
            planes[plane as usize] = Some(AlignedBytes::zeroed("activations", bytes.unwrap_or(usize::MAX))?);
        }
        Ok(Activations { columns, rows, writers: Writers::new(isa), planes })
    }

    /// Bytes that [`Activations::new`] takes.
    pub fn footprint(roundings: RoundingSet, columns: usize, rows: usize) -> usize {
        let records = rows.next_multiple_of(ROW_BLOCK) * columns.div_ceil(ACTIVATION_GROUP);
        let planes = Plane::ALL.into_iter().filter(|plane| roundings.contains(plane.rounding()));
        planes.map(|plane| records * plane.record()).sum()
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
        for (plane, memory) in Plane::ALL.into_iter().zip(&self.planes) {
            if let Some(memory) = memory {
                let offset = self.offset(row, first / ACTIVATION_GROUP, plane.record());
                // SAFETY: the records of a row that exists are inside the plane, `ROW_BLOCK` records apart.
                unsafe { writers[plane as usize](source, count, memory.shared_ptr().add(offset)) }
            }
        }
    }

    /// Bytes before the record of one row and group.
    fn offset(&self, row: usize, group: usize, record: usize) -> usize {
        let groups = self.columns.div_ceil(ACTIVATION_GROUP);
        ((row / ROW_BLOCK * groups + group) * ROW_BLOCK + row % ROW_BLOCK) * record
    }

    /// The first record of a row in one plane; none when no rounding needs it.
    ///
    /// The record of the next row in the same block is one record further, the next group's `ROW_BLOCK` records.
    pub(crate) fn row(&self, plane: Plane, row: usize) -> Option<*const u8> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let memory = self.planes[plane as usize].as_ref();
        // SAFETY: the record of a row that exists is inside the plane.
        memory.map(|memory| unsafe { memory.as_ptr().add(self.offset(row, 0, plane.record())) })
    }
}
