/* SPDX-License-Identifier: MIT
 *
 * libFuzzer target: bytes become a whole small problem of the indexer: formats, heads, strides, lengths, tables and
 * values, good and bad ones. Whatever they are, what fuzz_attention.c says of its calls holds here too; and where
 * scores and lists are both written, the lists are what the selection rules make of the scores.
 */
#include <math.h>
#include <string.h>

#include "hostile.h"
#include "oracle.h"

static msa_context *serial, *reversed;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    contexts_open(&serial, &reversed);
    return 0;
}

enum { Q, K, K_SCALE, SCORES, LISTS, COUNTS, NUM_TENSORS };

struct problem {
    bool decode;
    msa_index_desc desc;
    struct requests requests;
    struct tensor tensor[NUM_TENSORS];
};

/* ------------------------------------------------------------------------------------------------ making one */

static void make_desc(struct input *in, struct problem *p)
{
    static const msa_dtype pairs[3][2] = {{MSA_E4M3, MSA_E4M3}, {MSA_E4M3, MSA_NVFP4}, {MSA_BF16, MSA_BF16}};
    const msa_dtype *pair = pairs[take(in, 3)];
    msa_index_desc *d = &p->desc;

    *d = (msa_index_desc)MSA_INDEX_DESC_INIT;
    p->decode = take(in, 2);
    d->q_dtype = pair[0];
    d->k_dtype = pair[1];
    d->num_index_heads = 1 + take(in, rarely(in, 8) ? 64 : 4);
    d->topk = 1 + take(in, rarely(in, 8) ? 32 : 4);
    d->local_pages = 1 + take(in, d->topk);
    d->init_pages = take(in, d->topk - d->local_pages + 1);
    d->topk_order = take(in, 2) ? MSA_TOPK_ORDER_SCORE : MSA_TOPK_ORDER_PAGE;
    d->outputs = (int[]){MSA_INDEX_SCORES | MSA_INDEX_SELECTION, MSA_INDEX_SCORES, MSA_INDEX_SELECTION}[take(in, 3)];
    d->max_batch = p->requests.batch + 1;
    d->max_total_q = p->requests.rows + 1;
    d->max_kv_len = p->requests.max_kv_len;
}

static void make_problem(struct input *in, struct problem *p)
{
    memset(p, 0, sizeof(*p));
    requests_make(in, &p->requests);
    make_desc(in, p);

    const msa_index_desc *d = &p->desc;
    const int64_t rows = p->requests.rows, heads = d->num_index_heads, keys[2] = {p->requests.pool, 128};

    p->tensor[Q] = tensor_make(in, INPUT, 16, d->q_dtype == MSA_E4M3 ? 128 : 256, 2, (int64_t[]){rows, heads});
    p->tensor[K] = tensor_make(in, INPUT, 16,
                               d->k_dtype == MSA_NVFP4  ? 64
                               : d->k_dtype == MSA_E4M3 ? 128
                                                        : 256,
                               2, keys);
    if (d->k_dtype == MSA_NVFP4)
        p->tensor[K_SCALE] = tensor_make(in, INPUT, 8, 8, 2, keys);
    if (d->outputs & MSA_INDEX_SCORES)
        p->tensor[SCORES] = tensor_make(in, OUTPUT, 4, (size_t)p->requests.max_pages * 4, 2, (int64_t[]){heads, rows});
    if (d->outputs & MSA_INDEX_SELECTION) {
        p->tensor[LISTS] = tensor_make(in, OUTPUT, 4, (size_t)d->topk * 4, 2, (int64_t[]){heads, rows});
        if (take(in, 2))
            p->tensor[COUNTS] = tensor_make(in, OUTPUT, 4, (size_t)rows * 4, 1, &(int64_t){1});
    }
}

static void free_problem(struct problem *p)
{
    for (int i = 0; i < NUM_TENSORS; i++)
        tensor_free(&p->tensor[i]);
    requests_free(&p->requests);
}

/* ------------------------------------------------------------------------------------------------ what it uses */

/* History pages of a row that the plan has room for, and candidates, its own page included. */
static int history_of(const struct requests *r, int b, int64_t row)
{
    const int64_t position = requests_position(r, b, row), history = position < 0 ? 0 : position / 128;

    return (int)(history < r->max_pages ? history : r->max_pages);
}

