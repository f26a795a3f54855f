// Rules, draws and log-probabilities of rows of logits, with the very bits of `octavo_backend::sampling`.
//
// A row is num_tokens f32 logits; rows lie row_stride apart, a multiple of 4, and start at a multiple of 16 bytes. Entries
// (rules, draws, reports) name the row that they are about, several may name one; each has a block of its own. A row to
// which rules apply is first copied, changed, to `ruled`, where rows lie row_stride apart as well; an entry whose `ruled` is
// not -1 uses that copy.
//
// All arithmetic that decides anything is written with __f*_rn, so that no compiler option changes a bit.
//
// The filters all keep a head of one order, larger logits first and equal ones by id. A head is a cut: its last key and the
// last id of that key. Cuts are found by counting, and by adding whole numbers (units of mass), never by sorting.
#include "prelude.cuh"

constexpr int THREADS = 1024;
// One block a multiprocessor: up to 64 registers a thread.
#define ROW_KERNEL extern "C" __global__ void __launch_bounds__(1024, 1)
constexpr int WARPS = THREADS / WARP;

// What becomes of an entry. As `SampleError`: a logit is NaN or positive infinity, or none is finite; none is after the rules.
constexpr int DONE = 0;
constexpr int NOT_FINITE = 1;
constexpr int NOTHING_ALLOWED = 2;

// `LogitRules` of one row. Starts and ends are indices of the lists that the kernel is given.
struct Rules {
  int row;
  int bias_start, bias_end;
  int allowed;  // the first word of the mask, of at least ceil(num_tokens / 32); -1 if everything is allowed
  int banned_start, banned_end;
  int seen_start, seen_end;
  float repetition, frequency, presence;
};

// `SampleRow` of one draw.
struct Draw {
  int row;
  int ruled;  // the index of the row in `ruled`; -1: the row itself
  uint32_t position;
  uint32_t choice;
  uint32_t seed_low, seed_high;
  float inverse;   // `inverse_temperature`; 0 is greedy
  float least;     // `least_scaled` of min_p
  uint32_t top_k;  // 0 keeps all
  float top_p;
};

// What is wanted of one row: the log-probability of a token, and the likeliest ones.
struct Report {
  int row;
  int ruled;
  int token;  // where `draw` is -1
  int draw;   // the draw whose token it is
  int count;  // of likeliest tokens, at most MOST_TOP
};

struct Reported {
  double sum;     // of exp(logit - largest), as `MassSum` adds: with it the host makes `LogSoftmax`
  float largest;  // logit
  float logit;    // of the token
  uint32_t rank;  // of the token
  int state;
};

// ---- Logarithm, exponential, noise -------------------------------------------------------------------------------------

constexpr float LARGEST_NOISE = 22.8741f;
constexpr uint32_t DOMAIN_WORD = 0x53414d50u;
constexpr uint32_t NEAR_ONE = 0x4afb0ccdu;
constexpr uint32_t SPLIT = 0x3f3504f3u;
constexpr float HASH_SCALE = 1.0f / 4294967296.0f;

// ln(1 + f) + exponent * ln 2.
DEVICE float log1p_scaled(float f, float exponent) {
  const float square = __fmul_rn(f, f);
  float polynomial = 0.0703768358f;
  polynomial = __fmaf_rn(polynomial, f, -0.115146101f);
  polynomial = __fmaf_rn(polynomial, f, 0.116769984f);
  polynomial = __fmaf_rn(polynomial, f, -0.124201410f);
  polynomial = __fmaf_rn(polynomial, f, 0.142493233f);
  polynomial = __fmaf_rn(polynomial, f, -0.166680574f);
  polynomial = __fmaf_rn(polynomial, f, 0.200007141f);
  polynomial = __fmaf_rn(polynomial, f, -0.249999940f);
  polynomial = __fmaf_rn(polynomial, f, 0.333333313f);
  const float y = __fadd_rn(__fmaf_rn(__fmul_rn(polynomial, square), f, __fmul_rn(-0.5f, square)), f);
  return __fmaf_rn(exponent, 0.693147182f, y);
}

