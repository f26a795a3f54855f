//! Which units of work a step has.

use std::ops::Range;

use octavo_backend::{SpanInput, StepInputs, StepLimits};

use super::{Attention, AttentionShape, CHUNK};

/// A span of at most this many rows over at least two chunks has its chunks spread over the workers.
const SPREAD_ROWS: usize = 8;

/// Rows of one KV head of one span, and the chunks they see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// Index of the span.
    pub span: usize,
    /// The KV head.
    pub head: usize,
    /// The first row, counted in (token, query head of the group) from the start of the span.
    pub first: usize,
    /// Number of rows.
    pub rows: usize,
    /// Set when the unit is one chunk only.
    pub spread: Option<SpreadUnit>,
}

/// One chunk of a tile, and the place of its first row's partial state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpreadUnit {
    /// Index of the chunk.
    pub chunk: usize,
    /// Index of the partial state.
    pub partial: usize,
}

impl Unit {
    /// The step's row and the query head of the unit's row `index`.
    pub(super) fn row(&self, attention: &Attention<'_>, index: usize) -> (usize, usize) {
        let group_size = attention.shape.group_size();
        let row = self.first + index;
        let token = attention.inputs.spans[self.span].first_row + row / group_size;
        (token, self.head * group_size + row % group_size)
    }

    /// The chunk that the unit begins with.
    pub(super) fn first_chunk(&self, attention: &Attention<'_>) -> usize {
        self.spread.map_or_else(|| self.chunks(attention).start, |spread| spread.chunk)
    }

    /// All chunks that any of the unit's rows sees.
    pub(super) fn chunks(&self, attention: &Attention<'_>) -> Range<usize> {
        let span = &attention.inputs.spans[self.span];
        let position = |index| span.start + self.row(attention, index).0 - span.first_row;
        chunks(&attention.shape, position(0)..position(self.rows - 1) + 1)
    }
}

/// The chunks that rows at consecutive positions see.
fn chunks(shape: &AttentionShape, positions: Range<usize>) -> Range<usize> {
    shape.visible(positions.start).start / CHUNK..positions.end.div_ceil(CHUNK)
}

/// Rows whose chunks are spread: those of a span, or of several that have the chunks in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spread {
    pub(super) first_row: usize,
    rows: usize,
    first_chunk: usize,
    pub(super) num_chunks: usize,
    /// Its first partial state; they lie `[chunk][KV head][row][query head of the group]`.
    partial: usize,
    /// Rows of one KV head.
    head_rows: usize,
}

impl Spread {
    /// The partial state of a chunk's and KV head's first row.
    pub(super) fn first_partial(&self, chunk: usize, head: usize, num_kv_heads: usize) -> usize {
        self.partial + (chunk * num_kv_heads + head) * self.head_rows
    }
}

/// All units of one attention shape in one step.
#[derive(Debug)]
pub struct AttentionSchedule {
    shape: AttentionShape,
    /// Rows of a full tile.
    tile: usize,
    block_size: usize,
    /// Partial states that there is memory for.
    partials: usize,
    units: Vec<Unit>,
    /// Of spans, their later chunks where they share the first ones.
    spreads: Vec<Spread>,
    /// Of several spans, the first chunks, which are the same blocks for all.
    shared: Vec<Spread>,
}

impl AttentionSchedule {
    /// A schedule for steps within the limits.
    pub fn new(shape: AttentionShape, tile: usize, limits: &StepLimits) -> AttentionSchedule {
        AttentionSchedule {
            shape,
            tile,
            block_size: limits.block_size,
            partials: AttentionSchedule::partials(&shape, limits),
            units: Vec::with_capacity(most_units(&shape, tile, limits)),
            spreads: Vec::with_capacity(limits.max_spans),
            shared: Vec::with_capacity(limits.max_spans),
        }
    }

    /// Bytes of a schedule's lists.
    pub fn bytes(shape: &AttentionShape, tile: usize, limits: &StepLimits) -> usize {
        most_units(shape, tile, limits) * size_of::<Unit>() + 2 * limits.max_spans * size_of::<Spread>()
    }

    /// Partial states worth having memory for: two sequences of full length, and four chunks of each of the others.
    pub fn partials(shape: &AttentionShape, limits: &StepLimits) -> usize {
        shape.num_heads * (2 * limits.max_positions.div_ceil(CHUNK) + 4 * limits.max_spans)
    }

