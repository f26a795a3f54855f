//! The door to an engine that runs on its own thread. Whatever a caller can get wrong is refused here.

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicU64, Ordering},
    mpsc::{Sender, channel},
};
use std::{thread::JoinHandle, time::Instant};

use octavo_backend::Backend;
use octavo_sched::{
    AdmissionLimits, BlockState, InvalidParam, Micros, Rejected, Request, RequestId, SamplingParams, TokenId,
};

use crate::{
    Engine, EngineDead, Extras, Grammar, Inbox, Stats, SubmitError,
    worker::{self, Command, Obituary},
};

/// Log-probabilities that are reported of one prompt: a quarter of a gigabyte. They are kept until it is computed.
const MOST_PROMPT_LOGPROBS: usize = 1 << 25;

/// A prompt to continue.
#[derive(Clone)]
pub struct Submission {
    /// Token ids.
    pub prompt: Vec<TokenId>,
    /// Replaces `params.seed`; `None` derives one from the engine's seed and the number of submissions so far.
    pub seed: Option<u64>,
    /// How to continue.
    pub params: SamplingParams,
    /// What the output has to follow.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// What to make of the prompt's hidden states.
    pub pooling: Option<Pooling>,
    /// From now until it ends at the latest.
    pub deadline: Option<Micros>,
}

/// One vector for a whole prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The hidden state of its last token.
    Last,
    /// The mean of all its hidden states.
    Mean,
}

impl Submission {
    /// A prompt to continue without a grammar or a deadline.
    pub fn new(prompt: Vec<TokenId>, params: SamplingParams) -> Submission {
        Submission { prompt, seed: None, params, grammar: None, pooling: None, deadline: None }
    }
}

/// A submission that was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// Names it in outputs and in [`EngineHandle::abort`].
    pub id: RequestId,
    /// The seed it runs with.
    pub seed: u64,
}

/// A running engine. Any thread may use it; dropping it ends the engine.
pub struct EngineHandle {
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    obituary: Obituary,
    limits: AdmissionLimits,
    vocab_size: usize,
    seed: u64,
    submitted: AtomicU64,
    clock: Instant,
}

