//! What a caller asks for.

use crate::rejected::InvalidParam;

/// The index of a token in the model's vocabulary.
pub type TokenId = u32;

/// A point in time or a span of time, in microseconds, on whatever clock the caller keeps.
pub type Micros = u64;

/// The caller's name for a request; unique among the requests that have not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// The scheduler's name for a sequence, never used twice. Sorted by it, sequences stand in order of arrival, those of
/// one request side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId {
    /// Counts the requests handed in.
    pub arrival: u64,
    /// Which of the request's continuations it is.
    pub choice: u32,
}

/// How tokens are drawn, and when to stop.
///
/// What concerns the draw of one token travels with the sequence to whatever samples; the scheduler reads the rest.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// How many continuations of the prompt to generate; at least 1. Continuation 0 is that of a request for one.
    pub n: u32,
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Only the `top_k` likeliest tokens are kept; 0 keeps all.
    pub top_k: u32,
    /// Only the likeliest tokens whose probabilities add up to `top_p` are kept; in (0, 1].
    pub top_p: f32,
    /// Tokens less likely than `min_p` times the likeliest are dropped; in [0, 1].
    pub min_p: f32,
    /// Keys the noise of this request.
    pub seed: u64,
    /// The most tokens to generate; `None` goes on to the length limit of the engine.
    pub max_tokens: Option<usize>,
    /// No stop token and no end-of-sequence token is drawn before this many tokens have been generated.
    pub min_tokens: usize,
    /// Tokens that end the request, besides the model's own end-of-sequence tokens.
    pub stop_token_ids: Vec<TokenId>,
    /// Generates through the model's end-of-sequence tokens. `stop_token_ids` still count.
    pub ignore_eos: bool,
    /// How many alternatives to report the log-probabilities of, besides the sampled token.
    pub logprobs: Option<u32>,
    /// The same for each token of the prompt but the first.
    pub prompt_logprobs: Option<u32>,
    /// Subtracted from the logit of each token that the output has already; from -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from the logit of each token as many times as the output has it already; from -2 to 2.
    pub frequency_penalty: f32,
    /// Divides the positive logits of tokens that prompt or output have already, and multiplies the negative ones; from
    /// 0.01 to 100.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens; no token twice, each number from -100 to 100.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The only tokens that may be drawn, if there are any here.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Sequences of tokens that the output never has; none of them empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Search for the likeliest outputs instead of drawing one.
    pub beam: Option<BeamParams>,
    /// Blocks are shared only among requests of the same salt; empty is a salt like any other.
    pub cache_salt: Vec<u8>,
    /// Computes the whole prompt, though the prefix cache may hold its beginning.
    pub skip_reading_prefix_cache: bool,
}

/// A search for the likeliest outputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamParams {
    /// Partial outputs that are kept at each step, and outputs given at the end; at least 1.
    pub width: u32,
    /// An output's score is its log-probability divided by its length, prompt included and end token not, to this power.
    pub length_penalty: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            max_tokens: Some(16),
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_words: Vec::new(),
            beam: None,
            cache_salt: Vec::new(),
            skip_reading_prefix_cache: false,
        }
    }
}

