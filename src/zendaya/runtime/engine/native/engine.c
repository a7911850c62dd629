/* The calls `zd_read` and `zd_rows`: a batch of rows of many streams, computed by all threads of the pool together. */

#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_FEATURE 1e12f /* as in nn/decoder.py */

typedef struct {
    zd_model *m;
    int count, rows;
    zd_stream *const *streams;
    const int32_t *counts, *ids, *horizons;
    const float *source;
    float *logits, *last, *const *attention_weights;
    const int32_t *first; /* the first row of each stream; then 0, 1, … and 1, 1, …: `first` and `counts` of one row per stream */
    float *x, *y;         /* the rows, and the output of the next block: a late thread may still read the rows before */
    zd_worker worker;     /* each thread has its own copy of the batch */
} batch;

static float *row_at(float *rows, int r, size_t stride) { return rows + (size_t)r * stride; }

/* Row `n` of a packed matrix. */
static void unpack(const zd_matrix *x, int n, float *to) {
    const size_t panel = n / ZD_PANEL, lane = n % ZD_PANEL;
    for (int k = 0; k < x->inputs; k++)
        to[k] = x->f32 ? x->f32[(panel * x->inputs + k) * ZD_PANEL + lane]
                       : (x->u8[((panel * x->groups + k / 4) * ZD_PANEL + lane) * 4 + k % 4] - 128) * x->scale[n];
}

static void gemm_input_row(const zd_model *m, const zd_norm *n, const float *x, float *y, int width, const zd_gemm_in *in, int r) {
    if (n) m->k->layer_norm(x, n->weight, n->bias, y, width);
    if (m->int8) m->k->quantise(y, width, zd_round_up(width, 4), in->i8 + r * m->input_stride, in->scale + r, in->zero + r, in->sum + r);
}

/* Rows as the input of a GEMM: normalised if a norm is given (in place with `keep`), and quantised in int8. A single row is prepared by
   each thread for itself, which saves a barrier; it is then not kept in place, and a residual reads it from the input. */
static zd_gemm_in gemm_input(batch *b, const zd_norm *n, float *x, size_t stride, int width, int keep, int rows) {
    const zd_model *m = b->m;
    const int own = rows == 1 ? b->worker.id : 0, copied = n && (!keep || rows == 1);
    float *y = copied ? row_at(m->normed, own, m->input_stride) : x;
    const size_t stride_y = copied ? m->input_stride : stride;
    zd_gemm_in in = {
        .rows = rows,
        .stride = stride_y,
        .f32 = y,
        .stride_i8 = m->input_stride,
        .i8 = m->bytes + own * m->input_stride,
        .scale = m->scale + own,
        .zero = m->zero + own,
        .sum = m->sum + own};
    if (!n && !m->int8) return in;
    if (rows == 1) {
        gemm_input_row(m, n, x, y, width, &in, 0);
        return in;
    }
    ZD_TASKS(&b->worker, r, rows) gemm_input_row(m, n, row_at(x, r, stride), row_at(y, r, stride_y), width, &in, r);
    zd_pool_barrier(&b->worker);
    return in;
}

static void gemm(batch *b, const zd_matrix *x, const zd_gemm_in *in, const zd_gemm_out *out) {
    const int threads = zd_pool_threads(b->m->pool), unit = in->rows == 1 ? 8 : 2;
    int size = threads == 1 ? x->panels : x->panels / (4 * threads) / unit * unit;
    if (size < unit) size = unit;
    ZD_TASKS(&b->worker, i, (x->panels + size - 1) / size) {
        const int first = i * size, last = first + size < x->panels ? first + size : x->panels;
        b->m->k->gemm(x, in, out, first, last, first + threads * size); /* the other threads take the panels between */
    }
    zd_pool_barrier(&b->worker);
}

/* Scratch memory of one thread, for the attention of at most ZD_QUERIES queries. */
typedef struct {
    float *scores, *q, *y;
} scratch;

static scratch scratch_of(const zd_model *m, int worker) {
    float *own = m->scratch + worker * zd_scratch_size(m);
    return (scratch){own, own + ZD_QUERIES * 2 * m->score_stride, own + ZD_QUERIES * (2 * m->score_stride + m->padded_head_dim)};
}