static int candidates_of(const struct requests *r, int b, int64_t row)
{
    const int history = history_of(r, b, row);

    return requests_position(r, b, row) < 0 ? 0 : history < r->max_pages ? history + 1 : r->max_pages;
}

static void use_row(struct problem *p, int b, int64_t row)
{
    const int history = history_of(&p->requests, b, row);

    for (int page = 0; page < history; page++) {
        const int64_t physical = requests_look_up(&p->requests, b, page);

        for (int64_t t = 0; physical >= 0 && t < 128; t++) {
            tensor_use_row(&p->tensor[K], physical, t, 0);
            if (p->desc.k_dtype == MSA_NVFP4)
                tensor_use_row(&p->tensor[K_SCALE], physical, t, 0);
        }
    }
    for (int64_t h = 0; h < p->desc.num_index_heads; h++) {
        tensor_use_row(&p->tensor[Q], row, h, 0);
        if (p->desc.outputs & MSA_INDEX_SCORES)
            tensor_use(&p->tensor[SCORES], h, row, 0, 0, 4 * (size_t)history);
        if (p->desc.outputs & MSA_INDEX_SELECTION)
            tensor_use_row(&p->tensor[LISTS], h, row, 0);
    }
    if (p->tensor[COUNTS].data)
        tensor_use(&p->tensor[COUNTS], 0, 0, 0, 4 * (size_t)row, 4);
}

static void use_problem(struct problem *p)
{
    const struct requests *r = &p->requests;

    for (int b = 0; b < r->owners; b++) {
        for (int64_t row = r->cu[b]; row < r->cu[b + 1]; row++)
            use_row(p, b, row);
    }
    for (int i = 0; i < NUM_TENSORS && !r->good; i++) /* who owns which row is not for this target to say */
        tensor_use_all(&p->tensor[i]);
    if (!r->good)
        tensor_use_all(&p->requests.table);
}

/* ------------------------------------------------------------------------------------------------ running it */

/* Plans, prepares and runs the whole problem (b = -1) or one request; checks what it may write, and the error word. */
static void run(const struct problem *p, msa_context *context, int b, int fill)
{
    const struct requests *r = &p->requests;
    const struct tensor *t = p->tensor;
    const int64_t first = b >= 0 ? r->cu[b] : 0;
    msa_index_args args = MSA_INDEX_ARGS_INIT;
    int32_t alone[2];
    msa_step step = requests_step(r, b, alone);
    msa_plan *plan;

    args.index_q = tensor_row(&t[Q], first, 0, 0);
    args.index_q_row_stride = t[Q].given[0], args.index_q_head_stride = t[Q].given[1];
    args.index_k = t[K].data;
    args.index_k_page_stride = t[K].given[0], args.index_k_token_stride = t[K].given[1];
    args.index_k_scale = t[K_SCALE].data;
    args.index_k_scale_page_stride = t[K_SCALE].given[0], args.index_k_scale_token_stride = t[K_SCALE].given[1];
    args.num_pages = r->pool;
    args.scores = (float *)tensor_row(&t[SCORES], 0, first, 0);
    args.scores_head_stride = t[SCORES].stride[0], args.scores_row_stride = t[SCORES].given[1];
    args.topk = (int32_t *)tensor_row(&t[LISTS], 0, first, 0);
    args.topk_head_stride = t[LISTS].stride[0], args.topk_row_stride = t[LISTS].given[1];
    args.num_valid_pages = t[COUNTS].data ? (int32_t *)t[COUNTS].data + first : NULL;

    CHECK((p->decode ? msa_index_decode_plan : msa_index_prefill_plan)(context, &p->desc, &plan) == MSA_SUCCESS);
    step_workspace(&step, plan, fill);
    CHECK((p->decode ? msa_index_decode_prepare : msa_index_prefill_prepare)(plan, &step, NULL) == MSA_SUCCESS);
    CHECK((p->decode ? msa_index_decode_run : msa_index_prefill_run)(plan, &args, NULL) == MSA_SUCCESS);
    if (b < 0)
        requests_check_bits(r, plan);
    for (int i = SCORES; i <= COUNTS; i++)
        tensor_check_gaps(&t[i]);
    msa_plan_destroy(plan);
    free(step.workspace);
}

