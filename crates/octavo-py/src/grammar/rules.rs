//! Rules of a grammar, over lexemes that are regular expressions.

use std::collections::HashMap;

use llguidance::{
    api::{GrammarInit, ParserLimits, SkipSpec},
    derivre::RegexAst,
    earley::{
        Grammar, SymIdx, SymbolProps,
        lexerspec::{LexemeClass, LexemeIdx, LexerSpec},
    },
};

use super::CompileError;

/// Up to this many repetitions are counted one by one.
const FEW: usize = 8;

/// The library numbers symbols with 16 bits.
const MOST_SYMBOLS: usize = 60_000;

/// A grammar in the making. A symbol is what a rule refers to.
pub(super) struct Rules {
    grammar: Grammar,
    lexer: LexerSpec,
    class: LexemeClass,
    fuel: u64,
    start: SymIdx,
    by_lexeme: HashMap<LexemeIdx, SymIdx>,
    exactly: HashMap<(SymIdx, usize), SymIdx>,
    at_most: HashMap<(SymIdx, usize), SymIdx>,
}

impl Rules {
    /// Without rules. Nothing may stand between lexemes but what rules say.
    pub(super) fn new(limits: &ParserLimits) -> Result<Rules, CompileError> {
        let mut lexer = LexerSpec::new().map_err(CompileError::library)?;
        let class =
            lexer.setup_lexeme_class_with_skip(SkipSpec::once(RegexAst::NoMatch)).map_err(CompileError::library)?;
        lexer.regex_builder.unicode(true);
        lexer.regex_builder.utf8(true);
        let mut grammar = Grammar::new(None);
        // The library begins with the first symbol.
        let start = grammar
            .fresh_symbol_ext("start", SymbolProps { grammar_id: class, is_start: true, ..SymbolProps::default() });
        Ok(Rules {
            grammar,
            lexer,
            class,
            fuel: limits.initial_lexer_fuel,
            start,
            by_lexeme: HashMap::new(),
            exactly: HashMap::new(),
            at_most: HashMap::new(),
        })
    }

    /// The grammar of what follows from `root`.
    pub(super) fn finished(mut self, root: SymIdx) -> Result<GrammarInit, CompileError> {
        let start = self.start;
        self.rule(start, vec![root])?;
        Ok(GrammarInit::Internal(self.grammar, self.lexer))
    }

    /// A symbol that [`Rules::define`] gives its rules.
    pub(super) fn symbol(&mut self) -> SymIdx {
        self.grammar.fresh_symbol_ext("form", SymbolProps { grammar_id: self.class, ..SymbolProps::default() })
    }

    pub(super) fn define(&mut self, symbol: SymIdx, options: &[SymIdx]) -> Result<(), CompileError> {
        options.iter().try_for_each(|&option| self.rule(symbol, vec![option]))
    }

    fn rule(&mut self, symbol: SymIdx, parts: Vec<SymIdx>) -> Result<(), CompileError> {
        CompileError::check("symbols of a grammar", self.grammar.num_symbols(), MOST_SYMBOLS)?;
        self.grammar.add_rule(symbol, parts).map_err(CompileError::library)
    }

    /// Text that matches an expression, as much of it as does.
    pub(super) fn lexeme(&mut self, texts: RegexAst) -> Result<SymIdx, CompileError> {
        let lexeme = self
            .lexer
            .add_greedy_lexeme(String::new(), texts, false, None, usize::MAX)
            .map_err(CompileError::library)?;
        if self.lexer.cost() > self.fuel {
            return Err(CompileError::Source("the texts between which to choose are too complex together".to_owned()));
        }
        if let Some(&known) = self.by_lexeme.get(&lexeme) {
            return Ok(known);
        }
        let symbol = self.symbol();
        self.grammar.make_terminal(symbol, lexeme, &self.lexer).map_err(CompileError::library)?;
        self.by_lexeme.insert(lexeme, symbol);
        Ok(symbol)
    }

    /// Different lexemes so far.
    pub(super) fn num_lexemes(&self) -> usize {
        self.by_lexeme.len()
    }

    /// One after another.
    pub(super) fn sequence(&mut self, parts: &[SymIdx]) -> Result<SymIdx, CompileError> {
        if let [single] = parts {
            return Ok(*single);
        }
        let symbol = self.symbol();
        self.rule(symbol, parts.to_vec())?;
        Ok(symbol)
    }

    /// One of several.
    pub(super) fn select(&mut self, options: &[SymIdx]) -> Result<SymIdx, CompileError> {
        if let [single] = options {
            return Ok(*single);
        }
        let symbol = self.symbol();
        self.define(symbol, options)?;
        Ok(symbol)
    }

    pub(super) fn optional(&mut self, part: SymIdx) -> Result<SymIdx, CompileError> {
        let symbol = self.symbol();
        self.rule(symbol, Vec::new())?;
        self.rule(symbol, vec![part])?;
        Ok(symbol)
    }

    /// From `least` to `most` times; without end if there is no `most`.
    pub(super) fn repeat(&mut self, part: SymIdx, least: usize, most: Option<usize>) -> Result<SymIdx, CompileError> {
        let first = self.exactly(part, least)?;
        let others = match most {
            Some(most) => self.at_most(part, most.saturating_sub(least))?,
            None => {
                let symbol = self.symbol();
                self.rule(symbol, Vec::new())?;
                self.rule(symbol, vec![symbol, part])?;
                symbol
            }
        };
        if least == 0 { Ok(others) } else { self.sequence(&[first, others]) }
    }

    fn exactly(&mut self, part: SymIdx, count: usize) -> Result<SymIdx, CompileError> {
        if let Some(&known) = self.exactly.get(&(part, count)) {
            return Ok(known);
        }
        let symbol = if count <= FEW {
            self.sequence(&vec![part; count])?
        } else {
            let half = self.exactly(part, count / 2)?;
            let odd = vec![part; count % 2];
            self.sequence(&[vec![half, half], odd].concat())?
        };
        self.exactly.insert((part, count), symbol);
        Ok(symbol)
    }

    /// Either more than half of the most, or at most half of it: in one way for each number.
    fn at_most(&mut self, part: SymIdx, count: usize) -> Result<SymIdx, CompileError> {
        if let Some(&known) = self.at_most.get(&(part, count)) {
            return Ok(known);
        }
        let symbol = if count == 0 {
            self.sequence(&[])?
        } else if count <= FEW {
            let others = self.at_most(part, count - 1)?;
            let some = self.sequence(&[part, others])?;
            self.optional(some)?
        } else {
            let lower = (count - 1) / 2;
            let (few, half) = (self.at_most(part, lower)?, self.exactly(part, lower + 1)?);
            let left = self.at_most(part, count - lower - 1)?;
            let many = self.sequence(&[half, left])?;
            self.select(&[few, many])?
        };
        self.at_most.insert((part, count), symbol);
        Ok(symbol)
    }
}
