//! Iteration-level scheduling: after every step the batch is put together anew (Orca: Yu et al., OSDI'22).

mod admission;
mod ending;
mod preemption;
mod search;
mod snapshot;

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::beam::Search;
use crate::cache::KvCache;
use crate::config::{AdmissionLimits, SchedulerConfig};
use crate::headroom::ExpectedOutput;
use crate::plan::{BlockCopy, FinishReason, SeqSpan, StepOutput, StepPlan, StepRun};
use crate::rejected::Rejected;
use crate::request::{Micros, Request, RequestId, SamplingParams, SeqId, TokenId};
use crate::sequence::Sequence;
use crate::stats::SchedulerStats;

/// Decides what each step computes.
///
/// Every step fills one budget of tokens: first with the running sequences in order of arrival, then with waiting ones,
/// first come first served. A waiting request that does not fit holds up those behind it, small as they may be (Orca's
/// `break`, not `continue`), so that none waits forever. A prompt longer than what is left of the budget goes in
/// chunks.
///
/// Blocks are taken as a step writes to them. When there are too few, a running request gives all of its blocks back
/// and waits to be computed again; the earliest never does, so that it ends, and after it the next.
///
/// Invariant: `running` and `waiting` are sorted by id; the sequences of a request are side by side in one of them, and
/// the first of them waits for no other.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    limits: AdmissionLimits,
    cache: KvCache,
    expected: ExpectedOutput,
    /// Every request that has not ended.
    requests: HashMap<RequestId, Place>,
    /// Of those that have one; with the arrival, by which equal ones are told apart.
    deadlines: BTreeSet<(Micros, u64, RequestId)>,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    next_arrival: u64,
    /// A plan has been made and not been committed.
    is_planned: bool,
    /// The first waiting request did not fit beside the running ones when it was last looked at.
    is_short_of_blocks: bool,
    /// Only the counts since the beginning; the rest of a snapshot is filled in when it is asked for.
    totals: SchedulerStats,
}

/// Where the sequences of a request are.
#[derive(Debug)]
struct Place {
    /// Their [`SeqId::arrival`].
    arrival: u64,
    /// The choice of the next one that a fork makes.
    next_choice: u32,
    deadline: Option<Micros>,
    search: Option<Box<Search>>,
}

/// A plan in the making: what is left of the budget, and whose the copies are.
struct Draft {
    plan: StepPlan,
    budget: usize,
    copies: Vec<(SeqId, BlockCopy)>,
}

impl Scheduler {
    /// A scheduler without requests, all blocks free.
    ///
    /// # Panics
    /// If the config does not pass [`SchedulerConfig::validate`].
    pub fn new(config: SchedulerConfig) -> Scheduler {
        if let Err(invalid) = config.validate() {
            panic!("{invalid}");
        }
        Scheduler {
            limits: config.limits(),
            cache: KvCache::new(&config),
            expected: ExpectedOutput::new(),
            requests: HashMap::new(),
            deadlines: BTreeSet::new(),
            running: Vec::with_capacity(config.max_num_seqs.min(1024)),
            waiting: VecDeque::new(),
            next_arrival: 0,
            is_planned: false,
            is_short_of_blocks: false,
            totals: SchedulerStats::default(),
            config,
        }
    }

    /// The limits that a request has to meet, to check elsewhere before it is sent here.
    pub fn limits(&self) -> &AdmissionLimits {
        &self.limits
    }

    /// Checks a request that is not handed in yet; see [`AdmissionLimits::check`].
    ///
    /// # Errors
    /// What [`add`](Self::add) would say, except for a duplicate id.
    pub fn check(&self, prompt_len: usize, params: &SamplingParams) -> Result<(), Rejected> {
        self.limits.check(prompt_len, params)
    }

