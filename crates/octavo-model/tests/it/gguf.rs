//! Sound GGUF files, and sound ones that octavo cannot run.

use std::{fs, path::PathBuf};

use octavo_backend::{Activation, MlpSpec, RopeSpec, WeightFormat, WeightId, WeightSource};
use octavo_model::{Checkpoint, GgufVocabulary, ModelError, TokenizerSource};
use tempfile::TempDir;

use crate::support::{GgufWriter, TinyModel, all_weights, array_bytes, assert_refused, encode, refusal, text_bytes};

/// A file in a folder that goes away with it.
fn saved(writer: &GgufWriter) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("tiny.gguf");
    fs::write(&path, writer.finish()).unwrap();
    (folder, path)
}

fn opened(writer: &GgufWriter) -> Checkpoint {
    Checkpoint::open(&saved(writer).1).unwrap()
}

fn tiny() -> GgufWriter {
    TinyModel::tied().gguf(|_| WeightFormat::F32)
}

/// Fails unless `change` makes the tiny file refused in words that contain each of `parts`.
fn assert_change_refused(change: impl FnOnce(&mut GgufWriter) -> &mut GgufWriter, parts: &[&str]) {
    let mut writer = tiny();
    change(&mut writer);
    assert_refused(&saved(&writer).1, parts);
}

#[test]
fn weights_that_were_let_go_of_can_be_asked_for_again() {
    let (_folder, path) = saved(&TinyModel::tied().gguf(|_| WeightFormat::F32));
    let (mut checkpoint, mut untouched) = (Checkpoint::open(&path).unwrap(), Checkpoint::open(&path).unwrap());
    for id in [WeightId::Embedding, WeightId::Down(0), WeightId::Head] {
        checkpoint.release(id);
    }
    assert_eq!(all_weights(&mut checkpoint), all_weights(&mut untouched));
}

#[test]
fn a_file_becomes_the_spec_that_its_fields_describe() {
    let checkpoint = opened(&tiny());
    let config = checkpoint.config();
    assert_eq!((config.architecture.as_str(), config.name.as_deref()), ("llama", Some("Tiny")));
    assert_eq!((config.context_length, config.bos_token_id, &config.eos_token_ids[..]), (128, Some(1), &[2][..]));
    let spec = &config.spec;
    assert_eq!((spec.vocab_size, spec.hidden_size, spec.layers.len(), spec.embedding_scale), (40, 32, 2, 1.0));
    assert_eq!((spec.head.tied, spec.head.logit_scale, spec.head.norm.epsilon), (true, 1.0, 1e-5));
    let layer = &spec.layers[1];
    let attention = &layer.attention;
    assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_size), (4, 2, 8));
    assert_eq!((attention.scale, attention.window), (1.0 / 8f32.sqrt(), None));
    assert_eq!(attention.rope, RopeSpec::plain(10_000.0, 8));
    assert_eq!(layer.mlp, MlpSpec::Gated { intermediate_size: 64, activation: Activation::Silu });
}

#[test]
fn the_vocabulary_comes_out_as_it_was_written() {
    let checkpoint = opened(&tiny());
    assert_eq!(checkpoint.chat_template(), Some("{{ messages }}"));
    let expected = GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: "smollm".to_owned(),
        tokens: (0..40).map(|id| format!("token{id}")).collect(),
        token_types: [vec![3; 3], vec![1; 37]].concat(),
        merges: vec!["t o".to_owned(), "to ken".to_owned()],
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        eot_token_id: None,
        unknown_token_id: Some(0),
        padding_token_id: Some(2),
        add_bos: false,
        add_eos: false,
        add_space_prefix: false,
    };
    assert_eq!(checkpoint.tokenizer(), &TokenizerSource::Vocabulary(expected));
}

#[test]
fn a_file_without_tokens_is_a_model_without_a_tokenizer() {
    let mut writer = tiny();
    writer.remove("tokenizer.ggml.tokens");
    assert_eq!(opened(&writer).tokenizer(), &TokenizerSource::Missing);
}

#[test]
fn the_end_of_a_turn_ends_an_output_too() {
    let mut writer = tiny();
    writer.u32("tokenizer.ggml.eot_token_id", 1);
    assert_eq!(opened(&writer).config().eos_token_ids, [1, 2]);
}

#[test]
fn version_2_is_read_like_version_3_and_others_are_refused() {
    let mut writer = tiny();
    writer.version = Some(2);
    opened(&writer);
    for version in [0, 1, 4, 3u32.swap_bytes()] {
        writer.version = Some(version);
        assert_refused(&saved(&writer).1, &["tiny.gguf", "version", &version.to_string(), "2 or 3"]);
    }
}

