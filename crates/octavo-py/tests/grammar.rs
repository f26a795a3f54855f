//! Grammars over a vocabulary of bytes, without Python and without a model.
//!
//! The table of texts has an independent witness in `tests/test_structured_outputs.py`.
#![allow(dead_code, missing_docs)]

#[path = "../src/grammar/mod.rs"]
mod grammar;
#[path = "../src/tokenizer/mod.rs"]
mod tokenizer;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use grammar::{GrammarCompiler, GrammarSource};
use octavo_backend::TokenMask;
use octavo_engine::{Grammar, GrammarState};
use octavo_model::GgufVocabulary;
use tokenizer::Tokenizer;

/// Longer tokens besides the 256 bytes, so that one token spans several parts of a text.
const LONGER: [&str; 12] =
    ["ab", "{\"", "\":", "\":\u{120}", ",\u{120}\"", "\"}", "true", "null", "12", "\u{120}\u{120}", "]]", "}}"];
const FIRST_CONTROL: u32 = 256 + LONGER.len() as u32;
const CONTROL: [&str; 2] = ["<|e|>", "<|other|>"];
const END: u32 = FIRST_CONTROL;
/// The model's vocabulary goes on with padding.
const VOCAB_SIZE: usize = 300;

fn tokenizer() -> Tokenizer {
    let alphabet = (0..=255u8).scan(0x100, |next, byte| {
        let itself = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if itself { u32::from(byte) } else { *next };
        *next += u32::from(!itself);
        char::from_u32(code)
    });
    let tokens: Vec<String> =
        alphabet.map(String::from).chain(LONGER.map(str::to_owned)).chain(CONTROL.map(str::to_owned)).collect();
    let token_types = (0..tokens.len() as u32).map(|id| if id >= FIRST_CONTROL { 3 } else { 1 }).collect();
    Tokenizer::from_vocabulary(&GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: "smollm".to_owned(),
        tokens,
        token_types,
        merges: Vec::new(),
        bos_token_id: Some(END),
        eos_token_id: Some(END),
        eot_token_id: None,
        unknown_token_id: None,
        padding_token_id: None,
        add_bos: false,
        add_eos: false,
        add_space_prefix: false,
    })
    .expect("a sound vocabulary")
}

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(Some(Arc::new(tokenizer())), VOCAB_SIZE, vec![END])
}

fn schema(text: &str) -> GrammarSource {
    GrammarSource::JsonSchema(text.to_owned())
}

fn regex(pattern: &str) -> GrammarSource {
    GrammarSource::Regex(pattern.to_owned())
}

fn choice(texts: &[&str]) -> GrammarSource {
    GrammarSource::Choice(texts.iter().map(|&text| text.to_owned()).collect())
}

fn lark(text: &str) -> GrammarSource {
    GrammarSource::Lark(text.to_owned())
}

fn compiled(source: &GrammarSource) -> Arc<dyn Grammar> {
    compiler().compile(source).unwrap_or_else(|error| panic!("{source:?}: {error}"))
}

fn refusal(source: &GrammarSource) -> String {
    match compiler().compile(source) {
        Ok(_) => panic!("{source:?} was taken"),
        Err(error) => error.to_string(),
    }
}

fn allowed(state: &mut dyn GrammarState) -> Vec<u32> {
    let mut mask = TokenMask::none(VOCAB_SIZE);
    state.allowed(&mut mask).expect("a grammar that goes on");
    (0..VOCAB_SIZE as u32).filter(|&token| mask.contains(token)).collect()
}

/// Whether a text, byte by byte, is what the grammar allows from its beginning to its end.
fn accepts(grammar: &dyn Grammar, text: &str) -> bool {
    let mut state = grammar.start();
    for byte in text.bytes() {
        if !allowed(state.as_mut()).contains(&u32::from(byte)) {
            return false;
        }
        state.advance(u32::from(byte)).expect("an allowed token");
    }
    state.may_end().expect("a grammar that goes on")
}

