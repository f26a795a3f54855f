//! What goes to the GPU and comes back in a step: one copy each way, through host memory that the GPU reads by itself.
//!
//! Both are made for a common large step at load. A step with more than that (log-probabilities of whole vocabularies, long
//! lists of biases) makes them larger, once.

use std::sync::Arc;

use crate::{
    arena::{Layout, Place},
    device::{Device, DeviceMemory, PinnedBuffer, Plain, Slice},
    error::CudaError,
};

/// The integers and numbers that describe a step, gathered piece by piece and sent at once.
pub struct Upload {
    device: Arc<Device>,
    host: PinnedBuffer,
    memory: DeviceMemory,
    layout: Layout,
}

const UPLOAD: &str = "the inputs of a step";
const DOWNLOAD: &str = "the results of a step";

impl Upload {
    /// For steps of up to `bytes` bytes, as a start.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if there is not enough.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Upload, CudaError> {
        Ok(Upload {
            device: device.clone(),
            host: PinnedBuffer::new(device, UPLOAD, bytes)?,
            memory: DeviceMemory::new(device, UPLOAD, bytes)?,
            layout: Layout::default(),
        })
    }

    /// Forgets the last step, which must be over.
    pub fn clear(&mut self) {
        self.layout = Layout::default();
    }

    /// Appends values.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if they do not fit and more cannot be had.
    pub fn push<T: Plain>(&mut self, values: &[T]) -> Result<Place<T>, CudaError> {
        let place: Place<T> = self.layout.place(values.len());
        let capacity = self.host.bytes().len();
        if self.layout.bytes() > capacity {
            let mut larger = PinnedBuffer::new(&self.device, UPLOAD, self.layout.bytes().max(2 * capacity))?;
            larger.bytes_mut()[..capacity].copy_from_slice(self.host.bytes());
            self.host = larger;
        }
        // SAFETY: plain values are bytes.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        self.host.bytes_mut()[place.offset()..place.end()].copy_from_slice(bytes);
        Ok(place)
    }

    /// Queues the copy of all that was appended. Slices are known from now on.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if it does not fit and more cannot be had; the driver's.
    pub fn send(&mut self) -> Result<(), CudaError> {
        let bytes = self.layout.bytes();
        if bytes > self.memory.bytes() {
            self.memory = DeviceMemory::new(&self.device, UPLOAD, self.host.bytes().len())?;
        }
        if bytes == 0 { Ok(()) } else { self.device.upload(self.memory.address(), &self.host, bytes) }
    }

    /// Where values are on the GPU.
    pub fn slice<T>(&self, place: Place<T>) -> Slice<T> {
        assert!(place.end() <= self.memory.bytes());
        Slice::at(self.memory.address() + place.offset() as u64, place.len())
    }
}

/// What kernels write and the host reads, fetched at once.
pub struct Download {
    device: Arc<Device>,
    host: PinnedBuffer,
    memory: DeviceMemory,
    bytes: usize,
}

impl Download {
    /// For steps with results of up to `bytes` bytes, as a start.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if there is not enough.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Download, CudaError> {
        let (host, memory) = (PinnedBuffer::new(device, DOWNLOAD, bytes)?, DeviceMemory::new(device, DOWNLOAD, bytes)?);
        Ok(Download { device: device.clone(), host, memory, bytes: 0 })
    }

    /// Makes room for the results that are planned.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if they do not fit and more cannot be had.
    pub fn expect(&mut self, layout: &Layout) -> Result<(), CudaError> {
        self.bytes = layout.bytes();
        if self.bytes > self.memory.bytes() {
            let bytes = self.bytes.max(2 * self.memory.bytes());
            self.memory = DeviceMemory::new(&self.device, DOWNLOAD, bytes)?;
            self.host = PinnedBuffer::new(&self.device, DOWNLOAD, bytes)?;
        }
        Ok(())
    }

    /// Where results go on the GPU.
    pub fn slice<T>(&self, place: Place<T>) -> Slice<T> {
        assert!(place.end() <= self.memory.bytes());
        Slice::at(self.memory.address() + place.offset() as u64, place.len())
    }

    /// Queues the copy of all results and waits until everything queued is done: the one wait of a step.
    ///
    /// # Errors
    /// The failure of anything that was queued.
    pub fn fetch(&mut self) -> Result<(), CudaError> {
        if self.bytes > 0 {
            self.device.download(&mut self.host, self.memory.address(), self.bytes)?;
        }
        self.device.synchronize()
    }

    /// Fetched results.
    pub fn values<T: Plain>(&self, place: Place<T>) -> &[T] {
        let bytes = &self.host.bytes()[place.offset()..place.end()];
        let start = bytes.as_ptr().cast::<T>();
        assert!(start.is_aligned());
        // SAFETY: aligned, within the buffer, and every pattern of bits is a value.
        unsafe { std::slice::from_raw_parts(start, place.len()) }
    }
}