/* A task of attention: heads `first` … `last` - 1 of the stream at index `at`; fewer heads per task where there are few streams. */
typedef struct {
    int size, groups, at, first, last;
} head_range;

static head_range head_range_of(const batch *b, int task) {
    const int heads = b->m->shape.heads, size = b->count * heads / (16 * zd_pool_threads(b->m->pool));
    head_range h = {.size = size < 1 ? 1 : size < heads ? size : heads};
    h.groups = (heads + h.size - 1) / h.size, h.at = task / h.groups, h.first = task % h.groups * h.size;
    h.last = h.first + h.size < heads ? h.first + h.size : heads;
    return h;
}

/* The keys to prefetch: those of the task's next head; after its last head, those of the task that this thread will probably claim next, if
   the other threads claim those between. */
static const void *next_keys(const batch *b, const zd_kv_cache *(*of)(const zd_stream *), int layer, int task, int head) {
    const head_range now = head_range_of(b, task), then = head_range_of(b, task + zd_pool_threads(b->m->pool));
    const int at = head + 1 < now.last ? now.at : then.at;
    return at < b->count ? zd_kv_keys(b->streams[at], of(b->streams[at]), layer, head + 1 < now.last ? head + 1 : then.first) : NULL;
}

static const zd_kv_cache *self_kv_of(const zd_stream *s) { return &s->self_kv; }
static const zd_kv_cache *cross_kv_of(const zd_stream *s) { return &s->cross_kv; }
static const zd_kv_cache *source_kv_of(const zd_stream *s) { return &s->source_kv; }

/* Attention of one head, at most `most` rows at once: row i reads `length` + i · `length_step` positions. */
static void attention(
    batch *b, const scratch *d, const zd_stream *s, const zd_kv_cache *kv, int layer, int head, int row, int rows, int length,
    int length_step, int most, const void *next) {
    const zd_model *m = b->m;
    const int width = m->shape.head_dim;
    const float scale = 1.0f / sqrtf((float)width);
    const zd_kv_view view = zd_kv_view_of(s, kv, layer, head);
    for (int done = 0, now; done < rows; done += now) {
        now = rows - done >= most ? most : 1;
        for (int i = 0; i < now; i++) {
            const float *q = row_at(m->projected, row + done + i, m->projected_stride) + head * width;
            for (int n = 0; n < width; n++) d->q[i * m->padded_head_dim + n] = q[n] * scale;
        }
        m->k->attention(
            d->q, m->padded_head_dim, now, &view, next, length + done * length_step, length_step, width, d->scores, m->score_stride, d->y,
            m->padded_head_dim);
        for (int i = 0; i < now; i++)
            memcpy(
                row_at(m->attended, row + done + i, m->input_stride) + head * width, d->y + i * m->padded_head_dim, width * sizeof *d->y);
    }
}

/* Self-attention: each head first stores the new keys and values. `start` is the number of rows before the call. The last layer computes
   only the last row of each stream. */
static void self_attention(batch *b, const scratch *d, int layer, int is_source, int is_last) {
    const zd_model *m = b->m;
    const zd_kv_cache *(*of)(const zd_stream *) = is_source ? source_kv_of : self_kv_of;
    ZD_TASKS(&b->worker, i, b->count * head_range_of(b, 0).groups) {
        const head_range mine = head_range_of(b, i);
        const zd_stream *s = b->streams[mine.at];
        const int first = b->first[mine.at], start = is_source ? s->source : s->rows;
        for (int head = mine.first; head < mine.last; head++) {
            const void *next = next_keys(b, of, layer, i, head);
            for (int r = 0; r < b->counts[mine.at]; r++) {
                const float *k = row_at(m->projected, first + r, m->projected_stride) + m->inner + head * m->shape.head_dim;
                zd_kv_put(m->k, s, of(s), layer, head, start + r, k, k + m->inner);
            }
            const int skip = is_last ? b->counts[mine.at] - 1 : 0;
            attention(b, d, s, of(s), layer, head, first + skip, b->counts[mine.at] - skip, start + skip + 1, 1, ZD_QUERIES, next);
        }
    }
    zd_pool_barrier(&b->worker);
}

