//! Decodes moves, loads, stores and atomics.

use crate::isa::*;

use super::scope::{Scope, bank_of};
use super::statement::{Decoded, Operand, Statement};

/// Modifiers that say where data should be cached and how accesses are ordered: without effect where blocks run one after another.
const CACHING: [&str; 25] = [
    "weak",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];

/// `mov`, `ld`, `st`, `cvta`, `atom` or `red`.
pub(crate) fn decode(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    match statement.opcode {
        "mov" => mov(scope, statement),
        "ld" | "ldu" => load(scope, statement),
        "st" => store(scope, statement),
        "cvta" => convert_address(scope, statement),
        _ => atomic(scope, statement),
    }
}

fn mov(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let [d, a] = statement.exactly()?;
    match (d, a) {
        (_, Operand::Vector(parts)) => pack(scope, of, d, parts),
        (Operand::Vector(parts), _) => unpack(scope, of, parts, a),
        _ if of == Type::Pred => {
            let (a, flip) = scope.predicate(a)?;
            Ok(Op::Predicate { op: PredicateOp::And, d: scope.target(d, of)?, a: ALWAYS, b: a, flip })
        }
        _ => {
            let constant = match a {
                Operand::Name(name) if of.bytes() == 8 => scope.constant_address(name),
                _ => None,
            };
            let a = match constant {
                Some(slot) => slot,
                None => scope.source(a, of)?,
            };
            Ok(Op::Move { double: of.bytes() == 8, d: scope.target(d, of)?, a })
        }
    }
}

/// The type of each part when `of` is cut into `count`.
fn part_type(of: Type, count: usize) -> Decoded<Type> {
    match (of.bytes(), count) {
        (8, 2) => Ok(Type::B32),
        (8, 4) | (4, 2) => Ok(Type::B16),
        _ => Err(format!("{of:?} has no {count} parts")),
    }
}

fn pack(scope: &mut Scope<'_>, of: Type, d: &Operand<'_>, parts: &[Operand<'_>]) -> Decoded<Op> {
    let part = part_type(of, parts.len())?;
    let sources = parts.iter().map(|operand| scope.source(operand, part)).collect::<Decoded<Vec<_>>>()?;
    let d = scope.target(d, of)?;
    Ok(match (sources.as_slice(), of.bytes()) {
        ([low, high], 4) => Op::PackHalves { d, low: *low, high: *high },
        ([low, high], _) => Op::PackWords { d, low: *low, high: *high },
        ([a, b, c, e], _) => Op::PackQuarters { d, parts: Box::new([*a, *b, *c, *e]) },
        _ => return Err("2 or 4 parts are expected".to_string()),
    })
}

fn unpack(scope: &mut Scope<'_>, of: Type, parts: &[Operand<'_>], a: &Operand<'_>) -> Decoded<Op> {
    let part = part_type(of, parts.len())?;
    let a = scope.source(a, of)?;
    let targets = parts.iter().map(|operand| scope.target(operand, part)).collect::<Decoded<Vec<_>>>()?;
    Ok(match (targets.as_slice(), of.bytes()) {
        ([low, high], 4) => Op::UnpackHalves { low: *low, high: *high, a },
        ([low, high], _) => Op::UnpackWords { low: *low, high: *high, a },
        ([b, c, d, e], _) => Op::UnpackQuarters { parts: Box::new([*b, *c, *d, *e]), a },
        _ => return Err("2 or 4 parts are expected".to_string()),
    })
}

fn space(statement: &mut Statement<'_>) -> Space {
    let choices = [
        ("global", Space::Global),
        ("shared", Space::Shared),
        ("shared::cta", Space::Shared),
        ("local", Space::Local),
        ("param", Space::Param),
        ("param::entry", Space::Param),
        ("const", Space::Const),
    ];
    statement.modifiers.choice(&choices).unwrap_or(Space::Generic)
}

fn vector_length(statement: &mut Statement<'_>) -> usize {
    statement.modifiers.choice(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1)
}

/// The elements of a vector operand, or the one operand.
fn elements<'o, 'a>(operand: &'o Operand<'a>, length: usize) -> Decoded<&'o [Operand<'a>]> {
    let parts = match operand {
        Operand::Vector(parts) => parts.as_slice(),
        single => std::slice::from_ref(single),
    };
    if parts.len() == length { Ok(parts) } else { Err(format!("{length} elements expected, {} found", parts.len())) }
}

fn check_size(of: Type, length: usize) -> Decoded<()> {
    let bytes = of.bytes() as usize * length;
    if of != Type::Pred && bytes <= 32 { Ok(()) } else { Err(format!("{bytes} bytes a lane cannot be moved at once")) }
}