    /// The layer shape it is for.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// The units, in an order in which those of one span and head are neighbours.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Plans a step for `workers`. What is computed, and in which order for each row, does not depend on them.
    ///
    /// Spans of one row that follow each other and begin with the same blocks read the chunks that these fill together.
    pub fn plan(&mut self, inputs: &StepInputs, workers: usize) {
        self.units.clear();
        self.spreads.clear();
        self.shared.clear();
        let group_size = self.shape.group_size();
        let mut used = 0;
        // First chunks that the spans up to `end` have in common.
        let (mut common, mut end) = (0, 0);
        for (index, span) in inputs.spans.iter().enumerate() {
            let rows = span.len * group_size;
            if rows == 0 {
                continue;
            }
            if index >= end {
                (common, end) = self.shared_from(inputs, index);
                let needed = self.states_of_shared(inputs, index..end, common);
                if needed == 0 || used + needed > self.partials {
                    common = 0;
                } else {
                    let shared = self.place(span.first_row, end - index, 0..common, &mut used);
                    self.spread(index, &shared);
                    self.shared.push(shared);
                }
            }
            let chunks = chunks(&self.shape, span.start..span.start + span.len);
            let needed = chunks.len() * rows * self.shape.num_kv_heads;
            let is_worth_it = workers > 1 && span.len <= SPREAD_ROWS && chunks.len() > 1;
            // The memory for what is left of spans that share was counted with what they share.
            if common > 0 || is_worth_it && used + needed <= self.partials {
                let spread = self.place(span.first_row, span.len, chunks.start.max(common)..chunks.end, &mut used);
                self.spread(index, &spread);
                self.spreads.push(spread);
                continue;
            }
            for head in 0..self.shape.num_kv_heads {
                for first in (0..rows).step_by(self.tile) {
                    self.units.push(Unit { span: index, head, first, rows: self.tile.min(rows - first), spread: None });
                }
            }
        }
    }

    /// Rows with their chunks and the next free partial states.
    fn place(&self, first_row: usize, rows: usize, chunks: Range<usize>, used: &mut usize) -> Spread {
        let head_rows = rows * self.shape.group_size();
        let spread =
            Spread { first_row, rows, first_chunk: chunks.start, num_chunks: chunks.len(), partial: *used, head_rows };
        *used += chunks.len() * head_rows * self.shape.num_kv_heads;
        spread
    }

    /// How many first chunks a span and those after it have in common, and the index after the last of these spans.
    fn shared_from(&self, inputs: &StepInputs, first: usize) -> (usize, usize) {
        let whole = |index: usize| match inputs.spans[index] {
            SpanInput { len: 1, start, .. } if self.shape.window.is_none() => start / CHUNK,
            _ => 0,
        };
        let (mut common, mut end) = (whole(first), first + 1);
        while common > 0 && end < inputs.spans.len() {
            let most = common.min(whole(end));
            let group = &inputs.groups[self.shape.group];
            let blocks = (most * CHUNK).div_ceil(self.block_size);
            let pairs = group.table(first)[..blocks].iter().zip(group.table(end));
            let same = pairs.take_while(|(a, b)| a == b).count();
            let chunks = most.min(same * self.block_size / CHUNK);
            if chunks == 0 {
                break;
            }
            (common, end) = (chunks, end + 1);
        }
        (common, end)
    }

    /// Partial states that spans need which share their first chunks; 0 if there is nothing to share.
    fn states_of_shared(&self, inputs: &StepInputs, spans: Range<usize>, common: usize) -> usize {
        if common == 0 || spans.len() < 2 {
            return 0;
        }
        let own: usize = inputs.spans[spans.clone()].iter().map(|span| (span.start + 1).div_ceil(CHUNK) - common).sum();
        (spans.len() * common + own) * self.shape.num_heads
    }

    fn spread(&mut self, span: usize, spread: &Spread) {
        for chunk in 0..spread.num_chunks {
            for head in 0..self.shape.num_kv_heads {
                for first in (0..spread.head_rows).step_by(self.tile) {
                    let partial = spread.first_partial(chunk, head, self.shape.num_kv_heads) + first;
                    let unit = SpreadUnit { chunk: spread.first_chunk + chunk, partial };
                    let rows = self.tile.min(spread.head_rows - first);
                    self.units.push(Unit { span, head, first, rows, spread: Some(unit) });
                }
            }
        }
    }

    /// The chunks of a row that are spread, in their order: those it shares, then its own.
    pub(super) fn spreads_of(&self, row: usize) -> impl Iterator<Item = &Spread> {
        [&self.shared, &self.spreads].into_iter().filter_map(move |spreads| {
            let at = spreads.partition_point(|spread| spread.first_row + spread.rows <= row);
            spreads.get(at).filter(|spread| spread.first_row <= row)
        })
    }
}

/// Full tiles, one that is not full for each span and KV head, and one unit for each partial state.
fn most_units(shape: &AttentionShape, tile: usize, limits: &StepLimits) -> usize {
    let full = limits.max_rows * shape.num_heads / tile;
    full + limits.max_spans * shape.num_kv_heads + AttentionSchedule::partials(shape, limits)
}
