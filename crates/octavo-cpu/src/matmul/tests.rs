//! Kernels against the twin, bit for bit, and the twin against `f64`.

use octavo_backend::{InputRounding, Matrix, WeightFormat};

use super::{
    samples::{fill_codes, random_matrix, random_values},
    twin, *,
};
use crate::{activation::RoundingSet, options::ActivationType};

const DENSE: [WeightFormat; 3] = [WeightFormat::Bf16, WeightFormat::F16, WeightFormat::F32];

/// Types of inputs.
const INPUTS: [ActivationType; 3] = [ActivationType::Int8, ActivationType::Int16, ActivationType::Bf16];

fn quantized() -> impl Iterator<Item = WeightFormat> {
    WeightFormat::ALL.into_iter().filter(|format| format.is_quantized())
}

fn all_roundings() -> RoundingSet {
    InputRounding::ALL.into_iter().collect()
}

/// Every format with every type of inputs.
fn every_kind() -> impl Iterator<Item = (WeightFormat, ActivationType)> {
    WeightFormat::ALL.into_iter().flat_map(|format| INPUTS.map(|input| (format, input)))
}

/// How the inputs of a format are rounded.
fn rounding(format: WeightFormat, input: ActivationType) -> InputRounding {
    match format {
        WeightFormat::F16 | WeightFormat::F32 => InputRounding::None,
        WeightFormat::Bf16 => input.bf16_input(),
        _ => input.quantized_input(),
    }
}

/// Bits, all NaN alike.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

/// All outputs by the kernels of one instruction set, the work cut into `cuts` ranges of tiles.
fn multiply(isa: Isa, parts: &[Matrix], input: ActivationType, values: &[f32], cuts: usize) -> Vec<f32> {
    let packed = PackedMatrix::pack(parts, input).unwrap();
    let (columns, tiles) = (packed.columns(), packed.tiles());
    let rows = values.len() / columns;
    let activations = Activations::new(isa, packed.input_roundings(), columns, rows).unwrap();
    for (row, values) in values.chunks(columns).enumerate() {
        // SAFETY: one thread.
        unsafe { activations.write_row(row, values) };
    }
    let matmul = Matmul::new(isa);
    let mut out = vec![0.0; rows * packed.rows()];
    let output = Output { start: out.as_mut_ptr(), stride: packed.rows(), mode: Mode::Store };
    for cut in 0..cuts {
        let tiles = tiles * cut / cuts..tiles * (cut + 1) / cuts;
        // SAFETY: one thread; `out` has all rows and outputs.
        unsafe { matmul.run(&packed, &activations, 0..rows, tiles, output) };
    }
    out
}

fn multiply_by_twin(parts: &[Matrix], input: ActivationType, values: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    for row in values.chunks(parts[0].columns) {
        for part in parts {
            out.extend((0..part.rows).map(|n| twin::output(part, rounding(part.data.format, input), n, row)));
        }
    }
    out
}

fn assert_equals_twin(parts: &[Matrix], input: ActivationType, values: &[f32], what: &str) {
    let expected = bits(&multiply_by_twin(parts, input, values));
    for isa in Isa::supported() {
        for cuts in [1, 3] {
            assert_eq!(
                bits(&multiply(isa, parts, input, values, cuts)),
                expected,
                "{isa}, {input:?}, {cuts} cuts, {what}"
            );
        }
    }
}

#[test]
fn every_instruction_set_equals_the_twin_for_1_to_17_rows_in_every_format() {
    for (format, input) in every_kind() {
        for (outputs, columns) in [(5, 32usize), (16, 64), (33, 96), (17, 160)] {
            let columns = columns.next_multiple_of(format.block());
            let matrix = random_matrix(format, outputs, columns, 42);
            for rows in 1..=17 {
                let values = random_values(rows, columns, rows as u64);
                assert_equals_twin(
                    std::slice::from_ref(&matrix),
                    input,
                    &values,
                    &format!("{format} {outputs} x {columns}, {rows} rows"),
                );
            }
        }
    }
}