/* Cross-attention over exactly the first `horizon` source tokens. */
static void cross_attention(batch *b, const scratch *d, int layer) {
    const zd_model *m = b->m;
    const int width = m->shape.head_dim;
    ZD_TASKS(&b->worker, i, b->count * head_range_of(b, 0).groups) {
        const head_range mine = head_range_of(b, i);
        const zd_stream *s = b->streams[mine.at];
        const int first = b->first[mine.at], horizon = b->horizons[mine.at];
        float *weights = b->attention_weights ? b->attention_weights[mine.at] : NULL;
        for (int head = mine.first; head < mine.last; head++) {
            const void *next = next_keys(b, cross_kv_of, layer, i, head);
            if (horizon) attention(b, d, s, &s->cross_kv, layer, head, first, b->counts[mine.at], horizon, 0, weights ? 1 : ZD_QUERIES, next);
            for (int row = first; !horizon && row < first + b->counts[mine.at]; row++)
                memset(row_at(m->attended, row, m->input_stride) + head * width, 0, width * sizeof(float));
            if (weights)
                memcpy(weights + ((size_t)layer * m->shape.heads + head) * horizon, d->scores, horizon * sizeof(float));
        }
    }
    zd_pool_barrier(&b->worker);
}

/* Residual and norm around a block: x + f(norm(x)) with pre-norm, norm(x + f(x)) with post-norm. `before` is the norm of the previous block,
   which post-norm applies at the start of the next. The residual is x, or with post-norm the normalised input. */
static zd_gemm_in block_input(batch *b, const zd_norm *own, const zd_norm *before) {
    const zd_model *m = b->m;
    const int pre = m->shape.pre_norm;
    return gemm_input(b, pre ? own : before, b->x, m->dim, m->shape.dim, !pre, b->rows);
}

static void block_output(
    batch *b, const zd_matrix *x, const zd_gemm_in *in, const zd_gemm_in *entered, const zd_norm *before, const uint8_t *skip) {
    const zd_model *m = b->m;
    zd_gemm_out out = {.epilogue = ZD_ADD, .to = b->y, .stride = m->dim, .from = b->x, .from_stride = m->dim, .skip = skip};
    if (before && !m->shape.pre_norm) out.from = entered->f32, out.from_stride = entered->stride;
    gemm(b, x, in, &out);
    b->y = b->x, b->x = out.to;
}

/* Keeps only the last row of each stream, moved to row `at`. One task in order: each target was the place of a row already moved. */
static void keep_last_rows(batch *b) {
    const zd_model *m = b->m;
    ZD_TASKS(&b->worker, i, 1)
        for (int at = 0; at < b->count; at++) {
            const int row = b->first[at] + b->counts[at] - 1;
            memmove(row_at(b->x, at, m->dim), row_at(b->x, row, m->dim), m->dim * sizeof(float));
            memmove(row_at(m->attended, at, m->input_stride), row_at(m->attended, row, m->input_stride), m->input_stride * sizeof(float));
            m->skip[at] = b->horizons[at] == 0;
        }
    zd_pool_barrier(&b->worker);
    b->first = b->first + b->count, b->counts = b->first + b->count, b->rows = b->count;
}

