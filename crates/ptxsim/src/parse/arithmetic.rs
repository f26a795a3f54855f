//! Decodes arithmetic, logic, comparisons and selections.

use crate::isa::*;

use super::scope::Scope;
use super::statement::{Decoded, Operand, Statement};

/// Any opcode of this family; every other opcode is unknown.
pub(crate) fn decode(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    match statement.opcode {
        "add" | "sub" | "mul" | "div" | "min" | "max" => two_operands(scope, statement),
        "rem" => {
            let of = statement.modifiers.of_type()?;
            integer(scope, statement, of, signed(of, IntegerOp::RemSigned, IntegerOp::RemUnsigned))
        }
        "addc" | "subc" | "madc" => carry(scope, statement),
        "mad" | "fma" => three_operands(scope, statement),
        "neg" | "abs" => sign(scope, statement),
        "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => function(scope, statement),
        "and" | "or" | "xor" => logic(scope, statement),
        "not" | "cnot" | "popc" | "clz" | "brev" | "bfind" => bits(scope, statement),
        "shl" | "shr" => shift(scope, statement),
        "shf" => funnel(scope, statement),
        "lop3" => lop3(scope, statement),
        "prmt" => permute(scope, statement),
        "bfe" | "bfi" => bit_field(scope, statement),
        "setp" | "set" => compare(scope, statement),
        "selp" => select(scope, statement),
        other => Err(format!("the opcode {other} is not known")),
    }
}

fn signed<T>(of: Type, if_signed: T, if_unsigned: T) -> T {
    if of.is_signed() { if_signed } else { if_unsigned }
}

fn width(of: Type) -> Decoded<Width> {
    of.width().ok_or_else(|| format!("{of:?} is no integer type of this instruction"))
}

/// The flags of floating-point arithmetic. The only rounding known is to nearest.
fn float_flags(statement: &mut Statement<'_>) -> FloatFlags {
    let modifiers = &mut statement.modifiers;
    modifiers.ignore(&["rn"]);
    FloatFlags { flush: modifiers.flag("ftz"), saturate: modifiers.flag("sat"), relu: modifiers.flag("relu") }
}

fn two_operands(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    if let Some(format) = of.format() {
        return float(scope, statement, of, format);
    }
    let opcode = statement.opcode;
    if opcode == "mul" && statement.modifiers.flag("wide") {
        return mul_wide(scope, statement, of);
    }
    if matches!(opcode, "add" | "sub") && statement.modifiers.flag("cc") {
        let op = if opcode == "add" { CarryOp::Add } else { CarryOp::Sub };
        return carry_link(scope, statement, of, (op, false, true));
    }
    let op = match opcode {
        "add" if statement.modifiers.flag("sat") => IntegerOp::AddSaturating,
        "sub" if statement.modifiers.flag("sat") => IntegerOp::SubSaturating,
        "add" => IntegerOp::Add,
        "sub" => IntegerOp::Sub,
        "mul" if statement.modifiers.flag("hi") => signed(of, IntegerOp::MulHighSigned, IntegerOp::MulHighUnsigned),
        "mul" if statement.modifiers.flag("lo") => IntegerOp::MulLow,
        "mul" => return Err("mul needs .lo, .hi or .wide".to_string()),
        "div" => signed(of, IntegerOp::DivSigned, IntegerOp::DivUnsigned),
        "min" => signed(of, IntegerOp::MinSigned, IntegerOp::MinUnsigned),
        _ => signed(of, IntegerOp::MaxSigned, IntegerOp::MaxUnsigned),
    };
    integer(scope, statement, of, op)
}

fn integer(scope: &mut Scope<'_>, statement: &Statement<'_>, of: Type, op: IntegerOp) -> Decoded<Op> {
    let [d, a, b] = statement.exactly()?;
    let (a, b) = (scope.source(a, of)?, scope.source(b, of)?);
    Ok(Op::Integer { op, width: width(of)?, d: scope.target(d, of)?, a, b })
}

fn float(scope: &mut Scope<'_>, statement: &mut Statement<'_>, of: Type, format: Format) -> Decoded<Op> {
    let nan = statement.modifiers.flag("NaN");
    let op = match statement.opcode {
        "add" => FloatOp::Add,
        "sub" => FloatOp::Sub,
        "mul" => FloatOp::Mul,
        "div" => {
            statement.modifiers.ignore(&["full", "approx"]);
            FloatOp::Div
        }
        "min" if nan => FloatOp::MinNan,
        "max" if nan => FloatOp::MaxNan,
        "min" => FloatOp::Min,
        _ => FloatOp::Max,
    };
    if op == FloatOp::Div && !matches!(format, Format::F32 | Format::F64) {
        return Err("div is not known for this type".to_string());
    }
    let flags = float_flags(statement);
    let [d, a, b] = statement.exactly()?;
    let (a, b) = (scope.source(a, of)?, scope.source(b, of)?);
    Ok(Op::Float { op, format, flags, d: scope.target(d, of)?, a, b })
}

