//! Which token blocks have been computed, as a tree: a path from the root spells the beginning of some sequence.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::block::VACANT_BLOCK;
use crate::config::PrefixCaching;
use crate::request::TokenId;

/// Names a node; may be used again once the node is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeId(u32);

#[cfg(test)]
impl NodeId {
    pub(crate) const fn new(id: u32) -> Self {
        Self(id)
    }
}

/// Full blocks of tokens by what precedes them.
///
/// A node is found by a hash chained from the salt over its ancestors to its own tokens. A hash only leads to
/// candidates: a node is the one sought if its parent and its tokens are, so that no two hashes that happen to be
/// equal, or were made to be, can hand one request the keys and values of another.
///
/// Invariant: a node exists while it has a child, a block, or a sequence that continues it.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    nodes: Vec<Node>,
    vacancies: Vec<NodeId>,
    /// One node of each hash; the others follow by `Node::alike`.
    by_hash: HashMap<u64, NodeId>,
    roots: HashMap<Box<[u8]>, NodeId>,
    /// For each node and layer group the block that holds the keys and values, or [`VACANT_BLOCK`].
    blocks: Vec<u32>,
    num_groups: usize,
    hashing: PrefixCaching,
}

#[derive(Debug, Default)]
struct Node {
    /// `None` for a root.
    parent: Option<NodeId>,
    /// Of a root.
    salt: Box<[u8]>,
    hash: u64,
    /// Of any other node.
    tokens: Box<[TokenId]>,
    /// Another node of the same hash.
    alike: Option<NodeId>,
    /// Sorted by their tokens.
    children: Vec<NodeId>,
    /// Sequences that continue the node, and blocks that hold it.
    uses: u32,
}

impl PrefixTree {
    pub(crate) fn new(num_groups: usize, hashing: PrefixCaching) -> Self {
        let (nodes, vacancies, blocks) = (vec![], vec![], vec![]);
        Self { nodes, vacancies, by_hash: HashMap::new(), roots: HashMap::new(), blocks, num_groups, hashing }
    }

    /// The node under which everything of one salt is.
    pub(crate) fn root(&self, salt: &[u8]) -> Option<NodeId> {
        self.roots.get(salt).copied()
    }

    /// The same, made if there is none. Whoever asks is to [`pin`](Self::pin) it.
    pub(crate) fn root_or_new(&mut self, salt: &[u8]) -> NodeId {
        if let Some(root) = self.root(salt) {
            return root;
        }
        let hash = self.hash(0, salt);
        let root = self.insert(Node { salt: salt.into(), hash, ..Node::default() });
        self.roots.insert(salt.into(), root);
        root
    }

    /// The node that continues `parent` by one block of tokens.
    pub(crate) fn child(&self, parent: NodeId, tokens: &[TokenId]) -> Option<NodeId> {
        let is_sought = |id: &NodeId| {
            let node = self.node(*id);
            node.parent == Some(parent) && *node.tokens == *tokens
        };
        self.of_hash(self.hash(self.node(parent).hash, tokens)).find(is_sought)
    }

    /// The same, made if there is none. Whoever asks is to [`pin`](Self::pin) it.
    pub(crate) fn child_or_new(&mut self, parent: NodeId, tokens: &[TokenId]) -> NodeId {
        if let Some(child) = self.child(parent, tokens) {
            return child;
        }
        let hash = self.hash(self.node(parent).hash, tokens);
        let child = self.insert(Node { parent: Some(parent), hash, tokens: tokens.into(), ..Node::default() });
        self.nodes[child.0 as usize].alike = self.by_hash.insert(hash, child);
        let place = self.place_among_children(parent, tokens);
        self.nodes[parent.0 as usize].children.insert(place, child);
        child
    }

    /// The most tokens, counted from the first, that some continuation of `parent` has in common with `tokens`, which
    /// are one block's or fewer; `None` if there is no continuation.
    pub(crate) fn common_len(&self, parent: NodeId, tokens: &[TokenId]) -> Option<usize> {
        let children = &self.node(parent).children;
        let place = self.place_among_children(parent, tokens);
        let neighbours = &children[place.saturating_sub(1)..children.len().min(place + 1)];
        let common = |id: &NodeId| self.node(*id).tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        neighbours.iter().map(common).max()
    }

