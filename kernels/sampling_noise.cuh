// The functions that decide draws, each step one rounding as `octavo_backend` defines it: logarithm, exponential, and
// the noise of a token, a hash turned into a Gumbel variate. Written with __f*_rn, so that no compiler option changes a
// bit.
#pragma once
#include "prelude.cuh"

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

// All that the noise of a draw depends on but the token.
struct Noise {
  uint32_t position;
  uint32_t choice;
  uint32_t seed_low, seed_high;
};

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
DEVICE uint4 noise_column(const Noise& noise, uint32_t start, uint32_t column) {
  return philox(start / 64 * 16 + column, noise.position, noise.choice, noise.seed_low, noise.seed_high);
}

DEVICE uint32_t noise_hash(const Noise& noise, uint32_t token) {
  return word_of(noise_column(noise, token / 64 * 64, token % 16), token / 16 % 4);
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
