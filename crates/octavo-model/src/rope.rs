//! Rotary frequencies: the base and the rules that stretch a context, folded into one number a pair.

use std::{f64::consts::TAU, path::Path};

use octavo_backend::RopeSpec;

use crate::ModelError;

/// The base of checkpoints that do not name theirs (Su et al., 2021).
pub(crate) const DEFAULT_BASE: f64 = 10_000.0;

/// A model's rotary embedding as its checkpoint describes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rope {
    pub(crate) base: f64,
    pub(crate) scaling: RopeScaling,
}

/// How frequencies differ from the plain ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RopeScaling {
    Plain,
    /// All divided by `factor` (Chen et al., 2023).
    Linear {
        factor: f64,
    },
    Llama3(Llama3Scaling),
}

/// Llama 3.1's rule: wavelengths that fit the original context many times stay, long ones are divided by `factor`,
/// those between are blended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Llama3Scaling {
    pub(crate) factor: f64,
    /// Turns in the original context below which a frequency is divided in full.
    pub(crate) low_frequency_factor: f64,
    /// Turns above which it stays.
    pub(crate) high_frequency_factor: f64,
    pub(crate) original_context_length: f64,
}

impl Rope {
    /// One inverse frequency a pair of a head's `head_size` values.
    pub(crate) fn spec(&self, head_size: usize) -> RopeSpec {
        let mut spec = RopeSpec::plain(self.base, head_size);
        for frequency in &mut spec.inverse_frequencies {
            *frequency = match self.scaling {
                RopeScaling::Plain => *frequency,
                RopeScaling::Linear { factor } => *frequency / factor,
                RopeScaling::Llama3(rule) => rule.apply(*frequency),
            };
        }
        spec
    }
}

impl Llama3Scaling {
    fn apply(&self, frequency: f64) -> f64 {
        let turns = self.original_context_length * frequency / TAU;
        let (low, high) = (self.low_frequency_factor, self.high_frequency_factor);
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        frequency * kept + frequency / self.factor * (1.0 - kept)
    }
}

/// The base as a checkpoint gives it, or [`DEFAULT_BASE`] with a notice.
pub(crate) fn base(value: Option<f64>, file: &Path, field: &str) -> Result<f64, ModelError> {
    match value {
        Some(base) if base.is_finite() && base > 0.0 => Ok(base),
        Some(base) => Err(ModelError::corrupt(file, field, base, "a finite number above 0")),
        None => {
            log::info!("{}: {field} is absent, taking {DEFAULT_BASE}", file.display());
            Ok(DEFAULT_BASE)
        }
    }
}

/// A scaling factor, which must be a positive number.
pub(crate) fn factor(value: f64, file: &Path, field: &str) -> Result<f64, ModelError> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(ModelError::corrupt(file, field, value, "a finite number above 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let plain = Rope { base: 500_000.0, scaling: RopeScaling::Plain }.spec(8);
        let linear = Rope { base: 500_000.0, scaling: RopeScaling::Linear { factor: 2.0 } }.spec(8);
        for (plain, linear) in plain.inverse_frequencies.iter().zip(linear.inverse_frequencies) {
            assert_eq!(linear, plain / 2.0);
        }
    }

    #[test]
    fn llama3_scaling_keeps_short_waves_and_divides_long_ones() {
        let scaling = RopeScaling::Llama3(Llama3Scaling {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context_length: 8192.0,
        });
        let frequencies = Rope { base: 500_000.0, scaling }.spec(128).inverse_frequencies;
        // Computed apart from this code, from the rule as Llama 3.1 states it by wavelengths, with 50 digits.
        let expected = [
            (0, 1.0),
            (10, 0.12868737343265052),
            (28, 0.003211445994752591),
            (29, 0.0021665707635033587),
            (30, 0.0013718935677611381),
            (32, 0.0005248461609929547),
            (35, 9.556212353964683e-05),
            (36, 7.78465527393245e-05),
            (63, 3.068925988914511e-07),
        ];
        for (pair, value) in expected {
            assert!((frequencies[pair] / value - 1.0f64).abs() < 1e-13, "pair {pair}: {}", frequencies[pair]);
        }
    }
}
