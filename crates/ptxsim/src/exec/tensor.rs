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

/// Where register `index` of a lane has its first element in a matrix of `1 << log2_columns` columns; the second is beside it. `A` and the
/// result go down 8 rows before they go right.
const fn places(log2_columns: usize) -> [[u8; LANES]; 4] {
    let mut places = [[0; LANES]; 4];
    let (mut index, mut lane) = (0, 0);
    while index < 4 {
        let (row, column) = (lane / 4 + (index & 1) * 8, lane % 4 * 2 + (index >> 1) * 8);
        places[index][lane] = ((row << log2_columns) + column) as u8;
        lane += 1;
        if lane == LANES {
            lane = 0;
            index += 1;
        }
    }
    places
}

/// Places in `A`, 16 by 16.
const A_PLACES: [[u8; LANES]; 4] = places(4);
/// Places of the rows of a result, 16 by 8: registers 0 and 1 lie in the first, 2 and 3 in the second.
const D_PLACES: [[u8; LANES]; 4] = places(3);

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
    let (mut a, mut b) = ([0f32; ROWS * DEPTH], [[0f32; COLUMNS]; DEPTH]);
    if mma.format == Format::Bf16 {
        operands(registers, mma, bf16_halves, &mut a, &mut b);
    } else {
        operands(registers, mma, f16_halves, &mut a, &mut b);
    }
    let mut sums = [0f32; ROWS * COLUMNS];
    for (index, slot) in mma.c.iter().enumerate() {
        let (fragment, places) = (registers.word(*slot), &D_PLACES[index / 2]);
        for lane in 0..LANES {
            sums[usize::from(places[lane]) + index % 2 & 127] = f32::from_bits(fragment[lane]);
        }
    }
    if mma.b.len() == 2 {
        multiply::<16>(&a, &b, &mut sums);
    } else {
        multiply::<8>(&a, &b, &mut sums);
    }
    for (index, slot) in mma.d.iter().enumerate() {
        let (target, places) = (&mut registers.words[*slot as usize], &D_PLACES[index / 2]);
        for lane in 0..LANES {
            target[lane] = canonical(sums[usize::from(places[lane]) + index % 2 & 127]);
        }
    }
}

/// The fragments of both factors put into matrices.
#[inline(always)]
fn operands(
    registers: &Registers,
    mma: &Mma,
    halves: impl Fn(u32) -> [f32; 2],
    a: &mut [f32; ROWS * DEPTH],
    b: &mut [[f32; COLUMNS]; DEPTH],
) {
    for (slot, places) in mma.a.iter().zip(&A_PLACES) {
        let fragment = registers.word(*slot);
        for lane in 0..LANES {
            let [low, high] = halves(fragment[lane]);
            let place = usize::from(places[lane] & !1);
            a[place] = low;
            a[place | 1] = high;
        }
    }
    for (index, slot) in mma.b.iter().enumerate() {
        let fragment = registers.word(*slot);
        let first = index * 8 & 8;
        for lane in 0..LANES {
            let [low, high] = halves(fragment[lane]);
            let (row, column) = (first | lane % 4 * 2, lane / 4);
            b[row][column] = low;
            b[row | 1][column] = high;
        }
    }
}

fn multiply<const K: usize>(a: &[f32; ROWS * DEPTH], b: &[[f32; COLUMNS]; DEPTH], sums: &mut [f32; ROWS * COLUMNS]) {
    for row in 0..ROWS {
        let mut result = [0f32; COLUMNS];
        for column in 0..COLUMNS {
            result[column] = sums[row * COLUMNS + column];
        }
        for k in 0..K {
            let factor = a[row * DEPTH + k];
            for column in 0..COLUMNS {
                result[column] += factor * b[k][column];
            }
        }
        for column in 0..COLUMNS {
            sums[row * COLUMNS + column] = result[column];
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
            u32::from(u16::from_le_bytes([rows[row & 7][column * 2 & 15], rows[row & 7][(column * 2 & 15) | 1]]))
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
