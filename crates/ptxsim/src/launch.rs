//! Runs a kernel over a grid.

use crate::exec::{Machine, Trouble, barrier_result, trouble};
use crate::fault::{BarrierDivergence, Fault, FaultKind};
use crate::isa::{Barrier, Op, Special};
use crate::memory::Memory;
use crate::module::{Kernel, RegisterLayout};
use crate::registers::{LANES, Registers};
use crate::report::{BufferTraffic, Report};
use crate::shared::SharedMemory;
use crate::warp::Warp;

/// The most shared memory that a block can have, static and dynamic together: 227 KiB, as on compute capability 9.0.
pub const SHARED_LIMIT: usize = 227 * 1024;

/// Instructions that a warp may run in a block before it counts as endless.
pub const DEFAULT_BUDGET: u64 = 200_000_000;

const MOST_THREADS: usize = 1024;

/// A launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// What runs.
    pub kernel: &'a Kernel,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y, z.
    pub block: [u32; 3],
    /// Bytes of shared memory beyond the kernel's own.
    pub dynamic_shared: usize,
    /// The parameters at their offsets.
    pub params: &'a [u8],
}

impl Launch<'_> {
    /// Runs all blocks, one after another along x, then y, then z. At a fault `memory` holds what was written until then.
    pub fn run(&self, memory: &mut Memory) -> Result<Report, Fault> {
        self.run_with_budget(memory, DEFAULT_BUDGET)
    }

    /// The same with another limit on the instructions of a warp in a block.
    pub fn run_with_budget(&self, memory: &mut Memory, budget: u64) -> Result<Report, Fault> {
        self.check().map_err(|kind| self.fault([0; 3], 0, (0, String::new()), kind))?;
        let kernel = self.kernel;
        let bytes = kernel.dynamic_base() + self.dynamic_shared;
        let mut machine = Machine {
            kernel,
            params: self.params,
            shared: SharedMemory::new(bytes, kernel.shared_grain),
            report: Report::default(),
            traffic: vec![BufferTraffic::default(); memory.num_buffers()],
            last_buffer: vec![u32::MAX; kernel.code.len()],
            memory,
            budget,
        };
        let mut warps = self.warps();
        for z in 0..self.grid[2] {
            for y in 0..self.grid[1] {
                for x in 0..self.grid[0] {
                    self.run_block(&mut machine, &mut warps, [x, y, z])?;
                }
            }
        }
        let Machine { memory, mut report, traffic, .. } = machine;
        for (index, traffic) in traffic.into_iter().enumerate() {
            if traffic != BufferTraffic::default() {
                report.buffers.insert(memory.buffer(index).base, traffic);
            }
        }
        Ok(report)
    }

    fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    fn check(&self) -> Result<(), FaultKind> {
        let kernel = self.kernel;
        let (expected, found) = (kernel.param_bytes(), self.params.len());
        if expected != found {
            return Err(FaultKind::ParameterBytes { expected, found });
        }
        let [x, y, z] = self.grid;
        if x == 0 || y == 0 || z == 0 || x > i32::MAX as u32 || y > 0xffff || z > 0xffff {
            return Err(FaultKind::GridSize(self.grid));
        }
        let threads = self.block.iter().map(|count| u64::from(*count)).fold(1, u64::saturating_mul);
        let limit = kernel.max_threads.unwrap_or(MOST_THREADS).min(MOST_THREADS);
        let required = kernel.required_threads.is_some_and(|required| threads != required as u64);
        if threads == 0 || threads > limit as u64 || self.block[2] > 64 || required {
            return Err(FaultKind::BlockSize { threads, limit });
        }
        let bytes = kernel.dynamic_base().saturating_add(self.dynamic_shared);
        if bytes > SHARED_LIMIT {
            return Err(FaultKind::SharedSize { bytes, limit: SHARED_LIMIT });
        }
        Ok(())
    }

    fn fault(&self, block: [u32; 3], thread: u32, (line, instruction): (u32, String), kind: FaultKind) -> Fault {
        Fault { kernel: self.kernel.name.clone(), line, instruction, block, thread, kind }
    }

    /// The warps of a block, with all registers that never change filled.
    fn warps(&self) -> Vec<Warp> {
        let threads = self.threads();
        let warps = threads.div_ceil(LANES as u32);
        let new = |index: u32| {
            let first = index * LANES as u32;
            let mut registers = fresh_registers(&self.kernel.layout);
            for (slot, special) in &self.kernel.layout.word_specials {
                registers.words[*slot as usize] = std::array::from_fn(|lane| self.special(*special, first, lane));
            }
            for (slot, special) in &self.kernel.layout.double_specials {
                registers.doubles[*slot as usize] =
                    std::array::from_fn(|lane| u64::from(self.special(*special, first, lane)));
            }
            Warp::new(registers, first, threads - first, self.kernel.local_bytes)
        };
        (0..warps).map(new).collect()
    }

    fn special(&self, special: Special, first: u32, lane: usize) -> u32 {
        let (thread, bit) = (first + lane as u32, 1u32 << lane);
        let [x, y, _] = self.block;
        match special {
            Special::Thread(0) => thread % x,
            Special::Thread(1) => thread / x % y,
            Special::Thread(_) => thread / x / y,
            Special::ThreadCount(axis) => self.block[usize::from(axis)],
            // Filled when a block begins.
            Special::Block(_) => 0,
            Special::BlockCount(axis) => self.grid[usize::from(axis)],
            Special::Lane => lane as u32,
            Special::Warp => first / LANES as u32,
            Special::WarpCount => self.threads().div_ceil(LANES as u32),
            Special::LanesEqual => bit,
            Special::LanesLess => bit - 1,
            Special::LanesLessEqual => bit | (bit - 1),
            Special::LanesGreater => !(bit | (bit - 1)),
            Special::LanesGreaterEqual => !(bit - 1),
            Special::DynamicShared => self.kernel.dynamic_base() as u32,
            Special::DynamicSharedBytes => self.dynamic_shared as u32,
            Special::TotalSharedBytes => (self.kernel.dynamic_base() + self.dynamic_shared) as u32,
            Special::Zero => 0,
            Special::One => 1,
        }
    }

    fn run_block(&self, machine: &mut Machine<'_>, warps: &mut [Warp], block: [u32; 3]) -> Result<(), Fault> {
        machine.shared.begin_block();
        let threads = self.threads();
        for warp in warps.iter_mut() {
            warp.restart(threads - warp.clock.first_thread);
            self.set_block(&mut warp.registers, block);
        }
        while warps.iter().any(|warp| warp.live != 0) {
            for warp in warps.iter_mut().filter(|warp| warp.live != 0) {
                let outcome = warp.run(machine);
                outcome.map_err(|trouble| self.located(warp, block, *trouble))?;
            }
            if let Err((index, trouble)) = self.meet(machine, warps) {
                return Err(self.located(&warps[index], block, *trouble));
            }
        }
        machine.report.blocks += 1;
        machine.report.warp_instructions += warps.iter().map(|warp| warp.steps).sum::<u64>();
        Ok(())
    }

    fn set_block(&self, registers: &mut Registers, block: [u32; 3]) {
        for (slot, special) in &self.kernel.layout.word_specials {
            if let Special::Block(axis) = special {
                registers.words[*slot as usize] = [block[usize::from(*axis)]; LANES];
            }
        }
        for (slot, special) in &self.kernel.layout.double_specials {
            if let Special::Block(axis) = special {
                registers.doubles[*slot as usize] = [u64::from(block[usize::from(*axis)]); LANES];
            }
        }
    }

    fn located(&self, warp: &Warp, block: [u32; 3], trouble: Trouble) -> Fault {
        let index = warp.current as usize;
        let line = self.kernel.code.get(index).or(self.kernel.code.last()).map_or(0, |instruction| instruction.line);
        let text = self.kernel.texts.get(index).cloned().unwrap_or_default();
        self.fault(block, warp.clock.first_thread + trouble.lane as u32, (line, text), trouble.kind)
    }

    /// All warps have stopped: either every thread has returned, or all wait at one barrier, which then opens.
    fn meet(&self, machine: &mut Machine<'_>, warps: &mut [Warp]) -> Result<(), (usize, Box<Trouble>)> {
        let first = warps.iter().enumerate().find_map(|(index, warp)| Some((index, warp.barrier()?)));
        let Some((index, pc)) = first else {
            return Ok(());
        };
        let at_barrier: u32 = warps.iter().map(|warp| warp.waiting.count_ones()).sum();
        let returned = self.threads() - at_barrier;
        if returned > 0 {
            let divergence = BarrierDivergence::Returned { count: returned };
            return Err((index, warps[index].at_barrier(divergence)));
        }
        let elsewhere = warps
            .iter()
            .enumerate()
            .find_map(|(other, warp)| Some((other, warp.barrier()?)).filter(|found| found.1 != pc));
        if let Some((other, other_pc)) = elsewhere {
            let line = machine.kernel.code[other_pc].line;
            let divergence = BarrierDivergence::Elsewhere { warp: other as u32, line };
            return Err((index, warps[index].at_barrier(divergence)));
        }
        if let Op::Barrier(barrier) = &machine.kernel.code[pc].op {
            self.check_threads(warps, barrier)?;
            reduce(warps, barrier);
        }
        machine.report.barriers += 1;
        machine.shared.barrier();
        warps.iter_mut().for_each(Warp::release);
        Ok(())
    }

    /// A barrier for a part of the block is not modelled.
    fn check_threads(&self, warps: &mut [Warp], barrier: &Barrier) -> Result<(), (usize, Box<Trouble>)> {
        let Some(slot) = barrier.threads else {
            return Ok(());
        };
        let (threads, block_threads) = (warps[0].registers.word(slot)[0], self.threads());
        if threads == block_threads.next_multiple_of(LANES as u32) || threads == block_threads {
            return Ok(());
        }
        warps[0].current = warps[0].barrier().unwrap_or_default() as u32;
        Err((0, trouble(0, FaultKind::PartialBarrier { threads, block_threads })))
    }
}

/// `bar.red`: counts over all warps, then gives each the result.
fn reduce(warps: &mut [Warp], barrier: &Barrier) {
    let yes = |warp: &Warp| ((warp.registers.predicate(barrier.a) ^ barrier.flip) & warp.waiting).count_ones();
    let counted = warps.iter().map(yes).sum();
    let threads = warps.iter().map(|warp| warp.waiting.count_ones()).sum();
    for warp in warps {
        barrier_result(&mut warp.registers, warp.waiting, barrier, (threads, counted));
    }
}

fn fresh_registers(layout: &RegisterLayout) -> Registers {
    let mut registers = Registers {
        words: vec![[u32::MAX; LANES]; layout.words],
        doubles: vec![[u64::MAX; LANES]; layout.doubles],
        predicates: vec![0; layout.predicates],
        carry: 0,
    };
    registers.predicates[crate::isa::ALWAYS as usize] = u32::MAX;
    for (slot, value) in &layout.word_constants {
        registers.words[*slot as usize] = [*value; LANES];
    }
    for (slot, value) in &layout.double_constants {
        registers.doubles[*slot as usize] = [*value; LANES];
    }
    registers
}
