//! Refuses a step that contradicts itself or the limits given at load, before anything of it is computed.
//!
//! To [`StepInputs::check`] this adds what the workers' freedom from data races rests on: each KV slot is written by one
//! row at most. Any number may read it.

use std::ops::Range;

use octavo_backend::{BackendError, DecoderSpec, KvGeometry, SpanInput, StepInputs, StepLimits};

/// What steps are checked against, and the blocks that the current one writes.
pub struct StepCheck {
    vocab_size: usize,
    geometry: KvGeometry,
    limits: StepLimits,
    /// For each KV group and block, the last step that wrote it.
    written: Vec<Vec<u32>>,
    step: u32,
}

impl StepCheck {
    /// For plans of this spec and these limits.
    pub fn new(spec: &DecoderSpec, limits: &StepLimits) -> StepCheck {
        StepCheck {
            vocab_size: spec.vocab_size,
            geometry: spec.kv_geometry(limits.block_size),
            limits: limits.clone(),
            written: limits.num_blocks.iter().map(|&blocks| vec![0; blocks]).collect(),
            step: 0,
        }
    }

    /// Bytes that [`StepCheck::new`] takes.
    pub fn bytes(limits: &StepLimits) -> usize {
        limits.num_blocks.iter().map(|blocks| blocks * size_of::<u32>()).sum()
    }

    /// Checks every number that is later used as an index.
    ///
    /// # Errors
    /// [`BackendError::Inputs`] with the first contradiction.
    pub fn check(&mut self, inputs: &StepInputs) -> Result<(), BackendError> {
        inputs.check(self.vocab_size, &self.geometry, &self.limits)?;
        if self.step == u32::MAX {
            self.written.iter_mut().for_each(|blocks| blocks.fill(0));
            self.step = 0;
        }
        self.step += 1;
        for (group, written) in inputs.groups.iter().zip(&mut self.written) {
            for (index, span) in inputs.spans.iter().enumerate() {
                let blocks = &group.table(index)[written_entries(span, self.limits.block_size)];
                if let Some(block) = blocks.iter().find(|&&block| mark(&mut written[block as usize], self.step)) {
                    return Err(BackendError::Inputs {
                        what: "block",
                        found: format!("{block}, written at two places in one step"),
                        expected: "a block of its own for each span that writes".to_owned(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// The entries of a span's block table that a step writes.
fn written_entries(span: &SpanInput, block_size: usize) -> Range<usize> {
    let first = span.start / block_size;
    first..(span.start + span.len).div_ceil(block_size).max(first)
}

/// Whether the block was marked in this step before; it is now.
fn mark(last: &mut u32, step: u32) -> bool {
    std::mem::replace(last, step) == step
}

#[cfg(test)]
mod tests {
    use octavo_backend::{BlockCopy, GroupInputs, KvGroup};

    use super::*;

    fn check() -> StepCheck {
        StepCheck {
            vocab_size: 10,
            geometry: KvGeometry {
                block_size: 16,
                groups: vec![KvGroup { layers: vec![0], window: Some(20), elements_per_token: 32, heads_per_token: 2 }],
            },
            limits: StepLimits { max_rows: 8, max_spans: 2, max_positions: 64, block_size: 16, num_blocks: vec![4] },
            written: vec![vec![0; 4]],
            step: 0,
        }
    }

    fn inputs() -> StepInputs {
        StepInputs {
            tokens: vec![1, 2, 3],
            spans: vec![SpanInput { first_row: 0, len: 2, start: 40 }, SpanInput { first_row: 2, len: 1, start: 0 }],
            groups: vec![GroupInputs { tables: vec![99, 1, 2, 3], table_starts: vec![0, 3, 4], copies: vec![] }],
            ..StepInputs::default()
        }
    }

    #[test]
    fn a_sound_step_is_let_through_even_with_rubbish_before_its_window() {
        let mut check = check();
        check.check(&inputs()).unwrap();
        check.step = u32::MAX - 1;
        for _ in 0..3 {
            check.check(&inputs()).unwrap();
        }
    }

    #[test]
    fn each_contradiction_is_named() {
        type Breaking = fn(&mut StepInputs);
        let broken: [(&str, Breaking); 5] = [
            ("token: found 10", |i| i.tokens[0] = 10),
            ("positions of a span", |i| i.spans[1].start = usize::MAX),
            ("block: found 7, expected below 4", |i| i.groups[0].tables[1] = 7),
            ("block: found 2, written at two places", |i| i.groups[0].tables[3] = 2),
            ("blocks of a span: found 3", |i| i.groups[0].table_starts = vec![0, 2, 4]),
        ];
        for (message, breaking) in broken {
            let mut inputs = inputs();
            breaking(&mut inputs);
            let error = check().check(&inputs).unwrap_err().to_string();
            assert!(error.contains(message), "{error} does not say {message}");
        }
    }

    #[test]
    fn blocks_that_nobody_writes_may_be_read_by_many() {
        let mut inputs = inputs();
        inputs.spans =
            vec![SpanInput { first_row: 0, len: 2, start: 32 }, SpanInput { first_row: 2, len: 1, start: 35 }];
        inputs.groups[0] = GroupInputs {
            tables: vec![0, 1, 2, 0, 1, 3],
            table_starts: vec![0, 3, 6],
            copies: vec![BlockCopy { from: 2, to: 3 }],
        };
        check().check(&inputs).unwrap();
        inputs.groups[0].tables[5] = 2;
        let error = check().check(&inputs).unwrap_err().to_string();
        assert!(error.contains("2, written at two places"), "{error}");
    }
}
