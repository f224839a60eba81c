/* SPDX-License-Identifier: MIT
 *
 * options.c - parsing of argument lists, and the options that run and check share.
 */
#include "axes.h"
#include "output.h"

#include <string.h>
#include <unistd.h>

const char *const precision_names[] = {"exact", "fast", NULL};
const char *const strategy_names[] = {"auto", "query-major", "page-major", NULL};
static const char *const plan_names[] = {"auto", "prefill", "decode", NULL};

int options_parse(int argc, const char **argv, const struct poptOption *table, const char *arguments,
                  poptContext *context)
{
    *context = poptGetContext(NULL, argc, argv, table, 0);
    if (!*context)
        return cli_error("out of memory");
    poptSetOtherOptionHelp(*context, arguments);
    int code;
    while ((code = poptGetNextOpt(*context)) > 0)
        ;
    if (code < -1) {
        cli_error("%s: %s; see %s --help", poptBadOption(*context, POPT_BADOPTION_NOALIAS), poptStrerror(code),
                  argv[0]);
        *context = poptFreeContext(*context);
        return CLI_BAD;
    }
    return CLI_OK;
}

int output_read(const char *command, const char *kind, char **values, const char **path)
{
    if (!values)
        return cli_error("%s: -o %s is missing", command, kind);
    if (values[1])
        return cli_error("%s: -o is given twice: '%s' and '%s'", command, values[0], values[1]);
    *path = values[0];
    if (!**path || strcmp(*path, "-") == 0)
        return cli_error("%s: -o '%s' cannot be written: the name of a file is needed", command, *path);
    return output_check("-o", *path);
}

static struct {
    char *device, *threads, *isa, *precision, *strategy, *plan, *poison;
} texts;

struct poptOption run_option_table[] = {
    {"device", 0, POPT_ARG_STRING, &texts.device, 0, "where to compute (default cpu)", "cpu|cuda[:N]"},
    {"threads", 0, POPT_ARG_STRING, &texts.threads, 0, "CPU threads (default 0: all)", "N"},
    {"isa", 0, POPT_ARG_STRING, &texts.isa, 0, "cap on the CPU instruction set (default best; see msa info)",
     "best|c|avx2|avx512|avx512bf16|amx|neon"},
    {"precision", 0, POPT_ARG_STRING, &texts.precision, 0, "default exact", "exact|fast"},
    {"strategy", 0, POPT_ARG_STRING, &texts.strategy, 0, "default auto", "auto|query-major|page-major"},
    {"plan", 0, POPT_ARG_STRING, &texts.plan, 0, "which plans to use; auto (default): those of the case's op",
     "auto|prefill|decode"},
    {"poison", 0, POPT_ARG_STRING, &texts.poison, 0,
     "fill all memory that no visible key names with this byte (0..255) first: results must not change", "BYTE"},
    POPT_TABLEEND};

int run_options_read(struct run_options *options)
{
    *options = (struct run_options)RUN_OPTIONS_INIT;
    int64_t threads = options->threads, poison = options->poison;
    int isa = 0, precision = options->precision, strategy = options->strategy, plan = options->plan;
    if ((texts.device && parse_device("--device", texts.device, &options->device)) ||
        (texts.threads && parse_int("--threads", texts.threads, 0, CLI_MAX_THREADS, &threads)) ||
        (texts.isa && parse_choice("--isa", texts.isa, isa_names, &isa)) ||
        (texts.precision && parse_choice("--precision", texts.precision, precision_names, &precision)) ||
        (texts.strategy && parse_choice("--strategy", texts.strategy, strategy_names, &strategy)) ||
        (texts.plan && parse_choice("--plan", texts.plan, plan_names, &plan)) ||
        (texts.poison && parse_int("--poison", texts.poison, 0, 255, &poison)))
        return CLI_BAD;
    options->threads = (int32_t)threads;
    options->isa = isa ? isa_names[isa] : NULL;
    options->precision = (msa_precision)precision;
    options->strategy = (msa_strategy)strategy;
    options->plan = (enum plan_kind)plan;
    options->poison = (int)poison;
    options->progress = isatty(STDERR_FILENO);
    return CLI_OK;
}
