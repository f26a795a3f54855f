//! What the keywords of one place say, each checked.

use llguidance::derivre::RegexAst;
use serde_json::{Map, Value};

use super::{
    document::{Document, Place, kind},
    number::{Bound, Decimal, Numbers, Reach, Side},
    text::{FORMATS, Texts, format},
};
use crate::grammar::{CompileError, regex};

/// Counts of characters, items and members; more would never be reached.
const LARGEST_COUNT: u64 = 10_000;

/// Keywords that say nothing about the values.
const ANNOTATIONS: [&str; 18] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];

/// Keywords that are read where places are joined.
const JOINED: [&str; 4] = ["$ref", "allOf", "anyOf", "oneOf"];

/// A set of JSON's types. Integers and other numbers are two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    pub(super) const NULL: Types = Types(1);
    pub(super) const BOOLEAN: Types = Types(2);
    pub(super) const INTEGER: Types = Types(4);
    pub(super) const FRACTION: Types = Types(8);
    pub(super) const NUMBER: Types = Types(4 | 8);
    pub(super) const STRING: Types = Types(16);
    pub(super) const ARRAY: Types = Types(32);
    pub(super) const OBJECT: Types = Types(64);
    pub(super) const ALL: Types = Types(127);

    fn named(name: &str) -> Option<Types> {
        Some(match name {
            "null" => Types::NULL,
            "boolean" => Types::BOOLEAN,
            "integer" => Types::INTEGER,
            "number" => Types::NUMBER,
            "string" => Types::STRING,
            "array" => Types::ARRAY,
            "object" => Types::OBJECT,
            _ => return None,
        })
    }

    pub(super) fn of(value: &Value) -> Types {
        match value {
            Value::Null => Types::NULL,
            Value::Bool(_) => Types::BOOLEAN,
            // 1.0 is an integer too.
            Value::Number(number) if number.as_f64().is_some_and(|double| number.is_f64() && double.fract() == 0.0) => {
                Types::INTEGER.either(Types::FRACTION)
            }
            Value::Number(number) if number.is_f64() => Types::FRACTION,
            Value::Number(_) => Types::INTEGER,
            Value::String(_) => Types::STRING,
            Value::Array(_) => Types::ARRAY,
            Value::Object(_) => Types::OBJECT,
        }
    }

    pub(super) fn has(self, other: Types) -> bool {
        self.0 & other.0 != 0
    }

    pub(super) fn both(self, other: Types) -> Types {
        Types(self.0 & other.0)
    }

    fn either(self, other: Types) -> Types {
        Types(self.0 | other.0)
    }
}

/// What several places say together about one value, all but what they say about parts of it.
#[derive(Debug, Clone)]
pub(super) struct Assertions<'a> {
    pub types: Types,
    pub numbers: Numbers,
    pub texts: Texts,
    /// From `enum` and `const`, with the place; each list must have the value.
    pub values: Vec<(Place, Vec<&'a Value>)>,
    pub items: (u64, Option<u64>),
    pub members: (u64, Option<u64>),
    /// In the order in which they are named, some perhaps more than once.
    pub required: Vec<&'a str>,
}

