// Rules, draws and log-probabilities of rows of logits, with the very bits of `octavo_backend::sampling`.
//
// A row is num_tokens f32 logits; rows lie row_stride apart, a multiple of 4, and start at a multiple of 16 bytes.
// Entries (rules, draws, reports) name the row that they are about, several may name one; each has a block of its own.
// A row to which rules apply is first copied, changed, to `ruled`, where rows lie row_stride apart as well; an entry
// whose `ruled` is not -1 uses that copy.
//
// The filters all keep a head of one order, larger logits first and equal ones by id. A head is a cut: its last key and
// the last id of that key.
#include "sampling_cuts.cuh"

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
  Noise noise;
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

// ---- Filters --------------------------------------------------------------------------------------------------------

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
  const double total = mass_sum(
      row, [&](int token, float logit) { return kept.has(row, logit, token) ? mass_of(row, logit) : 0.0f; }, shared);
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

// Cuts what is kept to the smallest head whose mass reaches `target`. Tokens that min_p leaves out come after all that
// it keeps, so counting them changes nothing.
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

// ---- The draw -------------------------------------------------------------------------------------------------------

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

// The winner among what is kept. Tokens whose best possible score is below the best so far are passed over; the bounds
// are exact (`Draw::among_all`), so that this changes nothing.
DEVICE uint32_t drawn(const Row& row, const Draw& draw, const Kept& kept, uint32_t likeliest, Shared& shared) {
  Winner winner;
  if (kept.has(row, row.largest, likeliest)) {
    winner.see(score_of(row, row.largest, noise_hash(draw.noise, likeliest)), likeliest);
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
    const uint4 hashes = noise_column(draw.noise, start, column);
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
sample(int* __restrict__ tokens, int* __restrict__ states, const float* __restrict__ logits,
       const float* __restrict__ ruled, const int* __restrict__ ruled_states, const Draw* __restrict__ draws,
       int64_t row_stride, int num_tokens) {
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

// ---- Log-probabilities ----------------------------------------------------------------------------------------------

// Writes the tokens that the cut keeps, at most MOST_TOP, in their order.
DEVICE void write_top(int* top_tokens, float* top_logits, const Row& row, const Cut& cut, uint32_t count,
                      Shared& shared) {
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

// reported[entry], and the likeliest tokens and their logits at [entry][0..count], rows of `most_top` (up to 1024).
// `tokens` are those of the draws. Grid (entries), block 1024.
ROW_KERNEL
logprobs(Reported* __restrict__ reported, int* __restrict__ top_tokens, float* __restrict__ top_logits,
         const float* __restrict__ logits, const float* __restrict__ ruled, const int* __restrict__ ruled_states,
         const int* __restrict__ tokens, const Report* __restrict__ reports, int64_t row_stride, int num_tokens,
         int most_top) {
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
    const bool is_cut = count > 0 && count < num_tokens;
    if (is_cut) clear_bins(shared);
    uint32_t larger = 0;
    result.sum = mass_sum(
        row,
        [&](int, float logit) {
          larger += logit > result.logit;
          if (is_cut) count_bin(row, logit, shared);
          return mass_of(row, logit);
        },
        shared);
    result.rank = 1 + block_sum(larger, shared);
    if (count > 0) {
      Cut cut;
      if (is_cut) cut = first_tokens(row, collect_candidates(row, shared), count, shared);
      const int64_t first = int64_t(blockIdx.x) * most_top;
      write_top(top_tokens + first, top_logits + first, row, cut, count, shared);
    }
  }
  if (threadIdx.x == 0) reported[blockIdx.x] = result;
}

// ---- Rules ----------------------------------------------------------------------------------------------------------

// ruled[entry] = the row with its rules applied: bias, mask, bans, penalties, in this order; states[entry] is DONE or,
// if the row itself is not finite, NOT_FINITE. Tokens of a list beyond the row are passed over; `seen` has a token and
// how often the output has it. Grid (entries), block 1024.
ROW_KERNEL
apply_rules(float* __restrict__ ruled, int* __restrict__ states, const float* __restrict__ logits,
            const Rules* __restrict__ entries, const uint32_t* __restrict__ bias_tokens,
            const float* __restrict__ bias_values, const uint32_t* __restrict__ allowed,
            const uint32_t* __restrict__ banned, const uint2* __restrict__ seen, int64_t row_stride, int num_tokens) {
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

// ---- Known answers --------------------------------------------------------------------------------------------------

// The hash and the noise of one token each. Grid (answers), block 1.
KERNEL(1)
noise_known_answers(const uint64_t* __restrict__ seeds, const uint32_t* __restrict__ positions,
                    const uint32_t* __restrict__ choices, const uint32_t* __restrict__ tokens,
                    uint32_t* __restrict__ hashes, float* __restrict__ gumbels) {
  const int i = blockIdx.x;
  const Noise noise{positions[i], choices[i], uint32_t(seeds[i]), uint32_t(seeds[i] >> 32)};
  hashes[i] = noise_hash(noise, tokens[i]);
  gumbels[i] = gumbel(hashes[i]);
}

// The noise of hashes. Grid (ceil(count / 256)), block 256.
KERNEL(256)
gumbel_known_answers(const uint32_t* __restrict__ hashes, float* __restrict__ gumbels, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) gumbels[i] = gumbel(hashes[i]);
}
