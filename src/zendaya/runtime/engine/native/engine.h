/* The native decoder. A model holds packed weights and threads; a stream holds the KV caches of one text and its source.

   Two calls do the work. `zd_read` projects source tokens, each once, into the cross-attention's keys and values. `zd_rows` writes text
   rows of many streams at once, each stream at its own row and horizon, and returns the logits of each stream's last row, or the last
   rows themselves, for which `zd_logits` computes logits. The results of a stream never depend on the other streams in the call.

   Threads
   - All functions may be called from any thread, and at the same time, with the exceptions below.
   - `zd_read`, `zd_rows`, `zd_stream_clone`, `zd_stream_truncate`, `zd_stream_clear_source`, `zd_stream_keep_source` and
     `zd_stream_num_bytes` take turns on one model: its lock lets one of them run at a time. Calls on different models run in parallel.
   - `zd_stream_num_rows` and `zd_stream_num_source` never wait. During a call on the stream they return the number from before or after
     the call.
   - `zd_stream_reset` and `zd_stream_free` need a stream that no other call uses.
   - `zd_model_free` needs a model that no other call uses, and whose streams have all been freed.
   - After fork, a child process may use a model if no call on it was running in the parent. Its calls then run on one thread.

   Memory
   - Arguments belong to the caller. The library reads and writes them only during the call, and copies the weights.
   - The caller frees each model and each stream exactly once. Returned strings are constants.

   Errors
   - A call is checked whole before it has any effect. A function that returns `int` returns ZD_OK (or a number ≥ 0), or an error code.
   - After an error, the streams hold the same rows and source tokens as before. */

#ifndef ZENDAYA_ENGINE_H
#define ZENDAYA_ENGINE_H

#include <stdint.h>

#define ZD_EXPORT __attribute__((visibility("default")))

/* Version of this interface. native_engine.py has the same number, and does not use a library with another one. */
enum { ZD_ABI = 6 };

enum {
    ZD_OK = 0,
    ZD_NO_MEMORY = -1,
    ZD_BAD_ARGUMENT = -2,
    ZD_BAD_SHAPE = -3,
    ZD_BAD_WEIGHTS = -4,
    ZD_BAD_KERNELS = -5,
    ZD_BAD_STREAM = -6,
    ZD_BAD_COUNT = -7,
    ZD_BAD_HORIZON = -8,
    ZD_BAD_TOKEN = -9,
    ZD_INTERNAL = -10,
};

enum {
    ZD_MAX_CALL_ROWS = 1 << 16,
    ZD_MAX_INPUTS = 1 << 16, /* of a matrix: the int8 sums still fit in 32 bits */
    ZD_MAX_THREADS = 256,
    ZD_NAME_SIZE = 96,
};

typedef struct zd_model zd_model;
typedef struct zd_stream zd_stream;

/* The sizes of a decoder, as in DecoderConfig. */
typedef struct {
    int32_t vocab_size, source_dim, max_source, max_rows, dim, layers, heads, head_dim, ffn_dim;
    int32_t relu, pre_norm, embed_source, source_vocab, source_layers;
} zd_shape;

/* One entry of the weight list: [rows][columns], or a vector of `rows` where `columns` is 0. */
typedef struct {
    char name[ZD_NAME_SIZE];
    int64_t rows, columns;
} zd_weight;

/* A tensor that the caller passes: its name in the weight list, and its values. */
typedef struct {
    const char *name;
    const float *data;
    int64_t size;
} zd_tensor;

ZD_EXPORT int zd_abi(void);

/* One sentence about an error code. */
ZD_EXPORT const char *zd_error_text(int code);

/* Name of the i-th kernel set that this processor can run, best first: "vnni", "avx512", "avx2", "portable". NULL after the last. */
ZD_EXPORT const char *zd_kernel_name(int i);

/* Number of weights of a decoder, and the i-th of them, in the order that `zd_model_new` takes. weights.c holds the list. */
ZD_EXPORT int zd_num_weights(const zd_shape *shape);
ZD_EXPORT int zd_weight_at(const zd_shape *shape, int i, zd_weight *weight);

/* Makes a model from all weights of the list, in order. `kernels` is a name, or NULL for the best. */
ZD_EXPORT int zd_model_new(
    const zd_shape *shape, const zd_tensor *tensors, int count, int int8, int threads, const char *kernels, zd_model **model);
ZD_EXPORT void zd_model_free(zd_model *m);

/* A new stream or a copy of one; NULL without memory. */
ZD_EXPORT zd_stream *zd_stream_new(zd_model *m);
ZD_EXPORT zd_stream *zd_stream_clone(zd_stream *s);
ZD_EXPORT void zd_stream_free(zd_stream *s);

ZD_EXPORT int zd_stream_num_rows(const zd_stream *s);
ZD_EXPORT int zd_stream_num_source(const zd_stream *s);
ZD_EXPORT int64_t zd_stream_num_bytes(const zd_stream *s); /* of the KV caches */

/* Keep the first `rows` text rows; forget the source; forget both. The memory stays allocated. */
ZD_EXPORT int zd_stream_truncate(zd_stream *s, int rows);
ZD_EXPORT int zd_stream_clear_source(zd_stream *s);
ZD_EXPORT int zd_stream_reset(zd_stream *s);

/* Keep the first `count` source tokens, and all text rows; with source layers that have met an unreadable token, keep none. The next
   `zd_read` goes on after those kept, and gives the bits of a fresh read. More than there are changes nothing. */
ZD_EXPORT int zd_stream_keep_source(zd_stream *s, int count);

/* Reads counts[i] source tokens into stream i; `source` is [sum of counts][source_dim]. */
ZD_EXPORT int zd_read(zd_model *m, int count, zd_stream *const *streams, const int32_t *counts, const float *source);

/* Writes counts[i] rows of text to stream i, which read the first horizons[i] source tokens. `ids` is [sum of counts], `logits` is
   [count][vocab_size]. `attention_weights` is NULL, or one pointer per stream, NULL or to [layers][heads][horizon]: the cross-attention of
   its last row. With `last`, [count][dim], it gets the last rows of the last layer, and `logits` is not used. */
ZD_EXPORT int zd_rows(
    zd_model *m, int count, zd_stream *const *streams, const int32_t *counts, const int32_t *ids, const int32_t *horizons, float *logits,
    float *const *attention_weights, float *last);

/* The logits [count][vocab_size] of rows [count][dim] that `zd_rows` gave as `last`: the bits that it would have given. */
ZD_EXPORT int zd_logits(zd_model *m, int count, const float *last, float *logits);

#endif
