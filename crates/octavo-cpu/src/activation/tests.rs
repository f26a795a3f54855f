//! Rows against the contract's own rounding, bit for bit.

use half::bf16;
use octavo_backend::numerics::{ActivationGroup, rms_norm};

use super::*;
use crate::simd::random_bits;

const ALL: [InputRounding; 5] = InputRounding::ALL;

fn record(activations: &Activations, plane: Plane, row: usize, group: usize) -> Int8Record {
    let first = activations.row(plane, row).unwrap();
    // SAFETY: the tests ask for groups that exist.
    unsafe { first.add(group * ROW_BLOCK * INT8_RECORD).cast::<Int8Record>().read() }
}

fn element<T: Copy>(activations: &Activations, plane: Plane, row: usize, column: usize) -> T {
    let first = activations.row(plane, row).unwrap().cast::<T>();
    let place = column / ACTIVATION_GROUP * ROW_BLOCK * ACTIVATION_GROUP + column % ACTIVATION_GROUP;
    // SAFETY: the tests ask for columns that exist.
    unsafe { first.add(place).read() }
}

/// One row of values in each kind of difficulty.
fn rows(columns: usize) -> Vec<Vec<f32>> {
    let mut bits = random_bits(3);
    let mut row =
        |scale: f32| -> Vec<f32> { (0..columns).map(|_| (bits() as i32 as f32) / 2f32.powi(31) * scale).collect() };
    let mut rows = vec![row(1.0), row(1e-38), row(1e-42), row(3e38), row(0.0)];
    for (special, at) in [(f32::NAN, 1), (f32::INFINITY, 17), (f32::NEG_INFINITY, 31), (1000.0, 0), (-0.0, 5)] {
        rows.push(row(1.0));
        rows.last_mut().unwrap()[at] = special;
    }
    rows.push((0..columns).map(|i| (i % 255) as f32 * 0.5 - 63.5).collect());
    rows
}

fn check_int8(activations: &Activations, row: usize, expected: &[f32]) {
    for (group, values) in expected.as_chunks::<ACTIVATION_GROUP>().0.iter().enumerate() {
        let expected = ActivationGroup::round(values);
        check_record(record(activations, Plane::Int8, row, group), expected, &format!("row {row}, group {group}"));
        let rest = ActivationGroup::round(&expected.rest(values));
        check_record(record(activations, Plane::Rest, row, group), rest, &format!("rest of row {row}, group {group}"));
    }
}

fn check_record(found: Int8Record, expected: ActivationGroup, what: &str) {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    assert_eq!(found.codes, expected.codes, "{what}");
    assert!(same(found.scale, expected.scale), "{what}");
    assert!(same(found.scaled_sum, expected.scale * expected.sum() as f32), "{what}");
    assert_eq!(found.nibble_correction, -8 * expected.sum());
    assert_eq!(found.biased_correction(), -128 * expected.sum());
    let halves = [0, 16].map(|at| expected.codes[at..at + 16].iter().map(|code| i32::from(*code)).sum::<i32>());
    assert_eq!([found.half_correction, found.second_half_correction()], halves.map(|sum| -32 * sum));
}

#[test]
fn rows_are_rounded_as_the_contract_defines_on_every_instruction_set() {
    for (isa, columns) in Isa::supported().into_iter().flat_map(|isa| [(isa, 96), (isa, 288)]) {
        let rows = rows(columns);
        let activations = Activations::new(isa, ALL.into_iter().collect(), columns, rows.len()).unwrap();
        for (i, values) in rows.iter().enumerate() {
            // SAFETY: one thread.
            unsafe { activations.write_row(i, values) };
        }
        for (i, values) in rows.iter().enumerate() {
            check_int8(&activations, i, values);
            for (column, value) in values.iter().enumerate() {
                let bf16_bits: u16 = element(&activations, Plane::Bf16, i, column);
                assert_eq!(bf16_bits, bf16::from_f32(*value).to_bits(), "{isa}, row {i}, column {column}");
                let plain: f32 = element(&activations, Plane::F32, i, column);
                assert_eq!(plain.to_bits(), value.to_bits());
            }
        }
    }
}

#[test]
fn a_norm_on_the_way_in_gives_the_bits_of_the_norm_before() {
    for columns in [32, 64, 576] {
        let weight: Vec<f32> = (0..columns).map(|i| 0.5 + i as f32 * 0.01).collect();
        for isa in Isa::supported() {
            let rows = rows(columns);
            let activations = Activations::new(isa, ALL.into_iter().collect(), columns, rows.len()).unwrap();
            for (i, values) in rows.iter().enumerate() {
                // SAFETY: one thread.
                unsafe { activations.write_normalized_row(i, values, Norm { weight: &weight, epsilon: 1e-5 }) };
                let mut expected = vec![0.0; columns];
                rms_norm(values, &weight, 1e-5, &mut expected);
                check_int8(&activations, i, &expected);
            }
        }
    }
}

#[test]
fn columns_that_fill_no_group_are_padded_with_zeros() {
    let rounding: RoundingSet = [InputRounding::Bf16, InputRounding::None].into_iter().collect();
    for isa in Isa::supported() {
        let activations = Activations::new(isa, rounding, 43, 9).unwrap();
        for row in 0..9 {
            // SAFETY: one thread.
            unsafe { activations.write_row(row, &[1.5; 43]) };
        }
        for column in 0..64 {
            let expected = if column < 43 { 1.5f32 } else { 0.0 };
            assert_eq!(element::<f32>(&activations, Plane::F32, 8, column), expected);
            let bits: u16 = element(&activations, Plane::Bf16, 3, column);
            assert_eq!(bf16::from_bits(bits).to_f32(), expected);
        }
    }
}

#[test]
fn a_width_without_whole_groups_is_refused_for_8_bits() {
    let error = Activations::new(Isa::Scalar, [InputRounding::Int8Group32].into_iter().collect(), 48, 1);
    assert!(error.unwrap_err().to_string().contains("48"));
}

#[test]
fn the_footprint_is_what_is_taken() {
    let set: RoundingSet = ALL.into_iter().collect();
    let activations = Activations::new(Isa::Scalar, set, 64, 9).unwrap();
    let taken: usize = activations.planes.iter().map(|plane| plane.as_ref().unwrap().len()).sum();
    assert_eq!(Activations::footprint(set, 64, 9), taken);
}

#[test]
fn a_row_written_in_pieces_equals_one_written_at_once() {
    for isa in Isa::supported() {
        let rows = rows(416);
        let whole = Activations::new(isa, ALL.into_iter().collect(), 416, rows.len()).unwrap();
        let pieces = Activations::new(isa, ALL.into_iter().collect(), 416, rows.len()).unwrap();
        for (row, values) in rows.iter().enumerate() {
            // SAFETY: one thread.
            unsafe {
                whole.write_row(row, values);
                for first in [256, 0, 128, 384] {
                    pieces.write_columns(row, first, &values[first..416.min(first + 128)]);
                }
            }
        }
        for (whole, pieces) in whole.planes.iter().zip(&pieces.planes) {
            let bytes = |plane: &Option<AlignedBytes>| plane.as_ref().unwrap().elements::<u8>().to_vec();
            assert!(bytes(whole) == bytes(pieces), "{isa}");
        }
    }
}
