#define _GNU_SOURCE
#include "engine.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

#define LARGEST_FEATURE 1e12f /* as in decoder.py */

enum { LINE = 64, MOST_ROWS = 1 << 16, PHASES = 16 /* of a layer, or around them */, MOST_INPUTS = 1 << 16 /* their products still fit in 32 bits */ };

typedef struct { float *weight, *bias; } norm;

typedef struct {
    matrix in, out; /* in: queries, and for self-attention keys and values after them */
    norm around;
} attention;

typedef struct {
    attention self, cross; /* cross.in.outputs is 0 in a source layer */
    matrix up, down;
    norm around;
} layer;

/* Keys and values of some layers: keys [layer][head][panel][head_dim][PANEL], values [layer][head][position][padded head_dim]; of bytes,
   also the scales of keys and of values [layer][head][position]. */
typedef struct {
    int layers, capacity, most;
    char *keys, *values;
    float *key_scales, *value_scales;
} store_kv;

struct stream {
    int rows, source, heads, width; /* width: of a head */
    size_t size;                    /* of an element: 1 for a byte, 4 for a float */
    int unreadable;                 /* its source layers have met an unreadable token */
    int marked;                     /* in the call under way */
    store_kv text, cross, context;
};

struct model {
    decoder_shape shape;
    const kernels *k;
    pool *threads;
    pthread_mutex_t turn;
    int int8, inner;
    size_t dim, padded_width; /* rounded up to PANEL */
    void **taken;             /* what the weights were allocated in */
    int num_taken;
    matrix tokens, source_projection, source_tokens, memory; /* memory: keys and values of every layer's cross-attention */
    float *positions, *source_positions;
    float *balanced; /* what each column of `tokens` was multiplied by, or NULL */
    layer *layers, *source_layers;
    norm last; /* before the logits */
    /* Room for the rows of a call, kept between calls. */
    int room;
    size_t wide;    /* floats of a row of `products` */
    size_t longest; /* inputs of the widest product, rounded up */
    size_t scores;  /* of a query at most, rounded up */
    float *x, *y, *normed, *products, *attended, *scale, *zero, *scratch;
    int8_t *bytes;
    int32_t *sum, *stream_of;
    uint8_t *silent, *readable;
};

static size_t desk_size(const model *m) { return QUERIES * (2 * m->scores + 2 * m->padded_width) + LINE; }

static void *take(model *m, size_t size) {
    void **taken = realloc(m->taken, (m->num_taken + 1) * sizeof *taken);
    if (!taken) return NULL;
    m->taken = taken;
    if (!(taken[m->num_taken] = memory_new(size))) return NULL;
    return taken[m->num_taken++];
}

/* Weights. */

typedef struct {
    model *m;
    const float *const *tensors;
    const int64_t *sizes;
    int count, at;
    int failed;
} reader;

static const float *next_tensor(reader *r, int64_t size) {
    if (r->failed || r->at >= r->count || r->sizes[r->at] != size) {
        r->failed = 1;
        return NULL;
    }
    return r->tensors[r->at++];
}

static float *next_copy(reader *r, int64_t size) {
    const float *from = next_tensor(r, size);
    float *to = from ? take(r->m, round_up(size, PANEL) * sizeof *to) : NULL;
    if (!to) r->failed = 1;
    else memcpy(to, from, size * sizeof *to);
    return to;
}

static norm next_norm(reader *r) {
    norm n;
    n.weight = next_copy(r, r->m->shape.dim);
    n.bias = next_copy(r, r->m->shape.dim);
    return n;
}

static void make_matrix(reader *r, matrix *x, int outputs, int inputs) {
    *x = (matrix){.outputs = outputs, .inputs = inputs, .panels = (outputs + PANEL - 1) / PANEL, .groups = (inputs + 3) / 4};
    const size_t rows = (size_t)x->panels * PANEL;
    if (r->failed || inputs > MOST_INPUTS || !(x->bias = take(r->m, rows * sizeof(float)))) {
        r->failed = 1;
        return;
    }
    if (r->m->int8) {
        x->scale = take(r->m, rows * sizeof(float)), x->total = take(r->m, rows * sizeof(float));
        if ((x->u8 = take(r->m, rows * x->groups * 4))) memset(x->u8, 128, rows * x->groups * 4);
    } else {
        x->f32 = take(r->m, rows * inputs * sizeof(float));
    }
    r->failed |= r->m->int8 ? !x->u8 || !x->scale || !x->total : !x->f32;
}

/* Put a dense layer's rows into a matrix from output `first` on; its bias may be NULL. In int8 its columns are multiplied `by` what is given,
   if it is. */
static void pack(reader *r, matrix *x, int first, int outputs, const float *weight, const float *bias, const float *by) {
    if (r->failed || !weight) return;
    for (int o = 0; o < outputs; o++) {
        const float *row = weight + (size_t)o * x->inputs;
        const int n = first + o, panel = n / PANEL, lane = n % PANEL;
        if (bias) x->bias[n] = bias[o];
        if (x->f32) {
            for (int k = 0; k < x->inputs; k++) x->f32[((size_t)panel * x->inputs + k) * PANEL + lane] = row[k];
            continue;
        }
        float top = 0, broken = 0;
        for (int k = 0; k < x->inputs; k++) top = fmaxf(top, fabsf(by ? row[k] * by[k] : row[k])), broken += 0 * row[k];
        x->scale[n] = top / 127 + broken;
        if (broken != 0 || top < 1e-30f) continue;
        for (int k = 0; k < x->inputs; k++) {
            const int byte = (int)lrintf((by ? row[k] * by[k] : row[k]) * (127 / top));
            x->u8[(((size_t)panel * x->groups + k / 4) * PANEL + lane) * 4 + k % 4] = (uint8_t)(byte + 128), x->total[n] += (float)byte;
        }
    }
}

