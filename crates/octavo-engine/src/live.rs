//! What the engine keeps of a request that has not ended, beside what the scheduler keeps.

use std::{collections::HashMap, sync::Arc};

use octavo_backend::{SampleError, TokenLogprobs};

use crate::{
    Grammar, Pooling, Story,
    rules::{Progress, RequestRules},
};

/// What a request asks for that the scheduler need not know of.
#[derive(Clone, Default)]
pub struct Extras {
    /// What the output has to follow.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// What to make of the prompt's hidden states.
    pub pooling: Option<Pooling>,
}

/// A request that has not ended.
#[derive(Default)]
pub(crate) struct LiveRequest {
    pub story: Story,
    pub rules: Option<RequestRules>,
    /// How far each continuation has been read by the rules.
    pub progress: HashMap<u32, Progress>,
    pub prompt: PromptReport,
}

/// What is gathered while a prompt is computed, in however many chunks and however often.
#[derive(Default)]
pub(crate) struct PromptReport {
    /// How many likeliest tokens are reported beside each token of the prompt; `None` if nothing is.
    top: Option<u32>,
    pooling: Option<Pooling>,
    /// Log-probabilities of the tokens at 1, 2, ...
    scores: Vec<TokenLogprobs>,
    /// Tokens whose hidden states are in `sum`.
    pooled: usize,
    /// Added in order of position, so that it does not depend on chunks.
    sum: Vec<f64>,
    has_failed: bool,
}

impl PromptReport {
    /// Reports log-probabilities, with as many of the likeliest tokens, or a pooled hidden state, or both.
    pub(crate) fn new(top: Option<u32>, pooling: Option<Pooling>) -> PromptReport {
        PromptReport { top, pooling, ..PromptReport::default() }
    }

    /// How many likeliest tokens are to be reported with the prompt token at `position`; `None` if it is not to be
    /// reported, or has been.
    pub(crate) fn wants_score(&self, position: usize) -> Option<u32> {
        self.top.filter(|_| position > self.scores.len())
    }

    /// Whether the hidden state at `position` of a prompt is still to come.
    pub(crate) fn wants_hidden(&self, position: usize, prompt_len: usize) -> bool {
        match self.pooling {
            None => false,
            Some(Pooling::Last) => position + 1 == prompt_len,
            Some(Pooling::Mean) => position < prompt_len && position >= self.pooled,
        }
    }

    pub(crate) fn add_score(&mut self, score: Result<TokenLogprobs, SampleError>) {
        match score {
            Ok(score) => self.scores.push(score),
            Err(_) => self.has_failed = true,
        }
    }

    pub(crate) fn add_hidden(&mut self, hidden: &[f32]) {
        if self.pooling == Some(Pooling::Last) {
            self.sum.clear();
            self.pooled = 0;
        }
        self.sum.resize(hidden.len(), 0.0);
        self.sum.iter_mut().zip(hidden).for_each(|(sum, value)| *sum += f64::from(*value));
        self.pooled += 1;
        self.has_failed |= hidden.iter().any(|value| !value.is_finite());
    }

    /// Whether the model gave something that is no number.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Hands out the log-probabilities, once.
    pub(crate) fn take_scores(&mut self) -> Vec<TokenLogprobs> {
        self.top = None;
        std::mem::take(&mut self.scores)
    }

    /// Hands out the pooled hidden state, once.
    pub(crate) fn take_pooled(&mut self) -> Vec<f32> {
        self.pooling = None;
        let count = self.pooled as f64;
        std::mem::take(&mut self.sum).into_iter().map(|sum| (sum / count) as f32).collect()
    }
}
