//! One attention problem: sequences with their keys and values in a paged cache, what the kernels make of it, and what
//! they should.

use half::bf16;
use ptxsim::{Fault, Kernel, Report};

use crate::device::{Arguments, Device, Extent, Noise, kernel_of};

pub const CHUNK: usize = 256;
const TILE_ROWS: usize = 64;

/// The heads, and what a row sees. A window or softcap of 0 is none.
#[derive(Clone, Copy)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub size: usize,
    pub block_size: usize,
    pub window: usize,
    pub softcap: f32,
}

impl Shape {
    pub fn plain(heads: usize, kv_heads: usize, size: usize) -> Shape {
        Shape { heads, kv_heads, size, block_size: 16, window: 0, softcap: 0.0 }
    }

    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn first_seen(&self, position: usize) -> usize {
        if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) }
    }

    pub fn decode_shared(&self) -> usize {
        if self.size > 128 { 288 * (self.size + 8) + 1552 } else { 544 * (self.size + 8) + 2576 }
    }

    pub fn prefill_shared(&self) -> usize {
        if self.size > 128 { 256 * (self.size + 8) + 5648 } else { 384 * (self.size + 8) + 16 }
    }
}

/// Rows of one sequence: `len` of them from position `start` on.
#[derive(Clone, Copy)]
pub struct Span {
    pub start: usize,
    pub len: usize,
}

/// The problem on a device. All rows of all spans follow each other; a row of `queries` and of the results is
/// `heads * size` wide.
pub struct Case {
    pub device: Device,
    shape: Shape,
    spans: Vec<Span>,
    queries: Vec<bf16>,
    /// By sequence and position: `[kv_heads, size]` each.
    keys: Vec<Vec<Vec<bf16>>>,
    values: Vec<Vec<Vec<bf16>>>,
    tables: Vec<i32>,
    table_starts: Vec<usize>,
    num_blocks: usize,
    pub addresses: Addresses,
    /// Bytes of shared memory that a launch is denied.
    pub denied: usize,
}

#[derive(Clone, Copy, Default)]
pub struct Addresses {
    pub queries: u64,
    pub keys: u64,
    pub values: u64,
    pub tables: u64,
}

/// What a launch gave, and what it moved.
pub struct Outcome {
    pub out: Vec<bf16>,
    pub report: Report,
}

impl Case {
    /// Random queries, keys and values; slots that are not filled hold NaN, and so do blocks before a window, whose table
    /// entries lead nowhere.
    pub fn new(shape: Shape, spans: &[Span]) -> Case {
        let mut noise = Noise::new(shape.size as u64 + spans.len() as u64);
        let rows: usize = spans.iter().map(|span| span.len).sum();
        let round = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let scale = 3.0 / (shape.size as f32).sqrt();
        let queries = round(noise.vector(rows * shape.heads * shape.size).iter().map(|v| v * scale).collect());
        let width = shape.kv_heads * shape.size;
        let mut sequence = |scale: f32| -> Vec<Vec<Vec<bf16>>> {
            let token = |noise: &mut Noise| round(noise.vector(width).iter().map(|v| v * scale).collect());
            spans.iter().map(|span| (0..span.start + span.len).map(|_| token(&mut noise)).collect()).collect()
        };
        let (keys, values) = (sequence(2.0), sequence(1.0));
        let mut case = Case {
            device: Device::new(),
            shape,
            spans: spans.to_vec(),
            queries,
            keys,
            values,
            tables: Vec::new(),
            table_starts: Vec::new(),
            num_blocks: 0,
            addresses: Addresses::default(),
            denied: 0,
        };
        case.place_blocks();
        case.upload();
        case
    }

    /// Replaces one key and value of one sequence, all heads.
    pub fn overwrite(&mut self, sequence: usize, position: usize, key: f32, value: f32) {
        self.keys[sequence][position].fill(bf16::from_f32(key));
        self.values[sequence][position].fill(bf16::from_f32(value));
        self.upload();
    }

    /// Blocks in an order that looks random, with unused ones between.
    fn place_blocks(&mut self) {
        let size = self.shape.block_size;
        let needed: usize = self.spans.iter().map(|span| (span.start + span.len).div_ceil(size)).sum();
        self.num_blocks = 2 * needed + 1;
        let mut free: Vec<i32> = (0..self.num_blocks as i32).collect();
        let mut noise = Noise::new(9);
        for span in &self.spans {
            self.table_starts.push(self.tables.len());
            for block in 0..(span.start + span.len).div_ceil(size) {
                let is_seen = (block + 1) * size > self.shape.first_seen(span.start);
                self.tables.push(if is_seen { free.swap_remove(noise.below(free.len())) } else { i32::MAX });
            }
        }
    }

