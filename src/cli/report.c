/* SPDX-License-Identifier: MIT
 *
 * report.c - results as a table, CSV or markdown, and the comparison with a baseline.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Extents in a few characters: B requests, T query rows, n keys of the longest; R rows, P pages, S splits. */
static void shape_text(const struct result *result, char *text, size_t size)
{
    const int64_t *at = result->point.at;
    switch (result->point.op) {
    case BENCH_TOPK:
        snprintf(text, size, "R=%lld P=%lld k=%lld %s", (long long)at[AXIS_ROWS], (long long)at[AXIS_PAGES],
                 (long long)at[AXIS_K], axis_text(AXIS_SCORES, at[AXIS_SCORES], (char[24]){0}));
        break;
    case BENCH_COMBINE:
        snprintf(text, size, "T=%lld S=%lld", (long long)at[AXIS_QUERIES], (long long)at[AXIS_SPLITS]);
        break;
    case BENCH_QUANTISE:
        snprintf(text, size, "R=%lld%s", (long long)at[AXIS_ROWS], at[AXIS_CACHE] ? " cache" : "");
        break;
    default:
        snprintf(text, size, "B=%lld T=%lld n=%lld", (long long)result->batch, (long long)result->total_q,
                 (long long)result->kv_len);
    }
}

static void heads_text(const struct result *result, char *text, size_t size)
{
    static const enum axis axes[] = {AXIS_Q_HEADS, AXIS_KV_HEADS, AXIS_INDEX_HEADS};
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof(axes) / sizeof(*axes); i++) {
        if (axis_applies(&result->point, axes[i]))
            used += (size_t)snprintf(text + used, size - used, "%s%lld", used ? "/" : "",
                                     (long long)result->point.at[axes[i]]);
    }
}

/* Text of an axis, or of an operation that has not got it. */
static const char *axis_or_dash(const struct result *result, enum axis axis, char buffer[24])
{
    return axis_applies(&result->point, axis) ? axis_text(axis, result->point.at[axis], buffer) : "-";
}