/// Numbers that look random and are the same each time.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

/// Tokens drawn at random from what is allowed, most of them short ones so that texts end; `None` if it does not.
fn walk(grammar: &dyn Grammar, draws: &mut Draws) -> Option<Vec<u32>> {
    let mut state = grammar.start();
    let mut tokens = Vec::new();
    while tokens.len() < 400 {
        let next = allowed(state.as_mut());
        let may_end = state.may_end().expect("a grammar that goes on");
        if next.is_empty() || (may_end && draws.below(4) == 0) {
            assert!(may_end, "after {tokens:?} there is no way on");
            return Some(tokens);
        }
        let closing: Vec<u32> = next.iter().copied().filter(|&token| b"\"]},".contains(&(token as u8))).collect();
        let from = if closing.is_empty() || draws.below(3) == 0 { &next } else { &closing };
        let token = from[draws.below(from.len())];
        state.advance(token).expect("an allowed token");
        tokens.push(token);
    }
    None
}

/// A few tokens, as far as there is a way on.
fn stroll(grammar: &dyn Grammar, draws: &mut Draws) {
    let mut state = grammar.start();
    for _ in 0..20 {
        let next = allowed(state.as_mut());
        if next.is_empty() || state.advance(next[draws.below(next.len())]).is_err() {
            break;
        }
    }
}

fn text(tokens: &[u32]) -> String {
    tokenizer().decode(tokens, tokenizer::ControlTokensIn::Kept)
}

/// JSON schemas, each with texts that follow it, and texts that do not.
fn schemas() -> Vec<(String, Vec<String>, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>, Vec<String>)> = Vec::new();
    for line in include_str!("../../../tests/data/schemas.txt").lines().filter(|line| !line.starts_with('#')) {
        let text = |written: &str| match written.strip_prefix("string ") {
            Some(quoted) => serde_json::from_str(quoted).expect("a JSON string"),
            None => written.to_owned(),
        };
        let last = found.last_mut();
        match (line.split_once(' '), last) {
            (Some(("+", right)), Some((_, rights, _))) => rights.push(text(right)),
            (Some(("-", wrong)), Some((_, _, wrongs))) => wrongs.push(text(wrong)),
            _ if line.is_empty() => {}
            _ => found.push((line.to_owned(), Vec::new(), Vec::new())),
        }
    }
    assert!(found.len() > 30 && found.iter().all(|(_, rights, wrongs)| !rights.is_empty() && !wrongs.is_empty()));
    found
}

#[test]
fn a_schema_allows_just_the_texts_that_follow_it() {
    let compiler = compiler();
    for (source, right, wrong) in schemas() {
        let grammar = compiler.compile(&schema(&source)).unwrap_or_else(|error| panic!("{source}: {error}"));
        for text in right {
            assert!(accepts(&*grammar, &text), "{source} refuses {text}");
        }
        for text in wrong {
            assert!(!accepts(&*grammar, &text), "{source} takes {text}");
        }
    }
}

#[test]
fn every_way_through_a_schema_comes_to_an_end_or_goes_on() {
    let compiler = compiler();
    let mut draws = Draws(1);
    let mut ended = 0;
    let schemas = schemas();
    for (source, _, _) in &schemas {
        let grammar = compiler.compile(&schema(source)).expect("a sound schema");
        for _ in 0..20 {
            if let Some(tokens) = walk(&*grammar, &mut draws) {
                let text = text(&tokens);
                let read = serde_json::from_str::<serde_json::Value>(&text);
                assert!(read.is_ok(), "{source}: {text}: {read:?}");
                ended += 1;
            }
        }
    }
    assert!(ended > 15 * schemas.len(), "{ended} texts ended");
}

