//! Attention, decoding and prefill.

use octavo_cuda::kernels::HEAD_SIZES;

use crate::case::{Case, Shape, broken_rows, differing_rows, spans};

/// Contexts around the edges of a block, a group of positions, a chunk.
const TAILS: [usize; 12] = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 530];

fn single_rows(contexts: &[usize]) -> Vec<(usize, usize)> {
    contexts.iter().map(|context| (context - 1, 1)).collect()
}

#[test]
fn decoding_agrees_with_softmax_at_every_tail() {
    for size in [16, 64, 128] {
        let mut case = Case::new(Shape::plain(4, 2, size), &spans(&single_rows(&TAILS)));
        let found = case.decode();
        case.check("decode", &found.out);
    }
}

#[test]
fn prefill_agrees_with_softmax_over_ragged_spans() {
    let ragged = spans(&[(0, 1), (0, 15), (0, 16), (3, 17), (0, 70), (250, 12), (511, 2)]);
    for size in [16, 64, 128] {
        let mut case = Case::new(Shape::plain(4, 2, size), &ragged);
        let found = case.prefill();
        case.check("prefill", &found.out);
    }
}

#[test]
fn every_group_size_reads_its_own_kv_head() {
    for group in [1, 3, 4, 8, 16] {
        let mut case = Case::new(Shape::plain(2 * group, 2, 32), &spans(&[(0, 5), (70, 23), (300, 1)]));
        let (decoded, prefilled) = (case.decode(), case.prefill());
        case.check("decode", &decoded.out);
        case.check("prefill", &prefilled.out);
    }
}

#[test]
fn every_head_size_has_kernels() {
    for size in HEAD_SIZES {
        let mut case = Case::new(Shape::plain(2, 1, size), &spans(&[(60, 9), (0, 1)]));
        let (decoded, prefilled) = (case.decode(), case.prefill());
        case.check("decode", &decoded.out);
        assert_eq!(differing_rows(&decoded.out, &prefilled.out, 2 * size), [0; 0], "heads of {size}");
    }
}

#[test]
fn any_block_size_is_gathered() {
    for block_size in [32, 48, 80, 256] {
        let shape = Shape { block_size, ..Shape::plain(2, 1, 64) };
        let mut case = Case::new(shape, &spans(&[(0, 3), (100, 40), (290, 1)]));
        let found = case.prefill();
        case.check("prefill", &found.out);
        let found = case.decode();
        case.check("decode", &found.out);
    }
}

#[test]
fn a_window_hides_what_is_before_it() {
    for window in [1, 16, 33, 64, 100, 300] {
        let shape = Shape { window, ..Shape::plain(4, 2, 64) };
        let mut case = Case::new(shape, &spans(&[(0, 40), (250, 20), (599, 1)]));
        let (decoded, prefilled) = (case.decode(), case.prefill());
        case.check("decode", &decoded.out);
        assert_eq!(differing_rows(&decoded.out, &prefilled.out, 4 * 64), [0; 0], "window {window}");
    }
}

#[test]
fn scores_are_capped() {
    let shape = Shape { softcap: 1.5, ..Shape::plain(2, 1, 64) };
    let mut case = Case::new(shape, &spans(&[(0, 20), (270, 3)]));
    let (decoded, prefilled) = (case.decode(), case.prefill());
    case.check("decode", &decoded.out);
    case.check("prefill", &prefilled.out);
}

#[test]
fn a_row_has_the_same_bits_decoded_alone_and_in_any_tile() {
    for size in [16, 64, 96, 128, 256] {
        let mut case = Case::new(Shape::plain(3, 1, size), &spans(&[(0, 30), (240, 25), (505, 20)]));
        let (decoded, prefilled) = (case.decode(), case.prefill());
        assert_eq!(differing_rows(&decoded.out, &prefilled.out, 3 * size), [0; 0], "heads of {size}");
    }
}

#[test]
fn a_row_that_is_not_finite_stays_alone() {
    for (key, value) in [(0.5, f32::NAN), (0.5, f32::INFINITY), (f32::NAN, 0.5), (f32::INFINITY, 0.5)] {
        let mut case = Case::new(Shape { window: 20, ..Shape::plain(2, 1, 64) }, &spans(&[(60, 40), (60, 5)]));
        let sound = case.prefill();
        case.overwrite(0, 70, key, value);
        let (decoded, prefilled) = (case.decode(), case.prefill());
        let (width, seeing) = (2 * 64, (10..30).collect::<Vec<usize>>());
        assert_eq!(differing_rows(&sound.out, &prefilled.out, width), seeing, "{key} {value}");
        if key.is_nan() || !value.is_finite() {
            assert_eq!(broken_rows(&prefilled.out, width), seeing, "{key} {value}");
            assert_eq!(broken_rows(&decoded.out, width), seeing, "{key} {value}");
        }
    }
}

#[test]
fn a_span_of_no_rows_is_padding() {
    let mut case = Case::new(Shape::plain(2, 1, 16), &spans(&[(3, 1), (9, 0), (5, 1)]));
    let found = case.decode();
    case.check("decode", &found.out);
}

#[test]
fn decoding_a_whole_chunk_moves_its_keys_and_values_once() {
    for (size, kv_heads) in [(64, 2), (128, 2), (256, 1)] {
        let mut case = Case::new(Shape::plain(4 * kv_heads, kv_heads, size), &spans(&[(255, 1)]));
        let report = case.decode().report;
        let (keys, values) = (&report.buffers[&case.addresses.keys], &report.buffers[&case.addresses.values]);
        let least = (256 * kv_heads * size * 2) as u64;
        for loads in [keys.loads, values.loads] {
            assert_eq!((loads.bytes, 32 * loads.sectors), (least, least), "heads of {size}");
        }
        let all = 32 * report.global_loads.sectors;
        assert!(all as f64 <= 1.05 * 2.0 * least as f64, "heads of {size}: {all} bytes for {}", 2 * least);
        assert_eq!(report.shared.conflicts, 0, "heads of {size}");
        // 16 x 8 x 16 each, no more than scores and values need.
        assert_eq!(report.mma, (kv_heads * 2 * (256 / 8) * (size / 16)) as u64, "heads of {size}");
    }
}

#[test]
fn prefill_reads_its_keys_and_values_once_a_tile() {
    let mut case = Case::new(Shape::plain(4, 1, 64), &spans(&[(256, 64)]));
    let report = case.prefill().report;
    let expected: u64 = (0..4).map(|tile| (256 + 16 * (tile + 1)) * 64 * 2).sum();
    for cache in [case.addresses.keys, case.addresses.values] {
        let loads = report.buffers[&cache].loads;
        assert_eq!((loads.bytes, 32 * loads.sectors), (expected, expected));
    }
    assert_eq!(report.global_stores.bytes, 32 * report.global_stores.sectors);
    assert_eq!(report.global_stores.bytes, 64 * 4 * 64 * 2);
    assert_eq!(report.shared.conflicts, 0);
}
