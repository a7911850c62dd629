/* Threads that do one job together, phase by phase. Each runs the same function, takes pieces of the phase as they come, and goes on
   once all pieces are done, by whomever: a thread that the machine has no time for is not waited for, and helps when it comes. */

#ifndef ZENDAYA_POOL_H
#define ZENDAYA_POOL_H

typedef struct pool pool;

/* A thread's place in a job. */
typedef struct {
    pool *p;
    int worker, phase, pieces;
} place;

pool *pool_new(int threads, int phases); /* at most so many phases in a job; NULL: no memory or no threads */
void pool_free(pool *p);
int pool_threads(const pool *p);
/* Run the job on the caller's thread and whichever of the others come. One job at a time. */
void pool_run(pool *p, void (*work)(void *job, place at), void *job);

int pool_claim(place *at, int pieces); /* the next piece of this phase, from 0; -1: all are taken */
void pool_done(const place *at);       /* the piece that was claimed */
void pool_meet(place *at);             /* wait for the pieces that others still have, and go on to the next phase */

/* The pieces 0 … n - 1 of a phase that fall to this thread; and then the next phase. */
#define PIECES(at, i, n) for (int i; (i = pool_claim(at, n)) >= 0; pool_done(at))

#endif
