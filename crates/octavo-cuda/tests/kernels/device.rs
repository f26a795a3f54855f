//! A simulated device, what is put on it, and the PTX of single kernels.

use std::{collections::HashMap, fs, path::Path, sync::Mutex, sync::OnceLock};

use half::bf16;
use ptxsim::{Fault, Kernel, Launch, Memory, Module, Report};

/// A value that arrays on the device are made of.
pub trait Element: Copy {
    fn append_to(self, bytes: &mut Vec<u8>);
    fn from_bytes(bytes: &[u8]) -> Self;
}

macro_rules! element {
    ($($type:ty),*) => {
        $(impl Element for $type {
            fn append_to(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
            fn from_bytes(bytes: &[u8]) -> Self {
                <$type>::from_le_bytes(bytes.try_into().unwrap())
            }
        })*
    };
}
element!(u8, i32, i64, u64, f32, bf16);

pub struct Device {
    pub memory: Memory,
}

impl Device {
    pub fn new() -> Device {
        Device { memory: Memory::new(1 << 30) }
    }

    pub fn upload<T: Element>(&mut self, values: &[T]) -> u64 {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| value.append_to(&mut bytes));
        let address = self.memory.allocate(bytes.len().max(1)).unwrap();
        self.memory.write(address, bytes.len()).unwrap().copy_from_slice(&bytes);
        address
    }

    /// An array that holds NaN.
    pub fn poisoned<T: Element>(&mut self, len: usize) -> u64 {
        self.memory.allocate(len * size_of::<T>()).unwrap()
    }

    pub fn download<T: Element>(&self, address: u64, len: usize) -> Vec<T> {
        let bytes = self.memory.read(address, len * size_of::<T>()).unwrap();
        bytes.chunks_exact(size_of::<T>()).map(T::from_bytes).collect()
    }

    pub fn run(&mut self, kernel: &Kernel, extent: Extent, arguments: &Arguments) -> Result<Report, Fault> {
        let Extent { grid, block, shared } = extent;
        let launch = Launch { kernel, grid, block: [block, 1, 1], dynamic_shared: shared, params: &arguments.bytes };
        launch.run(&mut self.memory)
    }
}

#[derive(Clone, Copy)]
pub struct Extent {
    pub grid: [u32; 3],
    pub block: u32,
    pub shared: usize,
}

/// The arguments of a launch, each aligned to its size.
#[derive(Default)]
pub struct Arguments {
    bytes: Vec<u8>,
}

impl Arguments {
    pub fn with<T: Element>(mut self, value: T) -> Arguments {
        self.bytes.resize(self.bytes.len().next_multiple_of(size_of::<T>()), 0);
        value.append_to(&mut self.bytes);
        self
    }

    pub fn all<T: Element>(self, values: &[T]) -> Arguments {
        values.iter().fold(self, |arguments, value| arguments.with(*value))
    }
}

/// The PTX of one kernel of kernels/`stem`.cu, as a module of its own.
pub fn ptx_of(stem: &str, kernel: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../target/kernels/{stem}.ptx"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}; `make kernels`", path.display()));
    let head = &text[..text.find(".visible .entry").unwrap()];
    let start = text.find(&format!(".visible .entry {kernel}(")).unwrap_or_else(|| panic!("{stem} has no {kernel}"));
    let end = start + text[start..].find("\n}").unwrap() + 2;
    format!("{head}{}\n", &text[start..end])
}

/// A module with that kernel alone, parsed once.
pub fn module_of(stem: &str, kernel: &str) -> &'static Module {
    static MODULES: OnceLock<Mutex<HashMap<String, &'static Module>>> = OnceLock::new();
    let mut modules = MODULES.get_or_init(Mutex::default).lock().unwrap();
    modules
        .entry(kernel.to_owned())
        .or_insert_with(|| Box::leak(Box::new(Module::parse(&ptx_of(stem, kernel)).unwrap())))
}

/// The kernel, parsed once.
pub fn kernel_of(stem: &str, kernel: &str) -> &'static Kernel {
    module_of(stem, kernel).kernel(kernel).unwrap()
}

/// Numbers that look random, the same in every run.
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    /// In -1..1.
    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }

    pub fn below(&mut self, limit: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * limit as f32) as usize % limit
    }
}
