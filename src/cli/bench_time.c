/* SPDX-License-Identifier: MIT
 *
 * bench_time.c - times a subject and sets the result against the peaks of the machine.
 */
#include "bench.h"
#include "parallel.h"
#include "peak.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

/* The peak beside the samples. On a machine that others use, a share of a peak from another moment says little: so
 * windows of the peak stand between rounds of samples, and a sample's share is of the mean of those before and after
 * its round. */
struct beside {
    const struct subject *subject;
    int threads;
    bool open;   /* since it was first measured: to measure a peak empties the caches */
    bool memory; /* the peak is one of memory */
    bool shares_mean_something;
    enum peak peak;
    struct peak_probe probe;
    double work;            /* of a sample, in the peak's units: a floor is work / rate * 1e-9 seconds */
    double *rates, *shares; /* of all windows, of all samples */
    int num_rates;
};

static enum peak memory_peak(const struct subject *subject)
{
    return subject->copies ? PEAK_COPY : PEAK_READ;
}

/* The larger of the two floors counts, that of memory only where the caches do not hold all inputs. */
static void open_beside(struct beside *beside)
{
    const struct subject *subject = beside->subject;
    enum peak arithmetic = peak_of_kernel(subject->kernel), memory = memory_peak(subject);
    bool cached = subject->bytes * subject->rotations <= (double)cache_bytes();
    beside->memory = subject->flops == 0;
    if (subject->flops > 0 && !cached)
        beside->memory = subject->bytes / peak_rate(memory, beside->threads) >
                         subject->flops / peak_rate(arithmetic, beside->threads);
    beside->peak = beside->memory ? memory : arithmetic;
    beside->work = beside->memory ? subject->bytes : subject->flops;
    beside->shares_mean_something =
        !(beside->memory && cached) && peak_open(&beside->probe, beside->peak, beside->threads);
    beside->open = true;
}

enum { MOST_WINDOWS = 15, MAX_RATES = MOST_WINDOWS * 4096 };
#define ROUND_SECONDS 0.02 /* of samples between windows, at least */
#define WINDOW_PART 0.05   /* of a round's time goes to the windows after it */

/* The median of as many windows as befit a round; 0: not measured. */
static double measure_beside(struct beside *beside, double round_seconds)
{
    double rates[MOST_WINDOWS], wanted = round_seconds * WINDOW_PART / 0.002;
    int count = wanted < 1 ? 1 : wanted > MOST_WINDOWS ? MOST_WINDOWS : (int)wanted;
    if (!device_is_host(beside->subject->device))
        return 0;
    if (!beside->open)
        open_beside(beside);
    if (!beside->shares_mean_something)
        return 0;
    for (int i = 0; i < count; i++) {
        rates[i] = peak_window(&beside->probe);
        if (beside->num_rates < MAX_RATES)
            beside->rates[beside->num_rates++] = rates[i];
    }
    sort_samples(rates, count);
    return quantile(rates, count, 0.5);
}

static void set_shares(struct beside *beside, const double *runs, int first, int last, double rate)
{
    for (int i = first; i < last && rate > 0; i++)
        beside->shares[i] = beside->work / rate * 1e-9 / runs[i];
}

static void pause_ms(int ms)
{
    struct timespec left = {ms / 1000, ms % 1000 * 1000000L};
    while (ms > 0 && nanosleep(&left, &left) != 0)
        ;
}

/* Samples in seconds into runs and totals. A tenth of the time, one call at least, warms up. */
static int take_samples(struct subject *subject, const struct bench_options *options, struct beside *beside,
                        double *runs, double *totals, int *count)
{
    double warm_up = options->run_once ? -1 : 0.1 * options->min_time, started = seconds_now();
    int rotation = 0, round_first = 0;
    double run, total;
    for (; warm_up >= 0 && (rotation == 0 || seconds_now() - started < warm_up); rotation++) {
        if (subject->call(subject, rotation % subject->rotations, &run, &total) != CLI_OK)
            return CLI_BAD;
    }
    /* A single call is for profilers: nothing before it, and nothing that would empty the caches for it. */
    double before = options->run_once ? 0 : measure_beside(beside, ROUND_SECONDS), round_started = seconds_now();
    started = round_started;
    for (*count = 0; *count < MAX_SAMPLES; rotation++) {
        pause_ms(options->rest_ms);
        if (subject->call(subject, rotation % subject->rotations, &runs[*count], &totals[*count]) != CLI_OK)
            return CLI_BAD;
        ++*count;
        double now = seconds_now(), elapsed = now - started;
        bool enough = *count >= options->min_samples && elapsed >= options->min_time;
        double of_time = options->min_time > 0 ? elapsed / options->min_time : 1;
        double of_samples = (double)*count / options->min_samples;
        progress_update(of_time < of_samples ? of_time : of_samples);
        if (!enough && *count < MAX_SAMPLES && now - round_started < ROUND_SECONDS)
            continue;
        double after = measure_beside(beside, now - round_started);
        set_shares(beside, runs, round_first, *count, before > 0 ? (before + after) / 2 : after);
        before = after;
        round_first = *count;
        round_started = seconds_now();
        if (enough)
            break;
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

static void set_rates(const struct subject *subject, struct beside *beside, int threads, struct result *result)
{
    double seconds = result->median_us * 1e-6;
    result->flops = subject->flops;
    result->bytes = subject->bytes;
    result->gflops = subject->flops / seconds * 1e-9;
    result->gbps = subject->bytes / seconds * 1e-9;
    if (!device_is_host(subject->device)) {
        set_cuda_rates(subject, result);
        return;
    }
    result->memory_bound = beside->memory;
    result->peak_gflops = peak_rate(peak_of_kernel(subject->kernel), threads);
    result->peak_gbps = peak_rate(memory_peak(subject), threads);
    result->floor_us = result->peak_fraction = NAN;
    if (!beside->num_rates)
        return;
    sort_samples(beside->rates, beside->num_rates);
    sort_samples(beside->shares, result->samples);
    double peak = quantile(beside->rates, beside->num_rates, 0.5);
    *(beside->memory ? &result->peak_gbps : &result->peak_gflops) = peak;
    result->floor_us = beside->work / peak * 1e-3;
    result->peak_fraction = quantile(beside->shares, result->samples, 0.5);
    result->peak_fraction_p10 = quantile(beside->shares, result->samples, 0.1);
    result->peak_fraction_p90 = quantile(beside->shares, result->samples, 0.9);
}

int bench_time(struct subject *subject, const struct bench_options *options, int threads, struct result *result)
{
    double *runs = malloc(MAX_SAMPLES * sizeof(*runs)), *totals = malloc(MAX_SAMPLES * sizeof(*totals));
    struct beside beside = {.subject = subject,
                            .threads = threads,
                            .rates = malloc(MAX_RATES * sizeof(*beside.rates)),
                            .shares = calloc(MAX_SAMPLES, sizeof(*beside.shares))};
    bool memory = runs && totals && beside.rates && beside.shares;
    int count, status = memory ? CLI_OK : cli_error("out of memory");
    if (status == CLI_OK)
        status = take_samples(subject, options, &beside, runs, totals, &count);
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
        set_rates(subject, &beside, threads, result);
    }
    if (beside.open)
        peak_close(&beside.probe);
    free(beside.rates);
    free(beside.shares);
    free(runs);
    free(totals);
    return status;
}
