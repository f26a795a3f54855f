//! The same files read by candle: header, offsets and the numbers of every format.

use std::{fs, io::Cursor};

use candle_core::{Device, quantized::gguf_file::Content};
use half::f16;
use octavo_backend::{Matrix, WeightData, WeightFormat, WeightId, WeightSource};
use octavo_model::Checkpoint;
use tempfile::NamedTempFile;

use crate::support::{GgufWriter, TINY, TinyModel, all_weights};

const FORMATS: [WeightFormat; 6] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::Bf16,
    WeightFormat::Q8_0,
    WeightFormat::Q4_0,
    WeightFormat::Q4_1,
];

struct Oracle {
    content: Content,
    file: Cursor<Vec<u8>>,
}

impl Oracle {
    fn open(bytes: Vec<u8>) -> Oracle {
        let mut file = Cursor::new(bytes);
        Oracle { content: Content::read(&mut file).unwrap(), file }
    }

    fn values(&mut self, name: &str) -> Vec<f32> {
        let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu).unwrap();
        tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Rows of rotated heads in the order in which halves are paired.
    fn halves(&mut self, name: &str) -> Vec<f32> {
        let stored = self.values(name);
        let rows: Vec<&[f32]> = stored.chunks(TINY.hidden).collect();
        let half = TINY.head / 2;
        let source = |row: usize| row / TINY.head * TINY.head + row % half * 2 + row % TINY.head / half;
        (0..rows.len()).flat_map(|row| rows[source(row)].to_vec()).collect()
    }

    fn weight(&mut self, id: WeightId) -> Vec<f32> {
        let parts = match id {
            WeightId::Embedding => vec![self.values("token_embd.weight")],
            WeightId::FinalNorm => vec![self.values("output_norm.weight")],
            WeightId::Head => vec![self.values("output.weight")],
            WeightId::AttentionNorm(i) => vec![self.values(&format!("blk.{i}.attn_norm.weight"))],
            WeightId::Qkv(i) => vec![
                self.halves(&format!("blk.{i}.attn_q.weight")),
                self.halves(&format!("blk.{i}.attn_k.weight")),
                self.values(&format!("blk.{i}.attn_v.weight")),
            ],
            WeightId::AttentionOutput(i) => vec![self.values(&format!("blk.{i}.attn_output.weight"))],
            WeightId::MlpNorm(i) => vec![self.values(&format!("blk.{i}.ffn_norm.weight"))],
            WeightId::GateUp(i) => {
                vec![self.values(&format!("blk.{i}.ffn_gate.weight")), self.values(&format!("blk.{i}.ffn_up.weight"))]
            }
            WeightId::Down(i) => vec![self.values(&format!("blk.{i}.ffn_down.weight"))],
        };
        parts.concat()
    }
}

#[test]
fn candle_reads_the_same_numbers_in_every_format() {
    for format in FORMATS {
        let bytes = TinyModel::untied().gguf(|_| format).finish();
        let file = NamedTempFile::new().unwrap();
        fs::write(file.path(), &bytes).unwrap();
        let mut oracle = Oracle::open(bytes);
        let mut checkpoint = Checkpoint::open(file.path()).unwrap();
        for (id, values) in all_weights(&mut checkpoint) {
            assert!(values.iter().any(|value| *value != 0.0));
            assert_eq!(values, oracle.weight(id), "{format} {id}");
        }
    }
}

#[test]
fn candle_reads_the_same_numbers_where_scales_have_a_scale() {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let (rows, columns) = (5, 512);
    for format in [WeightFormat::Q4K, WeightFormat::Q6K] {
        let size = rows * format.row_bytes(columns).unwrap();
        let mut bytes: Vec<u8> = (0..size).map(|_| random()).collect();
        // Factors of ordinary size.
        for block in bytes.chunks_exact_mut(size / rows / 2) {
            for at in if format == WeightFormat::Q4K { [0, 2] } else { [208, 208] } {
                let factor = f16::from_f32(f32::from(random()) / 256.0 - 0.5);
                block[at..at + 2].copy_from_slice(&factor.to_le_bytes());
            }
        }
        let file = GgufWriter::default().tensor("t", &[rows, columns], format, bytes.clone()).finish();
        let expected = Oracle::open(file).values("t");
        let matrix = Matrix { rows, columns, data: WeightData { format, bytes: bytes.into() } };
        let mut found = vec![0.0; columns];
        for (row, expected) in expected.chunks_exact(columns).enumerate() {
            matrix.dequantize_row(row, &mut found);
            assert_eq!(found, expected, "{format}, row {row}");
        }
    }
}

#[test]
fn candle_reads_the_same_header() {
    let bytes = TinyModel::tied().gguf(|_| WeightFormat::Q8_0).finish();
    let oracle = Oracle::open(bytes.clone());
    let file = NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    let checkpoint = Checkpoint::open(file.path()).unwrap();
    let config = checkpoint.config();
    let number = |key: &str| oracle.content.metadata[key].to_u32().unwrap() as usize;
    assert_eq!(number("llama.block_count"), config.spec.layers.len());
    assert_eq!(number("llama.context_length"), config.context_length);
    assert_eq!(number("tokenizer.ggml.eos_token_id"), config.eos_token_ids[0] as usize);
    let infos = oracle.content.tensor_infos.values();
    let bytes: usize = infos.map(|info| info.shape.elem_count() / 32 * 34).sum();
    assert_eq!(bytes, checkpoint.weight_bytes());
}

#[test]
fn rows_that_stay_in_place_are_not_copied() {
    let file = NamedTempFile::new().unwrap();
    fs::write(file.path(), TinyModel::tied().gguf(|_| WeightFormat::Q4_1).finish()).unwrap();
    let mut checkpoint = Checkpoint::open(file.path()).unwrap();
    let octavo_backend::WeightGroup::Matrices(parts) = checkpoint.weight(WeightId::Qkv(0)).unwrap() else {
        panic!("a projection is made of matrices");
    };
    let borrowed: Vec<bool> =
        parts.iter().map(|part| matches!(part.data.bytes, std::borrow::Cow::Borrowed(_))).collect();
    assert_eq!(borrowed, [false, false, true]);
}