impl EngineHandle {
    /// Puts `engine` on a thread of its own.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub fn start<B: Backend>(engine: Engine<B>) -> std::io::Result<EngineHandle> {
        let (commands, receiver) = channel();
        let obituary: Obituary = Arc::new(OnceLock::new());
        let (limits, vocab_size, seed, clock) = (engine.limits(), engine.vocab_size(), engine.seed(), engine.clock());
        let shared = Arc::clone(&obituary);
        let thread = std::thread::Builder::new()
            .name("octavo-engine".into())
            .spawn(move || worker::run(engine, receiver, &shared))?;
        let thread = Mutex::new(Some(thread));
        Ok(EngineHandle { commands, thread, obituary, limits, vocab_size, seed, submitted: AtomicU64::new(0), clock })
    }

    /// Queues all submissions or none; their outputs arrive in `inbox`.
    ///
    /// # Errors
    /// The first submission that can never run, or a dead engine.
    pub fn submit(&self, submissions: Vec<Submission>, inbox: &Inbox) -> Result<Vec<Accepted>, SubmitError> {
        for (index, submission) in submissions.iter().enumerate() {
            self.check(index, submission)?;
        }
        self.alive()?;
        let arrival = self.now();
        let first = self.submitted.fetch_add(submissions.len() as u64, Ordering::Relaxed);
        let requests: Vec<(Request, Extras)> =
            submissions.into_iter().zip(first..).map(|(one, number)| self.request(one, number, arrival)).collect();
        let accepted =
            requests.iter().map(|(request, _)| Accepted { id: request.id, seed: request.params.seed }).collect();
        self.send(Command::Add(requests, inbox.address()))?;
        // The thread writes its obituary before it empties the channel for the last time.
        self.alive()?;
        Ok(accepted)
    }

    /// Ends requests; each still answers with a last output. Ids that have ended are passed over.
    pub fn abort(&self, ids: &[RequestId]) {
        // A dead engine has nothing left to abort.
        let _ = self.send(Command::Abort(ids.to_vec()));
    }

    /// Counts as of the end of the current step, after everything asked before.
    ///
    /// # Errors
    /// A dead engine.
    pub fn stats(&self) -> Result<Stats, EngineDead> {
        self.ask(Command::Stats)
    }

    /// The state of every KV block, group by group, as of the end of the current step.
    ///
    /// # Errors
    /// A dead engine.
    pub fn block_map(&self) -> Result<Vec<Vec<BlockState>>, EngineDead> {
        self.ask(Command::BlockMap)
    }

    /// Forgets what the prefix cache holds and gives the number of blocks whose content could have been found. Requests
    /// that run keep their blocks; whatever is submitted later finds none of today's.
    ///
    /// # Errors
    /// A dead engine.
    pub fn reset_prefix_cache(&self) -> Result<usize, EngineDead> {
        self.ask(Command::ResetPrefixCache)
    }

    /// Ends one continuation, in whose text a stop string was found; it answers with a last output unless it has ended.
    pub fn stop(&self, id: RequestId, choice: u32) {
        // A dead engine has nothing left to stop.
        let _ = self.send(Command::Stop(id, choice));
    }

    /// Makes the engine's thread panic after its current step, as a faulty kernel would, though without a word on stderr:
    /// for tests of what callers see then. It cannot be undone.
    pub fn inject_panic(&self, message: &str) {
        // A dead engine cannot die again.
        let _ = self.send(Command::Panic(message.to_owned()));
    }

    /// Ends the engine after its current step and waits for it. Requests that still run end with an event.
    pub fn close(&self) {
        let _ = self.send(Command::Shutdown);
        // Held while waiting, so that whoever closes too waits as well.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // The thread catches its own panics.
            let _ = thread.join();
        }
    }

    /// Microseconds on the clock of every [`crate::Story`].
    pub fn now(&self) -> Micros {
        self.clock.elapsed().as_micros() as Micros
    }

    fn request(&self, submission: Submission, number: u64, arrival: Micros) -> (Request, Extras) {
        let Submission { prompt, seed, mut params, grammar, pooling, deadline } = submission;
        params.seed = seed.unwrap_or_else(|| derived_seed(self.seed, number));
        let deadline = deadline.map(|deadline| arrival.saturating_add(deadline));
        (Request { id: RequestId(number), prompt, params, arrival, deadline }, Extras { grammar, pooling })
    }

    fn check(&self, index: usize, submission: &Submission) -> Result<(), SubmitError> {
        let Submission { prompt, params, .. } = submission;
        self.limits.check(prompt.len(), params).map_err(|reason| SubmitError::Rejected { index, reason })?;
        if params.beam.is_some() && submission.grammar.is_some() {
            let (field, found, expected) = ("beam_width", "a beam search that has to follow a grammar", "one of them");
            let reason = Rejected::Param(InvalidParam { field, found: found.to_owned(), expected });
            return Err(SubmitError::Rejected { index, reason });
        }
        let vocab_size = self.vocab_size;
        if let Some(position) = prompt.iter().position(|&token| token as usize >= vocab_size) {
            return Err(SubmitError::TokenOutOfRange { index, position, token: prompt[position], vocab_size });
        }
        let num_reported = params.prompt_logprobs.map_or(0, |top| (top as usize + 1).saturating_mul(prompt.len()));
        if num_reported > MOST_PROMPT_LOGPROBS {
            let (field, found) = ("prompt_logprobs", format!("{num_reported} numbers for {} tokens", prompt.len()));
            let reason = Rejected::Param(InvalidParam { field, found, expected: "at most 33554432 numbers" });
            return Err(SubmitError::Rejected { index, reason });
        }
        for (field, found) in [("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)] {
            if let Some(found) = found.filter(|&found| found as usize > vocab_size) {
                return Err(SubmitError::TooManyLogprobs { index, field, found, vocab_size });
            }
        }
        let bias: Vec<TokenId> = params.logit_bias.iter().map(|&(token, _)| token).collect();
        let fields = [
            ("stop_token_ids", params.stop_token_ids.as_slice()),
            ("logit_bias", &bias),
            ("allowed_token_ids", params.allowed_token_ids.as_deref().unwrap_or_default()),
            ("bad_words", &params.bad_words.concat()),
        ];
        for (field, tokens) in fields {
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab_size) {
                return Err(SubmitError::ParamTokenOutOfRange { index, field, token, vocab_size });
            }
        }
        Ok(())
    }

    fn alive(&self) -> Result<(), EngineDead> {
        if self.obituary.get().is_some() { Err(self.dead()) } else { Ok(()) }
    }

    fn dead(&self) -> EngineDead {
        let reason = self.obituary.get().cloned();
        EngineDead { reason: reason.unwrap_or_else(|| "its thread is gone".into()) }
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, EngineDead> {
        let (reply, answer) = channel();
        self.send(command(reply))?;
        answer.recv().map_err(|_| self.dead())
    }

    fn send(&self, command: Command) -> Result<(), EngineDead> {
        self.commands.send(command).map_err(|_| self.dead())
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.close();
    }
}

/// A seed for submission `number`: SplitMix64 (Steele, Lea, Flood, OOPSLA'14) over both.
fn derived_seed(engine_seed: u64, number: u64) -> u64 {
    let mut z = engine_seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
