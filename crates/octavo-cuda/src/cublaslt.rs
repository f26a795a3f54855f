//! The few functions of cuBLASLt that dense matrix products need, bound by path.
//!
//! The library is looked for in folders that are given (NVIDIA's wheels put it beside others in `site-packages/nvidia`),
//! then where the loader looks. Types and numbers are those of `cublasLt.h`, which has not changed them since version 11.
//!
//! SAFETY of the whole module: functions are called with the types that the header declares; handles and descriptors are
//! made here and destroyed once.

use std::{
    collections::HashMap,
    ffi::c_void,
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use half::bf16;
use libloading::Library;

use crate::{
    device::{Device, DeviceMemory, Slice},
    error::CudaError,
};

/// Work memory that an algorithm may have: what NVIDIA advises for its newest cards.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// Up to this many rows each power of two has an algorithm of its own, beyond it each multiple of it.
const FINE_ROWS: usize = 512;

type Status = i32;
type Handle = *mut c_void;

const R_32F: i32 = 0;
const R_16BF: i32 = 14;
const COMPUTE_32F: i32 = 68;
const DESCRIPTOR_TRANSPOSE_A: i32 = 3;
const OPERATION_TRANSPOSE: i32 = 1;
const LAYOUT_COLUMNS: i32 = 3;
const PREFERENCE_WORKSPACE_BYTES: i32 = 1;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [i32; 4],
}

/// Declares a table of functions and how it is filled from a library.
macro_rules! functions {
    ($($field:ident = $name:literal ( $($argument:ty),* $(,)? );)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) -> Status,)* }

        impl Functions {
            fn of(library: &Library) -> Result<Functions, libloading::Error> {
                // SAFETY: the types are those of the header.
                unsafe { Ok(Functions { $($field: *library.get(concat!($name, "\0").as_bytes())?,)* }) }
            }
        }
    };
}

functions! {
    create = "cublasLtCreate"(*mut Handle);
    destroy = "cublasLtDestroy"(Handle);
    create_descriptor = "cublasLtMatmulDescCreate"(*mut Handle, i32, i32);
    destroy_descriptor = "cublasLtMatmulDescDestroy"(Handle);
    set_descriptor = "cublasLtMatmulDescSetAttribute"(Handle, i32, *const c_void, usize);
    create_layout = "cublasLtMatrixLayoutCreate"(*mut Handle, i32, u64, u64, i64);
    destroy_layout = "cublasLtMatrixLayoutDestroy"(Handle);
    set_layout = "cublasLtMatrixLayoutSetAttribute"(Handle, i32, *const c_void, usize);
    create_preference = "cublasLtMatmulPreferenceCreate"(*mut Handle);
    destroy_preference = "cublasLtMatmulPreferenceDestroy"(Handle);
    set_preference = "cublasLtMatmulPreferenceSetAttribute"(Handle, i32, *const c_void, usize);
    heuristic = "cublasLtMatmulAlgoGetHeuristic"(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut HeuristicResult, *mut i32,
    );
    matmul = "cublasLtMatmul"(
        Handle, Handle, *const f32, u64, Handle, u64, Handle, *const f32, u64, Handle, u64, Handle,
        *const [u64; 8], u64, usize, *mut c_void,
    );
}

fn check(call: &'static str, status: Status) -> Result<(), CudaError> {
    if status == 0 { Ok(()) } else { Err(CudaError::CublasLt { call, status }) }
}

/// The library, loaded, with a handle on one GPU.
pub struct CublasLt {
    functions: Functions,
    handle: Handle,
    descriptor: Handle,
    preference: Handle,
    workspace: DeviceMemory,
    shapes: HashMap<Shape, Plan>,
    device: Arc<Device>,
    /// Dropped after everything that came from it.
    _library: Library,
}

// SAFETY: handles that any one thread at a time may use.
unsafe impl Send for CublasLt {}

/// What an algorithm is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    outputs: usize,
    inputs: usize,
    stride: usize,
    row_bucket: usize,
}

/// The layouts of a product and the algorithm chosen for it.
struct Plan {
    weights: Handle,
    input: Handle,
    output: Handle,
    algorithm: [u64; 8],
}

/// `output[row] = factor * weights input[row]`.
#[derive(Clone, Copy)]
pub struct Product {
    /// `[outputs, inputs]`.
    pub weights: Slice<bf16>,
    /// `[rows, inputs]`.
    pub input: Slice<bf16>,
    /// `[rows, stride]`, of which the first `outputs` of each row are written.
    pub output: Slice<f32>,
    /// Rows of the weights.
    pub outputs: usize,
    /// Columns of the weights.
    pub inputs: usize,
    /// From one row of the output to the next.
    pub stride: usize,
    /// Rows of input and output.
    pub rows: usize,
    /// On every output.
    pub factor: f32,
}

