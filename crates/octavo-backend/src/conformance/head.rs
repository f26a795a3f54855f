//! What a step reports besides free draws: draws under rules, scores of known tokens, hidden states. And padding.

use std::sync::Arc;

use super::agreement::assert_same_results;
use super::driver::{Driver, Feed, Rows, Tolerance, assert_close};
use super::{TinyModel, TinyShape};
use crate::{
    Backend, LEAST_LOGPROB, LogitRules, Penalties, Reference, SampleError, SampleRow, ScoreRow, SeenToken, StepInputs,
    StepResult, TokenMask, WeightFormat,
};

/// Rows of the steps without layers: more than a tile of the head.
const ROWS: usize = 70;

fn run<B: Backend>(driver: &mut Driver<B>, inputs: &StepInputs) -> StepResult {
    driver.try_run(inputs).unwrap_or_else(|error| panic!("step: {error}"))
}

/// Rules of every kind and their combinations; those of row 63 leave nothing.
fn rules(row: usize, vocab_size: usize) -> LogitRules {
    let spread = |count: usize, step: usize| (0..count).map(move |i| ((i * step + row) % vocab_size) as u32);
    let mut bias: Vec<(u32, f32)> = spread(9, 31).map(|token| (token, (token % 5) as f32 - 2.0)).collect();
    bias.sort_unstable_by_key(|bias| bias.0);
    let mut allowed = TokenMask::none(vocab_size);
    spread(if row == 63 { 0 } else { 40 }, 7).for_each(|token| allowed.insert(token));
    let seen = spread(60, 3).map(|token| SeenToken { token, in_output: token % 4 }).collect();
    let penalties = Penalties { repetition: 1.3, frequency: 0.4, presence: -0.7, seen: Arc::new(seen) };
    LogitRules {
        bias: if row.is_multiple_of(2) { bias.into() } else { Arc::default() },
        allowed: row.is_multiple_of(3).then(|| Arc::new(allowed)),
        banned: if row.is_multiple_of(5) { spread(11, 13).collect() } else { Vec::new() },
        penalties: (row % 4 < 2).then_some(penalties),
    }
}

pub(super) fn rules_scores_and_hidden_states_equal_the_reference<B: Backend>(make: &impl Fn() -> B) {
    let shape = TinyShape { vocab_size: 500, num_layers: 0, format: WeightFormat::Q8_0, ..TinyShape::default() };
    let model = TinyModel::new(shape, 47);
    let tokens = model.tokens(ROWS, 5);
    let feed = [Feed { tokens: &tokens, start: 0, table: &[0, 1, 2, 3, 4], rows: Rows::All }];
    let sample = |row: usize| SampleRow {
        seed: 77,
        temperature: [0.0, 0.7, 1.0][row % 3],
        top_k: [0, 9][row % 2],
        top_p: [1.0, 0.8, 1.0, 0.99][row % 4],
        logprobs: [None, Some(0), Some(5), Some(500)][row % 4],
        rules: Some(Box::new(rules(row, shape.vocab_size))),
        ..SampleRow::greedy(row, row as u32 + 1)
    };
    let mut subject = Driver::without_poison(make(), &model);
    let mut reference = Driver::without_poison(Reference::mirror(make().numerics()), &model);
    let mut inputs = subject.inputs(&feed, sample);
    // Draws and scores of one row, and two scores of one: all are rows of logits of their own.
    let score = |i: usize| ScoreRow { row: i / 2, token: (i * 37 % 500) as u32, top: [0, 3, 500][i % 3] };
    inputs.scores = (0..ROWS).map(score).collect();
    inputs.hidden = (0..ROWS).step_by(9).collect();
    let (found, expected) = (run(&mut subject, &inputs), run(&mut reference, &inputs));
    assert_eq!(found.sampled[63], Err(SampleError::NothingAllowed), "rules that leave nothing");
    for (row, found) in found.sampled.iter().enumerate() {
        let allowed = inputs.samples[row].rules.as_ref().and_then(|rules| rules.allowed.as_ref());
        if let (Ok(sampled), Some(allowed)) = (found, allowed) {
            assert!(allowed.contains(sampled.token), "row {row} drew token {}, which is not allowed", sampled.token);
        }
    }
    let sums = subject.numerics().sums;
    assert_same_results("draws, scores and hidden states", sums, &found, &expected);
    assert_eq!(found.hidden.len(), inputs.hidden.len() * shape.hidden_size);
    for samples in [0, ROWS] {
        let apart = StepInputs { samples: inputs.samples[..samples].to_vec(), ..inputs.clone() };
        let apart = StepInputs { scores: inputs.scores[..ROWS - samples].to_vec(), hidden: vec![], ..apart };
        let alone = run(&mut subject, &apart);
        let scores = found.scores[..ROWS - samples].to_vec();
        let expected = StepResult { sampled: found.sampled[..samples].to_vec(), scores, hidden: vec![] };
        assert_same_results("draws without scores and scores without draws", sums, &alone, &expected);
    }
}

