//! Work memory: every buffer of a step at a fixed place in one allocation, planned before it is taken.

use std::{marker::PhantomData, ops::Range};

use octavo_backend::BackendError;

use crate::arena::{ALIGNMENT, AlignedBytes, Plain};

/// A buffer's place in the work memory.
#[derive(Debug)]
pub struct Place<T> {
    offset: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Place<T> {
    fn clone(&self) -> Place<T> {
        *self
    }
}

impl<T> Copy for Place<T> {}

impl<T> Place<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Hands out places one after another.
#[derive(Debug, Default)]
pub struct WorkLayout {
    bytes: usize,
}

impl WorkLayout {
    /// A place for `len` elements, on a cache line of its own.
    pub fn place<T: Plain>(&mut self, len: usize) -> Place<T> {
        let place = Place { offset: self.bytes, len, element: PhantomData };
        self.bytes += (len * size_of::<T>()).next_multiple_of(ALIGNMENT);
        place
    }

    /// Bytes of all places.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The memory behind a [`WorkLayout`], shared by the workers of a step.
pub struct WorkMemory {
    memory: AlignedBytes,
}

impl WorkMemory {
    /// Takes and touches the memory of a layout.
    ///
    /// # Errors
    /// [`BackendError::Memory`] when it cannot be had.
    pub fn new(layout: &WorkLayout) -> Result<WorkMemory, BackendError> {
        Ok(WorkMemory { memory: AlignedBytes::zeroed("work memory", layout.bytes)? })
    }

    /// The first element of a place.
    ///
    /// # Panics
    /// If the place belongs to a larger layout.
    pub fn pointer<T: Plain>(&self, place: Place<T>) -> *mut T {
        assert!(place.offset + place.len * size_of::<T>() <= self.memory.len());
        // SAFETY: in bounds by the assertion; places are aligned to a cache line.
        unsafe { self.memory.shared_ptr().add(place.offset).cast() }
    }

    /// Elements of a place, to read.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    ///
    /// # Panics
    /// If the range does not lie in the place.
    pub unsafe fn read<T: Plain>(&self, place: Place<T>, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= place.len);
        // SAFETY: in bounds, initialised, any bits are valid; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.pointer(place).add(range.start), range.len()) }
    }

    /// Elements of a place, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    ///
    /// # Panics
    /// If the range does not lie in the place.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn write<T: Plain>(&self, place: Place<T>, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= place.len);
        // SAFETY: as in `read`, and exclusive by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(place).add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_do_not_overlap_and_are_aligned() {
        let mut layout = WorkLayout::default();
        let (a, b) = (layout.place::<f32>(3), layout.place::<u16>(100));
        let memory = WorkMemory::new(&layout).unwrap();
        // SAFETY: one thread, disjoint places.
        unsafe {
            memory.write(a, 0..3).fill(1.0);
            memory.write(b, 0..100).fill(7);
            assert_eq!(memory.read(a, 0..3), [1.0; 3]);
        }
        assert!((memory.pointer(b) as usize).is_multiple_of(ALIGNMENT));
        assert_eq!(layout.bytes(), 64 + 256);
    }

    #[test]
    #[should_panic(expected = "range.end <= place.len")]
    fn a_range_beyond_its_place_is_refused() {
        let mut layout = WorkLayout::default();
        let place = layout.place::<f32>(3);
        let memory = WorkMemory::new(&layout).unwrap();
        // SAFETY: nobody else has it.
        let _ = unsafe { memory.read(place, 0..4) };
    }
}
