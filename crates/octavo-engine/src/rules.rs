//! What a request's parameters do to the logits of its next token.
//!
//! Invariant: the rules of a draw follow from the request and from the tokens before it, and from nothing else. A
//! [`Progress`] only remembers how far it has read a sequence; read anew from the first token it gives the same, so it
//! may be dropped at any time, and a continuation that parts from another begins without one.

use std::{collections::HashMap, sync::Arc};

use octavo_backend::{LogitRules, Penalties, SeenToken, TokenMask};
use octavo_sched::{SamplingParams, Sequence, TokenId};

use crate::{
    Grammar, GrammarError, GrammarState,
    masks::{Answer, Question},
};

/// The part of a request's rules that is the same for each of its draws.
pub(crate) struct RequestRules {
    vocab_size: usize,
    bias: Arc<[(TokenId, f32)]>,
    allowed: Option<Arc<TokenMask>>,
    grammar: Option<Arc<dyn Grammar>>,
    /// The model's end-of-sequence tokens.
    eos_token_ids: Vec<TokenId>,
    /// What is not drawn while the output is too short: end tokens, and the caller's stop tokens.
    ends: Vec<TokenId>,
    /// The end token is for a grammar that can only end.
    avoids_end: bool,
}

/// How far a sequence has been read.
#[derive(Default)]
pub(crate) struct Progress {
    tokens: usize,
    seen: Arc<Vec<SeenToken>>,
    /// Where a token is in `seen`.
    places: HashMap<TokenId, usize>,
    grammar: Option<Box<dyn GrammarState>>,
    /// Tokens of the output that the grammar has read, or is asked to read.
    asked: usize,
}

impl RequestRules {
    /// Rules of a request; `None` if they never change a logit.
    pub(crate) fn new(
        params: &SamplingParams,
        grammar: Option<Arc<dyn Grammar>>,
        eos_token_ids: &[TokenId],
        vocab_size: usize,
    ) -> Option<RequestRules> {
        let is_plain = params.min_tokens == 0
            && params.logit_bias.is_empty()
            && params.allowed_token_ids.is_none()
            && params.bad_words.is_empty()
            && !has_penalties(params)
            && grammar.is_none();
        if is_plain || params.beam.is_some() {
            return None;
        }
        let known = |tokens: &[TokenId]| -> Vec<TokenId> {
            tokens.iter().copied().filter(|&token| (token as usize) < vocab_size).collect()
        };
        let mut bias = params.logit_bias.clone();
        bias.sort_by_key(|&(token, _)| token);
        let eos_token_ids = known(eos_token_ids);
        let mut ends = known(&params.stop_token_ids);
        if !params.ignore_eos {
            ends.extend(&eos_token_ids);
        }
        Some(RequestRules {
            vocab_size,
            bias: bias.into(),
            allowed: params.allowed_token_ids.as_ref().map(|tokens| Arc::new(mask_of(tokens, vocab_size))),
            avoids_end: params.ignore_eos && grammar.is_some(),
            grammar,
            eos_token_ids,
            ends,
        })
    }

    /// What a grammar is to be asked before the next draw; `None` without one. The state goes with it.
    pub(crate) fn question(&self, sequence: &Sequence, progress: &mut Progress) -> Option<Question> {
        let grammar = Arc::clone(self.grammar.as_ref()?);
        let (state, output) = (progress.grammar.take(), &sequence.tokens()[sequence.prompt_len()..]);
        let unread = if state.is_some() { progress.asked } else { 0 };
        progress.asked = output.len();
        let tokens = output[unread..].to_vec();
        Some(Question { seq: sequence.id(), grammar, state, tokens, vocab_size: self.vocab_size })
    }

    /// Whether a grammar is asked before each draw.
    pub(crate) fn has_grammar(&self) -> bool {
        self.grammar.is_some()
    }

    /// Tokens that a mask speaks of.
    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The rules of the token that follows a sequence, with the answer to its [`RequestRules::question`].
    ///
    /// # Errors
    /// A grammar that cannot go on.
    pub(crate) fn next(
        &self,
        sequence: &Sequence,
        progress: &mut Progress,
        answer: Option<Result<Answer, GrammarError>>,
    ) -> Result<LogitRules, GrammarError> {
        let (params, prompt_len) = (sequence.params(), sequence.prompt_len());
        progress.read(sequence);
        let output = &sequence.tokens()[prompt_len..];
        let early: &[TokenId] = if output.len() < params.min_tokens { &self.ends } else { &[] };
        let (allowed, mut banned) = match answer {
            Some(answer) => {
                let Answer { state, mask, may_end } = answer?;
                progress.grammar = Some(state);
                (Some(Arc::new(self.narrowed(mask, early, may_end.then_some(&self.eos_token_ids)))), Vec::new())
            }
            None => (self.allowed.clone(), early.to_vec()),
        };
        for word in &params.bad_words {
            if let Some((last, before)) = word.split_last()
                && output.ends_with(before)
            {
                banned.push(*last);
            }
        }
        let penalties = has_penalties(params).then(|| Penalties {
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
            seen: Arc::clone(&progress.seen),
        });
        Ok(LogitRules { bias: Arc::clone(&self.bias), allowed, banned, penalties })
    }

    /// What a grammar allows without the tokens that would be too early, and the end tokens where it may end: those that
    /// are too early only if nothing else is possible.
    fn narrowed(&self, mut mask: TokenMask, early: &[TokenId], ends: Option<&Vec<TokenId>>) -> TokenMask {
        if let Some(allowed) = &self.allowed {
            mask.intersect(allowed);
        }
        early.iter().for_each(|&token| mask.remove(token));
        let nothing_else = mask.is_empty();
        for &token in ends.into_iter().flatten() {
            if nothing_else || !(self.avoids_end || early.contains(&token)) {
                mask.insert(token);
            }
        }
        mask
    }
}

impl Progress {
    /// Counts the tokens that were added since.
    fn read(&mut self, sequence: &Sequence) {
        if has_penalties(sequence.params()) {
            for (position, &token) in sequence.tokens().iter().enumerate().skip(self.tokens) {
                self.count(token, u32::from(position >= sequence.prompt_len()));
            }
        }
        self.tokens = sequence.tokens().len();
    }

    fn count(&mut self, token: TokenId, in_output: u32) {
        // Nobody else holds it between two steps, so nothing is copied.
        let seen = Arc::make_mut(&mut self.seen);
        let place = *self.places.entry(token).or_insert(seen.len());
        if place == seen.len() {
            seen.push(SeenToken { token, in_output: 0 });
        }
        seen[place].in_output += in_output;
    }
}

fn has_penalties(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 || params.presence_penalty != 0.0
}

fn mask_of(tokens: &[TokenId], vocab_size: usize) -> TokenMask {
    let mut mask = TokenMask::none(vocab_size);
    tokens.iter().for_each(|&token| mask.insert(token));
    mask
}