impl SamplingParams {
    /// Checks every number for its range.
    ///
    /// # Errors
    /// The first field that is out of range, in order of declaration. NaN is in no range.
    pub fn validate(&self) -> Result<(), InvalidParam> {
        let invalid = |field, found: String, expected| Err(InvalidParam { field, found, expected });
        if self.n == 0 {
            return invalid("n", "0".to_owned(), "at least 1");
        }
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return invalid("temperature", self.temperature.to_string(), "a finite number, at least 0");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return invalid("top_p", self.top_p.to_string(), "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return invalid("min_p", self.min_p.to_string(), "from 0 to 1");
        }
        if self.max_tokens == Some(0) {
            return invalid("max_tokens", "0".to_owned(), "at least 1, or none for no limit of its own");
        }
        if self.max_tokens.is_some_and(|max_tokens| self.min_tokens > max_tokens) {
            return invalid("min_tokens", self.min_tokens.to_string(), "at most max_tokens");
        }
        let (penalties, range) = (-2.0..=2.0, "from -2 to 2");
        if !penalties.contains(&self.presence_penalty) {
            return invalid("presence_penalty", self.presence_penalty.to_string(), range);
        }
        if !penalties.contains(&self.frequency_penalty) {
            return invalid("frequency_penalty", self.frequency_penalty.to_string(), range);
        }
        if !(0.01..=100.0).contains(&self.repetition_penalty) {
            return invalid("repetition_penalty", self.repetition_penalty.to_string(), "from 0.01 to 100");
        }
        if let Some((token, bias)) = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias)) {
            return invalid("logit_bias", format!("{bias} for token {token}"), "from -100 to 100");
        }
        if self.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
            return invalid("allowed_token_ids", "an empty list".to_owned(), "at least one token, or none for all");
        }
        if self.bad_words.iter().any(Vec::is_empty) {
            return invalid("bad_words", "an empty word".to_owned(), "at least one token in each");
        }
        self.validate_beam()
    }

    /// Whether a token ends a sequence.
    pub(crate) fn is_end(&self, token: TokenId, eos_token_ids: &[TokenId]) -> bool {
        !self.ignore_eos && eos_token_ids.contains(&token) || self.stop_token_ids.contains(&token)
    }

    /// How many sequences of a request run at once at most.
    pub(crate) fn num_sequences(&self) -> usize {
        self.beam.map_or(self.n, |beam| beam.width) as usize
    }

    /// The name of the parameter that says so.
    pub(crate) fn sequences_field(&self) -> &'static str {
        if self.beam.is_some() { "beam_width" } else { "n" }
    }

    fn validate_beam(&self) -> Result<(), InvalidParam> {
        let invalid = |field, found: String, expected| Err(InvalidParam { field, found, expected });
        let Some(beam) = self.beam else { return Ok(()) };
        if beam.width == 0 {
            return invalid("beam_width", "0".to_owned(), "at least 1");
        }
        // Beyond, powers of a length would not be numbers.
        if !(-10.0..=10.0).contains(&beam.length_penalty) {
            return invalid("length_penalty", beam.length_penalty.to_string(), "from -10 to 10");
        }
        if self.n != 1 {
            return invalid("n", self.n.to_string(), "1 in a beam search");
        }
        let plain = SamplingParams::default();
        let refused = [
            ("min_tokens", self.min_tokens != plain.min_tokens),
            ("presence_penalty", self.presence_penalty != plain.presence_penalty),
            ("frequency_penalty", self.frequency_penalty != plain.frequency_penalty),
            ("repetition_penalty", self.repetition_penalty != plain.repetition_penalty),
            ("logit_bias", !self.logit_bias.is_empty()),
            ("allowed_token_ids", self.allowed_token_ids.is_some()),
            ("bad_words", !self.bad_words.is_empty()),
        ];
        match refused.into_iter().find(|(_, is_set)| *is_set) {
            Some((field, _)) => {
                invalid(field, "set".to_owned(), "nothing that changes log-probabilities in a beam search")
            }
            None => Ok(()),
        }
    }
}

/// A prompt to continue.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The caller's name for it.
    pub id: RequestId,
    /// The tokens to continue; at least one. Whoever knows the vocabulary checks the ids.
    pub prompt: Vec<TokenId>,
    /// How to continue.
    pub params: SamplingParams,
    /// When the caller handed it in; only measured with. The order of service is the order of `Scheduler::add`.
    pub arrival: Micros,
    /// When it ends at the latest, finished or not.
    pub deadline: Option<Micros>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn invalid_field(change: impl FnOnce(&mut SamplingParams)) -> Option<&'static str> {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate().err().map(|invalid| invalid.field)
    }

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(SamplingParams::default().validate(), Ok(()));
    }

    #[test]
    fn a_temperature_that_is_negative_or_not_finite_is_refused() {
        for bad in [-0.1, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(invalid_field(|p| p.temperature = bad), Some("temperature"), "{bad}");
        }
        assert_eq!(invalid_field(|p| p.temperature = 0.0), None);
    }

    #[test]
    fn a_top_p_outside_zero_exclusive_to_one_is_refused() {
        for bad in [0.0, -0.5, 1.01, f32::NAN] {
            assert_eq!(invalid_field(|p| p.top_p = bad), Some("top_p"), "{bad}");
        }
        assert_eq!(invalid_field(|p| p.top_p = 1e-6), None);
    }

    #[test]
    fn a_min_p_outside_zero_to_one_is_refused() {
        for bad in [-0.5, 1.01, f32::NAN] {
            assert_eq!(invalid_field(|p| p.min_p = bad), Some("min_p"), "{bad}");
        }
        assert_eq!(invalid_field(|p| p.min_p = 1.0), None);
    }

    #[test]
    fn zero_tokens_to_generate_are_refused() {
        assert_eq!(invalid_field(|p| p.max_tokens = Some(0)), Some("max_tokens"));
        assert_eq!(invalid_field(|p| p.max_tokens = None), None);
    }

    #[test]
    fn a_beam_search_takes_no_other_outputs_and_no_rules() {
        let with_beam = |change: fn(&mut SamplingParams)| {
            invalid_field(|params| {
                params.beam = Some(BeamParams { width: 2, length_penalty: 1.0 });
                change(params);
            })
        };
        assert_eq!(with_beam(|_| {}), None);
        assert_eq!(with_beam(|p| p.beam = Some(BeamParams { width: 0, length_penalty: 1.0 })), Some("beam_width"));
        assert_eq!(
            with_beam(|p| p.beam = Some(BeamParams { width: 2, length_penalty: f32::NAN })),
            Some("length_penalty")
        );
        assert_eq!(with_beam(|p| p.n = 2), Some("n"));
        assert_eq!(with_beam(|p| p.repetition_penalty = 1.5), Some("repetition_penalty"));
        assert_eq!(with_beam(|p| p.allowed_token_ids = Some(vec![1])), Some("allowed_token_ids"));
    }
}