static void next_dense(reader *r, matrix *x, int outputs, int inputs) {
    make_matrix(r, x, outputs, inputs);
    const float *weight = next_tensor(r, (int64_t)outputs * inputs), *bias = next_tensor(r, outputs);
    pack(r, x, 0, outputs, weight, bias, NULL);
}

/* What the columns of some matrices, which multiply the same rows, are to be multiplied by in int8, and the rows divided by: NULL where
   nothing. In trained models a few columns, and a few places of a row, are so much larger than the others that one scale for all would
   leave those only a few of its steps. What sets them apart is shared between the two (SmoothQuant's balance, Xiao et al. 2023); how
   large a row is where, the norm that makes it says. */
static float *balance(reader *r, const norm *n, int count, const float *const *weights, const int *outputs) {
    const int dim = r->m->shape.dim;
    if (!r->m->int8 || r->failed) return NULL;
    float *by = take(r->m, r->m->dim * sizeof *by);
    if (!by) {
        r->failed = 1;
        return NULL;
    }
    for (int i = 0; i < count; i++)
        for (int o = 0; o < outputs[i]; o++)
            for (int k = 0; k < dim; k++) by[k] += weights[i][(size_t)o * dim + k] * weights[i][(size_t)o * dim + k] / (float)outputs[i];
    for (int k = 0; k < dim; k++) {
        const float row = n ? n->weight[k] * n->weight[k] + n->bias[k] * n->bias[k] : 1.0f;
        by[k] = powf(row / by[k], 0.25f);
        if (!(by[k] > 1e-6f && by[k] < 1e6f)) by[k] = 1.0f;
    }
    return by;
}

/* A norm's rows, divided so. */
static void divide(norm *n, const float *by, int dim) {
    for (int k = 0; by && k < dim; k++) n->weight[k] /= by[k], n->bias[k] /= by[k];
}

/* The norm before matrices that multiply the same rows, balanced with them; after-normalisation's rows go elsewhere too, and stay. */
static const float *next_balanced(reader *r, norm *n, int count, const float *const *weights, const int *outputs) {
    *n = next_norm(r);
    const float *by = r->m->shape.pre_norm && !r->failed ? balance(r, n, count, weights, outputs) : NULL;
    divide(n, by, r->m->shape.dim);
    return by;
}

/* Attention's tensors: query, key (without bias), value, out. Keys and values of a cross-attention go to the model's memory matrix. */
static void next_attention(reader *r, attention *a, int cross) {
    model *m = r->m;
    const int inner = m->inner, dim = m->shape.dim;
    const float *q = next_tensor(r, (int64_t)inner * dim), *q_bias = next_tensor(r, inner), *k = next_tensor(r, (int64_t)inner * dim);
    const float *v = next_tensor(r, (int64_t)inner * dim), *v_bias = next_tensor(r, inner);
    next_dense(r, &a->out, dim, inner);
    const float *by = next_balanced(r, &a->around, cross < 0 ? 3 : 1, (const float *const[]){q, k, v}, (const int[]){inner, inner, inner});
    make_matrix(r, &a->in, cross < 0 ? 3 * inner : inner, dim);
    pack(r, &a->in, 0, inner, q, q_bias, by);
    matrix *kv = cross < 0 ? &a->in : &m->memory;
    const int first = cross < 0 ? inner : 2 * inner * cross;
    pack(r, kv, first, inner, k, NULL, cross < 0 ? by : NULL);
    pack(r, kv, first + inner, inner, v, v_bias, cross < 0 ? by : NULL);
}

static void next_layer(reader *r, layer *l, int cross) {
    const decoder_shape *s = &r->m->shape;
    next_attention(r, &l->self, -1);
    if (cross >= 0) next_attention(r, &l->cross, cross);
    const float *up = next_tensor(r, (int64_t)s->ffn_dim * s->dim), *up_bias = next_tensor(r, s->ffn_dim);
    next_dense(r, &l->down, s->dim, s->ffn_dim);
    const float *by = next_balanced(r, &l->around, 1, &up, &s->ffn_dim);
    make_matrix(r, &l->up, s->ffn_dim, s->dim);
    pack(r, &l->up, 0, s->ffn_dim, up, up_bias, by);
}

/* The embeddings, whose rows are also what logits are products with: what their columns are multiplied by is divided out again when they
   are looked up. */
static void next_tokens(reader *r) {
    model *m = r->m;
    const int vocab = m->shape.vocab_size, dim = m->shape.dim;
    const float *weight = next_tensor(r, (int64_t)vocab * dim);
    make_matrix(r, &m->tokens, vocab, dim);
    m->balanced = balance(r, NULL, 1, &weight, &vocab);
    pack(r, &m->tokens, 0, vocab, weight, NULL, m->balanced);
}

