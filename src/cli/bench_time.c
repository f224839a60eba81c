/* SPDX-License-Identifier: MIT
 *
 * bench_time.c - times a subject and sets the result against the peaks of the machine.
 */
#include "bench.h"
#include "parallel.h"
#include "peak.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SAMPLES = 100000 };

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void sort_samples(double *samples, int count)
{
    qsort(samples, (size_t)count, sizeof(*samples), ascending);
}

double quantile(const double *sorted, int count, double fraction)
{
    double at = fraction * (count - 1);
    int below = (int)at, above = below + 1 < count ? below + 1 : below;
    return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
}

/* Samples in seconds into runs and totals. A tenth of the time, one call at least, warms up. */
static int take_samples(struct subject *subject, const struct bench_options *options, double *runs, double *totals,
                        int *count)
{
    double warm_up = options->run_once ? -1 : 0.1 * options->min_time, started = seconds_now();
    int rotation = 0;
    double run, total;
    for (; warm_up >= 0 && (rotation == 0 || seconds_now() - started < warm_up); rotation++) {
        if (subject->call(subject, rotation % subject->rotations, &run, &total) != CLI_OK)
            return CLI_BAD;
    }
    started = seconds_now();
    for (*count = 0; *count < MAX_SAMPLES; rotation++, (*count)++) {
        double elapsed = seconds_now() - started;
        if (*count >= options->min_samples && elapsed >= options->min_time)
            break;
        if (subject->call(subject, rotation % subject->rotations, &runs[*count], &totals[*count]) != CLI_OK)
            return CLI_BAD;
        double of_time = options->min_time > 0 ? elapsed / options->min_time : 1;
        double of_samples = (double)*count / options->min_samples;
        progress_update(of_time < of_samples ? of_time : of_samples);
    }
    return subject->finish(subject);
}

/* The floor of a GPU is the larger of those of its arithmetic and its memory. */
static void set_cuda_rates(const struct subject *subject, struct result *result)
{
    const double *peaks = cuda_peaks(subject->device->ordinal);
    if (peaks[CUDA_PEAK_F16] == 0)
        return;
    double seconds_a_flop = subject->fp8 / peaks[CUDA_PEAK_FP8] + (1 - subject->fp8) / peaks[CUDA_PEAK_F16];
    result->peak_gflops = 1 / seconds_a_flop;
    result->peak_gbps = peaks[subject->copies ? CUDA_PEAK_COPY : CUDA_PEAK_READ];
    double compute_us = subject->flops / result->peak_gflops * 1e-3,
           memory_us = subject->bytes / result->peak_gbps * 1e-3;
    result->memory_bound = memory_us > compute_us;
    result->floor_us = result->memory_bound ? memory_us : compute_us;
    result->peak_fraction = result->floor_us / result->median_us;
}

static void set_rates(const struct subject *subject, int threads, struct result *result)
{
    double seconds = result->median_us * 1e-6;
    result->flops = subject->flops;
    result->bytes = subject->bytes;
    result->memory_bound = subject->memory_bound;
    result->gflops = subject->flops / seconds * 1e-9;
    result->gbps = subject->bytes / seconds * 1e-9;
    if (!device_is_host(subject->device)) {
        set_cuda_rates(subject, result);
        return;
    }
    result->peak_gflops = peak_gflops(subject->kernel, threads);
    result->peak_gbps = peak_rate(subject->copies ? PEAK_COPY : PEAK_READ, threads);
    double work = subject->memory_bound ? subject->bytes : subject->flops;
    double peak = subject->memory_bound ? result->peak_gbps : result->peak_gflops;
    result->floor_us = work / peak * 1e-3;
    result->peak_fraction = result->floor_us / result->median_us;
}

int bench_time(struct subject *subject, const struct bench_options *options, int threads, struct result *result)
{
    double *runs = malloc(MAX_SAMPLES * sizeof(*runs)), *totals = malloc(MAX_SAMPLES * sizeof(*totals));
    int count, status = runs && totals ? CLI_OK : cli_error("out of memory");
    if (status == CLI_OK)
        status = take_samples(subject, options, runs, totals, &count);
    if (status == CLI_OK) {
        sort_samples(runs, count);
        sort_samples(totals, count);
        result->samples = count;
        result->median_us = quantile(runs, count, 0.5) * 1e6;
        result->p10_us = quantile(runs, count, 0.1) * 1e6;
        result->p90_us = quantile(runs, count, 0.9) * 1e6;
        result->spread = (result->p90_us - result->p10_us) / result->median_us;
        result->prepare_run_us = quantile(totals, count, 0.5) * 1e6;
        snprintf(result->kernel, sizeof(result->kernel), "%s", subject->kernel);
        snprintf(result->strategy, sizeof(result->strategy), "%s", subject->strategy);
        snprintf(result->precision, sizeof(result->precision), "%s", subject->precision);
        set_rates(subject, threads, result); /* after the samples: to measure a peak empties the caches */
    }
    free(runs);
    free(totals);
    return status;
}
