//! Memory that is taken and zeroed at load: 64-byte aligned, on huge pages where it is large.

#[cfg(target_os = "linux")]
use std::time::Duration;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fmt,
    ptr::NonNull,
    sync::Arc,
};

use octavo_backend::BackendError;

use crate::{host::available_threads, pool::for_each_once};

/// Alignment of every piece: a cache line, and one 512-bit register.
pub const ALIGNMENT: usize = 64;

/// Size of a huge page; larger allocations are aligned to it.
const HUGE_PAGE: usize = 2 << 20;

/// When pages begin to be touched in the background: a model is loaded by then, and its first answer on its way.
#[cfg(target_os = "linux")]
const TOUCH_DELAY: Duration = Duration::from_secs(1);
/// How long the thread that does it rests after each.
#[cfg(target_os = "linux")]
const TOUCH_PAUSE: Duration = Duration::from_millis(1);

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

/// A piece of zeroed memory, 64-byte aligned.
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
        let mut piece = AlignedBytes::carve(Arc::new(chunk), 0, len);
        clear(piece.elements_mut());
        Ok(piece)
    }

    /// As [`AlignedBytes::zeroed`], for a large piece that is not used at once: where the system can, its pages are touched
    /// by a thread of their own in the minute after, little by little. Whatever is used sooner is touched by that use.
    ///
    /// # Errors
    /// As [`AlignedBytes::zeroed`].
    pub fn zeroed_in_background(what: &'static str, len: usize) -> Result<AlignedBytes, BackendError> {
        #[cfg(target_os = "linux")]
        if len >= CHUNK {
            let chunk = Arc::new(Chunk::new(len).ok_or(BackendError::Memory { what, bytes: len })?);
            touch_in_background(&chunk);
            return Ok(AlignedBytes::carve(chunk, 0, len));
        }
        AlignedBytes::zeroed(what, len)
    }

    /// The caller hands out each byte of a chunk at most once.
    fn carve(chunk: Arc<Chunk>, offset: usize, len: usize) -> AlignedBytes {
        assert!(offset.is_multiple_of(ALIGNMENT) && offset + len <= chunk.layout.size());
        // SAFETY: in bounds by the assertion.
        let start = unsafe { chunk.start.add(offset) };
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
        // SAFETY: aligned to 64, in bounds, zeroed by the allocation, any bits are valid.
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

/// Writes zeros over zeros, which touches each page: with several threads where that takes long.
fn clear(bytes: &mut [u8]) {
    let threads = if bytes.len() < CHUNK { 1 } else { available_threads().count };
    let share = bytes.len().div_ceil(threads).next_multiple_of(HUGE_PAGE).max(HUGE_PAGE);
    for_each_once(bytes.chunks_mut(share).collect(), threads, |share| share.fill(0));
}

/// Has a thread touch a chunk's pages, a huge page every millisecond or so, until it is done or the chunk is gone. The system
/// makes room without changing what a page holds, so that others may use it meanwhile. Where it cannot, or no thread is to
/// be had, pages come with their first use.
#[cfg(target_os = "linux")]
fn touch_in_background(chunk: &Arc<Chunk>) {
    let watched = Arc::downgrade(chunk);
    let touch = move || {
        std::thread::sleep(TOUCH_DELAY);
        let mut at = 0;
        // Held for one page at a time, so that a chunk that is let go of is soon free.
        while let Some(chunk) = watched.upgrade().filter(|chunk| at < chunk.layout.size()) {
            // SAFETY: one huge page inside a live mapping, the content of which stays as it is.
            let code =
                unsafe { libc::madvise(chunk.start.as_ptr().add(at).cast(), HUGE_PAGE, libc::MADV_POPULATE_WRITE) };
            drop(chunk);
            if code != 0 {
                return;
            }
            at += HUGE_PAGE;
            std::thread::sleep(TOUCH_PAUSE);
        }
    };
    // A refused thread leaves it to the first use.
    let _ = std::thread::Builder::new().name("octavo-touch".to_owned()).spawn(touch);
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

    /// Takes `len` zeroed bytes, not touched yet. They live as long as the piece, whatever becomes of the arena.
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
    /// Where a mapping of its own begins, and its size.
    #[cfg(target_os = "linux")]
    mapping: Option<(NonNull<u8>, usize)>,
}

// SAFETY: a chunk only owns the allocation; access goes through disjoint pieces.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Takes zeroed memory; pages are committed when they are written.
    fn new(len: usize) -> Option<Chunk> {
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            return Chunk::mapped(len);
        }
        let size = len.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let alignment = if size >= HUGE_PAGE { HUGE_PAGE } else { ALIGNMENT };
        let layout = Layout::from_size_align(size, alignment).ok()?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Chunk {
            start,
            layout,
            #[cfg(target_os = "linux")]
            mapping: None,
        })
    }

    /// New pages straight from the system, which are zeros.
    #[cfg(target_os = "linux")]
    fn mapped(len: usize) -> Option<Chunk> {
        let layout = Layout::from_size_align(len.checked_next_multiple_of(HUGE_PAGE)?, HUGE_PAGE).ok()?;
        let size = layout.size().checked_add(HUGE_PAGE)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping that replaces none.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, -1, 0) };
        if mapping == libc::MAP_FAILED {
            return None;
        }
        let mapping = NonNull::new(mapping.cast::<u8>())?;
        // SAFETY: less than a huge page further, by which the mapping is longer.
        let start = unsafe { mapping.add(mapping.align_offset(HUGE_PAGE)) };
        let chunk = Chunk { start, layout, mapping: Some((mapping, size)) };
        chunk.advise_huge_pages();
        Some(chunk)
    }

    /// Streaming weights from 4 KiB pages costs about a third of a core's read bandwidth in page walks.
    #[cfg(target_os = "linux")]
    fn advise_huge_pages(&self) {
        // SAFETY: the range is one live mapping; the advice changes no content. Failure is harmless.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.layout.size(), libc::MADV_HUGEPAGE) };
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if let Some((mapping, size)) = self.mapping {
            // SAFETY: mapped in `mapped` with this size, and no piece is left.
            unsafe { libc::munmap(mapping.as_ptr().cast(), size) };
            return;
        }
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

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_touched_in_the_background_keep_what_is_written_meanwhile() {
        let mut piece = AlignedBytes::zeroed_in_background("cache", CHUNK + 12_345).unwrap();
        assert_eq!(piece.len(), CHUNK + 12_345);
        assert!((piece.as_ptr() as usize).is_multiple_of(HUGE_PAGE));
        let bytes = piece.elements_mut::<u8>();
        for at in (0..bytes.len()).step_by(4096) {
            bytes[at] = at as u8 / 16 + 1;
        }
        std::thread::sleep(TOUCH_DELAY + 30 * TOUCH_PAUSE);
        let bytes = piece.elements::<u8>();
        let expected = |at: usize| if at.is_multiple_of(4096) { at as u8 / 16 + 1 } else { 0 };
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_is_touched_in_the_background_and_given_back_while_that_goes_on() {
        let resident = |piece: &AlignedBytes| {
            let pages = piece.len() / 4096;
            let mut states = vec![0u8; pages];
            // SAFETY: asks about pages of a live mapping, one byte each.
            let code = unsafe { libc::mincore(piece.as_ptr().cast_mut().cast(), pages * 4096, states.as_mut_ptr()) };
            assert_eq!(code, 0);
            states.iter().filter(|state| **state & 1 == 1).count() * 4096
        };
        let piece = AlignedBytes::zeroed_in_background("cache", 2 * CHUNK).unwrap();
        let start = std::time::Instant::now();
        while resident(&piece) < piece.len() {
            assert!(start.elapsed().as_secs() < 30, "{} of {} bytes touched", resident(&piece), piece.len());
            std::thread::sleep(Duration::from_millis(5));
        }
        let weak = Arc::downgrade(&AlignedBytes::zeroed_in_background("cache", 1 << 30).unwrap()._chunk);
        while weak.strong_count() > 0 {
            assert!(start.elapsed().as_secs() < 60, "the mapping is still held");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn an_empty_piece_is_fine() {
        let piece = AlignedBytes::zeroed("nothing", 0).unwrap();
        assert!(piece.is_empty() && piece.elements::<f32>().is_empty());
    }
}
