//! The fake driver under cudarc. `tools/fakecuda.sh`, then
//! `LD_LIBRARY_PATH=$PWD/target/fakecuda cargo test -p octavo-cuda --features kernels`.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use half::bf16;
use octavo_cuda::{
    CudaError, CudaOptions,
    cublaslt::{CublasLt, Product},
    device::{Device, DeviceMemory, Extent, PinnedBuffer, Slice},
    kernels::Kernels,
    probe,
};

fn device() -> Arc<Device> {
    let device = Device::open(&CudaOptions::default()).unwrap_or_else(|error| {
        panic!("{error}; these tests need the fake driver: run tools/fakecuda.sh and set LD_LIBRARY_PATH=$PWD/target/fakecuda")
    });
    assert_eq!(device.info().name, "octavo fake GPU", "these tests need the fake driver, not a GPU's");
    device
}

/// Memory with these values, and the slice of them.
fn values<T: octavo_cuda::device::Plain>(device: &Arc<Device>, values: &[T]) -> (DeviceMemory, Slice<T>) {
    let memory = DeviceMemory::new(device, "a test", size_of_val(values)).unwrap();
    let slice = Slice::at(memory.address(), values.len());
    device.write(slice, values).unwrap();
    (memory, slice)
}

fn bf16s(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(*value)).collect()
}

#[test]
fn a_probe_finds_the_fake_and_its_library_of_products() {
    device();
    let info = probe().unwrap();
    assert_eq!((info.compute_capability, info.driver, info.is_integrated), ((8, 7), (12, 4), true));
    assert!(info.cublaslt.ends_with("libcublasLt.so.12"), "{info:?}");
    assert!(matches!(
        octavo_cuda::probe_with(&CudaOptions { device: 1, ..CudaOptions::default() }),
        Err(CudaError::NoDevice { found: 1, wanted: 1 })
    ));
}

#[test]
fn device_memory_cannot_be_read_by_the_host() {
    let device = device();
    let (_memory, slice) = values(&device, &[1.0f32; 4]);
    let mut pipe = [0; 2];
    // SAFETY: the kernel reads the address, and refuses it where a process would be ended.
    let written = unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        libc::write(pipe[1], slice.address as *const libc::c_void, 4)
    };
    assert_eq!(written, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
}

#[test]
fn copies_use_pinned_memory_only_when_they_are_waited_for() {
    let device = device();
    let memory = DeviceMemory::new(&device, "a test", 4).unwrap();
    let mut from = PinnedBuffer::new(&device, "a test", 4).unwrap();
    let mut to = PinnedBuffer::new(&device, "a test", 4).unwrap();
    from.bytes_mut()[..4].fill(1);
    to.bytes_mut().fill(9);
    device.upload(memory.address(), &from, 4).unwrap();
    device.download(&mut to, memory.address(), 4).unwrap();
    from.bytes_mut()[..4].fill(2);
    assert_eq!(to.bytes()[..4], [9; 4], "nothing has run yet");
    device.synchronize().unwrap();
    assert_eq!(to.bytes()[..4], [2; 4], "what the buffer held when the copy ran");
}

#[test]
fn a_copy_beyond_the_end_of_a_buffer_is_refused() {
    let device = device();
    let memory = DeviceMemory::new(&device, "a test", 4).unwrap();
    let error = device.write(Slice::at(memory.address(), 2), &[1.0f32, 2.0]).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
}

#[test]
fn memory_that_is_not_there_is_refused_with_its_size() {
    let bytes = 9 << 30;
    let error = DeviceMemory::new(&device(), "a test", bytes).err();
    assert_eq!(error, Some(CudaError::Memory { what: "a test", bytes }));
}

#[test]
fn a_kernel_runs_from_its_ptx() {
    let device = device();
    let kernels = Kernels::new(&device).unwrap();
    let rows: Vec<f32> = (0..4 * 64).map(|i| i as f32 / 2.0).collect();
    let (_table, table) = values(&device, &bf16s(&rows));
    let (_tokens, tokens) = values(&device, &[3, 0]);
    let (_hidden, hidden) = values(&device, &[0.0f32; 2 * 64]);
    kernels.embed(hidden, table, tokens, 2.0).unwrap();
    let doubled = |token: usize| rows[token * 64..][..64].iter().map(|value| bf16::from_f32(*value).to_f32() * 2.0);
    assert_eq!(device.read(hidden).unwrap(), doubled(3).chain(doubled(0)).collect::<Vec<f32>>());
    let report = report(c"embed");
    assert!(report[0] >= 1 && report[5] >= 2 * 64 * 2, "launches and bytes of loads: {report:?}");
}