    /// The block of a layer group that holds the node, or [`VACANT_BLOCK`].
    pub(crate) fn block(&self, node: NodeId, group: usize) -> u32 {
        self.blocks[node.0 as usize * self.num_groups + group]
    }

    /// Lets a block hold the node; it must have none in that group.
    pub(crate) fn set_block(&mut self, node: NodeId, group: usize, block: u32) {
        debug_assert_eq!(self.block(node, group), VACANT_BLOCK, "a node has one block in a group");
        self.blocks[node.0 as usize * self.num_groups + group] = block;
        self.pin(node);
    }

    /// The block is going to hold something else.
    pub(crate) fn forget_block(&mut self, node: NodeId, group: usize) {
        self.blocks[node.0 as usize * self.num_groups + group] = VACANT_BLOCK;
        self.unpin(node);
    }

    /// Keeps a node for a sequence that continues it.
    pub(crate) fn pin(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].uses += 1;
    }

    /// Takes that back. A node without any use goes, and then perhaps its parent.
    pub(crate) fn unpin(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].uses -= 1;
        let mut next = Some(node);
        while let Some(id) = next {
            if self.node(id).uses > 0 || !self.node(id).children.is_empty() {
                break;
            }
            next = self.remove(id);
        }
    }

    /// Forgets every node. Ids handed out before mean nothing any more.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.blocks.clear();
        self.vacancies.clear();
        self.by_hash.clear();
        self.roots.clear();
    }

    /// Verifies that nodes are used as often as `num_pins` sequences and `num_blocks` blocks use them. For tests.
    pub(crate) fn check(&self, num_pins: usize, num_blocks: usize) -> Result<(), String> {
        let live = || self.nodes.iter().filter(|node| node.uses > 0 || !node.children.is_empty());
        let uses: usize = live().map(|node| node.uses as usize).sum();
        if uses != num_pins + num_blocks || live().count() != self.num_nodes() {
            let (live, nodes) = (live().count(), self.num_nodes());
            return Err(format!(
                "{uses} uses by {num_pins} sequences and {num_blocks} blocks; {live} of {nodes} nodes"
            ));
        }
        let indexed: usize = self.by_hash.keys().map(|&hash| self.of_hash(hash).count()).sum();
        let children: usize = live().map(|node| node.children.len()).sum();
        if indexed + self.roots.len() != self.num_nodes() || children != indexed {
            return Err(format!("{} nodes, {indexed} indexed, {children} children", self.num_nodes()));
        }
        Ok(())
    }

    /// Number of nodes, roots included.
    pub(crate) fn num_nodes(&self) -> usize {
        self.nodes.len() - self.vacancies.len()
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn insert(&mut self, node: Node) -> NodeId {
        let id = self.vacancies.pop().unwrap_or(NodeId(self.nodes.len() as u32));
        match self.nodes.get_mut(id.0 as usize) {
            Some(vacancy) => *vacancy = node,
            None => {
                self.nodes.push(node);
                self.blocks.resize(self.nodes.len() * self.num_groups, VACANT_BLOCK);
            }
        }
        id
    }

    /// Gives the parent of the node that is gone.
    fn remove(&mut self, id: NodeId) -> Option<NodeId> {
        if let Some(parent) = self.node(id).parent {
            let place = self.place_among_children(parent, &self.node(id).tokens);
            self.nodes[parent.0 as usize].children.remove(place);
        }
        let Node { parent, hash, alike, .. } = *self.node(id);
        match parent {
            Some(_) => self.unlink(id, hash, alike),
            None => _ = self.roots.remove(&self.nodes[id.0 as usize].salt),
        }
        self.nodes[id.0 as usize] = Node::default();
        self.vacancies.push(id);
        parent
    }

    fn of_hash(&self, hash: u64) -> impl Iterator<Item = NodeId> {
        std::iter::successors(self.by_hash.get(&hash).copied(), |id| self.node(*id).alike)
    }

    /// Lets what led to a node among those of its hash lead to the next.
    fn unlink(&mut self, id: NodeId, hash: u64, next: Option<NodeId>) {
        let before = self.of_hash(hash).find(|before| self.node(*before).alike == Some(id));
        if let Some(before) = before {
            self.nodes[before.0 as usize].alike = next;
        } else if let Some(next) = next {
            self.by_hash.insert(hash, next);
        } else {
            self.by_hash.remove(&hash);
        }
    }

    /// Where a child of these tokens stands, or would.
    fn place_among_children(&self, parent: NodeId, tokens: &[TokenId]) -> usize {
        self.node(parent).children.partition_point(|child| *self.node(*child).tokens < *tokens)
    }

    /// Not a promise: only an index, so its values may change with the toolchain.
    fn hash(&self, parent: u64, content: impl Hash) -> u64 {
        if self.hashing == PrefixCaching::Colliding {
            return 0;
        }
        let mut hasher = DefaultHasher::new();
        (parent, content).hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of one layer group with pinned nodes for [1, 2], [1, 2, 3, 4], [1, 2, 3, 9] and [7, 7].
    fn tree(hashing: PrefixCaching) -> (PrefixTree, [NodeId; 4]) {
        let mut tree = PrefixTree::new(1, hashing);
        let root = tree.root_or_new(b"");
        tree.pin(root);
        let mut grow = |parent, tokens: [u32; 2]| {
            let node = tree.child_or_new(parent, &tokens);
            tree.pin(node);
            node
        };
        let first = grow(root, [1, 2]);
        let nodes = [first, grow(first, [3, 4]), grow(first, [3, 9]), grow(root, [7, 7])];
        tree.unpin(root);
        (tree, nodes)
    }

    #[test]
    fn a_node_is_found_by_its_tokens_and_its_parent_alone() {
        for hashing in [PrefixCaching::On, PrefixCaching::Colliding] {
            let (tree, [first, second, third, other]) = tree(hashing);
            let root = tree.root(b"").unwrap();
            assert_eq!(tree.child(root, &[1, 2]), Some(first));
            assert_eq!(tree.child(first, &[3, 4]), Some(second));
            assert_eq!(tree.child(first, &[3, 9]), Some(third));
            assert_eq!([tree.child(root, &[3, 4]), tree.child(other, &[3, 4]), tree.child(first, &[1, 2])], [None; 3]);
        }
    }

    #[test]
    fn salts_share_nothing() {
        let (mut tree, _) = tree(PrefixCaching::Colliding);
        assert_eq!(tree.root(b"salt"), None);
        let salted = tree.root_or_new(b"salt");
        assert_eq!(tree.child(salted, &[1, 2]), None);
        assert_eq!(tree.common_len(salted, &[1, 2]), None);
    }

    #[test]
    fn a_node_stays_while_it_is_continued_and_goes_with_its_last_child() {
        let (mut tree, [first, second, third, other]) = tree(PrefixCaching::On);
        tree.unpin(first);
        tree.unpin(second);
        assert_eq!(tree.num_nodes(), 4, "the second is gone; the first is continued by the third");
        tree.unpin(third);
        assert_eq!(tree.num_nodes(), 2, "the root and [7, 7]");
        tree.unpin(other);
        assert_eq!((tree.num_nodes(), tree.root(b"")), (0, None));
    }

    #[test]
    fn a_block_keeps_its_node_until_it_is_forgotten() {
        let (mut tree, [.., other]) = tree(PrefixCaching::On);
        tree.set_block(other, 0, 5);
        tree.unpin(other);
        let root = tree.root(b"").unwrap();
        assert_eq!(tree.child(root, &[7, 7]).map(|node| tree.block(node, 0)), Some(5));
        tree.forget_block(other, 0);
        assert_eq!(tree.child(root, &[7, 7]), None);
    }

    #[test]
    fn the_longest_common_beginning_is_found_among_all_continuations() {
        let (tree, [first, second, ..]) = tree(PrefixCaching::On);
        let root = tree.root(b"").unwrap();
        let common = |parent, tokens: &[u32]| tree.common_len(parent, tokens);
        assert_eq!([common(root, &[1, 9]), common(root, &[7]), common(root, &[2, 2])], [Some(1), Some(1), Some(0)]);
        assert_eq!([common(first, &[3, 5]), common(first, &[3, 9]), common(first, &[])], [Some(1), Some(2), Some(0)]);
        assert_eq!(common(second, &[1]), None);
    }
}
