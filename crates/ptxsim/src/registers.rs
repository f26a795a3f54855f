//! A warp's registers, and the loops over lanes that all register instructions are made of.
//!
//! Every loop computes all 32 lanes and then keeps those of the mask: the compiler turns both halves into vector code, and values of
//! inactive lanes harm nobody (no operation here can fail).

use crate::isa::Slot;

/// Lanes in a warp.
pub(crate) const LANES: usize = 32;

/// `LANE_BIT[l]` is lane `l` in a mask.
pub(crate) const LANE_BIT: [u32; LANES] = {
    let mut bits = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        bits[lane] = 1 << lane;
        lane += 1;
    }
    bits
};

/// One value for each lane.
pub(crate) type Words = [u32; LANES];
/// One value for each lane.
pub(crate) type Doubles = [u64; LANES];

/// The lanes of a mask, from the lowest.
pub(crate) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}

/// The three banks and the carry flags.
#[derive(Debug, Clone, Default)]
pub(crate) struct Registers {
    pub words: Vec<Words>,
    pub doubles: Vec<Doubles>,
    pub predicates: Vec<u32>,
    pub carry: u32,
}

impl Registers {
    pub fn word(&self, slot: Slot) -> &Words {
        &self.words[slot as usize]
    }

    pub fn double(&self, slot: Slot) -> &Doubles {
        &self.doubles[slot as usize]
    }

    pub fn predicate(&self, slot: Slot) -> u32 {
        self.predicates[slot as usize]
    }

    #[inline(always)]
    pub fn put_words(&mut self, d: Slot, mask: u32, values: &Words) {
        let target = &mut self.words[d as usize];
        if mask == u32::MAX {
            *target = *values;
            return;
        }
        for lane in 0..LANES {
            let keep = mask & LANE_BIT[lane] == 0;
            target[lane] = if keep { target[lane] } else { values[lane] };
        }
    }

    #[inline(always)]
    pub fn put_doubles(&mut self, d: Slot, mask: u32, values: &Doubles) {
        let target = &mut self.doubles[d as usize];
        if mask == u32::MAX {
            *target = *values;
            return;
        }
        for lane in 0..LANES {
            let keep = mask & LANE_BIT[lane] == 0;
            target[lane] = if keep { target[lane] } else { values[lane] };
        }
    }

    pub fn put_predicate(&mut self, d: Slot, mask: u32, value: u32) {
        let target = &mut self.predicates[d as usize];
        *target = *target & !mask | value & mask;
    }

    #[inline(always)]
    pub fn map_words(&mut self, d: Slot, mask: u32, a: Slot, f: impl Fn(u32) -> u32) {
        let a = self.word(a);
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane]);
        }
        self.put_words(d, mask, &values);
    }

    #[inline(always)]
    pub fn zip_words(&mut self, d: Slot, mask: u32, (a, b): (Slot, Slot), f: impl Fn(u32, u32) -> u32) {
        let (a, b) = (self.word(a), self.word(b));
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane], b[lane]);
        }
        self.put_words(d, mask, &values);
    }

    #[inline(always)]
    pub fn zip3_words(&mut self, d: Slot, mask: u32, (a, b, c): (Slot, Slot, Slot), f: impl Fn(u32, u32, u32) -> u32) {
        let (a, b, c) = (self.word(a), self.word(b), self.word(c));
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane], b[lane], c[lane]);
        }
        self.put_words(d, mask, &values);
    }

    #[inline(always)]
    pub fn map_doubles(&mut self, d: Slot, mask: u32, a: Slot, f: impl Fn(u64) -> u64) {
        let a = self.double(a);
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane]);
        }
        self.put_doubles(d, mask, &values);
    }

    #[inline(always)]
    pub fn zip_doubles(&mut self, d: Slot, mask: u32, (a, b): (Slot, Slot), f: impl Fn(u64, u64) -> u64) {
        let (a, b) = (self.double(a), self.double(b));
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane], b[lane]);
        }
        self.put_doubles(d, mask, &values);
    }

    /// Two doubles in, a third that is a double too.
    #[inline(always)]
    pub fn zip3_doubles(
        &mut self,
        d: Slot,
        mask: u32,
        (a, b, c): (Slot, Slot, Slot),
        f: impl Fn(u64, u64, u64) -> u64,
    ) {
        let (a, b, c) = (self.double(a), self.double(b), self.double(c));
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane], b[lane], c[lane]);
        }
        self.put_doubles(d, mask, &values);
    }

    /// A double and a word in (shifts).
    #[inline(always)]
    pub fn zip_double_word(&mut self, d: Slot, mask: u32, (a, b): (Slot, Slot), f: impl Fn(u64, u32) -> u64) {
        let (a, b) = (self.double(a), self.word(b));
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane], b[lane]);
        }
        self.put_doubles(d, mask, &values);
    }

    /// A double in, a word out.
    #[inline(always)]
    pub fn narrow(&mut self, d: Slot, mask: u32, a: Slot, f: impl Fn(u64) -> u32) {
        let a = self.double(a);
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane]);
        }
        self.put_words(d, mask, &values);
    }

    /// A word in, a double out.
    #[inline(always)]
    pub fn widen(&mut self, d: Slot, mask: u32, a: Slot, f: impl Fn(u32) -> u64) {
        let a = self.word(a);
        let mut values = [0; LANES];
        for lane in 0..LANES {
            values[lane] = f(a[lane]);
        }
        self.put_doubles(d, mask, &values);
    }

    /// The lanes in which two words pass a test.
    #[inline(always)]
    pub fn test_words(&self, (a, b): (Slot, Slot), f: impl Fn(u32, u32) -> bool) -> u32 {
        let (a, b) = (self.word(a), self.word(b));
        let mut passed = 0;
        for lane in 0..LANES {
            passed |= if f(a[lane], b[lane]) { LANE_BIT[lane] } else { 0 };
        }
        passed
    }

    /// The lanes in which two doubles pass a test.
    #[inline(always)]
    pub fn test_doubles(&self, (a, b): (Slot, Slot), f: impl Fn(u64, u64) -> bool) -> u32 {
        let (a, b) = (self.double(a), self.double(b));
        let mut passed = 0;
        for lane in 0..LANES {
            passed |= if f(a[lane], b[lane]) { LANE_BIT[lane] } else { 0 };
        }
        passed
    }
}
