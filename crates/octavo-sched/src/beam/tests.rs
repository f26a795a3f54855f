//! Steps small enough to follow by hand, and random searches beside the definition.

use super::*;

const END: TokenId = 0;

fn search(width: u32, length_penalty: f32, max_tokens: usize) -> Search {
    Search::new(BeamParams { width, length_penalty }, 1, 1 + max_tokens)
}

fn candidates(logprobs: &[(TokenId, f32)]) -> Vec<Candidate> {
    let candidate = |(index, &(token, logprob)): (usize, _)| Candidate { token, logprob, rank: 1 + index as u32 };
    logprobs.iter().enumerate().map(candidate).collect()
}

fn advance(search: &mut Search, next_choice: &mut u32, proposals: &[(u32, &[(TokenId, f32)])]) -> Progress {
    let all: Vec<_> = proposals.iter().map(|&(choice, logprobs)| (choice, candidates(logprobs))).collect();
    let proposals: Vec<_> = all.iter().map(|&(choice, ref candidates)| Proposal { choice, candidates }).collect();
    search.advance(&proposals, |token| token == END, next_choice)
}

fn survivors(survivors: &[(u32, u32, TokenId)]) -> Progress {
    let survivor = |&(parent, choice, token)| Survivor { parent, choice, token };
    Progress::GoesOn(survivors.iter().map(survivor).collect())
}

fn outputs(progress: Progress) -> Vec<(Vec<TokenId>, f64, FinishReason)> {
    let Progress::Ended(completed) = progress else { panic!("it goes on: {progress:?}") };
    let tokens = |one: &Completed| one.hypothesis.tokens.iter().map(|candidate| candidate.token).collect();
    completed.iter().map(|one| (tokens(one), one.hypothesis.cumulative_logprob, one.finish())).collect()
}