fn load(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    statement.modifiers.ignore(&CACHING);
    let (space, length) = (space(statement), vector_length(statement));
    let of = statement.modifiers.of_type()?;
    check_size(of, length)?;
    let [d, address] = statement.exactly()?;
    let address = scope.address(address, space)?;
    let targets =
        elements(d, length)?.iter().map(|target| scope.any_target(target, of)).collect::<Decoded<Vec<_>>>()?;
    let bank = targets[0].bank;
    if targets.iter().any(|target| target.bank != bank || !can_hold(bank, of)) {
        return Err("the targets are narrower than the type, or not all alike".to_string());
    }
    let extend = match (of.is_signed(), bank) {
        (false, _) => Extend::Zero,
        (true, Bank::Half) => Extend::SignToHalf,
        (true, _) => Extend::Sign,
    };
    let registers = targets.iter().map(|target| target.slot).collect();
    let double = bank == Bank::Double;
    Ok(Op::Load(Box::new(Access { space, address, element: of.bytes(), extend, double, registers })))
}

fn can_hold(bank: Bank, of: Type) -> bool {
    match bank {
        Bank::Predicate => false,
        Bank::Half => of.bytes() <= 2,
        Bank::Word => of.bytes() <= 4,
        Bank::Double => true,
    }
}

fn store(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    statement.modifiers.ignore(&CACHING);
    let (space, length) = (space(statement), vector_length(statement));
    if matches!(space, Space::Param | Space::Const) {
        return Err("parameters and constants cannot be written".to_string());
    }
    let of = statement.modifiers.of_type()?;
    check_size(of, length)?;
    let [address, values] = statement.exactly()?;
    let address = scope.address(address, space)?;
    let sources =
        elements(values, length)?.iter().map(|value| scope.any_source(value, of)).collect::<Decoded<Vec<_>>>()?;
    let double = sources[0].bank == Bank::Double;
    if sources.iter().any(|source| (source.bank == Bank::Double) != double || !can_hold(source.bank, of)) {
        return Err("the sources are narrower than the type, or not all alike".to_string());
    }
    let registers = sources.iter().map(|source| source.slot).collect();
    Ok(Op::Store(Box::new(Access { space, address, element: of.bytes(), extend: Extend::Zero, double, registers })))
}

fn convert_address(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let from_generic = statement.modifiers.flag("to");
    let space = space(statement);
    let of = statement.modifiers.of_type()?;
    let [d, a] = statement.exactly()?;
    let constant = match a {
        Operand::Name(name) if of.bytes() == 8 => scope.constant_address(name),
        _ => None,
    };
    let a = match constant {
        Some(slot) => slot,
        None => scope.source(a, of)?,
    };
    let (d, double) = (scope.target(d, of)?, bank_of(of) == Bank::Double);
    Ok(match space {
        // Addresses of these two are generic addresses already.
        Space::Global | Space::Const => Op::Move { double, d, a },
        Space::Shared | Space::Local if from_generic => Op::FromGeneric { space, double, d, a },
        Space::Shared | Space::Local => Op::ToGeneric { space, double, d, a },
        _ => return Err("addresses of this space cannot be converted".to_string()),
    })
}

fn atomic(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let returns = statement.opcode == "atom";
    statement.modifiers.ignore(&CACHING);
    statement.modifiers.ignore(&["noftz"]);
    let space = space(statement);
    let choices = [
        ("add", AtomicOp::Add),
        ("min", AtomicOp::Min),
        ("max", AtomicOp::Max),
        ("and", AtomicOp::And),
        ("or", AtomicOp::Or),
        ("xor", AtomicOp::Xor),
        ("exch", AtomicOp::Exchange),
        ("cas", AtomicOp::CompareAndSwap),
        ("inc", AtomicOp::Increment),
        ("dec", AtomicOp::Decrement),
    ];
    let op = statement.modifiers.one_of("the operation", &choices)?;
    let of = statement.modifiers.of_type()?;
    check_atomic(op, of, space)?;
    let first = usize::from(returns);
    let wanted = first + 2 + usize::from(op == AtomicOp::CompareAndSwap);
    if statement.operands.len() != wanted {
        return Err(format!("{wanted} operands expected, {} found", statement.operands.len()));
    }
    let address = scope.address(&statement.operands[first], space)?;
    let b = scope.source(&statement.operands[first + 1], of)?;
    let c = match statement.operands.get(first + 2) {
        Some(operand) => scope.source(operand, of)?,
        None => b,
    };
    let d = if returns { Some(scope.target(&statement.operands[0], of)?) } else { None };
    Ok(Op::Atomic(Box::new(Atomic { op, of, space, address, d, b, c })))
}

fn check_atomic(op: AtomicOp, of: Type, space: Space) -> Decoded<()> {
    let fits = match op {
        _ if of.bytes() < 4 => false,
        AtomicOp::Add => true,
        AtomicOp::Increment | AtomicOp::Decrement => of == Type::U32,
        _ => of.format().is_none(),
    };
    if !fits {
        return Err(format!("{op:?} of {of:?} is not known"));
    }
    match space {
        Space::Generic | Space::Global | Space::Shared => Ok(()),
        _ => Err("atomics work on global and shared memory".to_string()),
    }
}
