//! From a checkpoint to a running engine, on the device that was asked for.

use std::path::{Path, PathBuf};

use octavo_backend::{
    Backend, BackendError, DecoderSpec, KvType, Reference, WeightFormat, WeightGroup, WeightId, WeightShape,
    WeightSource,
};
use octavo_cpu::{ActivationType, CpuBackend, CpuOptions, Projections, host};
use octavo_cuda::{CudaBackend, CudaError, CudaOptions};
use octavo_engine::{Engine, EngineConfig, EngineHandle, PrefixCaching};
use octavo_model::{Checkpoint, MemoryPlan, MemoryRequest, ModelError, memory_plan};

/// Where to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The host's CPUs.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
    /// The plain `f32` specification.
    Reference,
}

/// Sizes and limits, as the caller gave them.
#[derive(Debug, Clone, pyo3::FromPyObject)]
#[pyo3(from_item_all)]
pub struct Options {
    pub threads: Option<usize>,
    pub seed: u64,
    pub block_size: usize,
    pub max_model_len: Option<usize>,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub kv_cache_memory_bytes: Option<usize>,
    pub num_kv_blocks: Option<usize>,
    /// `auto`, `bfloat16` or `int8`.
    pub kv_cache_dtype: String,
    /// `auto` or `bfloat16`.
    pub dtype: String,
    /// Some of [`Projections::NAMES`].
    pub int16_activations: Vec<String>,
    /// Folders that may hold the libraries of CUDA.
    pub cuda_library_folders: Vec<PathBuf>,
    pub enable_prefix_caching: bool,
}

/// A running engine and what it took.
pub struct Started {
    pub handle: EngineHandle,
    pub memory: MemoryPlan,
    pub cost: TokenCost,
    /// Threads of the host that compute.
    pub threads: usize,
}

/// What one token costs, for comparison with what a machine can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCost {
    /// Bytes of weights, as stored, that a decoded token reads.
    pub bytes: usize,
    /// Weights of the layers' matrices: each is multiplied once for every token.
    pub layer_weights: usize,
    /// Format of the widest of these matrices in the first layer.
    pub layer_format: WeightFormat,
}

impl TokenCost {
    fn of(checkpoint: &mut Checkpoint) -> Result<TokenCost, BackendError> {
        let (spec, weight_bytes) = (checkpoint.config().spec.clone(), checkpoint.weight_bytes());
        let looked_up = match checkpoint.weight(WeightId::Embedding)? {
            // A single row is read, unless the table is the head too.
            WeightGroup::Matrices(parts) if !spec.head.tied => parts.iter().map(|part| part.data.bytes.len()).sum(),
            _ => 0,
        };
        let layer_format = match checkpoint.weight(WeightId::GateUp(0))? {
            WeightGroup::Matrices(parts) => parts.first().map_or(WeightFormat::F32, |part| part.data.format),
            WeightGroup::Vector(_) => WeightFormat::F32,
        };
        Ok(TokenCost { bytes: weight_bytes - looked_up, layer_weights: layer_weights(&spec), layer_format })
    }
}

fn layer_weights(spec: &DecoderSpec) -> usize {
    let matrices = |layer| {
        [WeightId::Qkv(layer), WeightId::AttentionOutput(layer), WeightId::GateUp(layer), WeightId::Down(layer)]
    };
    let size = |id| match spec.weight_shape(id) {
        WeightShape::Matrices { parts, columns } => parts.iter().sum::<usize>() * columns,
        WeightShape::Vector(_) => 0,
    };
    (0..spec.layers.len()).flat_map(matrices).map(size).sum()
}

/// Why an engine could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The caller asks for a device that is not there.
    #[error("device: found {0:?}, expected cpu, cuda or reference: this build has no other")]
    Device(String),
    /// The GPU, or what it needs, is not there.
    #[error("device cuda: {0}")]
    Cuda(#[from] CudaError),
    /// The checkpoint, or the memory it would take.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device refused the model.
    #[error("{path}: {reason}")]
    Backend {
        /// The checkpoint.
        path: String,
        /// The backend's reason.
        reason: BackendError,
    },
    /// No thread for the engine.
    #[error("the engine's thread could not be started: {0}")]
    Thread(std::io::Error),
}

impl Device {
    /// The device called `name`.
    ///
    /// # Errors
    /// A name that this build does not know.
    pub fn named(name: &str) -> Result<Device, StartError> {
        match name {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda),
            "reference" => Ok(Device::Reference),
            _ => Err(StartError::Device(name.to_owned())),
        }
    }

    /// What callers call it.
    pub fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
            Device::Reference => "reference",
        }
    }

    /// Loads the model and puts its engine on a thread. Of its vocabulary, the first `num_tokens` can be drawn.
    ///
    /// # Errors
    /// Whatever keeps the model from running.
    pub fn start(
        self,
        path: &Path,
        checkpoint: &mut Checkpoint,
        num_tokens: Option<usize>,
        options: &Options,
    ) -> Result<Started, StartError> {
        match self {
            Device::Cpu => {
                let backend = cpu(path, options)?;
                let threads = backend.threads();
                start(
                    Placed { backend, threads, path, num_tokens, needs: needs_of_host(checkpoint) },
                    checkpoint,
                    options,
                )
            }
            Device::Cuda => {
                let backend = cuda(options)?;
                let threads = options.threads.unwrap_or_else(|| host::available_threads().count);
                let needs = needs_of_gpu(&backend, checkpoint);
                start(Placed { backend, threads, path, num_tokens, needs }, checkpoint, options)
            }
            Device::Reference => {
                let (backend, needs) = (Reference::exact(), needs_of_host(checkpoint));
                start(Placed { backend, threads: 1, path, num_tokens, needs }, checkpoint, options)
            }
        }
    }

    /// The memory that [`Device::start`] would take.
    ///
    /// # Errors
    /// Options that contradict the model or each other, or more than the memory limit.
    pub fn plan(self, path: &Path, checkpoint: &Checkpoint, options: &Options) -> Result<MemoryPlan, StartError> {
        let plan = match self {
            Device::Cpu => plan(&cpu(path, options)?, checkpoint, needs_of_host(checkpoint), options),
            Device::Cuda => {
                let backend = cuda(options)?;
                plan(&backend, checkpoint, needs_of_gpu(&backend, checkpoint), options)
            }
            Device::Reference => plan(&Reference::exact(), checkpoint, needs_of_host(checkpoint), options),
        };
        plan.map_err(StartError::from)
    }
}

