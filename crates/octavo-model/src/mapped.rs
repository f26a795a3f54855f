//! Files as bytes, without reading them: the one place in this crate with unsafe code.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;

use crate::ModelError;

/// Bytes of the largest page of memory in use: ranges are cut to whole ones.
#[cfg(unix)]
const PAGE: usize = 64 << 10;

/// A read-only view of a whole file.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file; `expected` says what it is for when it is missing.
    pub(crate) fn open(path: &Path, expected: &'static str) -> Result<MappedFile, ModelError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => ModelError::NotFound { path: path.to_owned(), expected },
            _ => ModelError::Io { path: path.to_owned(), source },
        };
        // Opening a pipe would wait for its writer.
        if !fs::metadata(path).map_err(failed)?.is_file() {
            return Err(ModelError::corrupt(path, "kind of file", "something other than a regular file", expected));
        }
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is private to this value, read-only, and handed out only as `&[u8]` that borrow it; no
        // reference with another type or a longer life is made. Its length is fixed here, and every offset taken from
        // the file is checked against it. What remains is the assumption every user of a memory map makes: nobody
        // shortens or rewrites the file while the checkpoint is open. If somebody does, the bytes may change or the
        // process may receive SIGBUS, as with any mapped library.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(MappedFile { path: path.to_owned(), map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Takes the whole pages of a range out of the process's memory; whoever reads them again gets them from the file.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
            if start < end {
                // SAFETY: a shared, read-only map of a file: its pages come back as they were. Failure is harmless.
                let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
