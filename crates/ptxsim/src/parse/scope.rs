//! The names of a kernel and what they stand for.

use std::collections::HashMap;

use crate::exec::window;
use crate::isa::{ALWAYS, Address, Bank, NEVER, Register, Slot, Space, Special, Type};
use crate::module::RegisterLayout;

use super::statement::{Decoded, Operand, number_bits};
use super::variables::{Extent, Variables};

/// Registers and symbols that are visible at a place of a kernel, and the slots given out so far.
pub(crate) struct Scope<'m> {
    variables: &'m Variables,
    /// Innermost last: braces in a body have names of their own.
    registers: Vec<HashMap<String, Register>>,
    symbols: HashMap<String, Symbol>,
    words: HashMap<u32, Slot>,
    doubles: HashMap<u64, Slot>,
    specials: HashMap<(Special, bool), Slot>,
    pub layout: RegisterLayout,
    pub static_shared: u32,
    pub local_bytes: u32,
}

#[derive(Debug, Clone, Copy)]
enum Symbol {
    Param(u32),
    Shared(u32),
    Local(u32),
    Dynamic,
}

impl<'m> Scope<'m> {
    pub fn new(variables: &'m Variables) -> Self {
        let layout = RegisterLayout { predicates: 2, ..RegisterLayout::default() };
        Self {
            variables,
            registers: vec![HashMap::new()],
            symbols: HashMap::new(),
            words: HashMap::new(),
            doubles: HashMap::new(),
            specials: HashMap::new(),
            layout,
            static_shared: 0,
            local_bytes: 0,
        }
    }

    pub fn open(&mut self) {
        self.registers.push(HashMap::new());
    }

    pub fn close(&mut self) {
        self.registers.pop();
    }

    /// Number of open braces.
    pub fn depth(&self) -> usize {
        self.registers.len()
    }

    /// A register declared here.
    pub fn declare(&mut self, name: &str, of: Type) {
        let register = self.fresh(bank_of(of));
        if let Some(scope) = self.registers.last_mut() {
            scope.insert(name.to_string(), register);
        }
    }

    pub fn add_param(&mut self, name: &str, offset: u32) {
        self.symbols.insert(name.to_string(), Symbol::Param(offset));
    }

    pub fn add_shared(&mut self, name: &str, extent: Extent) -> u32 {
        let offset = self.static_shared.next_multiple_of(extent.alignment);
        self.static_shared = offset + extent.bytes.unwrap_or(0);
        self.symbols.insert(name.to_string(), Symbol::Shared(offset));
        offset
    }

    pub fn add_local(&mut self, name: &str, extent: Extent) {
        let offset = self.local_bytes.next_multiple_of(extent.alignment);
        self.local_bytes = offset + extent.bytes.unwrap_or(0);
        self.symbols.insert(name.to_string(), Symbol::Local(offset));
    }

    fn fresh(&mut self, bank: Bank) -> Register {
        let count = match bank {
            Bank::Predicate => &mut self.layout.predicates,
            Bank::Half | Bank::Word => &mut self.layout.words,
            Bank::Double => &mut self.layout.doubles,
        };
        let slot = *count as Slot;
        *count += 1;
        Register { bank, slot }
    }

