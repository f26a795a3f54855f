//! What can be wrong with the text of a module.

use thiserror::Error;

/// Why a module cannot be run. Nothing is ever skipped in silence: what the interpreter does not know is one of these.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ParseError {
    /// The text ends inside a kernel or a statement.
    #[error("the PTX ends where {expected} was expected")]
    UnexpectedEnd {
        /// What should have come.
        expected: &'static str,
    },
    /// A character that no PTX token starts with.
    #[error("PTX line {line}: {found:?} starts no token")]
    Character {
        /// Line of the PTX, from 1.
        line: u32,
        /// The character.
        found: char,
    },
    /// Another token than the grammar wants.
    #[error("PTX line {line}: expected {expected}, found {found:?}")]
    Unexpected {
        /// Line of the PTX, from 1.
        line: u32,
        /// What should have stood there.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
    /// A directive that the interpreter does not know.
    #[error("PTX line {line}: the directive {directive:?} is not known")]
    Directive {
        /// Line of the PTX, from 1.
        line: u32,
        /// The directive, with its dot.
        directive: String,
    },
    /// An instruction, or a form of one, that the interpreter cannot run.
    #[error("PTX line {line}: {text:?}: {reason}")]
    Instruction {
        /// Line of the PTX, from 1.
        line: u32,
        /// The statement.
        text: String,
        /// What is not known about it.
        reason: String,
    },
    /// A branch to a label that the kernel does not have.
    #[error("PTX line {line}: the label {label:?} is not in this kernel")]
    Label {
        /// Line of the branch, from 1.
        line: u32,
        /// The label.
        label: String,
    },
}
