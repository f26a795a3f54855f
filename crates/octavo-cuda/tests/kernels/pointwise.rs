//! What happens between products: embed, norms, activation, gathering, block copies, rotation and cache writes.

use half::bf16;
use ptxsim::Report;

use crate::device::{Arguments, Device, Extent, Noise, kernel_of};

fn extent(grid: [u32; 3], block: u32) -> Extent {
    Extent { grid, block, shared: 0 }
}

fn bf16s(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(*value)).collect()
}

/// All requests of the launch touch only sectors that they use to the last byte.
fn assert_full_sectors(report: &Report) {
    assert_eq!(report.global_stores.bytes, 32 * report.global_stores.sectors, "stores");
}

#[test]
fn embedding_rows_are_scaled() {
    let (hidden, vocabulary) = (1000, 7);
    let table = bf16s(&Noise::new(1).vector(hidden * vocabulary));
    let tokens = [6, 0, 3];
    let mut device = Device::new();
    let out = device.poisoned::<f32>(3 * hidden);
    let (table_at, tokens_at) = (device.upload(&table), device.upload(&tokens));
    let arguments = Arguments::default().all(&[out, table_at, tokens_at]).with(hidden as i32).with(1.5f32);
    let report = device.run(kernel_of("pointwise", "embed"), extent([3, 1, 1], 128), &arguments).unwrap();
    let expected: Vec<f32> =
        tokens.iter().flat_map(|t| &table[*t as usize * hidden..][..hidden]).map(|v| v.to_f32() * 1.5).collect();
    assert_eq!(device.download::<f32>(out, 3 * hidden), expected);
    assert_full_sectors(&report);
}

struct NormCase {
    rows: usize,
    hidden: usize,
    update: bool,
}

/// Runs both norms and compares them with one in f64; gives the report of the one to bfloat16.
fn check_norm(case: &NormCase) -> Report {
    let &NormCase { rows, hidden, update } = case;
    let mut noise = Noise::new(hidden as u64);
    let (stream, change, weight) = (noise.vector(rows * hidden), noise.vector(rows * hidden), noise.vector(hidden));
    let expected_stream: Vec<f32> =
        stream.iter().zip(&change).map(|(value, change)| if update { value + change } else { *value }).collect();
    let expected: Vec<f64> = expected_stream
        .chunks(hidden)
        .flat_map(|row| {
            let mean = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / hidden as f64;
            let factor = 1.0 / (mean + 1e-5).sqrt();
            row.iter().zip(&weight).map(move |(value, weight)| f64::from(*value) * factor * f64::from(*weight))
        })
        .collect();
    let mut device = Device::new();
    let mut reports = Vec::new();
    let threads = (hidden as u32).div_ceil(4).next_multiple_of(32).min(256);
    for (name, size) in [("norm_f32", 4), ("norm_bf16", 2)] {
        let (stream_at, weight_at) = (device.upload(&stream), device.upload(&weight));
        let update_at = if update { device.upload(&change) } else { 0 };
        let out = device.poisoned::<u8>(rows * hidden * size);
        let pointers = [out, stream_at, update_at, weight_at];
        let arguments = Arguments::default().all(&pointers).with(hidden as i32).with(1e-5f32);
        let kernel = kernel_of("pointwise", name);
        reports.push(device.run(kernel, extent([rows as u32, 1, 1], threads), &arguments).unwrap());
        assert_eq!(device.download::<f32>(stream_at, rows * hidden), expected_stream, "{name}: the residual stream");
        let found: Vec<f64> = match size {
            4 => device.download::<f32>(out, rows * hidden).into_iter().map(f64::from).collect(),
            _ => device.download::<bf16>(out, rows * hidden).into_iter().map(f64::from).collect(),
        };
        let tolerance = if size == 4 { 1e-6 } else { 1.0 / 256.0 };
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() <= tolerance * expected.abs().max(1e-3),
                "{name}: {found}, not {expected}"
            );
        }
    }
    reports.remove(1)
}

#[test]
fn norms_add_the_update_first_and_write_it_back() {
    for hidden in [8, 128, 136, 576, 1000, 1024, 1032, 8192, 8200, 9000] {
        check_norm(&NormCase { rows: 3, hidden, update: true });
    }
}

