//! From nodes to rules.

use llguidance::{
    api::{GrammarInit, ParserLimits},
    derivre::RegexAst,
    earley::SymIdx,
};

use super::{
    literal::{COLON, COMMA, named},
    node::{Items, Members, Node, NodeId, Presence, options},
};
use crate::grammar::{
    CompileError,
    rules::Rules,
    work::{Work, size},
};

/// States that a count of members may take over all fields of one object.
const MOST_STATES: usize = 50_000;

/// Texts between which an output may have to choose: the library takes longer than in proportion to them.
const MOST_LEXEMES: usize = 4_000;

/// The grammar of a graph whose first node has values; `ends` says which others have.
pub(super) fn emitted(
    nodes: &[Node],
    ends: &[bool],
    limits: &ParserLimits,
    work: &Work,
) -> Result<GrammarInit, CompileError> {
    let mut emitter = Emitter {
        rules: Rules::new(limits)?,
        nodes,
        ends,
        known: vec![None; nodes.len()],
        todo: Vec::new(),
        work,
        asked: 0,
    };
    let root = emitter.reference(NodeId(0))?;
    while let Some((id, symbol)) = emitter.todo.pop() {
        let body = emitter.body(id)?;
        emitter.rules.define(symbol, &[body])?;
    }
    emitter.rules.finished(root)
}

struct Emitter<'a> {
    rules: Rules,
    nodes: &'a [Node],
    ends: &'a [bool],
    known: Vec<Option<SymIdx>>,
    todo: Vec<(NodeId, SymIdx)>,
    work: &'a Work,
    /// Asked for so far.
    asked: usize,
}

