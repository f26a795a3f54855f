//! The rotary embedding of a `config.json`, in its old and its new spelling.
//!
//! Old: `rope_theta` beside `rope_scaling: {"type" or "rope_type", ...}`. New: all of it in `rope_parameters`. A value
//! that is given twice must be given alike.

use super::JsonFile;
use crate::{
    ModelError,
    rope::{self, Llama3Scaling, Rope, RopeScaling},
};

/// Reads whichever spelling is there.
pub(crate) fn rope(config: &JsonFile) -> Result<Rope, ModelError> {
    let new = config.object("rope_parameters")?;
    let old = config.object("rope_scaling")?;
    let mut base = config.number("rope_theta")?;
    let mut rule = None;
    for object in [new, old].into_iter().flatten() {
        if let Some(inner) = object.number("rope_theta")? {
            if base.is_some_and(|outer| outer != inner) {
                return Err(object.corrupt("rope_theta", inner, format!("{base:?} as elsewhere in the file")));
            }
            base = Some(inner);
        }
        let inner = scaling(&object)?;
        if rule.is_some_and(|outer| outer != inner) {
            return Err(config.corrupt("rope_scaling", format!("{inner:?}"), "the rule of rope_parameters"));
        }
        rule = Some(inner);
    }
    Ok(Rope { base: rope::base(base, config.path(), "rope_theta")?, scaling: rule.unwrap_or(RopeScaling::Plain) })
}

fn scaling(object: &JsonFile) -> Result<RopeScaling, ModelError> {
    let (new, old) = (object.text("rope_type")?, object.text("type")?);
    let kind = match (new, old) {
        (Some(new), Some(old)) if new != old => {
            return Err(object.corrupt("type", format!("{old:?}"), format!("{new:?}, the rope_type")));
        }
        (new, old) => new.or(old).unwrap_or("default"),
    };
    let factor = || rope::factor(object.required_number("factor")?, object.path(), "rope factor");
    let (scaling, own_fields): (_, &[&str]) = match kind {
        "default" => (RopeScaling::Plain, &[]),
        // The original length only says where the factor came from.
        "linear" => (RopeScaling::Linear { factor: factor()? }, &["factor", "original_max_position_embeddings"]),
        "llama3" => (llama3(object, factor()?)?, &LLAMA3_FIELDS),
        other => {
            let found = format!("{other:?}");
            return Err(object.unsupported("rope_type", found, "\"default\", \"linear\" or \"llama3\""));
        }
    };
    let common = ["rope_type", "type", "rope_theta"];
    for key in object.keys().filter(|key| object.value(key).is_some()) {
        let whole = key == "partial_rotary_factor" && object.number(key)? == Some(1.0);
        if !common.contains(&key) && !own_fields.contains(&key) && !whole {
            return Err(object.unsupported(key, "the field", format!("no such field for rope_type {kind:?}")));
        }
    }
    Ok(scaling)
}

const LLAMA3_FIELDS: [&str; 4] = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];

fn llama3(object: &JsonFile, factor: f64) -> Result<RopeScaling, ModelError> {
    let positive = |key: &str| rope::factor(object.required_number(key)?, object.path(), key);
    let low_frequency_factor = positive("low_freq_factor")?;
    let high_frequency_factor = positive("high_freq_factor")?;
    if high_frequency_factor <= low_frequency_factor {
        let expected = format!("more than low_freq_factor, {low_frequency_factor}");
        return Err(object.corrupt("high_freq_factor", high_frequency_factor, expected));
    }
    Ok(RopeScaling::Llama3(Llama3Scaling {
        factor,
        low_frequency_factor,
        high_frequency_factor,
        original_context_length: positive("original_max_position_embeddings")?,
    }))
}