/* A page whose score is not specified, because a key may be NaN, or which is outside the cache. */
static bool scores_are_numbers(const float *scores, int history)
{
    for (int i = 0; i < history; i++) {
        if (!isfinite(scores[i]))
            return false;
    }
    return true;
}

static void check_list(const struct problem *p, int64_t head, int64_t row, int history, int candidates)
{
    const msa_index_desc *d = &p->desc;
    float scores[MAX_PAGES + 1] = {0};
    int32_t expected[MSA_MAX_TOPK], got[MSA_MAX_TOPK];
    int used = 0;

    memcpy(got, tensor_row(&p->tensor[LISTS], head, row, 0), 4 * (size_t)d->topk);
    while (used < d->topk && got[used] >= 0)
        used++;
    for (int i = 0; i < d->topk; i++) {
        CHECK(i < used ? got[i] < candidates : got[i] == -1);
        for (int j = 0; j < i && i < used; j++)
            CHECK(got[i] != got[j] && (d->topk_order == MSA_TOPK_ORDER_SCORE || got[j] < got[i]));
    }
    if (!(d->outputs & MSA_INDEX_SCORES))
        return;
    memcpy(scores, tensor_row(&p->tensor[SCORES], head, row, 0), 4 * (size_t)history);
    if (!scores_are_numbers(scores, history))
        return;
    oracle_select_row(scores, candidates, d->topk, d->init_pages, d->local_pages, d->topk_order, expected);
    CHECK(memcmp(got, expected, 4 * (size_t)d->topk) == 0);
}

static void check_selection(const struct problem *p)
{
    const struct requests *r = &p->requests;

    for (int b = 0; b < r->owners && p->tensor[LISTS].data; b++) {
        for (int64_t row = r->cu[b]; row < r->cu[b + 1]; row++) {
            const int32_t candidates = candidates_of(r, b, row);

            for (int64_t h = 0; h < p->desc.num_index_heads; h++)
                check_list(p, h, row, history_of(r, b, row), candidates);
            if (p->tensor[COUNTS].data)
                CHECK(memcmp(p->tensor[COUNTS].data + 4 * row, &candidates, 4) == 0);
        }
    }
}

static void check_alone(const struct problem *p, int b, const uint8_t *const expected[NUM_TENSORS])
{
    const struct requests *r = &p->requests;

    run(p, serial, b, 0);
    for (int64_t row = r->cu[b]; row < r->cu[b + 1]; row++) {
        for (int64_t h = 0; h < p->desc.num_index_heads; h++) {
            for (int t = SCORES; t <= LISTS; t++) {
                const struct tensor *tensor = &p->tensor[t];
                const uint8_t *got = tensor_row(tensor, h, row, 0);

                CHECK(!got || memcmp(got, expected[t] + (got - tensor->data), tensor->row_bytes) == 0);
            }
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct input in = input_open(bytes, size);
    struct problem p;
    uint8_t *first[NUM_TENSORS] = {NULL};

    make_problem(&in, &p);
    use_problem(&p);
    run(&p, serial, -1, 0xFF);
    check_selection(&p);
    for (int i = SCORES; i <= COUNTS; i++)
        first[i] = tensor_take(&p.tensor[i]);

    for (int i = Q; i <= K_SCALE; i++)
        tensor_poison(&p.tensor[i], 0x7F);
    tensor_poison(&p.requests.table, 0x7F);
    run(&p, reversed, -1, 0x7F);
    for (int i = SCORES; i <= COUNTS; i++) {
        CHECK(p.tensor[i].bytes == 0 || memcmp(p.tensor[i].data, first[i], p.tensor[i].bytes) == 0);
        free(tensor_take(&p.tensor[i]));
    }
    if (p.requests.owners)
        check_alone(&p, take(&in, p.requests.owners), (const uint8_t *const *)first);
    for (int i = SCORES; i <= COUNTS; i++)
        free(first[i]);
    free_problem(&p);
    return 0;
}
