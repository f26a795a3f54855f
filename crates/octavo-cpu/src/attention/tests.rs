//! Attention against a plain `f64` twin over the stored keys and values, and against itself under every cut of the work.

use half::bf16;
use octavo_backend::{
    Activation, AttentionSpec, BlockCopy, DecoderSpec, GroupInputs, HeadSpec, KvType, LayerSpec, MlpSpec, NormSpec,
    RopeSpec, SpanInput, StepInputs, StepLimits,
};

use super::*;
use crate::{heads::HeadKernels, kv::KvCache};

const MAX_POSITIONS: usize = 640;

#[derive(Debug, Clone, Copy)]
struct Case {
    num_kv_heads: usize,
    group_size: usize,
    head_size: usize,
    block_size: usize,
    window: Option<usize>,
    kv: KvType,
}

const CASE: Case =
    Case { num_kv_heads: 2, group_size: 3, head_size: 64, block_size: 16, window: None, kv: KvType::Bf16 };

/// Uniform in -1..1.
fn random(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32) / 8_388_608.0 - 1.0
    }
}

fn spec(case: &Case) -> DecoderSpec {
    let norm = NormSpec { epsilon: 1e-5 };
    let attention = AttentionSpec {
        num_heads: case.num_kv_heads * case.group_size,
        num_kv_heads: case.num_kv_heads,
        head_size: case.head_size,
        scale: 1.0,
        rope: RopeSpec::plain(10_000.0, case.head_size),
        window: case.window,
    };
    let mlp = MlpSpec::Gated { intermediate_size: 32, activation: Activation::Silu };
    DecoderSpec {
        vocab_size: 1,
        hidden_size: 32,
        embedding_scale: 1.0,
        layers: vec![LayerSpec { attention_norm: norm, attention, mlp_norm: norm, mlp }],
        head: HeadSpec { norm, tied: true, logit_scale: 1.0, num_tokens: 1 },
    }
}

/// One sequence: a cache with its keys and values, NaN everywhere else, and a query for each position.
struct Sequence {
    case: Case,
    cache: KvCache,
    table: Vec<u32>,
    /// `[position][head][head_size]`, as stored.
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<u16>,
}

impl Sequence {
    fn new(case: Case, len: usize) -> Sequence {
        Sequence::scaled(case, len, 1.5, 1.0)
    }

    /// With keys and values of up to these magnitudes.
    fn scaled(case: Case, len: usize, key: f32, value: f32) -> Sequence {
        let limits = limits(&case);
        let cache = KvCache::new(&spec(&case), &limits, case.kv).unwrap();
        let layer = cache.layer(0);
        let heads = HeadKernels::new(Isa::Scalar);
        let blocks = limits.num_blocks[0];
        // Its blocks lie backwards, with those of others in between.
        let table: Vec<u32> = (0..blocks as u32).rev().step_by(2).collect();
        let nan = vec![f32::NAN; case.head_size];
        for slot in 0..blocks * case.block_size {
            for head in 0..case.num_kv_heads {
                // SAFETY: one thread.
                unsafe { layer.write(&heads, slot / case.block_size, slot % case.block_size, head, &nan, &nan) };
            }
        }
        let mut random = random(len as u64);
        let mut rounded =
            |n: usize, size: f32| -> Vec<f32> { (0..n).map(|_| bf16::from_f32(size * random()).to_f32()).collect() };
        let row = case.num_kv_heads * case.head_size;
        let (mut keys, mut values) = (rounded(len * row, key), rounded(len * row, value));
        let queries = rounded(len * row * case.group_size, 0.3).into_iter().map(|v| bf16::from_f32(v).to_bits());
        for (index, (key, value)) in
            keys.chunks_exact(case.head_size).zip(values.chunks_exact(case.head_size)).enumerate()
        {
            let (position, head) = (index / case.num_kv_heads, index % case.num_kv_heads);
            let block = table[position / case.block_size] as usize;
            // SAFETY: one thread.
            unsafe { layer.write(&heads, block, position % case.block_size, head, key, value) };
        }
        for stored in [&mut keys, &mut values] {
            stored.chunks_exact_mut(case.head_size).for_each(|head| case.kv.round_head(head));
        }
        Sequence { case, queries: queries.collect(), table, keys, values, cache }
    }

    /// The outputs of positions `start..start + len`, `[len][num_heads * head_size]`.
    fn attend(&self, isa: Isa, tile: Option<usize>, start: usize, len: usize, workers: usize) -> Vec<f32> {
        self.attend_spans(isa, tile, &[(start..start + len, self.table.clone())], workers).0
    }

