/* SPDX-License-Identifier: MIT
 *
 * cmd_run.c - msa run: runs a case file and writes what it gives.
 */
#include "cli.h"
#include "problem.h"

#include <stdio.h>
#include <sys/stat.h>

static char **outputs;
static const char *output;
static int show_hash;

static struct poptOption option_table[] = {
    {"output", 'o', POPT_ARG_ARGV, &outputs, 0, "file to write: out, lse, scores, topk, num_valid_pages", "OUT"},
    {"hash", 0, POPT_ARG_NONE, &show_hash, 0, "print a hash of the results' bits", NULL},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, run_option_table, 0, "How to run:", NULL},
    POPT_AUTOHELP POPT_TABLEEND};

static int write_results(struct results *results, const struct problem *problem, const struct run_options *options)
{
    struct tensor_file *file = &results->file;
    if (tensor_file_set_metadata(file, "op", op_names[problem->op]) != CLI_OK ||
        tensor_file_set_metadata(file, "kernels", results->kernels) != CLI_OK ||
        tensor_file_set_metadata(file, "precision", precision_names[options->precision]) != CLI_OK ||
        tensor_file_set_metadata(file, "version", msa_version()) != CLI_OK)
        return CLI_BAD;
    return tensor_file_write(file, output);
}

static int run_problem(struct problem *problem, const struct run_options *options)
{
    struct device device;
    if (device_open(&device, options) != CLI_OK)
        return CLI_BAD;
    struct results results;
    int status = problem_run(problem, &device, options, &results);
    if (status == CLI_OK)
        status = write_results(&results, problem, options);
    if (status == CLI_OK && show_hash)
        printf("%016llx\n", (unsigned long long)results_hash(&results));
    tensor_file_free(&results.file);
    device_close(&device);
    return status;
}

/* Whether two paths lead to one file; a file that is not there is like no other. */
static bool same_file(const char *a, const char *b)
{
    struct stat first, second;
    return stat(a, &first) == 0 && stat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

static int run_case(const char *path, const struct run_options *options)
{
    struct tensor_file file;
    if (tensor_file_read(&file, path) != CLI_OK)
        return CLI_BAD;
    struct problem problem;
    int status = problem_from_file(&problem, &file, path);
    if (status == CLI_OK)
        status = run_problem(&problem, options);
    tensor_file_free(&file);
    return status;
}

int cmd_run(int argc, const char **argv)
{
    poptContext context;
    if (options_parse(argc, argv, option_table, "[OPTION...] CASE -o OUT", &context) != CLI_OK)
        return CLI_BAD;
    struct run_options options;
    const char *path = poptGetArg(context);
    int status;
    if (!path || poptPeekArg(context))
        status = cli_error("run: exactly one case file is needed");
    else if (output_read("run", "OUT", outputs, &output) != CLI_OK)
        status = CLI_BAD;
    else if (same_file(path, output))
        status = cli_error("run: -o %s: is the case file itself", output);
    else if ((status = run_options_read(&options)) == CLI_OK)
        status = run_case(path, &options);
    poptFreeContext(context);
    return status;
}
