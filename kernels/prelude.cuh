// The vocabulary of all kernels. No CUDA header is included, so that NVRTC needs no include path: what they would bring
// (bfloat16, asynchronous copies, matrix instructions) is a few lines of inline PTX here.
//
// Nothing in this file waits for other threads except the functions named block_*, which say so.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;

#define DEVICE __device__ __forceinline__
// A kernel: the largest block that it is launched with, and how many blocks of that size a multiprocessor should hold at
// least. Without the second, the compiler may rather spill registers than lose a block.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

constexpr int WARP = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
// What attention takes for zero: 2^-40 (`octavo_backend::numerics::SMALLEST_KV`).
constexpr float SMALLEST_KV = 1.0f / 1099511627776.0f;

struct bf16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
DEVICE float not_a_number() { return __uint_as_float(0x7fffffffu); }

// ---- Conversions ----

DEVICE float to_f32(bf16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }
DEVICE float to_f32(half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
// To nearest, ties to even.
DEVICE bf16 to_bf16(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
DEVICE half to_half(float value) {
  half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
// Two values in one register, as the matrix instructions want them: `low` in the low half (the smaller address).
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
DEVICE float low_f32(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high_f32(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// An operand of attention before it is rounded to bfloat16: what is below 2^-40 is zero. NaN stays.
DEVICE float kv_flushed(float value) { return fabsf(value) < SMALLEST_KV ? 0.0f : value; }
// `octavo_backend::numerics::kv_bf16`, once and for a pair.
DEVICE bf16 kv_bf16(float value) { return to_bf16(kv_flushed(value)); }
DEVICE uint32_t pack_kv_bf16(float low, float high) { return pack_bf16(kv_flushed(low), kv_flushed(high)); }

// ---- Functions of the special function unit ----

// 2^x within 2 units of the last place; 2^-inf is 0.
DEVICE float ex2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// log2(x) to about 2^-22.
DEVICE float lg2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// 1 / x within 1 unit of the last place.
DEVICE float rcp(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// ---- Bits ----

// Any function of three bits: TABLE is that function of 0xf0, 0xcc and 0xaa.
template <int TABLE>
DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return result;
}
// Both halves at once: a * b + c, rounded once.
DEVICE uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// ---- Memory ----

DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// The block's dynamic shared memory.
DEVICE unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// 16 bytes that are read once and that nobody writes during the launch: they leave the first-level cache to others.
DEVICE uint4 load_streaming(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

// For pointers of which the compiler does not see that they are global: those that are loaded, or chosen between.
DEVICE uint4 load_global_16(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}
DEVICE void store_global(void* pointer, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DEVICE void store_global(void* pointer, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void store_global(void* pointer, bf16 v) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(pointer), "h"(v.bits) : "memory");
}

// 16 bytes from global to shared memory, done by the next cp_async_wait; with `ignore` zeros are written and nothing is
// read, wherever `global` points. What has arrived is seen by the thread that asked for it; by others after a barrier.
DEVICE void cp_async_16(void* shared, const void* global, bool ignore) {
  const int source_bytes = ignore ? 0 : 16;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(source_bytes)
               : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most PENDING of this thread's youngest groups are still under way.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Matrices (one warp) ----
//
// With lane = 4 * g + t, a register holds two neighbours of a row (A, result) or of a column (B):
//   A, 16 x 16: a[0] row g, columns 2t, 2t + 1; a[1] row g + 8; a[2], a[3] the same 8 columns on
//   B, 16 x 8:  b[0] column g, rows 2t, 2t + 1; b[1] 8 rows on
//   D, 16 x 8:  d[0], d[1] row g, columns 2t, 2t + 1; d[2], d[3] row g + 8

// D += A B.
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 tiles; lane i gives the shared address of row i % 8 of tile i / 8, and gets of each tile row g, columns 2t
// and 2t + 1.
DEVICE void ldmatrix_x4(uint32_t (&tiles)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row)
               : "memory");
}
// Two tiles; lanes 0 to 15 give the addresses, the others' are not used.
DEVICE void ldmatrix_x2(uint32_t (&tiles)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(tiles[0]), "=r"(tiles[1])
               : "r"(row)
               : "memory");
}
// As ldmatrix_x4, each tile transposed: a lane gets column g, rows 2t and 2t + 1.
DEVICE void ldmatrix_x4_transposed(uint32_t (&tiles)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row)
               : "memory");
}

// ---- Reductions ----

// Over the lanes of a whole warp, the same bits in each.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}
// Over a block of whole warps, in their ascending order, the same bits in each thread. Waits for the block once, between
// writing `scratch` (a value for each warp, shared) and reading it: before a second use, wait again.
DEVICE float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
  __syncthreads();
  float sum = scratch[0];
  for (int warp = 1; warp < blockDim.x / WARP; warp++) sum += scratch[warp];
  return sum;
}
