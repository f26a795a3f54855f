//! A checkpoint as a Hugging Face folder has it: `config.json`, `generation_config.json`, and the weights in bfloat16.

use std::io::{self, Write};

use half::bf16;
use octavo_backend::{DecoderSpec, MlpSpec, RopeSpec, TokenId, WeightGroup, WeightId, WeightShape};
use serde_json::{Map, Value, json};

use crate::{
    Checkpoint, ModelError, TokenizerSource,
    family::{self, Part},
    rope::{Llama3Scaling, Rope, RopeScaling},
};

/// The header's length is a multiple of this, so that the data is aligned.
const ALIGNMENT: usize = 8;

/// How far frequencies may be from a rule's for it to be theirs, relative to them: their divisors are stored as `f32`.
const RULE_TOLERANCE: f64 = 1e-5;

impl Checkpoint {
    /// The text of a `config.json`.
    ///
    /// # Errors
    /// Rotary frequencies for which Hugging Face's configurations have no rule.
    pub fn folder_config(&self) -> Result<String, ModelError> {
        let config = self.config();
        let spec = &config.spec;
        let layer = &spec.layers[0];
        let attention = &layer.attention;
        let MlpSpec::Gated { intermediate_size, .. } = layer.mlp;
        let mut fields = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": config.architecture,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": spec.layers.len(),
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_size,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
            "max_position_embeddings": config.context_length,
            "rms_norm_eps": shortest(layer.attention_norm.epsilon),
            "rope_theta": self.rope.base,
            "tie_word_embeddings": spec.head.tied,
            "torch_dtype": "bfloat16",
        });
        match self.folder_rope(&attention.rope, attention.head_size)? {
            RopeScaling::Plain => {}
            RopeScaling::Linear { factor } => fields["rope_scaling"] = json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3(rule) => {
                fields["rope_scaling"] = json!({
                    "rope_type": "llama3",
                    "factor": rule.factor,
                    "low_freq_factor": rule.low_frequency_factor,
                    "high_freq_factor": rule.high_frequency_factor,
                    "original_max_position_embeddings": rule.original_context_length as u64,
                });
            }
        }
        self.put_token_ids(&mut fields);
        Ok(file_text(&fields))
    }

    /// The text of a `generation_config.json`. A recommendation that does not say so is one for sampling.
    pub fn folder_generation_config(&self) -> String {
        let found = self.config().generation;
        let numbers = [
            ("temperature", found.temperature),
            ("top_p", found.top_p),
            ("min_p", found.min_p),
            ("repetition_penalty", found.repetition_penalty),
        ];
        let mut fields = Value::Object(Map::new());
        self.put_token_ids(&mut fields);
        for (name, number) in numbers {
            if let Some(number) = number {
                fields[name] = shortest(number).into();
            }
        }
        if let Some(top_k) = found.top_k {
            fields["top_k"] = top_k.into();
        }
        let recommends = found.top_k.is_some() || numbers[..3].iter().any(|(_, number)| number.is_some());
        if let Some(do_sample) = found.do_sample.or(recommends.then_some(true)) {
            fields["do_sample"] = do_sample.into();
        }
        file_text(&fields)
    }

    /// Writes all weights as one safetensors file: bfloat16, rounded to nearest with ties to even, in the order of
    /// execution. One row is held as `f32` at a time, and of matrices whose rows have to be moved one as it is stored.
    ///
    /// # Errors
    /// Those of `sink`.
    pub fn write_safetensors(&self, sink: &mut impl Write) -> io::Result<()> {
        let header = header(&self.config().spec, family::folder_names());
        sink.write_all(&(header.len() as u64).to_le_bytes())?;
        sink.write_all(&header)?;
        for id in self.config().spec.weight_ids() {
            let parts = self.weights.get(&id).map(Vec::as_slice).unwrap_or_default();
            for part in parts {
                self.write_part(part, sink)?;
            }
        }
        Ok(())
    }

    fn write_part(&self, part: &Part, sink: &mut impl Write) -> io::Result<()> {
        match Part::group(std::slice::from_ref(part), &self.table) {
            WeightGroup::Vector(values) => write_row(&values, &mut Vec::new(), sink),
            WeightGroup::Matrices(matrices) => {
                for matrix in matrices {
                    let (mut row, mut bytes) = (vec![0.0; matrix.columns], Vec::new());
                    for index in 0..matrix.rows {
                        matrix.dequantize_row(index, &mut row);
                        write_row(&row, &mut bytes, sink)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn put_token_ids(&self, fields: &mut Value) {
        if let Some(id) = self.config().bos_token_id {
            fields["bos_token_id"] = id.into();
        }
        match self.config().eos_token_ids.as_slice() {
            [] => {}
            [id] => fields["eos_token_id"] = (*id).into(),
            ids => fields["eos_token_id"] = ids.into(),
        }
        if let Some(id) = self.padding_token_id() {
            fields["pad_token_id"] = id.into();
        }
    }

    fn padding_token_id(&self) -> Option<TokenId> {
        match self.tokenizer() {
            TokenizerSource::Vocabulary(vocabulary) => vocabulary.padding_token_id,
            TokenizerSource::File(_) | TokenizerSource::Missing => None,
        }
    }

    /// The rule behind the decoder's frequencies. GGUF files of Llama 3 hold divisors instead of the rule.
    fn folder_rope(&self, found: &RopeSpec, head_size: usize) -> Result<RopeScaling, ModelError> {
        let agrees = |rope: &Rope| {
            let expected = rope.spec(head_size).inverse_frequencies;
            let mut pairs = expected.iter().zip(&found.inverse_frequencies);
            pairs.all(|(expected, found)| (expected / found - 1.0).abs() < RULE_TOLERANCE)
        };
        if agrees(&self.rope) {
            return Ok(self.rope.scaling);
        }
        // The longest wave is divided in full.
        let plain = Rope { base: self.rope.base, scaling: RopeScaling::Plain }.spec(head_size);
        let divisors = plain.inverse_frequencies.iter().zip(&found.inverse_frequencies);
        let factor = divisors.map(|(plain, found)| plain / found).fold(1.0, f64::max);
        let scaling = RopeScaling::Llama3(Llama3Scaling {
            factor: f64::from(factor as f32),
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context_length: 8192.0,
        });
        if agrees(&Rope { base: self.rope.base, scaling }) {
            return Ok(scaling);
        }
        Err(ModelError::unsupported(
            self.path(),
            "divisors of the rotary frequencies",
            format!("other ones than Llama 3's with factor {factor}"),
            "none, or those of Llama 3 for a config.json to name",
        ))
    }
}

/// The header of a safetensors file: every tensor of `spec` in the order of execution, padded with spaces.
fn header(spec: &DecoderSpec, names: &family::TensorNames) -> Vec<u8> {
    let mut fields = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut end = 0;
    for id in spec.weight_ids() {
        for (name, shape) in names.of(id).into_iter().zip(shapes(spec, id)) {
            let begin = end;
            end += shape.iter().product::<usize>() * size_of::<bf16>();
            fields.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}));
        }
    }
    let mut text = Value::Object(fields).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    text
}

fn shapes(spec: &DecoderSpec, id: WeightId) -> Vec<Vec<usize>> {
    match spec.weight_shape(id) {
        WeightShape::Vector(size) => vec![vec![size]],
        WeightShape::Matrices { parts, columns } => parts.into_iter().map(|rows| vec![rows, columns]).collect(),
    }
}

/// Rounds a row; `bytes` is scratch.
fn write_row(row: &[f32], bytes: &mut Vec<u8>, sink: &mut impl Write) -> io::Result<()> {
    bytes.clear();
    bytes.extend(row.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()));
    sink.write_all(bytes)
}

/// The number that has the shortest text of those that are `value` as `f32`.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn file_text(fields: &Value) -> String {
    format!("{fields:#}\n")
}
