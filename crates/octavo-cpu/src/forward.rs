//! One step: every worker goes through all layers; each region ends with a barrier. In a step of many rows each worker
//! keeps some of them for its own, and they meet before and after attention only.
//!
//! SAFETY of the whole module: workers share buffers through raw places. Within a region, each item (a row, a row and
//! head, a range of tiles, a unit of attention) is handed out once and writes its own part of a buffer; what a region
//! reads was written in an earlier one. The barrier between regions makes it visible.

#[cfg(test)]
mod tests;

use std::ops::Range;

use octavo_backend::{
    BackendError, SampleError, Sampled, StepInputs, StepResult, TokenLogprobs,
    numerics::{ACTIVATION_GROUP, rms_norm},
};

use crate::{
    activation::{Activations, Norm, ROW_BLOCK},
    attention::{Attention, AttentionKernels},
    heads::HeadKernels,
    matmul::{Matmul, Mode, Output},
    pack::{PackedMatrix, TILE_ROWS},
    plan::{CpuPlan, GATED_COLUMNS, GATED_ROWS, LayerPlan},
    pointwise::GateKernel,
    pool::{Pool, Worker},
    sampler::{SPAN, Sampler, Scratch},
    work::Place,
};

/// The kernels of one instruction set.
pub struct Kernels {
    /// Of projections.
    pub matmul: Matmul,
    /// Of attention.
    pub attention: AttentionKernels,
    /// Of heads on their way to attention.
    pub heads: HeadKernels,
    /// Of the gated MLP.
    pub silu: GateKernel,
    /// Of draws and scores.
    pub sampler: Sampler,
}

/// What all workers of a step see.
pub struct Step<'a> {
    plan: &'a CpuPlan,
    inputs: &'a StepInputs,
    kernels: &'a Kernels,
    /// Set in a step of many rows: the rows of each worker.
    own_rows: Option<usize>,
    sampled: Results<Result<Sampled, SampleError>>,
    scores: Results<Result<TokenLogprobs, SampleError>>,
    hidden: Results<f32>,
}

/// Places in a step's result, each written by one worker.
struct Results<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: only an address; each place is written from one worker, which is what `Results::write` asks for.
unsafe impl<T: Send> Send for Results<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Results<T> {}

impl<T> Results<T> {
    fn of(places: &mut [T]) -> Results<T> {
        Results { start: places.as_mut_ptr(), len: places.len() }
    }

    /// # Safety
    /// The places live, and nobody else uses this one.
    unsafe fn write(&self, index: usize, value: T) {
        assert!(index < self.len);
        // SAFETY: in bounds, initialised, and exclusive by the contract.
        unsafe { *self.start.add(index) = value };
    }

    /// # Safety
    /// The places live, and nobody else uses these.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds, initialised, and exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Rows a worker needs to be worth reading all weights for: then it keeps its rows through a layer, whose values need not
/// travel between the workers' caches, and waits for the others around attention only.
const OWN_ROWS: usize = 64;

const _: () = assert!(SPAN.is_multiple_of(TILE_ROWS), "a span of logits is whole tiles");

/// How many rows each worker has for its own in a step of so many, if there are enough.
fn own_rows(rows: usize, workers: usize) -> Option<usize> {
    let own = rows.div_ceil(workers).next_multiple_of(ROW_BLOCK);
    // With rounding, the last worker could be left without any.
    (own >= OWN_ROWS && own * (workers - 1) < rows).then_some(own)
}

impl Step<'_> {
    /// Runs a step that [`CpuPlan::prepare`] has checked and planned.
    ///
    /// # Errors
    /// [`BackendError::Kernel`] if a worker panicked.
    pub fn run(
        plan: &CpuPlan,
        inputs: &StepInputs,
        kernels: &Kernels,
        pool: &mut Pool,
    ) -> Result<StepResult, BackendError> {
        let mut result = StepResult {
            sampled: vec![Err(SampleError::NotFinite); inputs.samples.len()],
            scores: vec![Err(SampleError::NotFinite); inputs.scores.len()],
            hidden: vec![0.0; inputs.hidden.len() * plan.spec.hidden_size],
        };
        let step = Step {
            plan,
            inputs,
            kernels,
            own_rows: own_rows(inputs.tokens.len(), pool.count()),
            sampled: Results::of(&mut result.sampled),
            scores: Results::of(&mut result.scores),
            hidden: Results::of(&mut result.hidden),
        };
        pool.run(|worker| step.work(worker))?;
        Ok(result)
    }

