//! Small random decoders held in memory.

use std::{borrow::Cow, collections::BTreeMap};

use half::{bf16, f16};

use crate::{
    Activation, AttentionSpec, BackendError, DecoderSpec, HeadSpec, LayerSpec, Matrix, MlpSpec, NormSpec, RopeSpec,
    WeightData, WeightFormat, WeightGroup, WeightId, WeightShape, WeightSource,
};

/// The sizes of a [`TinyModel`].
#[derive(Debug, Clone, Copy)]
pub struct TinyShape {
    /// Rows of the embedding; the last one is NaN in every element ([`TinyModel::poison`]).
    pub vocab_size: usize,
    /// Width.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Query heads for each KV head.
    pub group_size: usize,
    /// Width of a head.
    pub head_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Sliding window of every odd layer.
    pub window: Option<usize>,
    /// Format of all matrices but the embedding (`F32` unless the head is tied to it).
    pub format: WeightFormat,
    /// The head is the embedding.
    pub tied: bool,
}

impl Default for TinyShape {
    fn default() -> TinyShape {
        TinyShape {
            vocab_size: 100,
            hidden_size: 64,
            num_layers: 1,
            num_kv_heads: 2,
            group_size: 2,
            head_size: 16,
            intermediate_size: 96,
            window: None,
            format: WeightFormat::F32,
            tied: false,
        }
    }
}

/// A decoder with random weights.
#[derive(Debug, Clone)]
pub struct TinyModel {
    /// Its shape.
    pub spec: DecoderSpec,
    weights: BTreeMap<WeightId, WeightGroup<'static>>,
}

impl TinyModel {
    /// Weights drawn from `seed`, scaled so that activations keep their size.
    pub fn new(shape: TinyShape, seed: u64) -> TinyModel {
        let spec = spec(&shape);
        let mut random = Random(seed);
        let mut weights = BTreeMap::new();
        for id in spec.weight_ids() {
            let format = if id == WeightId::Embedding && !shape.tied { WeightFormat::F32 } else { shape.format };
            let group = match spec.weight_shape(id) {
                WeightShape::Vector(len) => WeightGroup::Vector((0..len).map(|_| 1.0 + 0.3 * random.next()).collect()),
                WeightShape::Matrices { parts, columns } => WeightGroup::Matrices(
                    parts.iter().map(|&rows| random.matrix(rows, columns, format, id == WeightId::Embedding)).collect(),
                ),
            };
            weights.insert(id, group);
        }
        TinyModel { spec, weights }
    }

    /// A token whose embedding is NaN: its keys and values are NaN wherever it is computed.
    pub fn poison(&self) -> u32 {
        self.spec.vocab_size as u32 - 1
    }

    /// The same model with the poisoned embedding row replaced by the first one.
    pub fn with_finite_embedding(mut self) -> TinyModel {
        if let Some(WeightGroup::Matrices(parts)) = self.weights.get_mut(&WeightId::Embedding) {
            let rows = parts[0].rows;
            let bytes = parts[0].data.bytes.to_mut();
            let row = bytes.len() / rows;
            let last = bytes.len() - row;
            bytes.copy_within(..row, last);
        }
        self
    }

    /// The same model with every element of one place zero.
    pub fn without(mut self, id: WeightId) -> TinyModel {
        if let Some(WeightGroup::Matrices(parts)) = self.weights.get_mut(&id) {
            for part in parts {
                part.data.bytes = Cow::Owned(vec![0; part.data.bytes.len()]);
            }
        }
        self
    }

    /// Tokens drawn from `seed`, none of them the poison.
    pub fn tokens(&self, count: usize, seed: u64) -> Vec<u32> {
        let mut random = Random(seed.wrapping_add(0x5eed));
        (0..count).map(|_| random.bits() % self.poison()).collect()
    }
}

impl WeightSource for TinyModel {
    fn weight(&mut self, id: WeightId) -> Result<WeightGroup<'_>, BackendError> {
        self.weights.get(&id).cloned().ok_or(BackendError::Source { id, reason: "not in this model".into() })
    }
}

fn spec(shape: &TinyShape) -> DecoderSpec {
    let norm = NormSpec { epsilon: 1e-5 };
    let layer = |index: usize| LayerSpec {
        attention_norm: norm,
        attention: AttentionSpec {
            num_heads: shape.num_kv_heads * shape.group_size,
            num_kv_heads: shape.num_kv_heads,
            head_size: shape.head_size,
            scale: 1.0 / (shape.head_size as f32).sqrt(),
            rope: RopeSpec::plain(10_000.0, shape.head_size),
            window: if index % 2 == 1 || shape.num_layers == 1 { shape.window } else { None },
        },
        mlp_norm: norm,
        mlp: MlpSpec::Gated { intermediate_size: shape.intermediate_size, activation: Activation::Silu },
    };
    DecoderSpec {
        vocab_size: shape.vocab_size,
        hidden_size: shape.hidden_size,
        embedding_scale: 1.0,
        layers: (0..shape.num_layers).map(layer).collect(),
        head: HeadSpec { norm, tied: shape.tied, logit_scale: 1.0, num_tokens: shape.vocab_size },
    }
}

