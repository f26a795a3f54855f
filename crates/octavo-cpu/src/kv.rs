//! The paged KV cache: keys and values in bfloat16 or in 8 bits, laid out so that attention loads them without a shuffle.
//!
//! A layer is an array of blocks; a block holds, for each KV head, sub-blocks of 16 tokens, a sub-block its keys and
//! then its values:
//!
//! - keys `[head_size / n][16 tokens][n]`: one 64-byte load has the same `n` dimensions of 16 tokens;
//! - values `[16 / n][head_size][n tokens]`: one 64-byte load has 16 dimensions of `n` neighbouring tokens.
//!
//! Both feed a dot product of lanes of 4 bytes, `n = 2` bfloat16 or `n = 4` codes, whose other operand is one broadcast
//! lane. In 8 bits values are signed codes and keys have 128 added to them; the scales of the 16 keys, then those of the 16
//! values follow as bfloat16.

use half::bf16;
use octavo_backend::{BackendError, BlockCopy, DecoderSpec, KvType, StepLimits, numerics::kv_scale};

use crate::{arena::AlignedBytes, heads::HeadKernels};

/// Tokens of a sub-block: one a lane.
pub const SUB_BLOCK: usize = 16;

/// Elements of a head that are rounded before they are scattered.
const SCATTERED: usize = 64;

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
    /// Bytes before the layer's first block.
    offset: usize,
    num_blocks: usize,
    num_kv_heads: usize,
    head_size: usize,
    /// Sub-blocks in a block.
    sub_blocks: usize,
    kind: KvType,
}

impl KvShape {
    /// Elements of the keys or of the values of a sub-block.
    fn elements(&self) -> usize {
        SUB_BLOCK * self.head_size
    }

    fn sub_block_bytes(&self) -> usize {
        self.kind.bytes(2 * self.elements(), 2 * SUB_BLOCK)
    }

    fn block_bytes(&self) -> usize {
        self.num_kv_heads * self.sub_blocks * self.sub_block_bytes()
    }
}

impl KvCache {
    /// Takes the memory for the blocks of `limits`.
    ///
    /// # Errors
    /// A head size or block size that is no multiple of 16, or memory that cannot be had.
    pub fn new(spec: &DecoderSpec, limits: &StepLimits, kind: KvType) -> Result<KvCache, BackendError> {
        check(spec, limits)?;
        let (layers, bytes) = shapes(spec, limits, kind);
        let groups = spec.kv_geometry(limits.block_size).groups.into_iter().map(|group| group.layers).collect();
        Ok(KvCache { memory: AlignedBytes::zeroed_in_background("the KV cache", bytes)?, layers, groups })
    }

    /// Bytes that [`KvCache::new`] takes.
    pub fn bytes(spec: &DecoderSpec, limits: &StepLimits, kind: KvType) -> usize {
        shapes(spec, limits, kind).1
    }

    /// The blocks of one layer.
    pub fn layer(&self, index: usize) -> KvLayer<'_> {
        KvLayer { shape: self.layers[index], cache: self }
    }

    /// The layers of one KV group.
    pub fn group_layers(&self, group: usize) -> &[usize] {
        &self.groups[group]
    }

    fn base(&self) -> *mut u8 {
        self.memory.shared_ptr()
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

    /// What an element is.
    pub fn kind(&self) -> KvType {
        self.shape.kind
    }

    /// The keys of 16 tokens, followed by their values, and with 8-bit elements by the scales of keys and values, `[2][16]`;
    /// the module says how they lie.
    ///
    /// `slot` is the first token's place in the block, a multiple of 16.
    ///
    /// # Panics
    /// If block, head or slot is out of range.
    pub fn sub_block(&self, block: usize, head: usize, slot: usize) -> *mut u8 {
        let shape = &self.shape;
        let sub_block = slot / SUB_BLOCK;
        assert!(block < shape.num_blocks && head < shape.num_kv_heads && sub_block < shape.sub_blocks);
        let index = (block * shape.num_kv_heads + head) * shape.sub_blocks + sub_block;
        // SAFETY: in range by the assertion and by the sizes in `shapes`.
        unsafe { self.cache.base().add(shape.offset + index * shape.sub_block_bytes()) }
    }

    /// Stores the key and value of one token and head, each `[head_size]`, rounded as [`KvType::round_head`] says.
    ///
    /// # Safety
    /// No other thread reads this slot or writes it at the same time.
    pub unsafe fn write(
        &self,
        kernels: &HeadKernels,
        block: usize,
        slot: usize,
        head: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let head_size = self.shape.head_size;
        assert!(key.len() == head_size && value.len() == head_size);
        let start = self.sub_block(block, head, slot);
        let token = slot % SUB_BLOCK;
        // SAFETY: the caller's; the sub-block is laid out for the kind of its elements.
        unsafe {
            if self.shape.kind == KvType::Int8 {
                let ((key_inverse, key_scale), (value_inverse, value_scale)) = (kv_scale(key), kv_scale(value));
                let scales: *mut bf16 = start.add(2 * self.shape.elements()).cast();
                scales.add(token).write(key_scale);
                scales.add(SUB_BLOCK + token).write(value_scale);
                let biased = |x: &[f32], to: &mut [i8]| {
                    kernels.to_codes(x, key_inverse, to);
                    to.iter_mut().for_each(|code| *code ^= i8::MIN);
                };
                let signed = |x: &[f32], to: &mut [i8]| kernels.to_codes(x, value_inverse, to);
                self.scatter::<i8, 4>(start.cast(), token, (key, biased), (value, signed));
            } else {
                let round = |x: &[f32], to: &mut [u16]| kernels.to_bf16(x, 1.0, to);
                self.scatter::<u16, 2>(start.cast(), token, (key, round), (value, round));
            }
        }
    }

    /// Rounds and places a key and a value, `N` elements of a head in each lane.
    ///
    /// # Safety
    /// As [`KvLayer::write`]; `start` is a sub-block with elements of type `T`.
    unsafe fn scatter<T: Copy + Default, const N: usize>(
        &self,
        start: *mut T,
        token: usize,
        key: (&[f32], impl Fn(&[f32], &mut [T])),
        value: (&[f32], impl Fn(&[f32], &mut [T])),
    ) {
        let mut rounded = [T::default(); SCATTERED];
        for (index, part) in key.0.chunks(SCATTERED).enumerate() {
            let rounded = &mut rounded[..part.len()];
            key.1(part, rounded);
            for (lane, rounded) in rounded.as_chunks::<N>().0.iter().enumerate() {
                let lane = index * SCATTERED / N + lane;
                // SAFETY: lane < head_size / N and token < 16 stay inside the keys of this sub-block.
                unsafe { start.add((lane * SUB_BLOCK + token) * N).cast::<[T; N]>().write(*rounded) };
            }
        }
        let values = self.shape.elements() + (token / N) * self.shape.head_size * N + token % N;
        for (index, part) in value.0.chunks(SCATTERED).enumerate() {
            let rounded = &mut rounded[..part.len()];
            value.1(part, rounded);
            for (dimension, rounded) in rounded.iter().enumerate() {
                // SAFETY: inside the values of this sub-block.
                unsafe { start.add(values + (index * SCATTERED + dimension) * N).write(*rounded) };
            }
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
        let len = self.shape.block_bytes();
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

/// The layers' places, one after another, and the number of bytes in all.
fn shapes(spec: &DecoderSpec, limits: &StepLimits, kind: KvType) -> (Vec<KvShape>, usize) {
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
            kind,
        };
        offset += shape.num_blocks * shape.block_bytes();
        shape
    });
    (shapes.collect(), offset)
}
