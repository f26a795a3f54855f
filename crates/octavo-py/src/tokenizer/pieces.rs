//! What each token stands for, as bytes, where a vocabulary allows to say so.
//!
//! Byte-level vocabularies (Radford et al., 2019) write each byte as one character, so a text is the concatenation of
//! its tokens' bytes, and decoding costs the same for every token of a stream.

use tokenizers::DecoderWrapper;

/// How tokens become text.
pub(super) enum Pieces {
    /// Each token has bytes of its own.
    Bytes(ByteTable),
    /// Only the encoder's rules can tell, from several tokens at once.
    Rules,
}

/// The bytes of all tokens, one after another.
pub(super) struct ByteTable {
    bytes: Vec<u8>,
    /// Token `i` owns `bytes[starts[i]..starts[i + 1]]`.
    starts: Vec<usize>,
}

impl Pieces {
    pub(super) fn of(encoder: &tokenizers::Tokenizer) -> Pieces {
        match encoder.get_decoder() {
            Some(decoder) if is_byte_level(decoder) => Pieces::Bytes(ByteTable::of(encoder)),
            _ => Pieces::Rules,
        }
    }
}

fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(sequence) => {
            let decoders = sequence.get_decoders();
            decoders.len() == 1 && is_byte_level(&decoders[0])
        }
        _ => false,
    }
}

impl ByteTable {
    fn of(encoder: &tokenizers::Tokenizer) -> ByteTable {
        let mut tokens: Vec<(u32, String)> =
            encoder.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort();
        let alphabet = Alphabet::new();
        let mut table = ByteTable { bytes: Vec::new(), starts: vec![0] };
        for (id, _) in tokens {
            // Ids without a token own nothing; of several spellings of one id, the encoder's own choice counts.
            if (id as usize) < table.starts.len() - 1 {
                continue;
            }
            table.starts.resize(id as usize + 1, table.bytes.len());
            table.bytes.extend(alphabet.bytes_of(&encoder.id_to_token(id).unwrap_or_default()));
            table.starts.push(table.bytes.len());
        }
        table
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.starts.get(id + 1) {
            Some(&end) => &self.bytes[self.starts[id]..end],
            None => &[],
        }
    }
}

/// The characters that stand for bytes: printable Latin-1 for itself, all others from U+0100 on in order.
struct Alphabet {
    /// Indexed by character.
    bytes: Vec<Option<u8>>,
}

impl Alphabet {
    fn new() -> Alphabet {
        let mut bytes = vec![None; 0x144];
        let mut next = 0x100;
        for byte in 0..=u8::MAX {
            let itself = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let character = if itself { usize::from(byte) } else { next };
            next += usize::from(!itself);
            bytes[character] = Some(byte);
        }
        Alphabet { bytes }
    }

    /// The bytes that a token stands for. One with a character outside the alphabet is text as it is.
    fn bytes_of(&self, token: &str) -> Vec<u8> {
        let byte = |character: char| self.bytes.get(character as usize).copied().flatten();
        token.chars().map(byte).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
    }
}
