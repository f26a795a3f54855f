//! Parses a kernel: its parameters, launch bounds, variables and statements.

use std::collections::HashMap;

use crate::ParseError;
use crate::isa::{ALWAYS, Instruction, Op, Space};
use crate::lexer::Tokens;
use crate::module::{Kernel, Param};

use super::scope::Scope;
use super::statement::{Decoded, Operand, Statement};
use super::variables::{Variables, declaration, type_of};
use super::{arithmetic, collective, convert, data};

/// Reads `.entry name(...) ... { ... }`.
pub(crate) fn parse_kernel(tokens: &mut Tokens<'_>, variables: &Variables) -> Result<Kernel, ParseError> {
    tokens.expect(".entry")?;
    let name = tokens.take("a kernel's name")?.text.to_string();
    let mut scope = Scope::new(variables);
    let params = if tokens.at("(") { parse_params(tokens, &mut scope)? } else { Vec::new() };
    let bounds = parse_bounds(tokens)?;
    let mut body = Body { scope, code: Vec::new(), texts: Vec::new(), labels: HashMap::new(), branches: Vec::new() };
    body.parse(tokens)?;
    body.link()?;
    super::allocate::allocate(&mut body.code, &mut body.scope.layout);
    Ok(Kernel {
        name,
        params,
        shared_grain: shared_grain(&body.code),
        code: body.code,
        texts: body.texts,
        layout: body.scope.layout,
        static_shared: body.scope.static_shared as usize,
        local_bytes: body.scope.local_bytes as usize,
        max_threads: bounds.most,
        required_threads: bounds.exactly,
        constants: variables.constants.clone(),
    })
}

fn parse_params(tokens: &mut Tokens<'_>, scope: &mut Scope<'_>) -> Result<Vec<Param>, ParseError> {
    let (mut params, mut next) = (Vec::new(), 0u32);
    tokens.expect("(")?;
    while !tokens.accept(")") {
        tokens.expect(".param")?;
        let (mut alignment, mut bytes, mut pointer) = (None, 1, false);
        let name = loop {
            let token = tokens.take("a parameter's name")?;
            match token.text.strip_prefix('.') {
                // The alignment behind `.ptr` is that of what the pointer points to.
                Some("align") if pointer => drop(tokens.number()?),
                Some("align") => alignment = Some(tokens.number()?),
                Some("ptr") => pointer = true,
                Some("global" | "shared" | "const" | "local") => {}
                Some(name) => bytes = type_of(name, token.line)?.bytes(),
                None => break token.text,
            }
        };
        let alignment = alignment.unwrap_or(bytes).max(1);
        if tokens.accept("[") {
            bytes *= tokens.number()?;
            tokens.expect("]")?;
        }
        let offset = next.next_multiple_of(alignment);
        next = offset + bytes;
        scope.add_param(name, offset);
        params.push(Param { offset: offset as usize, bytes: bytes as usize });
        if !tokens.at(")") {
            tokens.expect(",")?;
        }
    }
    Ok(params)
}

#[derive(Default)]
struct Bounds {
    most: Option<usize>,
    exactly: Option<usize>,
}

/// The directives between parameters and body.
fn parse_bounds(tokens: &mut Tokens<'_>) -> Result<Bounds, ParseError> {
    let mut bounds = Bounds::default();
    loop {
        let token = tokens.take("{")?;
        match token.text {
            "{" => return Ok(bounds),
            ".maxntid" => bounds.most = Some(numbers(tokens)?),
            ".reqntid" => {
                bounds.exactly = Some(numbers(tokens)?);
                bounds.most = bounds.exactly;
            }
            ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => drop(tokens.number()?),
            ".noreturn" => {}
            ".pragma" => tokens.skip_past(";")?,
            other => return Err(ParseError::Directive { line: token.line, directive: other.to_string() }),
        }
    }
}

/// The product of `128, 1, 1`.
fn numbers(tokens: &mut Tokens<'_>) -> Result<usize, ParseError> {
    let mut product = tokens.number()? as usize;
    while tokens.accept(",") {
        product *= tokens.number()? as usize;
    }
    Ok(product)
}

struct Body<'m> {
    scope: Scope<'m>,
    code: Vec<Instruction>,
    texts: Vec<String>,
    labels: HashMap<String, u32>,
    /// Instruction and label of each branch.
    branches: Vec<(usize, String)>,
}

