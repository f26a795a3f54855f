//! A scheduler beside a plain account of what it should be doing, and a memory in which its plans are carried out.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;

use octavo_sched::{
    FinishCounts, FinishReason, PrefixCaching, Rejected, Request, RequestId, SamplingParams, Scheduler,
    SchedulerConfig, SchedulerStats, SeqId, SeqSpan, Sequence, StepOutput, StepPlan, StepRun,
};

use crate::account::Live;
use crate::history::{Histories, History};
use crate::memory::Memory;
use crate::model;
use crate::operation::{NewRequest, Operation};
use crate::room::Room;
use crate::search::Found;

#[derive(Debug)]
pub struct Checked {
    pub(crate) config: SchedulerConfig,
    pub(crate) room: Room,
    pub(crate) scheduler: Scheduler,
    /// The same but for its hashes, which all collide.
    pub(crate) twin: Option<Scheduler>,
    /// By arrival.
    pub(crate) live: BTreeMap<u64, Live>,
    pub(crate) histories: Histories,
    pub(crate) memory: Memory,
    /// Counts the resets of the prefix cache.
    pub(crate) age: u32,
    /// For each layer group what the blocks that can be found hold, each up to its last token.
    pub(crate) cached: Vec<HashSet<History>>,
    /// All that could ever be found.
    pub(crate) known: HashSet<History>,
    /// The spans of a plan that is not committed.
    pub(crate) planned: BTreeMap<SeqId, SeqSpan>,
    /// What has been counted since the beginning; the rest is left at 0.
    pub(crate) totals: SchedulerStats,
    pub(crate) now: u64,
    pub visits: Visits,
}

/// How often that happened which does not happen by itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Visits {
    pub preempted: u64,
    /// Preempted requests of several continuations.
    pub preempted_families: u64,
    /// Requests that found some of their tokens when they were admitted.
    pub hits: u64,
    /// Those among them that had been preempted.
    pub resumed_hits: u64,
    pub copies: u64,
    pub forks: u64,
    /// Sequences that waited for the first of their request, and parted from it.
    pub joins: u64,
    /// Blocks that a reset forgot.
    pub forgotten: u64,
    /// Continuations that ended alone, before they were done.
    pub ended_choices: u64,
    pub expired: u64,
    /// Searches that ended with outputs.
    pub searches: u64,
    /// Searches of several beams that were preempted.
    pub preempted_searches: u64,
    /// Beams from which nothing came, or more than one.
    pub beams_parted: u64,
}

impl Visits {
    pub fn all(&self) -> [u64; 13] {
        let Self { preempted, preempted_families, hits, resumed_hits, copies, forks, joins, forgotten, .. } = *self;
        let Self { ended_choices, expired, searches, preempted_searches, beams_parted, .. } = *self;
        let few = [preempted, preempted_families, hits, resumed_hits, copies, forks, joins, forgotten];
        let [a, b, c, d, e, f, g, h] = few;
        [a, b, c, d, e, f, g, h, ended_choices, expired, searches, preempted_searches, beams_parted]
    }
}

impl Checked {
    /// Begins after `num_ended` outputs of one token. The more, the shorter the outputs that the scheduler expects, and the
    /// less room it keeps: without any it hardly ever has to preempt in pools so small.
    pub fn new(config: SchedulerConfig, num_ended: usize) -> Self {
        let mut checked = Self::without_past(config);
        for _ in 0..num_ended {
            checked.both(run_one_token);
        }
        checked.totals = SchedulerStats { blocks_total: 0, blocks_free: 0, ..checked.scheduler.stats() };
        checked
    }

    fn without_past(config: SchedulerConfig) -> Self {
        let colliding = SchedulerConfig { prefix_cache: PrefixCaching::Colliding, ..config.clone() };
        Self {
            room: Room::new(&config),
            scheduler: Scheduler::new(config.clone()),
            twin: (config.prefix_cache == PrefixCaching::On).then(|| Scheduler::new(colliding)),
            live: BTreeMap::new(),
            histories: Histories::default(),
            memory: Memory::new(&config),
            age: 0,
            cached: vec![HashSet::new(); config.groups.len()],
            known: HashSet::new(),
            planned: BTreeMap::new(),
            totals: SchedulerStats::default(),
            now: 0,
            visits: Visits::default(),
            config,
        }
    }

