//! The tokenizer and the text stream, without Python.
#![allow(dead_code, missing_docs)]

#[path = "../src/text.rs"]
mod text;
#[path = "../src/tokenizer/mod.rs"]
mod tokenizer;

use octavo_model::GgufVocabulary;
use text::TextStream;
use tokenizer::{ControlText, ControlTokensIn, Edges, Tokenizer, TokenizerError};

/// All 256 bytes, then `ab`, then the control tokens `<|e|>` and `|>x`, then a user-defined `[T]`.
fn vocabulary() -> GgufVocabulary {
    let alphabet = (0..=255u8).scan(0x100, |next, byte| {
        let itself = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if itself { u32::from(byte) } else { *next };
        *next += u32::from(!itself);
        char::from_u32(code)
    });
    let mut tokens: Vec<String> = alphabet.map(String::from).collect();
    let mut token_types = vec![1; 256];
    for (token, kind) in [("ab", 1), ("<|e|>", 3), ("|>x", 3), ("[T]", 4)] {
        tokens.push(token.to_owned());
        token_types.push(kind);
    }
    GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: "smollm".to_owned(),
        tokens,
        token_types,
        merges: vec!["a b".to_owned()],
        bos_token_id: Some(257),
        eos_token_id: Some(257),
        eot_token_id: None,
        unknown_token_id: None,
        padding_token_id: None,
        add_bos: false,
        add_eos: false,
        add_space_prefix: false,
    }
}

const AB: u32 = 256;
const END: u32 = 257;
const OTHER: u32 = 258;
const USER: u32 = 259;
const MARKER: char = '\u{fdd0}';

fn tokenizer() -> Tokenizer {
    Tokenizer::from_vocabulary(&vocabulary()).expect("a sound vocabulary")
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn stream(tokenizer: &Tokenizer, ids: &[u32], control: ControlTokensIn) -> Vec<String> {
    let mut stream = TextStream::new(tokenizer, control);
    let mut pieces: Vec<String> = ids
        .iter()
        .map(|&id| {
            let mut piece = String::new();
            stream.push(tokenizer, id, &mut piece);
            piece
        })
        .collect();
    let mut last = String::new();
    stream.finish(tokenizer, &mut last);
    pieces.push(last);
    pieces
}

#[test]
fn a_control_token_spelled_in_ordinary_text_is_ordinary_text() {
    let ids = tokenizer().encode("ab<|e|>", Edges::Bare, ControlText::Ordinary).unwrap();
    assert_eq!(ids, [vec![AB], bytes("<|e|>")].concat());
}

#[test]
fn a_control_token_is_one_token_where_the_caller_asks_for_it() {
    let ids = tokenizer().encode("ab<|e|>|>xa", Edges::Bare, ControlText::Atomic).unwrap();
    assert_eq!(ids, [AB, END, OTHER, u32::from(b'a')]);
}

#[test]
fn a_user_defined_token_is_one_token_in_any_text() {
    let ids = tokenizer().encode("a[T]", Edges::Bare, ControlText::Ordinary).unwrap();
    assert_eq!(ids, [u32::from(b'a'), USER]);
}

#[test]
fn marked_text_never_becomes_a_control_token_and_unmarked_text_does() {
    let tokenizer = tokenizer();
    for content in ["<|e|>", "a<|e|>x", "<|", "e|>", ">", "x", "<|e|>x|>x", "<", "|>x"] {
        let marked = tokenizer.mark(content, MARKER);
        assert_eq!(marked.replace(MARKER, ""), content);
        for (before, after) in [("", ""), ("<|e|>", "<|e|>"), ("<|", "|>"), ("<", ">x"), ("|", "e|>")] {
            let ids = tokenizer.encode_marked(&format!("{before}{marked}{after}"), MARKER).unwrap();
            let control: Vec<u32> = ids.iter().copied().filter(|&id| tokenizer.is_control(id)).collect();
            let expected = if before == "<|e|>" { vec![END, END] } else { vec![] };
            assert_eq!(control, expected, "{before:?} {content:?} {after:?}");
            let text = tokenizer.decode(&ids, ControlTokensIn::Kept);
            assert_eq!(text, format!("{before}{content}{after}"));
        }
    }
}

#[test]
fn bos_and_eos_are_added_only_when_the_file_asks_for_them() {
    let asked = GgufVocabulary { add_bos: true, add_eos: true, ..vocabulary() };
    let asked = Tokenizer::from_vocabulary(&asked).unwrap();
    assert_eq!(asked.encode("ab", Edges::Added, ControlText::Ordinary).unwrap(), [END, AB, END]);
    assert_eq!(asked.encode("ab", Edges::Bare, ControlText::Ordinary).unwrap(), [AB]);
    assert_eq!(tokenizer().encode("ab", Edges::Added, ControlText::Ordinary).unwrap(), [AB]);
}

#[test]
fn a_character_is_given_out_when_it_is_complete_and_not_before() {
    let pieces = stream(&tokenizer(), &bytes("hé😀!"), ControlTokensIn::Skipped);
    assert_eq!(pieces, ["h", "", "é", "", "", "", "😀", "!", ""]);
}

#[test]
fn a_character_that_is_never_completed_ends_as_one_replacement() {
    let pieces = stream(&tokenizer(), &[0x61, 0xf0, 0x9f, 0x98], ControlTokensIn::Skipped);
    assert_eq!(pieces, ["a", "", "", "", "\u{fffd}"]);
}

#[test]
fn joined_pieces_are_the_text_of_all_ids_for_any_bytes() {
    let tokenizer = tokenizer();
    let mut state = 1u64;
    for length in 0..400 {
        let ids: Vec<u32> = (0..length % 23)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let id = (state >> 33) as u32;
                // Mostly bytes that begin or continue characters, so that all kinds of broken ones occur.
                if id.is_multiple_of(3) { id % 260 } else { 0x80 + id % 0x80 }
            })
            .collect();
        for control in [ControlTokensIn::Kept, ControlTokensIn::Skipped] {
            assert_eq!(stream(&tokenizer, &ids, control).concat(), tokenizer.decode(&ids, control), "{ids:?}");
        }
    }
}

