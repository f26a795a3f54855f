//! Matrix instructions. The whole warp takes part; the layouts of the fragments are those of PTX's section on `mma.m16n8k16`.

use crate::fault::AccessKind;
use crate::isa::{Format, LoadMatrix, Mma, Space};
use crate::numeric::{bf16_value, canonical, f16_value};
use crate::registers::{Doubles, LANES, Registers};
use crate::report::Report;
use crate::warp::Warp;

use super::access::{addresses, count_shared};
use super::{Machine, Outcome, window};

const ROWS: usize = 16;
const COLUMNS: usize = 8;
const DEPTH: usize = 16;

/// The halves of a register of bf16 as numbers.
fn bf16_halves(bits: u32) -> [f32; 2] {
    [bf16_value(bits & 0xffff), f32::from_bits(bits & 0xffff_0000)]
}

fn f16_halves(bits: u32) -> [f32; 2] {
    [f16_value(bits), f16_value(bits >> 16)]
}

/// `mma.sync`: products are exact in f32, and added to the accumulator in the order of the depth, each sum rounded to nearest. (The
/// hardware adds with other roundings, of which its makers say nothing.)
pub(super) fn mma(registers: &mut Registers, report: &mut Report, mma: &Mma) {
    report.mma += 1;
    let (mut a, mut b) = ([[0f32; ROWS]; DEPTH], [[0f32; COLUMNS]; DEPTH]);
    if mma.format == Format::Bf16 {
        operands(registers, mma, bf16_halves, &mut a, &mut b);
    } else {
        operands(registers, mma, f16_halves, &mut a, &mut b);
    }
    let mut sums = [[0f32; ROWS]; COLUMNS];
    for (index, slot) in mma.c.iter().enumerate() {
        for (lane, bits) in registers.word(*slot).iter().enumerate() {
            let (row, column) = (lane / 4 + (index & 2) * 4, lane % 4 * 2 + (index & 1));
            sums[column][row] = f32::from_bits(*bits);
        }
    }
    multiply(&a[..mma.b.len() * 8], &b, &mut sums);
    for (index, slot) in mma.d.iter().enumerate() {
        let target = &mut registers.words[*slot as usize];
        for (lane, target) in target.iter_mut().enumerate() {
            let (row, column) = (lane / 4 + (index & 2) * 4, lane % 4 * 2 + (index & 1));
            *target = canonical(sums[column][row]);
        }
    }
}

/// The fragments of both factors put into matrices.
#[inline(always)]
fn operands(
    registers: &Registers,
    mma: &Mma,
    halves: impl Fn(u32) -> [f32; 2],
    a: &mut [[f32; ROWS]; DEPTH],
    b: &mut [[f32; COLUMNS]; DEPTH],
) {
    for (index, slot) in mma.a.iter().enumerate() {
        let (down, right) = ((index & 1) * 8, (index & 2) * 4);
        for (lane, bits) in registers.word(*slot).iter().enumerate() {
            let [low, high] = halves(*bits);
            let (row, k) = (down + lane / 4, right + lane % 4 * 2);
            a[k][row] = low;
            a[k | 1][row] = high;
        }
    }
    for (index, slot) in mma.b.iter().enumerate() {
        let first = (index & 1) * 8;
        for (lane, bits) in registers.word(*slot).iter().enumerate() {
            let [low, high] = halves(*bits);
            let (k, column) = (first + lane % 4 * 2, lane / 4);
            b[k][column] = low;
            b[k | 1][column] = high;
        }
    }
}

/// `sums += a b`, column by column. The rows of a column are one vector: their number is hidden from the compiler, which would else unroll
/// the innermost loop and not see one.
fn multiply(a: &[[f32; ROWS]], b: &[[f32; COLUMNS]; DEPTH], sums: &mut [[f32; ROWS]; COLUMNS]) {
    let rows = std::hint::black_box(ROWS).min(ROWS);
    for (a, b) in a.iter().zip(b) {
        for (sums, factor) in sums.iter_mut().zip(b) {
            for row in 0..rows {
                sums[row] += a[row] * factor;
            }
        }
    }
}

/// `ldmatrix`: lane `8 i + r` has the address of row `r` of matrix `i`; lane `l` gets two neighbours of row `l / 4`, or of column `l / 4`.
pub(super) fn load_matrix(warp: &mut Warp, machine: &mut Machine<'_>, load: &LoadMatrix) -> Outcome {
    const ROW_BYTES: u32 = 16;
    let mut addresses: Doubles = addresses(&warp.registers, load.address);
    if load.space == Space::Generic {
        addresses = addresses.map(|address| address.wrapping_sub(window::SHARED));
    }
    let num_rows = load.d.len() * 8;
    let mut rows = [[0u8; ROW_BYTES as usize]; LANES];
    let mask = if num_rows == LANES { u32::MAX } else { (1 << num_rows) - 1 };
    machine.shared.check(AccessKind::Load, mask, &addresses, ROW_BYTES)?;
    machine.shared.read(&warp.clock, mask, &addresses, ROW_BYTES)?;
    for lane in 0..num_rows {
        rows[lane].copy_from_slice(&machine.shared.data[addresses[lane] as usize..][..ROW_BYTES as usize]);
    }
    count_shared(machine, mask, &addresses, ROW_BYTES);
    for (rows, slot) in rows.chunks_exact(8).zip(&load.d) {
        let element = |row: usize, column: usize| {
            let pair: [u8; 2] = [rows[row][column * 2], rows[row][column * 2 + 1]];
            u32::from(u16::from_le_bytes(pair))
        };
        let target = &mut warp.registers.words[*slot as usize];
        for (lane, target) in target.iter_mut().enumerate() {
            let (outer, inner) = (lane / 4, lane % 4 * 2);
            *target = if load.transposed {
                element(inner, outer) | element(inner + 1, outer) << 16
            } else {
                element(outer, inner) | element(outer, inner + 1) << 16
            };
        }
    }
    Ok(())
}
