//! Everything a backend can refuse.

use crate::WeightId;

/// Why a model could not be loaded or a step could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// A weight has another shape or format than its place in the spec asks for.
    #[error("weight {id}: found {found}, expected {expected}")]
    Weight {
        /// Which weight.
        id: WeightId,
        /// What the source handed out.
        found: String,
        /// What the spec asks for.
        expected: String,
    },
    /// The source of the weights failed.
    #[error("weight {id}: {reason}")]
    Source {
        /// Which weight.
        id: WeightId,
        /// The source's own message.
        reason: String,
    },
    /// The spec asks for something that this backend cannot do.
    #[error("{what}: found {found}, expected {expected}")]
    Unsupported {
        /// The property of the spec.
        what: &'static str,
        /// Its value.
        found: String,
        /// What the backend can do.
        expected: String,
    },
    /// The step's inputs contradict each other or the limits given at load.
    #[error("step inputs, {what}: found {found}, expected {expected}")]
    Inputs {
        /// Which field.
        what: &'static str,
        /// Its value.
        found: String,
        /// The bound it breaks.
        expected: String,
    },
    /// Memory could not be taken at load.
    #[error("{what}: could not take {bytes} bytes")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
    },
    /// A kernel failed while a step ran; the plan must not be used again.
    #[error("a kernel failed: {0}")]
    Kernel(String),
}
