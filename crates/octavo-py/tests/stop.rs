//! Stop strings, and outputs that end with them, without Python.
#![allow(dead_code, missing_docs)]

#[path = "../src/reader.rs"]
mod reader;
#[path = "../src/stop.rs"]
mod stop;
#[path = "../src/text.rs"]
mod text;
#[path = "../src/tokenizer/mod.rs"]
mod tokenizer;
mod vocabularies;

use std::collections::BTreeSet;

use octavo_engine::{Finish, FinishReason, Output, RequestId, Story, TokenLogprobs};
use proptest::{collection::vec, prelude::*, sample::select};
use reader::{Reader, Reading, ReadingRules, StopReason};
use stop::{StopSearch, StopStrings, StopText, Stops};
use tokenizer::{ControlTokensIn, Tokenizer};
use vocabularies::byte_level;

fn owned(strings: &[&str]) -> Vec<String> {
    strings.iter().map(|string| (*string).to_owned()).collect()
}

/// What each piece gives out, then what waits at the end, and the stop string.
fn search(stops: &[&str], stop_text: StopText, pieces: &[&str]) -> (Vec<String>, Option<String>) {
    let stops = StopStrings::new(owned(stops), stop_text);
    let (mut search, mut given) = (StopSearch::default(), Vec::new());
    for piece in pieces {
        let mut text = String::new();
        let found = search.push(&stops, piece, Stops::Count, &mut text);
        given.push(text);
        if let Some(index) = found {
            return (given, Some(stops.string(index).to_owned()));
        }
    }
    let mut text = String::new();
    search.finish(&mut text);
    given.push(text);
    (given, None)
}

fn excluded(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
    let (given, found) = search(stops, StopText::Excluded, pieces);
    (given.concat(), found)
}

fn text(text: &str, stop: &str) -> (String, Option<String>) {
    (text.to_owned(), Some(stop.to_owned()))
}

#[test]
fn a_text_ends_before_a_stop_string_wherever_the_tokens_part_it() {
    let letters = "ABCDEFGHIJKLM";
    for cut in 0..letters.len() {
        let (left, right) = letters.split_at(cut);
        assert_eq!(excluded(&["DEFGHIJ"], &[left, right]), text("ABC", "DEFGHIJ"));
        assert_eq!(excluded(&["FGHI"], &[left, right]), text("ABCDE", "FGHI"));
        assert_eq!(excluded(&["DEFZ"], &[left, right]), (letters.to_owned(), None));
        let (given, _) = search(&["FGHI"], StopText::Included, &[left, right]);
        assert_eq!(given.concat(), "ABCDEFGHI");
    }
}

#[test]
fn what_waits_comes_as_soon_as_it_begins_no_stop_string() {
    let (given, _) = search(&["DEFZ"], StopText::Excluded, &["ABC", "D", "EF", "GD", "E"]);
    assert_eq!(given, ["ABC", "", "", "DEFG", "", "DE"]);
    // The longest end that may begin one waits, and not what stands before it.
    let (given, _) = search(&["aab"], StopText::Excluded, &["a", "a", "a", "a", "c"]);
    assert_eq!(given, ["", "", "a", "a", "aac", ""]);
}

#[test]
fn the_stop_string_that_is_complete_first_ends_the_text_and_of_several_the_longest() {
    assert_eq!(excluded(&["bcd", "c"], &["abcd"]), text("ab", "c"));
    assert_eq!(excluded(&["c", "abc", "bc"], &["xabc"]), text("x", "abc"));
    assert_eq!(excluded(&["abcd", "bc"], &["abcd"]), text("a", "bc"));
    assert_eq!(excluded(&["ab", "abab"], &["a", "babab"]), text("", "ab"));
}

#[test]
fn a_stop_string_of_several_bytes_a_character_is_found_and_held_back_as_a_whole() {
    let (given, found) = search(&["日é"], StopText::Excluded, &["x", "日", "本", "日", "éy"]);
    assert_eq!((given.concat().as_str(), found.as_deref()), ("x日本", Some("日é")));
    assert_eq!(given[1], "");
    // 日 and 旦 begin with the same two bytes, and that is nothing to wait for.
    assert_eq!(search(&["旦"], StopText::Excluded, &["日"]).0, ["日", ""]);
}

