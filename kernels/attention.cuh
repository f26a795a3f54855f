// Causal attention over a paged KV cache, for decoding (one row a sequence, split over the positions) and for prefill.
//
// Both kernels do the same arithmetic for a row, in the same order, so that its bits do not depend on which one it met,
// nor on the rows beside it:
//   - positions are cut into chunks at absolute multiples of 256, chunks into groups of 64 (32 if D is above 128);
//   - within a chunk the groups are taken in ascending order: scores, their maximum with what there was, weights
//     2^(score * log2 e - maximum) rounded to bfloat16 and summed as rounded, out = out * scale + weights * values;
//   - chunks are merged in ascending order by `merge_scales` and `merged`.
// A group in which a row sees nothing, and a chunk likewise, changes no bit of the row.
//
// A tile is 16 rows, a row being one token's query head; the heads of a group are rows of one tile, so that they read
// their keys and values once. WARPS warps share a tile: each makes the scores of its share of a group's positions and
// the output of its share of the columns, and between the two they exchange maxima and weights through shared memory. A
// product's element has the same bits whoever computes it, so WARPS may differ between the kernels.
#pragma once
#include "prelude.cuh"

constexpr int CHUNK = 256;
constexpr int TILE_ROWS = 16;
constexpr int SPAN_INTS = 5;

// Consecutive positions of one sequence: rows first_row.. at positions start.., their block table at
// tables[table_start].
struct Span {
  int first_row, len, start, table_start;
};
DEVICE Span span_at(const int* spans, int index) {
  const int* span = spans + index * SPAN_INTS;
  return {span[0], span[1], span[2], span[3]};
}

// Positions first..end.
struct Range {
  int first, end;
};
// What the token at `position` sees; a window of 0 is none.
DEVICE Range seen_from(int position, int window) {
  return {window > 0 ? max(0, position + 1 - window) : 0, position + 1};
}
DEVICE bool is_in(int position, Range range) {
  return uint32_t(position - range.first) < uint32_t(range.end - range.first);
}

// One sequence's keys and values of one KV head. Caches are [num_blocks, num_kv_heads, block_size, D].
struct Cache {
  const bf16 *keys, *values;
  const int* table;
  int num_kv_heads, kv_head, block_size;

  // The row of D elements, counted from the start of the cache, that holds `position`; the next 15 are in the same
  // block if the position is a multiple of 16.
  DEVICE uint32_t row_of(int position) const {
    const uint32_t at = position, size = block_size;
    return (uint32_t(table[at / size]) * num_kv_heads + kv_head) * size + at % size;
  }
};

// What a lane's two rows, g and g + 8 of their tile, see, and what the block's rows see together.
struct Sight {
  Range row[2];
  Range warp;   // some row of the warp's tile sees these
  Range any;    // some row of the block sees these: nothing else is read
  Range whole;  // all rows of the block see these
};

struct MergeScales {
  float before, chunk;
};
// Raises `largest` to that of one more chunk and says what the sums before it and its own are multiplied by. A chunk
// that has seen nothing has the sum 0 (one that is not finite has not), and changes no bit: x + 0 * -0 is x for all x.
DEVICE MergeScales merge_scales(float& largest, float chunk_largest, float chunk_sum) {
  const bool is_empty = chunk_sum == 0.0f;
  const float raised = is_empty ? largest : fmaxf(largest, chunk_largest);
  const MergeScales scales = {is_empty ? 1.0f : ex2(largest - raised), is_empty ? -0.0f : ex2(chunk_largest - raised)};
  largest = raised;
  return scales;
}
DEVICE float merged(float before, float chunk, MergeScales scales) {
  return fmaf(chunk, scales.chunk, before * scales.before);
}

// Two rows' sums: out[unit][half][..] are the elements of a matrix product's result, unit u being 16 columns.
template <int UNITS>
struct Sums {
  float out[UNITS][2][4];
  float sum[2];
  float largest[2];  // in units of log2: score * log2 e

  DEVICE void clear() {
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
#pragma unroll
      for (int i = 0; i < 4; i++) out[unit][0][i] = out[unit][1][i] = 0.0f;
    }
    sum[0] = sum[1] = 0.0f;
    largest[0] = largest[1] = -infinity();
  }

  // Adds a chunk's sums.
  DEVICE void merge(const Sums& chunk) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const MergeScales scales = merge_scales(largest[row], chunk.largest[row], chunk.sum[row]);
      sum[row] = merged(sum[row], chunk.sum[row], scales);
