//! A loaded model: weights, the KV cache, and work memory for the largest step.

use std::{collections::BTreeMap, sync::Arc};

use half::bf16;
use octavo_backend::{BackendError, DecoderSpec, Footprint, KvGeometry, MlpSpec, RopeSpec, StepLimits, WeightSource};

use crate::{
    arena::{Arena, Layout, Place},
    cublaslt::WORKSPACE_BYTES,
    device::{Device, Slice},
    error::CudaError,
    kernels::{AttentionKernels, CHUNK, HEAD_SIZES, HeadShape, Kernels, LayerCache, Partials},
    sampler::{SamplerBuffers, SamplerPlaces, logit_stride},
    staging::{Download, Upload},
    weights::Weights,
};

/// Most rows of logits that are held at once.
pub(crate) const HEAD_ROWS: usize = 64;

/// Partial results of attention that are held at once, in spans times chunks, unless one span has more.
const PARTIALS: usize = 4096;

/// Sums of products with 4-bit codes that are held at once.
const SPLIT_SUMS: usize = 4 << 20;

/// A model loaded by [`crate::CudaBackend`], with all memory that its steps need.
pub struct CudaPlan {
    pub(crate) spec: DecoderSpec,
    pub(crate) limits: StepLimits,
    pub(crate) geometry: KvGeometry,
    pub(crate) weights: Weights,
    pub(crate) layers: Vec<LayerPlan>,
    pub(crate) attention: BTreeMap<usize, AttentionKernels>,
    pub(crate) buffers: Buffers,
    /// For each group, copies of blocks by their size: the caches that they are in.
    pub(crate) copies: Vec<CopyPlan>,
    pub(crate) upload: Upload,
    pub(crate) download: Download,
    /// What the slices lie in.
    _cache: Arena,
    _work: Arena,
}

/// What a layer uses beside its weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerPlan {
    pub shape: HeadShape,
    /// The KV group of the layer.
    pub group: usize,
    pub window: Option<usize>,
    pub scale: f32,
    /// `[max_positions, pairs, 2]`.
    pub angles: Slice<f32>,
    pub pairs: usize,
    pub cache: LayerCache,
    /// Width of the MLP.
    pub intermediate_size: usize,
}

/// Caches of one group whose blocks have one size.
pub(crate) struct CopyPlan {
    pub group: usize,
    pub block_bytes: usize,
    /// Addresses of the caches, of keys and of values.
    pub caches: Slice<u64>,
}

/// Work memory.
pub(crate) struct Buffers {
    /// The residual stream, `[max_rows, hidden_size]`.
    pub hidden: Slice<f32>,
    /// What is added to it next.
    pub update: Slice<f32>,
    /// Input of products, `[max_rows, hidden_size]`.
    pub normed: Slice<bf16>,
    /// Queries, keys and values, or gate and up: `[max_rows, widest]`.
    pub projected: Slice<f32>,
    /// `[max_rows, num_heads * head_size]` of the widest layer.
    pub queries: Slice<bf16>,
    /// As many.
    pub attended: Slice<bf16>,
    /// `[max_rows, intermediate_size]` of the widest layer.
    pub inner: Slice<bf16>,
    pub partials: Partials,
    /// Spans times chunks that the partial results are for.
    pub num_partials: usize,
    pub split_sums: Slice<f32>,
    /// Of a tile of the head, `[HEAD_ROWS, hidden_size]` each.
    pub tile_hidden: Slice<f32>,
    pub tile_update: Slice<f32>,
    pub tile_normed: Slice<bf16>,
    /// `[HEAD_ROWS, logit_stride(vocab_size)]`.
    pub logits: Slice<f32>,
    pub sampler: SamplerBuffers,
}

/// Where work memory will be.
struct Places {
    layout: Layout,
    hidden: Place<f32>,
    update: Place<f32>,
    normed: Place<bf16>,
    projected: Place<f32>,
    queries: Place<bf16>,
    attended: Place<bf16>,
    inner: Place<bf16>,
    partial_out: Place<f32>,
    partial_max: Place<f32>,
    partial_sum: Place<f32>,
    num_partials: usize,
    split_sums: Place<f32>,
    tile_hidden: Place<f32>,
    tile_update: Place<f32>,
    tile_normed: Place<bf16>,
    logits: Place<f32>,
    sampler: SamplerPlaces,
    /// One for each distinct rope.
    angles: Vec<(RopeSpec, Place<f32>)>,
    caches: Vec<Place<u64>>,
}

