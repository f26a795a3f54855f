//! What can go wrong between a caller and the engine.

use octavo_backend::BackendError;
use octavo_sched::{Rejected, TokenId};

/// The engine's thread has ended; nothing can be computed any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the engine has ended: {reason}")]
pub struct EngineDead {
    /// Why.
    pub reason: String,
}

/// Why a list of submissions was refused; none of them was queued.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The scheduler can never run one of them.
    #[error("prompt {index}: {reason}")]
    Rejected {
        /// Its place in the list.
        index: usize,
        /// The scheduler's reason.
        reason: Rejected,
    },
    /// A token is not in the vocabulary.
    #[error("prompt {index}: token id {token} at position {position}, expected 0 to {}", vocab_size - 1)]
    TokenOutOfRange {
        /// The prompt's place in the list.
        index: usize,
        /// The token's place in the prompt.
        position: usize,
        /// The id.
        token: TokenId,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A token that a parameter names is not in the vocabulary.
    #[error("prompt {index}: {field} names token id {token}, expected 0 to {}", vocab_size - 1)]
    ParamTokenOutOfRange {
        /// The prompt's place in the list.
        index: usize,
        /// The parameter.
        field: &'static str,
        /// The id.
        token: TokenId,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// More log-probabilities are asked for than there are tokens.
    #[error("prompt {index}: {field} is {found}, expected at most {vocab_size}, the size of the vocabulary")]
    TooManyLogprobs {
        /// The prompt's place in the list.
        index: usize,
        /// The parameter.
        field: &'static str,
        /// What was asked for.
        found: u32,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// The engine's thread has ended.
    #[error(transparent)]
    Dead(#[from] EngineDead),
}

/// Why a step could not be done; the engine cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// There is work, but the scheduler planned none of it.
    #[error("the scheduler planned nothing although {running} sequences run and {waiting} wait")]
    Stalled {
        /// Running sequences.
        running: usize,
        /// Waiting requests.
        waiting: usize,
    },
}
