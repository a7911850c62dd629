/* Vectors of sixteen floats (`vf`), in AVX-512, in AVX2, or as arrays that the compiler vectorises.

   `vf_max(a, b)` and `vf_min(a, b)` are b if either is NaN. `acc` is sixteen exact running sums of products of an unsigned and a signed
   byte. */

#include <math.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) /* its checks, inlined everywhere, would take minutes to compile */
#define INLINE static __attribute__((noinline, unused))
#else
#define INLINE static inline __attribute__((always_inline))
#endif

INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
INLINE void prefetch_l2(const void *p) { __builtin_prefetch(p, 0, 2); } /* into L2: L1 is full of the current tile */

#if defined(USE_AVX512)

#include <immintrin.h>

typedef __m512 vf;

INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf vf_load_i8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_scale_pow2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_copysign(vf a, vf sign) {
    const __m512i bit = _mm512_set1_epi32((int)0x80000000);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), _mm512_and_si512(_mm512_castps_si512(sign), bit)));
}
INLINE vf vf_mask(vf a, int n, float rest) { return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), vf_set1(rest), a); }
INLINE int32_t vf_store_i8(int8_t *p, vf a) {
    __m512i i = _mm512_cvtps_epi32(a);
    _mm_storeu_si128((void *)p, _mm512_cvtsepi32_epi8(i));
    return _mm512_reduce_add_epi32(i);
}

#if defined(USE_VNNI)

typedef __m512i acc;
INLINE acc acc_zero(void) { return _mm512_setzero_si512(); }
typedef __m512i panel_u8;
INLINE panel_u8 load_panel_u8(const uint8_t *w) { return _mm512_loadu_si512(w); }
INLINE acc acc_dot(acc a, panel_u8 w, const int8_t *x) {
    typedef int32_t four __attribute__((may_alias, aligned(4))); /* byte rows begin at multiples of 64 */
    /* In assembly, because compilers move the sums between registers at a higher cost than the product itself. */
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(a) : "v"(w), "m"(*(const four *)x));
    return a;
}
INLINE vf acc_to_vf(acc a, int32_t less) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, _mm512_set1_epi32(less))); }
#define TILE_ROWS 12
#define TILE_PANELS 2
#define ONE_ROW_PANELS 8
#define ROW_CASES ROWS_1_TO_12

#else

/* Each sum is kept as two sums, of two products each. */
typedef struct { __m512i a[2]; } acc;
typedef const uint8_t *panel_u8;
INLINE panel_u8 load_panel_u8(const uint8_t *w) { return w; }
INLINE acc acc_zero(void) { return (acc){{_mm512_setzero_si512(), _mm512_setzero_si512()}}; }
INLINE acc acc_dot(acc a, panel_u8 w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    __m512i x16 = _mm512_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
    for (int i = 0; i < 2; i++) {
        __m512i w16 = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(w + 32 * i)));
        a.a[i] = _mm512_add_epi32(a.a[i], _mm512_madd_epi16(w16, x16));
    }
    return a;
}
INLINE vf acc_to_vf(acc a, int32_t less) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i total = _mm512_add_epi32(
        _mm512_permutex2var_epi32(a.a[0], even, a.a[1]),
        _mm512_permutex2var_epi32(a.a[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), a.a[1]));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(total, _mm512_set1_epi32(less)));
}
#define TILE_ROWS 6
#define TILE_PANELS 2
#define ONE_ROW_PANELS 4
#define ROW_CASES ROWS_1_TO_6

#endif

#elif defined(USE_AVX2)

#include <immintrin.h>

typedef struct { __m256 a, b; } vf;

