//! From a source to a grammar.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use llguidance::{
    api::{GrammarInit, ParserLimits, TopLevelGrammar},
    derivre::RegexAst,
};
use octavo_engine::Grammar;

use super::{CompileError, json, lark, regex, rules::Rules, state::Compiled, vocabulary::Vocabulary};
use crate::tokenizer::Tokenizer;

/// Bytes of a source.
const LARGEST_SOURCE: usize = 256 << 10;

/// Bytes of a source in Lark's notation, which is read by recursion.
const LARGEST_LARK: usize = 64 << 10;

/// Brackets within brackets of such a source.
const DEEPEST_LARK: usize = 100;

/// Threads that compile at a time, whether somebody still waits for them or not. Others wait for their turn.
const MOST_THREADS: usize = 2;

/// How long a caller waits, for its turn and for the grammar. The work is counted, so that it ends soon after that even
/// if nobody waits any longer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Address space for recursion; only what is used is taken.
const STACK: usize = 256 << 20;

/// Compiled grammars and refusals that are kept.
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
}

/// What the threads that compile share.
struct Shared {
    tokenizer: Option<Arc<Tokenizer>>,
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    vocabulary: OnceLock<Result<Vocabulary, CompileError>>,
    jobs: Mutex<Jobs>,
    /// A job has ended.
    ended: Condvar,
}

type Compilation = Result<Arc<dyn Grammar>, CompileError>;

/// What is being compiled, and what has been.
#[derive(Default)]
struct Jobs {
    running: Vec<GrammarSource>,
    /// The last used at the end. Refusals too, so that asking again does not begin the work again.
    kept: VecDeque<(GrammarSource, Compilation)>,
}

impl GrammarCompiler {
    /// For a model that knows `vocab_size` tokens. The tree of its vocabulary is made when the first grammar is.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>, vocab_size: usize, eos_token_ids: Vec<u32>) -> GrammarCompiler {
        let (vocabulary, jobs, ended) = (OnceLock::new(), Mutex::default(), Condvar::new());
        let shared = Shared { tokenizer, vocab_size, eos_token_ids, vocabulary, jobs, ended };
        GrammarCompiler { shared: Arc::new(shared) }
    }

    /// The grammar of a source.
    ///
    /// # Errors
    /// A source that is wrong, that nothing follows, or that is too large or too complex; no thread to compile in.
    pub fn compile(&self, source: &GrammarSource) -> Result<Arc<dyn Grammar>, CompileError> {
        source.check_size()?;
        let shared = &self.shared;
        // Not within the time of a source: it is the same work for all.
        shared.vocabulary()?;
        let begun = Instant::now();
        let mut jobs = shared.jobs();
        loop {
            if let Some(known) = jobs.known(source) {
                return known;
            }
            let is_running = jobs.running.contains(source);
            if !is_running && jobs.running.len() < MOST_THREADS {
                Shared::begin(shared, source)?;
                jobs.running.push(source.clone());
                continue;
            }
            let Some(left) = PATIENCE.checked_sub(begun.elapsed()) else {
                let seconds = PATIENCE.as_secs();
                return Err(if is_running {
                    CompileError::TooSlow { seconds }
                } else {
                    CompileError::Busy { seconds }
                });
            };
            jobs = shared.ended.wait_timeout(jobs, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Jobs {
    fn known(&mut self, source: &GrammarSource) -> Option<Compilation> {
        let place = self.kept.iter().position(|(known, _)| known == source)?;
        let entry = self.kept.remove(place)?;
        let compiled = entry.1.clone();
        self.kept.push_back(entry);
        Some(compiled)
    }

    fn end(&mut self, source: GrammarSource, compiled: Compilation) {
        self.running.retain(|running| running != &source);
        self.kept.push_back((source, compiled));
        if self.kept.len() > KEPT {
            self.kept.pop_front();
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

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles on a thread, whose result is kept whether anybody still waits for it or not.
    fn begin(shared: &Arc<Shared>, source: &GrammarSource) -> Result<(), CompileError> {
        let (shared, source) = (Arc::clone(shared), source.clone());
        let spawned = thread::Builder::new().name("octavo-grammar".to_owned()).stack_size(STACK).spawn(move || {
            let compiled = shared.compile(&source);
            shared.jobs().end(source, compiled);
            shared.ended.notify_all();
        });
        spawned.map_err(|error| CompileError::Source(format!("no thread to compile in: {error}")))?;
        Ok(())
    }

    fn compile(&self, source: &GrammarSource) -> Compilation {
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
                CompileError::check("brackets within brackets", lark::depth(text), DEEPEST_LARK)?;
                lark::check_attributes(text)?;
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