#[test]
fn norms_without_an_update_leave_the_stream() {
    let report = check_norm(&NormCase { rows: 2, hidden: 576, update: false });
    assert_eq!(report.global_stores.bytes, 2 * 576 * 2);
}

#[test]
fn a_norm_moves_each_row_once() {
    let report = check_norm(&NormCase { rows: 4, hidden: 4096, update: true });
    let elements = 4 * 4096;
    assert_eq!(report.global_loads.bytes, elements * (4 + 4) + elements * 4, "stream, update and weights");
    assert_eq!(report.global_stores.bytes, elements * (4 + 2));
    assert_full_sectors(&report);
}

#[test]
fn the_gate_is_activated_and_multiplied() {
    for width in [8, 504, 512, 1032] {
        let rows = 2;
        let mut gate_up: Vec<f32> =
            Noise::new(width as u64).vector(rows * 2 * width).iter().map(|v| v * 12.0).collect();
        gate_up[..2].copy_from_slice(&[-200.0, 200.0]);
        let mut device = Device::new();
        let (out, input) = (device.poisoned::<bf16>(rows * width), device.upload(&gate_up));
        let arguments = Arguments::default().with(out).with(input).with(width as i32);
        let grid = [rows as u32, width.div_ceil(512) as u32, 1];
        let report = device.run(kernel_of("pointwise", "silu_and_mul"), extent(grid, 128), &arguments).unwrap();
        let found = device.download::<bf16>(out, rows * width);
        for (i, found) in found.iter().enumerate() {
            let at = i / width * 2 * width + i % width;
            let (gate, up) = (f64::from(gate_up[at]), f64::from(gate_up[at + width]));
            let expected = gate / (1.0 + (-gate).exp()) * up;
            assert!((f64::from(*found) - expected).abs() <= expected.abs() / 250.0 + 1e-38, "{found}, not {expected}");
        }
        assert_eq!(report.global_loads.bytes, (rows * width * 8) as u64);
    }
}

#[test]
fn gathered_rows_come_in_the_order_asked_for() {
    for width in [5, 8, 1000] {
        let input = Noise::new(width as u64).vector(4 * width);
        let rows = [3, 0, 3];
        let mut device = Device::new();
        let (out, input_at, rows_at) = (device.poisoned::<f32>(3 * width), device.upload(&input), device.upload(&rows));
        let arguments = Arguments::default().all(&[out, input_at, rows_at]).with(width as i32);
        device.run(kernel_of("pointwise", "gather_rows"), extent([3, 1, 1], 128), &arguments).unwrap();
        let expected: Vec<f32> =
            rows.iter().flat_map(|row| &input[*row as usize * width..][..width]).copied().collect();
        assert_eq!(device.download::<f32>(out, 3 * width), expected);
    }
}

#[test]
fn block_copies_reach_every_cache_and_nothing_else() {
    let (blocks, block) = (6, 16 * 16 * 2);
    let mut noise = Noise::new(3);
    let contents: Vec<Vec<f32>> = (0..3).map(|_| noise.vector(blocks * block / 4)).collect();
    let pairs = [0, 3, 0, 5, 1, 2];
    let mut device = Device::new();
    let caches: Vec<u64> = contents.iter().map(|content| device.upload(content)).collect();
    let (caches_at, pairs_at) = (device.upload(&caches), device.upload(&pairs));
    let arguments = Arguments::default().with(caches_at).with(pairs_at).with(block as i64);
    let report = device.run(kernel_of("blocks", "copy_blocks"), extent([3, 3, 1], 256), &arguments).unwrap();
    for (cache, content) in caches.iter().zip(&contents) {
        let mut expected = content.clone();
        for pair in pairs.chunks(2) {
            let (from, to) = (pair[0] as usize * block / 4, pair[1] as usize * block / 4);
            expected[to..to + block / 4].copy_from_slice(&content[from..from + block / 4]);
        }
        assert_eq!(device.download::<f32>(*cache, content.len()), expected);
    }
    assert_eq!(report.global_stores.bytes, (3 * 3 * block) as u64);
    assert_full_sectors(&report);
}

struct RopeCase {
    heads: usize,
    kv_heads: usize,
    size: usize,
    pairs: usize,
    block_size: usize,
}

