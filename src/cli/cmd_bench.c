/* SPDX-License-Identifier: MIT
 *
 * cmd_bench.c - msa bench: times operations over the product of the axes, or over a suite, and reports.
 */
#include "bench.h"
#include "output.h"
#include "peak.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_OPS = 8 };
#define DEFAULT_MIN_TIME 1.0
#define DEFAULT_SAMPLES 5

static struct {
    char *suite, *cases, *device, *min_time, *samples, *rest, *footprint, *baseline, *json, *plot;
    int run_once, csv, markdown;
} texts;

static struct poptOption option_table[] = {
    {"suite", 0, POPT_ARG_STRING, &texts.suite, 0,
     "prefill, index or layer (default prefill) over the formal prefill suite, its anchors, or a table of the same "
     "columns",
     "formal|smoke|FILE"},
    {"case", 0, POPT_ARG_STRING, &texts.cases, 0, "these cases of the suite only", "ID,..."},
    {"device", 0, POPT_ARG_STRING, &texts.device, 0, "where to compute (default cpu)", "cpu|cuda[:N]"},
    {"min-time", 0, POPT_ARG_STRING, &texts.min_time, 0,
     "least time to measure for (default 1), if 100000 samples take it", "SECONDS"},
    {"samples", 0, POPT_ARG_STRING, &texts.samples, 0, "least number of samples (default 5)", "N"},
    {"rest", 0, POPT_ARG_STRING, &texts.rest, 0,
     "pause before each sample (default 0): a GPU that works without a pause lowers its clock to keep its power limit",
     "MS"},
    {"run-once", 0, POPT_ARG_NONE, &texts.run_once, 0, "one call without warm-up, for profilers", NULL},
    {"footprint", 0, POPT_ARG_STRING, &texts.footprint, 0,
     "inputs rotate over this much memory (default: twice the largest cache on a CUDA device, and for decode, index "
     "and layer --decode, topk, combine and quantise, else 0: the same inputs again), in at most 4096 copies",
     "MIB"},
    {"baseline", 0, POPT_ARG_STRING, &texts.baseline, 0, "compare with an earlier --json", "FILE"},
    {"json", 0, POPT_ARG_STRING, &texts.json, 0, "write all results; - is stdout, and then no table is printed",
     "FILE|-"},
    {"csv", 0, POPT_ARG_NONE, &texts.csv, 0, "print CSV instead of a table", NULL},
    {"markdown", 0, POPT_ARG_NONE, &texts.markdown, 0, "print a markdown table", NULL},
    {"plot", 0, POPT_ARG_STRING, &texts.plot, 0, "draw the times as curves (needs gnuplot)", "FILE.png|.svg"},
    POPT_TABLEEND};

/* All that lasts from one result to the next. */
struct bench {
    struct bench_options options;
    int32_t device_ordinal;
    struct suite suite;
    enum report_style style;
    FILE *text; /* where summaries go: not into JSON or CSV */
    json_t *baseline;
    struct result *results;
    int num_results;
    int number, total;        /* of the result at work */
    struct workload workload; /* of the last point */
    bool has_workload;
};

static size_t footprint(const struct bench *bench, const struct point *point)
{
    bool memory = point->op == BENCH_DECODE || point->op == BENCH_TOPK || point->op == BENCH_COMBINE ||
                  point->op == BENCH_QUANTISE ||
                  ((point->op == BENCH_INDEX || point->op == BENCH_LAYER) && point->at[AXIS_DECODE]);
    if (bench->options.footprint >= 0)
        return (size_t)bench->options.footprint;
    if (bench->options.run_once)
        return 0;
    if (bench->device_ordinal != MSA_DEVICE_CPU)
        return 2 * device_cache_bytes(bench->device_ordinal);
    return memory ? 2 * cache_bytes() : 0;
}

/* ---- one result */