    fn work(&self, worker: &Worker<'_>) {
        self.copy_blocks(worker);
        self.embed(worker);
        for index in 0..self.plan.layers.len() {
            self.attend(worker, index);
            self.feed_forward(worker, index);
        }
        self.meet(worker);
        self.report_hidden(worker);
        let wanted = self.inputs.samples.len() + self.inputs.scores.len();
        for first in (0..wanted).step_by(self.plan.head_rows) {
            self.head(worker, first..wanted.min(first + self.plan.head_rows));
        }
    }

    fn copy_blocks(&self, worker: &Worker<'_>) {
        if self.inputs.groups.iter().all(|group| group.copies.is_empty()) {
            return;
        }
        worker.for_each(self.plan.layers.len(), 1, |layers| {
            for layer in layers {
                let copies = &self.inputs.groups[self.plan.layers[layer].shape.group].copies;
                // SAFETY: see the module; the blocks exist.
                unsafe { self.plan.cache.layer(layer).copy(copies) };
            }
        });
    }

    fn embed(&self, worker: &Worker<'_>) {
        let scale = self.plan.spec.embedding_scale;
        self.for_each_row(worker, |row| {
            // SAFETY: see the module.
            unsafe {
                let hidden = self.row_mut(self.plan.buffers.hidden, row, self.plan.spec.hidden_size);
                self.plan.weights.embedding.dequantize_row(self.inputs.tokens[row] as usize, hidden);
                hidden.iter_mut().for_each(|value| *value *= scale);
                for rope in &self.plan.buffers.ropes {
                    rope.compute(&self.plan.memory, row, self.plan.rows[row].position);
                }
            }
        });
    }

    fn attend(&self, worker: &Worker<'_>, index: usize) {
        let (plan, weights) = (&self.plan.layers[index], &self.plan.weights.layers[index]);
        let epsilon = self.plan.spec.layers[index].attention_norm.epsilon;
        let norm = Norm { weight: &weights.attention_norm, epsilon };
        let inputs = &self.plan.inputs.activations[plan.qkv];
        self.normalize(worker, inputs, norm);
        self.project(worker, &weights.qkv, inputs, self.projected(weights.qkv.rows()));
        self.store(worker, index, plan);
        let attention = Attention {
            kernels: &self.kernels.attention,
            shape: plan.shape,
            layer: self.plan.cache.layer(index),
            inputs: self.inputs,
            schedule: &self.plan.schedules[plan.schedule],
            memory: &self.plan.memory,
            buffers: &self.plan.buffers.attention,
        };
        self.meet(worker);
        let units = attention.schedule.units();
        worker.for_each_in_order(units.len(), |range| {
            // SAFETY: see the module; this worker's index is its own.
            unsafe { attention.run(&units[range], worker.index) };
        });
        let inputs = &self.plan.inputs.activations[plan.output];
        self.for_each_row(worker, |row| {
            // SAFETY: see the module.
            unsafe {
                attention.merge_row(row, worker.index);
                inputs.write_row(row, self.row(self.plan.buffers.attention.outputs, row, inputs.columns()));
            }
        });
        self.project(worker, &weights.output, inputs, self.residual());
    }

