/* SPDX-License-Identifier: MIT
 *
 * bench.h - timing: what can be timed, how, what comes out, and how it is reported.
 *
 *   bench_planned.c    prefill, decode, index, layer as subjects
 *   bench_stateless.c  topk, combine, quantise as subjects
 *   bench_time.c       times a subject: samples, statistics, peaks
 *   suite.c            the formal prefill suite and its summary
 *   report.c           table, CSV, markdown
 *   report_json.c      JSON, and an earlier JSON as baseline
 *   report_plot.c      curves, by gnuplot
 *   cmd_bench.c        options, and the loop over ops, points and cases
 */
#ifndef MSA_BENCH_H
#define MSA_BENCH_H

#include "axes.h"
#include "device.h"
#include "workload.h"

#include <jansson.h>
#include <stdio.h>

struct bench_options {
    double min_time; /* seconds of samples at least */
    int min_samples;
    int rest_ms;       /* pause before each sample */
    bool run_once;     /* one sample, no warm-up */
    int64_t footprint; /* bytes that the rotated inputs cover; -1: by operation */
};

/* Operations with plans; the others are stateless calls. */
static inline bool is_planned(enum bench_op op)
{
    return op == BENCH_PREFILL || op == BENCH_DECODE || op == BENCH_INDEX || op == BENCH_LAYER;
}

/* ---- subjects */

/* Something to time: `call` does the work on the inputs of one rotation and tells the seconds of `run`, and of
 * `prepare` and `run` together (the same for operations that prepare nothing). */
struct subject {
    const char *name; /* of the operation, for messages */
    char kernel[192]; /* the main one first */
    const char *strategy, *precision;
    double flops, bytes; /* useful, a call; flops 0: memory alone counts */
    bool copies;         /* reads and writes alike: measured against the copy rate */
    double fp8;          /* GPUs: the part of the flops that FP8 tensor cores do, by the plan's precision */
    const struct device *device;
    int rotations;
    int (*call)(struct subject *subject, int rotation, double *run, double *total); /* CLI_OK or CLI_BAD */
    int (*finish)(struct subject *subject); /* after the last call: CLI_BAD if the results are not to be trusted */
    void (*close)(struct subject *subject);
    void *self;
};

/* The workload must outlive the subject. CLI_OK, or CLI_BAD after a message and with nothing left to close. */
int planned_open(struct subject *subject, const struct workload *workload, struct device *device,
                 const struct run_options *options);
int topk_open(struct subject *subject, const struct point *point, struct device *device, size_t footprint,
              int threads);
int combine_open(struct subject *subject, const struct point *point, struct device *device, size_t footprint,
                 int threads);
int quantise_open(struct subject *subject, const struct point *point, struct device *device, size_t footprint,
                  int threads);

/* ---- results */

struct result {
    struct point point; /* threads and isa as used */
    int64_t batch, total_q, kv_len;
    char device[96], isa[16], kernel[192], strategy[16], precision[16];
    int samples;
    double median_us, p10_us, p90_us, spread; /* of run; spread = (p90 - p10) / median */
    double prepare_run_us;                    /* median of prepare and run */
    double flops, bytes;
    double gflops, gbps, peak_gflops, peak_gbps, floor_us, peak_fraction;
    double peak_fraction_p10, peak_fraction_p90; /* CPU: of the samples, each against the peak measured beside it */
    bool memory_bound;
    double weight;      /* suite: of the case, 0 outside the weighted mean */
    bool remeasured;    /* suite: the spread was above 3 %, and the case was measured again */
    int rest_ms;        /* before each sample */
    double baseline_us; /* 0: no baseline for it */
    char *work;         /* what was computed: equal for results that can be compared */
    char *command;      /* repeats it */
};

/* Times a subject and fills in all but the identity of the result. CLI_OK or CLI_BAD. */
int bench_time(struct subject *subject, const struct bench_options *options, int threads, struct result *result);

/* Statistics of samples: sort them first; a quantile between two samples is interpolated. */
void sort_samples(double *samples, int count);
double quantile(const double *sorted, int count, double fraction);

/* ---- suites */

#define SUITE_SPREAD 0.03 /* a case with a larger spread is measured again, and marked */

struct suite_case {
    char *id;
    double weight; /* in the weighted mean; 0: not in it */
    int32_t batch;
    int64_t *query_lens, *prefix_lens; /* [batch] */
};
struct suite {
    struct suite_case *cases;
    int num_cases;
};
/* `formal`: all cases; `smoke`: those tagged anchor; anything else: all cases of that CSV file. `ids`: those cases
 * only, separated by commas; NULL: all. CLI_OK, or CLI_BAD after a message; suite_close in any case. */
int suite_open(struct suite *suite, const char *name, const char *ids);
void suite_close(struct suite *suite);
/* Of one configuration's results: weighted mean latency and rate; for the index also medians by number of queries. */
void suite_summary(FILE *stream, const struct result *results, int count);

/* ---- reports */

enum report_style { REPORT_NONE, REPORT_TABLE, REPORT_CSV, REPORT_MARKDOWN };
void report_header(FILE *stream, enum report_style style);
/* The table and markdown put the command that repeats the result on a line of its own, or in the last column. CLI_OK or
 * CLI_BAD. */
int report_row(FILE *stream, enum report_style style, const struct result *result);
/* With a baseline given: how many results it has, if not all; ratios baseline/this: geometric mean, least, largest, and
 * how many are more than 1 % slower. */
void report_baseline(FILE *stream, bool given, const struct result *results, int count);

/* All about a result under the names of the JSON report; NULL: no memory. */
json_t *result_json(const struct result *result);
/* Writes all results as an array; path "-": stdout. CLI_OK or CLI_BAD. */
int json_write(const char *path, const struct result *results, int count);
/* The results of an earlier json_write. CLI_OK or CLI_BAD; json_decref it. */
int baseline_read(const char *path, json_t **baseline);
/* Median of the same work, from the same threads and instruction set if there is such a result; 0: none. */
double baseline_find(const json_t *baseline, const struct result *result);

/* Median time over the length of the context, or over the axis with most values: one curve for each combination of the
 * others. The ending of the path, .png or .svg, is the format; plot_check looks at it, and whether
 * gnuplot is there, before the work begins. */
int plot_check(const char *path);
int plot_write(const char *path, const struct result *results, int count);

#endif