static int open_workload(struct bench *bench, const struct point *point, const struct suite_case *suite_case,
                         int threads)
{
    if (bench->has_workload && point_same_inputs(point, &bench->workload.point)) {
        bench->workload.problem.index_outputs =
            point->at[AXIS_SCORES_ONLY] ? MSA_INDEX_SCORES : MSA_INDEX_SCORES | MSA_INDEX_SELECTION;
        return CLI_OK;
    }
    if (bench->has_workload)
        workload_close(&bench->workload);
    bench->has_workload = false;
    struct shape shape;
    int status = suite_case ? shape_set(&shape, suite_case->batch, suite_case->query_lens, suite_case->prefix_lens)
                            : shape_from_point(&shape, point);
    if (status == CLI_OK)
        status = workload_open(&bench->workload, point, &shape, footprint(bench, point), threads);
    shape_free(&shape);
    bench->has_workload = status == CLI_OK;
    return status;
}

static int open_subject(struct bench *bench, struct subject *subject, const struct point *point,
                        const struct suite_case *suite_case, struct device *device, const struct run_options *options,
                        int threads)
{
    size_t bytes = footprint(bench, point);
    switch (point->op) {
    case BENCH_TOPK:
        return topk_open(subject, point, device, bytes, threads);
    case BENCH_COMBINE:
        return combine_open(subject, point, device, bytes, threads);
    case BENCH_QUANTISE:
        return quantise_open(subject, point, device, bytes, threads);
    default:
        if (open_workload(bench, point, suite_case, threads) != CLI_OK)
            return CLI_BAD;
        return planned_open(subject, &bench->workload, device, options);
    }
}

/* The command that repeats a result. */
static void print_command(FILE *stream, const struct bench *bench, const struct point *point)
{
    const char *const given[][2] = {{"--device", texts.device},
                                    {"--min-time", texts.min_time},
                                    {"--samples", texts.samples},
                                    {"--rest", texts.rest},
                                    {"--footprint", texts.footprint}};
    fputs("msa bench ", stream);
    point_print(stream, point, true);
    for (size_t i = 0; i < sizeof(given) / sizeof(*given); i++) {
        if (given[i][1])
            fprintf(stream, " %s %s", given[i][0], given[i][1]);
    }
    if (bench->options.run_once)
        fputs(" --run-once", stream);
}

/* The identity of a result: what was asked for, with what was used in place of "best" and "all". CLI_OK or CLI_BAD. */
static int identify(const struct bench *bench, const struct point *point, const msa_context_info *info,
                    struct result *result)
{
    result->point = *point;
    result->point.at[AXIS_THREADS] = info->num_threads;
    for (int i = 0; isa_names[i]; i++) {
        if (strcmp(info->isa, isa_names[i]) == 0)
            result->point.at[AXIS_ISA] = i;
    }
    snprintf(result->device, sizeof(result->device), "%s", info->device_name);
    snprintf(result->isa, sizeof(result->isa), "%s", info->isa);
    result->rest_ms = bench->options.rest_ms;
    size_t size;
    FILE *work = open_memstream(&result->work, &size), *command = open_memstream(&result->command, &size);
    if (work)
        point_print(work, &result->point, false);
    if (command)
        print_command(command, bench, &result->point);
    bool good = work && fclose(work) == 0;
    return command && fclose(command) == 0 && good ? CLI_OK : cli_error("out of memory");
}

static void free_result(struct result *result)
{
    free(result->work);
    free(result->command);
}

static int time_subject(struct bench *bench, struct subject *subject, struct result *result)
{
    char what[128];
    int threads = (int)result->point.at[AXIS_THREADS];
    snprintf(what, sizeof(what), "msa bench: %d of %d, %s %s", bench->number, bench->total, subject->name,
             result->point.case_id ? result->point.case_id : "");
    progress_begin(what);
    int status = bench_time(subject, &bench->options, threads, result);
    if (status == CLI_OK && result->point.suite && result->spread > SUITE_SPREAD && !bench->options.run_once) {
        status = bench_time(subject, &bench->options, threads, result);
        result->remeasured = true;
    }
    progress_end();
    return status;
}

