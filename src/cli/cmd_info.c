/* SPDX-License-Identifier: MIT
 *
 * cmd_info.c - msa info: devices, instruction sets, kernels; as text, as JSON, or as the support matrix in Markdown.
 */
#include "axes.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

static int as_json, as_markdown;

static struct poptOption option_table[] = {
    {"json", 0, POPT_ARG_NONE, &as_json, 0, "print one JSON object", NULL},
    {"markdown", 0, POPT_ARG_NONE, &as_markdown, 0, "print the matrix of kernels as a Markdown table", NULL},
    POPT_AUTOHELP POPT_TABLEEND};

static bool isa_is_available(const char *isa)
{
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;
    msa_context *context;
    options.isa = isa;
    bool available = msa_context_create(&options, &context) == MSA_SUCCESS;
    msa_context_destroy(context);
    return available;
}

/* The context of a CUDA device; NULL after the last. */
static msa_context *open_cuda(int32_t ordinal)
{
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;
    msa_context *context;
    options.device = ordinal;
    return msa_context_create(&options, &context) == MSA_SUCCESS ? context : NULL;
}

static bool get_kernel(const msa_context *context, size_t index, msa_kernel_info *kernel)
{
    *kernel = (msa_kernel_info)MSA_KERNEL_INFO_INIT;
    return msa_kernel_get(context, index, kernel) == MSA_SUCCESS;
}

/* ---- text */

static void print_text(const msa_context *cpu, const msa_context_info *info)
{
    printf("msa %s\n\ncpu: %s, %d thread%s, instruction set %s (available:", msa_version(), info->device_name,
           info->num_threads, info->num_threads == 1 ? "" : "s", info->isa);
    for (int i = 1; isa_names[i]; i++) { /* all but "best" */
        if (isa_is_available(isa_names[i]))
            printf(" %s", isa_names[i]);
    }
    printf(")\n");
    msa_context *cuda = open_cuda(0);
    if (!cuda)
        printf("cuda: none (%s)\n", msa_last_error());
    for (int32_t ordinal = 0; cuda; cuda = open_cuda(++ordinal)) {
        msa_context_info device = MSA_CONTEXT_INFO_INIT;
        msa_context_get_info(cuda, &device);
        printf("cuda:%d: %s, compute capability %d.%d, image %s\n", ordinal, device.device_name,
               device.compute_capability / 10, device.compute_capability % 10, device.isa);
        msa_context_destroy(cuda);
    }
    printf("\nkernels (* runs here):\n");
    msa_kernel_info kernel;
    for (size_t i = 0; get_kernel(cpu, i, &kernel); i++)
        printf("%c %-36s %-17s %-10s %s\n", kernel.available ? '*' : ' ', kernel.name, kernel.operation, kernel.isa,
               kernel.formats);
}

/* ---- JSON */

static json_t *describe_device(const char *name, const msa_context_info *info)
{
    return json_pack("{s:s, s:s, s:s, s:i, s:i}", "device", name, "name", info->device_name, "isa", info->isa,
                     "threads", info->num_threads, "compute_capability", info->compute_capability);
}

static int print_json(const msa_context *cpu, const msa_context_info *info)
{
    json_t *devices = json_array(), *isas = json_array(), *kernels = json_array();
    int failed = json_array_append_new(devices, describe_device("cpu", info));
    msa_context *cuda;
    for (int32_t ordinal = 0; (cuda = open_cuda(ordinal)); ordinal++) {
        char name[24];
        msa_context_info device = MSA_CONTEXT_INFO_INIT;
        snprintf(name, sizeof(name), "cuda:%d", ordinal);
        msa_context_get_info(cuda, &device);
        failed |= json_array_append_new(devices, describe_device(name, &device));
        msa_context_destroy(cuda);
    }
    for (int i = 1; isa_names[i]; i++) { /* all but "best" */
        if (isa_is_available(isa_names[i]))
            failed |= json_array_append_new(isas, json_string(isa_names[i]));
    }
    msa_kernel_info kernel;
    for (size_t i = 0; get_kernel(cpu, i, &kernel); i++) {
        json_t *entry = json_pack("{s:s, s:s, s:s, s:s, s:b}", "name", kernel.name, "operation", kernel.operation,
                                  "formats", kernel.formats, "isa", kernel.isa, "available", kernel.available);
        failed |= json_array_append_new(kernels, entry);
    }
    json_t *root = json_pack("{s:s, s:o, s:o, s:o}", "version", msa_version(), "devices", devices, "cpu_isas", isas,
                             "kernels", kernels);
    failed |= !root || (json_dumpf(root, stdout, JSON_INDENT(2)) && !ferror(stdout)); /* that, finish_output says */
    json_decref(root);
    printf("\n");
    return failed ? cli_error("info: no memory for the JSON text") : CLI_OK;
}