#[test]
fn arrays_of_arrays_are_walked_over() {
    let inner = array_bytes(8, 2, &[text_bytes("a"), text_bytes("bc")].concat());
    let outer = array_bytes(9, 2, &[inner.clone(), inner].concat());
    opened(tiny().raw("vendor.matrix", 9, &outer));
    let mut nested = array_bytes(0, 1, &[7]);
    for _ in 0..200 {
        nested = array_bytes(9, 1, &nested);
    }
    assert_change_refused(|writer| writer.raw("vendor.deep", 9, &nested), &["vendor.deep", "nested"]);
}

#[test]
fn bytes_after_the_last_tensor_do_no_harm() {
    let (_folder, path) = saved(&tiny());
    let mut bytes = fs::read(&path).unwrap();
    bytes.extend([0; 31]);
    fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path).unwrap();
}

#[test]
fn an_output_matrix_unties_the_head() {
    let mut checkpoint = opened(&TinyModel::untied().gguf(|_| WeightFormat::F16));
    assert!(!checkpoint.config().spec.head.tied);
    let weights = all_weights(&mut checkpoint);
    let values = |id| &weights.iter().find(|(known, _)| *known == id).unwrap().1;
    assert_eq!(values(WeightId::Head).len(), 40 * 32);
    assert_ne!(values(WeightId::Head), values(WeightId::Embedding));
}

#[test]
fn a_tied_head_and_a_layer_too_many_are_no_weights() {
    let mut checkpoint = opened(&tiny());
    for id in [WeightId::Head, WeightId::Down(2)] {
        let message = checkpoint.weight(id).unwrap_err().to_string();
        assert!(message.contains("no such weight"), "{message}");
    }
}

#[test]
fn formats_belong_to_tensors() {
    let mut checkpoint = opened(&TinyModel::tied().gguf(|name| match name {
        "token_embd.weight" => WeightFormat::Q8_0,
        name if name.ends_with("norm.weight") => WeightFormat::F32,
        _ => WeightFormat::Q4_1,
    }));
    let layer = [(32 + 16 + 16 + 32) * 32, 3 * 64 * 32].iter().sum::<usize>();
    let expected =
        vec![(WeightFormat::Q4_1, 2 * layer / 32 * 20), (WeightFormat::Q8_0, 40 * 34), (WeightFormat::F32, 5 * 32 * 4)];
    assert_eq!(checkpoint.config().weight_formats, expected);
    assert_eq!(checkpoint.weight_bytes(), expected.iter().map(|(_, bytes)| bytes).sum::<usize>());
    all_weights(&mut checkpoint);
}

#[test]
fn other_tensor_types_are_refused_by_name() {
    assert_change_refused(
        |writer| {
            writer.remove_tensor("blk.1.ffn_up.weight").tensor_of_type(
                "blk.1.ffn_up.weight",
                &[64, 32],
                13,
                vec![0; 176 * 8],
            )
        },
        &["tiny.gguf", "blk.1.ffn_up.weight", "Q5_K", "F32, F16, BF16, Q8_0, Q6_K, Q4_K, Q4_0 or Q4_1"],
    );
}

#[test]
fn other_architectures_and_kinds_are_refused() {
    assert_change_refused(
        |writer| writer.text("general.architecture", "mamba"),
        &["general.architecture", "\"mamba\"", "\"llama\""],
    );
    assert_change_refused(|writer| writer.remove("general.architecture"), &["general.architecture", "nothing"]);
    assert_change_refused(|writer| writer.text("general.type", "adapter"), &["general.type", "\"adapter\""]);
    assert_change_refused(|writer| writer.raw("split.count", 2, &[3, 0]), &["split.count", "3"]);
    assert_change_refused(|writer| writer.u32("general.quantization_version", 1), &["quantization_version"]);
}

#[test]
fn fields_of_variants_are_refused_unless_they_are_neutral() {
    opened(tiny().u32("llama.expert_count", 0));
    opened(tiny().flag("llama.attention.causal", true));
    assert_change_refused(|writer| writer.u32("llama.expert_count", 8), &["llama.expert_count", "8"]);
    assert_change_refused(|writer| writer.flag("llama.attention.causal", false), &["llama.attention.causal"]);
    assert_change_refused(|writer| writer.f32("llama.residual_scale", 0.2), &["llama.residual_scale", "0.2"]);
    assert_change_refused(|writer| writer.text("llama.rope.scaling.type", "yarn"), &["\"yarn\"", "linear"]);
}

