// GCC 12.2 declares that `_tile_loadconfig` reads 8 bytes, not the 64 that it does read, and leaves out the
// stores to the others: llama.cpp's AMX kernels then end in a general protection fault. This declares the whole.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#include <immintrin.h>
static __inline__ __attribute__((__always_inline__)) void whole_tile_loadconfig(const void *config) {
    __asm__ volatile("ldtilecfg\t%0" : : "m"(*(const char(*)[64])config));
}
#define _tile_loadconfig whole_tile_loadconfig
#endif
