//! A schema as a graph of nodes, each a form that a value may have.

use std::collections::BTreeSet;

use llguidance::derivre::{RegexAst, RegexBuilder};

use super::document::Place;

/// How much work it may be to see whether a regular expression matches any text at all.
const EMPTINESS_FUEL: u64 = 50_000;

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
    Leaf(RegexAst),
    /// Any of several.
    Select(Vec<NodeId>),
    Array(Items),
    Object(Members),
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
    fn is_possible(&self) -> bool {
        self.most.is_none_or(|most| self.least <= most) && (self.least <= self.first.len() || self.rest.is_some())
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

    pub(super) fn num_required(&self) -> usize {
        self.fields.iter().filter(|field| field.presence == Presence::Required).count()
    }
}

/// Whether each node has a value at all: one without end is none.
pub(super) fn nodes_that_end(nodes: &[Node]) -> Vec<bool> {
    let mut ends = vec![false; nodes.len()];
    loop {
        let mut changed = false;
        // A node's parts mostly come after it.
        for index in (0..nodes.len()).rev().filter(|&index| !matches!(nodes[index], Node::Unknown | Node::Never(..))) {
            if !ends[index] && ends_by(&nodes[index], &ends) {
                ends[index] = true;
                changed = true;
            }
        }
        if !changed {
            return ends;
        }
    }
}

fn ends_by(node: &Node, ends: &[bool]) -> bool {
    match node {
        Node::Unknown | Node::Never(..) => false,
        Node::Leaf(_) => true,
        Node::Select(options) => options.iter().any(|option| ends[option.0]),
        Node::Array(items) => items.without(ends).is_possible(),
        Node::Object(members) => {
            let left = members.without(ends);
            let (required, fields) = (members.num_required(), left.fields.len());
            left.num_required() == required
                && members.most.is_none_or(|most| required.max(members.least) <= most)
                && (members.least <= fields || !left.extra.is_empty())
        }
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

/// Whether no value has both forms, as far as that can be seen `depth` members deep.
pub(super) fn are_disjoint(nodes: &[Node], one: NodeId, other: NodeId, depth: usize) -> bool {
    let others = options(nodes, other);
    options(nodes, one).into_iter().all(|one| {
        others.iter().all(|&other| match (&nodes[one.0], &nodes[other.0]) {
            (Node::Never(..), _) | (_, Node::Never(..)) => true,
            (Node::Leaf(one), Node::Leaf(other)) => {
                is_empty(&RegexAst::And(vec![one.clone(), other.clone()])).unwrap_or(false)
            }
            (Node::Object(one), Node::Object(other)) => {
                depth > 0 && (names_apart(nodes, one, other, depth) || names_apart(nodes, other, one, depth))
            }
            (Node::Array(_), Node::Array(_)) => false,
            // A list or an object that is known as a whole may have the other's form.
            (Node::Leaf(known), other) | (other, Node::Leaf(known)) => {
                let first = if matches!(other, Node::Array(_)) { r"\[(?s:.*)" } else { r"\{(?s:.*)" };
                is_empty(&RegexAst::And(vec![known.clone(), RegexAst::Regex(first.to_owned())])).unwrap_or(false)
            }
            _ => true,
        })
    })
}

/// Whether a member that `one` must have keeps the two apart.
fn names_apart(nodes: &[Node], one: &Members, other: &Members, depth: usize) -> bool {
    one.fields.iter().filter(|field| field.presence == Presence::Required).any(|field| {
        match other.fields.iter().find(|also| also.name == field.name) {
            Some(also) => are_disjoint(nodes, field.node, also.node, depth - 1),
            None => other.extra.is_empty(),
        }
    })
}

/// Whether a regular expression matches nothing; `None` if that is too much work to see.
pub(super) fn is_empty(pattern: &RegexAst) -> Option<bool> {
    let mut builder = RegexBuilder::new();
    let expression = builder.mk(pattern).ok()?;
    if builder.exprset().is_positive(expression) {
        return Some(false);
    }
    Some(builder.to_regex_limited(expression, EMPTINESS_FUEL).ok()?.always_empty())
}
