//! One chunk of positions for a tile of rows: what every kernel of attention has in common.
//!
//! The arithmetic of one row, positions in groups of 64:
//! - scores: for each 32 dimensions, the products of the even ones and those of the odd ones, each by a chain of fused
//!   multiply-adds from 0; both are added, and the result to the score. This is what a matrix unit's bfloat16 product
//!   does;
//! - softmax against the largest score so far;
//! - values: for each 16 positions, the even and the odd ones in the same way; added to the group's sum. Then
//!   `output = fma(output, change, sum)`, where `change` takes the output so far to the new largest score.
//!
//! With keys and values in 8 bits, sums are those of integers, which are exact:
//! - scores: `(dot * query's factor) * key's scale`, where queries are codes of 13 bits ([`crate::heads`]);
//! - values: probabilities times the values' scales become codes of 13 bits, of which the group's largest is the last;
//!   `output = fma(output, change, dot * factor)`.
//!
//! Invariant (row invariance): what is computed for a row, and in which order, follows from its own range of positions.
//! The other rows of its tile only share loads with it, and the kernels of vector registers and of a matrix unit give the same
//! bits, since nothing is ever subnormal ([`octavo_backend::numerics::SMALLEST_KV`]). Adding a product with a probability of 0 changes no bit, since no
//! sum is ever a negative zero; but what a row does not see may hold anything, and must not even be multiplied by zero.

use std::ops::Range;

use crate::{
    heads::PLANE_BITS,
    kv::{KvLayer, SUB_BLOCK},
    simd::{LANES, Simd, exp, exp_from, first_lanes},
};

use super::merge::{STATE_HEADER, state_len};

/// Positions are cut into chunks at multiples of this; a chunk's partial result is complete before it is merged.
pub const CHUNK: usize = 256;

/// Positions of one softmax group: scored, then rescaled once.
pub(super) const GROUP: usize = 64;

/// Sub-blocks of a group.
pub(super) const SUB_BLOCKS: usize = GROUP / SUB_BLOCK;

/// Dimensions whose products are one chain each of even and of odd ones.
pub(super) const SCORED_DIMENSIONS: usize = 32;

/// A score so far below the largest one has a probability of 0: `e^-27.5` is just above
/// [`octavo_backend::numerics::SMALLEST_KV`].
const LEAST_SCORE: f32 = -27.5;

/// The largest code of a probability times the scale of a value.
const LARGEST_CODE: f32 = 8191.0;

/// Rows of the largest tile.
pub const MAX_TILE: usize = 16;

/// What a chunk's kernel needs. Rows are query heads of one or several tokens that read the same KV head.
pub struct ChunkTask<'a> {
    /// The layer's cache.
    pub layer: KvLayer<'a>,
    /// The sequence's block table.
    pub table: &'a [u32],
    /// The KV head.
    pub head: usize,
    /// Rows of the tile.
    pub rows: usize,
    /// Queries, scaled and rounded, in the kernel's own layout.
    pub queries: *const f32,
    /// Of queries in 8-bit planes: what the codes are to be multiplied by, and their sums.
    pub query_scales: [[f32; 2]; MAX_TILE],
    /// The positions that each row sees in this chunk; a range may be empty.
    pub visible: [Range<usize>; MAX_TILE],
    /// Where the rows' states go, `[rows][state_len]`.
    pub states: *mut f32,
    /// Where the keys lie that are likely wanted after this chunk; null where nothing is known.
    pub following: [*const u16; SUB_BLOCKS],
    /// Space for the weighted values of a group, `[rows][head_size]`.
    pub sums: *mut f32,
    /// Space for a copy of a group's keys and values in bfloat16, `[4][2 * 16 * head_size]`.
    #[cfg_attr(
        not(all(target_arch = "x86_64", target_os = "linux")),
        expect(dead_code, reason = "for the matrix unit")
    )]
    pub copies: *mut u16,
}

/// The state of a tile's rows within a chunk.
pub(super) struct Rows<S: Simd> {
    /// Of one group; after [`Rows::softmax`] probabilities, rounded to bfloat16.
    pub scores: [[f32; GROUP]; MAX_TILE],
    /// The same probabilities in 16 bits, where a kernel asks for them.
    pub probabilities: [[u16; GROUP]; MAX_TILE],
    /// The largest scores so far.
    pub largest: [f32; MAX_TILE],
    /// The sums of probabilities so far.
    pub totals: [S::F; MAX_TILE],
}

/// What 8-bit values are multiplied by: probabilities times the values' scales.
pub(super) struct Weights {
    /// As codes in two planes, higher parts first.
    pub planes: [[[u8; GROUP]; 2]; MAX_TILE],
    /// What the codes are to be multiplied by.
    pub factors: [f32; MAX_TILE],
}

