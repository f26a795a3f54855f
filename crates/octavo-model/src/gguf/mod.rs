//! GGUF files, versions 2 and 3: a header of metadata and tensor descriptions, then the tensors' bytes.
//!
//! The reader borrows from the mapped file and allocates nothing whose size the file merely claims: each count and
//! length is compared with the bytes that are left before it is used.

mod cursor;
mod header;
mod metadata;
mod value;
mod vocabulary;

pub(crate) use header::Header;
pub(crate) use metadata::Metadata;
pub(crate) use vocabulary::{chat_template, generation_defaults, special_token, tokenizer, vocab_size};
