/* A thread pool that runs one job at a time, phase by phase. All threads run the same function. In each phase they claim tasks, and go on
   when all tasks are complete. A thread that the system runs late is not waited for: it finds the earlier phases complete and joins at
   the current one. */

#ifndef ZENDAYA_POOL_H
#define ZENDAYA_POOL_H

typedef struct zd_pool zd_pool;

/* One thread's position in a job. */
typedef struct {
    zd_pool *pool;
    int id, phase, tasks;
} zd_worker;

zd_pool *zd_pool_new(int threads, int max_phases); /* NULL without memory or threads */
void zd_pool_free(zd_pool *p);
int zd_pool_threads(const zd_pool *p);
/* Runs a job on the calling thread and the pool's; one job at a time. 0, or -1 if the job had more than `max_phases` phases: the phases
   beyond are not run. */
int zd_pool_run(zd_pool *p, void (*work)(void *job, zd_worker worker), void *job);

int zd_pool_claim(zd_worker *w, int tasks); /* the next task of this phase, from 0; -1 if all are claimed */
void zd_pool_complete(const zd_worker *w);  /* the claimed task is done */
void zd_pool_barrier(zd_worker *w);         /* waits until all tasks of this phase are complete, then begins the next phase */

/* Loops over the tasks 0 … n - 1 of a phase that this thread claims. A barrier follows. */
#define ZD_TASKS(worker, i, n) for (int i; (i = zd_pool_claim(worker, n)) >= 0; zd_pool_complete(worker))

#endif
