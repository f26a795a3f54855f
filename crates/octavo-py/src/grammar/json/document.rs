//! A schema as a document: places in it, and what a reference leads to.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::grammar::{CompileError, work::Work};

/// A place in the document that holds a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place(usize);

/// The schema and the places in it that have been looked at.
pub(super) struct Document<'a> {
    root: &'a Value,
    places: Vec<(String, &'a Value)>,
    by_pointer: HashMap<String, Place>,
    /// Of the whole schema.
    pub work: &'a Work,
}

impl<'a> Document<'a> {
    pub(super) fn new(root: &'a Value, work: &'a Work) -> Document<'a> {
        Document { root, places: Vec::new(), by_pointer: HashMap::new(), work }
    }

    /// The place at a JSON pointer that is known to lead somewhere.
    fn place(&mut self, pointer: String, value: &'a Value) -> Place {
        self.work.note(2 + pointer.len() / 8);
        if let Some(&place) = self.by_pointer.get(&pointer) {
            return place;
        }
        let place = Place(self.places.len());
        self.by_pointer.insert(pointer.clone(), place);
        self.places.push((pointer, value));
        place
    }

    pub(super) fn root(&mut self) -> Place {
        let root = self.root;
        self.place(String::new(), root)
    }

    /// What is at a place.
    pub(super) fn value(&self, place: Place) -> &'a Value {
        self.places[place.0].1
    }

    /// The keywords of a place; none for `true`.
    ///
    /// # Errors
    /// Something that is no schema.
    pub(super) fn keywords(&self, place: Place) -> Result<Option<&'a Map<String, Value>>, CompileError> {
        match self.value(place) {
            Value::Object(keywords) => Ok(Some(keywords)),
            Value::Bool(_) => Ok(None),
            other => {
                Err(self.fault(place, format!("found {}, expected a schema: an object, true or false", kind(other))))
            }
        }
    }

    /// The place of a keyword's value, or of a part of it.
    pub(super) fn below(&mut self, place: Place, steps: &[&str]) -> Option<Place> {
        let (mut pointer, mut value) = (self.pointer(place).to_owned(), self.value(place));
        for step in steps {
            value = child(value, step)?;
            pointer = format!("{pointer}/{}", step.replace('~', "~0").replace('/', "~1"));
        }
        Some(self.place(pointer, value))
    }

    /// What the `$ref` of a place leads to.
    ///
    /// # Errors
    /// A reference that leads nowhere, or out of the document.
    pub(super) fn referred(&mut self, place: Place, reference: &Value) -> Result<Place, CompileError> {
        let wrong = |document: &Document<'_>, reason: String| Err(document.fault_in(place, "$ref", reason));
        let Some(text) = reference.as_str() else {
            return wrong(self, format!("found {}, expected a text", kind(reference)));
        };
        let Some(fragment) = text.strip_prefix('#').and_then(decoded) else {
            return wrong(
                self,
                format!("found {text:?}, expected a reference inside the schema, such as \"#/$defs/name\""),
            );
        };
        if !(fragment.is_empty() || fragment.starts_with('/')) {
            return wrong(self, format!("found {text:?}, expected a JSON pointer after \"#\""));
        }
        self.work.note(text.len() / 8);
        let steps: Vec<String> =
            fragment.split('/').skip(1).map(|step| step.replace("~1", "/").replace("~0", "~")).collect();
        let root = self.root();
        match self.below(root, &steps.iter().map(String::as_str).collect::<Vec<_>>()) {
            Some(found) => Ok(found),
            None => wrong(self, format!("{text:?} leads nowhere")),
        }
    }

    pub(super) fn pointer(&self, place: Place) -> &str {
        &self.places[place.0].0
    }

    pub(super) fn fault(&self, place: Place, reason: impl Into<String>) -> CompileError {
        CompileError::at(self.pointer(place), reason)
    }

    pub(super) fn fault_in(&self, place: Place, keyword: &str, reason: impl Into<String>) -> CompileError {
        let keyword = keyword.replace('~', "~0").replace('/', "~1");
        CompileError::at(&format!("{}/{keyword}", self.pointer(place)), reason)
    }
}

fn child<'a>(value: &'a Value, step: &str) -> Option<&'a Value> {
    match value {
        Value::Object(members) => members.get(step),
        Value::Array(items) => items.get(step.parse::<usize>().ok()?),
        _ => None,
    }
}

/// A URI's fragment with its `%XX` taken for what they stand for.
fn decoded(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'%' {
            let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &rest[2..];
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// How a message calls a value.
pub(super) fn kind(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= 60 { text } else { format!("{}...", text.chars().take(57).collect::<String>()) }
}
