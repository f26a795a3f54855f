//! Decodes `cvt`.

use crate::isa::*;

use super::scope::Scope;
use super::statement::{Decoded, Statement};

/// `cvt` with one source, or with two that are packed.
pub(crate) fn decode(scope: &mut Scope<'_>, statement: &mut Statement<'_>) -> Decoded<Op> {
    let modifiers = &mut statement.modifiers;
    let fraction = modifiers.choice(&[
        ("rn", Rounding::Nearest),
        ("rz", Rounding::Zero),
        ("rm", Rounding::Down),
        ("rp", Rounding::Up),
    ]);
    let whole = modifiers.choice(&[
        ("rni", Rounding::Nearest),
        ("rzi", Rounding::Zero),
        ("rmi", Rounding::Down),
        ("rpi", Rounding::Up),
    ]);
    let flags =
        FloatFlags { flush: modifiers.flag("ftz"), saturate: modifiers.flag("sat"), relu: modifiers.flag("relu") };
    let (to, from) = (modifiers.of_type()?, modifiers.of_type()?);
    let rounding = fraction.or(whole).unwrap_or(Rounding::Nearest);
    if let Type::F16x2 | Type::Bf16x2 = to {
        if from != Type::F32 {
            return Err("only two f32 can be packed".to_string());
        }
        let [d, high, low] = statement.exactly()?;
        let (high, low) = (scope.source(high, from)?, scope.source(low, from)?);
        let format = to.format().ok_or("a floating-point type is expected")?;
        return Ok(Op::ConvertPair { format, rounding, flags, d: scope.target(d, to)?, high, low });
    }
    if matches!(from, Type::F16x2 | Type::Bf16x2 | Type::Pred) || to == Type::Pred {
        return Err(format!("conversion of {from:?} to {to:?} is not known"));
    }
    let wide_integer = from.format().is_none() && from.bytes() == 8;
    if to == Type::F64 && wide_integer && rounding != Rounding::Nearest {
        return Err("64-bit integers become f64 only by rounding to nearest".to_string());
    }
    let [d, a] = statement.exactly()?;
    let a = scope.any_source(a, from)?;
    let d = scope.any_target(d, to)?;
    if a.bank == Bank::Predicate || d.bank == Bank::Predicate {
        return Err("a predicate cannot be converted".to_string());
    }
    if bytes_of(a.bank) < from.bytes() || bytes_of(d.bank) < to.bytes() {
        return Err("a register is narrower than its type".to_string());
    }
    Ok(Op::Convert(Box::new(Convert { from, to, rounding, whole: whole.is_some(), flags, d, a })))
}

fn bytes_of(bank: Bank) -> u32 {
    match bank {
        Bank::Predicate => 0,
        Bank::Half => 2,
        Bank::Word => 4,
        Bank::Double => 8,
    }
}
