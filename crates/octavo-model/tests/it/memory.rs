//! Memory plans for the reference backend.

use std::fs;

use octavo_backend::{Backend, Reference, StepLimits, WeightFormat};
use octavo_model::{Checkpoint, MemoryPlan, MemoryRequest, ModelError, memory_plan};
use tempfile::NamedTempFile;

use crate::support::TinyModel;

const REQUEST: MemoryRequest = MemoryRequest {
    block_size: 16,
    max_model_len: None,
    max_num_seqs: 4,
    max_num_batched_tokens: 32,
    kv_cache_memory_bytes: None,
    num_kv_blocks: None,
    memory_limit: 64 << 20,
};

/// Two layers, K and V, two heads of 8, in `f32`.
const BYTES_PER_TOKEN: usize = 2 * 2 * 2 * 8 * 4;

fn tiny() -> Checkpoint {
    let file = NamedTempFile::new().unwrap();
    fs::write(file.path(), TinyModel::tied().gguf(|_| WeightFormat::Q8_0).finish()).unwrap();
    Checkpoint::open(file.path()).unwrap()
}

fn plan(request: MemoryRequest) -> Result<MemoryPlan, ModelError> {
    let checkpoint = tiny();
    memory_plan(&Reference::exact(), checkpoint.config(), checkpoint.weight_bytes(), &request)
}

fn assert_refused(request: MemoryRequest, parts: &[&str]) {
    let message = plan(request).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn the_default_cache_is_a_fifth_of_the_limit() {
    let plan = plan(REQUEST).unwrap();
    let share = (64 << 20) / 100 * 20;
    assert_eq!(plan.kv_bytes_per_token, BYTES_PER_TOKEN);
    assert_eq!(plan.num_blocks, [share / (16 * BYTES_PER_TOKEN)]);
    assert_eq!(plan.kv_bytes, plan.num_blocks[0] * 16 * BYTES_PER_TOKEN);
    assert_eq!(plan.max_model_len, 128);
    assert_eq!(plan.weight_bytes, tiny().weight_bytes());
    assert_eq!(plan.total(), plan.weight_bytes + plan.kv_bytes + plan.arena_bytes);
}

#[test]
fn the_default_cache_is_at_most_half_a_gibibyte() {
    let plan = plan(MemoryRequest { memory_limit: 1 << 40, ..REQUEST }).unwrap();
    assert_eq!(plan.kv_bytes, 512 << 20);
}

#[test]
fn the_default_cache_holds_one_longest_request() {
    let room = plan(MemoryRequest { num_kv_blocks: Some(8), ..REQUEST }).unwrap().total();
    assert_eq!(plan(MemoryRequest { memory_limit: room, ..REQUEST }).unwrap().num_blocks, [8]);
    let short = MemoryRequest { max_model_len: Some(17), memory_limit: room, ..REQUEST };
    assert_eq!(plan(short).unwrap().num_blocks, [room / 100 * 20 / (16 * BYTES_PER_TOKEN)]);
}

#[test]
fn the_arena_is_what_the_backend_says() {
    let checkpoint = tiny();
    let plan = plan(MemoryRequest { num_kv_blocks: Some(3), ..REQUEST }).unwrap();
    let limits = StepLimits { max_rows: 32, max_spans: 4, max_positions: 128, block_size: 16, num_blocks: vec![3] };
    let footprint = Reference::exact().footprint(&checkpoint.config().spec, &limits);
    assert_eq!((plan.kv_bytes, plan.arena_bytes), (footprint.kv_bytes, footprint.arena_bytes));
}

#[test]
fn bytes_buy_whole_blocks() {
    let block = 16 * BYTES_PER_TOKEN;
    let with = |bytes| MemoryRequest { kv_cache_memory_bytes: Some(bytes), ..REQUEST };
    assert_eq!(plan(with(block)).unwrap().num_blocks, [1]);
    assert_eq!(plan(with(5 * block - 1)).unwrap().num_blocks, [4]);
    assert_refused(with(block - 1), &["kv_cache_memory_bytes", &(block - 1).to_string(), &block.to_string()]);
}

#[test]
fn a_sum_beyond_the_limit_is_refused_with_its_numbers() {
    let plan_bytes = plan(MemoryRequest { num_kv_blocks: Some(8), ..REQUEST }).unwrap();
    let limit = plan_bytes.total() - 1;
    let request = MemoryRequest { num_kv_blocks: Some(8), memory_limit: limit, ..REQUEST };
    let numbers = [plan_bytes.weight_bytes, plan_bytes.kv_bytes, plan_bytes.arena_bytes, limit];
    let numbers = numbers.map(|number| number.to_string());
    assert_refused(request, &numbers.each_ref().map(String::as_str));
    assert_refused(MemoryRequest { memory_limit: 0, ..REQUEST }, &["exceed the limit of 0"]);
}

#[test]
fn absurd_options_are_refused_and_do_not_overflow() {
    for absurd in [1 << 40, usize::MAX] {
        let refused = |request| assert!(matches!(plan(request), Err(ModelError::Memory { .. })));
        refused(MemoryRequest { num_kv_blocks: Some(absurd), ..REQUEST });
        refused(MemoryRequest { kv_cache_memory_bytes: Some(absurd), ..REQUEST });
        refused(MemoryRequest { max_num_batched_tokens: absurd, ..REQUEST });
        refused(MemoryRequest { max_num_seqs: absurd, ..REQUEST });
        refused(MemoryRequest { block_size: absurd, ..REQUEST });
    }
}

#[test]
fn options_that_contradict_the_model_or_each_other_are_refused() {
    assert_refused(MemoryRequest { max_model_len: Some(129), ..REQUEST }, &["max_model_len", "129", "128"]);
    assert_refused(MemoryRequest { max_model_len: Some(0), ..REQUEST }, &["max_model_len"]);
    assert_refused(MemoryRequest { max_model_len: Some(1), ..REQUEST }, &["max_model_len", "from 2 to"]);
    assert_refused(MemoryRequest { block_size: 0, ..REQUEST }, &["block_size", "at least 1"]);
    assert_refused(MemoryRequest { max_num_seqs: 0, ..REQUEST }, &["max_num_seqs"]);
    assert_refused(MemoryRequest { max_num_batched_tokens: 0, ..REQUEST }, &["max_num_batched_tokens"]);
    assert_refused(MemoryRequest { num_kv_blocks: Some(0), ..REQUEST }, &["num_kv_blocks", "at least 1"]);
    let both = MemoryRequest { num_kv_blocks: Some(4), kv_cache_memory_bytes: Some(1 << 20), ..REQUEST };
    assert_refused(both, &["kv_cache_memory_bytes", "num_kv_blocks"]);
}

#[test]
fn a_backend_loads_a_checkpoint_within_its_plan() {
    let mut checkpoint = tiny();
    let spec = checkpoint.config().spec.clone();
    let limits = StepLimits { max_rows: 32, max_spans: 4, max_positions: 128, block_size: 16, num_blocks: vec![8] };
    Reference::exact().load(&spec, &mut checkpoint, &limits).unwrap();
}