DEVICE float natural_log(float x) {
  const uint32_t bits = __float_as_uint(x);
  const int exponent = int(bits - SPLIT) >> 23;
  const float mantissa = __uint_as_float(bits - (uint32_t(exponent) << 23));
  return log1p_scaled(__fsub_rn(mantissa, 1.0f), __int2float_rn(exponent));
}

DEVICE float exponential(uint32_t hash) {
  if (hash < NEAR_ONE) return -log1p_scaled(-__fmaf_rn(__uint2float_rn(hash), HASH_SCALE, HASH_SCALE / 2.0f), 0.0f);
  return -natural_log(__fmaf_rn(__uint2float_rn(~hash), HASH_SCALE, HASH_SCALE / 2.0f));
}

DEVICE float gumbel(uint32_t hash) { return -natural_log(exponential(hash)); }

// Philox4x32-10 of the counter {counter, position, choice, DOMAIN_WORD}.
DEVICE uint4 philox(uint32_t counter, uint32_t position, uint32_t choice, uint32_t key0, uint32_t key1) {
  uint4 c = make_uint4(counter, position, choice, DOMAIN_WORD);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    if (round > 0) {
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
    const uint32_t high_a = __umulhi(0xd2511f53u, c.x), low_a = 0xd2511f53u * c.x;
    const uint32_t high_b = __umulhi(0xcd9e8d57u, c.z), low_b = 0xcd9e8d57u * c.z;
    c = make_uint4(high_b ^ c.y ^ key0, low_b, high_a ^ c.w ^ key1, low_a);
  }
  return c;
}

DEVICE uint32_t word_of(uint4 words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

// The hashes of tokens start + column + 16 * (0, 1, 2, 3); `start` is a multiple of 64, `column` below 16.
DEVICE uint4 noise_column(const Draw& draw, uint32_t start, uint32_t column) {
  return philox(start / 64 * 16 + column, draw.position, draw.choice, draw.seed_low, draw.seed_high);
}

DEVICE uint32_t noise_hash(const Draw& draw, uint32_t token) {
  return word_of(noise_column(draw, token / 64 * 64, token % 16), token / 16 % 4);
}

// `octavo_backend::numerics::exp` of a number that is not above 0.
DEVICE float exp_of(float x) {
  if (x < -87.0f) return 0.0f;
  const float n = rintf(__fmul_rn(x, LOG2_E));
  const float r = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.6933594f, x));
  float p = 0.0013814599f;
  p = __fmaf_rn(p, r, 0.008368717f);
  p = __fmaf_rn(p, r, 0.04166839f);
  p = __fmaf_rn(p, r, 0.16666521f);
  p = __fmaf_rn(p, r, 0.49999994f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  return __fmul_rn(p, __uint_as_float(uint32_t(__float2int_rz(n) + 127) << 23));
}

// ---- Keys ---------------------------------------------------------------------------------------------------------------

// Larger logits have larger keys, 0 and -0 the same. No key is 0.
DEVICE uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
  return bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
}
DEVICE float logit_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }
// Of a logit and its token: the earlier in the order, the larger.
DEVICE uint64_t place_of(uint32_t key, uint32_t token) { return uint64_t(key) << 32 | uint32_t(~token); }
DEVICE uint32_t token_of(uint64_t place) { return ~uint32_t(place); }

// ---- What a block shares ------------------------------------------------------------------------------------------------

// A block's row, as one draw or report sees it.
struct Row {
  const float* logits;
  int num_tokens;
  float largest;
  float inverse;

  DEVICE float scaled(float logit) const { return __fmul_rn(__fsub_rn(logit, largest), inverse); }
};

constexpr int BINS = THREADS;               // of scaled distances from the largest logit
constexpr float BINS_OF_ONE = 32.0f;        // so they reach to exp(-32)
constexpr int MOST_CANDIDATES = 4 * THREADS;
constexpr int MASS_BLOCK = 256;
constexpr int MOST_FOLDS = 1024;            // blocks of mass that are added at once
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