/* What stands before the logits: a norm of its own, or a copy of the last layer's, which goes nowhere else. */
static void make_last(reader *r) {
    model *m = r->m;
    const size_t size = m->dim * sizeof(float);
    if (m->shape.pre_norm) m->last = next_norm(r);
    else m->last = (norm){take(m, size), take(m, size)};
    r->failed |= !m->last.weight || !m->last.bias;
    if (r->failed) return;
    const norm *from = &m->layers[m->shape.layers - 1].around;
    if (!m->shape.pre_norm) memcpy(m->last.weight, from->weight, size), memcpy(m->last.bias, from->bias, size);
    divide(&m->last, m->balanced, m->shape.dim);
}

static void next_weights(reader *r) {
    model *m = r->m;
    const decoder_shape *s = &m->shape;
    next_tokens(r);
    m->positions = next_copy(r, (int64_t)s->max_rows * s->dim);
    if (s->source_vocab) {
        make_matrix(r, &m->source_tokens, s->source_vocab, s->dim);
        pack(r, &m->source_tokens, 0, s->source_vocab, next_tensor(r, (int64_t)s->source_vocab * s->dim), NULL, NULL);
    } else if (s->embed_source) {
        next_dense(r, &m->source_projection, s->dim, s->source_dim);
    }
    if (s->embed_source) m->source_positions = next_copy(r, (int64_t)s->max_source * s->dim);
    m->layers = take(m, s->layers * sizeof(layer));
    m->source_layers = take(m, s->source_layers * sizeof(layer));
    r->failed |= !m->layers || !m->source_layers;
    for (int i = 0; i < s->source_layers && !r->failed; i++) next_layer(r, &m->source_layers[i], -1);
    make_matrix(r, &m->memory, 2 * m->inner * s->layers, s->dim);
    for (int i = 0; i < s->layers && !r->failed; i++) next_layer(r, &m->layers[i], i);
    make_last(r);
    r->failed |= r->at != r->count;
}

static int can_run(const kernels *k) {
#if defined(__x86_64__)
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512dq");
    if (k == &avx2_kernels) return avx2;
    if (k == &avx512_kernels) return avx512;
    if (k == &vnni_kernels) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return k == &portable_kernels;
}

static const kernels *kernels_at(int place) {
    static const kernels *const all[] = {
#if defined(__x86_64__)
        &vnni_kernels, &avx512_kernels, &avx2_kernels,
#endif
        &portable_kernels,
    };
    for (size_t i = 0; place >= 0 && i < sizeof all / sizeof *all; i++)
        if (can_run(all[i]) && place-- == 0) return all[i];
    return NULL;
}

int zendaya_abi(void) { return ABI; }

const char *zendaya_kernels(int place) {
    const kernels *k = kernels_at(place);
    return k ? k->name : NULL;
}

model *zendaya_model_new(
    const decoder_shape *shape, const float *const *tensors, const int64_t *sizes, int count, int int8, int threads, const char *kernels_name) {
    model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->shape = *shape, m->int8 = int8, m->inner = shape->heads * shape->head_dim;
    m->dim = round_up(shape->dim, PANEL), m->padded_width = round_up(shape->head_dim, PANEL);
    for (int i = 0; kernels_at(i); i++)
        if (!m->k && (!kernels_name || !strcmp(kernels_at(i)->name, kernels_name))) m->k = kernels_at(i);
    pthread_mutex_init(&m->turn, NULL);
    reader r = {.m = m, .tensors = tensors, .sizes = sizes, .count = count};
    if (m->k) next_weights(&r);
    if (!m->k || r.failed || threads < 1 || !(m->threads = pool_new(threads, PHASES * (1 + shape->layers + shape->source_layers)))) {
        zendaya_model_free(m);
        return NULL;
    }
    size_t widest = 3 * m->inner, inputs = shape->dim, longest = shape->max_rows > shape->max_source ? shape->max_rows : shape->max_source;
    if ((size_t)shape->ffn_dim > widest) widest = shape->ffn_dim;
    if ((size_t)m->memory.outputs > widest) widest = m->memory.outputs;
    const int others[] = {m->inner, shape->ffn_dim, shape->source_dim};
    for (int i = 0; i < 3; i++)
        if ((size_t)others[i] > inputs) inputs = others[i];
    m->wide = round_up(widest, PANEL), m->longest = round_up(inputs, LINE);
    m->scores = round_up(longest, PANEL);
    if (!(m->scratch = take(m, threads * desk_size(m) * sizeof(float)))) {
        zendaya_model_free(m);
        return NULL;
    }
    return m;
}

static void free_room(model *m) {
    void *all[] = {
        m->x, m->y, m->normed, m->products, m->attended, m->scale, m->zero, m->bytes, m->sum, m->stream_of, m->silent, m->readable,
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) memory_free(all[i]);
    m->x = m->y = m->normed = m->products = m->attended = m->scale = m->zero = NULL;
    m->bytes = NULL, m->sum = m->stream_of = NULL, m->silent = m->readable = NULL;
    m->room = 0;
}

void zendaya_model_free(model *m) {
    if (!m) return;
    pool_free(m->threads);
    free_room(m);
    for (int i = 0; i < m->num_taken; i++) memory_free(m->taken[i]);
    free(m->taken);
    pthread_mutex_destroy(&m->turn);
    free(m);
}

