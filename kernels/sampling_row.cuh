// A row of logits and the block of threads that works on it: the order of its tokens, the largest one, sums of masses.
#pragma once
#include "sampling_noise.cuh"

constexpr int THREADS = 1024;
// One block a multiprocessor: up to 64 registers a thread.
#define ROW_KERNEL extern "C" __global__ void __launch_bounds__(1024, 1)
constexpr int WARPS = THREADS / WARP;

// What becomes of an entry. As `SampleError`: a logit is NaN or positive infinity, or none is finite; none is after the
// rules.
constexpr int DONE = 0;
constexpr int NOT_FINITE = 1;
constexpr int NOTHING_ALLOWED = 2;

// ---- Keys -----------------------------------------------------------------------------------------------------------

// Larger logits have larger keys, 0 and -0 the same. No key is 0.
DEVICE uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
  return bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
}
DEVICE float logit_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }
// Of a logit and its token: the earlier in the order, the larger.
DEVICE uint64_t place_of(uint32_t key, uint32_t token) { return uint64_t(key) << 32 | uint32_t(~token); }
DEVICE uint32_t token_of(uint64_t place) { return ~uint32_t(place); }

// ---- What a block shares --------------------------------------------------------------------------------------------

// A block's row, as one draw or report sees it.
struct Row {
  const float* logits;
  int num_tokens;
  float largest;
  float inverse;

  DEVICE float scaled(float logit) const { return __fmul_rn(__fsub_rn(logit, largest), inverse); }
};

constexpr int BINS = THREADS;         // of scaled distances from the largest logit
constexpr float BINS_OF_ONE = 32.0f;  // so they reach to exp(-32)
constexpr int MOST_CANDIDATES = 4 * THREADS;
constexpr int MASS_BLOCK = 256;
constexpr int MOST_FOLDS = 1024;  // blocks of mass that are added at once
constexpr int MOST_TOP = 1024;

struct Shared {
  uint64_t reduction[WARPS];
  uint64_t places[MOST_TOP];
  double total;
  uint64_t target;
  uint32_t candidates[MOST_CANDIDATES];
  uint32_t bins[BINS];
  float folds[MOST_FOLDS];
  uint32_t scan[WARPS];
  uint32_t count;
  uint32_t found;
};

DEVICE uint64_t lanes_max(uint64_t value) {
  const uint32_t high = __reduce_max_sync(ALL_LANES, uint32_t(value >> 32));
  const uint32_t low = __reduce_max_sync(ALL_LANES, uint32_t(value >> 32) == high ? uint32_t(value) : 0);
  return uint64_t(high) << 32 | low;
}

// Over all threads of the block, the same in each. These wait for the block.
DEVICE uint64_t block_max(uint64_t value, Shared& shared) {
  value = lanes_max(value);
  if (threadIdx.x % WARP == 0) shared.reduction[threadIdx.x / WARP] = value;
  __syncthreads();
  value = shared.reduction[threadIdx.x % WARP];
  __syncthreads();
  return lanes_max(value);
}

DEVICE uint32_t lanes_sum(uint32_t value) { return __reduce_add_sync(ALL_LANES, value); }
// In pieces of 26 bits, of which 32 do not overflow a word.
DEVICE uint64_t lanes_sum(uint64_t value) {
  const uint32_t mask = (1u << 26) - 1;
  const uint64_t low = lanes_sum(uint32_t(value) & mask);
  const uint64_t middle = lanes_sum(uint32_t(value >> 26) & mask);
  const uint64_t high = lanes_sum(uint32_t(value >> 52));
  return low + (middle << 26) + (high << 52);
}
template <class Number>
DEVICE Number block_sum(Number value, Shared& shared) {
  value = lanes_sum(value);
  if (threadIdx.x % WARP == 0) shared.reduction[threadIdx.x / WARP] = value;
  __syncthreads();
  value = Number(shared.reduction[threadIdx.x % WARP]);
  __syncthreads();
  return lanes_sum(value);
}

// How many lanes below this one have their bit in `lanes`.
DEVICE int bits_below(uint32_t lanes) { return __popc(lanes & ((1u << threadIdx.x % WARP) - 1)); }