#pragma unroll
      for (int i = 0; i < UNITS * 4; i++) {
        float& value = out[i / 4][i / 2 % 2][2 * row + i % 2];
        value = merged(value, chunk.out[i / 4][i / 2 % 2][2 * row + i % 2], scales);
      }
    }
  }
};

// Over the four lanes that share a row, the same bits in each.
DEVICE float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
  return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}
DEVICE float quad_sum(float value) {
  value += __shfl_xor_sync(ALL_LANES, value, 1);
  return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// Infinity or NaN among eight bfloat16.
DEVICE bool is_broken(uint4 eight) {
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  bool broken = false;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    broken |= (words[i] & 0x7f800000u) == 0x7f800000u || (words[i] & 0x7f80u) == 0x7f80u;
  }
  return broken;
}

// A block of ROW_TILES tiles with WARPS warps each, over heads of D elements; STAGES groups of keys, and as many of
// values, are in shared memory or on their way.
template <int D, int WARPS, int ROW_TILES, int STAGES>
struct Attention {
  static constexpr int THREADS = WARP * WARPS * ROW_TILES;
  static constexpr int GROUP = D > 128 ? 32 : 64;
  // Rows lie 16 bytes modulo 32 apart, so that the eight rows of a matrix tile are in different banks.
  static constexpr int PITCH = D + 8;
  static constexpr int WEIGHTS_PITCH = GROUP + 8;
  static constexpr int SCORE_TILES = GROUP / 8 / WARPS;
  static constexpr int STEPS = GROUP / 16;
  static constexpr int UNITS = (D / 16 + WARPS - 1) / WARPS;
  // Whether the rows of a block are of several tokens, so that some may see what others may not.
  static constexpr bool MENDS = ROW_TILES > 1;
  using Partial = Sums<UNITS>;

  struct Tile {
    bf16 weights[TILE_ROWS][WEIGHTS_PITCH];
    float largest[WARPS][TILE_ROWS];
  };
  struct Shared {
    bf16 queries[ROW_TILES * TILE_ROWS][PITCH];
    bf16 keys[STAGES][GROUP][PITCH];
    bf16 values[STAGES][GROUP][PITCH];
    // Positions of a group with a value that is not finite, by the parity of the group.
    uint32_t broken[2][2];
    // Used with more than one warp a tile, not there otherwise.
    Tile tiles[ROW_TILES];
  };
  static constexpr int SHARED_BYTES = sizeof(Shared) - (WARPS > 1 ? 0 : sizeof(Tile) * ROW_TILES);

  static DEVICE int lane() { return threadIdx.x % WARP; }
  static DEVICE int tile() { return threadIdx.x / WARP / WARPS; }
  static DEVICE int warp_of_tile() { return threadIdx.x / WARP % WARPS; }
  // The columns of unit `unit` of this warp; beyond D if it has none.
  static DEVICE int column_of(int unit) { return (unit * WARPS + warp_of_tile()) * 16; }
  static DEVICE bool has(int unit) { return D / 16 % WARPS == 0 || column_of(unit) < D; }

  // ---- Staging: every thread of the block copies its share, 16 bytes at a time.

  // LANES threads share a row, each with every LANES-th piece of 16 bytes, so that what differs between a thread's
  // pieces is known when this is compiled.
  static constexpr int LANES = D / 8 & -(D / 8);
  static constexpr int STRIDE = THREADS / LANES;

  // body(row, column) for the thread's pieces of ROWS rows.
  template <int ROWS, class Body>
  static DEVICE void for_each_piece(Body body) {
    const int first_row = threadIdx.x / LANES, first_column = threadIdx.x % LANES * 8;
    if (STRIDE > ROWS && first_row >= ROWS) return;
#pragma unroll 1
    for (int row = 0; row < ROWS; row += STRIDE) {
#pragma unroll
      for (int column = 0; column < D; column += 8 * LANES) body(first_row + row, first_column + column);
    }
  }

  // Lane i gets the cache row of the group's positions 16 i..; of those that nobody sees, row 0.
  static DEVICE uint32_t locate(const Cache& cache, Range any, int position) {
    position += 16 * lane();
    const bool is_wanted = lane() < STEPS && position + 16 > any.first && position < any.end;
    return is_wanted ? cache.row_of(position) : 0;
  }

