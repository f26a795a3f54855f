//! One GPU: its context, the stream that everything is done on, and the memory that is taken from it.
//!
//! SAFETY of the whole module: handles are made here and destroyed once, by the value that owns them; every method binds
//! the context to the calling thread first.

use std::{ffi::c_void, marker::PhantomData, mem::size_of, ptr::NonNull, sync::Arc};

use cudarc::driver::{
    CudaContext, CudaStream, DriverError, result,
    sys::{self, CUresult},
};

use crate::{
    error::{CudaError, Doing},
    images::{Image, images},
    probe::{CudaOptions, DeviceInfo, probe_with},
};

/// A GPU in use.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    info: DeviceInfo,
}

impl Device {
    /// Takes hold of a GPU, once [`probe_with`] finds nothing missing.
    ///
    /// # Errors
    /// What the probe says, or the driver.
    pub fn open(options: &CudaOptions) -> Result<Arc<Device>, CudaError> {
        let info = probe_with(options)?;
        let context = CudaContext::new(options.device).doing("making a context on the GPU")?;
        // SAFETY: everything goes through one stream, and no slice of cudarc's is ever made.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().doing("making a stream")?;
        Ok(Arc::new(Device { context, stream, info }))
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The stream that everything is done on.
    pub fn stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// The stream, to capture graphs of it.
    pub fn shared_stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Makes the context that of the calling thread.
    ///
    /// # Errors
    /// An earlier failure of the driver.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().doing("binding the GPU's context to a thread")
    }

    /// Waits until all that was queued is done.
    ///
    /// # Errors
    /// The failure of anything that was queued.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: see the module.
        unsafe { result::stream::synchronize(self.stream()) }.doing("work on the GPU")
    }

    /// Bytes that are free, and bytes in all.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.context.mem_get_info().doing("asking for free memory")
    }

    /// Queues a copy of the first `bytes` of a host buffer, which is read when its turn comes.
    ///
    /// # Errors
    /// A range beyond either end; the driver's.
    pub fn upload(&self, to: u64, from: &PinnedBuffer, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the buffer lives; whoever writes it has waited for the last step.
        unsafe { result::memcpy_htod_async(to, &from.bytes()[..bytes], self.stream()) }.doing("copying to the GPU")
    }

    /// Queues a copy to the start of a host buffer, which holds it after the next [`Device::synchronize`].
    ///
    /// # Errors
    /// A range beyond either end; the driver's.
    pub fn download(&self, to: &mut PinnedBuffer, from: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the buffer lives; whoever reads it waits first.
        let copied = unsafe { result::memcpy_dtoh_async(&mut to.bytes_mut()[..bytes], from, self.stream()) };
        copied.doing("copying from the GPU")
    }

    /// Queues a copy from one place on the GPU to another that does not overlap it.
    ///
    /// # Errors
    /// A range beyond either end; the driver's.
    pub fn copy<T>(&self, to: Slice<T>, from: Slice<T>) -> Result<(), CudaError> {
        assert_eq!(to.len, from.len);
        let bytes = from.len * size_of::<T>();
        // SAFETY: the driver checks both ranges.
        unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, self.stream()) }.doing("copying on the GPU")
    }

    /// Copies values to the GPU and waits for it.
    ///
    /// # Errors
    /// Values beyond the end of the slice; the driver's.
    pub fn write<T: Plain>(&self, to: Slice<T>, values: &[T]) -> Result<(), CudaError> {
        assert!(values.len() <= to.len, "{} values for a slice of {}", values.len(), to.len);
        if values.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // On our stream: the one that blocking copies go through does not wait for ours, nor ours for it.
        // SAFETY: `values` lives until the copy is done, which is waited for.
        unsafe { result::memcpy_htod_async(to.address, values, self.stream()) }.doing("copying to the GPU")?;
        self.synchronize()
    }

    /// Copies values from the GPU once everything queued is done.
    ///
    /// # Errors
    /// The driver's, and that of anything that was queued.
    pub fn read<T: Plain>(&self, from: Slice<T>) -> Result<Vec<T>, CudaError> {
        self.bind()?;
        let mut values = vec![T::default(); from.len];
        if !values.is_empty() {
            // SAFETY: `values` is as long as the slice, plain, and lives until the copy is done, which is waited for.
            unsafe { result::memcpy_dtoh_async(&mut values, from.address, self.stream()) }
                .doing("copying from the GPU")?;
        }
        self.synchronize()?;
        Ok(values)
    }

    /// Loads the image of a module that suits this GPU.
    ///
    /// # Errors
    /// There is none, or the driver refuses it.
    pub fn load(self: &Arc<Self>, module: &'static str) -> Result<Arc<Module>, CudaError> {
        let image = Image::of(images()?, module, &self.info).ok_or(CudaError::NoImage { module })?;
        self.bind()?;
        let words = image.loadable();
        // SAFETY: the image is complete, aligned, and ended by a zero.
        let raw = unsafe { result::module::load_data(words.as_ptr().cast()) }
            .map_err(|error| CudaError::driver(format!("loading the kernels of {module}"), error))?;
        Ok(Arc::new(Module { raw, name: module, device: self.clone() }))
    }
}