    /// Rotates queries and keys; queries are scaled and rounded into their buffer, keys and values into the cache.
    fn store(&self, worker: &Worker<'_>, index: usize, plan: &LayerPlan) {
        let shape = &plan.shape;
        let head_size = shape.head_size;
        let width = (shape.num_heads + 2 * shape.num_kv_heads) * head_size;
        let layer = self.plan.cache.layer(index);
        let rope = &self.plan.buffers.ropes[plan.rope];
        let scale = self.plan.spec.layers[index].attention.scale;
        self.for_each_row(worker, |row| {
            let place = self.plan.rows[row];
            let block = self.inputs.groups[shape.group].table(place.span)[place.position / layer.block_size()];
            let head = |head: usize| row * width + head * head_size..row * width + (head + 1) * head_size;
            // SAFETY: see the module; the step's check lets no two rows share a slot.
            let heads = |index| unsafe { self.plan.memory.write(self.plan.buffers.projected, head(index)) };
            let kernels = &self.kernels.heads;
            // SAFETY: see the module.
            let (cosines, sines) = unsafe { rope.of_row(&self.plan.memory, row) };
            for index in 0..shape.num_heads {
                let query = heads(index);
                kernels.rotate(query, cosines, sines);
                let (memory, buffers) = (&self.plan.memory, &self.plan.buffers.attention);
                let at = row * shape.num_heads + index;
                // SAFETY: as above.
                unsafe { buffers.write_query(memory, kernels, layer.kind(), at, query, scale) };
            }
            for kv_head in 0..shape.num_kv_heads {
                let key = heads(shape.num_heads + kv_head);
                let value = heads(shape.num_heads + shape.num_kv_heads + kv_head);
                kernels.rotate(key, cosines, sines);
                let slot = place.position % layer.block_size();
                // SAFETY: as above.
                unsafe { layer.write(kernels, block as usize, slot, kv_head, key, value) };
            }
        });
    }

    fn feed_forward(&self, worker: &Worker<'_>, index: usize) {
        let (plan, weights) = (&self.plan.layers[index], &self.plan.weights.layers[index]);
        let epsilon = self.plan.spec.layers[index].mlp_norm.epsilon;
        let norm = Norm { weight: &weights.mlp_norm, epsilon };
        let inputs = &self.plan.inputs.activations[plan.gate_up];
        self.normalize(worker, inputs, norm);
        let gated = &self.plan.inputs.activations[plan.down];
        // Narrow pieces are more overhead, and share the work out better.
        let is_enough = plan.intermediate_size >= 4 * worker.count * GATED_COLUMNS;
        let width = if is_enough { GATED_COLUMNS } else { ACTIVATION_GROUP };
        let pieces = plan.intermediate_size.div_ceil(width);
        self.for_each_part(worker, pieces, GATED_ROWS, |rows, pieces| {
            for piece in pieces {
                let columns = piece * width..plan.intermediate_size.min((piece + 1) * width);
                self.gate(worker, &weights.gate_up, inputs, rows.clone(), columns, gated);
            }
        });
        self.project(worker, &weights.down, gated, self.residual());
    }

    /// Some rows and columns of the MLP's inner state, rounded for the projection down.
    fn gate(
        &self,
        worker: &Worker<'_>,
        gate_up: &PackedMatrix,
        inputs: &Activations,
        rows: Range<usize>,
        columns: Range<usize>,
        gated: &Activations,
    ) {
        let place = self.plan.buffers.gated[worker.index];
        // SAFETY: the worker's own place.
        let (gate, up) = unsafe { self.plan.memory.write(place, 0..place.len()) }.split_at_mut(place.len() / 2);
        for (half, part) in [&mut *gate, &mut *up].into_iter().zip(gate_up.parts()) {
            let tiles = part.first_tile + columns.start / TILE_ROWS..part.first_tile + columns.end.div_ceil(TILE_ROWS);
            let first = part.first_row + columns.start;
            let output = Output::window(half.as_mut_ptr(), GATED_COLUMNS, rows.start, first, Mode::Store);
            // SAFETY: see the module; the place holds all rows and columns.
            unsafe { self.kernels.matmul.run(gate_up, inputs, rows.clone(), tiles, output) };
        }
        let halves = gate.chunks_exact_mut(GATED_COLUMNS).zip(up.chunks_exact(GATED_COLUMNS));
        for (row, (gate, up)) in rows.zip(halves) {
            let gate = &mut gate[..columns.len()];
            self.kernels.silu.apply(gate, &up[..columns.len()]);
            // SAFETY: see the module.
            unsafe { gated.write_columns(row, columns.start, gate) };
        }
    }