    /// Puts a request at the end of the queue. What has been taken in can always be served.
    ///
    /// # Errors
    /// [`Rejected`], with nothing changed.
    pub fn add(&mut self, request: Request) -> Result<SeqId, Rejected> {
        self.limits.check(request.prompt.len(), &request.params)?;
        if self.requests.contains_key(&request.id) {
            return Err(Rejected::DuplicateId(request.id));
        }
        let id = SeqId { arrival: self.next_arrival, choice: 0 };
        self.next_arrival += 1;
        let final_len = self.limits.final_len(request.prompt.len(), &request.params);
        let new_search = |beam| Box::new(Search::new(beam, request.prompt.len(), final_len));
        let place = Place {
            arrival: id.arrival,
            next_choice: request.params.n,
            deadline: request.deadline,
            search: request.params.beam.map(new_search),
        };
        self.deadlines.extend(place.deadline.map(|deadline| (deadline, id.arrival, request.id)));
        self.requests.insert(request.id, place);
        self.waiting.push_back(Sequence::new(id, request, final_len, self.cache.no_blocks()));
        Ok(id)
    }

    /// Parts a running sequence in two: the new one has the same tokens and shares all blocks, until either writes.
    ///
    /// `None`, and no change, if the sequence does not run, or still computes its prompt or what a preemption took, if
    /// it is a beam, if no more sequences may run, or if the pool could not hold the request's sequences up to their end.
    ///
    /// # Panics
    /// Between `schedule` and `commit`.
    pub fn fork(&mut self, id: SeqId) -> Option<SeqId> {
        assert!(!self.is_planned, "a sequence is not forked between schedule and commit");
        let family = self.running_of(id.arrival);
        let parent = &self.running[self.running.binary_search_by_key(&id, Sequence::id).ok()?];
        let generates = parent.output_len() > 0 && parent.pending() == 1;
        let is_awaited = self.running[family.clone()].iter().any(|sequence| sequence.follows);
        let fits = self.limits.holds(parent.prompt_len(), parent.final_len(), family.len() + 1);
        if !generates || is_awaited || parent.is_beam() || !fits || self.num_seats_taken() == self.config.max_num_seqs {
            return None;
        }
        let place = self.requests.get_mut(&parent.request())?;
        let child = parent.fork(place.next_choice, &mut self.cache);
        place.next_choice += 1;
        let id = child.id();
        self.running.insert(family.end, child);
        Some(id)
    }

    /// Plans the next step and takes the blocks that it writes to. The plan is empty only if there is no work.
    ///
    /// # Panics
    /// If the plan before has not been committed.
    pub fn schedule(&mut self, now: Micros) -> StepPlan {
        assert!(!self.is_planned, "the plan before has not been committed");
        let budget = self.config.max_num_batched_tokens;
        let plan = StepPlan { spans: Vec::with_capacity(self.running.len()), ..Default::default() };
        let mut draft = Draft { plan, budget, copies: vec![] };
        self.plan_running(&mut draft);
        // Who has just given way does not come back at once.
        self.is_short_of_blocks = !draft.plan.preempted.is_empty();
        if !self.is_short_of_blocks {
            self.admit_waiting(now, &mut draft);
        }
        let Draft { mut plan, copies, .. } = draft;
        // What was admitted again may have come before what runs.
        plan.spans.sort_unstable_by_key(|span| span.seq);
        plan.copies = copies.into_iter().map(|(_, copy)| copy).collect();
        self.totals.steps += u64::from(!plan.spans.is_empty());
        self.totals.tokens_scheduled += plan.spans.iter().map(|span| span.len as u64).sum::<u64>();
        self.totals.blocks_copied += plan.copies.len() as u64;
        self.is_planned = !plan.spans.is_empty();
        plan
    }