impl CublasLt {
    /// The library and where it was found: in the folders, in their order, then by the loader. The driver of CUDA 12 runs
    /// version 12 only.
    ///
    /// # Errors
    /// [`CudaError::NoCublasLt`] with all places.
    pub fn find(folders: &[PathBuf], driver: (u32, u32)) -> Result<(Library, String), CudaError> {
        let names =
            if driver.0 >= 13 { &["libcublasLt.so.13", "libcublasLt.so.12"][..] } else { &["libcublasLt.so.12"] };
        let in_folders = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
        let by_loader = names.iter().map(PathBuf::from);
        let mut looked = Vec::new();
        for path in in_folders.chain(by_loader) {
            // SAFETY: loading NVIDIA's library runs its own initialisers.
            if let Ok(library) = unsafe { Library::new(&path) }
                && Functions::of(&library).is_ok()
            {
                return Ok((library, path.display().to_string()));
            }
            looked.push(path_words(&path));
        }
        Err(CudaError::NoCublasLt { looked })
    }

    /// Makes a handle and takes work memory.
    ///
    /// # Errors
    /// The library is missing or refuses; memory that cannot be had.
    pub fn new(device: &Arc<Device>, folders: &[PathBuf]) -> Result<CublasLt, CudaError> {
        let (library, path) = CublasLt::find(folders, device.info().driver)?;
        let functions = Functions::of(&library)
            .map_err(|error| CudaError::NoCublasLt { looked: vec![format!("{path}: {error}")] })?;
        device.bind()?;
        let workspace = DeviceMemory::new(device, "work memory of matrix products", WORKSPACE_BYTES)?;
        let mut found = CublasLt {
            functions,
            handle: ptr::null_mut(),
            descriptor: ptr::null_mut(),
            preference: ptr::null_mut(),
            workspace,
            shapes: HashMap::new(),
            device: device.clone(),
            _library: library,
        };
        found.make_descriptors()?;
        Ok(found)
    }

    fn make_descriptors(&mut self) -> Result<(), CudaError> {
        let f = &self.functions;
        // SAFETY: see the module.
        unsafe {
            check("cublasLtCreate", (f.create)(&mut self.handle))?;
            check("cublasLtMatmulDescCreate", (f.create_descriptor)(&mut self.descriptor, COMPUTE_32F, R_32F))?;
            let transpose = OPERATION_TRANSPOSE;
            let (value, size) = (ptr::from_ref(&transpose).cast(), size_of::<i32>());
            let status = (f.set_descriptor)(self.descriptor, DESCRIPTOR_TRANSPOSE_A, value, size);
            check("cublasLtMatmulDescSetAttribute", status)?;
            check("cublasLtMatmulPreferenceCreate", (f.create_preference)(&mut self.preference))?;
            let bytes = WORKSPACE_BYTES as u64;
            let (value, size) = (ptr::from_ref(&bytes).cast(), size_of::<u64>());
            let status = (f.set_preference)(self.preference, PREFERENCE_WORKSPACE_BYTES, value, size);
            check("cublasLtMatmulPreferenceSetAttribute", status)
        }
    }

    /// Queues a product.
    ///
    /// # Errors
    /// The library refuses.
    ///
    /// # Panics
    /// If a slice is shorter than the product says.
    pub fn run(&mut self, product: &Product) -> Result<(), CudaError> {
        if product.rows == 0 {
            return Ok(());
        }
        assert!(product.weights.len >= product.outputs * product.inputs && product.stride >= product.outputs);
        assert!(product.input.len >= product.rows * product.inputs);
        assert!(product.output.len >= (product.rows - 1) * product.stride + product.outputs);
        let bucket = row_bucket(product.rows);
        match self.run_as(product, bucket) {
            // An algorithm for the most rows of a bucket need not take fewer.
            Err(CudaError::CublasLt { .. }) if bucket != product.rows => self.run_as(product, product.rows),
            result => result,
        }
    }

