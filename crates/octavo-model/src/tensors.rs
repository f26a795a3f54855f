//! The tensors of a checkpoint, whatever kind of file they lie in.

use std::{collections::BTreeMap, ops::Range, path::Path};

use octavo_backend::{Matrix, WeightData, WeightFormat};

use crate::{ModelError, Shape, mapped::MappedFile};

/// Where a tensor lies and what its bytes mean.
///
/// Invariant: `range` lies within the file and is exactly as long as `shape` in `format`.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// As the checkpoint calls it.
    pub(crate) name: String,
    /// Outermost dimension first; the last one is contiguous.
    pub(crate) shape: Vec<usize>,
    pub(crate) format: WeightFormat,
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

impl TensorTable {
    pub(crate) fn path(&self, tensor: &Tensor) -> &Path {
        self.files[tensor.file].path()
    }

    pub(crate) fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.files[tensor.file].bytes()[tensor.range.clone()]
    }

    pub(crate) fn release(&self, tensor: &Tensor) {
        self.files[tensor.file].release(tensor.range.clone());
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
        let data = WeightData { format: tensor.format, bytes: self.bytes(tensor).into() };
        Matrix { rows: 1, columns: values.len(), data }.dequantize_row(0, &mut values);
        values
    }

    /// Bytes of all tensors, each format's share, largest first.
    pub(crate) fn format_bytes(&self) -> Vec<(WeightFormat, usize)> {
        let mut shares: Vec<(WeightFormat, usize)> = Vec::new();
        for tensor in self.tensors.values() {
            match shares.iter_mut().find(|(format, _)| *format == tensor.format) {
                Some((_, bytes)) => *bytes += tensor.range.len(),
                None => shares.push((tensor.format, tensor.range.len())),
            }
        }
        shares.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        shares
    }
}