#[test]
fn wide_matrices_equal_the_twin() {
    for (format, input) in every_kind() {
        // Of 28 rows a matrix unit takes two blocks, and the second one finds the weights widened.
        for (outputs, columns, rows) in [(100, 576usize, 9), (17, 1536, 28)] {
            let columns = columns.next_multiple_of(format.block());
            let matrix = random_matrix(format, outputs, columns, 7);
            let values = random_values(rows, columns, 3);
            assert_equals_twin(
                std::slice::from_ref(&matrix),
                input,
                &values,
                &format!("{format} {outputs} x {columns}"),
            );
        }
    }
}

#[test]
fn widths_that_fill_no_group_equal_the_twin_in_dense_formats() {
    for (format, input) in DENSE.into_iter().flat_map(|format| INPUTS.map(|input| (format, input))) {
        for columns in [1, 2, 31, 33, 47] {
            let matrix = random_matrix(format, 19, columns, 7);
            let values = random_values(3, columns, 3);
            assert_equals_twin(std::slice::from_ref(&matrix), input, &values, &format!("{format}, {columns} columns"));
        }
    }
}

#[test]
fn stacked_parts_of_mixed_formats_equal_the_twin() {
    let parts: Vec<Matrix> = [
        (WeightFormat::Q4_1, 33),
        (WeightFormat::Q8_0, 5),
        (WeightFormat::Bf16, 16),
        (WeightFormat::Q4_0, 100),
        (WeightFormat::F32, 1),
        (WeightFormat::F16, 20),
        (WeightFormat::Q4K, 17),
        (WeightFormat::Q6K, 6),
        (WeightFormat::Int4Group32, 18),
        (WeightFormat::Int4Group128, 3),
    ]
    .into_iter()
    .map(|(format, rows)| random_matrix(format, rows, 256, rows as u64))
    .collect();
    for (rows, input) in [1, 8, 13].into_iter().flat_map(|rows| INPUTS.map(|input| (rows, input))) {
        assert_equals_twin(&parts, input, &random_values(rows, 256, 5), &format!("{rows} rows"));
    }
}

#[test]
fn extreme_codes_and_activations_equal_the_twin() {
    for (format, input) in quantized().flat_map(|format| INPUTS.map(|input| (format, input))) {
        for byte in [0x00, 0xff, 0x7f, 0x80, 0xf0] {
            let columns = 64usize.next_multiple_of(format.block());
            let mut matrix = random_matrix(format, 18, columns, 3);
            fill_codes(&mut matrix, byte);
            for values in [1.0, -1.0, 0.0].map(|value| vec![value; columns]) {
                assert_equals_twin(
                    std::slice::from_ref(&matrix),
                    input,
                    &values,
                    &format!("{format}, codes {byte:#x}"),
                );
            }
            let alternating: Vec<f32> = (0..columns).map(|i| if i % 2 == 0 { 127.0 } else { -127.0 }).collect();
            assert_equals_twin(
                std::slice::from_ref(&matrix),
                input,
                &alternating,
                &format!("{format}, codes {byte:#x}"),
            );
        }
    }
}

#[test]
fn one_channel_a_thousand_times_larger_equals_the_twin() {
    for (format, input) in every_kind() {
        let columns = 96usize.next_multiple_of(format.block());
        let matrix = random_matrix(format, 20, columns, 3);
        let mut values = random_values(5, columns, 8);
        values.iter_mut().skip(37).step_by(columns).for_each(|v| *v *= 1000.0);
        assert_equals_twin(std::slice::from_ref(&matrix), input, &values, &format!("{format}"));
    }
}

