/* The native decoder: a model holds packed weights and threads, a stream the keys and values of one text and its source.

   Two calls do the work. `zendaya_read` projects source tokens that have arrived, each once, into the keys and values of the
   cross-attention. `zendaya_rows` writes rows of text of many streams at once, each stream at its own row and reading its own horizon of
   its source, and gives the logits of each stream's last row. What a stream gets never depends on the others in the call. */

#ifndef ZENDAYA_ENGINE_H
#define ZENDAYA_ENGINE_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct model model;
typedef struct stream stream;

typedef struct {
    int32_t vocab_size, source_dim, max_source, max_rows, dim, layers, heads, head_dim, ffn_dim;
    int32_t relu, pre_norm, embed_source, source_vocab, source_layers;
} decoder_shape;

enum { DONE = 0, NO_MEMORY = -1, BAD_CALL = -2 };

/* Which version of these functions a library has; backend.py names the same number, and counts another as not built. */
enum { ABI = 2 };
EXPORT int zendaya_abi(void);

/* Kernels that this processor can run, best first: "vnni", "avx512", "avx2", "portable"; NULL past the last. */
EXPORT const char *zendaya_kernels(int place);

/* Weights in the order of decoder.py, `count` tensors of the given sizes; they are copied. NULL: no memory, or not the shape's weights. */
EXPORT model *zendaya_model_new(
    const decoder_shape *shape, const float *const *tensors, const int64_t *sizes, int count, int int8, int threads, const char *kernels);
EXPORT void zendaya_model_free(model *m);

EXPORT stream *zendaya_stream_new(const model *m);
EXPORT stream *zendaya_stream_clone(const model *m, const stream *s);
EXPORT void zendaya_stream_free(stream *s);
EXPORT int zendaya_stream_rows(const stream *s);
EXPORT int zendaya_stream_source(const stream *s);
EXPORT int64_t zendaya_stream_bytes(const model *m, const stream *s);
/* Keep the first `rows` rows of text; forget the source. The memory stays. */
EXPORT int zendaya_stream_keep(stream *s, int rows);
EXPORT void zendaya_stream_forget_source(stream *s);

EXPORT int zendaya_read(model *m, int count, stream *const *streams, const int32_t *tokens, const float *source);
/* `logits` is [count][vocab_size]. With one stream, `gaze` may be [layers][heads][horizon]: where the last row looked. */
EXPORT int zendaya_rows(
    model *m, int count, stream *const *streams, const int32_t *rows, const int32_t *ids, const int32_t *horizons, float *logits, float *gaze);

#endif
