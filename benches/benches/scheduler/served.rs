//! The engine on SmolLM2, serving a workload.

use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_backend::{Backend, BackendError, StepInputs, StepResult};
use octavo_benches::{around::Around, smollm2};
use octavo_cpu::{CpuBackend, CpuOptions, CpuPlan};
use octavo_engine::{Engine, EngineConfig};
use octavo_sched::SchedulerStats;

use crate::usage::Usage;
use crate::workload::Workload;

/// Runs a step, except that a draw which completes an output gives the token that ends it. So the engine learns of an end as
/// it does with a real end-of-sequence token: when it is there.
fn end_as_known(
    workload: &Workload,
    backend: &mut CpuBackend,
    plan: &mut CpuPlan,
    inputs: &StepInputs,
) -> Result<StepResult, BackendError> {
    let mut result = backend.run(plan, inputs)?;
    for (sample, sampled) in inputs.samples.iter().zip(&mut result.sampled) {
        if let Ok(sampled) = sampled {
            // The seed of each request is its place in the workload.
            let (index, choice) = (sample.seed as usize, sample.choice as usize);
            if let Some(logprobs) = sampled.logprobs.as_mut().filter(|_| workload.beams.is_some()) {
                logprobs.top = workload.following(index, sample.position as usize, &logprobs.top);
                continue;
            }
            sampled.token = workload.token(index, choice, sample.position as usize, sampled.token);
        }
    }
    Ok(result)
}

/// Such a step.
type KnownEnds = Box<dyn FnMut(&mut CpuBackend, &mut CpuPlan, &StepInputs) -> Result<StepResult, BackendError> + Send>;

/// An engine that is served a workload.
pub struct Served {
    engine: Engine<Around<KnownEnds>>,
}

impl Served {
    /// Loads the model and puts all requests into the queue.
    pub fn new(workload: Workload, config: EngineConfig) -> Served {
        let mut checkpoint = smollm2::open();
        let spec = checkpoint.config().spec.clone();
        let workload = Arc::new(workload);
        let backend = CpuBackend::new(CpuOptions::default()).expect("a CPU backend");
        let known = Arc::clone(&workload);
        let step: KnownEnds = Box::new(move |backend, plan, inputs| end_as_known(&known, backend, plan, inputs));
        let mut engine =
            Engine::load(Around { backend, step }, &spec, &mut checkpoint, config).expect("the model loads");
        for index in 0..workload.jobs.len() {
            engine.add(workload.request(index)).expect("a request that fits");
        }
        Served { engine }
    }

    /// One step, and the time it took; `None` when there is nothing left to do.
    pub fn step(&mut self) -> Option<Duration> {
        if !self.engine.has_work() {
            return None;
        }
        let start = Instant::now();
        self.engine.step().expect("a step");
        Some(start.elapsed())
    }

    /// The scheduler's state.
    pub fn stats(&self) -> SchedulerStats {
        self.engine.stats().scheduler
    }

    /// Runs until `count` continuations have ended.
    pub fn finish(&mut self, count: u64) -> Usage {
        let mut usage = Usage::default();
        while usage.last().finished.total() < count && self.step().is_some() {
            usage.note(self.stats());
        }
        usage
    }
}
