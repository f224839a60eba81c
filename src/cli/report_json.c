/* SPDX-License-Identifier: MIT
 *
 * report_json.c - results as JSON, and an earlier JSON as the baseline of this run.
 */
#include "bench.h"
#include "output.h"

#include <math.h>
#include <string.h>

/* JSON has no infinities and no NaN: what was not measured is null. */
static json_t *real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *text_or_null(const char *text)
{
    return *text ? json_string(text) : json_null();
}

/* A size of a planned operation. */
static json_t *size_or_null(const struct result *result, int64_t size)
{
    return is_planned(result->point.op) ? json_integer(size) : json_null();
}

static json_t *axis_json(const struct point *point, enum axis axis)
{
    char buffer[24];
    if (!axis_applies(point, axis))
        return json_null();
    if (axis_is_flag(axis))
        return json_boolean(point->at[axis]);
    if (axis_is_number(axis))
        return json_integer(point->at[axis]);
    return json_string(axis_text(axis, point->at[axis], buffer));
}

/* An object that cannot take a value becomes NULL, and stays it. */
static void put(json_t **object, const char *key, json_t *value)
{
    if (json_object_set_new(*object, key, value) == 0)
        return;
    json_decref(*object);
    *object = NULL;
}

json_t *result_json(const struct result *result)
{
    const struct point *point = &result->point;
    json_t *object = json_object();
    put(&object, "op", json_string(bench_op_names[point->op]));
    put(&object, "case", point->case_id ? json_string(point->case_id) : json_null());
    for (int a = 0; a < AXIS_COUNT; a++) {
        char key[32];
        snprintf(key, sizeof(key), "%s", axis_name((enum axis)a));
        for (char *dash = key; (dash = strchr(dash, '-')); dash++)
            *dash = '_';
        put(&object, key, axis_json(point, (enum axis)a));
    }
    /* What was used, where an axis only asked for it. */
    put(&object, "batch", size_or_null(result, result->batch));
    put(&object, "isa", json_string(result->isa));
    put(&object, "strategy", text_or_null(result->strategy));
    put(&object, "precision", axis_applies(point, AXIS_PRECISION) ? text_or_null(result->precision) : json_null());

    put(&object, "total_q", size_or_null(result, result->total_q));
    put(&object, "kv_len", size_or_null(result, result->kv_len));
    put(&object, "device", json_string(result->device));
    put(&object, "kernel", text_or_null(result->kernel));
    put(&object, "samples", json_integer(result->samples));
    put(&object, "median_us", real(result->median_us));
    put(&object, "p10_us", real(result->p10_us));
    put(&object, "p90_us", real(result->p90_us));
    put(&object, "spread", result->samples > 1 ? real(result->spread) : json_null());
    put(&object, "remeasured", json_boolean(result->remeasured));
    put(&object, "prepare_run_us", real(result->prepare_run_us));
    put(&object, "flops", real(result->flops));
    put(&object, "bytes", real(result->bytes));
    put(&object, "gflops", result->flops > 0 ? real(result->gflops) : json_null());
    put(&object, "gbps", real(result->gbps));
    put(&object, "peak_gflops", real(result->peak_gflops));
    put(&object, "peak_gbps", real(result->peak_gbps));
    const char *bound = result->memory_bound ? "memory" : "compute";
    put(&object, "bound", isfinite(result->floor_us) ? json_string(bound) : json_null());
    put(&object, "floor_us", real(result->floor_us));
    put(&object, "peak_fraction", real(result->peak_fraction));
    bool paired = result->peak_fraction_p90 > 0;
    put(&object, "peak_fraction_p10", paired ? real(result->peak_fraction_p10) : json_null());
    put(&object, "peak_fraction_p90", paired ? real(result->peak_fraction_p90) : json_null());
    put(&object, "weight", real(result->weight));
    put(&object, "baseline_us", result->baseline_us > 0 ? real(result->baseline_us) : json_null());
    put(&object, "work", json_string(result->work));
    put(&object, "command", json_string(result->command));
    put(&object, "rest_ms", json_integer(result->rest_ms));
    return object;
}

int json_write(const char *path, const struct result *results, int count)
{
    json_t *array = json_array();
    for (int i = 0; i < count; i++)
        json_array_append_new(array, result_json(&results[i]));
    if ((int)json_array_size(array) != count) {
        json_decref(array);
        return cli_error("--json: out of memory");
    }
    const size_t style = JSON_INDENT(2) | JSON_REAL_PRECISION(9);
    bool to_stdout = strcmp(path, "-") == 0;
    struct output output;
    int status = CLI_OK;
    if (to_stdout) /* what fails here shows at the end */
        json_dumpf(array, stdout, style), putchar('\n');
    else if ((status = output_open(&output, "--json", path)) == CLI_OK)
        status = output_close(&output, json_dumpf(array, output.stream, style) == 0);
    json_decref(array);
    return status;
}

int baseline_read(const char *path, json_t **baseline)
{
    json_error_t error;
    *baseline = json_load_file(path, 0, &error);
    if (!*baseline)
        return error.line < 0 ? cli_error("--baseline: %s", error.text)
                              : cli_error("--baseline: %s: %s (line %d)", path, error.text, error.line);
    size_t i;
    json_t *entry;
    bool good = json_is_array(*baseline);
    json_array_foreach(*baseline, i, entry)
    {
        good = good && json_is_string(json_object_get(entry, "work")) &&
               json_is_number(json_object_get(entry, "median_us")) &&
               json_number_value(json_object_get(entry, "median_us")) > 0 &&
               json_number_value(json_object_get(entry, "median_us")) < 1e15;
    }
    if (good)
        return CLI_OK;
    json_decref(*baseline);
    *baseline = NULL;
    return cli_error("--baseline: %s is not an array of results with work and a positive median_us", path);
}

double baseline_find(const json_t *baseline, const struct result *result)
{
    double found = 0;
    int likeness = -1;
    size_t i;
    const json_t *entry;
    json_array_foreach((json_t *)baseline, i, entry)
    {
        if (strcmp(json_string_value(json_object_get(entry, "work")), result->work) != 0 ||
            json_integer_value(json_object_get(entry, "rest_ms")) != result->rest_ms) /* none in the entry: 0 */
            continue;
        const char *isa = json_string_value(json_object_get(entry, "isa"));
        int same = 2 * (json_integer_value(json_object_get(entry, "threads")) == result->point.at[AXIS_THREADS]) +
                   (isa && strcmp(isa, result->isa) == 0);
        if (same > likeness) {
            likeness = same;
            found = json_number_value(json_object_get(entry, "median_us"));
        }
    }
    return found;
}
