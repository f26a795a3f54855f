//! Gives registers that are never needed at the same time the same slot.
//!
//! PTX has a register for every value, thousands in a large kernel, each 32 lanes wide: a warp would not fit a cache, and a launch would spend
//! its time on clearing them. Liveness is that of one thread: a write under a mask leaves the other lanes' values alone, so lanes that have
//! parted do not disturb each other. A register lives from its first to its last place in the text (Poletto and Sarkar, "Linear scan register
//! allocation", 1999), lengthened by every block through which it is carried.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use crate::isa::{ALWAYS, File, Instruction, NEVER, Op, Role, Slot};
use crate::module::RegisterLayout;

/// Renumbers the registers of `code` and of `layout`.
pub(super) fn allocate(code: &mut [Instruction], layout: &mut RegisterLayout) {
    let numbers = Numbers { words: layout.words, doubles: layout.doubles, predicates: layout.predicates };
    let pinned = pinned(layout, &numbers);
    let uses: Vec<Uses> = code.iter_mut().map(|instruction| uses(instruction, &numbers)).collect();
    let blocks = blocks(code);
    let live = liveness(&blocks, &uses, numbers.total());
    let intervals = intervals(&blocks, &uses, &live, numbers.total());
    let slots = Slots::assign(&intervals, &pinned, &numbers);
    for instruction in code.iter_mut() {
        instruction.op.visit(&mut |file, _, slot| *slot = slots.of[numbers.index(file, *slot)]);
        instruction.guard = slots.of[numbers.index(File::Predicates, instruction.guard)];
    }
    let words = layout.word_constants.iter_mut().map(|(slot, _)| slot);
    for slot in words.chain(layout.word_specials.iter_mut().map(|(slot, _)| slot)) {
        *slot = slots.of[numbers.index(File::Words, *slot)];
    }
    let doubles = layout.double_constants.iter_mut().map(|(slot, _)| slot);
    for slot in doubles.chain(layout.double_specials.iter_mut().map(|(slot, _)| slot)) {
        *slot = slots.of[numbers.index(File::Doubles, *slot)];
    }
    [layout.words, layout.doubles, layout.predicates] = slots.counts;
}

/// One number for each register of all banks.
struct Numbers {
    words: usize,
    doubles: usize,
    predicates: usize,
}

impl Numbers {
    fn total(&self) -> usize {
        self.words + self.doubles + self.predicates
    }

    fn first(&self, file: File) -> usize {
        match file {
            File::Words => 0,
            File::Doubles => self.words,
            File::Predicates => self.words + self.doubles,
        }
    }

    fn index(&self, file: File, slot: Slot) -> usize {
        self.first(file) + slot as usize
    }

    fn file(&self, index: usize) -> usize {
        usize::from(index >= self.words) + usize::from(index >= self.words + self.doubles)
    }
}

/// Registers that keep their value for the whole kernel.
fn pinned(layout: &RegisterLayout, numbers: &Numbers) -> BTreeSet<usize> {
    let words =
        layout.word_constants.iter().map(|(slot, _)| slot).chain(layout.word_specials.iter().map(|(slot, _)| slot));
    let doubles =
        layout.double_constants.iter().map(|(slot, _)| slot).chain(layout.double_specials.iter().map(|(slot, _)| slot));
    let words = words.map(|slot| numbers.index(File::Words, *slot));
    let doubles = doubles.map(|slot| numbers.index(File::Doubles, *slot));
    let predicates = [ALWAYS, NEVER].map(|slot| numbers.index(File::Predicates, slot));
    words.chain(doubles).chain(predicates).collect()
}

/// What an instruction reads and writes; a write under a guard keeps the old value where the guard is false, and so reads it.
struct Uses {
    reads: Vec<usize>,
    writes: Vec<usize>,
    guarded: bool,
}

fn uses(instruction: &mut Instruction, numbers: &Numbers) -> Uses {
    let guarded = instruction.guard != ALWAYS || instruction.flip != 0;
    let mut uses =
        Uses { reads: vec![numbers.index(File::Predicates, instruction.guard)], writes: Vec::new(), guarded };
    instruction.op.visit(&mut |file, role, slot| {
        let index = numbers.index(file, *slot);
        if role == Role::Write {
            uses.writes.push(index);
        }
        if role == Role::Read || guarded {
            uses.reads.push(index);
        }
    });
    uses
}

/// Instructions that always run one after another, and the blocks that may follow.
struct Block {
    start: usize,
    end: usize,
    next: Vec<usize>,
}

