//! One layer whose MLP adds nothing and whose weights are `f32`: what is left to differ is attention, and the projections of
//! a backend that rounds weights.

use super::agreement::assert_same_rows;
use super::driver::{Driver, Feed, Rows, Tolerance, assert_close};
use super::{TinyModel, TinyShape};
use crate::{Backend, KvType, Reference, WeightId, WeightRounding};

/// Blocks of strangers lie between a sequence's own.
const TABLE: [u32; 24] = [17, 3, 30, 4, 9, 1, 22, 12, 39, 25, 0, 7, 14, 33, 2, 19, 11, 28, 5, 36, 8, 21, 31, 16];

pub(super) fn agrees_over_shapes_and_part_filled_blocks<B: Backend>(make: &impl Fn() -> B) {
    for group_size in [1, 3, 4, 8] {
        for head_size in [16, 64, 128] {
            for block_size in [16, 32] {
                let shape = TinyShape { group_size, head_size, num_kv_heads: 2, ..TinyShape::default() };
                let what = format!("attention, group {group_size}, head {head_size}, block {block_size}");
                compare(&what, make, shape, block_size);
            }
        }
    }
}

pub(super) fn windows_hide_what_lies_before_them<B: Backend>(make: &impl Fn() -> B) {
    for window in [1, 5, 64, 70, 300] {
        let shape = TinyShape { window: Some(window), group_size: 3, ..TinyShape::default() };
        compare(&format!("attention, window {window}"), make, shape, 16);
    }
}

fn compare<B: Backend>(what: &str, make: &impl Fn() -> B, shape: TinyShape, block_size: usize) {
    let model = TinyModel::new(shape, 11).without(WeightId::Down(0));
    let numerics = make().numerics();
    let tolerance = match numerics.kv {
        // The projections' inputs are rounded too.
        _ if numerics.weights == WeightRounding::Bf16 => Tolerance { most: 5e-2, mean: 3e-3 },
        KvType::F32 => Tolerance { most: 1e-4, mean: 1e-5 },
        KvType::Bf16 => Tolerance { most: 5e-3, mean: 4e-4 },
        // A backend may round the product of probability and scale, where the mirror rounds the probability alone.
        KvType::Int8 => Tolerance { most: 1e-2, mean: 8e-4 },
    };
    let mut reference = Driver::new(Reference::mirror(numerics), &model, block_size, 40);
    let mut subject = Driver::new(make(), &model, block_size, 40);
    let tokens = model.tokens(300, 5);
    // One sequence in a single span, then row by row over the lengths where blocks, groups and chunks end.
    let whole = [Feed { tokens: &tokens, start: 0, table: &TABLE, rows: Rows::All }];
    let expected = reference.step(&whole);
    let found = subject.step(&whole);
    assert_close(what, &found, &expected, tolerance);
    for rows in [1, 7, 33] {
        for end in [1, 2, 15, 16, 17, 33, 63, 64, 65, 129, 255, 256, 257, 300] {
            let start = end - rows.min(end);
            let feed = [Feed { tokens: &tokens[start..end], start, table: &TABLE, rows: Rows::All }];
            let what = format!("{what}, rows {start}..{end} again");
            assert_same_rows(&what, numerics.sums, &subject.step(&feed), &found[start..end]);
        }
    }
}