/* One layer on all rows of the batch. Takes and returns the norm that post-norm has still to apply. */
static const zd_norm *run_layer(batch *b, const scratch *d, const zd_layer *l, int index, int is_source, const zd_norm *before) {
    const zd_model *m = b->m;
    const zd_gemm_out projected = {.epilogue = ZD_STORE, .to = m->projected, .stride = m->projected_stride};
    zd_gemm_in entered = block_input(b, &l->self.norm, before), in = entered;
    gemm(b, &l->self.in, &in, &projected);
    const int is_last = !is_source && index == m->shape.layers - 1;
    self_attention(b, d, index, is_source, is_last);
    if (is_last && b->rows > b->count) keep_last_rows(b);
    in = gemm_input(b, NULL, m->attended, m->input_stride, m->inner, 0, b->rows);
    block_output(b, &l->self.out, &in, &entered, before, NULL);
    before = &l->self.norm;
    if (!is_source) {
        in = entered = block_input(b, &l->cross.norm, before);
        gemm(b, &l->cross.in, &in, &projected);
        cross_attention(b, d, index);
        in = gemm_input(b, NULL, m->attended, m->input_stride, m->inner, 0, b->rows);
        block_output(b, &l->cross.out, &in, &entered, before, m->skip);
        before = &l->cross.norm;
    }
    in = entered = block_input(b, &l->norm, before);
    gemm(b, &l->up, &in, &(zd_gemm_out){.epilogue = m->shape.relu ? ZD_RELU : ZD_GELU, .to = m->projected, .stride = m->projected_stride});
    in = gemm_input(b, NULL, m->projected, m->projected_stride, m->shape.ffn_dim, 0, b->rows);
    block_output(b, &l->down, &in, &entered, before, NULL);
    return &l->norm;
}

/* The logits of the first row of each stream. */
static void compute_logits(batch *b) {
    const zd_model *m = b->m;
    zd_gemm_in in = gemm_input(b, &m->final_norm, b->x, m->dim, m->shape.dim, 0, b->count);
    gemm(b, &m->embeddings, &in, &(zd_gemm_out){.epilogue = ZD_STORE, .to = b->logits, .stride = m->shape.vocab_size});
}

static void run_rows(void *argument, zd_worker worker) {
    batch mine = *(batch *)argument, *b = &mine;
    zd_model *m = b->m;
    b->worker = worker;
    const scratch d = scratch_of(m, worker.id);
    const int dim = m->shape.dim;
    ZD_TASKS(&b->worker, r, b->rows) {
        const int at = m->stream_of_row[r], position = b->streams[at]->rows + r - b->first[at];
        float *x = row_at(b->x, r, m->dim);
        unpack(&m->embeddings, b->ids[r], x);
        for (int i = 0; m->smoothing && i < dim; i++) x[i] /= m->smoothing[i];
        for (int i = 0; i < dim; i++) x[i] += m->positions[(size_t)position * dim + i];
        m->skip[r] = b->horizons[at] == 0;
    }
    zd_pool_barrier(&b->worker);
    const zd_norm *before = NULL;
    for (int i = 0; i < m->shape.layers; i++) before = run_layer(b, &d, &m->layers[i], i, 0, before);
    /* The last layer kept only the last row of each stream. */
    if (b->last) {
        ZD_TASKS(&b->worker, at, b->count) memcpy(row_at(b->last, at, dim), row_at(b->x, at, m->dim), dim * sizeof(float));
        return;
    }
    compute_logits(b);
}

static void run_logits(void *argument, zd_worker worker) {
    batch mine = *(batch *)argument, *b = &mine;
    const int dim = b->m->shape.dim;
    b->worker = worker;
    ZD_TASKS(&b->worker, at, b->count) memcpy(row_at(b->x, at, b->m->dim), row_at(b->last, at, dim), dim * sizeof(float));
    zd_pool_barrier(&b->worker);
    compute_logits(b);
}

/* Projects source tokens to the model's width and adds positions. Unreadable tokens become zeros. */
static void embed_source_tokens(batch *b) {
    zd_model *m = b->m;
    const int dim = m->shape.dim, features = m->shape.source_dim;
    ZD_TASKS(&b->worker, r, b->rows) {
        const float *from = b->source + (size_t)r * features;
        int readable = 1;
        for (int i = 0; i < features; i++) readable &= fabsf(from[i]) < LARGEST_FEATURE; /* false for NaN */
        if (m->shape.source_vocab)
            readable = readable && from[0] >= 0 && from[0] < (float)m->shape.source_vocab && from[0] == floorf(from[0]);
        m->readable[r] = (uint8_t)readable;
        float *to = row_at(m->shape.embed_source ? m->attended : b->x, r, m->shape.embed_source ? m->input_stride : m->dim);
        if (m->shape.source_vocab) unpack(&m->source_embeddings, readable ? (int)from[0] : 0, row_at(b->x, r, m->dim));
        else if (readable) memcpy(to, from, features * sizeof *to);
        else memset(to, 0, features * sizeof *to);
    }
    zd_pool_barrier(&b->worker);
    if (!m->shape.embed_source) return;
    if (!m->shape.source_vocab) {
        zd_gemm_in in = gemm_input(b, NULL, m->attended, m->input_stride, features, 0, b->rows);
        gemm(b, &m->source_projection, &in, &(zd_gemm_out){.epilogue = ZD_STORE, .to = b->x, .stride = m->dim});
    }
    ZD_TASKS(&b->worker, r, b->rows) {
        const int at = m->stream_of_row[r];
        const float *position = m->source_positions + (size_t)(b->streams[at]->source + r - b->first[at]) * dim;
        for (int i = 0; i < dim; i++) row_at(b->x, r, m->dim)[i] += position[i];
    }
    zd_pool_barrier(&b->worker);
}

