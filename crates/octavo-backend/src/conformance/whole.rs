//! Decoders of two layers in every weight format, and what a step promises as a whole.

use super::agreement::{assert_same_draws, assert_same_rows};
use super::driver::{Driver, Feed, Rows, Tolerance, assert_close};
use super::{TinyModel, TinyShape};
use crate::{
    Backend, BackendError, BlockCopy, InputRounding, KvType, Numerics, Reference, SampleError, SampleRow, Sampled,
    Sums, WeightFormat, WeightRounding,
};

const TABLE: [u32; 8] = [5, 11, 0, 7, 2, 9, 4, 10];
const STRANGER: [u32; 4] = [1, 3, 6, 8];

fn model(format: WeightFormat) -> TinyModel {
    let mut shape = TinyShape { num_layers: 2, group_size: 3, window: Some(40), format, ..TinyShape::default() };
    if format.block() > 32 {
        // An MLP as wide as the residual stream, too.
        shape = TinyShape { hidden_size: 256, intermediate_size: 256, head_size: 64, group_size: 2, ..shape };
    }
    TinyModel::new(shape, 23)
}

pub(super) fn agrees_in_every_format<B: Backend>(make: &impl Fn() -> B) {
    let numerics = make().numerics();
    for format in WeightFormat::ALL {
        let model = model(format);
        let tokens = model.tokens(100, 3);
        let feed = [Feed { tokens: &tokens, start: 0, table: &TABLE, rows: Rows::All }];
        let expected = Driver::new(Reference::mirror(numerics), &model, 16, 12).step(&feed);
        let found = Driver::new(make(), &model, 16, 12).step(&feed);
        assert_close(&format!("two layers of {format}"), &found, &expected, tolerance(numerics, format));
    }
}

/// One quantum of a rounded activation can fall the other way when attention differs in the last bits.
fn tolerance(numerics: Numerics, format: WeightFormat) -> Tolerance {
    let rounded = match format {
        WeightFormat::F32 | WeightFormat::F16 if numerics.weights == WeightRounding::None => InputRounding::None,
        WeightFormat::F32 | WeightFormat::F16 => numerics.bf16_input,
        WeightFormat::Bf16 => numerics.bf16_input,
        _ => numerics.quantized_input,
    };
    match (rounded, numerics.kv) {
        (InputRounding::None, KvType::F32) => Tolerance { most: 1e-4, mean: 1e-5 },
        (InputRounding::None, KvType::Bf16) => Tolerance { most: 1e-2, mean: 1e-3 },
        (InputRounding::None, KvType::Int8) => Tolerance { most: 2e-2, mean: 2e-3 },
        // So can one of a projection's output that is summed in another order, in every layer's input.
        (InputRounding::Bf16, _) if numerics.sums == Sums::Free => Tolerance { most: 5e-2, mean: 5e-3 },
        // A quantum of a cached code, too, can fall the other way.
        (InputRounding::Bf16 | InputRounding::Bf16Chains, KvType::Int8) => Tolerance { most: 0.1, mean: 8e-3 },
        (InputRounding::Bf16 | InputRounding::Bf16Chains, _) => Tolerance { most: 5e-2, mean: 3e-3 },
        // Twice rounded, activations are closer than bfloat16 is.
        (InputRounding::Int8Twice, KvType::Int8) => Tolerance { most: 0.1, mean: 8e-3 },
        (InputRounding::Int8Twice, _) => Tolerance { most: 5e-2, mean: 3e-3 },
        (InputRounding::Int8Group32, KvType::Int8) => Tolerance { most: 0.4, mean: 3e-2 },
        (InputRounding::Int8Group32, _) => Tolerance { most: 0.2, mean: 1.5e-2 },
    }
}

pub(super) fn bits_do_not_depend_on_chunks_neighbours_or_place<B: Backend>(make: &impl Fn() -> B) {
    for format in [WeightFormat::Bf16, WeightFormat::Q4_1, WeightFormat::Q8_0, WeightFormat::Int4Group64] {
        let model = model(format);
        let tokens = model.tokens(100, 3);
        let strangers = model.tokens(60, 4);
        let whole = [Feed { tokens: &tokens, start: 0, table: &TABLE, rows: Rows::All }];
        let expected = Driver::new(make(), &model, 16, 12).step(&whole);
        for chunk in [1, 3, 16, 33] {
            let mut driver = Driver::new(make(), &model, 16, 12);
            let mut found = Vec::new();
            for (index, part) in tokens.chunks(chunk).enumerate() {
                let own = Feed { tokens: part, start: index * chunk, table: &TABLE, rows: Rows::All };
                let place = index % strangers.len();
                let stranger =
                    Feed { tokens: &strangers[place..place + 1], start: place, table: &STRANGER, rows: Rows::None };
                // The stranger stands before the sequence in even steps and behind it in odd ones.
                let feeds = if index.is_multiple_of(2) { [stranger, own] } else { [own, stranger] };
                found.extend(driver.step(&feeds));
            }
            let what = format!("{format} in chunks of {chunk} beside a stranger");
            assert_same_rows(&what, driver.numerics().sums, &found, &expected);
        }
    }
}

