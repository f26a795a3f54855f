// out[m, n] = input[m, k] times the transpose of a matrix [n, k] of 4-bit weights: value = scale * (code - zero), with
// a scale (f16) and a zero point (a byte below 128) for each GROUP columns of a row. k is a multiple of 64 and of
// GROUP.
//
// What is multiplied is exact: code - zero is a whole number that bfloat16 holds, a product of it and an input is exact
// in f32, and the scale is applied in f32 to the sum of up to 64 (at most GROUP) such products.
//
// The layout of the weights, which `octavo_cuda::int4` makes; N is n rounded up to a multiple of 64 by rows of zeros:
//
// - codes, [N / 16][k / 64][32 lanes][4] words of 32 bits. With lane = 4 g + t and r = 16 * tile, word w of a chunk of
//   64 columns that starts at c has the codes of rows r + g and r + g + 8 at the four columns from
//   c + 32 (w / 2) + 8 t + 4 (w % 2) on. Bits 4i.. and 16 + 4i.. (i = 0 to 3) are the first and the second of two
//   neighbours: i = 0 the first two columns of row r + g, i = 1 of row r + g + 8, i = 2 the last two columns of row
//   r + g, i = 3 of row r + g + 8. So 16 bytes a lane are a tile of 16 rows and 64 columns, and a word is the operand A
//   of one matrix instruction, its columns in an order that suits loads of 16 bytes of the input.
// - scales, [k / GROUP][N / 32][8][4] f16: those of rows 32 * tile + g + 8 i at [g][i].
// - zeros, [k / GROUP][N / 32][8][4] bytes, in the same order.
#include "prelude.cuh"

constexpr int CHUNK = 64;          // columns of a tile of codes
constexpr int TILE = 16;           // its rows
constexpr int BLOCK_COLUMNS = 32;  // rows of weights, so columns of out, that share a word of zeros

// What a lane needs to know about one group of its 4 rows: g + 8 * i for i = 0 to 3.
struct GroupParameters {
  uint2 scales;
  uint32_t zeros;
};

DEVICE float scale_of(const GroupParameters& group, int i) {
  const uint32_t pair = i < 2 ? group.scales.x : group.scales.y;
  return to_f32(half{uint16_t(i % 2 == 0 ? pair : pair >> 16)});
}
// -(128 + zero), twice.
DEVICE uint32_t minus_zero_of(const GroupParameters& group, int i) {
  return __byte_perm(group.zeros, 0, 0x4040 + 0x0101 * i) | 0xc300c300u;
}

// code - zero of a word, as operand A. A code set into the mantissa of 128 makes 128 + code.
DEVICE void dequantize(uint32_t (&a)[4], uint32_t word, uint32_t minus_zero_low, uint32_t minus_zero_high) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t raised = lop3<0xea>(word >> (4 * i), 0x000f000fu, 0x43004300u);
    a[i] = bf16x2_fma(raised, 0x3f803f80u, i % 2 == 0 ? minus_zero_low : minus_zero_high);
  }
}

