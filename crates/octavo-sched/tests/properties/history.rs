//! Names for the beginnings of sequences, so that two are the same exactly if their names are.

use std::collections::HashMap;

use octavo_sched::TokenId;

/// A salt, the age of the cache, and tokens from the first on. An age ends when the cache is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct History(u32);

/// All histories met so far, as a tree.
#[derive(Debug, Default)]
pub struct Histories {
    /// What each continues, and how many tokens it has.
    entries: Vec<(Option<History>, usize)>,
    roots: HashMap<(Vec<u8>, u32), History>,
    ages: HashMap<History, u32>,
    children: HashMap<(History, TokenId), History>,
}

impl Histories {
    /// The history of no tokens.
    pub fn root(&mut self, salt: &[u8], age: u32) -> History {
        let next = History(self.entries.len() as u32);
        let root = *self.roots.entry((salt.to_vec(), age)).or_insert(next);
        if root == next {
            self.entries.push((None, 0));
            self.ages.insert(root, age);
        }
        root
    }

    /// The history that continues another by one token.
    pub fn then(&mut self, history: History, token: TokenId) -> History {
        let next = History(self.entries.len() as u32);
        let child = *self.children.entry((history, token)).or_insert(next);
        if child == next {
            self.entries.push((Some(history), self.len(history) + 1));
        }
        child
    }

    /// The histories up to each of the tokens that follow a root.
    pub fn along(&mut self, root: History, tokens: &[TokenId]) -> Vec<History> {
        let mut history = root;
        let mut step = |&token| {
            history = self.then(history, token);
            history
        };
        tokens.iter().map(&mut step).collect()
    }

    /// What a history continues by one token.
    pub fn parent(&self, history: History) -> Option<History> {
        self.entries[history.0 as usize].0
    }

    /// Number of tokens.
    pub fn len(&self, history: History) -> usize {
        self.entries[history.0 as usize].1
    }

    /// A history and all that it continues, down to the root.
    pub fn back_from(&self, history: History) -> impl Iterator<Item = History> {
        std::iter::successors(Some(history), |&history| self.parent(history))
    }

    /// Whether one history is the other, or goes on from it.
    pub fn continues(&self, history: History, beginning: History) -> bool {
        let too_long = self.len(history).saturating_sub(self.len(beginning));
        self.back_from(history).nth(too_long) == Some(beginning)
    }

    /// The age of the cache in which a history began.
    pub fn age(&self, history: History) -> Option<u32> {
        self.ages.get(&self.root_of(history)).copied()
    }

    /// The history of no tokens that a history begins with.
    pub fn root_of(&self, history: History) -> History {
        self.back_from(history).last().unwrap_or(history)
    }
}
