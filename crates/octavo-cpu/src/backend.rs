//! The backend: a pool of workers and the kernels of one instruction set.

use octavo_backend::{
    Activation, Backend, BackendError, DecoderSpec, Footprint, KvType, Numerics, StepInputs, StepLimits, StepResult, Sums,
    WeightRounding, WeightSource,
};

use crate::{
    attention::AttentionKernels,
    forward::{Kernels, Step},
    heads::HeadKernels,
    host,
    isa::Isa,
    matmul::Matmul,
    options::{ActivationType, CpuOptions, Projections},
    plan::{CpuPlan, Machine},
    pointwise::GateKernel,
    pool::Pool,
    sampler::Sampler,
};

/// Runs decoders on the host's CPUs.
///
/// The thread that calls [`Backend::run`] is one of its workers; the others sleep when there is no work.
pub struct CpuBackend {
    pool: Pool,
    isa: Isa,
    options: CpuOptions,
    kernels: Kernels,
}

impl CpuBackend {
    /// Starts the workers.
    ///
    /// # Errors
    /// An instruction set that this machine lacks, no threads at all, or one that the system refuses to start.
    pub fn new(options: CpuOptions) -> Result<CpuBackend, BackendError> {
        let isa = options.isa.unwrap_or_else(Isa::detect);
        if !isa.is_supported() {
            let supported: Vec<String> = Isa::supported().iter().map(Isa::to_string).collect();
            return Err(BackendError::Unsupported {
                what: "instruction set",
                found: isa.to_string(),
                expected: format!("one of {}", supported.join(", ")),
            });
        }
        if options.threads == Some(0) {
            return Err(BackendError::Unsupported {
                what: "threads",
                found: "0".to_owned(),
                expected: "at least 1".to_owned(),
            });
        }
        if options.activations == ActivationType::Bf16 && !options.int16_activations.is_empty() {
            return Err(BackendError::Unsupported {
                what: "projections with 16-bit activations",
                found: "some beside bfloat16 activations".to_owned(),
                expected: "none, or the others in 8 bits".to_owned(),
            });
        }
        if options.kv == KvType::F32 {
            return Err(BackendError::Unsupported {
                what: "elements of the KV cache",
                found: "32-bit floats".to_owned(),
                expected: "bfloat16 or 8 bits".to_owned(),
            });
        }
        let pool = match options.threads {
            Some(threads) => Pool::new(threads)?,
            None => Pool::within(host::available_threads().count, &host::cpus_of_one_node())?,
        };
        let kernels = Kernels {
            matmul: Matmul::new(isa),
            attention: AttentionKernels::new(isa),
            heads: HeadKernels::new(isa),
            silu: GateKernel::new(isa, Activation::Silu),
            sampler: Sampler::new(isa),
        };
        Ok(CpuBackend { pool, isa, options, kernels })
    }

    /// Workers, the calling thread included.
    pub fn threads(&self) -> usize {
        self.pool.count()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    fn machine(&self) -> Machine {
        Machine { isa: self.isa, workers: self.pool.count(), options: self.options }
    }
}

impl Backend for CpuBackend {
    type Plan = CpuPlan;

    fn load(
        &self,
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        limits: &StepLimits,
    ) -> Result<CpuPlan, BackendError> {
        self.pool.beside(|| CpuPlan::load(spec, weights, limits, self.machine()))
    }

    fn run(&mut self, plan: &mut CpuPlan, inputs: &StepInputs) -> Result<StepResult, BackendError> {
        plan.prepare(inputs, self.pool.count())?;
        Step::run(plan, inputs, &self.kernels, &mut self.pool)
    }

    fn numerics(&self) -> Numerics {
        let coarsest = match self.options.int16_activations {
            Projections::ALL => ActivationType::Int16,
            _ => self.options.activations,
        };
        Numerics {
            quantized_input: coarsest.quantized_input(),
            bf16_input: coarsest.bf16_input(),
            kv: self.options.kv,
            weights: WeightRounding::None,
            sums: Sums::Fixed,
        }
    }

    /// The KV cache is exact; work memory is an upper bound, since only the checkpoint's formats decide which roundings
    /// of the matmuls' inputs are needed.
    fn footprint(&self, spec: &DecoderSpec, limits: &StepLimits) -> Footprint {
        CpuPlan::footprint(spec, limits, self.machine())
    }
}