#define BOTH_HALVES(f, x, y) ((vf){f((x).a, (y).a), f((x).b, (y).b)})
INLINE vf vf_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE __m256 load8_i8(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p))); }
INLINE vf vf_load_i8(const int8_t *p) { return (vf){load8_i8(p), load8_i8(p + 8)}; }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE vf vf_set1(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vf vf_add(vf x, vf y) { return BOTH_HALVES(_mm256_add_ps, x, y); }
INLINE vf vf_sub(vf x, vf y) { return BOTH_HALVES(_mm256_sub_ps, x, y); }
INLINE vf vf_mul(vf x, vf y) { return BOTH_HALVES(_mm256_mul_ps, x, y); }
INLINE vf vf_div(vf x, vf y) { return BOTH_HALVES(_mm256_div_ps, x, y); }
INLINE vf vf_fma(vf x, vf y, vf z) { return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE vf vf_max(vf x, vf y) { return BOTH_HALVES(_mm256_max_ps, x, y); }
INLINE vf vf_min(vf x, vf y) { return BOTH_HALVES(_mm256_min_ps, x, y); }
INLINE __m256 round8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_round(vf x) { return (vf){round8(x.a), round8(x.b)}; }
INLINE __m256 pow2_8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE vf vf_scale_pow2(vf x, vf n) { return (vf){_mm256_mul_ps(x.a, pow2_8(n.a)), _mm256_mul_ps(x.b, pow2_8(n.b))}; }
INLINE vf vf_abs(vf x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE vf vf_copysign(vf x, vf y) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_or_ps(x.a, _mm256_and_ps(sign, y.a)), _mm256_or_ps(x.b, _mm256_and_ps(sign, y.b))};
}
INLINE vf vf_mask(vf x, int n, float rest) {
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256 other = _mm256_set1_ps(rest);
    __m256i a = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane), b = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
    return (vf){_mm256_blendv_ps(other, x.a, _mm256_castsi256_ps(a)), _mm256_blendv_ps(other, x.b, _mm256_castsi256_ps(b))};
}
INLINE int32_t vf_store_i8(int8_t *p, vf x) {
    int32_t i[16], sum = 0;
    _mm256_storeu_si256((void *)i, _mm256_cvtps_epi32(x.a)), _mm256_storeu_si256((void *)(i + 8), _mm256_cvtps_epi32(x.b));
    for (int j = 0; j < 16; j++) p[j] = (int8_t)i[j], sum += i[j];
    return sum;
}

/* Each sum is kept as two sums, of two products each: products of bytes extended to 16 bits cannot overflow. */
typedef struct { __m256i a[4]; } acc;
typedef const uint8_t *panel_u8;
INLINE panel_u8 load_panel_u8(const uint8_t *w) { return w; }
INLINE acc acc_zero(void) {
    return (acc){{_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()}};
}
INLINE acc acc_dot(acc a, panel_u8 w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    __m256i x16 = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
    for (int i = 0; i < 4; i++) {
        __m256i w16 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(w + 16 * i)));
        a.a[i] = _mm256_add_epi32(a.a[i], _mm256_madd_epi16(w16, x16));
    }
    return a;
}
INLINE vf acc_to_vf(acc a, int32_t less) {
    const __m256i taken = _mm256_set1_epi32(less);
    __m256i low = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a.a[0], a.a[1]), 0xd8);
    __m256i high = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a.a[2], a.a[3]), 0xd8);
    return (vf){_mm256_cvtepi32_ps(_mm256_sub_epi32(low, taken)), _mm256_cvtepi32_ps(_mm256_sub_epi32(high, taken))};
}
#define TILE_ROWS 4
#define TILE_PANELS 1
#define ONE_ROW_PANELS 2
#define ROW_CASES ROWS_1_TO_4

#else

typedef struct { float x[16]; } vf;

