// The attention kernels: decoding, the merge of its chunks, and prefill. What they share is in attention.cuh.
#include "attention.cuh"

// ---- Decode ----

template <int D>
using DecodeAttention = Attention<D, 4, 1, 2>;

struct DecodeOutputs {
  float *out, *largest, *sum;
  int chunks;
};

// One chunk of what the row of sequence blockIdx.x sees, for the heads that read KV head blockIdx.y.
template <int D>
DEVICE void decode(DecodeOutputs outputs, const bf16* queries, Cache cache, Span span, int group_size, int window,
                   float softcap) {
  using A = DecodeAttention<D>;
  auto& shared = *reinterpret_cast<typename A::Shared*>(dynamic_shared());
  const int chunk = blockIdx.z, num_heads = gridDim.y * group_size, first_head = blockIdx.y * group_size;
  const Range seen = seen_from(span.start, window);
  const Range range = {max(seen.first, chunk * CHUNK), min(seen.end, chunk * CHUNK + CHUNK)};
  // Of the group's first head; the next one's is `chunks` on.
  const int64_t partial = (blockIdx.x * int64_t(num_heads) + first_head) * outputs.chunks + chunk;
  if (span.len == 0 || range.first >= range.end) {
    if (threadIdx.x < group_size) {
      outputs.largest[partial + threadIdx.x * outputs.chunks] = -infinity();
      outputs.sum[partial + threadIdx.x * outputs.chunks] = 0.0f;
    }
    return;
  }
  const bf16* from = queries + (int64_t(span.first_row) * num_heads + first_head) * D;
  A::template for_each_piece<TILE_ROWS>([&](int row, int column) {
    cp_async_16(&shared.queries[row][column], row < group_size ? from + row * D + column : from, row >= group_size);
  });
  const Sight sight = {{range, range}, range, range, range};
  A::attend(shared, cache, sight, softcap, [&](const typename A::Partial& sums) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const int head = A::lane() / 4 + 8 * row;
      if (head >= group_size) continue;
      const int64_t at = partial + head * outputs.chunks;
      if (threadIdx.x < WARP && A::lane() % 4 == 0) {
        outputs.largest[at] = sums.largest[row];
        outputs.sum[at] = sums.sum[row];
      }
#pragma unroll
      for (int i = 0; i < 2 * A::UNITS; i++) {
        if (!A::has(i / 2)) continue;
        const float2 pair = make_float2(sums.out[i / 2][i % 2][2 * row], sums.out[i / 2][i % 2][2 * row + 1]);
        *reinterpret_cast<float2*>(&outputs.out[at * D + A::column_of(i / 2) + i % 2 * 8 + A::lane() % 4 * 2]) = pair;
      }
    }
  });
}

// Two neighbours, or zeros, without a branch that would keep the next load waiting.
DEVICE float2 load_pair_if(bool condition, const float* pointer) {
  float2 v = make_float2(0.0f, 0.0f);
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p ld.global.v2.f32 {%0, %1}, [%2]; }"
               : "+f"(v.x), "+f"(v.y)
               : "l"(pointer), "r"(int(condition)));
  return v;
}

