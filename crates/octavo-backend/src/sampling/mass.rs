//! Sums of exponentials in an order that a wide machine can keep, bit for bit.

use crate::numerics::{exp, fold_lanes};

/// Tokens whose masses are summed in `f32` before they are added to the `f64` total.
pub const MASS_BLOCK: usize = 256;

/// The unnormalised probability of a token: `exp` of its logit relative to the largest, over the temperature.
pub(super) fn mass(scaled: f32) -> f32 {
    exp(scaled)
}

/// What [`mass_units`] counts in: the smallest mass that can bring a set closer to its share.
const UNIT: f64 = 1.0 / (1u64 << 40) as f64;

/// A mass as a whole number of units, rounded down, so that sums of them do not depend on their order. A row that fits into
/// memory cannot overflow one.
pub fn mass_units(mass: f32) -> u64 {
    (f64::from(mass) / UNIT) as u64
}

/// Whether a sum of [`mass_units`] is a mass of at least `wanted`.
pub fn reaches(units: u64, wanted: f64) -> bool {
    units as f64 * UNIT >= wanted
}

/// A sum of masses over tokens in ascending order.
///
/// In each block of [`MASS_BLOCK`] tokens, token `t` goes to lane `t % 16`; the lanes are then added by halves
/// ([`fold_lanes`]) and the blocks in `f64`. Tokens that are left out weigh nothing, so a sum over few tokens has the bits
/// of one over all of them with the others at zero.
#[derive(Debug, Default)]
pub struct MassSum {
    lanes: [f32; 16],
    block: usize,
    total: f64,
}

impl MassSum {
    /// Adds the mass of a token that comes after all before it.
    pub fn add(&mut self, token: usize, mass: f32) {
        if token / MASS_BLOCK != self.block {
            self.close();
            self.block = token / MASS_BLOCK;
        }
        self.lanes[token % 16] += mass;
    }

    /// The sum.
    pub fn total(mut self) -> f64 {
        self.close();
        self.total
    }

    fn close(&mut self) {
        self.total += f64::from(fold_lanes(self.lanes));
        self.lanes = [0.0; 16];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tokens_weigh_what_they_weigh_among_all() {
        let values: Vec<f32> = (0..3000).map(|id| mass(-0.01 * (id % 700) as f32)).collect();
        let (mut sparse, mut dense) = (MassSum::default(), MassSum::default());
        for (id, &value) in values.iter().enumerate() {
            let member = id % 37 == 5 || (600..620).contains(&id);
            dense.add(id, if member { value } else { 0.0 });
            if member {
                sparse.add(id, value);
            }
        }
        assert_eq!(sparse.total(), dense.total());
    }

    #[test]
    fn a_sum_is_close_to_the_exact_one() {
        for step in [0.0f32, 1e-5, 3e-4, 0.01, 1.0] {
            let mut sum = MassSum::default();
            let mut exact = 0.0;
            for id in 0..150_000 {
                let scaled = -step * (id * 7919 % 150_000) as f32;
                sum.add(id, mass(scaled));
                exact += f64::from(scaled).exp();
            }
            let error = (sum.total() / exact).ln().abs();
            assert!(error < 5e-7, "step {step}: {error:e}");
        }
    }
}
