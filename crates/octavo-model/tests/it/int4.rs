//! Folders whose matrices are packed by AWQ, GPTQ and compressed-tensors.

use half::{bf16, f16};
use octavo_backend::{WeightFormat, WeightGroup, WeightId, WeightSource};
use octavo_model::Checkpoint;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{FolderWriter, Stored, TinyModel, all_weights, assert_refused, log_lines_with};

/// How a test packs a matrix.
#[derive(Debug, Clone, Copy)]
struct Packer {
    method: Method,
    group_size: usize,
    scales: WeightFormat,
    /// Groups take turns from input to input.
    interleaved: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Method {
    Awq,
    Gptq,
    GptqV2,
    PackSymmetric,
    PackAsymmetric,
}

const METHODS: [Method; 5] = [Method::Awq, Method::Gptq, Method::GptqV2, Method::PackSymmetric, Method::PackAsymmetric];

fn packer(method: Method, group_size: usize) -> Packer {
    Packer { method, group_size, scales: WeightFormat::F16, interleaved: false }
}

fn code(row: usize, column: usize) -> u32 {
    ((row * 5 + column * 7 + row * column) % 16) as u32
}

fn scale(row: usize, group: usize) -> f32 {
    (1.0 + ((row * 3 + group * 11) % 29) as f32) / 512.0 * if row.is_multiple_of(3) { -1.0 } else { 1.0 }
}

impl Packer {
    /// Every value that the method can store, 0 and 15 included.
    fn zero(&self, row: usize, group: usize) -> u32 {
        let stored = ((row * 13 + group * 5) % 16) as u32;
        match self.method {
            Method::PackSymmetric => 8,
            Method::Gptq => stored + 1,
            _ => stored,
        }
    }

    fn group(&self, column: usize, columns: usize) -> usize {
        if self.interleaved { column % (columns / self.group_size) } else { column / self.group_size }
    }

    fn value(&self, row: usize, column: usize, columns: usize) -> f32 {
        let group = self.group(column, columns);
        (code(row, column) as f32 - self.zero(row, group) as f32) * scale(row, group)
    }

