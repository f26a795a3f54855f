//! Writes GGUF files, sound ones and such that lie.

use octavo_backend::WeightFormat;

/// Collects fields and tensors.
#[derive(Debug, Clone, Default)]
pub struct GgufWriter {
    /// Written instead of 3.
    pub version: Option<u32>,
    /// Written instead of the true count.
    pub num_tensors: Option<u64>,
    /// Written instead of the true count.
    pub num_fields: Option<u64>,
    /// Offsets written instead of the true ones, by tensor.
    pub offsets: Vec<(String, u64)>,
    fields: Vec<(String, Vec<u8>)>,
    tensors: Vec<Tensor>,
}

#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    kind: u32,
    bytes: Vec<u8>,
}

const ALIGNMENT: usize = 32;

impl GgufWriter {
    /// Sets a field to a type's number and a value's bytes.
    pub fn raw(&mut self, key: &str, kind: u32, bytes: &[u8]) -> &mut Self {
        self.fields.retain(|(known, _)| known != key);
        self.fields.push((key.to_owned(), [&kind.to_le_bytes(), bytes].concat()));
        self
    }

    pub fn remove(&mut self, key: &str) -> &mut Self {
        self.fields.retain(|(known, _)| known != key);
        self
    }

    /// Adds the last field once more.
    pub fn repeat_last_field(&mut self) -> &mut Self {
        self.fields.extend(self.fields.last().cloned());
        self
    }

    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        self.raw(key, 7, &[value.into()])
    }

    pub fn text(&mut self, key: &str, value: &str) -> &mut Self {
        self.raw(key, 8, &text_bytes(value))
    }

    pub fn texts(&mut self, key: &str, values: &[String]) -> &mut Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| text_bytes(value)).collect();
        self.raw(key, 9, &array_bytes(8, values.len() as u64, &elements))
    }

    pub fn i32s(&mut self, key: &str, values: &[i32]) -> &mut Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, 9, &array_bytes(5, values.len() as u64, &elements))
    }

    /// Adds a tensor; `shape` has its outermost dimension first.
    pub fn tensor(&mut self, name: &str, shape: &[usize], format: WeightFormat, bytes: Vec<u8>) -> &mut Self {
        let kind = match format {
            WeightFormat::F32 => 0,
            WeightFormat::F16 => 1,
            WeightFormat::Q4_0 => 2,
            WeightFormat::Q4_1 => 3,
            WeightFormat::Q8_0 => 8,
            WeightFormat::Q4K => 12,
            WeightFormat::Q6K => 14,
            WeightFormat::Bf16 => 30,
            other => panic!("GGUF has no {other}"),
        };
        self.tensor_of_type(name, shape, kind, bytes)
    }

    pub fn tensor_of_type(&mut self, name: &str, shape: &[usize], kind: u32, bytes: Vec<u8>) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), kind, bytes });
        self
    }

    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// The file; it ends with the last tensor's last byte.
    pub fn finish(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.unwrap_or(3).to_le_bytes());
        file.extend(self.num_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.num_fields.unwrap_or(self.fields.len() as u64).to_le_bytes());
        for (key, value) in &self.fields {
            file.extend(text_bytes(key));
            file.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
            let lie = self.offsets.iter().find(|(name, _)| *name == tensor.name);
            file.extend(text_bytes(&tensor.name));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            for size in tensor.shape.iter().rev() {
                file.extend((*size as u64).to_le_bytes());
            }
            file.extend(tensor.kind.to_le_bytes());
            file.extend(lie.map_or(data.len() as u64, |(_, offset)| *offset).to_le_bytes());
            data.extend(&tensor.bytes);
        }
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(data);
        file
    }
}

pub fn text_bytes(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// An array's element type, count and elements.
pub fn array_bytes(kind: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}
