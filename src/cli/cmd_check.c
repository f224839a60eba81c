/* SPDX-License-Identifier: MIT
 *
 * cmd_check.c - msa check: runs case files and compares with the answers they hold, one line a case.
 */
#include "cli.h"
#include "problem.h"

#include <stdio.h>

static int show_hash;

static struct poptOption option_table[] = {
    {"hash", 0, POPT_ARG_NONE, &show_hash, 0, "print a hash of the results' bits with each case", NULL},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, run_option_table, 0, "How to run:", NULL},
    POPT_AUTOHELP POPT_TABLEEND};

static int check_problem(struct problem *problem, const struct device *device, const struct run_options *options)
{
    struct results results;
    int status = problem_run(problem, device, options, &results);
    if (status != CLI_OK)
        return status;
    char summary[1024] = "";
    status = results_compare(&results, problem, summary, sizeof(summary));
    if (status != CLI_BAD) {
        printf("%s  ", status == CLI_OK ? "ok  " : "FAIL");
        print_name(stdout, problem->name);
        printf(": %s, %s: %s", op_names[problem->op], results.kernels, summary);
        if (show_hash)
            printf(", hash %016llx", (unsigned long long)results_hash(&results));
        printf("\n");
        fflush(stdout); /* in step with stderr */
    }
    tensor_file_free(&results.file);
    return status;
}

static int check_case(const char *path, const struct device *device, const struct run_options *options)
{
    struct tensor_file file;
    if (tensor_file_read(&file, path) != CLI_OK)
        return CLI_BAD;
    struct problem problem;
    int status = problem_from_file(&problem, &file, path);
    if (status == CLI_OK)
        status = check_problem(&problem, device, options);
    tensor_file_free(&file);
    return status;
}

static int check_cases(poptContext context, const struct run_options *options)
{
    struct device device;
    if (device_open(&device, options) != CLI_OK)
        return CLI_BAD;
    int highest = CLI_OK;
    const char *path;
    while ((path = poptGetArg(context))) {
        int status = check_case(path, &device, options);
        if (status > highest)
            highest = status;
    }
    device_close(&device);
    return highest;
}

int cmd_check(int argc, const char **argv)
{
    poptContext context;
    if (options_parse(argc, argv, option_table, "[OPTION...] CASE...", &context) != CLI_OK)
        return CLI_BAD;
    struct run_options options;
    int status;
    if (!poptPeekArg(context))
        status = cli_error("check: no case file is given");
    else if ((status = run_options_read(&options)) == CLI_OK)
        status = check_cases(context, &options);
    poptFreeContext(context);
    return status;
}
