/* What a processor must be able to do for the engine, and the forms its numbers are kept in.

   A matrix of `outputs` rows and `inputs` columns is packed in panels of PANEL outputs. In float32 a panel is [inputs][PANEL]; in int8
   it is [inputs / 4][PANEL][4] of bytes w + 128, which is the form that VNNI multiplies by signed activations.

   Every output is summed over its inputs in one order, whatever the number of rows beside it: a row's bits never depend on its
   neighbours. */

#ifndef ZENDAYA_KERNELS_H
#define ZENDAYA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { PANEL = 16, QUERIES = 4 };

static inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

typedef struct {
    int outputs, inputs, panels, groups; /* groups of four inputs */
    float *bias;                         /* [panels * PANEL] */
    float *scale, *total;                /* int8: of each output, and the sum of its bytes w */
    float *f32;                          /* one of the two */
    uint8_t *u8;
} matrix;

/* Rows that go into a product: floats, or bytes b with the scale, the zero point z and the sum of each row: x = scale · (b + z). */
typedef struct {
    int rows;
    size_t stride; /* of f32, in floats */
    const float *f32;
    size_t stride_i8;
    int8_t *i8;
    float *scale, *zero;
    int32_t *sum;
} input;

typedef enum { STORE, ADD, GELU, RELU } finish;

/* Where a product goes: stored, stored added to `from`, which may be what is there, or stored through an activation. Of a row whose
   `silent` flag is up, nothing is added. */
typedef struct {
    finish how;
    float *to;
    size_t stride;
    const float *from;
    size_t from_stride;
    const uint8_t *silent;
} output;

/* Keys and values of a head: keys in panels of PANEL positions, [width][PANEL], values [position][padded width]; floats, or bytes with the
   scales of each position. */
typedef struct {
    const void *keys, *values;
    const float *key_scale, *value_scale; /* NULL: floats */
} held;

typedef struct {
    const char *name;
    /* Outputs of panels first … last - 1, for all rows. Each panel is fetched while the one before is multiplied, which takes as long
       where the rows are few; `then` is the one that is probably next after these. */
    void (*multiply)(const matrix *m, const input *in, const output *out, int first, int last, int then);
    /* y = norm(x) where a weight is given, else x; x is read to `n`, y written to `n` rounded up to PANEL. May be in place. */
    void (*normalise)(const float *x, const float *weight, const float *bias, float *y, int n);
    /* Signed bytes of a row, its scale, zero point and sum; its range, 0 included, has all the bytes, which what an activation leaves above
       0 would have half of. A row that is not finite gets the scale NaN. `padded` is n rounded up to 4 or more. */
    void (*quantise)(const float *x, int n, size_t padded, int8_t *y, float *scale, float *zero, int32_t *sum);
    /* Attention of at most QUERIES queries, the first over `length` positions, each of the others over `more` than the one before it. Of
       `room` each, `scores` has two for a query; where there is one query, it keeps its weights. Nothing at or beyond a query's length
       reaches its `out`, whose bits do not depend on the others. `next` are the keys that will be wanted after these, about as many, or
       NULL: they are fetched meanwhile. */
    void (*attend)(
        const float *q, size_t q_stride, int queries, const held *over, const void *next, int length, int more, int width, float *scores,
        size_t room, float *out, size_t out_stride);
    /* A position's key and value as bytes with a scale each: the key down a column of its panel, the value along. What is not finite gets
       the scale NaN. */
    void (*shrink)(const float *k, const float *v, int width, int8_t *keys, int8_t *values, float *key_scale, float *value_scale);
} kernels;

extern const kernels portable_kernels;
#if defined(__x86_64__)
extern const kernels avx2_kernels, avx512_kernels, vnni_kernels;
#endif

#endif
