//! Matrix instructions. The whole warp takes part; the layouts of the fragments are those of PTX's section on `mma.m16n8k16`.

use crate::fault::AccessKind;
use crate::isa::{Format, LoadMatrix, Mma, Space};
use crate::numeric::{bf16_value, canonical, f16_value};
use crate::registers::{Doubles, LANES, Registers};
use crate::report::Report;
use crate::warp::Warp;

use super::access::{addresses, count_shared};
use super::{Machine, Outcome, trouble, window};

const ROWS: usize = 16;
const COLUMNS: usize = 8;
const DEPTH: usize = 16;

/// `mma.sync`: products are exact in f32, and added to the accumulator in the order of the depth, each sum rounded to nearest. (The
/// hardware adds with other roundings, of which its makers say nothing.)
pub(super) fn mma(registers: &mut Registers, report: &mut Report, mma: &Mma) {
    report.mma += 1;
    let value = |bits: u32| if mma.format == Format::Bf16 { bf16_value(bits & 0xffff) } else { f16_value(bits) };
    let mut a = [[0f32; DEPTH]; ROWS];
    for (index, slot) in mma.a.iter().enumerate() {
        let fragment = registers.word(*slot);
        for lane in 0..LANES {
            let (row, k) = (lane / 4 + (index & 1) * 8, lane % 4 * 2 + (index >> 1) * 8);
            a[row][k] = value(fragment[lane]);
            a[row][k + 1] = value(fragment[lane] >> 16);
        }
    }
    let mut b = [[0f32; COLUMNS]; DEPTH];
    for (index, slot) in mma.b.iter().enumerate() {
        let fragment = registers.word(*slot);
        for lane in 0..LANES {
            let (k, column) = (lane % 4 * 2 + index * 8, lane / 4);
            b[k][column] = value(fragment[lane]);
            b[k + 1][column] = value(fragment[lane] >> 16);
        }
    }
    let place = |index: usize, lane: usize| (lane / 4 + (index >> 1) * 8, lane % 4 * 2 + (index & 1));
    let mut sums = [[0f32; COLUMNS]; ROWS];
    for (index, slot) in mma.c.iter().enumerate() {
        let fragment = registers.word(*slot);
        for lane in 0..LANES {
            let (row, column) = place(index, lane);
            sums[row][column] = f32::from_bits(fragment[lane]);
        }
    }
    let depth = mma.b.len() * 8;
    for (row, sums) in sums.iter_mut().enumerate() {
        for k in 0..depth {
            for column in 0..COLUMNS {
                sums[column] += a[row][k] * b[k][column];
            }
        }
    }
    for (index, slot) in mma.d.iter().enumerate() {
        let target = &mut registers.words[*slot as usize];
        for (lane, target) in target.iter_mut().enumerate() {
            let (row, column) = place(index, lane);
            *target = canonical(sums[row][column]);
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
    machine.shared.begin_instruction();
    for lane in 0..num_rows {
        let address = addresses[lane];
        machine.shared.check(AccessKind::Load, address, ROW_BYTES).map_err(|kind| trouble(lane, kind))?;
        let read = machine.shared.read(&warp.clock, lane, address as u32, ROW_BYTES);
        read.map_err(|kind| trouble(lane, kind))?;
        rows[lane].copy_from_slice(&machine.shared.data[address as usize..][..ROW_BYTES as usize]);
    }
    let mask = if num_rows == LANES { u32::MAX } else { (1 << num_rows) - 1 };
    count_shared(machine, mask, &addresses, ROW_BYTES);
    for (matrix, slot) in load.d.iter().enumerate() {
        let element = |row: usize, column: usize| {
            let row = &rows[matrix * 8 + row];
            u32::from(row[column * 2]) | u32::from(row[column * 2 + 1]) << 8
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