#[test]
fn an_empty_stop_string_and_one_that_is_there_twice_change_nothing() {
    assert_eq!(excluded(&["", "b", "b"], &["abc"]), text("a", "b"));
    assert_eq!(excluded(&[""], &["abc"]), ("abc".to_owned(), None));
    assert!(StopStrings::new(owned(&[""]), StopText::Excluded).is_empty());
}

#[test]
fn a_stop_string_that_does_not_count_is_text_of_which_the_next_may_begin() {
    let stops = StopStrings::new(owned(&["aa"]), StopText::Excluded);
    let (mut search, mut text) = (StopSearch::default(), String::new());
    assert_eq!(search.push(&stops, "xaa", Stops::Pass, &mut text), None);
    assert_eq!(text, "xa");
    assert_eq!(search.push(&stops, "a", Stops::Count, &mut text), Some(0));
    assert_eq!(text, "xa");
}

/// The tokens of [`vocabulary`] behind its 256 bytes: some end inside a character, some hold several.
const PIECES: [&[u8]; 9] =
    [b"aab", b"ba", b"ab", b"  ", b"\x98\x80\xf0", b"\xa5a", b"\xc3\xa9\xe6", b"b\xcc", "日é".as_bytes()];
const END: u32 = 256 + PIECES.len() as u32;

fn vocabulary() -> Tokenizer {
    Tokenizer::from_vocabulary(&byte_level(&PIECES, &["<|e|>"])).expect("a sound vocabulary")
}

fn characters(range: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    let some = select(vec!["a", "b", "aab", " ", "é", "日", "😀", "\u{301}"]);
    vec(some, range).prop_map(|characters| characters.concat())
}

/// Stop strings, of which some are parts of the text.
fn text_and_stops() -> impl Strategy<Value = (String, Vec<String>)> {
    let parts = vec((any::<prop::sample::Index>(), 1..5usize), 0..3);
    (characters(0..24), vec(characters(1..4), 0..4), parts).prop_map(|(text, mut stops, parts)| {
        let all: Vec<char> = text.chars().collect();
        for (index, len) in parts.into_iter().filter(|_| !all.is_empty()) {
            let start = index.index(all.len());
            stops.push(all[start..all.len().min(start + len)].iter().collect());
        }
        (text, stops)
    })
}

fn stop_text() -> impl Strategy<Value = StopText> {
    select(vec![StopText::Excluded, StopText::Included])
}

/// Where the text ends, and with which string, by looking at all of it. `counts` tells for the byte before each place
/// whether a string that ends there counts.
fn first_end<'a>(text: &str, stops: &'a [String], counts: impl Fn(usize) -> bool) -> Option<(usize, &'a str)> {
    let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end) && counts(end));
    ends.filter_map(|end| {
        let found = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
        found.max_by_key(|stop| stop.len()).map(|stop| (end, stop.as_str()))
    })
    .next()
}

/// Bytes at the end of a text that may belong to a stop string yet.
fn waiting(text: &str, stops: &[String]) -> usize {
    let begins = |start: &usize| {
        text.is_char_boundary(*start)
            && stops.iter().any(|stop| stop.starts_with(&text[*start..]) && stop.len() > text.len() - *start)
    };
    text.len() - (0..text.len()).find(begins).unwrap_or(text.len())
}

/// Splits the bytes of a text into tokens of [`vocabulary`]; `choices` says which of those that fit.
fn tokens(text: &str, choices: &[usize]) -> Vec<u32> {
    let (mut rest, mut tokens) = (text.as_bytes(), Vec::new());
    while let Some(&byte) = rest.first() {
        let pieces = (256..END).filter(|&id| rest.starts_with(PIECES[id as usize - 256]));
        let fitting: Vec<u32> = std::iter::once(byte.into()).chain(pieces).collect();
        let id = fitting[choices[tokens.len() % choices.len()] % fitting.len()];
        tokens.push(id);
        rest = &rest[PIECES.get((id as usize).wrapping_sub(256)).map_or(1, |piece| piece.len())..];
    }
    tokens
}

