/* Sixteen floats at a time, in the words of the processor at hand: AVX-512, AVX2, or arrays that a compiler makes the best of.

   `greater(a, b)` is b where either is NaN. `dots` are sixteen running sums of products of an unsigned and a signed byte, exact. */

#include <math.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) /* whose checks, inlined everywhere, take a compiler minutes */
#define INLINE static __attribute__((noinline, unused))
#else
#define INLINE static inline __attribute__((always_inline))
#endif

INLINE void fetch(const void *p) { __builtin_prefetch(p); }
INLINE void fetch_near(const void *p) { __builtin_prefetch(p, 0, 2); } /* not into the first cache, which is full of what is used now */

#if defined(USE_AVX512)

#include <immintrin.h>

typedef __m512 vf;

INLINE vf load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf load_i8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }
INLINE void store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf all(float a) { return _mm512_set1_ps(a); }
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf divide(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf fma_(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf greater(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf lesser(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf whole(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf times_power(vf a, vf n) { return _mm512_scalef_ps(a, n); }
INLINE vf magnitude(vf a) { return _mm512_abs_ps(a); }
INLINE vf with_sign(vf a, vf sign) {
    const __m512i bit = _mm512_set1_epi32((int)0x80000000);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), _mm512_and_si512(_mm512_castps_si512(sign), bit)));
}
INLINE vf first_lanes(vf a, int n, float rest) { return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), all(rest), a); }
INLINE int32_t store_bytes(int8_t *p, vf a) {
    __m512i i = _mm512_cvtps_epi32(a);
    _mm_storeu_si128((void *)p, _mm512_cvtsepi32_epi8(i));
    return _mm512_reduce_add_epi32(i);
}

#if defined(USE_VNNI)

typedef __m512i dots;
INLINE dots no_dots(void) { return _mm512_setzero_si512(); }
typedef __m512i bytes;
INLINE bytes load_bytes(const uint8_t *w) { return _mm512_loadu_si512(w); }
INLINE dots dot(dots a, bytes w, const int8_t *x) {
    typedef int32_t four __attribute__((may_alias, aligned(4))); /* rows of bytes begin at multiples of 64 */
    /* In words of its own, because compilers spend more on moving the sums about than on making them. */
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(a) : "v"(w), "m"(*(const four *)x));
    return a;
}
INLINE vf sums(dots a, int32_t less) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, _mm512_set1_epi32(less))); }
#define ROWS 12
#define WIDE 2
#define STREAM 8
#define ROW_CASES TWELVE

#else

/* Each of the sums is two, of two products each. */
typedef struct { __m512i a[2]; } dots;
typedef const uint8_t *bytes;
INLINE bytes load_bytes(const uint8_t *w) { return w; }
INLINE dots no_dots(void) { return (dots){{_mm512_setzero_si512(), _mm512_setzero_si512()}}; }
INLINE dots dot(dots a, bytes w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    __m512i x16 = _mm512_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
    for (int i = 0; i < 2; i++) {
        __m512i w16 = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(w + 32 * i)));
        a.a[i] = _mm512_add_epi32(a.a[i], _mm512_madd_epi16(w16, x16));
    }
    return a;
}
INLINE vf sums(dots a, int32_t less) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i total = _mm512_add_epi32(
        _mm512_permutex2var_epi32(a.a[0], even, a.a[1]), _mm512_permutex2var_epi32(a.a[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), a.a[1]));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(total, _mm512_set1_epi32(less)));
}
#define ROWS 6
#define WIDE 2
#define STREAM 4
#define ROW_CASES SIX

#endif

#elif defined(USE_AVX2)

#include <immintrin.h>

typedef struct { __m256 a, b; } vf;

