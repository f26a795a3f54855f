//! What a folder says about its int4 weights.

use std::path::Path;

use super::json::JsonFile;
use crate::ModelError;

/// How the matrices of a folder are packed; which ones are, their tensors say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quantization {
    pub(crate) packing: Packing,
    /// Inputs of an output that share a scale; all of them if `None`.
    pub(crate) group_size: Option<usize>,
}

/// The order of codes, and where zero points are counted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// AutoAWQ's "GEMM" (Lin et al., 2023): eight outputs to a number, in the order 0, 2, 4, 6, 1, 3, 5, 7.
    Awq,
    /// GPTQ (Frantar et al., 2022): eight inputs to a number, in their order.
    Gptq {
        /// What is added to a stored zero point: 1, in version 2 of the format 0.
        zero_offset: u8,
    },
    /// compressed-tensors' "pack-quantized": output after output, eight inputs to a number; 8 is the zero point if none is
    /// stored.
    PackQuantized {
        /// Whether zero points are stored.
        has_zeros: bool,
    },
}

const FIELD: &str = "quantization_config";

/// Files of older writers, which hold what is now a field of `config.json`, and their method.
const OLDER: [(&str, &str); 2] = [("quant_config.json", "awq"), ("quantize_config.json", "gptq")];

impl Quantization {
    /// `None` for a folder whose weights are not quantised.
    ///
    /// # Errors
    /// A method, a number of bits or a layout that is not read.
    pub(super) fn read(folder: &Path, config: &JsonFile) -> Result<Option<Quantization>, ModelError> {
        if let Some(fields) = config.object(FIELD)? {
            let method = fields.text("quant_method")?.ok_or_else(|| fields.missing("quant_method"))?;
            return Quantization::parse(&fields, &method.to_lowercase()).map(Some);
        }
        for (name, method) in OLDER {
            if let Some(fields) = JsonFile::read(&folder.join(name))? {
                return Quantization::parse(&fields, method).map(Some);
            }
        }
        Ok(None)
    }

    fn parse(fields: &JsonFile, method: &str) -> Result<Quantization, ModelError> {
        match method {
            "awq" => awq(fields),
            "gptq" => gptq(fields),
            "compressed-tensors" => compressed_tensors(fields),
            other => Err(fields.unsupported(
                "quant_method",
                format!("{other:?}"),
                "\"awq\", \"gptq\" or \"compressed-tensors\"",
            )),
        }
    }
}

/// The first of these fields that is there.
fn first<'f>(fields: &JsonFile, names: [&'f str; 2]) -> &'f str {
    if fields.value(names[0]).is_none() { names[1] } else { names[0] }
}

fn check_bits(fields: &JsonFile, name: &str) -> Result<(), ModelError> {
    match fields.required_number(name)? {
        4.0 => Ok(()),
        bits => Err(fields.unsupported(name, bits, 4)),
    }
}

/// A field that is -1 for one group of all inputs.
fn group_size(fields: &JsonFile, name: &str) -> Result<Option<usize>, ModelError> {
    if fields.number(name)? == Some(-1.0) {
        return Ok(None);
    }
    fields.required_size(name).map(Some)
}

fn awq(fields: &JsonFile) -> Result<Quantization, ModelError> {
    check_bits(fields, first(fields, ["bits", "w_bit"]))?;
    if let Some(version) = fields.text("version")?
        && !version.eq_ignore_ascii_case("gemm")
    {
        return Err(fields.unsupported("version", format!("{version:?}"), "\"gemm\""));
    }
    if fields.flag("zero_point")? == Some(false) {
        return Err(fields.unsupported("zero_point", false, true));
    }
    fields.texts("modules_to_not_convert")?;
    let group_size = group_size(fields, first(fields, ["group_size", "q_group_size"]))?;
    Ok(Quantization { packing: Packing::Awq, group_size })
}

fn gptq(fields: &JsonFile) -> Result<Quantization, ModelError> {
    check_bits(fields, "bits")?;
    if fields.value("dynamic").is_some_and(|rules| rules.as_object().is_none_or(|rules| !rules.is_empty())) {
        return Err(fields.unsupported("dynamic", "rules for single modules", "none"));
    }
    let zero_offset = match fields.text("checkpoint_format")? {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(other) => {
            return Err(fields.unsupported("checkpoint_format", format!("{other:?}"), "\"gptq\" or \"gptq_v2\""));
        }
    };
    Ok(Quantization { packing: Packing::Gptq { zero_offset }, group_size: group_size(fields, "group_size")? })
}

fn compressed_tensors(fields: &JsonFile) -> Result<Quantization, ModelError> {
    let format = fields.text("format")?;
    if format != Some("pack-quantized") {
        return Err(fields.unsupported("format", format!("{format:?}"), "\"pack-quantized\""));
    }
    let groups = fields.object("config_groups")?.ok_or_else(|| fields.missing("config_groups"))?;
    let names: Vec<&str> = groups.keys().collect();
    let [name] = names[..] else {
        return Err(fields.unsupported("config_groups", format!("{} groups", names.len()), "one"));
    };
    let group = groups.object(name)?.ok_or_else(|| groups.missing(name))?;
    for activations in ["input_activations", "output_activations"] {
        if group.value(activations).is_some() {
            return Err(group.unsupported(activations, "a quantisation of its own", "none"));
        }
    }
    let weights = group.object("weights")?.ok_or_else(|| group.missing("weights"))?;
    check_bits(&weights, "num_bits")?;
    weights.expect_text("type", "int")?;
    let group_size = match weights.text("strategy")? {
        Some("group") => group_size(&weights, "group_size")?,
        Some("channel") => None,
        other => return Err(weights.unsupported("strategy", format!("{other:?}"), "\"group\" or \"channel\"")),
    };
    let has_zeros = weights.flag("symmetric")? == Some(false);
    Ok(Quantization { packing: Packing::PackQuantized { has_zeros }, group_size })
}