// Over all threads of the block, the same in each. These wait for the block.
DEVICE uint64_t block_max(uint64_t value, Shared& shared) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  if (threadIdx.x % WARP == 0) shared.reduction[threadIdx.x / WARP] = value;
  __syncthreads();
  value = shared.reduction[threadIdx.x % WARP];
  __syncthreads();
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  return value;
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

// ---- The largest logit --------------------------------------------------------------------------------------------------

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

// ---- Mass ---------------------------------------------------------------------------------------------------------------

DEVICE float mass_of(const Row& row, float logit) { return exp_of(row.scaled(logit)); }
// A mass in units of 2^-40, rounded down.
DEVICE uint64_t units_of(float mass) { return __float2ull_rz(__fmul_rn(mass, 1099511627776.0f)); }

// The sum of mass(token, logit) over the row in the order of `MassSum`: of each 256 tokens 16 lanes in f32, folded by halves,
// and those sums in f64.
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
#pragma unroll 4
      for (int i = 0; i < MASS_BLOCK / 16; i++) {
        const int token = block * MASS_BLOCK + 16 * i + lane;
        if (block < end && token < row.num_tokens) sum = __fadd_rn(sum, mass(token, row.logits[token]));
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

// ---- Cuts ---------------------------------------------------------------------------------------------------------------

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

// ---- Filters ------------------------------------------------------------------------------------------------------------

// What min_p and a cut keep.
struct Kept {
  float least;
  Cut cut;

  DEVICE bool has(const Row& row, float logit, uint32_t token) const {
    return row.scaled(logit) >= least && cut.keeps(key_of(logit), token);
  }
};

DEVICE bool reaches(uint64_t units, double wanted) {
  return __dmul_rn(__ull2double_rn(units), 1.0 / 1099511627776.0) >= wanted;
}

// The least units that are a share `top_p` of the mass that is kept. Waits for the block.
DEVICE uint64_t target_units(const Row& row, const Kept& kept, float top_p, Shared& shared) {
  const double total = mass_sum(row, [&](int token, float logit) {
    return kept.has(row, logit, token) ? mass_of(row, logit) : 0.0f;
  }, shared);
  if (threadIdx.x == 0) {
    const double wanted = __dmul_rn(total, double(top_p));
    uint64_t units = wanted > 0.0 ? __double2ull_rz(__dmul_rn(wanted, 1099511627776.0)) : 0;
    while (units > 0 && reaches(units - 1, wanted)) units--;
    while (!reaches(units, wanted)) units++;
    shared.target = units;
  }
  __syncthreads();
  return shared.target;
}

// How many of `most` tokens of `units` each it takes to reach `target` from `above`: at least 1.
DEVICE uint32_t ties_needed(uint64_t above, uint64_t units, uint32_t most, uint64_t target) {
  uint32_t low = 1, high = most;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (above + middle * units >= target) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Cuts what is kept to the smallest head whose mass reaches `target`. Tokens that min_p leaves out come after all that it
// keeps, so counting them changes nothing.
DEVICE void keep_top_p(const Row& row, Keys keys, Kept& kept, uint64_t target, Shared& shared) {
  const uint32_t floor_key = kept.cut.key;
  const auto units = [&](uint32_t key) {
    return key > floor_key ? units_of(mass_of(row, logit_of(key))) : uint64_t(0);
  };
  const auto sum_of_keys = [&] {
    uint64_t sum = 0;
    for_each_key(row, keys, [&](uint32_t key) { sum += units(key); });
    return block_sum(sum, shared);
  };
  // If the candidates do not reach far enough, all keys do.
  keys.in_registers = keys.count > 0;
  uint64_t above_floor = sum_of_keys();
  if (keys.in_registers && above_floor < target) {
    keys.in_registers = false;
    above_floor = sum_of_keys();
  }
  const uint32_t largest_key = key_of(row.largest);
  if (above_floor < target || floor_key == largest_key) {
    // The cut lies among the tokens of the last key, or stays.
    if (kept.cut.ties == 0) return;
    const uint64_t each = units_of(mass_of(row, logit_of(floor_key)));
    if (above_floor + kept.cut.ties * each < target) return;
    const uint32_t needed = ties_needed(above_floor, each, kept.cut.ties, target);
    if (needed == kept.cut.ties) return;
    kept.cut.ties = needed;
    kept.cut.last = nth_tie(row, floor_key, needed, shared);
    return;
  }
  Cut cut;
  cut.key = search(row, keys, floor_key + 1, largest_key, target, units, shared);
  uint64_t above;
  uint32_t ties;
  sum_above(row, keys, cut.key, units, above, ties, shared);
  cut.ties = ties_needed(above, units(cut.key), ties, target);
  if (cut.ties < ties) cut.last = nth_tie(row, cut.key, cut.ties, shared);
  kept.cut = cut;
}

// What min_p, top_k and top_p keep.
DEVICE Kept filtered(const Row& row, const Draw& draw, Shared& shared) {
  Kept kept{draw.least, Cut()};
  const bool cuts_count = draw.top_k != 0 && draw.top_k < uint32_t(row.num_tokens);
  if (!cuts_count && !(draw.top_p < 1.0f)) return kept;
  clear_bins(shared);
#pragma unroll 4
  for (int token = threadIdx.x; token < row.num_tokens; token += THREADS) count_bin(row, row.logits[token], shared);
  const Keys keys = collect_candidates(row, shared);
  if (cuts_count) kept.cut = first_tokens(row, keys, draw.top_k, shared);
  if (draw.top_p < 1.0f) keep_top_p(row, keys, kept, target_units(row, kept, draw.top_p, shared), shared);
  return kept;
}

// ---- The draw -----------------------------------------------------------------------------------------------------------

// The best score so far and whose it is.
struct Winner {
  float score = -infinity();
  uint32_t token = ~0u;

  DEVICE void see(float other, uint32_t other_token) {
    if (other > score || (other == score && other_token < token)) {
      score = other;
      token = other_token;
    }
  }
};

DEVICE float score_of(const Row& row, float logit, uint32_t hash) {
  return __fmaf_rn(__fsub_rn(logit, row.largest), row.inverse, gumbel(hash));
}

// The winner among what is kept. Tokens whose best possible score is below the best so far are passed over; the bounds are
// exact (`Draw::among_all`), so that this changes nothing.
DEVICE uint32_t drawn(const Row& row, const Draw& draw, const Kept& kept, uint32_t likeliest, Shared& shared) {
  Winner winner;
  if (kept.has(row, row.largest, likeliest)) {
    winner.see(score_of(row, row.largest, noise_hash(draw, likeliest)), likeliest);
  }
  const int columns = (row.num_tokens + 63) / 64 * 16;
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    const uint32_t start = i / 16 * 64, column = i % 16;
    float logits[4];
    float most = -infinity();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t token = start + column + 16 * j;
      logits[j] = token < row.num_tokens ? row.logits[token] : -infinity();
      // What is not kept can no longer win.
      if (token >= row.num_tokens || !kept.has(row, logits[j], token)) logits[j] = not_a_number();
      most = fmaxf(most, row.scaled(logits[j]));
    }
    if (most == -infinity() || most < winner.score - LARGEST_NOISE) continue;
    const uint4 hashes = noise_column(draw, start, column);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t hash = word_of(hashes, j);
      const float bound = float(__clz(hash) + 1) * LN_2;
      // NaN fails this comparison too.
      if (!(row.scaled(logits[j]) + bound >= winner.score - 1e-4f)) continue;
      winner.see(score_of(row, logits[j], hash), start + column + 16 * j);
    }
  }
  const uint64_t place = winner.token == ~0u ? 0 : place_of(key_of(winner.score), winner.token);
  return token_of(block_max(place, shared));
}

