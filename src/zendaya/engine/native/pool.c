#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { SPINS = 300, YIELDS = 200 }; /* a few microseconds of spinning; then yields, and between jobs after those a sleep */

struct pool {
    int threads, started, active; /* active: threads of the job under way */
    pid_t process;                /* after a fork the others are gone, and jobs run on the caller alone */
    pthread_t *members;
    pthread_mutex_t turn, sleep;
    pthread_cond_t wake;
    atomic_int jobs, sleepers, stop;
    void (*work)(void *, int);
    void *job;
    atomic_int piece, arrived, phase;
};

typedef struct { pool *p; int worker; } member;

static void relax(int turn) {
    if (turn >= SPINS) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

static void *serve(void *argument) {
    member me = *(member *)argument;
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
        p->work(p->job, me.worker);
        pool_meet(p);
    }
}

pool *pool_new(int threads) {
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->threads = p->active = threads, p->process = getpid();
    p->members = calloc((size_t)threads, sizeof *p->members);
    pthread_mutex_init(&p->turn, NULL), pthread_mutex_init(&p->sleep, NULL), pthread_cond_init(&p->wake, NULL);
    for (p->started = 1; p->members && p->started < threads; p->started++) {
        member *m = malloc(sizeof *m);
        if (!m) break;
        *m = (member){p, p->started};
        if (pthread_create(&p->members[p->started], NULL, serve, m)) {
            free(m);
            break;
        }
    }
    if (p->members && p->started == threads) return p;
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
    free(p->members);
    free(p);
}

int pool_threads(const pool *p) { return p->threads; }

void pool_run(pool *p, void (*work)(void *, int), void *job) {
    pthread_mutex_lock(&p->turn);
    p->active = p->process == getpid() ? p->threads : 1;
    p->work = work, p->job = job;
    atomic_store(&p->piece, 0);
    if (p->active > 1) announce(p);
    work(job, 0);
    pool_meet(p);
    pthread_mutex_unlock(&p->turn);
}

int pool_piece(pool *p) { return atomic_fetch_add_explicit(&p->piece, 1, memory_order_relaxed); }

void pool_meet(pool *p) {
    const int phase = atomic_load_explicit(&p->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) + 1 == p->active) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&p->piece, 0, memory_order_relaxed);
        atomic_store_explicit(&p->phase, (phase + 1) & 0xffff, memory_order_release);
        return;
    }
    for (int turn = 0; atomic_load_explicit(&p->phase, memory_order_acquire) == phase; turn += turn < SPINS) relax(turn);
}