#[test]
fn a_fault_in_a_row_reaches_its_outputs_and_no_others() {
    for (format, input) in every_kind() {
        let columns = 64usize.next_multiple_of(format.block());
        let matrix = random_matrix(format, 20, columns, 3);
        for fault in [f32::NAN, f32::INFINITY] {
            let mut values = random_values(3, columns, 8);
            values[columns + 40] = fault;
            for isa in Isa::supported() {
                let out = multiply(isa, std::slice::from_ref(&matrix), input, &values, 1);
                for (i, value) in out.iter().enumerate() {
                    assert_eq!(value.is_finite(), i / 20 != 1, "{isa}, {format}, {fault}, output {i}");
                }
            }
        }
    }
}

#[test]
fn the_twin_is_within_a_millionth_of_the_sum_of_magnitudes_in_f64() {
    for (format, input) in every_kind() {
        let matrix = random_matrix(format, 8, 1536, 21);
        let values = random_values(2, 1536, 22);
        for row in values.chunks(1536) {
            for n in 0..matrix.rows {
                let (exact, magnitude) = twin::exact_output(&matrix, rounding(format, input), n, row);
                let error = (f64::from(twin::output(&matrix, rounding(format, input), n, row)) - exact).abs();
                assert!(error <= 1e-6 * magnitude, "{format}: {error:e} of {magnitude:e}");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_whatever_range_it_is_computed() {
    let matrix = random_matrix(WeightFormat::Q4_1, 40, 64, 2);
    let values = random_values(300, 64, 4);
    for (isa, input) in Isa::supported().into_iter().flat_map(|isa| INPUTS.map(|input| (isa, input))) {
        let packed = PackedMatrix::pack(std::slice::from_ref(&matrix), input).unwrap();
        let activations = Activations::new(isa, all_roundings(), 64, 300).unwrap();
        for (row, values) in values.chunks(64).enumerate() {
            // SAFETY: one thread.
            unsafe { activations.write_row(row, values) };
        }
        let matmul = Matmul::new(isa);
        let run = |ranges: &[Range<usize>]| {
            let mut out = vec![0.0f32; 300 * 40];
            let output = Output { start: out.as_mut_ptr(), stride: 40, mode: Mode::Store };
            for rows in ranges {
                // SAFETY: one thread; `out` has all rows and outputs.
                unsafe { matmul.run(&packed, &activations, rows.clone(), 0..packed.tiles(), output) };
            }
            out
        };
        let whole = run(std::slice::from_ref(&(0..300)));
        let singly: Vec<Range<usize>> = (0..300).map(|row| row..row + 1).collect();
        assert_eq!(run(&singly), whole, "{isa}");
        assert_eq!(run(&[0..5, 5..6, 6..23, 23..300]), whole, "{isa}");
    }
}

#[test]
fn adding_to_a_residual_leaves_neighbours_alone() {
    let matrix = random_matrix(WeightFormat::Q8_0, 21, 32, 2);
    let packed = PackedMatrix::pack(std::slice::from_ref(&matrix), ActivationType::Int8).unwrap();
    let values = random_values(2, 32, 4);
    let product = multiply_by_twin(std::slice::from_ref(&matrix), ActivationType::Int8, &values);
    for isa in Isa::supported() {
        let activations = Activations::new(isa, packed.input_roundings(), 32, 2).unwrap();
        let mut out = vec![0.25; 2 * 23];
        let output = Output { start: out.as_mut_ptr(), stride: 23, mode: Mode::Add };
        // SAFETY: one thread; `out` has two rows of 23.
        unsafe {
            activations.write_row(0, &values[..32]);
            activations.write_row(1, &values[32..]);
            Matmul::new(isa).run(&packed, &activations, 0..2, 0..2, output);
        }
        for (row, out) in out.chunks(23).enumerate() {
            let expected: Vec<f32> = product[row * 21..][..21].iter().map(|v| 0.25 + v).collect();
            assert_eq!(bits(&out[..21]), bits(&expected), "{isa}");
            assert_eq!(out[21..], [0.25, 0.25], "{isa}");
        }
    }
}