    /// The outputs of spans of positions, each with its table, and how many units of attention they were.
    fn attend_spans(
        &self,
        isa: Isa,
        tile: Option<usize>,
        parts: &[(Range<usize>, Vec<u32>)],
        workers: usize,
    ) -> (Vec<f32>, usize) {
        let limits = limits(&self.case);
        let shape = AttentionShape::of(&spec(&self.case).layers[0].attention, 0);
        let kernels = AttentionKernels::new(isa);
        let tile = tile.unwrap_or(super::tile(isa, shape.head_size));
        let width = shape.num_heads * shape.head_size;
        let partials = AttentionSchedule::partials(&shape, &limits);
        let mut layout = WorkLayout::default();
        let sizes = AttentionSizes { num_heads: shape.num_heads, head_size: shape.head_size, width, partials };
        let buffers = AttentionBuffers::new(&mut layout, limits.max_rows, sizes, workers);
        let memory = WorkMemory::new(&layout).unwrap();
        let mut inputs = StepInputs {
            groups: vec![GroupInputs { tables: vec![], table_starts: vec![0], copies: vec![] }],
            ..StepInputs::default()
        };
        let mut queries = vec![];
        for (positions, table) in parts {
            let (first_row, len, start) = (inputs.tokens.len(), positions.len(), positions.start);
            inputs.spans.push(SpanInput { first_row, len, start });
            inputs.tokens.resize(first_row + len, 0);
            inputs.groups[0].tables.extend(table);
            let end = inputs.groups[0].tables.len();
            inputs.groups[0].table_starts.push(end);
            queries.extend(&self.queries[start * width..][..len * width]);
        }
        let len = inputs.tokens.len();
        let mut schedule = AttentionSchedule::new(shape, tile, &limits);
        schedule.plan(&inputs, workers);
        let attention = Attention {
            kernels: &kernels,
            shape,
            layer: self.cache.layer(0),
            inputs: &inputs,
            schedule: &schedule,
            memory: &memory,
            buffers: &buffers,
        };
        // SAFETY: one thread.
        unsafe {
            let heads = HeadKernels::new(isa);
            for (index, query) in queries.chunks_exact(shape.head_size).enumerate() {
                let query: Vec<f32> = query.iter().map(|bits| bf16::from_bits(*bits).to_f32()).collect();
                buffers.write_query(&memory, &heads, self.case.kv, index, &query, 1.0);
            }
            for (index, units) in schedule.units().chunks(3).enumerate() {
                attention.run(units, index % workers);
            }
            for row in 0..len {
                attention.merge_row(row, row % workers);
            }
            (memory.read(buffers.outputs, 0..len * width).to_vec(), schedule.units().len())
        }
    }

    /// Softmax attention of one position and head in `f64`.
    fn twin(&self, position: usize, head: usize) -> Vec<f64> {
        let Case { num_kv_heads, group_size, head_size, window, .. } = self.case;
        let query = &self.queries[(position * num_kv_heads * group_size + head) * head_size..][..head_size];
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
        let at = |seen: usize| (seen * num_kv_heads + head / group_size) * head_size;
        let score = |seen: usize| -> f64 {
            let key = &self.keys[at(seen)..][..head_size];
            query.iter().zip(key).map(|(q, k)| f64::from(bf16::from_bits(*q).to_f32()) * f64::from(*k)).sum()
        };
        let scores: Vec<f64> = (first..=position).map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        let mut output = vec![0.0; head_size];
        for (score, seen) in scores.iter().zip(first..) {
            for (out, value) in output.iter_mut().zip(&self.values[at(seen)..][..head_size]) {
                *out += (score - largest).exp() / total * f64::from(*value);
            }
        }
        output
    }
}