#[test]
fn digits_do_not_run_on_without_end() {
    let grammar = compiled(&schema(r#"{"type": "number"}"#));
    let digits = |count: usize| "1".repeat(count);
    assert!(accepts(&*grammar, &format!("-{}.{}e-{}", digits(19), digits(17), digits(2))));
    for text in [digits(20), format!("1.{}", digits(18)), "1e111".to_owned()] {
        assert!(!accepts(&*grammar, &text), "{text}");
    }
    assert!(!accepts(&*compiled(&schema(r#"{"type": "integer", "minimum": 5}"#)), &digits(20)));
}

#[test]
fn any_object_is_one_and_blank_space_is_bounded() {
    let grammar = compiled(&GrammarSource::JsonObject);
    for text in ["{}", r#"{"a":{"b":[1,"x",null,true,-2.5e3]}}"#, r#"{"a": 1, "b": {}}"#] {
        assert!(accepts(&*grammar, text), "{text}");
    }
    for text in ["[]", "1", "{ }", r#"{"a":  1}"#, r#"{"a":1 }"#, "{\"a\":\n1}", r#"{"a":1} "#] {
        assert!(!accepts(&*grammar, text), "{text}");
    }
}

#[test]
fn a_choice_is_one_of_its_texts_even_where_one_begins_another() {
    let grammar = compiled(&choice(&["ab", "a", "abc d", "x\"\n"]));
    for text in ["a", "ab", "abc d", "x\"\n"] {
        assert!(accepts(&*grammar, text), "{text}");
    }
    for text in ["", "b", "abc", "abc de", "x"] {
        assert!(!accepts(&*grammar, text), "{text}");
    }
}

#[test]
fn a_regular_expression_matches_the_whole_text() {
    for (pattern, right, wrong) in [
        (r"\d{3}-\d{4}", ["123-4567"], ["123-456"]),
        ("^(a|b)+$", ["abba"], [""]),
        ("^a|b$", ["b"], ["ab"]),
        (r"a/b\/c\$", ["a/b/c$"], ["a/b/c"]),
        ("é|日", ["日"], ["e"]),
    ] {
        let grammar = compiled(&regex(pattern));
        assert!(right.iter().all(|text| accepts(&*grammar, text)), "{pattern}");
        assert!(!wrong.iter().any(|text| accepts(&*grammar, text)), "{pattern}");
    }
}

#[test]
fn a_grammar_in_larks_notation_may_nest() {
    let grammar = compiled(&lark("start: item\nitem: \"(\" item* \")\" | WORD\nWORD: /[a-z]+/"));
    assert!(accepts(&*grammar, "(ab(c)())"));
    assert!(!accepts(&*grammar, "(ab"));
}

#[test]
fn where_nothing_can_follow_the_mask_is_empty_and_the_output_may_end() {
    let bounded = schema(r#"{"enum": [12, 7], "minimum": 9}"#);
    for source in [choice(&["ab"]), bounded, regex("a{0}b?"), lark("start: \"ab\"")] {
        let mut state = compiled(&source).start();
        while let Some(&token) = allowed(state.as_mut()).first() {
            state.advance(token).unwrap();
        }
        assert!(state.may_end().unwrap(), "{source:?}");
    }
}

#[test]
fn only_tokens_of_text_are_allowed() {
    let mut state = compiled(&regex("(?s:.)*")).start();
    let first = allowed(state.as_mut());
    // Bytes that no UTF-8 has, end tokens, control tokens, padding.
    let never = (0xc0..0xc2).chain(0xf5..0x100).chain(FIRST_CONTROL..VOCAB_SIZE as u32);
    for token in never {
        assert!(!first.contains(&token), "{token}");
    }
    assert!((0..0x80).chain(256..FIRST_CONTROL).all(|token| first.contains(&token)));
    // Spelled out, a control token is a text like any other.
    assert!(accepts(&*compiled(&choice(&["<|other|>"])), "<|other|>"));
}

#[test]
fn a_state_read_anew_from_its_tokens_answers_the_same() {
    let properties =
        r#"{"a": {"type": "string", "maxLength": 9}, "b": {"type": "array", "items": {"type": "number"}}}"#;
    let grammar = compiled(&schema(&format!(r#"{{"type": "object", "properties": {properties}}}"#)));
    let mut draws = Draws(3);
    for _ in 0..20 {
        let Some(tokens) = walk(&*grammar, &mut draws) else { continue };
        let (mut one, mut other) = (grammar.start(), grammar.start());
        for (index, &token) in tokens.iter().enumerate() {
            // One is asked at each place, the other never before the last.
            allowed(one.as_mut());
            one.advance(token).unwrap();
            other.advance(token).unwrap();
            let mut anew = grammar.start();
            tokens[..=index].iter().for_each(|&token| anew.advance(token).unwrap());
            assert_eq!(allowed(anew.as_mut()), allowed(one.as_mut()));
            assert_eq!(anew.may_end(), one.may_end());
        }
        assert_eq!(allowed(one.as_mut()), allowed(other.as_mut()));
    }
}

#[test]
fn a_token_that_is_not_allowed_ends_this_output_and_no_other() {
    let grammar = compiled(&choice(&["ab", "cd"]));
    let mut state = grammar.start();
    assert!(state.advance(u32::from(b'x')).is_err());
    assert!(state.may_end().is_err());
    assert!(state.allowed(&mut TokenMask::none(VOCAB_SIZE)).is_err());
    assert!(accepts(&*grammar, "cd"));
}

#[test]
fn what_is_wrong_is_said_with_its_place_and_soon() {
    let refused: &[(GrammarSource, &str)] = &[
        (schema(r#"{"type": "strng"}"#), r#"at /type: found "strng", expected null"#),
        (schema(r##"{"$ref": "#/$defs/none"}"##), r##"at /$ref: "#/$defs/none" leads nowhere"##),
        (schema(r#"{"$ref": "other.json"}"#), r#"at /$ref: found "other.json", expected a reference inside"#),
        (schema(r##"{"$ref": "#"}"##), "at #: this schema refers to itself without end"),
        (schema(r##"{"anyOf": [{"$ref": "#"}]}"##), "at #: no value fits the schema: it needs itself without end"),
        (
            schema(r##"{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}"##),
            "at #: no value fits",
        ),
        (schema(r#"{"type": "array", "maxItems": 1000000000}"#), "at /maxItems: found 1000000000, expected an integer"),
        (schema(r#"{"type": "string", "maxLength": 1e9}"#), "at /maxLength: found 1000000000.0, expected an integer"),
        (
            schema(r#"{"properties": {"a": {"uniqueItems": true}}}"#),
            "at /properties/a/uniqueItems: this keyword is not",
        ),
        (schema(r#"{"items": {"not": {}}}"#), "at /items/not: this keyword is not supported"),
        (schema(r#"{"properties": {"a/b~": {"if": {}}}}"#), "at /properties/a~1b~0/if: this keyword is not supported"),
        (schema(r#"{"anyOf": [{"type": "null"}, {"widht": 3}]}"#), "at /anyOf/1/widht: this keyword is not supported"),
        (schema(r#"{"type": "string", "format": "regex"}"#), r#"at /format: found "regex", expected one of date"#),
        (schema(r#"{"type": "string", "pattern": "("}"#), "at /pattern: the regular expression"),
        (schema(r#"{"type": "string", "pattern": "(?=a)"}"#), "at /pattern: the regular expression"),
        (schema(r#"{"type": "string", "pattern": "(a{1000}){1000}"}"#), "at /pattern: found 1000000 places"),
        (schema(r#"{"type": "integer", "minimum": 5, "maximum": 3}"#), "at #: no value fits all that is said here"),
        (schema(r#"{"type": "string", "minLength": 5, "maxLength": 3}"#), "at #: no value fits all that is said here"),
        (
            schema(r#"{"type": "string", "pattern": "^a$", "minLength": 2}"#),
            "at #: no value fits all that is said here",
        ),
        (schema(r#"{"type": "integer", "minimum": "5"}"#), r#"at /minimum: found "5", expected a number"#),
        (schema(r#"{"type": "object", "required": "a"}"#), r#"at /required: found "a", expected a list"#),
        (schema(r#"{"anyOf": []}"#), "at /anyOf: found [], expected a list of at least one schema"),
        (schema(r#"{"enum": [{}, 1], "maxProperties": 0}"#), "at #: lists and objects as values, beside keywords"),
        (schema(r#"{"oneOf": [{"type": "integer"}, {"type": "number"}]}"#), "at /oneOf: schemas 0 and 1 may both hold"),
        // 2 is 2.0, the order of members says nothing, and a format says nothing to many validators.
        (
            schema(r#"{"oneOf": [{"type": "integer"}, {"enum": [0.5, 2.0]}]}"#),
            "at /oneOf: schemas 0 and 1 may both hold",
        ),
        (schema(r#"{"oneOf": [{"const": 1e2}, {"const": 5}, {"const": 100}]}"#), "at /oneOf: schemas 0 and 2 may both"),
        (schema(r#"{"oneOf": [{"const": [2]}, {"const": [2.0]}]}"#), "at /oneOf: schemas 0 and 1 may both hold"),
        (
            schema(r#"{"oneOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}]}"#),
            "at /oneOf: schemas 0 and 1 may both hold",
        ),
        (
            schema(r#"{"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}]}"#),
            "at /oneOf: schemas 0 and 1 may both hold",
        ),
        // Open to `a`, as validators read it.
        (
            schema(r#"{"type": "object", "oneOf": [{"required": ["a"]}, {"properties": {"b": {"type": "integer"}}}]}"#),
            "at /oneOf: schemas 0 and 1 may both hold",
        ),
        (
            schema(r#"{"items": {"type": "object", "minProperties": 2}}"#),
            "at /items/minProperties: found 2, expected at",
        ),
        (
            schema(r#"{"properties": {"a": {}}, "additionalProperties": {"type": "null"}, "minProperties": 3}"#),
            "at /minProperties: found 3, expected at most 2 here: names that the schema does not list may repeat",
        ),
        (
            schema(r#"{"type": "object", "patternProperties": {"^x": {}}, "minProperties": 2}"#),
            "at /minProperties: found 2, expected at most 1 here",
        ),
        (
            schema(
                r#"{"type": "object", "properties": {"a": false}, "additionalProperties": true, "minProperties": 2}"#,
            ),
            "at /properties/a: no value fits",
        ),
        (schema("[1]"), "at #: found [1], expected a schema"),
        (schema("false"), "at #: no value fits"),
        (schema("{"), "the schema is no JSON text: EOF"),
        (schema(&format!("\"{}\"", "a".repeat(300_000))), "found 300002 bytes, expected at most 262144"),
        (schema(&"[".repeat(100_000)), "the schema is no JSON text: recursion limit"),
        (regex("("), r#"the regular expression "(" is wrong at byte 0: unclosed group"#),
        (regex("[a"), r#"the regular expression "[a" is wrong at byte 0: unclosed character class"#),
        (regex("(a{1000}){1000}"), "found 1000000 places with all repetitions written out, expected at most 10000"),
        (regex("a\\"), "the regular expression"),
        (regex(r"(a)\1"), "the regular expression"),
        (regex(r"a\bc"), ""),
        (regex("[^\\s\\S]"), "no text can follow"),
        (regex(&"(".repeat(100_000)), "the regular expression"),
        (choice(&[]), "found no text or an empty one"),
        (choice(&["a", ""]), "found no text or an empty one"),
        (lark("start: b"), "at 1("),
        (lark("start: (\"a\""), "1("),
        (lark("b: \"a\""), ""),
        (lark("start: a\na: a"), "no text can follow"),
        (lark("start: <|e|> \"a\""), "at 1("),
        (lark("start: a\n?a[stop=\"]\", temperature=0.5]: /[a-z]+/"), r#"at 2: the attribute "temperature" of a rule"#),
        (lark("start[capture]: \"a\""), r#"at 1: the attribute "capture" of a rule is not supported"#),
        (lark(&format!("start: {}\"a\"{}", "(".repeat(5_000), ")".repeat(5_000))), "found 5000 brackets within"),
        (lark(&"a".repeat(70_000)), "found 70000 bytes, expected at most 65536"),
    ];
    for (source, expected) in refused {
        let begun = Instant::now();
        let found = refusal(source);
        assert!(found.starts_with(expected), "{source:?}: {found}");
        assert!(!found.contains('\n') && found.len() < 500, "{found}");
        assert!(begun.elapsed() < Duration::from_secs(4), "{source:?} took {:?}", begun.elapsed());
    }
}

/// Schemas of less than 256 KiB that refer to themselves so often that they are the work of minutes, or of gigabytes.
fn dear_schemas() -> Vec<String> {
    let listed = |count: usize, part: &dyn Fn(usize) -> String| (0..count).map(part).collect::<Vec<_>>().join(",");
    let chain = |count: usize| {
        let step = |index| format!(r##""{index}":{{"$ref":"#/$defs/{}"}}"##, index + 1);
        format!(r#"{},"{count}":{{}}"#, listed(count, &step))
    };
    let apart = listed(14_000, &|index| format!(r#"{{"const":{index}}}"#));
    let strings = listed(3_000, &|index| format!(r#"{{"type":"string","pattern":"^{index}a*$"}}"#));
    let joined = listed(4_000, &|index| format!(r##""p{index}":{{"$ref":"#/$defs/{index}"}}"##));
    let names = listed(30_000, &|index| format!("\"{index}\""));
    let matched = listed(9_000, &|index| format!(r#""aaaaaaaaaa{index}":{{}}"#));
    let again = listed(3_000, &|index| format!(r##""p{index}":{{"$ref":"#/$defs/e","minimum":{index}}}"##));
    let values = listed(15_000, &|index| format!("{index}"));
    let ways = listed(4_000, &|index| format!(r##"{{"$ref":"#/$defs/{index}"}}"##));
    let long = "a".repeat(80_000);
    let below = listed(6_000, &|index| format!(r#""{index}":{{}}"#));
    let either = listed(14, &|index| format!(r#"{{"anyOf":[{{"minimum":{index}}},{{"maximum":{index}}}]}}"#));
    vec![
        format!(r#"{{"oneOf":[{apart}]}}"#),
        format!(r#"{{"oneOf":[{strings}]}}"#),
        format!(r#"{{"properties":{{{joined}}},"$defs":{{{}}}}}"#, chain(4_000)),
        format!(r#"{{"required":[{names}]}}"#),
        format!(
            r#"{{"properties":{{{matched}}},"patternProperties":{{"(a|b)*a(a|b){{12}}c":{{}},"b$":{{}},"c+":{{}}}}}}"#
        ),
        format!(r#"{{"properties":{{{again}}},"$defs":{{"e":{{"enum":[{values}]}}}}}}"#),
        format!(r#"{{"anyOf":[{ways}],"$defs":{{{}}}}}"#, chain(3_999)),
        format!(r##"{{"$ref":"#/$defs/{long}","$defs":{{"{long}":{{"properties":{{{below}}}}}}}}}"##),
        format!(r#"{{"allOf":[{either}]}}"#),
        format!(r#"{{"enum":[{values}],"allOf":[{{"enum":[{values}]}}]}}"#),
    ]
}

#[test]
fn the_work_of_one_schema_is_counted_and_too_much_is_refused_soon() {
    let compiler = compiler();
    let mut refused = 0;
    for source in dear_schemas() {
        assert!(source.len() < 256 << 10, "{}", source.len());
        let begun = Instant::now();
        let outcome = compiler.compile(&schema(&source));
        let shown: String = source.chars().take(80).collect();
        if let Err(error) = outcome {
            let error = error.to_string();
            assert!(error.starts_with("found ") || error.contains("too complex to see"), "{shown}: {error}");
            refused += 1;
        }
        assert!(begun.elapsed() < Duration::from_secs(2), "{shown} took {:?}", begun.elapsed());
    }
    assert!(refused >= 8, "{refused}");
    // What people write is far from that.
    let kinds: Vec<String> = (0..300)
        .map(|kind| format!(r#"{{"properties":{{"kind":{{"const":"k{kind}"}},"v":{{}}}},"required":["kind"]}}"#))
        .collect();
    compiler.compile(&schema(&format!(r#"{{"type":"object","oneOf":[{}]}}"#, kinds.join(",")))).expect("300 kinds");
    let values: Vec<String> = (0..1_000).map(|value| format!(r#"{{"const":{value}}}"#)).collect();
    compiler.compile(&schema(&format!(r#"{{"oneOf":[{}]}}"#, values.join(",")))).expect("1,000 values");
    let members: Vec<String> = (0..1_900).map(|index| format!(r#""p{index}":{{"type":"integer"}}"#)).collect();
    compiler.compile(&schema(&format!(r#"{{"properties":{{{}}}}}"#, members.join(",")))).expect("1,900 members");
}

#[test]
fn callers_wait_for_their_turn_and_equal_sources_for_each_other() {
    let compiler = Arc::new(compiler());
    let sources: Vec<GrammarSource> = (0..24).map(|index| regex(&format!("(a|b){{{}}}", 100 + index / 2))).collect();
    let threads: Vec<_> = sources
        .iter()
        .cloned()
        .map(|source| (Arc::clone(&compiler), source))
        .map(|(compiler, source)| {
            std::thread::spawn(move || compiler.compile(&source).map_err(|error| error.to_string()))
        })
        .collect();
    let found: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap().expect("a sound expression")).collect();
    for pair in found.chunks(2) {
        assert!(Arc::ptr_eq(&pair[0], &pair[1]));
    }
}

#[test]
fn a_refusal_is_kept_as_a_grammar_is() {
    let compiler = compiler();
    let dear = schema(&dear_schemas()[0]);
    let first = compiler.compile(&dear).err().expect("a refusal");
    let begun = Instant::now();
    assert_eq!(compiler.compile(&dear).err(), Some(first));
    assert!(begun.elapsed() < Duration::from_millis(20), "{:?}", begun.elapsed());
}

#[test]
fn sources_that_are_long_chains_do_not_break_anything() {
    let compiler = compiler();
    let rules: String = (0..3_000).map(|index| format!("r{index}: r{}\n", index + 1)).collect();
    let step = |index| format!(r##""d{index}": {{"properties": {{"a": {{"$ref": "#/$defs/d{}"}}}}}}"##, index + 1);
    let definitions: Vec<String> = (0..2_000).map(step).chain([r#""d2000": {"type": "null"}"#.to_owned()]).collect();
    let members: Vec<String> = (0..5_000).map(|index| format!(r#""p{index}": {{"type": "integer"}}"#)).collect();
    let numbers: Vec<String> = (0..20_000).map(|number| number.to_string()).collect();
    let texts: Vec<&str> = numbers.iter().map(String::as_str).collect();
    for source in [
        lark(&format!("start: r0\n{rules}r3000: \"a\"")),
        schema(&format!(r##"{{"$ref": "#/$defs/d0", "$defs": {{{}}}}}"##, definitions.join(", "))),
        schema(&format!(r#"{{"type": "object", "properties": {{{}}}}}"#, members.join(", "))),
        schema(&format!(r#"{{"enum": [{}]}}"#, numbers.join(","))),
        schema(&format!(r#"{{"type": "string", "pattern": "{}"}}"#, "(a|b)?".repeat(2_000))),
        regex(&"a?".repeat(9_000)),
        regex("(a|aa|aaa|aaaa)*b(a|aa|aaa|aaaa){500}c"),
        choice(&texts),
    ] {
        let begun = Instant::now();
        // Taken or refused, with a way on or without: what matters is that it ends, and ends soon.
        if let Ok(grammar) = compiler.compile(&source) {
            stroll(&*grammar, &mut Draws(5));
        }
        let shown: String = format!("{source:?}").chars().take(60).collect();
        assert!(begun.elapsed() < Duration::from_secs(10), "{shown} took {:?}", begun.elapsed());
    }
    assert!(accepts(&*compiler.compile(&choice(&["ab"])).expect("a sound choice"), "ab"));
}

#[test]
fn damaged_sources_are_refused_or_taken_and_never_worse() {
    let compiler = compiler();
    let mut draws = Draws(7);
    let sound: Vec<String> = schemas()
        .into_iter()
        .map(|(source, _, _)| source)
        .chain(["start: a (\",\" a)*\na: /[0-9]+/ | \"x\"".to_owned(), r"^[a-z]+(\d|-){2,3}$".to_owned()])
        .collect();
    for index in 0..300 {
        let mut bytes = sound[index % sound.len()].clone().into_bytes();
        for _ in 0..1 + draws.below(3) {
            let at = draws.below(bytes.len());
            match draws.below(3) {
                0 => drop(bytes.remove(at)),
                1 => bytes[at] = b" {}[]()\"\\0123456789ae*+?|:,/~#$"[draws.below(31)],
                _ => bytes.insert(at, b"{}[]()\"9$*"[draws.below(10)]),
            }
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        for source in [schema(&text), regex(&text), lark(&text)] {
            if let Ok(grammar) = compiler.compile(&source) {
                stroll(&*grammar, &mut draws);
            }
        }
    }
}

#[test]
fn an_equal_source_is_compiled_once_and_the_oldest_are_forgotten() {
    let compiler = compiler();
    let source = choice(&["first"]);
    let first = compiler.compile(&source).unwrap();
    assert!(Arc::ptr_eq(&first, &compiler.compile(&source).unwrap()));
    for index in 0..64 {
        compiler.compile(&choice(&[&format!("other {index}")])).unwrap();
    }
    assert!(!Arc::ptr_eq(&first, &compiler.compile(&source).unwrap()));
}

#[test]
fn without_a_tokenizer_nothing_is_compiled() {
    let compiler = GrammarCompiler::new(None, VOCAB_SIZE, vec![END]);
    let error = compiler.compile(&choice(&["a"])).err().expect("a refusal");
    assert!(error.to_string().contains("no tokenizer"));
}

#[test]
fn without_an_end_token_that_can_be_drawn_nothing_is_compiled() {
    let tokenizer = Arc::new(tokenizer());
    // Beyond the tokenizer's vocabulary, or beyond the model's.
    let padding = FIRST_CONTROL + CONTROL.len() as u32;
    for ends in [vec![], vec![padding], vec![5_000]] {
        let compiler = GrammarCompiler::new(Some(Arc::clone(&tokenizer)), VOCAB_SIZE, ends);
        let error = compiler.compile(&choice(&["a"])).err().expect("a refusal");
        assert!(error.to_string().contains("no end token that can be drawn"), "{error}");
    }
    let compiler = GrammarCompiler::new(Some(tokenizer), VOCAB_SIZE, vec![padding, END]);
    assert!(compiler.compile(&choice(&["a"])).is_ok());
}

#[test]
fn a_vocabulary_without_a_table_of_bytes_gives_spaces_and_bytes() {
    let file = r#"{"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": {"<s>": 0, "a": 1, "▁": 2, "▁b": 3, "<0xC3>": 4, "<0xA9>": 5, "s": 6}, "merges": []}}"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, file).unwrap();
    let tokenizer = Tokenizer::from_file(&path).expect("a sound file");
    let compiler = GrammarCompiler::new(Some(Arc::new(tokenizer)), 7, vec![0]);
    let mut state = compiler.compile(&choice(&["a bé", "<s>"])).expect("a choice").start();
    for token in [1, 3, 4, 5] {
        let mut mask = TokenMask::none(7);
        state.allowed(&mut mask).unwrap();
        assert!(mask.contains(token), "{token}");
        state.advance(token).unwrap();
    }
    assert!(state.may_end().unwrap());
}
