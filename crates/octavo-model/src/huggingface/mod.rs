//! Hugging Face folders: JSON files beside safetensors.

mod folder;
mod int4;
mod json;
mod quantization;
mod rope;
mod safetensors;
mod shards;

pub(crate) use folder::Folder;
pub(crate) use int4::PackedInt4;
pub(crate) use json::JsonFile;
pub(crate) use rope::rope;
pub(crate) use shards::read_tensors;