/* After a source layer: applies the norm of post-norm, and sets overflowed rows to zero, so that they do not reach other rows. */
static void drop_overflowed_rows(batch *b, const zd_norm *after) {
    const zd_model *m = b->m;
    ZD_TASKS(&b->worker, r, b->rows) {
        float *x = row_at(b->x, r, m->dim), broken = 0;
        if (!m->shape.pre_norm) m->k->layer_norm(x, after->weight, after->bias, x, m->shape.dim);
        for (int i = 0; i < m->shape.dim; i++) broken += 0 * x[i];
        if (broken != 0) memset(x, 0, m->shape.dim * sizeof *x), m->readable[r] = 0; /* true for NaN too */
    }
    zd_pool_barrier(&b->worker);
}

static void run_read(void *argument, zd_worker worker) {
    batch mine = *(batch *)argument, *b = &mine;
    zd_model *m = b->m;
    b->worker = worker;
    const scratch d = scratch_of(m, worker.id);
    embed_source_tokens(b);
    for (int i = 0; i < m->shape.source_layers; i++) drop_overflowed_rows(b, run_layer(b, &d, &m->source_layers[i], i, 1, NULL));
    /* An unreadable token becomes NaN for each row that reads it. With source layers, so do all tokens after it. */
    ZD_TASKS(&b->worker, at, b->count) {
        zd_stream *s = b->streams[at];
        for (int r = b->first[at]; r < b->first[at] + b->counts[at]; r++) {
            if (m->shape.source_layers && !m->readable[r]) s->unreadable = 1;
            if (s->unreadable || !m->readable[r])
                for (int i = 0; i < m->shape.dim; i++) row_at(b->x, r, m->dim)[i] = NAN;
        }
    }
    zd_pool_barrier(&b->worker);
    zd_gemm_in in = gemm_input(b, NULL, b->x, m->dim, m->shape.dim, 0, b->rows);
    gemm(b, &m->cross_kv, &in, &(zd_gemm_out){.epilogue = ZD_STORE, .to = m->projected, .stride = m->projected_stride});
    ZD_TASKS(&b->worker, i, b->count * m->shape.layers) {
        const int at = i / m->shape.layers, index = i % m->shape.layers;
        const zd_stream *s = b->streams[at];
        for (int r = 0; r < b->counts[at]; r++)
            for (int head = 0; head < s->heads; head++) {
                const float *k = row_at(m->projected, b->first[at] + r, m->projected_stride) + 2 * m->inner * index + head * s->head_dim;
                zd_kv_put(m->k, s, &s->cross_kv, index, head, s->source + r, k, k + m->inner);
            }
    }
    zd_pool_barrier(&b->worker);
}

/* Checks a call whole, before it has any effect. */
static int check_call(batch *b, int is_source) {
    const zd_model *m = b->m;
    int64_t total = 0;
    int error = ZD_OK, marked = 0;
    for (; marked < b->count && !error; marked += !error) {
        zd_stream *s = b->streams[marked];
        if (!s || s->model != m || s->in_call) {
            error = s ? ZD_BAD_STREAM : ZD_BAD_ARGUMENT;
            break;
        }
        const int count = b->counts[marked], space = is_source ? m->shape.max_source - s->source : m->shape.max_rows - s->rows;
        if (count < 1 || count > space || (total += count) > ZD_MAX_CALL_ROWS) error = ZD_BAD_COUNT;
        else if (!is_source && (b->horizons[marked] < 0 || b->horizons[marked] > s->source)) error = ZD_BAD_HORIZON;
        else s->in_call = 1;
    }
    for (int i = 0; i < marked; i++) b->streams[i]->in_call = 0;
    for (int64_t r = 0; r < total && !error && !is_source; r++)
        if (b->ids[r] < 0 || b->ids[r] >= m->shape.vocab_size) error = ZD_BAD_TOKEN;
    b->rows = (int)total;
    return error;
}

