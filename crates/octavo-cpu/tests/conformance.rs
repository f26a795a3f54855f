//! The CPU backend agrees with the reference on every instruction set of this machine, whatever the number of threads.

use octavo_backend::conformance;
use octavo_cpu::{CpuBackend, CpuOptions, isa::Isa};

fn conforms(isa: Isa, threads: usize) {
    if isa.is_supported() {
        conformance::run_all(|| {
            CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa) }).expect("a backend")
        });
    }
}

#[test]
fn plain_rust_conforms() {
    conforms(Isa::Scalar, 2);
}

#[test]
fn avx2_conforms() {
    conforms(Isa::Avx2, 2);
}

#[test]
fn avx512_conforms() {
    conforms(Isa::Avx512, 2);
}

#[test]
fn avx512_with_bfloat16_conforms() {
    conforms(Isa::Avx512Bf16, 2);
}

#[test]
fn one_thread_conforms() {
    conforms(Isa::detect(), 1);
}
