//! Blocks that several sequences read, blocks that are copied for one of them, and rows that are drawn from several
//! times. Whatever is shared, each sequence gets the bits that it gets alone.

use std::collections::BTreeSet;

use super::agreement::{assert_same_draws, assert_same_rows};
use super::driver::{Driver, Feed, Rows};
use super::{TinyModel, TinyShape};
use crate::{Backend, BackendError, BlockCopy, Reference, SampleRow, Sampled, StepInputs, StepLimits, WeightFormat};

const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 40;
const WINDOW: usize = 40;

/// What a table holds where there is no block.
const VACANT: u32 = u32::MAX;

/// A global layer and a windowed one: two KV groups.
fn model(format: WeightFormat) -> TinyModel {
    let shape = TinyShape { num_layers: 2, group_size: 3, window: Some(WINDOW), format, ..TinyShape::default() };
    TinyModel::new(shape, 41)
}

/// The report of every row of `tokens`, computed at once in blocks of their own.
fn alone<B: Backend>(make: &impl Fn() -> B, model: &TinyModel, tokens: &[u32]) -> Vec<Vec<f32>> {
    let table: Vec<u32> = (0..NUM_BLOCKS as u32).rev().collect();
    let feed = [Feed { tokens, start: 0, table: &table, rows: Rows::All }];
    Driver::new(make(), model, BLOCK_SIZE, NUM_BLOCKS).step(&feed)
}

/// The blocks of a prefix, which all sequences read, and then `own` ones.
fn table(shared: usize, own: std::ops::Range<u32>) -> Vec<u32> {
    (0..shared as u32).map(|block| block * 7 % 23).chain(own).collect()
}

pub(super) fn sequences_that_share_blocks_equal_unshared_runs<B: Backend>(make: &impl Fn() -> B) {
    for format in [WeightFormat::F32, WeightFormat::Q4_1] {
        // The longer prefix reaches into the second chunk of attention.
        for shared in [3, 17] {
            let model = model(format);
            let prefix = model.tokens(shared * BLOCK_SIZE, 1);
            let mut driver = Driver::new(make(), &model, BLOCK_SIZE, NUM_BLOCKS);
            let tables = [23..26, 26..29, 29..32, 32..35].map(|own| table(shared, own));
            let mut sequences = [2, 3, 4, 5].map(|seed| [prefix.clone(), model.tokens(40, seed)].concat());
            // One of them goes on with the same token as another.
            sequences[3][prefix.len()] = sequences[0][prefix.len()];
            let expected = sequences.clone().map(|tokens| alone(make, &model, &tokens));
            driver.step(&[Feed { tokens: &prefix, start: 0, table: &tables[0], rows: Rows::None }]);
            let mut starts = [prefix.len(); 4];
            // Rows of one step by sequence: first a chunk of a prompt among single rows, then single rows alone.
            for lens in [[1, 7, 33, 1], [1, 1, 0, 1], [2, 1, 1, 3]] {
                let feeds: Vec<Feed<'_>> = (0..4)
                    .filter(|&i| lens[i] > 0)
                    .map(|i| Feed {
                        tokens: &sequences[i][starts[i]..starts[i] + lens[i]],
                        start: starts[i],
                        table: &tables[i],
                        rows: Rows::All,
                    })
                    .collect();
                let found = driver.step(&feeds);
                let expected: Vec<Vec<f32>> =
                    (0..4).flat_map(|i| expected[i][starts[i]..starts[i] + lens[i]].to_vec()).collect();
                let what = format!("{format}, {shared} shared blocks, rows {lens:?} at {starts:?}");
                assert_same_rows(&what, driver.numerics().sums, &found, &expected);
                (0..4).for_each(|i| starts[i] += lens[i]);
            }
        }
    }
}

