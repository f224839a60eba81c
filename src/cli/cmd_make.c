/* SPDX-License-Identifier: MIT
 *
 * cmd_make.c - msa make: a case file of any shape, format and pattern.
 */
#include "device.h"
#include "expected.h"
#include "problem.h"
#include "workload.h"

#include <string.h>

static char **outputs, *operation;
static const char *output;
static int with_expected;

static struct poptOption option_table[] = {
    {"output", 'o', POPT_ARG_ARGV, &outputs, 0, "file to write", "CASE"},
    {"op", 0, POPT_ARG_STRING, &operation, 0, "operation (default prefill)", "prefill|decode|index|layer"},
    {"with-expected", 0, POPT_ARG_NONE, &with_expected, 0,
     "add the right answers, computed in double precision (slow: for small cases)", NULL},
    POPT_TABLEEND};

/* Opens plans for the problem, so that the library refuses here what it would refuse when the file is run. */
static int check_problem(const struct workload *workload)
{
    struct run_options options = RUN_OPTIONS_INIT;
    struct device device;
    struct execution execution;
    if (device_open(&device, &options) != CLI_OK)
        return CLI_BAD;
    int status = execution_open(&execution, &workload->problem, &device, &options);
    if (status == CLI_OK)
        execution_close(&execution);
    device_close(&device);
    return status;
}

static int make(const struct point *point)
{
    struct shape shape;
    struct workload workload;
    int threads = point->at[AXIS_THREADS] ? (int)point->at[AXIS_THREADS] : host_threads();
    int status = shape_from_point(&shape, point);
    if (status == CLI_OK)
        status = workload_open(&workload, point, &shape, 0, threads);
    shape_free(&shape);
    if (status != CLI_OK)
        return status;
    status = check_problem(&workload);
    if (status == CLI_OK && with_expected)
        status = expected_add(&workload, threads);
    if (status == CLI_OK)
        status = tensor_file_write(&workload.file, output);
    workload_close(&workload);
    return status;
}

static int read_point(struct point *point)
{
    int op = BENCH_PREFILL;
    static const char *const names[] = {"prefill", "decode", "index", "layer", NULL}; /* the first of bench_op_names */
    if (operation && parse_choice("--op", operation, names, &op) != CLI_OK)
        return CLI_BAD;
    struct axes axes;
    enum bench_op ops[] = {(enum bench_op)op};
    int position[AXIS_COUNT];
    if (axes_read(&axes, ops[0], NULL, ops, 1) != CLI_OK)
        return CLI_BAD;
    if (op == BENCH_LAYER && axes.values[AXIS_DECODE][0])
        return cli_error("--decode: a layer's case is the same for all plans; msa run has --plan");
    for (int a = 0; a < AXIS_COUNT; a++) {
        if (axis_is_of_runs((enum axis)a) && axes.count[a] && axes.values[a][0])
            return cli_error("--%s: a case does not say how it is run", axis_name((enum axis)a));
    }
    for (int a = 0; a < AXIS_COUNT; a++) {
        if (axes.count[a] > 1)
            return cli_error("--%s: a case has one value, not %d", axis_name((enum axis)a), axes.count[a]);
    }
    axes_first(&axes, point, position);
    return CLI_OK;
}

int cmd_make(int argc, const char **argv)
{
    struct poptOption table[] = {{NULL, 0, POPT_ARG_INCLUDE_TABLE, option_table, 0, "What to make:", NULL},
                                 {NULL, 0, POPT_ARG_INCLUDE_TABLE, axes_options(true), 0, "Axes:", NULL},
                                 POPT_AUTOHELP POPT_TABLEEND};
    poptContext context;
    if (options_parse(argc, argv, table, "[OPTION...] -o CASE", &context) != CLI_OK)
        return CLI_BAD;
    const char *rest = poptGetArg(context);
    struct point point;
    int status;
    if (rest)
        status = cli_error("make: '%s' is one argument too many", rest);
    else if ((status = read_point(&point)) == CLI_OK &&
             (status = output_read("make", "CASE", outputs, &output)) == CLI_OK)
        status = make(&point);
    poptFreeContext(context);
    return status;
}
