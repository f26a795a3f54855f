//! Where Python finds what its requests gained. Tokens become text here, on the caller's thread, without the GIL.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use octavo_engine::{
    EngineDead, EngineHandle, Event, FinishReason, Inbox, Micros, Output, RequestId, Story, TokenLogprobs,
};
use pyo3::{IntoPyObjectExt, prelude::*};

use crate::{
    errors::{self, InvalidRequest},
    reader::{Reader, Reading, StopReason},
    tokenizer::{ControlTokensIn, Tokenizer},
};

/// No single wait is longer; the caller loops.
const LONGEST_WAIT: f64 = 3600.0;

/// The receiving end of a caller's requests. Dropping it aborts what still runs for it.
#[pyclass(name = "Inbox", module = "octavo._octavo", frozen)]
pub struct InboxClass {
    pub(crate) inbox: Inbox,
    /// The requests that have not ended.
    pub(crate) requests: Mutex<HashMap<RequestId, Pending>>,
    handle: Arc<EngineHandle>,
    tokenizer: Option<Arc<Tokenizer>>,
    clock_offset: f64,
    died: Mutex<Option<String>>,
    process: u32,
}

/// What one step gave to one continuation of a request.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Delta {
    /// The request's id.
    #[pyo3(get)]
    request: u64,
    /// Which of its continuations.
    #[pyo3(get)]
    choice: u32,
    /// The text that became complete.
    #[pyo3(get)]
    text: String,
    /// The new tokens, a stopping one included.
    #[pyo3(get)]
    token_ids: Vec<u32>,
    /// For each token: itself, then the likeliest ones, as (id, log-probability, rank, text). None if not asked for.
    #[pyo3(get)]
    logprobs: Option<Vec<Vec<TokenReport>>>,
    /// The sum of the tokens' log-probabilities, of an output of a beam search.
    #[pyo3(get)]
    cumulative_logprob: Option<f64>,
    /// As `logprobs`, for each token of the prompt but the first: with the first output of a request that asked.
    #[pyo3(get)]
    prompt_logprobs: Option<Vec<Vec<TokenReport>>>,
    /// The prompt's pooled hidden state: with the first output of a request that asked.
    #[pyo3(get)]
    pooled: Option<Vec<f32>>,
    /// Why the continuation ended; None while it goes on.
    #[pyo3(get)]
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    /// Whether nothing more comes for the request.
    #[pyo3(get)]
    last: bool,
    /// What happened to the request so far.
    #[pyo3(get)]
    story: StoryClass,
}

type TokenReport = (u32, f32, u32, Option<String>);

/// What happened to a request. Times are in seconds of `time.monotonic`.
#[pyclass(name = "Story", module = "octavo._octavo", frozen, get_all)]
#[derive(Debug, Clone, Copy)]
pub struct StoryClass {
    /// It was submitted.
    arrival: f64,
    /// It left the queue; None if it ended before.
    scheduled: Option<f64>,
    /// Its first token was there.
    first_token: Option<f64>,
    /// Its last token was there.
    last_token: Option<f64>,
    /// Pieces in which its prompt was computed, and whatever a preemption took.
    chunks: u32,
    /// Times that it lost its blocks.
    preemptions: u32,
    /// Prompt tokens found in the prefix cache.
    cached_tokens: usize,
    /// The position of the first token that differed from what the cache held.
    first_difference: Option<usize>,
}

impl StoryClass {
    fn new(story: &Story, clock_offset: f64) -> StoryClass {
        let seconds = |at: Micros| at as f64 * 1e-6 + clock_offset;
        StoryClass {
            arrival: seconds(story.arrival),
            scheduled: story.scheduled.map(seconds),
            first_token: story.first_token.map(seconds),
            last_token: story.last_token.map(seconds),
            chunks: story.chunks,
            preemptions: story.preemptions,
            cached_tokens: story.cached_tokens,
            first_difference: story.first_difference,
        }
    }
}

/// A request that has not ended.
pub(crate) struct Pending {
    pub(crate) reader: Reader,
    /// The prompt, while the log-probabilities of its tokens are to come.
    pub(crate) scored_prompt: Option<Vec<u32>>,
}

#[pymethods]
impl Delta {
    /// The stop token or stop string that the caller had asked for.
    #[getter]
    fn stop_reason<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match &self.stop_reason {
            None => Ok(None),
            Some(StopReason::Token(id)) => id.into_bound_py_any(py).map(Some),
            Some(StopReason::Text(text)) => text.into_bound_py_any(py).map(Some),
        }
    }
}

