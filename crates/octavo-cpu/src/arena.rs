//! Memory that is taken, zeroed and touched at load: 64-byte aligned, on huge pages where it is large.

use std::{
    alloc::{Layout, alloc, dealloc},
    fmt,
    mem::MaybeUninit,
    ptr::NonNull,
    sync::Arc,
};

use octavo_backend::BackendError;

use crate::{host::available_threads, pool::for_each_once};

/// Alignment of every piece: a cache line, and one 512-bit register.
pub const ALIGNMENT: usize = 64;

/// Size of a huge page; larger allocations are aligned to it.
const HUGE_PAGE: usize = 2 << 20;

/// An arena takes memory from the system in chunks of at least this.
const CHUNK: usize = 32 << 20;

/// Plain numbers: any bits are a value.
///
/// # Safety
/// The type has no padding, no invalid bit pattern, no interior mutability, and an alignment of at most [`ALIGNMENT`].
pub unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: primitive numbers satisfy all of it.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// A piece of zeroed memory, 64-byte aligned, all of its pages touched.
///
/// Invariant: no other `AlignedBytes` overlaps it, so it behaves as an owned buffer.
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    _chunk: Arc<Chunk>,
}

// SAFETY: the piece is exclusively this value's (invariant above) and its content is plain bytes; shared references
// read only, except through `shared_ptr`, whose users must avoid races themselves.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// Takes `len` bytes of its own from the system; `what` names their purpose in the error.
    ///
    /// # Errors
    /// [`BackendError::Memory`] when they cannot be had.
    pub fn zeroed(what: &'static str, len: usize) -> Result<AlignedBytes, BackendError> {
        let chunk = Chunk::new(len).ok_or(BackendError::Memory { what, bytes: len })?;
        Ok(AlignedBytes::carve(Arc::new(chunk), 0, len))
    }

    /// The caller hands out each byte of a chunk at most once.
    fn carve(chunk: Arc<Chunk>, offset: usize, len: usize) -> AlignedBytes {
        assert!(offset.is_multiple_of(ALIGNMENT) && offset + len <= chunk.layout.size());
        // SAFETY: in bounds by the assertion; the memory was allocated but perhaps never written, and nobody else has
        // these bytes.
        let (start, bytes) = unsafe {
            let start = chunk.start.add(offset);
            (start, std::slice::from_raw_parts_mut(start.as_ptr().cast::<MaybeUninit<u8>>(), len))
        };
        clear(bytes);
        AlignedBytes { start, len, _chunk: chunk }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte, 64-byte aligned; valid for reads of [`AlignedBytes::len`] bytes.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// The first byte, for workers that write disjoint parts through a shared reference.
    ///
    /// The pointer is valid for reads and writes of [`AlignedBytes::len`] bytes while `self` lives. Whoever writes
    /// through it must make sure that no other thread accesses the same bytes at that time and that no slice from
    /// [`AlignedBytes::elements`] or [`AlignedBytes::elements_mut`] over them is alive.
    pub fn shared_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The whole as elements; trailing bytes that do not fill one are left out.
    pub fn elements<T: Plain>(&self) -> &[T] {
        // SAFETY: aligned to 64, in bounds, initialised at `carve`, any bits are valid.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len / size_of::<T>()) }
    }

    /// As [`AlignedBytes::elements`], mutable.
    pub fn elements_mut<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: as in `elements`, and exclusive through `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len / size_of::<T>()) }
    }
}

impl fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBytes({})", self.len)
    }
}

/// Writes zeros, which also touches each page: with several threads where that takes long.
fn clear(bytes: &mut [MaybeUninit<u8>]) {
    let threads = if bytes.len() < CHUNK { 1 } else { available_threads().count };
    let share = bytes.len().div_ceil(threads).next_multiple_of(HUGE_PAGE).max(HUGE_PAGE);
    for_each_once(bytes.chunks_mut(share).collect(), threads, |share| share.fill(MaybeUninit::new(0)));
}

/// Hands out pieces of large chunks, so that many small matrices share huge pages and lie one after another.
#[derive(Debug)]
pub struct Arena {
    chunk: Option<Arc<Chunk>>,
    chunk_size: usize,
    used: usize,
    taken: usize,
}

impl Default for Arena {
    fn default() -> Arena {
        Arena::new()
    }
}

impl Arena {
    /// An arena that has taken nothing yet.
    pub fn new() -> Arena {
        Arena { chunk: None, chunk_size: CHUNK, used: 0, taken: 0 }
    }

    /// An arena that gives each piece an allocation of its own.
    pub fn sized_exactly() -> Arena {
        Arena { chunk_size: 0, ..Arena::new() }
    }

    /// Takes `len` zeroed bytes. They live as long as the piece, whatever becomes of the arena.
    ///
    /// # Errors
    /// [`BackendError::Memory`] when they cannot be had; `what` names their purpose.
    pub fn take(&mut self, what: &'static str, len: usize) -> Result<AlignedBytes, BackendError> {
        let refuse = || BackendError::Memory { what, bytes: len };
        let size = len.checked_next_multiple_of(ALIGNMENT).ok_or_else(refuse)?;
        let chunk = match &self.chunk {
            Some(chunk) if chunk.layout.size() - self.used >= size => Arc::clone(chunk),
            _ => {
                let chunk = Arc::new(Chunk::new(size.max(self.chunk_size)).ok_or_else(refuse)?);
                self.used = 0;
                self.chunk = Some(Arc::clone(&chunk));
                chunk
            }
        };
        let piece = AlignedBytes::carve(chunk, self.used, len);
        self.used += size;
        self.taken += size;
        Ok(piece)
    }

    /// Bytes handed out so far.
    pub fn taken(&self) -> usize {
        self.taken
    }
}

/// One allocation; freed with its last piece.
#[derive(Debug)]
struct Chunk {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a chunk only owns the allocation; access goes through disjoint pieces.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Allocates without writing: pages are committed when pieces are carved.
    fn new(len: usize) -> Option<Chunk> {
        let size = len.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let alignment = if size >= HUGE_PAGE { HUGE_PAGE } else { ALIGNMENT };
        let layout = Layout::from_size_align(size, alignment).ok()?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        let chunk = Chunk { start, layout };
        chunk.advise_huge_pages();
        Some(chunk)
    }

    /// Streaming weights from 4 KiB pages costs about a third of a core's read bandwidth in page walks.
    fn advise_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.layout.align() == HUGE_PAGE {
            let whole_pages = self.layout.size() / 4096 * 4096;
            // SAFETY: the range is inside one live allocation; the advice changes no content. Failure is harmless.
            unsafe { libc::madvise(self.start.as_ptr().cast(), whole_pages, libc::MADV_HUGEPAGE) };
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and no piece is left.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_zeroed_and_apart() {
        let mut arena = Arena::new();
        let mut a = arena.take("a", 100).unwrap();
        let mut b = arena.take("b", 3).unwrap();
        a.elements_mut::<u8>().fill(1);
        b.elements_mut::<u8>().fill(2);
        let c = arena.take("c", CHUNK).unwrap();
        for piece in [&a, &b, &c] {
            assert!((piece.as_ptr() as usize).is_multiple_of(ALIGNMENT));
        }
        assert!(a.elements::<u8>().iter().all(|&v| v == 1));
        assert!(b.elements::<u8>().iter().all(|&v| v == 2));
        assert!(c.elements::<u32>().iter().all(|&v| v == 0));
        assert_eq!(arena.taken(), 128 + 64 + CHUNK);
    }

    #[test]
    fn a_piece_outlives_its_arena() {
        let mut arena = Arena::new();
        let piece = arena.take("piece", 4096).unwrap();
        drop(arena);
        assert!(piece.elements::<f32>().iter().all(|&v| v == 0.0));
    }

    #[test]
    fn what_cannot_be_had_is_an_error_with_its_name_and_size() {
        let error = AlignedBytes::zeroed("the moon", usize::MAX / 4).unwrap_err().to_string();
        assert!(error.contains("the moon") && error.contains(&(usize::MAX / 4).to_string()), "{error}");
        assert!(AlignedBytes::zeroed("more", usize::MAX).is_err());
        assert!(Arena::new().take("more", usize::MAX - 3).is_err());
    }

    #[test]
    fn large_pieces_start_on_a_huge_page() {
        let piece = AlignedBytes::zeroed("large", 3 << 20).unwrap();
        assert!((piece.as_ptr() as usize).is_multiple_of(HUGE_PAGE));
    }

    #[test]
    fn an_empty_piece_is_fine() {
        let piece = AlignedBytes::zeroed("nothing", 0).unwrap();
        assert!(piece.is_empty() && piece.elements::<f32>().is_empty());
    }
}
