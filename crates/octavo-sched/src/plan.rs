//! What goes from the scheduler to whatever runs the model, and what comes back. Plain data throughout.

use crate::request::{RequestId, SeqId, TokenId};

/// One iteration: which tokens to compute. The blocks are in the tables of each [`Sequence`](crate::Sequence).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepPlan {
    /// One span for each sequence in the step, in order of arrival.
    pub spans: Vec<SeqSpan>,
    /// Blocks to copy before anything is computed.
    pub copies: Vec<BlockCopy>,
    /// Sequences that lost their blocks and wait to be computed again.
    pub preempted: Vec<SeqId>,
    /// Requests that left the queue, for the first time or after a preemption.
    pub admitted: Vec<Admitted>,
}

/// A request that left the queue, and how much of it need not be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    /// The request.
    pub request: RequestId,
    /// Tokens whose keys and values were found in the prefix cache.
    pub cached_tokens: usize,
    /// The position of the first token that differs from all that the cache holds there; `None` if none does, or nobody
    /// looked. The cache holds full blocks only: what ends within one, or is not there at all, differs from nothing.
    pub first_difference: Option<usize>,
}

/// The tokens of one sequence to compute in this iteration: positions `start..start + len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeqSpan {
    /// The sequence.
    pub seq: SeqId,
    /// First position; everything before it has been computed.
    pub start: usize,
    /// Number of positions, at least 1.
    pub len: usize,
    /// How many of them, at the end, are guesses to verify.
    pub drafts: usize,
    /// How many tokens are sampled after it: one if it reaches the last known token, or one for each continuation if
    /// they part there, otherwise none. All beams of a search reach theirs in the same step, each with one.
    pub samples: usize,
}

impl SeqSpan {
    /// The position after the last.
    pub fn end(&self) -> usize {
        self.start + self.len
    }
}

/// A block whose content a sequence needs a copy of, because others go on reading the original.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Index of the layer group.
    pub group: usize,
    /// The block to read.
    pub from: u32,
    /// The block to write.
    pub to: u32,
}

/// What came of one sample.
#[derive(Debug, Clone, PartialEq)]
pub enum StepRun {
    /// The sampled tokens in order: as many drafts as were right, and one more.
    Tokens(Vec<TokenId>),
    /// The likeliest next tokens, descending, twice as many as the beam is wide: what a search chooses from.
    Candidates(Vec<Candidate>),
    /// No token could be sampled, as with logits that are not numbers. The sequence ends, the others go on.
    Failed,
}

/// A token that may come next in a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Its id.
    pub token: TokenId,
    /// Its natural log-probability, given all before it.
    pub logprob: f32,
    /// Its place among all, 1 the likeliest.
    pub rank: u32,
}

/// What a beam search found: an output, token by token.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// The sum of the tokens' log-probabilities.
    pub cumulative_logprob: f64,
    /// One for each token of the output.
    pub tokens: Vec<Candidate>,
}

/// What a step did for one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    /// The request that the sequence belongs to.
    pub request: RequestId,
    /// The sequence.
    pub seq: SeqId,
    /// The tokens appended, the one that stopped it included.
    pub tokens: Vec<TokenId>,
    /// Why it ended, if it did.
    pub finish: Option<FinishReason>,
    /// The token that ended it, with [`FinishReason::Stop`].
    pub stop_token: Option<TokenId>,
    /// Whether the request has ended with it: no continuation of it goes on.
    pub last: bool,
    /// Of a beam search, which gives its outputs whole and at its end, the best first; `seq` then counts them.
    pub hypothesis: Option<Hypothesis>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token or an end-of-sequence token was sampled.
    Stop,
    /// `max_tokens` or the length limit of the engine was reached.
    Length,
    /// The caller took it back.
    Abort,
    /// Its time was up.
    Deadline,
    /// Nothing could be sampled.
    Error,
}

impl FinishReason {
    /// The name that callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Deadline => "deadline",
            FinishReason::Error => "error",
        }
    }
}