#[pymethods]
impl InboxClass {
    /// Wait up to `timeout` seconds for outputs, then take whatever is there; empty when time ran out.
    fn recv(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<Delta>> {
        if !(0.0..=LONGEST_WAIT).contains(&timeout) {
            let expected = format!("expected 0 to {LONGEST_WAIT} seconds");
            return Err(InvalidRequest::new_err(format!("timeout: found {timeout}, {expected}")));
        }
        py.detach(|| self.receive(Duration::from_secs_f64(timeout))).map_err(|error| errors::dead(&error))
    }

    /// End every request that still runs for this inbox.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.abort_all());
    }
}

impl InboxClass {
    pub(crate) fn new(handle: Arc<EngineHandle>, tokenizer: Option<Arc<Tokenizer>>, clock_offset: f64) -> InboxClass {
        InboxClass {
            inbox: Inbox::new(),
            requests: Mutex::default(),
            handle,
            tokenizer,
            clock_offset,
            died: Mutex::default(),
            process: std::process::id(),
        }
    }

    fn receive(&self, timeout: Duration) -> Result<Vec<Delta>, EngineDead> {
        let mut died = self.died.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = died.clone() {
            return Err(EngineDead { reason });
        }
        let events = self.inbox.recv(timeout);
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let mut deltas = Vec::new();
        for event in events {
            match event {
                Event::Outputs(outputs) => {
                    deltas.extend(outputs.into_iter().filter_map(|output| self.read(&mut requests, output)));
                }
                Event::Died(reason) => *died = Some(reason),
            }
        }
        // What arrived before the end is handed out first.
        match died.clone() {
            Some(reason) if deltas.is_empty() => Err(EngineDead { reason }),
            _ => Ok(deltas),
        }
    }

    fn read(&self, requests: &mut HashMap<RequestId, Pending>, mut output: Output) -> Option<Delta> {
        let pending = requests.get_mut(&output.request)?;
        let Reading { text, finish_reason, stop_reason, last, is_news } =
            pending.reader.read(self.tokenizer.as_deref(), &mut output)?;
        if is_news {
            self.handle.stop(output.request, output.choice);
        }
        // The first token of a prompt follows nothing. A request that ended before it was computed brings no rows.
        let rows = &output.prompt_logprobs;
        let scored_prompt = pending.scored_prompt.take_if(|prompt| prompt.len() == rows.len() + 1);
        if last {
            requests.remove(&output.request);
        }
        Some(Delta {
            request: output.request.0,
            choice: output.choice,
            text,
            logprobs: (!output.logprobs.is_empty()).then(|| self.reports(&output.tokens, &output.logprobs)),
            cumulative_logprob: output.cumulative_logprob,
            prompt_logprobs: scored_prompt.map(|prompt| self.reports(&prompt[1..], rows)),
            pooled: (!output.pooled.is_empty()).then_some(output.pooled),
            token_ids: output.tokens,
            finish_reason: finish_reason.map(FinishReason::as_str),
            stop_reason,
            last,
            story: StoryClass::new(&output.story, self.clock_offset),
        })
    }

    fn reports(&self, tokens: &[u32], rows: &[TokenLogprobs]) -> Vec<Vec<TokenReport>> {
        tokens.iter().zip(rows).map(|(&token, row)| self.report(token, row)).collect()
    }

    /// Equal log-probabilities share the better rank.
    fn report(&self, token: u32, row: &TokenLogprobs) -> Vec<TokenReport> {
        let text = |id| self.tokenizer.as_deref().map(|tokenizer| tokenizer.decode(&[id], ControlTokensIn::Kept));
        let mut report = vec![(token, row.logprob, row.rank, text(token))];
        let mut rank = 1;
        for (index, &(id, logprob)) in row.top.iter().enumerate() {
            if index > 0 && logprob < row.top[index - 1].1 {
                rank = index as u32 + 1;
            }
            report.push((id, logprob, rank, text(id)));
        }
        report
    }

    fn abort_all(&self) {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let ids: Vec<RequestId> = requests.keys().copied().collect();
        if !ids.is_empty() {
            self.handle.abort(&ids);
        }
    }
}

impl Drop for InboxClass {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.abort_all();
        } else {
            // See the drop of `Core`.
            std::mem::forget(Arc::clone(&self.handle));
        }
    }
}
