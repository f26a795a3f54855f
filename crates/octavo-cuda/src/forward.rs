//! One step: everything is queued on one stream, and waited for once.
//!
//! `hidden` is the residual stream; what a projection adds to it lies in `update` until the next norm adds it.

use octavo_backend::{BackendError, StepInputs, StepResult};

use crate::{
    arena::Place,
    backend::Shared,
    device::Slice,
    error::CudaError,
    kernels::{Attention, Norm, Partials, RopeAndCache, SPAN_INTS},
    plan::{CudaPlan, HEAD_ROWS},
    products::DenseOutput,
    sampler::{SamplerTile, TileLogits, logit_stride},
    step::PreparedStep,
};

/// A step that is being queued.
pub(crate) struct Step<'a> {
    shared: &'a Shared,
    plan: &'a CudaPlan,
    prepared: &'a PreparedStep,
    rows: usize,
}

impl Shared {
    /// Runs a step.
    ///
    /// # Errors
    /// Inputs that contradict each other; anything that fails on the GPU.
    pub(crate) fn run(&self, plan: &mut CudaPlan, inputs: &StepInputs) -> Result<StepResult, BackendError> {
        self.device.bind()?;
        let prepared = plan.prepare(inputs)?;
        plan.upload.send()?;
        Step { shared: self, plan, prepared: &prepared, rows: inputs.tokens.len() }.queue()?;
        plan.download.fetch()?;
        let mut result = StepResult { hidden: plan.download.values(prepared.hidden).to_vec(), ..StepResult::default() };
        for tile in &prepared.sampler {
            let of_tile = tile.results(&plan.download);
            result.sampled.extend(of_tile.sampled);
            result.scores.extend(of_tile.scores);
        }
        Ok(result)
    }
}