static int add_result(struct bench *bench, const struct point *point, const struct suite_case *suite_case)
{
    struct result *grown = realloc(bench->results, (size_t)(bench->num_results + 1) * sizeof(*grown));
    if (!grown)
        return cli_error("out of memory");
    bench->results = grown;
    bench->number++;
    struct result *result = &grown[bench->num_results];
    struct run_options options = RUN_OPTIONS_INIT;
    options.device = bench->device_ordinal;
    options.threads = (int32_t)point->at[AXIS_THREADS];
    options.isa = point->at[AXIS_ISA] ? isa_names[point->at[AXIS_ISA]] : NULL;
    options.precision = (msa_precision)point->at[AXIS_PRECISION];
    options.strategy = (msa_strategy)point->at[AXIS_STRATEGY];
    options.plan = point->op == BENCH_DECODE || point->at[AXIS_DECODE] ? PLAN_DECODE : PLAN_PREFILL;

    struct device device;
    struct subject subject;
    msa_context_info info = MSA_CONTEXT_INFO_INIT;
    if (device_open(&device, &options) != CLI_OK)
        return CLI_BAD;
    int status = msa_context_get_info(device.context, &info) == MSA_SUCCESS ? CLI_OK : cli_library_error("bench");
    if (status == CLI_OK)
        status = open_subject(bench, &subject, point, suite_case, &device, &options,
                              info.num_threads ? info.num_threads : host_threads());
    *result = (struct result){0};
    if (status == CLI_OK) {
        status = identify(bench, point, &info, result);
        if (is_planned(point->op)) {
            const struct shape *shape = &bench->workload.shape;
            result->batch = shape->batch;
            result->total_q = shape->total_q;
            result->kv_len = shape->max_kv_len;
        }
        result->weight = suite_case ? suite_case->weight : 0;
        if (status == CLI_OK && bench->baseline)
            result->baseline_us = baseline_find(bench->baseline, result);
        if (status == CLI_OK)
            status = time_subject(bench, &subject, result);
        subject.close(&subject);
    }
    device_close(&device);
    if (status != CLI_OK) {
        free_result(result);
        return status;
    }
    if (bench->num_results++ == 0)
        report_header(stdout, bench->style);
    return report_row(stdout, bench->style, result);
}

/* ---- all results */

static int run_op(struct bench *bench, const struct axes *axes)
{
    struct point point;
    int position[AXIS_COUNT], status = CLI_OK;
    axes_first(axes, &point, position);
    do {
        int first = bench->num_results;
        for (int i = 0; status == CLI_OK && axes->suite && i < bench->suite.num_cases; i++) {
            point.case_id = bench->suite.cases[i].id;
            status = add_result(bench, &point, &bench->suite.cases[i]);
        }
        if (!axes->suite)
            status = add_result(bench, &point, NULL);
        else if (status == CLI_OK)
            suite_summary(bench->text, bench->results + first, bench->num_results - first);
    } while (status == CLI_OK && axes_next(axes, &point, position));
    return status;
}

static int product_size(const struct bench *bench, const struct axes *axes)
{
    int size = axes->suite ? bench->suite.num_cases : 1;
    for (int a = 0; a < AXIS_COUNT; a++)
        size *= axes->count[a] ? axes->count[a] : 1;
    return size;
}

/* Everything is read before anything runs, so that a mistake in the last option costs nothing. */
static int run_ops(struct bench *bench, const enum bench_op *ops, int num_ops)
{
    struct axes *axes = calloc((size_t)num_ops, sizeof(*axes));
    int status = axes ? CLI_OK : cli_error("out of memory");
    for (int i = 0; status == CLI_OK && i < num_ops; i++) {
        status = axes_read(&axes[i], ops[i], texts.suite, ops, num_ops);
        if (status == CLI_OK)
            bench->total += product_size(bench, &axes[i]);
    }
    for (int i = 0; status == CLI_OK && i < num_ops; i++)
        status = run_op(bench, &axes[i]);
    free(axes);
    report_baseline(bench->text, bench->baseline != NULL, bench->results, bench->num_results);
    return status;
}

/* What results are measured, compared and written by: peak has no results. */
static int refuse_result_options(void)
{
    for (const struct poptOption *option = option_table; option->longName; option++) {
        bool given = option->argInfo == POPT_ARG_NONE ? *(int *)option->arg != 0 : *(char **)option->arg != NULL;
        if (given && option->arg != &texts.device)
            return cli_error("--%s: not an option of peak", option->longName);
    }
    return CLI_OK;
}

