//! What it costs to read an output: tokens to text, and the search for stop strings, on the thread of whoever waits.
//!
//! The tokens of a real text come one an output, as the engine gives them, with 0, 1 and 4 stop strings that begin in
//! it now and then and are never complete. Once with SmolLM2's vocabulary, whose tokens have bytes of their own, and
//! once with the same pieces spelled as SentencePiece does, so that a text has to be decoded again and again.
#![allow(dead_code, missing_docs)]

#[path = "../../crates/octavo-py/src/reader.rs"]
mod reader;
#[path = "../../crates/octavo-py/src/stop.rs"]
mod stop;
#[path = "../../crates/octavo-py/src/text.rs"]
mod text;
#[path = "../../crates/octavo-py/src/tokenizer/mod.rs"]
mod tokenizer;

use std::time::Instant;

use octavo_benches::{series::Series, smollm2};
use octavo_engine::{Output, RequestId, Story};
use octavo_model::TokenizerSource;
use reader::{Reader, ReadingRules};
use stop::{StopStrings, StopText};
use tokenizer::{ControlText, ControlTokensIn, Edges, Tokenizer};
use tokenizers::{
    DecoderWrapper,
    decoders::{byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence, strip::Strip},
    models::bpe::BPE,
    normalizers::Replace,
};

const TURNS: usize = 9;
/// Prose, code and numbers, and then lines in many scripts.
const TEXTS: [&str; 2] = [include_str!("../../ARCHITECTURE.md"), include_str!("../../tests/data/tokenizer_lines.json")];
const STOPS: [&str; 4] = ["the end of it", "\n\nHuman:", "</s>", "as the \u{1f600}"];

fn main() {
    let bytes = smollm2_tokenizer();
    let ids = bytes.encode(&TEXTS.concat(), Edges::Bare, ControlText::Ordinary).expect("a text like any other");
    let window = respelled(&bytes);
    println!("nanoseconds a token, over {} tokens; medians of {TURNS} turns [least to most]", ids.len());
    for (name, tokenizer) in [("bytes of their own", &bytes), ("decoded in windows", &window)] {
        for num_stops in [0, 1, 4] {
            let mut nanos = Vec::new();
            for turn in 0..=TURNS {
                let nanos_now = nanos_a_token(tokenizer, &ids, &STOPS[..num_stops]);
                // The first turn warms up and does not count.
                if turn > 0 {
                    nanos.push(nanos_now);
                }
            }
            println!("{name}, {num_stops} stop strings  {}", Series::of(nanos).scaled(1.0));
        }
    }
}

fn smollm2_tokenizer() -> Tokenizer {
    match smollm2::open().tokenizer() {
        TokenizerSource::Vocabulary(vocabulary) => Tokenizer::from_vocabulary(vocabulary).expect("a sound vocabulary"),
        other => panic!("{other:?}"),
    }
}

/// The same ids: what is text is spelled as such, with U+2581 for a space, and what is a byte as `<0x0A>`.
fn respelled(bytes: &Tokenizer) -> Tokenizer {
    let spelled = |id: u32| match bytes.token_bytes(id).unwrap_or_default() {
        [byte] if !byte.is_ascii() => format!("<0x{byte:02X}>"),
        piece => match std::str::from_utf8(piece) {
            Ok(text) if !text.is_empty() => text.replace(' ', "\u{2581}"),
            _ => format!("<part{id}>"),
        },
    };
    let tokens: ahash::AHashMap<String, u32> = (0..bytes.vocab_size() as u32).map(|id| (spelled(id), id)).collect();
    let model = BPE::builder().vocab_and_merges(tokens, Vec::new()).byte_fallback(true).build().expect("a vocabulary");
    let mut built = tokenizers::Tokenizer::new(model);
    built.with_decoder(Some(DecoderWrapper::Sequence(Sequence::new(vec![
        DecoderWrapper::Replace(Replace::new("\u{2581}", " ").expect("a pattern")),
        DecoderWrapper::ByteFallback(ByteFallback::new()),
        DecoderWrapper::Fuse(Fuse::new()),
        DecoderWrapper::Strip(Strip::new(' ', 1, 0)),
    ]))));
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tokenizer.json");
    built.save(&file, false).expect("a file");
    Tokenizer::from_file(&file).expect("a sound file")
}

fn nanos_a_token(tokenizer: &Tokenizer, ids: &[u32], stops: &[&str]) -> f64 {
    let rules = ReadingRules {
        control: Some(ControlTokensIn::Skipped),
        stop_strings: StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()).collect(), StopText::Excluded)
            .into(),
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        num_choices: 1,
    };
    let mut reader = Reader::new(rules, Some(tokenizer), &[]);
    let mut outputs: Vec<Output> = ids.iter().map(|&id| output(id)).collect();
    let mut num_bytes = 0;
    let start = Instant::now();
    for output in &mut outputs {
        let reading = reader.read(Some(tokenizer), output).expect("an output that goes on");
        assert_eq!(reading.finish_reason, None);
        num_bytes += reading.text.len();
    }
    let nanos = start.elapsed().as_nanos() as f64;
    assert!(num_bytes > ids.len());
    nanos / ids.len() as f64
}

fn output(id: u32) -> Output {
    Output {
        request: RequestId(0),
        choice: 0,
        tokens: vec![id],
        logprobs: Vec::new(),
        cumulative_logprob: None,
        prompt_logprobs: Vec::new(),
        pooled: Vec::new(),
        finish: None,
        last: false,
        story: Story::default(),
    }
}
