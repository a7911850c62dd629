/* The weight list: name and shape of each tensor of a decoder, in the order of `zd_model_new`. No other place states the order.

   The names are those of the PyTorch decoder. Python asks for the list and sends its tensors by name; `zd_model_new` compares the names
   and sizes it gets, and model.c names each tensor that it takes. */

#include <stdio.h>
#include <string.h>

#include "engine.h"

typedef enum { NONE, DIM, INNER, FFN_DIM, VOCAB, MAX_ROWS, MAX_SOURCE, SOURCE_DIM, SOURCE_VOCAB } size_name;
typedef enum { ALWAYS, SOURCE_IDS, SOURCE_FEATURES, EMBED_SOURCE, PRE_NORM } condition;

typedef struct {
    const char *name;
    size_name rows, columns;
    condition when;
} entry;

#define VECTOR(name, rows) {name, rows, NONE, ALWAYS}
#define MATRIX(name, rows, columns) {name, rows, columns, ALWAYS}
#define LINEAR(name, outputs, inputs) MATRIX(name ".weight", outputs, inputs), VECTOR(name ".bias", outputs)
#define NORM(name) VECTOR(name ".weight", DIM), VECTOR(name ".bias", DIM)
#define ATTENTION(name, norm)                                                                                    \
    LINEAR(name ".query", INNER, DIM), MATRIX(name ".key.weight", INNER, DIM), LINEAR(name ".value", INNER, DIM), \
        LINEAR(name ".out", DIM, INNER), NORM(norm ".norm")
#define FEED_FORWARD \
    LINEAR("feed_forward.up", FFN_DIM, DIM), LINEAR("feed_forward.down", DIM, FFN_DIM), NORM("around_feed_forward.norm")

static const entry EMBEDDINGS[] = {
    MATRIX("tokens.weight", VOCAB, DIM),
    MATRIX("positions.weight", MAX_ROWS, DIM),
    {"source_tokens.weight", SOURCE_VOCAB, DIM, SOURCE_IDS},
    {"source_projection.weight", DIM, SOURCE_DIM, SOURCE_FEATURES},
    {"source_projection.bias", DIM, NONE, SOURCE_FEATURES},
    {"source_positions.weight", MAX_SOURCE, DIM, EMBED_SOURCE},
};
static const entry SOURCE_LAYER[] = {ATTENTION("attention", "around_attention"), FEED_FORWARD};
static const entry LAYER[] = {ATTENTION("self_attention", "around_self"), ATTENTION("cross_attention", "around_cross"), FEED_FORWARD};
static const entry FINAL_NORM[] = {{"norm.weight", DIM, NONE, PRE_NORM}, {"norm.bias", DIM, NONE, PRE_NORM}};

static int64_t size_of(const zd_shape *s, size_name name) {
    switch (name) {
        case DIM: return s->dim;
        case INNER: return (int64_t)s->heads * s->head_dim;
        case FFN_DIM: return s->ffn_dim;
        case VOCAB: return s->vocab_size;
        case MAX_ROWS: return s->max_rows;
        case MAX_SOURCE: return s->max_source;
        case SOURCE_DIM: return s->source_dim;
        case SOURCE_VOCAB: return s->source_vocab;
        default: return 0;
    }
}

static int holds(const zd_shape *s, condition when) {
    switch (when) {
        case SOURCE_IDS: return s->source_vocab > 0;
        case SOURCE_FEATURES: return s->embed_source && !s->source_vocab;
        case EMBED_SOURCE: return s->embed_source;
        case PRE_NORM: return s->pre_norm;
        default: return 1;
    }
}

/* Entry `i` of a group that is repeated per layer; where the group is shorter, `i` is reduced by its length. */
static int find(const zd_shape *s, const char *layers, int repeats, const entry *entries, int count, int *i, zd_weight *weight) {
    for (int layer = 0; layer < repeats; layer++)
        for (int e = 0; e < count; e++) {
            if (!holds(s, entries[e].when) || (*i)-- > 0) continue;
            char prefix[32] = "";
            if (layers) snprintf(prefix, sizeof prefix, "%s.%d.", layers, layer);
            snprintf(weight->name, sizeof weight->name, "%s%s", prefix, entries[e].name);
            weight->rows = size_of(s, entries[e].rows), weight->columns = size_of(s, entries[e].columns);
            return 1;
        }
    return 0;
}

#define LENGTH(entries) ((int)(sizeof(entries) / sizeof *(entries)))

int zd_weight_at(const zd_shape *shape, int i, zd_weight *weight) {
    if (!shape || !weight || i < 0) return ZD_BAD_ARGUMENT;
    const int found = find(shape, NULL, 1, EMBEDDINGS, LENGTH(EMBEDDINGS), &i, weight) ||
                      find(shape, "source_layers", shape->source_layers, SOURCE_LAYER, LENGTH(SOURCE_LAYER), &i, weight) ||
                      find(shape, "layers", shape->layers, LAYER, LENGTH(LAYER), &i, weight) ||
                      find(shape, NULL, 1, FINAL_NORM, LENGTH(FINAL_NORM), &i, weight);
    return found ? ZD_OK : ZD_BAD_ARGUMENT;
}

int zd_num_weights(const zd_shape *shape) {
    if (!shape) return ZD_BAD_ARGUMENT;
    int count = LENGTH(SOURCE_LAYER) * shape->source_layers + LENGTH(LAYER) * shape->layers;
    for (int e = 0; e < LENGTH(EMBEDDINGS); e++) count += holds(shape, EMBEDDINGS[e].when);
    for (int e = 0; e < LENGTH(FINAL_NORM); e++) count += holds(shape, FINAL_NORM[e].when);
    return count;
}
