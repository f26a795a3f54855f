//! Grammars in Lark's notation: what is looked at before the library reads one.

use super::CompileError;

/// Attributes of rules that the library takes, and of which nothing comes here.
const WITHOUT_EFFECT: [&str; 3] = ["temperature", "capture", "stop_capture"];

/// The most brackets that are open at once, wherever they stand.
pub(super) fn depth(text: &str) -> usize {
    let mut open = 0usize;
    let mut most = 0;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

/// Refuses attributes such as in `name[temperature=0.5]: ...` that would change nothing.
///
/// # Errors
/// The attribute and its line.
pub(super) fn check_attributes(text: &str) -> Result<(), CompileError> {
    for (index, line) in text.lines().enumerate() {
        let Some(attributes) = attributes_of(line) else { continue };
        let names = attributes.split(',').map(|attribute| attribute.split('=').next().unwrap_or("").trim());
        if let Some(name) = names.into_iter().find(|name| WITHOUT_EFFECT.contains(name)) {
            let reason = format!("at {}: the attribute {name:?} of a rule is not supported", index + 1);
            return Err(CompileError::Source(reason));
        }
    }
    Ok(())
}

/// What stands in brackets behind the name of a rule, where a line begins with one.
fn attributes_of(line: &str) -> Option<&str> {
    let line = line.trim_start().trim_start_matches(['?', '!']);
    let rest = line.trim_start_matches(|character: char| character.is_alphanumeric() || "_-.".contains(character));
    let inner = rest.trim_start().strip_prefix('[').filter(|_| rest.len() < line.len())?;
    // The last bracket before the body: one inside a text of `stop="]"` ends nothing.
    Some(&inner[..inner.find("]:").or_else(|| inner.find("] :")).unwrap_or(inner.len())])
}
