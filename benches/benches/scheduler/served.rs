//! The engine on SmolLM2, serving a workload.

use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_backend::{
    Backend, BackendError, DecoderSpec, Footprint, Numerics, StepInputs, StepLimits, StepResult, WeightSource,
};
use octavo_benches::smollm2;
use octavo_cpu::{CpuBackend, CpuOptions, CpuPlan};
use octavo_engine::{Engine, EngineConfig};
use octavo_sched::SchedulerStats;

use crate::usage::Usage;
use crate::workload::Workload;

/// The CPU backend, except that a draw which completes an output gives the token that ends it. So the engine learns of
/// an end as it does with a real end-of-sequence token: when it is there.
struct Ending {
    backend: CpuBackend,
    workload: Arc<Workload>,
}

impl Backend for Ending {
    type Plan = CpuPlan;

    fn load(
        &self,
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        limits: &StepLimits,
    ) -> Result<CpuPlan, BackendError> {
        self.backend.load(spec, weights, limits)
    }

    fn run(&mut self, plan: &mut CpuPlan, inputs: &StepInputs) -> Result<StepResult, BackendError> {
        let mut result = self.backend.run(plan, inputs)?;
        for (sample, sampled) in inputs.samples.iter().zip(&mut result.sampled) {
            if let Ok(sampled) = sampled {
                // The seed of each request is its place in the workload.
                let (index, choice) = (sample.seed as usize, sample.choice as usize);
                if let Some(logprobs) = sampled.logprobs.as_mut().filter(|_| self.workload.beams.is_some()) {
                    logprobs.top = self.workload.following(index, sample.position as usize, &logprobs.top);
                    continue;
                }
                sampled.token = self.workload.token(index, choice, sample.position as usize, sampled.token);
            }
        }
        Ok(result)
    }

    fn numerics(&self) -> Numerics {
        self.backend.numerics()
    }

    fn footprint(&self, spec: &DecoderSpec, limits: &StepLimits) -> Footprint {
        self.backend.footprint(spec, limits)
    }
}

/// An engine that is served a workload.
pub struct Served {
    engine: Engine<Ending>,
}

impl Served {
    /// Loads the model and puts all requests into the queue.
    pub fn new(workload: Workload, config: EngineConfig) -> Served {
        let mut checkpoint = smollm2::open();
        let spec = checkpoint.config().spec.clone();
        let workload = Arc::new(workload);
        let backend = CpuBackend::new(CpuOptions::default()).expect("a CPU backend");
        let backend = Ending { backend, workload: Arc::clone(&workload) };
        let mut engine = Engine::load(backend, &spec, &mut checkpoint, config).expect("the model loads");
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