/* msa bench peak: the ceilings that results are set against. */
static int print_cuda_peaks(int32_t ordinal)
{
    struct run_options options = RUN_OPTIONS_INIT;
    struct device device;
    options.device = ordinal;
    if (device_open(&device, &options) != CLI_OK)
        return CLI_BAD;
    const double *peaks = cuda_peaks(ordinal);
    for (int p = 0; p < NUM_CUDA_PEAKS; p++)
        printf(" %9s", cuda_peak_names[p]);
    printf("\n");
    for (int p = 0; p < NUM_CUDA_PEAKS; p++)
        printf(" %9.1f", peaks[p]);
    printf("\nDense products of tensor cores in GFLOP/s; device memory read, and copy (read + written), in GB/s\n");
    device_close(&device);
    return peaks[CUDA_PEAK_F16] > 0 ? CLI_OK : CLI_BAD;
}

static int print_peaks(void)
{
    int32_t ordinal = MSA_DEVICE_CPU;
    if (refuse_result_options() != CLI_OK || axes_refuse_others(AXIS_THREADS, "peak") != CLI_OK ||
        (texts.device && parse_device("--device", texts.device, &ordinal) != CLI_OK))
        return CLI_BAD;
    if (ordinal != MSA_DEVICE_CPU)
        return print_cuda_peaks(ordinal);
    const enum bench_op op = BENCH_TOPK; /* any that has threads */
    struct axes axes;
    if (axes_read(&axes, op, NULL, &op, 1) != CLI_OK)
        return CLI_BAD;
    printf("threads");
    for (int p = 0; p < NUM_PEAKS; p++)
        printf(" %9s", peak_names[p]);
    printf("\n");
    for (int i = 0; i < axes.count[AXIS_THREADS]; i++) {
        struct run_options options = RUN_OPTIONS_INIT;
        struct device device;
        msa_context_info info = MSA_CONTEXT_INFO_INIT;
        options.threads = (int32_t)axes.values[AXIS_THREADS][i];
        if (device_open(&device, &options) != CLI_OK)
            return CLI_BAD;
        msa_status status = msa_context_get_info(device.context, &info);
        device_close(&device);
        if (status != MSA_SUCCESS)
            return cli_library_error("bench peak");
        printf("%7d", info.num_threads);
        for (int p = 0; p < NUM_PEAKS; p++)
            printf(" %9.1f", peak_rate((enum peak)p, info.num_threads));
        printf("\n");
    }
    printf("FP32 multiply-add by register bits and BF16 dot products in GFLOP/s; DRAM read, and copy (read + written), "
           "in GB/s\n");
    return CLI_OK;
}

/* ---- options */

static int read_ops(const char *text, enum bench_op ops[MAX_OPS], int *num_ops)
{
    char *list = strdup(text), *rest = list;
    int status = list ? CLI_OK : cli_error("out of memory"), op;
    while (status == CLI_OK && rest) {
        char *item = strsep(&rest, ",");
        if (*num_ops == MAX_OPS)
            status = cli_error("bench: more than %d operations", MAX_OPS);
        else if (strcmp(item, "peak") == 0)
            status = cli_error("bench: peak stands alone, not in a list");
        else if ((status = parse_choice("bench", item, bench_op_names, &op)) == CLI_OK)
            ops[(*num_ops)++] = (enum bench_op)op;
    }
    free(list);
    return status;
}

