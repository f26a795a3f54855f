//! Tokens to text as they arrive, without Python.
#![allow(dead_code, missing_docs)]

#[path = "../src/text.rs"]
mod text;
#[path = "../src/tokenizer/mod.rs"]
mod tokenizer;
mod vocabularies;

use proptest::{collection::vec, prelude::*, sample::select};
use text::TextStream;
use tokenizer::{ControlTokensIn, Tokenizer};
use vocabularies::{byte_level, piece, sentencepiece, wordpieces};

const END: u32 = 256;

/// All bytes, then a control token.
fn bytes_only() -> Tokenizer {
    Tokenizer::from_vocabulary(&byte_level(&[], &["<|e|>"])).expect("a sound vocabulary")
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// What each token gives, then the end.
fn pieces(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32], control: ControlTokensIn) -> Vec<String> {
    let mut stream = TextStream::after(tokenizer, prompt, control);
    let push = |id: &u32| {
        let mut piece = String::new();
        stream.push(tokenizer, *id, &mut piece);
        piece
    };
    let mut pieces: Vec<String> = ids.iter().map(push).collect();
    let mut last = String::new();
    stream.finish(tokenizer, &mut last);
    pieces.push(last);
    pieces
}

fn skipped(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> Vec<String> {
    pieces(tokenizer, prompt, ids, ControlTokensIn::Skipped)
}

#[test]
fn a_character_is_given_out_when_it_is_complete_and_not_before() {
    assert_eq!(skipped(&bytes_only(), &[], &bytes("hé😀!")), ["h", "", "é", "", "", "", "😀", "!", ""]);
}

#[test]
fn a_combining_mark_follows_its_letter_without_holding_it_back() {
    assert_eq!(skipped(&bytes_only(), &[], &bytes("e\u{301}")), ["e", "", "\u{301}", ""]);
    let ids = [b'e'.into(), piece("\u{301}"), 0xcc, 0x81];
    assert_eq!(skipped(&sentencepiece(), &[], &ids), ["e", "\u{301}", "", "\u{301}", ""]);
}

#[test]
fn a_character_that_is_never_completed_ends_as_one_replacement() {
    assert_eq!(skipped(&bytes_only(), &[], &[0x61, 0xf0, 0x9f, 0x98]), ["a", "", "", "", "\u{fffd}"]);
}

#[test]
fn control_tokens_give_text_only_when_they_are_kept_and_do_not_part_a_character_when_they_are_not() {
    let ids = [0x61, END, 0xe2, END, 0x82, 0xac];
    assert_eq!(skipped(&bytes_only(), &[], &ids).concat(), "a€");
    let kept = pieces(&bytes_only(), &[], &ids, ControlTokensIn::Kept).concat();
    assert_eq!(kept, "a<|e|>\u{fffd}<|e|>\u{fffd}\u{fffd}");
    let ids = [piece("\u{2581}a"), piece("</s>"), piece("[T]"), piece("\u{2581}a")];
    assert_eq!(skipped(&sentencepiece(), &[], &ids), ["a", "", "[T]", " a", ""]);
    assert_eq!(pieces(&sentencepiece(), &[], &ids, ControlTokensIn::Kept), ["a", "</s>", "[T]", " a", ""]);
}

#[test]
fn a_character_that_begins_in_the_prompt_comes_whole() {
    let emoji = bytes("😀");
    for (tokenizer, before) in [(bytes_only(), b'x'.into()), (sentencepiece(), piece("\u{2581}a"))] {
        for cut in 1..4 {
            // After a letter, after nothing, after a space that the beginning takes away, and after another character that
            // takes several bytes.
            let space = piece("\u{2581}");
            for start in [vec![before], vec![], vec![space], bytes("日"), bytes("日日日日日日日")] {
                let prompt = [start, emoji[..cut].to_vec()].concat();
                let output = [&emoji[cut..], &bytes("日")].concat();
                let pieces = skipped(&tokenizer, &prompt, &output);
                assert_eq!(pieces[3 - cut], "😀", "{prompt:?} {pieces:?}");
                assert_eq!(pieces.concat(), "😀日", "{prompt:?} {pieces:?}");
            }
        }
    }
}

#[test]
fn what_the_prompt_leaves_broken_gives_nothing() {
    for tokenizer in [bytes_only(), sentencepiece()] {
        for prompt in [[0x61, 0xf0], [0x9f, 0xf0], [0x61, 0xff], [0x61, 0x80]] {
            let text = |ids: &[u32]| skipped(&tokenizer, &prompt, ids).concat();
            assert_eq!(text(&bytes("b日")), "b日", "{prompt:?}");
            assert_eq!(text(&[]), "", "{prompt:?}");
        }
    }
    // One replacement for all bytes of a broken character, and it is the prompt's; or one for each byte.
    assert_eq!(skipped(&bytes_only(), &[0xf0], &[0x9f, 0x62]), ["", "b", ""]);
    assert_eq!(skipped(&bytes_only(), &[0xf0], &[0x9f]), ["", ""]);
    let b = piece("b");
    assert_eq!(skipped(&sentencepiece(), &[b, 0xf0], &[0x9f, b]), ["", "\u{fffd}b", ""]);
}

#[test]
fn the_first_word_keeps_its_space_behind_a_prompt_and_loses_it_without_one() {
    let tokenizer = sentencepiece();
    let (space, two_spaces, word, end) =
        (piece("\u{2581}"), piece("\u{2581}\u{2581}"), piece("\u{2581}a"), piece("</s>"));
    let first = |prompt: &[u32]| skipped(&tokenizer, prompt, &[word]).concat();
    assert_eq!(first(&[piece("b")]), " a");
    assert_eq!(first(&[word, word]), " a");
    assert_eq!(first(&bytes("日")), " a");
    assert_eq!(first(&[piece("b"), space]), " a");
    assert_eq!(first(&[piece("b"), two_spaces, two_spaces]), " a");
    assert_eq!(first(&[]), "a");
    // A control token that is skipped is no text for a word to follow.
    assert_eq!(first(&[end]), "a");
    assert_eq!(pieces(&tokenizer, &[end], &[word], ControlTokensIn::Kept).concat(), " a");
    assert_eq!(skipped(&wordpieces(), &[2], &[0, 1, 2, 3, 4, 2]), [" un", "do", " the", ".", "", " the", ""]);
    assert_eq!(skipped(&wordpieces(), &[0], &[1, 2]), ["do", " the", ""]);
    assert_eq!(skipped(&wordpieces(), &[], &[0, 1]), ["un", "do", ""]);
}

#[test]
fn tokens_without_text_do_not_take_the_space_of_the_word_behind_them() {
    let tokenizer = sentencepiece();
    let nothing = 5000;
    let ids = [vec![piece("b")], vec![nothing; 100], vec![piece("\u{2581}a"), piece("\u{2581}"), piece("\u{2581}a")]]
        .concat();
    assert_eq!(skipped(&tokenizer, &[], &ids).concat(), "b a  a");
}

/// Ids of which most are bytes that begin or continue characters, so that all kinds of broken ones occur.
fn broken() -> impl Strategy<Value = Vec<u32>> {
    vec(prop_oneof![0x80..0x100u32, select(vec![0x61, END]), Just(0xf0u32), Just(0x9f)], 0..24)
}

/// Texts token by token, each character as a piece of its own where there is one, or as bytes.
fn valid() -> impl Strategy<Value = Vec<u32>> {
    let words = ["\u{2581}", "\u{2581}a", "b", "\u{2581}the", "日", ".", "\u{2581}\u{2581}", "</s>", "[T]", "\u{301}"];
    let word = select(words.to_vec()).prop_map(|word| vec![piece(word)]);
    let character = select(vec!["é", "日", "😀", "\u{301}", "a", "👩‍🦰"]).prop_map(bytes);
    vec(prop_oneof![word, character], 0..16).prop_map(|parts| parts.concat())
}

fn control() -> impl Strategy<Value = ControlTokensIn> {
    select(vec![ControlTokensIn::Kept, ControlTokensIn::Skipped])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn joined_pieces_are_the_text_of_all_ids_for_any_bytes(ids in broken(), control in control()) {
        let tokenizer = bytes_only();
        prop_assert_eq!(pieces(&tokenizer, &[], &ids, control).concat(), tokenizer.decode(&ids, control));
    }

    #[test]
    fn after_any_bytes_the_joined_pieces_are_what_follows_them(prompt in broken(), ids in broken()) {
        let tokenizer = bytes_only();
        let decode = |ids: &[u32]| tokenizer.decode(ids, ControlTokensIn::Skipped);
        let (before, whole) = (decode(&prompt), decode(&[prompt.clone(), ids.clone()].concat()));
        // A character that begins in the prompt is a replacement at the end of its text until the output completes it.
        let kept = whole.starts_with(&before);
        let before = if kept { &before } else { before.trim_end_matches(char::REPLACEMENT_CHARACTER) };
        let following = whole.strip_prefix(before).unwrap();
        let text = skipped(&tokenizer, &prompt, &ids).concat();
        if kept {
            prop_assert_eq!(text, following);
        } else {
            prop_assert_eq!(text.as_str(), following.trim_start_matches(char::REPLACEMENT_CHARACTER));
        }
    }

    #[test]
    fn without_bytes_of_its_own_a_vocabulary_gives_the_same_text_in_pieces(
        prompt in valid(), ids in valid(), cut in 0..4usize, control in control()
    ) {
        let tokenizer = sentencepiece();
        let decode = |ids: &[u32]| tokenizer.decode(ids, control);
        prop_assert_eq!(pieces(&tokenizer, &[], &ids, control).concat(), decode(&ids));
        let whole = [prompt.clone(), ids.clone()].concat();
        let text = pieces(&tokenizer, &prompt, &ids, control).concat();
        prop_assert_eq!(decode(&prompt) + &text, decode(&whole), "{:?} {:?}", prompt, ids);
        // Wherever the whole is cut, also inside a character, which then comes with the output.
        let at = prompt.len().saturating_sub(cut);
        let is_complete = |end: &usize| !decode(&whole[..*end]).ends_with(char::REPLACEMENT_CHARACTER);
        let complete = (0..=at).rev().find(is_complete).unwrap();
        let text = pieces(&tokenizer, &whole[..at], &whole[at..], control).concat();
        prop_assert_eq!(decode(&whole[..complete]) + &text, decode(&whole), "{:?} {:?}", &whole[..at], &whole[at..]);
    }

    #[test]
    fn no_piece_ends_inside_a_character_and_no_more_than_one_character_waits(ids in valid(), control in control()) {
        let tokenizer = sentencepiece();
        let mut stream = TextStream::after(&tokenizer, &[], control);
        let mut text = String::new();
        for (at, &id) in ids.iter().enumerate() {
            stream.push(&tokenizer, id, &mut text);
            let complete = tokenizer.decode(&ids[..=at], control);
            let complete = complete.trim_end_matches(char::REPLACEMENT_CHARACTER);
            if at + 1 == ids.len() || ids[at + 1] >= 0x100 || ids[at] >= 0x100 {
                prop_assert_eq!(&text, complete);
            }
            prop_assert!(!text.contains(char::REPLACEMENT_CHARACTER));
        }
    }
}
