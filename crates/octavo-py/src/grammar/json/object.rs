//! Members of objects: which names there may be, and what each names.

use std::collections::HashMap;

use llguidance::derivre::{RegexAst, RegexBuilder};
use serde_json::Value;

use super::{
    document::Place,
    graph::Graph,
    keywords::{Assertions, pattern},
    node::{Field, Members, Node, Presence},
    text::{any_string, quoted},
};
use crate::grammar::CompileError;

/// Patterns of names that one object may have: every subset of them is a kind of name.
const MOST_PATTERNS: usize = 4;

/// How much work it may be to see whether a name matches a pattern.
const MATCH_FUEL: u64 = 50_000;

/// What one place says about members.
struct Said<'a> {
    place: Place,
    named: Vec<&'a str>,
    patterns: Vec<&'a str>,
    others: Option<Place>,
}

impl<'a> Graph<'a> {
    pub(super) fn object(&mut self, places: &[Place], asserted: &Assertions<'a>) -> Result<Node, CompileError> {
        let said = places.iter().map(|&place| self.said(place)).collect::<Result<Vec<_>, _>>()?;
        let patterns = self.patterns(&said)?;
        let mut names: Vec<&str> = Vec::new();
        for &name in said.iter().flat_map(|said| &said.named).chain(&asserted.required) {
            // Few names are searched, many are compared once.
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let mut fields = Vec::with_capacity(names.len());
        for name in &names {
            let kind = matching(&patterns, name).map_err(|reason| self.document.fault(places[0], reason))?;
            let asked = self.asked(&said, Some(name), &kind);
            let presence = if asserted.required.contains(name) { Presence::Required } else { Presence::Optional };
            fields.push(Field { name: (*name).to_owned(), node: self.node(&asked)?, presence });
        }
        let (least, most) = (asserted.members.0 as usize, asserted.members.1.map(|most| most as usize));
        let mut extra = Vec::new();
        for kind in kinds(&patterns) {
            let lists = said.iter().any(|said| !said.named.is_empty() || !said.patterns.is_empty());
            let says_more = said.iter().any(|said| said.others.is_some());
            // What a schema lists is all there is, unless it says more or asks for more.
            if kind.is_empty() && lists && !says_more && least <= names.len() {
                continue;
            }
            let spelled = spellings(&patterns, &kind, &names);
            if patterns.is_empty() || self.exists(places[0], &spelled)? {
                let asked = self.asked(&said, None, &kind);
                extra.push((spelled, self.node(&asked)?));
            }
        }
        Ok(Node::Object(Members { fields, extra, least, most }))
    }

    fn said(&mut self, place: Place) -> Result<Said<'a>, CompileError> {
        let keywords = self.document.keywords(place)?;
        let names = |keyword: &str| -> Vec<&'a str> {
            let members = keywords.and_then(|keywords| keywords.get(keyword)).and_then(Value::as_object);
            members.into_iter().flat_map(|members| members.keys().map(String::as_str)).collect()
        };
        Ok(Said {
            place,
            named: names("properties"),
            patterns: names("patternProperties"),
            others: self.document.below(place, &["additionalProperties"]),
        })
    }

    /// All patterns of names, each once.
    fn patterns(&self, said: &[Said<'a>]) -> Result<Vec<(&'a str, RegexAst)>, CompileError> {
        let mut found: HashMap<&str, RegexAst> = HashMap::new();
        let mut order = Vec::new();
        for (said, &name) in said.iter().flat_map(|said| said.patterns.iter().map(move |name| (said, name))) {
            if !found.contains_key(name) {
                let parsed = pattern(&Value::String(name.to_owned()));
                let parsed =
                    parsed.map_err(|reason| self.document.fault_in(said.place, "patternProperties", reason))?;
                found.insert(name, parsed.clone());
                order.push((name, parsed));
            }
            if order.len() > MOST_PATTERNS {
                let reason =
                    format!("found more than {MOST_PATTERNS} patterns, expected at most that many for one object");
                return Err(self.document.fault_in(said.place, "patternProperties", reason));
            }
        }
        Ok(order)
    }

    /// The places that speak of a member: of its name, or of a name that matches just the patterns of `kind`.
    fn asked(&mut self, said: &[Said<'a>], name: Option<&str>, kind: &[&str]) -> Vec<Place> {
        let mut asked = Vec::new();
        for said in said {
            let named = name.filter(|name| said.named.contains(name));
            let mut here: Vec<Place> = Vec::new();
            here.extend(named.and_then(|name| self.document.below(said.place, &["properties", name])));
            for pattern in said.patterns.iter().filter(|pattern| kind.contains(pattern)) {
                here.extend(self.document.below(said.place, &["patternProperties", pattern]));
            }
            if here.is_empty() {
                here.extend(said.others);
            }
            asked.extend(here);
        }
        asked
    }
}

/// The patterns that a name matches.
fn matching<'a>(patterns: &[(&'a str, RegexAst)], name: &str) -> Result<Vec<&'a str>, String> {
    let mut found = Vec::new();
    for (pattern, parsed) in patterns {
        let mut builder = RegexBuilder::new();
        let expression = builder.mk(parsed).map_err(|error| error.to_string())?;
        let compiled = builder.to_regex_limited(expression, MATCH_FUEL).map_err(|error| error.to_string())?;
        let mut compiled = compiled;
        if compiled.is_match(name) {
            found.push(*pattern);
        }
    }
    Ok(found)
}

/// All subsets of the patterns, the empty one last.
fn kinds<'a>(patterns: &[(&'a str, RegexAst)]) -> Vec<Vec<&'a str>> {
    let subset = |bits: usize| {
        let chosen = patterns.iter().enumerate().filter(move |(index, _)| bits >> index & 1 == 1);
        chosen.map(|(_, (pattern, _))| *pattern).collect()
    };
    (0..1usize << patterns.len()).rev().map(subset).collect()
}

/// Names that match just the patterns of `kind` and are none of `names`, quoted.
fn spellings(patterns: &[(&str, RegexAst)], kind: &[&str], names: &[&str]) -> RegexAst {
    let (mut all, mut others) = (Vec::new(), Vec::new());
    for (pattern, parsed) in patterns {
        if kind.contains(pattern) { all.push(parsed.clone()) } else { others.push(quoted(parsed.clone())) }
    }
    others.extend(names.iter().map(|name| RegexAst::Literal(Value::String((*name).to_owned()).to_string())));
    let spelled = match all.len() {
        0 => any_string(),
        _ => quoted(RegexAst::And(all)),
    };
    if others.is_empty() {
        return spelled;
    }
    RegexAst::And(vec![spelled, RegexAst::Not(Box::new(RegexAst::Or(others)))])
}
