//! From a source to a grammar.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, OnceLock, PoisonError, mpsc},
    thread,
    time::Duration,
};

use llguidance::{
    api::{GrammarInit, ParserLimits, TopLevelGrammar},
    derivre::RegexAst,
};
use octavo_engine::Grammar;

use super::{CompileError, json, regex, rules::Rules, state::Compiled, vocabulary::Vocabulary};
use crate::tokenizer::Tokenizer;

/// Bytes of a source.
const LARGEST_SOURCE: usize = 256 << 10;

/// Bytes of a source in Lark's notation, which is read by recursion.
const LARGEST_LARK: usize = 64 << 10;

/// Brackets within brackets of such a source.
const DEEPEST_LARK: usize = 100;

/// How long a caller waits. The work has bounds of its own, so that it ends even if nobody waits any longer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Address space for recursion; only what is used is taken.
const STACK: usize = 256 << 20;

/// Compiled grammars that are kept.
const KEPT: usize = 64;

/// What an output has to follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrammarSource {
    /// A JSON schema.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression for the whole output.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// A grammar in Lark's notation.
    Lark(String),
}

/// Compiles for one model.
pub struct GrammarCompiler {
    shared: Arc<Shared>,
    /// The last used at the end.
    kept: Mutex<VecDeque<(GrammarSource, Arc<dyn Grammar>)>>,
}

/// What the thread that compiles needs.
struct Shared {
    tokenizer: Option<Arc<Tokenizer>>,
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    vocabulary: OnceLock<Result<Vocabulary, CompileError>>,
}

impl GrammarCompiler {
    /// For a model that knows `vocab_size` tokens. The tree of its vocabulary is made when the first grammar is.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>, vocab_size: usize, eos_token_ids: Vec<u32>) -> GrammarCompiler {
        let shared = Shared { tokenizer, vocab_size, eos_token_ids, vocabulary: OnceLock::new() };
        GrammarCompiler { shared: Arc::new(shared), kept: Mutex::new(VecDeque::new()) }
    }

    /// The grammar of a source.
    ///
    /// # Errors
    /// A source that is wrong, that nothing follows, or that is too large or too complex.
    pub fn compile(&self, source: &GrammarSource) -> Result<Arc<dyn Grammar>, CompileError> {
        source.check_size()?;
        if let Some(known) = self.known(source) {
            return Ok(known);
        }
        // Not within the time of a source: it is the same work for all.
        self.shared.vocabulary()?;
        let (shared, own) = (Arc::clone(&self.shared), source.clone());
        let (sender, receiver) = mpsc::sync_channel(1);
        let spawned = thread::Builder::new().name("octavo-grammar".to_owned()).stack_size(STACK).spawn(move || {
            // Nobody may be waiting any longer.
            drop(sender.send(shared.compile(&own)));
        });
        spawned.map_err(|error| CompileError::Source(format!("no thread to compile in: {error}")))?;
        let grammar = match receiver.recv_timeout(PATIENCE) {
            Ok(compiled) => compiled?,
            Err(_) => return Err(CompileError::TooSlow { seconds: PATIENCE.as_secs() }),
        };
        self.keep(source, &grammar);
        Ok(grammar)
    }

    fn known(&self, source: &GrammarSource) -> Option<Arc<dyn Grammar>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let place = kept.iter().position(|(known, _)| known == source)?;
        let entry = kept.remove(place)?;
        let grammar = Arc::clone(&entry.1);
        kept.push_back(entry);
        Some(grammar)
    }

    fn keep(&self, source: &GrammarSource, grammar: &Arc<dyn Grammar>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back((source.clone(), Arc::clone(grammar)));
        if kept.len() > KEPT {
            kept.pop_front();
        }
    }
}

impl Shared {
    fn vocabulary(&self) -> Result<&Vocabulary, CompileError> {
        let made = self.vocabulary.get_or_init(|| {
            let tokenizer = self.tokenizer.as_ref().ok_or(CompileError::NoTokenizer)?;
            Vocabulary::new(tokenizer, self.vocab_size, &self.eos_token_ids)
        });
        made.as_ref().map_err(Clone::clone)
    }

    fn compile(&self, source: &GrammarSource) -> Result<Arc<dyn Grammar>, CompileError> {
        let vocabulary = self.vocabulary()?;
        let compiled = catch_unwind(AssertUnwindSafe(|| {
            let rules = source.rules(vocabulary.factory.limits())?;
            let parser = vocabulary.factory.create_parser_from_init_default(rules).map_err(CompileError::library)?;
            Compiled::new(parser, &vocabulary.usable)
        }));
        let failed = || Err(CompileError::Source("too complex, or wrong in a way that is not understood".to_owned()));
        Ok(Arc::new(compiled.unwrap_or_else(|_| failed())?))
    }
}

impl GrammarSource {
    fn check_size(&self) -> Result<(), CompileError> {
        let (size, most) = match self {
            GrammarSource::JsonObject => (0, 0),
            GrammarSource::JsonSchema(text) | GrammarSource::Regex(text) => (text.len(), LARGEST_SOURCE),
            GrammarSource::Lark(text) => (text.len(), LARGEST_LARK),
            GrammarSource::Choice(texts) => (texts.iter().map(String::len).sum(), LARGEST_SOURCE),
        };
        CompileError::check("bytes", size, most)
    }

    fn rules(&self, limits: &ParserLimits) -> Result<GrammarInit, CompileError> {
        match self {
            GrammarSource::JsonSchema(text) => json::grammar(text, limits),
            GrammarSource::JsonObject => json::grammar(r#"{"type": "object"}"#, limits),
            GrammarSource::Regex(pattern) => {
                let checked = regex::checked(pattern)?;
                one_lexeme(RegexAst::Regex(regex::unanchored(&checked).to_owned()), limits)
            }
            GrammarSource::Choice(texts) => {
                if texts.is_empty() || texts.iter().any(String::is_empty) {
                    return Err(CompileError::Source("found no text or an empty one, expected texts".to_owned()));
                }
                one_lexeme(RegexAst::Or(texts.iter().cloned().map(RegexAst::Literal).collect()), limits)
            }
            GrammarSource::Lark(text) => {
                CompileError::check("brackets within brackets", depth(text), DEEPEST_LARK)?;
                Ok(GrammarInit::Serialized(TopLevelGrammar::from_lark(text.clone())))
            }
        }
    }
}

fn one_lexeme(texts: RegexAst, limits: &ParserLimits) -> Result<GrammarInit, CompileError> {
    let mut rules = Rules::new(limits)?;
    let symbol = rules.lexeme(texts)?;
    rules.finished(symbol)
}

/// The most brackets that are open at once, wherever they stand.
fn depth(text: &str) -> usize {
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