DEVICE uint32_t word_of(uint4 words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

DEVICE int64_t padded(int n) { return (int64_t(n) + 63) / 64 * 64; }

// sums[0..4] += scale * partial: two columns of out (rows of weights), 8 apart, at two tokens each.
DEVICE void add_scaled(float (&sums)[4], const float (&partial)[4], float scale_low, float scale_high) {
  sums[0] = fmaf(scale_low, partial[0], sums[0]);
  sums[1] = fmaf(scale_low, partial[1], sums[1]);
  sums[2] = fmaf(scale_high, partial[2], sums[2]);
  sums[3] = fmaf(scale_high, partial[3], sums[3]);
}

// ---- Up to 8 rows of input: bound by memory -------------------------------------------------------------------------

constexpr int GEMV_WARPS = 8;
constexpr int GEMV_ROWS = 8;
// A row of the block's partial sums, so that 4 rows at 8 columns each lie in 32 banks.
constexpr int GEMV_STRIDE = BLOCK_COLUMNS + 4;

// A warp's share of one step along k: 32 rows of weights, at least one whole group of columns.
template <int GROUP>
struct GemvStep {
  static constexpr int CHUNKS = GROUP > CHUNK ? GROUP / CHUNK : 1;
  static constexpr int GROUPS = CHUNKS * CHUNK / GROUP;

  uint4 codes[2][CHUNKS];
  uint4 inputs[CHUNKS][2];
  GroupParameters groups[GROUPS];
};

template <int GROUP>
struct Gemv {
  using Step = GemvStep<GROUP>;

  const uint32_t* codes;  // of this lane, at the block's first tile
  const bf16* input;      // of this lane's row
  const half* scales;
  const uint8_t* zeros;
  int64_t tile_words;
  int64_t group_stride;
  bool has_row;

  DEVICE void load(Step& step, int at) const {
#pragma unroll
    for (int chunk = 0; chunk < Step::CHUNKS; chunk++) {
      const int64_t index = int64_t(at) * Step::CHUNKS + chunk;
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        step.codes[tile][chunk] = load_streaming(codes + tile * tile_words + index * 128);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4* from = reinterpret_cast<const uint4*>(input + index * CHUNK + 32 * i);
        step.inputs[chunk][i] = has_row ? __ldg(from) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int group = 0; group < Step::GROUPS; group++) {
      const int64_t index = (int64_t(at) * Step::GROUPS + group) * group_stride;
      step.groups[group].scales = __ldg(reinterpret_cast<const uint2*>(scales + index));
      step.groups[group].zeros = __ldg(reinterpret_cast<const uint32_t*>(zeros + index));
    }
  }

  DEVICE static void add(float (&sums)[2][4], const Step& step) {
#pragma unroll
    for (int chunk = 0; chunk < Step::CHUNKS; chunk++) {
      constexpr int PARTS = Step::GROUPS;  // groups of a chunk; 1 where a group has several chunks
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const GroupParameters& group = step.groups[part];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
          float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int word = part * 4 / PARTS; word < (part + 1) * 4 / PARTS; word++) {
            uint32_t a[4];
            dequantize(a, word_of(step.codes[tile][chunk], word), minus_zero_of(group, 2 * tile),
                       minus_zero_of(group, 2 * tile + 1));
            const uint4 input = step.inputs[chunk][word / 2];
            mma_m16n8k16(partial, a, word_of(input, word % 2 * 2), word_of(input, word % 2 * 2 + 1));
          }
          add_scaled(sums[tile], partial, scale_of(group, 2 * tile), scale_of(group, 2 * tile + 1));
        }
      }
    }
  }
};

// Grid (ceil(n / 32)), block 256, m from 1 to 8. The warps share k, step by step; each byte of the weights is read
// once.
template <int GROUP>
DEVICE void int4_gemv(float* __restrict__ out, const bf16* __restrict__ input, const uint32_t* __restrict__ codes,
                      const half* __restrict__ scales, const uint8_t* __restrict__ zeros, int m, int n, int k) {
  using Step = GemvStep<GROUP>;
  __shared__ float partials[GEMV_WARPS][GEMV_ROWS][GEMV_STRIDE];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int first_column = blockIdx.x * BLOCK_COLUMNS;
  const int steps = k / (Step::CHUNKS * CHUNK);
  Gemv<GROUP> gemv;
  gemv.tile_words = int64_t(k / CHUNK) * 128;
  gemv.group_stride = padded(n);
  gemv.codes = codes + first_column / TILE * gemv.tile_words + 4 * lane;
  gemv.input = input + int64_t(g) * k + 8 * t;
  gemv.scales = scales + first_column + 4 * g;
  gemv.zeros = zeros + first_column + 4 * g;
  gemv.has_row = g < m;

  float sums[2][4] = {};
  Step even, odd;
  int at = warp;
  if (at < steps) gemv.load(even, at);
  for (; at < steps; at += 2 * GEMV_WARPS) {
    const bool has_odd = at + GEMV_WARPS < steps;
    if (has_odd) gemv.load(odd, at + GEMV_WARPS);
    gemv.add(sums, even);
    if (at + 2 * GEMV_WARPS < steps) gemv.load(even, at + 2 * GEMV_WARPS);
    if (has_odd) gemv.add(sums, odd);
  }
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) partials[warp][2 * t + i % 2][TILE * tile + g + i / 2 * 8] = sums[tile][i];
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < GEMV_WARPS; i++) sum += partials[i][warp][lane];
  const int column = first_column + lane;
  if (warp < m && column < n) out[int64_t(warp) * n + column] = sum;
}

