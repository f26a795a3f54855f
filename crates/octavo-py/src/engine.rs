//! The engine as Python sees it: load, submit, abort, count, close.

use std::{
    panic::resume_unwind,
    path::PathBuf,
    sync::{Arc, PoisonError},
    thread,
};

use octavo_cpu::{ActivationType, isa::Isa, limits};
use octavo_engine::{BeamParams, BlockState, EngineHandle, Micros, Pooling, RequestId, SamplingParams, Submission};
use octavo_model::{Checkpoint, MemoryPlan, ModelConfig, TokenizerSource};
use pyo3::{exceptions::PyMemoryError, prelude::*, types::PyDict};

use crate::{
    device::{self, Device, Options, Started, TokenCost},
    errors::{self, LoadError},
    grammar::GrammarCompiler,
    grammar_class::GrammarClass,
    host::MEASURED,
    inbox::{InboxClass, Pending},
    reader::{Reader, ReadingRules},
    stop::{StopStrings, StopText},
    tokenizer::{ControlTokensIn, Tokenizer},
    tokenizer_class::TokenizerClass,
};

/// A loaded model and the engine that runs it.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Core {
    handle: Arc<EngineHandle>,
    tokenizer: Option<Arc<Tokenizer>>,
    grammars: GrammarCompiler,
    config: ModelConfig,
    chat_template: Option<String>,
    memory: MemoryPlan,
    cost: TokenCost,
    activations: ActivationType,
    device: Device,
    threads: usize,
    /// Add to the engine's clock to get `time.monotonic`, in seconds.
    clock_offset: f64,
    process: u32,
}

/// How to continue a prompt, and what to make of the tokens.
#[derive(Debug, Clone, FromPyObject)]
#[pyo3(from_item_all)]
struct RequestParams {
    n: u32,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: Option<u64>,
    max_tokens: Option<usize>,
    min_tokens: usize,
    stop: Vec<String>,
    include_stop_str_in_output: bool,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    logit_bias: Vec<(u32, f32)>,
    allowed_token_ids: Option<Vec<u32>>,
    bad_words: Vec<Vec<u32>>,
    /// Width and length penalty.
    beam: Option<(u32, f32)>,
    /// `last` or `mean`.
    pooling: Option<String>,
    /// Milliseconds.
    deadline_ms: Option<f64>,
    grammar: Option<GrammarClass>,
    detokenize: bool,
    skip_special_tokens: bool,
    cache_salt: Option<String>,
    skip_reading_prefix_cache: bool,
}

/// A KV block: sequences that hold it, slots that are filled, and whether a new request could find its content.
type BlockRow = (u32, u32, bool);

