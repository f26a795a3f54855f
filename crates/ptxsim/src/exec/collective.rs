//! Exchanges between the lanes of a warp. The warp has made sure that the member masks fit the lanes that arrived.

use std::collections::HashMap;

use crate::fault::FaultKind;
use crate::isa::{Barrier, BarrierReduction, Match, Reduce, Shuffle, ShuffleMode, Slot, Vote, VoteMode};
use crate::registers::{LANE_BIT, LANES, Registers, Words, lanes};

use super::{Outcome, integer, trouble};

/// `shfl.sync`
pub(super) fn shuffle(registers: &mut Registers, mask: u32, shuffle: &Shuffle) -> Outcome {
    let values = *registers.word(shuffle.a);
    let (distance, control) = (*registers.word(shuffle.b), *registers.word(shuffle.c));
    let members = *registers.word(shuffle.members);
    let (mut results, mut in_range) = ([0; LANES], 0);
    if mask == u32::MAX && members == [u32::MAX; LANES] {
        for lane in 0..LANES {
            let (source, valid) = source_lane(shuffle.mode, lane as u32, distance[lane] & 31, control[lane]);
            results[lane] = values[source as usize % LANES];
            in_range |= if valid { LANE_BIT[lane] } else { 0 };
        }
        finish_shuffle(registers, mask, shuffle, (&results, in_range));
        return Ok(());
    }
    for lane in lanes(mask) {
        let (source, valid) = source_lane(shuffle.mode, lane as u32, distance[lane] & 31, control[lane]);
        if members[lane] >> source & 1 == 0 || mask >> source & 1 == 0 {
            return Err(trouble(
                lane,
                FaultKind::InactiveSource { source_lane: source, arrived: mask & members[lane] },
            ));
        }
        results[lane] = values[source as usize];
        in_range |= u32::from(valid) << lane;
    }
    finish_shuffle(registers, mask, shuffle, (&results, in_range));
    Ok(())
}

fn finish_shuffle(registers: &mut Registers, mask: u32, shuffle: &Shuffle, (results, in_range): (&Words, u32)) {
    registers.put_words(shuffle.d, mask, results);
    if shuffle.in_range != crate::isa::NEVER {
        registers.put_predicate(shuffle.in_range, mask, in_range);
    }
}

/// Where a lane reads: its own value if the lane meant is outside its segment.
#[inline(always)]
fn source_lane(mode: ShuffleMode, lane: u32, distance: u32, control: u32) -> (u32, bool) {
    let (clamp, segment) = (control & 31, control >> 8 & 31);
    let last = lane & segment | clamp & !segment;
    let first = lane & segment;
    let (source, valid) = match mode {
        ShuffleMode::Up => (lane.wrapping_sub(distance), lane as i32 - distance as i32 >= last as i32),
        ShuffleMode::Down => (lane + distance, lane + distance <= last),
        ShuffleMode::Butterfly => (lane ^ distance, lane ^ distance <= last),
        ShuffleMode::Index => {
            let source = first | distance & !segment;
            (source, source <= last)
        }
    };
    if valid { (source, true) } else { (lane, false) }
}

/// `vote.sync`; lanes with another member mask vote on their own.
pub(super) fn vote(registers: &mut Registers, mask: u32, vote: &Vote) {
    let ballot = (registers.predicate(vote.a) ^ vote.flip) & mask;
    let members = *registers.word(vote.members);
    if vote.mode == VoteMode::Ballot {
        registers.put_words(vote.d, mask, &members.map(|members| ballot & members));
        return;
    }
    let result = lanes(mask).fold(0, |result, lane| {
        let (voters, yes) = (members[lane], ballot & members[lane]);
        let outcome = match vote.mode {
            VoteMode::All => yes == voters,
            VoteMode::Any => yes != 0,
            _ => yes == 0 || yes == voters,
        };
        result | u32::from(outcome) << lane
    });
    registers.put_predicate(vote.d, mask, result);
}

/// `match.sync`
pub(super) fn matching(registers: &mut Registers, mask: u32, matching: &Match) {
    let members = *registers.word(matching.members);
    let value = |lane: usize| {
        if matching.double { registers.double(matching.a)[lane] } else { u64::from(registers.word(matching.a)[lane]) }
    };
    let mut alike: HashMap<(u32, u64), u32> = HashMap::new();
    for lane in lanes(mask) {
        *alike.entry((members[lane], value(lane))).or_default() |= 1 << lane;
    }
    let (mut results, mut same) = ([0; LANES], 0);
    for lane in lanes(mask) {
        let found = alike[&(members[lane], value(lane))];
        let complete = found == members[lane];
        results[lane] = if !matching.all || complete { found } else { 0 };
        same |= u32::from(complete) << lane;
    }
    registers.put_words(matching.d, mask, &results);
    if matching.same != crate::isa::NEVER {
        registers.put_predicate(matching.same, mask, same);
    }
}

/// `redux.sync`
pub(super) fn reduce(registers: &mut Registers, mask: u32, reduce: &Reduce) {
    let (values, members) = (*registers.word(reduce.a), *registers.word(reduce.members));
    let mut results = [0; LANES];
    let mut rest = mask;
    while rest != 0 {
        let group = members[rest.trailing_zeros() as usize] & mask;
        let total = lanes(group).map(|lane| values[lane]).reduce(|a, b| integer::word(reduce.op, a, b)).unwrap_or(0);
        for lane in lanes(group) {
            results[lane] = total;
        }
        // A lane is always one of its own members, so this ends.
        rest &= !(group | 1 << rest.trailing_zeros());
    }
    registers.put_words(reduce.d, mask, &results);
}

/// What `bar.red` gives, from the number of threads and of true predicates; written to the lanes of `mask`.
pub(crate) fn barrier_result(registers: &mut Registers, mask: u32, barrier: &Barrier, (threads, yes): (u32, u32)) {
    let d: Slot = barrier.d;
    let spread = |outcome: bool| if outcome { u32::MAX } else { 0 };
    match barrier.reduction {
        BarrierReduction::None => {}
        BarrierReduction::Count => registers.put_words(d, mask, &[yes; LANES]),
        BarrierReduction::All => registers.put_predicate(d, mask, spread(yes == threads)),
        BarrierReduction::Any => registers.put_predicate(d, mask, spread(yes > 0)),
    }
}
