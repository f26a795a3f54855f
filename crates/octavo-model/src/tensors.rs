//! The tensors of a checkpoint, whatever kind of file they lie in.

use std::{borrow::Cow, collections::BTreeMap, ops::Range, path::Path};

use octavo_backend::{Matrix, WeightData, WeightFormat};

use crate::{ModelError, Shape, huggingface::PackedInt4, mapped::MappedFile};

/// A tensor, and where it comes from.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// As the checkpoint calls it.
    pub(crate) name: String,
    /// Outermost dimension first; the last one is contiguous.
    pub(crate) shape: Vec<usize>,
    pub(crate) format: WeightFormat,
    pub(crate) source: TensorSource,
}

/// Where the elements of a tensor are.
#[derive(Debug, Clone)]
pub(crate) enum TensorSource {
    /// Stored as they are. Invariant: exactly as many bytes as the shape takes in the format.
    Stored(Place),
    /// Packed into tensors of other shapes, to be unpacked when they are asked for.
    Packed(PackedInt4),
}

/// A part of a file.
///
/// Invariant: `range` lies within the file.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Index into [`TensorTable::files`].
    pub(crate) file: usize,
    pub(crate) range: Range<usize>,
}

/// All tensors of a checkpoint by name, and the files that they lie in.
#[derive(Debug)]
pub(crate) struct TensorTable {
    pub(crate) files: Vec<MappedFile>,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Tensor {
    /// Bytes that a tensor of this shape and format takes, and nothing when it cannot exist.
    pub(crate) fn size(shape: &[usize], format: WeightFormat) -> Option<usize> {
        let (columns, outer) = shape.split_last()?;
        outer.iter().try_fold(format.row_bytes(*columns)?, |size, dimension| size.checked_mul(*dimension))
    }
}

impl Place {
    pub(crate) fn bytes<'f>(&self, files: &'f [MappedFile]) -> &'f [u8] {
        &files[self.file].bytes()[self.range.clone()]
    }
}

impl TensorTable {
    pub(crate) fn path(&self, tensor: &Tensor) -> &Path {
        let place = match &tensor.source {
            TensorSource::Stored(place) => place,
            TensorSource::Packed(packed) => packed.place(),
        };
        self.files[place.file].path()
    }

    /// The elements in the tensor's format.
    pub(crate) fn bytes(&self, tensor: &Tensor) -> Cow<'_, [u8]> {
        match &tensor.source {
            TensorSource::Stored(place) => place.bytes(&self.files).into(),
            TensorSource::Packed(packed) => packed.unpack(&self.files, tensor.format).into(),
        }
    }

    pub(crate) fn release(&self, tensor: &Tensor) {
        let release = |place: &Place| self.files[place.file].release(place.range.clone());
        match &tensor.source {
            TensorSource::Stored(place) => release(place),
            TensorSource::Packed(packed) => packed.places().for_each(release),
        }
    }

    /// Fails unless the tensor's dimensions are these.
    pub(crate) fn check_shape(&self, tensor: &Tensor, expected: &[usize]) -> Result<(), ModelError> {
        if tensor.shape == expected {
            return Ok(());
        }
        Err(ModelError::Shape {
            file: self.path(tensor).to_owned(),
            tensor: tensor.name.clone(),
            found: Shape(tensor.shape.clone()),
            expected: Shape(expected.to_vec()),
        })
    }

    /// A tensor of one dimension as `f32`.
    pub(crate) fn vector(&self, tensor: &Tensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.shape.iter().product()];
        let data = WeightData { format: tensor.format, bytes: self.bytes(tensor) };
        Matrix { rows: 1, columns: values.len(), data }.dequantize_row(0, &mut values);
        values
    }

    /// Bytes of all tensors, each format's share, largest first.
    pub(crate) fn format_bytes(&self) -> Vec<(WeightFormat, usize)> {
        let mut shares: Vec<(WeightFormat, usize)> = Vec::new();
        for tensor in self.tensors.values() {
            let size = match &tensor.source {
                TensorSource::Stored(place) => place.range.len(),
                TensorSource::Packed(_) => Tensor::size(&tensor.shape, tensor.format).unwrap_or(0),
            };
            match shares.iter_mut().find(|(format, _)| *format == tensor.format) {
                Some((_, bytes)) => *bytes += size,
                None => shares.push((tensor.format, size)),
            }
        }
        shares.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        shares
    }
}
