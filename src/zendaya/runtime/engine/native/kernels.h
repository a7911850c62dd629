/* The operations that each processor type implements, and the layouts of their operands.

   A matrix of `outputs` rows and `inputs` columns is packed in panels of ZD_PANEL outputs. A float32 panel is [inputs][ZD_PANEL].
   An int8 panel is [inputs / 4][ZD_PANEL][4] of bytes w + 128: the layout that VNNI multiplies by signed activations.

   Each output is summed over its inputs in one fixed order, for any number of rows in the call. So the bits of a row never depend on
   the other rows. */

#ifndef ZENDAYA_KERNELS_H
#define ZENDAYA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { ZD_PANEL = 16, ZD_QUERIES = 4 };

static inline size_t zd_round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* A packed weight matrix, in float32 or in int8: the pointers of the other precision are NULL. */
typedef struct {
    int outputs, inputs, panels, groups; /* groups of four inputs */
    float *bias;                         /* [panels * ZD_PANEL] */
    float *scale, *total;                /* int8, per output: the scale, and the sum of the bytes w */
    float *f32;
    uint8_t *u8;
} zd_matrix;

/* The left operand of a GEMM: float rows, or int8 rows with scale, zero point z and sum per row: x = scale · (b + z). */
typedef struct {
    int rows;
    size_t stride; /* of f32, in floats */
    const float *f32;
    size_t stride_i8;
    int8_t *i8;
    float *scale, *zero;
    int32_t *sum;
} zd_gemm_in;

typedef enum { ZD_STORE, ZD_ADD, ZD_GELU, ZD_RELU } zd_epilogue;

/* The result of a GEMM: stored, added to `from` and stored, or stored after an activation. `from` may be equal to `to`. Rows with a
   `skip` flag are copied from `from` without the product. */
typedef struct {
    zd_epilogue epilogue;
    float *to;
    size_t stride;
    const float *from;
    size_t from_stride;
    const uint8_t *skip;
} zd_gemm_out;

/* Keys and values of one head: keys in panels of ZD_PANEL positions, [head_dim][ZD_PANEL]; values [position][padded head_dim]. Both are
   float32, or int8 with a scale per position. */
typedef struct {
    const void *keys, *values;
    const float *key_scale, *value_scale; /* NULL in float32 */
} zd_kv_view;

typedef struct {
    const char *name;
    /* Computes the outputs of panels `first` … `last` - 1 for all rows. Each panel is prefetched during the product of the previous
       one; `then` is the panel that this thread will probably need after these. */
    void (*gemm)(const zd_matrix *m, const zd_gemm_in *in, const zd_gemm_out *out, int first, int last, int then);
    /* Layer norm of x, or a copy of x where `weight` is NULL. Reads `n` floats and writes `n` rounded up to ZD_PANEL. Works in place. */
    void (*layer_norm)(const float *x, const float *weight, const float *bias, float *y, int n);
    /* Quantises a row to signed bytes with scale, zero point and sum. The range always includes 0 and uses all bytes, because
       activations after ReLU or GELU are mostly above 0. A row with a non-finite value gets the scale NaN. `padded` is `n` rounded up
       to a multiple of 4. */
    void (*quantise)(const float *x, int n, size_t padded, int8_t *y, float *scale, float *zero, int32_t *sum);
    /* Attention of at most ZD_QUERIES queries. Query i reads `length` + i · `length_step` positions, and nothing at or beyond that
       reaches its `out`. The bits of a query do not depend on the other queries. `scores` has two rows of `score_stride` floats per
       query; with one query, the first row holds its attention weights afterwards. `next`, if not NULL, points at the keys of the next
       call, which are prefetched. */
    void (*attention)(
        const float *q, size_t q_stride, int queries, const zd_kv_view *kv, const void *next, int length, int length_step, int head_dim,
        float *scores, size_t score_stride, float *out, size_t out_stride);
    /* Quantises one position's key and value to int8, with a scale each: the key into a column of its panel, the value into a row. A
       non-finite key or value gets the scale NaN. */
    void (*quantise_kv)(const float *k, const float *v, int head_dim, int8_t *keys, int8_t *values, float *key_scale, float *value_scale);
} zd_kernels;

extern const zd_kernels zd_kernels_portable;
#if defined(__x86_64__)
extern const zd_kernels zd_kernels_avx2, zd_kernels_avx512, zd_kernels_vnni;
#endif

#endif
