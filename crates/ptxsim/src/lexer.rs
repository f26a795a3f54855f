//! Cuts PTX into tokens.

use crate::ParseError;

/// A token: a word (name, number, opcode with its modifiers, directive), a quoted string, or one punctuation character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub text: &'a str,
    pub line: u32,
}

/// The tokens of a text, read from front to back.
pub(crate) struct Tokens<'a> {
    tokens: Vec<Token<'a>>,
    next: usize,
}

impl<'a> Tokens<'a> {
    /// Cuts `text` whole.
    pub fn new(text: &'a str) -> Result<Self, ParseError> {
        Ok(Self { tokens: cut(text)?, next: 0 })
    }

    /// The token that comes next, which stays.
    pub fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.next).copied()
    }

    /// True if the next token is `text`.
    pub fn at(&self, text: &str) -> bool {
        self.peek().is_some_and(|token| token.text == text)
    }

    /// True if the token after the next one is `text`.
    pub fn followed_by(&self, text: &str) -> bool {
        self.tokens.get(self.next + 1).is_some_and(|token| token.text == text)
    }

    /// Passes over `count` tokens.
    pub fn skip(&mut self, count: usize) {
        self.next += count;
    }

    /// Takes the next token.
    pub fn take(&mut self, expected: &'static str) -> Result<Token<'a>, ParseError> {
        let token = self.peek().ok_or(ParseError::UnexpectedEnd { expected })?;
        self.next += 1;
        Ok(token)
    }

    /// Takes the next token if it is `text`.
    pub fn accept(&mut self, text: &str) -> bool {
        let found = self.at(text);
        self.next += usize::from(found);
        found
    }

    /// Takes the next token, which must be `text`.
    pub fn expect(&mut self, text: &'static str) -> Result<Token<'a>, ParseError> {
        let token = self.take(text)?;
        if token.text == text {
            return Ok(token);
        }
        Err(ParseError::Unexpected { line: token.line, expected: text, found: token.text.to_string() })
    }

    /// Takes a whole number.
    pub fn number(&mut self) -> Result<u32, ParseError> {
        let token = self.take("a number")?;
        token.text.parse().map_err(|_| ParseError::Unexpected {
            line: token.line,
            expected: "a number",
            found: token.text.to_string(),
        })
    }

    /// Takes tokens up to and with the next `text`.
    pub fn skip_past(&mut self, text: &'static str) -> Result<(), ParseError> {
        while self.take(text)?.text != text {}
        Ok(())
    }

    /// Takes the tokens that stand on `line`.
    pub fn skip_line(&mut self, line: u32) {
        while self.peek().is_some_and(|token| token.line == line) {
            self.next += 1;
        }
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'%' | b'.' | b'_' | b'$')
}

fn cut(text: &str) -> Result<Vec<Token<'_>>, ParseError> {
    let bytes = text.as_bytes();
    let (mut tokens, mut line, mut at) = (Vec::new(), 1, 0);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            byte if byte.is_ascii_whitespace() || byte == 0 => {
                at += 1;
                continue;
            }
            b'/' if bytes[at..].starts_with(b"//") => {
                at = find(bytes, at, b"\n");
                continue;
            }
            b'/' if bytes[at..].starts_with(b"/*") => {
                at = (find(bytes, at, b"*/") + 2).min(bytes.len());
                line += count_lines(&bytes[start..at]);
                continue;
            }
            b'"' => {
                at = (find(bytes, at + 1, b"\"") + 1).min(bytes.len());
                tokens.push(Token { text: &text[start..at], line });
                line += count_lines(&bytes[start..at]);
                continue;
            }
            byte if is_word(byte) => at = word_end(bytes, at),
            byte if byte.is_ascii_punctuation() => at += 1,
            _ => {
                let found = text[at..].chars().next().unwrap_or('?');
                return Err(ParseError::Character { line, found });
            }
        }
        tokens.push(Token { text: &text[start..at], line });
    }
    Ok(tokens)
}

/// Where the word that starts at `at` ends. Two colons belong to a word (`L1::no_allocate`), one ends a label.
fn word_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        if is_word(bytes[at]) {
            at += 1;
        } else if bytes[at..].starts_with(b"::") {
            at += 2;
        } else {
            break;
        }
    }
    at
}

fn find(bytes: &[u8], from: usize, pattern: &[u8]) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    rest.windows(pattern.len()).position(|window| window == pattern).map_or(bytes.len(), |found| from + found)
}

fn count_lines(bytes: &[u8]) -> u32 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modifiers_stay_with_their_opcode_and_a_label_loses_its_colon() {
        let text =
            "$L1:\n ld.global.L1::no_allocate.v4.u32 {%r1,_}, [%rd1+-8]; // end\n/* two\nlines */ @!%p1 bra $L1;";
        let tokens: Vec<_> = cut(text).unwrap().into_iter().map(|token| (token.text, token.line)).collect();
        let words: Vec<_> = tokens.iter().map(|token| token.0).collect();
        let expected = "$L1 : ld.global.L1::no_allocate.v4.u32 { %r1 , _ } , [ %rd1 + - 8 ] ; @ ! %p1 bra $L1 ;";
        assert_eq!(words.join(" "), expected);
        assert_eq!(tokens.last().unwrap().1, 4);
    }

    #[test]
    fn a_character_outside_ascii_is_an_error_with_its_line() {
        assert_eq!(cut("a\n\u{e9}"), Err(ParseError::Character { line: 2, found: '\u{e9}' }));
    }
}
