/* The kernels for AVX2; empty on processors other than x86-64. */

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define USE_AVX2
#define KERNELS zd_kernels_avx2
#define NAME "avx2"
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
