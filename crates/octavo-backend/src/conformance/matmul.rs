//! Decoders without layers: embedding, norm, head. Where sums have a fixed order, every step is defined bit for bit.

use std::collections::BTreeSet;

use super::agreement::assert_same_rows;
use super::driver::{Driver, Feed, Rows};
use super::{TinyModel, TinyShape};
use crate::{Backend, Reference, WeightFormat};

pub(super) fn bits_equal_the_mirrored_reference<B: Backend>(make: &impl Fn() -> B) {
    for format in WeightFormat::ALL {
        let sizes: BTreeSet<usize> = [32, 96, 576].map(|size: usize| size.next_multiple_of(format.block())).into();
        for hidden_size in sizes {
            for vocab_size in [33, 100] {
                let shape = TinyShape { vocab_size, hidden_size, num_layers: 0, format, ..TinyShape::default() };
                compare(&format!("head {format} {vocab_size} x {hidden_size}"), make, shape);
            }
        }
    }
}

pub(super) fn tied_head_reads_the_embedding<B: Backend>(make: &impl Fn() -> B) {
    for format in WeightFormat::ALL {
        let hidden_size = 64usize.next_multiple_of(format.block());
        let shape = TinyShape { num_layers: 0, hidden_size, format, tied: true, ..TinyShape::default() };
        compare(&format!("tied head {format}"), make, shape);
    }
}

fn compare<B: Backend>(what: &str, make: &impl Fn() -> B, shape: TinyShape) {
    let model = TinyModel::new(shape, 7);
    // The poisoned row of a tied head would make every logit NaN.
    let model = if shape.tied { model.with_finite_embedding() } else { model };
    let mut subject = Driver::without_poison(make(), &model);
    let mut reference = Driver::without_poison(Reference::mirror(make().numerics()), &model);
    for rows in [1, 7, 33, 70] {
        let tokens = model.tokens(rows, rows as u64);
        let feed = [Feed { tokens: &tokens, start: 0, table: &[0, 1, 2, 3, 4], rows: Rows::All }];
        let (found, expected) = (subject.step(&feed), reference.step(&feed));
        assert_same_rows(&format!("{what}, {rows} rows"), subject.numerics().sums, &found, &expected);
    }
}
