/* SPDX-License-Identifier: MIT
 *
 * expected.c - right answers for a made case. The oracle (tests/oracle.c) shares no code with the library; it takes the
 * library's own argument structs, which are filled here from the tensors of the file, all of them dense.
 */
#include "expected.h"

#include "oracle.h"
#include "parallel.h"
#include "random.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct answer {
    struct workload *workload;
    msa_step step;
    msa_index_desc index_desc;
    msa_index_args index_args;
    msa_attention_desc attention_desc;
    msa_attention_args attention_args;
    struct tensor *out, *lse, *scores, *topk, *num_valid_pages;
    atomic_bool failed;
};

static const void *data_of(const struct tensor *tensor)
{
    return tensor ? tensor->data : NULL;
}

/* ---- index and selection */

/* Whether another order of the FP32 sums could choose other pages: a score outside the list comes within twice the
 * error bounds of one inside. */
static bool is_ambiguous(const double *scores, const double *bounds, int32_t history, const int32_t *ids, int32_t k)
{
    for (int32_t in = 0; in < k && ids[in] >= 0; in++) {
        for (int32_t page = 0; page < history && ids[in] < history; page++) {
            bool listed = false;
            for (int32_t i = 0; i < k; i++)
                listed |= ids[i] == page;
            if (!listed && scores[page] + 2 * bounds[page] >= scores[ids[in]] - 2 * bounds[ids[in]])
                return true;
        }
    }
    return false;
}

static void draw_again(const struct answer *answer, int64_t row, int32_t head, int64_t attempt)
{
    const struct problem *problem = &answer->workload->problem;
    int64_t heads = problem->num_index_heads, elements = problem->total_q * heads * MSA_HEAD_DIM;
    int64_t first = (row * heads + head) * MSA_HEAD_DIM;
    char *data = problem->index_q->data;
    fill_normal(problem->index_q_dtype, data + first * (int64_t)tensor_dtype_bytes(problem->index_q->dtype), NULL,
                attempt * elements + first, MSA_HEAD_DIM, (uint64_t)answer->workload->point.at[AXIS_SEED],
                STREAM_INDEX_Q, 1);
}

static void answer_index(struct answer *answer, int64_t row, int32_t head, double *scores, double *bounds)
{
    const struct problem *problem = &answer->workload->problem;
    int64_t at = head * problem->total_q + row;
    float *row_scores = (float *)answer->scores->data + at * problem->max_pages;
    int32_t *ids = (int32_t *)answer->topk->data + at * problem->topk, pages;
    for (int64_t attempt = 1;; attempt++) {
        pages = oracle_index_row(&answer->index_desc, &answer->step, &answer->index_args, row, head, scores, bounds);
        for (int32_t page = 0; page < pages; page++)
            row_scores[page] = page < pages - 1 ? (float)scores[page] : NAN; /* the own page has no score */
        oracle_select_row(row_scores, pages, problem->topk, 0, 1, MSA_TOPK_ORDER_PAGE, ids);
        if (!is_ambiguous(scores, bounds, pages - 1, ids, problem->topk))
            break;
        draw_again(answer, row, head, attempt);
    }
    ((int32_t *)answer->num_valid_pages->data)[row] = pages;
}

/* Each thread takes every threads-th row. */
static void answer_index_rows(void *arg, int thread, int threads)
{
    struct answer *answer = arg;
    const struct problem *problem = &answer->workload->problem;
    double *scores = malloc(2 * (size_t)problem->max_pages * sizeof(*scores));
    if (!scores)
        atomic_store(&answer->failed, true);
    for (int64_t row = thread; scores && row < problem->total_q; row += threads) {
        for (int32_t head = 0; head < problem->num_index_heads; head++)
            answer_index(answer, row, head, scores, scores + problem->max_pages);
        if (thread == 0)
            progress_update((double)row / (double)problem->total_q);
    }
    free(scores);
}

