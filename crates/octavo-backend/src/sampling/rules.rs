//! What is done to a row's logits before anything is drawn from it.

use crate::{LogitRules, TokenMask};

impl LogitRules {
    /// Applies everything, in order: bias, masks, penalties. Tokens beyond the row are passed over.
    pub fn apply(&self, logits: &mut [f32]) {
        self.add_bias(logits);
        if let Some(allowed) = &self.allowed {
            allowed.keep_only(logits);
        }
        self.ban(logits);
        self.penalize(logits);
    }

    /// Adds [`LogitRules::bias`].
    pub fn add_bias(&self, logits: &mut [f32]) {
        for &(token, bias) in self.bias.iter() {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
    }

    /// Makes the tokens of [`LogitRules::banned`] impossible.
    pub fn ban(&self, logits: &mut [f32]) {
        for &token in &self.banned {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Applies [`LogitRules::penalties`]: repetition, then frequency, then presence.
    pub fn penalize(&self, logits: &mut [f32]) {
        let Some(penalties) = &self.penalties else { return };
        for seen in penalties.seen.iter() {
            let Some(logit) = logits.get_mut(seen.token as usize) else { continue };
            if *logit > 0.0 {
                *logit /= penalties.repetition;
            } else {
                *logit *= penalties.repetition;
            }
            if seen.in_output > 0 {
                *logit = (-penalties.frequency).mul_add(seen.in_output as f32, *logit) - penalties.presence;
            }
        }
    }
}

impl TokenMask {
    /// Makes every token that is not in the set impossible.
    pub fn keep_only(&self, logits: &mut [f32]) {
        let words = self.words().iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in logits.chunks_mut(32).zip(words) {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Penalties, SeenToken, TokenId};

    const NEVER: f32 = f32::NEG_INFINITY;

    fn mask(vocab_size: usize, tokens: &[TokenId]) -> Option<Arc<TokenMask>> {
        let mut mask = TokenMask::none(vocab_size);
        tokens.iter().for_each(|&token| mask.insert(token));
        Some(Arc::new(mask))
    }

    fn seen(tokens: &[(TokenId, u32)]) -> Arc<Vec<SeenToken>> {
        Arc::new(tokens.iter().map(|&(token, in_output)| SeenToken { token, in_output }).collect())
    }

    #[test]
    fn bias_is_added_before_a_mask_and_cannot_undo_it() {
        let rules =
            LogitRules { bias: Arc::from([(0, 5.0), (1, 100.0)]), allowed: mask(3, &[0, 2]), ..LogitRules::default() };
        let mut logits = [1.0, 2.0, 3.0];
        rules.apply(&mut logits);
        assert_eq!(logits, [6.0, NEVER, 3.0]);
    }

    #[test]
    fn a_token_must_be_allowed_and_not_banned() {
        let rules = LogitRules { allowed: mask(70, &[1, 33, 69]), banned: vec![33], ..LogitRules::default() };
        let mut logits = [0.5; 70];
        rules.apply(&mut logits);
        let left: Vec<usize> = (0..70).filter(|&id| logits[id] > NEVER).collect();
        assert_eq!(left, [1, 69]);
    }

    #[test]
    fn repetition_weakens_every_seen_token_whatever_its_sign() {
        let penalties =
            Penalties { repetition: 2.0, frequency: 0.0, presence: 0.0, seen: seen(&[(0, 0), (1, 0), (2, 3)]) };
        let mut logits = [3.0, -3.0, 0.0, 3.0];
        LogitRules { penalties: Some(penalties), ..LogitRules::default() }.apply(&mut logits);
        assert_eq!(logits, [1.5, -6.0, 0.0, 3.0]);
    }

    #[test]
    fn frequency_counts_the_output_and_presence_asks_whether_it_has_the_token() {
        let penalties =
            Penalties { repetition: 2.0, frequency: 0.5, presence: 0.25, seen: seen(&[(0, 3), (1, 1), (2, 0)]) };
        let mut logits = [8.0, 8.0, 8.0, 8.0];
        LogitRules { penalties: Some(penalties), ..LogitRules::default() }.apply(&mut logits);
        assert_eq!(logits, [8.0 / 2.0 - 1.5 - 0.25, 8.0 / 2.0 - 0.5 - 0.25, 8.0 / 2.0, 8.0]);
    }

    #[test]
    fn penalties_act_on_what_bias_and_masks_left() {
        let penalties = Penalties { repetition: 2.0, frequency: 1.0, presence: 1.0, seen: seen(&[(0, 1), (1, 1)]) };
        let rules = LogitRules {
            bias: Arc::from([(0, 4.0)]),
            banned: vec![1],
            penalties: Some(penalties),
            ..LogitRules::default()
        };
        let mut logits = [-2.0, 7.0];
        rules.apply(&mut logits);
        assert_eq!(logits, [-1.0, NEVER]);
    }

    #[test]
    fn rules_about_padding_change_nothing() {
        let penalties = Penalties { repetition: 2.0, frequency: 1.0, presence: 1.0, seen: seen(&[(9, 1)]) };
        let rules = LogitRules {
            bias: Arc::from([(8, 4.0)]),
            banned: vec![7],
            allowed: mask(64, &[0, 1, 40]),
            penalties: Some(penalties),
        };
        let mut logits = [1.0, 2.0];
        rules.apply(&mut logits);
        assert_eq!(logits, [1.0, 2.0]);
    }
}
