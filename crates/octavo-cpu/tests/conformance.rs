//! The CPU backend agrees with the reference on every instruction set of this machine, whatever the number of threads.

use std::sync::{Mutex, PoisonError};

use octavo_backend::{KvType, conformance};
use octavo_cpu::{CpuBackend, CpuOptions, isa::Isa};

/// One at a time: several pools on the same two cores would wait for each other.
static MACHINE: Mutex<()> = Mutex::new(());

fn conforms(isa: Isa, threads: usize) {
    conforms_with(isa, threads, KvType::Bf16);
}

fn conforms_with(isa: Isa, threads: usize, kv: KvType) {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if isa.is_supported() {
        conformance::run_all(|| {
            CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa), kv }).expect("a backend")
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
fn an_8_bit_cache_conforms() {
    conforms_with(Isa::detect(), 2, KvType::Int8);
}

#[test]
fn one_thread_conforms() {
    conforms(Isa::detect(), 1);
}
