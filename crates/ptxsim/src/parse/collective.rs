//! Decodes what a warp or a block does together: barriers, exchanges between lanes, matrices, asynchronous copies.

use crate::isa::*;

use super::scope::Scope;
use super::statement::{Decoded, Operand, Statement};

/// Any opcode of this family.
pub(crate) fn decode(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    match statement.opcode {
        "bar" | "barrier" => barrier(scope, statement),
        "shfl" => shuffle(scope, statement),
        "vote" => vote(scope, statement),
        "match" => matching(scope, statement),
        "redux" => reduce(scope, statement),
        "activemask" => {
            statement.modifiers.of_type()?;
            let [d] = statement.exactly()?;
            Ok(Op::ActiveMask { d: scope.target(d, Type::B32)? })
        }
        "mma" => mma(scope, statement),
        "ldmatrix" => load_matrix(scope, statement),
        _ => asynchronous(scope, statement),
    }
}

fn barrier(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    statement.modifiers.ignore(&["aligned", "cta"]);
    if statement.modifiers.flag("warp") {
        require(statement, "sync")?;
        let [members] = statement.exactly()?;
        return Ok(Op::SyncWarp { members: scope.word(members)? });
    }
    let mut barrier = Barrier { reduction: BarrierReduction::None, d: 0, a: 0, flip: 0, number: 0, threads: None };
    let reduces = statement.modifiers.flag("red");
    if !reduces {
        require(statement, "sync")?;
    }
    let mut operands = statement.operands.as_slice();
    if reduces {
        let choices =
            [("popc", BarrierReduction::Count), ("and", BarrierReduction::All), ("or", BarrierReduction::Any)];
        barrier.reduction = statement.modifiers.one_of("the reduction", &choices)?;
        let of = statement.modifiers.of_type()?;
        let [d, rest @ .., a] = operands else {
            return Err("too few operands".to_string());
        };
        barrier.d = scope.target(d, of)?;
        (barrier.a, barrier.flip) = scope.predicate(a)?;
        operands = rest;
    }
    let (number, threads) = match operands {
        [number] => (number, None),
        [number, threads] => (number, Some(scope.word(threads)?)),
        _ => return Err("a barrier number is expected".to_string()),
    };
    barrier.number = scope.word(number)?;
    barrier.threads = threads;
    Ok(Op::Barrier(Box::new(barrier)))
}

fn require(statement: &mut Statement<'_>, name: &str) -> Decoded<()> {
    if statement.modifiers.flag(name) { Ok(()) } else { Err(format!(".{name} is expected")) }
}

/// A target with an optional predicate behind a bar.
fn target_pair(scope: &mut Scope<'_>, operand: &Operand<'_>) -> Decoded<(Slot, Slot)> {
    match operand {
        Operand::Pair(d, p) => Ok((scope.target(d, Type::B32)?, scope.target(p, Type::Pred)?)),
        d => Ok((scope.target(d, Type::B32)?, NEVER)),
    }
}

fn shuffle(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    require(statement, "sync")?;
    let choices = [
        ("up", ShuffleMode::Up),
        ("down", ShuffleMode::Down),
        ("bfly", ShuffleMode::Butterfly),
        ("idx", ShuffleMode::Index),
    ];
    let mode = statement.modifiers.one_of("the direction", &choices)?;
    statement.modifiers.of_type()?;
    let [d, a, b, c, members] = statement.exactly()?;
    let (a, b, c, members) = (scope.word(a)?, scope.word(b)?, scope.word(c)?, scope.word(members)?);
    let (d, in_range) = target_pair(scope, d)?;
    Ok(Op::Shuffle(Box::new(Shuffle { mode, d, in_range, a, b, c, members })))
}

fn vote(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    require(statement, "sync")?;
    let choices =
        [("all", VoteMode::All), ("any", VoteMode::Any), ("uni", VoteMode::Uniform), ("ballot", VoteMode::Ballot)];
    let mode = statement.modifiers.one_of("the kind of vote", &choices)?;
    let of = statement.modifiers.of_type()?;
    let [d, a, members] = statement.exactly()?;
    let ((a, flip), members) = (scope.predicate(a)?, scope.word(members)?);
    let wanted = if mode == VoteMode::Ballot { Type::B32 } else { Type::Pred };
    if of != wanted {
        return Err(format!("this vote gives {wanted:?}"));
    }
    Ok(Op::Vote(Box::new(Vote { mode, d: scope.target(d, of)?, a, flip, members })))
}

fn matching(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    require(statement, "sync")?;
    let all = statement.modifiers.one_of("any or all", &[("all", true), ("any", false)])?;
    let of = statement.modifiers.of_type()?;
    let [d, a, members] = statement.exactly()?;
    let (a, members) = (scope.source(a, of)?, scope.word(members)?);
    let (d, same) = target_pair(scope, d)?;
    Ok(Op::Match(Box::new(Match { all, double: of.bytes() == 8, d, same, a, members })))
}

fn reduce(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    require(statement, "sync")?;
    let names = ["add", "min", "max", "and", "or", "xor"];
    let name = statement.modifiers.one_of("the operation", &names.map(|name| (name, name)))?;
    let of = statement.modifiers.of_type()?;
    if of.format().is_some() || of.bytes() != 4 {
        return Err(format!("reductions of {of:?} are not known"));
    }
    let op = match (name, of.is_signed()) {
        ("add", _) => IntegerOp::Add,
        ("min", true) => IntegerOp::MinSigned,
        ("min", false) => IntegerOp::MinUnsigned,
        ("max", true) => IntegerOp::MaxSigned,
        ("max", false) => IntegerOp::MaxUnsigned,
        ("and", _) => IntegerOp::And,
        ("or", _) => IntegerOp::Or,
        _ => IntegerOp::Xor,
    };
    let [d, a, members] = statement.exactly()?;
    let (a, members) = (scope.word(a)?, scope.word(members)?);
    Ok(Op::Reduce(Box::new(Reduce { op, d: scope.target(d, of)?, a, members })))
}

