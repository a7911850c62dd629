/* The kernels for AVX-512 with VNNI; empty on processors other than x86-64. */

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
#endif
#define USE_AVX512
#define USE_VNNI
#define KERNELS zd_kernels_vnni
#define NAME "vnni"
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