impl Emitter<'_> {
    /// How rules refer to a node. What is more than a text is written later, so that nodes may refer to themselves.
    fn reference(&mut self, id: NodeId) -> Result<SymIdx, CompileError> {
        if let Some(known) = self.known[id.0] {
            return Ok(known);
        }
        let reference = match &self.nodes[id.0] {
            Node::Leaf(texts) => self.lexeme(texts.texts.clone())?,
            _ => {
                let placeholder = self.rules.symbol();
                self.todo.push((id, placeholder));
                placeholder
            }
        };
        self.known[id.0] = Some(reference);
        Ok(reference)
    }

    fn body(&mut self, id: NodeId) -> Result<SymIdx, CompileError> {
        match &self.nodes[id.0] {
            Node::Select(_) => self.select(id),
            Node::Array(items) => self.array(&items.without(self.ends)),
            Node::Object(members) => self.object(&members.without(self.ends)),
            Node::Leaf(texts) => self.lexeme(texts.texts.clone()),
            Node::Unknown | Node::Never(..) => {
                Err(CompileError::Source("a form without values was left in".to_owned()))
            }
        }
    }

    fn lexeme(&mut self, texts: RegexAst) -> Result<SymIdx, CompileError> {
        // The library searches those that it knows one by one.
        self.asked += 1;
        self.work.spend(1 + size(&texts) + self.asked / 100)?;
        let symbol = self.rules.lexeme(texts)?;
        CompileError::check("different texts of names and values", self.rules.num_lexemes(), MOST_LEXEMES)?;
        Ok(symbol)
    }

    fn pattern(&mut self, pattern: &str) -> Result<SymIdx, CompileError> {
        self.lexeme(RegexAst::Regex(pattern.to_owned()))
    }

    fn literal(&mut self, text: &str) -> Result<SymIdx, CompileError> {
        self.lexeme(RegexAst::Literal(text.to_owned()))
    }

    /// Texts become one lexeme.
    fn select(&mut self, id: NodeId) -> Result<SymIdx, CompileError> {
        let (mut texts, mut others) = (Vec::new(), Vec::new());
        let options = options(self.nodes, id);
        self.work.spend(1 + options.len())?;
        for option in options.into_iter().filter(|option| self.ends[option.0]) {
            match &self.nodes[option.0] {
                Node::Leaf(leaf) => {
                    self.work.spend(size(&leaf.texts))?;
                    texts.push(leaf.texts.clone());
                }
                _ => others.push(self.reference(option)?),
            }
        }
        if !texts.is_empty() {
            others.push(self.lexeme(RegexAst::Or(texts))?);
        }
        self.rules.select(&others)
    }

    fn array(&mut self, items: &Items) -> Result<SymIdx, CompileError> {
        let comma = self.pattern(COMMA)?;
        let most = items.most.unwrap_or(usize::MAX);
        let first = &items.first[..items.first.len().min(most)];
        let mut tail = match items.rest.filter(|_| most > first.len()) {
            Some(rest) => {
                let item = self.reference(rest)?;
                let left = items.most.map(|most| most - first.len());
                let least = items.least.saturating_sub(first.len());
                if first.is_empty() {
                    self.several(item, comma, least, left)?
                } else {
                    self.more(item, comma, least, left)?
                }
            }
            None => self.rules.sequence(&[])?,
        };
        for (index, &item) in first.iter().enumerate().rev() {
            let item = self.reference(item)?;
            let with = if index == 0 { vec![item, tail] } else { vec![comma, item, tail] };
            let with = self.rules.sequence(&with)?;
            tail = if index < items.least { with } else { self.rules.optional(with)? };
        }
        let (open, close) = (self.literal("[")?, self.literal("]")?);
        self.rules.sequence(&[open, tail, close])
    }

    /// Several of `item` with commas between them.
    fn several(
        &mut self,
        item: SymIdx,
        comma: SymIdx,
        least: usize,
        most: Option<usize>,
    ) -> Result<SymIdx, CompileError> {
        if most == Some(0) {
            return self.rules.sequence(&[]);
        }
        let others = self.more(item, comma, least.saturating_sub(1), most.map(|most| most - 1))?;
        let all = self.rules.sequence(&[item, others])?;
        if least == 0 { self.rules.optional(all) } else { Ok(all) }
    }

    /// Several of `item` with a comma before each.
    fn more(&mut self, item: SymIdx, comma: SymIdx, least: usize, most: Option<usize>) -> Result<SymIdx, CompileError> {
        let next = self.rules.sequence(&[comma, item])?;
        self.rules.repeat(next, least, most)
    }

    fn object(&mut self, members: &Members) -> Result<SymIdx, CompileError> {
        let inner = self.members(members)?;
        let (open, close) = (self.literal("{")?, self.literal("}")?);
        self.rules.sequence(&[open, inner, close])
    }

    /// From the last field to the first: what may follow once `count` members are written.
    fn members(&mut self, members: &Members) -> Result<SymIdx, CompileError> {
        // Without an upper bound, counting ends where no more are asked for; the first comma needs one.
        let counted = members.most.unwrap_or(members.least.max(1)).min(members.fields.len().max(members.least) + 1);
        let states = (members.fields.len() + 1).saturating_mul(counted + 1);
        CompileError::check("counts of members in one object", states, MOST_STATES)?;
        self.work.spend(states)?;
        let item = self.extra_item(members)?;
        let mut tails = Vec::with_capacity(counted + 1);
        for count in 0..=counted {
            tails.push(self.extra(members, item, count)?);
        }
        for field in members.fields.iter().rev() {
            let first = self.lexeme(named(&field.name))?;
            let comma = RegexAst::Regex(COMMA.to_owned());
            let later = self.lexeme(RegexAst::Concat(vec![comma, named(&field.name)]))?;
            let value = self.reference(field.node)?;
            let mut before = Vec::with_capacity(tails.len());
            for count in 0..=counted {
                let is_full = members.most == Some(count);
                let after = tails[(count + 1).min(counted)].clone().filter(|_| !is_full);
                let name = if count == 0 { first } else { later };
                let with = after.map(|after| [vec![name, value], after].concat());
                let without = tails[count].clone().filter(|_| field.presence == Presence::Optional);
                before.push(match (with, without) {
                    (Some(with), Some(without)) => {
                        let both = [self.rules.sequence(&with)?, self.rules.sequence(&without)?];
                        Some(vec![self.rules.select(&both)?])
                    }
                    (one, other) => one.or(other),
                });
            }
            tails = before;
        }
        match tails.swap_remove(0) {
            Some(all) => self.rules.sequence(&all),
            None => Err(CompileError::Source("no number of members fits".to_owned())),
        }
    }

    /// A member without a field of its own, as the first member and as a later one, if there may be one.
    fn extra_item(&mut self, members: &Members) -> Result<Option<(SymIdx, SymIdx)>, CompileError> {
        if members.extra.is_empty() {
            return Ok(None);
        }
        let (mut first, mut later) = (Vec::new(), Vec::new());
        for (name, node) in &members.extra {
            let (comma, colon) = (RegexAst::Regex(COMMA.to_owned()), RegexAst::Regex(COLON.to_owned()));
            let alone = self.lexeme(RegexAst::Concat(vec![name.clone(), colon.clone()]))?;
            // With the comma, as fields are: the text of a lexeme goes on as long as that of any other may.
            let behind = self.lexeme(RegexAst::Concat(vec![comma, name.clone(), colon]))?;
            let value = self.reference(*node)?;
            first.push(self.rules.sequence(&[alone, value])?);
            later.push(self.rules.sequence(&[behind, value])?);
        }
        Ok(Some((self.rules.select(&first)?, self.rules.select(&later)?)))
    }

    /// Members without a field of their own, once `count` are written; `None` if too few would be there.
    fn extra(
        &mut self,
        members: &Members,
        item: Option<(SymIdx, SymIdx)>,
        count: usize,
    ) -> Result<Option<Vec<SymIdx>>, CompileError> {
        let least = members.least.saturating_sub(count);
        let most = members.most.map(|most| most.saturating_sub(count));
        let Some((first, later)) = item.filter(|_| most != Some(0)) else {
            return Ok((least == 0).then(Vec::new));
        };
        // Two of them may have one name, and are one member then.
        if least > 1 {
            return Ok(None);
        }
        if count > 0 {
            return Ok(Some(vec![self.rules.repeat(later, least, most)?]));
        }
        let others = self.rules.repeat(later, 0, most.map(|most| most - 1))?;
        let all = self.rules.sequence(&[first, others])?;
        Ok(Some(vec![if least == 0 { self.rules.optional(all)? } else { all }]))
    }
}
