//! KV blocks: which are owned, and which are free (Kwon et al., SOSP'23).

use crate::prefix::NodeId;
use crate::table::BlockTable;

/// The entry of a [`BlockTable`] whose block has gone home because no later token can see it.
pub const VACANT_BLOCK: u32 = u32::MAX;

/// Blocks of `block_size` token slots each, with reference counts and one list of those that nobody owns.
///
/// [`take`](Self::take) hands out the front of the free list. A released block whose content can be found again goes to
/// its end, so that the one released longest ago is taken first; a block of no such content goes to the front. So both
/// wait in one list, and "free" and "evictable" are one number.
///
/// Invariant: a block is in the free list exactly when it has no owner.
#[derive(Debug)]
pub struct BlockPool {
    /// One link per block, then the sentinel that closes the list to a ring, which spares every special case for its
    /// ends: `next` of the sentinel is the block to take first, `prev` the one released last.
    links: Vec<Link>,
    block_size: usize,
    num_free: usize,
    counts: BlockCounts,
    /// What was published of blocks that have been taken for something else since anybody asked.
    evicted: Vec<NodeId>,
}

/// What the blocks of a pool amount to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct BlockCounts {
    /// Blocks with more than one owner.
    pub shared: usize,
    /// Owners beyond the first, summed over the blocks.
    pub saved: usize,
    /// Blocks that are published.
    pub cached: usize,
    /// Filled slots in blocks with an owner.
    pub used: usize,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    owners: u32,
    prev: u32,
    next: u32,
    /// Slots, from the first on, that hold a computed token.
    filled: u32,
    /// Where the content can be found.
    published: Option<NodeId>,
}

