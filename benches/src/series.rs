//! What was measured several times.

/// The median of some measurements, and how far they spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Series {
    /// The smallest.
    pub least: f64,
    /// The one in the middle.
    pub median: f64,
    /// The largest.
    pub most: f64,
}

impl Series {
    /// Sums up at least one measurement.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(mut values: Vec<f64>) -> Series {
        values.sort_by(f64::total_cmp);
        Series { least: values[0], median: values[values.len() / 2], most: values[values.len() - 1] }
    }

    /// As [`Series::of`], without the hundredth at either end: of very many short measurements some are interrupted.
    ///
    /// # Panics
    /// If there is none.
    pub fn of_many(mut values: Vec<f64>) -> Series {
        values.sort_by(f64::total_cmp);
        let cut = values.len() / 100;
        Series::of(values[cut..values.len() - cut].to_vec())
    }

    /// All three times `factor`, with one decimal: `median [least to most]`.
    pub fn scaled(&self, factor: f64) -> String {
        format!("{:8.1} [{:.1} to {:.1}]", self.median * factor, self.least * factor, self.most * factor)
    }
}
