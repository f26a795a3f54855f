//! Hugging Face folders.

use std::fs;

use octavo_backend::{WeightFormat, WeightId};
use octavo_model::{Checkpoint, GenerationDefaults, TokenizerSource};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{FolderWriter, TinyModel, all_weights, assert_refused, log_lines_with};

fn tiny() -> FolderWriter {
    TinyModel::tied().folder(WeightFormat::F32)
}

fn opened(writer: &FolderWriter) -> Checkpoint {
    let folder = TempDir::new().unwrap();
    writer.write(folder.path());
    Checkpoint::open(folder.path()).unwrap()
}

/// Fails unless the tiny folder with this field in its `config.json` is refused in words that contain each of `parts`.
fn assert_field_refused(field: &str, value: Value, parts: &[&str]) {
    let folder = TempDir::new().unwrap();
    let mut writer = tiny();
    writer.config[field] = value;
    writer.write(folder.path());
    assert_refused(folder.path(), &[&["config.json", field], parts].concat());
}

#[test]
fn one_model_is_the_same_in_a_folder_and_in_a_gguf_file() {
    for model in [TinyModel::tied(), TinyModel::untied()] {
        for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16] {
            let mut from_folder = opened(&model.folder(format));
            let gguf = tempfile::NamedTempFile::new().unwrap();
            fs::write(gguf.path(), model.gguf(|_| format).finish()).unwrap();
            let mut from_gguf = Checkpoint::open(gguf.path()).unwrap();
            assert_eq!(from_folder.config().spec, from_gguf.config().spec);
            assert_eq!(from_folder.config().eos_token_ids, from_gguf.config().eos_token_ids);
            assert_eq!(from_folder.weight_bytes(), from_gguf.weight_bytes());
            assert_eq!(all_weights(&mut from_folder), all_weights(&mut from_gguf));
        }
    }
}

#[test]
fn weights_have_the_shapes_that_the_spec_asks_for() {
    let mut checkpoint = opened(&TinyModel::untied().folder(WeightFormat::Bf16));
    let sizes: Vec<usize> = all_weights(&mut checkpoint).iter().map(|(_, values)| values.len()).take(9).collect();
    assert_eq!(sizes, [40 * 32, 32, 40 * 32, 32, 64 * 32, 32 * 32, 32, 128 * 32, 32 * 64]);
}

#[test]
fn text_files_are_optional() {
    let checkpoint = opened(&tiny());
    assert_eq!(checkpoint.tokenizer(), &TokenizerSource::Missing);
    assert_eq!(checkpoint.chat_template(), None);
    assert_eq!(checkpoint.config().generation, GenerationDefaults::default());
}

#[test]
fn the_tokenizer_is_handed_on_as_a_path() {
    let folder = TempDir::new().unwrap();
    tiny().write(folder.path());
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, "{}").unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tokenizer(), &TokenizerSource::File(path));
}

#[test]
fn the_chat_template_is_found_in_each_of_its_places() {
    let folder = TempDir::new().unwrap();
    tiny().write(folder.path());
    let template = || Checkpoint::open(folder.path()).unwrap().chat_template().map(str::to_owned);
    let write = |template: Value| {
        let text = json!({"chat_template": template}).to_string();
        fs::write(folder.path().join("tokenizer_config.json"), text).unwrap();
    };
    write(json!("plain"));
    assert_eq!(template().as_deref(), Some("plain"));
    write(json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "first"}]));
    assert_eq!(template().as_deref(), Some("first"));
    write(Value::Null);
    assert_eq!(template(), None);
    write(json!([{"name": "tool_use", "template": "tools"}]));
    assert_refused(folder.path(), &["tokenizer_config.json", "chat_template", "default"]);
    write(json!("plain"));
    fs::write(folder.path().join("chat_template.jinja"), "of its own").unwrap();
    assert_eq!(template().as_deref(), Some("of its own"));
}

#[test]
fn both_configurations_name_tokens_that_end_an_output() {
    let folder = TempDir::new().unwrap();
    tiny().write(folder.path());
    let generation = json!({
        "eos_token_id": [7, 2, 5], "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_length": 4
    });
    fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config().eos_token_ids, [2, 5, 7]);
    let expected = GenerationDefaults {
        do_sample: Some(true),
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.9),
        min_p: None,
        repetition_penalty: None,
    };
    assert_eq!(checkpoint.config().generation, expected);
}

#[test]
fn a_tied_head_may_be_stored_again_but_not_differently() {
    let mut writer = tiny();
    let mut head = writer.tensors[0].clone();
    head.name = "lm_head.weight".to_owned();
    writer.tensors.push(head);
    let mut checkpoint = opened(&writer);
    assert!(checkpoint.config().spec.head.tied);
    assert!(all_weights(&mut checkpoint).iter().all(|(id, _)| *id != WeightId::Head));
    writer.tensors.last_mut().unwrap().bytes[0] ^= 1;
    let folder = TempDir::new().unwrap();
    writer.write(folder.path());
    assert_refused(folder.path(), &["lm_head.weight", "differ", "ties"]);
}

