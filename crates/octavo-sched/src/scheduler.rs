//! Iteration-level scheduling: after every step the batch is put together anew (Orca: Yu et al., OSDI'22).

use std::collections::{BTreeMap, VecDeque};

use crate::config::{AdmissionLimits, SchedulerConfig};
use crate::group::Group;
use crate::plan::{FinishReason, SeqSpan, StepOutput, StepPlan, StepRun};
use crate::request::{Micros, Rejected, Request, RequestId, SamplingParams, SeqId, TokenId};
use crate::sequence::Sequence;
use crate::stats::{BlockState, SchedulerStats};

/// Decides what each step computes.
///
/// Every step fills one budget of tokens: first with the running sequences in order of arrival, then with waiting ones,
/// first come first served. A waiting request that does not fit holds up those behind it, small as they may be (Orca's
/// `break`, not `continue`), so that none waits forever. A prompt longer than what is left of the budget goes in chunks.
///
/// Invariant: `running` and `waiting` are sorted by id, which is the order of arrival, and everything in `running`
/// came before everything in `waiting`.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    limits: AdmissionLimits,
    groups: Vec<Group>,
    /// Every sequence that has not ended.
    sequences: BTreeMap<SeqId, Sequence>,
    requests: BTreeMap<RequestId, SeqId>,
    running: Vec<SeqId>,
    waiting: VecDeque<SeqId>,
    next_id: u64,
    /// Only the counts since the beginning; the rest of a snapshot is filled in when it is asked for.
    totals: SchedulerStats,
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
            groups: config.groups.iter().map(|group| Group::new(&config, group)).collect(),
            sequences: BTreeMap::new(),
            requests: BTreeMap::new(),
            running: Vec::with_capacity(config.max_num_seqs.min(1024)),
            waiting: VecDeque::new(),
            next_id: 0,
            totals: SchedulerStats::default(),
            config,
        }
    }

    /// The limits that a request has to meet, to check elsewhere before it is sent here.
    pub fn limits(&self) -> AdmissionLimits {
        self.limits
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
        let id = SeqId { arrival: self.next_id, choice: 0 };
        self.next_id += 1;
        let final_len = self.limits.final_len(request.prompt.len(), &request.params);
        self.requests.insert(request.id, id);
        self.waiting.push_back(id);
        self.sequences.insert(id, Sequence::new(id, request, final_len, self.groups.len()));
        Ok(id)
    }

    /// Ends a request and sends its blocks home at once. `false` if it has ended already, or never was.
    ///
    /// It may come between `schedule` and `commit`. There is no output for the request after it.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let Some(&seq) = self.requests.get(&id) else { return false };
        if let Ok(index) = self.running.binary_search(&seq) {
            self.running.remove(index);
        } else if let Ok(index) = self.waiting.binary_search(&seq) {
            self.waiting.remove(index);
        }
        self.end(seq, FinishReason::Abort);
        true
    }

    /// Plans the next step and takes the blocks that it writes to. The plan is empty only if there is no work.
    ///
    /// Each plan is committed before the next one is made; a plan that was not is made again.
    pub fn schedule(&mut self, now: Micros) -> StepPlan {
        let mut budget = self.config.max_num_batched_tokens;
        let mut plan = StepPlan { spans: Vec::with_capacity(self.running.len()), ..Default::default() };
        for id in &self.running {
            if budget == 0 {
                break;
            }
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            let span = sequence.next_span(&mut self.groups, budget);
            budget -= span.len;
            plan.spans.push(span);
        }
        while budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(span) = self.admit_next(now, budget) else { break };
            budget -= span.len;
            plan.spans.push(span);
        }
        self.totals.steps += u64::from(!plan.spans.is_empty());
        self.totals.tokens_scheduled += (self.config.max_num_batched_tokens - budget) as u64;
        plan
    }

    /// Takes in what came of a plan: appends the sampled tokens, ends what is to end, sends blocks home.
    ///
    /// `runs` has one entry for each span that samples, in the order of the plan, also for those whose request has been
    /// aborted since, which are passed over. The outputs are in the same order.
    ///
    /// # Panics
    /// If `runs` does not match the plan, or the plan has been committed before.
    pub fn commit(&mut self, plan: &StepPlan, runs: &[StepRun]) -> Vec<StepOutput> {
        let num_samples = plan.spans.iter().filter(|span| span.samples).count();
        assert_eq!(runs.len(), num_samples, "one run is expected for each span that samples");
        let mut runs = runs.iter();
        let mut outputs = Vec::with_capacity(num_samples);
        let num_before = self.sequences.len();
        for span in &plan.spans {
            let run = if span.samples { runs.next() } else { None };
            let Some(sequence) = self.sequences.get_mut(&span.seq) else { continue };
            assert_eq!(span.start, sequence.computed(), "the plan is not the last one made");
            let output = run.map(|run| take_run(sequence, span, run, &self.config.eos_token_ids));
            match output.as_ref().and_then(|output| output.finish) {
                Some(reason) => self.end(span.seq, reason),
                None => {
                    if run.is_none() {
                        sequence.advance(span.end());
                    }
                    sequence.settle(&mut self.groups);
                }
            }
            outputs.extend(output);
        }
        if self.sequences.len() < num_before {
            self.running.retain(|id| self.sequences.contains_key(id));
        }
        outputs
    }

    /// Forgets what the prefix cache holds and gives the number of blocks whose content could have been found.
    pub fn reset_prefix_cache(&mut self) -> usize {
        0
    }

    /// The state of every block, group by group.
    pub fn block_map(&self) -> Vec<Vec<BlockState>> {
        Vec::new()
    }

    /// A sequence that has not ended.
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// Whether any request has not ended.
    pub fn has_work(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Counts as they are now. O(running).
    pub fn stats(&self) -> SchedulerStats {
        let sum = |count: fn(&Group) -> usize| self.groups.iter().map(count).sum::<usize>();
        let running = self.running.iter().filter_map(|id| self.sequences.get(id));
        let blocks_total = sum(|group| group.pool().num_blocks());
        let blocks_free = sum(|group| group.pool().num_free());
        SchedulerStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            blocks_total,
            blocks_free,
            blocks_promised: sum(Group::promised),
            slots_allocated: (blocks_total - blocks_free) * self.config.block_size,
            slots_used: running.map(|sequence| sequence.slots_used(self.config.block_size)).sum(),
            ..self.totals
        }
    }

    /// Verifies every invariant of pools, promises and queues. O(blocks + sequences), for tests.
    ///
    /// # Errors
    /// A sentence about the first contradiction found.
    pub fn audit(&self) -> Result<(), String> {
        for (index, group) in self.groups.iter().enumerate() {
            let tables = self.sequences.values().map(|sequence| &sequence.tables()[index]);
            group.pool().check(tables).map_err(|error| format!("group {index}: {error}"))?;
            let promised: usize = self.sequences.values().map(|sequence| sequence.promises()[index]).sum();
            if promised != group.promised() || promised > group.pool().num_free() {
                let (counted, free) = (group.promised(), group.pool().num_free());
                return Err(format!("group {index}: {promised} promised, {counted} counted, {free} free"));
            }
        }
        let queued: Vec<_> = self.running.iter().chain(&self.waiting).collect();
        if !queued.iter().copied().eq(self.sequences.keys()) || self.requests.len() != queued.len() {
            return Err(format!("{queued:?} are not the sequences, sorted by arrival"));
        }
        Ok(())
    }

    /// Admits the first waiting request, if all blocks it could come to need can be promised, and gives its first span.
    fn admit_next(&mut self, now: Micros, budget: usize) -> Option<SeqSpan> {
        let sequence = self.sequences.get_mut(self.waiting.front()?)?;
        if !sequence.admit(&mut self.groups) {
            return None;
        }
        self.totals.admitted += 1;
        self.totals.queue_time += now.saturating_sub(sequence.arrival());
        let span = sequence.next_span(&mut self.groups, budget);
        self.running.extend(self.waiting.pop_front());
        Some(span)
    }

    /// Forgets a sequence and sends its blocks home; the caller takes it out of its queue.
    fn end(&mut self, id: SeqId, reason: FinishReason) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            sequence.release(&mut self.groups);
            self.requests.remove(&sequence.request());
            self.totals.finished.count(reason);
        }
    }
}

/// Moves a sequence on by what was sampled. Right drafts have been computed in the same span; wrong ones have not.
fn take_run(sequence: &mut Sequence, span: &SeqSpan, run: &StepRun, eos_token_ids: &[TokenId]) -> StepOutput {
    let StepRun::Tokens(sampled) = run else {
        let (request, seq) = (sequence.request(), sequence.id());
        return StepOutput {
            request,
            seq,
            tokens: vec![],
            finish: Some(FinishReason::Error),
            stop_token: None,
            last: true,
        };
    };
    let expected = 1..=span.drafts + 1;
    assert!(expected.contains(&sampled.len()), "{} tokens sampled, expected {expected:?}", sampled.len());
    sequence.advance(span.end() - span.drafts + sampled.len() - 1);
    sequence.append(sampled, eos_token_ids)
}
