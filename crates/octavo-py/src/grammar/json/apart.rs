//! Which nodes exclude each other: no value follows both, however a validator reads the schema.
//!
//! Values are compared, not texts: 2 and 2.0 are one number, and the order of members says nothing.

use std::collections::BTreeSet;

use llguidance::derivre::RegexAst;
use serde_json::Value;

use super::{
    keywords::Types,
    node::{Closing, Leaf, Members, Node, NodeId, Presence, is_empty, options},
};
use crate::grammar::{CompileError, work::Work};

/// Nodes to compare, and the work that it takes.
pub(super) struct Comparison<'a> {
    pub nodes: &'a [Node],
    pub work: &'a Work,
}

impl Comparison<'_> {
    /// The first two of several nodes that may share a value, as far as can be seen `depth` members deep.
    ///
    /// # Errors
    /// Too much work.
    pub(super) fn shared(&self, nodes: &[NodeId], depth: usize) -> Result<Option<(usize, usize)>, CompileError> {
        let opened = nodes.iter().map(|&node| self.opened(node)).collect::<Result<Vec<_>, _>>()?;
        for (index, one) in opened.iter().enumerate() {
            for (before, other) in opened[..index].iter().enumerate() {
                if nodes[index] == nodes[before] || !self.all_apart(one, other, depth)? {
                    return Ok(Some((before, index)));
                }
            }
        }
        Ok(None)
    }

    fn opened(&self, node: NodeId) -> Result<Vec<NodeId>, CompileError> {
        let found = options(self.nodes, node);
        self.work.spend(2 + found.len())?;
        Ok(found)
    }

    fn all_apart(&self, ones: &[NodeId], others: &[NodeId], depth: usize) -> Result<bool, CompileError> {
        for one in ones {
            for other in others {
                if !self.are_apart(&self.nodes[one.0], &self.nodes[other.0], depth)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn are_apart(&self, one: &Node, other: &Node, depth: usize) -> Result<bool, CompileError> {
        self.work.spend(2)?;
        match (one, other) {
            (Node::Never(..), _) | (_, Node::Never(..)) => Ok(true),
            (Node::Leaf(one), Node::Leaf(other)) => self.leaves_apart(one, other),
            (Node::Object(one), Node::Object(other)) => {
                Ok(depth > 0 && (self.names_apart(one, other, depth)? || self.names_apart(other, one, depth)?))
            }
            (Node::Array(_), Node::Array(_)) => Ok(false),
            // A list or an object that is known as a whole may have the other's form.
            (Node::Leaf(known), Node::Array(_)) | (Node::Array(_), Node::Leaf(known)) => {
                Ok(!known.types.has(Types::ARRAY))
            }
            (Node::Leaf(known), Node::Object(_)) | (Node::Object(_), Node::Leaf(known)) => {
                Ok(!known.types.has(Types::OBJECT))
            }
            (Node::Object(_), Node::Array(_)) | (Node::Array(_), Node::Object(_)) => Ok(true),
            (Node::Select(_) | Node::Unknown, _) | (_, Node::Select(_) | Node::Unknown) => Ok(false),
        }
    }

    fn leaves_apart(&self, one: &Leaf, other: &Leaf) -> Result<bool, CompileError> {
        if !one.types.has(other.types) {
            return Ok(true);
        }
        if let (Some(one), Some(other)) = (&one.listed, &other.listed) {
            self.work.spend(one.len().min(other.len()) * 2)?;
            let (few, many) = if one.len() < other.len() { (one, other) } else { (other, one) };
            return Ok(few.iter().all(|value| !many.contains(value)));
        }
        let both = RegexAst::And(vec![one.spelled.clone(), other.spelled.clone()]);
        Ok(is_empty(&both, self.work)?.unwrap_or(false))
    }

    /// Whether a member that `one` must have keeps the two apart.
    fn names_apart(&self, one: &Members, other: &Members, depth: usize) -> Result<bool, CompileError> {
        for field in one.fields.iter().filter(|field| field.presence == Presence::Required) {
            self.work.spend(1 + other.fields.len() / 4)?;
            let apart = match other.fields.iter().find(|also| also.name == field.name) {
                Some(also) => self.all_apart(&self.opened(field.node)?, &self.opened(also.node)?, depth - 1)?,
                // A schema is open to names that it does not list, unless it says otherwise.
                None => other.closing == Closing::Schema,
            };
            if apart {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The spellings of listed values by which they are compared.
pub(super) fn spellings<'a>(values: impl IntoIterator<Item = &'a Value>) -> BTreeSet<String> {
    values.into_iter().map(spelling).collect()
}

fn spelling(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(spelling).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(members) => {
            let mut members: Vec<String> = members
                .iter()
                .map(|(name, value)| format!("{}:{}", Value::String(name.clone()), spelling(value)))
                .collect();
            members.sort();
            format!("{{{}}}", members.join(","))
        }
        // As doubles, which is how most validators read them; without an exponent, and zero without a sign.
        Value::Number(number) => match number.as_f64() {
            Some(0.0) => "0".to_owned(),
            Some(double) => format!("{double}"),
            None => number.to_string(),
        },
        other => other.to_string(),
    }
}