/* Text in quotes, doubled where they stand in it; numbers as JSON has them. */
static void print_csv_cell(FILE *stream, const json_t *value)
{
    if (json_is_string(value)) {
        fputc('"', stream);
        for (const char *c = json_string_value(value); *c; c++)
            fputs(*c == '"' ? "\"\"" : (char[2]){*c, '\0'}, stream);
        fputc('"', stream);
    } else if (!json_is_null(value)) {
        json_dumpf(value, stream, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    }
}

static int print_csv(FILE *stream, const struct result *result, bool names)
{
    json_t *object = result_json(result), *value;
    const char *key, *separator = "";
    if (!object)
        return cli_error("--csv: out of memory");
    json_object_foreach(object, key, value)
    {
        fputs(separator, stream);
        if (names)
            fputs(key, stream);
        else
            print_csv_cell(stream, value);
        separator = ",";
    }
    fputc('\n', stream);
    json_decref(object);
    return CLI_OK;
}

static const struct {
    const char *title;
    int width; /* negative: to the left */
} columns[] = {
    {"op", -8},  {"format", -8},  {"pattern", -10},       {"shape", -26}, {"heads", -8},
    {"thr", 3},  {"kernel", -25}, {"median us", 12},      {"spread", 7},  {"GFLOP/s", 9},
    {"GB/s", 8}, {"peak", 7},     {"prepare+run us", 15}, {"ratio", 6},
};
enum { NUM_COLUMNS = sizeof(columns) / sizeof(*columns) };

static void print_cells(FILE *stream, enum report_style style, char cells[NUM_COLUMNS][64], const char *command)
{
    for (int i = 0; i < NUM_COLUMNS; i++) {
        if (style == REPORT_MARKDOWN)
            fprintf(stream, "| %s ", cells[i]);
        else
            fprintf(stream, "%s%*s", i ? " " : "", columns[i].width, cells[i]);
    }
    if (style == REPORT_MARKDOWN)
        fprintf(stream, "| `%s` |\n", command);
    else
        fprintf(stream, "\n  %s\n", command);
}

void report_header(FILE *stream, enum report_style style)
{
    if (style == REPORT_CSV) {
        const struct result empty = {.work = (char[1]){0}, .command = (char[1]){0}};
        print_csv(stream, &empty, true);
        return;
    }
    for (int i = 0; i < NUM_COLUMNS && style != REPORT_NONE; i++) {
        if (style == REPORT_MARKDOWN)
            fprintf(stream, "| %s ", columns[i].title);
        else
            fprintf(stream, "%s%*s", i ? " " : "", columns[i].width, columns[i].title);
    }
    if (style == REPORT_MARKDOWN) {
        fprintf(stream, "| command |\n");
        for (int i = 0; i < NUM_COLUMNS; i++)
            fprintf(stream, columns[i].width < 0 ? "|---" : "|--:");
        fprintf(stream, "|---|\n");
    } else if (style == REPORT_TABLE) {
        fputc('\n', stream);
    }
}

int report_row(FILE *stream, enum report_style style, const struct result *result)
{
    if (style == REPORT_NONE)
        return CLI_OK;
    if (style == REPORT_CSV) {
        int status = print_csv(stream, result, false);
        fflush(stream);
        return status;
    }
    char cells[NUM_COLUMNS][64], buffer[24];
    int i = 0;
    snprintf(cells[i++], sizeof(*cells), "%s", bench_op_names[result->point.op]);
    snprintf(cells[i++], sizeof(*cells), "%s", axis_or_dash(result, AXIS_FORMAT, buffer));
    snprintf(cells[i++], sizeof(*cells), "%s", axis_or_dash(result, AXIS_PATTERN, buffer));
    shape_text(result, cells[i++], sizeof(*cells));
    heads_text(result, cells[i++], sizeof(*cells));
    snprintf(cells[i++], sizeof(*cells), "%lld", (long long)result->point.at[AXIS_THREADS]);
    const char *kernel = *result->kernel ? result->kernel : "-";
    snprintf(cells[i++], sizeof(*cells), "%.*s", (int)strcspn(kernel, ","), kernel);
    snprintf(cells[i++], sizeof(*cells), "%.2f", result->median_us);
    if (result->samples > 1)
        snprintf(cells[i++], sizeof(*cells), "%.1f %%%s", 100 * result->spread, result->remeasured ? "*" : "");
    else
        snprintf(cells[i++], sizeof(*cells), "-");
    snprintf(cells[i++], sizeof(*cells), "%.1f", result->gflops);
    snprintf(cells[i++], sizeof(*cells), "%.2f", result->gbps);
    if (isfinite(result->peak_fraction))
        snprintf(cells[i++], sizeof(*cells), "%.1f %%", 100 * result->peak_fraction);
    else
        snprintf(cells[i++], sizeof(*cells), "-");
    snprintf(cells[i++], sizeof(*cells), "%.2f", result->prepare_run_us);
    if (result->baseline_us > 0)
        snprintf(cells[i++], sizeof(*cells), "%.3f", result->baseline_us / result->median_us);
    else
        snprintf(cells[i++], sizeof(*cells), "-");
    print_cells(stream, style, cells, result->command);
    fflush(stream);
    return CLI_OK;
}

void report_baseline(FILE *stream, bool given, const struct result *results, int count)
{
    double sum = 0, least = INFINITY, largest = 0;
    int compared = 0, slower = 0;
    for (int i = 0; i < count; i++) {
        if (results[i].baseline_us <= 0)
            continue;
        double ratio = results[i].baseline_us / results[i].median_us;
        sum += log(ratio);
        least = fmin(least, ratio);
        largest = fmax(largest, ratio);
        slower += results[i].median_us > 1.01 * results[i].baseline_us;
        compared++;
    }
    if (compared < count && given)
        fprintf(stream, "baseline: %d of %d results are in the file, with the same --rest\n", compared, count);
    if (compared)
        fprintf(stream,
                "baseline/this: geometric mean %.4f, least %.4f, largest %.4f; %d of %d more than 1 %% slower\n",
                exp(sum / compared), least, largest, slower, compared);
}
