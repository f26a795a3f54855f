//! The largest part of a step: matmul for each weight format, rounding of its inputs, and number of rows.
//!
//! Throughput is in elements of the weight matrix times rows, so `Gelem/s` times two is Gop/s.

use std::{borrow::Cow, time::Duration};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use octavo_backend::{Matrix, WeightData, WeightFormat};
use octavo_cpu::{
    ActivationType,
    activation::Activations,
    isa::Isa,
    matmul::{Matmul, Mode, Output},
    pack::PackedMatrix,
};

const ROWS: usize = 1536;
const COLUMNS: usize = 1536;

fn matmul(criterion: &mut Criterion) {
    let isa = std::env::var("OCTAVO_ISA").map_or_else(|_| Isa::detect(), |name| name.parse().expect("OCTAVO_ISA"));
    let kernels = Matmul::new(isa);
    let formats = [
        WeightFormat::Q4_0,
        WeightFormat::Q4_1,
        WeightFormat::Q4K,
        WeightFormat::Int4Group128,
        WeightFormat::Q6K,
        WeightFormat::Q8_0,
        WeightFormat::Bf16,
    ];
    let types = [(ActivationType::Int8, ""), (ActivationType::Bf16, ", bfloat16 activations")];
    let kinds = types.into_iter().flat_map(|kind| formats.map(|format| (format, kind)));
    for (format, (activations, name)) in kinds.chain([(WeightFormat::F32, types[0])]) {
        let packed = PackedMatrix::pack(&[zeros(format)], activations).expect("a matrix");
        let mut group = criterion.benchmark_group(format!("matmul {format} {ROWS}x{COLUMNS} {isa}{name}"));
        for rows in [1, 2, 4, 8, 16, 32, 128] {
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
    let bytes = ROWS * format.row_bytes(COLUMNS).expect("a multiple of every block");
    Matrix { rows: ROWS, columns: COLUMNS, data: WeightData { format, bytes: Cow::Owned(vec![0; bytes]) } }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = matmul
}
criterion_main!(benches);