#[test]
fn dimensions_that_contradict_each_other_are_refused() {
    fn set(key: &str, value: u32) -> impl FnOnce(&mut GgufWriter) -> &mut GgufWriter {
        move |writer| writer.u32(key, value)
    }
    let kv = "llama.attention.head_count_kv";
    assert_change_refused(set(kv, 3), &[kv, "found 3", "4 query heads"]);
    assert_change_refused(set(kv, 0), &[kv, "found 0", "from 1"]);
    assert_change_refused(set("llama.attention.head_count", 5), &["head_count", "found 5", "32"]);
    assert_change_refused(set("llama.rope.dimension_count", 4), &["dimension_count", "4", "8"]);
    assert_change_refused(set("llama.attention.key_length", 7), &["7", "8"]);
    assert_change_refused(set("llama.block_count", u32::MAX), &["llama.block_count", "4294967295"]);
    assert_change_refused(set("llama.block_count", i32::MAX as u32), &["blk.2.attn_norm.weight", "not found"]);
    assert_change_refused(set("tokenizer.ggml.eos_token_id", 40), &["eos_token_id", "found 40", "below 40"]);
    assert_change_refused(set("llama.vocab_size", 39), &["39", "40"]);
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    assert_change_refused(|writer| writer.f32(epsilon, f32::NAN), &[epsilon, "NaN", "finite"]);
    assert_change_refused(|writer| writer.text("llama.block_count", "two"), &["llama.block_count", "\"two\""]);
}

#[test]
fn shapes_are_compared_with_the_dimensions() {
    let mut writer = tiny();
    writer.u32("llama.feed_forward_length", 96);
    match refusal(&saved(&writer).1) {
        ModelError::Shape { tensor, found, expected, .. } => {
            assert_eq!(tensor, "blk.0.ffn_gate.weight");
            assert_eq!((found.0, expected.0), (vec![64, 32], vec![96, 32]));
        }
        other => panic!("{other}"),
    }
    assert_change_refused(
        |writer| {
            writer.remove_tensor("output_norm.weight").tensor(
                "output_norm.weight",
                &[1, 32],
                WeightFormat::F32,
                vec![0; 128],
            )
        },
        &["output_norm.weight", "[1, 32]", "[32]"],
    );
}

#[test]
fn no_tensor_may_be_missing_or_left_over() {
    assert_change_refused(
        |writer| writer.remove_tensor("blk.1.attn_v.weight"),
        &["tiny.gguf", "blk.1.attn_v.weight", "not found"],
    );
    assert_change_refused(
        |writer| writer.tensor("blk.0.attn_q.bias", &[32], WeightFormat::F32, vec![0; 128]),
        &["tiny.gguf", "blk.0.attn_q.bias", "[32] in F32", "only tensors of a llama model"],
    );
    assert_change_refused(|writer| writer.u32("llama.block_count", 1), &["blk.1.", "with 1 layers"]);
}

#[test]
fn rope_factors_divide_the_frequencies() {
    let factors = [1.0f32, 1.5, 4.0, 8.0];
    let mut writer = tiny();
    writer.tensor("rope_freqs.weight", &[4], WeightFormat::F32, encode(&factors, WeightFormat::F32));
    let checkpoint = opened(&writer);
    let plain = RopeSpec::plain(10_000.0, 8).inverse_frequencies;
    let found = &checkpoint.config().spec.layers[0].attention.rope.inverse_frequencies;
    for ((found, plain), factor) in found.iter().zip(plain).zip(factors) {
        assert_eq!(*found, plain / f64::from(factor));
    }
    for bad in [0.0, f32::NAN, -1.0] {
        let factors = encode(&[1.0, bad, 1.0, 1.0], WeightFormat::F32);
        assert_change_refused(
            |writer| writer.tensor("rope_freqs.weight", &[4], WeightFormat::F32, factors),
            &["rope_freqs.weight", &format!("factor {bad}")],
        );
    }
}

#[test]
fn linear_scaling_is_read_from_either_key() {
    let plain = RopeSpec::plain(10_000.0, 8).inverse_frequencies;
    let halved: Vec<f64> = plain.iter().map(|frequency| frequency / 2.0).collect();
    let frequencies =
        |writer: &GgufWriter| opened(writer).config().spec.layers[0].attention.rope.inverse_frequencies.clone();
    let new = frequencies(tiny().text("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 2.0));
    assert_eq!(new, halved);
    assert_eq!(frequencies(tiny().f32("llama.rope.scale_linear", 2.0)), halved);
    assert_eq!(frequencies(tiny().text("llama.rope.scaling.type", "none")), plain);
}