impl Weights {
    pub fn new() -> Weights {
        Weights { planes: [[[0; GROUP]; 2]; MAX_TILE], factors: [0.0; MAX_TILE] }
    }
}

/// The scales of an 8-bit group's keys and of its values.
pub(super) struct Scales {
    pub keys: [f32; GROUP],
    pub values: [f32; GROUP],
}

impl Scales {
    /// Collects those of some sub-blocks; those of others are zeros.
    ///
    /// # Safety
    /// The pointers are sub-blocks of an 8-bit cache or null, and nobody writes them.
    #[inline(always)]
    pub unsafe fn of<S: Simd>(simd: S, sub_blocks: &[*const u16; SUB_BLOCKS], head_size: usize) -> Scales {
        let mut scales = Scales { keys: [0.0; GROUP], values: [0.0; GROUP] };
        for (index, pointer) in sub_blocks.iter().enumerate().filter(|(_, pointer)| !pointer.is_null()) {
            // SAFETY: by the contract: a sub-block has 32 codes for each dimension, then the scales.
            unsafe {
                let found = pointer.add(SUB_BLOCK * head_size);
                simd.store(scales.keys.as_mut_ptr().add(index * SUB_BLOCK), simd.load_bf16(found));
                simd.store(scales.values.as_mut_ptr().add(index * SUB_BLOCK), simd.load_bf16(found.add(SUB_BLOCK)));
            }
        }
        scales
    }
}

/// One softmax group: 64 positions.
pub(super) struct Group {
    /// The keys of each sub-block, the values behind them; null where no row sees anything.
    pub sub_blocks: [*const u16; SUB_BLOCKS],
    /// Where the next group's keys are.
    pub next: [*const u16; SUB_BLOCKS],
    /// What each row sees, relative to the group.
    pub visible: [Range<usize>; MAX_TILE],
}

/// From the first to the last position that any row sees.
#[inline(always)]
pub(super) fn seen_by_any(visible: &[Range<usize>]) -> Range<usize> {
    let (mut start, mut end) = (usize::MAX, 0);
    for visible in visible {
        if !visible.is_empty() {
            (start, end) = (start.min(visible.start), end.max(visible.end));
        }
    }
    start.min(end)..end
}

/// Looks up the sub-blocks of a group of one KV head that lie in the range of positions seen; null for the others.
#[inline(always)]
pub(super) fn sub_blocks_at(
    layer: &KvLayer<'_>,
    table: &[u32],
    head: usize,
    start: usize,
    seen: &Range<usize>,
) -> [*const u16; SUB_BLOCKS] {
    let block_size = layer.block_size();
    let mut sub_blocks = [std::ptr::null(); SUB_BLOCKS];
    for (index, pointer) in sub_blocks.iter_mut().enumerate() {
        let position = start + index * SUB_BLOCK;
        if position < seen.end && position + SUB_BLOCK > seen.start {
            let block = table[position / block_size] as usize;
            *pointer = layer.sub_block(block, head, position % block_size).cast_const().cast();
        }
    }
    sub_blocks
}

impl ChunkTask<'_> {
    /// The sub-blocks of the group at `start`.
    #[inline(always)]
    pub fn sub_blocks(&self, start: usize, seen: &Range<usize>) -> [*const u16; SUB_BLOCKS] {
        sub_blocks_at(&self.layer, self.table, self.head, start, seen)
    }

    /// Those of the next group; after the chunk's last one, what follows the chunk.
    #[inline(always)]
    pub fn sub_blocks_after(&self, start: usize, seen: &Range<usize>) -> [*const u16; SUB_BLOCKS] {
        if start + GROUP < seen.end { self.sub_blocks(start + GROUP, seen) } else { self.following }
    }
}

/// What the rows of a tile see of the group at `start`.
#[inline(always)]
pub(super) fn visible_in_group(visible: &[Range<usize>; MAX_TILE], start: usize) -> [Range<usize>; MAX_TILE] {
    let mut relative = [const { 0..0 }; MAX_TILE];
    for (relative, absolute) in relative.iter_mut().zip(visible) {
        *relative = absolute.start.saturating_sub(start).min(GROUP)..absolute.end.saturating_sub(start).min(GROUP);
    }
    relative
}

/// What a row sees of sub-block `index`, relative to it.
#[inline(always)]
pub(super) fn visible_in_sub_block(visible: &Range<usize>, index: usize) -> Range<usize> {
    let relative = |position: usize| position.saturating_sub(index * SUB_BLOCK).min(SUB_BLOCK);
    relative(visible.start)..relative(visible.end)
}

/// How much of a group a row sees.
enum Seen {
    Nothing,
    Some,
    All,
}

#[inline(always)]
fn seen(visible: &Range<usize>) -> Seen {
    match visible.len() {
        0 => Seen::Nothing,
        GROUP => Seen::All,
        _ => Seen::Some,
    }
}