    /// Queues a product with the algorithm for so many rows.
    fn run_as(&mut self, product: &Product, rows: usize) -> Result<(), CudaError> {
        let shape =
            Shape { outputs: product.outputs, inputs: product.inputs, stride: product.stride, row_bucket: rows };
        if !self.shapes.contains_key(&shape) {
            let plan = self.plan(&shape)?;
            self.shapes.insert(shape, plan);
        }
        let Some(plan) = self.shapes.get(&shape) else { return Ok(()) };
        let columns = product.rows as u64;
        let (value, size) = (ptr::from_ref(&columns).cast(), size_of::<u64>());
        let zero = 0.0f32;
        let f = &self.functions;
        // SAFETY: see the module; the slices are as long as the layouts say.
        unsafe {
            for layout in [plan.input, plan.output] {
                check("cublasLtMatrixLayoutSetAttribute", (f.set_layout)(layout, LAYOUT_COLUMNS, value, size))?;
            }
            // Everything is row-major here and column-major there, where the product is transpose(weights) times input.
            let status = (f.matmul)(
                self.handle,
                self.descriptor,
                &product.factor,
                product.weights.address,
                plan.weights,
                product.input.address,
                plan.input,
                &zero,
                product.output.address,
                plan.output,
                product.output.address,
                plan.output,
                &plan.algorithm,
                self.workspace.address(),
                self.workspace.bytes(),
                self.device.stream().cast(),
            );
            check("cublasLtMatmul", status)
        }
    }

    /// Layouts for the most rows of the bucket, and the algorithm that the library thinks best for them.
    fn plan(&self, shape: &Shape) -> Result<Plan, CudaError> {
        let layout = |kind: i32, rows: usize, columns: usize, stride: usize| {
            let mut layout = ptr::null_mut();
            // SAFETY: see the module.
            let status = unsafe {
                (self.functions.create_layout)(&mut layout, kind, rows as u64, columns as u64, stride as i64)
            };
            check("cublasLtMatrixLayoutCreate", status).map(|()| layout)
        };
        let mut plan = Plan {
            weights: layout(R_16BF, shape.inputs, shape.outputs, shape.inputs)?,
            input: layout(R_16BF, shape.inputs, shape.row_bucket, shape.inputs)?,
            output: layout(R_32F, shape.outputs, shape.row_bucket, shape.stride)?,
            algorithm: [0; 8],
        };
        let mut best =
            HeuristicResult { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut count = 0;
        // SAFETY: see the module; there is room for the one result that is asked for.
        let status = unsafe {
            (self.functions.heuristic)(
                self.handle,
                self.descriptor,
                plan.weights,
                plan.input,
                plan.output,
                plan.output,
                self.preference,
                1,
                &mut best,
                &mut count,
            )
        };
        check("cublasLtMatmulAlgoGetHeuristic", status)?;
        check("the choice of cublasLtMatmulAlgoGetHeuristic", if count < 1 { -1 } else { best.state })?;
        plan.algorithm = best.algorithm;
        Ok(plan)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let f = &self.functions;
        // SAFETY: see the module; errors have nowhere to go.
        unsafe {
            for plan in self.shapes.values() {
                for layout in [plan.weights, plan.input, plan.output] {
                    (f.destroy_layout)(layout);
                }
            }
            if !self.preference.is_null() {
                (f.destroy_preference)(self.preference);
            }
            if !self.descriptor.is_null() {
                (f.destroy_descriptor)(self.descriptor);
            }
            if !self.handle.is_null() && self.device.bind().is_ok() {
                (f.destroy)(self.handle);
            }
        }
    }
}

/// The most rows that share an algorithm with `rows`.
fn row_bucket(rows: usize) -> usize {
    if rows <= FINE_ROWS { rows.next_power_of_two() } else { rows.next_multiple_of(FINE_ROWS) }
}

fn path_words(path: &Path) -> String {
    if path.is_absolute() { path.display().to_string() } else { format!("{} by the loader", path.display()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported_with_every_place() {
        let folders = [PathBuf::from("/nowhere/nvidia/cublas/lib")];
        // A machine that has the library cannot say that it is missing.
        if let Err(error) = CublasLt::find(&folders, (13, 0)) {
            let looked = [
                "/nowhere/nvidia/cublas/lib/libcublasLt.so.13",
                "/nowhere/nvidia/cublas/lib/libcublasLt.so.12",
                "libcublasLt.so.13 by the loader",
                "libcublasLt.so.12 by the loader",
            ];
            assert_eq!(error, CudaError::NoCublasLt { looked: looked.map(str::to_owned).to_vec() });
        }
    }

    #[test]
    fn rows_share_algorithms_in_buckets() {
        let buckets = [1, 2, 3, 64, 65, 512, 513, 1025].map(row_bucket);
        assert_eq!(buckets, [1, 2, 4, 64, 128, 512, 1024, 1536]);
    }

    #[test]
    fn the_result_of_the_heuristic_has_the_size_of_the_header() {
        assert_eq!(size_of::<HeuristicResult>(), 96);
    }
}