#define EACH(f, x, y) ((vf){f((x).a, (y).a), f((x).b, (y).b)})
INLINE vf load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE __m256 eight_bytes(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p))); }
INLINE vf load_i8(const int8_t *p) { return (vf){eight_bytes(p), eight_bytes(p + 8)}; }
INLINE void store(float *p, vf x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE vf all(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vf add(vf x, vf y) { return EACH(_mm256_add_ps, x, y); }
INLINE vf sub(vf x, vf y) { return EACH(_mm256_sub_ps, x, y); }
INLINE vf mul(vf x, vf y) { return EACH(_mm256_mul_ps, x, y); }
INLINE vf divide(vf x, vf y) { return EACH(_mm256_div_ps, x, y); }
INLINE vf fma_(vf x, vf y, vf z) { return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE vf greater(vf x, vf y) { return EACH(_mm256_max_ps, x, y); }
INLINE vf lesser(vf x, vf y) { return EACH(_mm256_min_ps, x, y); }
INLINE __m256 whole8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf whole(vf x) { return (vf){whole8(x.a), whole8(x.b)}; }
INLINE __m256 power8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE vf times_power(vf x, vf n) { return (vf){_mm256_mul_ps(x.a, power8(n.a)), _mm256_mul_ps(x.b, power8(n.b))}; }
INLINE vf magnitude(vf x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE vf with_sign(vf x, vf y) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_or_ps(x.a, _mm256_and_ps(sign, y.a)), _mm256_or_ps(x.b, _mm256_and_ps(sign, y.b))};
}
INLINE vf first_lanes(vf x, int n, float rest) {
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256 other = _mm256_set1_ps(rest);
    __m256i a = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane), b = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
    return (vf){_mm256_blendv_ps(other, x.a, _mm256_castsi256_ps(a)), _mm256_blendv_ps(other, x.b, _mm256_castsi256_ps(b))};
}
INLINE int32_t store_bytes(int8_t *p, vf x) {
    int32_t i[16], sum = 0;
    _mm256_storeu_si256((void *)i, _mm256_cvtps_epi32(x.a)), _mm256_storeu_si256((void *)(i + 8), _mm256_cvtps_epi32(x.b));
    for (int j = 0; j < 16; j++) p[j] = (int8_t)i[j], sum += i[j];
    return sum;
}

/* Each of the sums is two, of two products each: sixteen-bit products of bytes, which cannot overflow. */
typedef struct { __m256i a[4]; } dots;
typedef const uint8_t *bytes;
INLINE bytes load_bytes(const uint8_t *w) { return w; }
INLINE dots no_dots(void) { return (dots){{_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()}}; }
INLINE dots dot(dots a, bytes w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    __m256i x16 = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
    for (int i = 0; i < 4; i++) {
        __m256i w16 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(w + 16 * i)));
        a.a[i] = _mm256_add_epi32(a.a[i], _mm256_madd_epi16(w16, x16));
    }
    return a;
}
INLINE vf sums(dots a, int32_t less) {
    const __m256i taken = _mm256_set1_epi32(less);
    __m256i low = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a.a[0], a.a[1]), 0xd8);
    __m256i high = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a.a[2], a.a[3]), 0xd8);
    return (vf){_mm256_cvtepi32_ps(_mm256_sub_epi32(low, taken)), _mm256_cvtepi32_ps(_mm256_sub_epi32(high, taken))};
}
#define ROWS 4
#define WIDE 1
#define STREAM 2
#define ROW_CASES FOUR

#else

typedef struct { float x[16]; } vf;