fn wide_type(from: Type) -> Decoded<Type> {
    match from {
        Type::U16 | Type::S16 => Ok(Type::B32),
        Type::U32 | Type::S32 => Ok(Type::B64),
        _ => Err(format!("{from:?} cannot be multiplied to twice its width")),
    }
}

fn mul_wide(scope: &mut Scope<'_>, statement: &Statement<'_>, from: Type) -> Decoded<Op> {
    let [d, a, b] = statement.exactly()?;
    let (a, b) = (scope.source(a, from)?, scope.source(b, from)?);
    Ok(Op::MulWide { from, d: scope.target(d, wide_type(from)?)?, a, b, c: None })
}

fn three_operands(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    if let Some(format) = of.format() {
        let flags = float_flags(statement);
        let [d, a, b, c] = statement.exactly()?;
        let (a, b, c) = (scope.source(a, of)?, scope.source(b, of)?, scope.source(c, of)?);
        return Ok(Op::Fma { format, flags, d: scope.target(d, of)?, a, b, c });
    }
    if statement.modifiers.flag("wide") {
        let [d, a, b, c] = statement.exactly()?;
        let wide = wide_type(of)?;
        let (a, b, c) = (scope.source(a, of)?, scope.source(b, of)?, scope.source(c, wide)?);
        return Ok(Op::MulWide { from: of, d: scope.target(d, wide)?, a, b, c: Some(c) });
    }
    if statement.modifiers.flag("cc") {
        let op = mad_carry(statement, of)?;
        return carry_link(scope, statement, of, (op, false, true));
    }
    let high = signed(of, IntegerOp::MulHighSigned, IntegerOp::MulHighUnsigned);
    let op = statement.modifiers.one_of("the half of the product", &[("lo", IntegerOp::MulLow), ("hi", high)])?;
    let [d, a, b, c] = statement.exactly()?;
    let (a, b, c) = (scope.source(a, of)?, scope.source(b, of)?, scope.source(c, of)?);
    Ok(Op::Mad { op, width: width(of)?, d: scope.target(d, of)?, a, b, c })
}

fn mad_carry(statement: &mut Statement<'_>, of: Type) -> Decoded<CarryOp> {
    let high = signed(of, CarryOp::MadHighSigned, CarryOp::MadHighUnsigned);
    statement.modifiers.one_of("the half of the product", &[("lo", CarryOp::MadLow), ("hi", high)])
}

fn carry(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let op = match statement.opcode {
        "addc" => CarryOp::Add,
        "subc" => CarryOp::Sub,
        _ => mad_carry(statement, of)?,
    };
    let writes = statement.modifiers.flag("cc");
    carry_link(scope, statement, of, (op, true, writes))
}

fn carry_link(
    scope: &mut Scope<'_>,
    statement: &Statement<'_>,
    of: Type,
    (op, reads, writes): (CarryOp, bool, bool),
) -> Decoded<Op> {
    let double = match width(of)? {
        Width::Word => false,
        Width::Double => true,
        Width::Half => return Err("a carry needs 32 or 64 bits".to_string()),
    };
    let mut sources = [0; 3];
    let wanted = if matches!(op, CarryOp::Add | CarryOp::Sub) { 2 } else { 3 };
    if statement.operands.len() != wanted + 1 {
        return Err(format!("{} operands expected, {} found", wanted + 1, statement.operands.len()));
    }
    for (slot, operand) in sources.iter_mut().zip(&statement.operands[1..]) {
        *slot = scope.source(operand, of)?;
    }
    let d = scope.target(&statement.operands[0], of)?;
    let [a, b, c] = sources;
    Ok(Op::Carry(Box::new(Carry { op, double, reads, writes, d, a, b, c })))
}

fn sign(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let [d, a] = statement.exactly()?;
    let (a, d) = (scope.source(a, of)?, scope.target(d, of)?);
    let negates = statement.opcode == "neg";
    if let Some(format) = of.format() {
        let op = if negates { FloatUnaryOp::Neg } else { FloatUnaryOp::Abs };
        return Ok(Op::FloatUnary { op, format, flags: float_flags(statement), d, a });
    }
    let op = if negates { IntegerUnaryOp::Neg } else { IntegerUnaryOp::Abs };
    Ok(Op::IntegerUnary { op, width: width(of)?, d, a })
}

