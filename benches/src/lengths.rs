//! Lengths of prompts and outputs like those that requests have: lognormal, with the means that Kwon et al. (SOSP'23,
//! figure 11) give for two collections of real ones.

use std::f64::consts::TAU;

/// The longest prompt and the longest output, in tokens.
pub const LONGEST: usize = 1024;

/// SplitMix64 (Steele, Lea, Flood, OOPSLA'14): the same numbers everywhere.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator that follows from `seed` alone.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform above 0, up to 1.
    fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller, 1958).
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (TAU * self.uniform()).cos()
    }
}

/// A lognormal distribution, clipped to 1 up to [`LONGEST`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lognormal {
    log_median: f64,
    sigma: f64,
}

impl Lognormal {
    /// The one whose mean, after clipping, is `mean`.
    pub fn with_mean(mean: f64, sigma: f64) -> Lognormal {
        let (mut low, mut high) = (0.0, (LONGEST as f64).ln());
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            let too_small = Lognormal { log_median: middle, sigma }.mean() < mean;
            (low, high) = if too_small { (middle, high) } else { (low, middle) };
        }
        Lognormal { log_median: low, sigma }
    }

    /// Its mean, by the midpoint rule over ten deviations either way.
    fn mean(&self) -> f64 {
        const STEPS: usize = 4000;
        let width = 20.0 / STEPS as f64;
        let part = |step: usize| {
            let z = -10.0 + (step as f64 + 0.5) * width;
            (-0.5 * z * z).exp() / TAU.sqrt() * width * self.at(z)
        };
        (0..STEPS).map(part).sum()
    }

    /// A length, rounded to whole tokens.
    pub fn draw(&self, random: &mut Random) -> usize {
        self.at(random.normal()).round() as usize
    }

    fn at(&self, deviations: f64) -> f64 {
        (self.log_median + self.sigma * deviations).exp().clamp(1.0, LONGEST as f64)
    }
}

/// How long prompts and outputs are; independent of each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    /// Of prompts.
    pub prompt: Lognormal,
    /// Of outputs.
    pub output: Lognormal,
}

impl Lengths {
    /// Like conversations with a chat model: 161 tokens in and 338 out on average, widely spread.
    pub fn sharegpt() -> Lengths {
        Lengths { prompt: Lognormal::with_mean(161.31, 1.15), output: Lognormal::with_mean(337.99, 0.95) }
    }

    /// Like short instructions: 19 tokens in and 58 out on average.
    pub fn alpaca() -> Lengths {
        Lengths { prompt: Lognormal::with_mean(19.31, 0.5), output: Lognormal::with_mean(58.45, 0.85) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_lengths_have_the_mean_and_stay_within_bounds() {
        let (sharegpt, alpaca) = (Lengths::sharegpt(), Lengths::alpaca());
        let expected =
            [(sharegpt.prompt, 161.31), (sharegpt.output, 337.99), (alpaca.prompt, 19.31), (alpaca.output, 58.45)];
        for (distribution, mean) in expected {
            let mut random = Random::new(1);
            let lengths: Vec<usize> = (0..100_000).map(|_| distribution.draw(&mut random)).collect();
            let found = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
            // Four deviations of the mean of so many, the widest of which has one of 270.
            assert!((found - mean).abs() < 4.0 * 270.0 / 316.0, "mean {found}, expected {mean}");
            assert!(lengths.iter().all(|length| (1..=LONGEST).contains(length)));
        }
    }

    #[test]
    fn the_logarithm_of_a_length_has_the_deviation_asked_for() {
        let mut random = Random::new(2);
        let distribution = Lognormal::with_mean(58.45, 0.85);
        let logs: Vec<f64> = (0..100_000).map(|_| (distribution.draw(&mut random) as f64).ln()).collect();
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        let deviation = (logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / logs.len() as f64).sqrt();
        assert!((deviation - 0.85).abs() < 0.02, "{deviation}");
    }

    #[test]
    fn random_numbers_are_those_of_splitmix64() {
        // The first outputs for seed 1234567 that the generator's public test vectors list.
        let mut random = Random::new(1_234_567);
        assert_eq!([random.bits(), random.bits()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }
}
