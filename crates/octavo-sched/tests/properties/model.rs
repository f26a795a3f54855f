//! A model that knows nothing but the seed, the choice and the position, and the requests that it answers.
//!
//! Prompts and answers are beginnings of the same few words over two letters, so that what one sequence generates is
//! what another begins with.

use octavo_sched::{BeamParams, Candidate, FinishReason, Request, RequestId, SamplingParams, TokenId};

use crate::operation::NewRequest;

pub const EOS: TokenId = 0;
pub const NUM_WORDS: usize = WORDS.len();

/// The second and third part from the first at positions 6 and 3.
const WORDS: [u64; 4] = [0x5A3C_96E1_07B2_C4D8, 0x5A3C_96E1_07B2_C498, 0x5A3C_96E1_07B2_C4D0, 0xC3A5_5A3C_69D2_1E27];

fn letter(word: usize, position: usize) -> TokenId {
    1 + (WORDS[word] >> (position % 64) & 1) as TokenId
}

/// The finalizer of SplitMix64.
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The token at a position of a continuation: one in 24 ends it, one in eight is of another word.
pub fn sample(seed: u64, choice: u32, position: usize) -> TokenId {
    let noise = mix(seed << 40 | u64::from(choice) << 20 | position as u64);
    match noise % 24 {
        0 => EOS,
        1..=3 => letter((noise >> 8) as usize % NUM_WORDS, position),
        _ => letter((seed as usize + choice as usize) % NUM_WORDS, position),
    }
}

/// The likeliest tokens to follow, equal ones by id: of three, those of a word mostly.
pub fn propose(seed: u64, tokens: &[TokenId], count: usize) -> Vec<Candidate> {
    let noise = tokens.iter().fold(seed, |state, &token| mix(state << 2 | u64::from(token)));
    let word = letter(seed as usize % NUM_WORDS, tokens.len());
    let logprob = |token: TokenId| {
        let unlikely = if token == EOS { 6 } else { 3 * u32::from(token != word) };
        -0.25 * ((noise >> (8 * token)) % 8) as f32 - 0.25 * unlikely as f32
    };
    let mut all: Vec<_> = [EOS, 1, 2].map(|token| (token, logprob(token))).into();
    all.sort_by(|one: &(TokenId, f32), other| other.1.total_cmp(&one.1));
    let candidate = |(rank, (token, logprob)): (u32, _)| Candidate { token, logprob, rank };
    (1..).zip(all).map(candidate).take(count).collect()
}

pub fn is_end(params: &SamplingParams, token: TokenId) -> bool {
    params.stop_token_ids.contains(&token) || (token == EOS && !params.ignore_eos)
}

/// Why a sequence ends with its last token, if it does.
pub fn finish(params: &SamplingParams, tokens: &[TokenId], final_len: usize) -> Option<FinishReason> {
    if is_end(params, *tokens.last()?) {
        return Some(FinishReason::Stop);
    }
    (tokens.len() == final_len).then_some(FinishReason::Length)
}

/// The request that a few small numbers stand for.
pub fn request(id: RequestId, new: &NewRequest, arrival: u64) -> Request {
    let mut prompt: Vec<_> = (0..new.prompt_len).map(|position| letter(new.word, position)).collect();
    if let Some(token) = new.flipped.and_then(|position| prompt.get_mut(position)) {
        *token = 3 - *token;
    }
    let params = SamplingParams {
        n: if new.penalty.is_some() { 1 } else { new.n },
        beam: new.penalty.map(|length_penalty| BeamParams { width: new.n, length_penalty }),
        seed: new.seed,
        max_tokens: new.max_tokens,
        stop_token_ids: new.stop.into_iter().collect(),
        ignore_eos: new.ignore_eos,
        cache_salt: if new.is_salted { b"salt".to_vec() } else { vec![] },
        skip_reading_prefix_cache: new.skips_cache,
        ..Default::default()
    };
    Request { id, prompt, params, arrival, deadline: new.time.map(|time| arrival + time) }
}