// The chunks of one sequence (blockIdx.x) and head (blockIdx.y), in ascending order: a thread has two columns. BATCH
// chunks are read at once, so that their latencies overlap.
template <int D>
DEVICE void merge(bf16* out, const float* partial_out, const float* partial_max, const float* partial_sum, Span span,
                  int chunks) {
  constexpr int BATCH = 16;
  const int head = blockIdx.y, num_heads = gridDim.y, column = 2 * threadIdx.x;
  const int64_t partial = (blockIdx.x * int64_t(num_heads) + head) * chunks;
  const int seen = min(chunks, span.start / CHUNK + 1);
  float sum = 0.0f, largest = -infinity();
  float2 value = make_float2(0.0f, 0.0f);
  for (int first = 0; first < seen; first += BATCH) {
    float sums[BATCH], maxima[BATCH];
    float2 values[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      sums[i] = first + i < seen ? partial_sum[partial + first + i] : 0.0f;
      maxima[i] = first + i < seen ? partial_max[partial + first + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      // What a chunk has that saw nothing was never written.
      values[i] = load_pair_if(sums[i] != 0.0f, &partial_out[(partial + first + i) * D + column]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const MergeScales scales = merge_scales(largest, maxima[i], sums[i]);
      sum = merged(sum, sums[i], scales);
      value = make_float2(merged(value.x, values[i].x, scales), merged(value.y, values[i].y, scales));
    }
  }
  const float inverse = 1.0f / sum;
  *reinterpret_cast<uint32_t*>(&out[(int64_t(span.first_row) * num_heads + head) * D + column]) =
      pack_bf16(value.x * inverse, value.y * inverse);
}

// ---- Prefill ----

// Heads wider than 128 have two warps a tile: one lane's registers do not hold a chunk's sums and those of all chunks.
template <int D>
using PrefillAttention = Attention<D, (D > 128 ? 2 : 1), 4, 1>;

// The 64 rows of a block: consecutive (token, head of the group) of one span, from `first_row` of the span on.
struct PrefillRows {
  Span span;
  int first_row, group_size, window;

  DEVICE int end() const { return span.len * group_size; }
  DEVICE Range seen_by(int row) const { return seen_from(span.start + (first_row + row) / group_size, window); }
  // What some of the rows first..=last see. No row if first is beyond the span's last.
  DEVICE Range seen_by_any(int first, int last) const {
    last = min(last, end() - 1 - first_row);
    if (first > last) return {0, 0};
    return {seen_by(first).first, seen_by(last).end};
  }
  // Where a row's query, and its output, begins.
  DEVICE int64_t at(int row, int head_size) const {
    const int token = (first_row + row) / group_size, head = blockIdx.y * group_size + (first_row + row) % group_size;
    return ((int64_t(span.first_row) + token) * (gridDim.y * group_size) + head) * head_size;
  }
};

template <int D>
DEVICE void prefill(bf16* out, const bf16* queries, Cache cache, PrefillRows rows, float softcap) {
  using A = PrefillAttention<D>;
  auto& shared = *reinterpret_cast<typename A::Shared*>(dynamic_shared());
  constexpr int ROWS = 4 * TILE_ROWS;
  const int num_rows = min(ROWS, rows.end() - rows.first_row);
  A::template for_each_piece<ROWS>([&](int row, int column) {
    const bf16* from = row < num_rows ? queries + rows.at(row, D) + column : queries;
    cp_async_16(&shared.queries[row][column], from, row >= num_rows);
  });
  Sight sight;
  const int first = A::tile() * TILE_ROWS, own = first + A::lane() / 4;
  sight.row[0] = rows.seen_by_any(own, own);
  sight.row[1] = rows.seen_by_any(own + 8, own + 8);
  sight.warp = rows.seen_by_any(first, first + TILE_ROWS - 1);
  sight.any = rows.seen_by_any(0, ROWS - 1);
  sight.whole = {rows.seen_by(num_rows - 1).first, rows.seen_by(0).end};

  typename A::Partial total;
  total.clear();
  A::attend(shared, cache, sight, softcap, [&](const typename A::Partial& chunk) { total.merge(chunk); });

  // The queries are read no more: their place takes the output, which leaves it 16 bytes at a time.
#pragma unroll
  for (int row = 0; row < 2; row++) {
    const float inverse = 1.0f / total.sum[row];
#pragma unroll
    for (int i = 0; i < 2 * A::UNITS; i++) {
      if (!A::has(i / 2)) continue;
      const float* pair = &total.out[i / 2][i % 2][2 * row];
      *reinterpret_cast<uint32_t*>(
          &shared.queries[own + 8 * row][A::column_of(i / 2) + i % 2 * 8 + A::lane() % 4 * 2]) =
          pack_bf16(pair[0] * inverse, pair[1] * inverse);
    }
  }
  __syncthreads();
  A::template for_each_piece<ROWS>([&](int row, int column) {
    if (row >= num_rows) return;
    *reinterpret_cast<uint4*>(out + rows.at(row, D) + column) = *reinterpret_cast<uint4*>(&shared.queries[row][column]);
  });
}

// ---- Kernels ----
//
// decode: grid (num_seqs, num_kv_heads, chunks), block 128; merge: grid (num_seqs, num_heads), block D / 2;
// prefill: grid (num_tiles, num_kv_heads), block 128, 256 for D > 128. spans: 5 ints each: first row, rows, position of
// the first, start of its block table in `tables`, one that is not used. A span of no rows is padding. tiles: pairs of
// a span and the first of 64 rows of its flattened (token, head of the group). Dynamic shared memory: README.md, and
// the asserts.

#define ATTENTION(D)                                                                                                   \
  static_assert(DecodeAttention<D>::SHARED_BYTES == (D > 128 ? 288 * (D + 8) + 1552 : 544 * (D + 8) + 2576),           \
                "README.md");                                                                                          \
  static_assert(PrefillAttention<D>::SHARED_BYTES == (D > 128 ? 256 * (D + 8) + 5648 : 384 * (D + 8) + 16),            \
                "README.md");                                                                                          \
  KERNEL(128, 4)                                                                                                       \
  attention_decode_d##D(float* partial_out, float* partial_max, float* partial_sum, const bf16* queries,               \
                        const bf16* key_cache, const bf16* value_cache, const int* tables, const int* spans,           \
                        int num_heads, int num_kv_heads, int block_size, int window, int chunks, float softcap) {      \
    const Span span = span_at(spans, blockIdx.x);                                                                      \
    const Cache cache = {                                                                                              \
        key_cache, value_cache, tables + span.table_start, num_kv_heads, int(blockIdx.y), block_size};                 \
    decode<D>({partial_out, partial_max, partial_sum, chunks}, queries, cache, span, num_heads / num_kv_heads, window, \
              softcap);                                                                                                \
  }                                                                                                                    \
  KERNEL(D / 2, 4)                                                                                                     \
  attention_merge_d##D(bf16* out, const float* partial_out, const float* partial_max, const float* partial_sum,        \
                       const int* spans, int num_heads, int chunks) {                                                  \
    const Span span = span_at(spans, blockIdx.x);                                                                      \
    if (span.len > 0) merge<D>(out, partial_out, partial_max, partial_sum, span, chunks);                              \
  }                                                                                                                    \
  KERNEL(PrefillAttention<D>::THREADS)                                                                                 \
  attention_prefill_d##D(bf16* out, const bf16* queries, const bf16* key_cache, const bf16* value_cache,               \
                         const int* tables, const int* spans, const int* tiles, int num_heads, int num_kv_heads,       \
                         int block_size, int window, float softcap) {                                                  \
    const Span span = span_at(spans, tiles[2 * blockIdx.x]);                                                           \
    const Cache cache = {                                                                                              \
        key_cache, value_cache, tables + span.table_start, num_kv_heads, int(blockIdx.y), block_size};                 \
    prefill<D>(out, queries, cache, {span, tiles[2 * blockIdx.x + 1], num_heads / num_kv_heads, window}, softcap);     \
  }

ATTENTION(16)
ATTENTION(32)
ATTENTION(48)
ATTENTION(64)
ATTENTION(80)
ATTENTION(96)
ATTENTION(112)
ATTENTION(128)
ATTENTION(160)
ATTENTION(192)
ATTENTION(256)
