//! Writes Hugging Face folders, in one safetensors file or several.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

/// A tensor as a safetensors file holds it.
#[derive(Debug, Clone)]
pub struct Stored {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: &'static str,
    pub bytes: Vec<u8>,
}

/// A folder's content.
#[derive(Debug, Clone)]
pub struct FolderWriter {
    pub config: Value,
    pub tensors: Vec<Stored>,
}

impl FolderWriter {
    /// Writes `config.json` and `model.safetensors`.
    pub fn write(&self, folder: &Path) {
        self.write_config(folder);
        fs::write(folder.join("model.safetensors"), safetensors_bytes(&self.tensors)).unwrap();
    }

    /// Writes `config.json`, two shards, and an index that `change` may falsify first.
    pub fn write_sharded(&self, folder: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
        self.write_config(folder);
        let (first, second) = self.tensors.split_at(self.tensors.len() / 2);
        let mut places = Map::new();
        for (tensors, file) in [(first, SHARDS[0]), (second, SHARDS[1])] {
            fs::write(folder.join(file), safetensors_bytes(tensors)).unwrap();
            for tensor in tensors {
                places.insert(tensor.name.clone(), file.into());
            }
        }
        change(&mut places);
        let index = json!({"metadata": {"total_size": 0}, "weight_map": places});
        fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    fn write_config(&self, folder: &Path) {
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
    }

    pub fn remove(&mut self, name: &str) -> Stored {
        let at = self.tensors.iter().position(|tensor| tensor.name == name).unwrap();
        self.tensors.remove(at)
    }
}

pub const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// A safetensors file.
pub fn safetensors_bytes(tensors: &[Stored]) -> Vec<u8> {
    let mut header = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut data = Vec::new();
    for Stored { name, shape, dtype, bytes } in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with this header, whatever it says.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}
