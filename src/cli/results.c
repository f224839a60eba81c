/* SPDX-License-Identifier: MIT
 *
 * results.c - runs a problem once and fetches what it gave.
 *
 * Before the run all outputs are filled with one byte. What the operation must leave alone (padding rows, scores of
 * pages that are no history) is checked to hold that byte still, and then gets a fixed value, so that results can be
 * compared.
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Adds a result; source NULL: the operation has none. */
static int fetch(struct execution *x, struct results *results, const char *name, enum tensor_dtype dtype, int rank,
                 const int64_t *shape, const void *source)
{
    if (!source)
        return CLI_OK;
    struct tensor *tensor = tensor_file_add(&results->file, name, dtype, rank, shape);
    return tensor ? device_copy_out(x->device, tensor->data, source, tensor->bytes) : CLI_BAD;
}

static int fetch_all(struct execution *x, struct results *results)
{
    const struct problem *p = x->problem;
    const int64_t heads = p->num_index_heads, rows = p->total_q, q_heads = p->num_q_heads;
    enum tensor_dtype out_dtype = p->out_dtype == MSA_FP16 ? TENSOR_F16 : TENSOR_BF16;
    if (p->out_dtype == MSA_DTYPE_DEFAULT && p->q_dtype == MSA_FP16)
        out_dtype = TENSOR_F16;
    const char *out = x->attention_args.out;
    if (fetch(x, results, "out", out_dtype, 3, (int64_t[]){rows, q_heads, MSA_HEAD_DIM}, out) != CLI_OK ||
        fetch(x, results, "lse", TENSOR_F32, 2, (int64_t[]){rows, q_heads}, x->attention_args.lse) != CLI_OK ||
        fetch(x, results, "scores", TENSOR_F32, 3, (int64_t[]){heads, rows, p->max_pages}, x->index_args.scores) !=
            CLI_OK ||
        fetch(x, results, "topk", TENSOR_I32, 3, (int64_t[]){heads, rows, p->topk}, x->index_args.topk) != CLI_OK ||
        fetch(x, results, "num_valid_pages", TENSOR_I32, 1, &rows, x->index_args.num_valid_pages) != CLI_OK)
        return CLI_BAD;
    snprintf(results->kernels, sizeof(results->kernels), "%s%s%s", x->index_plan ? x->index_info.kernel : "",
             x->index_plan && x->attention_plan ? ", " : "", x->attention_plan ? x->attention_info.kernel : "");
    return CLI_OK;
}

/* ---- what must not have been written */

struct settling {
    const struct execution *execution;
    const struct results *results;
    const int64_t *positions;
    uint32_t untouched; /* output_byte, four times */
};

/* Words first..first+count-1 of a row must be untouched; they get the value. */
static int settle_words(const struct settling *s, const struct tensor *tensor, uint32_t *words, int64_t count,
                        uint32_t value)
{
    for (int64_t i = 0; i < count; i++) {
        if (words[i] != s->untouched) {
            cli_error("%s: %s: word %lld was written, but must keep its bits", s->execution->problem->name,
                      tensor->name, (long long)(words + i - (uint32_t *)tensor->data));
            return CLI_DIFFERS;
        }
        words[i] = value;
    }
    return CLI_OK;
}

/* Padding rows of [outer, total_q, ...]. */
static int settle_padding(const struct settling *s, const char *name, int64_t outer, uint32_t value)
{
    struct tensor *tensor = tensor_file_find(&s->results->file, name);
    int64_t rows = s->execution->problem->total_q;
    if (!tensor || !tensor->bytes)
        return CLI_OK;
    int64_t words = (int64_t)tensor->bytes / 4 / (outer * rows);
    int status = CLI_OK;
    for (int64_t i = 0; status == CLI_OK && i < outer * rows; i++) {
        if (s->positions[i % rows] == POSITION_PADDING)
            status = settle_words(s, tensor, (uint32_t *)tensor->data + i * words, words, value);
    }
    return status;
}

/* Scores of all pages that are not history pages of their row. */
static int settle_scores(const struct settling *s)
{
    const struct problem *problem = s->execution->problem;
    struct tensor *tensor = tensor_file_find(&s->results->file, "scores");
    if (!tensor)
        return CLI_OK;
    uint32_t *words = tensor->data;
    int status = CLI_OK;
    for (int64_t i = 0; status == CLI_OK && i < problem->num_index_heads * problem->total_q; i++) {
        int64_t position = s->positions[i % problem->total_q];
        int64_t history = position < 0 ? 0 : position / MSA_PAGE_SIZE;
        status = settle_words(s, tensor, words + i * problem->max_pages + history, problem->max_pages - history,
                              0x7FC00000 /* NaN */);
    }
    return status;
}

static int settle(const struct execution *x, struct results *results)
{
    const int64_t heads = x->problem->num_index_heads;
    struct settling s = {x, results, problem_positions(x->problem), (uint32_t)x->output_byte * 0x01010101u};
    if (!s.positions)
        return CLI_BAD;
    int status = settle_padding(&s, "out", 1, 0);
    if (status == CLI_OK)
        status = settle_padding(&s, "lse", 1, 0xFF800000 /* -inf */);
    if (status == CLI_OK)
        status = settle_padding(&s, "topk", heads, 0xFFFFFFFF /* -1 */);
    if (status == CLI_OK)
        status = settle_padding(&s, "num_valid_pages", 1, 0);
    if (status == CLI_OK)
        status = settle_scores(&s);
    free((void *)s.positions);
    return status;
}

/* ---- the run */

static int run_steps(struct execution *x)
{
    if (x->index_plan && (execution_index_prepare(x) != CLI_OK || execution_index_run(x) != CLI_OK))
        return CLI_BAD;
    if (x->attention_plan && (execution_attention_prepare(x) != CLI_OK || execution_attention_run(x) != CLI_OK))
        return CLI_BAD;
    return execution_check_errors(x);
}

int problem_run(struct problem *problem, const struct device *device, const struct run_options *options,
                struct results *results)
{
    struct execution x;
    *results = (struct results)RESULTS_INIT;
    if (options->poison >= 0 && problem_poison(problem, options->poison) != CLI_OK)
        return CLI_BAD;
    if (execution_open(&x, problem, device, options) != CLI_OK)
        return CLI_BAD;
    progress_begin(problem->name);
    int status = run_steps(&x);
    progress_end();
    if (status == CLI_OK)
        status = fetch_all(&x, results);
    if (status == CLI_OK)
        status = settle(&x, results);
    if (status != CLI_OK)
        tensor_file_free(&results->file);
    execution_close(&x);
    return status;
}