/// A type whose values are all their bits, on both sides.
///
/// # Safety
/// Every pattern of bits is a value, there is no padding, and the device has the same layout.
pub unsafe trait Plain: Copy + Default + 'static {}

// SAFETY: numbers.
unsafe impl Plain for u8 {}
// SAFETY: numbers.
unsafe impl Plain for i32 {}
// SAFETY: numbers.
unsafe impl Plain for u32 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: two bytes, all of whose patterns are numbers.
unsafe impl Plain for half::bf16 {}
// SAFETY: two bytes, all of whose patterns are numbers.
unsafe impl Plain for half::f16 {}

/// The loaded kernels of one source file.
pub struct Module {
    raw: sys::CUmodule,
    name: &'static str,
    device: Arc<Device>,
}

// SAFETY: a handle that any thread may use once the context is bound to it.
unsafe impl Send for Module {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Module {}

impl Module {
    /// A kernel that may have so many bytes of shared memory when it is launched.
    ///
    /// # Errors
    /// There is none of this name, or no GPU block has so much.
    pub fn kernel(self: &Arc<Self>, name: &str, shared_bytes: usize) -> Result<Kernel, CudaError> {
        self.device.bind()?;
        let missing = || CudaError::NoKernel { kernel: name.to_owned(), module: self.name };
        let c_name = std::ffi::CString::new(name).map_err(|_| missing())?;
        // SAFETY: the module is loaded.
        let raw = unsafe { result::module::get_function(self.raw, c_name) }.map_err(|error| match error {
            DriverError(CUresult::CUDA_ERROR_NOT_FOUND) => missing(),
            error => CudaError::driver(format!("looking for kernel {name}"), error),
        })?;
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function exists.
            unsafe { result::function::set_function_attribute(raw, attribute, shared_bytes as i32) }.map_err(
                |error| CudaError::driver(format!("{shared_bytes} bytes of shared memory for {name}"), error),
            )?;
        }
        Ok(Kernel { raw, name: name.to_owned(), module: self.clone() })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: no kernel of it is left; an error has nowhere to go.
            let _ = unsafe { result::module::unload(self.raw) };
        }
    }
}

/// Shared memory that every launch may have.
const DEFAULT_SHARED_BYTES: usize = 48 << 10;

/// A kernel that can be launched.
pub struct Kernel {
    raw: sys::CUfunction,
    name: String,
    module: Arc<Module>,
}

// SAFETY: a handle that any thread may use once the context is bound to it.
unsafe impl Send for Kernel {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Kernel {}

/// Arguments that a kernel has at most.
const MOST_ARGUMENTS: usize = 16;

/// The extent of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub block: usize,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: usize,
}

