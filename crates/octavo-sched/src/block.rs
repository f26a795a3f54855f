//! KV blocks: which are owned, which are free, and the tables through which sequences own them (Kwon et al., SOSP'23).

/// The entry of a [`BlockTable`] whose block has gone home because no later token can see it.
pub const VACANT_BLOCK: u32 = u32::MAX;

/// Blocks of `block_size` token slots each, with reference counts and one list of those that nobody owns.
///
/// The free list is ordered by the time of release and [`take`](Self::take) hands out the block that was released
/// longest ago. So a block whose content could be used again waits in the same list as an empty one, and "free" and
/// "evictable" are one number.
///
/// Invariant: a block is in the free list exactly when it has no owner.
#[derive(Debug)]
pub struct BlockPool {
    /// One link per block, then the sentinel that closes the list to a ring, which spares every special case for its
    /// ends: `next` of the sentinel is the block to take first, `prev` the one released last.
    links: Vec<Link>,
    block_size: usize,
    num_free: usize,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    owners: u32,
    prev: u32,
    next: u32,
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
        let links = (0..ring).map(|id| Link { owners: 0, prev: (id + ring - 1) % ring, next: (id + 1) % ring });
        Self { links: links.collect(), block_size, num_free: num_blocks }
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

    /// Gives the caller the block that has been free for longest, or `None` if all have an owner.
    pub fn take(&mut self) -> Option<u32> {
        if self.num_free == 0 {
            return None;
        }
        let id = self.links[self.num_blocks()].next;
        self.retain(id);
        Some(id)
    }

    /// Adds an owner to a block. A block without one leaves the free list, its content as it was.
    pub fn retain(&mut self, id: u32) {
        if self.links[id as usize].owners == 0 {
            self.unlink(id);
        }
        self.links[id as usize].owners += 1;
    }

    /// Takes an owner from a block. Without any left it goes to the end of the free list.
    ///
    /// # Panics
    /// If the block has no owner.
    pub fn release(&mut self, id: u32) {
        let link = &mut self.links[id as usize];
        assert!(link.owners > 0, "block {id} was released more often than it was taken");
        link.owners -= 1;
        if link.owners == 0 {
            self.append(id);
        }
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
        self.check_free_list(owners.iter().filter(|&&owners| owners == 0).count())
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

    fn append(&mut self, id: u32) {
        let sentinel = self.num_blocks();
        let last = self.links[sentinel].prev;
        self.links[last as usize].next = id;
        self.links[sentinel].prev = id;
        let link = &mut self.links[id as usize];
        (link.prev, link.next) = (last, sentinel as u32);
        self.num_free += 1;
    }
}

/// The blocks of one sequence in one layer group: token `p` lives in `blocks()[p / block_size]`, slot `p % block_size`.
///
/// A table must be released to its pool by hand, since it cannot reach the pool when it is dropped. It is not `Clone`,
/// since every copy has to be counted.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<u32>,
    /// Entries at the front that have gone home.
    num_vacant: usize,
}

impl BlockTable {
    /// A table without blocks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Block ids in order of position; [`VACANT_BLOCK`] where the block has gone home.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Blocks that the table owns.
    pub fn num_held(&self) -> usize {
        self.blocks.len() - self.num_vacant
    }

    /// Entries at the front whose block has gone home.
    pub fn num_vacant(&self) -> usize {
        self.num_vacant
    }

    /// Grows to cover the positions below `num_tokens`, all or nothing: `false`, and no change, if the pool has too
    /// few free blocks.
    #[must_use]
    pub fn reserve(&mut self, pool: &mut BlockPool, num_tokens: usize) -> bool {
        let missing = num_tokens.div_ceil(pool.block_size()).saturating_sub(self.blocks.len());
        if missing > pool.num_free() {
            return false;
        }
        self.blocks.extend((0..missing).map_while(|_| pool.take()));
        true
    }

    /// Sends home the blocks that lie wholly before `position` and leaves [`VACANT_BLOCK`] in their place.
    pub fn release_before(&mut self, pool: &mut BlockPool, position: usize) {
        let end = (position / pool.block_size()).min(self.blocks.len());
        while self.num_vacant < end {
            pool.release(self.blocks[self.num_vacant]);
            self.blocks[self.num_vacant] = VACANT_BLOCK;
            self.num_vacant += 1;
        }
    }

    /// Sends every block home, the last one first: the front of a sequence is the likeliest to be wanted again, so it
    /// is to be taken last.
    pub fn release(&mut self, pool: &mut BlockPool) {
        for &id in self.held().iter().rev() {
            pool.release(id);
        }
        self.blocks.clear();
        self.num_vacant = 0;
    }

    fn held(&self) -> &[u32] {
        &self.blocks[self.num_vacant..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_pool_gives_nothing() {
        let mut pool = BlockPool::new(1, 2);
        assert_eq!(pool.take(), Some(0));
        assert_eq!(pool.take(), None);
        assert_eq!(pool.num_free(), 0);
    }

    #[test]
    fn the_block_released_longest_ago_is_taken_first() {
        let mut pool = BlockPool::new(3, 2);
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken, [0, 1, 2]);
        for id in [1, 2, 0] {
            pool.release(id);
        }
        assert_eq!([pool.take(), pool.take(), pool.take()], [Some(1), Some(2), Some(0)]);
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
    fn reserve_takes_only_what_is_missing() {
        let mut pool = BlockPool::new(4, 2);
        let mut table = BlockTable::new();
        assert!(table.reserve(&mut pool, 3));
        assert!(table.reserve(&mut pool, 4));
        assert!(table.reserve(&mut pool, 1));
        assert_eq!(table.blocks(), [0, 1]);
        assert!(table.reserve(&mut pool, 5));
        assert_eq!(table.blocks(), [0, 1, 2]);
    }

    #[test]
    fn reserve_is_all_or_nothing() {
        let mut pool = BlockPool::new(4, 2);
        let mut table = BlockTable::new();
        assert!(table.reserve(&mut pool, 2));
        assert!(!table.reserve(&mut pool, 9));
        assert_eq!((table.num_held(), pool.num_free()), (1, 3));
        assert_eq!(pool.check([&table].into_iter()), Ok(()));
    }

    #[test]
    fn only_blocks_wholly_before_a_position_leave_a_vacancy() {
        let mut pool = BlockPool::new(4, 2);
        let mut table = BlockTable::new();
        assert!(table.reserve(&mut pool, 6));
        table.release_before(&mut pool, 3);
        assert_eq!(table.blocks(), [VACANT_BLOCK, 1, 2]);
        table.release_before(&mut pool, 100);
        assert_eq!((table.num_vacant(), table.num_held(), pool.num_free()), (3, 0, 4));
        assert!(table.reserve(&mut pool, 8));
        assert_eq!(table.blocks()[..3], [VACANT_BLOCK; 3]);
        assert_eq!(pool.check([&table].into_iter()), Ok(()));
    }

    #[test]
    fn the_front_of_a_released_table_is_taken_last() {
        let mut pool = BlockPool::new(2, 2);
        let mut table = BlockTable::new();
        assert!(table.reserve(&mut pool, 4));
        table.release(&mut pool);
        assert_eq!(table.blocks(), [0_u32; 0]);
        assert_eq!([pool.take(), pool.take()], [Some(1), Some(0)]);
    }

    #[test]
    fn check_finds_a_block_that_no_table_has() {
        let mut pool = BlockPool::new(2, 2);
        pool.take();
        assert_eq!(pool.check([].into_iter()), Err("block 0 counts 1 owners, but 0 tables have it".to_owned()));
    }
}