/// The lanes of sub-block `index` that lie in a range of the group.
#[inline(always)]
fn mask(visible: &Range<usize>, index: usize) -> u16 {
    let visible = visible_in_sub_block(visible, index);
    first_lanes(visible.end) & !first_lanes(visible.start)
}

impl<S: Simd> Rows<S> {
    pub fn new(simd: S) -> Rows<S> {
        Rows {
            scores: [[0.0; GROUP]; MAX_TILE],
            probabilities: [[0; GROUP]; MAX_TILE],
            largest: [f32::NEG_INFINITY; MAX_TILE],
            totals: [simd.splat(0.0); MAX_TILE],
        }
    }

    /// Turns the scores of the first `rows` rows into probabilities against the largest score so far, with `WORDS` into
    /// words as well; returns the factors on what was summed before.
    ///
    /// A row that sees nothing keeps its state and scores; its words are zeros.
    #[inline(always)]
    pub fn softmax<const WORDS: bool>(
        &mut self,
        simd: S,
        rows: usize,
        visible: &[Range<usize>; MAX_TILE],
    ) -> [f32; MAX_TILE] {
        let changes = self.rescale(simd, rows, visible);
        for row in 0..rows {
            match seen(&visible[row]) {
                Seen::Nothing if WORDS => self.probabilities[row] = [0; GROUP],
                Seen::Nothing => {}
                Seen::All => self.exponentiate::<WORDS, false>(simd, row, changes[row], &visible[row]),
                Seen::Some => self.exponentiate::<WORDS, true>(simd, row, changes[row], &visible[row]),
            }
        }
        changes
    }

    /// As [`Rows::softmax`], but what becomes of the scores are `weights`.
    #[inline(always)]
    pub fn weigh(
        &mut self,
        simd: S,
        rows: usize,
        visible: &[Range<usize>; MAX_TILE],
        scales: &Scales,
        weights: &mut Weights,
    ) -> [f32; MAX_TILE] {
        let changes = self.rescale(simd, rows, visible);
        for row in 0..rows {
            match seen(&visible[row]) {
                Seen::Nothing => (weights.planes[row], weights.factors[row]) = ([[0; GROUP]; 2], 0.0),
                Seen::All => self.weights::<false>(simd, row, changes[row], &visible[row], scales, weights),
                Seen::Some => self.weights::<true>(simd, row, changes[row], &visible[row], scales, weights),
            }
        }
        changes
    }

    /// Finds the largest scores, those of this group included; returns the factors on what was summed before.
    #[inline(always)]
    fn rescale(&mut self, simd: S, rows: usize, visible: &[Range<usize>; MAX_TILE]) -> [f32; MAX_TILE] {
        let mut changes = [0.0f32; MAX_TILE];
        for row in 0..rows {
            let most = match seen(&visible[row]) {
                Seen::Nothing => continue,
                Seen::All => self.largest_of::<false>(simd, row, &visible[row]),
                Seen::Some => self.largest_of::<true>(simd, row, &visible[row]),
            };
            changes[row] = self.largest[row] - most;
            self.largest[row] = most;
        }
        // SAFETY: 16 floats.
        unsafe {
            let factors = exp(simd, simd.load(changes.as_ptr()));
            simd.store(changes.as_mut_ptr(), factors);
        }
        changes
    }

    /// The largest score so far, those of this group included.
    #[inline(always)]
    fn largest_of<const MASKED: bool>(&self, simd: S, row: usize, visible: &Range<usize>) -> f32 {
        let nothing = simd.splat(f32::NEG_INFINITY);
        let mut most = simd.splat(self.largest[row]);
        for index in 0..SUB_BLOCKS {
            if MASKED && mask(visible, index) == 0 {
                continue;
            }
            // SAFETY: in bounds; what was not scored is masked.
            let mut scores = unsafe { simd.load(self.scores[row].as_ptr().add(index * LANES)) };
            if MASKED {
                scores = simd.select(mask(visible, index), scores, nothing);
            }
            most = simd.max(scores, most);
        }
        simd.fold_max(most)
    }

