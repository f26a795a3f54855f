//! Paged attention: cuts a step into units of work and runs them.
//!
//! A unit is a tile of up to 16 rows that read the same KV head of the same sequence: the query heads of its group, of one
//! token or of several. The head's keys and values are read once for all of them. Positions are cut in chunks at 0, 256,
//! 512, ...; each chunk's partial result is finished before it is merged into those of the chunks before it. Short spans
//! over long contexts have their chunks spread over the workers, all others walk them in order: the same tree of
//! operations either way.

mod chunk;
mod integers;
mod kernel;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod matrix_unit;
mod merge;
mod schedule;
#[cfg(test)]
mod tests;

use std::ops::Range;

use octavo_backend::{AttentionSpec, GroupInputs, KvType, StepInputs};

pub use chunk::{CHUNK, MAX_TILE};
pub use schedule::{AttentionSchedule, Unit};

use crate::{
    heads::HeadKernels,
    isa::Isa,
    kv::KvLayer,
    work::{Place, WorkLayout, WorkMemory},
};
use chunk::{ChunkTask, GROUP};
use half::bf16;
use integers::integer_chunk_kernel;
use kernel::{VECTOR_TILE, chunk_kernel};
use merge::{finish_kernel, merge_kernel, state_len};

/// What two layers must share for the same units of work to serve both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// The KV group, which decides the block tables.
    pub group: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_size: usize,
    /// Position `p` sees positions `> p - window`.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// The shape of one layer's attention.
    pub fn of(attention: &AttentionSpec, group: usize) -> AttentionShape {
        AttentionShape {
            group,
            num_heads: attention.num_heads,
            num_kv_heads: attention.num_kv_heads,
            head_size: attention.head_size,
            window: attention.window,
        }
    }

    /// Query heads that read one KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// The positions that a row at `position` sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
    }
}

type ChunkKernel = unsafe fn(&ChunkTask<'_>);

/// The kernels of one instruction set.
pub struct AttentionKernels {
    isa: Isa,
    chunks: [ChunkKernel; VECTOR_TILE],
    integer_chunks: [ChunkKernel; VECTOR_TILE],
    merge: unsafe fn(*mut f32, *const f32, usize),
    finish: unsafe fn(*const f32, *mut f32, usize),
}

/// Rows of a full tile on an instruction set.
pub fn tile(isa: Isa, head_size: usize) -> usize {
    match isa {
        Isa::Scalar | Isa::Avx2 | Isa::AvxVnni | Isa::Neon => 4,
        _ if has_matrix_unit(isa, head_size) => MAX_TILE,
        _ => VECTOR_TILE,
    }
}

/// True when there is a matrix unit that takes heads of this size.
fn has_matrix_unit(isa: Isa, head_size: usize) -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        isa == Isa::Amx && matrix_unit::takes(head_size)
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    {
        let _ = (isa, head_size);
        false
    }
}

/// True when a tile goes to the matrix unit: fewer rows are faster without.
fn uses_matrix_unit(isa: Isa, head_size: usize, rows: usize) -> bool {
    rows > VECTOR_TILE && has_matrix_unit(isa, head_size)
}

impl AttentionKernels {
    /// The kernels for `isa`, which this machine must have.
    pub fn new(isa: Isa) -> AttentionKernels {
        AttentionKernels {
            isa,
            chunks: [
                chunk_kernel::<1>(isa),
                chunk_kernel::<2>(isa),
                chunk_kernel::<3>(isa),
                chunk_kernel::<4>(isa),
                chunk_kernel::<5>(isa),
                chunk_kernel::<6>(isa),
                chunk_kernel::<7>(isa),
                chunk_kernel::<8>(isa),
            ],
            integer_chunks: [
                integer_chunk_kernel::<1>(isa),
                integer_chunk_kernel::<2>(isa),
                integer_chunk_kernel::<3>(isa),
                integer_chunk_kernel::<4>(isa),
                integer_chunk_kernel::<5>(isa),
                integer_chunk_kernel::<6>(isa),
                integer_chunk_kernel::<7>(isa),
                integer_chunk_kernel::<8>(isa),
            ],
            merge: merge_kernel(isa),
            finish: finish_kernel(isa),
        }
    }

