//! The CPU backend with something around its steps.

use octavo_backend::{
    Backend, BackendError, DecoderSpec, Footprint, Numerics, StepInputs, StepLimits, StepResult, WeightSource,
};
use octavo_cpu::{CpuBackend, CpuPlan};

/// A CPU backend that hands each step to a function, which runs it and may look at it or change it.
pub struct Around<F> {
    /// What runs the steps.
    pub backend: CpuBackend,
    /// Gets the backend, its plan and the inputs of a step.
    pub step: F,
}

impl<F> Backend for Around<F>
where
    F: FnMut(&mut CpuBackend, &mut CpuPlan, &StepInputs) -> Result<StepResult, BackendError> + Send + 'static,
{
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
        (self.step)(&mut self.backend, plan, inputs)
    }

    fn numerics(&self) -> Numerics {
        self.backend.numerics()
    }

    fn footprint(&self, spec: &DecoderSpec, limits: &StepLimits) -> Footprint {
        self.backend.footprint(spec, limits)
    }
}