    /// Requests that have not ended.
    pub fn num_live(&self) -> usize {
        self.live.len()
    }

    pub fn apply(&mut self, operation: &Operation) {
        self.now += 1;
        match operation {
            Operation::Add(new) => self.add(new),
            Operation::Step => self.step(None, None),
            Operation::StepFailing(index) => self.step(Some(*index), None),
            Operation::StepAround(between) => self.step(None, Some(between)),
            Operation::Abort(index) => self.abort(*index),
            Operation::EndChoice(index) => self.end_choice(*index),
            Operation::Expire => self.expire(),
            Operation::Fork(index) => self.fork(*index),
            Operation::ResetPrefixCache => self.reset(),
        }
        self.check_state();
    }

    /// Steps until every request has ended. While the earliest waits, each of the running ones becomes the first in turn
    /// and goes on until it ends; then the earliest does.
    pub fn drain(&mut self) {
        let tokens: usize = self.live.values().map(|live| live.num_seats() * live.final_len).sum();
        for _ in 0..self.live.len() * tokens {
            if self.live.is_empty() {
                break;
            }
            self.apply(&Operation::Step);
        }
        assert!(self.live.is_empty() && !self.scheduler.has_work(), "every admitted request ends");
        let stats = self.scheduler.stats();
        assert_eq!((stats.blocks_free, stats.blocks_promised), (stats.blocks_total, 0), "all blocks come home");
    }

    /// Does the same to the scheduler and to its twin.
    pub(crate) fn both<T: PartialEq + Debug>(&mut self, act: impl Fn(&mut Scheduler) -> T) -> T {
        let result = act(&mut self.scheduler);
        if let Some(twin) = &mut self.twin {
            assert_eq!(act(twin), result, "hashes make no difference");
        }
        result
    }