    fn quantization(&self) -> Value {
        let group_size = self.group_size;
        match self.method {
            Method::Awq => json!({
                "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "GEMM", "zero_point": true,
                "modules_to_not_convert": null,
            }),
            Method::Gptq => json!({
                "quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": self.interleaved, "sym": false,
            }),
            Method::GptqV2 => json!({
                "quant_method": "gptq", "bits": 4, "group_size": group_size, "checkpoint_format": "gptq_v2",
            }),
            Method::PackSymmetric | Method::PackAsymmetric => json!({
                "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {
                    "targets": ["Linear"], "input_activations": null,
                    "weights": {
                        "num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size,
                        "symmetric": self.method == Method::PackSymmetric,
                    },
                }},
            }),
        }
    }

    /// The tensors that a matrix of the folder becomes.
    fn pack(&self, name: &str, rows: usize, columns: usize) -> Vec<Stored> {
        let module = name.strip_suffix(".weight").unwrap();
        let groups = columns / self.group_size;
        let tensor = |suffix: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>| Stored {
            name: format!("{module}{suffix}"),
            shape: shape.to_vec(),
            dtype,
            bytes,
        };
        // Eight numbers of four bits, the first in the lowest bits.
        let word = |nibbles: [u32; 8]| nibbles.iter().rev().fold(0u32, |word, nibble| word << 4 | nibble).to_le_bytes();
        let eight = |at: usize, of: &dyn Fn(usize) -> u32| word(std::array::from_fn(|i| of(8 * at + i)));
        // AWQ's order of outputs within a word, lowest bits first.
        let awq = |at: usize, of: &dyn Fn(usize) -> u32| word([0, 2, 4, 6, 1, 3, 5, 7].map(|i| of(8 * at + i)));
        let grid = |outer: usize, inner: usize, bytes: &dyn Fn(usize, usize) -> Vec<u8>| -> Vec<u8> {
            (0..outer).flat_map(|at| (0..inner).flat_map(move |inner| bytes(at, inner)).collect::<Vec<u8>>()).collect()
        };
        let (dtype, number): (_, fn(f32) -> Vec<u8>) = match self.scales {
            WeightFormat::F16 => ("F16", |value| f16::from_f32(value).to_le_bytes().to_vec()),
            WeightFormat::Bf16 => ("BF16", |value| bf16::from_f32(value).to_le_bytes().to_vec()),
            _ => ("F32", |value| value.to_le_bytes().to_vec()),
        };
        let columns_of_groups =
            || tensor(".scales", dtype, &[groups, rows], grid(groups, rows, &|group, row| number(scale(row, group))));
        match self.method {
            Method::Awq => vec![
                tensor(
                    ".qweight",
                    "I32",
                    &[columns, rows / 8],
                    grid(columns, rows / 8, &|column, at| awq(at, &|row| code(row, column)).to_vec()),
                ),
                tensor(
                    ".qzeros",
                    "I32",
                    &[groups, rows / 8],
                    grid(groups, rows / 8, &|group, at| awq(at, &|row| self.zero(row, group)).to_vec()),
                ),
                columns_of_groups(),
            ],
            Method::Gptq | Method::GptqV2 => {
                let offset = u32::from(self.method == Method::Gptq);
                let order = (0..columns).flat_map(|column| (self.group(column, columns) as u32).to_le_bytes());
                vec![
                    tensor(
                        ".qweight",
                        "I32",
                        &[columns / 8, rows],
                        grid(columns / 8, rows, &|at, row| eight(at, &|column| code(row, column)).to_vec()),
                    ),
                    tensor(
                        ".qzeros",
                        "I32",
                        &[groups, rows / 8],
                        grid(groups, rows / 8, &|group, at| eight(at, &|row| self.zero(row, group) - offset).to_vec()),
                    ),
                    columns_of_groups(),
                    tensor(".g_idx", "I32", &[columns], order.collect()),
                    tensor(".bias", "F16", &[rows], vec![0; 2 * rows]),
                ]
            }
            Method::PackSymmetric | Method::PackAsymmetric => {
                let shape = [rows as u64, columns as u64].iter().flat_map(|size| size.to_le_bytes()).collect();
                let mut tensors = vec![
                    tensor(
                        ".weight_packed",
                        "I32",
                        &[rows, columns / 8],
                        grid(rows, columns / 8, &|row, at| eight(at, &|column| code(row, column)).to_vec()),
                    ),
                    tensor(
                        ".weight_scale",
                        dtype,
                        &[rows, groups],
                        grid(rows, groups, &|row, group| number(scale(row, group))),
                    ),
                    tensor(".weight_shape", "I64", &[2], shape),
                ];
                if self.method == Method::PackAsymmetric {
                    let zeros = grid(rows / 8, groups, &|at, group| eight(at, &|row| self.zero(row, group)).to_vec());
                    tensors.push(tensor(".weight_zero_point", "I32", &[rows / 8, groups], zeros));
                }
                tensors
            }
        }
    }

    /// The tiny model with all projections packed but those with one of `dense` in their names, and the same with the
    /// values that the packed ones stand for.
    fn folders(&self, dense: &[&str]) -> (FolderWriter, FolderWriter) {
        let mut packed = TinyModel::untied().folder(WeightFormat::F32);
        let mut plain = packed.clone();
        packed.config["quantization_config"] = self.quantization();
        packed.tensors.clear();
        for tensor in &mut plain.tensors {
            if !tensor.name.contains("_proj") || dense.iter().any(|part| tensor.name.contains(part)) {
                packed.tensors.push(tensor.clone());
                continue;
            }
            let (rows, columns) = (tensor.shape[0], tensor.shape[1]);
            packed.tensors.extend(self.pack(&tensor.name, rows, columns));
            let values = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
            tensor.bytes = values.flat_map(|(row, column)| self.value(row, column, columns).to_le_bytes()).collect();
        }
        (packed, plain)
    }
}

fn opened(writer: &FolderWriter) -> Checkpoint {
    let folder = TempDir::new().unwrap();
    writer.write(folder.path());
    Checkpoint::open(folder.path()).unwrap()
}

fn refused(writer: &FolderWriter, parts: &[&str]) {
    let folder = TempDir::new().unwrap();
    writer.write(folder.path());
    assert_refused(folder.path(), parts);
}

/// The formats of the attention's output and of the MLP's second matrix in the first layer.
fn formats(checkpoint: &mut Checkpoint) -> [WeightFormat; 2] {
    [WeightId::AttentionOutput(0), WeightId::Down(0)].map(|id| match checkpoint.weight(id).unwrap() {
        WeightGroup::Matrices(parts) => parts[0].data.format,
        WeightGroup::Vector(_) => panic!("{id} is a vector"),
    })
}

#[test]
fn codes_minus_zero_points_times_scales_come_out_exactly() {
    for method in METHODS {
        let (packed, plain) = packer(method, 32).folders(&[]);
        let (mut packed, mut plain) = (opened(&packed), opened(&plain));
        assert_eq!(formats(&mut packed), [WeightFormat::Int4Group32; 2], "{method:?}");
        assert!(all_weights(&mut packed) == all_weights(&mut plain), "{method:?}");
        assert_eq!(packed.config().spec, plain.config().spec);
        assert!(packed.weight_bytes() < plain.weight_bytes() / 2);
    }
}

