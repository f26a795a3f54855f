//! What becomes of a kernel that does what it must not. In a process of its own: nothing works after it. As for `fake.rs`.

use std::sync::Arc;

use half::bf16;
use octavo_cuda::{
    CudaOptions,
    device::{Device, DeviceMemory, Plain, Slice},
    kernels::Kernels,
};

fn values<T: Plain>(device: &Arc<Device>, values: &[T]) -> (DeviceMemory, Slice<T>) {
    let memory = DeviceMemory::new(device, "a test", size_of_val(values)).unwrap();
    let slice = Slice::at(memory.address(), values.len());
    device.write(slice, values).unwrap();
    (memory, slice)
}

#[test]
fn a_fault_in_a_kernel_fails_the_synchronisation_and_all_after_it_and_is_named() {
    let device = Device::open(&CudaOptions::default()).unwrap_or_else(|error| {
        panic!("{error}; this test needs the fake driver: run tools/fakecuda.sh and set LD_LIBRARY_PATH=$PWD/target/fakecuda")
    });
    let kernels = Kernels::new(&device).unwrap();
    let (_table, table) = values(&device, &[bf16::ONE; 4 * 8]);
    let (_hidden, hidden) = values(&device, &[0.0f32; 8]);
    let (_tokens, tokens) = values(&device, &[4]);
    // One row beyond the table.
    kernels.embed(hidden, table, tokens, 1.0).unwrap();
    let error = device.synchronize().unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED") && error.contains("embed"), "{error}");
    let again = device.read(hidden).unwrap_err().to_string();
    assert!(again.contains("CUDA_ERROR_LAUNCH_FAILED"), "{again}");
    // SAFETY: the fake's own function, with its type.
    let fault = unsafe {
        let library = libloading::Library::new("libcuda.so.1").unwrap();
        let call = library.get::<unsafe extern "C" fn() -> *const std::ffi::c_char>(b"fakecuda_last_fault\0").unwrap();
        std::ffi::CStr::from_ptr(call()).to_string_lossy().into_owned()
    };
    assert!(fault.contains("embed"), "{fault}");
}
