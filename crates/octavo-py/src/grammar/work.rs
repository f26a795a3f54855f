//! The work of one schema, counted.
//!
//! Invariant: what is refused follows from the schema alone, not from the machine. A schema of 256 KiB may refer to itself
//! so often that its forms, or the pairs to compare, are more than a process can hold.

use std::cell::Cell;

use llguidance::derivre::RegexAst;

use super::CompileError;

/// Steps of one schema; one takes about a tenth of a microsecond.
const MOST_STEPS: u64 = 4_000_000;

/// Work that has been done.
#[derive(Debug, Default)]
pub(super) struct Work {
    steps: Cell<u64>,
}

impl Work {
    /// Counts work, before it is done where that is possible.
    ///
    /// # Errors
    /// More than one schema may take.
    pub(super) fn spend(&self, steps: usize) -> Result<(), CompileError> {
        self.note(steps);
        self.check()
    }

    /// Counts work where nothing can be refused; [`Work::check`] has to follow soon.
    pub(super) fn note(&self, steps: usize) {
        self.steps.set(self.steps.get().saturating_add(steps as u64));
    }

    pub(super) fn check(&self) -> Result<(), CompileError> {
        let found = self.steps.get();
        if found > MOST_STEPS {
            return Err(CompileError::TooLarge { what: "steps of work in one schema", found, most: MOST_STEPS });
        }
        Ok(())
    }
}

/// The parts and characters of an expression.
pub(super) fn size(texts: &RegexAst) -> usize {
    let mut todo = vec![texts];
    let mut size = 0;
    while let Some(next) = todo.pop() {
        size += match next {
            RegexAst::Regex(text) | RegexAst::SearchRegex(text) | RegexAst::Literal(text) => 1 + text.len(),
            _ => 1,
        };
        todo.extend(next.get_args());
    }
    size
}