/// The fake's counters of a kernel: launches, blocks, instructions, and loads as requests, sectors and bytes; and more.
fn report(kernel: &std::ffi::CStr) -> [u64; 12] {
    let mut report = [0u64; 12];
    // SAFETY: the fake's own function, with its types.
    unsafe {
        let library = libloading::Library::new("libcuda.so.1").unwrap();
        let call = library.get::<unsafe extern "C" fn(*const std::ffi::c_char, *mut u64) -> i32>(b"fakecuda_report\0");
        assert_eq!(call.unwrap()(kernel.as_ptr(), report.as_mut_ptr()), 0);
    }
    report
}

#[test]
fn a_captured_graph_does_the_same_again_with_new_inputs() {
    let device = device();
    let kernels = Kernels::new(&device).unwrap();
    let (_table, table) = values(&device, &bf16s(&[[1.0; 8], [2.0; 8]].concat()));
    let (_tokens, tokens) = values(&device, &[0]);
    let (_hidden, hidden) = values(&device, &[0.0f32; 8]);
    let stream = device.shared_stream();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    kernels.embed(hidden, table, tokens, 1.0).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    assert_eq!(device.read(hidden).unwrap(), [0.0; 8], "capturing runs nothing");
    for token in [1, 0] {
        device.write(tokens, &[token]).unwrap();
        graph.launch().unwrap();
        assert_eq!(device.read(hidden).unwrap(), [1.0 + token as f32; 8]);
    }
}

#[test]
fn launches_that_a_gpu_would_refuse_are_refused() {
    let device = device();
    assert!(matches!(device.load("no_such_file"), Err(CudaError::NoImage { module: "no_such_file" })));
    let module = device.load("pointwise").unwrap();
    assert!(matches!(module.kernel("no_such_kernel", 0), Err(CudaError::NoKernel { module: "pointwise", .. })));
    let kernel = module.kernel("gather_rows", 0).unwrap();
    let extents = [
        Extent { grid: [1, 1, 1], block: 256, shared_bytes: 0 },
        Extent { grid: [1, 70_000, 1], block: 128, shared_bytes: 0 },
        Extent { grid: [1, 1, 1], block: 128, shared_bytes: 50 << 10 },
    ];
    for extent in extents {
        // SAFETY: the launch is refused before anything is read.
        let error = unsafe { kernel.launch(extent, &[0; 4]) }.unwrap_err().to_string();
        assert!(error.contains("gather_rows") && error.contains("CUDA_ERROR_INVALID_VALUE"), "{extent:?}: {error}");
    }
}

#[test]
fn products_are_those_of_rows_of_weights_and_of_input() {
    let device = device();
    let mut cublaslt = CublasLt::new(&device, &[]).unwrap();
    let (outputs, inputs, stride) = (24, 16, 28);
    let whole = |count: usize, step: usize| (0..count).map(|i| (i * step % 7) as f32 - 3.0).collect::<Vec<f32>>();
    let matrix = whole(outputs * inputs, 5);
    let (_weights, weights) = values(&device, &bf16s(&matrix));
    for rows in [1, 3, 70] {
        let vectors = whole(rows * inputs, 3);
        let (_input, input) = values(&device, &bf16s(&vectors));
        let (_output, output) = values(&device, &vec![-1.0f32; rows * stride]);
        cublaslt.run(&Product { weights, input, output, outputs, inputs, stride, rows, factor: 0.5 }).unwrap();
        let found = device.read(output).unwrap();
        for row in 0..rows {
            for column in 0..stride {
                let terms = (0..inputs).map(|i| matrix[column % outputs * inputs + i] * vectors[row * inputs + i]);
                let expected = if column < outputs { 0.5 * terms.sum::<f32>() } else { -1.0 };
                assert_eq!(found[row * stride + column], expected, "row {row} of {rows}, column {column}");
            }
        }
    }
}