impl Kernel {
    /// Queues a launch; nothing if there are no blocks.
    ///
    /// # Errors
    /// The driver's, or the failure of something queued before.
    ///
    /// # Safety
    /// The arguments are values of the types that the kernel has, in its order, each in the first bytes of its word; what the
    /// kernel reads and writes through them is there.
    ///
    /// # Panics
    /// If there are more arguments than any kernel has.
    pub unsafe fn launch(&self, extent: Extent, arguments: &[u64]) -> Result<(), CudaError> {
        if extent.grid.contains(&0) {
            return Ok(());
        }
        let mut addresses = [std::ptr::null_mut::<c_void>(); MOST_ARGUMENTS];
        assert!(arguments.len() <= MOST_ARGUMENTS, "{} arguments for {}", arguments.len(), self.name);
        for (address, argument) in addresses.iter_mut().zip(arguments) {
            // Only read from, while the launch is queued.
            *address = std::ptr::from_ref(argument).cast_mut().cast();
        }
        let [x, y, z] = extent.grid.map(|blocks| blocks as u32);
        let stream = self.module.device.stream();
        let (block, shared) = ((extent.block as u32, 1, 1), extent.shared_bytes as u32);
        // SAFETY: by the contract.
        unsafe { result::launch_kernel(self.raw, (x, y, z), block, shared, stream, &mut addresses) }
            .map_err(|error| CudaError::driver(format!("launching kernel {}", self.name), error))
    }
}

/// Memory of the GPU, freed when dropped.
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
    device: Arc<Device>,
}

impl DeviceMemory {
    /// Takes `bytes` bytes, which hold anything.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if there are not as many; the driver's.
    pub fn new(device: &Arc<Device>, what: &'static str, bytes: usize) -> Result<DeviceMemory, CudaError> {
        device.bind()?;
        // SAFETY: the context is bound.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|error| match error {
            DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => CudaError::Memory { what, bytes },
            error => CudaError::driver(what, error),
        })?;
        Ok(DeviceMemory { address, bytes, device: device.clone() })
    }

    /// Its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Work that uses it may still be queued.
        if self.device.synchronize().is_ok() || self.device.bind().is_ok() {
            // SAFETY: freed once; an error has nowhere to go.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Part of the GPU's memory, as elements of one type. Like an address, it knows no owner.
#[derive(Debug)]
pub struct Slice<T> {
    /// The first element.
    pub address: u64,
    /// Elements.
    pub len: usize,
    marker: PhantomData<fn() -> T>,
}

impl<T> Clone for Slice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Slice<T> {}

impl<T> Slice<T> {
    /// Elements from an address on.
    pub fn at(address: u64, len: usize) -> Slice<T> {
        Slice { address, len, marker: PhantomData }
    }

    /// No elements at all, at the address 0.
    pub fn none() -> Slice<T> {
        Slice::at(0, 0)
    }

    /// Some of the elements.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn part(self, range: std::ops::Range<usize>) -> Slice<T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        Slice::at(self.address + (range.start * size_of::<T>()) as u64, range.len())
    }
}

/// Host memory that the GPU reads and writes by itself.
pub struct PinnedBuffer {
    start: NonNull<u8>,
    bytes: usize,
    device: Arc<Device>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Takes `bytes` bytes, all 0.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if there are not as many; the driver's.
    pub fn new(device: &Arc<Device>, what: &'static str, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        device.bind()?;
        let bytes = bytes.max(8);
        // No flags: memory that is written past the caches is slow to read.
        // SAFETY: the context is bound.
        let start = unsafe { result::malloc_host(bytes, 0) }.map_err(|error| match error {
            DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => CudaError::Memory { what, bytes },
            error => CudaError::driver(what, error),
        })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(CudaError::Memory { what, bytes })?;
        // SAFETY: that many bytes were taken.
        unsafe { start.write_bytes(0, bytes) };
        Ok(PinnedBuffer { start, bytes, device: device.clone() })
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialised, and owned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// All bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialised, and owned.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // Copies from or to it may still be queued.
        if self.device.synchronize().is_ok() || self.device.bind().is_ok() {
            // SAFETY: freed once; an error has nowhere to go.
            let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
        }
    }
}