/* ---- Markdown: a row per operation and formats, a column per instruction set, in the order of the list */

static bool same_row(const msa_kernel_info *a, const msa_kernel_info *b)
{
    return strcmp(a->operation, b->operation) == 0 && strcmp(a->formats, b->formats) == 0;
}

static bool same_column(const msa_kernel_info *a, const msa_kernel_info *b)
{
    return strcmp(a->isa, b->isa) == 0;
}

/* Whether entry `index` is the first of its row or column. */
static bool is_first(size_t index, bool (*same)(const msa_kernel_info *a, const msa_kernel_info *b))
{
    msa_kernel_info kernel, earlier;
    get_kernel(NULL, index, &kernel);
    for (size_t i = 0; i < index && get_kernel(NULL, i, &earlier); i++) {
        if (same(&earlier, &kernel))
            return false;
    }
    return true;
}

static void print_cell(const msa_kernel_info *row, const msa_kernel_info *column)
{
    msa_kernel_info kernel;
    for (size_t i = 0; get_kernel(NULL, i, &kernel); i++) {
        if (same_row(&kernel, row) && same_column(&kernel, column)) {
            printf(" `%s` |", kernel.name);
            return;
        }
    }
    printf(" |");
}

static void print_markdown(void)
{
    msa_kernel_info row, column;
    printf("| operation | formats |");
    for (size_t i = 0; get_kernel(NULL, i, &column); i++) {
        if (is_first(i, same_column))
            printf(" %s |", column.isa);
    }
    printf("\n|---|---|");
    for (size_t i = 0; get_kernel(NULL, i, &column); i++) {
        if (is_first(i, same_column))
            printf("---|");
    }
    printf("\n");
    for (size_t i = 0; get_kernel(NULL, i, &row); i++) {
        if (!is_first(i, same_row))
            continue;
        printf("| %s | %s |", row.operation, row.formats);
        for (size_t j = 0; get_kernel(NULL, j, &column); j++) {
            if (is_first(j, same_column))
                print_cell(&row, &column);
        }
        printf("\n");
    }
}

static int print_devices(void)
{
    msa_context *cpu;
    if (msa_context_create(NULL, &cpu) != MSA_SUCCESS)
        return cli_library_error("info");
    msa_context_info info = MSA_CONTEXT_INFO_INIT;
    int status = CLI_OK;
    if (msa_context_get_info(cpu, &info) != MSA_SUCCESS)
        status = cli_library_error("info");
    else if (as_json)
        status = print_json(cpu, &info);
    else
        print_text(cpu, &info);
    msa_context_destroy(cpu);
    return status;
}

int cmd_info(int argc, const char **argv)
{
    poptContext context;
    if (options_parse(argc, argv, option_table, "[OPTION...]", &context) != CLI_OK)
        return CLI_BAD;
    int status;
    if (poptPeekArg(context)) {
        status = cli_error("info: '%s' is not expected, there are no arguments", poptPeekArg(context));
    } else if (as_json && as_markdown) {
        status = cli_error("info: --json and --markdown exclude each other");
    } else if (as_markdown) {
        print_markdown();
        status = CLI_OK;
    } else {
        status = print_devices();
    }
    poptFreeContext(context);
    return status;
}