/// Where the keys and values of each layer will be.
struct CachePlaces {
    layout: Layout,
    layers: Vec<(Place<bf16>, Place<bf16>)>,
}

impl CachePlaces {
    fn new(spec: &DecoderSpec, limits: &StepLimits) -> CachePlaces {
        let geometry = spec.kv_geometry(limits.block_size);
        let mut layout = Layout::default();
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (index, layer) in spec.layers.iter().enumerate() {
            let slots = limits.num_blocks[geometry.group_of(index)] * limits.block_size;
            let elements = slots * layer.attention.kv_rows();
            layers.push((layout.place(elements), layout.place(elements)));
        }
        CachePlaces { layout, layers }
    }
}

/// The most that any layer needs of something; 0 without layers.
fn most(spec: &DecoderSpec, of_layer: impl Fn(&octavo_backend::LayerSpec) -> usize) -> usize {
    spec.layers.iter().map(of_layer).max().unwrap_or(0)
}

impl Places {
    fn new(spec: &DecoderSpec, limits: &StepLimits) -> Places {
        let mut layout = Layout::default();
        let (rows, width) = (limits.max_rows, spec.hidden_size);
        let heads = rows * most(spec, |layer| layer.attention.num_heads * layer.attention.head_size);
        let widest = most(spec, |layer| layer.attention.qkv_rows().max(2 * intermediate_size(&layer.mlp)));
        let chunks = limits.max_positions.div_ceil(CHUNK).max(1);
        let num_partials =
            if spec.layers.is_empty() { 0 } else { (limits.max_spans * chunks).min(PARTIALS).max(chunks) };
        let partials = num_partials * most(spec, |layer| layer.attention.num_heads);
        let partial_out = num_partials * most(spec, |layer| layer.attention.num_heads * layer.attention.head_size);
        let mut angles: Vec<(RopeSpec, Place<f32>)> = Vec::new();
        for layer in &spec.layers {
            let rope = &layer.attention.rope;
            if !angles.iter().any(|(known, _)| known == rope) {
                let place = layout.place(limits.max_positions * rope.inverse_frequencies.len() * 2);
                angles.push((rope.clone(), place));
            }
        }
        Places {
            hidden: layout.place(rows * width),
            update: layout.place(rows * width),
            normed: layout.place(rows * width),
            projected: layout.place(rows * widest),
            queries: layout.place(heads),
            attended: layout.place(heads),
            inner: layout.place(rows * most(spec, |layer| intermediate_size(&layer.mlp))),
            partial_out: layout.place(partial_out),
            partial_max: layout.place(partials),
            partial_sum: layout.place(partials),
            num_partials,
            split_sums: layout.place((rows * widest.max(width)).min(SPLIT_SUMS)),
            tile_hidden: layout.place(HEAD_ROWS * width),
            tile_update: layout.place(HEAD_ROWS * width),
            tile_normed: layout.place(HEAD_ROWS * width),
            logits: layout.place(HEAD_ROWS * logit_stride(spec.vocab_size)),
            sampler: SamplerPlaces::new(&mut layout, spec.vocab_size),
            caches: copies(spec, limits).iter().map(|(_, _, layers)| layout.place(2 * layers.len())).collect(),
            angles,
            layout,
        }
    }

    fn buffers(&self, work: &Arena) -> Buffers {
        Buffers {
            hidden: work.slice(self.hidden),
            update: work.slice(self.update),
            normed: work.slice(self.normed),
            projected: work.slice(self.projected),
            queries: work.slice(self.queries),
            attended: work.slice(self.attended),
            inner: work.slice(self.inner),
            partials: Partials {
                out: work.slice(self.partial_out),
                max: work.slice(self.partial_max),
                sum: work.slice(self.partial_sum),
            },
            num_partials: self.num_partials,
            split_sums: work.slice(self.split_sums),
            tile_hidden: work.slice(self.tile_hidden),
            tile_update: work.slice(self.tile_update),
            tile_normed: work.slice(self.tile_normed),
            logits: work.slice(self.logits),
            sampler: self.sampler.buffers(work),
        }
    }
}

