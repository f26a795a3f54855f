//! The head on inputs that the reference gets too, so that nothing before it can make a difference.

use octavo_backend::{
    Backend, GroupInputs, Reference, ScoreRow, SpanInput, StepInputs, StepLimits, WeightFormat,
    conformance::{TinyModel, TinyShape},
    sampling,
};

use crate::{CpuBackend, CpuOptions, isa::Isa};

const ROWS: usize = 40;
const VOCAB_SIZE: usize = 1001;

/// Every row is scored, and its hidden state is wanted.
fn inputs(model: &TinyModel) -> StepInputs {
    let tokens = model.tokens(ROWS, 1);
    let score = |row: usize| ScoreRow { row, token: tokens[ROWS - 1 - row], top: VOCAB_SIZE as u32 };
    StepInputs {
        scores: (0..ROWS).map(score).collect(),
        hidden: (0..ROWS).collect(),
        spans: vec![SpanInput { first_row: 0, len: ROWS, start: 0 }],
        groups: vec![GroupInputs { tables: vec![2, 0, 1], table_starts: vec![0, 3], copies: vec![] }],
        tokens,
        ..StepInputs::default()
    }
}

#[test]
fn logits_have_the_bits_of_the_mirrored_reference_and_logprobs_follow_from_them() {
    let limits = StepLimits { max_rows: ROWS, max_spans: 1, max_positions: ROWS, block_size: 16, num_blocks: vec![3] };
    for format in WeightFormat::ALL {
        let mut shape =
            TinyShape { vocab_size: VOCAB_SIZE, hidden_size: 576, num_layers: 2, format, ..TinyShape::default() };
        if format.block() > 32 {
            shape = TinyShape { hidden_size: 768, intermediate_size: 256, head_size: 64, ..shape };
        }
        let model = TinyModel::new(shape, 61);
        let inputs = inputs(&model);
        for isa in Isa::supported() {
            let mut backend =
                CpuBackend::new(CpuOptions { threads: Some(2), isa: Some(isa), ..CpuOptions::default() }).unwrap();
            let mut plan = backend.load(&model.spec, &mut model.clone(), &limits).unwrap();
            let result = backend.run(&mut plan, &inputs).unwrap();
            // SAFETY: the step is over.
            let found = unsafe { plan.memory.read(plan.buffers.logits, 0..ROWS * VOCAB_SIZE) };

            let reference = Reference::mirror(backend.numerics());
            let mirrored = reference.load(&model.spec, &mut model.clone(), &limits).unwrap();
            let expected = reference.logits(&mirrored, &result.hidden);
            assert!(found.iter().map(|v| v.to_bits()).eq(expected.iter().map(|v| v.to_bits())), "{format} on {isa}");

            let rows = expected.chunks(VOCAB_SIZE).zip(&inputs.scores).zip(result.scores);
            for ((logits, score), found) in rows {
                let found = found.unwrap();
                assert_eq!(found, sampling::score(logits, score).unwrap(), "{format} on {isa}, row {}", score.row);
                let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                for (token, logprob) in &found.top {
                    let exact = f64::from(logits[*token as usize]) - sum.ln();
                    assert!((f64::from(*logprob) - exact).abs() < 2e-6, "{logprob} and {exact}");
                }
            }
        }
    }
}