#[test]
fn the_likeliest_go_on_and_the_first_of_a_beam_keeps_its_number() {
    let (mut search, mut next) = (search(2, 1.0, 9), 1);
    let progress = advance(&mut search, &mut next, &[(0, &[(5, -1.0), (4, -2.0), (6, -3.0), (7, -4.0)])]);
    assert_eq!(progress, survivors(&[(0, 0, 5), (0, 1, 4)]));
    let weak: &[(TokenId, f32)] = &[(5, -3.0), (6, -4.0)];
    let progress = advance(&mut search, &mut next, &[(0, weak), (1, &[(8, -0.25), (9, -0.5)])]);
    assert_eq!(progress, survivors(&[(1, 1, 8), (1, 2, 9)]), "beam 0 has none, and its number is not used again");
    assert_eq!(search.choices().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn equal_sums_stand_in_the_order_of_their_beams_and_then_of_tokens() {
    let (mut search, mut next) = (search(3, 1.0, 9), 1);
    advance(&mut search, &mut next, &[(0, &[(5, -1.0), (4, -2.0), (6, -3.0)])]);
    let proposals: [(u32, &[(TokenId, f32)]); 3] =
        [(0, &[(7, -2.0), (8, -2.0)]), (1, &[(1, -1.0), (3, -1.0)]), (2, &[(2, -0.0)])];
    let progress = advance(&mut search, &mut next, &proposals);
    assert_eq!(progress, survivors(&[(0, 0, 7), (0, 3, 8), (1, 1, 1)]));
}

#[test]
fn an_end_token_completes_an_output_and_does_not_count_into_its_length() {
    let (mut search, mut next) = (search(1, 1.0, 2), 1);
    assert_eq!(advance(&mut search, &mut next, &[(0, &[(5, -1.0), (END, -1.5)])]), survivors(&[(0, 0, 5)]));
    // -1.5 over the one token of the prompt, -4.5 over three.
    let best = outputs(advance(&mut search, &mut next, &[(0, &[(6, -3.5), (END, -4.0)])]));
    assert_eq!(best, [(vec![END], -1.5, FinishReason::Stop)]);
}

#[test]
fn a_penalty_of_length_prefers_the_longer_and_the_order_of_completion_breaks_ties() {
    let run = |length_penalty| {
        let (mut search, mut next) = (search(2, length_penalty, 2), 1);
        advance(&mut search, &mut next, &[(0, &[(5, -1.0), (END, -1.5)])]);
        let proposal: &[(TokenId, f32)] = &[(6, -0.5), (END, -1.0)];
        outputs(advance(&mut search, &mut next, &[(0, proposal)]))
    };
    let (ended, long) = (vec![END], vec![5, 6]);
    assert_eq!(run(1.0), [(long.clone(), -1.5, FinishReason::Length), (vec![5, END], -2.0, FinishReason::Stop)]);
    assert_eq!(run(0.0), [(ended, -1.5, FinishReason::Stop), (long, -1.5, FinishReason::Length)]);
}

#[test]
fn a_search_ends_once_nothing_better_can_come() {
    let first: &[(TokenId, f32)] = &[(END, -0.5), (5, -3.0)];
    // Over the four tokens at which it ends at the latest, -3 may become -0.75, and -1.5 without any more.
    let (mut short, mut next) = (search(1, 1.0, 3), 1);
    assert_eq!(outputs(advance(&mut short, &mut next, &[(0, first)])).len(), 1);
    // Over ten it may become -0.3.
    assert_eq!(advance(&mut search(1, 1.0, 9), &mut next, &[(0, first)]), survivors(&[(0, 0, 5)]));
    // Where length counts against an output, the shortest that may come is the best.
    assert_eq!(outputs(advance(&mut search(1, -1.0, 9), &mut next, &[(0, first)])).len(), 1);
    assert_eq!(advance(&mut search(2, -1.0, 9), &mut next, &[(0, first)]), survivors(&[(0, 0, 5)]), "two are wanted");
}

#[test]
fn a_search_ends_with_what_there_is_when_nothing_goes_on() {
    let (mut search, mut next) = (search(3, 1.0, 9), 1);
    let best = outputs(advance(&mut search, &mut next, &[(0, &[(END, -0.5)])]));
    assert_eq!(best, [(vec![END], -0.5, FinishReason::Stop)]);
}

#[test]
fn a_beam_that_fails_dies_and_the_search_fails_with_the_last() {
    let (mut search, mut next) = (search(2, 1.0, 9), 1);
    advance(&mut search, &mut next, &[(0, &[(5, -1.0), (4, -2.0)])]);
    assert_eq!(advance(&mut search, &mut next, &[(0, &[]), (1, &[(7, -1.0)])]), survivors(&[(1, 1, 7)]));
    assert_eq!(search.num_vacant(), 1);
    assert_eq!(advance(&mut search, &mut next, &[(1, &[])]), Progress::Failed);
}

#[test]
fn a_certain_output_has_a_score_under_any_penalty() {
    for length_penalty in [-1e30, 0.0, 1e30] {
        assert_eq!(search(1, length_penalty, 9).score(0.0, 5), 0.0);
    }
}

/// SplitMix64 (Steele et al., OOPSLA'14).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end
    }
}

/// The log-probabilities of all tokens after some others, of few values, so that there are ties.
fn table(seed: u64, tokens: &[TokenId], vocab_size: u32) -> Vec<f64> {
    let path = tokens.iter().fold(seed, |path, &token| path.wrapping_mul(31).wrapping_add(u64::from(token) + 1));
    let mut random = Random(path);
    (0..vocab_size).map(|_| -(random.below(24) as f64) / 4.0).collect()
}

/// The `count` likeliest tokens, equal ones by id.
fn likeliest(seed: u64, tokens: &[TokenId], vocab_size: u32, count: usize) -> Vec<(TokenId, f64)> {
    let mut all: Vec<_> = (0..).zip(table(seed, tokens, vocab_size)).collect();
    all.sort_by(|one: &(TokenId, f64), other| other.1.total_cmp(&one.1));
    all.truncate(count);
    all
}

struct Case {
    seed: u64,
    vocab_size: u32,
    width: usize,
    prompt_len: usize,
    max_tokens: usize,
    penalty: f32,
}

type Found = (Vec<TokenId>, f64);