static int read_options(struct bench *bench)
{
    int64_t mib = 0, samples = DEFAULT_SAMPLES, rest = 0;
    bench->options = (struct bench_options){.min_time = DEFAULT_MIN_TIME, .run_once = texts.run_once, .footprint = -1};
    bench->device_ordinal = MSA_DEVICE_CPU;
    if ((texts.min_time && parse_double("--min-time", texts.min_time, &bench->options.min_time)) ||
        (texts.samples && parse_int("--samples", texts.samples, 1, 10000, &samples)) ||
        (texts.rest && parse_int("--rest", texts.rest, 0, 10000, &rest)) ||
        (texts.footprint && parse_int("--footprint", texts.footprint, 0, 1 << 20, &mib)) ||
        (texts.device && parse_device("--device", texts.device, &bench->device_ordinal)) ||
        (texts.plot && plot_check(texts.plot)))
        return CLI_BAD;
    if (bench->options.min_time < 0 || bench->options.min_time > 3600)
        return cli_error("--min-time: %s is outside 0..3600", texts.min_time);
    if (texts.csv && texts.markdown)
        return cli_error("--csv and --markdown exclude each other");
    bool json_on_stdout = texts.json && strcmp(texts.json, "-") == 0;
    if (json_on_stdout && (texts.csv || texts.markdown))
        return cli_error("--json - and --%s exclude each other: both go to stdout", texts.csv ? "csv" : "markdown");
    if (texts.cases && !texts.suite)
        return cli_error("--case: only a --suite has cases");
    bench->options.min_samples = (int)samples;
    bench->options.rest_ms = (int)rest;
    if (texts.run_once) {
        bench->options.min_time = 0;
        bench->options.min_samples = 1;
    }
    if (texts.footprint)
        bench->options.footprint = mib << 20;
    bench->style = json_on_stdout   ? REPORT_NONE
                   : texts.csv      ? REPORT_CSV
                   : texts.markdown ? REPORT_MARKDOWN
                                    : REPORT_TABLE;
    bench->text = bench->style == REPORT_NONE || bench->style == REPORT_CSV ? stderr : stdout;
    if (texts.json && !json_on_stdout && output_check("--json", texts.json) != CLI_OK)
        return CLI_BAD;
    if (texts.baseline && baseline_read(texts.baseline, &bench->baseline) != CLI_OK)
        return CLI_BAD;
    return texts.suite ? suite_open(&bench->suite, texts.suite, texts.cases) : CLI_OK;
}

static int run(struct bench *bench, const char *operations)
{
    enum bench_op ops[MAX_OPS];
    int num_ops = 0;
    if (!operations && !texts.suite)
        return cli_error(
            "bench: give an operation (prefill, decode, index, layer, topk, combine, quantise, peak) or --suite");
    if (operations && strcmp(operations, "peak") == 0)
        return print_peaks();
    if (read_ops(operations ? operations : "prefill", ops, &num_ops) || read_options(bench))
        return CLI_BAD;
    for (int i = 0; texts.suite && i < num_ops; i++) {
        if (ops[i] != BENCH_PREFILL && ops[i] != BENCH_INDEX && ops[i] != BENCH_LAYER)
            return cli_error("--suite: %s has no suite; prefill, index and layer have", bench_op_names[ops[i]]);
    }
    int status = run_ops(bench, ops, num_ops);
    /* What was measured before a failure is not thrown away; where nothing was, an earlier file stays as it is. */
    if (texts.json && bench->num_results && json_write(texts.json, bench->results, bench->num_results) != CLI_OK)
        status = CLI_BAD;
    if (texts.plot && bench->num_results && plot_write(texts.plot, bench->results, bench->num_results) != CLI_OK)
        status = CLI_BAD;
    return status;
}

int cmd_bench(int argc, const char **argv)
{
    struct poptOption table[] = {
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, option_table, 0, "What to run and report:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, axes_options(false), 0,
         "Axes. A value is a comma list; a number may be a range FIRST:LAST, FIRST:LAST:STEP or "
         "FIRST:LAST:xFACTOR, and K and M multiply by 1024 and 1048576:",
         NULL},
        POPT_AUTOHELP POPT_TABLEEND};
    poptContext context;
    if (options_parse(argc, argv, table, "[OPTION...] OP[,OP...]|peak", &context) != CLI_OK)
        return CLI_BAD;
    struct bench bench = {0};
    const char *operations = poptGetArg(context), *rest = poptGetArg(context);
    int status = rest ? cli_error("bench: '%s' is one argument too many", rest) : run(&bench, operations);
    if (bench.has_workload)
        workload_close(&bench.workload);
    suite_close(&bench.suite);
    json_decref(bench.baseline);
    for (int i = 0; i < bench.num_results; i++)
        free_result(&bench.results[i]);
    free(bench.results);
    poptFreeContext(context);
    return status;
}
