//! The tensors of a folder: one safetensors file, or several and an index that says what lies where.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{
    Folder, int4,
    json::JsonFile,
    safetensors::{self, StoredTensor},
};
use crate::{ModelError, mapped::MappedFile, tensors::TensorTable};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const WEIGHT_MAP: &str = "weight_map";

/// Maps every file and checks it; the index and the shards must agree tensor by tensor.
pub(crate) fn read_tensors(folder: &Folder) -> Result<TensorTable, ModelError> {
    let single = folder.path.join(SINGLE);
    if single.exists() {
        let file = MappedFile::open(&single, "a safetensors file")?;
        let stored = safetensors::read(&file, 0)?.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        return int4::table(folder, vec![file], stored);
    }
    match JsonFile::read(&folder.path.join(INDEX))? {
        Some(index) => {
            let (files, stored) = read_shards(&folder.path, &index)?;
            int4::table(folder, files, stored)
        }
        None => Err(ModelError::NotFound { path: single, expected: "the weights, in one file or with an index" }),
    }
}

type Shards = (Vec<MappedFile>, BTreeMap<String, StoredTensor>);

fn read_shards(folder: &Path, index: &JsonFile) -> Result<Shards, ModelError> {
    let places = places(index)?;
    let (mut files, mut stored) = (Vec::new(), BTreeMap::new());
    for shard in places.values().copied().collect::<BTreeSet<_>>() {
        let file = MappedFile::open(&folder.join(shard), "a shard that the index names")?;
        for tensor in safetensors::read(&file, files.len())? {
            check_place(&tensor, shard, &file, &places, index)?;
            stored.insert(tensor.name.clone(), tensor);
        }
        files.push(file);
    }
    match places.iter().find(|(name, _)| !stored.contains_key(**name)) {
        None => Ok((files, stored)),
        Some((name, shard)) => Err(ModelError::MissingTensor { file: folder.join(shard), tensor: (*name).to_owned() }),
    }
}

/// The shard of each tensor, as the index has it.
fn places(index: &JsonFile) -> Result<BTreeMap<&str, &str>, ModelError> {
    let map = index.value(WEIGHT_MAP).and_then(|map| map.as_object()).filter(|map| !map.is_empty());
    let map = map.ok_or_else(|| index.corrupt(WEIGHT_MAP, "no entries", "the file of each tensor"))?;
    map.iter()
        .map(|(name, shard)| match shard.as_str() {
            // A name with a path in it could lead out of the folder.
            Some(shard) if shard.ends_with(".safetensors") && !shard.contains(['/', '\\']) => {
                Ok((name.as_str(), shard))
            }
            _ => {
                let field = format!("{WEIGHT_MAP}.{name}");
                Err(index.corrupt(&field, shard, "the name of a safetensors file in this folder"))
            }
        })
        .collect()
}

fn check_place(
    tensor: &StoredTensor,
    shard: &str,
    file: &MappedFile,
    places: &BTreeMap<&str, &str>,
    index: &JsonFile,
) -> Result<(), ModelError> {
    match places.get(tensor.name.as_str()) {
        Some(place) if *place == shard => Ok(()),
        Some(place) => {
            let field = format!("{WEIGHT_MAP}.{}", tensor.name);
            Err(index.corrupt(&field, place, format!("{shard}, where the tensor lies")))
        }
        None => Err(ModelError::LeftOverTensor {
            file: file.path().to_owned(),
            tensor: tensor.name.clone(),
            found: format!("shape {:?} in {}", tensor.shape, tensor.element),
            expected: format!("only tensors that {INDEX} names"),
        }),
    }
}
