//! The limits of the whole machine: [`crate::peak`] on all threads at once.

use std::{
    sync::{Barrier, OnceLock},
    time::Duration,
};

use octavo_backend::{BackendError, WeightFormat};

use crate::{
    arena::AlignedBytes,
    isa::Isa,
    options::ActivationType,
    peak::{dot_peak, product_rate, read_bandwidth},
};

/// Bytes, over all threads, that no last-level cache holds for long: reading them is reading memory.
pub const MEMORY_BYTES: usize = 1 << 30;

/// Memory for one measurement of the read bandwidth, allocated and touched once.
pub struct ReadBuffer {
    parts: Vec<AlignedBytes>,
}

impl ReadBuffer {
    /// `bytes` spread over `threads`.
    ///
    /// With [`MEMORY_BYTES`] the bandwidth is that of memory; with as many bytes as a model's weights it is what a step
    /// that reads them all can have, part of them from a cache that keeps them between steps.
    ///
    /// # Errors
    /// [`BackendError::Memory`] if they cannot be had.
    pub fn new(threads: usize, bytes: usize) -> Result<ReadBuffer, BackendError> {
        let threads = threads.max(1);
        let part = |_| AlignedBytes::zeroed("the buffer that bandwidth is measured with", bytes / threads);
        Ok(ReadBuffer { parts: (0..threads).map(part).collect::<Result<_, _>>()? })
    }

    /// Bytes a second that all threads together read, each at its best within `time`.
    pub fn bandwidth(&self, isa: Isa, time: Duration) -> f64 {
        on_all_threads(self.parts.len(), |index| read_bandwidth(isa, self.parts[index].elements::<u8>(), time))
    }
}

/// Integer multiplications and additions a second on `threads` threads at once, each at its best within `time`.
pub fn dot_peak_of(threads: usize, isa: Isa, time: Duration) -> f64 {
    on_all_threads(threads.max(1), |_| dot_peak(isa, time))
}

/// Operations a second of the matmul kernels on `threads` threads at once, over cached weights of a format, each at its best
/// within `time`.
///
/// # Errors
/// [`BackendError::Memory`] if it cannot be had.
pub fn product_rate_of(
    threads: usize,
    isa: Isa,
    format: WeightFormat,
    activations: ActivationType,
    time: Duration,
) -> Result<f64, BackendError> {
    let failed = OnceLock::new();
    let rate = on_all_threads(threads.max(1), |_| {
        product_rate(isa, format, activations, time).unwrap_or_else(|error| {
            // The first one will do.
            let _ = failed.set(error);
            0.0
        })
    });
    failed.into_inner().map_or(Ok(rate), Err)
}

/// The sum of what `measure` gives on `count` threads that start together.
fn on_all_threads(count: usize, measure: impl Fn(usize) -> f64 + Sync) -> f64 {
    let barrier = Barrier::new(count);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|index| {
                let (barrier, measure) = (&barrier, &measure);
                scope.spawn(move || {
                    barrier.wait();
                    measure(index)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_adds_its_own_share() {
        assert_eq!(on_all_threads(3, |index| index as f64), 3.0);
        assert!(dot_peak_of(1, Isa::Scalar, Duration::from_millis(1)) > 0.0);
    }
}