fn cpu(path: &Path, options: &Options) -> Result<CpuBackend, StartError> {
    let kv = if options.kv_cache_dtype == "int8" { KvType::Int8 } else { KvType::Bf16 };
    let activations = activations(options);
    let int16_activations = Projections::named(&options.int16_activations).map_err(|name| {
        let reason = BackendError::Unsupported {
            what: "projection with 16-bit activations",
            found: name.to_owned(),
            expected: format!("one of {}", Projections::NAMES.join(", ")),
        };
        refused(path, reason)
    })?;
    let threads = options.threads;
    CpuBackend::new(CpuOptions { threads, kv, activations, int16_activations, ..CpuOptions::default() })
        .map_err(|reason| refused(path, reason))
}

fn cuda(options: &Options) -> Result<CudaBackend, CudaError> {
    CudaBackend::new(&CudaOptions { device: 0, library_folders: options.cuda_library_folders.clone() })
}

/// What a model's weights take where they are computed with, and how much memory there is.
#[derive(Debug, Clone, Copy)]
struct Needs {
    weight_bytes: usize,
    memory_limit: usize,
}

fn needs_of_host(checkpoint: &Checkpoint) -> Needs {
    Needs { weight_bytes: checkpoint.weight_bytes(), memory_limit: host::memory_limit() }
}

fn needs_of_gpu(backend: &CudaBackend, checkpoint: &Checkpoint) -> Needs {
    let weight_bytes = CudaBackend::weight_bytes(&checkpoint.config().spec);
    Needs { weight_bytes, memory_limit: backend.info().memory }
}

/// What projections make of their inputs, those named in `int16_activations` apart.
fn activations(options: &Options) -> ActivationType {
    if options.dtype == "bfloat16" { ActivationType::Bf16 } else { ActivationType::Int8 }
}

/// What the widest matrices of the layers, gate and up, make of their inputs.
pub fn layer_activations(options: &Options) -> ActivationType {
    let is_named = options.int16_activations.iter().any(|name| name == "gate_up");
    if is_named { ActivationType::Int16 } else { activations(options) }
}

fn refused(path: &Path, reason: BackendError) -> StartError {
    StartError::Backend { path: path.display().to_string(), reason }
}

fn plan<B: Backend>(
    backend: &B,
    checkpoint: &Checkpoint,
    needs: Needs,
    options: &Options,
) -> Result<MemoryPlan, ModelError> {
    let request = MemoryRequest {
        block_size: options.block_size,
        max_model_len: options.max_model_len,
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        kv_cache_memory_bytes: options.kv_cache_memory_bytes,
        num_kv_blocks: options.num_kv_blocks,
        memory_limit: needs.memory_limit,
    };
    memory_plan(backend, checkpoint.config(), needs.weight_bytes, &request)
}

/// A backend, and the model that it is to run.
struct Placed<'a, B> {
    backend: B,
    threads: usize,
    path: &'a Path,
    num_tokens: Option<usize>,
    needs: Needs,
}

fn start<B: Backend>(
    placed: Placed<'_, B>,
    checkpoint: &mut Checkpoint,
    options: &Options,
) -> Result<Started, StartError> {
    let Placed { backend, threads, path, num_tokens, needs } = placed;
    let memory = plan(&backend, checkpoint, needs, options)?;
    let mut model = checkpoint.config().clone();
    let head = &mut model.spec.head;
    head.num_tokens = num_tokens.unwrap_or(head.num_tokens).clamp(1, head.num_tokens);
    let cost = TokenCost::of(checkpoint).map_err(|reason| refused(path, reason))?;
    let config = EngineConfig {
        block_size: options.block_size,
        num_blocks: memory.num_blocks.clone(),
        max_model_len: memory.max_model_len,
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        prefix_cache: if options.enable_prefix_caching { PrefixCaching::On } else { PrefixCaching::Off },
        eos_token_ids: model.eos_token_ids,
        seed: options.seed,
        mask_threads: threads,
    };
    let engine = Engine::load(backend, &model.spec, checkpoint, config).map_err(|reason| refused(path, reason))?;
    log::info!("{}: {} bytes of memory, {threads} threads", path.display(), memory.total());
    let handle = EngineHandle::start(engine).map_err(StartError::Thread)?;
    Ok(Started { handle, memory, cost, threads })
}
