//! The tokenizer, without Python.
#![allow(dead_code, missing_docs)]

#[path = "../src/tokenizer/mod.rs"]
mod tokenizer;
mod vocabularies;

use octavo_model::GgufVocabulary;
use tokenizer::{ControlText, ControlTokensIn, Edges, Tokenizer, TokenizerError};

/// All 256 bytes, then `ab`, then the control tokens `<|e|>` and `|>x`, then a user-defined `[T]`.
fn vocabulary() -> GgufVocabulary {
    let mut vocabulary = vocabularies::byte_level(&[b"ab"], &["<|e|>", "|>x", "[T]"]);
    vocabulary.token_types[USER as usize] = 4;
    vocabulary.merges.push("a b".to_owned());
    (vocabulary.bos_token_id, vocabulary.eos_token_id) = (Some(END), Some(END));
    vocabulary
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
fn bytes_that_are_no_character_are_decoded_as_replacements() {
    let ids = [u32::from(b'a'), 0xf0, 0x9f, 0x98, u32::from(b'b'), 0xff];
    assert_eq!(tokenizer().decode(&ids, ControlTokensIn::Kept), "a\u{fffd}b\u{fffd}");
}

#[test]
fn control_tokens_give_no_text_when_they_are_skipped() {
    let ids = [AB, END, 0xe2, OTHER, 0x82, 0xac];
    assert_eq!(tokenizer().decode(&ids, ControlTokensIn::Skipped), "ab€");
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
