//! The kernels as functions: the only place that knows their grids, blocks and shared memory (kernels/README.md).
//!
//! SAFETY of the whole module: each launch passes the arguments of the kernel's signature, in its order, each of the type
//! named there; each function asserts that its slices are as long as the launch makes the kernel read and write. What the
//! values in integer slices address is checked when a step is prepared.

use std::sync::Arc;

use half::bf16;

use crate::{
    device::{Device, Extent, Kernel, Module, Slice},
    error::CudaError,
};

/// The arguments of a launch.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => {
        &[$($crate::kernels::Argument::word($argument)),*]
    };
}
pub(crate) use arguments;

/// A value that a kernel takes.
pub trait Argument {
    /// The value in the first bytes of a word.
    fn word(self) -> u64;
}

impl Argument for u64 {
    fn word(self) -> u64 {
        self
    }
}

impl Argument for i64 {
    fn word(self) -> u64 {
        self as u64
    }
}

impl Argument for i32 {
    fn word(self) -> u64 {
        u64::from(self as u32)
    }
}

impl Argument for f32 {
    fn word(self) -> u64 {
        u64::from(self.to_bits())
    }
}

/// A size as kernels take it. Plans refuse what would not fit.
pub(crate) fn int(size: usize) -> i32 {
    i32::try_from(size).unwrap_or(i32::MAX)
}

/// The kernels that do not depend on a model's shape.
pub struct Kernels {
    embed: Kernel,
    norm_bf16: Kernel,
    norm_f32: Kernel,
    silu_and_mul: Kernel,
    gather_rows: Kernel,
    copy_blocks: Kernel,
    rope_and_cache: Kernel,
    attention: Arc<Module>,
}

/// What a norm reads and writes: `hidden += update`, then `out = norm(hidden) * weight`.
#[derive(Clone, Copy)]
pub struct Norm {
    /// `[rows, hidden_size]`.
    pub hidden: Slice<f32>,
    /// As many, or none.
    pub update: Option<Slice<f32>>,
    /// `[hidden_size]`.
    pub weight: Slice<f32>,
    /// Rows.
    pub rows: usize,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Heads and their widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadShape {
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_size: usize,
    /// Tokens in a KV block.
    pub block_size: usize,
}

/// The cache of one layer: `[num_blocks, num_kv_heads, block_size, head_size]` each.
#[derive(Debug, Clone, Copy)]
pub struct LayerCache {
    /// Keys.
    pub keys: Slice<bf16>,
    /// Values.
    pub values: Slice<bf16>,
}

/// What becomes of a step's queries, keys and values.
#[derive(Clone, Copy)]
pub struct RopeAndCache {
    /// `[rows, num_heads, head_size]`, written.
    pub queries: Slice<bf16>,
    /// Written at the step's slots.
    pub cache: LayerCache,
    /// `[rows, (num_heads + 2 num_kv_heads) head_size]`.
    pub qkv: Slice<f32>,
    /// `[positions, pairs, 2]`: cosines and sines.
    pub angles: Slice<f32>,
    /// `[rows]`.
    pub positions: Slice<i32>,
    /// `[rows]`: block times block size, plus the place in it.
    pub slots: Slice<i32>,
    /// Heads.
    pub shape: HeadShape,
    /// Pairs that are rotated.
    pub pairs: usize,
    /// On queries.
    pub scale: f32,
}

impl Kernels {
    /// Loads all modules but those of the sampler and of 4-bit weights.
    ///
    /// # Errors
    /// A kernel is missing; the driver's.
    pub fn new(device: &Arc<Device>) -> Result<Kernels, CudaError> {
        let pointwise = device.load("pointwise")?;
        Ok(Kernels {
            embed: pointwise.kernel("embed", 0)?,
            norm_bf16: pointwise.kernel("norm_bf16", 0)?,
            norm_f32: pointwise.kernel("norm_f32", 0)?,
            silu_and_mul: pointwise.kernel("silu_and_mul", 0)?,
            gather_rows: pointwise.kernel("gather_rows", 0)?,
            copy_blocks: device.load("blocks")?.kernel("copy_blocks", 0)?,
            rope_and_cache: device.load("rope_and_cache")?.kernel("rope_and_cache", 0)?,
            attention: device.load("attention")?,
        })
    }

    /// `hidden[row] = table[tokens[row]] * scale`.
    ///
    /// # Errors
    /// The driver's.
    pub fn embed(
        &self,
        hidden: Slice<f32>,
        table: Slice<bf16>,
        tokens: Slice<i32>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let rows = tokens.len;
        let width = hidden.len / rows.max(1);
        assert!(hidden.len == rows * width && width.is_multiple_of(8) && table.len >= width);
        let extent = Extent { grid: [rows, 1, 1], block: 128, shared_bytes: 0 };
        let arguments = arguments![hidden.address, table.address, tokens.address, int(width), scale];
        // SAFETY: see the module.
        unsafe { self.embed.launch(extent, arguments) }
    }

