//! The limits of the whole machine: [`crate::peak`] on all threads at once.

use std::{sync::Barrier, time::Duration};

use octavo_backend::BackendError;

use crate::{
    arena::AlignedBytes,
    isa::Isa,
    peak::{dot_peak, read_bandwidth},
};

/// Bytes that each thread reads: too many for a share of a last-level cache to flatter the figure.
const BYTES_PER_THREAD: usize = 512 << 20;

/// Memory for one measurement of the read bandwidth, allocated and touched once.
pub struct ReadBuffer {
    parts: Vec<AlignedBytes>,
}

impl ReadBuffer {
    /// 512 MiB for each of `threads`.
    ///
    /// # Errors
    /// [`BackendError::Memory`] if they cannot be had.
    pub fn new(threads: usize) -> Result<ReadBuffer, BackendError> {
        let part = |_| AlignedBytes::zeroed("the buffer that bandwidth is measured with", BYTES_PER_THREAD);
        Ok(ReadBuffer { parts: (0..threads.max(1)).map(part).collect::<Result<_, _>>()? })
    }

    /// Bytes a second that all threads together read from memory, each at its best within `time`.
    pub fn bandwidth(&self, isa: Isa, time: Duration) -> f64 {
        on_all_threads(self.parts.len(), |index| read_bandwidth(isa, self.parts[index].elements::<u8>(), time))
    }
}

/// Integer multiplications and additions a second on `threads` threads at once, each at its best within `time`.
pub fn dot_peak_of(threads: usize, isa: Isa, time: Duration) -> f64 {
    on_all_threads(threads.max(1), |_| dot_peak(isa, time))
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