static int make_room(model *m, int rows) {
    if (rows <= m->room) return 1;
    free_room(m);
    const size_t n = round_up(rows, PANEL);
    m->x = memory_new(n * m->dim * sizeof(float)), m->y = memory_new(n * m->dim * sizeof(float));
    m->normed = memory_new(n * m->longest * sizeof(float));
    m->products = memory_new(n * m->wide * sizeof(float)), m->attended = memory_new(n * m->longest * sizeof(float));
    m->scale = memory_new(n * sizeof(float)), m->zero = memory_new(n * sizeof(float)), m->sum = memory_new(n * sizeof(int32_t));
    m->bytes = memory_new(n * m->longest);
    m->stream_of = memory_new(n * sizeof(int32_t)), m->silent = memory_new(n), m->readable = memory_new(n);
    m->room = (int)n;
    const int some = m->x && m->y && m->normed && m->products && m->attended && m->scale && m->zero;
    if (some && m->bytes && m->sum && m->stream_of && m->silent && m->readable) return 1;
    free_room(m);
    return 0;
}

/* Streams. */

static size_t padded(const stream *s) { return round_up(s->width, PANEL); }

static char *keys_at(const stream *s, const store_kv *kv, int layer, int head) {
    return kv->keys + ((size_t)layer * s->heads + head) * kv->capacity * s->width * s->size;
}

static char *values_at(const stream *s, const store_kv *kv, int layer, int head) {
    return kv->values + ((size_t)layer * s->heads + head) * kv->capacity * padded(s) * s->size;
}

static held held_at(const stream *s, const store_kv *kv, int layer, int head) {
    const size_t at = ((size_t)layer * s->heads + head) * kv->capacity;
    held found = {.keys = keys_at(s, kv, layer, head), .values = values_at(s, kv, layer, head)};
    if (s->size == 1) found.key_scale = kv->key_scales + at, found.value_scale = kv->value_scales + at;
    return found;
}

static void drop(store_kv *kv) {
    memory_free(kv->keys), memory_free(kv->values), memory_free(kv->key_scales), memory_free(kv->value_scales);
}

/* Copy what a head holds from one store to another of at least its capacity. */
static void copy_head(const stream *s, store_kv *to, const store_kv *from, int layer, int head) {
    const size_t at = (size_t)layer * s->heads + head, many = from->capacity;
    memcpy(keys_at(s, to, layer, head), keys_at(s, from, layer, head), many * s->width * s->size);
    memcpy(values_at(s, to, layer, head), values_at(s, from, layer, head), many * padded(s) * s->size);
    if (s->size > 1) return;
    memcpy(to->key_scales + at * to->capacity, from->key_scales + at * many, many * sizeof(float));
    memcpy(to->value_scales + at * to->capacity, from->value_scales + at * many, many * sizeof(float));
}

/* Room for so many positions: it doubles, so that memory follows what was read, and what is there is moved. */
static int grow(stream *s, store_kv *kv, int needed) {
    if (needed <= kv->capacity || !kv->layers) return 1;
    int capacity = 2 * kv->capacity > needed ? 2 * kv->capacity : needed;
    if (capacity > kv->most) capacity = kv->most;
    store_kv new = {.layers = kv->layers, .capacity = (int)round_up(capacity, 2 * PANEL), .most = kv->most};
    const size_t positions = (size_t)kv->layers * s->heads * new.capacity;
    new.keys = memory_new(positions * s->width * s->size), new.values = memory_new(positions * padded(s) * s->size);
    if (s->size == 1) new.key_scales = memory_new(positions * sizeof(float)), new.value_scales = memory_new(positions * sizeof(float));
    if (!new.keys || !new.values || (s->size == 1 && (!new.key_scales || !new.value_scales))) {
        drop(&new);
        return 0;
    }
    for (int l = 0; kv->capacity && l < kv->layers; l++)
        for (int h = 0; h < s->heads; h++) copy_head(s, &new, kv, l, h);
    drop(kv);
    *kv = new;
    return 1;
}

static void put(const kernels *by, const stream *s, const store_kv *kv, int layer, int head, int position, const float *k, const float *v) {
    const size_t panel = (size_t)(position / PANEL) * s->width * PANEL + position % PANEL, row = position * padded(s);
    if (s->size == 1) {
        const size_t at = ((size_t)layer * s->heads + head) * kv->capacity + position;
        int8_t *keys = (int8_t *)keys_at(s, kv, layer, head) + panel, *values = (int8_t *)values_at(s, kv, layer, head) + row;
        by->shrink(k, v, s->width, keys, values, kv->key_scales + at, kv->value_scales + at);
    } else {
        float *keys = (float *)keys_at(s, kv, layer, head) + panel, *values = (float *)values_at(s, kv, layer, head) + row;
        for (int d = 0; d < s->width; d++) keys[d * PANEL] = k[d];
        memcpy(values, v, s->width * sizeof *v);
    }
}

stream *zendaya_stream_new(const model *m) {
    stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->heads = m->shape.heads, s->width = m->shape.head_dim, s->size = m->int8 ? 1 : 4;
    s->text = (store_kv){.layers = m->shape.layers, .most = m->shape.max_rows};
    s->cross = (store_kv){.layers = m->shape.layers, .most = m->shape.max_source};
    s->context = (store_kv){.layers = m->shape.source_layers, .most = m->shape.max_source};
    return s;
}

void zendaya_stream_free(stream *s) {
    if (!s) return;
    store_kv *all[] = {&s->text, &s->cross, &s->context};
    for (int i = 0; i < 3; i++) drop(all[i]);
    free(s);
}

