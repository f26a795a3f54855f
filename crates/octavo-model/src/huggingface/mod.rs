//! Hugging Face folders: JSON files beside safetensors.

mod folder;
mod json;
mod rope;
mod safetensors;
mod shards;

pub(crate) use folder::Folder;
pub(crate) use json::JsonFile;
pub(crate) use rope::rope;
pub(crate) use shards::read_tensors;
