/* SPDX-License-Identifier: MIT
 *
 * parallel.h - threads and time for the tool's own work (inputs, peaks); the library has its own threads. */
#ifndef MSA_CLI_PARALLEL_H
#define MSA_CLI_PARALLEL_H

#include <time.h>

/* Calls fn(arg, thread, threads) once in each of `threads` threads and waits for all. One after the other, and with the
 * same results, when the tool was built without OpenMP. */
static inline void parallel_run(int threads, void (*fn)(void *arg, int thread, int threads), void *arg)
{
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1)
#endif
    for (int thread = 0; thread < threads; thread++) {
        fn(arg, thread, threads);
    }
}

static inline double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