    /// The register called `name`.
    pub fn register(&self, name: &str) -> Option<Register> {
        self.registers.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    /// A slot that holds `value` in every lane.
    pub fn constant_word(&mut self, value: u32) -> Slot {
        if let Some(slot) = self.words.get(&value) {
            return *slot;
        }
        let slot = self.fresh(Bank::Word).slot;
        self.words.insert(value, slot);
        self.layout.word_constants.push((slot, value));
        slot
    }

    fn constant_double(&mut self, value: u64) -> Slot {
        if let Some(slot) = self.doubles.get(&value) {
            return *slot;
        }
        let slot = self.fresh(Bank::Double).slot;
        self.doubles.insert(value, slot);
        self.layout.double_constants.push((slot, value));
        slot
    }

    fn special(&mut self, special: Special, bank: Bank) -> Slot {
        let double = bank == Bank::Double;
        if let Some(slot) = self.specials.get(&(special, double)) {
            return *slot;
        }
        let slot = self.fresh(if double { Bank::Double } else { Bank::Word }).slot;
        self.specials.insert((special, double), slot);
        let list = if double { &mut self.layout.double_specials } else { &mut self.layout.word_specials };
        list.push((slot, special));
        slot
    }

    /// A source of arithmetic in `of`.
    pub fn source(&mut self, operand: &Operand<'_>, of: Type) -> Decoded<Slot> {
        let wanted = bank_of(of);
        match operand {
            Operand::Number { text, negative } => {
                let bits = immediate(text, *negative, of)?;
                Ok(match wanted {
                    Bank::Double => self.constant_double(bits),
                    Bank::Half => self.constant_word(bits as u32 & 0xffff),
                    _ => self.constant_word(bits as u32),
                })
            }
            Operand::Name(name) => {
                if let Some(register) = self.register(name) {
                    let same = register.bank == wanted
                        || matches!((register.bank, wanted), (Bank::Half, Bank::Word) | (Bank::Word, Bank::Half));
                    return if same { Ok(register.slot) } else { Err(format!("{name} has another width")) };
                }
                self.symbol(name, wanted)
            }
            _ => Err("a register or a number is expected".to_string()),
        }
    }

    /// A word: shift distances, masks, counts.
    pub fn word(&mut self, operand: &Operand<'_>) -> Decoded<Slot> {
        self.source(operand, Type::U32)
    }

    /// A source of any width, as `cvt` takes it.
    pub fn any_source(&mut self, operand: &Operand<'_>, of: Type) -> Decoded<Register> {
        if let Operand::Name(name) = operand
            && let Some(register) = self.register(name)
        {
            return Ok(register);
        }
        Ok(Register { bank: bank_of(of), slot: self.source(operand, of)? })
    }

    fn symbol(&mut self, name: &str, wanted: Bank) -> Decoded<Slot> {
        if let Some(special) = special_of(name) {
            return Ok(self.special(special, wanted));
        }
        let value = match self.resolve(name)? {
            Symbol::Dynamic => return Ok(self.special(Special::DynamicShared, wanted)),
            Symbol::Param(offset) | Symbol::Shared(offset) | Symbol::Local(offset) => u64::from(offset),
        };
        Ok(if wanted == Bank::Double { self.constant_double(value) } else { self.constant_word(value as u32) })
    }

    /// The symbol called `name`; a module's shared variable gets its place in the kernel that first uses it.
    fn resolve(&mut self, name: &str) -> Decoded<Symbol> {
        if let Some(symbol) = self.symbols.get(name) {
            return Ok(*symbol);
        }
        match self.variables.shared.get(name) {
            Some(extent) if extent.bytes.is_some() => Ok(Symbol::Shared(self.add_shared(name, *extent))),
            Some(_) => Ok(Symbol::Dynamic),
            None => Err(format!("{name} is not declared")),
        }
    }

    /// A target in `of`; `_` is a place that nobody reads.
    pub fn target(&mut self, operand: &Operand<'_>, of: Type) -> Decoded<Slot> {
        let wanted = bank_of(of);
        let register = self.any_target(operand, of)?;
        let same = register.bank == wanted || (register.bank == Bank::Word && wanted == Bank::Half);
        if same { Ok(register.slot) } else { Err("the target has another width".to_string()) }
    }

    /// A target of any width, as `cvt` and `ld` take it.
    pub fn any_target(&mut self, operand: &Operand<'_>, of: Type) -> Decoded<Register> {
        match operand {
            Operand::Name("_") => Ok(self.fresh(bank_of(of))),
            Operand::Name(name) => self.register(name).ok_or_else(|| format!("{name} is not declared")),
            _ => Err("a register is expected".to_string()),
        }
    }

    /// A predicate as a source, with its flip.
    pub fn predicate(&mut self, operand: &Operand<'_>) -> Decoded<(Slot, u32)> {
        match operand {
            Operand::Not(inner) => self.predicate(inner).map(|(slot, flip)| (slot, !flip)),
            Operand::Number { text, negative } => {
                let value = immediate(text, *negative, Type::U32)?;
                Ok((if value == 0 { NEVER } else { ALWAYS }, 0))
            }
            Operand::Name(name) => match self.register(name) {
                Some(Register { bank: Bank::Predicate, slot }) => Ok((slot, 0)),
                _ => Err(format!("{name} is not a predicate")),
            },
            _ => Err("a predicate is expected".to_string()),
        }
    }

    /// An address operand in `space`.
    pub fn address(&mut self, operand: &Operand<'_>, space: Space) -> Decoded<Address> {
        let Operand::Address { base, offset } = operand else {
            return Err("an address is expected".to_string());
        };
        if let Some(register) = self.register(base) {
            return match register.bank {
                Bank::Double => Ok(Address { double: true, base: register.slot, offset: *offset }),
                Bank::Word => Ok(Address { double: false, base: register.slot, offset: *offset }),
                _ => Err(format!("{base} cannot hold an address")),
            };
        }
        if let Some(start) = number_bits(base) {
            let base = self.constant_double(start);
            return Ok(Address { double: true, base, offset: *offset });
        }
        let known = self.symbols.contains_key(*base);
        if !known && let Some(start) = self.variables.constant_offsets.get(*base) {
            let base = self.constant_double(window::CONST + u64::from(*start));
            return Ok(Address { double: true, base, offset: *offset });
        }
        let (base, offset) = match self.resolve(base)? {
            Symbol::Dynamic => (self.special(Special::DynamicShared, Bank::Word), *offset),
            Symbol::Param(start) | Symbol::Shared(start) | Symbol::Local(start) => {
                let within = match space {
                    Space::Generic => return Err(format!("{base} needs a state space")),
                    _ => i64::from(start),
                };
                (self.constant_word(0), *offset + within)
            }
        };
        Ok(Address { double: false, base, offset })
    }

    /// The address of a module's constant, if `name` is one.
    pub fn constant_address(&mut self, name: &str) -> Option<Slot> {
        let start = *self.variables.constant_offsets.get(name)?;
        Some(self.constant_double(window::CONST + u64::from(start)))
    }
}

/// Where a value of a type lives.
pub(crate) fn bank_of(of: Type) -> Bank {
    match of {
        Type::Pred => Bank::Predicate,
        _ => match of.bytes() {
            1 | 2 => Bank::Half,
            4 => Bank::Word,
            _ => Bank::Double,
        },
    }
}

/// The bits of a literal as a value of `of`.
fn immediate(text: &str, negative: bool, of: Type) -> Decoded<u64> {
    if let Some(bits) = number_bits(text) {
        return Ok(if negative { bits.wrapping_neg() } else { bits });
    }
    let value: f64 = text.parse().map_err(|_| format!("{text} is not a number"))?;
    let value = if negative { -value } else { value };
    let format = of.format().ok_or_else(|| format!("{text} is not a whole number"))?;
    Ok(crate::numeric::encode(value, format, crate::isa::Rounding::Nearest))
}

fn special_of(name: &str) -> Option<Special> {
    let axis = |name: &str| ["x", "y", "z"].iter().position(|axis| *axis == name).map(|axis| axis as u8);
    if let Some((register, rest)) = name.split_once('.') {
        let axis = axis(rest)?;
        return Some(match register {
            "%tid" => Special::Thread(axis),
            "%ntid" => Special::ThreadCount(axis),
            "%ctaid" => Special::Block(axis),
            "%nctaid" => Special::BlockCount(axis),
            _ => return None,
        });
    }
    Some(match name {
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::WarpCount,
        "%lanemask_eq" => Special::LanesEqual,
        "%lanemask_lt" => Special::LanesLess,
        "%lanemask_le" => Special::LanesLessEqual,
        "%lanemask_gt" => Special::LanesGreater,
        "%lanemask_ge" => Special::LanesGreaterEqual,
        "%dynamic_smem_size" => Special::DynamicSharedBytes,
        "%total_smem_size" => Special::TotalSharedBytes,
        "%smid" | "%gridid" => Special::Zero,
        "%nsmid" => Special::One,
        _ => return None,
    })
}