#[test]
fn an_untied_head_must_be_there() {
    let mut writer = tiny();
    writer.config["tie_word_embeddings"] = json!(false);
    let folder = TempDir::new().unwrap();
    writer.write(folder.path());
    assert_refused(folder.path(), &["lm_head.weight", "not found"]);
}

#[test]
fn stored_rotary_frequencies_are_passed_over_in_layers_that_exist() {
    let mut writer = tiny();
    let mut add = |layer: usize| {
        let mut frequencies = writer.tensors[1].clone();
        frequencies.name = format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq");
        writer.tensors.push(frequencies);
        writer.clone()
    };
    opened(&add(0));
    let folder = TempDir::new().unwrap();
    add(2).write(folder.path());
    assert_refused(folder.path(), &["model.layers.2.self_attn.rotary_emb.inv_freq", "2 layers"]);
}

#[test]
fn a_head_size_of_its_own_is_honoured() {
    let mut model = TinyModel::tied();
    model.sizes.head = 16;
    let mut writer = model.folder(WeightFormat::F16);
    writer.config["head_dim"] = json!(16);
    let checkpoint = opened(&writer);
    let attention = &checkpoint.config().spec.layers[0].attention;
    assert_eq!((attention.head_size, attention.scale, attention.rope.inverse_frequencies.len()), (16, 0.25, 8));
}

#[test]
fn configurations_of_other_arithmetic_are_refused_by_field() {
    assert_field_refused("model_type", json!("qwen2"), &["qwen2", "llama"]);
    assert_field_refused("architectures", json!(["LlamaForSequenceClassification"]), &["LlamaForCausalLM"]);
    assert_field_refused("hidden_act", json!("gelu"), &["gelu", "silu"]);
    assert_field_refused("attention_bias", json!(true), &["true", "false"]);
    assert_field_refused("mlp_bias", json!(true), &["true", "false"]);
    assert_field_refused("rope_interleaved", json!(true), &["true"]);
    assert_field_refused("sliding_window", json!(4096), &["4096"]);
    assert_field_refused("partial_rotary_factor", json!(0.5), &["0.5"]);
}

#[test]
fn configurations_with_impossible_values_are_refused_by_field() {
    for value in [json!(0), json!(-1), json!("32"), json!(32.5), json!(1u64 << 40), json!(null), json!([32])] {
        assert_field_refused("hidden_size", value, &["expected"]);
    }
    assert_field_refused("num_key_value_heads", json!(3), &["found 3", "4 query heads"]);
    assert_field_refused("num_attention_heads", json!(5), &["found 5", "32"]);
    assert_field_refused("head_dim", json!(9), &["found 9", "even"]);
    assert_field_refused("rms_norm_eps", json!(-0.1), &["-0.1"]);
    assert_field_refused("eos_token_id", json!(40), &["below 40"]);
    assert_field_refused("eos_token_id", json!([2, -1]), &["below 40"]);
    assert_field_refused("tie_word_embeddings", json!("yes"), &["boolean"]);
}

#[test]
fn fields_that_nobody_knows_are_named_in_the_log() {
    let folder = TempDir::new().unwrap();
    let mut writer = tiny();
    writer.config["vendor_magic"] = json!(3);
    writer.write(folder.path());
    let lines = log_lines_with(folder.path().to_str().unwrap(), || {
        Checkpoint::open(folder.path()).unwrap();
    });
    assert!(lines.iter().any(|line| line.contains("vendor_magic") && !line.contains("torch_dtype")), "{lines:?}");
}

#[test]
fn files_that_are_no_configuration_are_refused() {
    let folder = TempDir::new().unwrap();
    assert_refused(folder.path(), &["config.json", "not found"]);
    tiny().write(folder.path());
    let path = folder.path().join("config.json");
    for content in ["", "[]", "{\"a\": ", "\u{feff}{}", "nonsense"] {
        fs::write(&path, content).unwrap();
        assert_refused(folder.path(), &["config.json", "a JSON object"]);
    }
    fs::write(&path, [0xff, 0xfe]).unwrap();
    assert_refused(folder.path(), &["config.json", "UTF-8"]);
    fs::write(&path, "[".repeat(1_000_000)).unwrap();
    assert_refused(folder.path(), &["config.json"]);
    fs::write(&path, " ".repeat((16 << 20) + 1)).unwrap();
    assert_refused(folder.path(), &["config.json", "longer", "at most"]);
}