#[test]
fn control_tokens_give_no_text_when_they_are_skipped() {
    let ids = [AB, END, 0xe2, OTHER, 0x82, 0xac];
    assert_eq!(tokenizer().decode(&ids, ControlTokensIn::Skipped), "ab€");
    assert_eq!(stream(&tokenizer(), &ids, ControlTokensIn::Skipped).concat(), "ab€");
}

#[test]
fn an_id_without_a_token_gives_no_text() {
    assert_eq!(tokenizer().decode(&[AB, 5000], ControlTokensIn::Kept), "ab");
}

#[test]
fn a_vocabulary_that_cannot_be_used_is_refused_by_field() {
    let message = |change: fn(&mut GgufVocabulary)| {
        let mut vocabulary = vocabulary();
        change(&mut vocabulary);
        match Tokenizer::from_vocabulary(&vocabulary) {
            Err(error @ TokenizerError::Vocabulary { .. }) => error.to_string(),
            other => panic!("{:?}", other.err()),
        }
    };
    assert!(message(|v| v.model = "llama".to_owned()).contains("tokenizer.ggml.model: found \"llama\""));
    let pre = message(|v| v.pre = "qwen2".to_owned());
    assert!(pre.contains("tokenizer.ggml.pre: found \"qwen2\"") && pre.contains("smollm"), "{pre}");
    assert!(message(|v| v.merges.push("zz".to_owned())).contains("tokenizer.ggml.merges: found \"zz\" at 1"));
    assert!(message(|v| v.merges.push("a zzz".to_owned())).contains("tokenizer.ggml.merges"));
    assert!(message(|v| v.tokens[9] = "ab".to_owned()).contains("\"ab\" at 9 and at 256"));
    assert!(message(|v| v.token_types.truncate(3)).contains("tokenizer.ggml.token_type: found 3 entries"));
    assert!(message(|v| (v.add_bos, v.bos_token_id) = (true, Some(999))).contains("tokenizer.ggml.bos_token_id"));
}
