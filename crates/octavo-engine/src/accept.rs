//! From sampled rows to what each sequence gains.

use octavo_backend::{SampleError, Sampled};
use octavo_sched::StepRun;

/// One run for each sampled row, in plan order.
///
/// With drafts this becomes the longest prefix of drafts that equal the samples, and one token more.
pub(crate) fn accept(sampled: &[Result<Sampled, SampleError>]) -> Vec<StepRun> {
    let run = |row: &Result<Sampled, SampleError>| match row {
        Ok(sampled) => StepRun::Tokens(vec![sampled.token]),
        Err(SampleError::NotFinite | SampleError::NothingAllowed) => StepRun::Failed,
    };
    sampled.iter().map(run).collect()
}
