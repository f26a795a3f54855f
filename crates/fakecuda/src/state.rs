//! The device: its memory, what is loaded, and what is queued.
//!
//! SAFETY of the whole module: host addresses come from the caller, who promises what the driver's functions promise: they
//! are valid for as long as the driver says.

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::{BTreeMap, VecDeque},
    ffi::CString,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use ptxsim::{Launch, Memory, Module, Report};

use crate::{
    codes::{self, Code},
    product::Product,
};

/// Bytes of device memory.
pub const MEMORY_BYTES: usize = 8 << 30;

/// Shared memory of a block, without and with asking for more.
pub const SHARED_BYTES: usize = 48 << 10;
/// The most that can be asked for.
pub const MOST_SHARED_BYTES: usize = 163 << 10;

/// The null stream.
pub const NULL_STREAM: usize = 0;

/// The one device of this process.
static DEVICE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::new()));

/// The device, for one call.
pub fn device() -> MutexGuard<'static, State> {
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything the driver knows.
pub struct State {
    /// Device memory.
    pub memory: Memory,
    /// Loaded modules.
    pub modules: BTreeMap<usize, Arc<Module>>,
    /// Kernels that were looked up.
    pub functions: BTreeMap<usize, Function>,
    /// Events.
    pub events: BTreeMap<usize, Event>,
    /// Graphs, and what was made to run from them.
    pub graphs: BTreeMap<usize, Arc<[Operation]>>,
    /// Who uses the context.
    pub users: usize,
    /// What the last fault was.
    pub last_fault: Option<&'static CString>,
    streams: BTreeMap<usize, Stream>,
    pinned: BTreeMap<usize, Layout>,
    reports: BTreeMap<String, (u64, Report)>,
    sticky: Code,
    next_handle: usize,
}

/// A kernel, and how much shared memory its launches may have.
#[derive(Clone)]
pub struct Function {
    /// Its module.
    pub module: Arc<Module>,
    /// Its name.
    pub name: String,
    /// Dynamic shared memory that it may have.
    pub most_dynamic_shared: usize,
}

/// A point in a stream.
#[derive(Clone, Copy, Default)]
pub struct Event {
    /// The stream and how many operations it had, once recorded.
    pub recorded: Option<(usize, u64)>,
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<Operation>,
    queued: u64,
    done: u64,
    /// What is captured instead of queued.
    capture: Option<Vec<Operation>>,
}

/// What can be queued.
#[derive(Clone)]
pub enum Operation {
    /// Host to device; pinned memory is read when its turn comes.
    UploadPinned {
        /// Device address.
        to: u64,
        /// Host address.
        from: usize,
        /// Bytes.
        bytes: usize,
    },
    /// Host to device, of bytes that were put aside when the copy was queued.
    Upload {
        /// Device address.
        to: u64,
        /// The bytes.
        bytes: Arc<[u8]>,
    },
    /// Device to host.
    Download {
        /// Host address.
        to: usize,
        /// Device address.
        from: u64,
        /// Bytes.
        bytes: usize,
    },
    /// Device to device.
    Copy {
        /// Device address.
        to: u64,
        /// Device address.
        from: u64,
        /// Bytes.
        bytes: usize,
    },
    /// The same byte everywhere.
    Fill {
        /// Device address.
        to: u64,
        /// The byte.
        value: u8,
        /// How often.
        bytes: usize,
    },
    /// A kernel.
    Launch(Arc<QueuedLaunch>),
    /// A matrix product.
    Product(Product),
    /// Nothing before another stream has come so far.
    Wait {
        /// The other stream.
        stream: usize,
        /// How many of its operations.
        upto: u64,
    },
}

/// A launch with its arguments.
pub struct QueuedLaunch {
    /// The kernel.
    pub function: Function,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// The arguments as the kernel finds them.
    pub params: Vec<u8>,
}

impl State {
    fn new() -> State {
        State {
            memory: Memory::new(MEMORY_BYTES),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            events: BTreeMap::new(),
            graphs: BTreeMap::new(),
            users: 0,
            last_fault: None,
            streams: BTreeMap::from([(NULL_STREAM, Stream::default())]),
            pinned: BTreeMap::new(),
            reports: BTreeMap::new(),
            sticky: codes::SUCCESS,
            next_handle: 0x1000,
        }
    }