    /// Takes in what came of a plan: appends the sampled tokens, publishes full blocks, ends what is to end, sends
    /// blocks home.
    ///
    /// `runs` has [`SeqSpan::samples`] entries for each span, in the order of the plan, also for those whose request
    /// has been aborted since, which are passed over. The outputs are in the same order.
    ///
    /// # Panics
    /// If `runs` does not match the plan, or the plan has been committed before.
    pub fn commit(&mut self, plan: &StepPlan, runs: &[StepRun]) -> Vec<StepOutput> {
        assert!(self.is_planned || plan.spans.is_empty(), "the plan is not the last one made, or was committed before");
        self.is_planned = false;
        let num_samples = plan.spans.iter().map(|span| span.samples).sum();
        assert_eq!(runs.len(), num_samples, "a run is expected for each sample of the plan");
        let (mut runs, mut outputs, mut searched) = (runs, Vec::with_capacity(num_samples), vec![]);
        let (mut index, mut born) = (0, vec![]);
        for span in &plan.spans {
            let (own, others) = runs.split_at(span.samples);
            runs = others;
            index += self.running[index..].iter().take_while(|sequence| sequence.id() < span.seq).count();
            let Some(sequence) = self.running.get_mut(index).filter(|sequence| sequence.id() == span.seq) else {
                continue;
            };
            assert_eq!(span.start, sequence.computed(), "the plan is not the last one made");
            let eos = &self.config.eos_token_ids;
            sequence.advance(computed_end(span, own.first()), &mut self.cache);
            if sequence.is_beam() {
                searched.extend(own.first().map(|run| (sequence.request(), span.seq, run)));
                continue;
            }
            let first_born = born.len();
            born.extend((1..own.len()).map(|choice| sequence.fork(choice as u32, &mut self.cache)));
            sequence.unborn = if own.is_empty() { sequence.unborn } else { 0 };
            let family = std::iter::once(sequence).chain(&mut born[first_born..]);
            outputs.extend(family.zip(own).map(|(sequence, run)| take_run(sequence, run, eos)));
        }
        if !born.is_empty() {
            self.running.append(&mut born);
            self.running.sort_by_key(Sequence::id);
        }
        self.expected.generated(outputs.iter().map(|output| output.tokens.len()).sum());
        self.end_finished(&mut outputs);
        if !searched.is_empty() {
            outputs.extend(self.advance_searches(&searched));
            outputs.sort_by_key(|output| output.seq.arrival);
        }
        outputs
    }

