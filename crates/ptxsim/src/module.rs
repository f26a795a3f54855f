//! A parsed module and its kernels.

use std::collections::BTreeMap;

use crate::ParseError;
use crate::isa::{Instruction, Slot, Special};

/// The kernels of one PTX text.
#[derive(Debug)]
pub struct Module {
    kernels: BTreeMap<String, Kernel>,
}

impl Module {
    /// Parses what NVRTC emitted (a trailing zero byte is allowed).
    pub fn parse(ptx: &str) -> Result<Module, ParseError> {
        let kernels = crate::parse::parse_module(ptx)?;
        Ok(Module { kernels: kernels.into_iter().map(|kernel| (kernel.name.clone(), kernel)).collect() })
    }

    /// All kernels, by name.
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.values()
    }

    /// The kernel called `name`.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.get(name)
    }
}

/// Where a parameter lies in the block of parameter bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Bytes from the beginning.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// A kernel, ready to be launched.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) code: Vec<Instruction>,
    /// The statements' text, by instruction.
    pub(crate) texts: Vec<String>,
    pub(crate) layout: RegisterLayout,
    pub(crate) static_shared: usize,
    pub(crate) local_bytes: usize,
    pub(crate) max_threads: Option<usize>,
    pub(crate) required_threads: Option<usize>,
    /// Bytes of the module's constant variables as this kernel addresses them.
    pub(crate) constants: Vec<u8>,
    /// Power of two of the narrowest access to shared memory: hazards are tracked at this grain.
    pub(crate) shared_grain: u32,
}

/// How many registers a warp needs and what fills those that never change.
#[derive(Debug, Default)]
pub(crate) struct RegisterLayout {
    pub words: usize,
    pub doubles: usize,
    pub predicates: usize,
    pub word_constants: Vec<(Slot, u32)>,
    pub double_constants: Vec<(Slot, u64)>,
    pub word_specials: Vec<(Slot, Special)>,
    pub double_specials: Vec<(Slot, Special)>,
}

impl Kernel {
    /// The name without mangling, for kernels that are `extern "C"`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameters in order.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Bytes of parameters that a launch gives.
    pub fn param_bytes(&self) -> usize {
        self.params.last().map_or(0, |param| param.offset + param.bytes)
    }

    /// Bytes of shared memory that the kernel declares itself.
    pub fn static_shared_bytes(&self) -> usize {
        self.static_shared
    }

    /// The most threads that a block may have, if the kernel has launch bounds.
    pub fn max_threads(&self) -> Option<usize> {
        self.max_threads
    }

    /// Bytes of each thread's stack.
    pub fn local_bytes(&self) -> usize {
        self.local_bytes
    }

    /// Number of instructions.
    pub fn num_instructions(&self) -> usize {
        self.code.len()
    }

    /// Words and doubles that each lane of a warp holds, constants included, after registers that are never needed together share one.
    pub fn num_registers(&self) -> (usize, usize) {
        (self.layout.words, self.layout.doubles)
    }

    /// Where dynamic shared memory begins.
    pub(crate) fn dynamic_base(&self) -> usize {
        self.static_shared.next_multiple_of(16)
    }
}