/// A 64-bit linear congruential generator: enough for weights, and the same everywhere.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// Uniform in -1..1.
    fn next(&mut self) -> f32 {
        self.bits() as f32 / (1u32 << 30) as f32 - 1.0
    }

    fn matrix(&mut self, rows: usize, columns: usize, format: WeightFormat, is_embedding: bool) -> Matrix<'static> {
        let size = if is_embedding { 1.0 } else { (3.0 / columns as f32).sqrt() };
        let mut bytes = Vec::new();
        for row in 0..rows {
            if is_embedding && row + 1 == rows {
                bytes.extend(nan_row(format, columns));
                continue;
            }
            match format {
                WeightFormat::F32 => bytes.extend((0..columns).flat_map(|_| (size * self.next()).to_le_bytes())),
                WeightFormat::F16 => {
                    bytes.extend((0..columns).flat_map(|_| f16::from_f32(size * self.next()).to_le_bytes()));
                }
                WeightFormat::Bf16 => {
                    bytes.extend((0..columns).flat_map(|_| bf16::from_f32(size * self.next()).to_le_bytes()));
                }
                WeightFormat::Q4_0 => self.blocks(&mut bytes, columns, size / 8.0, None, 16),
                WeightFormat::Q4_1 => self.blocks(&mut bytes, columns, size / 7.5, Some(-size), 16),
                WeightFormat::Q8_0 => self.blocks(&mut bytes, columns, size / 127.0, None, 32),
                WeightFormat::Q4K => {
                    for _ in 0..columns / format.block() {
                        // Scales of 32 to 63, and minima of as much, so that values lie about 0.
                        bytes.extend(f16::from_f32(size / 7.5 / 48.0).to_le_bytes());
                        bytes.extend(f16::from_f32(size / 48.0).to_le_bytes());
                        let [first, last] = [0, 1].map(|_| [0; 4].map(|_: u8| self.bits() as u8));
                        let first = first.map(|bits| bits & 0x1f | 0xa0);
                        bytes.extend([first, first, last.map(|bits| bits & 15 | bits << 4)].concat());
                        bytes.extend((0..128).map(|_| self.bits() as u8));
                    }
                }
                _ if format.is_int4() => {
                    for _ in 0..columns / format.block() {
                        bytes.extend(f16::from_f32(size / 7.5 * (1.0 + 0.4 * self.next())).to_le_bytes());
                        bytes.push(6 + (self.bits() % 4) as u8);
                        bytes.extend((0..format.block() / 2).map(|_| self.bits() as u8));
                    }
                }
                _ => {
                    for _ in 0..columns / format.block() {
                        bytes.extend((0..192).map(|_| self.bits() as u8));
                        bytes.extend((0..16).map(|_| (self.bits() % 128) as u8 ^ 0xc0));
                        bytes.extend(f16::from_f32(size / 32.0 / 64.0).to_le_bytes());
                    }
                }
            }
        }
        Matrix { rows, columns, data: WeightData { format, bytes: Cow::Owned(bytes) } }
    }

    fn blocks(&mut self, bytes: &mut Vec<u8>, columns: usize, scale: f32, minimum: Option<f32>, codes: usize) {
        for _ in 0..columns / 32 {
            let jitter = 1.0 + 0.4 * self.next();
            bytes.extend(f16::from_f32(scale * jitter).to_le_bytes());
            if let Some(minimum) = minimum {
                bytes.extend(f16::from_f32(minimum * jitter).to_le_bytes());
            }
            bytes.extend((0..codes).map(|_| self.bits() as u8));
        }
    }
}

/// A row that decodes to NaN in every element.
fn nan_row(format: WeightFormat, columns: usize) -> Vec<u8> {
    let half_nan = f16::NAN.to_le_bytes();
    let (element, count) = match format {
        WeightFormat::F32 => (f32::NAN.to_le_bytes().to_vec(), columns),
        WeightFormat::F16 => (half_nan.to_vec(), columns),
        WeightFormat::Bf16 => (bf16::NAN.to_le_bytes().to_vec(), columns),
        WeightFormat::Q4_0 => ([&half_nan[..], &[0; 16]].concat(), columns / 32),
        WeightFormat::Q4_1 => ([&half_nan[..], &half_nan, &[0; 16]].concat(), columns / 32),
        WeightFormat::Q8_0 => ([&half_nan[..], &[0; 32]].concat(), columns / 32),
        WeightFormat::Q4K => ([&half_nan[..], &half_nan, &[0; 140]].concat(), columns / 256),
        WeightFormat::Q6K => ([&[1; 208][..], &half_nan].concat(), columns / 256),
        _ => ([&half_nan[..], &vec![1; format.block() / 2 + 1]].concat(), columns / format.block()),
    };
    element.repeat(count)
}
