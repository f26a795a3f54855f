//! Parses a module: its variables, and its kernels instruction by instruction.

mod allocate;
mod arithmetic;
mod collective;
mod convert;
mod data;
mod kernel;
mod scope;
mod statement;
mod variables;

use crate::ParseError;
use crate::lexer::Tokens;
use crate::module::Kernel;

use variables::Variables;

/// All kernels of a text.
pub(crate) fn parse_module(text: &str) -> Result<Vec<Kernel>, ParseError> {
    let mut tokens = Tokens::new(text)?;
    let (mut variables, mut kernels) = (Variables::default(), Vec::new());
    while let Some(token) = tokens.peek() {
        match token.text {
            ".version" | ".target" | ".address_size" | ".file" => tokens.skip_line(token.line),
            ".visible" | ".weak" | ".extern" | ".common" => {
                tokens.take("a linkage directive")?;
            }
            ".shared" | ".const" | ".global" => variables.declare(&mut tokens)?,
            ".entry" => kernels.push(kernel::parse_kernel(&mut tokens, &variables)?),
            ".section" => skip_section(&mut tokens)?,
            other => return Err(ParseError::Directive { line: token.line, directive: other.to_string() }),
        }
    }
    Ok(kernels)
}

/// Debug information: `.section .debug_str { ... }`.
fn skip_section(tokens: &mut Tokens<'_>) -> Result<(), ParseError> {
    tokens.skip_past("{")?;
    let mut depth = 1;
    while depth > 0 {
        match tokens.take("}")?.text {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
    }
    Ok(())
}
