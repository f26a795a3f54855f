//! What can be wrong with a grammar.

use std::fmt::Display;

/// Why a source cannot be compiled. What follows the field's name in messages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// A place in a JSON schema.
    #[error("at {place}: {reason}")]
    Schema {
        /// A JSON pointer; a bare `#` is the schema itself.
        place: String,
        /// What was found there, and what was expected.
        reason: String,
    },
    /// A source that is wrong as a whole, or a place that `reason` names.
    #[error("{0}")]
    Source(String),
    /// A bound of this module.
    #[error("found {found} {what}, expected at most {most}")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// How many there may be.
        most: u64,
    },
    /// It would take too long.
    #[error("not compiled within {seconds} s, expected a simpler one")]
    TooSlow {
        /// The time it had.
        seconds: u64,
    },
    /// Others are being compiled.
    #[error("not begun within {seconds} s, since others that take long are being compiled; try again later")]
    Busy {
        /// The time it waited.
        seconds: u64,
    },
    /// Where a form is complete, nothing could say so.
    #[error("the model has no end token that can be drawn, so no output could end with its form")]
    NoEnd,
    /// The vocabulary cannot be used.
    #[error("the model has no tokenizer, so nothing can be compiled for it")]
    NoTokenizer,
}

impl CompileError {
    /// At a JSON pointer, without its leading `#`.
    pub(super) fn at(pointer: &str, reason: impl Into<String>) -> CompileError {
        let place = if pointer.is_empty() { "#" } else { pointer };
        CompileError::Schema { place: place.to_owned(), reason: reason.into() }
    }

    /// What the library says, in one line. It appends its own state, and a backtrace to a panic.
    pub(super) fn library(error: impl Display) -> CompileError {
        CompileError::Source(first_part(&format!("{error:#}")))
    }

    pub(super) fn check(what: &'static str, found: usize, most: usize) -> Result<(), CompileError> {
        if found > most {
            return Err(CompileError::TooLarge { what, found: found as u64, most: most as u64 });
        }
        Ok(())
    }
}

/// A message of the library without its own state, as one line.
pub(super) fn first_part(message: &str) -> String {
    let end = message.find("\n<").unwrap_or(message.len());
    let words: Vec<&str> = message[..end].split_whitespace().collect();
    words.join(" ")
}
