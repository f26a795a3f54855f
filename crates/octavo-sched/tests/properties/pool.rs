//! Random use of a pool by hand, through what is public of it.

use octavo_sched::{BlockPool, BlockTable};
use proptest::prelude::*;

const BLOCK_SIZE: usize = 2;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_reserve_and_release_keeps_owners_and_free_list_in_step(
        operations in prop::collection::vec((0..3_usize, 0..4_usize, 0..12_usize), 1..60),
    ) {
        let mut pool = BlockPool::new(4, BLOCK_SIZE);
        let mut tables = [BlockTable::new(), BlockTable::new(), BlockTable::new()];
        for (index, action, position) in operations {
            let table = &mut tables[index];
            match action {
                0 => table.release(&mut pool),
                1 => table.release_before(&mut pool, position),
                _ => {
                    let (free, before) = (pool.num_free(), table.blocks().to_vec());
                    let missing = position.div_ceil(BLOCK_SIZE).saturating_sub(before.len());
                    prop_assert_eq!(table.reserve(&mut pool, position), missing <= free);
                    prop_assert_eq!(&table.blocks()[..before.len()], &before[..]);
                }
            }
            prop_assert_eq!(pool.check(tables.iter()), Ok(()));
            let held: usize = tables.iter().map(BlockTable::num_held).sum();
            prop_assert_eq!(held + pool.num_free(), pool.num_blocks());
        }
    }
}