    /// A norm whose output goes into a product.
    ///
    /// # Errors
    /// The driver's.
    pub fn norm_bf16(&self, out: Slice<bf16>, norm: Norm) -> Result<(), CudaError> {
        self.norm(&self.norm_bf16, (out.address, out.len), norm)
    }

    /// A norm whose output is reported.
    ///
    /// # Errors
    /// The driver's.
    pub fn norm_f32(&self, out: Slice<f32>, norm: Norm) -> Result<(), CudaError> {
        self.norm(&self.norm_f32, (out.address, out.len), norm)
    }

    fn norm(&self, kernel: &Kernel, (out, out_len): (u64, usize), norm: Norm) -> Result<(), CudaError> {
        let width = norm.weight.len;
        let elements = norm.rows * width;
        assert!(out_len >= elements && norm.hidden.len >= elements);
        assert!(norm.update.is_none_or(|update| update.len >= elements));
        let update = norm.update.map_or(0u64, |update| update.address);
        // Whole warps, so many that a step over the row reaches its end.
        let block = width.div_ceil(4).next_multiple_of(32).min(256);
        let extent = Extent { grid: [norm.rows, 1, 1], block, shared_bytes: 0 };
        let arguments = arguments![out, norm.hidden.address, update, norm.weight.address, int(width), norm.epsilon];
        // SAFETY: see the module.
        unsafe { kernel.launch(extent, arguments) }
    }

    /// `out = silu(gate) * up` of rows that are gate and up one after the other.
    ///
    /// # Errors
    /// The driver's.
    pub fn silu_and_mul(
        &self,
        out: Slice<bf16>,
        gate_up: Slice<f32>,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        assert!(out.len >= rows * width && gate_up.len >= 2 * rows * width && width.is_multiple_of(8));
        let extent = Extent { grid: [rows, width.div_ceil(128 * 4), 1], block: 128, shared_bytes: 0 };
        // SAFETY: see the module.
        unsafe { self.silu_and_mul.launch(extent, arguments![out.address, gate_up.address, int(width)]) }
    }

    /// `out[i] = input[rows[i]]`.
    ///
    /// # Errors
    /// The driver's.
    pub fn gather_rows(
        &self,
        out: Slice<f32>,
        input: Slice<f32>,
        rows: Slice<i32>,
        width: usize,
    ) -> Result<(), CudaError> {
        assert!(out.len >= rows.len * width);
        let extent = Extent { grid: [rows.len, 1, 1], block: 128, shared_bytes: 0 };
        let arguments = arguments![out.address, input.address, rows.address, int(width)];
        // SAFETY: see the module.
        unsafe { self.gather_rows.launch(extent, arguments) }
    }

    /// Copies whole blocks, `pairs` of (from, to), in each of the caches whose addresses are in `caches`.
    ///
    /// # Errors
    /// The driver's.
    pub fn copy_blocks(&self, caches: Slice<u64>, pairs: Slice<i32>, block_bytes: usize) -> Result<(), CudaError> {
        assert!(block_bytes.is_multiple_of(16));
        let extent = Extent { grid: [pairs.len / 2, caches.len, 1], block: 256, shared_bytes: 0 };
        let arguments = arguments![caches.address, pairs.address, block_bytes as i64];
        // SAFETY: see the module.
        unsafe { self.copy_blocks.launch(extent, arguments) }
    }

    /// Rotates queries and keys, scales and rounds queries, and puts keys and values into the cache.
    ///
    /// # Errors
    /// The driver's.
    pub fn rope_and_cache(&self, call: &RopeAndCache) -> Result<(), CudaError> {
        let HeadShape { num_heads, num_kv_heads, head_size, block_size } = call.shape;
        let rows = call.positions.len;
        assert!(call.slots.len == rows && call.queries.len >= rows * num_heads * head_size);
        assert!(call.qkv.len >= rows * (num_heads + 2 * num_kv_heads) * head_size);
        let extent = Extent { grid: [rows, 1, 1], block: 128, shared_bytes: 0 };
        let arguments = arguments![
            call.queries.address,
            call.cache.keys.address,
            call.cache.values.address,
            call.qkv.address,
            call.angles.address,
            call.positions.address,
            call.slots.address,
            int(num_heads),
            int(num_kv_heads),
            int(head_size),
            int(call.pairs),
            int(block_size),
            call.scale,
        ];
        // SAFETY: see the module.
        unsafe { self.rope_and_cache.launch(extent, arguments) }
    }

