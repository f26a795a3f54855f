// Whole KV blocks go from one place of their cache to another.
#include "prelude.cuh"

// For every cache (the device addresses of all key and value caches of a group's layers) and every pair (from, to): block
// `to` becomes block `from`. No block is the destination of two, or of one and the source of another, so the order is free.
// Grid (num_copies, num_caches), block 256; block_bytes is a multiple of 16.
KERNEL(256)
copy_blocks(const uint64_t* __restrict__ caches, const int* __restrict__ pairs, int64_t block_bytes) {
  const uint64_t cache = caches[blockIdx.y];
  const uint4* from = reinterpret_cast<const uint4*>(cache + pairs[2 * blockIdx.x] * block_bytes);
  uint4* to = reinterpret_cast<uint4*>(cache + pairs[2 * blockIdx.x + 1] * block_bytes);
  for (int64_t i = threadIdx.x; i < block_bytes / 16; i += blockDim.x) to[i] = from[i];
}