#[pymethods]
impl Core {
    /// Load the model at `model`; `tokenizer` is a `tokenizer.json` to use instead of the model's own.
    #[new]
    #[pyo3(signature = (model, *, device, tokenizer, options))]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        device: &str,
        tokenizer: Option<PathBuf>,
        options: Options,
    ) -> PyResult<Core> {
        let device = Device::named(device).map_err(LoadError::from)?;
        let loaded = py.detach(|| Loaded::open(&model, device, tokenizer, &options))?;
        let monotonic: f64 = py.import("time")?.call_method0("monotonic")?.extract()?;
        let Loaded { config, chat_template, tokenizer, started: Started { handle, memory, cost, threads } } = loaded;
        let tokenizer = tokenizer.map(Arc::new);
        Ok(Core {
            clock_offset: monotonic - handle.now() as f64 * 1e-6,
            handle: Arc::new(handle),
            grammars: GrammarCompiler::new(tokenizer.clone(), config.spec.vocab_size, config.eos_token_ids.clone()),
            tokenizer,
            config,
            chat_template,
            memory,
            cost,
            activations: device::layer_activations(&options),
            device,
            threads,
            process: std::process::id(),
        })
    }

    /// An empty inbox for the outputs of requests.
    fn inbox(&self) -> InboxClass {
        InboxClass::new(Arc::clone(&self.handle), self.tokenizer.clone(), self.clock_offset)
    }

    /// Queue all prompts or none; returns an id and a seed for each. Outputs arrive in `inbox`.
    fn submit(
        &self,
        py: Python<'_>,
        inbox: &InboxClass,
        prompts: Vec<Vec<u32>>,
        params: Vec<RequestParams>,
    ) -> PyResult<Vec<(u64, u64)>> {
        params.iter().enumerate().try_for_each(|(index, params)| self.check_device(index, params))?;
        py.detach(|| {
            let mut known = Vec::new();
            let readers: Vec<Pending> =
                params.iter().zip(&prompts).map(|(params, prompt)| self.reader(params, prompt, &mut known)).collect();
            let submissions = prompts.into_iter().zip(params).map(|(prompt, params)| submission(prompt, params));
            let submissions: Vec<Submission> = submissions.collect();
            // Held until the readers are in place, so that no output is read before.
            let mut requests = inbox.requests.lock().unwrap_or_else(PoisonError::into_inner);
            let accepted = self.handle.submit(submissions, &inbox.inbox).map_err(|error| errors::submit(&error))?;
            requests.extend(accepted.iter().map(|accepted| accepted.id).zip(readers));
            Ok(accepted.into_iter().map(|accepted| (accepted.id.0, accepted.seed)).collect())
        })
    }

    /// What outputs have to follow, compiled for this model's vocabulary. `kind` is a field of `StructuredOutputsParams`.
    fn compile_grammar(&self, py: Python<'_>, kind: &str, source: String) -> PyResult<GrammarClass> {
        py.detach(|| GrammarClass::compiled(&self.grammars, kind, source))
    }

    /// End requests; each still answers with a last output.
    fn abort(&self, py: Python<'_>, ids: Vec<u64>) {
        let ids: Vec<RequestId> = ids.into_iter().map(RequestId).collect();
        py.detach(|| self.handle.abort(&ids));
    }

    /// Counts as of the end of the current step. Times are in microseconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.handle.stats()).map_err(|error| errors::dead(&error))?;
        let scheduler = stats.scheduler;
        let counts = [
            ("running", scheduler.running as u64),
            ("waiting", scheduler.waiting as u64),
            ("blocks_total", scheduler.blocks_total as u64),
            ("blocks_free", scheduler.blocks_free as u64),
            ("blocks_cached", scheduler.blocks_cached as u64),
            ("blocks_shared", scheduler.blocks_shared as u64),
            ("blocks_saved", scheduler.blocks_saved as u64),
            ("blocks_copied", scheduler.blocks_copied),
            ("blocks_promised", scheduler.blocks_promised as u64),
            ("blocks_peak", stats.most_blocks_used as u64),
            ("slots_allocated", scheduler.slots_allocated as u64),
            ("slots_used", scheduler.slots_used as u64),
            ("slots_reserved", scheduler.slots_reserved as u64),
            ("slots_internal", scheduler.slots_internal as u64),
            ("slots_external", scheduler.slots_external as u64),
            ("slot_steps_allocated", stats.slot_steps_allocated),
            ("slot_steps_used", stats.slot_steps_used),
            ("steps", scheduler.steps),
            ("tokens_scheduled", scheduler.tokens_scheduled),
            ("prompt_tokens", stats.prompt_tokens),
            ("generation_tokens", stats.generation_tokens),
            ("admitted", scheduler.admitted),
            ("preemptions", scheduler.preemptions),
            ("prefix_queries", scheduler.prefix_queries),
            ("prefix_hits", scheduler.prefix_hits),
            ("queue_time", scheduler.queue_time),
            ("busy_time", stats.busy),
            ("masks", stats.masks),
            ("mask_nanos", stats.mask_nanos),
            ("finished_stop", scheduler.finished.stop),
            ("finished_length", scheduler.finished.length),
            ("finished_abort", scheduler.finished.abort),
            ("finished_deadline", scheduler.finished.deadline),
            ("finished_error", scheduler.finished.error),
        ];
        let dict = PyDict::new(py);
        for (name, count) in counts {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }

    /// Every KV block, group by group, as of the end of the current step: owners, filled slots, whether it can be found.
    fn block_map(&self, py: Python<'_>) -> PyResult<Vec<Vec<BlockRow>>> {
        let map = py.detach(|| self.handle.block_map()).map_err(|error| errors::dead(&error))?;
        let row = |block: BlockState| (block.owners, block.filled, block.cached);
        Ok(map.into_iter().map(|group| group.into_iter().map(row).collect()).collect())
    }

    /// Forget what the prefix cache holds; returns the number of blocks that could have been found.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<usize> {
        py.detach(|| self.handle.reset_prefix_cache()).map_err(|error| errors::dead(&error))
    }

    /// Make the engine's thread panic, as a faulty kernel would: for tests.
    fn inject_panic(&self, py: Python<'_>, message: &str) {
        py.detach(|| self.handle.inject_panic(message));
    }

    /// End the engine after its current step and give its memory back.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.handle.close());
    }

    /// The tokenizer; None for a model that has none.
    #[getter]
    fn tokenizer(&self) -> Option<TokenizerClass> {
        self.tokenizer.clone().map(|inner| TokenizerClass { inner })
    }

    /// The model's own chat template.
    #[getter]
    fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The family's name in the checkpoint.
    #[getter]
    fn architecture(&self) -> &str {
        &self.config.architecture
    }

    /// The model's own name.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.config.name.as_deref()
    }

    /// Tokens that the model knows; prompts must stay below.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.config.spec.vocab_size
    }

    /// The longest sequence, prompt and output together.
    #[getter]
    fn max_model_len(&self) -> usize {
        self.memory.max_model_len
    }

    /// Begins a text.
    #[getter]
    fn bos_token_id(&self) -> Option<u32> {
        self.config.bos_token_id
    }

    /// Each of them ends an output.
    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.config.eos_token_ids.clone()
    }

    /// Where it computes: `cpu`, `cuda` or `reference`.
    #[getter]
    fn device(&self) -> &'static str {
        self.device.name()
    }

    /// Threads of the host that compute.
    #[getter]
    fn threads(&self) -> usize {
        self.threads
    }

    /// Bytes of weights, KV cache and work memory, and what one token takes of them.
    #[getter]
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("weight_bytes", self.memory.weight_bytes)?;
        dict.set_item("kv_bytes", self.memory.kv_bytes)?;
        dict.set_item("arena_bytes", self.memory.arena_bytes)?;
        dict.set_item("kv_bytes_per_token", self.memory.kv_bytes_per_token)?;
        dict.set_item("bytes_per_token", self.cost.bytes)?;
        dict.set_item("layer_weights", self.cost.layer_weights)?;
        Ok(dict)
    }

    /// How fast the CPU's kernels for the layers' widest matrices are where memory does not matter, in Gop/s.
    fn measure_product_rate(&self, py: Python<'_>) -> PyResult<f64> {
        let (format, threads) = (self.cost.layer_format, self.threads);
        let measured =
            py.detach(|| limits::product_rate_of(threads, Isa::detect(), format, self.activations, MEASURED));
        measured.map(|rate| rate * 1e-9).map_err(|error| PyMemoryError::new_err(error.to_string()))
    }

    /// The sampling that the checkpoint recommends; only what it says.
    #[getter]
    fn generation_defaults<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let defaults = &self.config.generation;
        let dict = PyDict::new(py);
        if let Some(do_sample) = defaults.do_sample {
            dict.set_item("do_sample", do_sample)?;
        }
        if let Some(top_k) = defaults.top_k {
            dict.set_item("top_k", top_k)?;
        }
        let numbers = [
            ("temperature", defaults.temperature),
            ("top_p", defaults.top_p),
            ("min_p", defaults.min_p),
            ("repetition_penalty", defaults.repetition_penalty),
        ];
        for (name, number) in numbers {
            if let Some(number) = number {
                dict.set_item(name, decimal(number))?;
            }
        }
        Ok(dict)
    }
}