stream *zendaya_stream_clone(const model *m, const stream *s) {
    stream *c = zendaya_stream_new(m);
    if (!c) return NULL;
    const store_kv *from[] = {&s->text, &s->cross, &s->context};
    store_kv *to[] = {&c->text, &c->cross, &c->context};
    for (int i = 0; i < 3; i++) {
        if (!grow(c, to[i], from[i]->capacity)) {
            zendaya_stream_free(c);
            return NULL;
        }
        for (int l = 0; from[i]->capacity && l < from[i]->layers; l++)
            for (int h = 0; h < s->heads; h++) copy_head(s, to[i], from[i], l, h);
    }
    c->rows = s->rows, c->source = s->source, c->unreadable = s->unreadable;
    return c;
}

int zendaya_stream_rows(const stream *s) { return s->rows; }
int zendaya_stream_source(const stream *s) { return s->source; }

int64_t zendaya_stream_bytes(const model *m, const stream *s) {
    int64_t positions = 0;
    const store_kv *all[] = {&s->text, &s->cross, &s->context};
    for (int i = 0; i < 3; i++) positions += (int64_t)all[i]->layers * all[i]->capacity;
    const size_t scales = s->size == 1 ? 2 * sizeof(float) : 0;
    return positions * m->shape.heads * (int64_t)((s->width + padded(s)) * s->size + scales);
}

int zendaya_stream_keep(stream *s, int rows) {
    if (rows < 0 || rows > s->rows) return BAD_CALL;
    s->rows = rows;
    return DONE;
}

void zendaya_stream_forget_source(stream *s) { s->source = s->unreadable = 0; }

/* One call: rows of some streams, which all threads work on together. */

typedef struct {
    model *m;
    int count, rows;
    stream *const *streams;
    const int32_t *counts, *ids, *horizons;
    const float *source;
    float *logits, *gaze;
    const int32_t *first; /* each stream's first row; then 0, 1, … and as many ones, for when a stream has one row each */
    float *x, *y; /* the rows, and where the next block leaves them: a thread that comes late may still be reading the ones before */
    place at;     /* each thread has a copy of the job with its own */
} job;

static float *row_of(float *rows, int r, size_t stride) { return rows + (size_t)r * stride; }

static void unpack(const matrix *x, int n, float *to) {
    const size_t panel = n / PANEL, lane = n % PANEL;
    for (int k = 0; k < x->inputs; k++)
        to[k] = x->f32 ? x->f32[(panel * x->inputs + k) * PANEL + lane]
                       : (x->u8[((panel * x->groups + k / 4) * PANEL + lane) * 4 + k % 4] - 128) * x->scale[n];
}

static void prepare_row(const model *m, const norm *n, const float *x, float *y, int width, const input *in, int r) {
    if (n) m->k->normalise(x, n->weight, n->bias, y, width);
    if (m->int8) m->k->quantise(y, width, round_up(width, 4), in->i8 + r * m->longest, in->scale + r, in->zero + r, in->sum + r);
}

/* Rows as what a product takes: normed if a norm is given, into the same place if `keep`; in int8 as bytes. A single row each thread
   prepares for itself, and none waits; it is not kept then, and whoever adds to it has it from the input. */
static input prepare(job *j, const norm *n, float *x, size_t stride, int width, int keep, int rows) {
    const model *m = j->m;
    const int own = rows == 1 ? j->at.worker : 0, apart = n && (!keep || rows == 1);
    float *y = apart ? row_of(m->normed, own, m->longest) : x;
    const size_t stride_y = apart ? m->longest : stride;
    input in = {.rows = rows, .stride = stride_y, .f32 = y, .stride_i8 = m->longest, .i8 = m->bytes + own * m->longest,
                .scale = m->scale + own, .zero = m->zero + own, .sum = m->sum + own};
    if (!n && !m->int8) return in;
    if (rows == 1) {
        prepare_row(m, n, x, y, width, &in, 0);
        return in;
    }
    PIECES(&j->at, r, rows) prepare_row(m, n, row_of(x, r, stride), row_of(y, r, stride_y), width, &in, r);
    pool_meet(&j->at);
    return in;
}

static void multiply(job *j, const matrix *x, const input *in, const output *out) {
    const int threads = pool_threads(j->m->threads), unit = in->rows == 1 ? 8 : 2;
    int size = threads == 1 ? x->panels : x->panels / (4 * threads) / unit * unit;
    if (size < unit) size = unit;
    PIECES(&j->at, i, (x->panels + size - 1) / size) {
        const int first = i * size, last = first + size < x->panels ? first + size : x->panels;
        j->m->k->multiply(x, in, out, first, last, first + threads * size); /* the others have those between */
    }
    pool_meet(&j->at);
}

/* A thread's own place for the attention of some queries. */
typedef struct { float *scores, *q, *y; } desk;

static desk desk_of(const model *m, int worker) {
    float *own = m->scratch + worker * desk_size(m);
    return (desk){own, own + QUERIES * 2 * m->scores, own + QUERIES * (2 * m->scores + m->padded_width)};
}

/* Attention's pieces of work: some heads of a stream, fewer where there are few streams to share out. */
typedef struct { int together, groups, at, first, last; } share;