/// For each group and size of a block: the group, the bytes, the layers.
fn copies(spec: &DecoderSpec, limits: &StepLimits) -> Vec<(usize, usize, Vec<usize>)> {
    let mut copies: Vec<(usize, usize, Vec<usize>)> = Vec::new();
    for (group, shape) in spec.kv_geometry(limits.block_size).groups.iter().enumerate() {
        for &layer in &shape.layers {
            let bytes = limits.block_size * spec.layers[layer].attention.kv_rows() * size_of::<bf16>();
            match copies.iter_mut().find(|known| (known.0, known.1) == (group, bytes)) {
                Some(known) => known.2.push(layer),
                None => copies.push((group, bytes, vec![layer])),
            }
        }
    }
    copies
}

pub(crate) fn intermediate_size(mlp: &MlpSpec) -> usize {
    let MlpSpec::Gated { intermediate_size, .. } = mlp;
    *intermediate_size
}

impl CudaPlan {
    pub(crate) fn load(
        device: &Arc<Device>,
        kernels: &Kernels,
        spec: &DecoderSpec,
        source: &mut dyn WeightSource,
        limits: &StepLimits,
    ) -> Result<CudaPlan, BackendError> {
        check_spec(spec, limits)?;
        // The cache and work memory first: what they are is known, and a machine too small for them is known at once.
        let (cache_places, places) = (CachePlaces::new(spec, limits), Places::new(spec, limits));
        let cache = Arena::new(device, "KV cache", &cache_places.layout)?;
        let work = Arena::new(device, "work memory", &places.layout)?;
        let weights = Weights::load(device, spec, source)?;
        let geometry = spec.kv_geometry(limits.block_size);
        let angles = write_angles(device, &places, &work, limits)?;
        let mut attention = BTreeMap::new();
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (index, layer) in spec.layers.iter().enumerate() {
            let head_size = layer.attention.head_size;
            if let std::collections::btree_map::Entry::Vacant(entry) = attention.entry(head_size) {
                entry.insert(kernels.attention(head_size)?);
            }
            let rope = places.angles.iter().position(|(rope, _)| *rope == layer.attention.rope).unwrap_or(0);
            let (keys, values) = cache_places.layers[index];
            layers.push(LayerPlan {
                shape: HeadShape {
                    num_heads: layer.attention.num_heads,
                    num_kv_heads: layer.attention.num_kv_heads,
                    head_size,
                    block_size: limits.block_size,
                },
                group: geometry.group_of(index),
                window: layer.attention.window,
                scale: layer.attention.scale,
                angles: angles[rope],
                pairs: layer.attention.rope.inverse_frequencies.len(),
                cache: LayerCache { keys: cache.slice(keys), values: cache.slice(values) },
                intermediate_size: intermediate_size(&layer.mlp),
            });
        }
        let copies = write_copies(device, spec, limits, &layers, &places, &work)?;
        let (upload, download) = (upload_bytes(spec, limits), download_bytes(limits));
        Ok(CudaPlan {
            spec: spec.clone(),
            limits: limits.clone(),
            geometry,
            weights,
            layers,
            attention,
            buffers: places.buffers(&work),
            copies,
            upload: Upload::new(device, upload)?,
            download: Download::new(device, download)?,
            _cache: cache,
            _work: work,
        })
    }

    pub(crate) fn footprint(spec: &DecoderSpec, limits: &StepLimits) -> Footprint {
        let arena = Places::new(spec, limits).layout.bytes() + upload_bytes(spec, limits) + download_bytes(limits);
        Footprint { kv_bytes: CachePlaces::new(spec, limits).layout.bytes(), arena_bytes: arena + WORKSPACE_BYTES }
    }
}

/// Cosine and sine of every position and pair.
fn write_angles(
    device: &Device,
    places: &Places,
    work: &Arena,
    limits: &StepLimits,
) -> Result<Vec<Slice<f32>>, CudaError> {
    let write = |(rope, place): &(RopeSpec, Place<f32>)| {
        let pairs = rope.inverse_frequencies.len();
        let (mut cosines, mut sines) = (vec![0.0; pairs], vec![0.0; pairs]);
        let mut values = Vec::with_capacity(place.len());
        for position in 0..limits.max_positions {
            rope.angles(position, &mut cosines, &mut sines);
            values.extend(cosines.iter().zip(&sines).flat_map(|(cosine, sine)| [*cosine, *sine]));
        }
        let slice = work.slice(*place);
        device.write(slice, &values)?;
        Ok(slice)
    };
    places.angles.iter().map(write).collect()
}

