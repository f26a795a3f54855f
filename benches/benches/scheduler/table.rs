//! A language model that is a table: what may follow depends on the two tokens before, and on nothing else.

use octavo_benches::lengths::Random;
use octavo_sched::TokenId;

/// Rows of the table; two tokens lead to one of them.
const NUM_ROWS: usize = 4096;
/// Tokens that may follow, from 1 on.
const NUM_TOKENS: usize = 2000;

/// What is likeliest to follow.
pub struct Table {
    /// The likeliest tokens of each row and their log-probabilities, descending.
    rows: Vec<Vec<(TokenId, f32)>>,
}

impl Table {
    /// A table of normally distributed logits, of which the `count` likeliest of each row are kept.
    pub fn new(count: usize, deviation: f64) -> Table {
        let mut random = Random::new(17);
        Table { rows: (0..NUM_ROWS).map(|_| row(&mut random, count, deviation)).collect() }
    }

    /// What may follow.
    pub fn after(&self, tokens: &[TokenId]) -> &[(TokenId, f32)] {
        let last_two = tokens.iter().rev().take(2);
        let key = last_two.fold(1, |key: u64, &token| (key + u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        &self.rows[(key >> 32) as usize % NUM_ROWS]
    }
}

fn row(random: &mut Random, count: usize, deviation: f64) -> Vec<(TokenId, f32)> {
    let mut logits: Vec<_> = (1..=NUM_TOKENS as TokenId).map(|token| (token, deviation * random.normal())).collect();
    let log_sum = logits.iter().map(|(_, logit)| logit.exp()).sum::<f64>().ln();
    logits.sort_by(|one, other| other.1.total_cmp(&one.1));
    logits.into_iter().take(count).map(|(token, logit)| (token, (logit - log_sum) as f32)).collect()
}