static share share_of(const job *j, int piece) {
    const int heads = j->m->shape.heads, most = j->count * heads / (16 * pool_threads(j->m->threads));
    share s = {.together = most < 1 ? 1 : most < heads ? most : heads};
    s.groups = (heads + s.together - 1) / s.together, s.at = piece / s.groups, s.first = piece % s.groups * s.together;
    s.last = s.first + s.together < heads ? s.first + s.together : heads;
    return s;
}

/* The keys that a thread will probably want after a head's: the next head's; after the last of its piece, those of the piece that falls
   to it when the others take the ones between. */
static const void *keys_after(const job *j, const store_kv *(*of)(const stream *), int layer, int piece, int head) {
    const share now = share_of(j, piece), then = share_of(j, piece + pool_threads(j->m->threads));
    const int at = head + 1 < now.last ? now.at : then.at;
    return at < j->count ? keys_at(j->streams[at], of(j->streams[at]), layer, head + 1 < now.last ? head + 1 : then.first) : NULL;
}

static const store_kv *text_of(const stream *s) { return &s->text; }
static const store_kv *cross_of(const stream *s) { return &s->cross; }
static const store_kv *context_of(const stream *s) { return &s->context; }

/* Attention of some rows, the first over `length` positions, each of the others over `more` than the one before it. */
static void attend(
    job *j, const desk *d, const stream *s, const store_kv *kv, int layer, int head, int row, int rows, int length, int more, const void *next) {
    const model *m = j->m;
    const int width = m->shape.head_dim;
    const float scale = 1.0f / sqrtf((float)width);
    const held over = held_at(s, kv, layer, head);
    for (int done = 0, now; done < rows; done += now) {
        now = rows - done >= QUERIES && !j->gaze ? QUERIES : 1;
        for (int i = 0; i < now; i++) {
            const float *q = row_of(m->products, row + done + i, m->wide) + head * width;
            for (int n = 0; n < width; n++) d->q[i * m->padded_width + n] = q[n] * scale;
        }
        m->k->attend(
            d->q, m->padded_width, now, &over, next, length + done * more, more, width, d->scores, m->scores, d->y, m->padded_width);
        for (int i = 0; i < now; i++)
            memcpy(row_of(m->attended, row + done + i, m->longest) + head * width, d->y + i * m->padded_width, width * sizeof *d->y);
    }
}

/* Self-attention: a stream's head at a time, whose new keys and values are put down first. `start` is a stream's rows before the call.
   Of the last layer only each stream's last row is wanted. */
static void attend_self(job *j, const desk *d, int layer, int is_source, int is_last) {
    const model *m = j->m;
    const store_kv *(*of)(const stream *) = is_source ? context_of : text_of;
    PIECES(&j->at, i, j->count * share_of(j, 0).groups) {
        const share mine = share_of(j, i);
        const stream *s = j->streams[mine.at];
        const int first = j->first[mine.at], start = is_source ? s->source : s->rows;
        for (int head = mine.first; head < mine.last; head++) {
            const void *next = keys_after(j, of, layer, i, head);
            for (int r = 0; r < j->counts[mine.at]; r++) {
                const float *k = row_of(m->products, first + r, m->wide) + m->inner + head * m->shape.head_dim;
                put(m->k, s, of(s), layer, head, start + r, k, k + m->inner);
            }
            const int skip = is_last ? j->counts[mine.at] - 1 : 0;
            attend(j, d, s, of(s), layer, head, first + skip, j->counts[mine.at] - skip, start + skip + 1, 1, next);
        }
    }
    pool_meet(&j->at);
}

/* Cross-attention: over exactly the first `horizon` source tokens. */
static void attend_cross(job *j, const desk *d, int layer) {
    const model *m = j->m;
    const int width = m->shape.head_dim;
    PIECES(&j->at, i, j->count * share_of(j, 0).groups) {
        const share mine = share_of(j, i);
        const stream *s = j->streams[mine.at];
        const int first = j->first[mine.at], horizon = j->horizons[mine.at];
        for (int head = mine.first; head < mine.last; head++) {
            const void *next = keys_after(j, cross_of, layer, i, head);
            if (horizon) attend(j, d, s, &s->cross, layer, head, first, j->counts[mine.at], horizon, 0, next);
            for (int row = first; !horizon && row < first + j->counts[mine.at]; row++)
                memset(row_of(m->attended, row, m->longest) + head * width, 0, width * sizeof(float));
            if (j->gaze) memcpy(j->gaze + ((size_t)layer * m->shape.heads + head) * horizon, d->scores, horizon * sizeof(float));
        }
    }
    pool_meet(&j->at);
}

/* Residual and normalisation around a block: x + f(norm(x)) before, norm(x + f(x)) after; `before` is the norm of the block before,
   which after-normalisation has still to apply. What a block adds to is x, or after-normalisation what was entered with. */
static input enter(job *j, const norm *own, const norm *before) {
    const model *m = j->m;
    const int pre = m->shape.pre_norm;
    return prepare(j, pre ? own : before, j->x, m->dim, m->shape.dim, !pre, j->rows);
}

static void leave(job *j, const matrix *x, const input *in, const input *entered, const norm *before, const uint8_t *silent) {
    const model *m = j->m;
    output out = {.how = ADD, .to = j->y, .stride = m->dim, .from = j->x, .from_stride = m->dim, .silent = silent};
    if (before && !m->shape.pre_norm) out.from = entered->f32, out.from_stride = entered->stride;
    multiply(j, x, in, &out);
    j->y = j->x, j->x = out.to;
}

