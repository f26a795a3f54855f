//! A Llama small enough to be damaged byte by byte.

use half::{bf16, f16};
use octavo_backend::{DecoderSpec, WeightFormat, WeightGroup, WeightId, WeightSource};
use octavo_model::Checkpoint;
use serde_json::json;

use super::{FolderWriter, GgufWriter, Stored};

/// The model's dimensions.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub vocab: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head: usize,
    pub inner: usize,
}

/// Two query heads read one KV head; columns are whole blocks, so that every format can hold every matrix.
pub const TINY: Sizes = Sizes { vocab: 40, hidden: 32, layers: 2, heads: 4, kv_heads: 2, head: 8, inner: 64 };

/// Values by place, and how each kind of checkpoint lays them out.
#[derive(Debug, Clone)]
pub struct TinyModel {
    pub sizes: Sizes,
    pub tied: bool,
}

/// A tensor's GGUF name, folder name, shape, and whether its rows are rotated.
type Place = (String, String, Vec<usize>, Rows);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    Plain,
    Rotated,
}

impl TinyModel {
    pub fn tied() -> TinyModel {
        TinyModel { sizes: TINY, tied: true }
    }

    pub fn untied() -> TinyModel {
        TinyModel { sizes: TINY, tied: false }
    }

    fn places(&self) -> Vec<Place> {
        let Sizes { vocab, hidden, layers, heads, kv_heads, head, inner } = self.sizes;
        let plain = |gguf: &str, folder: &str, shape: &[usize]| {
            (gguf.to_owned(), folder.to_owned(), shape.to_vec(), Rows::Plain)
        };
        let mut places = vec![
            plain("token_embd.weight", "model.embed_tokens.weight", &[vocab, hidden]),
            plain("output_norm.weight", "model.norm.weight", &[hidden]),
        ];
        if !self.tied {
            places.push(plain("output.weight", "lm_head.weight", &[vocab, hidden]));
        }
        for layer in 0..layers {
            let matrices: [(&str, &str, &[usize]); 9] = [
                ("attn_norm", "input_layernorm", &[hidden]),
                ("attn_q", "self_attn.q_proj", &[heads * head, hidden]),
                ("attn_k", "self_attn.k_proj", &[kv_heads * head, hidden]),
                ("attn_v", "self_attn.v_proj", &[kv_heads * head, hidden]),
                ("attn_output", "self_attn.o_proj", &[hidden, heads * head]),
                ("ffn_norm", "post_attention_layernorm", &[hidden]),
                ("ffn_gate", "mlp.gate_proj", &[inner, hidden]),
                ("ffn_up", "mlp.up_proj", &[inner, hidden]),
                ("ffn_down", "mlp.down_proj", &[hidden, inner]),
            ];
            for (gguf, folder, shape) in matrices {
                let rows = if matches!(gguf, "attn_q" | "attn_k") { Rows::Rotated } else { Rows::Plain };
                let names = (format!("blk.{layer}.{gguf}.weight"), format!("model.layers.{layer}.{folder}.weight"));
                places.push((names.0, names.1, shape.to_vec(), rows));
            }
        }
        places
    }

    /// A GGUF file whose tensors have the format that `format` chooses by name.
    pub fn gguf(&self, format: impl Fn(&str) -> WeightFormat) -> GgufWriter {
        let mut writer = GgufWriter::default();
        self.write_fields(&mut writer);
        for (index, (name, _, shape, rows)) in self.places().into_iter().enumerate() {
            let mut values = values(index, shape.iter().product());
            if rows == Rows::Rotated {
                values = neighbours_from_halves(&values, shape[0], self.sizes.head);
            }
            let format = format(&name);
            writer.tensor(&name, &shape, format, encode(&values, format));
        }
        writer
    }

    fn write_fields(&self, writer: &mut GgufWriter) {
        let Sizes { vocab, hidden, layers, heads, kv_heads, head, inner } = self.sizes;
        let tokens: Vec<String> = (0..vocab).map(|id| format!("token{id}")).collect();
        let types: Vec<i32> = (0..vocab).map(|id| if id < 3 { 3 } else { 1 }).collect();
        writer
            .text("general.architecture", "llama")
            .text("general.name", "Tiny")
            .u32("llama.block_count", layers as u32)
            .u32("llama.context_length", 128)
            .u32("llama.embedding_length", hidden as u32)
            .u32("llama.feed_forward_length", inner as u32)
            .u32("llama.attention.head_count", heads as u32)
            .u32("llama.attention.head_count_kv", kv_heads as u32)
            .u32("llama.rope.dimension_count", head as u32)
            .f32("llama.rope.freq_base", 10000.0)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .u32("llama.vocab_size", vocab as u32)
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "smollm")
            .texts("tokenizer.ggml.tokens", &tokens)
            .i32s("tokenizer.ggml.token_type", &types)
            .texts("tokenizer.ggml.merges", &["t o".to_owned(), "to ken".to_owned()])
            .u32("tokenizer.ggml.bos_token_id", 1)
            .u32("tokenizer.ggml.eos_token_id", 2)
            .u32("tokenizer.ggml.unknown_token_id", 0)
            .u32("tokenizer.ggml.padding_token_id", 2)
            .flag("tokenizer.ggml.add_bos_token", false)
            .text("tokenizer.chat_template", "{{ messages }}");
    }

    /// A folder whose tensors are all F32, F16 or BF16.
    pub fn folder(&self, format: WeightFormat) -> FolderWriter {
        let Sizes { vocab, hidden, layers, heads, kv_heads, inner, .. } = self.sizes;
        let dtype = match format {
            WeightFormat::F32 => "F32",
            WeightFormat::F16 => "F16",
            _ => "BF16",
        };
        let store = |(index, (_, name, shape, _)): (usize, Place)| Stored {
            name,
            bytes: encode(&values(index, shape.iter().product()), format),
            shape,
            dtype,
        };
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "max_position_embeddings": 128,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "vocab_size": vocab,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        });
        FolderWriter { config, tensors: self.places().into_iter().enumerate().map(store).collect() }
    }
}

