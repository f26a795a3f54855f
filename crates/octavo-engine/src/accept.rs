//! From sampled rows to what each sequence gains.

use octavo_backend::{SampleError, Sampled, TokenId, TokenLogprobs};
use octavo_sched::{Candidate, Hypothesis, Scheduler, SeqSpan, StepPlan, StepRun};

/// One run for each sampled row, in plan order.
///
/// With drafts this becomes the longest prefix of drafts that equal the samples, and one token more.
pub(crate) fn accept(scheduler: &Scheduler, plan: &StepPlan, sampled: &[Result<Sampled, SampleError>]) -> Vec<StepRun> {
    let is_beam = |span: &SeqSpan| scheduler.sequence(span.seq).is_some_and(|seq| seq.params().beam.is_some());
    let rows = plan.spans.iter().flat_map(|span| std::iter::repeat_n(is_beam(span), span.samples));
    let run = |(row, is_beam): (&Result<Sampled, SampleError>, bool)| match row {
        Ok(Sampled { logprobs: Some(logprobs), .. }) if is_beam => StepRun::Candidates(candidates(&logprobs.top)),
        Ok(sampled) if !is_beam => StepRun::Tokens(vec![sampled.token]),
        Ok(_) | Err(SampleError::NotFinite | SampleError::NothingAllowed) => StepRun::Failed,
    };
    sampled.iter().zip(rows).map(run).collect()
}

/// What a beam proposes: the likeliest tokens, descending. Equal ones share the better rank.
fn candidates(top: &[(TokenId, f32)]) -> Vec<Candidate> {
    let candidate = |&(token, logprob): &(TokenId, f32)| {
        let rank = 1 + top.partition_point(|(_, better)| *better > logprob) as u32;
        Candidate { token, logprob, rank }
    };
    top.iter().map(candidate).collect()
}

/// The log-probabilities of a found output, without alternatives.
pub(crate) fn logprobs(found: &Hypothesis) -> Vec<TokenLogprobs> {
    let report = |&Candidate { logprob, rank, .. }: &Candidate| TokenLogprobs { logprob, rank, top: vec![] };
    found.tokens.iter().map(report).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_equal_log_probability_share_the_better_rank() {
        let ranks = candidates(&[(4, -0.5), (1, -1.0), (7, -1.0), (2, -3.0)]);
        assert_eq!(ranks.iter().map(|candidate| candidate.rank).collect::<Vec<_>>(), [1, 2, 2, 4]);
    }
}