    /// Turns a row's scores into probabilities and adds them to its total, which moves to the new largest score first.
    #[inline(always)]
    fn exponentiate<const WORDS: bool, const MASKED: bool>(
        &mut self,
        simd: S,
        row: usize,
        change: f32,
        visible: &Range<usize>,
    ) {
        let (most, zero) = (simd.splat(self.largest[row]), simd.splat(0.0));
        let mut total = simd.mul(self.totals[row], simd.splat(change));
        for index in 0..SUB_BLOCKS {
            let seen = if MASKED { mask(visible, index) } else { u16::MAX };
            if seen == 0 {
                self.scores[row][index * LANES..][..LANES].fill(0.0);
                if WORDS {
                    self.probabilities[row][index * LANES..][..LANES].fill(0);
                }
                continue;
            }
            // SAFETY: in bounds.
            unsafe {
                let place = self.scores[row].as_mut_ptr().add(index * LANES);
                let mut probabilities = exp_from(simd, simd.sub(simd.load(place), most), simd.splat(LEAST_SCORE));
                if MASKED {
                    probabilities = simd.select(seen, probabilities, zero);
                }
                probabilities = simd.round_bf16(probabilities);
                total = simd.add(total, probabilities);
                if WORDS {
                    let words = self.probabilities[row].as_mut_ptr().add(index * LANES);
                    simd.store_rounded_bf16(words, probabilities);
                } else {
                    simd.store(place, probabilities);
                }
            }
        }
        self.totals[row] = total;
    }

    /// Turns a row's scores into probabilities and adds them to its total, which moves to the new largest score first; then
    /// into probabilities times the scales of the values, rounded to codes in 0..=8191 of which the largest is the last.
    #[inline(always)]
    fn weights<const MASKED: bool>(
        &mut self,
        simd: S,
        row: usize,
        change: f32,
        visible: &Range<usize>,
        scales: &Scales,
        into: &mut Weights,
    ) {
        let (most, zero) = (simd.splat(self.largest[row]), simd.splat(0.0));
        let mut total = simd.mul(self.totals[row], simd.splat(change));
        let (mut weights, mut largest) = ([zero; SUB_BLOCKS], simd.splat_int(0));
        for (index, weight) in weights.iter_mut().enumerate() {
            let seen = if MASKED { mask(visible, index) } else { u16::MAX };
            if seen == 0 {
                continue;
            }
            // SAFETY: in bounds.
            let (scores, scales) = unsafe {
                let at = index * LANES;
                (simd.load(self.scores[row].as_ptr().add(at)), simd.load(scales.values.as_ptr().add(at)))
            };
            let mut probabilities = exp_from(simd, simd.sub(scores, most), simd.splat(LEAST_SCORE));
            if MASKED {
                probabilities = simd.select(seen, probabilities, zero);
            }
            total = simd.add(total, probabilities);
            *weight = simd.mul(probabilities, scales);
            if MASKED {
                // What is not seen may have any scale.
                *weight = simd.select(seen, *weight, zero);
            }
            largest = simd.max_int(simd.magnitude_bits(*weight), largest);
        }
        self.totals[row] = total;
        let largest = f32::from_bits(simd.fold_max_int(largest) as u32);
        into.factors[row] = largest * (1.0 / LARGEST_CODE);
        if largest == 0.0 || !largest.is_finite() {
            into.planes[row] = [[0; GROUP]; 2];
            return;
        }
        let (inverse, low_bits) = (simd.splat(LARGEST_CODE / largest), simd.splat_int((1 << PLANE_BITS) - 1));
        for (index, weights) in weights.into_iter().enumerate() {
            let codes = simd.round_to_int(simd.mul(weights, inverse));
            let [high, low] = &mut into.planes[row];
            // SAFETY: in bounds; both parts fit in 7 bits.
            unsafe {
                simd.store_i8(high.as_mut_ptr().add(index * LANES).cast(), simd.shift_down(codes, PLANE_BITS));
                simd.store_i8(low.as_mut_ptr().add(index * LANES).cast(), simd.and(codes, low_bits));
            }
        }
    }

    /// Moves the outputs to the new largest scores and adds the group's sums: `output = fma(output, change, sum)`.
    ///
    /// # Safety
    /// The task's states and sums hold `task.rows` rows and belong to the caller.
    #[inline(always)]
    pub unsafe fn add_sums(simd: S, task: &ChunkTask<'_>, rows: usize, changes: &[f32; MAX_TILE]) {
        let head_size = task.layer.head_size();
        for (row, change) in changes[..rows].iter().enumerate() {
            let change = simd.splat(*change);
            // SAFETY: by the contract.
            unsafe {
                let output = task.states.add(row * state_len(head_size) + STATE_HEADER);
                let sums = task.sums.add(row * head_size);
                for at in (0..head_size).step_by(LANES) {
                    let sum = simd.fma(simd.load(output.add(at)), change, simd.load(sums.add(at)));
                    simd.store(output.add(at), sum);
                }
            }
        }
    }

    /// Writes the heads of the states.
    ///
    /// # Safety
    /// As [`Rows::add_sums`].
    #[inline(always)]
    pub unsafe fn finish(&self, simd: S, task: &ChunkTask<'_>, rows: usize) {
        let stride = state_len(task.layer.head_size());
        for row in 0..rows {
            // SAFETY: by the contract.
            unsafe {
                *task.states.add(row * stride) = self.largest[row];
                *task.states.add(row * stride + 1) = simd.fold(self.totals[row]);
            }
        }
    }
}