/// The addresses of the caches that blocks are copied in.
fn write_copies(
    device: &Device,
    spec: &DecoderSpec,
    limits: &StepLimits,
    layers: &[LayerPlan],
    places: &Places,
    work: &Arena,
) -> Result<Vec<CopyPlan>, CudaError> {
    let write = |((group, block_bytes, of), place): ((usize, usize, Vec<usize>), &Place<u64>)| {
        let caches = of.iter().map(|&layer| layers[layer].cache);
        let addresses: Vec<u64> = caches.flat_map(|cache| [cache.keys.address, cache.values.address]).collect();
        let caches = work.slice(*place);
        device.write(caches, &addresses)?;
        Ok(CopyPlan { group, block_bytes, caches })
    };
    copies(spec, limits).into_iter().zip(&places.caches).map(write).collect()
}

/// What most steps send at most: tokens, positions and slots of all rows, the spans' tables, what is sampled, and a mask for
/// every span.
fn upload_bytes(spec: &DecoderSpec, limits: &StepLimits) -> usize {
    let groups = limits.num_blocks.len();
    let blocks = limits.max_positions.div_ceil(limits.block_size);
    let tables = (limits.max_spans * blocks).min(4 * limits.num_blocks.iter().sum::<usize>() + limits.max_spans);
    let rows = limits.max_rows.max(limits.max_spans);
    let ints = rows * (8 + groups) + 16 * limits.max_spans * (1 + groups) + tables * groups;
    let sampler = rows * 128 + limits.max_spans * spec.vocab_size.div_ceil(8);
    (ints * size_of::<i32>() + sampler + (64 << 10)).next_multiple_of(4096)
}

/// What most steps bring back at most: a token and five log-probabilities for every row.
fn download_bytes(limits: &StepLimits) -> usize {
    (limits.max_rows.max(limits.max_spans) * 128 + (64 << 10)).next_multiple_of(4096)
}

/// Refuses what the kernels are not made for.
fn check_spec(spec: &DecoderSpec, limits: &StepLimits) -> Result<(), BackendError> {
    let check = |is_fine: bool, what, found: String, expected: &str| {
        if is_fine { Ok(()) } else { Err(BackendError::Unsupported { what, found, expected: expected.to_owned() }) }
    };
    let (vocab, width) = (spec.vocab_size, spec.hidden_size);
    check(vocab > 0 && width > 0, "embedding", format!("{vocab} x {width}"), "at least one row and one column")?;
    check(width.is_multiple_of(8), "hidden size", width.to_string(), "a multiple of 8")?;
    spec.head.check(vocab)?;
    let block = limits.block_size;
    check(block > 0 && block.is_multiple_of(16), "block size", block.to_string(), "a multiple of 16")?;
    let groups = spec.kv_geometry(block).groups.len();
    let pools = limits.num_blocks.len();
    check(groups == pools, "pools of KV blocks", pools.to_string(), &format!("{groups}, one for each group"))?;
    for &blocks in &limits.num_blocks {
        check(blocks < i32::MAX as usize / block, "KV blocks", blocks.to_string(), "slots that 31 bits can number")?;
    }
    for layer in &spec.layers {
        let attention = &layer.attention;
        let (heads, kv_heads, size) = (attention.num_heads, attention.num_kv_heads, attention.head_size);
        let is_fine = heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads / kv_heads.max(1) <= 16;
        let found = format!("{heads} query heads and {kv_heads} KV heads");
        check(is_fine, "attention heads", found, "1 to 16 query heads for each KV head")?;
        let sizes = HEAD_SIZES.map(|size| size.to_string()).join(", ");
        check(HEAD_SIZES.contains(&size), "head size", size.to_string(), &format!("one of {sizes}"))?;
        let rotated = 2 * attention.rope.inverse_frequencies.len();
        check(rotated <= size, "rotated elements of a head", rotated.to_string(), "at most the head's size")?;
        check(attention.window != Some(0), "attention window", "0".to_owned(), "at least 1")?;
        let inner = intermediate_size(&layer.mlp);
        check(inner.is_multiple_of(8), "width of the MLP", inner.to_string(), "a multiple of 8")?;
    }
    Ok(())
}