// ---- The largest logit ----------------------------------------------------------------------------------------------

constexpr uint64_t FAULT = ~0ull;

struct Best {
  float value = -infinity();
  uint32_t token = 0;
  bool has_fault = false;

  // Tokens come in ascending order.
  DEVICE void see(float logit, uint32_t seen) {
    // NaN fails every comparison.
    has_fault |= !(logit < infinity());
    if (logit > value) {
      value = logit;
      token = seen;
    }
  }
};

// The place of the largest logit (the lowest id on ties), or FAULT where a logit is NaN or positive infinity. One pass.
DEVICE uint64_t largest_place(const float* logits, int num_tokens, Shared& shared) {
  Best best;
  const int whole = num_tokens / 4 * 4;
#pragma unroll 4
  for (int i = 4 * threadIdx.x; i < whole; i += 4 * THREADS) {
    const float4 four = *reinterpret_cast<const float4*>(logits + i);
    best.see(four.x, i);
    best.see(four.y, i + 1);
    best.see(four.z, i + 2);
    best.see(four.w, i + 3);
  }
  if (threadIdx.x < num_tokens - whole) best.see(logits[whole + threadIdx.x], whole + threadIdx.x);
  return block_max(best.has_fault ? FAULT : place_of(key_of(best.value), best.token), shared);
}

DEVICE int state_of(uint64_t largest, int none_finite) {
  if (largest == FAULT) return NOT_FINITE;
  return uint32_t(largest >> 32) > key_of(-infinity()) ? DONE : none_finite;
}

// The row of an entry and its largest place; the state says whether anything can be drawn from it.
DEVICE int prepare(Row& row, uint64_t& largest, const float* logits, const float* ruled, const int* ruled_states,
                   int64_t row_stride, int own, int copy, Shared& shared) {
  if (copy >= 0 && ruled_states[copy] != DONE) return ruled_states[copy];
  row.logits = copy >= 0 ? ruled + copy * row_stride : logits + own * row_stride;
  largest = largest_place(row.logits, row.num_tokens, shared);
  row.largest = logit_of(uint32_t(largest >> 32));
  return state_of(largest, copy >= 0 ? NOTHING_ALLOWED : NOT_FINITE);
}

// ---- Mass -----------------------------------------------------------------------------------------------------------

DEVICE float mass_of(const Row& row, float logit) { return exp_of(row.scaled(logit)); }
// A mass in units of 2^-40, rounded down.
DEVICE uint64_t units_of(float mass) { return __float2ull_rz(__fmul_rn(mass, 1099511627776.0f)); }

// The sum of mass(token, logit) over the row in the order of `MassSum`: of each 256 tokens 16 lanes in f32, folded by
// halves, and those sums in f64.
template <class Mass>
DEVICE double mass_sum(const Row& row, Mass mass, Shared& shared) {
  const int lane = threadIdx.x % 16;
  const int blocks = (row.num_tokens + MASS_BLOCK - 1) / MASS_BLOCK;
  double total = 0.0;
  for (int start = 0; start < blocks; start += MOST_FOLDS) {
    const int end = min(start + MOST_FOLDS, blocks);
    for (int first = start; first < end; first += THREADS / 16) {
      const int block = first + threadIdx.x / 16;
      float sum = 0.0f;
      const int tokens = block < end ? min(MASS_BLOCK, row.num_tokens - block * MASS_BLOCK) : 0;
#pragma unroll 4
      for (int i = lane; i < tokens; i += 16) {
        const int token = block * MASS_BLOCK + i;
        sum = __fadd_rn(sum, mass(token, row.logits[token]));
      }
#pragma unroll
      for (int half_lanes = 8; half_lanes > 0; half_lanes /= 2) {
        sum = __fadd_rn(sum, __shfl_down_sync(ALL_LANES, sum, half_lanes, 16));
      }
      if (lane == 0 && block < end) shared.folds[block - start] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < end - start; i++) total = __dadd_rn(total, double(shared.folds[i]));
      shared.total = total;
    }
    __syncthreads();
  }
  return shared.total;
}
