//! Memory that is taken in one piece at load and handed out in parts.

use std::{marker::PhantomData, sync::Arc};

use crate::{
    device::{Device, DeviceMemory, Slice},
    error::CudaError,
};

/// Every part begins at a multiple of this, which is wide enough for every load and copy.
pub const ALIGNMENT: usize = 256;

/// Where parts will be.
#[derive(Debug, Default, Clone)]
pub struct Layout {
    bytes: usize,
}

/// A part that has been planned.
#[derive(Debug)]
pub struct Place<T> {
    offset: usize,
    len: usize,
    marker: PhantomData<fn() -> T>,
}

impl<T> Clone for Place<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Place<T> {}

impl<T> Place<T> {
    /// `len` elements, `offset` bytes from the beginning.
    pub(crate) fn new(offset: usize, len: usize) -> Place<T> {
        Place { offset, len, marker: PhantomData }
    }

    /// Bytes from the beginning.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes from the beginning to its end.
    pub fn end(&self) -> usize {
        self.offset + self.len * size_of::<T>()
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Layout {
    /// Plans a part of `len` elements.
    pub fn place<T>(&mut self, len: usize) -> Place<T> {
        let offset = self.bytes;
        self.bytes += (len * size_of::<T>()).next_multiple_of(ALIGNMENT);
        Place::new(offset, len)
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// One piece of the GPU's memory.
pub struct Arena {
    memory: DeviceMemory,
}

impl Arena {
    /// Takes memory for all parts of a layout.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if there is not enough.
    pub fn new(device: &Arc<Device>, what: &'static str, layout: &Layout) -> Result<Arena, CudaError> {
        Ok(Arena { memory: DeviceMemory::new(device, what, layout.bytes)? })
    }

    /// A planned part.
    ///
    /// # Panics
    /// If it was planned in another, larger layout.
    pub fn slice<T>(&self, place: Place<T>) -> Slice<T> {
        assert!(place.end() <= self.memory.bytes());
        Slice::at(self.memory.address() + place.offset as u64, place.len)
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        let mut layout = Layout::default();
        let first: Place<u8> = layout.place(1);
        let second: Place<f32> = layout.place(65);
        let third: Place<u8> = layout.place(0);
        assert_eq!((first.offset, second.offset, third.offset), (0, 256, 768));
        assert_eq!((layout.bytes(), second.len()), (768, 65));
    }
}
