//! GGUF files that are cut short or lie: each must be an ordinary error, found in time and memory of the file's size.

use std::{
    fs::{self, File},
    path::Path,
    time::{Duration, Instant},
};

use octavo_backend::WeightFormat;
use octavo_model::{Checkpoint, ModelError};
use proptest::prelude::*;
use tempfile::{NamedTempFile, TempDir};

use crate::support::{GgufWriter, TinyModel, all_weights, array_bytes, assert_refused, refusal};

fn tiny() -> GgufWriter {
    TinyModel::tied().gguf(|name| match name {
        "token_embd.weight" => WeightFormat::Q8_0,
        name if name.ends_with("norm.weight") => WeightFormat::F32,
        _ => WeightFormat::Q4_0,
    })
}

/// Fails unless the file is refused, soon, in words that contain each of `parts`.
fn assert_bytes_refused(bytes: &[u8], parts: &[&str]) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("damaged.gguf");
    fs::write(&path, bytes).unwrap();
    let start = Instant::now();
    assert_refused(&path, parts);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn every_prefix_of_a_file_is_refused_with_both_sizes() {
    let bytes = tiny().finish();
    let file = NamedTempFile::new().unwrap();
    fs::write(file.path(), &bytes).unwrap();
    Checkpoint::open(file.path()).unwrap();
    let handle = File::options().write(true).open(file.path()).unwrap();
    for length in (0..bytes.len()).rev() {
        handle.set_len(length as u64).unwrap();
        match refusal(file.path()) {
            ModelError::Truncated { file: named, found, expected, .. } => {
                assert_eq!(named, file.path());
                assert!(found < expected, "{length}: {found} {expected}");
            }
            other => panic!("{length}: {other}"),
        }
    }
}

#[test]
fn a_cut_among_the_weights_names_the_tensor_and_the_sizes() {
    let bytes = tiny().finish();
    let (found, expected) = (format!("found {} bytes", bytes.len() - 1), format!("expected {}", bytes.len()));
    assert_bytes_refused(&bytes[..bytes.len() - 1], &["damaged.gguf", "blk.1.ffn_down.weight", &found, &expected]);
}

#[test]
fn an_offset_beyond_the_file_names_the_tensor() {
    for offset in [(1u64 << 63) - 1, u64::MAX, u64::MAX - 31, 1 << 20] {
        let mut writer = tiny();
        writer.offsets.push(("blk.0.attn_k.weight".to_owned(), offset));
        assert_bytes_refused(&writer.finish(), &["damaged.gguf", "blk.0.attn_k.weight", &offset.to_string(), "size"]);
    }
}

#[test]
fn tensors_may_neither_overlap_nor_be_misaligned() {
    for (offset, word) in [(0, "ends"), (1, "multiple of 32")] {
        let mut writer = tiny();
        writer.offsets.push(("output_norm.weight".to_owned(), offset));
        assert_bytes_refused(&writer.finish(), &["damaged.gguf", word]);
    }
}

#[test]
fn a_field_or_tensor_may_not_appear_twice() {
    assert_bytes_refused(&tiny().u32("vendor.x", 1).repeat_last_field().finish(), &["vendor.x", "twice"]);
    let norm = vec![0; 128];
    let writer = tiny().tensor("output_norm.weight", &[32], WeightFormat::F32, norm).finish();
    assert_bytes_refused(&writer, &["output_norm.weight", "twice"]);
}

#[test]
fn counts_that_lie_cost_nothing() {
    for count in [1 << 40, 1 << 63, u64::MAX, 200] {
        let mut fields = tiny();
        fields.num_fields = Some(count);
        assert_bytes_refused(&fields.finish(), &["damaged.gguf"]);
        let mut tensors = tiny();
        tensors.num_tensors = Some(count);
        assert_bytes_refused(&tensors.finish(), &["damaged.gguf"]);
    }
}

#[test]
fn lengths_that_lie_cost_nothing() {
    for count in [1u64 << 40, 1 << 63, u64::MAX] {
        for kind in [0, 4, 5, 7, 8, 9, 10, 12] {
            let array = array_bytes(kind, count, &[0; 64]);
            assert_bytes_refused(&tiny().raw("vendor.list", 9, &array).finish(), &["damaged.gguf", "vendor.list"]);
        }
        let text = count.to_le_bytes();
        assert_bytes_refused(&tiny().raw("vendor.text", 8, &text).finish(), &["damaged.gguf", "vendor.text"]);
    }
}

#[test]
fn tensor_shapes_that_lie_cost_nothing() {
    let shapes: [&[usize]; 6] =
        [&[1 << 62, 32], &[usize::MAX, usize::MAX], &[1 << 40], &[0, 32], &[32, 0], &[1 << 31, 1 << 31, 1 << 31, 32]];
    for shape in shapes {
        let bytes = tiny().tensor("vendor.huge", shape, WeightFormat::F32, Vec::new()).finish();
        assert_bytes_refused(&bytes, &["damaged.gguf", "vendor.huge"]);
    }
    let partial = tiny().tensor("vendor.odd", &[2, 33], WeightFormat::Q8_0, vec![0; 68]).finish();
    assert_bytes_refused(&partial, &["vendor.odd", "whole blocks"]);
    for shape in [&[][..], &[1, 1, 1, 1, 1]] {
        let bytes = tiny().tensor("vendor.flat", shape, WeightFormat::F32, vec![0; 4]).finish();
        assert_bytes_refused(&bytes, &["vendor.flat", "dimensions"]);
    }
}

#[test]
fn values_that_no_writer_makes_are_refused() {
    assert_bytes_refused(&tiny().raw("vendor.flag", 7, &[2]).finish(), &["vendor.flag", "boolean"]);
    assert_bytes_refused(&tiny().raw("vendor.kind", 13, &[0; 8]).finish(), &["vendor.kind", "type 13"]);
    let text = [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat();
    assert_bytes_refused(&tiny().raw("vendor.text", 8, &text).finish(), &["vendor.text", "UTF-8"]);
    for alignment in [0, 12] {
        assert_bytes_refused(&tiny().u32("general.alignment", alignment).finish(), &["general.alignment"]);
    }
}

#[test]
fn what_is_no_checkpoint_is_said_to_be_none() {
    assert_bytes_refused(b"PK\x03\x04 and so on", &["damaged.gguf", "magic", "GGUF"]);
    assert_bytes_refused(b"", &["damaged.gguf", "found 0 bytes"]);
    match refusal(Path::new("/nowhere/at/all.gguf")) {
        ModelError::NotFound { path, .. } => assert_eq!(path, Path::new("/nowhere/at/all.gguf")),
        other => panic!("{other}"),
    }
    assert_refused(Path::new("/dev/zero"), &["/dev/zero", "regular file"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The header is most of what is parsed, so most flips go there.
    #[test]
    fn flipped_bytes_are_refused_or_give_weights_but_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), prop::bool::weighted(0.9)), 1..6),
    ) {
        let mut bytes = tiny().finish();
        for (index, value, in_header) in flips {
            let at = index.index(if in_header { 3400 } else { bytes.len() });
            bytes[at] = value;
        }
        let file = NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        if let Ok(mut checkpoint) = Checkpoint::open(file.path()) {
            all_weights(&mut checkpoint);
        }
    }
}
