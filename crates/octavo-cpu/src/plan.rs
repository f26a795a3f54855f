//! A loaded model: packed weights, the KV cache, and work memory for the largest step.

use std::collections::BTreeSet;

use octavo_backend::{
    BackendError, DecoderSpec, Footprint, InputRounding, MlpSpec, StepInputs, StepLimits, WeightSource,
};

use crate::{
    activation::{Activations, RoundingSet},
    attention::{AttentionBuffers, AttentionSchedule, AttentionShape, AttentionSizes, tile},
    check::StepCheck,
    isa::Isa,
    kv::KvCache,
    options::{ActivationType, CpuOptions},
    pack::PackedMatrix,
    pool::Worker,
    rope::RopeAngles,
    sampler::{SPAN, Scratch, num_maxima},
    weights::Weights,
    work::{Place, WorkLayout, WorkMemory},
};

/// Rows and columns of the MLP that a worker takes on at once: what it computes of them stays in its cache until it is
/// rounded.
pub(crate) const GATED_ROWS: usize = 256;
pub(crate) const GATED_COLUMNS: usize = 128;

/// Most rows of logits that are held at once.
const HEAD_ROWS: usize = 64;

/// A model loaded by [`crate::CpuBackend`], with all memory that its steps need.
pub struct CpuPlan {
    pub(crate) spec: DecoderSpec,
    pub(crate) weights: Weights,
    pub(crate) cache: KvCache,
    pub(crate) memory: WorkMemory,
    pub(crate) buffers: Buffers,
    pub(crate) inputs: MatmulInputs,
    pub(crate) schedules: Vec<AttentionSchedule>,
    pub(crate) layers: Vec<LayerPlan>,
    /// Draws that go through the head together.
    pub(crate) head_rows: usize,
    /// The KV group of each layer is in its shape; this is where each row of the current step stands.
    pub(crate) rows: Vec<RowPlace>,
    check: StepCheck,
}

/// What a layer uses of what layers share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerPlan {
    pub shape: AttentionShape,
    /// Index into [`CpuPlan::schedules`].
    pub schedule: usize,
    /// Index into [`Buffers::ropes`].
    pub rope: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Indices into [`MatmulInputs`].
    pub qkv: usize,
    pub output: usize,
    pub gate_up: usize,
    pub down: usize,
}

/// A row's sequence and place in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowPlace {
    pub span: usize,
    pub position: usize,
}

/// Places in the work memory.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// The residual stream, `[rows, hidden_size]`.
    pub hidden: Place<f32>,
    /// Queries, keys and values: `[rows, widest]`.
    pub projected: Place<f32>,
    /// Of each worker, gate and up of some rows and columns: `[2][GATED_ROWS][GATED_COLUMNS]`.
    pub gated: Vec<Place<f32>>,
    /// `[head_rows, vocab_size]`.
    pub logits: Place<f32>,
    /// The largest of each span of logits: `[head_rows, spans]`.
    pub span_maxima: Place<f32>,
    pub attention: AttentionBuffers,
    pub ropes: Vec<RopeAngles>,
    pub sampler: SamplerBuffers,
}

/// Memory of the rows that are sampled from at the same time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SamplerBuffers {
    /// Rows.
    pub count: usize,
    /// Elements of [`SamplerBuffers::keys`] a row.
    pub num_keys: usize,
    /// `[count, num_keys]`.
    pub keys: Place<u64>,
    /// Elements of [`SamplerBuffers::maxima`] a row.
    pub num_maxima: usize,
    /// `[count, num_maxima]`.
    pub maxima: Place<f32>,
}

impl SamplerBuffers {
    /// There are never more rows at work than workers, nor than rows in a tile of the head.
    fn new(spec: &DecoderSpec, layout: &mut WorkLayout, workers: usize, rows: usize) -> SamplerBuffers {
        let count = workers.min(rows);
        let (num_keys, num_maxima) = (spec.head.num_tokens, num_maxima(spec.head.num_tokens));
        let (keys, maxima) = (layout.place(count * num_keys), layout.place(count * num_maxima));
        SamplerBuffers { count, num_keys, keys, num_maxima, maxima }
    }

    /// The memory for a row of the tile: each worker has its own, or each row if there are more workers than rows.
    ///
    /// # Safety
    /// Nobody else is at work for this worker or this row.
    pub(crate) unsafe fn scratch<'a>(&self, memory: &'a WorkMemory, worker: &Worker<'_>, row: usize) -> Scratch<'a> {
        let index = if worker.count == self.count { worker.index } else { row };
        // SAFETY: by the contract.
        unsafe {
            Scratch {
                keys: memory.write(self.keys, index * self.num_keys..(index + 1) * self.num_keys),
                maxima: memory.write(self.maxima, index * self.num_maxima..(index + 1) * self.num_maxima),
            }
        }
    }
}