    /// # Safety
    /// The task is one that a kernel for its head size takes.
    unsafe fn run(&self, task: &ChunkTask<'_>) {
        // SAFETY: by the contract; the kernels were made for an instruction set that is there.
        unsafe {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if uses_matrix_unit(self.isa, task.layer.head_size(), task.rows) {
                return match task.layer.kind() {
                    KvType::Int8 => matrix_unit::integers::attend_chunk(task),
                    _ => matrix_unit::attend_chunk(task),
                };
            }
            match task.layer.kind() {
                KvType::Int8 => self.integer_chunks[task.rows - 1](task),
                _ => self.chunks[task.rows - 1](task),
            }
        }
    }
}

/// Places of everything that attention reads and writes besides the cache.
#[derive(Debug, Clone)]
pub struct AttentionBuffers {
    /// Queries, rotated, scaled and rounded, `[rows, num_heads * head_size]`: bfloat16, or for an 8-bit cache the two planes
    /// of each head.
    queries: Place<u16>,
    /// Of planes, what the codes are to be multiplied by, and their sum: `[rows, num_heads][2]`.
    query_scales: Place<f32>,
    /// The result, `[rows, num_heads * head_size]`.
    pub outputs: Place<f32>,
    /// Partial results of spans whose chunks are spread.
    partials: Place<f32>,
    /// What a worker has for itself.
    workers: Vec<WorkerBuffers>,
}

#[derive(Debug, Clone, Copy)]
struct WorkerBuffers {
    /// In the kernel's layout, at most `[VECTOR_TILE][head_size]` or half as many bytes for each of `MAX_TILE` rows.
    queries: Place<f32>,
    /// Of the chunks so far, then of the current one: `[2][MAX_TILE][state_len]`.
    states: Place<f32>,
    /// `[MAX_TILE][head_size]`.
    sums: Place<f32>,
    copies: Place<u16>,
}

impl AttentionBuffers {
    /// Plans buffers for steps of up to `max_rows` rows and shapes up to the given sizes.
    pub fn new(layout: &mut WorkLayout, max_rows: usize, sizes: AttentionSizes, workers: usize) -> AttentionBuffers {
        let head_size = sizes.head_size;
        AttentionBuffers {
            queries: layout.place(max_rows * sizes.width),
            query_scales: layout.place(2 * max_rows * sizes.num_heads),
            outputs: layout.place(max_rows * sizes.width),
            partials: layout.place(sizes.partials * state_len(head_size)),
            workers: (0..workers)
                .map(|_| WorkerBuffers {
                    queries: layout.place(VECTOR_TILE * head_size),
                    states: layout.place(2 * MAX_TILE * state_len(head_size)),
                    sums: layout.place(MAX_TILE * head_size),
                    copies: layout.place(GROUP * 2 * head_size),
                })
                .collect(),
        }
    }

    /// Scales and rounds a rotated query as attention to a cache of this kind takes it; `index` counts all heads of all rows
    /// of its layer.
    ///
    /// # Safety
    /// Nobody else accesses this query.
    pub unsafe fn write_query(
        &self,
        memory: &WorkMemory,
        kernels: &HeadKernels,
        kind: KvType,
        index: usize,
        query: &[f32],
        scale: f32,
    ) {
        let head_size = query.len();
        // SAFETY: by the contract.
        unsafe {
            let rounded = memory.write(self.queries, index * head_size..(index + 1) * head_size);
            if kind == KvType::Int8 {
                let planes = std::slice::from_raw_parts_mut(rounded.as_mut_ptr().cast::<i8>(), 2 * head_size);
                let scales = kernels.to_planes(query, scale, planes);
                memory.write(self.query_scales, 2 * index..2 * index + 2).copy_from_slice(&scales);
            } else {
                kernels.to_bf16(query, scale, rounded);
            }
        }
    }
}

/// The largest of all layers.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionSizes {
    /// Query heads.
    pub num_heads: usize,
    /// Width of one head.
    pub head_size: usize,
    /// Width of all query heads.
    pub width: usize,
    /// Partial states, one for each row, query head and chunk that is spread.
    pub partials: usize,
}

/// One layer's attention in one step, as every worker sees it.
pub struct Attention<'a> {
    /// The instruction set's kernels.
    pub kernels: &'a AttentionKernels,
    /// The layer's shape.
    pub shape: AttentionShape,
    /// The layer's cache.
    pub layer: KvLayer<'a>,
    /// The step.
    pub inputs: &'a StepInputs,
    /// Its units.
    pub schedule: &'a AttentionSchedule,
    /// Where the data is.
    pub memory: &'a WorkMemory,
    /// Places in it.
    pub buffers: &'a AttentionBuffers,
}

