/* Threads that do one job together: each runs the same function, takes pieces of a phase as they come, and meets the others after it.
   They spin a little and then yield, so that a busy machine slows them down and no more. */

#ifndef ZENDAYA_POOL_H
#define ZENDAYA_POOL_H

typedef struct pool pool;

pool *pool_new(int threads); /* NULL: no memory or no threads */
void pool_free(pool *p);
int pool_threads(const pool *p);
/* Run the job on every thread, the caller's among them; one job at a time, others wait their turn. */
void pool_run(pool *p, void (*work)(void *job, int worker), void *job);
/* Inside a job: the next piece of this phase, from 0; and the end of the phase, which all reach before any goes on. */
int pool_piece(pool *p);
void pool_meet(pool *p);

#endif
