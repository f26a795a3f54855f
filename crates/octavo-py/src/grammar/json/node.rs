//! A schema as a graph of nodes, each a form that a value may have.

use std::collections::BTreeSet;

use llguidance::derivre::{RegexAst, RegexBuilder};

use super::{document::Place, keywords::Types};
use crate::grammar::{
    CompileError,
    work::{Work, size},
};

/// How much work it may be to see whether a regular expression matches any text at all.
const EMPTINESS_FUEL: u64 = 50_000;

/// Steps for the smallest regular expression.
pub(super) const LEAST_STEPS: usize = 200;

/// The index of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NodeId(pub usize);

/// A form of a value.
#[derive(Debug, Clone)]
pub(super) enum Node {
    /// Not looked at yet.
    Unknown,
    /// No value has it.
    Never(Place, &'static str),
    /// The texts of a value without parts, or of one that is known as a whole.
    Leaf(Leaf),
    /// Any of several.
    Select(Vec<NodeId>),
    Array(Items),
    Object(Members),
}

/// The texts of a value, and what other texts may mean the same value.
#[derive(Debug, Clone)]
pub(super) struct Leaf {
    pub texts: RegexAst,
    /// Of all its values; integers and other numbers are not told apart.
    pub types: Types,
    /// All values there may be, each in a spelling of its own.
    pub listed: Option<BTreeSet<String>>,
    /// That spelling of all others.
    pub spelled: RegexAst,
}

/// Items of an array.
#[derive(Debug, Clone)]
pub(super) struct Items {
    /// The first ones.
    pub first: Vec<NodeId>,
    /// All others; none if there may be no others.
    pub rest: Option<NodeId>,
    pub least: usize,
    pub most: Option<usize>,
}

/// Members of an object.
#[derive(Debug, Clone)]
pub(super) struct Members {
    /// In the order of the output.
    pub fields: Vec<Field>,
    /// Names that are in no field, quoted, with what they name.
    pub extra: Vec<(RegexAst, NodeId)>,
    pub least: usize,
    pub most: Option<usize>,
    pub closing: Closing,
}

/// Who says that there are no members but those of `fields` and `extra`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closing {
    /// The schema, to every validator.
    Schema,
    /// Nobody, or only octavo, which writes no others.
    Open,
}

/// A member with a name of its own.
#[derive(Debug, Clone)]
pub(super) struct Field {
    pub name: String,
    pub node: NodeId,
    pub presence: Presence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Required,
    Optional,
}

impl Node {
    /// How many parts are looked at with a node.
    fn num_parts(&self) -> usize {
        match self {
            Node::Unknown | Node::Never(..) | Node::Leaf(_) => 0,
            Node::Select(options) => options.len(),
            Node::Array(items) => items.first.len(),
            Node::Object(members) => members.fields.len() + members.extra.len(),
        }
    }
}

impl Items {
    /// The same without what no value has: what follows such an item cannot be reached.
    pub(super) fn without(&self, ends: &[bool]) -> Items {
        let reached = self.first.iter().take_while(|node| ends[node.0]).count();
        let cut = reached < self.first.len();
        Items {
            first: self.first[..reached].to_vec(),
            rest: self.rest.filter(|node| !cut && ends[node.0]),
            ..self.clone()
        }
    }

    /// Whether an array can be this, once what no value has is left out.
    fn is_possible(&self, ends: &[bool]) -> bool {
        let reached = self.first.iter().take_while(|node| ends[node.0]).count();
        let goes_on = reached == self.first.len() && self.rest.is_some_and(|rest| ends[rest.0]);
        self.most.is_none_or(|most| self.least <= most) && (self.least <= reached || goes_on)
    }
}

impl Members {
    /// The same without what no value has.
    pub(super) fn without(&self, ends: &[bool]) -> Members {
        Members {
            fields: self.fields.iter().filter(|field| ends[field.node.0]).cloned().collect(),
            extra: self.extra.iter().filter(|(_, node)| ends[node.0]).cloned().collect(),
            ..self.clone()
        }
    }

    /// Whether an object can be this, once what no value has is left out.
    fn is_possible(&self, ends: &[bool]) -> bool {
        let required = || self.fields.iter().filter(|field| field.presence == Presence::Required);
        let fields = self.fields.iter().filter(|field| ends[field.node.0]).count();
        // Names without a field may come again and again, and are one member then.
        let others = usize::from(self.extra.iter().any(|(_, node)| ends[node.0]));
        required().all(|field| ends[field.node.0])
            && self.most.is_none_or(|most| required().count().max(self.least) <= most)
            && self.least <= fields + others
    }
}

/// Whether each node has a value at all: one without end is none.
///
/// # Errors
/// Too much work.
pub(super) fn nodes_that_end(nodes: &[Node], work: &Work) -> Result<Vec<bool>, CompileError> {
    let mut ends = vec![false; nodes.len()];
    loop {
        let mut changed = false;
        // A node's parts mostly come after it.
        for index in (0..nodes.len()).rev().filter(|&index| !matches!(nodes[index], Node::Unknown | Node::Never(..))) {
            work.spend(1 + nodes[index].num_parts() / 8)?;
            if !ends[index] && ends_by(&nodes[index], &ends) {
                ends[index] = true;
                changed = true;
            }
        }
        if !changed {
            return Ok(ends);
        }
    }
}

fn ends_by(node: &Node, ends: &[bool]) -> bool {
    match node {
        Node::Unknown | Node::Never(..) => false,
        Node::Leaf(_) => true,
        Node::Select(options) => options.iter().any(|option| ends[option.0]),
        Node::Array(items) => items.is_possible(ends),
        Node::Object(members) => members.is_possible(ends),
    }
}

/// The options of a node: itself, or those of a choice, with choices inside it opened.
pub(super) fn options(nodes: &[Node], node: NodeId) -> Vec<NodeId> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    let mut todo = vec![node];
    while let Some(next) = todo.pop().filter(|_| found.len() <= nodes.len()) {
        if !seen.insert(next) {
            continue;
        }
        match &nodes[next.0] {
            Node::Select(inner) => todo.extend(inner.iter().rev()),
            _ => found.push(next),
        }
    }
    found
}

/// Whether a regular expression matches nothing; `None` if that is too much work to see.
///
/// # Errors
/// Too much work in the schema as a whole.
pub(super) fn is_empty(pattern: &RegexAst, work: &Work) -> Result<Option<bool>, CompileError> {
    work.spend(LEAST_STEPS + size(pattern))?;
    let mut builder = RegexBuilder::new();
    let Ok(expression) = builder.mk(pattern) else { return Ok(None) };
    let made = builder.exprset().cost() as usize;
    work.spend(made)?;
    if builder.exprset().is_positive(expression) {
        return Ok(Some(false));
    }
    match builder.into_regex_limited(expression, EMPTINESS_FUEL) {
        Ok(mut regex) => {
            work.spend((regex.cost() as usize).saturating_sub(made))?;
            Ok(Some(regex.always_empty()))
        }
        Err(_) => {
            work.spend(EMPTINESS_FUEL as usize)?;
            Ok(None)
        }
    }
}