/* Go on with each stream's last row alone, moved to its stream's place; in order, as a row's new place was that of one moved before. */
static void keep_last(job *j) {
    const model *m = j->m;
    PIECES(&j->at, i, 1)
        for (int at = 0; at < j->count; at++) {
            const int row = j->first[at] + j->counts[at] - 1;
            memmove(row_of(j->x, at, m->dim), row_of(j->x, row, m->dim), m->dim * sizeof(float));
            memmove(row_of(m->attended, at, m->longest), row_of(m->attended, row, m->longest), m->longest * sizeof(float));
            m->silent[at] = j->horizons[at] == 0;
        }
    pool_meet(&j->at);
    j->first = j->first + j->count, j->counts = j->first + j->count, j->rows = j->count;
}

/* A layer on the call's rows; the norm that is still to apply goes in and comes out. */
static const norm *run_layer(job *j, const desk *d, const layer *l, int index, int is_source, const norm *before) {
    const model *m = j->m;
    const output products = {.how = STORE, .to = m->products, .stride = m->wide};
    input entered = enter(j, &l->self.around, before), in = entered;
    multiply(j, &l->self.in, &in, &products);
    const int is_last = !is_source && index == m->shape.layers - 1;
    attend_self(j, d, index, is_source, is_last);
    if (is_last && j->rows > j->count) keep_last(j);
    in = prepare(j, NULL, m->attended, m->longest, m->inner, 0, j->rows);
    leave(j, &l->self.out, &in, &entered, before, NULL);
    before = &l->self.around;
    if (!is_source) {
        in = entered = enter(j, &l->cross.around, before);
        multiply(j, &l->cross.in, &in, &products);
        attend_cross(j, d, index);
        in = prepare(j, NULL, m->attended, m->longest, m->inner, 0, j->rows);
        leave(j, &l->cross.out, &in, &entered, before, m->silent);
        before = &l->cross.around;
    }
    in = entered = enter(j, &l->around, before);
    multiply(j, &l->up, &in, &(output){.how = m->shape.relu ? RELU : GELU, .to = m->products, .stride = m->wide});
    in = prepare(j, NULL, m->products, m->wide, m->shape.ffn_dim, 0, j->rows);
    leave(j, &l->down, &in, &entered, before, NULL);
    return &l->around;
}

static void rows_work(void *argument, place at_phase) {
    job mine = *(job *)argument, *j = &mine;
    model *m = j->m;
    j->at = at_phase;
    const desk d = desk_of(m, at_phase.worker);
    const int dim = m->shape.dim;
    PIECES(&j->at, r, j->rows) {
        const int at = m->stream_of[r], position = j->streams[at]->rows + r - j->first[at];
        float *x = row_of(j->x, r, m->dim);
        unpack(&m->tokens, j->ids[r], x);
        for (int i = 0; m->balanced && i < dim; i++) x[i] /= m->balanced[i];
        for (int i = 0; i < dim; i++) x[i] += m->positions[(size_t)position * dim + i];
        m->silent[r] = j->horizons[at] == 0;
    }
    pool_meet(&j->at);
    const norm *before = NULL;
    for (int i = 0; i < m->shape.layers; i++) before = run_layer(j, &d, &m->layers[i], i, 0, before);
    /* Logits of each stream's last row: the last layer has kept no other. */
    input in = prepare(j, &m->last, j->x, m->dim, dim, 0, j->count);
    multiply(j, &m->tokens, &in, &(output){.how = STORE, .to = j->logits, .stride = m->shape.vocab_size});
}

/* Source tokens at the model's width, at their positions; unreadable ones as zeros. */
static void place_source(job *j) {
    model *m = j->m;
    const int dim = m->shape.dim, features = m->shape.source_dim;
    PIECES(&j->at, r, j->rows) {
        const float *from = j->source + (size_t)r * features;
        int readable = 1;
        for (int i = 0; i < features; i++) readable &= fabsf(from[i]) < LARGEST_FEATURE; /* false for NaN */
        if (m->shape.source_vocab) readable = readable && from[0] >= 0 && from[0] < (float)m->shape.source_vocab && from[0] == floorf(from[0]);
        m->readable[r] = (uint8_t)readable;
        float *to = row_of(m->shape.embed_source ? m->attended : j->x, r, m->shape.embed_source ? m->longest : m->dim);
        if (m->shape.source_vocab) unpack(&m->source_tokens, readable ? (int)from[0] : 0, row_of(j->x, r, m->dim));
        else if (readable) memcpy(to, from, features * sizeof *to);
        else memset(to, 0, features * sizeof *to);
    }
    pool_meet(&j->at);
    if (!m->shape.embed_source) return;
    if (!m->shape.source_vocab) {
        input in = prepare(j, NULL, m->attended, m->longest, features, 0, j->rows);
        multiply(j, &m->source_projection, &in, &(output){.how = STORE, .to = j->x, .stride = m->dim});
    }
    PIECES(&j->at, r, j->rows) {
        const int at = m->stream_of[r];
        const float *position = m->source_positions + (size_t)(j->streams[at]->source + r - j->first[at]) * dim;
        for (int i = 0; i < dim; i++) row_of(j->x, r, m->dim)[i] += position[i];
    }
    pool_meet(&j->at);
}

