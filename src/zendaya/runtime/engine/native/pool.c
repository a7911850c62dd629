#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* An idle thread spins for some microseconds, then yields, then sleeps. */
enum { SPINS = 300, YIELDS = 200, CLOSED = 1 << 30 };

typedef struct { atomic_int claimed, complete; } phase_count;

struct zd_pool {
    int threads, started, max_phases;
    pid_t process; /* after a fork only the calling thread exists, and jobs run on it alone */
    pthread_t *members;
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    atomic_int jobs, sleepers, stop;
    atomic_int entered, left; /* threads in the current job; CLOSED is added to `entered` when no thread may join any more */
    atomic_int overflow;      /* the current job had more than `max_phases` phases */
    void (*work)(void *, zd_worker);
    void *job;
    phase_count *counts;
};

typedef struct { zd_pool *p; int id; } member;

static void relax(int spin) {
    if (spin >= SPINS) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

static void *run_thread(void *argument) {
    const member me = *(member *)argument;
    zd_pool *p = me.p;
    free(argument);
    for (int seen = 0;;) {
        for (int spin = 0; atomic_load(&p->jobs) == seen && spin < SPINS + YIELDS; spin++) relax(spin);
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
        p->work(p->job, (zd_worker){.pool = p, .id = me.id});
        atomic_fetch_add(&p->left, 1);
    }
}

zd_pool *zd_pool_new(int threads, int max_phases) {
    zd_pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->threads = threads, p->max_phases = max_phases, p->process = getpid();
    p->members = calloc((size_t)threads, sizeof *p->members), p->counts = calloc((size_t)max_phases, sizeof *p->counts);
    atomic_store(&p->entered, CLOSED);
    pthread_mutex_init(&p->sleep, NULL), pthread_cond_init(&p->wake, NULL);
    for (p->started = 1; p->members && p->counts && p->started < threads; p->started++) {
        member *m = malloc(sizeof *m);
        if (!m) break;
        *m = (member){p, p->started};
        if (pthread_create(&p->members[p->started], NULL, run_thread, m)) {
            free(m);
            break;
        }
    }
    if (p->members && p->counts && p->started == threads) return p;
    zd_pool_free(p);
    return NULL;
}

static void announce(zd_pool *p) {
    pthread_mutex_lock(&p->sleep);
    atomic_fetch_add(&p->jobs, 1);
    if (atomic_load(&p->sleepers)) pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->sleep);
}

void zd_pool_free(zd_pool *p) {
    if (!p) return;
    if (p->process == getpid()) {
        atomic_store(&p->stop, 1);
        announce(p);
        for (int i = 1; i < p->started; i++) pthread_join(p->members[i], NULL);
    }
    free(p->members), free(p->counts);
    free(p);
}

int zd_pool_threads(const zd_pool *p) { return p->threads; }

int zd_pool_run(zd_pool *p, void (*work)(void *, zd_worker), void *job) {
    for (int i = 0; i < p->max_phases; i++) atomic_store(&p->counts[i].claimed, 0), atomic_store(&p->counts[i].complete, 0);
    atomic_store(&p->overflow, 0);
    p->work = work, p->job = job;
    const int together = p->threads > 1 && p->process == getpid();
    if (together) {
        atomic_store(&p->left, 0);
        atomic_store(&p->entered, 0);
        announce(p);
    }
    work(job, (zd_worker){.pool = p});
    if (together) {
        const int entered = atomic_fetch_add(&p->entered, CLOSED);
        for (int spin = 0; atomic_load(&p->left) < entered; spin += spin < SPINS) relax(spin);
    }
    return atomic_load(&p->overflow) ? -1 : 0;
}

int zd_pool_claim(zd_worker *w, int tasks) {
    w->tasks = tasks;
    if (w->phase >= w->pool->max_phases) { /* every thread comes to the same phase, so none waits for these tasks */
        atomic_store(&w->pool->overflow, 1);
        return -1;
    }
    atomic_int *claimed = &w->pool->counts[w->phase].claimed;
    if (atomic_load_explicit(claimed, memory_order_relaxed) >= tasks) return -1;
    const int task = atomic_fetch_add_explicit(claimed, 1, memory_order_relaxed);
    return task < tasks ? task : -1;
}

void zd_pool_complete(const zd_worker *w) {
    atomic_fetch_add_explicit(&w->pool->counts[w->phase].complete, 1, memory_order_acq_rel);
}

void zd_pool_barrier(zd_worker *w) {
    if (w->phase >= w->pool->max_phases) return;
    atomic_int *complete = &w->pool->counts[w->phase].complete;
    for (int spin = 0; atomic_load_explicit(complete, memory_order_acquire) < w->tasks; spin += spin < SPINS) relax(spin);
    w->phase++;
}