/// The registers of a fragment.
fn fragment(scope: &mut Scope<'_>, operand: &Operand<'_>, length: usize) -> Decoded<Vec<Slot>> {
    match operand {
        Operand::Vector(parts) if parts.len() == length => parts.iter().map(|part| scope.word(part)).collect(),
        // A fragment of one register may stand without braces.
        single @ Operand::Name(_) if length == 1 => Ok(vec![scope.word(single)?]),
        _ => Err(format!("a fragment of {length} registers is expected")),
    }
}

fn target_fragment(scope: &mut Scope<'_>, operand: &Operand<'_>, length: usize) -> Decoded<Vec<Slot>> {
    match operand {
        Operand::Vector(parts) if parts.len() == length => {
            parts.iter().map(|part| scope.target(part, Type::B32)).collect()
        }
        single @ Operand::Name(_) if length == 1 => Ok(vec![scope.target(single, Type::B32)?]),
        _ => Err(format!("a fragment of {length} registers is expected")),
    }
}

fn four(slots: Vec<Slot>) -> Decoded<[Slot; 4]> {
    slots.try_into().map_err(|_| "4 registers are expected".to_string())
}

fn mma(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    for name in ["sync", "aligned", "row", "col"] {
        require(statement, name)?;
    }
    let depth = statement.modifiers.one_of("a known shape", &[("m16n8k16", 16), ("m16n8k8", 8)])?;
    let types = [(); 4].map(|()| statement.modifiers.of_type());
    let format = match types {
        [Ok(Type::F32), Ok(Type::Bf16), Ok(Type::Bf16), Ok(Type::F32)] => Format::Bf16,
        [Ok(Type::F32), Ok(Type::F16), Ok(Type::F16), Ok(Type::F32)] => Format::F16,
        _ => return Err("only products of bf16 or f16 with f32 accumulators are known".to_string()),
    };
    let [d, a, b, c] = statement.exactly()?;
    let (a, b, c) = (fragment(scope, a, depth / 4)?, fragment(scope, b, depth / 8)?, fragment(scope, c, 4)?);
    let d = four(target_fragment(scope, d, 4)?)?;
    Ok(Op::Mma(Box::new(Mma { format, d, a, b, c: four(c)? })))
}

fn load_matrix(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    for name in ["sync", "aligned", "m8n8"] {
        require(statement, name)?;
    }
    let count = statement.modifiers.one_of("the number of matrices", &[("x1", 1), ("x2", 2), ("x4", 4)])?;
    let transposed = statement.modifiers.flag("trans");
    let shared = [("shared", Space::Shared), ("shared::cta", Space::Shared)];
    let space = statement.modifiers.choice(&shared).unwrap_or(Space::Generic);
    if statement.modifiers.of_type()? != Type::B16 {
        return Err("only matrices of b16 are known".to_string());
    }
    let [d, address] = statement.exactly()?;
    let (address, d) = (scope.address(address, space)?, target_fragment(scope, d, count)?);
    Ok(Op::LoadMatrix(Box::new(LoadMatrix { transposed, space, address, d })))
}

fn asynchronous(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    require(statement, "async")?;
    if statement.modifiers.flag("commit_group") {
        let [] = statement.exactly()?;
        return Ok(Op::AsyncCommit);
    }
    if statement.modifiers.flag("wait_all") {
        let [] = statement.exactly()?;
        return Ok(Op::AsyncWait { groups: None });
    }
    if statement.modifiers.flag("wait_group") {
        let [groups] = statement.exactly()?;
        return Ok(Op::AsyncWait { groups: Some(whole_number(groups)?) });
    }
    statement.modifiers.ignore(&["ca", "cg", "L2::64B", "L2::128B", "L2::256B"]);
    if !statement.modifiers.flag("shared") && !statement.modifiers.flag("shared::cta") {
        return Err("a copy to shared memory is expected".to_string());
    }
    require(statement, "global")?;
    let (operands, rest) = match statement.operands.as_slice() {
        [to, from, bytes, rest @ ..] if rest.len() < 2 => ([to, from, bytes], rest.first()),
        _ => return Err("3 or 4 operands are expected".to_string()),
    };
    let (to, from) = (scope.address(operands[0], Space::Shared)?, scope.address(operands[1], Space::Global)?);
    let bytes = whole_number(operands[2])?;
    if !matches!(bytes, 4 | 8 | 16) {
        return Err(format!("{bytes} bytes cannot be copied at once"));
    }
    let (mut source_bytes, mut ignore) = (None, None);
    match rest {
        None => {}
        Some(operand) => match scope.predicate(operand) {
            Ok(predicate) if !matches!(operand, Operand::Number { .. }) => ignore = Some(predicate),
            _ => source_bytes = Some(scope.word(operand)?),
        },
    }
    Ok(Op::AsyncCopy(Box::new(AsyncCopy { to, from, bytes, source_bytes, ignore })))
}

fn whole_number(operand: &Operand<'_>) -> Decoded<u32> {
    let bits = match operand {
        Operand::Number { text, negative: false } => super::statement::number_bits(text),
        _ => None,
    };
    bits.and_then(|bits| u32::try_from(bits).ok()).ok_or_else(|| "a whole number is expected".to_string())
}