    /// The context ends with its last user: nothing of it is left, no error either.
    pub fn release(&mut self) {
        self.users = self.users.saturating_sub(1);
        if self.users > 0 {
            return;
        }
        for (address, layout) in std::mem::take(&mut self.pinned) {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(address as *mut u8, layout) };
        }
        let (reports, last_fault) = (std::mem::take(&mut self.reports), self.last_fault);
        *self = State { reports, last_fault, next_handle: self.next_handle, ..State::new() };
    }

    /// A handle that was never given out.
    pub fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    /// The error of an earlier launch, if there is one: nothing works any more then.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), Code> {
        if self.sticky == codes::SUCCESS { Ok(()) } else { Err(self.sticky) }
    }

    // ---- Streams -------------------------------------------------------------------------------------------------------

    /// A new stream.
    pub fn create_stream(&mut self) -> usize {
        let handle = self.handle();
        self.streams.insert(handle, Stream::default());
        handle
    }

    /// Runs what is queued, and forgets the stream.
    ///
    /// # Errors
    /// No such stream; what was queued failed.
    pub fn destroy_stream(&mut self, handle: usize) -> Result<(), Code> {
        let result = self.drain(handle);
        if handle == NULL_STREAM || self.streams.remove(&handle).is_none() {
            return Err(codes::INVALID_HANDLE);
        }
        result
    }

    fn stream(&mut self, handle: usize) -> Result<&mut Stream, Code> {
        self.streams.get_mut(&handle).ok_or(codes::INVALID_HANDLE)
    }

    /// Whether a stream is captured.
    ///
    /// # Errors
    /// No such stream.
    pub fn is_capturing(&mut self, handle: usize) -> Result<bool, Code> {
        Ok(self.stream(handle)?.capture.is_some())
    }

    /// Begins to capture instead of to queue.
    ///
    /// # Errors
    /// No such stream; it is captured already, or is the null stream.
    pub fn begin_capture(&mut self, handle: usize) -> Result<(), Code> {
        if handle == NULL_STREAM || self.is_capturing(handle)? {
            return Err(codes::STREAM_CAPTURE_UNSUPPORTED);
        }
        self.stream(handle)?.capture = Some(Vec::new());
        Ok(())
    }

    /// What was captured, as a graph.
    ///
    /// # Errors
    /// No such stream, or it is not captured.
    pub fn end_capture(&mut self, handle: usize) -> Result<usize, Code> {
        let captured = self.stream(handle)?.capture.take().ok_or(codes::STREAM_CAPTURE_UNSUPPORTED)?;
        let graph = self.handle();
        self.graphs.insert(graph, captured.into());
        Ok(graph)
    }

    /// Puts an operation at the end of a stream's queue, or into its capture.
    ///
    /// # Errors
    /// No such stream; an earlier error.
    pub fn enqueue(&mut self, handle: usize, operation: Operation) -> Result<(), Code> {
        self.check()?;
        let stream = self.stream(handle)?;
        match &mut stream.capture {
            Some(captured) => captured.push(operation),
            None => {
                stream.queue.push_back(operation);
                stream.queued += 1;
            }
        }
        Ok(())
    }

    /// Where a stream's queue ends now.
    ///
    /// # Errors
    /// No such stream.
    pub fn end_of(&mut self, handle: usize) -> Result<u64, Code> {
        Ok(self.stream(handle)?.queued)
    }

    /// Whether a stream has come so far.
    pub fn has_reached(&self, handle: usize, upto: u64) -> bool {
        self.streams.get(&handle).is_none_or(|stream| stream.done >= upto)
    }

    /// Runs all that a stream has queued.
    ///
    /// # Errors
    /// No such stream; it is captured; an operation failed, now or before.
    pub fn drain(&mut self, handle: usize) -> Result<(), Code> {
        self.drain_to(handle, u64::MAX)
    }

    /// Runs a stream up to an operation.
    ///
    /// # Errors
    /// As [`State::drain`].
    pub fn drain_to(&mut self, handle: usize, upto: u64) -> Result<(), Code> {
        self.check()?;
        if self.is_capturing(handle)? {
            return Err(codes::STREAM_CAPTURE_UNSUPPORTED);
        }
        loop {
            let stream = self.stream(handle)?;
            if stream.done >= upto {
                return Ok(());
            }
            let Some(operation) = stream.queue.pop_front() else { return Ok(()) };
            stream.done += 1;
            if let Err(fault) = self.run(&operation) {
                eprintln!("fakecuda: {fault}");
                // Text of an error lives as long as the process, as a driver's does.
                let text = CString::new(fault.replace('\0', " ")).unwrap_or_default();
                self.last_fault = Some(Box::leak(Box::new(text)));
                self.sticky = codes::LAUNCH_FAILED;
                return Err(self.sticky);
            }
        }
    }

    /// Runs all that is queued anywhere.
    ///
    /// # Errors
    /// As [`State::drain`].
    pub fn drain_all(&mut self) -> Result<(), Code> {
        let handles: Vec<usize> = self.streams.keys().copied().collect();
        handles.into_iter().try_for_each(|handle| match self.is_capturing(handle) {
            Ok(true) => Ok(()),
            _ => self.drain(handle),
        })
    }

    // ---- Memory --------------------------------------------------------------------------------------------------------

    /// Whether device memory from an address on is there.
    ///
    /// # Errors
    /// It is not.
    pub fn check_range(&self, address: u64, bytes: usize) -> Result<(), Code> {
        if bytes == 0 || self.memory.read(address, bytes).is_some() { Ok(()) } else { Err(codes::INVALID_VALUE) }
    }

    /// Host memory that is read and written when the turn of a copy comes.
    ///
    /// # Errors
    /// No room.
    pub fn allocate_pinned(&mut self, bytes: usize) -> Result<usize, Code> {
        let layout = Layout::from_size_align(bytes, 4096).map_err(|_| codes::OUT_OF_MEMORY)?;
        // SAFETY: the layout is not empty: callers refuse 0 bytes.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return Err(codes::OUT_OF_MEMORY);
        }
        // SAFETY: that many bytes were allocated.
        unsafe { start.write_bytes(0xff, bytes) };
        self.pinned.insert(start as usize, layout);
        Ok(start as usize)
    }

    /// Gives pinned memory back, once nothing queued can use it any more.
    ///
    /// # Errors
    /// It is none.
    pub fn free_pinned(&mut self, address: usize) -> Result<(), Code> {
        // An error of what was queued is reported by the next synchronisation.
        let _ = self.drain_all();
        let layout = self.pinned.remove(&address).ok_or(codes::INVALID_VALUE)?;
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(address as *mut u8, layout) };
        Ok(())
    }

    /// Whether host memory is pinned.
    pub fn is_pinned(&self, address: usize, bytes: usize) -> bool {
        let before = self.pinned.range(..=address).next_back();
        before.is_some_and(|(start, layout)| address + bytes <= start + layout.size())
    }

    // ---- Running -------------------------------------------------------------------------------------------------------

    /// How often a kernel was launched, and what its launches counted together.
    pub fn report(&self, kernel: &str) -> Option<&(u64, Report)> {
        self.reports.get(kernel)
    }

    fn run(&mut self, operation: &Operation) -> Result<(), String> {
        match operation {
            Operation::UploadPinned { to, from, bytes } => {
                let target = writable(&mut self.memory, *to, *bytes, "a copy from the host")?;
                // SAFETY: see the module.
                target.copy_from_slice(unsafe { std::slice::from_raw_parts(*from as *const u8, *bytes) });
            }
            Operation::Upload { to, bytes } => {
                writable(&mut self.memory, *to, bytes.len(), "a copy from the host")?.copy_from_slice(bytes);
            }
            Operation::Download { to, from, bytes } => {
                let source = readable(&self.memory, *from, *bytes, "a copy to the host")?;
                // SAFETY: see the module.
                unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), *to as *mut u8, *bytes) };
            }
            Operation::Copy { to, from, bytes } => {
                let source = readable(&self.memory, *from, *bytes, "a copy on the device")?.to_vec();
                writable(&mut self.memory, *to, *bytes, "a copy on the device")?.copy_from_slice(&source);
            }
            Operation::Fill { to, value, bytes } => {
                writable(&mut self.memory, *to, *bytes, "filling memory")?.fill(*value);
            }
            Operation::Launch(launch) => self.launch(launch)?,
            Operation::Product(product) => self.multiply(product)?,
            // The other stream's own failure is found there.
            Operation::Wait { stream, upto } => {
                self.drain_to(*stream, *upto).map_err(|code| format!("a stream that was waited for: error {code}"))?;
            }
        }
        Ok(())
    }

    fn launch(&mut self, queued: &QueuedLaunch) -> Result<(), String> {
        let function = &queued.function;
        let kernel = function.module.kernel(&function.name).ok_or_else(|| format!("no kernel {}", function.name))?;
        let launch = Launch {
            kernel,
            grid: queued.grid,
            block: queued.block,
            dynamic_shared: queued.dynamic_shared,
            params: &queued.params,
        };
        let report = launch.run(&mut self.memory).map_err(|fault| fault.to_string())?;
        let (count, sum) = self.reports.entry(function.name.clone()).or_default();
        *count += 1;
        *sum += report;
        Ok(())
    }

    fn multiply(&mut self, product: &Product) -> Result<(), String> {
        let [weight_bytes, input_bytes, output_bytes] = product.bytes();
        let weights = readable(&self.memory, product.weights, weight_bytes, "the weights of a matrix product")?;
        let input = readable(&self.memory, product.input, input_bytes, "the input of a matrix product")?;
        let sums = product.run(weights, input);
        let output = writable(&mut self.memory, product.output, output_bytes, "the output of a matrix product")?;
        for row in 0..product.rows {
            let row_of = &mut output[4 * row * product.output_stride..];
            for (index, place) in row_of.as_chunks_mut::<4>().0.iter_mut().take(product.outputs).enumerate() {
                *place = sums[index * product.rows + row].to_le_bytes();
            }
        }
        Ok(())
    }
}

fn readable<'a>(memory: &'a Memory, address: u64, bytes: usize, what: &str) -> Result<&'a [u8], String> {
    if bytes == 0 {
        return Ok(&[]);
    }
    memory.read(address, bytes).ok_or_else(|| format!("{what}: {bytes} bytes at {address:#x} are not in one buffer"))
}

fn writable<'a>(memory: &'a mut Memory, address: u64, bytes: usize, what: &str) -> Result<&'a mut [u8], String> {
    if bytes == 0 {
        return Ok(&mut []);
    }
    memory.write(address, bytes).ok_or_else(|| format!("{what}: {bytes} bytes at {address:#x} are not in one buffer"))
}