fn blocks(code: &[Instruction]) -> Vec<Block> {
    let mut starts = BTreeSet::from([0]);
    for (index, instruction) in code.iter().enumerate() {
        match instruction.op {
            Op::Branch { target } => starts.extend([target as usize, index + 1]),
            Op::Exit => starts.extend([index + 1]),
            _ => {}
        }
    }
    let starts: Vec<usize> = starts.into_iter().filter(|start| *start < code.len()).collect();
    let block_at = |start: usize| starts.binary_search(&start).ok();
    let end_of = |index: usize| starts.get(index + 1).copied().unwrap_or(code.len());
    let block = |(index, start): (usize, &usize)| {
        let end = end_of(index);
        let last = &code[end - 1];
        let guarded = last.guard != ALWAYS || last.flip != 0;
        let (target, falls) = match last.op {
            Op::Branch { target } => (block_at(target as usize), guarded),
            Op::Exit => (None, guarded),
            _ => (None, true),
        };
        let next = target.into_iter().chain(falls.then(|| block_at(end)).flatten()).collect();
        Block { start: *start, end, next }
    };
    starts.iter().enumerate().map(block).collect()
}

/// A set of registers.
#[derive(Clone, PartialEq, Eq)]
struct Set(Vec<u64>);

impl Set {
    fn new(size: usize) -> Self {
        Self(vec![0; size.div_ceil(64)])
    }

    fn insert(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }

    fn remove(&mut self, index: usize) {
        self.0[index / 64] &= !(1 << (index % 64));
    }

    /// True if something was new.
    fn add(&mut self, other: &Set) -> bool {
        let mut grew = false;
        for (mine, other) in self.0.iter_mut().zip(&other.0) {
            grew |= *other & !*mine != 0;
            *mine |= other;
        }
        grew
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, bits)| **bits != 0)
            .flat_map(|(index, bits)| (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| index * 64 + bit))
    }
}

/// The registers needed at each block's beginning and behind its end.
struct Live {
    before: Vec<Set>,
    behind: Vec<Set>,
}

fn liveness(blocks: &[Block], uses: &[Uses], total: usize) -> Live {
    let mut live = Live { before: vec![Set::new(total); blocks.len()], behind: vec![Set::new(total); blocks.len()] };
    let mut changed = true;
    while changed {
        changed = false;
        for (index, block) in blocks.iter().enumerate().rev() {
            for next in &block.next {
                let needed = live.before[*next].clone();
                live.behind[index].add(&needed);
            }
            let mut needed = live.behind[index].clone();
            for uses in uses[block.start..block.end].iter().rev() {
                if !uses.guarded {
                    uses.writes.iter().for_each(|register| needed.remove(*register));
                }
                uses.reads.iter().for_each(|register| needed.insert(*register));
            }
            changed |= live.before[index].add(&needed);
        }
    }
    live
}

/// First and last place of each register. An instruction reads at twice its index and writes just behind.
fn intervals(blocks: &[Block], uses: &[Uses], live: &Live, total: usize) -> Vec<Option<(usize, usize)>> {
    let mut intervals: Vec<Option<(usize, usize)>> = vec![None; total];
    let mut extend = |register: usize, place: usize| {
        let (start, end) = intervals[register].unwrap_or((place, place));
        intervals[register] = Some((start.min(place), end.max(place)));
    };
    for (index, block) in blocks.iter().enumerate() {
        live.before[index].iter().for_each(|register| extend(register, 2 * block.start));
        live.behind[index].iter().for_each(|register| extend(register, 2 * block.end));
        for (index, uses) in uses.iter().enumerate().take(block.end).skip(block.start) {
            uses.reads.iter().for_each(|register| extend(*register, 2 * index));
            uses.writes.iter().for_each(|register| extend(*register, 2 * index + 1));
        }
    }
    intervals
}

/// The slot of every register, and how many slots each bank has.
struct Slots {
    of: Vec<Slot>,
    counts: [usize; 3],
}

impl Slots {
    fn assign(intervals: &[Option<(usize, usize)>], pinned: &BTreeSet<usize>, numbers: &Numbers) -> Self {
        let mut slots = Self { of: vec![0; intervals.len()], counts: [0; 3] };
        for register in pinned {
            slots.of[*register] = slots.fresh(numbers.file(*register));
        }
        let mut order: Vec<(usize, usize, usize)> = intervals
            .iter()
            .enumerate()
            .filter(|(register, _)| !pinned.contains(register))
            .filter_map(|(register, interval)| interval.map(|(start, end)| (start, end, register)))
            .collect();
        order.sort_unstable();
        let mut free: [Vec<Slot>; 3] = Default::default();
        let mut taken: [BinaryHeap<Reverse<(usize, Slot)>>; 3] = Default::default();
        for (start, end, register) in order {
            let file = numbers.file(register);
            while let Some(Reverse((last, slot))) = taken[file].peek().copied()
                && last < start
            {
                taken[file].pop();
                free[file].push(slot);
            }
            let slot = free[file].pop().unwrap_or_else(|| slots.fresh(file));
            slots.of[register] = slot;
            taken[file].push(Reverse((end, slot)));
        }
        slots
    }

    fn fresh(&mut self, file: usize) -> Slot {
        self.counts[file] += 1;
        self.counts[file] as Slot - 1
    }
}
