//! JSON schemas.
//!
//! The way of a schema: `document` finds places in it, `form` says which of them hold together, `keywords` reads what
//! they say, `graph` makes nodes of that (with `object`, `number`, `text`, `literal` for the parts), `node` leaves out
//! what no value can be, `apart` sees which nodes exclude each other, and `emit` writes a grammar of the library.
//!
//! Invariant: every output follows the schema, as a validator of JSON Schema 2020-12 reads it. The reverse does not hold:
//! numbers have finitely many digits, spaces stand only after `:` and `,`, members come in the schema's order, and what a
//! schema lists is all there is unless it says more.

mod apart;
mod document;
mod emit;
mod form;
mod graph;
mod keywords;
mod literal;
mod node;
mod number;
mod object;
mod text;

use llguidance::api::{GrammarInit, ParserLimits};
use serde_json::Value;

use super::{CompileError, work::Work};
use graph::Graph;
use node::{Node, nodes_that_end};

/// The grammar of a schema's text.
///
/// # Errors
/// Text that is no JSON, a keyword that is not supported or says something that it cannot, and a schema that no value
/// fits.
pub(super) fn grammar(text: &str, limits: &ParserLimits) -> Result<GrammarInit, CompileError> {
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| CompileError::Source(format!("the schema is no JSON text: {error}")))?;
    let work = Work::default();
    let graph = Graph::of(&schema, &work)?;
    let ends = nodes_that_end(&graph.nodes, &work)?;
    if !ends.first().is_some_and(|&ends| ends) {
        return Err(fault(&graph));
    }
    emit::emitted(&graph.nodes, &ends, limits, &work)
}

/// Why the whole has no value.
fn fault(graph: &Graph<'_>) -> CompileError {
    let never = graph.nodes.iter().find_map(|node| match node {
        Node::Never(place, reason) => Some(graph.document.fault(*place, *reason)),
        _ => None,
    });
    never.unwrap_or_else(|| CompileError::at("", "no value fits the schema: it needs itself without end"))
}