/* Reserves the memory of a checked call, and fills `first`. */
static int reserve(batch *b, int is_source, int32_t *first) {
    zd_model *m = b->m;
    const int threads = zd_pool_threads(m->pool); /* each may need a row of its own */
    if (!zd_model_reserve(m, b->rows > threads ? b->rows : threads)) return ZD_NO_MEMORY;
    for (int i = 0, row = 0; i < b->count; i++) {
        zd_stream *s = b->streams[i];
        const int needed = (is_source ? s->source : s->rows) + b->counts[i];
        const int reserved = is_source ? zd_kv_reserve(s, &s->cross_kv, needed) && zd_kv_reserve(s, &s->source_kv, needed)
                                       : zd_kv_reserve(s, &s->self_kv, needed);
        if (!reserved) return ZD_NO_MEMORY;
        first[i] = row, first[b->count + i] = i, first[2 * b->count + i] = 1;
        for (int r = 0; r < b->counts[i]; r++) m->stream_of_row[row++] = i;
    }
    b->first = first;
    return ZD_OK;
}

static int run_call(batch *b, int is_source) {
    if (!b->m || !b->streams || !b->counts || b->count < 1 || b->count > ZD_MAX_CALL_ROWS) return ZD_BAD_ARGUMENT;
    int32_t *first = calloc(3 * (size_t)b->count, sizeof *first);
    if (!first) return ZD_NO_MEMORY;
    pthread_mutex_lock(&b->m->lock);
    int error = check_call(b, is_source);
    if (!error) error = reserve(b, is_source, first);
    if (!error) {
        b->x = b->m->x, b->y = b->m->y;
        if (zd_pool_run(b->m->pool, is_source ? run_read : run_rows, b)) error = ZD_INTERNAL;
    }
    for (int i = 0; i < b->count && !error; i++) *(is_source ? &b->streams[i]->source : &b->streams[i]->rows) += b->counts[i];
    pthread_mutex_unlock(&b->m->lock);
    free(first);
    return error;
}

int zd_read(zd_model *m, int count, zd_stream *const *streams, const int32_t *counts, const float *source) {
    if (!source) return ZD_BAD_ARGUMENT;
    batch b = {.m = m, .count = count, .streams = streams, .counts = counts, .source = source};
    return run_call(&b, 1);
}

int zd_rows(
    zd_model *m, int count, zd_stream *const *streams, const int32_t *counts, const int32_t *ids, const int32_t *horizons, float *logits,
    float *const *attention_weights, float *last) {
    if (!ids || !horizons || (!logits && !last)) return ZD_BAD_ARGUMENT;
    batch b = {
        .m = m,
        .count = count,
        .streams = streams,
        .counts = counts,
        .ids = ids,
        .horizons = horizons,
        .logits = logits,
        .last = last,
        .attention_weights = attention_weights};
    return run_call(&b, 0);
}

int zd_logits(zd_model *m, int count, const float *last, float *logits) {
    if (!m || !last || !logits || count < 1 || count > ZD_MAX_CALL_ROWS) return ZD_BAD_ARGUMENT;
    pthread_mutex_lock(&m->lock);
    const int threads = zd_pool_threads(m->pool);
    int error = zd_model_reserve(m, count > threads ? count : threads) ? ZD_OK : ZD_NO_MEMORY;
    batch b = {.m = m, .count = count, .rows = count, .last = (float *)last, .logits = logits, .x = m->x, .y = m->y};
    if (!error && zd_pool_run(m->pool, run_logits, &b)) error = ZD_INTERNAL;
    pthread_mutex_unlock(&m->lock);
    return error;
}