/// Inputs of all matmuls; those of one width and the same roundings share memory where they are never needed together.
pub(crate) struct MatmulInputs {
    pub activations: Vec<Activations>,
    pub head: usize,
}

/// What can be known before a weight is seen.
struct Sizes {
    layout: WorkLayout,
    buffers: Buffers,
    shapes: Vec<AttentionShape>,
    shape_of_layer: Vec<usize>,
    rope_of_layer: Vec<usize>,
}

impl Sizes {
    fn new(spec: &DecoderSpec, limits: &StepLimits, machine: Machine) -> Sizes {
        let workers = machine.workers;
        let geometry = spec.kv_geometry(limits.block_size);
        let mut shapes: Vec<AttentionShape> = Vec::new();
        let mut shape_of_layer = Vec::with_capacity(spec.layers.len());
        let mut sizes = AttentionSizes::default();
        let mut widest = 0;
        for (index, layer) in spec.layers.iter().enumerate() {
            let shape = AttentionShape::of(&layer.attention, geometry.group_of(index));
            let known = shapes.iter().position(|known| *known == shape).unwrap_or(shapes.len());
            if known == shapes.len() {
                shapes.push(shape);
            }
            shape_of_layer.push(known);
            sizes.head_size = sizes.head_size.max(shape.head_size);
            sizes.num_heads = sizes.num_heads.max(shape.num_heads);
            sizes.width = sizes.width.max(shape.num_heads * shape.head_size);
            sizes.partials = sizes.partials.max(AttentionSchedule::partials(&shape, limits));
            widest = widest.max(layer.attention.qkv_rows());
        }
        let rows = limits.max_rows;
        let mut layout = WorkLayout::default();
        let (hidden, projected) = (layout.place(rows * spec.hidden_size), layout.place(rows * widest));
        let gated = (0..workers).map(|_| layout.place(2 * GATED_ROWS.min(rows) * GATED_COLUMNS)).collect();
        let logits = layout.place(head_rows(limits) * spec.vocab_size);
        let span_maxima = layout.place(head_rows(limits) * spec.head.num_tokens.div_ceil(SPAN));
        let attention = AttentionBuffers::new(&mut layout, rows, sizes, workers);
        let (ropes, rope_of_layer) = RopeAngles::of(spec, &mut layout, rows);
        let sampler = SamplerBuffers::new(spec, &mut layout, workers, head_rows(limits));
        let buffers = Buffers { hidden, projected, gated, logits, span_maxima, attention, ropes, sampler };
        Sizes { layout, buffers, shapes, shape_of_layer, rope_of_layer }
    }
}

/// A tile of the head: as many rows as a step is likely to sample, up to the most. A row may be drawn from by several
/// sequences, so there can be more draws than rows.
fn head_rows(limits: &StepLimits) -> usize {
    limits.max_rows.max(limits.max_spans).min(HEAD_ROWS)
}

/// Rows of the matmuls' inputs: those of a step, or a tile of the head.
fn input_rows(limits: &StepLimits) -> usize {
    limits.max_rows.max(head_rows(limits))
}

fn intermediate_size(mlp: &MlpSpec) -> usize {
    let MlpSpec::Gated { intermediate_size, .. } = mlp;
    *intermediate_size
}

impl CpuPlan {
    pub(crate) fn load(
        spec: &DecoderSpec,
        source: &mut dyn WeightSource,
        limits: &StepLimits,
        machine: Machine,
    ) -> Result<CpuPlan, BackendError> {
        check_spec(spec)?;
        let sizes = Sizes::new(spec, limits, machine);
        // The cache first: it is the largest single piece, and its limits are checked there.
        let cache = KvCache::new(spec, limits, machine.options.kv)?;
        let weights = Weights::load(spec, source, machine.options, machine.workers)?;
        let memory = WorkMemory::new(&sizes.layout)?;
        let mut inputs = InputsPlan::default();
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (index, layer) in weights.layers.iter().enumerate() {
            layers.push(LayerPlan {
                shape: sizes.shapes[sizes.shape_of_layer[index]],
                schedule: sizes.shape_of_layer[index],
                rope: sizes.rope_of_layer[index],
                intermediate_size: intermediate_size(&spec.layers[index].mlp),
                qkv: inputs.of(&layer.qkv, Origin::Rows),
                output: inputs.of(&layer.output, Origin::Rows),
                gate_up: inputs.of(&layer.gate_up, Origin::Rows),
                down: inputs.of(&layer.down, Origin::Gated),
            });
        }
        let head = inputs.of(weights.head(), Origin::Rows);
        let schedules =
            sizes.shapes.iter().map(|shape| AttentionSchedule::new(*shape, tile(machine.isa, shape.head_size), limits));
        Ok(CpuPlan {
            schedules: schedules.collect(),
            inputs: MatmulInputs { activations: inputs.take(machine.isa, input_rows(limits))?, head },
            head_rows: head_rows(limits),
            check: StepCheck::new(spec, limits),
            rows: Vec::with_capacity(limits.max_rows),
            spec: spec.clone(),
            buffers: sizes.buffers,
            weights,
            cache,
            memory,
            layers,
        })
    }