// ---- More rows: matrix instructions fed from shared memory ----------------------------------------------------------

constexpr int GEMM_THREADS = 128;
constexpr int GEMM_WARPS = GEMM_THREADS / WARP;
constexpr int GEMM_COLUMNS = 64;  // of out
constexpr int GEMM_ROWS = 64;
constexpr int GEMM_STAGES = 4;
constexpr int STAGE_DEPTH = 2 * CHUNK;  // columns of the weights: one chunk for each half of the warps
constexpr int INPUT_ROW_BYTES = STAGE_DEPTH * 2;
constexpr int STAGE_CODE_BYTES = GEMM_COLUMNS * STAGE_DEPTH / 2;
constexpr int GROUP_BYTES = BLOCK_COLUMNS * 3;  // the scales and zero points of a warp's columns

// Where a 16-byte piece of a row of input lies: rows of either parity use their own half of the banks in the same
// moment.
DEVICE int input_offset(int row, int piece) { return row * INPUT_ROW_BYTES + (piece ^ (row % 2 * 4)) * 16; }

// A block's view of its problem. A warp works on 32 columns of out (`side`) and on every second chunk (`turn`).
template <int GROUP>
struct Gemm {
  static constexpr int PARTS = GROUP < CHUNK ? CHUNK / GROUP : 1;  // groups of a chunk
  static constexpr int WARP_GROUP_BYTES = GROUP_BYTES * PARTS;

  const bf16* input;
  const uint32_t* codes;
  const half* scales;
  const uint8_t* zeros;
  int64_t group_stride;
  int m, k, first_row, rows, chunks_end;  // `rows` of input in shared memory: a multiple of 8
  int side, turn, warp, lane;

  DEVICE unsigned char* stage(int index) const {
    const int bytes = rows * INPUT_ROW_BYTES + STAGE_CODE_BYTES + GEMM_WARPS * WARP_GROUP_BYTES;
    return dynamic_shared() + index % GEMM_STAGES * bytes;
  }
  DEVICE unsigned char* stage_codes(int index) const {
    return stage(index) + rows * INPUT_ROW_BYTES + warp * (STAGE_CODE_BYTES / GEMM_WARPS) + lane * 16;
  }
  DEVICE unsigned char* stage_groups(int index) const {
    return stage(index) + rows * INPUT_ROW_BYTES + STAGE_CODE_BYTES + warp * WARP_GROUP_BYTES;
  }

