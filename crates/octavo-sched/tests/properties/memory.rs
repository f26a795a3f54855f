//! What the KV cache of a backend would hold, slot by slot.

use octavo_sched::{BlockCopy, BlockState, SchedulerConfig};

use crate::history::History;

/// In place of keys and values, each slot holds the history up to the token that was written there.
#[derive(Debug)]
pub struct Memory {
    block_size: usize,
    /// For each layer group all slots of all blocks.
    groups: Vec<Vec<Option<History>>>,
}

impl Memory {
    pub fn new(config: &SchedulerConfig) -> Self {
        let slots = |num_blocks| vec![None; num_blocks * config.block_size];
        let groups = config.groups.iter().map(|group| slots(group.num_blocks)).collect();
        Self { block_size: config.block_size, groups }
    }

    /// The slots of a block.
    pub fn block(&self, group: usize, block: u32) -> &[Option<History>] {
        let start = block as usize * self.block_size;
        &self.groups[group][start..start + self.block_size]
    }

    pub fn write(&mut self, group: usize, block: u32, slot: usize, history: History) {
        self.groups[group][block as usize * self.block_size + slot] = Some(history);
    }

    /// Loses whatever is in slots that are not filled according to the scheduler: nobody may rely on it.
    pub fn forget_unfilled(&mut self, map: &[Vec<BlockState>]) {
        for (slots, blocks) in self.groups.iter_mut().zip(map) {
            for (slots, block) in slots.chunks_exact_mut(self.block_size).zip(blocks) {
                slots[block.filled as usize..].fill(None);
            }
        }
    }

    /// The blocks that copies read.
    pub fn sources(&self, copies: &[BlockCopy]) -> Vec<Vec<Option<History>>> {
        copies.iter().map(|copy| self.block(copy.group, copy.from).to_vec()).collect()
    }

    /// Writes what was read, in whatever order: no block is written twice, or read and written.
    pub fn copy(&mut self, copies: &[BlockCopy], sources: &[Vec<Option<History>>]) {
        for (index, (copy, source)) in copies.iter().zip(sources).enumerate() {
            for (other_index, other) in copies.iter().enumerate().filter(|(_, other)| other.group == copy.group) {
                assert!(copy.to != other.from, "block {} is written by one copy and read by another", copy.to);
                assert!(index == other_index || copy.to != other.to, "block {} is written by two copies", copy.to);
            }
            let start = copy.to as usize * self.block_size;
            self.groups[copy.group][start..start + self.block_size].copy_from_slice(source);
        }
    }
}
