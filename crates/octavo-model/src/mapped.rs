//! Files as bytes, without reading them: the one place in this crate with unsafe code.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use memmap2::Mmap;

use crate::ModelError;

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
}
