//! Stop strings: where an output's text ends, and what of it has to wait until that is known.
//!
//! The strings form one automaton (Aho and Corasick, CACM 18(6), 1975). Its state after any text is the longest end of
//! the text that begins a stop string; so one state says which string is complete and how much has to wait, and a byte
//! costs the same whatever came before, taken over the whole text.
//!
//! Invariant: what is found depends on the text alone, not on the pieces in which it comes. No character of a stop
//! string that is found is given out before it, and nothing waits but the longest end of the text that a stop string
//! may begin with.

use std::{collections::VecDeque, ops::Range};

/// What becomes of a stop string that is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopText {
    /// The text ends before it.
    Excluded,
    /// The text ends with it.
    Included,
}

/// Whether a stop string that a piece of text completes ends the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stops {
    /// It does.
    Count,
    /// It is text like any other.
    Pass,
}

/// The stop strings of a request, and the automaton that finds them.
#[derive(Debug)]
pub struct StopStrings {
    strings: Vec<String>,
    stop_text: StopText,
    /// By length of their text; the first has none.
    nodes: Vec<Node>,
}

/// A beginning of a stop string. There may be many, so numbers are small: the strings have fewer than 2^32 bytes.
#[derive(Debug)]
struct Node {
    /// The last byte of its text.
    byte: u8,
    /// The nodes that are one byte longer, sorted by that byte.
    longer: Range<u32>,
    /// The node of the longest proper end of its text that is a node too.
    shorter: u32,
    /// Bytes at the end of its text that may begin a stop string that is not complete yet.
    waiting: u32,
    /// The longest of the stop strings that its text ends with.
    complete: Option<u32>,
}

impl StopStrings {
    /// Any number of strings. An empty one is found nowhere.
    pub fn new(strings: Vec<String>, stop_text: StopText) -> StopStrings {
        let nodes = nodes(&strings);
        StopStrings { strings, stop_text, nodes }
    }

    /// Whether nothing can be found.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// The string of this index, as given to [`StopStrings::new`].
    pub fn string(&self, index: usize) -> &str {
        &self.strings[index]
    }
}

impl Node {
    fn new(byte: u8, shorter: u32) -> Node {
        Node { byte, longer: 0..0, shorter, waiting: 0, complete: None }
    }
}

/// The search in one text.
#[derive(Debug, Clone, Default)]
pub struct StopSearch {
    node: u32,
    /// What waits, behind what is given out already.
    text: String,
    given: usize,
}

impl StopSearch {
    /// Takes the next piece of the text in and appends to `text` what cannot belong to a stop string any more.
    ///
    /// Gives the index of the stop string that is complete first, the longest if several are at once; the text has
    /// ended with it.
    pub fn push(&mut self, stops: &StopStrings, piece: &str, count: Stops, text: &mut String) -> Option<usize> {
        if stops.is_empty() {
            text.push_str(piece);
            return None;
        }
        for (at, &byte) in piece.as_bytes().iter().enumerate() {
            self.node = after(&stops.nodes, self.node, byte);
            if let (Stops::Count, Some(found)) = (count, stops.nodes[self.node as usize].complete) {
                let found = found as usize;
                self.text.push_str(&piece[..=at]);
                let end = self.text.len();
                let end = if stops.stop_text == StopText::Included { end } else { end - stops.strings[found].len() };
                text.push_str(&self.text[self.given..end]);
                *self = StopSearch::default();
                return Some(found);
            }
        }
        self.text.push_str(piece);
        let end = self.text.len() - stops.nodes[self.node as usize].waiting as usize;
        text.push_str(&self.text[self.given..end]);
        self.given = end;
        // What waits is moved only when as much has been given out, so that no byte is moved more than a few times.
        if self.given > self.text.len() / 2 {
            self.text.drain(..self.given);
            self.given = 0;
        }
        None
    }

    /// The text ends without a stop string: appends what waits.
    pub fn finish(&mut self, text: &mut String) {
        text.push_str(&self.text[self.given..]);
        *self = StopSearch::default();
    }
}

/// The automaton of some strings, its nodes by length of their text.
fn nodes(strings: &[String]) -> Vec<Node> {
    let bytes = |index: usize| strings[index].as_bytes();
    let mut sorted: Vec<usize> = (0..strings.len()).filter(|&index| !strings[index].is_empty()).collect();
    sorted.sort_by_key(|&index| bytes(index));
    let mut nodes = vec![Node::new(0, 0)];
    // For each node: the strings that begin with its text, and the length of that.
    let mut queue = VecDeque::from([(sorted.as_slice(), 0)]);
    for node in 0.. {
        let Some((begun, len)) = queue.pop_front() else { break };
        let (own, longer) = begun.split_at(begun.partition_point(|&index| bytes(index).len() == len));
        let first = nodes.len() as u32;
        for group in longer.chunk_by(|&one, &other| bytes(one)[len] == bytes(other)[len]) {
            let byte = bytes(group[0])[len];
            let shorter = if node == 0 { 0 } else { after(&nodes, nodes[node].shorter, byte) };
            nodes.push(Node::new(byte, shorter));
            queue.push_back((group, len + 1));
        }
        // Its text is shorter, so it has been here before.
        let Node { waiting, complete, .. } = nodes[nodes[node].shorter as usize];
        let end = nodes.len() as u32;
        let own_node = &mut nodes[node];
        own_node.longer = first..end;
        own_node.waiting = if longer.is_empty() { waiting } else { len as u32 };
        own_node.complete = own.first().map(|&index| index as u32).or(complete);
    }
    nodes
}

/// The node of the longest end of `node`'s text with `byte` behind it.
fn after(nodes: &[Node], mut node: u32, byte: u8) -> u32 {
    loop {
        let Node { longer, shorter, .. } = &nodes[node as usize];
        let children = &nodes[longer.start as usize..longer.end as usize];
        if let Ok(index) = children.binary_search_by_key(&byte, |child| child.byte) {
            return longer.start + index as u32;
        }
        if node == 0 {
            return 0;
        }
        node = *shorter;
    }
}