// tokens[entry] and states[entry]. Grid (entries), block 1024. A greedy entry reads its row once.
ROW_KERNEL
sample(int* __restrict__ tokens, int* __restrict__ states, const float* __restrict__ logits, const float* __restrict__ ruled,
       const int* __restrict__ ruled_states, const Draw* __restrict__ draws, int64_t row_stride, int num_tokens) {
  __shared__ Shared shared;
  const Draw draw = draws[blockIdx.x];
  Row row;
  row.num_tokens = num_tokens;
  row.inverse = draw.inverse;
  uint64_t largest = 0;
  const int state = prepare(row, largest, logits, ruled, ruled_states, row_stride, draw.row, draw.ruled, shared);
  uint32_t token = token_of(largest);
  if (state == DONE && draw.inverse > 0.0f) {
    const Kept kept = filtered(row, draw, shared);
    token = drawn(row, draw, kept, token, shared);
  }
  if (threadIdx.x == 0) {
    tokens[blockIdx.x] = int(token);
    states[blockIdx.x] = state;
  }
}

// ---- Log-probabilities --------------------------------------------------------------------------------------------------

// Writes the tokens that the cut keeps, at most MOST_TOP, in their order.
DEVICE void write_top(int* top_tokens, float* top_logits, const Row& row, const Cut& cut, uint32_t count, Shared& shared) {
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
#pragma unroll 4
  for (int token = threadIdx.x; token < row.num_tokens; token += THREADS) {
    const uint32_t key = key_of(row.logits[token]);
    if (cut.keeps(key, token)) shared.places[atomicAdd(&shared.count, 1u)] = place_of(key, token);
  }
  __syncthreads();
  if (threadIdx.x >= count) return;
  const uint64_t own = shared.places[threadIdx.x];
  uint32_t before = 0;
  for (uint32_t i = 0; i < count; i++) before += shared.places[i] > own;
  const uint32_t token = token_of(own);
  top_tokens[before] = int(token);
  top_logits[before] = row.logits[token];
}