static int add_index(struct answer *answer)
{
    struct workload *workload = answer->workload;
    const struct problem *problem = &workload->problem;
    int64_t heads = problem->num_index_heads, rows = problem->total_q;
    answer->scores = tensor_file_add(&workload->file, "expected.scores", TENSOR_F32, 3,
                                     (int64_t[]){heads, rows, problem->max_pages});
    answer->topk =
        tensor_file_add(&workload->file, "expected.topk", TENSOR_I32, 3, (int64_t[]){heads, rows, problem->topk});
    answer->num_valid_pages =
        tensor_file_add(&workload->file, "expected.num_valid_pages", TENSOR_I32, 1, (int64_t[]){rows});
    if (!answer->scores || !answer->topk || !answer->num_valid_pages)
        return CLI_BAD;
    float *scores = answer->scores->data;
    for (int64_t i = 0; i < heads * rows * problem->max_pages; i++)
        scores[i] = NAN; /* nothing is written there */
    msa_index_desc *desc = &answer->index_desc;
    *desc = (msa_index_desc)MSA_INDEX_DESC_INIT;
    desc->q_dtype = problem->index_q_dtype;
    desc->k_dtype = problem->index_k_dtype;
    desc->num_index_heads = problem->num_index_heads;
    desc->topk = problem->topk;
    desc->max_batch = problem->batch;
    desc->max_total_q = problem->total_q;
    desc->max_kv_len = problem->max_pages * MSA_PAGE_SIZE;
    msa_index_args *args = &answer->index_args;
    *args = (msa_index_args)MSA_INDEX_ARGS_INIT;
    args->index_q = problem->index_q->data;
    args->index_k = problem->index_k.tensor->data;
    args->index_k_scale = data_of(problem->index_k_scale.tensor);
    args->num_pages = problem->num_index_pages;
    return CLI_OK;
}

/* ---- attention */

static void answer_attention_rows(void *arg, int thread, int threads)
{
    struct answer *answer = arg;
    const struct problem *problem = &answer->workload->problem;
    float *out = answer->out->data, *lse = answer->lse->data;
    for (int64_t row = thread; row < problem->total_q; row += threads) {
        for (int32_t head = 0; head < problem->num_q_heads; head++) {
            oracle_state state;
            oracle_attention_row(&answer->attention_desc, &answer->step, &answer->attention_args, row, head, &state);
            int64_t at = row * problem->num_q_heads + head;
            for (int d = 0; d < MSA_HEAD_DIM; d++)
                out[at * MSA_HEAD_DIM + d] = (float)state.out[d];
            lse[at] = (float)state.lse;
        }
        if (thread == 0)
            progress_update((double)row / (double)problem->total_q);
    }
}

static int add_attention(struct answer *answer)
{
    struct workload *workload = answer->workload;
    const struct problem *problem = &workload->problem;
    int64_t rows = problem->total_q, heads = problem->num_q_heads;
    answer->out =
        tensor_file_add(&workload->file, "expected.out", TENSOR_F32, 3, (int64_t[]){rows, heads, MSA_HEAD_DIM});
    answer->lse = tensor_file_add(&workload->file, "expected.lse", TENSOR_F32, 2, (int64_t[]){rows, heads});
    if (!answer->out || !answer->lse)
        return CLI_BAD;
    msa_attention_desc *desc = &answer->attention_desc;
    *desc = (msa_attention_desc)MSA_ATTENTION_DESC_INIT;
    desc->q_dtype = problem->q_dtype;
    desc->kv_dtype = problem->kv_dtype;
    desc->num_q_heads = problem->num_q_heads;
    desc->num_kv_heads = problem->num_kv_heads;
    desc->num_lists = problem->list ? problem->num_kv_heads : problem->num_index_heads;
    desc->topk = problem->topk;
    desc->sm_scale = problem->sm_scale;
    desc->max_batch = problem->batch;
    desc->max_total_q = problem->total_q;
    desc->max_kv_len = problem->max_pages * MSA_PAGE_SIZE;
    msa_attention_args *args = &answer->attention_args;
    *args = (msa_attention_args)MSA_ATTENTION_ARGS_INIT;
    args->q = problem->q->data;
    args->k = problem->k.tensor->data;
    args->v = problem->v.tensor->data;
    args->k_scale = data_of(problem->k_scale.tensor);
    args->v_scale = data_of(problem->v_scale.tensor);
    args->num_pages = problem->num_pages;
    answer->step.topk = problem->list ? problem->list->data : answer->topk->data;
    return CLI_OK;
}

int expected_add(struct workload *workload, int threads)
{
    const struct problem *problem = &workload->problem;
    struct answer answer = {.workload = workload, .step = MSA_STEP_INIT};
    answer.step.batch = problem->batch;
    answer.step.total_q = problem->total_q;
    answer.step.cu_seqlens_q = problem->cu_seqlens_q->data;
    answer.step.kv_lens = problem->kv_lens->data;
    answer.step.page_table = problem->page_table->data;
    if (op_has_index(problem->op)) {
        if (add_index(&answer) != CLI_OK)
            return CLI_BAD;
        progress_begin("expected scores and selection");
        parallel_run(threads, answer_index_rows, &answer);
        progress_end();
    }
    if (op_has_attention(problem->op)) {
        if (add_attention(&answer) != CLI_OK)
            return CLI_BAD;
        progress_begin("expected attention");
        parallel_run(threads, answer_attention_rows, &answer);
        progress_end();
    }
    return answer.failed ? cli_error("out of memory") : CLI_OK;
}
