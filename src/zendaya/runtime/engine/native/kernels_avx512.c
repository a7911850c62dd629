/* The kernels for AVX-512; empty on processors other than x86-64. */

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif
#define USE_AVX512
#define KERNELS zd_kernels_avx512
#define NAME "avx512"
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
