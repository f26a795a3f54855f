// From the stacked projection of a row to what attention reads: queries rotated, scaled and rounded; keys rotated and
// rounded, values rounded, both put into the cache.
//
// A cache is [num_blocks, num_kv_heads, block_size, head_size] in bfloat16: a head's keys of one block are consecutive,
// and a slot is block * block_size + offset in the block.
#include "prelude.cuh"

// Where one head of the row goes, and what it is multiplied by.
struct Destination {
  bf16* head;
  float scale;
};

struct RowOutputs {
  bf16* queries;
  // Null for a row without a slot: its keys and values are not kept.
  bf16* keys;
  bf16* values;
  int64_t head_stride;
  int num_heads, num_kv_heads, head_size;
  float query_scale;

  DEVICE Destination of(int head) const {
    if (head < num_heads) return {queries + head * head_size, query_scale};
    head -= num_heads;
    bf16* cache = head < num_kv_heads ? keys : values;
    if (cache == nullptr) return {nullptr, 1.0f};
    return {cache + (head < num_kv_heads ? head : head - num_kv_heads) * head_stride, 1.0f};
  }
};

DEVICE void store4(bf16* to, float scale, float a, float b, float c, float d) {
  store_global(to, make_uint2(pack_kv_bf16(a * scale, b * scale), pack_kv_bf16(c * scale, d * scale)));
}

// (x, y) turned by the angle; each operation rounded once, as the reference has it.
struct Turned {
  float x, y;
};
DEVICE Turned turn(float x, float y, float cosine, float sine) {
  return {__fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine)), __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine))};
}

// Elements i..i + 4 and i + pairs..i + pairs + 4 of a rotated head.
DEVICE void rotate4(Destination to, const float* head, const float* angles, int i, int pairs) {
  const float4 x = *reinterpret_cast<const float4*>(head + i), y = *reinterpret_cast<const float4*>(head + pairs + i);
  const float4 first = *reinterpret_cast<const float4*>(angles + 2 * i);
  const float4 second = *reinterpret_cast<const float4*>(angles + 2 * i + 4);
  const Turned a = turn(x.x, y.x, first.x, first.y), b = turn(x.y, y.y, first.z, first.w);
  const Turned c = turn(x.z, y.z, second.x, second.y), d = turn(x.w, y.w, second.z, second.w);
  store4(to.head + i, to.scale, a.x, b.x, c.x, d.x);
  store4(to.head + pairs + i, to.scale, a.y, b.y, c.y, d.y);
}

DEVICE void copy4(Destination to, const float* head, int i) {
  const float4 v = *reinterpret_cast<const float4*>(head + i);
  store4(to.head + i, to.scale, v.x, v.y, v.z, v.w);
}

// Four elements at a time: pairs is a multiple of 4.
DEVICE void by_fours(const RowOutputs& outputs, const float* row, const float* angles, int pairs) {
  const int size = outputs.head_size, rotated_heads = outputs.num_heads + outputs.num_kv_heads;
  // Of a rotated head one item turns two fours; the fours beyond its pairs, and those of a value, are one item each.
  const int turns = pairs / 4, items = size / 4 - turns, rotated_items = rotated_heads * items;
  const int total = rotated_items + outputs.num_kv_heads * (size / 4);
  for (int item = threadIdx.x; item < total; item += blockDim.x) {
    const bool is_rotated = item < rotated_items;
    const int per_head = is_rotated ? items : size / 4, rest = is_rotated ? item : item - rotated_items;
    const int head = rest / per_head + (is_rotated ? 0 : rotated_heads), i = rest % per_head;
    const Destination to = outputs.of(head);
    if (to.head == nullptr) continue;
    if (is_rotated && i < turns) {
      rotate4(to, row + head * size, angles, 4 * i, pairs);
    } else {
      copy4(to, row + head * size, 4 * (is_rotated ? i + turns : i));
    }
  }
}

// Any number of pairs, an element at a time.
DEVICE void by_elements(const RowOutputs& outputs, const float* row, const float* angles, int pairs) {
  const int size = outputs.head_size, rotated_heads = outputs.num_heads + outputs.num_kv_heads;
  const int total = (rotated_heads + outputs.num_kv_heads) * size;
  for (int item = threadIdx.x; item < total; item += blockDim.x) {
    const int head = item / size, i = item % size, pair = i < pairs ? i : i - pairs;
    const Destination to = outputs.of(head);
    if (to.head == nullptr) continue;
    float value = row[item];
    if (head < rotated_heads && i < 2 * pairs) {
      const float* x = row + head * size + pair;
      const Turned turned = turn(x[0], x[pairs], angles[2 * pair], angles[2 * pair + 1]);
      value = i < pairs ? turned.x : turned.y;
    }
    store_global(to.head + i, kv_bf16(value * to.scale));
  }
}

// Grid (rows), block 128. qkv [rows, (num_heads + 2 num_kv_heads) * head_size]; angles [positions, pairs, 2]: cosine,
// sine; elements i and i + pairs of a head turn together, those beyond 2 * pairs stay. A row whose slot is negative is
// padding: only its queries are written.
KERNEL(128)
rope_and_cache(bf16* __restrict__ queries, bf16* __restrict__ key_cache, bf16* __restrict__ value_cache,
               const float* __restrict__ qkv, const float* __restrict__ angles, const int* __restrict__ positions,
               const int* __restrict__ slots, int num_heads, int num_kv_heads, int head_size, int pairs, int block_size,
               float scale) {
  const int64_t row = blockIdx.x;
  const int slot = slots[row];
  const int64_t block = slot / block_size, offset = slot % block_size;
  const int64_t cache_at = (block * num_kv_heads * block_size + offset) * head_size;
  RowOutputs outputs;
  outputs.queries = queries + row * num_heads * head_size;
  outputs.keys = slot < 0 ? nullptr : key_cache + cache_at;
  outputs.values = slot < 0 ? nullptr : value_cache + cache_at;
  outputs.head_stride = int64_t(block_size) * head_size;
  outputs.num_heads = num_heads;
  outputs.num_kv_heads = num_kv_heads;
  outputs.head_size = head_size;
  outputs.query_scale = scale;
  const float* from = qkv + row * (num_heads + 2 * num_kv_heads) * head_size;
  const float* row_angles = angles + positions[row] * int64_t(2 * pairs);
  if (pairs % 4 == 0) {
    by_fours(outputs, from, row_angles, pairs);
  } else {
    by_elements(outputs, from, row_angles, pairs);
  }
}
