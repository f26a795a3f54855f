//! What `octavo doctor` asks: the machine, its limits, and what a model would take on it.

use std::{path::PathBuf, time::Duration};

use octavo_cpu::{
    host,
    isa::Isa,
    limits::{self, ReadBuffer},
};
use octavo_cuda::{CudaError, CudaOptions, probe_with};
use octavo_model::Checkpoint;
use pyo3::{exceptions::PyMemoryError, prelude::*, types::PyDict};

use crate::{
    device::{Device, Options},
    errors::LoadError,
};

/// How long a limit is measured.
pub const MEASURED: Duration = Duration::from_millis(400);

/// What the host grants this process, and what octavo makes of it.
#[pyfunction(name = "host")]
pub fn host_facts(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let threads = host::available_threads();
    let dict = PyDict::new(py);
    let supported = Isa::supported().iter().map(Isa::to_string).collect::<Vec<_>>();
    dict.set_item("features", supported)?;
    dict.set_item("isa", Isa::detect().to_string())?;
    dict.set_item("threads", threads.count)?;
    dict.set_item("affinity", threads.affinity)?;
    dict.set_item("quota", threads.quota)?;
    dict.set_item("nodes", threads.nodes)?;
    dict.set_item("cores", threads.cores)?;
    dict.set_item("memory_limit", host::memory_limit())?;
    Ok(dict)
}

/// The first NVIDIA GPU, or what is missing to compute on it and whether there is a driver at all.
#[pyfunction]
pub fn probe_cuda(py: Python<'_>, library_folders: Vec<PathBuf>) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    match py.detach(|| probe_with(&CudaOptions { device: 0, library_folders })) {
        Ok(info) => {
            dict.set_item("name", info.name)?;
            dict.set_item("compute_capability", info.compute_capability)?;
            dict.set_item("memory", info.memory)?;
            dict.set_item("driver", info.driver)?;
            dict.set_item("multiprocessors", info.multiprocessors)?;
            dict.set_item("cublaslt", info.cublaslt)?;
        }
        Err(error) => {
            dict.set_item("missing", error.to_string())?;
            dict.set_item("has_driver", !matches!(error, CudaError::NoDriver { .. }))?;
        }
    }
    Ok(dict)
}

/// The memory that a model would take; nothing is loaded.
#[pyfunction]
#[pyo3(signature = (model, *, device, options))]
pub fn memory_plan<'py>(
    py: Python<'py>,
    model: PathBuf,
    device: &str,
    options: Options,
) -> PyResult<Bound<'py, PyDict>> {
    let device = Device::named(device).map_err(LoadError::from)?;
    let plan = py.detach(|| -> Result<_, LoadError> {
        let checkpoint = Checkpoint::open(&model)?;
        Ok(device.plan(&model, &checkpoint, &options)?)
    })?;
    let dict = PyDict::new(py);
    dict.set_item("weight_bytes", plan.weight_bytes)?;
    dict.set_item("kv_bytes", plan.kv_bytes)?;
    dict.set_item("arena_bytes", plan.arena_bytes)?;
    dict.set_item("kv_bytes_per_token", plan.kv_bytes_per_token)?;
    dict.set_item("num_blocks", plan.num_blocks)?;
    dict.set_item("max_model_len", plan.max_model_len)?;
    Ok(dict)
}

/// How fast `threads` threads read `num_bytes` bytes over and over, in GB/s (1e9 bytes); `None` is more than caches hold.
#[pyfunction]
#[pyo3(signature = (threads, num_bytes=None))]
pub fn measure_read_bandwidth(py: Python<'_>, threads: usize, num_bytes: Option<usize>) -> PyResult<f64> {
    let num_bytes = num_bytes.unwrap_or(limits::MEMORY_BYTES);
    let measured =
        py.detach(|| ReadBuffer::new(threads, num_bytes).map(|buffer| buffer.bandwidth(Isa::detect(), MEASURED)));
    measured.map(|bytes| bytes * 1e-9).map_err(|error| PyMemoryError::new_err(error.to_string()))
}

/// The peak of int8 dot products on `threads` threads, in Gop/s; a multiplication and an addition are two.
#[pyfunction]
pub fn measure_dot_peak(py: Python<'_>, threads: usize) -> f64 {
    py.detach(|| limits::dot_peak_of(threads, Isa::detect(), MEASURED) * 1e-9)
}
