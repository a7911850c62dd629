/* Models: weights packed for the kernels, and the buffers of a call. */

#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

enum { PHASES = 16 /* per layer, and around the layers */, MAX_TOKENS = 1 << 22, MAX_LAYERS = 1 << 10 /* as in nn/config.py */ };

static void *model_alloc(zd_model *m, size_t size) {
    void **allocations = realloc(m->allocations, (m->num_allocations + 1) * sizeof *allocations);
    if (!allocations) return NULL;
    m->allocations = allocations;
    if (!(allocations[m->num_allocations] = zd_alloc(size))) return NULL;
    return allocations[m->num_allocations++];
}

/* Weights: taken one by one in the order of the weight list, and packed. */

typedef struct {
    zd_model *m;
    const zd_tensor *tensors;
    int count, at;
    int error; /* the first one, after which nothing more is read */
} weight_reader;

static void fail(weight_reader *r, int error) {
    if (!r->error) r->error = error;
}

static void *reader_alloc(weight_reader *r, size_t size) {
    void *p = r->error ? NULL : model_alloc(r->m, size);
    if (!p) fail(r, ZD_NO_MEMORY);
    return p;
}

/* Takes the next tensor. The end of its name in the list states what it is, and `size` how much of it will be read. */
static const float *read_tensor(weight_reader *r, const char *name_end, int64_t size) {
    if (r->error) return NULL;
    const zd_tensor *t = r->tensors + r->at;
    const size_t length = r->at < r->count ? strlen(t->name) : 0, end = strlen(name_end);
    if (length < end || strcmp(t->name + length - end, name_end) || t->size != size) {
        fail(r, ZD_INTERNAL);
        return NULL;
    }
    r->at++;
    return t->data;
}

static float *read_copy(weight_reader *r, const char *name_end, int64_t size) {
    const float *from = read_tensor(r, name_end, size);
    float *to = reader_alloc(r, zd_round_up(size, ZD_PANEL) * sizeof *to);
    if (to) memcpy(to, from, size * sizeof *to);
    return to;
}

static zd_norm read_norm(weight_reader *r) {
    zd_norm n;
    n.weight = read_copy(r, "norm.weight", r->m->shape.dim);
    n.bias = read_copy(r, "norm.bias", r->m->shape.dim);
    return n;
}

static void new_matrix(weight_reader *r, zd_matrix *x, int outputs, int inputs) {
    *x = (zd_matrix){.outputs = outputs, .inputs = inputs, .panels = (outputs + ZD_PANEL - 1) / ZD_PANEL, .groups = (inputs + 3) / 4};
    const size_t rows = (size_t)x->panels * ZD_PANEL;
    x->bias = reader_alloc(r, rows * sizeof(float));
    if (r->m->int8) {
        x->scale = reader_alloc(r, rows * sizeof(float)), x->total = reader_alloc(r, rows * sizeof(float));
        if ((x->u8 = reader_alloc(r, rows * x->groups * 4))) memset(x->u8, 128, rows * x->groups * 4);
    } else {
        x->f32 = reader_alloc(r, rows * inputs * sizeof(float));
    }
}

/* Packs the rows of a linear layer into a matrix, from output `first` on. `bias` may be NULL. In int8, column k is first multiplied by
   `by[k]`, unless `by` is NULL. */
