//! A warp: its lanes' program counters, and which of them run together.
//!
//! The lanes with the lowest program counter run first, until they reach the place where others wait. A collective whose member mask names
//! lanes that have not arrived holds the lanes that have, as the hardware does; if nobody else can run, that is a fault.

use crate::exec::{Copies, Machine, Outcome, Trouble, execute, trouble};
use crate::fault::{BarrierDivergence, FaultKind};
use crate::isa::{Instruction, Op, Slot};
use crate::registers::{LANES, Registers, Words, lanes};
use crate::shared::WarpClock;

/// No program counter.
const NOWHERE: u32 = u32::MAX;

/// One warp of a block.
#[derive(Debug)]
pub(crate) struct Warp {
    pub registers: Registers,
    pub clock: WarpClock,
    pub copies: Copies,
    /// The lanes' stacks, one behind the other.
    pub local: Vec<u8>,
    /// Lanes that have not returned.
    pub live: u32,
    /// Lanes that wait at a barrier of the block.
    pub waiting: u32,
    /// Lanes that wait for other lanes at a collective.
    held: u32,
    counters: [u32; LANES],
    /// The instruction that runs, for faults.
    pub current: u32,
    /// Instructions run in this block.
    pub steps: u64,
}

/// What became of a group of lanes at an instruction.
enum Arrival {
    Complete,
    /// Lanes that the collective needs are elsewhere.
    Missing,
}

impl Warp {
    /// A warp of a kernel with `num_threads` lanes, at the kernel's beginning.
    pub fn new(registers: Registers, first_thread: u32, num_threads: u32, local_bytes: usize) -> Self {
        let mut warp = Self {
            registers,
            clock: WarpClock::new(first_thread),
            copies: Copies::default(),
            local: vec![0xff; local_bytes * LANES],
            live: 0,
            waiting: 0,
            held: 0,
            counters: [0; LANES],
            current: 0,
            steps: 0,
        };
        warp.restart(num_threads);
        warp
    }

    /// Back to the beginning for another block.
    pub fn restart(&mut self, num_threads: u32) {
        self.live = if num_threads >= LANES as u32 { u32::MAX } else { (1 << num_threads) - 1 };
        self.waiting = 0;
        self.held = 0;
        self.counters = [0; LANES];
        self.steps = 0;
        self.clock = WarpClock::new(self.clock.first_thread);
        self.copies.reset();
        self.local.fill(0xff);
    }

    /// Runs until every lane has returned or waits at one barrier.
    pub fn run(&mut self, machine: &mut Machine<'_>) -> Outcome {
        while let Some((pc, mask, other)) = self.pick(machine)? {
            self.straight(machine, pc, mask, other)?;
        }
        let elsewhere = |barrier: usize| lanes(self.waiting).any(|lane| self.counters[lane] as usize != barrier);
        if self.waiting != 0 && (self.waiting != self.live || self.barrier().is_some_and(elsewhere)) {
            let divergence = BarrierDivergence::PartOfWarp { arrived: self.waiting, live: self.live };
            return Err(self.at_barrier(divergence));
        }
        Ok(())
    }

    /// The instruction at which the waiting lanes stand.
    pub fn barrier(&self) -> Option<usize> {
        (self.waiting != 0).then(|| self.counters[self.waiting.trailing_zeros() as usize] as usize)
    }

    /// Lets the waiting lanes go on behind their barrier.
    pub fn release(&mut self) {
        for lane in lanes(self.waiting) {
            self.counters[lane] += 1;
        }
        self.waiting = 0;
    }

    /// A fault at the barrier where lanes wait.
    pub fn at_barrier(&mut self, divergence: BarrierDivergence) -> Box<Trouble> {
        let lane = self.waiting.trailing_zeros() as usize;
        self.current = self.counters[lane % LANES];
        trouble(lane % LANES, FaultKind::DivergentBarrier(divergence))
    }

    /// The lanes to run: program counter, mask, and the next counter above at which other lanes stand. None if no lane can run.
    fn pick(&mut self, machine: &Machine<'_>) -> Result<Option<(u32, u32, u32)>, Box<Trouble>> {
        let present = self.live & !self.waiting;
        let lowest = lanes(present & !self.held).map(|lane| self.counters[lane]).min();
        let Some(pc) = lowest else {
            return if self.held == 0 { Ok(None) } else { Err(self.stuck(machine)) };
        };
        let (mut mask, mut other) = (0, NOWHERE);
        for lane in lanes(present) {
            let counter = self.counters[lane];
            if counter == pc {
                mask |= 1 << lane;
            } else if counter > pc {
                other = other.min(counter);
            }
        }
        self.held &= !mask;
        Ok(Some((pc, mask, other)))
    }

