/* SPDX-License-Identifier: MIT
 *
 * progress.c - progress on a terminal, for work that takes over a second.
 */
#include "cli.h"
#include "parallel.h"

#include <stdio.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static struct {
    const char *what;
    bool terminal, shown;
    double started, updated;
} progress;

void progress_begin(const char *what)
{
    progress.what = what;
    progress.terminal = isatty(STDERR_FILENO);
    progress.shown = false;
    progress.started = progress.updated = seconds_now();
}

void progress_update(double fraction)
{
    if (!progress.terminal)
        return;
    double now = seconds_now();
    if (now - progress.started < 1 || now - progress.updated < 0.2)
        return;
    fputc('\r', stderr);
    print_name(stderr, progress.what);
    fprintf(stderr, ": %3.0f %%\033[K", 100 * fraction);
    progress.shown = true;
    progress.updated = now;
}

void progress_end(void)
{
    if (progress.shown)
        fprintf(stderr, "\r\033[K");
    progress.shown = false;
}

int progress_parallel_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg)
{
    const int threads = *(const int *)data;
    size_t done = 0;
    (void)threads; /* without OpenMP there is one */
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
#endif
    for (size_t i = 0; i < n; i++) {
#ifdef _OPENMP
        int thread = omp_get_thread_num();
#else
        int thread = 0;
#endif
        task(arg, i, (size_t)thread);
        size_t now = __atomic_add_fetch(&done, 1, __ATOMIC_RELAXED);
        if (thread == 0)
            progress_update((double)now / (double)n);
    }
    return 0;
}
