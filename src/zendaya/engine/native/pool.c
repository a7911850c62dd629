#define _GNU_SOURCE
#include "pool.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { SPINS = 300, YIELDS = 200, CLOSED = 1 << 30 }; /* some microseconds of spinning; then yields; between jobs, after those, sleep */

typedef struct { atomic_int claimed, done; } phase_count;

struct pool {
    int threads, started, phases;
    pid_t process; /* after a fork the others are gone, and jobs run on the caller alone */
    pthread_t *members;
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    atomic_int jobs, sleepers, stop;
    atomic_int entered, left; /* of the job under way; CLOSED is added to `entered` when no one may come any more */
    void (*work)(void *, place);
    void *job;
    phase_count *counts;
};

typedef struct { pool *p; int worker; } member;

static void relax(int turn) {
    if (turn >= SPINS) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

static void *serve(void *argument) {
    const member me = *(member *)argument;
    pool *p = me.p;
    free(argument);
    for (int seen = 0;;) {
        for (int turn = 0; atomic_load(&p->jobs) == seen && turn < SPINS + YIELDS; turn++) relax(turn);
        if (atomic_load(&p->jobs) == seen) {
            pthread_mutex_lock(&p->sleep);
            atomic_fetch_add(&p->sleepers, 1);
            while (atomic_load(&p->jobs) == seen) pthread_cond_wait(&p->wake, &p->sleep);
            atomic_fetch_sub(&p->sleepers, 1);
            pthread_mutex_unlock(&p->sleep);
        }
        seen = atomic_load(&p->jobs);
        if (atomic_load(&p->stop)) return NULL;
        int entered = atomic_load(&p->entered);
        while (entered < CLOSED && !atomic_compare_exchange_weak(&p->entered, &entered, entered + 1)) {}
        if (entered >= CLOSED) continue;
        p->work(p->job, (place){.p = p, .worker = me.worker});
        atomic_fetch_add(&p->left, 1);
    }
}

pool *pool_new(int threads, int phases) {
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->threads = threads, p->phases = phases, p->process = getpid();
    p->members = calloc((size_t)threads, sizeof *p->members), p->counts = calloc((size_t)phases, sizeof *p->counts);
    atomic_store(&p->entered, CLOSED);
    pthread_mutex_init(&p->sleep, NULL), pthread_cond_init(&p->wake, NULL);
    for (p->started = 1; p->members && p->counts && p->started < threads; p->started++) {
        member *m = malloc(sizeof *m);
        if (!m) break;
        *m = (member){p, p->started};
        if (pthread_create(&p->members[p->started], NULL, serve, m)) {
            free(m);
            break;
        }
    }
    if (p->members && p->counts && p->started == threads) return p;
    pool_free(p);
    return NULL;
}

static void announce(pool *p) {
    pthread_mutex_lock(&p->sleep);
    atomic_fetch_add(&p->jobs, 1);
    if (atomic_load(&p->sleepers)) pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->sleep);
}

void pool_free(pool *p) {
    if (!p) return;
    if (p->process == getpid()) {
        atomic_store(&p->stop, 1);
        announce(p);
        for (int i = 1; i < p->started; i++) pthread_join(p->members[i], NULL);
    }
    free(p->members), free(p->counts);
    free(p);
}

int pool_threads(const pool *p) { return p->threads; }

void pool_run(pool *p, void (*work)(void *, place), void *job) {
    for (int i = 0; i < p->phases; i++) atomic_store(&p->counts[i].claimed, 0), atomic_store(&p->counts[i].done, 0);
    p->work = work, p->job = job;
    const int together = p->threads > 1 && p->process == getpid();
    if (together) {
        atomic_store(&p->left, 0);
        atomic_store(&p->entered, 0);
        announce(p);
    }
    work(job, (place){.p = p});
    if (!together) return;
    const int entered = atomic_fetch_add(&p->entered, CLOSED);
    for (int turn = 0; atomic_load(&p->left) < entered; turn += turn < SPINS) relax(turn);
}

int pool_claim(place *at, int pieces) {
    assert(at->phase < at->p->phases);
    at->pieces = pieces;
    atomic_int *claimed = &at->p->counts[at->phase].claimed;
    if (atomic_load_explicit(claimed, memory_order_relaxed) >= pieces) return -1;
    const int piece = atomic_fetch_add_explicit(claimed, 1, memory_order_relaxed);
    return piece < pieces ? piece : -1;
}

void pool_done(const place *at) { atomic_fetch_add_explicit(&at->p->counts[at->phase].done, 1, memory_order_acq_rel); }

void pool_meet(place *at) {
    atomic_int *done = &at->p->counts[at->phase].done;
    for (int turn = 0; atomic_load_explicit(done, memory_order_acquire) < at->pieces; turn += turn < SPINS) relax(turn);
    at->phase++;
}
