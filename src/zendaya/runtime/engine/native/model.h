/* The structs of models and streams, shared by model.c, stream.c and engine.c. */

#ifndef ZENDAYA_MODEL_H
#define ZENDAYA_MODEL_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine.h"
#include "kernels.h"
#include "pool.h"

enum { ZD_CACHE_LINE = 64 };

typedef struct {
    float *weight, *bias;
} zd_norm;

typedef struct {
    zd_matrix in, out; /* in: the query projection, followed in self-attention by those of key and value */
    zd_norm norm;
} zd_attention;

typedef struct {
    zd_attention self, cross; /* no `cross` in a source layer */
    zd_matrix up, down;
    zd_norm norm;
} zd_layer;

/* Keys and values of some layers: keys [layer][head][panel][head_dim][ZD_PANEL], values [layer][head][position][padded head_dim]. In int8
   also the scales of keys and values, [layer][head][position]. */
typedef struct {
    int layers, capacity, max_positions;
    char *keys, *values;
    float *key_scales, *value_scales;
} zd_kv_cache;

struct zd_stream {
    zd_model *model;
    atomic_int rows, source; /* text rows and source tokens in the caches */
    int heads, head_dim;
    size_t element_size; /* of keys and values: 1 in int8, 4 in float32 */
    int unreadable;      /* the source layers have met an unreadable token */
    int in_call;         /* marks a stream while a call is checked, to find one that is given twice */
    zd_kv_cache self_kv, cross_kv, source_kv;
};

struct zd_model {
    zd_shape shape;
    const zd_kernels *k;
    zd_pool *pool;
    pthread_mutex_t lock;        /* held by each call that uses the buffers or changes a stream */
    int int8, inner;             /* inner: heads · head_dim */
    size_t dim, padded_head_dim; /* rounded up to ZD_PANEL */
    void **allocations;          /* freed with the model */
    int num_allocations;
    zd_matrix embeddings, source_projection, source_embeddings;
    zd_matrix cross_kv; /* the key and value projections of all cross-attentions */
    float *positions, *source_positions;
    float *smoothing; /* factor of each column of `embeddings` (SmoothQuant), or NULL */
    zd_layer *layers, *source_layers;
    zd_norm final_norm; /* before the logits */
    /* Buffers for the rows of a call, kept between calls. */
    int buffer_rows;
    size_t projected_stride; /* floats per row of `projected` */
    size_t input_stride;     /* inputs of the widest GEMM, rounded up */
    size_t score_stride;     /* largest number of scores per query, rounded up */
    float *x, *y, *normed, *projected, *attended, *scale, *zero, *scratch;
    int8_t *bytes;
    int32_t *sum, *stream_of_row;
    uint8_t *skip, *readable;
};

/* model.c */
int zd_model_reserve(zd_model *m, int rows); /* buffers for so many rows; 0 without memory */
static inline size_t zd_scratch_size(const zd_model *m) {
    return ZD_QUERIES * (2 * m->score_stride + 2 * m->padded_head_dim) + ZD_CACHE_LINE;
}

/* stream.c */
static inline size_t zd_padded_head_dim(const zd_stream *s) { return zd_round_up(s->head_dim, ZD_PANEL); }

static inline char *zd_kv_keys(const zd_stream *s, const zd_kv_cache *kv, int layer, int head) {
    return kv->keys + ((size_t)layer * s->heads + head) * kv->capacity * s->head_dim * s->element_size;
}

static inline char *zd_kv_values(const zd_stream *s, const zd_kv_cache *kv, int layer, int head) {
    return kv->values + ((size_t)layer * s->heads + head) * kv->capacity * zd_padded_head_dim(s) * s->element_size;
}

zd_kv_view zd_kv_view_of(const zd_stream *s, const zd_kv_cache *kv, int layer, int head);
int zd_kv_reserve(zd_stream *s, zd_kv_cache *kv, int needed); /* capacity for so many positions; 0 without memory */
void zd_kv_put(
    const zd_kernels *k, const zd_stream *s, const zd_kv_cache *kv, int layer, int head, int position, const float *key,
    const float *value);

#endif