/// The definition word by word: every list is kept whole, and nothing ends early.
fn by_definition(case: &Case) -> Vec<Found> {
    let Case { seed, vocab_size, width, prompt_len, max_tokens, penalty } = *case;
    let (mut live, mut complete): (Vec<Found>, Vec<(f64, Found)>) = (vec![(vec![], 0.0)], vec![]);
    let score = |sum: f64, output_len: usize| sum / ((prompt_len + output_len) as f64).powf(f64::from(penalty));
    for _ in 0..max_tokens {
        let mut next: Vec<Found> = vec![];
        for (tokens, sum) in &live {
            for (token, logprob) in likeliest(seed, tokens, vocab_size, 2 * width) {
                let longer = ([&tokens[..], &[token]].concat(), sum + logprob);
                if token == END {
                    complete.push((score(longer.1, tokens.len()), longer));
                } else {
                    next.push(longer);
                }
            }
        }
        next.sort_by(|one, other| other.1.total_cmp(&one.1));
        next.truncate(width);
        live = next;
    }
    complete.extend(live.into_iter().map(|found| (score(found.1, found.0.len()), found)));
    complete.sort_by(|one, other| other.0.total_cmp(&one.0));
    complete.into_iter().take(width).map(|(_, found)| found).collect()
}

fn by_search(case: &Case) -> (Vec<Found>, usize) {
    let params = BeamParams { width: case.width as u32, length_penalty: case.penalty };
    let mut search = Search::new(params, case.prompt_len, case.prompt_len + case.max_tokens);
    let mut beams: Vec<(u32, Vec<TokenId>)> = vec![(0, vec![])];
    let mut next_choice = 1;
    for step in 1.. {
        let all: Vec<(u32, Vec<Candidate>)> = beams
            .iter()
            .map(|(choice, tokens)| {
                let top = likeliest(case.seed, tokens, case.vocab_size, 2 * case.width);
                let top: Vec<_> = top.into_iter().map(|(token, logprob)| (token, logprob as f32)).collect();
                (*choice, candidates(&top))
            })
            .collect();
        let proposals: Vec<_> = all.iter().map(|&(choice, ref candidates)| Proposal { choice, candidates }).collect();
        match search.advance(&proposals, |token| token == END, &mut next_choice) {
            Progress::GoesOn(survivors) => {
                let tokens = |parent| &beams.iter().find(|(choice, _)| *choice == parent).unwrap().1;
                let longer = |survivor: &Survivor| [&tokens(survivor.parent)[..], &[survivor.token]].concat();
                beams = survivors.iter().map(|survivor| (survivor.choice, longer(survivor))).collect();
            }
            ended => return (outputs(ended).into_iter().map(|(tokens, sum, _)| (tokens, sum)).collect(), step),
        }
    }
    unreachable!("there is always one more step")
}

#[test]
fn a_search_finds_what_its_definition_says() {
    let (mut random, mut early) = (Random(7), 0);
    for seed in 0..6000 {
        let case = Case {
            seed,
            vocab_size: 1 + random.below(7) as u32,
            width: 1 + random.below(6) as usize,
            prompt_len: 1 + random.below(4) as usize,
            max_tokens: 1 + random.below(8) as usize,
            penalty: [-1.0, 0.0, 0.5, 1.0, 2.0][random.below(5) as usize],
        };
        let (found, steps) = by_search(&case);
        early += usize::from(steps < case.max_tokens);
        assert_eq!(found, by_definition(&case), "seed {seed}, after {steps} of {} steps", case.max_tokens);
    }
    assert!(early > 600, "only {early} ended before they had to");
}

#[test]
fn a_beam_as_wide_as_all_outputs_finds_the_best_of_all() {
    for seed in 0..50 {
        let case = Case { seed, vocab_size: 3, width: 40, prompt_len: 2, max_tokens: 4, penalty: 1.0 };
        let mut all: Vec<(f64, Found)> = vec![];
        let mut partial: Vec<Found> = vec![(vec![], 0.0)];
        while let Some((tokens, sum)) = partial.pop() {
            for (token, logprob) in (0..).zip(table(seed, &tokens, 3)) {
                let longer = ([&tokens[..], &[token]].concat(), sum + logprob);
                let len = case.prompt_len + longer.0.iter().filter(|&&token| token != END).count();
                if token == END || longer.0.len() == case.max_tokens {
                    all.push((longer.1 / len as f64, longer));
                } else {
                    partial.push(longer);
                }
            }
        }
        let best = all.iter().map(|(score, _)| *score).fold(f64::MIN, f64::max);
        let (tokens, sum) = &by_search(&case).0[0];
        let len = case.prompt_len + tokens.iter().filter(|&&token| token != END).count();
        assert_eq!(sum / len as f64, best);
    }
}
