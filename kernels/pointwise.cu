// What happens between the matrix products, a row of the step at a time.
//
// The residual stream `hidden` is f32; what goes into a product is bfloat16, what comes out of one f32. Every row
// starts at a multiple of 16 bytes: hidden_size and intermediate_size are multiples of 8.
#include "prelude.cuh"

constexpr int NORM_THREADS = 256;
// What a thread of a norm keeps in registers: 4 * KEPT values, so rows of up to 8192 are read once.
constexpr int KEPT = 8;

DEVICE float4 load4(const float* pointer) { return *reinterpret_cast<const float4*>(pointer); }
DEVICE void store4(float* pointer, float4 v) { *reinterpret_cast<float4*>(pointer) = v; }
DEVICE void store4(bf16* pointer, float4 v) {
  *reinterpret_cast<uint2*>(pointer) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

// hidden[row] = table[tokens[row]] * scale. Grid (rows), block 128.
KERNEL(128)
embed(float* hidden, const bf16* __restrict__ table, const int* __restrict__ tokens, int hidden_size, float scale) {
  const int64_t row = blockIdx.x;
  const bf16* from = table + tokens[row] * int64_t(hidden_size);
  float* to = hidden + row * hidden_size;
  for (int i = 4 * threadIdx.x; i < hidden_size; i += 4 * blockDim.x) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from + i);
    store4(to + i, make_float4(low_f32(pairs.x) * scale, high_f32(pairs.x) * scale, low_f32(pairs.y) * scale,
                               high_f32(pairs.y) * scale));
  }
}

DEVICE float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Four values of the residual stream with the update added, written back.
DEVICE float4 updated(float* hidden, const float* update, int64_t at) {
  const float4 v = load4(hidden + at);
  if (update == nullptr) return v;
  const float4 sum = sum_of(v, load4(update + at));
  store4(hidden + at, sum);
  return sum;
}

DEVICE float sum_of_squares(float4 v, float sum) {
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

// As `octavo_backend::numerics::rms_norm`: each product rounded once.
DEVICE float4 normed(float4 v, float factor, float4 w) {
  return make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
}

// hidden[row] += update[row] unless update is null; out[row] = hidden[row] * weight / sqrt(mean square + epsilon).
template <class Out>
DEVICE void norm(Out* __restrict__ out, float* __restrict__ hidden, const float* __restrict__ update,
                 const float* __restrict__ weight, int hidden_size, float epsilon) {
  __shared__ float scratch[NORM_THREADS / WARP];
  const int64_t row = blockIdx.x * int64_t(hidden_size);
  const int first = 4 * threadIdx.x;
  const int step = 4 * blockDim.x;
  float4 kept[KEPT], change[KEPT];
  float sum = 0.0f;
  // All that is read is under way before the first of it is used. Steps beyond a row's end are passed over by all.
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const int at = first + i * step;
    if (i * step >= hidden_size) break;
    kept[i] = change[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at < hidden_size) kept[i] = load4(hidden + row + at);
    if (at < hidden_size && update != nullptr) change[i] = load4(update + row + at);
  }
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const int at = first + i * step;
    if (i * step >= hidden_size) break;
    kept[i] = sum_of(kept[i], change[i]);
    if (at < hidden_size && update != nullptr) store4(hidden + row + at, kept[i]);
    sum = sum_of_squares(kept[i], sum);
  }
#pragma unroll 1
  for (int i = first + KEPT * step; i < hidden_size; i += step) {
    sum = sum_of_squares(updated(hidden, update, row + i), sum);
  }
  sum = block_sum(sum, scratch);
  const float factor = 1.0f / sqrtf(sum / float(hidden_size) + epsilon);
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const int at = first + i * step;
    if (i * step >= hidden_size) break;
    if (at < hidden_size) store4(out + row + at, normed(kept[i], factor, load4(weight + at)));
  }
#pragma unroll 1
  for (int i = first + KEPT * step; i < hidden_size; i += step) {
    store4(out + row + i, normed(load4(hidden + row + i), factor, load4(weight + i)));
  }
}

// Grid (rows), block as many whole warps as it takes to read the row in one step, at most 256.
KERNEL(NORM_THREADS)
norm_bf16(bf16* out, float* hidden, const float* update, const float* weight, int hidden_size, float epsilon) {
  norm(out, hidden, update, weight, hidden_size, epsilon);
}

// The same without rounding, for hidden states that are asked for.
KERNEL(NORM_THREADS)
norm_f32(float* out, float* hidden, const float* update, const float* weight, int hidden_size, float epsilon) {
  norm(out, hidden, update, weight, hidden_size, epsilon);
}

DEVICE float silu(float x) { return x / (1.0f + ex2(-x * LOG2_E)); }

// out[row] = silu(gate) * up of gate_up[row] = [gate | up]. Grid (rows, ceil(intermediate_size / 512)), block 128.
KERNEL(128)
silu_and_mul(bf16* out, const float* __restrict__ gate_up, int intermediate_size) {
  const int at = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
  if (at >= intermediate_size) return;
  const int64_t row = blockIdx.x;
  const float* from = gate_up + row * 2 * intermediate_size + at;
  const float4 gate = load4(from), up = load4(from + intermediate_size);
  store4(out + row * intermediate_size + at,
         make_float4(silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z, silu(gate.w) * up.w));
}

// out[i] = in[rows[i]], `width` floats each. Grid (num_rows), block 128.
KERNEL(128)
gather_rows(float* out, const float* __restrict__ in, const int* __restrict__ rows, int width) {
  const float* from = in + rows[blockIdx.x] * int64_t(width);
  float* to = out + blockIdx.x * int64_t(width);
  if (width % 4 == 0) {
    for (int i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) store4(to + i, load4(from + i));
  } else {
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
  }
}
