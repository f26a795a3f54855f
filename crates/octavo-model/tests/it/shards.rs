//! Safetensors files, whole and damaged, in one piece or several.

use std::{
    fs::{self, File},
    path::Path,
};

use octavo_backend::WeightFormat;
use octavo_model::{Checkpoint, ModelError};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::support::{
    FolderWriter, SHARDS, TinyModel, all_weights, assert_refused, refusal, safetensors_bytes, with_header,
};

fn tiny() -> FolderWriter {
    TinyModel::tied().folder(WeightFormat::Bf16)
}

#[test]
fn shards_hold_the_same_model_as_one_file() {
    let (whole, sharded) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    tiny().write(whole.path());
    tiny().write_sharded(sharded.path(), |_| {});
    let mut whole = Checkpoint::open(whole.path()).unwrap();
    let mut sharded = Checkpoint::open(sharded.path()).unwrap();
    assert_eq!(whole.config(), sharded.config());
    assert_eq!(all_weights(&mut whole), all_weights(&mut sharded));
}

#[test]
fn a_missing_shard_is_named() {
    let folder = TempDir::new().unwrap();
    tiny().write_sharded(folder.path(), |_| {});
    fs::remove_file(folder.path().join(SHARDS[1])).unwrap();
    assert_refused(folder.path(), &[SHARDS[1], "not found"]);
}

#[test]
fn a_tensor_that_its_shard_lacks_is_named() {
    let folder = TempDir::new().unwrap();
    let mut writer = tiny();
    let dropped = writer.remove("model.layers.1.mlp.up_proj.weight").name;
    writer.write_sharded(folder.path(), |places| drop(places.insert(dropped.clone(), SHARDS[1].into())));
    assert_refused(folder.path(), &[SHARDS[1], &dropped, "not found"]);
}

#[test]
fn an_empty_index_is_refused() {
    let folder = TempDir::new().unwrap();
    tiny().write_sharded(folder.path(), |places| places.clear());
    assert_refused(folder.path(), &["model.safetensors.index.json", "weight_map", "no entries"]);
}

#[test]
fn a_name_that_points_at_the_wrong_shard_is_refused() {
    let folder = TempDir::new().unwrap();
    let name = "model.embed_tokens.weight";
    tiny().write_sharded(folder.path(), |places| drop(places.insert(name.to_owned(), SHARDS[1].into())));
    assert_refused(folder.path(), &["index.json", name, SHARDS[0], SHARDS[1]]);
}

#[test]
fn a_tensor_that_the_index_lacks_is_refused() {
    let folder = TempDir::new().unwrap();
    let name = "model.norm.weight";
    tiny().write_sharded(folder.path(), |places| drop(places.remove(name)));
    assert_refused(folder.path(), &[SHARDS[0], name, "index.json"]);
}

#[test]
fn a_shard_outside_the_folder_is_refused() {
    for place in ["../model.safetensors", "/etc/model.safetensors", "pytorch_model.bin"] {
        let folder = TempDir::new().unwrap();
        tiny().write_sharded(folder.path(), |places| {
            places.insert("model.norm.weight".to_owned(), place.into());
        });
        assert_refused(folder.path(), &["index.json", "model.norm.weight", place]);
    }
}

#[test]
fn a_folder_without_weights_says_which_file_it_lacks() {
    let folder = TempDir::new().unwrap();
    tiny().write(folder.path());
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert_refused(folder.path(), &["model.safetensors", "not found"]);
}

#[test]
fn a_tensor_missing_from_a_single_file_is_named() {
    let folder = TempDir::new().unwrap();
    let mut writer = tiny();
    let name = writer.remove("model.layers.0.self_attn.k_proj.weight").name;
    writer.write(folder.path());
    assert_refused(folder.path(), &[&name, "not found"]);
}

