//! The spellings of rotary embeddings in `config.json`.

use octavo_backend::WeightFormat;
use octavo_model::Checkpoint;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{TinyModel, assert_refused, log_lines_with};

/// A tiny folder whose `config.json` has these fields in place of `rope_theta`.
fn folder_with(fields: Value) -> TempDir {
    let mut writer = TinyModel::tied().folder(WeightFormat::F32);
    let config = writer.config.as_object_mut().unwrap();
    config.remove("rope_theta");
    config.extend(fields.as_object().unwrap().clone());
    let folder = TempDir::new().unwrap();
    writer.write(folder.path());
    folder
}

fn frequencies(fields: Value) -> Vec<f64> {
    let folder = folder_with(fields);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    checkpoint.config().spec.layers[1].attention.rope.inverse_frequencies.clone()
}

/// `theta^(-2i / 8)`, by roots instead of powers.
fn expected(theta: f64) -> [f64; 4] {
    let root = theta.sqrt().sqrt();
    [1.0, 1.0 / root, 1.0 / (root * root), 1.0 / (root * root * root)]
}

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-14, "{found} {expected}");
    }
}

#[test]
fn theta_is_found_in_both_places() {
    let top = frequencies(json!({"rope_theta": 500000.0}));
    assert_close(&top, &expected(500_000.0));
    assert_eq!(frequencies(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})), top);
    assert_eq!(frequencies(json!({"rope_parameters": {"rope_theta": 500000}, "rope_theta": 500000})), top);
    assert_eq!(frequencies(json!({"rope_theta": 500000, "rope_scaling": null})), top);
}

#[test]
fn an_absent_theta_is_ten_thousand_with_a_notice() {
    assert_close(&frequencies(json!({})), &expected(10_000.0));
    let folder = folder_with(json!({"rope_parameters": {"rope_type": "default"}}));
    let lines = log_lines_with(folder.path().to_str().unwrap(), || {
        Checkpoint::open(folder.path()).unwrap();
    });
    assert!(lines.iter().any(|line| line.contains("rope_theta is absent") && line.contains("10000")), "{lines:?}");
}

#[test]
fn both_spellings_of_linear_scaling_are_equal() {
    let old = frequencies(json!({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2}}));
    let halved: Vec<f64> = expected(500_000.0).iter().map(|frequency| frequency / 2.0).collect();
    assert_close(&old, &halved);
    let renamed = json!({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}});
    assert_eq!(frequencies(renamed), old);
    let new = json!({"rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0}});
    assert_eq!(frequencies(new), old);
    let twice = json!({
        "rope_scaling": {"type": "linear", "factor": 2},
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0}
    });
    assert_eq!(frequencies(twice), old);
}

#[test]
fn llama3_scaling_keeps_the_first_pair_and_divides_the_last() {
    let rule = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let found = frequencies(json!({"rope_theta": 500000.0, "rope_scaling": rule}));
    let plain = expected(500_000.0);
    // Wavelengths 6, 167, 4443 and 118143: the third turns 1.84 times in 8192 positions, between 1 and 4.
    let kept = (8192.0 * plain[2] / std::f64::consts::TAU - 1.0) / 3.0;
    let third = kept * plain[2] + (1.0 - kept) * plain[2] / 8.0;
    assert_close(&found, &[plain[0], plain[1], third, plain[3] / 8.0]);
}

#[test]
fn values_that_disagree_are_refused() {
    let refused = |fields: Value, parts: &[&str]| assert_refused(folder_with(fields).path(), parts);
    refused(json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}), &["rope_parameters.rope_theta"]);
    refused(
        json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}}),
        &["rope_scaling"],
    );
    refused(json!({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2}}), &["rope_scaling.type"]);
}

#[test]
fn unknown_rules_and_fields_are_refused_by_name() {
    let refused = |fields: Value, parts: &[&str]| assert_refused(folder_with(fields).path(), parts);
    refused(json!({"rope_scaling": {"type": "dynamic", "factor": 2}}), &["config.json", "rope_type", "dynamic"]);
    refused(json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}), &["yarn"]);
    refused(json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), &["full_attention"]);
    refused(json!({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 2]}}), &["mrope_section"]);
    refused(json!({"rope_scaling": {"type": "linear"}}), &["rope_scaling.factor", "nothing"]);
    refused(json!({"rope_scaling": {"type": "linear", "factor": 0}}), &["factor", "above 0"]);
    refused(json!({"rope_theta": -1}), &["rope_theta", "above 0"]);
    refused(json!({"rope_scaling": "linear"}), &["rope_scaling", "an object"]);
}
