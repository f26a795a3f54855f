//! The CPU backend agrees with the reference on every instruction set of this machine, whatever the number of threads.

use std::sync::{Mutex, PoisonError};

use octavo_backend::{KvType, conformance};
use octavo_cpu::{ActivationType, CpuBackend, CpuOptions, Projections, isa::Isa};

/// One at a time: several pools on the same two cores would wait for each other.
static MACHINE: Mutex<()> = Mutex::new(());

fn conforms(isa: Isa, threads: usize) {
    conforms_with(CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() });
}

fn conforms_with(options: CpuOptions) {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if options.isa.is_none_or(Isa::is_supported) {
        conformance::run_all(|| CpuBackend::new(options).expect("a backend"));
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
fn avx_vnni_conforms() {
    conforms(Isa::AvxVnni, 2);
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
fn a_matrix_unit_conforms() {
    conforms(Isa::Amx, 2);
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_conforms() {
    assert!(Isa::Neon.is_supported(), "the machine or emulator has no integer dot product");
    conforms(Isa::Neon, 2);
}

#[test]
fn an_8_bit_cache_conforms() {
    conforms_with(CpuOptions { threads: Some(2), kv: KvType::Int8, ..CpuOptions::default() });
}

#[test]
fn bfloat16_activations_conform_on_every_instruction_set() {
    for isa in Isa::supported() {
        let activations = ActivationType::Bf16;
        conforms_with(CpuOptions { threads: Some(2), isa: Some(isa), activations, ..CpuOptions::default() });
    }
}

#[test]
fn activations_in_16_bits_conform_on_every_instruction_set() {
    for isa in Isa::supported() {
        let int16_activations = Projections::ALL;
        conforms_with(CpuOptions { threads: Some(2), isa: Some(isa), int16_activations, ..CpuOptions::default() });
    }
}

#[test]
fn one_thread_conforms() {
    conforms(Isa::detect(), 1);
}
