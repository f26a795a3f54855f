//! A plan carried out in the memory, and what every sequence must find there.

use std::collections::HashSet;

use octavo_sched::{SeqId, SeqSpan, Sequence, StepPlan, VACANT_BLOCK};

use crate::checked::Checked;

impl Checked {
    /// Copies, then reads what each span sees, then writes: nothing may be read before a step has computed it.
    pub(crate) fn execute(&mut self, plan: &StepPlan) {
        let map = self.scheduler.block_map();
        let sources = self.memory.sources(&plan.copies);
        self.memory.forget_unfilled(&map);
        self.memory.copy(&plan.copies, &sources);
        for copy in &plan.copies {
            let writes = |span: &&SeqSpan| {
                self.sequence(span.seq).tables()[copy.group].blocks().get(span.start / self.config.block_size)
                    == Some(&copy.to)
            };
            let span = plan.spans.iter().find(writes).expect("a copy is made for a span that writes to it");
            assert!(span.start % self.config.block_size > 0, "nothing of {copy:?} is needed");
            assert!(map[copy.group][copy.from as usize].owners > 0, "the last owner of {copy:?} can write in place");
        }
        plan.spans.iter().for_each(|span| self.check_visible(span.seq, span.start, span.start));
        let mut written = HashSet::new();
        for span in &plan.spans {
            let histories = &self.live[&span.seq.arrival].continuations[&span.seq.choice].histories;
            let sequence = self.scheduler.sequence(span.seq).expect("it has not ended");
            for (group, table) in sequence.tables().iter().enumerate() {
                for (position, &history) in histories.iter().enumerate().take(span.end()).skip(span.start) {
                    let block = table.blocks()[position / self.config.block_size];
                    let slot = position % self.config.block_size;
                    let state = map[group][block as usize];
                    assert!(state.owners == 1 && !state.cached, "{span:?} writes to {state:?}");
                    assert!(written.insert((group, block, slot)), "{span:?} writes where another does");
                    self.memory.write(group, block, slot, history);
                }
            }
        }
        plan.spans.iter().for_each(|span| self.check_visible(span.seq, span.start, span.end()));
    }

    /// The positions before `end` that position `from` or a later one sees hold the tokens of the sequence itself.
    pub(crate) fn check_visible(&self, seq: SeqId, from: usize, end: usize) {
        let histories = &self.live[&seq.arrival].continuations[&seq.choice].histories;
        let block_size = self.config.block_size;
        for (index, (group, table)) in self.config.groups.iter().zip(self.sequence(seq).tables()).enumerate() {
            let start = group.window.map_or(0, |window| (from + 1).saturating_sub(window));
            for (position, &history) in histories.iter().enumerate().take(end).skip(start) {
                let block = table.blocks()[position / block_size];
                assert_ne!(block, VACANT_BLOCK, "{seq:?} sees {position} in group {index}");
                let found = self.memory.block(index, block)[position % block_size];
                assert_eq!(found, Some(history), "{seq:?} at {position} in block {block} of group {index}");
            }
        }
    }

    pub(crate) fn sequence(&self, seq: SeqId) -> &Sequence {
        self.scheduler.sequence(seq).expect("what has not ended is there")
    }
}
