//! Of cuBLASLt what a product `output = factor * transpose(weights) input` of bfloat16 needs, with sums in 32-bit floats.
//! Anything else is `CUBLAS_STATUS_NOT_SUPPORTED`.
//!
//! SAFETY of the whole module: as for the library's own functions; descriptors are those that were made here.

use std::ffi::c_void;

use crate::{
    product::Product,
    state::{Operation, device},
};

type Status = i32;
type Handle = *mut c_void;

const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

const R_32F: i32 = 0;
const R_16BF: i32 = 14;
const COMPUTE_32F: i32 = 68;

/// What the heuristic says and a product must be given.
const ALGORITHM: u64 = 0x6f63_7461_766f;

#[derive(Clone, Copy)]
struct Descriptor {
    is_transposed: [bool; 2],
}

/// Column-major, as the library's are.
#[derive(Clone, Copy)]
struct MatrixLayout {
    kind: i32,
    rows: usize,
    columns: usize,
    stride: usize,
}

/// The beginning of `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [i32; 4],
}

macro_rules! exported {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> Status $body:block)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As for the library's function of this name.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Status $body
    )*};
}

/// # Safety
/// The address is valid.
unsafe fn give<T>(to: *mut Handle, value: T) -> Status {
    // SAFETY: by the contract.
    unsafe { to.write(Box::into_raw(Box::new(value)).cast()) };
    SUCCESS
}

/// # Safety
/// The handle was given out for a value of this type, and is not used again.
unsafe fn take<T>(handle: Handle) -> Status {
    if handle.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: by the contract.
    drop(unsafe { Box::from_raw(handle.cast::<T>()) });
    SUCCESS
}

