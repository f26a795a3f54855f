//! The table through which a sequence owns blocks.

use crate::block::{BlockPool, VACANT_BLOCK};

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

    /// The same blocks for one more owner, as far as they hold the positions below `num_tokens`.
    pub(crate) fn fork(&self, pool: &mut BlockPool, num_tokens: usize) -> Self {
        let blocks = self.blocks[..num_tokens.div_ceil(pool.block_size())].to_vec();
        let num_vacant = self.num_vacant.min(blocks.len());
        let table = Self { blocks, num_vacant };
        table.held().iter().for_each(|&id| pool.retain(id));
        table
    }

    /// Appends a block that others may hold too.
    pub(crate) fn adopt(&mut self, pool: &mut BlockPool, id: u32) {
        pool.retain(id);
        self.blocks.push(id);
    }

    /// Holds another block of the same content in the place of one that is full.
    pub(crate) fn merge(&mut self, pool: &mut BlockPool, place: usize, id: u32) {
        pool.retain(id);
        pool.release(std::mem::replace(&mut self.blocks[place], id));
    }

    /// Appends an entry for a block that no later token can see; the table holds no block.
    pub(crate) fn adopt_vacancy(&mut self) {
        debug_assert_eq!(self.num_held(), 0, "vacancies are at the front");
        self.blocks.push(VACANT_BLOCK);
        self.num_vacant += 1;
    }

    /// Whether the block of `position` is there and others hold it too.
    pub(crate) fn is_shared(&self, pool: &BlockPool, position: usize) -> bool {
        let id = self.blocks.get(position / pool.block_size());
        id.is_some_and(|&id| id != VACANT_BLOCK && pool.owners(id) > 1)
    }

    /// Puts a block of its own in the place of a shared one, for writing at `position`: gives both, old and new, whose
    /// content is to be copied. `None`, and no change, if the pool has no free block.
    pub(crate) fn unshare(&mut self, pool: &mut BlockPool, position: usize) -> Option<(u32, u32)> {
        let to = pool.take()?;
        let from = std::mem::replace(&mut self.blocks[position / pool.block_size()], to);
        pool.release(from);
        pool.fill(to, position % pool.block_size());
        Some((from, to))
    }

    /// Notes that the positions from `start` to before `end` are computed.
    pub(crate) fn fill(&self, pool: &mut BlockPool, start: usize, end: usize) {
        let block_size = pool.block_size();
        for index in start / block_size..end.div_ceil(block_size) {
            pool.fill(self.blocks[index], (end - index * block_size).min(block_size));
        }
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

    pub(crate) fn held(&self) -> &[u32] {
        &self.blocks[self.num_vacant..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::NodeId;

    const NODES: [NodeId; 2] = [NodeId::new(0), NodeId::new(1)];

    #[test]
    fn a_fork_shares_every_block_and_writing_takes_a_copy_of_one() {
        let mut pool = BlockPool::new(4, 2);
        let mut table = BlockTable::new();
        assert!(table.reserve(&mut pool, 3));
        let mut fork = table.fork(&mut pool, 3);
        assert_eq!((fork.blocks(), pool.counts().saved), (table.blocks(), 2));
        assert_eq!(fork.unshare(&mut pool, 3), Some((1, 2)));
        assert_eq!((fork.blocks(), table.blocks()), (&[0, 2][..], &[0, 1][..]));
        assert!(!table.is_shared(&pool, 3) && table.is_shared(&pool, 1) && !table.is_shared(&pool, 4));
        assert_eq!(pool.check([&table, &fork].into_iter()), Ok(()));
        table.release(&mut pool);
        fork.release(&mut pool);
        assert_eq!(pool.num_free(), 4);
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
        table.fill(&mut pool, 0, 4);
        (0..2).for_each(|id| pool.publish(id, NODES[id as usize]));
        table.release(&mut pool);
        assert_eq!(table.blocks(), [0_u32; 0]);
        assert_eq!([pool.take(), pool.take()], [Some(1), Some(0)]);
    }
}
