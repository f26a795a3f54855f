//! A tiny Llama, and writers that put it into a GGUF file or a folder.

mod folder;
mod gguf;
mod log_lines;
mod model;

pub use folder::{FolderWriter, SHARDS, Stored, safetensors_bytes, with_header};
pub use gguf::{GgufWriter, array_bytes, text_bytes};
pub use log_lines::log_lines_with;
pub use model::{TINY, TinyModel, all_weights, encode};

use std::path::Path;

use octavo_model::{Checkpoint, ModelError};

/// The error of opening `path`.
pub fn refusal(path: &Path) -> ModelError {
    match Checkpoint::open(path) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error,
    }
}

/// Fails unless opening `path` is refused in words that contain each of `parts`.
pub fn assert_refused(path: &Path, parts: &[&str]) {
    let message = refusal(path).to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}
