//! Where Python finds what its requests gained. Tokens become text here, on the caller's thread, without the GIL.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use octavo_engine::{
    EngineDead, EngineHandle, Event, Finish, FinishReason, Inbox, Micros, Output, RequestId, Story, TokenLogprobs,
};
use pyo3::prelude::*;

use crate::{
    errors::{self, InvalidRequest},
    text::TextStream,
    tokenizer::{ControlTokensIn, Tokenizer},
};

/// No single wait is longer; the caller loops.
const LONGEST_WAIT: f64 = 3600.0;

/// The receiving end of a caller's requests. Dropping it aborts what still runs for it.
#[pyclass(name = "Inbox", module = "octavo._octavo", frozen)]
pub struct InboxClass {
    pub(crate) inbox: Inbox,
    /// The requests that have not ended.
    pub(crate) requests: Mutex<HashMap<RequestId, Reader>>,
    handle: Arc<EngineHandle>,
    tokenizer: Option<Arc<Tokenizer>>,
    clock_offset: f64,
    died: Mutex<Option<String>>,
    process: u32,
}

/// What one step gave to one request.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Delta {
    /// The request's id.
    #[pyo3(get)]
    request: u64,
    /// The text that became complete.
    #[pyo3(get)]
    text: String,
    /// The new tokens, a stopping one included.
    #[pyo3(get)]
    token_ids: Vec<u32>,
    /// For each token: itself, then the likeliest ones, as (id, log-probability, rank, text). None if not asked for.
    #[pyo3(get)]
    logprobs: Option<Vec<Vec<TokenReport>>>,
    /// Why the request ended; None while it goes on.
    #[pyo3(get)]
    finish_reason: Option<&'static str>,
    /// The stop token that the caller had asked for.
    #[pyo3(get)]
    stop_reason: Option<u32>,
    /// With the last output: arrival, scheduled, first token and last token, in seconds of `time.monotonic`.
    #[pyo3(get)]
    times: Option<Times>,
}

type TokenReport = (u32, f32, u32, Option<String>);
type Times = (f64, Option<f64>, Option<f64>, Option<f64>);

/// What has to be remembered of a request to read its outputs.
pub(crate) struct Reader {
    stream: Option<TextStream>,
    /// The caller's own stop tokens.
    stop_token_ids: Vec<u32>,
}

impl Reader {
    pub(crate) fn new(tokenizer: Option<&Tokenizer>, control: ControlTokensIn, stop_token_ids: Vec<u32>) -> Reader {
        Reader { stream: tokenizer.map(|tokenizer| TextStream::new(tokenizer, control)), stop_token_ids }
    }

    /// The text that an output completes. The token that stops a request gives none.
    fn text(&mut self, tokenizer: &Tokenizer, output: &Output) -> String {
        let mut text = String::new();
        let Some(stream) = &mut self.stream else { return text };
        let stopped = output.finish.is_some_and(|finish| finish.reason == FinishReason::Stop);
        let readable = output.tokens.len() - usize::from(stopped && !output.tokens.is_empty());
        for &token in &output.tokens[..readable] {
            stream.push(tokenizer, token, &mut text);
        }
        if output.finish.is_some() {
            stream.finish(tokenizer, &mut text);
        }
        text
    }

    fn stop_reason(&self, finish: &Finish) -> Option<u32> {
        finish.stop_token.filter(|token| self.stop_token_ids.contains(token))
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

    fn read(&self, requests: &mut HashMap<RequestId, Reader>, output: Output) -> Option<Delta> {
        let reader = requests.get_mut(&output.request)?;
        let text = self.tokenizer.as_deref().map(|tokenizer| reader.text(tokenizer, &output)).unwrap_or_default();
        let stop_reason = output.finish.as_ref().and_then(|finish| reader.stop_reason(finish));
        if output.finish.is_some() {
            requests.remove(&output.request);
        }
        let reports: Vec<_> =
            output.tokens.iter().zip(&output.logprobs).map(|(&token, row)| self.report(token, row)).collect();
        Some(Delta {
            request: output.request.0,
            text,
            logprobs: (!reports.is_empty()).then_some(reports),
            token_ids: output.tokens,
            finish_reason: output.finish.map(|finish| finish.reason.as_str()),
            stop_reason,
            times: output.finish.map(|finish| self.times(&finish.story)),
        })
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

    fn times(&self, story: &Story) -> Times {
        let seconds = |at: Micros| at as f64 * 1e-6 + self.clock_offset;
        (
            seconds(story.arrival),
            story.scheduled.map(seconds),
            story.first_token.map(seconds),
            story.last_token.map(seconds),
        )
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