/// The copied block carries NaN in the slots that its owner has not filled; forks fill some of them and must not see the
/// rest.
pub(super) fn forks_and_the_owner_of_the_copied_block_go_their_own_ways<B: Backend>(make: &impl Fn() -> B) {
    let model = model(WeightFormat::Q4_1);
    for prompt_len in [1, 30, 47, 270] {
        let prompt = model.tokens(prompt_len, 1);
        let full = prompt_len / BLOCK_SIZE;
        let tables = [23..26, 26..29, 29..32].map(|own| table(full, own));
        let sequences = [2, 3, 4].map(|seed| [prompt.clone(), model.tokens(20, seed)].concat());
        let expected = sequences.clone().map(|tokens| alone(make, &model, &tokens));
        let mut driver = Driver::new(make(), &model, BLOCK_SIZE, NUM_BLOCKS);
        driver.step(&[Feed { tokens: &prompt, start: 0, table: &tables[0], rows: Rows::None }]);
        for offset in 0..20 {
            let start = prompt_len + offset;
            let feeds = [0, 1, 2].map(|i| Feed {
                tokens: &sequences[i][start..start + 1],
                start,
                table: &tables[i],
                rows: Rows::All,
            });
            let mut inputs = driver.reporting(&feeds);
            if offset == 0 {
                // The owner of the source writes its next token into it in this very step.
                let copies = [1, 2].map(|fork| BlockCopy { from: tables[0][full], to: tables[fork][full] });
                inputs.groups.iter_mut().for_each(|group| group.copies = copies.to_vec());
            }
            let expected = [0, 1, 2].map(|i| expected[i][start].clone());
            let what = format!("{offset} tokens after a fork at {prompt_len}");
            assert_same_rows(&what, driver.numerics().sums, &driver.report(&inputs), &expected);
        }
    }
}

pub(super) fn each_group_copies_its_own_blocks<B: Backend>(make: &impl Fn() -> B) {
    let model = model(WeightFormat::F32);
    let tokens = model.tokens(40, 1);
    let stranger = model.tokens(2, 2);
    let expected = alone(make, &model, &tokens);
    let mut driver = Driver::new(make(), &model, BLOCK_SIZE, NUM_BLOCKS);
    driver.step(&[Feed { tokens: &tokens[..30], start: 0, table: &[5, 11], rows: Rows::None }]);
    // Block 11 has positions 16..30. The global layers get their copy in one step, the windowed ones theirs, in another
    // place, in the next; each time the other group keeps what it has in blocks of the same numbers.
    let mut copying = driver.reporting(&[Feed { tokens: &stranger[..1], start: 0, table: &[20], rows: Rows::None }]);
    copying.groups[0].copies = vec![BlockCopy { from: 11, to: 8 }];
    driver.run(&copying);
    let fork = Feed { tokens: &tokens[30..], start: 30, table: &[5, 8, 9], rows: Rows::All };
    let mut going_on = driver.reporting(&[fork]);
    going_on.groups[1].copies = vec![BlockCopy { from: 11, to: 6 }];
    going_on.groups[1].tables = vec![5, 6, 7];
    let found = driver.report(&going_on);
    assert_same_rows("copies of one group at a time", driver.numerics().sums, &found, &expected[30..]);
    for (group, block) in [(0, 6), (1, 8)] {
        // What the other group copied did not reach this one: the block still holds NaN.
        let mut misled =
            driver.reporting(&[Feed { tokens: &tokens[30..31], start: 30, table: &[5, 11], rows: Rows::All }]);
        misled.groups[group].tables[1] = block;
        let row = driver.try_run(&misled).unwrap_or_else(|error| panic!("step: {error}")).sampled.remove(0);
        assert!(row.is_err(), "group {group} has the copy of the other group in block {block}: {row:?}");
    }
}

