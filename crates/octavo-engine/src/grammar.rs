//! What may come next where an output has to follow a grammar. Who knows grammars implements this; the engine asks.

use octavo_backend::TokenMask;
use octavo_sched::TokenId;

/// A compiled grammar; requests may share it.
pub trait Grammar: Send + Sync {
    /// The place before the first token of an output.
    fn start(&self) -> Box<dyn GrammarState>;
}

/// How far one output has come in its grammar. It depends on the grammar and the tokens alone.
///
/// End-of-sequence tokens are no part of a grammar: the engine allows them where [`GrammarState::may_end`].
pub trait GrammarState: Send {
    /// Inserts every token that may come next into `mask`, which is empty.
    ///
    /// # Errors
    /// A grammar that takes more work than it may.
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), GrammarError>;

    /// Whether the output is complete as it stands.
    ///
    /// # Errors
    /// As [`GrammarState::allowed`].
    fn may_end(&mut self) -> Result<bool, GrammarError>;

    /// Goes on by a token.
    ///
    /// # Errors
    /// A token that is not allowed here, or more work than it may take.
    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError>;
}

/// Why a grammar cannot go on. The output ends with an error; others do not notice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the grammar cannot go on: {0}")]
pub struct GrammarError(pub String);
