//! How long outputs are expected to become.

use crate::sequence::Sequence;

/// A running mean of the lengths at which outputs ended, so that a request is admitted only beside room for what the
/// running ones are still going to write. Without it requests are admitted into blocks that others need a moment later, and
/// at saturation more than one preemption comes upon each request.
#[derive(Debug)]
pub(crate) struct ExpectedOutput {
    mean: f64,
    num_ended: u64,
}

/// What is expected before anything has ended.
const FIRST_MEAN: f64 = 128.0;

/// The mean follows about so many of the latest outputs.
const MEMORY: u64 = 256;

impl ExpectedOutput {
    pub(crate) fn new() -> Self {
        Self { mean: FIRST_MEAN, num_ended: 0 }
    }

    /// Takes in the length of an output that has ended. The first guess counts as one.
    pub(crate) fn learn(&mut self, output_len: usize) {
        self.num_ended += 1;
        self.mean += (output_len as f64 - self.mean) / (self.num_ended + 1).min(MEMORY) as f64;
    }

    /// The tokens that a sequence is still expected to generate: at least one block's, at most what it may.
    pub(crate) fn residual(&self, sequence: &Sequence, block_size: usize) -> usize {
        let residual = (self.mean as usize).saturating_sub(sequence.output_len());
        residual.max(block_size).min(sequence.final_len() - sequence.tokens().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::SequenceBlocks;
    use crate::request::{Request, RequestId, SamplingParams, SeqId};

    fn sequence(final_len: usize) -> Sequence {
        let request = Request { id: RequestId(0), prompt: vec![1], params: SamplingParams::default(), arrival: 0 };
        Sequence::new(SeqId { arrival: 0, choice: 0 }, request, final_len, SequenceBlocks::default())
    }

    #[test]
    fn what_is_left_of_the_mean_is_expected_but_no_more_than_may_come() {
        let expected = ExpectedOutput::new();
        assert_eq!(expected.residual(&sequence(1000), 16), 128);
        assert_eq!(expected.residual(&sequence(50), 16), 49);
    }

    #[test]
    fn at_least_a_block_is_expected_of_a_sequence_beyond_the_mean() {
        let mut sequence = sequence(1000);
        sequence.append(&[5; 200], &[]);
        assert_eq!(ExpectedOutput::new().residual(&sequence, 16), 16);
    }

    #[test]
    fn the_mean_is_of_what_ended_and_follows_the_latest() {
        let mut expected = ExpectedOutput::new();
        expected.learn(64);
        assert_eq!(expected.residual(&sequence(1000), 16), 96);
        (0..2000).for_each(|_| expected.learn(20));
        assert_eq!(expected.residual(&sequence(1000), 16), 20);
    }
}
