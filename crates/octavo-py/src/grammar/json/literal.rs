//! A value that is known, as text.

use llguidance::derivre::RegexAst;
use serde_json::Value;

/// What stands between two parts of a value: one space at most. A model that has a taste for spaces gets no further.
pub(super) const COMMA: &str = ", ?";

/// What stands between a name and its value.
pub(super) const COLON: &str = ": ?";

/// The texts of a value: they differ in spaces alone.
pub(super) fn texts(value: &Value) -> RegexAst {
    match value {
        Value::Array(items) => between("[", items.iter().map(texts).collect(), "]"),
        Value::Object(members) => {
            let member = |(name, value): (&String, &Value)| RegexAst::Concat(vec![named(name), texts(value)]);
            between("{", members.iter().map(member).collect(), "}")
        }
        scalar => RegexAst::Literal(scalar.to_string()),
    }
}

/// A name with what leads to its value.
pub(super) fn named(name: &str) -> RegexAst {
    let name = RegexAst::Literal(Value::String(name.to_owned()).to_string());
    RegexAst::Concat(vec![name, RegexAst::Regex(COLON.to_owned())])
}

fn between(open: &str, parts: Vec<RegexAst>, close: &str) -> RegexAst {
    let mut all = vec![RegexAst::Literal(open.to_owned())];
    for (index, part) in parts.into_iter().enumerate() {
        if index > 0 {
            all.push(RegexAst::Regex(COMMA.to_owned()));
        }
        all.push(part);
    }
    all.push(RegexAst::Literal(close.to_owned()));
    RegexAst::Concat(all)
}