#[test]
fn every_prefix_of_a_file_is_refused_with_both_sizes() {
    let folder = TempDir::new().unwrap();
    tiny().write(folder.path());
    let path = folder.path().join("model.safetensors");
    let handle = File::options().write(true).open(&path).unwrap();
    for length in (0..fs::metadata(&path).unwrap().len()).rev().step_by(7) {
        handle.set_len(length).unwrap();
        match refusal(folder.path()) {
            ModelError::Truncated { file, found, expected, .. } => {
                assert_eq!(file, path);
                assert!(found < expected, "{length}: {found} {expected}");
            }
            other => panic!("{length}: {other}"),
        }
    }
}

#[test]
fn other_types_are_refused_by_tensor() {
    let folder = TempDir::new().unwrap();
    let mut writer = tiny();
    writer.tensors[3].dtype = "F8_E4M3";
    writer.write(folder.path());
    assert_refused(folder.path(), &["model.safetensors", &writer.tensors[3].name, "F8_E4M3", "F32, F16 or BF16"]);
}

#[test]
fn headers_that_lie_are_refused() {
    let folder = TempDir::new().unwrap();
    tiny().write(folder.path());
    let path = folder.path().join("model.safetensors");
    let refused = |bytes: Vec<u8>, parts: &[&str]| {
        fs::write(&path, bytes).unwrap();
        assert_refused(folder.path(), &[&["model.safetensors"], parts].concat());
    };
    let entry = |shape: &str, offsets: &str| {
        let text = format!(r#"{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}"#);
        with_header(&text, &[0; 64])
    };
    refused([&u64::MAX.to_le_bytes()[..], b"{}"].concat(), &["header length", "at most"]);
    refused(with_header("[]", &[]), &["header", "an array"]);
    refused(with_header("{", &[]), &["header", "a JSON object"]);
    refused(entry("[16]", "[0, 32]"), &["tensor a", "32 bytes", "64"]);
    refused(entry("[8]", "[0, 32]"), &["data", "64 bytes", "32"]);
    refused(entry("[8]", "[32, 64]"), &["tensor a", "begins at 0"]);
    refused(entry("[8]", "[32, 0]"), &["tensor a"]);
    refused(entry("[16]", "[0, 18446744073709551615]"), &["tensor a", "18446744073709551615"]);
    refused(entry("[4294967296, 4294967296]", "[0, 64]"), &["tensor a", "None"]);
    refused(entry("[-1]", "[0, 64]"), &["tensor a", "shape"]);
    refused(entry("[16]", "[0]"), &["tensor a", "data_offsets"]);
    refused(with_header(r#"{"a": 3}"#, &[]), &["tensor a", "dtype"]);
}

#[test]
fn the_reader_agrees_with_the_formats_own_crate() {
    let folder = TempDir::new().unwrap();
    tiny().write(folder.path());
    let path = folder.path().join("model.safetensors");
    let views = |bytes: &[u8]| {
        let tensors = safetensors::SafeTensors::deserialize(bytes).unwrap();
        let owned = tensors.iter().map(|(name, view)| (name.to_owned(), view.shape().to_vec(), view.data().to_vec()));
        let mut owned: Vec<_> = owned.collect();
        owned.sort();
        owned
    };
    let ours = fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&ours).unwrap();
    let rewritten = safetensors::serialize(tensors.iter(), None).unwrap();
    assert_eq!(views(&ours), views(&rewritten));
    let mut before = Checkpoint::open(folder.path()).unwrap();
    let weights = all_weights(&mut before);
    drop(before);
    fs::write(&path, rewritten).unwrap();
    assert_eq!(all_weights(&mut Checkpoint::open(folder.path()).unwrap()), weights);
}

fn flipped(folder: &Path, flips: &[(prop::sample::Index, u8)]) {
    let writer = tiny();
    writer.write(folder);
    let mut bytes = safetensors_bytes(&writer.tensors);
    for (index, value) in flips {
        let at = index.index(2600);
        bytes[at] = *value;
    }
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn flipped_bytes_are_refused_or_give_weights_but_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let folder = TempDir::new().unwrap();
        flipped(folder.path(), &flips);
        if let Ok(mut checkpoint) = Checkpoint::open(folder.path()) {
            all_weights(&mut checkpoint);
        }
    }
}