// reported[entry], and the likeliest tokens and their logits at [entry][0..count], rows of `most_top` (up to 1024). `tokens`
// are those of the draws. Grid (entries), block 1024.
ROW_KERNEL
logprobs(Reported* __restrict__ reported, int* __restrict__ top_tokens, float* __restrict__ top_logits,
         const float* __restrict__ logits, const float* __restrict__ ruled, const int* __restrict__ ruled_states,
         const int* __restrict__ tokens, const Report* __restrict__ reports, int64_t row_stride, int num_tokens, int most_top) {
  __shared__ Shared shared;
  const Report report = reports[blockIdx.x];
  Row row;
  row.num_tokens = num_tokens;
  row.inverse = 1.0f;
  uint64_t largest = 0;
  Reported result = {};
  result.state = prepare(row, largest, logits, ruled, ruled_states, row_stride, report.row, report.ruled, shared);
  if (result.state == DONE) {
    const uint32_t token = uint32_t(report.draw >= 0 ? tokens[report.draw] : report.token);
    const uint32_t count = min(min(report.count, num_tokens), min(most_top, MOST_TOP));
    result.largest = row.largest;
    result.logit = token < num_tokens ? row.logits[token] : -infinity();
    clear_bins(shared);
    uint32_t larger = 0;
    result.sum = mass_sum(row, [&](int, float logit) {
      larger += logit > result.logit;
      if (count > 0) count_bin(row, logit, shared);
      return mass_of(row, logit);
    }, shared);
    result.rank = 1 + block_sum(larger, shared);
    if (count > 0) {
      Cut cut;
      if (count < num_tokens) cut = first_tokens(row, collect_candidates(row, shared), count, shared);
      const int64_t first = int64_t(blockIdx.x) * most_top;
      write_top(top_tokens + first, top_logits + first, row, cut, count, shared);
    }
  }
  if (threadIdx.x == 0) reported[blockIdx.x] = result;
}