  // `rows` as `locate` has them. What nobody sees becomes zeros: a recycled block may hold NaN.
  static DEVICE void stage(bf16 (*to)[PITCH], const bf16* from, uint32_t rows, Range any, int position) {
    const int first_row = threadIdx.x / LANES % GROUP, first_column = threadIdx.x % LANES * 8;
#pragma unroll 2
    for (int row = 0; row < GROUP; row += STRIDE) {
      // The rows of a pass are in one block of 16 positions, or the thread's always in the same place of one.
      const int source = STRIDE < 16 ? row / 16 : first_row / 16 + row / 16;
      const int offset = STRIDE < 16 ? first_row + row % 16 : first_row % 16;
      const uint32_t cache_row = __shfl_sync(ALL_LANES, rows, source) + offset;
      const bool ignore = !is_in(position + first_row + row, any);
      if (STRIDE > GROUP && threadIdx.x >= GROUP * LANES) return;
#pragma unroll
      for (int column = 0; column < D; column += 8 * LANES) {
        const bf16* piece = from + int64_t(cache_row) * D + first_column + column;
        cp_async_16(&to[first_row + row][first_column + column], piece, ignore);
      }
    }
  }

  // Finds values that are not finite among those that this thread has copied, which only it can see yet. They become
  // zeros, since zero weights of rows that do not see them would not silence them.
  static DEVICE void mend(bf16 (*values)[PITCH], uint32_t (&broken)[2]) {
    for_each_piece<GROUP>([&](int row, int column) {
      uint4* eight = reinterpret_cast<uint4*>(&values[row][column]);
      if (is_broken(*eight)) {
        *eight = make_uint4(0, 0, 0, 0);
        atomicOr(&broken[row / 32], 1u << row % 32);
      }
    });
  }

  // ---- One group of positions.

