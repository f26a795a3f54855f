// Where the order of a row's tokens is cut: behind so many, or where a sum of weights is reached. Nothing is sorted:
// the tokens near the largest logit go into registers (or the row is read again and again), and the key of the cut is
// found by bisection, its last id by counting. Sums are of whole numbers, so that their order does not matter.
#pragma once
#include "sampling_row.cuh"

// The tokens of larger keys, and `ties` of those with this key, up to the id `last`.
struct Cut {
  uint32_t key = 0;
  uint32_t ties = 0;
  uint32_t last = ~0u;

  DEVICE bool keeps(uint32_t other_key, uint32_t token) const {
    return place_of(other_key, token) >= place_of(key, last);
  }
};

// Where keys are read: what lies near the largest logit and fits into registers, or the whole row.
struct Keys {
  bool in_registers = false;
  uint32_t count = 0;  // in the registers of all threads
  uint32_t least = 0;  // of those
  uint32_t own[MOST_CANDIDATES / THREADS];
};

template <class See>
DEVICE void for_each_key(const Row& row, const Keys& keys, See see) {
  if (keys.in_registers) {
#pragma unroll
    for (int i = 0; i < MOST_CANDIDATES / THREADS; i++) {
      if (keys.own[i] != 0) see(keys.own[i]);
    }
  } else {
#pragma unroll 4
    for (int token = threadIdx.x; token < row.num_tokens; token += THREADS) see(key_of(row.logits[token]));
  }
}

// The bin of a scaled logit; BINS beyond the last one.
DEVICE int bin_of(float scaled) {
  const float distance = __fmul_rn(scaled, -BINS_OF_ONE);
  return distance < float(BINS) ? int(distance) : BINS;
}

DEVICE void clear_bins(Shared& shared) {
  shared.bins[threadIdx.x] = 0;
  __syncthreads();
}

DEVICE void count_bin(const Row& row, float logit, Shared& shared) {
  const int bin = bin_of(row.scaled(logit));
  if (bin < BINS) atomicAdd(&shared.bins[bin], 1u);
}

// The sum of the values of this thread and those before it. Waits for the block.
DEVICE uint32_t block_scan(uint32_t value, Shared& shared) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const uint32_t before = __shfl_up_sync(ALL_LANES, value, distance);
    if (lane >= distance) value += before;
  }
  if (lane == WARP - 1) shared.scan[warp] = value;
  __syncthreads();
  for (int i = 0; i < warp; i++) value += shared.scan[i];
  __syncthreads();
  return value;
}

// Once the bins are counted: takes the tokens of as many bins, from the largest logit on, as have room.
DEVICE Keys collect_candidates(const Row& row, Shared& shared) {
  __syncthreads();
  const uint32_t up_to_here = block_scan(shared.bins[threadIdx.x], shared);
  const bool fits = up_to_here <= MOST_CANDIDATES;
  const uint64_t found = block_max(fits ? uint64_t(threadIdx.x + 1) << 32 | up_to_here : 0, shared);
  const int bins = int(found >> 32);
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
#pragma unroll 4
  for (int first = 0; first < row.num_tokens; first += THREADS) {
    const int token = first + threadIdx.x;
    const float logit = token < row.num_tokens ? row.logits[token] : -infinity();
    const bool is_near = bin_of(row.scaled(logit)) < bins;
    const uint32_t lanes = __ballot_sync(ALL_LANES, is_near);
    if (lanes == 0) continue;
    uint32_t at = 0;
    if (threadIdx.x % WARP == 0) at = atomicAdd(&shared.count, uint32_t(__popc(lanes)));
    at = __shfl_sync(ALL_LANES, at, 0);
    if (is_near) shared.candidates[at + bits_below(lanes)] = key_of(logit);
  }
  __syncthreads();
  Keys keys;
  keys.count = uint32_t(found);
  uint32_t least = ~0u;
#pragma unroll
  for (int i = 0; i < MOST_CANDIDATES / THREADS; i++) {
    const uint32_t at = i * THREADS + threadIdx.x;
    keys.own[i] = at < keys.count ? shared.candidates[at] : 0;
    if (at < keys.count) least = min(least, keys.own[i]);
  }
  keys.least = ~uint32_t(block_max(~least, shared));
  return keys;
}

// The largest key up to `high` for which the weights of it and all larger ones reach `target`; those from `low` on do.
template <class Weight, class Number>
DEVICE uint32_t search(const Row& row, const Keys& keys, uint32_t low, uint32_t high, Number target, Weight weight,
                       Shared& shared) {
  if (keys.in_registers) low = max(low, keys.least);
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    Number sum = 0;
    for_each_key(row, keys, [&](uint32_t key) {
      if (key >= middle) sum += weight(key);
    });
    if (block_sum(sum, shared) >= target) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The sum of the weights of keys above `key`, and how many tokens have it.
template <class Weight, class Number>
DEVICE void sum_above(const Row& row, const Keys& keys, uint32_t key, Weight weight, Number& above, uint32_t& ties,
                      Shared& shared) {
  above = 0;
  ties = 0;
  for_each_key(row, keys, [&](uint32_t other) {
    if (other > key) above += weight(other);
    if (other == key) ties++;
  });
  above = block_sum(above, shared);
  ties = block_sum(ties, shared);
}

// The id of the `nth` (from 1) token that has this key, in ascending order.
DEVICE uint32_t nth_tie(const Row& row, uint32_t key, uint32_t nth, Shared& shared) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int share = (row.num_tokens + THREADS - 1) / THREADS * WARP;
  const int begin = warp * share, end = min(begin + share, row.num_tokens);
  const auto ties_at = [&](int first) {
    const int token = first + lane;
    return __ballot_sync(ALL_LANES, token < end && key_of(row.logits[token]) == key);
  };
  uint32_t count = 0;
  for (int first = begin; first < end; first += WARP) count += __popc(ties_at(first));
  if (lane == 0) shared.scan[warp] = count;
  __syncthreads();
  uint32_t before = 0;
  for (int i = 0; i < warp; i++) before += shared.scan[i];
  if (before < nth && nth <= before + count) {
    for (int first = begin; first < end; first += WARP) {
      const uint32_t lanes = ties_at(first);
      if ((lanes >> lane & 1) && before + bits_below(lanes) + 1 == nth) shared.found = first + lane;
      before += __popc(lanes);
    }
  }
  __syncthreads();
  return shared.found;
}

// The cut behind the first `count` tokens, fewer than the row has.
DEVICE Cut first_tokens(const Row& row, Keys keys, uint32_t count, Shared& shared) {
  const auto one = [](uint32_t) { return 1u; };
  keys.in_registers = count <= keys.count;
  Cut cut;
  cut.key = search(row, keys, key_of(-infinity()), key_of(row.largest), count, one, shared);
  uint32_t above, ties;
  sum_above(row, keys, cut.key, one, above, ties, shared);
  cut.ties = count - above;
  if (cut.ties < ties) cut.last = nth_tie(row, cut.key, cut.ties, shared);
  return cut;
}