    /// The hidden states that are wanted.
    fn report_hidden(&self, worker: &Worker<'_>) {
        if self.inputs.hidden.is_empty() {
            return;
        }
        let (width, epsilon) = (self.plan.spec.hidden_size, self.plan.spec.head.norm.epsilon);
        worker.for_each(self.inputs.hidden.len(), 1, |range| {
            for index in range {
                // SAFETY: see the module.
                unsafe {
                    let hidden = self.row(self.plan.buffers.hidden, self.inputs.hidden[index], width);
                    let wanted = self.hidden.slice(index * width..(index + 1) * width);
                    rms_norm(hidden, &self.plan.weights.final_norm, epsilon, wanted);
                }
            }
        });
    }

    /// Logits of up to [`CpuPlan::head_rows`] samples and scores, and what is wanted of them. Scores are numbered after
    /// all samples.
    fn head(&self, worker: &Worker<'_>, wanted: Range<usize>) {
        let head = self.plan.weights.head();
        let inputs = &self.plan.inputs.activations[self.plan.inputs.head];
        let norm = Norm { weight: &self.plan.weights.final_norm, epsilon: self.plan.spec.head.norm.epsilon };
        worker.for_each(wanted.len(), 1, |range| {
            for index in range {
                let row = self.row_of(wanted.start + index);
                // SAFETY: see the module.
                unsafe {
                    let hidden = self.row(self.plan.buffers.hidden, row, self.plan.spec.hidden_size);
                    inputs.write_normalized_row(index, hidden, norm);
                }
            }
        });
        let logits = self.plan.buffers.logits;
        let vocab_size = self.plan.spec.vocab_size;
        let output = Output { start: self.plan.memory.pointer(logits), stride: vocab_size, mode: Mode::Store };
        let spans = self.plan.spec.head.num_tokens.div_ceil(SPAN);
        worker.for_each_in_order(spans, |range| {
            for span in range {
                let tiles = span * SPAN / TILE_ROWS..head.tiles().min((span + 1) * SPAN / TILE_ROWS);
                // SAFETY: see the module.
                unsafe { self.kernels.matmul.run(head, inputs, 0..wanted.len(), tiles, output) };
                for index in 0..wanted.len() {
                    self.finish_logits(index, span);
                }
            }
        });
        worker.for_each(wanted.len(), 1, |range| {
            for index in range {
                // SAFETY: see the module.
                let (row, maxima, mut scratch) = unsafe {
                    let scratch = self.plan.buffers.sampler.scratch(&self.plan.memory, worker, index);
                    let maxima = self.row(self.plan.buffers.span_maxima, index, spans);
                    (self.row_mut(logits, index, vocab_size), maxima, scratch)
                };
                let row = &mut row[..self.plan.spec.head.num_tokens];
                self.draw(wanted.start + index, row, maxima, &mut scratch);
            }
        });
    }

    /// Scales a span of logits, and finds the largest of them, while they are in the cache of who computed them.
    fn finish_logits(&self, index: usize, span: usize) {
        let head = &self.plan.spec.head;
        let first = index * self.plan.spec.vocab_size;
        let range = first + span * SPAN..first + head.num_tokens.min((span + 1) * SPAN);
        let place = index * head.num_tokens.div_ceil(SPAN) + span;
        // SAFETY: see the module; a span is handed out with its part of all rows.
        unsafe {
            let logits = self.plan.memory.write(self.plan.buffers.logits, range);
            if head.logit_scale != 1.0 {
                logits.iter_mut().for_each(|logit| *logit *= head.logit_scale);
            }
            let maximum = self.kernels.sampler.span_maximum(logits);
            self.plan.memory.write(self.plan.buffers.span_maxima, place..place + 1)[0] = maximum;
        }
    }

    fn row_of(&self, wanted: usize) -> usize {
        let StepInputs { samples, scores, .. } = self.inputs;
        samples.get(wanted).map_or_else(|| scores[wanted - samples.len()].row, |sample| sample.row)
    }

    /// Draws from a row of logits, or scores it.
    fn draw(&self, wanted: usize, logits: &mut [f32], maxima: &[f32], scratch: &mut Scratch<'_>) {
        let StepInputs { samples, scores, .. } = self.inputs;
        let sampler = &self.kernels.sampler;
        // SAFETY: each index is handed out once, and `run` reads after all workers have left.
        unsafe {
            match samples.get(wanted) {
                Some(sample) => self.sampled.write(wanted, sampler.sample(logits, maxima, sample, scratch)),
                None => {
                    let index = wanted - samples.len();
                    self.scores.write(index, sampler.score(logits, maxima, &scores[index], scratch));
                }
            }
        }
    }