impl BlockPool {
    /// A pool with all blocks free, handed out in order of their ids at first.
    ///
    /// # Panics
    /// If `block_size` is 0 or the ids would not fit below [`VACANT_BLOCK`].
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        assert!(block_size > 0, "block_size is 0, expected at least 1");
        assert!(num_blocks < VACANT_BLOCK as usize, "{num_blocks} blocks, expected fewer than {VACANT_BLOCK}");
        let ring = num_blocks as u32 + 1;
        let link =
            |id| Link { owners: 0, prev: (id + ring - 1) % ring, next: (id + 1) % ring, filled: 0, published: None };
        Self {
            links: (0..ring).map(link).collect(),
            block_size,
            num_free: num_blocks,
            counts: BlockCounts::default(),
            evicted: vec![],
        }
    }

    /// Blocks in the pool, free or not.
    pub fn num_blocks(&self) -> usize {
        self.links.len() - 1
    }

    /// Blocks without an owner.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Token slots in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Sequences that hold a block.
    pub fn owners(&self, id: u32) -> u32 {
        self.links[id as usize].owners
    }

    /// Gives the caller the block at the front of the free list, empty, or `None` if all have an owner.
    pub fn take(&mut self) -> Option<u32> {
        if self.num_free == 0 {
            return None;
        }
        let id = self.links[self.num_blocks()].next;
        let link = &mut self.links[id as usize];
        link.filled = 0;
        if let Some(node) = link.published.take() {
            self.evicted.push(node);
            self.counts.cached -= 1;
        }
        self.retain(id);
        Some(id)
    }

    /// Adds an owner to a block. A block without one leaves the free list, its content as it was.
    pub fn retain(&mut self, id: u32) {
        if self.links[id as usize].owners == 0 {
            self.unlink(id);
        }
        let link = &mut self.links[id as usize];
        link.owners += 1;
        match link.owners {
            1 => self.counts.used += link.filled as usize,
            owners => {
                self.counts.saved += 1;
                self.counts.shared += usize::from(owners == 2);
            }
        }
    }

    /// Takes an owner from a block. Without any left it goes to the free list.
    ///
    /// # Panics
    /// If the block has no owner.
    pub fn release(&mut self, id: u32) {
        let link = &mut self.links[id as usize];
        assert!(link.owners > 0, "block {id} was released more often than it was taken");
        link.owners -= 1;
        if link.owners > 0 {
            self.counts.saved -= 1;
            self.counts.shared -= usize::from(link.owners == 1);
            return;
        }
        self.counts.used -= link.filled as usize;
        let is_published = link.published.is_some();
        let sentinel = self.num_blocks() as u32;
        if is_published {
            let last = self.links[sentinel as usize].prev;
            self.link_between(last, id, sentinel);
        } else {
            let first = self.links[sentinel as usize].next;
            self.link_between(sentinel, id, first);
        }
    }

    /// Notes how many slots of a block that has an owner hold a computed token.
    pub(crate) fn fill(&mut self, id: u32, filled: usize) {
        let link = &mut self.links[id as usize];
        debug_assert!(link.owners > 0, "block {id} is filled and has no owner");
        self.counts.used = self.counts.used - link.filled as usize + filled;
        link.filled = filled as u32;
    }

    /// Slots of a block that hold a computed token.
    pub(crate) fn filled(&self, id: u32) -> u32 {
        self.links[id as usize].filled
    }

    /// Where the content of a block can be found.
    pub(crate) fn published(&self, id: u32) -> Option<NodeId> {
        self.links[id as usize].published
    }

    /// Notes where the content of a block can be found; it has not been published before.
    pub(crate) fn publish(&mut self, id: u32, node: NodeId) {
        let before = self.links[id as usize].published.replace(node);
        debug_assert_eq!(before, None, "block {id} is published twice");
        self.counts.cached += 1;
    }

    /// Forgets where any content could be found.
    pub(crate) fn unpublish_all(&mut self) {
        self.links.iter_mut().for_each(|link| link.published = None);
        self.counts.cached = 0;
    }

    /// What was published of blocks that have been taken since the last call.
    pub(crate) fn drain_evicted(&mut self) -> std::vec::Drain<'_, NodeId> {
        self.evicted.drain(..)
    }

    pub(crate) fn counts(&self) -> BlockCounts {
        self.counts
    }

    /// Verifies that `tables` are the pool's only owners and that the free list is whole. O(blocks), for tests.
    ///
    /// # Errors
    /// A sentence about the first contradiction found.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) -> Result<(), String> {
        let mut owners = vec![0; self.num_blocks()];
        for &id in tables.flat_map(BlockTable::held) {
            match owners.get_mut(id as usize) {
                Some(count) => *count += 1,
                None => return Err(format!("a table owns block {id} of {}", self.num_blocks())),
            }
        }
        for (id, (link, owners)) in self.links.iter().zip(&owners).enumerate() {
            if link.owners != *owners {
                return Err(format!("block {id} counts {} owners, but {owners} tables have it", link.owners));
            }
        }
        self.check_counts()?;
        self.check_free_list(owners.iter().filter(|&&owners| owners == 0).count())
    }

    fn check_counts(&self) -> Result<(), String> {
        let links = &self.links[..self.num_blocks()];
        let counted = BlockCounts {
            shared: links.iter().filter(|link| link.owners > 1).count(),
            saved: links.iter().map(|link| link.owners.saturating_sub(1) as usize).sum(),
            cached: links.iter().filter(|link| link.published.is_some()).count(),
            used: links.iter().filter(|link| link.owners > 0).map(|link| link.filled as usize).sum(),
        };
        if counted != self.counts {
            return Err(format!("the blocks amount to {counted:?}, but {:?} is kept", self.counts));
        }
        match links.iter().position(|link| {
            link.filled as usize > self.block_size
                || link.published.is_some() && link.filled as usize != self.block_size
        }) {
            Some(id) => Err(format!("block {id} has {} slots filled, or is published and not full", links[id].filled)),
            None => Ok(()),
        }
    }

    fn check_free_list(&self, num_unowned: usize) -> Result<(), String> {
        let sentinel = self.num_blocks() as u32;
        let (mut id, mut length) = (sentinel, 0);
        loop {
            let next = self.links[id as usize].next;
            if self.links[next as usize].prev != id {
                return Err(format!("the free list goes from {id} to {next} but not back"));
            }
            if next == sentinel {
                break;
            }
            if self.links[next as usize].owners > 0 || length == self.num_blocks() {
                return Err(format!("block {next} has an owner or is in the free list twice"));
            }
            (id, length) = (next, length + 1);
        }
        if length != self.num_free || length != num_unowned {
            return Err(format!("{length} blocks listed, {} counted, {num_unowned} unowned", self.num_free));
        }
        Ok(())
    }

    fn unlink(&mut self, id: u32) {
        let Link { prev, next, .. } = self.links[id as usize];
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.num_free -= 1;
    }

    fn link_between(&mut self, prev: u32, id: u32, next: u32) {
        self.links[prev as usize].next = id;
        self.links[next as usize].prev = id;
        let link = &mut self.links[id as usize];
        (link.prev, link.next) = (prev, next);
        self.num_free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [NodeId; 2] = [NodeId::new(0), NodeId::new(1)];

    #[test]
    fn an_empty_pool_gives_nothing() {
        let mut pool = BlockPool::new(1, 2);
        assert_eq!(pool.take(), Some(0));
        assert_eq!(pool.take(), None);
        assert_eq!(pool.num_free(), 0);
    }

    #[test]
    fn blocks_of_no_use_are_taken_first_then_the_one_released_longest_ago() {
        let mut pool = BlockPool::new(3, 2);
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken, [0, 1, 2]);
        for (id, node) in [(0, NODES[0]), (1, NODES[1])] {
            pool.fill(id, 2);
            pool.publish(id, node);
        }
        for id in [1, 2, 0] {
            pool.release(id);
        }
        assert_eq!((pool.take(), pool.drain_evicted().count()), (Some(2), 0));
        assert_eq!([pool.take(), pool.take()], [Some(1), Some(0)]);
        assert_eq!(pool.drain_evicted().collect::<Vec<_>>(), [NODES[1], NODES[0]]);
    }

    #[test]
    fn slots_of_a_shared_block_are_counted_once_and_only_while_it_has_an_owner() {
        let mut pool = BlockPool::new(1, 2);
        let id = pool.take().unwrap();
        pool.retain(id);
        pool.fill(id, 1);
        pool.fill(id, 2);
        assert_eq!(pool.counts(), BlockCounts { shared: 1, saved: 1, cached: 0, used: 2 });
        pool.publish(id, NODES[0]);
        pool.release(id);
        pool.release(id);
        assert_eq!(pool.counts(), BlockCounts { shared: 0, saved: 0, cached: 1, used: 0 });
        pool.retain(id);
        assert_eq!((pool.counts().used, pool.published(id)), (2, Some(NODES[0])));
    }

    #[test]
    fn a_shared_block_goes_home_with_its_last_owner() {
        let mut pool = BlockPool::new(1, 2);
        let id = pool.take().unwrap();
        pool.retain(id);
        pool.release(id);
        assert_eq!(pool.num_free(), 0);
        pool.release(id);
        assert_eq!(pool.num_free(), 1);
    }

    #[test]
    fn a_free_block_can_be_retained_from_the_middle_of_the_list() {
        let mut pool = BlockPool::new(3, 2);
        pool.retain(1);
        assert_eq!(pool.num_free(), 2);
        assert_eq!([pool.take(), pool.take(), pool.take()], [Some(0), Some(2), None]);
    }

    #[test]
    #[should_panic(expected = "released more often")]
    fn releasing_a_free_block_panics() {
        BlockPool::new(1, 2).release(0);
    }

    #[test]
    fn check_finds_a_block_that_no_table_has() {
        let mut pool = BlockPool::new(2, 2);
        pool.take();
        assert_eq!(pool.check([].into_iter()), Err("block 0 counts 1 owners, but 0 tables have it".to_owned()));
    }
}