    /// Forgets what the prefix cache holds and gives the number of blocks whose content could have been found. Running
    /// requests keep their blocks, and nothing that they have computed so far will be found.
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.cache.reset(self.running.iter_mut().chain(&mut self.waiting).map(|sequence| &mut sequence.blocks))
    }

    /// A sequence that has not ended.
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        if let Ok(index) = self.running.binary_search_by_key(&id, Sequence::id) {
            return self.running.get(index);
        }
        self.waiting.get(self.waiting.binary_search_by_key(&id, Sequence::id).ok()?)
    }

    /// Whether any request has not ended.
    pub fn has_work(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Gives each running sequence its next span, in order of arrival, while the budget lasts.
    fn plan_running(&mut self, draft: &mut Draft) {
        let mut index = 0;
        while draft.budget > 0 && index < self.running.len() {
            if self.running[index].follows {
                index += 1;
                continue;
            }
            self.join_followers(index);
            if self.waits_for_beams(index, draft) || self.plan_span(index, draft) {
                index += 1;
            } else {
                let Some(next) = self.make_room(index, draft) else { break };
                index = next;
            }
        }
    }

    /// Gives one sequence its next span; `false`, and no change, if there are too few blocks.
    fn plan_span(&mut self, index: usize, draft: &mut Draft) -> bool {
        let end = self.next_end(index, draft.budget);
        let sequence = &mut self.running[index];
        let (seq, start) = (sequence.id(), sequence.computed());
        let mut copies = vec![];
        if !self.cache.reserve(&mut sequence.blocks, start, end, &mut copies) {
            return false;
        }
        draft.copies.extend(copies.into_iter().map(|copy| (seq, copy)));
        let continuations = if sequence.is_beam() { 1 } else { 1 + sequence.unborn };
        let samples = if end == sequence.tokens().len() { continuations } else { 0 };
        draft.budget -= end - start;
        draft.plan.spans.push(SeqSpan { seq, start, len: end - start, drafts: 0, samples });
        true
    }

    /// Where the next span of a sequence ends. One that others wait for stops where they are to part from it.
    fn next_end(&self, index: usize, budget: usize) -> usize {
        let sequence = &self.running[index];
        let end = self.computable_end(index).min(sequence.computed() + budget);
        let is_awaited = self.running.get(index + 1).is_some_and(|next| next.follows);
        if is_awaited { end.min(sequence.shared_len(self.config.block_size)) } else { end }
    }

    /// Lets those that wait for a sequence part from it once it has computed what they share. Each then looks for what
    /// else of it is in the cache.
    fn join_followers(&mut self, leader: usize) {
        let is_awaited = self.running.get(leader + 1).is_some_and(|next| next.follows);
        let sequence = &self.running[leader];
        if !is_awaited || sequence.computed() < sequence.shared_len(self.config.block_size) {
            return;
        }
        let family = leader..self.running_of(sequence.id().arrival).end;
        let [first, others @ ..] = &mut self.running[family] else { return };
        others.iter_mut().for_each(|sequence| sequence.part_from(first, &mut self.cache));
        for sequence in std::iter::once(first).chain(others) {
            if !sequence.params().skip_reading_prefix_cache {
                let (salt, limit) = (&sequence.params().cache_salt, sequence.findable_len());
                let found = self.cache.find(&sequence.blocks, salt, sequence.tokens(), limit.max(sequence.computed()));
                sequence.adopt(&found, &mut self.cache);
            }
        }
    }

    /// The places in `running` of a request's sequences.
    fn running_of(&self, arrival: u64) -> std::ops::Range<usize> {
        let start = self.running.partition_point(|sequence| sequence.id().arrival < arrival);
        let len = self.running[start..].iter().take_while(|sequence| sequence.id().arrival == arrival).count();
        start..start + len
    }

    /// The places in `waiting` of a request's sequences.
    fn waiting_of(&self, arrival: u64) -> std::ops::Range<usize> {
        let start = self.waiting.partition_point(|sequence| sequence.id().arrival < arrival);
        let len = self.waiting.range(start..).take_while(|sequence| sequence.id().arrival == arrival).count();
        start..start + len
    }

    /// Takes a request's sequences out of their queue.
    fn take_out(&mut self, arrival: u64) -> Vec<Sequence> {
        let (running, waiting) = (self.running_of(arrival), self.waiting_of(arrival));
        self.running.drain(running).chain(self.waiting.drain(waiting)).collect()
    }
}

/// How far a sequence is computed after a span. Right drafts have been computed in it; wrong ones have not.
fn computed_end(span: &SeqSpan, run: Option<&StepRun>) -> usize {
    let Some(StepRun::Tokens(sampled)) = run else { return span.end() - span.drafts };
    let expected = 1..=span.drafts + 1;
    assert!(expected.contains(&sampled.len()), "{} tokens sampled, expected {expected:?}", sampled.len());
    span.end() - span.drafts + sampled.len() - 1
}

/// Appends what was sampled.
fn take_run(sequence: &mut Sequence, run: &StepRun, eos_token_ids: &[TokenId]) -> StepOutput {
    match run {
        StepRun::Tokens(sampled) => sequence.append(sampled, eos_token_ids),
        StepRun::Candidates(_) => panic!("candidates for {:?}, expected tokens", sequence.id()),
        StepRun::Failed => StepOutput {
            request: sequence.request(),
            seq: sequence.id(),
            tokens: vec![],
            finish: Some(FinishReason::Error),
            stop_token: None,
            last: false,
            hypothesis: None,
        },
    }
}
