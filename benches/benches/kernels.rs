//! The parts of a step: matmul for each weight format and number of rows, and the draw of a token.
//!
//! Throughput is in elements of the weight matrix times rows, so `Gelem/s` times two is Gop/s.

use std::{borrow::Cow, hint::black_box, time::Duration};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use octavo_backend::{Matrix, SampleRow, WeightData, WeightFormat, sampling};
use octavo_cpu::{
    activation::Activations,
    isa::Isa,
    matmul::{Matmul, Mode, Output},
    pack::PackedMatrix,
};

const ROWS: usize = 1536;
const COLUMNS: usize = 1536;

fn matmul(criterion: &mut Criterion) {
    let isa = Isa::detect();
    let kernels = Matmul::new(isa);
    let formats = [WeightFormat::Q4_0, WeightFormat::Q4_1, WeightFormat::Q8_0, WeightFormat::Bf16, WeightFormat::F32];
    for format in formats {
        let packed = PackedMatrix::pack(&[zeros(format)]).expect("a matrix");
        let mut group = criterion.benchmark_group(format!("matmul {format} {ROWS}x{COLUMNS} {isa}"));
        for rows in [1, 2, 4, 8, 128] {
            let activations = Activations::new(isa, packed.input_roundings(), COLUMNS, rows).expect("activations");
            let input: Vec<f32> = (0..COLUMNS).map(|i| (i % 101) as f32 - 50.0).collect();
            for row in 0..rows {
                // SAFETY: nothing else uses the activations.
                unsafe { activations.write_row(row, &input) }
            }
            let mut result = vec![0.0f32; rows * ROWS];
            let output = Output { start: result.as_mut_ptr(), stride: ROWS, mode: Mode::Store };
            group.throughput(Throughput::Elements((rows * ROWS * COLUMNS) as u64));
            group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
                // SAFETY: `result` holds `rows` rows of `ROWS` elements and outlives the call.
                bencher.iter(|| unsafe { kernels.run(&packed, &activations, 0..rows, 0..packed.tiles(), output) });
            });
        }
        group.finish();
    }
}

/// The kernels' speed does not depend on values, as long as none is subnormal.
fn zeros(format: WeightFormat) -> Matrix<'static> {
    let bytes = ROWS * format.row_bytes(COLUMNS).expect("a multiple of 32");
    Matrix { rows: ROWS, columns: COLUMNS, data: WeightData { format, bytes: Cow::Owned(vec![0; bytes]) } }
}

fn draw(criterion: &mut Criterion) {
    let mut state = 1u32;
    let mut logits: Vec<f32> = (0..49_152)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0 * 20.0
        })
        .collect();
    const ROW: SampleRow = SampleRow::greedy(0, 1);
    let rows = [
        ("greedy", ROW),
        ("temperature 1", SampleRow { temperature: 1.0, ..ROW }),
        ("top-k 50", SampleRow { temperature: 0.7, top_k: 50, ..ROW }),
        ("top-p 0.9", SampleRow { temperature: 0.7, top_p: 0.9, ..ROW }),
    ];
    let mut group = criterion.benchmark_group("draw from 49152 logits");
    for (name, row) in rows {
        group.bench_function(name, |bencher| bencher.iter(|| sampling::sample(black_box(&mut logits), &row)));
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = matmul, draw
}
criterion_main!(benches);