#[test]
fn a_group_may_be_a_whole_row() {
    for method in [Method::Awq, Method::Gptq, Method::PackSymmetric] {
        let by_rows = packer(method, 64);
        let (mut packed, plain) = by_rows.folders(&["q_proj", "k_proj", "v_proj", "o_proj", "gate", "up"]);
        match method {
            Method::PackSymmetric => {
                let weights = &mut packed.config["quantization_config"]["config_groups"]["group_0"]["weights"];
                weights["strategy"] = json!("channel");
                weights["group_size"] = json!(null);
            }
            _ => packed.config["quantization_config"]["group_size"] = json!(-1),
        }
        let mut packed = opened(&packed);
        assert_eq!(formats(&mut packed), [WeightFormat::F32, WeightFormat::Int4Group64]);
        assert!(all_weights(&mut packed) == all_weights(&mut opened(&plain)), "{method:?}");
    }
}

#[test]
fn what_no_int4_format_holds_becomes_32_bit_numbers_of_the_same_value_and_is_said() {
    let small_groups = packer(Method::PackAsymmetric, 16);
    let taking_turns = Packer { interleaved: true, ..packer(Method::Gptq, 32) };
    let odd_scales = Packer { scales: WeightFormat::F32, ..packer(Method::Awq, 32) };
    for (packer, down) in [
        (small_groups, WeightFormat::F32),
        (taking_turns, WeightFormat::F32),
        (odd_scales, WeightFormat::Int4Group32),
        (Packer { scales: WeightFormat::Bf16, ..packer(Method::PackSymmetric, 32) }, WeightFormat::Int4Group32),
    ] {
        let (packed, plain) = packer.folders(&[]);
        let folder = TempDir::new().unwrap();
        packed.write(folder.path());
        let lines = log_lines_with(&folder.path().display().to_string(), || {
            let mut packed = Checkpoint::open(folder.path()).unwrap();
            assert_eq!(formats(&mut packed)[1], down, "{packer:?}");
            assert!(all_weights(&mut packed) == all_weights(&mut opened(&plain)), "{packer:?}");
        });
        let said = "int4 matrices, the first model.layers.0.mlp.down_proj.weight";
        assert_eq!(lines.iter().any(|line| line.contains(said)), down == WeightFormat::F32, "{packer:?}: {lines:?}");
    }
}

#[test]
fn scales_beyond_half_precision_are_kept() {
    let (mut packed, _) = packer(Method::Awq, 32).folders(&[]);
    let name = "model.layers.1.mlp.down_proj.scales";
    let scales = packed.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
    scales.dtype = "F32";
    scales.bytes = vec![1e-9f32; 2 * 32].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let mut checkpoint = opened(&packed);
    let WeightGroup::Matrices(parts) = checkpoint.weight(WeightId::Down(1)).unwrap() else { panic!("a vector") };
    assert_eq!(parts[0].data.format, WeightFormat::F32);
    let mut row = vec![0.0; 64];
    parts[0].dequantize_row(5, &mut row);
    assert_eq!(row[3], (code(5, 3) as f32 - packer(Method::Awq, 32).zero(5, 0) as f32) * 1e-9);
}

#[test]
fn modules_that_were_not_converted_load_as_they_are_whatever_the_list_says() {
    for method in METHODS {
        let (mut packed, plain) = packer(method, 32).folders(&["layers.1.mlp.down_proj"]);
        let expected = all_weights(&mut opened(&plain));
        for list in [json!(["lm_head", "model.layers.1.mlp.down_proj"]), json!(["lm_head", "down_proj"]), json!(null)] {
            let field = if method == Method::Awq { "modules_to_not_convert" } else { "ignore" };
            packed.config["quantization_config"][field] = list;
            assert!(all_weights(&mut opened(&packed)) == expected, "{method:?}");
        }
    }
}

#[test]
fn older_writers_keep_the_configuration_in_a_file_of_its_own() {
    for (method, name) in [(Method::Awq, "quant_config.json"), (Method::Gptq, "quantize_config.json")] {
        let (mut packed, plain) = packer(method, 32).folders(&[]);
        packed.config.as_object_mut().unwrap().remove("quantization_config");
        let text = match method {
            Method::Awq => json!({"w_bit": 4, "q_group_size": 32, "zero_point": true, "version": "GEMM"}),
            _ => json!({"bits": 4, "group_size": 32, "desc_act": false, "sym": true}),
        };
        let folder = TempDir::new().unwrap();
        packed.write(folder.path());
        assert_refused(folder.path(), &["dtype: found I32", "no quantization_config"]);
        std::fs::write(folder.path().join(name), text.to_string()).unwrap();
        let mut checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert!(all_weights(&mut checkpoint) == all_weights(&mut opened(&plain)), "{method:?}");
    }
}