    fn add(&mut self, new: &NewRequest) {
        // An id is used again as soon as its request has ended.
        let is_free = |id: &RequestId| self.live.values().all(|live| live.request.id != *id);
        let id = (0..).map(RequestId).find(is_free).expect("there are fewer requests than ids");
        let request = model::request(id, new, self.now);
        let n = new.n as usize;
        let limit = self.room.limit(request.prompt.len(), n);
        let wanted = new.max_tokens.map_or(0, |tokens| request.prompt.len() + tokens).min(self.config.max_model_len);
        let is_divided = n > 1 && wanted > limit;
        let result = self.both(|scheduler| scheduler.add(request.clone()));
        match result {
            Ok(id) => {
                assert!((1..limit).contains(&request.prompt.len()) && n <= self.config.max_num_seqs && !is_divided);
                let final_len = new.max_tokens.map_or(limit, |tokens| limit.min(request.prompt.len() + tokens));
                assert!(self.live.keys().all(|&arrival| arrival < id.arrival) && id.choice == 0);
                self.live.insert(id.arrival, Live::new(request, final_len));
            }
            Err(Rejected::EmptyPrompt) => assert!(request.prompt.is_empty()),
            Err(Rejected::TooManyContinuations { .. }) => assert!(n > self.config.max_num_seqs),
            Err(Rejected::BeamTooWide { .. }) => {
                assert!(new.penalty.is_some() && n > self.config.max_num_batched_tokens);
            }
            Err(Rejected::PromptTooLong { limit: found, .. }) => {
                assert!(found == limit && request.prompt.len() >= limit);
            }
            Err(Rejected::TooLongTogether { tokens, limit: found, .. }) => {
                assert!(is_divided && tokens == wanted && found == limit);
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn fork(&mut self, index: usize) {
        let ids = |(&arrival, live): (&u64, &Live)| {
            let choices: Vec<_> = live.continuations.keys().copied().collect();
            choices.into_iter().map(move |choice| SeqId { arrival, choice })
        };
        let (running, waiting): (Vec<_>, Vec<_>) = self.live.iter().partition(|(_, live)| live.runs);
        let ids: Vec<_> = running.into_iter().chain(waiting).flat_map(ids).collect();
        let Some(&id) = ids.get(index % ids.len().max(1)) else { return };
        let taken: usize = self.live.values().filter(|live| live.runs).map(Live::num_seats).sum();
        let live = &self.live[&id.arrival];
        let parent = &live.continuations[&id.choice];
        let (prompt_len, known) = (live.request.prompt.len(), parent.tokens.len());
        let is_up_to_date = parent.computed + 1 == known && !self.has_followers(id.arrival);
        let may_part = live.runs && known > prompt_len && is_up_to_date && !live.is_search();
        let fits = self.room.holds(prompt_len, live.final_len, live.continuations.len() + 1);
        let child = self.both(|scheduler| scheduler.fork(id));
        assert_eq!(child.is_some(), may_part && fits && taken < self.config.max_num_seqs);
        let Some(child) = child else { return };
        let live = self.live.get_mut(&id.arrival).expect("it is its request");
        assert!(child.arrival == id.arrival && child.choice >= live.num_choices, "{child:?} is used again");
        self.visits.forks += 1;
        live.num_choices = child.choice + 1;
        live.continuations.insert(child.choice, live.continuations[&id.choice].clone());
    }

    fn reset(&mut self) {
        let found: usize = self.cached.iter().map(HashSet::len).sum();
        assert_eq!(self.both(Scheduler::reset_prefix_cache), found);
        self.age += 1;
        self.visits.forgotten += found as u64;
        let block_size = self.config.block_size;
        for (&arrival, live) in self.live.iter_mut().filter(|(_, live)| live.runs) {
            // Where there is no full block to share, one of several may not have begun.
            let shares = live.request.prompt.len() >= block_size;
            let has_begun = |choice: u32| self.scheduler.sequence(SeqId { arrival, choice }).is_some_and(has_blocks);
            // What the first begins with is what those begin with that wait for it.
            let first = *live.continuations.keys().next().expect("it has not ended");
            let begins = |&choice: &u32| !has_begun(if shares { first } else { choice });
            live.enter_age(self.age, &mut self.histories, begins);
        }
    }

    /// Whether some of a running request have no blocks until the first has computed the full blocks of the prompt.
    pub fn has_followers(&self, arrival: u64) -> bool {
        let live = &self.live[&arrival];
        let is_empty = |&choice: &u32| !has_blocks(self.sequence(SeqId { arrival, choice }));
        live.request.prompt.len() >= self.config.block_size && live.continuations.keys().any(is_empty)
    }

    fn step(&mut self, failing: Option<usize>, between: Option<&Operation>) {
        let (now, has_room) = (self.now, self.has_room_to_go_on());
        let plan = self.both(|scheduler| scheduler.schedule(now));
        assert!(!has_room || plan.preempted.is_empty(), "there was room: {plan:?}");
        self.check_plan(&plan);
        self.execute(&plan);
        self.check_state();
        let runs = self.sample(&plan, failing);
        if let Some(between) = between {
            self.apply(between);
        }
        let expected = self.take_runs(&plan, &runs);
        assert_eq!(self.both(|scheduler| scheduler.commit(&plan, &runs)), expected);
        self.planned.clear();
        self.memory.forget_unfilled(&self.scheduler.block_map());
    }

    fn sample(&self, plan: &StepPlan, failing: Option<usize>) -> Vec<StepRun> {
        let draw = |span: &SeqSpan| self.live[&span.seq.arrival].draw(span);
        let mut runs: Vec<_> = plan.spans.iter().flat_map(draw).collect();
        if let Some(index) = failing.filter(|_| !runs.is_empty()) {
            let index = index % runs.len();
            runs[index] = StepRun::Failed;
        }
        runs
    }

    /// The outputs to expect. Each continuation finishes once, and with the last one the request has ended.
    fn take_runs(&mut self, plan: &StepPlan, mut runs: &[StepRun]) -> Vec<StepOutput> {
        let (mut outputs, mut searched) = (vec![], BTreeMap::<u64, Vec<(u32, &StepRun)>>::new());
        for span in &plan.spans {
            let (own, others) = runs.split_at(span.samples);
            runs = others;
            if let Some(live) = self.live.get_mut(&span.seq.arrival) {
                outputs.extend(live.take(span, own, &mut self.histories));
                if live.is_search() && span.samples > 0 {
                    searched.entry(span.seq.arrival).or_default().push((span.seq.choice, &own[0]));
                }
            }
        }
        for output in outputs.iter_mut() {
            let Some(reason) = output.finish else { continue };
            let finished = &mut self.totals.finished;
            count(finished, reason);
            let live = self.live.get_mut(&output.seq.arrival).expect("it has not ended");
            live.continuations.remove(&output.seq.choice);
            if live.continuations.is_empty() {
                output.last = true;
                self.end(output.seq.arrival);
            }
        }
        outputs.extend(searched.into_iter().flat_map(|(arrival, runs)| self.advance_search(arrival, &runs)));
        outputs.sort_by_key(|output| output.seq.arrival);
        outputs
    }

    fn advance_search(&mut self, arrival: u64, runs: &[(u32, &StepRun)]) -> Vec<StepOutput> {
        let live = self.live.get_mut(&arrival).expect("it has not ended");
        let before: Vec<_> = live.continuations.keys().copied().collect();
        let Some(found) = live.advance(runs, &mut self.histories) else {
            self.visits.beams_parted += u64::from(!before.iter().eq(live.continuations.keys()));
            return vec![];
        };
        let request = live.request.id;
        let output = |choice, found: Option<Found>| StepOutput {
            request,
            seq: SeqId { arrival, choice },
            tokens: found.as_ref().map_or(vec![], Found::tokens),
            finish: Some(found.as_ref().map_or(FinishReason::Error, |found| found.finish)),
            stop_token: found.as_ref().filter(|found| found.finish == FinishReason::Stop).map(|found| {
                let tokens = found.tokens();
                tokens[tokens.len() - 1]
            }),
            last: false,
            hypothesis: found.map(|found| found.hypothesis),
        };
        self.visits.searches += u64::from(!found.is_empty());
        let mut outputs: Vec<_> = (0..).zip(found).map(|(choice, found)| output(choice, Some(found))).collect();
        if outputs.is_empty() {
            outputs.push(output(0, None));
        }
        let len = outputs.len();
        outputs[len - 1].last = true;
        outputs.iter().filter_map(|output| output.finish).for_each(|reason| count(&mut self.totals.finished, reason));
        self.end(arrival);
        outputs
    }

    /// Forgets a request.
    pub(crate) fn end(&mut self, arrival: u64) -> Live {
        let ended = self.live.remove(&arrival).expect("it has not ended");
        for earlier in self.live.range_mut(..arrival).map(|(_, live)| live) {
            earlier.most_later = earlier.most_later.max(ended.iterations);
        }
        ended
    }
}

fn count(finished: &mut FinishCounts, reason: FinishReason) {
    *match reason {
        FinishReason::Stop => &mut finished.stop,
        FinishReason::Length => &mut finished.length,
        FinishReason::Abort => &mut finished.abort,
        FinishReason::Deadline => &mut finished.deadline,
        FinishReason::Error => &mut finished.error,
    } += 1;
}

pub(crate) fn has_blocks(sequence: &Sequence) -> bool {
    !sequence.tables()[0].blocks().is_empty()
}

/// A request that fills no block, from beginning to end.
fn run_one_token(scheduler: &mut Scheduler) {
    let params = SamplingParams { max_tokens: Some(1), skip_reading_prefix_cache: true, ..Default::default() };
    let request = Request { id: RequestId(0), prompt: vec![1], params, arrival: 0, deadline: None };
    scheduler.add(request).expect("it fits into any pool");
    let plan = scheduler.schedule(0);
    let outputs = scheduler.commit(&plan, &[StepRun::Tokens(vec![1])]);
    assert!(outputs[0].last && !scheduler.has_work());
}