impl<'a> Assertions<'a> {
    pub(super) fn none() -> Assertions<'a> {
        Assertions {
            types: Types::ALL,
            numbers: Numbers::default(),
            texts: Texts::default(),
            values: Vec::new(),
            items: (0, None),
            members: (0, None),
            required: Vec::new(),
        }
    }

    /// Takes in what a place says.
    ///
    /// # Errors
    /// A keyword that is not supported, or a value that it cannot have.
    pub(super) fn add(&mut self, document: &Document<'a>, place: Place) -> Result<(), CompileError> {
        let Some(keywords) = document.keywords(place)? else {
            if document.value(place) == &Value::Bool(false) {
                self.types = self.types.both(Types(0));
            }
            return Ok(());
        };
        for (keyword, value) in keywords {
            let parts = match value {
                Value::String(text) => text.len(),
                Value::Array(items) => items.len(),
                _ => 1,
            };
            document.work.spend(2 + parts)?;
            self.add_keyword(place, keywords, keyword, value)
                .map_err(|reason| document.fault_in(place, keyword, reason))?;
        }
        Ok(())
    }

    fn add_keyword(
        &mut self,
        place: Place,
        keywords: &'a Map<String, Value>,
        keyword: &str,
        value: &'a Value,
    ) -> Result<(), String> {
        match keyword {
            "type" => self.types = self.types.both(types(value)?),
            "const" => self.values.push((place, vec![value])),
            "enum" => self.values.push((place, list(value)?.iter().collect())),
            "minimum" => self.bound(Side::Least, value, exclusive(keywords, "exclusiveMinimum"))?,
            "maximum" => self.bound(Side::Most, value, exclusive(keywords, "exclusiveMaximum"))?,
            // In draft 4 they say how another bound is meant.
            "exclusiveMinimum" | "exclusiveMaximum" if value.is_boolean() => {}
            "exclusiveMinimum" => self.bound(Side::Least, value, Reach::Exclusive)?,
            "exclusiveMaximum" => self.bound(Side::Most, value, Reach::Exclusive)?,
            "multipleOf" => self.numbers.multiples.push(multiple(value)?),
            "minLength" => self.texts.min_length = self.texts.min_length.max(count(value)?),
            "maxLength" => self.texts.max_length = Some(least(self.texts.max_length, count(value)?)),
            "pattern" => self.texts.patterns.push(pattern(value)?),
            "format" => self.texts.formats.push(known_format(value)?),
            "minItems" => self.items.0 = self.items.0.max(count(value)?),
            "maxItems" => self.items.1 = Some(least(self.items.1, count(value)?)),
            "minProperties" => self.members.0 = self.members.0.max(count(value)?),
            "maxProperties" => self.members.1 = Some(least(self.members.1, count(value)?)),
            "required" => self.require(value)?,
            "properties" | "patternProperties" => {
                value.as_object().ok_or_else(|| wrong(value, "an object of schemas"))?;
            }
            "prefixItems" => {
                list(value)?;
            }
            "uniqueItems" if value == &Value::Bool(false) => {}
            "items" | "additionalItems" | "additionalProperties" => {}
            other if JOINED.contains(&other) || ANNOTATIONS.contains(&other) || other.starts_with("x-") => {}
            _ => return Err("this keyword is not supported".to_owned()),
        }
        Ok(())
    }

    fn bound(&mut self, side: Side, value: &Value, reach: Reach) -> Result<(), String> {
        let limit = value.as_number().and_then(Decimal::of).ok_or_else(|| wrong(value, "a number"))?;
        self.numbers.bounds.push(Bound { side, limit, reach });
        Ok(())
    }

    fn require(&mut self, value: &'a Value) -> Result<(), String> {
        for name in list(value)? {
            self.required.push(name.as_str().ok_or_else(|| wrong(value, "a list of names"))?);
        }
        Ok(())
    }
}

fn wrong(found: &Value, expected: &str) -> String {
    format!("found {}, expected {expected}", kind(found))
}

fn list(value: &Value) -> Result<&Vec<Value>, String> {
    value.as_array().ok_or_else(|| wrong(value, "a list"))
}

fn types(value: &Value) -> Result<Types, String> {
    const KNOWN: &str = "null, boolean, integer, number, string, array, object, or a list of them";
    let names = match value {
        Value::Array(names) if !names.is_empty() => names.iter().collect(),
        single => vec![single],
    };
    names.into_iter().try_fold(Types(0), |types, name| {
        let named = name.as_str().and_then(Types::named).ok_or_else(|| wrong(name, KNOWN))?;
        Ok(types.either(named))
    })
}

fn count(value: &Value) -> Result<u64, String> {
    // 3.0 is an integer in JSON.
    let whole = value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..1e15).contains(number));
    match value.as_u64().or(whole.map(|number| number as u64)) {
        Some(count) if count <= LARGEST_COUNT => Ok(count),
        _ => Err(wrong(value, &format!("an integer from 0 to {LARGEST_COUNT}"))),
    }
}

fn least(known: Option<u64>, other: u64) -> u64 {
    known.map_or(other, |known| known.min(other))
}

fn exclusive(keywords: &Map<String, Value>, keyword: &str) -> Reach {
    if keywords.get(keyword) == Some(&Value::Bool(true)) { Reach::Exclusive } else { Reach::Inclusive }
}

fn multiple(value: &Value) -> Result<(u32, u32), String> {
    let scaled = value.as_number().and_then(Decimal::of).and_then(|number| number.scaled());
    match scaled.filter(|_| value.as_f64().is_some_and(|number| number > 0.0)) {
        Some((coefficient, places)) if coefficient > 0 && places <= 9 => Ok((coefficient, places)),
        _ => Err(wrong(value, "a number above 0 of at most 9 digits")),
    }
}

/// As a text that has a match of it anywhere.
pub(super) fn pattern(value: &Value) -> Result<RegexAst, String> {
    let pattern = value.as_str().ok_or_else(|| wrong(value, "a regular expression as a text"))?;
    regex::checked(pattern).map(RegexAst::SearchRegex).map_err(|error| error.to_string())
}

fn known_format(value: &Value) -> Result<RegexAst, String> {
    value.as_str().and_then(format).ok_or_else(|| wrong(value, &format!("one of {}", FORMATS.join(", "))))
}