pub(super) fn padding_is_never_drawn_nor_weighed<B: Backend>(make: &impl Fn() -> B) {
    const NUM_TOKENS: u32 = 83;
    let mut model = TinyModel::new(TinyShape { num_layers: 0, ..TinyShape::default() }, 53);
    model.spec.head.num_tokens = NUM_TOKENS as usize;
    let tokens = model.tokens(20, 1);
    let feed = [Feed { tokens: &tokens, start: 0, table: &[0, 1], rows: Rows::All }];
    let mut subject = Driver::without_poison(make(), &model);
    let mut inputs = subject.inputs(&feed, |row| SampleRow {
        temperature: 1e4,
        logprobs: Some(100),
        min_p: [0.0, 0.5][row % 2],
        ..SampleRow::greedy(row, row as u32)
    });
    inputs.scores = vec![ScoreRow { row: 0, token: NUM_TOKENS - 1, top: 100 }, ScoreRow { row: 0, token: 99, top: 0 }];
    let found = run(&mut subject, &inputs);
    let is_distribution = |top: &[(u32, f32)]| {
        let sum: f64 = top.iter().map(|&(_, logprob)| f64::from(logprob).exp()).sum();
        top.len() == NUM_TOKENS as usize && top.iter().all(|top| top.0 < NUM_TOKENS) && (sum - 1.0).abs() < 1e-5
    };
    for sampled in &found.sampled {
        let sampled = sampled.as_ref().unwrap_or_else(|error| panic!("a row with padding: {error}"));
        assert!(sampled.token < NUM_TOKENS, "padding was drawn: {sampled:?}");
        assert!(sampled.logprobs.as_ref().is_some_and(|report| is_distribution(&report.top)), "{sampled:?}");
    }
    assert!(found.scores[0].as_ref().is_ok_and(|score| is_distribution(&score.top)), "{:?}", found.scores[0]);
    let padding = found.scores[1].as_ref().map(|score| (score.logprob, score.rank));
    assert_eq!(padding, Ok((LEAST_LOGPROB, NUM_TOKENS + 1)), "the score of padding");
    let mut reference = Driver::without_poison(Reference::mirror(make().numerics()), &model);
    assert_same_results("a row with padding", subject.numerics().sums, &found, &run(&mut reference, &inputs));
}

/// As a prompt's log-probabilities and an embedding are computed: chunk by chunk.
pub(super) fn scores_and_hidden_states_do_not_depend_on_chunks<B: Backend>(make: &impl Fn() -> B) {
    const LEN: usize = 90;
    let table = [5, 11, 0, 7, 2, 9];
    for format in [WeightFormat::F32, WeightFormat::Q4_1] {
        let model = TinyModel::new(TinyShape { num_layers: 2, group_size: 3, format, ..TinyShape::default() }, 59);
        let tokens = model.tokens(LEN + 1, 1);
        let in_chunks = |driver: &mut Driver<B>, chunk: usize| {
            let mut whole = StepResult::default();
            for start in (0..LEN).step_by(chunk) {
                let part = &tokens[start..LEN.min(start + chunk)];
                let feed = Feed { tokens: part, start, table: &table, rows: Rows::None };
                let score = |row: usize| ScoreRow { row, token: tokens[start + row + 1], top: 2 };
                let scores = (0..part.len()).map(score).collect();
                let inputs = StepInputs { scores, hidden: (0..part.len()).collect(), ..driver.reporting(&[feed]) };
                let result = run(driver, &inputs);
                whole.scores.extend(result.scores);
                whole.hidden.extend(result.hidden);
            }
            whole
        };
        let expected = in_chunks(&mut Driver::new(make(), &model, 16, 12), LEN);
        for chunk in [1, 7, 33, 64] {
            let mut driver = Driver::new(make(), &model, 16, 12);
            let found = in_chunks(&mut driver, chunk);
            let what = format!("{format}: scores and hidden states in chunks of {chunk}");
            assert_same_results(&what, driver.numerics().sums, &found, &expected);
        }
        if format == WeightFormat::F32 {
            let mut reference = Driver::new(Reference::mirror(make().numerics()), &model, 16, 12);
            let feed = Feed { tokens: &tokens[..LEN], start: 0, table: &table, rows: Rows::None };
            let inputs = StepInputs { hidden: (0..LEN).collect(), ..reference.reporting(&[feed]) };
            let hidden = [run(&mut reference, &inputs).hidden];
            let tolerance = Tolerance { most: 5e-2, mean: 2e-3 };
            assert_close("hidden states after two layers", &[expected.hidden], &hidden, tolerance);
        }
    }
}