impl Step<'_> {
    fn queue(&self) -> Result<(), CudaError> {
        self.copy_blocks()?;
        let (buffers, spec) = (&self.plan.buffers, &self.plan.spec);
        let hidden = buffers.hidden.part(0..self.rows * spec.hidden_size);
        let table = self.plan.weights.embedding.weights;
        self.shared.kernels.embed(hidden, table, self.input(self.prepared.tokens), spec.embedding_scale)?;
        for index in 0..self.plan.layers.len() {
            self.attend(index)?;
            self.feed_forward(index)?;
        }
        self.report_hidden()?;
        for (index, tile) in self.prepared.sampler.iter().enumerate() {
            self.head(index * HEAD_ROWS, tile)?;
        }
        Ok(())
    }

    fn input<T>(&self, place: Place<T>) -> Slice<T> {
        self.plan.upload.slice(place)
    }

    fn copy_blocks(&self) -> Result<(), CudaError> {
        for copy in &self.plan.copies {
            let pairs = self.input(self.prepared.groups[copy.group].copies);
            self.shared.kernels.copy_blocks(copy.caches, pairs, copy.block_bytes)?;
        }
        Ok(())
    }

    /// Adds the last update, if there is one, to the residual stream and writes its norm where products read it.
    fn normalize(&self, weight: Slice<f32>, epsilon: f32, update: Option<Slice<f32>>) -> Result<(), CudaError> {
        let buffers = &self.plan.buffers;
        let norm = Norm { hidden: buffers.hidden, update, weight, rows: self.rows, epsilon };
        self.shared.kernels.norm_bf16(buffers.normed, norm)
    }

    fn attend(&self, index: usize) -> Result<(), CudaError> {
        let (buffers, layer) = (&self.plan.buffers, &self.plan.layers[index]);
        let (weights, spec) = (&self.plan.weights.layers[index], &self.plan.spec.layers[index]);
        let products = &self.shared.products;
        let update = (index > 0).then_some(buffers.update);
        self.normalize(weights.attention_norm, spec.attention_norm.epsilon, update)?;
        products.run(&weights.qkv, buffers.normed, buffers.projected, self.rows, buffers.split_sums)?;
        let group = &self.prepared.groups[layer.group];
        self.shared.kernels.rope_and_cache(&RopeAndCache {
            queries: buffers.queries,
            cache: layer.cache,
            qkv: buffers.projected,
            angles: layer.angles,
            positions: self.input(self.prepared.positions),
            slots: self.input(group.slots),
            shape: layer.shape,
            pairs: layer.pairs,
            scale: layer.scale,
        })?;
        self.read_cache(index)?;
        products.run(&weights.output, buffers.attended, buffers.update, self.rows, buffers.split_sums)
    }

    /// Attention of all rows of a layer: spans of one row, as many at a time as there is room for their partial results,
    /// and the others.
    fn read_cache(&self, index: usize) -> Result<(), CudaError> {
        let (buffers, layer) = (&self.plan.buffers, &self.plan.layers[index]);
        let group = &self.prepared.groups[layer.group];
        let Some(kernels) = self.plan.attention.get(&layer.shape.head_size) else { return Ok(()) };
        let call = Attention {
            out: buffers.attended,
            queries: buffers.queries,
            cache: layer.cache,
            tables: self.input(group.tables),
            spans: Slice::none(),
            shape: layer.shape,
            window: layer.window,
        };
        let single = self.input(group.single);
        let chunks = self.prepared.chunks.max(1);
        let at_once = (buffers.num_partials / chunks).max(1) * SPAN_INTS;
        for first in (0..single.len).step_by(at_once) {
            let spans = single.part(first..single.len.min(first + at_once));
            let partials: &Partials = &buffers.partials;
            kernels.decode(&Attention { spans, ..call }, partials, chunks)?;
        }
        let tiles = self.prepared.tiles.get(&(layer.shape.num_heads / layer.shape.num_kv_heads));
        let Some(tiles) = tiles else { return Ok(()) };
        kernels.prefill(&Attention { spans: self.input(group.ragged), ..call }, self.input(*tiles))
    }

    fn feed_forward(&self, index: usize) -> Result<(), CudaError> {
        let (buffers, layer) = (&self.plan.buffers, &self.plan.layers[index]);
        let (weights, spec) = (&self.plan.weights.layers[index], &self.plan.spec.layers[index]);
        let products = &self.shared.products;
        self.normalize(weights.mlp_norm, spec.mlp_norm.epsilon, Some(buffers.update))?;
        products.run(&weights.gate_up, buffers.normed, buffers.projected, self.rows, buffers.split_sums)?;
        let width = layer.intermediate_size;
        self.shared.kernels.silu_and_mul(buffers.inner, buffers.projected, self.rows, width)?;
        products.run(&weights.down, buffers.inner, buffers.update, self.rows, buffers.split_sums)
    }

    /// Brings some rows of the residual stream, and of what is still to be added to it, to the head's own memory.
    fn gather(&self, rows: Slice<i32>) -> Result<Norm, CudaError> {
        let (buffers, spec) = (&self.plan.buffers, &self.plan.spec);
        let width = spec.hidden_size;
        self.shared.kernels.gather_rows(buffers.tile_hidden, buffers.hidden, rows, width)?;
        let update = (!self.plan.layers.is_empty()).then_some(buffers.tile_update);
        if update.is_some() {
            self.shared.kernels.gather_rows(buffers.tile_update, buffers.update, rows, width)?;
        }
        let (weight, epsilon) = (self.plan.weights.final_norm, spec.head.norm.epsilon);
        Ok(Norm { hidden: buffers.tile_hidden, update, weight, rows: rows.len, epsilon })
    }

    fn report_hidden(&self) -> Result<(), CudaError> {
        let (width, rows) = (self.plan.spec.hidden_size, self.input(self.prepared.hidden_rows));
        let out = self.plan.download.slice(self.prepared.hidden);
        for first in (0..rows.len).step_by(HEAD_ROWS) {
            let end = rows.len.min(first + HEAD_ROWS);
            let norm = self.gather(rows.part(first..end))?;
            self.shared.kernels.norm_f32(out.part(first * width..end * width), norm)?;
        }
        Ok(())
    }

    /// Logits of some draws and scores, and what is wanted of them. Scores are numbered after all draws.
    fn head(&self, first: usize, tile: &SamplerTile) -> Result<(), CudaError> {
        let (buffers, spec) = (&self.plan.buffers, &self.plan.spec);
        let rows = self.input(self.prepared.head_rows).part(first..first + tile.rows());
        let norm = self.gather(rows)?;
        self.shared.kernels.norm_bf16(buffers.tile_normed, norm)?;
        let (head, stride) = (&self.plan.weights.head, logit_stride(spec.vocab_size));
        let output = DenseOutput { sums: buffers.logits, stride, factor: spec.head.logit_scale };
        self.shared.products.dense(head, buffers.tile_normed, output, tile.rows())?;
        let at = TileLogits {
            logits: buffers.logits,
            stride,
            buffers: &buffers.sampler,
            upload: &self.plan.upload,
            download: &self.plan.download,
        };
        self.shared.sampler.run(tile, &at)
    }
}