/// Values that every 16-bit format holds exactly, different in every tensor.
fn values(tensor: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + tensor * 101) % 255) as f32 / 128.0 - 1.0).collect()
}

/// llama.cpp's order of rotated rows: rows `i` and `i + head / 2` of each head become neighbours.
fn neighbours_from_halves(values: &[f32], rows: usize, head: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    let mut moved = vec![0.0; values.len()];
    for row in 0..rows {
        let (first, within) = (row / head * head, row % head);
        let to = first + within % (head / 2) * 2 + within / (head / 2);
        moved[to * columns..(to + 1) * columns].copy_from_slice(&values[row * columns..(row + 1) * columns]);
    }
    moved
}

/// The bytes of `values` in `format`; quantised ones get scales and codes that come from the values.
pub fn encode(values: &[f32], format: WeightFormat) -> Vec<u8> {
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let nibbles = |block: &[f32]| -> Vec<u8> {
        let code = |value: f32| ((value + 1.0) * 7.5) as u8;
        (0..16).map(|i| code(block[i]) | code(block[i + 16]) << 4).collect()
    };
    match format {
        WeightFormat::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        WeightFormat::F16 => values.iter().flat_map(|value| half(*value)).collect(),
        WeightFormat::Bf16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        WeightFormat::Q4_0 => values.chunks(32).flat_map(|b| [&half(b[0] / 7.0)[..], &nibbles(b)].concat()).collect(),
        WeightFormat::Q4_1 => {
            values.chunks(32).flat_map(|b| [&half(b[1] / 15.0)[..], &half(b[2]), &nibbles(b)].concat()).collect()
        }
        WeightFormat::Q8_0 => values
            .chunks(32)
            .flat_map(|b| {
                let codes: Vec<u8> = b.iter().map(|value| (value * 127.0) as i8 as u8).collect();
                [&half(b[3] / 127.0)[..], &codes].concat()
            })
            .collect(),
        WeightFormat::Q4K => values
            .chunks(256)
            .flat_map(|b| {
                let rest = b.iter().take(140).map(|value| (value * 1e4) as i32 as u8);
                [&half(b[0] / 500.0)[..], &half(b[1] / 60.0), &rest.collect::<Vec<u8>>()].concat()
            })
            .collect(),
        WeightFormat::Q6K => values
            .chunks(256)
            .flat_map(|b| {
                let rest = b.iter().take(208).map(|value| (value * 1e4) as i32 as u8);
                [&rest.collect::<Vec<u8>>()[..], &half(b[0] / 4000.0)].concat()
            })
            .collect(),
        other => panic!("no file has {other}"),
    }
}

/// Every weight that a backend would ask for, as numbers, part after part.
pub fn all_weights(checkpoint: &mut Checkpoint) -> Vec<(WeightId, Vec<f32>)> {
    let ids = weight_ids(&checkpoint.config().spec);
    ids.into_iter().map(|id| (id, numbers(checkpoint.weight(id).unwrap()))).collect()
}

fn weight_ids(spec: &DecoderSpec) -> Vec<WeightId> {
    let mut ids = vec![WeightId::Embedding, WeightId::FinalNorm];
    ids.extend((!spec.head.tied).then_some(WeightId::Head));
    for layer in 0..spec.layers.len() {
        ids.extend([
            WeightId::AttentionNorm(layer),
            WeightId::Qkv(layer),
            WeightId::AttentionOutput(layer),
            WeightId::MlpNorm(layer),
            WeightId::GateUp(layer),
            WeightId::Down(layer),
        ]);
    }
    ids
}

fn numbers(group: WeightGroup<'_>) -> Vec<f32> {
    match group {
        WeightGroup::Vector(values) => values,
        WeightGroup::Matrices(parts) => {
            let mut values = Vec::new();
            for part in parts {
                let mut row_values = vec![0.0; part.columns];
                for row in 0..part.rows {
                    part.dequantize_row(row, &mut row_values);
                    values.extend(&row_values);
                }
            }
            values
        }
    }
}
