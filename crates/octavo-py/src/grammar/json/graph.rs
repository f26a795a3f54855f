//! From the places of a schema to nodes.

use std::collections::{HashMap, VecDeque};

use llguidance::derivre::RegexAst;
use serde_json::Value;

use super::{
    apart::{Comparison, spellings},
    document::{Document, Place},
    form::{Form, Part, choices, expanded},
    keywords::{Assertions, Types},
    literal,
    node::{Items, Leaf, Node, NodeId, is_empty},
    number::Numbers,
    text::{Texts, quoted},
};
use crate::grammar::{CompileError, work::Work};

/// Forms of one schema.
const MOST_NODES: usize = 20_000;

/// How far into objects the members of a `oneOf` are compared.
const ONE_OF_DEPTH: usize = 4;

/// Nodes in the making.
pub(super) struct Graph<'a> {
    pub(super) document: Document<'a>,
    pub(super) nodes: Vec<Node>,
    by_form: HashMap<Form, NodeId>,
    todo: VecDeque<(NodeId, Form)>,
    /// Choices of which only one may hold.
    alone: Vec<(Place, NodeId)>,
}

impl<'a> Graph<'a> {
    /// The graph of a schema; its first node is the whole.
    pub(super) fn of(schema: &'a Value, work: &'a Work) -> Result<Graph<'a>, CompileError> {
        let mut graph = Graph {
            document: Document::new(schema, work),
            nodes: Vec::new(),
            by_form: HashMap::new(),
            todo: VecDeque::new(),
            alone: Vec::new(),
        };
        let root = graph.document.root();
        graph.node(&[root])?;
        while let Some((id, form)) = graph.todo.pop_front() {
            graph.nodes[id.0] = graph.made(id, form)?;
        }
        graph.check_one_of()?;
        Ok(graph)
    }

    /// The node of what several places ask of one value.
    pub(super) fn node(&mut self, places: &[Place]) -> Result<NodeId, CompileError> {
        self.node_of(&places.iter().map(|&place| Part::Whole(place)).collect())
    }

    fn node_of(&mut self, form: &Form) -> Result<NodeId, CompileError> {
        let form = expanded(&mut self.document, form)?;
        self.document.work.spend(4 + form.len())?;
        if let Some(&known) = self.by_form.get(&form) {
            return Ok(known);
        }
        let id = self.add(Node::Unknown)?;
        self.by_form.insert(form.clone(), id);
        self.todo.push_back((id, form));
        Ok(id)
    }

    fn add(&mut self, node: Node) -> Result<NodeId, CompileError> {
        CompileError::check("forms of values in one schema", self.nodes.len() + 1, MOST_NODES)?;
        self.nodes.push(node);
        Ok(NodeId(self.nodes.len() - 1))
    }

    fn made(&mut self, id: NodeId, form: Form) -> Result<Node, CompileError> {
        if let Some((part, ways)) = choices(&mut self.document, &form)? {
            if let Part::OneOf(place) = part {
                self.alone.push((place, id));
            }
            return Ok(Node::Select(ways.iter().map(|way| self.node_of(way)).collect::<Result<_, _>>()?));
        }
        let places: Vec<Place> =
            form.iter().filter_map(|part| if let Part::Own(place) = part { Some(*place) } else { None }).collect();
        let mut asserted = Assertions::none();
        for &place in &places {
            asserted.add(&self.document, place)?;
        }
        let place = places.first().copied().unwrap_or_else(|| self.document.root());
        let options = if asserted.values.is_empty() {
            self.by_type(&places, place, &asserted)?
        } else {
            self.by_value(&places, place, &asserted)?
        };
        match options.len() {
            0 => Ok(Node::Never(place, "no value fits all that is said here")),
            1 => Ok(options.into_iter().next().unwrap_or(Node::Unknown)),
            _ => Ok(Node::Select(options.into_iter().map(|option| self.add(option)).collect::<Result<_, _>>()?)),
        }
    }

    fn by_type(
        &mut self,
        places: &[Place],
        place: Place,
        asserted: &Assertions<'a>,
    ) -> Result<Vec<Node>, CompileError> {
        let types = asserted.types;
        let mut options = Vec::new();
        if types.has(Types::NULL) {
            options.push(scalar(Types::NULL, &[Value::Null]));
        }
        if types.has(Types::BOOLEAN) {
            options.push(scalar(Types::BOOLEAN, &[Value::Bool(true), Value::Bool(false)]));
        }
        if types.has(Types::INTEGER) {
            let numbers = Numbers { whole: !types.has(Types::FRACTION), ..asserted.numbers.clone() };
            options.extend(self.number(place, None, &numbers)?);
        }
        if types.has(Types::STRING) {
            options.extend(self.text(place, None, &asserted.texts)?);
        }
        if types.has(Types::ARRAY) {
            options.push(self.array(places, asserted.items)?);
        }
        if types.has(Types::OBJECT) {
            options.push(self.object(places, asserted)?);
        }
        Ok(options)
    }

    /// One of the values that are listed; what else is said only takes some of them away.
    fn by_value(
        &mut self,
        places: &[Place],
        place: Place,
        asserted: &Assertions<'a>,
    ) -> Result<Vec<Node>, CompileError> {
        let Some(((listed_at, first), others)) = asserted.values.split_first() else { return Ok(Vec::new()) };
        let compared = others.iter().map(|(_, list)| list.len()).fold(1, usize::saturating_add);
        self.document.work.spend(first.len().saturating_mul(compared))?;
        let listed = first.iter().copied().filter(|&value| {
            asserted.types.has(Types::of(value)) && others.iter().all(|(_, list)| list.contains(&value))
        });
        let (mut options, mut numbers, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        for value in listed {
            match value {
                Value::Number(_) => numbers.push(value),
                Value::String(_) => texts.push(value),
                Value::Array(_) | Value::Object(_) if self.speaks_of_parts(places)? => {
                    let reason = "lists and objects as values, beside keywords on their parts, are not supported";
                    return Err(self.document.fault(*listed_at, reason));
                }
                other => options.push(known(other)),
            }
        }
        if !numbers.is_empty() {
            options.extend(self.number(place, Some(&numbers), &asserted.numbers)?);
        }
        if !texts.is_empty() {
            options.extend(self.text(place, Some(&texts), &asserted.texts)?);
        }
        Ok(options)
    }

    fn number(&self, place: Place, listed: Option<&[&Value]>, numbers: &Numbers) -> Result<Option<Node>, CompileError> {
        let limits = numbers.limits();
        let is_free = limits.is_empty();
        let texts = match listed {
            None => numbers.texts(),
            Some(listed) if is_free => written(listed),
            Some(listed) => RegexAst::And([vec![written(listed)], limits].concat()),
        };
        if !(is_free || self.exists(place, &texts)?) {
            return Ok(None);
        }
        let listed = listed.map(|listed| spellings(listed.iter().copied()));
        let spelled = match &listed {
            Some(listed) => RegexAst::Or(listed.iter().cloned().map(RegexAst::Literal).collect()),
            None => numbers.spelled(),
        };
        Ok(Some(Node::Leaf(Leaf { texts, types: Types::NUMBER, listed, spelled })))
    }

    fn text(&self, place: Place, listed: Option<&[&Value]>, texts: &Texts) -> Result<Option<Node>, CompileError> {
        if texts.max_length.is_some_and(|most| most < texts.min_length) {
            return Ok(None);
        }
        let is_free = texts.patterns.is_empty() && texts.formats.is_empty() && listed.is_none();
        let (unquoted, spelled) = match listed {
            Some(listed) => {
                let listed = listed.iter().filter_map(|value| value.as_str());
                let listed = RegexAst::Or(listed.map(|text| RegexAst::Literal(text.to_owned())).collect());
                (RegexAst::And(vec![listed.clone(), texts.texts()]), listed)
            }
            None => (texts.texts(), Texts { formats: Vec::new(), ..texts.clone() }.texts()),
        };
        if !(is_free || self.exists(place, &unquoted)?) {
            return Ok(None);
        }
        let listed = listed.map(|listed| spellings(listed.iter().copied()));
        let (texts, spelled) = (quoted(unquoted), quoted(spelled));
        Ok(Some(Node::Leaf(Leaf { texts, types: Types::STRING, listed, spelled })))
    }

    pub(super) fn exists(&self, place: Place, pattern: &RegexAst) -> Result<bool, CompileError> {
        match is_empty(pattern, self.document.work)? {
            Some(is_empty) => Ok(!is_empty),
            None => Err(self.document.fault(place, "too complex to see whether any value fits")),
        }
    }

    fn speaks_of_parts(&self, places: &[Place]) -> Result<bool, CompileError> {
        const PARTS: [&str; 11] = [
            "items",
            "prefixItems",
            "additionalItems",
            "minItems",
            "maxItems",
            "properties",
            "patternProperties",
            "additionalProperties",
            "required",
            "minProperties",
            "maxProperties",
        ];
        for &place in places {
            if self
                .document
                .keywords(place)?
                .is_some_and(|keywords| PARTS.iter().any(|part| keywords.contains_key(*part)))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn array(&mut self, places: &[Place], (least, most): (u64, Option<u64>)) -> Result<Node, CompileError> {
        let mut lists = Vec::new();
        for &place in places {
            let keywords = self.document.keywords(place)?;
            // Before 2020-12, a list of schemas was what `prefixItems` is now.
            let is_list = keywords.is_some_and(|keywords| keywords.get("items").is_some_and(Value::is_array));
            let (first, rest) = if is_list { ("items", "additionalItems") } else { ("prefixItems", "items") };
            let mut firsts = Vec::new();
            while let Some(item) = self.document.below(place, &[first, &firsts.len().to_string()]) {
                firsts.push(item);
            }
            lists.push((firsts, self.document.below(place, &[rest])));
        }
        let length = lists.iter().map(|(firsts, _)| firsts.len()).max().unwrap_or(0);
        let mut first = Vec::with_capacity(length);
        for index in 0..length {
            let asked: Vec<Place> =
                lists.iter().filter_map(|(firsts, rest)| firsts.get(index).copied().or(*rest)).collect();
            first.push(self.node(&asked)?);
        }
        let rests: Vec<Place> = lists.iter().filter_map(|(_, rest)| *rest).collect();
        // What a schema lists is all there is, unless it says more or asks for more.
        let is_open = length == 0 || !rests.is_empty() || least as usize > length;
        let rest = if is_open { Some(self.node(&rests)?) } else { None };
        Ok(Node::Array(Items { first, rest, least: least as usize, most: most.map(|most| most as usize) }))
    }

    fn check_one_of(&self) -> Result<(), CompileError> {
        let comparison = Comparison { nodes: &self.nodes, work: self.document.work };
        for &(place, id) in &self.alone {
            let Node::Select(ways) = &self.nodes[id.0] else { continue };
            if let Some((one, other)) = comparison.shared(ways, ONE_OF_DEPTH)? {
                let reason = format!("schemas {one} and {other} may both hold, expected ones that exclude each other");
                return Err(self.document.fault_in(place, "oneOf", reason));
            }
        }
        Ok(())
    }
}

/// Numbers as the schema writes them.
fn written(numbers: &[&Value]) -> RegexAst {
    RegexAst::Or(numbers.iter().map(|number| RegexAst::Literal(number.to_string())).collect())
}

/// Values without parts, of one type.
fn scalar(types: Types, values: &[Value]) -> Node {
    let texts = RegexAst::Or(values.iter().map(literal::texts).collect());
    Node::Leaf(Leaf { spelled: texts.clone(), texts, types, listed: Some(spellings(values)) })
}

/// A value that is known as a whole.
fn known(value: &Value) -> Node {
    let (texts, types) = (literal::texts(value), Types::of(value));
    Node::Leaf(Leaf { spelled: texts.clone(), texts, types, listed: Some(spellings([value])) })
}