/// As `octavo_backend::numerics::kv_bf16`.
fn kv_bf16(value: f32) -> bf16 {
    if value.abs() < 1.0 / (1u64 << 40) as f32 { bf16::ZERO } else { bf16::from_f32(value) }
}

fn check_rope(case: &RopeCase) {
    let &RopeCase { heads, kv_heads, size, pairs, block_size } = case;
    let (num_blocks, num_positions, scale) = (4, 40, 0.37f32);
    let positions = [39, 0, 7];
    // The last row is padding.
    let slots = [3 * block_size as i32 + 5, 17, -1];
    let row_width = (heads + 2 * kv_heads) * size;
    let mut noise = Noise::new(size as u64);
    let mut qkv = noise.vector(3 * row_width);
    qkv[row_width - 1] = 1e-13;
    let angles = noise.vector(num_positions * pairs * 2);
    let cache_len = num_blocks * kv_heads * block_size * size;
    let mut device = Device::new();
    let queries_at = device.poisoned::<bf16>(3 * heads * size);
    let (keys_at, values_at) = (device.poisoned::<bf16>(cache_len), device.poisoned::<bf16>(cache_len));
    let inputs = [device.upload(&qkv), device.upload(&angles), device.upload(&positions), device.upload(&slots)];
    let sizes = [heads, kv_heads, size, pairs, block_size].map(|size| size as i32);
    let arguments = Arguments::default().all(&[queries_at, keys_at, values_at]).all(&inputs).all(&sizes).with(scale);
    device.run(kernel_of("rope_and_cache", "rope_and_cache"), extent([3, 1, 1], 128), &arguments).unwrap();

    let mut queries = vec![bf16::NAN; 3 * heads * size];
    let untouched = bf16::from_bits(0xffff);
    let (mut keys, mut values) = (vec![untouched; cache_len], vec![untouched; cache_len]);
    for (row, qkv) in qkv.chunks(row_width).enumerate() {
        let angles = &angles[positions[row] as usize * pairs * 2..];
        for (head, input) in qkv.chunks(size).enumerate() {
            let mut turned = input.to_vec();
            if head < heads + kv_heads {
                for i in 0..pairs {
                    let (x, y, cosine, sine) = (input[i], input[i + pairs], angles[2 * i], angles[2 * i + 1]);
                    (turned[i], turned[i + pairs]) = (x * cosine - y * sine, y * cosine + x * sine);
                }
            }
            let to = if head < heads {
                turned.iter_mut().for_each(|value| *value *= scale);
                &mut queries[(row * heads + head) * size..][..size]
            } else if slots[row] < 0 {
                continue;
            } else {
                let (block, offset) = (slots[row] as usize / block_size, slots[row] as usize % block_size);
                let (cache, head) = if head < heads + kv_heads {
                    (&mut keys, head - heads)
                } else {
                    (&mut values, head - heads - kv_heads)
                };
                &mut cache[((block * kv_heads + head) * block_size + offset) * size..][..size]
            };
            to.iter_mut().zip(turned).for_each(|(to, value)| *to = kv_bf16(value));
        }
    }
    let bits = |values: &[bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<u16>>();
    assert_eq!(bits(&device.download(queries_at, queries.len())), bits(&queries), "queries");
    assert_eq!(bits(&device.download(keys_at, cache_len)), bits(&keys), "keys");
    assert_eq!(bits(&device.download(values_at, cache_len)), bits(&values), "values");
}

#[test]
fn queries_and_keys_are_rotated_and_cached_bit_for_bit() {
    check_rope(&RopeCase { heads: 6, kv_heads: 2, size: 64, pairs: 32, block_size: 16 });
    check_rope(&RopeCase { heads: 3, kv_heads: 3, size: 128, pairs: 64, block_size: 32 });
}

#[test]
fn elements_beyond_the_pairs_stay() {
    check_rope(&RopeCase { heads: 2, kv_heads: 1, size: 80, pairs: 8, block_size: 16 });
    check_rope(&RopeCase { heads: 2, kv_heads: 1, size: 16, pairs: 0, block_size: 16 });
}

#[test]
fn any_number_of_pairs_is_rotated() {
    check_rope(&RopeCase { heads: 4, kv_heads: 2, size: 48, pairs: 7, block_size: 48 });
}