fn function(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let format = of.format().ok_or("a floating-point type is expected")?;
    let op = match statement.opcode {
        "sqrt" => FloatUnaryOp::Sqrt,
        "rcp" => FloatUnaryOp::Reciprocal,
        "rsqrt" => FloatUnaryOp::ReciprocalSqrt,
        "ex2" => FloatUnaryOp::Exp2,
        "lg2" => FloatUnaryOp::Log2,
        "sin" => FloatUnaryOp::Sin,
        "cos" => FloatUnaryOp::Cos,
        _ => FloatUnaryOp::Tanh,
    };
    statement.modifiers.ignore(&["approx"]);
    if format == Format::F64 && !statement.modifiers.flag("rn") {
        return Err("only the exact form is known for f64".to_string());
    }
    let mut flags = float_flags(statement);
    flags.flush &= format == Format::F32;
    let [d, a] = statement.exactly()?;
    let a = scope.source(a, of)?;
    Ok(Op::FloatUnary { op, format, flags, d: scope.target(d, of)?, a })
}

fn logic(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    if of == Type::Pred {
        let op = match statement.opcode {
            "and" => PredicateOp::And,
            "or" => PredicateOp::Or,
            _ => PredicateOp::Xor,
        };
        let [d, a, b] = statement.exactly()?;
        let ((a, flip_a), (b, flip)) = (scope.predicate(a)?, scope.predicate(b)?);
        if flip_a != 0 {
            return Err("only the second operand may be negated".to_string());
        }
        return Ok(Op::Predicate { op, d: scope.target(d, of)?, a, b, flip });
    }
    let op = match statement.opcode {
        "and" => IntegerOp::And,
        "or" => IntegerOp::Or,
        _ => IntegerOp::Xor,
    };
    integer(scope, statement, of, op)
}

fn bits(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let shift_amount = statement.modifiers.flag("shiftamt");
    let of = statement.modifiers.of_type()?;
    let [d, a] = statement.exactly()?;
    if of == Type::Pred {
        let (a, flip) = scope.predicate(a)?;
        let d = scope.target(d, of)?;
        if statement.opcode != "not" {
            return Err("only not is known for predicates".to_string());
        }
        return Ok(Op::Predicate { op: PredicateOp::Xor, d, a: ALWAYS, b: a, flip });
    }
    let a = scope.source(a, of)?;
    let op = match (statement.opcode, shift_amount) {
        ("not", false) => IntegerUnaryOp::Not,
        ("brev", false) => IntegerUnaryOp::BitReverse,
        ("popc", false) => IntegerUnaryOp::PopulationCount,
        ("clz", false) => IntegerUnaryOp::LeadingZeros,
        ("bfind", false) => signed(of, IntegerUnaryOp::FindSigned, IntegerUnaryOp::FindUnsigned),
        ("bfind", true) => signed(of, IntegerUnaryOp::FindShiftSigned, IntegerUnaryOp::FindShiftUnsigned),
        _ => return Err("this form is not known".to_string()),
    };
    let target = match op {
        IntegerUnaryOp::Not | IntegerUnaryOp::BitReverse => of,
        _ => Type::U32,
    };
    Ok(Op::IntegerUnary { op, width: width(of)?, d: scope.target(d, target)?, a })
}

fn shift(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let op = match statement.opcode {
        "shl" => IntegerOp::ShiftLeft,
        _ => signed(of, IntegerOp::ShiftRightSigned, IntegerOp::ShiftRightUnsigned),
    };
    let [d, a, b] = statement.exactly()?;
    let (a, b) = (scope.source(a, of)?, scope.word(b)?);
    Ok(Op::Integer { op, width: width(of)?, d: scope.target(d, of)?, a, b })
}

fn funnel(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    if of != Type::B32 {
        return Err("shf works on b32".to_string());
    }
    let left = statement.modifiers.one_of("a direction", &[("l", true), ("r", false)])?;
    let clamp = statement.modifiers.one_of("wrap or clamp", &[("clamp", true), ("wrap", false)])?;
    let [d, a, b, c] = statement.exactly()?;
    let (a, b, c) = (scope.word(a)?, scope.word(b)?, scope.word(c)?);
    Ok(Op::Funnel { left, clamp, d: scope.target(d, of)?, a, b, c })
}