    /// One region: rounds the norm of every row of the residual stream.
    fn normalize(&self, worker: &Worker<'_>, inputs: &Activations, norm: Norm<'_>) {
        self.for_each_row(worker, |row| {
            // SAFETY: see the module.
            unsafe {
                let hidden = self.row(self.plan.buffers.hidden, row, self.plan.spec.hidden_size);
                inputs.write_normalized_row(row, hidden, norm);
            }
        });
    }

    /// One region: a matmul over all rows.
    fn project(&self, worker: &Worker<'_>, matrix: &PackedMatrix, inputs: &Activations, output: Output) {
        // The matrix unit takes two tiles at a time.
        let at_once = if self.inputs.tokens.len() > 1 { 2 } else { 1 };
        self.for_each_part(worker, matrix.tiles().div_ceil(at_once), usize::MAX, |rows, range| {
            let tiles = range.start * at_once..matrix.tiles().min(range.end * at_once);
            // SAFETY: see the module; the buffers are sized for the widest layer.
            unsafe { self.kernels.matmul.run(matrix, inputs, rows, tiles, output) };
        });
    }

    fn projected(&self, width: usize) -> Output {
        Output { start: self.plan.memory.pointer(self.plan.buffers.projected), stride: width, mode: Mode::Store }
    }

    fn residual(&self) -> Output {
        let stride = self.plan.spec.hidden_size;
        Output { start: self.plan.memory.pointer(self.plan.buffers.hidden), stride, mode: Mode::Add }
    }

    /// The rows of this worker, in a step in which every worker has its own.
    fn own_rows(&self, worker: &Worker<'_>) -> Option<Range<usize>> {
        let rows = self.inputs.tokens.len();
        self.own_rows.map(|own| (worker.index * own).min(rows)..((worker.index + 1) * own).min(rows))
    }

    /// Work on rows: in one region, or each worker on its own rows, without waiting for others.
    fn for_each_row(&self, worker: &Worker<'_>, mut body: impl FnMut(usize)) {
        match self.own_rows(worker) {
            Some(rows) => rows.for_each(body),
            None => {
                let rows = self.inputs.tokens.len();
                worker.for_each(rows, rows / (8 * worker.count), |range| range.for_each(&mut body));
            }
        }
    }

    /// Work on all rows, at most `most_rows` at a time, and `pieces` of a matrix: in one region, or each worker on its
    /// own rows and all pieces, without waiting for others.
    fn for_each_part(
        &self,
        worker: &Worker<'_>,
        pieces: usize,
        most_rows: usize,
        mut body: impl FnMut(Range<usize>, Range<usize>),
    ) {
        if let Some(own) = self.own_rows(worker) {
            for start in own.clone().step_by(most_rows) {
                body(start..own.end.min(start.saturating_add(most_rows)), 0..pieces);
            }
            return;
        }
        let rows = self.inputs.tokens.len();
        for start in (0..rows).step_by(most_rows) {
            let rows = start..rows.min(start.saturating_add(most_rows));
            worker.for_each_in_order(pieces, |pieces| body(rows.clone(), pieces));
        }
    }

    /// Waits for all workers where regions have not done so: what they did to their rows is then visible to all.
    fn meet(&self, worker: &Worker<'_>) {
        if self.own_rows.is_some() {
            worker.barrier();
        }
    }

    /// # Safety
    /// Nobody writes the row.
    unsafe fn row(&self, place: Place<f32>, row: usize, width: usize) -> &[f32] {
        // SAFETY: by the contract.
        unsafe { self.plan.memory.read(place, row * width..(row + 1) * width) }
    }

    /// # Safety
    /// Nobody else uses the row.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row_mut(&self, place: Place<f32>, row: usize, width: usize) -> &mut [f32] {
        // SAFETY: by the contract.
        unsafe { self.plan.memory.write(place, row * width..(row + 1) * width) }
    }
}