    pub(crate) fn footprint(spec: &DecoderSpec, limits: &StepLimits, machine: Machine) -> Footprint {
        let sizes = Sizes::new(spec, limits, machine);
        let bytes = |shape| AttentionSchedule::bytes(shape, tile(machine.isa, shape.head_size), limits);
        let schedules: usize = sizes.shapes.iter().map(bytes).sum();
        let rows = limits.max_rows * size_of::<RowPlace>();
        Footprint {
            kv_bytes: KvCache::bytes(spec, limits, machine.options.kv),
            arena_bytes: sizes.layout.bytes()
                + inputs_bytes(spec, input_rows(limits), machine.options)
                + schedules
                + rows
                + StepCheck::bytes(limits),
        }
    }

    /// Checks a step and plans its work.
    pub(crate) fn prepare(&mut self, inputs: &StepInputs, workers: usize) -> Result<(), BackendError> {
        self.check.check(inputs)?;
        self.rows.clear();
        for (span, input) in inputs.spans.iter().enumerate() {
            self.rows.extend((input.start..input.start + input.len).map(|position| RowPlace { span, position }));
        }
        for schedule in &mut self.schedules {
            schedule.plan(inputs, workers);
        }
        Ok(())
    }
}

/// What a plan must know about the machine it is made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Machine {
    pub isa: Isa,
    pub workers: usize,
    pub options: CpuOptions,
}

/// Which activations there must be.
#[derive(Default)]
struct InputsPlan {
    kinds: Vec<(RoundingSet, usize, Origin)>,
}

/// Where activations come from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// What is complete before it is written.
    Rows,
    /// A product that still reads its own inputs while it writes these.
    Gated,
}

impl InputsPlan {
    fn of(&mut self, matrix: &PackedMatrix, origin: Origin) -> usize {
        let kind = (matrix.input_roundings(), matrix.columns(), origin);
        self.kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            self.kinds.push(kind);
            self.kinds.len() - 1
        })
    }

    fn take(self, isa: Isa, rows: usize) -> Result<Vec<Activations>, BackendError> {
        let taken =
            self.kinds.into_iter().map(|(roundings, columns, _)| Activations::new(isa, roundings, columns, rows));
        taken.collect()
    }
}

/// Bytes of all activations if every width needed every rounding: which ones it needs, only the checkpoint knows.
fn inputs_bytes(spec: &DecoderSpec, rows: usize, options: CpuOptions) -> usize {
    let attention = spec.layers.iter().map(|layer| layer.attention.num_heads * layer.attention.head_size);
    let plain: BTreeSet<usize> = attention.chain([spec.hidden_size]).collect();
    let gated: BTreeSet<usize> = spec.layers.iter().map(|layer| intermediate_size(&layer.mlp)).collect();
    let quantized = options.activation_types().map(ActivationType::quantized_input);
    let all = [InputRounding::None, InputRounding::Bf16].into_iter().chain(quantized).collect();
    plain.into_iter().chain(gated).map(|width| Activations::footprint(all, width, rows)).sum()
}

/// Refuses a spec that the arithmetic below would divide by or index beyond.
fn check_spec(spec: &DecoderSpec) -> Result<(), BackendError> {
    let refuse = |what, found: String, expected: &str| {
        Err(BackendError::Unsupported { what, found, expected: expected.to_owned() })
    };
    if spec.vocab_size == 0 || spec.hidden_size == 0 {
        let found = format!("{} x {}", spec.vocab_size, spec.hidden_size);
        return refuse("embedding", found, "at least one row and one column");
    }
    spec.head.check(spec.vocab_size)?;
    for layer in &spec.layers {
        let attention = &layer.attention;
        let (heads, kv_heads) = (attention.num_heads, attention.num_kv_heads);
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let found = format!("{heads} query heads and {kv_heads} KV heads");
            return refuse("attention heads", found, "a whole number of query heads for each KV head");
        }
        let rotated = 2 * attention.rope.inverse_frequencies.len();
        if rotated > attention.head_size {
            return refuse("rotated elements of a head", rotated.to_string(), "at most the head's size");
        }
        if attention.window == Some(0) {
            return refuse("attention window", "0".to_owned(), "at least 1");
        }
    }
    Ok(())
}