  // Asks for the chunks `chunk` and `chunk + 1`. Rows beyond m and columns beyond the end are zeros.
  DEVICE void fetch(int index, int chunk) const {
    for (int i = threadIdx.x; i < rows * (INPUT_ROW_BYTES / 16); i += GEMM_THREADS) {
      const int row = i / (INPUT_ROW_BYTES / 16), piece = i % (INPUT_ROW_BYTES / 16);
      const bool is_there = first_row + row < m && chunk + piece / 8 < chunks_end;
      const bf16* from = input + int64_t(first_row + row) * k + chunk * CHUNK + piece * 8;
      cp_async_16(stage(index) + input_offset(row, piece), is_there ? from : input, !is_there);
    }
    const int own = chunk + turn;
    if (own >= chunks_end) return;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const uint32_t* from = codes + (int64_t(tile) * (k / CHUNK) + own) * 128 + 4 * lane;
      cp_async_16(stage_codes(index) + tile * 512, from, false);
    }
    // Of each group 4 pieces of scales and 2 of zero points.
    const int part = lane / 8, piece = lane % 8;
    if (part < PARTS && piece < 6) {
      const int64_t at = (int64_t(own) * CHUNK / GROUP + part) * group_stride;
      const void* from = piece < 4 ? static_cast<const void*>(scales + at + 8 * piece)
                                   : static_cast<const void*>(zeros + at + 16 * (piece - 4));
      cp_async_16(stage_groups(index) + part * GROUP_BYTES + piece * 16, from, false);
    }
  }

  // Adds the product of this warp's chunk of a stage.
  DEVICE void add(float (&sums)[GEMM_ROWS / 8][2][4], int index) const {
    const int g = lane / 4, t = lane % 4;
    GroupParameters groups[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const unsigned char* from = stage_groups(index) + part * GROUP_BYTES;
      groups[part].scales = *reinterpret_cast<const uint2*>(from + 8 * g);
      groups[part].zeros = *reinterpret_cast<const uint32_t*>(from + 2 * BLOCK_COLUMNS + 4 * g);
    }
    uint32_t a[2][4][4];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const uint4 words = *reinterpret_cast<const uint4*>(stage_codes(index) + tile * 512);
#pragma unroll
      for (int word = 0; word < 4; word++) {
        const GroupParameters& group = groups[word * PARTS / 4];
        dequantize(a[tile][word], word_of(words, word), minus_zero_of(group, 2 * tile),
                   minus_zero_of(group, 2 * tile + 1));
      }
    }
#pragma unroll
    for (int tokens = 0; tokens < GEMM_ROWS / 8; tokens++) {
      if (tokens * 8 >= rows) break;
      uint4 inputs[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int offset = input_offset(tokens * 8 + g, turn * 8 + i * 4 + t);
        inputs[i] = *reinterpret_cast<const uint4*>(stage(index) + offset);
      }
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int word = part * 4 / PARTS; word < (part + 1) * 4 / PARTS; word++) {
            const uint4 input = inputs[word / 2];
            mma_m16n8k16(partial, a[tile][word], word_of(input, word % 2 * 2), word_of(input, word % 2 * 2 + 1));
          }
          add_scaled(sums[tokens][tile], partial, scale_of(groups[part], 2 * tile),
                     scale_of(groups[part], 2 * tile + 1));
        }
      }
    }
  }
};

// The sums of the second half of the warps go to the first half through shared memory that no copy is under way to.
template <int GROUP>
DEVICE void join_turns(float (&sums)[GEMM_ROWS / 8][2][4], const Gemm<GROUP>& gemm) {
  // 2 KiB for 8 rows of input, which have 2 KiB of each stage themselves.
  float* exchange = reinterpret_cast<float*>(dynamic_shared()) + gemm.side * WARP + gemm.lane;
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GEMM_ROWS; i++) {
    if (gemm.turn == 1 && i / 8 * 8 < gemm.rows) exchange[i * 2 * WARP] = sums[i / 8][i / 4 % 2][i % 4];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GEMM_ROWS; i++) {
    if (gemm.turn == 0 && i / 8 * 8 < gemm.rows) sums[i / 8][i / 4 % 2][i % 4] += exchange[i * 2 * WARP];
  }
}

