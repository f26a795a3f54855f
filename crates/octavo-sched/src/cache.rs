//! The KV cache: the block pools of all layer groups, and the tree of what can be found in them again.

use crate::block::{BlockPool, VACANT_BLOCK};
use crate::config::{PrefixCaching, SchedulerConfig, most_blocks_in_window};
use crate::plan::BlockCopy;
use crate::prefix::{NodeId, PrefixTree};
use crate::request::TokenId;
use crate::stats::BlockState;
use crate::table::BlockTable;

/// Where keys and values are: for each layer group a pool of blocks (Kwon et al., SOSP'23), and over all of them one
/// tree of the token blocks that have been computed, in which a sequence finds how much of it is there already.
///
/// Invariant: what is published has been computed.
#[derive(Debug)]
pub(crate) struct KvCache {
    groups: Vec<Group>,
    tree: PrefixTree,
    caching: PrefixCaching,
    block_size: usize,
    max_chunk: usize,
}

#[derive(Debug)]
struct Group {
    pool: BlockPool,
    window: Option<usize>,
}

/// The blocks of one sequence. They must be released by hand.
#[derive(Debug, Default)]
pub(crate) struct SequenceBlocks {
    /// One for each layer group.
    tables: Vec<BlockTable>,
    /// Where the sequence stands in the tree; pinned.
    leaf: Option<NodeId>,
    /// How many of its blocks lead there.
    num_published: usize,
    /// What was computed before the cache was reset is not published after it.
    is_outdated: bool,
}

/// The beginning of a sequence, as far as it is in the cache.
#[derive(Debug)]
pub(crate) struct Found {
    /// The nodes of the blocks to adopt, after those that the sequence has.
    path: Vec<NodeId>,
    /// The position of the first token that differs from whatever the cache holds there.
    pub first_difference: Option<usize>,
}

/// How many blocks of a layer group come with what was found.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Adoption {
    /// Blocks that the sequence will hold.
    pub held: usize,
    /// Those of them that are free until then.
    pub unowned: usize,
}

/// How many blocks a sequence may come to hold: what it is now and where it is expected to end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prospect {
    /// Tokens that will have been stored.
    pub stored: usize,
    /// Known tokens that are not computed.
    pub pending: usize,
}

impl SequenceBlocks {
    pub(crate) fn tables(&self) -> &[BlockTable] {
        &self.tables
    }
}

