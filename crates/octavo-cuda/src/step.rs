//! A step's inputs as the kernels read them.

use std::collections::BTreeMap;

use octavo_backend::{BackendError, GroupInputs, SpanInput, StepInputs};

use crate::{
    arena::{Layout, Place},
    kernels::{CHUNK, SPAN_INTS, TILE_ROWS, int},
    plan::CudaPlan,
    sampler::SamplerTile,
};

/// Where the pieces of a step's description are.
pub(crate) struct PreparedStep {
    pub tokens: Place<i32>,
    pub positions: Place<i32>,
    /// One for each KV group.
    pub groups: Vec<GroupStep>,
    /// For each number of query heads a KV head has, the tiles of the spans of several rows.
    pub tiles: BTreeMap<usize, Place<i32>>,
    /// Chunks that the longest of the single rows sees.
    pub chunks: usize,
    /// The rows of all draws and then of all scores.
    pub head_rows: Place<i32>,
    /// The rows whose hidden states are wanted, and where those go.
    pub hidden_rows: Place<i32>,
    pub hidden: Place<f32>,
    /// Draws and scores in tiles of [`crate::plan::HEAD_ROWS`].
    pub sampler: Vec<SamplerTile>,
}

/// What a KV group's layers read.
pub(crate) struct GroupStep {
    pub slots: Place<i32>,
    pub tables: Place<i32>,
    /// The spans of one row.
    pub single: Place<i32>,
    /// The spans of several rows.
    pub ragged: Place<i32>,
    /// Copies of blocks: from, to.
    pub copies: Place<i32>,
}

impl CudaPlan {
    /// Checks a step, gathers its description and plans its results.
    pub(crate) fn prepare(&mut self, inputs: &StepInputs) -> Result<PreparedStep, BackendError> {
        inputs.check(self.spec.vocab_size, &self.geometry, &self.limits)?;
        self.upload.clear();
        let tokens: Vec<i32> = inputs.tokens.iter().map(|&token| token as i32).collect();
        let positions: Vec<i32> =
            inputs.spans.iter().flat_map(|span| (span.start..span.start + span.len).map(int)).collect();
        let (tokens, positions) = (self.upload.push(&tokens)?, self.upload.push(&positions)?);
        let groups = inputs.groups.iter().map(|group| self.prepare_group(inputs, group)).collect::<Result<_, _>>()?;
        let mut tiles = BTreeMap::new();
        for index in 0..self.layers.len() {
            let shape = self.layers[index].shape;
            let group_size = shape.num_heads / shape.num_kv_heads;
            if let std::collections::btree_map::Entry::Vacant(entry) = tiles.entry(group_size) {
                entry.insert(self.upload.push(&tiles_of(&inputs.spans, group_size))?);
            }
        }
        let single = inputs.spans.iter().filter(|span| span.len == 1);
        let head_rows: Vec<i32> = inputs.samples.iter().map(|sample| int(sample.row)).collect();
        let head_rows = [head_rows, inputs.scores.iter().map(|score| int(score.row)).collect()].concat();
        let hidden_rows: Vec<i32> = inputs.hidden.iter().map(|&row| int(row)).collect();
        let mut results = Layout::default();
        let step = PreparedStep {
            tokens,
            positions,
            groups,
            tiles,
            chunks: single.map(|span| span.start / CHUNK + 1).max().unwrap_or(0),
            head_rows: self.upload.push(&head_rows)?,
            hidden_rows: self.upload.push(&hidden_rows)?,
            hidden: results.place(hidden_rows.len() * self.spec.hidden_size),
            sampler: SamplerTile::prepare_all(inputs, self.spec.head.num_tokens, &mut self.upload, &mut results)?,
        };
        self.download.expect(&results)?;
        Ok(step)
    }

    fn prepare_group(&mut self, inputs: &StepInputs, group: &GroupInputs) -> Result<GroupStep, BackendError> {
        let block_size = self.limits.block_size;
        let mut slots = Vec::with_capacity(inputs.tokens.len());
        let (mut single, mut ragged) = (Vec::new(), Vec::new());
        for (index, span) in inputs.spans.iter().enumerate() {
            let table = group.table(index);
            slots.extend((span.start..span.start + span.len).map(|position| {
                let block = table[position / block_size] as usize;
                int(block * block_size + position % block_size)
            }));
            let spans = match span.len {
                0 => continue,
                1 => &mut single,
                _ => &mut ragged,
            };
            let ints: [i32; SPAN_INTS] =
                [int(span.first_row), int(span.len), int(span.start), int(group.table_starts[index]), 0];
            spans.extend(ints);
        }
        // An entry before a window may hold anything, and is not read.
        let tables: Vec<i32> = group.tables.iter().map(|&block| block as i32).collect();
        let copies: Vec<i32> = group.copies.iter().flat_map(|copy| [copy.from as i32, copy.to as i32]).collect();
        Ok(GroupStep {
            slots: self.upload.push(&slots)?,
            tables: self.upload.push(&tables)?,
            single: self.upload.push(&single)?,
            ragged: self.upload.push(&ragged)?,
            copies: self.upload.push(&copies)?,
        })
    }
}

/// Pairs of a span, counted among those of several rows, and the first row of a tile of it. Tiles late in a sequence see
/// the most, and come first, so that none of them is left alone at the end.
fn tiles_of(spans: &[SpanInput], group_size: usize) -> Vec<i32> {
    let ragged = spans.iter().filter(|span| span.len > 1).enumerate();
    let mut tiles: Vec<(usize, [i32; 2])> = ragged
        .flat_map(|(index, span)| {
            let rows = (0..span.len * group_size).step_by(TILE_ROWS);
            rows.map(move |row| (span.start + row / group_size, [int(index), int(row)]))
        })
        .collect();
    tiles.sort_by_key(|&(position, _)| std::cmp::Reverse(position));
    tiles.into_iter().flat_map(|(_, tile)| tile).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_row_of_spans_of_several_rows_the_latest_first() {
        let span = |first_row, len, start| SpanInput { first_row, len, start };
        let spans = [span(0, 1, 500), span(1, 30, 0), span(31, 0, 9), span(31, 2, 100)];
        // 30 rows of 3 heads are two tiles; the second begins at row 64 / 3 = 21.
        assert_eq!(tiles_of(&spans, 3), [1, 0, 0, 64, 0, 0]);
    }
}
