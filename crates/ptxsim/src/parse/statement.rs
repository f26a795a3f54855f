//! A statement before its names mean anything: guard, opcode with modifiers, operands.

use crate::ParseError;
use crate::isa::Type;
use crate::lexer::Tokens;

/// Why a statement cannot be decoded; the caller adds line and text.
pub(crate) type Decoded<T> = Result<T, String>;

/// An operand as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operand<'a> {
    Name(&'a str),
    Number {
        text: &'a str,
        negative: bool,
    },
    Not(Box<Operand<'a>>),
    Vector(Vec<Operand<'a>>),
    /// `[base + offset]`
    Address {
        base: &'a str,
        offset: i64,
    },
    /// `a|b`
    Pair(Box<Operand<'a>>, Box<Operand<'a>>),
}

/// A statement.
#[derive(Debug)]
pub(crate) struct Statement<'a> {
    pub line: u32,
    pub text: String,
    /// Predicate, and true if it is negated.
    pub guard: Option<(&'a str, bool)>,
    pub opcode: &'a str,
    pub modifiers: Modifiers<'a>,
    pub operands: Vec<Operand<'a>>,
}

impl<'a> Statement<'a> {
    /// Reads a statement with its semicolon.
    pub fn parse(tokens: &mut Tokens<'a>) -> Result<Self, ParseError> {
        let line = tokens.peek().map_or(0, |token| token.line);
        let mut text = String::new();
        let guard = if tokens.accept("@") {
            let negated = tokens.accept("!");
            let name = tokens.take("a predicate")?.text;
            text = format!("@{}{name} ", if negated { "!" } else { "" });
            Some((name, negated))
        } else {
            None
        };
        let word = tokens.take("an opcode")?.text;
        text.push_str(word);
        let mut parts = word.split('.');
        let opcode = parts.next().unwrap_or_default();
        let modifiers = Modifiers { rest: parts.collect() };
        let operands = match operands(tokens, &mut text) {
            Ok(operands) => operands,
            Err(ParseError::Unexpected { expected, found, .. }) => {
                let reason = format!("expected {expected}, found {found}");
                return Err(ParseError::Instruction { line, text, reason });
            }
            Err(other) => return Err(other),
        };
        Ok(Self { line, text, guard, opcode, modifiers, operands })
    }

    /// The operands, of which there must be `N`.
    pub fn exactly<const N: usize>(&self) -> Decoded<[&Operand<'a>; N]> {
        let operands: Vec<_> = self.operands.iter().collect();
        let found = operands.len();
        operands.try_into().map_err(|_| format!("{N} operands expected, {found} found"))
    }
}

fn operands<'a>(tokens: &mut Tokens<'a>, text: &mut String) -> Result<Vec<Operand<'a>>, ParseError> {
    let mut operands = Vec::new();
    while !tokens.accept(";") {
        text.push_str(if operands.is_empty() { " " } else { ", " });
        operands.push(operand(tokens, text)?);
        if !tokens.at(";") {
            tokens.expect(",")?;
        }
    }
    Ok(operands)
}

fn operand<'a>(tokens: &mut Tokens<'a>, text: &mut String) -> Result<Operand<'a>, ParseError> {
    let first = simple(tokens, text)?;
    if !tokens.accept("|") {
        return Ok(first);
    }
    text.push('|');
    Ok(Operand::Pair(Box::new(first), Box::new(simple(tokens, text)?)))
}

