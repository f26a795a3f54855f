//! The paged KV cache: bfloat16 keys and values, laid out so that attention loads them without a shuffle.
//!
//! A layer is an array of blocks; a block holds, for each KV head, sub-blocks of 16 tokens, a sub-block its keys and
//! then its values:
//!
//! - keys `[head_size / 2][16 tokens][2]`: one 64-byte load has the same two dimensions of 16 tokens;
//! - values `[8 pairs of tokens][head_size][2]`: one 64-byte load has 16 dimensions of two neighbouring tokens.
//!
//! Both feed a pairwise dot product whose other operand is one broadcast pair.

use half::bf16;
use octavo_backend::{BackendError, BlockCopy, DecoderSpec, StepLimits};

use crate::arena::AlignedBytes;

/// Tokens of a sub-block: one a lane.
pub const SUB_BLOCK: usize = 16;

/// Keys and values of all layers.
pub struct KvCache {
    memory: AlignedBytes,
    layers: Vec<KvShape>,
    /// The layers of each KV group.
    groups: Vec<Vec<usize>>,
}

/// Where a layer's blocks are and how they are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KvShape {
    /// Elements before the layer's first block.
    offset: usize,
    num_blocks: usize,
    num_kv_heads: usize,
    head_size: usize,
    /// Sub-blocks in a block.
    sub_blocks: usize,
}

impl KvShape {
    fn sub_block_elements(&self) -> usize {
        2 * SUB_BLOCK * self.head_size
    }

    fn block_elements(&self) -> usize {
        self.num_kv_heads * self.sub_blocks * self.sub_block_elements()
    }
}

impl KvCache {
    /// Takes the memory for the blocks of `limits` and touches it.
    ///
    /// # Errors
    /// A head size or block size that is no multiple of 16, or memory that cannot be had.
    pub fn new(spec: &DecoderSpec, limits: &StepLimits) -> Result<KvCache, BackendError> {
        check(spec, limits)?;
        let (layers, elements) = shapes(spec, limits);
        let groups = spec.kv_geometry(limits.block_size).groups.into_iter().map(|group| group.layers).collect();
        Ok(KvCache { memory: AlignedBytes::zeroed_elements::<u16>("the KV cache", elements)?, layers, groups })
    }

    /// Bytes that [`KvCache::new`] takes.
    pub fn bytes(spec: &DecoderSpec, limits: &StepLimits) -> usize {
        shapes(spec, limits).1 * size_of::<u16>()
    }

    /// The blocks of one layer.
    pub fn layer(&self, index: usize) -> KvLayer<'_> {
        KvLayer { shape: self.layers[index], cache: self }
    }

    /// The layers of one KV group.
    pub fn group_layers(&self, group: usize) -> &[usize] {
        &self.groups[group]
    }

    fn base(&self) -> *mut u16 {
        self.memory.shared_ptr().cast()
    }
}

/// The blocks of one layer, shared by all workers.
#[derive(Clone, Copy)]
pub struct KvLayer<'a> {
    shape: KvShape,
    cache: &'a KvCache,
}

