//! A compiled grammar and how far an output has come in it.
//!
//! Invariant: what a state answers follows from the grammar and the tokens alone. The library remembers what it has
//! worked out and counts work against limits, so each state has a memory of its own, and works out after every token what
//! may follow, whether it is asked or not.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use llguidance::{Matcher, TokenParser, api::StopReason, toktrie::SimpleVob};
use octavo_backend::TokenMask;
use octavo_engine::{Grammar, GrammarError, GrammarState};

use super::{CompileError, error::first_part};

/// A grammar for one vocabulary.
pub(super) struct Compiled {
    /// Never moved on; states begin as copies of it.
    start: Place,
}

impl Compiled {
    /// # Errors
    /// A grammar that allows nothing at its beginning, or that is too much work there.
    pub(super) fn new(parser: TokenParser, usable: &Arc<SimpleVob>) -> Result<Compiled, CompileError> {
        let start = Place::new(Matcher::new(Ok(parser)), Arc::clone(usable));
        start.map(|start| Compiled { start }).map_err(|error| CompileError::Source(error.0))
    }
}

impl Grammar for Compiled {
    fn start(&self) -> Box<dyn GrammarState> {
        Box::new(self.start.copy())
    }
}

/// A place in a grammar.
struct Place {
    matcher: Matcher,
    /// Tokens that can stand in a text.
    usable: Arc<SimpleVob>,
    allowed: SimpleVob,
    may_end: bool,
    /// Why there is no way on.
    fault: Option<GrammarError>,
}

impl Place {
    fn new(matcher: Matcher, usable: Arc<SimpleVob>) -> Result<Place, GrammarError> {
        let allowed = SimpleVob::alloc(usable.len());
        let mut place = Place { matcher, usable, allowed, may_end: false, fault: None };
        place.look()?;
        Ok(place)
    }

    fn copy(&self) -> Place {
        Place {
            matcher: self.matcher.deep_clone(),
            usable: Arc::clone(&self.usable),
            allowed: self.allowed.clone(),
            may_end: self.may_end,
            fault: self.fault.clone(),
        }
    }

    /// Works out what may follow.
    fn look(&mut self) -> Result<(), GrammarError> {
        if self.matcher.stop_reason() == StopReason::NoExtension {
            self.allowed.set_all(false);
            self.may_end = true;
            return Ok(());
        }
        self.may_end = self.matcher.is_accepting().map_err(fault)?;
        match self.matcher.compute_mask() {
            Ok(allowed) => {
                self.allowed = allowed;
                self.allowed.and(&self.usable);
                Ok(())
            }
            Err(error) => match fault(error) {
                error if error.0 != StopReason::NoExtensionBias.to_string() => Err(error),
                // Nothing but the end: the library sees that late where a text has to follow two patterns.
                _ if self.may_end => {
                    self.allowed.set_all(false);
                    Ok(())
                }
                _ => Err(GrammarError("no text can follow".to_owned())),
            },
        }
    }

    fn go_on(&mut self, token: u32) -> Result<(), GrammarError> {
        if token as usize >= self.allowed.len() || !self.allowed.is_allowed(token) {
            return Err(GrammarError(format!("token {token} is not allowed here")));
        }
        self.matcher.consume_token(token).map_err(fault)?;
        self.look()
    }

    fn checked(&self) -> Result<(), GrammarError> {
        self.fault.clone().map_or(Ok(()), Err)
    }
}

impl GrammarState for Place {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), GrammarError> {
        self.checked()?;
        for (word, allowed) in mask.words_mut().iter_mut().zip(self.allowed.as_slice()) {
            *word |= allowed;
        }
        Ok(())
    }

    fn may_end(&mut self) -> Result<bool, GrammarError> {
        self.checked()?;
        Ok(self.may_end)
    }

    fn advance(&mut self, token: u32) -> Result<(), GrammarError> {
        self.checked()?;
        let went = catch_unwind(AssertUnwindSafe(|| self.go_on(token)))
            .unwrap_or_else(|_| Err(GrammarError("the library failed".to_owned())));
        if let Err(error) = went {
            self.fault = Some(error.clone());
            return Err(error);
        }
        Ok(())
    }
}

fn fault(error: impl std::fmt::Display) -> GrammarError {
    GrammarError(first_part(&format!("{error:#}")))
}
