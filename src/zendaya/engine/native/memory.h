/* Memory on large pages, cleared: what a step reads lies in few of them, and the processor finds its addresses without looking them up. */

#ifndef ZENDAYA_MEMORY_H
#define ZENDAYA_MEMORY_H

#include <stddef.h>

void *memory_new(size_t size); /* zeros, at a multiple of 64 bytes; NULL: there is none */
void memory_free(void *p);

#endif
