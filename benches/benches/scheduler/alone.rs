//! The scheduler without a model: what would be sampled is made up.

use std::hint::black_box;
use std::time::{Duration, Instant};

use octavo_benches::lengths::Random;
use octavo_sched::{Candidate, Scheduler, SchedulerConfig, SchedulerStats, StepPlan, StepRun, TokenId};

use crate::table::Table;
use crate::usage::Usage;
use crate::workload::Workload;

/// A scheduler that is served a workload.
pub struct Alone<'a> {
    workload: &'a Workload,
    scheduler: Scheduler,
    random: Random,
    /// For searches.
    table: Option<Table>,
}

/// Time spent in the scheduler.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    /// Making plans.
    pub schedule: Duration,
    /// Taking in what came of them.
    pub commit: Duration,
}

impl<'a> Alone<'a> {
    /// With all requests in the queue, and the time that it took to put them there.
    pub fn new(workload: &'a Workload, config: SchedulerConfig) -> (Alone<'a>, Duration) {
        let requests: Vec<_> = (0..workload.jobs.len()).map(|index| workload.request(index)).collect();
        let mut scheduler = Scheduler::new(config);
        let start = Instant::now();
        for request in requests {
            scheduler.add(request).expect("a request that fits");
        }
        let spent = start.elapsed();
        let table = workload.beams.map(|beams| Table::new(2 * beams.width as usize, beams.deviation));
        (Alone { workload, scheduler, random: Random::new(3), table }, spent)
    }

    /// One step; `None` when there is nothing left to do.
    pub fn step(&mut self) -> Option<Spent> {
        if !self.scheduler.has_work() {
            return None;
        }
        let start = Instant::now();
        let plan = self.scheduler.schedule(0);
        let schedule = start.elapsed();
        let runs = self.runs(&plan);
        let start = Instant::now();
        let outputs = self.scheduler.commit(&plan, &runs);
        let commit = start.elapsed();
        black_box(outputs);
        Some(Spent { schedule, commit })
    }

    /// Runs to the end; looks at the scheduler after every `interval` steps.
    pub fn finish(&mut self, interval: usize) -> (Spent, Usage) {
        let (mut total, mut usage, mut steps) = (Spent::default(), Usage::default(), 0);
        while let Some(spent) = self.step() {
            total.schedule += spent.schedule;
            total.commit += spent.commit;
            steps += 1;
            if steps % interval == 0 || !self.scheduler.has_work() {
                usage.note(self.scheduler.stats());
            }
        }
        (total, usage)
    }

    /// Its state.
    pub fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    fn runs(&mut self, plan: &StepPlan) -> Vec<StepRun> {
        let mut runs = Vec::with_capacity(plan.spans.len());
        for span in plan.spans.iter().filter(|span| span.samples > 0) {
            let sequence = self.scheduler.sequence(span.seq).expect("a sequence of the plan");
            let (index, choice) = (sequence.request().0 as usize, span.seq.choice as usize);
            if let Some(table) = &self.table {
                let following = self.workload.following(index, span.end(), table.after(sequence.tokens()));
                let candidate = |(rank, (token, logprob))| Candidate { token, logprob, rank };
                runs.push(StepRun::Candidates((1..).zip(following).map(candidate).collect()));
                continue;
            }
            for choice in choice..choice + span.samples {
                let drawn = self.random.below(49_000) as TokenId;
                runs.push(StepRun::Tokens(vec![self.workload.token(index, choice, span.end(), drawn)]));
            }
        }
        runs
    }
}