exported! {
    /// A handle.
    fn cublasLtCreate(handle: *mut Handle) -> Status {
        // SAFETY: see the module.
        unsafe { give(handle, 0u64) }
    }

    /// Ends a handle.
    fn cublasLtDestroy(handle: Handle) -> Status {
        // SAFETY: see the module.
        unsafe { take::<u64>(handle) }
    }

    /// A description of products.
    fn cublasLtMatmulDescCreate(descriptor: *mut Handle, compute: i32, scale: i32) -> Status {
        if (compute, scale) != (COMPUTE_32F, R_32F) {
            return NOT_SUPPORTED;
        }
        // SAFETY: see the module.
        unsafe { give(descriptor, Descriptor { is_transposed: [false; 2] }) }
    }

    /// Ends a description.
    fn cublasLtMatmulDescDestroy(descriptor: Handle) -> Status {
        // SAFETY: see the module.
        unsafe { take::<Descriptor>(descriptor) }
    }

    /// Whether A (3) and B (4) are transposed.
    fn cublasLtMatmulDescSetAttribute(descriptor: Handle, attribute: i32, value: *const c_void, bytes: usize) -> Status {
        if bytes != size_of::<i32>() || !matches!(attribute, 3 | 4) {
            return NOT_SUPPORTED;
        }
        // SAFETY: see the module.
        unsafe { (*descriptor.cast::<Descriptor>()).is_transposed[attribute as usize - 3] = value.cast::<i32>().read() == 1 };
        SUCCESS
    }

    /// A matrix.
    fn cublasLtMatrixLayoutCreate(layout: *mut Handle, kind: i32, rows: u64, columns: u64, stride: i64) -> Status {
        if stride < rows as i64 {
            return INVALID_VALUE;
        }
        let (rows, columns, stride) = (rows as usize, columns as usize, stride as usize);
        // SAFETY: see the module.
        unsafe { give(layout, MatrixLayout { kind, rows, columns, stride }) }
    }

    /// Ends a matrix.
    fn cublasLtMatrixLayoutDestroy(layout: Handle) -> Status {
        // SAFETY: see the module.
        unsafe { take::<MatrixLayout>(layout) }
    }

    /// Rows (2) and columns (3).
    fn cublasLtMatrixLayoutSetAttribute(layout: Handle, attribute: i32, value: *const c_void, bytes: usize) -> Status {
        if bytes != size_of::<u64>() || !matches!(attribute, 2 | 3) {
            return NOT_SUPPORTED;
        }
        // SAFETY: see the module.
        unsafe {
            let (layout, value) = (&mut *layout.cast::<MatrixLayout>(), value.cast::<u64>().read() as usize);
            *(if attribute == 2 { &mut layout.rows } else { &mut layout.columns }) = value;
        }
        SUCCESS
    }

    /// What algorithms may have.
    fn cublasLtMatmulPreferenceCreate(preference: *mut Handle) -> Status {
        // SAFETY: see the module.
        unsafe { give(preference, 0u64) }
    }

    /// Ends it.
    fn cublasLtMatmulPreferenceDestroy(preference: Handle) -> Status {
        // SAFETY: see the module.
        unsafe { take::<u64>(preference) }
    }

    /// There is nothing to prefer.
    fn cublasLtMatmulPreferenceSetAttribute(
        _preference: Handle, _attribute: i32, _value: *const c_void, _bytes: usize,
    ) -> Status {
        SUCCESS
    }

    /// The only algorithm.
    fn cublasLtMatmulAlgoGetHeuristic(
        _handle: Handle, descriptor: Handle, a: Handle, b: Handle, c: Handle, d: Handle, _preference: Handle,
        wanted: i32, results: *mut HeuristicResult, found: *mut i32,
    ) -> Status {
        // SAFETY: see the module.
        let product = unsafe { product_of(descriptor, [a, b, c, d], [0; 3], 1.0) };
        let is_known = wanted >= 1 && product.is_ok();
        // SAFETY: see the module.
        unsafe {
            found.write(i32::from(is_known));
            if is_known {
                let (algorithm, reserved) = ([ALGORITHM; 8], [0; 4]);
                results.write(HeuristicResult { algorithm, workspace_bytes: 0, state: SUCCESS, waves: 1.0, reserved });
            }
        }
        product.err().unwrap_or(SUCCESS)
    }

    /// Queues a product.
    fn cublasLtMatmul(
        _handle: Handle, descriptor: Handle, alpha: *const f32, a: u64, a_layout: Handle, b: u64, b_layout: Handle,
        beta: *const f32, c: u64, c_layout: Handle, d: u64, d_layout: Handle, algorithm: *const [u64; 8],
        _workspace: u64, _workspace_bytes: usize, stream: Handle,
    ) -> Status {
        // SAFETY: see the module.
        let (alpha, beta, has_algorithm) =
            unsafe { (alpha.read(), beta.read(), algorithm.is_null() || (*algorithm)[0] == ALGORITHM) };
        if beta != 0.0 || c != d || !has_algorithm {
            return NOT_SUPPORTED;
        }
        // SAFETY: see the module.
        let product = unsafe { product_of(descriptor, [a_layout, b_layout, c_layout, d_layout], [a, b, d], alpha) };
        match product {
            Err(status) => status,
            Ok(product) => match device().enqueue(stream as usize, Operation::Product(product)) {
                Ok(()) => SUCCESS,
                Err(_) => EXECUTION_FAILED,
            },
        }
    }
}

/// The product that the library is asked for, if it is one that is known here.
///
/// # Safety
/// All handles were given out for what they are used as.
unsafe fn product_of(
    descriptor: Handle,
    layouts: [Handle; 4],
    addresses: [u64; 3],
    factor: f32,
) -> Result<Product, Status> {
    // SAFETY: by the contract.
    let (descriptor, [a, b, c, d]) = unsafe {
        (*descriptor.cast::<Descriptor>(), layouts.map(|layout| *layout.cast::<MatrixLayout>()))
    };
    let kinds = [a.kind, b.kind, c.kind, d.kind];
    if kinds != [R_16BF, R_16BF, R_32F, R_32F] || descriptor.is_transposed != [true, false] {
        return Err(NOT_SUPPORTED);
    }
    let is_whole = a.rows == b.rows && a.columns == d.rows && b.columns == d.columns;
    if !is_whole || (c.rows, c.columns, c.stride) != (d.rows, d.columns, d.stride) {
        return Err(INVALID_VALUE);
    }
    // The library's fast algorithms need it, and nobody should find out on a device.
    if addresses.iter().any(|address| address % 16 != 0) {
        return Err(INVALID_VALUE);
    }
    Ok(Product {
        weights: addresses[0],
        input: addresses[1],
        output: addresses[2],
        outputs: a.columns,
        inputs: a.rows,
        rows: b.columns,
        weight_stride: a.stride,
        input_stride: b.stride,
        output_stride: d.stride,
        factor,
    })
}
