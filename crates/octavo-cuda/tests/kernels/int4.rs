//! Products with 4-bit weights, against sums in f64.

use half::{bf16, f16};
use octavo_backend::{Matrix, WeightData, WeightFormat};
use octavo_cuda::int4::{Int4Matrix, repack};
use ptxsim::{Fault, Kernel, Report};

use crate::device::{Arguments, Device, Element, Extent, Noise, kernel_of};

const FORMATS: [WeightFormat; 3] = [WeightFormat::Int4Group32, WeightFormat::Int4Group64, WeightFormat::Int4Group128];

impl Element for f16 {
    fn append_to(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_le_bytes());
    }
    fn from_bytes(bytes: &[u8]) -> Self {
        f16::from_le_bytes(bytes.try_into().unwrap())
    }
}

/// `rows` rows of `columns` weights in octavo's own format.
fn weights(format: WeightFormat, rows: usize, columns: usize) -> Matrix<'static> {
    let mut noise = Noise::new((rows * columns) as u64);
    let mut bytes = Vec::new();
    for _ in 0..rows * columns / format.block() {
        bytes.extend(f16::from_f32(noise.next() / 8.0).to_le_bytes());
        bytes.push(noise.below(17) as u8);
        bytes.extend((0..format.block() / 2).map(|_| noise.below(256) as u8));
    }
    Matrix { rows, columns, data: WeightData { format, bytes: bytes.into() } }
}

/// A product: what goes in, and what should come out within which bound.
pub struct Case {
    packed: Int4Matrix,
    input: Vec<bf16>,
    rows: usize,
    expected: Vec<f64>,
    bounds: Vec<f64>,
}

impl Case {
    pub fn new(format: WeightFormat, rows: usize, outputs: usize, columns: usize) -> Case {
        let matrix = weights(format, outputs, columns);
        let packed = repack(std::slice::from_ref(&matrix)).unwrap();
        let input: Vec<bf16> = Noise::new(7).vector(rows * columns).into_iter().map(bf16::from_f32).collect();
        let (mut expected, mut bounds) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs]);
        let mut row = vec![0.0f32; columns];
        for output in 0..outputs {
            matrix.dequantize_row(output, &mut row);
            for (index, input) in input.chunks(columns).enumerate() {
                let products = || row.iter().zip(input).map(|(weight, x)| f64::from(*weight) * x.to_f64());
                expected[index * outputs + output] = products().sum();
                bounds[index * outputs + output] = 1e-6 * products().map(f64::abs).sum::<f64>();
            }
        }
        Case { packed, input, rows, expected, bounds }
    }

    fn gemv(&self) -> Outcome {
        let grid = [self.packed.rows.div_ceil(32) as u32, 1, 1];
        self.run(self.kernel("gemv"), Extent { grid, block: 256, shared: 0 }).unwrap()
    }

    fn gemm(&self, splits: usize) -> Outcome {
        self.gemm_with(self.kernel("gemm"), splits).unwrap()
    }

    pub fn gemm_with(&self, kernel: &Kernel, splits: usize) -> Result<Outcome, Fault> {
        let rows = self.rows.min(64).next_multiple_of(8);
        let shared = 4 * (rows * 256 + 4096 + 4 * 96 * (64 / self.packed.group).max(1));
        let grid = [self.packed.rows.div_ceil(64), self.rows.div_ceil(64), splits].map(|size| size as u32);
        self.run(kernel, Extent { grid, block: 128, shared })
    }

    fn kernel(&self, kind: &str) -> &'static Kernel {
        kernel_of("int4_matmul", &format!("int4_{kind}_g{}", self.packed.group))
    }

    fn run(&self, kernel: &Kernel, extent: Extent) -> Result<Outcome, Fault> {
        let mut device = Device::new();
        let count = self.rows * self.packed.rows;
        let splits = extent.grid[2] as usize;
        let out = device.poisoned::<f32>(splits * count);
        let input = device.upload(&self.input);
        let weights =
            [device.upload(&self.packed.codes), device.upload(&self.packed.scales), device.upload(&self.packed.zeros)];
        let sizes = [self.rows, self.packed.rows, self.packed.columns].map(|size| size as i32);
        let arguments = Arguments::default().all(&[out, input]).all(&weights).all(&sizes);
        let report = device.run(kernel, extent, &arguments)?;
        let mut result = out;
        if splits > 1 {
            result = device.poisoned::<f32>(count);
            let arguments = Arguments::default().all(&[result, out]).with(count as i64).with(splits as i32);
            let extent = Extent { grid: [count.div_ceil(256) as u32, 1, 1], block: 256, shared: 0 };
            device.run(kernel_of("int4_matmul", "int4_sum_splits"), extent, &arguments)?;
        }
        let weight_bytes = weights.map(|at| report.buffers[&at].loads).iter().map(|loads| 32 * loads.sectors).sum();
        Ok(Outcome { values: device.download(result, count), report, weight_bytes, out, input })
    }

    fn assert_right(&self, outcome: &Outcome, what: &str) {
        let columns = self.packed.rows;
        for (index, value) in outcome.values.iter().enumerate() {
            let (row, column) = (index / columns, index % columns);
            let expected = self.expected[index];
            assert!(
                (f64::from(*value) - expected).abs() <= self.bounds[index],
                "{what}, groups of {}, {} x {columns} x {}: row {row}, column {column}: {value}, {expected}",
                self.packed.group,
                self.rows,
                self.packed.columns,
            );
        }
    }
}