// Grid (ceil(n / 64), ceil(m / 64), splits), block 128. Split z takes its share of k and writes out[z]; with more than
// one, int4_sum_splits adds them up.
template <int GROUP>
DEVICE void int4_gemm(float* __restrict__ out, const bf16* __restrict__ input, const uint32_t* __restrict__ codes,
                      const half* __restrict__ scales, const uint8_t* __restrict__ zeros, int m, int n, int k) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int chunks = k / CHUNK;
  const int share = (chunks + 2 * gridDim.z - 1) / (2 * gridDim.z) * 2;
  const int first_chunk = blockIdx.z * share;
  Gemm<GROUP> gemm;
  gemm.side = warp % 2;
  gemm.turn = warp / 2;
  gemm.warp = warp;
  gemm.lane = lane;
  const int first_column = blockIdx.x * GEMM_COLUMNS + gemm.side * BLOCK_COLUMNS;
  gemm.m = m;
  gemm.k = k;
  gemm.first_row = blockIdx.y * GEMM_ROWS;
  gemm.rows = m < GEMM_ROWS ? (m + 7) / 8 * 8 : GEMM_ROWS;
  gemm.chunks_end = min(chunks, first_chunk + share);
  gemm.input = input;
  gemm.codes = codes + int64_t(first_column / TILE) * chunks * 128;
  gemm.scales = scales + first_column;
  gemm.zeros = zeros + first_column;
  gemm.group_stride = padded(n);

  float sums[GEMM_ROWS / 8][2][4] = {};
#pragma unroll
  for (int stage = 0; stage < GEMM_STAGES - 1; stage++) {
    if (first_chunk + 2 * stage < gemm.chunks_end) gemm.fetch(stage, first_chunk + 2 * stage);
    cp_async_commit();
  }
  for (int chunk = first_chunk, stage = 0; chunk < gemm.chunks_end; chunk += 2, stage++) {
    cp_async_wait<GEMM_STAGES - 2>();
    // Also: every warp is done with the stage that is refilled next.
    __syncthreads();
    const int later = chunk + 2 * (GEMM_STAGES - 1);
    if (later < gemm.chunks_end) gemm.fetch(stage + GEMM_STAGES - 1, later);
    cp_async_commit();
    if (chunk + gemm.turn < gemm.chunks_end) gemm.add(sums, stage);
  }
  join_turns(sums, gemm);
  if (gemm.turn != 0) return;
  float* to = out + int64_t(blockIdx.z) * m * n;
#pragma unroll
  for (int tokens = 0; tokens < GEMM_ROWS / 8; tokens++) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = gemm.first_row + tokens * 8 + lane % 4 * 2 + i % 2;
      const int column = first_column + i / 4 * TILE + i / 2 % 2 * 8 + lane / 4;
      if (row < m && column < n) to[int64_t(row) * n + column] = sums[tokens][i / 4][i % 4];
    }
  }
}

#define INT4_KERNELS(GROUP)                                                                                          \
  KERNEL(256)                                                                                                        \
  int4_gemv_g##GROUP(float* out, const bf16* input, const uint32_t* codes, const half* scales, const uint8_t* zeros, \
                     int m, int n, int k) {                                                                          \
    int4_gemv<GROUP>(out, input, codes, scales, zeros, m, n, k);                                                     \
  }                                                                                                                  \
  KERNEL(128)                                                                                                        \
  int4_gemm_g##GROUP(float* out, const bf16* input, const uint32_t* codes, const half* scales, const uint8_t* zeros, \
                     int m, int n, int k) {                                                                          \
    int4_gemm<GROUP>(out, input, codes, scales, zeros, m, n, k);                                                     \
  }
INT4_KERNELS(32)
INT4_KERNELS(64)
INT4_KERNELS(128)

// out[i] = the sum of partials[split][i] in ascending order of the splits. Grid (ceil(count / 256)), block 256.
KERNEL(256)
int4_sum_splits(float* __restrict__ out, const float* __restrict__ partials, int64_t count, int splits) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  float sum = partials[i];
  for (int split = 1; split < splits; split++) sum += partials[split * count + i];
  out[i] = sum;
}
