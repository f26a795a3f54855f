//! How long outputs are expected to become.

use crate::sequence::Sequence;

/// The mean length of outputs, learned from those that have ended and those that go on, so that a request is admitted
/// only beside room for what the running ones are going to write. Without it requests are admitted into blocks that
/// others need a moment later, and at saturation more than one preemption comes upon each request.
///
/// The mean is all tokens generated over all outputs ended, the likeliest value where every token is as likely as any
/// other to be the last. A mean over ended outputs alone begins too low, since the short ones end first.
#[derive(Debug)]
pub(crate) struct ExpectedOutput {
    tokens: f64,
    ended: f64,
}

/// What is expected before anything has ended, as if it had been seen so many times.
const FIRST_MEAN: f64 = 128.0;
const FIRST_WEIGHT: f64 = 4.0;

/// What is kept of the sums when an output ends: they follow about the latest 256.
const KEPT: f64 = 1.0 - 1.0 / 256.0;

impl ExpectedOutput {
    pub(crate) fn new() -> Self {
        Self { tokens: FIRST_MEAN * FIRST_WEIGHT, ended: FIRST_WEIGHT }
    }

    /// Takes in so many tokens that were generated.
    pub(crate) fn generated(&mut self, num_tokens: usize) {
        self.tokens += num_tokens as f64;
    }

    /// Takes in the end of an output, for whatever reason: one that was taken back has its blocks back too.
    pub(crate) fn ended(&mut self) {
        (self.tokens, self.ended) = (self.tokens * KEPT, (self.ended + 1.0) * KEPT);
    }

    /// The tokens to keep room for beside those that a sequence has: half of what the mean leaves, since outputs do not
    /// end all at once and each end gives its blocks back; at least one block's, at most what may come.
    pub(crate) fn room(&self, sequence: &Sequence, block_size: usize) -> usize {
        let residual = ((self.tokens / self.ended) as usize).saturating_sub(sequence.output_len());
        (residual / 2).max(block_size).min(sequence.final_len() - sequence.tokens().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::SequenceBlocks;
    use crate::request::{Request, RequestId, SamplingParams, SeqId};

    fn sequence(final_len: usize) -> Sequence {
        let params = SamplingParams::default();
        let request = Request { id: RequestId(0), prompt: vec![1], params, arrival: 0, deadline: None };
        Sequence::new(SeqId { arrival: 0, choice: 0 }, request, final_len, SequenceBlocks::default())
    }

    #[test]
    fn room_is_kept_for_half_of_what_the_mean_leaves_but_no_more_than_may_come() {
        let expected = ExpectedOutput::new();
        assert_eq!(expected.room(&sequence(1000), 16), 64);
        assert_eq!(expected.room(&sequence(50), 16), 49);
        let mut begun = sequence(1000);
        begun.append(&[5; 28], &[]);
        assert_eq!(expected.room(&begun, 16), 50);
    }

    #[test]
    fn room_for_a_block_is_kept_for_a_sequence_beyond_the_mean() {
        let mut sequence = sequence(1000);
        sequence.append(&[5; 200], &[]);
        assert_eq!(ExpectedOutput::new().room(&sequence, 16), 16);
    }

    #[test]
    fn the_mean_grows_with_outputs_that_go_on_and_follows_the_latest_that_ended() {
        let mut expected = ExpectedOutput::new();
        expected.generated(4 * 128);
        assert_eq!(expected.room(&sequence(1000), 16), 128, "twice as many tokens, and no end yet");
        for _ in 0..2000 {
            expected.generated(40);
            expected.ended();
        }
        assert_eq!(expected.room(&sequence(1000), 16), 20);
    }
}