    /// The fault of lanes that wait at a collective for lanes that cannot come.
    fn stuck(&mut self, machine: &Machine<'_>) -> Box<Trouble> {
        let lane = self.held.trailing_zeros() as usize;
        self.current = self.counters[lane];
        let arrived = lanes(self.held).filter(|other| self.counters[*other] == self.current);
        let arrived = arrived.fold(0, |arrived, lane| arrived | 1 << lane);
        let kind = match members(&machine.kernel.code[self.current as usize].op) {
            Some(Members::Mask(slot)) => FaultKind::MemberMask { mask: self.registers.word(slot)[lane], arrived },
            _ => FaultKind::PartialWarp { arrived },
        };
        trouble(lane, kind)
    }

    /// Runs the lanes of `mask` from `pc` until they part, meet others, wait or return.
    fn straight(&mut self, machine: &mut Machine<'_>, mut pc: u32, mut mask: u32, other: u32) -> Outcome {
        let kernel = machine.kernel;
        let alone = mask == self.live & !self.waiting;
        loop {
            self.current = pc;
            let Some(Instruction { op, guard, flip, .. }) = kernel.code.get(pc as usize) else {
                return Err(trouble(mask.trailing_zeros() as usize, FaultKind::PastTheEnd));
            };
            let active = mask & (self.registers.predicate(*guard) ^ flip);
            self.steps += 1;
            match op {
                Op::Branch { target } => {
                    self.check_budget(machine, mask)?;
                    if active == mask && alone {
                        pc = *target;
                        continue;
                    }
                    if active != 0 {
                        machine.report.divergent_branches += u64::from(active != mask);
                        self.set_counters(mask & !active, pc + 1);
                        self.set_counters(active, *target);
                        return Ok(());
                    }
                }
                Op::Exit => {
                    self.live &= !active;
                    mask &= !active;
                    if mask == 0 {
                        return Ok(());
                    }
                }
                Op::Barrier(_) if active != 0 => {
                    self.set_counters(active, pc);
                    self.set_counters(mask & !active, pc + 1);
                    self.waiting |= active;
                    return Ok(());
                }
                _ if active == 0 => {}
                _ => {
                    if let Some(members) = members(op)
                        && let Arrival::Missing = self.arrival(members, active)?
                    {
                        self.set_counters(active, pc);
                        self.set_counters(mask & !active, pc + 1);
                        self.held |= active;
                        return Ok(());
                    }
                    execute(self, machine, pc as usize, op, active)?;
                }
            }
            pc += 1;
            if pc == other {
                self.set_counters(mask, pc);
                return Ok(());
            }
        }
    }

    fn set_counters(&mut self, mask: u32, pc: u32) {
        for lane in lanes(mask) {
            self.counters[lane] = pc;
        }
    }

    fn check_budget(&self, machine: &Machine<'_>, mask: u32) -> Outcome {
        if self.steps <= machine.budget {
            return Ok(());
        }
        let instructions = machine.budget;
        Err(trouble(mask.trailing_zeros() as usize, FaultKind::Budget { instructions }))
    }

    /// Compares the lanes that a collective names with those that arrived.
    fn arrival(&self, members: Members, arrived: u32) -> Result<Arrival, Box<Trouble>> {
        let Members::Mask(slot) = members else {
            return match arrived {
                u32::MAX => Ok(Arrival::Complete),
                _ if self.live != u32::MAX => {
                    Err(trouble(arrived.trailing_zeros() as usize, FaultKind::PartialWarp { arrived }))
                }
                _ => Ok(Arrival::Missing),
            };
        };
        let masks: &Words = self.registers.word(slot);
        if arrived == u32::MAX && *masks == [u32::MAX; LANES] {
            return Ok(Arrival::Complete);
        }
        let mut missing = 0;
        for lane in lanes(arrived) {
            let mask = masks[lane];
            if mask >> lane & 1 == 0 || mask & !self.live != 0 {
                return Err(trouble(lane, FaultKind::MemberMask { mask, arrived }));
            }
            missing |= mask & !arrived;
            // Members must agree: a lane that names another is named by it.
            if lanes(mask & arrived).any(|other| masks[other] != mask) {
                return Err(trouble(lane, FaultKind::MemberMask { mask, arrived }));
            }
        }
        Ok(if missing == 0 { Arrival::Complete } else { Arrival::Missing })
    }
}

/// Which lanes a collective needs.
#[derive(Clone, Copy)]
enum Members {
    Mask(Slot),
    WholeWarp,
}

fn members(op: &Op) -> Option<Members> {
    match op {
        Op::Shuffle(shuffle) => Some(Members::Mask(shuffle.members)),
        Op::Vote(vote) => Some(Members::Mask(vote.members)),
        Op::Match(matching) => Some(Members::Mask(matching.members)),
        Op::Reduce(reduce) => Some(Members::Mask(reduce.members)),
        Op::SyncWarp { members } => Some(Members::Mask(*members)),
        Op::Mma(_) | Op::LoadMatrix(_) => Some(Members::WholeWarp),
        _ => None,
    }
}
