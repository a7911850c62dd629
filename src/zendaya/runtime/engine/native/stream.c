/* Streams: the KV caches of one text and its source. */

#include "model.h"

#include <stdlib.h>
#include <string.h>

#include "memory.h"

zd_kv_view zd_kv_view_of(const zd_stream *s, const zd_kv_cache *kv, int layer, int head) {
    const size_t at = ((size_t)layer * s->heads + head) * kv->capacity;
    zd_kv_view view = {.keys = zd_kv_keys(s, kv, layer, head), .values = zd_kv_values(s, kv, layer, head)};
    if (s->element_size == 1) view.key_scale = kv->key_scales + at, view.value_scale = kv->value_scales + at;
    return view;
}

static void kv_free(zd_kv_cache *kv) { zd_free(kv->keys), zd_free(kv->values), zd_free(kv->key_scales), zd_free(kv->value_scales); }

/* Copies one head's keys and values to a cache of at least the same capacity. */
static void kv_copy_head(const zd_stream *s, zd_kv_cache *to, const zd_kv_cache *from, int layer, int head) {
    const size_t at = (size_t)layer * s->heads + head, count = from->capacity;
    memcpy(zd_kv_keys(s, to, layer, head), zd_kv_keys(s, from, layer, head), count * s->head_dim * s->element_size);
    memcpy(zd_kv_values(s, to, layer, head), zd_kv_values(s, from, layer, head), count * zd_padded_head_dim(s) * s->element_size);
    if (s->element_size > 1) return;
    memcpy(to->key_scales + at * to->capacity, from->key_scales + at * count, count * sizeof(float));
    memcpy(to->value_scales + at * to->capacity, from->value_scales + at * count, count * sizeof(float));
}

/* The capacity doubles when it is reached, so memory follows the number of positions. */
int zd_kv_reserve(zd_stream *s, zd_kv_cache *kv, int needed) {
    if (needed <= kv->capacity || !kv->layers) return 1;
    int capacity = 2 * kv->capacity > needed ? 2 * kv->capacity : needed;
    if (capacity > kv->max_positions) capacity = kv->max_positions;
    zd_kv_cache new = {.layers = kv->layers, .capacity = (int)zd_round_up(capacity, 2 * ZD_PANEL), .max_positions = kv->max_positions};
    const size_t positions = (size_t)kv->layers * s->heads * new.capacity;
    new.keys = zd_alloc(positions * s->head_dim * s->element_size),
    new.values = zd_alloc(positions * zd_padded_head_dim(s) * s->element_size);
    if (s->element_size == 1) new.key_scales = zd_alloc(positions * sizeof(float)), new.value_scales = zd_alloc(positions * sizeof(float));
    if (!new.keys || !new.values || (s->element_size == 1 && (!new.key_scales || !new.value_scales))) {
        kv_free(&new);
        return 0;
    }
    for (int l = 0; kv->capacity && l < kv->layers; l++)
        for (int h = 0; h < s->heads; h++) kv_copy_head(s, &new, kv, l, h);
    kv_free(kv);
    *kv = new;
    return 1;
}

void zd_kv_put(
    const zd_kernels *k, const zd_stream *s, const zd_kv_cache *kv, int layer, int head, int position, const float *key,
    const float *value) {
    const size_t panel = (size_t)(position / ZD_PANEL) * s->head_dim * ZD_PANEL + position % ZD_PANEL,
                 row = position * zd_padded_head_dim(s);
    if (s->element_size == 1) {
        const size_t at = ((size_t)layer * s->heads + head) * kv->capacity + position;
        int8_t *keys = (int8_t *)zd_kv_keys(s, kv, layer, head) + panel, *values = (int8_t *)zd_kv_values(s, kv, layer, head) + row;
        k->quantise_kv(key, value, s->head_dim, keys, values, kv->key_scales + at, kv->value_scales + at);
    } else {
        float *keys = (float *)zd_kv_keys(s, kv, layer, head) + panel, *values = (float *)zd_kv_values(s, kv, layer, head) + row;
        for (int d = 0; d < s->head_dim; d++) keys[d * ZD_PANEL] = key[d];
        memcpy(values, value, s->head_dim * sizeof *value);
    }
}