impl Core {
    /// Refuses what the device does not have.
    fn check_device(&self, index: usize, params: &RequestParams) -> PyResult<()> {
        let penalties = [
            ("presence_penalty", params.presence_penalty, 0.0),
            ("frequency_penalty", params.frequency_penalty, 0.0),
            ("repetition_penalty", params.repetition_penalty, 1.0),
        ];
        let beam = params.beam.map(|(width, _)| ("beam_width", width.to_string(), "no beam search".to_owned()));
        let penalty = penalties.into_iter().find(|(_, found, none)| found != none);
        let penalty = penalty.map(|(field, found, none)| (field, format!("{:?}", decimal(found)), format!("{none:?}")));
        match (self.device, beam.or(penalty)) {
            (Device::Cuda, Some((field, found, expected))) => Err(errors::InvalidRequest::new_err(format!(
                "prompt {index}: {field}: found {found}, expected {expected}: the device cuda does not have it yet"
            ))),
            _ => Ok(()),
        }
    }

    /// `known` has the stop strings of the prompts before, for those that have the same.
    fn reader(&self, params: &RequestParams, prompt: &[u32], known: &mut Vec<KnownStops>) -> Pending {
        let control = if params.skip_special_tokens { ControlTokensIn::Skipped } else { ControlTokensIn::Kept };
        // A token that is both is the model's own end, unless that is ignored.
        let own = |id: &&u32| params.ignore_eos || !self.config.eos_token_ids.contains(id);
        // The outputs of a beam search come whole, when nothing can be stopped any more.
        let stop: &[String] = if params.beam.is_some() { &[] } else { &params.stop };
        let stop_text = if params.include_stop_str_in_output { StopText::Included } else { StopText::Excluded };
        let same = known.last().filter(|known| known.texts == stop && known.stop_text == stop_text);
        let stop_strings = same.map(|known| Arc::clone(&known.strings)).unwrap_or_else(|| {
            let strings = Arc::new(StopStrings::new(stop.to_vec(), stop_text));
            known.push(KnownStops { texts: stop.to_vec(), stop_text, strings: Arc::clone(&strings) });
            strings
        });
        let rules = ReadingRules {
            control: params.detokenize.then_some(control),
            stop_strings,
            min_tokens: params.min_tokens,
            stop_token_ids: params.stop_token_ids.iter().filter(own).copied().collect(),
            num_choices: params.n,
        };
        Pending {
            reader: Reader::new(rules, self.tokenizer.as_deref(), prompt),
            scored_prompt: params.prompt_logprobs.is_some().then(|| prompt.to_vec()),
        }
    }
}

