//! What `octavo doctor` asks: the machine, its limits, and what a model would take on it.

use std::{path::PathBuf, sync::Barrier, thread, time::Duration};

use octavo_cpu::{host, isa::Isa, peak};
use octavo_model::Checkpoint;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    device::{Device, Options},
    errors::LoadError,
};

/// How long a limit is measured.
const MEASURED: Duration = Duration::from_millis(400);

/// Bytes that each thread reads over and over: more than its share of any last-level cache.
const READ_BYTES: usize = 128 << 20;

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
    dict.set_item("cores", threads.cores)?;
    dict.set_item("memory_limit", host::memory_limit())?;
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

/// How fast `threads` threads read memory, in GB/s (1e9 bytes).
#[pyfunction]
pub fn measure_read_bandwidth(py: Python<'_>, threads: usize) -> f64 {
    py.detach(|| {
        at_once(threads, |isa, barrier| {
            // Written, so that every page is there.
            let buffer = vec![1u8; READ_BYTES];
            barrier.wait();
            peak::read_bandwidth(isa, &buffer, MEASURED)
        })
    })
}

/// The peak of int8 dot products on `threads` threads, in Gop/s; a multiplication and an addition are two.
#[pyfunction]
pub fn measure_dot_peak(py: Python<'_>, threads: usize) -> f64 {
    py.detach(|| {
        at_once(threads, |isa, barrier| {
            barrier.wait();
            peak::dot_peak(isa, MEASURED)
        })
    })
}

/// The sum of what `measure` gives on each of `threads` threads, in units of 1e9.
fn at_once(threads: usize, measure: impl Fn(Isa, &Barrier) -> f64 + Sync) -> f64 {
    let (isa, barrier) = (Isa::detect(), Barrier::new(threads));
    let total: f64 = thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| measure(isa, &barrier))).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    });
    total * 1e-9
}
