//! The reasons for which a request is refused before anything is computed.

use std::error::Error;
use std::fmt;

use crate::request::RequestId;

/// A number that is out of its range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidParam {
    /// The name of the field.
    pub field: &'static str,
    /// The value it has.
    pub found: String,
    /// The values it may have.
    pub expected: &'static str,
}

impl fmt::Display for InvalidParam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, expected {}", self.field, self.found, self.expected)
    }
}

impl Error for InvalidParam {}

/// What bounds the length of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// The longest sequence that the model is served with (`max_model_len`).
    Context,
    /// The KV blocks of the whole pool.
    Pool,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Context => "the context",
            Limit::Pool => "the KV pool",
        })
    }
}

/// Why a request was refused. Each is the caller's mistake; nothing in the scheduler has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejected {
    /// The prompt has no token to continue from.
    EmptyPrompt,
    /// The prompt leaves no room for one generated token.
    PromptTooLong {
        /// Length of the prompt.
        tokens: usize,
        /// Most tokens, prompt and output together, that a sequence can have.
        limit: usize,
        /// Where that limit comes from.
        because: Limit,
        /// How many continuations are to have that length.
        n: usize,
        /// The parameter that asks for so many.
        field: &'static str,
    },
    /// More continuations are asked for than sequences can run at once.
    TooManyContinuations {
        /// How many.
        n: usize,
        /// The parameter that asks for so many.
        field: &'static str,
        /// The most that can run.
        limit: usize,
    },
    /// The beams of a search go on in the same step, and there are more of them than it has tokens.
    BeamTooWide {
        /// How many beams.
        width: usize,
        /// The most tokens of a step.
        limit: usize,
    },
    /// The pool does not hold all continuations at the length that is asked for.
    TooLongTogether {
        /// How many continuations.
        n: usize,
        /// The parameter that asks for so many.
        field: &'static str,
        /// The length of each, prompt and output.
        tokens: usize,
        /// The length that the pool holds of each.
        limit: usize,
    },
    /// A sampling parameter is out of range.
    Param(InvalidParam),
    /// A request with this id has not ended yet.
    DuplicateId(RequestId),
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rejected::EmptyPrompt => f.write_str("the prompt has 0 tokens, expected at least 1"),
            Rejected::PromptTooLong { tokens, limit, because, n: 1, .. } => write!(
                f,
                "the prompt has {tokens} tokens, expected at most {}: {because} holds {limit} tokens and one must be \
                 left to generate",
                limit.saturating_sub(1)
            ),
            Rejected::PromptTooLong { tokens, limit, because, n, field } => write!(
                f,
                "{field} is {n}: {because} holds {limit} tokens of each continuation, prompt and output, expected more than \
                 the prompt's {tokens}"
            ),
            Rejected::TooManyContinuations { n, field, limit } => {
                write!(f, "{field} is {n}, expected at most {limit}, the sequences that can run at once (max_num_seqs)")
            }
            Rejected::BeamTooWide { width, limit } => write!(
                f,
                "beam_width is {width}, expected at most {limit}, the tokens of a step (max_num_batched_tokens), since \
                 all beams go on in the same one"
            ),
            Rejected::TooLongTogether { n, field, tokens, limit } => write!(
                f,
                "{field} is {n}: prompt and max_tokens together are {tokens}, expected at most {limit}, which the KV pool holds \
                 of each of {n} continuations"
            ),
            Rejected::Param(param) => param.fmt(f),
            Rejected::DuplicateId(id) => {
                write!(f, "request id {} is in use, expected one that no unfinished request has", id.0)
            }
        }
    }
}

impl Error for Rejected {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Rejected::Param(param) => Some(param),
            _ => None,
        }
    }
}

impl From<InvalidParam> for Rejected {
    fn from(param: InvalidParam) -> Self {
        Rejected::Param(param)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::SamplingParams;

    #[test]
    fn a_refusal_says_what_was_found_and_what_was_expected() {
        let long = Rejected::PromptTooLong { tokens: 200, limit: 128, because: Limit::Pool, n: 1, field: "n" };
        assert_eq!(
            long.to_string(),
            "the prompt has 200 tokens, expected at most 127: the KV pool holds 128 tokens and one must be left to \
             generate"
        );
        let nan = SamplingParams { top_p: f32::NAN, ..Default::default() }.validate().unwrap_err();
        assert_eq!(Rejected::from(nan).to_string(), "top_p is NaN, expected above 0 and at most 1");
    }
}
