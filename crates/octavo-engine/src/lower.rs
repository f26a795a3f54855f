//! From the scheduler's plan to the backend's flat arrays.

use octavo_backend::{BlockCopy, GroupInputs, SampleRow, SpanInput, StepInputs};
use octavo_sched::{Scheduler, Sequence, StepPlan};

/// Writes out the tokens, block tables and sampled rows of `plan`.
///
/// Invariant: every span of the plan belongs to a sequence that the scheduler still holds; the plan was made by the
/// same scheduler and nothing was aborted since.
pub(crate) fn lower(scheduler: &Scheduler, plan: &StepPlan, num_groups: usize) -> StepInputs {
    let empty = GroupInputs { table_starts: vec![0], ..GroupInputs::default() };
    let mut inputs = StepInputs { groups: vec![empty; num_groups], ..StepInputs::default() };
    for span in &plan.spans {
        let Some(sequence) = scheduler.sequence(span.seq) else { continue };
        let first_row = inputs.tokens.len();
        inputs.spans.push(SpanInput { first_row, len: span.len, start: span.start });
        inputs.tokens.extend(&sequence.tokens()[span.start..span.end()]);
        for (group, table) in inputs.groups.iter_mut().zip(sequence.tables()) {
            group.tables.extend(table.blocks());
            group.table_starts.push(group.tables.len());
        }
        let (row, choice) = (inputs.tokens.len() - 1, sequence.id().choice);
        let choices = (choice..).take(span.samples);
        inputs.samples.extend(choices.map(|choice| sample_row(sequence, row, span.end(), choice)));
    }
    for copy in &plan.copies {
        inputs.groups[copy.group].copies.push(BlockCopy { from: copy.from, to: copy.to });
    }
    inputs
}

/// The draw of the token at `position` of one choice, from the logits of `row`.
fn sample_row(sequence: &Sequence, row: usize, position: usize, choice: u32) -> SampleRow {
    let params = sequence.params();
    SampleRow {
        row,
        position: position as u32,
        choice,
        seed: params.seed,
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        logprobs: params.logprobs,
        rules: None,
    }
}
