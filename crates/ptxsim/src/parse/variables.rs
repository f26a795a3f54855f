//! Variables: shared memory, constants and stacks.

use std::collections::HashMap;

use crate::ParseError;
use crate::isa::Type;
use crate::lexer::Tokens;

/// The variables that stand outside kernels.
#[derive(Debug, Default)]
pub(crate) struct Variables {
    /// Shared memory; a length of none is the dynamic part.
    pub shared: HashMap<String, Extent>,
    /// Where each constant begins in `constants`.
    pub constant_offsets: HashMap<String, u32>,
    pub constants: Vec<u8>,
}

/// Size and alignment of a variable; no size if it is `extern` and open.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub bytes: Option<u32>,
    pub alignment: u32,
}

/// A declaration up to its name and dimensions.
pub(crate) struct Declaration<'a> {
    pub name: &'a str,
    pub of: Type,
    pub extent: Extent,
}

impl Variables {
    /// Reads a declaration of `.shared`, `.const` or `.global` up to its semicolon.
    pub fn declare(&mut self, tokens: &mut Tokens<'_>) -> Result<(), ParseError> {
        let space = tokens.take("a state space")?.text;
        let declaration = declaration(tokens)?;
        let values = if tokens.accept("=") { initialiser(tokens)? } else { Vec::new() };
        tokens.expect(";")?;
        if space == ".shared" {
            self.shared.insert(declaration.name.to_string(), declaration.extent);
            return Ok(());
        }
        let offset = self.constants.len().next_multiple_of(declaration.extent.alignment.max(8) as usize);
        self.constants.resize(offset, 0);
        let element = declaration.of.bytes() as usize;
        for value in values {
            self.constants.extend_from_slice(&value.to_le_bytes()[..element]);
        }
        let bytes = declaration.extent.bytes.unwrap_or(0) as usize;
        self.constants.resize((offset + bytes).max(self.constants.len()), 0);
        self.constant_offsets.insert(declaration.name.to_string(), offset as u32);
        Ok(())
    }
}

/// `.align 4 .b8 name[12][2]`, the state space already taken.
pub(crate) fn declaration<'a>(tokens: &mut Tokens<'a>) -> Result<Declaration<'a>, ParseError> {
    let (mut alignment, mut of) = (None, None);
    let name = loop {
        let token = tokens.take("a name")?;
        match token.text.strip_prefix('.') {
            Some("align") => alignment = Some(tokens.number()?),
            Some("attribute") => tokens.skip_past(")")?,
            Some(name) => of = Some(type_of(name, token.line)?),
            None => break token,
        }
    };
    let of =
        of.ok_or_else(|| ParseError::Unexpected { line: name.line, expected: "a type", found: name.text.to_string() })?;
    let mut bytes = Some(of.bytes());
    while tokens.accept("[") {
        if tokens.accept("]") {
            bytes = None;
            continue;
        }
        let length = tokens.number()?;
        bytes = bytes.and_then(|bytes| bytes.checked_mul(length));
        tokens.expect("]")?;
    }
    let alignment = alignment.unwrap_or(of.bytes()).max(1);
    Ok(Declaration { name: name.text, of, extent: Extent { bytes, alignment } })
}

pub(crate) fn type_of(name: &str, line: u32) -> Result<Type, ParseError> {
    Type::parse(name).ok_or_else(|| ParseError::Unexpected { line, expected: "a type", found: format!(".{name}") })
}

/// The numbers of `{1, 2, {3, 4}}` or of a single value, in order.
fn initialiser(tokens: &mut Tokens<'_>) -> Result<Vec<u64>, ParseError> {
    let (mut values, mut depth, mut negative) = (Vec::new(), 0, false);
    loop {
        let token = tokens.take("an initialiser")?;
        match token.text {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," => {}
            "-" => negative = true,
            text => {
                let value = super::statement::number_bits(text).ok_or_else(|| ParseError::Unexpected {
                    line: token.line,
                    expected: "a number",
                    found: text.to_string(),
                })?;
                values.push(if negative { value.wrapping_neg() } else { value });
                negative = false;
            }
        }
        if depth == 0 && !negative {
            return Ok(values);
        }
    }
}