impl Attention<'_> {
    fn table(&self) -> &GroupInputs {
        &self.inputs.groups[self.shape.group]
    }

    /// Runs some units, one after another, on worker `worker`.
    ///
    /// # Safety
    /// All queries, keys and values of the step are in place and nobody writes them; no other worker runs these units or
    /// has this index.
    pub unsafe fn run(&self, units: &[Unit], worker: usize) {
        for (index, unit) in units.iter().enumerate() {
            // SAFETY: by the contract.
            unsafe { self.run_unit(unit, units.get(index + 1), worker) }
        }
    }

    /// # Safety
    /// That of [`Attention::run`].
    unsafe fn run_unit(&self, unit: &Unit, next: Option<&Unit>, worker: usize) {
        let own = &self.buffers.workers[worker];
        let stride = state_len(self.shape.head_size);
        let next = next.map(|unit| (unit, unit.first_chunk(self)));
        // SAFETY: the worker's own place.
        let states = unsafe { self.memory.write(own.states, 0..2 * MAX_TILE * stride) };
        let (so_far, current) = states.split_at_mut(MAX_TILE * stride);
        let mut task = ChunkTask {
            layer: self.layer,
            table: self.table().table(unit.span),
            head: unit.head,
            rows: unit.rows,
            queries: self.memory.pointer(own.queries),
            query_scales: self.query_scales(unit),
            visible: [const { 0..0 }; MAX_TILE],
            states: current.as_mut_ptr(),
            sums: self.memory.pointer(own.sums),
            copies: self.memory.pointer(own.copies),
            following: self.first_keys(next),
        };
        // SAFETY: the worker's own places, sized for the largest head and tile; the caller vouches for the cache.
        unsafe {
            self.gather_queries(unit, self.memory.write(own.queries, 0..VECTOR_TILE * self.shape.head_size));
            if let Some(spread) = unit.spread {
                let at = spread.partial * stride;
                task.states = self.memory.write(self.buffers.partials, at..at + unit.rows * stride).as_mut_ptr();
                self.run_chunk(unit, spread.chunk, &mut task);
                return;
            }
            for row in 0..unit.rows {
                so_far[row * stride + 1] = 0.0;
            }
            let chunks = unit.chunks(self);
            for chunk in chunks.clone() {
                task.following = self.first_keys((chunk + 1 < chunks.end).then_some((unit, chunk + 1)).or(next));
                self.run_chunk(unit, chunk, &mut task);
                for row in 0..unit.rows {
                    let at = row * stride;
                    (self.kernels.merge)(so_far[at..].as_mut_ptr(), task.states.add(at), self.shape.head_size);
                }
            }
            for row in 0..unit.rows {
                let (token, head) = unit.row(self, row);
                self.finish(so_far[row * stride..].as_ptr(), token, head);
            }
        }
    }

    /// Where a unit finds the first keys of a chunk.
    fn first_keys(&self, wanted: Option<(&Unit, usize)>) -> [*const u16; chunk::SUB_BLOCKS] {
        let Some((unit, chunk)) = wanted else { return [std::ptr::null(); chunk::SUB_BLOCKS] };
        let span = &self.inputs.spans[unit.span];
        let position = |index| span.start + unit.row(self, index).0 - span.first_row;
        let seen = self.shape.visible(position(0)).start.max(chunk * CHUNK)..position(unit.rows - 1) + 1;
        chunk::sub_blocks_at(&self.layer, self.table().table(unit.span), unit.head, seen.start / GROUP * GROUP, &seen)
    }

    /// # Safety
    /// That of [`Attention::run`]; the task's pointers are sound.
    unsafe fn run_chunk(&self, unit: &Unit, chunk: usize, task: &mut ChunkTask<'_>) {
        let positions = chunk * CHUNK..(chunk + 1) * CHUNK;
        let span = &self.inputs.spans[unit.span];
        for (row, range) in task.visible[..unit.rows].iter_mut().enumerate() {
            let (token, _) = unit.row(self, row);
            let visible = self.shape.visible(span.start + token - span.first_row);
            let start = visible.start.max(positions.start);
            *range = start..visible.end.min(positions.end).max(start);
        }
        // SAFETY: by the contract.
        unsafe { self.kernels.run(task) }
    }

    /// What comes with queries in planes.
    fn query_scales(&self, unit: &Unit) -> [[f32; 2]; MAX_TILE] {
        let mut scales = [[0.0; 2]; MAX_TILE];
        if self.layer.kind() == KvType::Int8 {
            for (row, scales) in scales[..unit.rows].iter_mut().enumerate() {
                let (token, head) = unit.row(self, row);
                let at = 2 * (token * self.shape.num_heads + head);
                // SAFETY: the caller of `run` says that nobody writes queries now.
                scales.copy_from_slice(unsafe { self.memory.read(self.buffers.query_scales, at..at + 2) });
            }
        }
        scales
    }

    /// Brings the tile's queries into the kernel's layout: as they are for the matrix unit, planes before rows; else
    /// `[head_size / 2][rows][2]` as floats, or `[head_size / 4][rows][2 planes][4]`, so that the kernel's broadcasts read
    /// them one after another.
    fn gather_queries(&self, unit: &Unit, gathered: &mut [f32]) {
        let head_size = self.shape.head_size;
        let as_they_are = uses_matrix_unit(self.kernels.isa, head_size, unit.rows);
        for row in 0..unit.rows {
            let (token, head) = unit.row(self, row);
            let at = (token * self.shape.num_heads + head) * head_size;
            // SAFETY: the caller of `run` says that nobody writes queries now.
            let query = unsafe { self.memory.read(self.buffers.queries, at..at + head_size) };
            if self.layer.kind() == KvType::Int8 {
                let lanes = head_size / 4;
                // SAFETY: as many bytes, whose alignment is that of floats; any bits are a float.
                let (planes, to) = unsafe {
                    let planes = std::slice::from_raw_parts(query.as_ptr().cast::<[u8; 4]>(), 2 * lanes);
                    let to = gathered.as_mut_ptr().cast::<[u8; 4]>();
                    (planes, std::slice::from_raw_parts_mut(to, gathered.len()))
                };
                for (plane, planes) in planes.chunks_exact(lanes).enumerate() {
                    if as_they_are {
                        to[(plane * unit.rows + row) * lanes..][..lanes].copy_from_slice(planes);
                        continue;
                    }
                    for (lane, codes) in planes.iter().enumerate() {
                        to[(lane * unit.rows + row) * 2 + plane] = *codes;
                    }
                }
                continue;
            }
            if as_they_are {
                let to = gathered[row * head_size / 2..][..head_size / 2].as_mut_ptr().cast::<u16>();
                // SAFETY: as many bytes, and any bits are a float.
                unsafe { to.copy_from_nonoverlapping(query.as_ptr(), head_size) };
                continue;
            }
            for (pair, query) in query.as_chunks::<2>().0.iter().enumerate() {
                let floats = query.map(|bits| bf16::from_bits(bits).to_f32());
                gathered[(pair * unit.rows + row) * 2..][..2].copy_from_slice(&floats);
            }
        }
    }

    /// # Safety
    /// A state of this shape; nobody else has this row and head of the output.
    unsafe fn finish(&self, state: *const f32, row: usize, head: usize) {
        let head_size = self.shape.head_size;
        let at = (row * self.shape.num_heads + head) * head_size;
        // SAFETY: by the contract.
        unsafe {
            let output = self.memory.write(self.buffers.outputs, at..at + head_size);
            (self.kernels.finish)(state, output.as_mut_ptr(), head_size);
        }
    }

    /// Merges the spread chunks of one row, if it has any, and writes its output.
    ///
    /// # Safety
    /// All units have been run; no other worker merges this row or has this index.
    pub unsafe fn merge_row(&self, row: usize, worker: usize) {
        if self.schedule.spreads_of(row).next().is_none() {
            return;
        }
        let stride = state_len(self.shape.head_size);
        let group_size = self.shape.group_size();
        for head in 0..self.shape.num_heads {
            // SAFETY: the worker's own place; partials are only read now.
            unsafe {
                let so_far = self.memory.write(self.buffers.workers[worker].states, 0..stride);
                so_far[1] = 0.0;
                for spread in self.schedule.spreads_of(row) {
                    for chunk in 0..spread.num_chunks {
                        let unit = spread.first_partial(chunk, head / group_size, self.shape.num_kv_heads);
                        let at = (unit + (row - spread.first_row) * group_size + head % group_size) * stride;
                        let from = self.memory.read(self.buffers.partials, at..at + stride);
                        (self.kernels.merge)(so_far.as_mut_ptr(), from.as_ptr(), self.shape.head_size);
                    }
                }
                self.finish(so_far.as_ptr(), row, head);
            }
        }
    }
}
