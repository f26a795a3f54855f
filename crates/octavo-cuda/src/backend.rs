//! The backend: one GPU, its kernels and its library of products.

use std::sync::Arc;

use octavo_backend::{
    Backend, BackendError, DecoderSpec, Footprint, InputRounding, KvType, Numerics, StepInputs, StepLimits, StepResult,
    Sums, WeightRounding, WeightSource,
};

use crate::{
    cublaslt::CublasLt,
    device::Device,
    error::CudaError,
    kernels::Kernels,
    plan::CudaPlan,
    probe::{CudaOptions, DeviceInfo},
    products::Products,
    sampler::Sampler,
};

/// Runs decoders on one NVIDIA GPU. Clones share it.
#[derive(Clone)]
pub struct CudaBackend {
    shared: Arc<Shared>,
}

/// What all plans of a GPU share.
pub(crate) struct Shared {
    pub kernels: Kernels,
    pub products: Products,
    pub sampler: Sampler,
    pub device: Arc<Device>,
}

impl CudaBackend {
    /// Takes hold of a GPU and loads the kernels.
    ///
    /// # Errors
    /// The first thing that is missing, as [`crate::probe`] says; the driver's.
    pub fn new(options: &CudaOptions) -> Result<CudaBackend, CudaError> {
        let device = Device::open(options)?;
        let cublaslt = CublasLt::new(&device, &options.library_folders)?;
        let shared = Shared {
            kernels: Kernels::new(&device)?,
            products: Products::new(&device, cublaslt)?,
            sampler: Sampler::new(&device)?,
            device,
        };
        Ok(CudaBackend { shared: Arc::new(shared) })
    }

    /// The GPU.
    pub fn info(&self) -> &DeviceInfo {
        self.shared.device.info()
    }
}

impl Backend for CudaBackend {
    type Plan = CudaPlan;

    fn load(
        &self,
        spec: &DecoderSpec,
        weights: &mut dyn WeightSource,
        limits: &StepLimits,
    ) -> Result<CudaPlan, BackendError> {
        CudaPlan::load(&self.shared.device, &self.shared.kernels, spec, weights, limits)
    }

    fn run(&mut self, plan: &mut CudaPlan, inputs: &StepInputs) -> Result<StepResult, BackendError> {
        self.shared.run(plan, inputs)
    }

    fn numerics(&self) -> Numerics {
        Numerics {
            quantized_input: InputRounding::Bf16,
            bf16_input: InputRounding::Bf16,
            kv: KvType::Bf16,
            weights: WeightRounding::Bf16,
            sums: Sums::Free,
        }
    }

    fn footprint(&self, spec: &DecoderSpec, limits: &StepLimits) -> Footprint {
        CudaPlan::footprint(spec, limits)
    }
}