    fn upload(&mut self) {
        let Shape { kv_heads, size, block_size, .. } = self.shape;
        let len = self.num_blocks * kv_heads * block_size * size;
        let unused = bf16::from_bits(0xffff);
        let (mut keys, mut values) = (vec![unused; len], vec![unused; len]);
        for (sequence, first) in self.table_starts.iter().enumerate() {
            for position in 0..self.keys[sequence].len() {
                let block = self.tables[first + position / block_size];
                if block == i32::MAX {
                    continue;
                }
                for head in 0..kv_heads {
                    let row = (block as usize * kv_heads + head) * block_size + position % block_size;
                    let (to, from) = (row * size..(row + 1) * size, head * size..(head + 1) * size);
                    keys[to.clone()].copy_from_slice(&self.keys[sequence][position][from.clone()]);
                    values[to].copy_from_slice(&self.values[sequence][position][from]);
                }
            }
        }
        self.addresses = Addresses {
            queries: self.device.upload(&self.queries),
            keys: self.device.upload(&keys),
            values: self.device.upload(&values),
            tables: self.device.upload(&self.tables),
        };
    }

    /// Every row on its own, as a span of one; a span of no rows is padding, whose numbers lead nowhere.
    fn single_rows(&self) -> Vec<i32> {
        let mut spans = Vec::new();
        let mut row = 0;
        for (span, table) in self.spans.iter().zip(&self.table_starts) {
            if span.len == 0 {
                spans.extend([i32::MAX, 0, 0, i32::MAX, -1]);
            }
            for offset in 0..span.len {
                spans.extend([row, 1, (span.start + offset) as i32, *table as i32, -1]);
                row += 1;
            }
        }
        spans
    }

    fn out_len(&self) -> usize {
        self.queries.len()
    }