impl Body<'_> {
    fn parse(&mut self, tokens: &mut Tokens<'_>) -> Result<(), ParseError> {
        loop {
            let token = tokens.peek().ok_or(ParseError::UnexpectedEnd { expected: "}" })?;
            match token.text {
                "{" => {
                    tokens.expect("{")?;
                    self.scope.open();
                }
                "}" => {
                    tokens.expect("}")?;
                    if self.scope.depth() == 1 {
                        return Ok(());
                    }
                    self.scope.close();
                }
                ";" => drop(tokens.take(";")?),
                directive if directive.starts_with('.') => self.directive(tokens)?,
                _ => self.statement(tokens)?,
            }
        }
    }

    fn directive(&mut self, tokens: &mut Tokens<'_>) -> Result<(), ParseError> {
        let token = tokens.take("a directive")?;
        match token.text {
            ".loc" => tokens.skip_line(token.line),
            ".pragma" => tokens.skip_past(";")?,
            ".reg" => self.registers(tokens)?,
            ".shared" => {
                let declaration = declaration(tokens)?;
                self.scope.add_shared(declaration.name, declaration.extent);
                tokens.expect(";")?;
            }
            ".local" => {
                let declaration = declaration(tokens)?;
                self.scope.add_local(declaration.name, declaration.extent);
                tokens.expect(";")?;
            }
            other => return Err(ParseError::Directive { line: token.line, directive: other.to_string() }),
        }
        Ok(())
    }

    /// `.reg .b32 %r<10>, %x;`
    fn registers(&mut self, tokens: &mut Tokens<'_>) -> Result<(), ParseError> {
        let token = tokens.take("a type")?;
        let of = type_of(token.text.trim_start_matches('.'), token.line)?;
        loop {
            let name = tokens.take("a register")?.text;
            if tokens.accept("<") {
                for index in 0..tokens.number()? {
                    self.scope.declare(&format!("{name}{index}"), of);
                }
                tokens.expect(">")?;
            } else {
                self.scope.declare(name, of);
            }
            if tokens.accept(";") {
                return Ok(());
            }
            tokens.expect(",")?;
        }
    }

    fn statement(&mut self, tokens: &mut Tokens<'_>) -> Result<(), ParseError> {
        if let Some(label) = take_label(tokens) {
            self.labels.insert(label, self.code.len() as u32);
            return Ok(());
        }
        let mut statement = Statement::parse(tokens)?;
        let (line, text) = (statement.line, statement.text.clone());
        let instruction = self.instruction(&mut statement).map_err(|reason| ParseError::Instruction {
            line,
            text: text.clone(),
            reason,
        })?;
        self.code.push(instruction);
        self.texts.push(text);
        Ok(())
    }

    fn instruction(&mut self, statement: &mut Statement<'_>) -> Decoded<Instruction> {
        let (guard, flip) = match statement.guard {
            None => (ALWAYS, 0),
            Some((name, negated)) => {
                let (slot, flip) = self.scope.predicate(&Operand::Name(name))?;
                (slot, if negated { !flip } else { flip })
            }
        };
        if statement.opcode == "bra" {
            statement.modifiers.ignore(&["uni"]);
            let [Operand::Name(label)] = statement.exactly()? else {
                return Err("a label is expected".to_string());
            };
            self.branches.push((self.code.len(), (*label).to_string()));
        }
        let op = decode(&mut self.scope, statement)?;
        statement.modifiers.finish()?;
        Ok(Instruction { op, guard, flip, line: statement.line })
    }

    /// Gives each branch its target.
    fn link(&mut self) -> Result<(), ParseError> {
        for (index, label) in &self.branches {
            let instruction = &mut self.code[*index];
            let target = *self
                .labels
                .get(label)
                .ok_or_else(|| ParseError::Label { line: instruction.line, label: label.clone() })?;
            instruction.op = Op::Branch { target };
        }
        Ok(())
    }
}

/// A word that a colon follows.
fn take_label(tokens: &mut Tokens<'_>) -> Option<String> {
    let name = tokens.peek()?.text;
    tokens.followed_by(":").then(|| {
        tokens.skip(2);
        name.to_string()
    })
}

fn decode(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    match statement.opcode {
        "bra" => Ok(Op::Branch { target: 0 }),
        "ret" | "exit" => {
            statement.modifiers.ignore(&["uni"]);
            Ok(Op::Exit)
        }
        "trap" => Ok(Op::Trap),
        "membar" | "fence" | "prefetch" | "prefetchu" | "nanosleep" | "discard" | "applypriority" => {
            statement.modifiers = Default::default();
            Ok(Op::Nop)
        }
        "cvt" => convert::decode(scope, statement),
        "mov" | "ld" | "ldu" | "st" | "cvta" | "atom" | "red" => data::decode(scope, statement),
        "bar" | "barrier" | "shfl" | "vote" | "match" | "redux" | "activemask" | "mma" | "ldmatrix" | "cp" => {
            collective::decode(scope, statement)
        }
        _ => arithmetic::decode(scope, statement),
    }
}

/// Power of two of the narrowest access to shared memory, at most 2 (words). Atomics and matrices are never narrower than the loads and
/// stores of what they work on.
fn shared_grain(code: &[Instruction]) -> u32 {
    let narrowest = code.iter().filter_map(|instruction| match &instruction.op {
        Op::Load(access) | Op::Store(access) if matches!(access.space, Space::Shared | Space::Generic) => {
            Some(access.element * access.registers.len() as u32)
        }
        _ => None,
    });
    narrowest.min().unwrap_or(4).min(4).trailing_zeros()
}