zd_stream *zd_stream_new(zd_model *m) {
    zd_stream *s = m ? calloc(1, sizeof *s) : NULL;
    if (!s) return NULL;
    s->model = m;
    s->heads = m->shape.heads, s->head_dim = m->shape.head_dim, s->element_size = m->int8 ? 1 : 4;
    s->self_kv = (zd_kv_cache){.layers = m->shape.layers, .max_positions = m->shape.max_rows};
    s->cross_kv = (zd_kv_cache){.layers = m->shape.layers, .max_positions = m->shape.max_source};
    s->source_kv = (zd_kv_cache){.layers = m->shape.source_layers, .max_positions = m->shape.max_source};
    return s;
}

void zd_stream_free(zd_stream *s) {
    if (!s) return;
    zd_kv_cache *all[] = {&s->self_kv, &s->cross_kv, &s->source_kv};
    for (int i = 0; i < 3; i++) kv_free(all[i]);
    free(s);
}

static int copy_caches(zd_stream *to, const zd_stream *from) {
    const zd_kv_cache *sources[] = {&from->self_kv, &from->cross_kv, &from->source_kv};
    zd_kv_cache *targets[] = {&to->self_kv, &to->cross_kv, &to->source_kv};
    for (int i = 0; i < 3; i++) {
        if (!zd_kv_reserve(to, targets[i], sources[i]->capacity)) return 0;
        for (int l = 0; sources[i]->capacity && l < sources[i]->layers; l++)
            for (int h = 0; h < from->heads; h++) kv_copy_head(from, targets[i], sources[i], l, h);
    }
    to->rows = from->rows;
    to->source = from->source;
    to->unreadable = from->unreadable;
    return 1;
}

zd_stream *zd_stream_clone(zd_stream *s) {
    zd_stream *copy = s ? zd_stream_new(s->model) : NULL;
    if (!copy) return NULL;
    pthread_mutex_lock(&s->model->lock);
    const int copied = copy_caches(copy, s);
    pthread_mutex_unlock(&s->model->lock);
    if (copied) return copy;
    zd_stream_free(copy);
    return NULL;
}

int zd_stream_num_rows(const zd_stream *s) { return s ? s->rows : ZD_BAD_ARGUMENT; }
int zd_stream_num_source(const zd_stream *s) { return s ? s->source : ZD_BAD_ARGUMENT; }

int64_t zd_stream_num_bytes(const zd_stream *s) {
    if (!s) return ZD_BAD_ARGUMENT;
    int64_t positions = 0;
    const zd_kv_cache *all[] = {&s->self_kv, &s->cross_kv, &s->source_kv};
    pthread_mutex_lock(&s->model->lock);
    for (int i = 0; i < 3; i++) positions += (int64_t)all[i]->layers * all[i]->capacity;
    pthread_mutex_unlock(&s->model->lock);
    const size_t scales = s->element_size == 1 ? 2 * sizeof(float) : 0;
    return positions * s->heads * (int64_t)((s->head_dim + zd_padded_head_dim(s)) * s->element_size + scales);
}

int zd_stream_truncate(zd_stream *s, int rows) {
    if (!s) return ZD_BAD_ARGUMENT;
    pthread_mutex_lock(&s->model->lock);
    const int fits = rows >= 0 && rows <= s->rows;
    if (fits) s->rows = rows;
    pthread_mutex_unlock(&s->model->lock);
    return fits ? ZD_OK : ZD_BAD_COUNT;
}

int zd_stream_clear_source(zd_stream *s) {
    if (!s) return ZD_BAD_ARGUMENT;
    pthread_mutex_lock(&s->model->lock);
    s->source = s->unreadable = 0;
    pthread_mutex_unlock(&s->model->lock);
    return ZD_OK;
}

int zd_stream_keep_source(zd_stream *s, int count) {
    if (!s || count < 0) return ZD_BAD_ARGUMENT;
    pthread_mutex_lock(&s->model->lock);
    if (count < s->source) {
        s->source = s->unreadable ? 0 : count;
        s->unreadable = 0;
    }
    pthread_mutex_unlock(&s->model->lock);
    return ZD_OK;
}

int zd_stream_reset(zd_stream *s) { /* without the lock: no other call uses the stream */
    if (!s) return ZD_BAD_ARGUMENT;
    s->rows = s->source = s->unreadable = 0;
    return ZD_OK;
}