#define LANES for (int i = 0; i < 16; i++)
INLINE vf vf_load(const float *p) { vf r; memcpy(r.x, p, sizeof r.x); return r; }
INLINE vf vf_load_i8(const int8_t *p) { vf r; LANES r.x[i] = p[i]; return r; }
INLINE void vf_store(float *p, vf a) { memcpy(p, a.x, sizeof a.x); }
INLINE vf vf_set1(float a) { vf r; LANES r.x[i] = a; return r; }
INLINE vf vf_add(vf a, vf b) { LANES a.x[i] += b.x[i]; return a; }
INLINE vf vf_sub(vf a, vf b) { LANES a.x[i] -= b.x[i]; return a; }
INLINE vf vf_mul(vf a, vf b) { LANES a.x[i] *= b.x[i]; return a; }
INLINE vf vf_div(vf a, vf b) { LANES a.x[i] /= b.x[i]; return a; }
INLINE vf vf_fma(vf a, vf b, vf c) { LANES c.x[i] += a.x[i] * b.x[i]; return c; }
INLINE vf vf_max(vf a, vf b) { LANES a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
INLINE vf vf_min(vf a, vf b) { LANES a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
INLINE vf vf_round(vf a) { LANES a.x[i] = rintf(a.x[i]); return a; }
INLINE vf vf_scale_pow2(vf a, vf n) {
    LANES {
        int32_t power = n.x[i] >= -126 && n.x[i] <= 127 ? (int32_t)n.x[i] : 0; /* n is NaN only if `a` is NaN too */
        union { uint32_t u; float f; } two = {(uint32_t)(power + 127) << 23};
        a.x[i] *= two.f;
    }
    return a;
}
INLINE vf vf_abs(vf a) { LANES a.x[i] = fabsf(a.x[i]); return a; }
INLINE vf vf_copysign(vf a, vf sign) { LANES a.x[i] = copysignf(a.x[i], sign.x[i]); return a; }
INLINE vf vf_mask(vf a, int n, float rest) { LANES a.x[i] = i < n ? a.x[i] : rest; return a; }
INLINE int32_t vf_store_i8(int8_t *p, vf a) {
    int32_t sum = 0;
    LANES {
        int32_t whole = fabsf(a.x[i]) < 127.5f ? (int32_t)rintf(a.x[i]) : 0;
        p[i] = (int8_t)whole, sum += whole;
    }
    return sum;
}

typedef struct { int32_t a[16]; } acc;
typedef const uint8_t *panel_u8;
INLINE panel_u8 load_panel_u8(const uint8_t *w) { return w; }
INLINE acc acc_zero(void) { return (acc){{0}}; }
INLINE acc acc_dot(acc a, panel_u8 w, const int8_t *x) {
    LANES a.a[i] += w[4 * i] * x[0] + w[4 * i + 1] * x[1] + w[4 * i + 2] * x[2] + w[4 * i + 3] * x[3];
    return a;
}
INLINE vf acc_to_vf(acc a, int32_t less) { vf r; LANES r.x[i] = (float)(a.a[i] - less); return r; }
#define TILE_ROWS 2
#define TILE_PANELS 1
#define ONE_ROW_PANELS 1
#define ROW_CASES ROWS_1_TO_2

#endif

INLINE float vf_sum(vf a) {
    float x[16];
    vf_store(x, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

INLINE float vf_reduce_max(vf a) {
    float x[16];
    vf_store(x, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

/* e^x for x ≤ 88: x = n ln 2 + r with |r| ≤ ln 2 / 2, and the Taylor series of e^r to the sixth power. NaN stays NaN. */
INLINE vf vf_exp(vf x) {
    x = vf_max(vf_set1(-87.0f), vf_min(vf_set1(88.0f), x));
    vf n = vf_round(vf_mul(x, vf_set1(1.44269504f)));
    vf r = vf_fma(n, vf_set1(-0.693359375f), x); /* ln 2 in two parts, the first with few bits (Cody and Waite) */
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.0f / 720);
    p = vf_fma(p, r, vf_set1(1.0f / 120));
    p = vf_fma(p, r, vf_set1(1.0f / 24));
    p = vf_fma(p, r, vf_set1(1.0f / 6));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_scale_pow2(p, n);
}

/* x Φ(x), with the error function of Abramowitz and Stegun 7.1.26, whose error is below 1.5e-7. */
INLINE vf vf_gelu(vf x) {
    vf z = vf_mul(vf_abs(x), vf_set1(0.70710678f));
    vf t = vf_div(vf_set1(1.0f), vf_fma(z, vf_set1(0.3275911f), vf_set1(1.0f)));
    vf p = vf_set1(1.061405429f);
    p = vf_fma(p, t, vf_set1(-1.453152027f));
    p = vf_fma(p, t, vf_set1(1.421413741f));
    p = vf_fma(p, t, vf_set1(-0.284496736f));
    p = vf_fma(p, t, vf_set1(0.254829592f));
    vf erf = vf_sub(vf_set1(1.0f), vf_mul(vf_mul(p, t), vf_exp(vf_mul(vf_mul(z, z), vf_set1(-1.0f)))));
    return vf_mul(vf_mul(x, vf_set1(0.5f)), vf_add(vf_set1(1.0f), vf_copysign(erf, x)));
}