/// How many bytes of complete characters each of the first tokens ends with.
fn complete_ends(text: &str, tokens: &[u32]) -> Vec<usize> {
    let lens = tokens.iter().map(|&id| PIECES.get((id as usize).wrapping_sub(256)).map_or(1, |piece| piece.len()));
    let ends = lens.scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    ends.map(|end| (0..=end).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0)).collect()
}

fn output(choice: u32, tokens: &[u32]) -> Output {
    let row = |&id: &u32| TokenLogprobs { logprob: -(id as f32), rank: 1, top: Vec::new() };
    Output {
        request: RequestId(0),
        choice,
        tokens: tokens.to_vec(),
        logprobs: tokens.iter().map(row).collect(),
        cumulative_logprob: None,
        prompt_logprobs: Vec::new(),
        pooled: Vec::new(),
        finish: None,
        last: false,
        story: Story::default(),
    }
}

fn finished(output: Output, reason: FinishReason) -> Output {
    let stop_token = (reason == FinishReason::Stop).then_some(END);
    Output { finish: Some(Finish { reason, stop_token }), last: true, ..output }
}

struct Request {
    stops: Vec<String>,
    stop_text: StopText,
    min_tokens: usize,
    num_choices: u32,
}

impl Request {
    fn reader(&self, tokenizer: &Tokenizer) -> Reader {
        let rules = ReadingRules {
            control: Some(ControlTokensIn::Skipped),
            stop_strings: StopStrings::new(self.stops.clone(), self.stop_text).into(),
            min_tokens: self.min_tokens,
            stop_token_ids: vec![END],
            num_choices: self.num_choices,
        };
        Reader::new(rules, Some(tokenizer), &[])
    }
}