#define LANES for (int i = 0; i < 16; i++)
INLINE vf load(const float *p) { vf r; memcpy(r.x, p, sizeof r.x); return r; }
INLINE vf load_i8(const int8_t *p) { vf r; LANES r.x[i] = p[i]; return r; }
INLINE void store(float *p, vf a) { memcpy(p, a.x, sizeof a.x); }
INLINE vf all(float a) { vf r; LANES r.x[i] = a; return r; }
INLINE vf add(vf a, vf b) { LANES a.x[i] += b.x[i]; return a; }
INLINE vf sub(vf a, vf b) { LANES a.x[i] -= b.x[i]; return a; }
INLINE vf mul(vf a, vf b) { LANES a.x[i] *= b.x[i]; return a; }
INLINE vf divide(vf a, vf b) { LANES a.x[i] /= b.x[i]; return a; }
INLINE vf fma_(vf a, vf b, vf c) { LANES c.x[i] += a.x[i] * b.x[i]; return c; }
INLINE vf greater(vf a, vf b) { LANES a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
INLINE vf lesser(vf a, vf b) { LANES a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
INLINE vf whole(vf a) { LANES a.x[i] = rintf(a.x[i]); return a; }
INLINE vf times_power(vf a, vf n) {
    LANES {
        int32_t power = n.x[i] >= -126 && n.x[i] <= 127 ? (int32_t)n.x[i] : 0; /* a NaN has none, and `a` is one then */
        union { uint32_t u; float f; } two = {(uint32_t)(power + 127) << 23};
        a.x[i] *= two.f;
    }
    return a;
}
INLINE vf magnitude(vf a) { LANES a.x[i] = fabsf(a.x[i]); return a; }
INLINE vf with_sign(vf a, vf sign) { LANES a.x[i] = copysignf(a.x[i], sign.x[i]); return a; }
INLINE vf first_lanes(vf a, int n, float rest) { LANES a.x[i] = i < n ? a.x[i] : rest; return a; }
INLINE int32_t store_bytes(int8_t *p, vf a) {
    int32_t sum = 0;
    LANES {
        int32_t whole = fabsf(a.x[i]) < 127.5f ? (int32_t)rintf(a.x[i]) : 0;
        p[i] = (int8_t)whole, sum += whole;
    }
    return sum;
}

typedef struct { int32_t a[16]; } dots;
typedef const uint8_t *bytes;
INLINE bytes load_bytes(const uint8_t *w) { return w; }
INLINE dots no_dots(void) { return (dots){{0}}; }
INLINE dots dot(dots a, bytes w, const int8_t *x) {
    LANES a.a[i] += w[4 * i] * x[0] + w[4 * i + 1] * x[1] + w[4 * i + 2] * x[2] + w[4 * i + 3] * x[3];
    return a;
}
INLINE vf sums(dots a, int32_t less) { vf r; LANES r.x[i] = (float)(a.a[i] - less); return r; }
#define ROWS 2
#define WIDE 1
#define STREAM 1
#define ROW_CASES TWO

#endif

INLINE float total(vf a) {
    float x[16];
    store(x, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

INLINE float largest(vf a) {
    float x[16];
    store(x, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

/* e^x for x ≤ 88: x = n ln 2 + r, and the Taylor series of e^r to the sixth power, |r| ≤ ln 2 / 2. A NaN stays one. */
INLINE vf exponential(vf x) {
    x = greater(all(-87.0f), lesser(all(88.0f), x));
    vf n = whole(mul(x, all(1.44269504f)));
    vf r = fma_(n, all(-0.693359375f), x); /* ln 2 in two parts, the first exact in few bits (Cody and Waite) */
    r = fma_(n, all(2.12194440e-4f), r);
    vf p = all(1.0f / 720);
    p = fma_(p, r, all(1.0f / 120));
    p = fma_(p, r, all(1.0f / 24));
    p = fma_(p, r, all(1.0f / 6));
    p = fma_(p, r, all(0.5f));
    p = fma_(p, r, all(1.0f));
    p = fma_(p, r, all(1.0f));
    return times_power(p, n);
}

/* x Φ(x), with the error function of Abramowitz and Stegun 7.1.26, good to 1.5e-7. */
INLINE vf gelu(vf x) {
    vf z = mul(magnitude(x), all(0.70710678f));
    vf t = divide(all(1.0f), fma_(z, all(0.3275911f), all(1.0f)));
    vf p = all(1.061405429f);
    p = fma_(p, t, all(-1.453152027f));
    p = fma_(p, t, all(1.421413741f));
    p = fma_(p, t, all(-0.284496736f));
    p = fma_(p, t, all(0.254829592f));
    vf erf = sub(all(1.0f), mul(mul(p, t), exponential(mul(mul(z, z), all(-1.0f)))));
    return mul(mul(x, all(0.5f)), add(all(1.0f), with_sign(erf, x)));
}