#[test]
fn configurations_that_are_not_read_are_refused_by_field() {
    let changed = |method: Method, field: &str, value: Value, parts: &[&str]| {
        let (mut packed, _) = packer(method, 32).folders(&[]);
        *packed.config["quantization_config"].pointer_mut(field).unwrap_or(&mut Value::Null) = value.clone();
        if packed.config["quantization_config"].pointer(field).is_none() {
            packed.config["quantization_config"][&field[1..]] = value;
        }
        refused(&packed, &[&["config.json", "quantization_config."], parts].concat());
    };
    changed(Method::Awq, "/quant_method", json!("bitsandbytes"), &["quant_method", "bitsandbytes", "\"awq\""]);
    changed(Method::Awq, "/bits", json!(8), &["bits", "found 8", "expected 4"]);
    changed(Method::Awq, "/version", json!("gemv"), &["version", "gemv", "gemm"]);
    changed(Method::Awq, "/zero_point", json!(false), &["zero_point", "false"]);
    changed(Method::Awq, "/group_size", json!(0), &["group_size", "found 0"]);
    changed(Method::Gptq, "/bits", json!(3), &["bits", "found 3"]);
    changed(Method::Gptq, "/dynamic", json!({"-:.*down.*": {}}), &["dynamic", "single modules"]);
    changed(Method::Gptq, "/checkpoint_format", json!("marlin"), &["checkpoint_format", "marlin"]);
    changed(Method::PackSymmetric, "/format", json!("int-quantized"), &["format", "int-quantized"]);
    let weights = "/config_groups/group_0/weights";
    changed(Method::PackSymmetric, &format!("{weights}/num_bits"), json!(8), &["weights.num_bits", "found 8"]);
    changed(Method::PackSymmetric, &format!("{weights}/type"), json!("float"), &["weights.type", "float"]);
    changed(Method::PackSymmetric, &format!("{weights}/strategy"), json!("tensor"), &["strategy", "tensor"]);
    let inputs = "/config_groups/group_0/input_activations";
    changed(Method::PackSymmetric, inputs, json!({"num_bits": 8}), &["input_activations", "none"]);
}

#[test]
fn parts_that_are_missing_misshapen_or_too_many_are_refused_by_name() {
    let module = "model.layers.1.mlp.down_proj";
    for method in METHODS {
        let (packed, _) = packer(method, 32).folders(&[]);
        let of_module: Vec<Stored> =
            packed.tensors.iter().filter(|tensor| tensor.name.starts_with(module)).cloned().collect();
        for part in &of_module {
            // Without its codes, what is left of a module has no place.
            let is_optional = part.name.ends_with(".g_idx") || part.name.ends_with(".bias");
            if !is_optional {
                let mut without = packed.clone();
                without.remove(&part.name);
                let words =
                    if part.name.ends_with("qweight") || part.name.ends_with("packed") { module } else { &part.name };
                refused(&without, &[words]);
            }
            if !part.name.ends_with(".bias") {
                let mut misshapen = packed.clone();
                let at = misshapen.tensors.iter().position(|tensor| tensor.name == part.name).unwrap();
                misshapen.tensors[at].shape.push(1);
                refused(&misshapen, &[&part.name, "shape"]);
            }
        }
        let mut twice = packed.clone();
        twice.tensors.push(Stored {
            name: format!("{module}.weight"),
            shape: vec![32, 64],
            dtype: "F32",
            bytes: vec![0; 4 * 32 * 64],
        });
        refused(&twice, &[&format!("tensor {module}.weight"), "twice"]);
    }
}

#[test]
fn a_bias_that_is_not_zero_is_left_over() {
    let (mut packed, _) = packer(Method::Gptq, 32).folders(&[]);
    let bias = packed.tensors.iter_mut().find(|tensor| tensor.name.ends_with("down_proj.bias")).unwrap();
    bias.bytes[1] = 60;
    refused(&packed, &["down_proj.bias", "only tensors of a llama model"]);
}

#[test]
fn groups_beyond_the_last_are_refused() {
    let (mut packed, _) = packer(Method::Gptq, 32).folders(&[]);
    let order = packed.tensors.iter_mut().find(|tensor| tensor.name.ends_with("down_proj.g_idx")).unwrap();
    order.bytes[4..8].copy_from_slice(&(-1i32).to_le_bytes());
    refused(&packed, &["down_proj.g_idx", "group -1", "below 2"]);
}

#[test]
fn matrices_of_a_size_that_a_group_does_not_divide_are_refused() {
    let (mut packed, _) = packer(Method::Awq, 32).folders(&[]);
    packed.config["quantization_config"]["group_size"] = json!(128);
    refused(&packed, &["qweight", "inputs", "multiples of 128"]);
}