impl KvCache {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        let group = |group: &crate::config::GroupConfig| Group {
            pool: BlockPool::new(group.num_blocks, config.block_size),
            window: group.window,
        };
        Self {
            groups: config.groups.iter().map(group).collect(),
            tree: PrefixTree::new(config.groups.len(), config.prefix_cache),
            caching: config.prefix_cache,
            block_size: config.block_size,
            max_chunk: config.max_num_batched_tokens,
        }
    }

    /// What a sequence has before anything of it is computed.
    pub(crate) fn no_blocks(&self) -> SequenceBlocks {
        SequenceBlocks {
            tables: std::iter::repeat_with(BlockTable::new).take(self.groups.len()).collect(),
            ..Default::default()
        }
    }

    /// The blocks that hold what follows the computed part of a sequence, as far as its first `limit` tokens go.
    ///
    /// All layer groups must have them: one with a window only those that the next token will see.
    pub(crate) fn find(&self, blocks: &SequenceBlocks, salt: &[u8], tokens: &[TokenId], limit: usize) -> Found {
        let mut found = Found { path: vec![], first_difference: None };
        let root = blocks.leaf.or_else(|| self.tree.root(salt));
        if self.caching == PrefixCaching::Off || blocks.is_outdated {
            return found;
        }
        let start = blocks.num_published;
        let Some(mut node) = root else { return found };
        let mut in_a_row: Vec<usize> = blocks.tables.iter().map(BlockTable::num_held).collect();
        let mut usable = 0;
        for block in tokens[start * self.block_size..limit].chunks_exact(self.block_size) {
            let Some(child) = self.tree.child(node, block) else { break };
            if !self.extends(child, &mut in_a_row) {
                found.path.truncate(usable);
                return found;
            }
            node = child;
            found.path.push(child);
            if self.sees_enough(start + found.path.len(), &in_a_row) {
                usable = found.path.len();
            }
        }
        let position = (start + found.path.len()) * self.block_size;
        let rest = &tokens[position..tokens.len().min(position + self.block_size)];
        let common = self.tree.common_len(node, rest);
        found.first_difference = common.filter(|&common| common < rest.len()).map(|common| position + common);
        found.path.truncate(usable);
        found
    }

    /// Counts a node into the blocks that each group has in a row; `false` if one without a window lacks it.
    fn extends(&self, node: NodeId, in_a_row: &mut [usize]) -> bool {
        self.groups.iter().enumerate().zip(in_a_row).all(|((index, group), count)| {
            let has_block = self.tree.block(node, index) != VACANT_BLOCK;
            *count = if has_block { *count + 1 } else { 0 };
            has_block || group.window.is_some()
        })
    }

    fn sees_enough(&self, num_blocks: usize, in_a_row: &[usize]) -> bool {
        let visible = |group: &Group| num_blocks - self.num_hidden(group, num_blocks * self.block_size);
        self.groups.iter().zip(in_a_row).all(|(group, &count)| group.window.is_none() || count >= visible(group))
    }

    /// Blocks at the front that no token from `position` on can see.
    fn num_hidden(&self, group: &Group, position: usize) -> usize {
        group.window.map_or(0, |window| (position + 1).saturating_sub(window) / self.block_size)
    }

    /// What adopting the blocks found would mean for a layer group, to a sequence without blocks.
    pub(crate) fn adoption(&self, index: usize, found: &Found) -> Adoption {
        let group = &self.groups[index];
        let visible = &found.path[self.num_hidden(group, found.path.len() * self.block_size)..];
        let is_unowned = |node: &&NodeId| group.pool.owners(self.tree.block(**node, index)) == 0;
        Adoption { held: visible.len(), unowned: visible.iter().filter(is_unowned).count() }
    }

    /// Gives a sequence the blocks found, and so many more computed tokens.
    pub(crate) fn adopt(&mut self, blocks: &mut SequenceBlocks, found: &Found) -> usize {
        let Some(&leaf) = found.path.last() else { return 0 };
        let start = blocks.num_published;
        let end = start + found.path.len();
        for (index, table) in blocks.tables.iter_mut().enumerate() {
            let num_hidden = self.num_hidden(&self.groups[index], end * self.block_size);
            let pool = &mut self.groups[index].pool;
            table.release_before(pool, num_hidden * self.block_size);
            for (place, &node) in (start..).zip(&found.path) {
                if place < num_hidden {
                    table.adopt_vacancy();
                } else {
                    table.adopt(pool, self.tree.block(node, index));
                }
            }
        }
        self.step_to(blocks, leaf);
        blocks.num_published = end;
        found.path.len() * self.block_size
    }

    /// Makes room for writing the positions from `start` to before `end`, in all groups or in none: `false`, and no
    /// change, if one has too few free blocks. A shared block that is written to is replaced by a copy.
    #[must_use]
    pub(crate) fn reserve(
        &mut self,
        blocks: &mut SequenceBlocks,
        start: usize,
        end: usize,
        copies: &mut Vec<BlockCopy>,
    ) -> bool {
        let needed = |(group, table): (&Group, &BlockTable)| {
            let missing = end.div_ceil(self.block_size).saturating_sub(table.blocks().len());
            missing + usize::from(table.is_shared(&group.pool, start)) <= group.pool.num_free()
        };
        if !self.groups.iter().zip(&blocks.tables).all(needed) {
            return false;
        }
        for (index, (group, table)) in self.groups.iter_mut().zip(&mut blocks.tables).enumerate() {
            if table.is_shared(&group.pool, start)
                && let Some((from, to)) = table.unshare(&mut group.pool, start)
            {
                copies.push(BlockCopy { group: index, from, to });
            }
            let reserved = table.reserve(&mut group.pool, end);
            debug_assert!(reserved, "there were enough free blocks");
            for node in group.pool.drain_evicted() {
                self.tree.forget_block(node, index);
            }
        }
        true
    }

    /// Notes that positions are computed: publishes blocks that became full and sends home those that a window hides.
    pub(crate) fn computed(
        &mut self,
        blocks: &mut SequenceBlocks,
        span: std::ops::Range<usize>,
        salt: &[u8],
        tokens: &[TokenId],
    ) {
        let end = span.end;
        for (group, table) in self.groups.iter_mut().zip(&blocks.tables) {
            table.fill(&mut group.pool, span.start, end);
        }
        while self.caching != PrefixCaching::Off
            && !blocks.is_outdated
            && (blocks.num_published + 1) * self.block_size <= end
        {
            self.publish_next(blocks, salt, tokens);
        }
        for (group, table) in self.groups.iter_mut().zip(&mut blocks.tables) {
            if let Some(window) = group.window {
                table.release_before(&mut group.pool, (end + 1).saturating_sub(window));
            }
        }
    }

    fn publish_next(&mut self, blocks: &mut SequenceBlocks, salt: &[u8], tokens: &[TokenId]) {
        let place = blocks.num_published;
        let parent = match blocks.leaf {
            Some(leaf) => leaf,
            None => self.tree.root_or_new(salt),
        };
        let node = self.tree.child_or_new(parent, &tokens[place * self.block_size..(place + 1) * self.block_size]);
        self.step_to(blocks, node);
        blocks.num_published += 1;
        for (index, (group, table)) in self.groups.iter_mut().zip(&mut blocks.tables).enumerate() {
            let (block, published) = (table.blocks()[place], self.tree.block(node, index));
            if block == VACANT_BLOCK || block == published {
                continue;
            }
            if published == VACANT_BLOCK {
                group.pool.publish(block, node);
                self.tree.set_block(node, index, block);
            } else {
                // Another sequence has computed the same at the same time: one of the two blocks is enough.
                table.merge(&mut group.pool, place, published);
            }
        }
    }

    fn step_to(&mut self, blocks: &mut SequenceBlocks, node: NodeId) {
        self.tree.pin(node);
        if let Some(before) = blocks.leaf.replace(node) {
            self.tree.unpin(before);
        }
    }

    /// The same blocks for another sequence that begins with the same `num_tokens` tokens, which are computed.
    pub(crate) fn fork(&mut self, blocks: &SequenceBlocks, num_tokens: usize) -> SequenceBlocks {
        let fork = |(group, table): (&mut Group, &BlockTable)| table.fork(&mut group.pool, num_tokens);
        let tables = self.groups.iter_mut().zip(&blocks.tables).map(fork).collect();
        blocks.leaf.iter().for_each(|&leaf| self.tree.pin(leaf));
        debug_assert!(blocks.num_published <= num_tokens / self.block_size, "what is published is computed");
        SequenceBlocks { tables, ..*blocks }
    }

    /// Takes all blocks of a sequence back.
    pub(crate) fn release(&mut self, blocks: &mut SequenceBlocks) {
        for (group, table) in self.groups.iter_mut().zip(&mut blocks.tables) {
            table.release(&mut group.pool);
        }
        if let Some(leaf) = blocks.leaf.take() {
            self.tree.unpin(leaf);
        }
        (blocks.num_published, blocks.is_outdated) = (0, false);
    }

    /// Forgets what could be found; gives the number of blocks whose content that was. Sequences keep their blocks.
    pub(crate) fn reset<'a>(&mut self, sequences: impl Iterator<Item = &'a mut SequenceBlocks>) -> usize {
        let cached = self.sum(|pool| pool.counts().cached);
        self.tree.clear();
        self.groups.iter_mut().for_each(|group| group.pool.unpublish_all());
        for blocks in sequences {
            blocks.leaf = None;
            blocks.num_published = 0;
            blocks.is_outdated = blocks.tables.iter().any(|table| !table.blocks().is_empty());
        }
        cached
    }

    /// For one layer group, the blocks that a sequence holds once it has got to where it is expected to.
    pub(crate) fn blocks_at(&self, index: usize, prospect: Prospect) -> usize {
        let group = &self.groups[index];
        let all = prospect.stored.div_ceil(self.block_size);
        group.window.map_or(all, |window| {
            let chunk = prospect.pending.clamp(1, self.max_chunk);
            all.min(most_blocks_in_window(window, chunk, self.block_size))
        })
    }

    /// Whether the block to write to next at `position` is shared, so that a copy will be needed.
    pub(crate) fn is_shared(&self, index: usize, blocks: &SequenceBlocks, position: usize) -> bool {
        blocks.tables[index].is_shared(&self.groups[index].pool, position)
    }

    /// Whether a block of these sequences has no more owners than there are of them: then taking their blocks away is
    /// likely to set one free.
    pub(crate) fn would_free(&self, sequences: &[&SequenceBlocks]) -> bool {
        let sole = |pool: &BlockPool, id: u32| id != VACANT_BLOCK && pool.owners(id) as usize <= sequences.len();
        let in_group = |index: usize, group: &Group| {
            let mut blocks = sequences.iter().flat_map(|blocks| blocks.tables[index].blocks().iter().rev());
            blocks.any(|&id| sole(&group.pool, id))
        };
        self.groups.iter().enumerate().any(|(index, group)| in_group(index, group))
    }

    pub(crate) fn num_groups(&self) -> usize {
        self.groups.len()
    }

    pub(crate) fn num_free(&self, index: usize) -> usize {
        self.groups[index].pool.num_free()
    }

    /// A count of blocks or slots, summed over the layer groups.
    pub(crate) fn sum(&self, count: impl Fn(&BlockPool) -> usize) -> usize {
        self.groups.iter().map(|group| count(&group.pool)).sum()
    }

    /// Every block, group by group.
    pub(crate) fn block_map(&self) -> Vec<Vec<BlockState>> {
        let state = |pool: &BlockPool, id: u32| {
            let (owners, cached) = (pool.owners(id), pool.published(id).is_some());
            let filled = if owners > 0 || cached { pool.filled(id) } else { 0 };
            BlockState { owners, filled, cached }
        };
        let states = |group: &Group| (0..group.pool.num_blocks() as u32).map(|id| state(&group.pool, id)).collect();
        self.groups.iter().map(states).collect()
    }

    /// Verifies every invariant; `sequences` are all that hold blocks. For tests.
    pub(crate) fn audit<'a>(&self, sequences: impl Iterator<Item = &'a SequenceBlocks> + Clone) -> Result<(), String> {
        for (index, group) in self.groups.iter().enumerate() {
            let tables = sequences.clone().map(|blocks| &blocks.tables[index]);
            group.pool.check(tables).map_err(|error| format!("group {index}: {error}"))?;
            let lost = (0..group.pool.num_blocks() as u32).find(|&id| {
                let node = group.pool.published(id);
                node.is_some_and(|node| self.tree.block(node, index) != id)
            });
            if let Some(id) = lost {
                return Err(format!("group {index}: block {id} is published at a node that has another"));
            }
        }
        let pins = sequences.filter(|blocks| blocks.leaf.is_some()).count();
        self.tree.check(pins, self.sum(|pool| pool.counts().cached))
    }
}
