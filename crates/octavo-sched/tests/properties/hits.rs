//! What a request must find in the prefix cache, from the memory and the account alone.

use std::collections::HashSet;

use octavo_sched::Admitted;

use crate::checked::Checked;
use crate::history::History;

impl Checked {
    /// The most tokens before `limit` whose blocks are all there, in a group with a window those that the next token sees.
    /// Those before `start` are.
    pub(crate) fn longest_hit(
        &self,
        histories: &[History],
        start: usize,
        limit: usize,
        cached: &[HashSet<History>],
    ) -> usize {
        let block_size = self.config.block_size;
        let [start, limit] = [start, limit].map(|tokens| tokens / block_size);
        let is_hit = |num_blocks: &usize| {
            self.config.groups.iter().zip(cached).all(|(group, cached)| {
                let seen_from = group.window.map_or(0, |window| (num_blocks * block_size + 1).saturating_sub(window));
                let mut seen = start.max(seen_from / block_size)..*num_blocks;
                seen.all(|index| cached.contains(&histories[(index + 1) * block_size - 1]))
            })
        };
        (start + 1..=limit).rev().find(is_hit).unwrap_or(start) * block_size
    }

    /// What is reported was there at some time, and all that is still there says the same.
    pub(crate) fn check_first_difference(&self, admitted: &Admitted, histories: &[History], limit: usize) {
        let block_size = self.config.block_size;
        let is_there =
            |history: History| self.cached.iter().flatten().any(|&end| self.histories.continues(end, history));
        let num_there = histories.iter().take_while(|&&history| is_there(history)).count();
        let num_known = histories.iter().take_while(|history| self.known.contains(history)).count();
        let Some(position) = admitted.first_difference else {
            // Blocks that were found, then one of which only the beginning is there, and it is not the end of the tokens.
            let num_found = self.num_blocks_there(&histories[..num_there.min(limit)]);
            let end = num_found * block_size;
            let parent =
                end.checked_sub(1).map_or_else(|| self.histories.root_of(histories[0]), |last| histories[last]);
            let is_continued =
                self.cached.iter().flatten().any(|&end| end != parent && self.histories.continues(end, parent));
            let differs = num_known < histories.len().min(end + block_size);
            let all_found = num_found == num_there.min(limit) / block_size;
            assert!(!(all_found && is_continued && differs), "{admitted:?}, but what is there differs at {num_there}");
            return;
        };
        assert!((admitted.cached_tokens..histories.len()).contains(&position), "{admitted:?}");
        assert!(position >= num_there, "{admitted:?}, but {num_there} tokens are there");
        assert!(num_known >= position, "{admitted:?}, but only {num_known} tokens were ever there");
        let parent = self.histories.parent(histories[position]);
        let differs = |known: &&History| self.histories.parent(**known) == parent && **known != histories[position];
        assert!(self.known.iter().any(|known| differs(&known)), "{admitted:?}, but nothing ever differed");
    }

    /// How many blocks in a row, from the first on, the groups without a window have.
    pub(crate) fn num_blocks_there(&self, histories: &[History]) -> usize {
        let block_size = self.config.block_size;
        let has = |end: &History| {
            self.config
                .groups
                .iter()
                .zip(&self.cached)
                .all(|(group, cached)| group.window.is_some() || cached.contains(end))
        };
        histories.chunks_exact(block_size).take_while(|block| has(&block[block_size - 1])).count()
    }
}