pub struct Outcome {
    pub values: Vec<f32>,
    report: Report,
    weight_bytes: u64,
    out: u64,
    input: u64,
}

/// A width that groups of this format divide.
fn at_least(format: WeightFormat, columns: usize) -> usize {
    columns.next_multiple_of(format.block())
}

#[test]
fn few_rows_are_multiplied_as_in_double_precision() {
    for format in FORMATS {
        for (rows, outputs, columns) in [(1, 64, 64), (1, 72, 576), (3, 33, 576), (8, 200, 1024), (2, 1, 64)] {
            let case = Case::new(format, rows, outputs, at_least(format, columns));
            case.assert_right(&case.gemv(), "gemv");
        }
    }
}

#[test]
fn many_rows_are_multiplied_as_in_double_precision() {
    for format in FORMATS {
        for (rows, outputs, columns) in
            [(1, 64, 64), (3, 72, 576), (8, 33, 1024), (16, 104, 576), (17, 64, 64), (40, 130, 1024), (70, 64, 128)]
        {
            let case = Case::new(format, rows, outputs, at_least(format, columns));
            case.assert_right(&case.gemm(1), "gemm");
        }
    }
}

#[test]
fn a_width_shared_among_blocks_gives_the_same_sums() {
    for format in FORMATS {
        let case = Case::new(format, 17, 72, at_least(format, 576));
        // More than there are stages leaves the last ones nothing to do.
        for splits in [2, 3, 8] {
            case.assert_right(&case.gemm(splits), "gemm in parts");
        }
    }
}

#[test]
fn the_weights_are_read_once_whether_for_one_row_or_for_eight() {
    for format in FORMATS {
        for rows in [1, 8] {
            let case = Case::new(format, rows, 128, 1024);
            let least = 128 * format.row_bytes(1024).unwrap() as u64;
            assert_eq!(case.gemv().weight_bytes, least, "{format}, {rows} rows");
        }
        let case = Case::new(format, 40, 128, 1024);
        let groups = 1024 / format.block() as u64;
        // Where a group is two chunks, two warps read its scales and zero points.
        let parts = (format.block() as u64 / 64).max(1);
        assert_eq!(case.gemm(1).weight_bytes, 128 * (512 + 3 * groups * parts), "{format}, 40 rows");
    }
}

#[test]
fn every_access_uses_all_of_its_sectors_and_none_waits_for_a_bank() {
    for format in FORMATS {
        for (rows, is_gemv) in [(1, true), (8, true), (8, false), (40, false), (64, false)] {
            let case = Case::new(format, rows, 128, 1024);
            let Outcome { report, out, input, .. } = if is_gemv { case.gemv() } else { case.gemm(1) };
            let what = format!("{format}, {rows} rows, {report:?}");
            assert_eq!(report.shared.conflicts, 0, "bank conflicts: {what}");
            assert_eq!(report.local_requests, 0, "local memory: {what}");
            let stores = report.buffers[&out].stores;
            assert_eq!(stores.sectors, (rows * 128 * 4 / 32) as u64, "sectors of the output: {what}");
            assert_eq!(stores.bytes, 32 * stores.sectors, "bytes of the output: {what}");
            let loads = report.buffers[&input].loads;
            assert_eq!(loads.bytes, 32 * loads.sectors, "input: {what}");
            assert_eq!(report.global_loads.bytes, 32 * report.global_loads.sectors, "loads: {what}");
        }
    }
}

#[test]
fn products_are_spent_on_whole_tiles_of_eight_rows() {
    for (rows, tiles) in [(8, 1), (9, 2), (40, 5), (64, 8)] {
        let report = Case::new(WeightFormat::Int4Group128, rows, 64, 256).gemm(1).report;
        assert_eq!(report.mma, tiles * (64 / 16) * (256 / 16), "{rows} rows");
    }
}

#[test]
fn a_row_that_is_not_finite_stays_alone() {
    let mut case = Case::new(WeightFormat::Int4Group64, 8, 64, 128);
    let clean = [case.gemv().values, case.gemm(1).values];
    case.input[3 * 128 + 5] = bf16::NAN;
    for (clean, poisoned) in clean.iter().zip([case.gemv().values, case.gemm(1).values]) {
        for row in 0..8 {
            let (clean, poisoned) = (&clean[row * 64..][..64], &poisoned[row * 64..][..64]);
            match row {
                3 => assert!(poisoned.iter().all(|value| value.is_nan())),
                _ => assert_eq!(clean, poisoned, "row {row}"),
            }
        }
    }
}