/// Stop strings, and what they were made of.
struct KnownStops {
    texts: Vec<String>,
    stop_text: StopText,
    strings: Arc<StopStrings>,
}

impl Drop for Core {
    fn drop(&mut self) {
        // The engine's thread stayed in the process that was forked: it is not here to be ended and waited for.
        if self.process != std::process::id() {
            std::mem::forget(Arc::clone(&self.handle));
        }
    }
}

fn submission(prompt: Vec<u32>, params: RequestParams) -> Submission {
    let sampling = SamplingParams {
        n: params.n,
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        seed: 0,
        max_tokens: params.max_tokens,
        min_tokens: params.min_tokens,
        stop_token_ids: params.stop_token_ids,
        ignore_eos: params.ignore_eos,
        logprobs: params.logprobs,
        prompt_logprobs: params.prompt_logprobs,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        repetition_penalty: params.repetition_penalty,
        logit_bias: params.logit_bias,
        allowed_token_ids: params.allowed_token_ids,
        bad_words: params.bad_words,
        beam: params.beam.map(|(width, length_penalty)| BeamParams { width, length_penalty }),
        cache_salt: params.cache_salt.map(String::into_bytes).unwrap_or_default(),
        skip_reading_prefix_cache: params.skip_reading_prefix_cache,
    };
    let pooling = params.pooling.map(|name| if name == "mean" { Pooling::Mean } else { Pooling::Last });
    let deadline = params.deadline_ms.map(|milliseconds| (milliseconds * 1e3) as Micros);
    let grammar = params.grammar.map(|grammar| grammar.inner);
    Submission { prompt, seed: params.seed, params: sampling, grammar, pooling, deadline }
}

/// The double that reads like the single: 0.7 stays 0.7.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// Everything that is made while the GIL is released.
struct Loaded {
    config: ModelConfig,
    chat_template: Option<String>,
    tokenizer: Option<Tokenizer>,
    started: Started,
}

impl Loaded {
    fn open(
        path: &std::path::Path,
        device: Device,
        tokenizer: Option<PathBuf>,
        options: &Options,
    ) -> Result<Loaded, LoadError> {
        let mut checkpoint = Checkpoint::open(path)?;
        let file = tokenizer.as_deref();
        let (tokenizer, started) = match checkpoint.tokenizer().clone() {
            TokenizerSource::Vocabulary(vocabulary) if file.is_none() => {
                // Its size is known before it is built, which takes about as long as the weights.
                let num_tokens = Some(vocabulary.tokens.len());
                let (tokenizer, started) = thread::scope(|scope| {
                    let building = scope.spawn(|| Tokenizer::from_vocabulary(&vocabulary));
                    let started = device.start(path, &mut checkpoint, num_tokens, options);
                    (building.join(), started)
                });
                (Some(tokenizer.unwrap_or_else(|panic| resume_unwind(panic))?), started?)
            }
            source => {
                let tokenizer = match (file, &source) {
                    (Some(file), _) => Some(Tokenizer::from_file(file)?),
                    (None, TokenizerSource::File(file)) => Some(Tokenizer::from_file(file)?),
                    (None, _) => None,
                };
                let num_tokens = tokenizer.as_ref().map(Tokenizer::id_bound);
                (tokenizer, device.start(path, &mut checkpoint, num_tokens, options)?)
            }
        };
        Ok(Loaded {
            config: checkpoint.config().clone(),
            chat_template: checkpoint.chat_template().map(str::to_owned),
            tokenizer,
            started,
        })
    }
}
