//! Regular expressions from outside: what is wrong with one is said before anything is built from it.

use llguidance::regex_to_lark;
use regex_syntax::hir::{Hir, HirKind};

use super::CompileError;

/// The most places of an expression with its repetitions written out: `(a{3}b){2}` has 8.
const MOST_PLACES: usize = 10_000;

/// Checks syntax and size.
///
/// # Errors
/// What is wrong, and where in the expression.
fn check(pattern: &str) -> Result<(), CompileError> {
    // Look-around and back-references are among what the syntax does not have.
    let parsed = regex_syntax::parse(pattern).map_err(|error| CompileError::Source(fault(pattern, &error)))?;
    CompileError::check("places with all repetitions written out", places(&parsed), MOST_PLACES)
}

/// Checks an expression and writes it as the library reads it: `\d` and `\w` mean ASCII, as in ECMA 262.
///
/// # Errors
/// As [`check`].
pub(super) fn checked(pattern: &str) -> Result<String, CompileError> {
    check(pattern)?;
    let rewritten = regex_to_lark(pattern, "dw");
    check(&rewritten)?;
    Ok(rewritten)
}

/// The same expression without the anchors that a match of a whole text does not need.
pub(super) fn unanchored(pattern: &str) -> &str {
    let start = pattern.strip_prefix('^').unwrap_or(pattern);
    match start.strip_suffix('$') {
        Some(inner) if (inner.len() - inner.trim_end_matches('\\').len()).is_multiple_of(2) => inner,
        _ => start,
    }
}

fn fault(pattern: &str, error: &regex_syntax::Error) -> String {
    let (kind, at) = match error {
        regex_syntax::Error::Parse(error) => (error.kind().to_string(), error.span().start.offset),
        regex_syntax::Error::Translate(error) => (error.kind().to_string(), error.span().start.offset),
        other => (other.to_string(), 0),
    };
    let shown: String = pattern.chars().take(80).collect();
    format!("the regular expression {shown:?} is wrong at byte {at}: {kind}")
}

fn places(parsed: &Hir) -> usize {
    // From the leaves to the root without recursion, since an expression may be deep.
    let mut order = vec![parsed];
    let mut next = 0;
    while let Some(hir) = order.get(next) {
        order.extend(hir.kind().subs());
        next += 1;
    }
    let mut sizes: Vec<usize> = Vec::with_capacity(order.len());
    let mut totals = std::collections::HashMap::new();
    for hir in order.iter().rev() {
        let subs: usize =
            hir.kind().subs().iter().map(|sub| totals[&std::ptr::from_ref(sub)]).fold(0, usize::saturating_add);
        let size = match hir.kind() {
            HirKind::Literal(literal) => literal.0.len(),
            HirKind::Repetition(repetition) => {
                subs.saturating_mul(repetition.max.unwrap_or(repetition.min.saturating_add(1)).max(1) as usize)
            }
            HirKind::Empty | HirKind::Class(_) | HirKind::Look(_) => 1,
            HirKind::Capture(_) | HirKind::Concat(_) | HirKind::Alternation(_) => subs,
        };
        totals.insert(std::ptr::from_ref(*hir), size);
        sizes.push(size);
    }
    sizes.pop().unwrap_or(0)
}
