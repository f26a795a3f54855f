//! Forms: what several places of a schema ask of one value together.
//!
//! `allOf`, a `$ref` beside other keywords, and a property that two places speak of all mean that a value has to follow
//! more than one place. A form is the set of those places, so two ways to the same demands share one node, and a schema
//! that refers to itself has finitely many forms.

use std::collections::BTreeSet;

use serde_json::Value;

use super::document::{Document, Place, kind};
use crate::grammar::CompileError;

/// A part of what is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Part {
    /// All that a place says.
    Whole(Place),
    /// What it says without its `$ref`, `allOf`, `anyOf` and `oneOf`.
    Own(Place),
    /// Its `anyOf`.
    AnyOf(Place),
    /// Its `oneOf`.
    OneOf(Place),
}

/// Parts that all hold.
pub(super) type Form = BTreeSet<Part>;

/// A form without whole places.
pub(super) fn expanded(document: &mut Document<'_>, form: &Form) -> Result<Form, CompileError> {
    let mut found = Form::new();
    for &part in form {
        match part {
            Part::Whole(place) => expand(document, place, &mut BTreeSet::new(), &mut found)?,
            other => drop(found.insert(other)),
        }
    }
    Ok(found)
}

/// `path` leads here by `$ref` and `allOf` alone, that is without a step into the value.
fn expand(
    document: &mut Document<'_>,
    place: Place,
    path: &mut BTreeSet<Place>,
    found: &mut Form,
) -> Result<(), CompileError> {
    if !path.insert(place) {
        return Err(document.fault(place, "this schema refers to itself without end"));
    }
    document.work.spend(12)?;
    if found.insert(Part::Own(place)) {
        join(document, place, path, found)?;
    }
    path.remove(&place);
    Ok(())
}

/// What a place refers to holds as well.
fn join(
    document: &mut Document<'_>,
    place: Place,
    path: &mut BTreeSet<Place>,
    found: &mut Form,
) -> Result<(), CompileError> {
    let Some(keywords) = document.keywords(place)? else { return Ok(()) };
    if let Some(reference) = keywords.get("$ref") {
        let referred = document.referred(place, reference)?;
        expand(document, referred, path, found)?;
    }
    for index in 0..members(document, place, "allOf")? {
        if let Some(member) = document.below(place, &["allOf", &index.to_string()]) {
            expand(document, member, path, found)?;
        }
    }
    if members(document, place, "anyOf")? > 0 {
        found.insert(Part::AnyOf(place));
    }
    if members(document, place, "oneOf")? > 0 {
        found.insert(Part::OneOf(place));
    }
    Ok(())
}

/// The number of schemas in a list of them; 0 without the keyword.
fn members(document: &Document<'_>, place: Place, keyword: &str) -> Result<usize, CompileError> {
    match document.keywords(place)?.and_then(|keywords| keywords.get(keyword)) {
        None => Ok(0),
        Some(Value::Array(members)) if !members.is_empty() => Ok(members.len()),
        Some(other) => Err(document.fault_in(
            place,
            keyword,
            format!("found {}, expected a list of at least one schema", kind(other)),
        )),
    }
}

/// The forms between which a form leaves the choice, if it does: the part that does, and each way to go on.
///
/// # Errors
/// Too much work.
pub(super) fn choices(document: &mut Document<'_>, form: &Form) -> Result<Option<(Part, Vec<Form>)>, CompileError> {
    let choice = form.iter().find(|part| matches!(part, Part::AnyOf(_) | Part::OneOf(_)));
    let Some(&part) = choice else { return Ok(None) };
    let (place, keyword) = match part {
        Part::AnyOf(place) => (place, "anyOf"),
        Part::OneOf(place) => (place, "oneOf"),
        Part::Whole(_) | Part::Own(_) => return Ok(None),
    };
    let mut rest = form.clone();
    rest.remove(&part);
    let mut ways = Vec::new();
    while let Some(member) = document.below(place, &[keyword, &ways.len().to_string()]) {
        document.work.spend(1 + rest.len())?;
        let mut way = rest.clone();
        way.insert(Part::Whole(member));
        ways.push(way);
    }
    Ok(Some((part, ways)))
}