  // Scores of the warp's share of the group's positions.
  static DEVICE void score(float (&scores)[SCORE_TILES][4], const bf16 (*queries)[PITCH], const bf16 (*keys)[PITCH]) {
    const uint32_t a_row = shared_address(&queries[lane() % 16][lane() / 16 * 8]);
    const int key = warp_of_tile() * SCORE_TILES * 8 + lane() % 8 + (SCORE_TILES > 1 ? lane() / 16 * 8 : 0);
    const uint32_t b_row = shared_address(&keys[key][lane() / 8 % 2 * 8]);
#pragma unroll
    for (int i = 0; i < SCORE_TILES * 4; i++) scores[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int column = 0; column < D; column += 16) {
      uint32_t a[4];
      ldmatrix_x4(a, a_row + 2 * column);
      if constexpr (SCORE_TILES == 1) {
        uint32_t b[2];
        ldmatrix_x2(b, b_row + 2 * column);
        mma_m16n8k16(scores[0], a, b[0], b[1]);
      } else {
#pragma unroll
        for (int i = 0; i < SCORE_TILES; i += 2) {
          uint32_t b[4];
          ldmatrix_x4(b, b_row + 2 * (8 * i * PITCH + column));
          mma_m16n8k16(scores[i], a, b[0], b[1]);
          mma_m16n8k16(scores[i + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // softcap * tanh(score / softcap), by tanh x = 1 - 2 / (1 + e^2x).
  static DEVICE void cap(float (&scores)[SCORE_TILES][4], float softcap) {
    const float factor = 2.0f * LOG2_E / softcap;
#pragma unroll
    for (int i = 0; i < SCORE_TILES * 4; i++) {
      float& score = scores[i / 4][i % 4];
      score = softcap * fmaf(-2.0f, rcp(1.0f + ex2(score * factor)), 1.0f);
    }
  }

  // Selects out what the rows do not see, of a group that begins at `position`.
  static DEVICE void mask(float (&scores)[SCORE_TILES][4], const Sight& sight, int position) {
    const int first = position + warp_of_tile() * SCORE_TILES * 8 + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < SCORE_TILES * 4; i++) {
      float& score = scores[i / 4][i % 4];
      score = is_in(first + i / 4 * 8 + i % 2, sight.row[i / 2 % 2]) ? score : -infinity();
    }
  }

  static DEVICE void largest_of(float (&largest)[2], const float (&scores)[SCORE_TILES][4]) {
    largest[0] = largest[1] = -infinity();
#pragma unroll
    for (int i = 0; i < SCORE_TILES * 4; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i / 4][i % 4]);
    largest[0] = quad_max(largest[0]);
    largest[1] = quad_max(largest[1]);
  }

  // Raises the rows' largest and rescales their sums; turns the scores into weights, two neighbours in one register.
  static DEVICE void weigh(uint32_t (&weights)[SCORE_TILES][2], Partial& partial, const float (&scores)[SCORE_TILES][4],
                           const float (&largest)[2]) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const float raised = fmaxf(partial.largest[row], largest[row] * LOG2_E);
      // With nothing seen yet every difference below is -inf, and not NaN.
      const float base = raised == -infinity() ? 0.0f : raised;
      const float scale = ex2(partial.largest[row] - base);
      partial.largest[row] = raised;
      partial.sum[row] *= scale;
#pragma unroll
      for (int i = 0; i < UNITS * 4; i++) partial.out[i / 4][i / 2 % 2][2 * row + i % 2] *= scale;
#pragma unroll
      for (int i = 0; i < SCORE_TILES; i++) {
        const float low = ex2(fmaf(scores[i][2 * row], LOG2_E, -base));
        const float high = ex2(fmaf(scores[i][2 * row + 1], LOG2_E, -base));
        weights[i][row] = pack_kv_bf16(low, high);
      }
    }
  }

  // Between the warps of a tile: the largest of their scores, to the block before a barrier and from it after that.
  static DEVICE void publish_largest(Tile& tile, const float (&largest)[2]) {
    if (lane() % 4 != 0) return;
    tile.largest[warp_of_tile()][lane() / 4] = largest[0];
    tile.largest[warp_of_tile()][lane() / 4 + 8] = largest[1];
  }
  static DEVICE void gather_largest(float (&largest)[2], const Tile& tile) {
#pragma unroll
    for (int i = 0; i < 2 * WARPS; i++) {
      largest[i % 2] = fmaxf(largest[i % 2], tile.largest[i / 2][lane() / 4 + i % 2 * 8]);
    }
  }
  // Likewise their weights.
  static DEVICE void publish_weights(Tile& tile, const uint32_t (&weights)[SCORE_TILES][2]) {
#pragma unroll
    for (int i = 0; i < 2 * SCORE_TILES; i++) {
      const int column = (warp_of_tile() * SCORE_TILES + i / 2) * 8 + lane() % 4 * 2;
      *reinterpret_cast<uint32_t*>(&tile.weights[lane() / 4 + i % 2 * 8][column]) = weights[i / 2][i % 2];
    }
  }
  // The weights of all the group's positions as operands of products: those of the tile's warps, or the lane's own,
  // which are where a product wants them already.
  static DEVICE void gather_weights(uint32_t (&a)[STEPS][4], const Tile& tile,
                                    const uint32_t (&weights)[SCORE_TILES][2]) {
    if constexpr (WARPS > 1) {
      const uint32_t a_row = shared_address(&tile.weights[lane() % 16][lane() / 16 * 8]);
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        ldmatrix_x4(a[step], a_row + 2 * 16 * step);
      }
    } else {
#pragma unroll
      for (int i = 0; i < STEPS * 4; i++) a[i / 4][i % 4] = weights[i / 4 * 2 + i % 4 / 2][i % 2];
    }
  }

  // Adds the weights, each lane those that it holds, and their products with the values.
  static DEVICE void accumulate(Partial& partial, const uint32_t (&weights)[STEPS][4], const bf16 (*values)[PITCH]) {
#pragma unroll
    for (int i = 0; i < STEPS * 2; i++) {
      const uint32_t near = weights[i / 2][i % 2], far = weights[i / 2][i % 2 + 2];
      partial.sum[i % 2] += (low_f32(near) + high_f32(near)) + (low_f32(far) + high_f32(far));
    }
    const uint32_t b_row = shared_address(&values[lane() % 16][column_of(0) + lane() / 16 * 8]);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
      if (!has(unit)) continue;
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        uint32_t b[4];
        ldmatrix_x4_transposed(b, b_row + 2 * (16 * step * PITCH + 16 * unit * WARPS));
        mma_m16n8k16(partial.out[unit][0], weights[step], b[0], b[1]);
        mma_m16n8k16(partial.out[unit][1], weights[step], b[2], b[3]);
      }
    }
  }

  // Rows that see a value that is not finite are not finite.
  static DEVICE void spoil(Partial& partial, const uint32_t (&broken)[2], const Sight& sight, int position) {
    if ((broken[0] | broken[1]) == 0) return;
    for (int i = 0; i < GROUP; i++) {
      if ((broken[i / 32] >> i % 32 & 1) == 0) continue;
      if (is_in(position + i, sight.row[0])) partial.sum[0] = not_a_number();
      if (is_in(position + i, sight.row[1])) partial.sum[1] = not_a_number();
    }
  }

  // ---- All groups that some row of the block sees.

  // Puts groups on their way to shared memory, keys and values a commit each: keys 0, values 0, keys 1, ...
  struct Pipeline {
    Shared& shared;
    const Cache& cache;
    Range any;
    int begin, groups;
    uint32_t rows;  // of the last group whose keys were staged

    DEVICE int position_of(int group) const { return begin + group * GROUP; }
    DEVICE void stage_keys(int group) {
      if (group < groups) {
        rows = locate(cache, any, position_of(group));
        stage(shared.keys[group % STAGES], cache.keys, rows, any, position_of(group));
      }
      cp_async_commit();
    }
    DEVICE void stage_values(int group) {
      if (0 <= group && group < groups) {
        stage(shared.values[group % STAGES], cache.values, rows, any, position_of(group));
      }
      cp_async_commit();
    }
  };

  // The caller has put its queries on their way to shared.queries, uncommitted. `chunk_done` is called after the last
  // group of each chunk, with the sums of the chunk alone.
  template <class ChunkDone>
  static DEVICE void attend(Shared& shared, const Cache& cache, const Sight& sight, float softcap,
                            ChunkDone chunk_done) {
    const int begin = sight.any.first / GROUP * GROUP, groups = (sight.any.end - begin + GROUP - 1) / GROUP;
    Pipeline pipeline = {shared, cache, sight.any, begin, groups, 0};
    if (MENDS && threadIdx.x < 2) shared.broken[0][threadIdx.x] = 0;

    Tile& exchange = shared.tiles[tile()];
    Partial partial;
    partial.clear();
    // The first STAGES rounds only fill the pipeline.
    for (int group = -STAGES; group < groups; group++) {
      const int position = pipeline.position_of(group), stage_of = uint32_t(group) % STAGES;
      const bool is_whole = position >= sight.whole.first && position + GROUP <= sight.whole.end;
      const bool is_active = group >= 0 && position < sight.warp.end && position + GROUP > sight.warp.first;
      float scores[SCORE_TILES][4], largest[2];
      if (group >= 0) {
        cp_async_wait<2 * STAGES - 2>();
        __syncthreads();  // This group's keys are there, and nobody reads the last group's values any more.
      }
      pipeline.stage_values(group + STAGES - 1);
      if (MENDS && group >= 0 && threadIdx.x < 2) shared.broken[(group + 1) % 2][threadIdx.x] = 0;
      if (is_active) {
        score(scores, &shared.queries[tile() * TILE_ROWS], shared.keys[stage_of]);
        if (softcap > 0.0f) cap(scores, softcap);
        if (!is_whole) mask(scores, sight, position);
        largest_of(largest, scores);
        if (WARPS > 1) publish_largest(exchange, largest);
      }
      if (group >= 0) {
        cp_async_wait<2 * STAGES - 2>();
        if (MENDS && !is_whole) mend(shared.values[stage_of], shared.broken[group % 2]);
        __syncthreads();  // This group's values are there, and nobody reads its keys any more.
      }
      pipeline.stage_keys(group + STAGES);
      if (group < 0) continue;

      uint32_t weights[SCORE_TILES][2];
      if (is_active) {
        if (WARPS > 1) gather_largest(largest, exchange);
        weigh(weights, partial, scores, largest);
        if (WARPS > 1) publish_weights(exchange, weights);
      }
      if (WARPS > 1) __syncthreads();  // The tile's weights are there.
      if (is_active) {
        uint32_t a[STEPS][4];
        gather_weights(a, exchange, weights);
        accumulate(partial, a, shared.values[stage_of]);
        if (MENDS && !is_whole) spoil(partial, shared.broken[group % 2], sight, position);
      }
      if ((position + GROUP) % CHUNK == 0 || group + 1 == groups) {
        partial.sum[0] = quad_sum(partial.sum[0]);
        partial.sum[1] = quad_sum(partial.sum[1]);
        chunk_done(partial);
        partial.clear();
      }
    }
  }
};
