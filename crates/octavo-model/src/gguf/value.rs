//! One metadata value, borrowed from the file.

use std::fmt;

use super::cursor::Cursor;
use crate::ModelError;

/// Arrays of arrays exist in the format; nothing is known to nest deeper than two.
const DEEPEST_ARRAY: usize = 4;

/// A value; widths are forgotten.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value<'a> {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    Array(Array<'a>),
}

/// An array that has been walked once, so that its elements are known to be sound, and is decoded when asked for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Array<'a> {
    kind: Kind,
    count: usize,
    bytes: &'a [u8],
}

/// The format's number for a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    fn read(cursor: &mut Cursor<'_>, what: &str) -> Result<Kind, ModelError> {
        use Kind::*;
        const KINDS: [Kind; 13] = [U8, I8, U16, I16, U32, I32, F32, Bool, Text, Array, U64, I64, F64];
        let number = cursor.u32(what)?;
        KINDS
            .get(number as usize)
            .copied()
            .ok_or_else(|| cursor.corrupt(what, format!("value type {number}"), "a type from 0 to 12"))
    }

    /// Bytes that a value takes at least.
    fn least_size(self) -> u64 {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 | Kind::Text => 8,
            Kind::Array => 12,
        }
    }
}

impl<'a> Value<'a> {
    /// A type and a value of it; `key` names it in errors.
    pub(crate) fn read(cursor: &mut Cursor<'a>, key: &str) -> Result<Value<'a>, ModelError> {
        let kind = Kind::read(cursor, key)?;
        Value::read_as(kind, cursor, key, 0)
    }

    fn read_as(kind: Kind, cursor: &mut Cursor<'a>, key: &str, depth: usize) -> Result<Value<'a>, ModelError> {
        Ok(match kind {
            Kind::U8 => Value::Unsigned(u8::from_le_bytes(cursor.array(key)?).into()),
            Kind::I8 => Value::Signed(i8::from_le_bytes(cursor.array(key)?).into()),
            Kind::U16 => Value::Unsigned(u16::from_le_bytes(cursor.array(key)?).into()),
            Kind::I16 => Value::Signed(i16::from_le_bytes(cursor.array(key)?).into()),
            Kind::U32 => Value::Unsigned(cursor.u32(key)?.into()),
            Kind::I32 => Value::Signed(i32::from_le_bytes(cursor.array(key)?).into()),
            Kind::F32 => Value::Float(f32::from_le_bytes(cursor.array(key)?).into()),
            Kind::U64 => Value::Unsigned(cursor.u64(key)?),
            Kind::I64 => Value::Signed(i64::from_le_bytes(cursor.array(key)?)),
            Kind::F64 => Value::Float(f64::from_le_bytes(cursor.array(key)?)),
            Kind::Text => Value::Text(cursor.text(key)?),
            Kind::Bool => match cursor.array(key)? {
                [0u8] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(cursor.corrupt(key, format!("byte {other}"), "a boolean, 0 or 1")),
            },
            Kind::Array => Value::Array(Array::read(cursor, key, depth)?),
        })
    }
}

impl<'a> Array<'a> {
    fn read(cursor: &mut Cursor<'a>, key: &str, depth: usize) -> Result<Array<'a>, ModelError> {
        if depth == DEEPEST_ARRAY {
            return Err(cursor.corrupt(key, "arrays nested too deeply", format!("at most {DEEPEST_ARRAY} levels")));
        }
        let kind = Kind::read(cursor, key)?;
        let count = cursor.u64(key)?;
        cursor.check_count(count, kind.least_size(), key)?;
        let start = cursor.position();
        match kind {
            Kind::Text | Kind::Array | Kind::Bool => {
                for _ in 0..count {
                    Value::read_as(kind, cursor, key, depth + 1)?;
                }
            }
            _ => {
                cursor.take(count * kind.least_size(), key)?;
            }
        }
        Ok(Array { kind, count: count as usize, bytes: cursor.since(start) })
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// The elements, each decoded when the iterator reaches it.
    pub(crate) fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        // The walk of `read` left no error to find, so the path is never shown.
        let mut cursor = Cursor::new("".as_ref(), self.bytes);
        let kind = self.kind;
        (0..self.count).map_while(move |_| Value::read_as(kind, &mut cursor, "", 0).ok())
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(number) => write!(f, "{number}"),
            Value::Signed(number) => write!(f, "{number}"),
            Value::Float(number) => write!(f, "{number:?}"),
            Value::Bool(flag) => write!(f, "{flag}"),
            Value::Text(text) if text.chars().count() <= 60 => write!(f, "{text:?}"),
            Value::Text(text) => write!(f, "a text of {} bytes", text.len()),
            Value::Array(array) => write!(f, "an array of {} {:?} values", array.count, array.kind),
        }
    }
}