fn lop3(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let [d, a, b, c, table] = statement.exactly()?;
    let Operand::Number { text, negative: false } = table else {
        return Err("the table must be a number".to_string());
    };
    let bits = super::statement::number_bits(text).ok_or("the table must be a number")?;
    let table = u8::try_from(bits).map_err(|_| "the table has 8 bits".to_string())?;
    let (a, b, c) = (scope.word(a)?, scope.word(b)?, scope.word(c)?);
    Ok(Op::Lop3 { table, d: scope.target(d, of)?, a, b, c })
}

fn permute(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let [d, a, b, c] = statement.exactly()?;
    let (a, b, c) = (scope.word(a)?, scope.word(b)?, scope.word(c)?);
    Ok(Op::Permute { d: scope.target(d, of)?, a, b, c })
}

fn bit_field(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let double = match width(of)? {
        Width::Word => false,
        Width::Double => true,
        Width::Half => return Err("a bit field needs 32 or 64 bits".to_string()),
    };
    if statement.opcode == "bfe" {
        let [d, a, b, c] = statement.exactly()?;
        let (a, b, c) = (scope.source(a, of)?, scope.word(b)?, scope.word(c)?);
        return Ok(Op::BitExtract { of, d: scope.target(d, of)?, a, b, c });
    }
    let [d, a, b, position, length] = statement.exactly()?;
    let (a, b) = (scope.source(a, of)?, scope.source(b, of)?);
    let (position, length) = (scope.word(position)?, scope.word(length)?);
    Ok(Op::BitInsert { double, d: scope.target(d, of)?, a, b, position, length })
}

const TESTS: [(&str, Test); 18] = [
    ("eq", Test::Equal),
    ("ne", Test::NotEqual),
    ("lt", Test::Less),
    ("le", Test::LessEqual),
    ("gt", Test::Greater),
    ("ge", Test::GreaterEqual),
    ("lo", Test::Less),
    ("ls", Test::LessEqual),
    ("hi", Test::Greater),
    ("hs", Test::GreaterEqual),
    ("equ", Test::EqualUnordered),
    ("neu", Test::NotEqualUnordered),
    ("ltu", Test::LessUnordered),
    ("leu", Test::LessEqualUnordered),
    ("gtu", Test::GreaterUnordered),
    ("geu", Test::GreaterEqualUnordered),
    ("num", Test::Ordered),
    ("nan", Test::Unordered),
];

fn compare(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let sets_mask = statement.opcode == "set";
    let test = statement.modifiers.one_of("a comparison", &TESTS)?;
    let choices = [("and", PredicateOp::And), ("or", PredicateOp::Or), ("xor", PredicateOp::Xor)];
    let meets = statement.modifiers.choice(&choices);
    let flush = statement.modifiers.flag("ftz");
    let to = if sets_mask { Some(statement.modifiers.of_type()?) } else { None };
    let of = statement.modifiers.of_type()?;
    if matches!(of, Type::F16x2 | Type::Bf16x2 | Type::Pred) {
        return Err(format!("comparisons of {of:?} are not known"));
    }
    let wanted = 3 + usize::from(meets.is_some());
    if statement.operands.len() != wanted {
        return Err(format!("{wanted} operands expected, {} found", statement.operands.len()));
    }
    let (a, b) = (scope.source(&statement.operands[1], of)?, scope.source(&statement.operands[2], of)?);
    let combine = match meets {
        None => None,
        Some(op) => {
            let (slot, flip) = scope.predicate(&statement.operands[3])?;
            Some((op, slot, flip))
        }
    };
    let target = match (to, &statement.operands[0]) {
        (None, Operand::Pair(d, inverse)) => {
            CompareTarget::Predicates(scope.target(d, Type::Pred)?, scope.target(inverse, Type::Pred)?)
        }
        (None, d) => CompareTarget::Predicates(scope.target(d, Type::Pred)?, NEVER),
        (Some(Type::F32), d) => CompareTarget::Float(scope.target(d, Type::F32)?),
        (Some(Type::U32 | Type::S32 | Type::B32), d) => CompareTarget::Mask(scope.target(d, Type::B32)?),
        (Some(other), _) => return Err(format!("set to {other:?} is not known")),
    };
    Ok(Op::Compare(Box::new(Compare { test, of, flush, a, b, combine, target })))
}

fn select(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let of = statement.modifiers.of_type()?;
    let [d, a, b, p] = statement.exactly()?;
    let (a, b) = (scope.source(a, of)?, scope.source(b, of)?);
    let (p, flip) = scope.predicate(p)?;
    let (a, b) = if flip == 0 { (a, b) } else { (b, a) };
    Ok(Op::Select { double: of.bytes() == 8, d: scope.target(d, of)?, a, b, p })
}