    /// Attention over heads of one size.
    ///
    /// # Errors
    /// There are no kernels for it.
    pub fn attention(&self, head_size: usize) -> Result<AttentionKernels, CudaError> {
        AttentionKernels::new(&self.attention, head_size)
    }
}

/// Positions that one partial result of attention covers: those from a multiple of it on.
pub const CHUNK: usize = 256;

/// The sizes of heads that attention is compiled for.
pub const HEAD_SIZES: [usize; 11] = [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256];

/// Rows (tokens times heads of a group) that a block of [`AttentionKernels::prefill`] computes.
pub const TILE_ROWS: usize = 64;

/// Integers that describe a span: its first row, its length, its start, where its block table starts, and one that is
/// free.
pub const SPAN_INTS: usize = 5;

/// Attention over heads of one size.
pub struct AttentionKernels {
    head_size: usize,
    decode: Kernel,
    merge: Kernel,
    prefill: Kernel,
}

/// What attention reads and writes.
#[derive(Clone, Copy)]
pub struct Attention {
    /// `[rows, num_heads, head_size]`, written for the rows of the spans.
    pub out: Slice<bf16>,
    /// `[rows, num_heads, head_size]`.
    pub queries: Slice<bf16>,
    /// Keys and values, those of the rows themselves included.
    pub cache: LayerCache,
    /// The block tables of all spans.
    pub tables: Slice<i32>,
    /// [`SPAN_INTS`] for each span.
    pub spans: Slice<i32>,
    /// Heads.
    pub shape: HeadShape,
    /// Positions that a row sees, or all.
    pub window: Option<usize>,
}

/// Partial results of single rows, before they are merged.
#[derive(Clone, Copy)]
pub struct Partials {
    /// `[spans, num_heads, chunks, head_size]`.
    pub out: Slice<f32>,
    /// `[spans, num_heads, chunks]`.
    pub max: Slice<f32>,
    /// `[spans, num_heads, chunks]`.
    pub sum: Slice<f32>,
}

impl AttentionKernels {
    fn new(module: &Arc<Module>, head_size: usize) -> Result<AttentionKernels, CudaError> {
        Ok(AttentionKernels {
            head_size,
            decode: module.kernel(&format!("attention_decode_d{head_size}"), decode_shared_bytes(head_size))?,
            merge: module.kernel(&format!("attention_merge_d{head_size}"), 0)?,
            prefill: module.kernel(&format!("attention_prefill_d{head_size}"), prefill_shared_bytes(head_size))?,
        })
    }

    /// Single rows, each the only one of its span: partial results over `chunks` chunks of [`CHUNK`] positions, and their
    /// merge.
    ///
    /// # Errors
    /// The driver's.
    pub fn decode(&self, call: &Attention, partials: &Partials, chunks: usize) -> Result<(), CudaError> {
        let HeadShape { num_heads, num_kv_heads, head_size, block_size } = call.shape;
        let spans = call.spans.len / SPAN_INTS;
        let count = spans * num_heads * chunks;
        assert!(head_size == self.head_size && partials.out.len >= count * head_size);
        assert!(partials.max.len >= count && partials.sum.len >= count);
        let shared_bytes = decode_shared_bytes(head_size);
        let extent = Extent { grid: [spans, num_kv_heads, chunks], block: DECODE_BLOCK, shared_bytes };
        let arguments = arguments![
            partials.out.address,
            partials.max.address,
            partials.sum.address,
            call.queries.address,
            call.cache.keys.address,
            call.cache.values.address,
            call.tables.address,
            call.spans.address,
            int(num_heads),
            int(num_kv_heads),
            int(block_size),
            int(call.window.unwrap_or(0)),
            int(chunks),
            0.0f32,
        ];
        // SAFETY: see the module.
        unsafe { self.decode.launch(extent, arguments)? };
        let extent = Extent { grid: [spans, num_heads, 1], block: head_size / 2, shared_bytes: 0 };
        let arguments = arguments![
            call.out.address,
            partials.out.address,
            partials.max.address,
            partials.sum.address,
            call.spans.address,
            int(num_heads),
            int(chunks),
        ];
        // SAFETY: see the module.
        unsafe { self.merge.launch(extent, arguments) }
    }

    /// Spans of any length; `tiles` are pairs of a span and the first of its rows (tokens times heads of a group) that a
    /// block computes.
    ///
    /// # Errors
    /// The driver's.
    pub fn prefill(&self, call: &Attention, tiles: Slice<i32>) -> Result<(), CudaError> {
        let HeadShape { num_heads, num_kv_heads, head_size, block_size } = call.shape;
        assert!(head_size == self.head_size && tiles.len.is_multiple_of(2));
        let extent = Extent {
            grid: [tiles.len / 2, num_kv_heads, 1],
            block: prefill_block(head_size),
            shared_bytes: prefill_shared_bytes(head_size),
        };
        let arguments = arguments![
            call.out.address,
            call.queries.address,
            call.cache.keys.address,
            call.cache.values.address,
            call.tables.address,
            call.spans.address,
            tiles.address,
            int(num_heads),
            int(num_kv_heads),
            int(block_size),
            int(call.window.unwrap_or(0)),
            0.0f32,
        ];
        // SAFETY: see the module.
        unsafe { self.prefill.launch(extent, arguments) }
    }
}

const DECODE_BLOCK: usize = 128;

/// Heads wider than 128 have two warps for each 16 rows.
fn prefill_block(head_size: usize) -> usize {
    if head_size > 128 { 256 } else { 128 }
}

fn decode_shared_bytes(head_size: usize) -> usize {
    if head_size > 128 { 288 * (head_size + 8) + 1552 } else { 544 * (head_size + 8) + 2576 }
}

fn prefill_shared_bytes(head_size: usize) -> usize {
    if head_size > 128 { 256 * (head_size + 8) + 5648 } else { 384 * (head_size + 8) + 16 }
}
