/* Zeroed memory on large pages: the data of a step lies on few pages, so the processor rarely has to look up an address. Thread-safe. */

#ifndef ZENDAYA_MEMORY_H
#define ZENDAYA_MEMORY_H

#include <stddef.h>

void *zd_alloc(size_t size); /* zeros, aligned to 64 bytes; NULL without memory */
void zd_free(void *p);

#endif