fn limits(case: &Case) -> StepLimits {
    StepLimits {
        max_rows: MAX_POSITIONS,
        max_spans: 8,
        max_positions: MAX_POSITIONS,
        block_size: case.block_size,
        num_blocks: vec![2 * MAX_POSITIONS.div_ceil(case.block_size)],
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn cases() -> Vec<Case> {
    let mut cases = vec![];
    for group_size in [1, 3, 4, 5, 7, 8, 12] {
        cases.push(Case { group_size, ..CASE });
    }
    for head_size in [16, 48, 80, 128, 256] {
        cases.push(Case { head_size, ..CASE });
    }
    for block_size in [32, 48, 256] {
        cases.push(Case { block_size, ..CASE });
    }
    for window in [1, 2, 15, 64, 65, 100, 300] {
        cases.push(Case { window: Some(window), ..CASE });
    }
    let int8 = Case { kv: KvType::Int8, ..CASE };
    cases.extend([
        int8,
        Case { group_size: 8, ..int8 },
        Case { head_size: 16, ..int8 },
        Case { head_size: 128, block_size: 48, ..int8 },
        Case { window: Some(65), ..int8 },
    ]);
    cases
}

#[test]
fn outputs_are_as_close_to_the_exact_ones_as_rounded_probabilities_allow() {
    for case in cases() {
        let sequence = Sequence::new(case, 300);
        let largest = f64::from(sequence.values.iter().fold(0.0f32, |most, value| most.max(value.abs())));
        for isa in Isa::supported() {
            let outputs = sequence.attend(isa, None, 0, 300, 1);
            let heads = case.num_kv_heads * case.group_size;
            for position in (0..300).step_by(23).chain([15, 16, 63, 64, 255, 256, 299]) {
                // A probability is off by at most 2^-9 of itself, so the output by at most 2^-9 of the mean distance of
                // the values from it. Among many values these errors mostly cancel. In 8 bits what is rounded is the
                // probability times the value's scale, so that nothing cancels what rounds off the scale.
                let seen = case.window.unwrap_or(usize::MAX).min(position + 1);
                let tolerance = match case.kv {
                    KvType::Int8 => 2f64.powi(-11),
                    _ if seen < 64 => 2f64.powi(-9),
                    _ => 1e-3,
                } * largest;
                for head in 0..heads {
                    let found = &outputs[(position * heads + head) * case.head_size..];
                    for (found, exact) in found.iter().zip(sequence.twin(position, head)) {
                        let error = (f64::from(*found) - exact).abs();
                        assert!(error <= tolerance, "{isa} {case:?} position {position}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_other_rows_the_tile_or_the_workers() {
    for case in cases() {
        let len = 600;
        let sequence = Sequence::new(case, len);
        let width = case.num_kv_heads * case.group_size * case.head_size;
        for isa in Isa::supported() {
            // Plain Rust takes seconds for all rows; there, a few of them are compared with themselves.
            let whole = (isa != Isa::Scalar).then(|| bits(&sequence.attend(isa, None, 0, len, 1)));
            for (start, rows) in [(0, 1), (63, 1), (64, 3), (200, 16), (255, 2), (256, 1), (510, 5), (599, 1)] {
                let expected = match &whole {
                    Some(whole) => whole[start * width..(start + rows) * width].to_vec(),
                    None => bits(&sequence.attend(isa, Some(5), start, rows, 1)),
                };
                for (tile, workers) in [(None, 1), (None, 2), (None, 3), (Some(1), 2), (Some(3), 1), (Some(8), 1)] {
                    let part = bits(&sequence.attend(isa, tile, start, rows, workers));
                    assert!(part == expected, "{isa} {case:?} rows {start}+{rows}, tile {tile:?}, workers {workers}");
                }
            }
        }
    }
}

#[test]
fn rows_of_several_spans_read_the_blocks_they_share_together_and_keep_their_bits() {
    let kinds = [KvType::Bf16, KvType::Int8];
    for case in kinds.into_iter().flat_map(|kv| [16, 48, 256].map(|block_size| Case { kv, block_size, ..CASE })) {
        let sequence = Sequence::new(case, 640);
        let own = &sequence.table;
        // Sequences that begin with another block, and one that shares its first chunk only.
        let other = own[0] - 1;
        // SAFETY: one thread.
        unsafe { sequence.cache.layer(0).copy(&[BlockCopy { from: own[1], to: other }]) };
        let moved: Vec<u32> = std::iter::once(other).chain(own[1..].iter().copied()).collect();
        let second = 256usize.div_ceil(case.block_size);
        let mut parted = own.clone();
        parted[second] = own[second] - 1;
        // SAFETY: as above.
        unsafe { sequence.cache.layer(0).copy(&[BlockCopy { from: own[0], to: parted[second] }]) };
        let alone = |position: usize| (position..position + 1, own.clone());
        let spans = [
            alone(520),
            alone(639),
            (530..531, parted),
            (600..601, moved.clone()),
            (601..602, moved),
            alone(100),
            (300..303, own.clone()),
            alone(512),
        ];
        for isa in Isa::supported() {
            let apart: Vec<f32> = spans
                .iter()
                .flat_map(|span| sequence.attend_spans(isa, None, std::slice::from_ref(span), 1).0)
                .collect();
            let units: usize =
                spans.iter().map(|span| sequence.attend_spans(isa, None, std::slice::from_ref(span), 2).1).sum();
            for (tile, workers) in [(None, 1), (None, 2), (Some(1), 3), (Some(4), 2), (Some(8), 1)] {
                let (together, fewer) = sequence.attend_spans(isa, tile, &spans, workers);
                assert!(bits(&together) == bits(&apart), "{isa} {case:?}, tile {tile:?}, workers {workers}");
                let is_wide = tile.is_none() && super::tile(isa, case.head_size) >= 8;
                assert!(!is_wide || workers == 1 || fewer < units, "{isa} {case:?}: {fewer} of {units} units");
            }
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for case in cases() {
        let sequence = Sequence::new(case, 600);
        for (start, len) in [(0, 18), (60, 9), (250, 7), (599, 1)] {
            let expected = bits(&sequence.attend(Isa::Scalar, None, start, len, 1));
            for isa in Isa::supported() {
                let found = bits(&sequence.attend(isa, None, start, len, 1));
                assert!(found == expected, "{isa} {case:?} rows {start}+{len}");
            }
        }
    }
}

#[test]
fn kernels_agree_where_products_are_tiny() {
    let kinds = [KvType::Bf16, KvType::Int8];
    for (kv, value) in kinds.into_iter().flat_map(|kv| [(kv, 1.0), (kv, 1e-11), (kv, 1e-36)]) {
        // Scores far apart, so that probabilities go down to nothing, and values down to less than is kept at all.
        let sequence = Sequence::scaled(Case { kv, ..CASE }, 400, 60.0, value);
        let expected = bits(&sequence.attend(Isa::Scalar, None, 380, 9, 1));
        for isa in Isa::supported() {
            for tile in [None, Some(3), Some(8)] {
                assert!(
                    bits(&sequence.attend(isa, tile, 380, 9, 1)) == expected,
                    "{isa} {kv:?} values of {value:e}, tile {tile:?}"
                );
            }
        }
    }
}

#[test]
fn a_token_that_is_not_finite_harms_only_the_rows_that_see_it() {
    let nan = vec![f32::NAN; CASE.head_size];
    let width = CASE.num_kv_heads * CASE.group_size * CASE.head_size;
    let kinds = [KvType::Bf16, KvType::Int8];
    for (isa, kv) in Isa::supported().into_iter().flat_map(|isa| kinds.map(|kv| (isa, kv))) {
        let case = Case { kv, ..CASE };
        let before = Sequence::new(case, 100).attend(isa, None, 0, 100, 1);
        let poisoned = Sequence::new(case, 100);
        for head in 0..CASE.num_kv_heads {
            // SAFETY: one thread.
            unsafe {
                poisoned.cache.layer(0).write(&HeadKernels::new(isa), poisoned.table[4] as usize, 13, head, &nan, &nan)
            };
        }
        let after = poisoned.attend(isa, None, 0, 100, 1);
        assert_eq!(bits(&before[..77 * width]), bits(&after[..77 * width]), "{isa} {kv:?}");
        assert!(after[77 * width..].iter().all(|value| value.is_nan()), "{isa} {kv:?}: the fault must stay visible");
    }
}

#[test]
fn spread_chunks_are_planned_within_the_memory_for_them() {
    let shape = AttentionShape::of(&spec(&CASE).layers[0].attention, 0);
    let limits = StepLimits { max_spans: 40, ..limits(&CASE) };
    let mut schedule = AttentionSchedule::new(shape, 8, &limits);
    let spans = (0..40).map(|i| SpanInput { first_row: 2 * i, len: 2, start: 600 }).collect();
    let inputs = StepInputs { tokens: vec![0; 80], spans, ..StepInputs::default() };
    schedule.plan(&inputs, 2);
    let partials = AttentionSchedule::partials(&shape, &limits);
    let spread = schedule.units().iter().filter_map(|unit| Some(unit.spread?.partial + unit.rows)).max();
    assert!(spread.is_some_and(|end| end <= partials));
    assert!(schedule.units().iter().any(|unit| unit.spread.is_none()), "not all spans fit");
    let is_spread = |row: usize| schedule.spreads_of(row).next().is_some();
    assert!(is_spread(0) && is_spread(1) && !is_spread(79));
}
