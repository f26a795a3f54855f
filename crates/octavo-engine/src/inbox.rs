//! Where results arrive: each caller opens an inbox and finds there what its requests gained.

use std::sync::{
    Arc, Mutex, PoisonError,
    mpsc::{Receiver, RecvTimeoutError, Sender, channel},
};
use std::time::Duration;

use octavo_backend::TokenLogprobs;
use octavo_sched::{FinishReason, Micros, RequestId, TokenId};

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// What one step gave to this inbox's requests.
    Outputs(Vec<Output>),
    /// The engine has ended and nothing more will come.
    Died(String),
}

/// What one step gave to one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The request.
    pub request: RequestId,
    /// Which of its continuations.
    pub choice: u32,
    /// New tokens, the stopping one included.
    pub tokens: Vec<TokenId>,
    /// One entry a token if the request asked for log-probabilities, otherwise empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// The sum of the tokens' log-probabilities: of an output of a beam search, which comes whole.
    pub cumulative_logprob: Option<f64>,
    /// One entry for each token of the prompt but the first, with the first output of a request that asked for them.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// The prompt's pooled hidden state, `[hidden_size]`, with the first output of a request that asked for it.
    pub pooled: Vec<f32>,
    /// Present in the last output of a continuation.
    pub finish: Option<Finish>,
    /// Whether this is the last output of the request.
    pub last: bool,
    /// The request's story up to here.
    pub story: Story,
}

impl Output {
    /// The end of a continuation to which nothing was added.
    pub(crate) fn ended(request: RequestId, choice: u32, reason: FinishReason, story: Story) -> Output {
        Output {
            request,
            choice,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            cumulative_logprob: None,
            prompt_logprobs: Vec::new(),
            pooled: Vec::new(),
            finish: Some(Finish { reason, stop_token: None }),
            last: false,
            story,
        }
    }
}

/// How a continuation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// The token that stopped it.
    pub stop_token: Option<TokenId>,
}

/// What happened to a request. Times are microseconds on the clock of [`crate::EngineHandle::now`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Story {
    /// It was submitted.
    pub arrival: Micros,
    /// Its first step was planned; `None` if it ended before.
    pub scheduled: Option<Micros>,
    /// Its first token was there.
    pub first_token: Option<Micros>,
    /// Its last token was there.
    pub last_token: Option<Micros>,
    /// Pieces in which its prompt was computed, and whatever a preemption took.
    pub chunks: u32,
    /// Times that it lost its blocks to others and was computed again.
    pub preemptions: u32,
    /// Prompt tokens that were found in the prefix cache when it was first admitted.
    pub cached_tokens: usize,
    /// The position of its first token that differed from all that the cache held there; `None` if none did, or nobody
    /// looked. The cache holds full blocks only: what ends within one, or is not there at all, differs from nothing.
    pub first_difference: Option<usize>,
}

/// The receiving end of a caller's requests, for one thread to read. Once it is dropped, what still runs for it is
/// aborted at its next output.
#[derive(Debug)]
pub struct Inbox {
    address: Address,
    receiver: Mutex<Receiver<Event>>,
}

/// Where to send an inbox's events. Clones share the sender, so that its place in memory tells inboxes apart.
#[derive(Debug, Clone)]
pub(crate) struct Address(Arc<Sender<Event>>);

/// Tells the addresses of inboxes apart for as long as one of them exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AddressId(usize);

impl Address {
    pub(crate) fn id(&self) -> AddressId {
        AddressId(Arc::as_ptr(&self.0).addr())
    }

    /// Whether there is still an inbox to send to.
    pub(crate) fn send(&self, event: Event) -> bool {
        self.0.send(event).is_ok()
    }
}

impl Inbox {
    /// An empty inbox, for any number of requests.
    pub fn new() -> Inbox {
        let (sender, receiver) = channel();
        Inbox { address: Address(Arc::new(sender)), receiver: Mutex::new(receiver) }
    }

    /// Waits for the next event up to `timeout`, then takes whatever else is there; empty when time ran out.
    pub fn recv(&self, timeout: Duration) -> Vec<Event> {
        let receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner);
        match receiver.recv_timeout(timeout) {
            Ok(first) => std::iter::once(first).chain(receiver.try_iter()).collect(),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Vec::new(),
        }
    }

    pub(crate) fn address(&self) -> Address {
        self.address.clone()
    }
}

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox::new()
    }
}