fn stopping_at(stops: &[&str], num_choices: u32) -> Request {
    Request { stops: owned(stops), stop_text: StopText::Excluded, min_tokens: 0, num_choices }
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn an_output_is_cut_behind_the_token_that_completes_the_stop_string() {
    let tokenizer = vocabulary();
    let mut reader = stopping_at(&["bc"], 1).reader(&tokenizer);
    let mut several = output(0, &ids("abcdef"));
    let reading = reader.read(Some(&tokenizer), &mut several);
    let expected = Reading {
        text: "a".to_owned(),
        finish_reason: Some(FinishReason::Stop),
        stop_reason: Some(StopReason::Text("bc".to_owned())),
        last: true,
        is_news: true,
    };
    assert_eq!(reading, Some(expected));
    assert_eq!(several.tokens, ids("abc"));
    assert_eq!(several.logprobs, output(0, &ids("abc")).logprobs);
    // Whatever the engine computed meanwhile, and its own answer, is passed over.
    assert_eq!(reader.read(Some(&tokenizer), &mut output(0, &ids("g"))), None);
    assert_eq!(reader.read(Some(&tokenizer), &mut finished(output(0, &[]), FinishReason::Stop)), None);
}

#[test]
fn a_stop_string_in_the_last_output_wins_over_the_end_that_the_engine_found() {
    let tokenizer = vocabulary();
    for (tokens, reason) in [(ids("ab"), FinishReason::Length), ([ids("ab"), vec![END]].concat(), FinishReason::Stop)] {
        let mut reader = stopping_at(&["b"], 1).reader(&tokenizer);
        let mut last = finished(output(0, &tokens), reason);
        let reading = reader.read(Some(&tokenizer), &mut last).unwrap();
        assert_eq!((reading.text.as_str(), last.tokens), ("a", ids("ab")));
        assert_eq!(reading.finish_reason, Some(FinishReason::Stop));
        assert_eq!(reading.stop_reason, Some(StopReason::Text("b".to_owned())));
        assert!(reading.last && !reading.is_news, "the engine knows that it has ended");
    }
}

#[test]
fn what_waits_comes_with_the_end_whatever_that_is() {
    let tokenizer = vocabulary();
    let cases = [
        (finished(output(0, &ids("b")), FinishReason::Length), None),
        (finished(output(0, &[u32::from(b'b'), END]), FinishReason::Stop), Some(StopReason::Token(END))),
        (finished(output(0, &[]), FinishReason::Abort), None),
    ];
    for (mut last, stop_reason) in cases {
        let mut reader = stopping_at(&["abc\u{fffd}"], 1).reader(&tokenizer);
        assert_eq!(reader.read(Some(&tokenizer), &mut output(0, &ids("xa"))).unwrap().text, "x");
        let expected = if last.tokens.is_empty() { "a" } else { "ab" };
        let (reason, num_tokens) = (last.finish.unwrap().reason, last.tokens.len());
        let reading = reader.read(Some(&tokenizer), &mut last).unwrap();
        assert_eq!((reading.text.as_str(), reading.finish_reason), (expected, Some(reason)));
        assert_eq!((reading.stop_reason, last.tokens.len()), (stop_reason, num_tokens));
    }
}

#[test]
fn the_replacement_for_half_a_character_at_the_end_completes_no_stop_string() {
    let tokenizer = vocabulary();
    let mut reader = stopping_at(&["a\u{fffd}"], 1).reader(&tokenizer);
    let mut last = finished(output(0, &[u32::from(b'a'), 0xf0]), FinishReason::Length);
    let reading = reader.read(Some(&tokenizer), &mut last).unwrap();
    assert_eq!((reading.text.as_str(), reading.finish_reason), ("a\u{fffd}", Some(FinishReason::Length)));
    // In the middle of a text it is a character like any other.
    let mut reader = stopping_at(&["a\u{fffd}"], 1).reader(&tokenizer);
    let reading = reader.read(Some(&tokenizer), &mut output(0, &[u32::from(b'a'), 0xf0, u32::from(b'b')])).unwrap();
    assert_eq!((reading.text.as_str(), reading.finish_reason), ("", Some(FinishReason::Stop)));
}

#[test]
fn without_text_nothing_is_searched() {
    let tokenizer = vocabulary();
    let rules = ReadingRules {
        control: None,
        stop_strings: StopStrings::new(owned(&["a"]), StopText::Excluded).into(),
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        num_choices: 1,
    };
    let mut reader = Reader::new(rules, Some(&tokenizer), &[]);
    let reading = reader.read(Some(&tokenizer), &mut output(0, &ids("ab"))).unwrap();
    assert_eq!((reading.text.as_str(), reading.finish_reason), ("", None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_give_what_a_search_through_the_whole_text_finds(
        (text, strings) in text_and_stops(), lens in vec(0..5usize, 1..8), stop_text in stop_text()
    ) {
        let stops = StopStrings::new(strings.clone(), stop_text);
        let end = first_end(&text, &strings, |_| true);
        let (mut search, mut given, mut taken) = (StopSearch::default(), String::new(), 0);
        let mut found = None;
        for len in lens.iter().cycle() {
            if found.is_some() || (taken == text.len() && *len > 0) {
                break;
            }
            let piece_end = (taken + len).min(text.len());
            let piece_end = (piece_end..).find(|&end| text.is_char_boundary(end)).unwrap();
            let piece = &text[taken..piece_end];
            taken = piece_end;
            found = search.push(&stops, piece, Stops::Count, &mut given);
            if found.is_none() {
                prop_assert_eq!(&given, &text[..taken - waiting(&text[..taken], &strings)]);
            }
            if lens.iter().all(|&len| len == 0) {
                break;
            }
        }
        match (found, end) {
            (Some(index), Some((end, stop))) => {
                prop_assert_eq!(stops.string(index), stop);
                let end = if stop_text == StopText::Included { end } else { end - stop.len() };
                prop_assert_eq!(given, &text[..end]);
            }
            (None, _) => {
                search.finish(&mut given);
                prop_assert_eq!(given, &text[..taken]);
                prop_assert!(end.is_none() || taken < text.len());
            }
            (Some(_), None) => prop_assert!(false, "found what is not there"),
        }
    }

    #[test]
    fn tokens_give_what_a_search_through_the_whole_text_finds(
        (text, strings) in text_and_stops(),
        choices in vec(0..8usize, 1..12),
        lens in vec(1..4usize, 1..8),
        min_tokens in 0..6usize,
        stop_text in stop_text(),
        cut in 0..3usize,
    ) {
        let tokenizer = vocabulary();
        let mut all = tokens(&text, &choices);
        all.truncate(all.len() - cut.min(all.len()));
        let ends = complete_ends(&text, &all);
        let complete = &text[..ends.last().copied().unwrap_or(0)];
        // A character counts with the token that completes it.
        let completed_by = |end: usize| ends.iter().position(|&token_end| token_end >= end).unwrap();
        let end = first_end(complete, &strings, |end| completed_by(end) >= min_tokens);

        let request = Request { stops: strings.clone(), stop_text, min_tokens, num_choices: 1 };
        let mut reader = request.reader(&tokenizer);
        let (mut given, mut kept, mut taken, mut ended) = (String::new(), Vec::new(), 0, None);
        for len in lens.iter().cycle() {
            let upto = all.len().min(taken + len);
            let mut output = output(0, &all[taken..upto]);
            if upto == all.len() {
                output = finished(output, FinishReason::Length);
            }
            let reading = reader.read(Some(&tokenizer), &mut output).unwrap();
            prop_assert_eq!(output.tokens.len(), output.logprobs.len());
            given += &reading.text;
            kept.extend(output.tokens);
            taken = upto;
            if reading.finish_reason.is_some() {
                prop_assert!(reading.last);
                prop_assert_eq!(reading.is_news, upto < all.len());
                ended = Some(reading);
                break;
            }
            let seen = &text[..ends[taken - 1]];
            prop_assert_eq!(&given, &seen[..seen.len() - waiting(seen, &strings)]);
        }
        let ended = ended.unwrap();
        match end {
            Some((end, stop)) => {
                prop_assert_eq!(ended.stop_reason, Some(StopReason::Text(stop.to_owned())));
                prop_assert_eq!(&kept, &all[..=completed_by(end)]);
                let end = if stop_text == StopText::Included { end } else { end - stop.len() };
                prop_assert_eq!(given, &text[..end]);
            }
            None => {
                prop_assert_eq!(ended.finish_reason, Some(FinishReason::Length));
                prop_assert_eq!(&kept, &all);
                prop_assert_eq!(given, tokenizer.decode(&all, ControlTokensIn::Skipped));
            }
        }
    }

    #[test]
    fn each_choice_ends_once_and_the_last_end_is_the_last_of_the_request(
        texts in vec("[ab]{1,8}", 1..5), delay in 0..4usize, stop in "[ab]{1,3}"
    ) {
        let tokenizer = vocabulary();
        let num_choices = texts.len() as u32;
        let mut reader = stopping_at(&[&stop], num_choices).reader(&tokenizer);
        // The engine learns of a stop string some steps later, and answers it.
        let mut running: BTreeSet<u32> = (0..num_choices).collect();
        let (mut told, mut given, mut ended) = (Vec::new(), vec![String::new(); texts.len()], BTreeSet::new());
        let mut is_over = false;
        for step in 0.. {
            let mut outputs = Vec::new();
            told.retain(|&(at, choice)| {
                if at == step && running.remove(&choice) {
                    let answer = finished(output(choice, &[]), FinishReason::Stop);
                    outputs.push(Output { last: running.is_empty(), ..answer });
                }
                at > step
            });
            for choice in running.clone() {
                let tokens = ids(&texts[choice as usize]);
                let mut output = output(choice, &tokens[step..=step]);
                if step + 1 == tokens.len() {
                    running.remove(&choice);
                    output = Output { last: running.is_empty(), ..finished(output, FinishReason::Length) };
                }
                outputs.push(output);
            }
            for mut output in outputs {
                let choice = output.choice;
                let Some(reading) = reader.read(Some(&tokenizer), &mut output) else { continue };
                prop_assert!(!is_over, "something comes after the last");
                given[choice as usize] += &reading.text;
                if reading.is_news {
                    told.push((step + 1 + delay, choice));
                }
                if reading.finish_reason.is_some() {
                    prop_assert!(ended.insert(choice));
                }
                is_over = reading.last;
                prop_assert_eq!(reading.last, ended.len() == texts.len());
            }
            if running.is_empty() {
                break;
            }
        }
        prop_assert!(is_over);
        for (text, given) in texts.iter().zip(&given) {
            prop_assert_eq!(given, text.split(&stop).next().unwrap());
        }
    }
}