pub(super) fn a_table_may_begin_with_vacant_entries_before_its_window<B: Backend>(make: &impl Fn() -> B) {
    let model = model(WeightFormat::Q4_1);
    let tokens = model.tokens(340, 1);
    let expected = alone(make, &model, &tokens);
    for shared in [3, 4, 18] {
        let start = shared * BLOCK_SIZE;
        let mut driver = Driver::new(make(), &model, BLOCK_SIZE, NUM_BLOCKS);
        let (owner, adopter) = (table(shared, 23..26), table(shared, 26..30));
        driver.step(&[Feed { tokens: &tokens[..start + 5], start: 0, table: &owner, rows: Rows::None }]);
        let vacant = (start + 1 - WINDOW) / BLOCK_SIZE;
        let adopt = |driver: &Driver<B>, rows: std::ops::Range<usize>, vacant: usize| -> StepInputs {
            let feed = Feed { tokens: &tokens[rows.clone()], start: rows.start, table: &adopter, rows: Rows::All };
            let mut inputs = driver.reporting(&[feed]);
            inputs.groups[1].tables[..vacant].fill(VACANT);
            inputs
        };
        let missing = adopt(&driver, start..start + 1, vacant + 1);
        let refused = driver.try_run(&missing);
        assert!(matches!(refused, Err(BackendError::Inputs { .. })), "a vacancy inside the window: {refused:?}");
        for rows in [start..start + 1, start + 1..start + 34, start + 34..start + 35] {
            let inputs = adopt(&driver, rows.clone(), vacant);
            let what = format!("rows {rows:?} after {vacant} vacant entries");
            assert_same_rows(&what, driver.numerics().sums, &driver.report(&inputs), &expected[rows]);
        }
    }
}

/// Few rows, many draws: more of one row than rows in a step, and more of all than a tile of the head.
pub(super) fn draws_of_one_row_equal_those_of_separate_requests<B: Backend>(make: &impl Fn() -> B) {
    // Without layers every bit is defined, and there is no cache.
    let shape = TinyShape { vocab_size: 300, num_layers: 0, format: WeightFormat::Q8_0, ..TinyShape::default() };
    let model = TinyModel::new(shape, 43);
    let tokens = model.tokens(5, 1);
    let limits = StepLimits { max_rows: 5, max_spans: 90, max_positions: 16, block_size: 16, num_blocks: vec![] };
    let draw = |row: usize, choice: u32| SampleRow {
        choice,
        seed: 7 + row as u64,
        temperature: 1.0,
        top_p: [1.0, 0.9][choice as usize % 2],
        logprobs: choice.is_multiple_of(3).then_some(2),
        ..SampleRow::greedy(row, 9)
    };
    let samples: Vec<SampleRow> = [0, 3, 1, 80, 4]
        .into_iter()
        .enumerate()
        .flat_map(|(row, count)| (0..count).map(move |choice| draw(row, choice)))
        .collect();
    let mut subject = Driver::within(make(), &model, &limits);
    let mut reference = Driver::within(Reference::mirror(make().numerics()), &model, &limits);
    let feeds = [&tokens[..3], &tokens[3..4], &tokens[4..]].map(|tokens| Feed {
        tokens,
        start: 0,
        table: &[0],
        rows: Rows::None,
    });
    let step = subject.reporting(&feeds);
    let together = StepInputs { samples: samples.clone(), ..step.clone() };
    let drawn = |rows: Vec<Sampled>| rows.into_iter().map(Ok).collect::<Vec<_>>();
    let found = subject.run(&together);
    let of_one_row: BTreeSet<u32> = found[4..84].iter().map(|sampled| sampled.token).collect();
    let (found, sums) = (drawn(found), subject.numerics().sums);
    assert_same_draws("several draws of a row by the reference", sums, &found, &drawn(reference.run(&together)));
    let apart: Vec<_> = samples
        .iter()
        .flat_map(|sample| drawn(subject.run(&StepInputs { samples: vec![sample.clone()], ..step.clone() })))
        .collect();
    assert_same_draws("draws one at a time and several together", sums, &apart, &found);
    assert!(of_one_row.len() > 10, "80 choices of one row drew {of_one_row:?} only");
}
