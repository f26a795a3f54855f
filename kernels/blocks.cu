// Whole KV blocks go from one place of their cache to another.
#include "prelude.cuh"

// For every cache (the device addresses of all key and value caches of a group's layers) and every pair (from, to):
// block `to` becomes block `from`. No block is the destination of two, or of one and the source of another, so the
// order is free. Grid (num_copies, num_caches), block 256; block_bytes is a multiple of 16.
KERNEL(256)
copy_blocks(const uint64_t* __restrict__ caches, const int* __restrict__ pairs, int64_t block_bytes) {
  const uint64_t cache = caches[blockIdx.y];
  const uint64_t from = cache + pairs[2 * blockIdx.x] * block_bytes,
                 to = cache + pairs[2 * blockIdx.x + 1] * block_bytes;
  // What a thread reads before it writes.
  constexpr int BATCH = 4;
  const int step = 16 * blockDim.x;
  for (int64_t first = 16 * threadIdx.x; first < block_bytes; first += BATCH * step) {
    uint4 pieces[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int64_t at = first + i * step;
      if (at < block_bytes) pieces[i] = load_global_16(reinterpret_cast<const void*>(from + at));
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int64_t at = first + i * step;
      if (at < block_bytes) store_global(reinterpret_cast<void*>(to + at), pieces[i]);
    }
  }
}