static void pack(weight_reader *r, zd_matrix *x, int first, int outputs, const float *weight, const float *bias, const float *by) {
    if (r->error) return;
    for (int o = 0; o < outputs; o++) {
        const float *row = weight + (size_t)o * x->inputs;
        const int n = first + o, panel = n / ZD_PANEL, lane = n % ZD_PANEL;
        if (bias) x->bias[n] = bias[o];
        if (x->f32) {
            for (int k = 0; k < x->inputs; k++) x->f32[((size_t)panel * x->inputs + k) * ZD_PANEL + lane] = row[k];
            continue;
        }
        float top = 0, broken = 0;
        for (int k = 0; k < x->inputs; k++) top = fmaxf(top, fabsf(by ? row[k] * by[k] : row[k])), broken += 0 * row[k];
        x->scale[n] = top / 127 + broken;
        if (broken != 0 || top < 1e-30f) continue;
        for (int k = 0; k < x->inputs; k++) {
            const int byte = (int)lrintf((by ? row[k] * by[k] : row[k]) * (127 / top));
            x->u8[(((size_t)panel * x->groups + k / 4) * ZD_PANEL + lane) * 4 + k % 4] = (uint8_t)(byte + 128), x->total[n] += (float)byte;
        }
    }
}

static void read_linear(weight_reader *r, const char *weight_name, const char *bias_name, zd_matrix *x, int outputs, int inputs) {
    new_matrix(r, x, outputs, inputs);
    const float *weight = read_tensor(r, weight_name, (int64_t)outputs * inputs), *bias = read_tensor(r, bias_name, outputs);
    pack(r, x, 0, outputs, weight, bias, NULL);
}

/* SmoothQuant factors (Xiao et al. 2023) for matrices that multiply the same activations; NULL in float32. In trained models a few weight
   columns and a few activations are much larger than the rest, and one scale for all would leave the rest only a few int8 steps. Column k
   is multiplied by the factor and activation k divided by it, which shares the difference. The size of an activation is estimated from
   the weight and bias of the norm before it, so no data is needed. */