/* After a source layer: the norm that is left, and rows that overflowed set to zero, so that they stay their own. */
static void contain(job *j, const norm *after) {
    const model *m = j->m;
    PIECES(&j->at, r, j->rows) {
        float *x = row_of(j->x, r, m->dim), broken = 0;
        if (!m->shape.pre_norm) m->k->normalise(x, after->weight, after->bias, x, m->shape.dim);
        for (int i = 0; i < m->shape.dim; i++) broken += 0 * x[i];
        if (broken != 0) memset(x, 0, m->shape.dim * sizeof *x), m->readable[r] = 0; /* NaN is not 0 either */
    }
    pool_meet(&j->at);
}

static void read_work(void *argument, place at_phase) {
    job mine = *(job *)argument, *j = &mine;
    model *m = j->m;
    j->at = at_phase;
    const desk d = desk_of(m, at_phase.worker);
    place_source(j);
    for (int i = 0; i < m->shape.source_layers; i++) contain(j, run_layer(j, &d, &m->source_layers[i], i, 1, NULL));
    /* A token that cannot be read is NaN to whoever does; behind one, source layers make all tokens so. */
    PIECES(&j->at, at, j->count) {
        stream *s = j->streams[at];
        for (int r = j->first[at]; r < j->first[at] + j->counts[at]; r++) {
            if (m->shape.source_layers && !m->readable[r]) s->unreadable = 1;
            if (s->unreadable || !m->readable[r])
                for (int i = 0; i < m->shape.dim; i++) row_of(j->x, r, m->dim)[i] = NAN;
        }
    }
    pool_meet(&j->at);
    input in = prepare(j, NULL, j->x, m->dim, m->shape.dim, 0, j->rows);
    multiply(j, &m->memory, &in, &(output){.how = STORE, .to = m->products, .stride = m->wide});
    PIECES(&j->at, i, j->count * m->shape.layers) {
        const int at = i / m->shape.layers, index = i % m->shape.layers;
        const stream *s = j->streams[at];
        for (int r = 0; r < j->counts[at]; r++)
            for (int head = 0; head < s->heads; head++) {
                const float *k = row_of(m->products, j->first[at] + r, m->wide) + 2 * m->inner * index + head * s->width;
                put(m->k, s, &s->cross, index, head, s->source + r, k, k + m->inner);
            }
    }
    pool_meet(&j->at);
}

/* Check a call whole before anything of it is done, and find room for it; 0 or an error. */
static int admit(job *j, int is_source, int32_t *first) {
    model *m = j->m;
    int64_t total = 0;
    int wrong = j->count < 1 || j->count > MOST_ROWS, marked = 0;
    for (int i = 0; i < j->count && !wrong; i++, marked++) {
        stream *s = j->streams[i];
        const int most = is_source ? m->shape.max_source - s->source : m->shape.max_rows - s->rows;
        wrong = s->marked || j->counts[i] < 1 || j->counts[i] > most || (total += j->counts[i]) > MOST_ROWS;
        if (!is_source) wrong = wrong || j->horizons[i] < 0 || j->horizons[i] > s->source;
        if (wrong) break;
        s->marked = 1;
    }
    for (int i = 0; i < marked; i++) j->streams[i]->marked = 0;
    for (int64_t r = 0; r < total && !wrong && !is_source; r++) wrong = j->ids[r] < 0 || j->ids[r] >= m->shape.vocab_size;
    if (wrong) return BAD_CALL;
    j->rows = (int)total;
    const int own = pool_threads(m->threads); /* a row each thread may have to itself */
    if (!make_room(m, j->rows > own ? j->rows : own)) return NO_MEMORY;
    for (int i = 0, row = 0; i < j->count; i++) {
        stream *s = j->streams[i];
        const int grown = is_source ? grow(s, &s->cross, s->source + j->counts[i]) && grow(s, &s->context, s->source + j->counts[i])
                                    : grow(s, &s->text, s->rows + j->counts[i]);
        if (!grown) return NO_MEMORY;
        first[i] = row, first[j->count + i] = i, first[2 * j->count + i] = 1;
        for (int r = 0; r < j->counts[i]; r++) m->stream_of[row++] = i;
    }
    return DONE;
}

static int run(job *j, int is_source) {
    int32_t *first = calloc(j->count > 0 ? 3 * (size_t)j->count : 1, sizeof *first);
    if (!first) return NO_MEMORY;
    j->first = first;
    pthread_mutex_lock(&j->m->turn);
    const int error = admit(j, is_source, first);
    if (!error) {
        j->x = j->m->x, j->y = j->m->y;
        pool_run(j->m->threads, is_source ? read_work : rows_work, j);
        for (int i = 0; i < j->count; i++) *(is_source ? &j->streams[i]->source : &j->streams[i]->rows) += j->counts[i];
    }
    pthread_mutex_unlock(&j->m->turn);
    free(first);
    return error;
}

int zendaya_read(model *m, int count, stream *const *streams, const int32_t *tokens, const float *source) {
    job j = {.m = m, .count = count, .streams = streams, .counts = tokens, .source = source};
    return run(&j, 1);
}

int zendaya_rows(
    model *m, int count, stream *const *streams, const int32_t *rows, const int32_t *ids, const int32_t *horizons, float *logits, float *gaze) {
    job j = {.m = m, .count = count, .streams = streams, .counts = rows, .ids = ids, .horizons = horizons, .logits = logits,
             .gaze = count == 1 ? gaze : NULL};
    return run(&j, 0);
}
