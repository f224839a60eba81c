/* SPDX-License-Identifier: MIT
 *
 * checksample CASE [ROWS]: runs a case file of any size and compares a sample of its rows with the oracle: the scores
 * and lists of every index head, and the output and LSE of one query head of each KV head.
 */
#include "harness.h"
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tally {
    const char *what;
    long long checked, wrong;
    double largest; /* error of a right value */
};

enum { SCORES, LISTS, OUT, LSE, NUM_TALLIES };
static struct tally tallies[NUM_TALLIES] = {{.what = "scores"}, {.what = "lists"}, {.what = "out"}, {.what = "lse"}};

static void count(struct tally *tally, bool right, double error)
{
    tally->checked++;
    tally->wrong += !right;
    tally->largest = right && error > tally->largest ? error : tally->largest;
}

static msa_index_desc index_desc(const struct problem *problem)
{
    msa_index_desc desc = MSA_INDEX_DESC_INIT;
    desc.q_dtype = problem->index_q_dtype;
    desc.k_dtype = problem->index_k_dtype;
    desc.num_index_heads = problem->num_index_heads;
    desc.topk = problem->topk;
    desc.init_pages = problem->init_pages;
    desc.local_pages = problem->local_pages;
    desc.topk_order = problem->topk_order;
    desc.max_kv_len = problem->max_pages * MSA_PAGE_SIZE;
    return desc;
}

static msa_attention_desc attention_desc(const struct problem *problem)
{
    msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
    desc.q_dtype = problem->q_dtype;
    desc.kv_dtype = problem->kv_dtype;
    desc.out_dtype = problem->out_dtype ? problem->out_dtype : problem->q_dtype == MSA_FP16 ? MSA_FP16 : MSA_BF16;
    desc.num_q_heads = problem->num_q_heads;
    desc.num_kv_heads = problem->num_kv_heads;
    desc.num_lists = problem->op == OP_LAYER ? problem->num_index_heads : problem->num_kv_heads;
    desc.topk = problem->topk;
    desc.sm_scale = problem->sm_scale;
    desc.v_scale_order = problem->v_scale_order;
    desc.max_kv_len = problem->max_pages * MSA_PAGE_SIZE;
    return desc;
}

static void check_index(const struct execution *execution, const msa_index_desc *desc, int64_t row)
{
    const msa_index_args *args = &execution->index_args;
    int64_t total_q = execution->index_step.total_q, width = execution->table_width;
    double *scores = malloc((size_t)width * sizeof *scores), *bounds = malloc((size_t)width * sizeof *bounds);
    for (int32_t head = 0; scores && bounds && head < desc->num_index_heads; head++) {
        int32_t n = oracle_index_row(desc, &execution->index_step, args, row, head, scores, bounds);
        const float *actual = args->scores + (head * total_q + row) * width;
        for (int32_t p = 0; p < n - 1; p++)
            count(&tallies[SCORES], is_near(MSA_F32, actual[p], scores[p], bounds[p]), fabs(actual[p] - scores[p]));
        /* The list must follow from the library's own scores: near ties may fall either way in the oracle's. */
        int32_t list[MSA_MAX_TOPK];
        oracle_select_row(actual, n, desc->topk, desc->init_pages, desc->local_pages, desc->topk_order, list);
        const int32_t *listed = args->topk + (head * total_q + row) * desc->topk;
        count(&tallies[LISTS], memcmp(list, listed, (size_t)desc->topk * sizeof *list) == 0, 0);
    }
    free(scores);
    free(bounds);
}

static void check_attention(const struct execution *execution, const msa_attention_desc *desc, int64_t row)
{
    const msa_attention_args *args = &execution->attention_args;
    int32_t ratio = desc->num_q_heads / desc->num_kv_heads;
    for (int32_t kv_head = 0; kv_head < desc->num_kv_heads; kv_head++) {
        int32_t head = kv_head * ratio + (int32_t)(row % ratio);
        int64_t at = row * desc->num_q_heads + head;
        oracle_state state;
        oracle_attention_row(desc, &execution->attention_step, args, row, head, &state);
        const uint16_t *out = (const uint16_t *)args->out + at * MSA_HEAD_DIM;
        for (int d = 0; d < MSA_HEAD_DIM; d++) {
            double actual = oracle_value(desc->out_dtype, &out[d]);
            count(&tallies[OUT], is_near(desc->out_dtype, actual, state.out[d], state.out_bound[d]),
                  fabs(actual - state.out[d]));
        }
        count(&tallies[LSE], is_near(MSA_F32, args->lse[at], state.lse, state.lse_bound),
              fabs(args->lse[at] - state.lse));
    }
}

static int check_sample(struct problem *problem, int64_t rows)
{
    struct run_options options = RUN_OPTIONS_INIT;
    struct device device;
    struct execution execution;
    if (device_open(&device, &options))
        return CLI_BAD;
    int status = execution_open(&execution, problem, &device, &options);
    if (status) {
        device_close(&device);
        return status;
    }
    bool index = op_has_index(problem->op), attention = op_has_attention(problem->op);
    if (index && !(status = execution_index_prepare(&execution)))
        status = execution_index_run(&execution);
    if (attention && !status && !(status = execution_attention_prepare(&execution)))
        status = execution_attention_run(&execution);
    int64_t *positions = status ? NULL : problem_positions(problem);
    msa_index_desc indexer = index_desc(problem);
    msa_attention_desc attender = attention_desc(problem);
    rows = rows < problem->total_q ? rows : problem->total_q;
    for (int64_t i = 0; positions && i < rows; i++) {
        int64_t row = i == 0 ? 0 : i * (problem->total_q - 1) / (rows - 1); /* the first, the last, and between */
        if (positions[row] == POSITION_PADDING)
            continue;
        if (index)
            check_index(&execution, &indexer, row);
        if (attention)
            check_attention(&execution, &attender, row);
    }
    if (!positions)
        status = CLI_BAD;
    free(positions);
    execution_close(&execution);
    device_close(&device);
    return status;
}

int main(int argc, char **argv)
{
    int64_t rows = 16;
    if (argc < 2 || argc > 3 || (argc == 3 && parse_int("ROWS", argv[2], 1, INT32_MAX, &rows)))
        return cli_error("usage: checksample CASE [ROWS]");
    struct tensor_file file;
    struct problem problem;
    if (tensor_file_read(&file, argv[1]))
        return CLI_BAD;
    int status = problem_from_file(&problem, &file, argv[1]);
    if (!status)
        status = check_sample(&problem, rows);
    tensor_file_free(&file);
    if (status)
        return status;
    long long wrong = 0, checked = 0;
    printf("%lld rows against the oracle:\n", (long long)rows);
    for (int i = 0; i < NUM_TALLIES; i++) {
        const struct tally *tally = &tallies[i];
        if (tally->checked)
            printf("  %-6s %8lld checked, %lld wrong, largest error %.2g\n", tally->what, tally->checked, tally->wrong,
                   tally->largest);
        wrong += tally->wrong;
        checked += tally->checked;
    }
    return wrong || !checked ? CLI_DIFFERS : CLI_OK;
}