// ---- Rules --------------------------------------------------------------------------------------------------------------

// ruled[entry] = the row with its rules applied: bias, mask, bans, penalties, in this order; states[entry] is DONE or, if the
// row itself is not finite, NOT_FINITE. Tokens of a list beyond the row are passed over; `seen` has a token and how often the
// output has it. Grid (entries), block 1024.
ROW_KERNEL
apply_rules(float* __restrict__ ruled, int* __restrict__ states, const float* __restrict__ logits,
            const Rules* __restrict__ entries, const uint32_t* __restrict__ bias_tokens, const float* __restrict__ bias_values,
            const uint32_t* __restrict__ allowed, const uint32_t* __restrict__ banned, const uint2* __restrict__ seen,
            int64_t row_stride, int num_tokens) {
  __shared__ Shared shared;
  const Rules rules = entries[blockIdx.x];
  const float* from = logits + rules.row * row_stride;
  float* to = ruled + blockIdx.x * row_stride;
  const auto is_allowed = [&](uint32_t token) {
    return rules.allowed < 0 || (__ldg(allowed + rules.allowed + token / 32) >> token % 32 & 1);
  };
  Best best;
#pragma unroll 4
  for (int token = threadIdx.x; token < num_tokens; token += THREADS) {
    const float logit = from[token];
    best.see(logit, token);
    to[token] = is_allowed(token) ? logit : -infinity();
  }
  const uint64_t found = best.has_fault ? FAULT : place_of(key_of(best.value), best.token);
  const int state = state_of(block_max(found, shared), NOT_FINITE);
  // block_max was the barrier between the row and what changes it.
  for (int i = rules.bias_start + threadIdx.x; i < rules.bias_end; i += THREADS) {
    const uint32_t token = bias_tokens[i];
    // Whatever is added to a token that is not allowed, it stays impossible.
    if (token < num_tokens && is_allowed(token)) to[token] = __fadd_rn(to[token], bias_values[i]);
  }
  __syncthreads();
  for (int i = rules.banned_start + threadIdx.x; i < rules.banned_end; i += THREADS) {
    if (banned[i] < num_tokens) to[banned[i]] = -infinity();
  }
  __syncthreads();
  for (int i = rules.seen_start + threadIdx.x; i < rules.seen_end; i += THREADS) {
    const uint2 token = seen[i];
    if (token.x >= num_tokens) continue;
    float logit = to[token.x];
    logit = logit > 0.0f ? __fdiv_rn(logit, rules.repetition) : __fmul_rn(logit, rules.repetition);
    if (token.y > 0) logit = __fsub_rn(__fmaf_rn(-rules.frequency, __uint2float_rn(token.y), logit), rules.presence);
    to[token.x] = logit;
  }
  if (threadIdx.x == 0) states[blockIdx.x] = state;
}

// ---- Known answers ------------------------------------------------------------------------------------------------------

// The hash and the noise of one token each. Grid (answers), block 1.
KERNEL(1)
noise_known_answers(const uint64_t* __restrict__ seeds, const uint32_t* __restrict__ positions,
                    const uint32_t* __restrict__ choices, const uint32_t* __restrict__ tokens, uint32_t* __restrict__ hashes,
                    float* __restrict__ gumbels) {
  const int i = blockIdx.x;
  Draw draw = {};
  draw.position = positions[i];
  draw.choice = choices[i];
  draw.seed_low = uint32_t(seeds[i]);
  draw.seed_high = uint32_t(seeds[i] >> 32);
  hashes[i] = noise_hash(draw, tokens[i]);
  gumbels[i] = gumbel(hashes[i]);
}

// The noise of hashes. Grid (ceil(count / 256)), block 256.
KERNEL(256)
gumbel_known_answers(const uint32_t* __restrict__ hashes, float* __restrict__ gumbels, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) gumbels[i] = gumbel(hashes[i]);
}
