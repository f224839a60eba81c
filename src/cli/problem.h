/* SPDX-License-Identifier: MIT
 *
 * problem.h - runs a problem through the public API, and compares what it gives.
 *
 * An execution holds everything that running needs: plans, workspace, output buffers. Its steps are separate calls so
 * that a benchmark can time each; for a layer the order is index_prepare, index_run, attention_prepare, attention_run.
 */
#ifndef MSA_PROBLEM_H
#define MSA_PROBLEM_H

#include "case.h"
#include "cli.h"
#include "device.h"

enum { EXECUTION_MAX_BUFFERS = 40 };

struct execution {
    const struct problem *problem;
    const struct device *device;
    bool decode;                              /* the decode plans */
    int64_t table_width;                      /* columns of page_table and scores: the plans' max_pages */
    int output_byte;                          /* what output buffers are filled with before a run */
    msa_plan *index_plan, *attention_plan;    /* NULL where the operation has none */
    msa_plan_info index_info, attention_info; /* strings live as long as the plans */
    msa_step index_step, attention_step;
    msa_index_args index_args;
    msa_attention_args attention_args;
    struct {
        const struct tensor *source; /* the input it is a copy of, or NULL */
        void *data;
    } buffers[EXECUTION_MAX_BUFFERS]; /* device memory that it owns */
    int num_buffers;
    const struct execution *inputs; /* whose copies of inputs it uses, or NULL */
};

/* Plans, allocates and binds everything; runs nothing. CLI_OK, or CLI_BAD after a message (nothing is left to free). */
int execution_open(struct execution *execution, const struct problem *problem, const struct device *device,
                   const struct run_options *options);
/* Another execution of the same problem, with its own plans, workspace, outputs and queries. Other inputs are the copies
 * that `first` has, so close it before that one. */
int execution_open_beside(struct execution *execution, const struct execution *first,
                          const struct run_options *options);
void execution_close(struct execution *execution);
/* One step each; CLI_OK or CLI_BAD. On a CPU they return when the work is done. */
int execution_index_prepare(struct execution *execution);
int execution_index_run(struct execution *execution);
int execution_attention_prepare(struct execution *execution);
int execution_attention_run(struct execution *execution);
/* Waits for the work. CLI_OK if no plan has an error bit set, else CLI_BAD after a message that says what they mean. */
int execution_check_errors(struct execution *execution);

/* ---- results.c */

/* What a run gave: tensors out, lse, scores (NaN where nothing is written), topk, num_valid_pages, as far as the
 * operation has them. Padding rows hold 0, -inf, NaN, -1 and 0. */
struct results {
    struct tensor_file file;
    char kernels[128]; /* the main kernel of each plan, separated by ", " */
};
#define RESULTS_INIT         \
    {                        \
        TENSOR_FILE_INIT, "" \
    }

/* Poisons if asked, opens, runs all steps once, fetches, closes. CLI_OK; CLI_BAD after a message (error bits too);
 * CLI_DIFFERS after a message if a place was written that must keep its bits. */
int problem_run(struct problem *problem, const struct device *device, const struct run_options *options,
                struct results *results);

/* ---- compare.c */

/* FNV-1a of names, shapes and bits of all results. */
uint64_t results_hash(const struct results *results);
/* Compares with expected.*; appends a summary of each compared tensor to `line`. CLI_OK, CLI_DIFFERS, or CLI_BAD after
 * a message if the file holds nothing to compare with. */
int results_compare(const struct results *results, const struct problem *problem, char *line, size_t line_size);

#endif