fn simple<'a>(tokens: &mut Tokens<'a>, text: &mut String) -> Result<Operand<'a>, ParseError> {
    let token = tokens.take("an operand")?;
    text.push_str(token.text);
    Ok(match token.text {
        "!" => Operand::Not(Box::new(simple(tokens, text)?)),
        "-" => {
            let number = tokens.take("a number")?.text;
            text.push_str(number);
            Operand::Number { text: number, negative: true }
        }
        "{" => {
            let mut parts = Vec::new();
            while !tokens.accept("}") {
                if !parts.is_empty() {
                    tokens.expect(",")?;
                    text.push_str(", ");
                }
                parts.push(simple(tokens, text)?);
            }
            text.push('}');
            Operand::Vector(parts)
        }
        "[" => address(tokens, text)?,
        word if word.starts_with(|c: char| c.is_ascii_digit()) => Operand::Number { text: word, negative: false },
        word if word.starts_with(|c: char| c.is_ascii_alphabetic() || "%_$".contains(c)) => Operand::Name(word),
        other => {
            let (line, found) = (token.line, other.to_string());
            return Err(ParseError::Unexpected { line, expected: "an operand", found });
        }
    })
}

fn address<'a>(tokens: &mut Tokens<'a>, text: &mut String) -> Result<Operand<'a>, ParseError> {
    let base = tokens.take("an address")?;
    text.push_str(base.text);
    let mut offset = 0;
    let bad = |found: &str| ParseError::Unexpected { line: base.line, expected: "an offset", found: found.to_string() };
    while !tokens.accept("]") {
        let sign = tokens.take("an offset")?.text;
        let mut negative = sign == "-";
        if sign != "+" && sign != "-" {
            return Err(bad(sign));
        }
        text.push_str(sign);
        if tokens.accept("-") {
            negative = !negative;
            text.push('-');
        }
        let number = tokens.take("an offset")?.text;
        text.push_str(number);
        let value = number_bits(number).ok_or_else(|| bad(number))? as i64;
        offset += if negative { -value } else { value };
    }
    text.push(']');
    Ok(Operand::Address { base: base.text, offset })
}

/// The bits of a number: an integer of any base, or a float by its bits (`0f3F800000`, `0d3FF0000000000000`).
pub(crate) fn number_bits(text: &str) -> Option<u64> {
    let text = text.trim_end_matches(['U', 'u']);
    let digits = |radix, digits: &str| u64::from_str_radix(digits, radix).ok();
    match text.get(..2) {
        Some("0x" | "0X") => digits(16, &text[2..]),
        Some("0f" | "0F") if text.len() == 10 => digits(16, &text[2..]),
        Some("0d" | "0D") if text.len() == 18 => digits(16, &text[2..]),
        Some("0b" | "0B") => digits(2, &text[2..]),
        Some(_) if text.starts_with('0') => digits(8, text),
        _ => digits(10, text),
    }
}

/// The modifiers that nobody has claimed yet. Whatever is left at the end is an error.
#[derive(Debug, Clone, Default)]
pub(crate) struct Modifiers<'a> {
    rest: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    /// Claims `name`; false if it is not there.
    pub fn flag(&mut self, name: &str) -> bool {
        let found = self.rest.iter().position(|part| *part == name);
        if let Some(index) = found {
            self.rest.remove(index);
        }
        found.is_some()
    }

    /// Claims each of `names` that is there: hints that change no result.
    pub fn ignore(&mut self, names: &[&str]) {
        self.rest.retain(|part| !names.contains(part));
    }

    /// Claims the first of `choices` that is there.
    pub fn choice<T: Copy>(&mut self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(name, _)| self.flag(name)).map(|(_, value)| *value)
    }

    /// Claims one of `choices`, which must be there.
    pub fn one_of<T: Copy>(&mut self, what: &str, choices: &[(&str, T)]) -> Decoded<T> {
        self.choice(choices).ok_or_else(|| format!("{what} is missing or not known in .{}", self.rest.join(".")))
    }

    /// Claims the first type.
    pub fn of_type(&mut self) -> Decoded<Type> {
        let found = self.rest.iter().position(|part| Type::parse(part).is_some());
        let index = found.ok_or_else(|| format!("no known type in .{}", self.rest.join(".")))?;
        Type::parse(self.rest.remove(index)).ok_or_else(|| "a type is expected".to_string())
    }

    /// Every modifier must be claimed.
    pub fn finish(&self) -> Decoded<()> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(format!("the modifier .{} is not known here", self.rest.join(".")))
        }
    }
}
