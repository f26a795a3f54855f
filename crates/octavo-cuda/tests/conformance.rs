//! The backend against the reference. Needs a GPU or the fake driver: `tools/fakecuda.sh`, then
//! `LD_LIBRARY_PATH=$PWD/target/fakecuda cargo test -p octavo-cuda --features kernels`.

use octavo_backend::conformance;
use octavo_cuda::{CudaBackend, CudaOptions};

#[test]
fn cuda_agrees_with_the_reference() {
    let backend = CudaBackend::new(&CudaOptions::default()).unwrap_or_else(|error| {
        panic!("{error}; without a GPU, run tools/fakecuda.sh and set LD_LIBRARY_PATH=$PWD/target/fakecuda")
    });
    conformance::run_all(|| backend.clone());
}
