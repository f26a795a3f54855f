//! Members of objects: which names there may be, and what each names.

use std::collections::{HashMap, HashSet};

use llguidance::derivre::{Regex, RegexAst, RegexBuilder};
use serde_json::Value;

use super::{
    document::Place,
    graph::Graph,
    keywords::{Assertions, pattern},
    node::{Closing, Field, LEAST_STEPS, Members, Node, Presence},
    text::{any_string, quoted},
};
use crate::grammar::{CompileError, work::size};

/// Patterns of names that one object may have: every subset of them is a kind of name.
const MOST_PATTERNS: usize = 4;

/// How much work it may be to see whether a name matches a pattern.
const MATCH_FUEL: u64 = 50_000;

/// What one place says about members.
struct Said<'a> {
    place: Place,
    named: HashSet<&'a str>,
    order: Vec<&'a str>,
    patterns: Vec<&'a str>,
    others: Option<Place>,
}

impl<'a> Graph<'a> {
    pub(super) fn object(&mut self, places: &[Place], asserted: &Assertions<'a>) -> Result<Node, CompileError> {
        let said = places.iter().map(|&place| self.said(place)).collect::<Result<Vec<_>, _>>()?;
        let patterns = self.patterns(&said)?;
        let mut known: HashSet<&str> = HashSet::new();
        let all = said.iter().flat_map(|said| &said.order).chain(&asserted.required);
        let names: Vec<&str> = all.copied().filter(|&name| known.insert(name)).collect();
        let fields = self.fields(&said, &patterns, &names, asserted)?;
        let (least, most) = (asserted.members.0 as usize, asserted.members.1.map(|most| most as usize));
        let mut extra = Vec::new();
        let mut closing = Closing::Open;
        for kind in kinds(&patterns) {
            let lists = said.iter().any(|said| !said.order.is_empty() || !said.patterns.is_empty());
            let says_more = said.iter().any(|said| said.others.is_some());
            // What a schema lists is all there is, unless it says more or asks for more.
            if kind.is_empty() && lists && !says_more && least <= names.len() {
                continue;
            }
            self.document.work.spend(names.iter().map(|name| 4 + name.len()).sum())?;
            let spelled = spellings(&patterns, &kind, &names);
            if patterns.is_empty() || self.exists(places[0], &spelled)? {
                let asked = self.asked(&said, None, &kind)?;
                extra.push((spelled, self.node(&asked)?));
            }
        }
        if patterns.is_empty() && said.iter().any(|said| self.forbids_others(said)) {
            closing = Closing::Schema;
        }
        self.check_least(places, least, names.len(), extra.is_empty())?;
        Ok(Node::Object(Members { fields, extra, least, most, closing }))
    }

    fn fields(
        &mut self,
        said: &[Said<'a>],
        patterns: &[(&'a str, RegexAst)],
        names: &[&'a str],
        asserted: &Assertions<'a>,
    ) -> Result<Vec<Field>, CompileError> {
        let required: HashSet<&str> = asserted.required.iter().copied().collect();
        let mut matchers = self.matchers(patterns)?;
        let mut fields = Vec::with_capacity(names.len());
        for &name in names {
            let kind = self.matching(&mut matchers, name)?;
            let asked = self.asked(said, Some(name), &kind)?;
            let presence = if required.contains(name) { Presence::Required } else { Presence::Optional };
            fields.push(Field { name: name.to_owned(), node: self.node(&asked)?, presence });
        }
        Ok(fields)
    }

    fn forbids_others(&self, said: &Said<'a>) -> bool {
        said.others.is_some_and(|others| self.document.value(others) == &Value::Bool(false))
    }

    /// Names without a field may come again, and a reader of JSON sees one member then; so they count as one.
    fn check_least(&self, places: &[Place], least: usize, fields: usize, is_closed: bool) -> Result<(), CompileError> {
        if is_closed || least <= fields + 1 {
            return Ok(());
        }
        let says = |place: &&Place| {
            let keywords = self.document.keywords(**place).ok().flatten();
            let found = keywords.and_then(|keywords| keywords.get("minProperties")).and_then(Value::as_f64);
            found == Some(least as f64)
        };
        let place = places.iter().find(says).unwrap_or(&places[0]);
        let reason = format!(
            "found {least}, expected at most {} here: names that the schema does not list may repeat, and count as one",
            fields + 1
        );
        Err(self.document.fault_in(*place, "minProperties", reason))
    }

    fn said(&mut self, place: Place) -> Result<Said<'a>, CompileError> {
        let keywords = self.document.keywords(place)?;
        let names = |keyword: &str| -> Vec<&'a str> {
            let members = keywords.and_then(|keywords| keywords.get(keyword)).and_then(Value::as_object);
            members.into_iter().flat_map(|members| members.keys().map(String::as_str)).collect()
        };
        let order = names("properties");
        Ok(Said {
            place,
            named: order.iter().copied().collect(),
            order,
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
    fn asked(&mut self, said: &[Said<'a>], name: Option<&str>, kind: &[&str]) -> Result<Vec<Place>, CompileError> {
        let mut asked = Vec::new();
        self.document.work.spend(said.len())?;
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
        Ok(asked)
    }

    fn matchers(&self, patterns: &[(&'a str, RegexAst)]) -> Result<Vec<(&'a str, Regex)>, CompileError> {
        let mut matchers = Vec::with_capacity(patterns.len());
        for (pattern, parsed) in patterns {
            self.document.work.spend(LEAST_STEPS + size(parsed))?;
            let mut builder = RegexBuilder::new();
            let made = builder.mk(parsed).and_then(|made| builder.into_regex_limited(made, MATCH_FUEL));
            let regex = made.map_err(|error| CompileError::library(&error))?;
            self.document.work.spend(regex.cost() as usize)?;
            matchers.push((*pattern, regex));
        }
        Ok(matchers)
    }

    /// The patterns that a name matches.
    fn matching(&self, matchers: &mut [(&'a str, Regex)], name: &str) -> Result<Vec<&'a str>, CompileError> {
        let mut found = Vec::new();
        for (pattern, regex) in matchers {
            let mut state = regex.initial_state();
            for &byte in name.as_bytes() {
                let before = regex.cost();
                state = regex.transition(state, byte);
                self.document.work.spend(1 + (regex.cost() - before) as usize)?;
            }
            if regex.is_accepting(state) {
                found.push(*pattern);
            }
        }
        Ok(found)
    }
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