impl KvLayer<'_> {
    /// Width of one head.
    pub fn head_size(&self) -> usize {
        self.shape.head_size
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.shape.sub_blocks * SUB_BLOCK
    }

    /// The keys of 16 tokens, `[head_size / 2][16][2]`, followed by their values, `[8][head_size][2]`.
    ///
    /// `slot` is the first token's place in the block, a multiple of 16.
    ///
    /// # Panics
    /// If block, head or slot is out of range.
    pub fn sub_block(&self, block: usize, head: usize, slot: usize) -> *mut u16 {
        let shape = &self.shape;
        let sub_block = slot / SUB_BLOCK;
        assert!(block < shape.num_blocks && head < shape.num_kv_heads && sub_block < shape.sub_blocks);
        let index = (block * shape.num_kv_heads + head) * shape.sub_blocks + sub_block;
        // SAFETY: in range by the assertion and by the sizes in `shapes`.
        unsafe { self.cache.base().add(shape.offset + index * shape.sub_block_elements()) }
    }

    /// Stores the key and value of one token and head, each `[head_size]`, rounded to bfloat16.
    ///
    /// # Safety
    /// No other thread reads this slot or writes it at the same time.
    pub unsafe fn write(&self, block: usize, slot: usize, head: usize, key: &[f32], value: &[f32]) {
        let head_size = self.shape.head_size;
        assert!(key.len() == head_size && value.len() == head_size);
        let start = self.sub_block(block, head, slot);
        let token = slot % SUB_BLOCK;
        for (pair, key) in key.chunks_exact(2).enumerate() {
            let packed = [bf16::from_f32(key[0]).to_bits(), bf16::from_f32(key[1]).to_bits()];
            // SAFETY: pair < head_size / 2 and token < 16 stay inside the keys of this sub-block.
            unsafe { start.add((pair * SUB_BLOCK + token) * 2).cast::<[u16; 2]>().write(packed) };
        }
        let values = SUB_BLOCK * head_size + (token / 2) * head_size * 2 + token % 2;
        for (dimension, &value) in value.iter().enumerate() {
            // SAFETY: inside the values of this sub-block.
            unsafe { start.add(values + dimension * 2).write(bf16::from_f32(value).to_bits()) };
        }
    }

    /// Copies whole blocks, in order.
    ///
    /// # Safety
    /// No other thread accesses this layer at the same time.
    ///
    /// # Panics
    /// If a block is out of range.
    pub unsafe fn copy(&self, copies: &[BlockCopy]) {
        let len = self.shape.block_elements();
        for copy in copies {
            let from = self.sub_block(copy.from as usize, 0, 0);
            let to = self.sub_block(copy.to as usize, 0, 0);
            // SAFETY: both blocks lie inside the layer; `ptr::copy` allows a block to be copied to itself.
            unsafe { std::ptr::copy(from, to, len) };
        }
    }
}

/// Refuses what the layout cannot hold.
fn check(spec: &DecoderSpec, limits: &StepLimits) -> Result<(), BackendError> {
    let unsupported = |what, found: usize| BackendError::Unsupported {
        what,
        found: found.to_string(),
        expected: "a positive multiple of 16".to_owned(),
    };
    if limits.block_size == 0 || !limits.block_size.is_multiple_of(SUB_BLOCK) {
        return Err(unsupported("KV block size", limits.block_size));
    }
    for layer in &spec.layers {
        let head_size = layer.attention.head_size;
        if head_size == 0 || !head_size.is_multiple_of(16) {
            return Err(unsupported("attention head size", head_size));
        }
    }
    let groups = spec.kv_geometry(limits.block_size).groups.len();
    if limits.num_blocks.len() != groups {
        return Err(BackendError::Unsupported {
            what: "KV groups with a number of blocks",
            found: limits.num_blocks.len().to_string(),
            expected: groups.to_string(),
        });
    }
    Ok(())
}

/// The layers' places, one after another, and the number of elements in all.
fn shapes(spec: &DecoderSpec, limits: &StepLimits) -> (Vec<KvShape>, usize) {
    let geometry = spec.kv_geometry(limits.block_size);
    let mut offset = 0;
    let shapes = spec.layers.iter().enumerate().map(|(index, layer)| {
        let num_blocks = limits.num_blocks.get(geometry.group_of(index)).copied().unwrap_or(0);
        let shape = KvShape {
            offset,
            num_blocks,
            num_kv_heads: layer.attention.num_kv_heads,
            head_size: layer.attention.head_size,
            sub_blocks: limits.block_size / SUB_BLOCK,
        };
        offset += shape.num_blocks * shape.block_elements();
        shape
    });
    (shapes.collect(), offset)
}
