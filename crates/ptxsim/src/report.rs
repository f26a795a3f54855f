//! What a launch counted.

use std::collections::BTreeMap;
use std::ops::AddAssign;

/// Traffic of warp-wide accesses to global memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Warp-wide instructions with at least one lane active.
    pub requests: u64,
    /// Distinct aligned 32-byte sectors, summed over the requests.
    pub sectors: u64,
    /// Distinct bytes that the lanes asked for, summed over the requests; at most 32 a sector.
    pub bytes: u64,
}

/// Traffic of one buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BufferTraffic {
    /// Loads and the reading half of asynchronous copies.
    pub loads: Traffic,
    /// Stores.
    pub stores: Traffic,
    /// Atomic operations and reductions.
    pub atomics: Traffic,
}

/// Traffic of shared memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedTraffic {
    /// Warp-wide instructions with at least one lane active.
    pub requests: u64,
    /// Passes over the 32 banks that the requests took.
    pub wavefronts: u64,
    /// Passes beyond the least a request of its width needs (one for each 32, 16 or 8 lanes of 4, 8 or 16 bytes).
    pub conflicts: u64,
}

/// Counters of a launch, or of several added together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Blocks run.
    pub blocks: u64,
    /// Instructions, each counted once per warp and group of lanes that ran it together.
    pub warp_instructions: u64,
    /// Loads from global memory, `cp.async` included.
    pub global_loads: Traffic,
    /// Stores to global memory.
    pub global_stores: Traffic,
    /// Atomic operations on global memory.
    pub global_atomics: Traffic,
    /// Loads, stores, atomics and `ldmatrix` on shared memory.
    pub shared: SharedTraffic,
    /// Warp-wide accesses to local memory (spilled or indexed registers).
    pub local_requests: u64,
    /// Warp-wide matrix multiplications.
    pub mma: u64,
    /// Bytes that `cp.async` read.
    pub async_copy_bytes: u64,
    /// Barriers of whole blocks.
    pub barriers: u64,
    /// Branches at which the lanes of a warp parted.
    pub divergent_branches: u64,
    /// Global traffic by the address of the buffer.
    pub buffers: BTreeMap<u64, BufferTraffic>,
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.sectors += other.sectors;
        self.bytes += other.bytes;
    }
}

impl AddAssign for BufferTraffic {
    fn add_assign(&mut self, other: Self) {
        self.loads += other.loads;
        self.stores += other.stores;
        self.atomics += other.atomics;
    }
}

impl AddAssign for SharedTraffic {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.wavefronts += other.wavefronts;
        self.conflicts += other.conflicts;
    }
}

impl AddAssign<&Report> for Report {
    fn add_assign(&mut self, other: &Report) {
        self.blocks += other.blocks;
        self.warp_instructions += other.warp_instructions;
        self.global_loads += other.global_loads;
        self.global_stores += other.global_stores;
        self.global_atomics += other.global_atomics;
        self.shared += other.shared;
        self.local_requests += other.local_requests;
        self.mma += other.mma;
        self.async_copy_bytes += other.async_copy_bytes;
        self.barriers += other.barriers;
        self.divergent_branches += other.divergent_branches;
        for (address, traffic) in &other.buffers {
            *self.buffers.entry(*address).or_default() += *traffic;
        }
    }
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        *self += &other;
    }
}