pub(super) fn a_row_that_is_not_finite_fails_alone<B: Backend>(make: &impl Fn() -> B) {
    let model = model(WeightFormat::Q4_1);
    let tokens = model.tokens(5, 3);
    let alone = [Feed { tokens: &tokens, start: 0, table: &TABLE, rows: Rows::All }];
    let expected = Driver::new(make(), &model, 16, 12).run_all_rows(&alone);
    let mut driver = Driver::new(make(), &model, 16, 12);
    let poison = [model.poison()];
    let feeds = [Feed { tokens: &poison, start: 0, table: &STRANGER, rows: Rows::All }, alone[0].clone()];
    let mut found = driver.run_all_rows(&feeds);
    assert_eq!(found.remove(0), Err(SampleError::NotFinite), "a row of NaN");
    assert_same_draws("the neighbours of a row of NaN", driver.numerics().sums, &found, &expected);
}

pub(super) fn draws_equal_the_reference<B: Backend>(make: &impl Fn() -> B) {
    let model = TinyModel::new(TinyShape { vocab_size: 500, num_layers: 0, ..TinyShape::default() }, 31);
    let tokens = model.tokens(70, 3);
    let feed = [Feed { tokens: &tokens, start: 0, table: &[0, 1, 2, 3, 4], rows: Rows::All }];
    let sample = |row: usize| SampleRow {
        seed: 0x1234_5678_9abc_def0,
        temperature: 0.25 * (row % 7) as f32,
        top_k: [0, 1, 5, 400][row % 4],
        top_p: [1.0, 0.9, 0.3][row % 3],
        min_p: [0.0, 0.02][row % 2],
        logprobs: row.is_multiple_of(5).then_some(3),
        ..SampleRow::greedy(row, row as u32 + 1)
    };
    let mut reference = Driver::without_poison(Reference::mirror(make().numerics()), &model);
    let mut subject = Driver::without_poison(make(), &model);
    let inputs = subject.inputs(&feed, sample);
    let drawn = |rows: Vec<Sampled>| rows.into_iter().map(Ok).collect::<Vec<_>>();
    let (found, expected) = (drawn(subject.run(&inputs)), drawn(reference.run(&inputs)));
    assert_same_draws("draws of 70 rows", subject.numerics().sums, &found, &expected);
}

pub(super) fn inputs_out_of_bounds_are_refused<B: Backend>(make: &impl Fn() -> B) {
    let model = model(WeightFormat::F32);
    let tokens = model.tokens(20, 3);
    let mut driver = Driver::new(make(), &model, 16, 12);
    let feed = [Feed { tokens: &tokens, start: 0, table: &TABLE, rows: Rows::All }];
    let good = driver.inputs(&feed, |row| SampleRow::greedy(row, 0));
    let expected = driver.run(&good);
    let mut bad = vec![good.clone(); 8];
    bad[0].tokens[3] = model.spec.vocab_size as u32;
    bad[1].groups[0].tables[1] = 12;
    bad[2].spans[0].len = 19;
    bad[3].samples[0].row = 20;
    bad[4].groups[0].table_starts[1] = 1;
    bad[5].groups[1].copies = vec![BlockCopy { from: 1, to: 12 }];
    bad[6].groups[1].copies = vec![BlockCopy { from: 1, to: 3 }, BlockCopy { from: 6, to: 3 }];
    bad[7].groups[1].copies = vec![BlockCopy { from: 1, to: 3 }, BlockCopy { from: 3, to: 6 }];
    for (index, inputs) in bad.iter().enumerate() {
        let result = driver.try_run(inputs);
        assert!(matches!(result, Err(BackendError::Inputs { .. })), "bad inputs {index}: {result:?}");
    }
    assert_eq!(driver.run(&good), expected, "good inputs after bad ones");
}
