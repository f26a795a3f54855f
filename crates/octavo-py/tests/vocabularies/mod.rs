//! Small vocabularies of each kind.

use ahash::AHashMap;
use octavo_model::GgufVocabulary;
use tokenizers::{
    AddedToken, DecoderWrapper,
    decoders::{byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence, strip::Strip, wordpiece::WordPiece},
    models::{bpe::BPE, wordpiece},
    normalizers::Replace,
};

use crate::tokenizer::Tokenizer;

/// Bytes as a byte-level vocabulary writes them (Radford et al., 2019).
pub fn spelled(bytes: &[u8]) -> String {
    let alphabet = (0..=255u8).scan(0x100, |next, byte| {
        let itself = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if itself { u32::from(byte) } else { *next };
        *next += u32::from(!itself);
        char::from_u32(code)
    });
    let alphabet: Vec<char> = alphabet.collect();
    bytes.iter().map(|&byte| alphabet[usize::from(byte)]).collect()
}

/// Each byte is the token of that id. Then come `pieces`, and then control tokens.
pub fn byte_level(pieces: &[&[u8]], controls: &[&str]) -> GgufVocabulary {
    let mut tokens: Vec<String> = (0..=255u8).map(|byte| spelled(&[byte])).collect();
    tokens.extend(pieces.iter().map(|piece| spelled(piece)));
    let mut token_types = vec![1; tokens.len()];
    tokens.extend(controls.iter().map(|control| (*control).to_owned()));
    token_types.resize(tokens.len(), 3);
    GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: "smollm".to_owned(),
        tokens,
        token_types,
        merges: Vec::new(),
        bos_token_id: None,
        eos_token_id: None,
        eot_token_id: None,
        unknown_token_id: None,
        padding_token_id: None,
        add_bos: false,
        add_eos: false,
        add_space_prefix: false,
    }
}

/// The tokens of [`sentencepiece`] behind its 256 bytes. The last two are added ones, the first a control token.
const PIECES: [&str; 11] =
    ["\u{2581}", "\u{2581}a", "b", "\u{2581}the", "\u{301}", "日", "\u{fffd}", ".", "\u{2581}\u{2581}", "</s>", "[T]"];

/// As SentencePiece makes them: each byte is the token of that id, for characters that no other token spells; a word
/// carries the space before it, and a text loses its first one.
pub fn sentencepiece() -> Tokenizer {
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let tokens = bytes.chain(PIECES.map(str::to_owned)).zip(0..).collect::<AHashMap<String, u32>>();
    let model = BPE::builder().vocab_and_merges(tokens, Vec::new()).byte_fallback(true).build().expect("a vocabulary");
    let mut built = tokenizers::Tokenizer::new(model);
    built.with_decoder(Some(DecoderWrapper::Sequence(Sequence::new(vec![
        DecoderWrapper::Replace(Replace::new("\u{2581}", " ").expect("a pattern")),
        DecoderWrapper::ByteFallback(ByteFallback::new()),
        DecoderWrapper::Fuse(Fuse::new()),
        DecoderWrapper::Strip(Strip::new(' ', 1, 0)),
    ]))));
    built.add_special_tokens(&[AddedToken::from("</s>", true)]);
    built.add_tokens(&[AddedToken::from("[T]", false)]);
    read(&built)
}

/// The id of one of [`sentencepiece`]'s tokens that are no bytes.
pub fn piece(spelling: &str) -> u32 {
    256 + PIECES.iter().position(|piece| *piece == spelling).expect("a piece") as u32
}

/// A word begins without a mark, and goes on with one: `un`, `##do`, `the`, `.`, `[SEP]`.
pub fn wordpieces() -> Tokenizer {
    let tokens: AHashMap<String, u32> =
        ["un", "##do", "the", ".", "[SEP]"].map(str::to_owned).into_iter().zip(0..).collect();
    let model = wordpiece::WordPiece::builder().vocab(tokens).unk_token("un".to_owned()).build().expect("a vocabulary");
    let mut built = tokenizers::Tokenizer::new(model);
    built.with_decoder(Some(DecoderWrapper::WordPiece(WordPiece::new("##".to_owned(), true))));
    built.add_special_tokens(&[AddedToken::from("[SEP]", true)]);
    read(&built)
}

fn read(built: &tokenizers::Tokenizer) -> Tokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tokenizer.json");
    built.save(&file, false).expect("a file");
    Tokenizer::from_file(&file).expect("a sound file")
}
