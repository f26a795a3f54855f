//! Matrices and activations for tests.

use std::borrow::Cow;

use half::{bf16, f16};
use octavo_backend::{Matrix, WeightData, WeightFormat};

use crate::simd::random_bits;

/// A matrix of a format with random codes, scales and minima (or elements) of ordinary size.
pub(crate) fn random_matrix(format: WeightFormat, rows: usize, columns: usize, seed: u64) -> Matrix<'static> {
    let mut bits = random_bits(seed);
    let mut float = move || (bits() as i32 as f32) / 2f32.powi(31);
    let mut codes = random_bits(seed ^ 0x5555);
    let mut bytes = Vec::new();
    let mut half = |bytes: &mut Vec<u8>| bytes.extend(f16::from_f32(float() * 0.05).to_le_bytes());
    let (scales, code_bytes) = match format {
        WeightFormat::Q4_0 => (1, 16),
        WeightFormat::Q4_1 => (2, 16),
        WeightFormat::Q8_0 => (1, 32),
        _ => (0, 0),
    };
    if format.is_int4() {
        for _ in 0..rows * columns / format.block() {
            half(&mut bytes);
            bytes.push((codes() % 17) as u8);
            bytes.extend((0..format.block() / 2).map(|_| codes() as u8));
        }
    } else if format.block() > 32 {
        for _ in 0..rows * columns / format.block() {
            if format == WeightFormat::Q4K {
                half(&mut bytes);
                half(&mut bytes);
            }
            bytes.extend((0..if format == WeightFormat::Q4K { 140 } else { 208 }).map(|_| codes() as u8));
            if format == WeightFormat::Q6K {
                half(&mut bytes);
            }
        }
    } else if scales == 0 {
        for _ in 0..rows * columns {
            let value = (codes() as i32 as f32) / 2f32.powi(31);
            match format {
                WeightFormat::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                WeightFormat::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                _ => bytes.extend(value.to_le_bytes()),
            }
        }
    } else {
        for _ in 0..rows * columns / 32 {
            for _ in 0..scales {
                half(&mut bytes);
            }
            bytes.extend((0..code_bytes).map(|_| codes() as u8));
        }
    }
    Matrix { rows, columns, data: WeightData { format, bytes: Cow::Owned(bytes) } }
}

/// Sets every byte of codes, and of scales that have a scale, of a block-quantised matrix to one byte.
pub(crate) fn fill_codes(matrix: &mut Matrix, byte: u8) {
    let (block, codes) = match matrix.data.format {
        WeightFormat::Q4_0 => (18, 2..18),
        WeightFormat::Q4_1 => (20, 4..20),
        WeightFormat::Q4K => (144, 4..144),
        WeightFormat::Q6K => (210, 0..208),
        format if format.is_int4() => (3 + format.block() / 2, 3..3 + format.block() / 2),
        _ => (34, 2..34),
    };
    for block in matrix.data.bytes.to_mut().chunks_exact_mut(block) {
        block[codes.clone()].fill(byte);
    }
}

/// `rows * columns` values in -1..1.
pub(crate) fn random_values(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    let mut bits = random_bits(seed);
    (0..rows * columns).map(|_| (bits() as i32 as f32) / 2f32.powi(31)).collect()
}