    pub fn kernel(&self, name: &str) -> &'static Kernel {
        kernel_of("attention", &format!("attention_{name}_d{}", self.shape.size))
    }

    /// All rows by the kernels that decode; the report is that of the first of the two.
    pub fn decode(&mut self) -> Outcome {
        let kernel = self.kernel("decode");
        self.decode_with(kernel).unwrap_or_else(|fault| panic!("{fault}"))
    }

    pub fn decode_with(&mut self, kernel: &Kernel) -> Result<Outcome, Fault> {
        let Shape { heads, kv_heads, size, block_size, window, softcap } = self.shape;
        let spans = self.single_rows();
        let (rows, out_len) = (spans.len() / 5, self.out_len());
        let longest = self.spans.iter().map(|span| span.start + span.len).max().unwrap();
        // One more than are needed, as for a longer neighbour.
        let chunks = longest.div_ceil(CHUNK) + 1;
        let partials = rows * heads * chunks;
        let device = &mut self.device;
        let spans_at = device.upload(&spans);
        let out = device.poisoned::<bf16>(out_len);
        let partial = [
            device.poisoned::<f32>(partials * size),
            device.poisoned::<f32>(partials),
            device.poisoned::<f32>(partials),
        ];
        let at = self.addresses;
        let sizes = [heads, kv_heads, block_size, window, chunks].map(|size| size as i32);
        let arguments = Arguments::default().all(&partial).all(&[at.queries, at.keys, at.values, at.tables, spans_at]);
        let grid = [rows as u32, kv_heads as u32, chunks as u32];
        let extent = Extent { grid, block: 128, shared: self.shape.decode_shared() - self.denied };
        let report = device.run(kernel, extent, &arguments.all(&sizes).with(softcap))?;
        let arguments =
            Arguments::default().with(out).all(&partial).with(spans_at).with(heads as i32).with(chunks as i32);
        let extent = Extent { grid: [rows as u32, heads as u32, 1], block: size as u32 / 2, shared: 0 };
        let merge = kernel_of("attention", &format!("attention_merge_d{size}"));
        device.run(merge, extent, &arguments)?;
        Ok(Outcome { out: device.download(out, out_len), report })
    }

    /// All rows by the prefill kernel, the spans as they are.
    pub fn prefill(&mut self) -> Outcome {
        let kernel = self.kernel("prefill");
        self.prefill_with(kernel).unwrap_or_else(|fault| panic!("{fault}"))
    }

    pub fn prefill_with(&mut self, kernel: &Kernel) -> Result<Outcome, Fault> {
        let Shape { heads, kv_heads, size, block_size, window, softcap } = self.shape;
        let (mut spans, mut tiles, mut row) = (Vec::new(), Vec::new(), 0);
        for (index, span) in self.spans.iter().enumerate() {
            spans.extend([row, span.len as i32, span.start as i32, self.table_starts[index] as i32, -1]);
            row += span.len as i32;
            for first in (0..span.len * self.shape.group()).step_by(TILE_ROWS) {
                tiles.extend([index as i32, first as i32]);
            }
        }
        let (out_len, at) = (self.out_len(), self.addresses);
        let out = self.device.poisoned::<bf16>(out_len);
        let pointers = [self.device.upload(&spans), self.device.upload(&tiles)];
        let sizes = [heads, kv_heads, block_size, window].map(|size| size as i32);
        let arguments = Arguments::default().all(&[out, at.queries, at.keys, at.values, at.tables]).all(&pointers);
        let extent = Extent {
            grid: [tiles.len() as u32 / 2, kv_heads as u32, 1],
            block: if size > 128 { 256 } else { 128 },
            shared: self.shape.prefill_shared() - self.denied,
        };
        let report = self.device.run(kernel, extent, &arguments.all(&sizes).with(softcap))?;
        Ok(Outcome { out: self.device.download(out, out_len), report })
    }

    /// The same in f64, rounded nowhere.
    pub fn expected(&self) -> Vec<f64> {
        let Shape { heads, size, .. } = self.shape;
        let mut out = Vec::new();
        for (sequence, span) in self.spans.iter().enumerate() {
            for offset in 0..span.len {
                for head in 0..heads {
                    let query = &self.queries[out.len()..][..size];
                    out.extend(self.attend(query, sequence, span.start + offset, head / self.shape.group()));
                }
            }
        }
        out
    }

    fn attend(&self, query: &[bf16], sequence: usize, position: usize, head: usize) -> Vec<f64> {
        let Shape { size, softcap, .. } = self.shape;
        let softcap = f64::from(softcap);
        let first = self.shape.first_seen(position);
        let of = |rows: &[Vec<bf16>], position: usize, i: usize| f64::from(rows[position][head * size + i]);
        let scores: Vec<f64> = (first..=position)
            .map(|at| query.iter().enumerate().map(|(i, q)| f64::from(*q) * of(&self.keys[sequence], at, i)).sum())
            .map(|score: f64| if softcap > 0.0 { softcap * (score / softcap).tanh() } else { score })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let column = |i| {
            (first..=position).zip(&weights).map(|(at, w)| w * of(&self.values[sequence], at, i)).sum::<f64>() / total
        };
        (0..size).map(column).collect()
    }

    /// Compares with [`Case::expected`] within the rounding of weights and results.
    pub fn check(&self, what: &str, found: &[bf16]) {
        let width = self.shape.heads * self.shape.size;
        for (i, (found, expected)) in found.iter().zip(self.expected()).enumerate() {
            let found = f64::from(*found);
            assert!(
                (found - expected).abs() <= 6e-3,
                "{what}, heads of {}, row {}, column {}: {found}, not {expected}",
                self.shape.size,
                i / width,
                i % width
            );
        }
    }
}

pub fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Rows whose bits differ.
pub fn differing_rows(left: &[bf16], right: &[bf16], width: usize) -> Vec<usize> {
    let rows = left.chunks(width).zip(right.chunks(width)).enumerate();
    rows.filter(|(_, (left, right))| bits(left) != bits(right)).map(|(row, _)| row).collect()
}

/// The rows that hold a number that is not finite.
pub fn broken_rows(values: &[bf16], width: usize) -> Vec<usize> {
    let rows = values.chunks(width).enumerate();
    rows.filter(|(_, row)| row.iter().any(|value| !value.is_finite())).map(|(row, _)| row).collect()
}

/// Spans as pairs of a start and a number of rows.
pub fn spans(list: &[(usize, usize)]) -> Vec<Span> {
    list.iter().map(|&(start, len)| Span { start, len }).collect()
}