static float *smooth(weight_reader *r, const zd_norm *n, int count, const float *const *weights, const int *outputs) {
    const int dim = r->m->shape.dim;
    float *by = r->m->int8 ? reader_alloc(r, r->m->dim * sizeof *by) : NULL;
    if (!by) return NULL;
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

/* Divides the output of a norm by the smoothing factors. */
static void divide_norm(zd_norm *n, const float *by, int dim) {
    for (int k = 0; by && k < dim; k++) n->weight[k] /= by[k], n->bias[k] /= by[k];
}

/* Reads the norm before some matrices and smooths it into them. Not with post-norm, where the norm's output is also the residual. */
static const float *read_smoothed_norm(weight_reader *r, zd_norm *n, int count, const float *const *weights, const int *outputs) {
    *n = read_norm(r);
    const float *by = r->m->shape.pre_norm && !r->error ? smooth(r, n, count, weights, outputs) : NULL;
    divide_norm(n, by, r->m->shape.dim);
    return by;
}

/* Reads an attention block. `cross` is the layer of a cross-attention, whose key and value projections go to the model's `cross_kv`; -1 for
   self-attention. */
static void read_attention(weight_reader *r, zd_attention *a, int cross) {
    zd_model *m = r->m;
    const int inner = m->inner, dim = m->shape.dim;
    const int64_t size = (int64_t)inner * dim;
    const float *q = read_tensor(r, "query.weight", size), *q_bias = read_tensor(r, "query.bias", inner);
    const float *k = read_tensor(r, "key.weight", size);
    const float *v = read_tensor(r, "value.weight", size), *v_bias = read_tensor(r, "value.bias", inner);
    read_linear(r, "out.weight", "out.bias", &a->out, dim, inner);
    const float *by =
        read_smoothed_norm(r, &a->norm, cross < 0 ? 3 : 1, (const float *const[]){q, k, v}, (const int[]){inner, inner, inner});
    new_matrix(r, &a->in, cross < 0 ? 3 * inner : inner, dim);
    pack(r, &a->in, 0, inner, q, q_bias, by);
    zd_matrix *kv = cross < 0 ? &a->in : &m->cross_kv;
    const int first = cross < 0 ? inner : 2 * inner * cross;
    pack(r, kv, first, inner, k, NULL, cross < 0 ? by : NULL);
    pack(r, kv, first + inner, inner, v, v_bias, cross < 0 ? by : NULL);
}

static void read_layer(weight_reader *r, zd_layer *l, int cross) {
    const zd_shape *s = &r->m->shape;
    read_attention(r, &l->self, -1);
    if (cross >= 0) read_attention(r, &l->cross, cross);
    const float *up = read_tensor(r, "up.weight", (int64_t)s->ffn_dim * s->dim), *up_bias = read_tensor(r, "up.bias", s->ffn_dim);
    read_linear(r, "down.weight", "down.bias", &l->down, s->dim, s->ffn_dim);
    const float *by = read_smoothed_norm(r, &l->norm, 1, &up, &s->ffn_dim);
    new_matrix(r, &l->up, s->ffn_dim, s->dim);
    pack(r, &l->up, 0, s->ffn_dim, up, up_bias, by);
}

/* The token embeddings, which are also the output matrix of the logits. A lookup divides by the smoothing factors again. */
static void read_embeddings(weight_reader *r) {
    zd_model *m = r->m;
    const int vocab = m->shape.vocab_size, dim = m->shape.dim;
    const float *weight = read_tensor(r, "tokens.weight", (int64_t)vocab * dim);
    new_matrix(r, &m->embeddings, vocab, dim);
    m->smoothing = smooth(r, NULL, 1, &weight, &vocab);
    pack(r, &m->embeddings, 0, vocab, weight, NULL, m->smoothing);
}

/* The norm before the logits: its own with pre-norm, a copy of the last layer's with post-norm. */
static void read_final_norm(weight_reader *r) {
    zd_model *m = r->m;
    const size_t size = m->dim * sizeof(float);
    if (m->shape.pre_norm) m->final_norm = read_norm(r);
    else m->final_norm = (zd_norm){reader_alloc(r, size), reader_alloc(r, size)};
    if (r->error) return;
    const zd_norm *from = &m->layers[m->shape.layers - 1].norm;
    if (!m->shape.pre_norm) memcpy(m->final_norm.weight, from->weight, size), memcpy(m->final_norm.bias, from->bias, size);
    divide_norm(&m->final_norm, m->smoothing, m->shape.dim);
}

static void read_weights(weight_reader *r) {
    zd_model *m = r->m;
    const zd_shape *s = &m->shape;
    read_embeddings(r);
    m->positions = read_copy(r, "positions.weight", (int64_t)s->max_rows * s->dim);
    if (s->source_vocab) {
        new_matrix(r, &m->source_embeddings, s->source_vocab, s->dim);
        const float *weight = read_tensor(r, "source_tokens.weight", (int64_t)s->source_vocab * s->dim);
        pack(r, &m->source_embeddings, 0, s->source_vocab, weight, NULL, NULL);
    } else if (s->embed_source) {
        read_linear(r, "source_projection.weight", "source_projection.bias", &m->source_projection, s->dim, s->source_dim);
    }
    if (s->embed_source) m->source_positions = read_copy(r, "source_positions.weight", (int64_t)s->max_source * s->dim);
    m->layers = reader_alloc(r, s->layers * sizeof(zd_layer));
    m->source_layers = reader_alloc(r, s->source_layers * sizeof(zd_layer));
    for (int i = 0; i < s->source_layers && !r->error; i++) read_layer(r, &m->source_layers[i], -1);
    new_matrix(r, &m->cross_kv, 2 * m->inner * s->layers, s->dim);
    for (int i = 0; i < s->layers && !r->error; i++) read_layer(r, &m->layers[i], i);
    read_final_norm(r);
    if (r->at != r->count) fail(r, ZD_INTERNAL);
}

static int is_supported(const zd_kernels *k) {
#if defined(__x86_64__)
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (k == &zd_kernels_avx2) return avx2;
    if (k == &zd_kernels_avx512) return avx512;
    if (k == &zd_kernels_vnni) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return k == &zd_kernels_portable;
}

static const zd_kernels *supported_kernels(int index) {
    static const zd_kernels *const all[] = {
#if defined(__x86_64__)
        &zd_kernels_vnni,
        &zd_kernels_avx512,
        &zd_kernels_avx2,
#endif
        &zd_kernels_portable,
    };
    for (size_t i = 0; index >= 0 && i < sizeof all / sizeof *all; i++)
        if (is_supported(all[i]) && index-- == 0) return all[i];
    return NULL;
}

int zd_abi(void) { return ZD_ABI; }

const char *zd_kernel_name(int i) {
    const zd_kernels *k = supported_kernels(i);
    return k ? k->name : NULL;
}

const char *zd_error_text(int code) {
    switch (code) {
        case ZD_OK: return "no error";
        case ZD_NO_MEMORY: return "no memory, or no thread, for this call";
        case ZD_BAD_ARGUMENT: return "an argument is NULL or out of range";
        case ZD_BAD_SHAPE:
            return "a size of the decoder is out of range (a matrix has at most 65536 inputs), or two sizes do not fit together";
        case ZD_BAD_WEIGHTS: return "the weights differ from the engine's weight list in name, order, size or number";
        case ZD_BAD_KERNELS: return "this processor cannot run these kernels";
        case ZD_BAD_STREAM: return "a stream was given twice, or belongs to another model";
        case ZD_BAD_COUNT: return "a stream has no rows or tokens in the call, or more than it, or the call, can take";
        case ZD_BAD_HORIZON: return "a horizon lies beyond the source tokens of its stream";
        case ZD_BAD_TOKEN: return "a token id lies outside the vocabulary";
        case ZD_INTERNAL: return "internal error of the native engine";
        default: return "unknown error code";
    }
}

static int within(int64_t low, int64_t n, int64_t high) { return low <= n && n <= high; }

static int check_shape(const zd_shape *s) {
    const int64_t inner = (int64_t)s->heads * s->head_dim;
    const int sizes = within(1, s->vocab_size, MAX_TOKENS) && within(1, s->max_source, MAX_TOKENS) && within(1, s->max_rows, MAX_TOKENS) &&
                      within(0, s->source_vocab, MAX_TOKENS) && within(1, s->source_dim, ZD_MAX_INPUTS) &&
                      within(1, s->dim, ZD_MAX_INPUTS) && within(1, s->ffn_dim, ZD_MAX_INPUTS) && within(1, s->heads, ZD_MAX_INPUTS) &&
                      within(1, s->head_dim, ZD_MAX_INPUTS) && within(1, inner, ZD_MAX_INPUTS) && within(1, s->layers, MAX_LAYERS) &&
                      within(0, s->source_layers, MAX_LAYERS);
    const int source = s->source_vocab ? s->embed_source && s->source_dim == 1 : s->embed_source || s->source_dim == s->dim;
    return sizes && source ? ZD_OK : ZD_BAD_SHAPE;
}

/* Compares the caller's tensors with the weight list. */
static int check_weights(const zd_shape *shape, const zd_tensor *tensors, int count) {
    if (count != zd_num_weights(shape)) return ZD_BAD_WEIGHTS;
    for (int i = 0; i < count; i++) {
        zd_weight w;
        if (zd_weight_at(shape, i, &w)) return ZD_INTERNAL;
        if (!tensors[i].name || !tensors[i].data || strcmp(tensors[i].name, w.name)) return ZD_BAD_WEIGHTS;
        if (tensors[i].size != w.rows * (w.columns ? w.columns : 1)) return ZD_BAD_WEIGHTS;
    }
    return ZD_OK;
}

static int larger(int a, int b) { return a > b ? a : b; }

static int build_model(zd_model *m, const zd_tensor *tensors, int count, int threads) {
    const zd_shape *s = &m->shape;
    weight_reader r = {.m = m, .tensors = tensors, .count = count};
    read_weights(&r);
    if (r.error) return r.error;
    m->projected_stride = zd_round_up(larger(larger(3 * m->inner, s->ffn_dim), m->cross_kv.outputs), ZD_PANEL);
    m->input_stride = zd_round_up(larger(larger(s->dim, m->inner), larger(s->ffn_dim, s->source_dim)), ZD_CACHE_LINE);
    m->score_stride = zd_round_up(larger(s->max_rows, s->max_source), ZD_PANEL);
    m->scratch = model_alloc(m, threads * zd_scratch_size(m) * sizeof(float));
    m->pool = zd_pool_new(threads, PHASES * (1 + s->layers + s->source_layers));
    return m->scratch && m->pool ? ZD_OK : ZD_NO_MEMORY;
}

int zd_model_new(const zd_shape *shape, const zd_tensor *tensors, int count, int int8, int threads, const char *kernels, zd_model **model) {
    if (!shape || !tensors || !model || !within(1, threads, ZD_MAX_THREADS)) return ZD_BAD_ARGUMENT;
    const zd_kernels *k = NULL;
    for (int i = 0; !k && supported_kernels(i); i++)
        if (!kernels || !strcmp(supported_kernels(i)->name, kernels)) k = supported_kernels(i);
    int error = k ? check_shape(shape) : ZD_BAD_KERNELS;
    if (!error) error = check_weights(shape, tensors, count);
    if (error) return error;
    zd_model *m = calloc(1, sizeof *m);
    if (!m) return ZD_NO_MEMORY;
    m->shape = *shape, m->k = k, m->int8 = int8, m->inner = shape->heads * shape->head_dim;
    m->dim = zd_round_up(shape->dim, ZD_PANEL), m->padded_head_dim = zd_round_up(shape->head_dim, ZD_PANEL);
    pthread_mutex_init(&m->lock, NULL);
    if ((error = build_model(m, tensors, count, threads))) {
        zd_model_free(m);
        return error;
    }
    *model = m;
    return ZD_OK;
}

static void free_buffers(zd_model *m) {
    void *all[] = {
        m->x, m->y, m->normed, m->projected, m->attended, m->scale, m->zero, m->bytes, m->sum, m->stream_of_row, m->skip, m->readable,
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) zd_free(all[i]);
    m->x = m->y = m->normed = m->projected = m->attended = m->scale = m->zero = NULL;
    m->bytes = NULL, m->sum = m->stream_of_row = NULL, m->skip = m->readable = NULL;
    m->buffer_rows = 0;
}

void zd_model_free(zd_model *m) {
    if (!m) return;
    zd_pool_free(m->pool);
    free_buffers(m);
    for (int i = 0; i < m->num_allocations; i++) zd_free(m->allocations[i]);
    free(m->allocations);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

int zd_model_reserve(zd_model *m, int rows) {
    if (rows <= m->buffer_rows) return 1;
    free_buffers(m);
    const size_t n = zd_round_up(rows, ZD_PANEL);
    m->x = zd_alloc(n * m->dim * sizeof(float)), m->y = zd_alloc(n * m->dim * sizeof(float));
    m->normed = zd_alloc(n * m->input_stride * sizeof(float));
    m->projected = zd_alloc(n * m->projected_stride * sizeof(float)), m->attended = zd_alloc(n * m->input_stride * sizeof(float));
    m->scale = zd_alloc(n * sizeof(float)), m->zero = zd_alloc(n * sizeof(float)), m->sum = zd_alloc(n * sizeof(int32_t));
    m->bytes = zd_alloc(n * m->input_stride);
    m->stream_of_row = zd_alloc(n * sizeof(int32_t)), m->skip = zd_alloc(n), m->readable = zd_alloc(n);
    m->buffer_rows = (int)n;
    const int some = m->x && m->y && m->normed && m->projected && m->attended && m->scale && m->zero;
    if (some && m->bytes && m->sum && m->stream_of_row && m->skip && m->readable) return 1;
    free_buffers(m);
    return 0;
}
