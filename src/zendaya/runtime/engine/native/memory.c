#define _GNU_SOURCE
#include "memory.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

/* Blocks of at least one unit share regions, by first fit. Smaller blocks come from malloc; under a sanitizer, all blocks do. */
enum { LINE = 64, UNIT = 1 << 16, UNITS = 512, HUGE_PAGE = 1 << 21 };

typedef struct region {
    struct region *next;
    char *start;
    size_t units, used;
    uint32_t *length; /* [units]: length of the block that begins at this unit; 0 elsewhere */
} region;

static region *regions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static region *region_new(size_t units) {
    region *r = calloc(1, sizeof *r);
    void *start = NULL;
    if (!r || !(r->length = calloc(units, sizeof *r->length)) || posix_memalign(&start, HUGE_PAGE, units * UNIT)) {
        if (r) free(r->length);
        free(r);
        return NULL;
    }
#if defined(__linux__)
    madvise(start, units * UNIT, MADV_HUGEPAGE);
#endif
    *r = (region){.next = regions, .start = start, .units = units, .length = r->length};
    return regions = r;
}

/* Index of the first run of `units` free units; the region's size if there is none. */
static size_t first_fit(const region *r, size_t units) {
    size_t first = 0;
    for (size_t at = 0; at < r->units && at - first < units;) {
        if (r->length[at]) first = at += r->length[at];
        else at++;
    }
    return first + units <= r->units ? first : r->units;
}

static char *block_new(size_t units) {
    region *r = regions;
    while (r && (r->units - r->used < units || first_fit(r, units) == r->units)) r = r->next;
    if (!r && !(r = region_new(units > UNITS ? (units + UNITS / 16 - 1) / (UNITS / 16) * (UNITS / 16) : UNITS))) return NULL;
    const size_t at = first_fit(r, units);
    r->length[at] = (uint32_t)units, r->used += units;
    return r->start + at * UNIT;
}

void *zd_alloc(size_t size) {
    void *p = NULL;
#if !defined(__SANITIZE_ADDRESS__)
    if (size >= UNIT) {
        pthread_mutex_lock(&lock);
        p = block_new((size + UNIT - 1) / UNIT);
        pthread_mutex_unlock(&lock);
        if (p) memset(p, 0, size);
        return p;
    }
#endif
    size = (size + LINE) / LINE * LINE;
    if (posix_memalign(&p, LINE, size)) return NULL;
    return memset(p, 0, size);
}

void zd_free(void *p) {
    pthread_mutex_lock(&lock);
    region **at = &regions;
    while (*at && ((char *)p < (*at)->start || (char *)p >= (*at)->start + (*at)->units * UNIT)) at = &(*at)->next;
    region *r = *at;
    if (r) {
        const size_t first = ((char *)p - r->start) / UNIT;
        r->used -= r->length[first], r->length[first] = 0;
        if (!r->used) *at = r->next, free(r->start), free(r->length), free(r);
    }
    pthread_mutex_unlock(&lock);
    if (!r) free(p);
}
