/* SPDX-License-Identifier: MIT
 *
 * Steps at the edges: empty ones, error bits for values inside tensors, call order, and what workspaces may hold.
 */
#include "api_fixture.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* The planned operations; exactly one of plan_attention and plan_index is set. */
struct operation {
    const char *name;
    plan_attention_fn *plan_attention;
    plan_index_fn *plan_index;
    prepare_fn *prepare;
    msa_status (*run_attention)(msa_plan *, const msa_attention_args *, msa_stream);
    msa_status (*run_index)(msa_plan *, const msa_index_args *, msa_stream);
};
static const struct operation operations[] = {
    {"prefill", msa_prefill_plan, NULL, msa_prefill_prepare, msa_prefill_run, NULL},
    {"decode", msa_decode_plan, NULL, msa_decode_prepare, msa_decode_run, NULL},
    {"index_prefill", NULL, msa_index_prefill_plan, msa_index_prefill_prepare, NULL, msa_index_prefill_run},
    {"index_decode", NULL, msa_index_decode_plan, msa_index_decode_prepare, NULL, msa_index_decode_run},
};
enum { NUM_OPERATIONS = 4 };

static void open_operation(struct fixture *f, const struct operation *op)
{
    fixture_open(f);
    if (op->plan_attention)
        fixture_attention(f, MSA_E4M3, MSA_E4M3, 0, op->plan_attention, op->prepare);
    else
        fixture_index(f, MSA_E4M3, MSA_E4M3, MSA_INDEX_SCORES | MSA_INDEX_SELECTION, op->plan_index, op->prepare);
}

static msa_status run(struct fixture *f, const struct operation *op)
{
    return op->run_attention ? op->run_attention(f->plan, &f->attend, NULL) : op->run_index(f->plan, &f->score, NULL);
}

/* Prepares and runs the fixture's step; gives the error word. */
static uint32_t step(struct fixture *f, const struct operation *op)
{
    uint32_t bits = UINT32_MAX;

    assert_int_equal(op->prepare(f->plan, &f->step, NULL), MSA_SUCCESS);
    assert_int_equal(run(f, op), MSA_SUCCESS);
    assert_int_equal(msa_plan_error(f->plan, &bits, NULL), MSA_SUCCESS);
    return bits;
}

/* ------------------------------------------------------------------------------------------------ call order */

static void run_before_prepare(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        msa_plan_destroy(f.plan);
        assert_int_equal(op->plan_attention ? op->plan_attention(f.context, &f.attention, &f.plan)
                                            : op->plan_index(f.context, &f.index, &f.plan), MSA_SUCCESS);
        fixture_remember(&f);
        assert_int_equal(run(&f, op), MSA_ERROR_NOT_PREPARED);
        assert_non_null(strstr(msa_last_error(), op->name));
        assert_non_null(strstr(msa_last_error(), "prepare must succeed before"));
        f.step.batch = -1; /* a refused prepare does not count */
        assert_int_equal(op->prepare(f.plan, &f.step, NULL), MSA_ERROR_INVALID_ARGUMENT);
        assert_int_equal(run(&f, op), MSA_ERROR_NOT_PREPARED);
        assert_true(fixture_untouched(&f));
        f.step.batch = FIX_BATCH;
        assert_int_equal(step(&f, op), 0);
        fixture_close(&f);
    }
}

/* After a refused prepare a run is one of the step before. */
static void refused_prepare(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        assert_int_equal(step(&f, op), 0);
        memset(f.step.workspace, 0, f.step.workspace_bytes);
        fixture_remember(&f);
        f.step.total_q = 1; /* would pass by itself */
        f.step.cu_seqlens_q = NULL;
        assert_int_equal(op->prepare(f.plan, &f.step, NULL), MSA_ERROR_INVALID_ARGUMENT);
        if (op->plan_attention)
            memset(f.attend.out, 0xFF, FIX_ROWS * FIX_Q_HEADS * 256);
        else
            memset(f.score.topk, 0xFF, FIX_KV_HEADS * FIX_ROWS * FIX_TOPK * 4);
        assert_int_equal(run(&f, op), MSA_SUCCESS);
        memset(f.step.workspace, 0, f.step.workspace_bytes);
        assert_true(fixture_untouched(&f));
        fixture_close(&f);
    }
}

/* ------------------------------------------------------------------------------------------------ nothing to do */

/* No request, or requests without a query: no pointer is looked at. */
static void empty_steps(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        f.attend = (msa_attention_args)MSA_ATTENTION_ARGS_INIT;
        f.score = (msa_index_args)MSA_INDEX_ARGS_INIT;
        f.step = (msa_step)MSA_STEP_INIT;
        for (int batch = 0; batch <= FIX_BATCH; batch++) {
            f.step.batch = batch;
            assert_int_equal(step(&f, op), 0);
        }
        f.step.batch = 0;
        f.step.total_q = FIX_ROWS; /* padding only */
        assert_int_equal(step(&f, op), 0);
        fixture_close(&f);
    }
}

static void empty_stateless_calls(void **state)
{
    struct fixture f;

    (void)state;
    fixture_open(&f);
    f.merge = (msa_merge_args)MSA_MERGE_ARGS_INIT;
    f.merge.num_states = FIX_STATES;
    for (int i = 0; i < FIX_STATES; i++)
        f.states[i] = (msa_merge_state)MSA_MERGE_STATE_INIT;
    f.merge.states = f.states;
    f.quantise = (msa_quantise_args)MSA_QUANTISE_ARGS_INIT;
    f.convert = (msa_convert_args)MSA_CONVERT_ARGS_INIT;
    f.quantise.cols = f.convert.cols = 16;
    assert_int_equal(msa_topk(f.context, &(msa_topk_args)MSA_TOPK_ARGS_INIT, NULL), MSA_SUCCESS);
    assert_int_equal(msa_combine(f.context, &(msa_combine_args)MSA_COMBINE_ARGS_INIT, NULL), MSA_SUCCESS);
    assert_int_equal(msa_merge(f.context, &f.merge, NULL), MSA_SUCCESS);
    assert_int_equal(msa_quantise(f.context, &f.quantise, NULL), MSA_SUCCESS);
    assert_int_equal(msa_convert(f.context, &f.convert, NULL), MSA_SUCCESS);
    assert_int_equal(msa_cache_write(f.context, &(msa_cache_write_args)MSA_CACHE_WRITE_ARGS_INIT, NULL), MSA_SUCCESS);
    fixture_close(&f);
}

/* Top-k without a single column: no score is read, every slot is -1. */
static void topk_without_columns(void **state)
{
    struct fixture f;

    (void)state;
    fixture_open(&f);
    f.topk.columns = 0;
    f.topk.scores = NULL;
    assert_int_equal(msa_topk(f.context, &f.topk, NULL), MSA_SUCCESS);
    for (int i = 0; i < FIX_KV_HEADS * FIX_ROWS * FIX_TOPK; i++)
        assert_int_equal(f.topk.topk[i], -1);
    fixture_close(&f);
}

/* A cache without pages: everything is outside, and its pointers may be NULL. */
static void no_pages(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        struct fixture f;

        open_operation(&f, &operations[i]);
        f.attend.num_pages = f.score.num_pages = 0;
        f.attend.k = f.attend.v = f.score.index_k = NULL;
        assert_int_equal(step(&f, &operations[i]), MSA_ERROR_BIT_PAGE_ID);
        if (operations[i].plan_attention) {
            for (size_t j = 0; j < FIX_ROWS * FIX_Q_HEADS * 128; j++)
                assert_int_equal(((const uint16_t *)f.attend.out)[j], 0);
            for (size_t j = 0; j < FIX_ROWS * FIX_Q_HEADS; j++)
                assert_memory_equal(&f.attend.lse[j], &(uint32_t){0xFF800000}, 4);
        }
        fixture_close(&f);
    }
}

/* ------------------------------------------------------------------------------------------------ error bits */

static int32_t *table(struct fixture *f)
{
    return (int32_t *)(uintptr_t)f->step.page_table; /* the fixture's own, writable memory */
}

static int32_t *list(struct fixture *f)
{
    return (int32_t *)(uintptr_t)f->step.topk;
}

static int32_t *lengths(struct fixture *f)
{
    return (int32_t *)(uintptr_t)f->step.kv_lens;
}

static int32_t *cu_q(struct fixture *f)
{
    return (int32_t *)(uintptr_t)f->step.cu_seqlens_q;
}

/* Sets one value, sees the bit, puts the value back and sees the next prepare clear it. */
static void check_bit(struct fixture *f, const struct operation *op, int32_t *place, int32_t value, uint32_t bit)
{
    const int32_t before = *place;
    uint32_t bits;

    *place = value;
    bits = step(f, op);
    if (bits != bit)
        fail_msg("%s: value %d sets error bits %u, must be %u", op->name, value, bits, bit);
    *place = before;
    assert_int_equal(op->prepare(f->plan, &f->step, NULL), MSA_SUCCESS);
    assert_int_equal(msa_plan_error(f->plan, &bits, NULL), MSA_SUCCESS);
    assert_int_equal(bits, 0);
    assert_int_equal(step(f, op), 0);
}

static void error_bits(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        assert_int_equal(step(&f, op), 0);
        if (op->plan_attention) {
            const int32_t bad_ids[] = {FIX_TABLE, INT_MAX, 1 << 30, -2, INT_MIN};

            for (size_t j = 0; j < sizeof(bad_ids) / sizeof(bad_ids[0]); j++)
                check_bit(&f, op, list(&f) + 2, bad_ids[j], MSA_ERROR_BIT_LIST_ID);
        }
        /* Page 0 of the second request is seen by every operation: its last queries stand in page 1. */
        check_bit(&f, op, table(&f) + FIX_TABLE, FIX_PAGES, MSA_ERROR_BIT_PAGE_ID);
        check_bit(&f, op, table(&f) + FIX_TABLE, -5, MSA_ERROR_BIT_PAGE_ID);
        check_bit(&f, op, table(&f) + FIX_TABLE, INT_MAX, MSA_ERROR_BIT_PAGE_ID);
        check_bit(&f, op, table(&f) + FIX_TABLE, INT_MIN, MSA_ERROR_BIT_PAGE_ID);
        check_bit(&f, op, lengths(&f), -1, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, lengths(&f) + 1, INT_MIN, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f), 1, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f), -1, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f), INT_MIN, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f) + 1, FIX_ROWS + 1, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f) + 1, INT_MAX, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f) + 2, 1, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f) + 2, FIX_ROWS + 1, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_q(&f) + 2, INT_MIN, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, lengths(&f) + 1, FIX_KV_LEN + 1, MSA_ERROR_BIT_CAPACITY);
        check_bit(&f, op, lengths(&f) + 1, INT_MAX, MSA_ERROR_BIT_CAPACITY);
        fixture_close(&f);
    }
}

/* The other way to give lengths has the same faults. */
static void error_bits_of_cu_seqlens_k(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        int32_t *cu_k = fixture_place(&f, 12);

        memcpy(cu_k, (int32_t[3]){0, 200, 200 + FIX_KV_LEN}, 12);
        f.step.kv_lens = NULL;
        f.step.cu_seqlens_k = cu_k;
        assert_int_equal(step(&f, op), 0);
        check_bit(&f, op, cu_k, 1, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_k + 2, 199, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_k + 2, INT_MIN, MSA_ERROR_BIT_LENGTHS);
        check_bit(&f, op, cu_k + 2, INT_MAX, MSA_ERROR_BIT_CAPACITY);
        check_bit(&f, op, cu_k + 1, INT_MAX, MSA_ERROR_BIT_LENGTHS | MSA_ERROR_BIT_CAPACITY);
        fixture_close(&f);
    }
}

/* What is masked contributes nothing: the same bits as without it. */
static void masked_values(void **state)
{
    const size_t bytes = FIX_ROWS * FIX_Q_HEADS * 256;
    uint8_t *expected = test_malloc(bytes);

    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        for (size_t j = 0; j < FIX_KV_HEADS * FIX_ROWS * FIX_TOPK; j++)
            list(&f)[j] = (int32_t)(j % FIX_TOPK) - 1; /* -1, 0, 1 */
        assert_int_equal(step(&f, op), 0);
        memcpy(expected, f.attend.out, bytes);
        for (size_t j = 0; j < FIX_KV_HEADS * FIX_ROWS * FIX_TOPK; j += FIX_TOPK)
            list(&f)[j] = j % 2 ? INT_MAX : INT_MIN;
        assert_int_equal(step(&f, op), MSA_ERROR_BIT_LIST_ID);
        assert_memory_equal(f.attend.out, expected, bytes);
        for (size_t j = 0; j < FIX_KV_HEADS * FIX_ROWS * FIX_TOPK; j += FIX_TOPK)
            list(&f)[j] = 1; /* a page twice counts once */
        assert_int_equal(step(&f, op), 0);
        assert_memory_equal(f.attend.out, expected, bytes);

        for (size_t j = 0; j < FIX_KV_HEADS * FIX_ROWS * FIX_TOPK; j++)
            list(&f)[j] = j % FIX_TOPK ? -1 : 1;
        assert_int_equal(step(&f, op), 0);
        memcpy(expected, f.attend.out, bytes);
        for (size_t j = 1; j < FIX_KV_HEADS * FIX_ROWS * FIX_TOPK; j += FIX_TOPK)
            list(&f)[j] = 0;
        table(&f)[0] = table(&f)[FIX_TABLE] = FIX_PAGES;
        assert_int_equal(step(&f, op), MSA_ERROR_BIT_PAGE_ID);
        assert_memory_equal(f.attend.out, expected, bytes);
        fixture_close(&f);
    }
    test_free(expected);
}

/* ------------------------------------------------------------------------------------------------ workspaces */

/* What a workspace held before does not matter, and a second run of a step gives the same bits. */
static void workspace_contents(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        fixture_remember(&f);
        assert_int_equal(step(&f, op), 0);
        uint8_t *first = test_malloc(f.used);

        memset(f.step.workspace, 0, f.step.workspace_bytes);
        memcpy(first, f.arena, f.used);
        for (int fill = 0; fill < 256; fill += 51) {
            fixture_restore(&f);
            memset(f.step.workspace, fill, f.step.workspace_bytes);
            assert_int_equal(step(&f, op), 0);
            assert_int_equal(run(&f, op), MSA_SUCCESS);
            memset(f.step.workspace, 0, f.step.workspace_bytes);
            assert_memory_equal(f.arena, first, f.used);
        }
        test_free(first);
        fixture_close(&f);
    }
}

/* Plans share a workspace if each finishes before the next prepares. */
static void shared_workspace(void **state)
{
    struct fixture f;
    msa_workspace *workspace;
    msa_plan *scorer;
    const msa_step *reference;

    (void)state;
    open_operation(&f, &operations[0]);
    assert_int_equal(step(&f, &operations[0]), 0);
    fixture_remember(&f);
    reference = &f.step;

    msa_step scorer_step = *reference;

    f.index = (msa_index_desc)MSA_INDEX_DESC_INIT;
    f.index.max_batch = FIX_BATCH;
    f.index.max_total_q = FIX_ROWS;
    f.index.max_kv_len = FIX_KV_LEN;
    f.index.outputs = MSA_INDEX_SELECTION;
    f.score = (msa_index_args)MSA_INDEX_ARGS_INIT;
    f.score.index_q = f.attend.q;
    f.score.index_k = f.attend.k;
    f.score.num_pages = FIX_PAGES;
    f.score.topk = fixture_place(&f, FIX_ROWS * 16 * 4);
    assert_int_equal(msa_index_prefill_plan(f.context, &f.index, &scorer), MSA_SUCCESS);
    assert_int_equal(msa_workspace_create(f.context, msa_plan_workspace(f.plan), &workspace), MSA_SUCCESS);
    assert_int_equal(msa_workspace_reserve(workspace, msa_plan_workspace(scorer)), MSA_SUCCESS);
    scorer_step.workspace = f.step.workspace = msa_workspace_data(workspace);
    scorer_step.workspace_bytes = f.step.workspace_bytes = msa_workspace_bytes(workspace);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(msa_index_prefill_prepare(scorer, &scorer_step, NULL), MSA_SUCCESS);
        assert_int_equal(msa_index_prefill_run(scorer, &f.score, NULL), MSA_SUCCESS);
        memset(f.attend.out, 0, FIX_ROWS * FIX_Q_HEADS * 256);
        assert_int_equal(step(&f, &operations[0]), 0);
        assert_true(fixture_untouched(&f));
    }
    msa_workspace_destroy(workspace);
    msa_plan_destroy(scorer);
    fixture_close(&f);
}

static int32_t below(uint32_t *noise, int32_t n)
{
    *noise = *noise * 1664525 + 1013904223;
    return (int32_t)((uint64_t)*noise * (uint64_t)n >> 32);
}

static size_t workspace_of(const struct operation *op, struct fixture *f)
{
    msa_plan *plan;
    size_t bytes;

    assert_int_equal(op->plan_attention ? op->plan_attention(f->context, &f->attention, &plan)
                                        : op->plan_index(f->context, &f->index, &plan), MSA_SUCCESS);
    bytes = msa_plan_workspace(plan);
    msa_plan_destroy(plan);
    return bytes;
}

/* Sizes grow with every shape argument: a plan for more never needs less. */
static void workspace_is_monotone(void **state)
{
    uint32_t noise = 3;

    (void)state;
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        const struct operation *op = &operations[i];
        struct fixture f;

        open_operation(&f, op);
        for (int round = 0; round < 1000; round++) {
            const int32_t batch = 1 + below(&noise, 1 << below(&noise, 10));
            const int32_t rows = 1 + below(&noise, 1 << below(&noise, 13));
            const int32_t keys = 1 + below(&noise, 1 << below(&noise, 20));

            f.index.num_index_heads = 1 << below(&noise, 7);
            f.attention.num_kv_heads = 1 + below(&noise, 8);
            f.attention.num_q_heads = f.attention.num_kv_heads * (1 + below(&noise, 16));
            f.attention.topk = f.index.topk = 1 + below(&noise, 32);
            f.attention.max_batch = f.index.max_batch = batch;
            f.attention.max_total_q = f.index.max_total_q = rows;
            f.attention.max_kv_len = f.index.max_kv_len = keys;
            const size_t small = workspace_of(op, &f);

            f.index.num_index_heads <<= below(&noise, 64 / f.index.num_index_heads > 1 ? 2 : 1);
            f.attention.num_q_heads <<= below(&noise, 2);
            f.attention.num_kv_heads <<= f.attention.num_q_heads / f.attention.num_kv_heads > 16;
            f.attention.topk = f.index.topk += below(&noise, 33 - f.index.topk);
            f.attention.max_batch = f.index.max_batch = batch + below(&noise, 3) * below(&noise, 100);
            f.attention.max_total_q = f.index.max_total_q = rows + below(&noise, 3) * below(&noise, 1000);
            f.attention.max_kv_len = f.index.max_kv_len =
                keys + below(&noise, 2) * below(&noise, MSA_MAX_KV_LEN - keys);
            const size_t large = workspace_of(op, &f);

            if (small > large)
                fail_msg("%s: batch %d, %d rows, %d keys need %zu bytes, a larger plan of batch %d, %d rows, %d keys "
                         "only %zu",
                         op->name, batch, rows, keys, small, (int)f.index.max_batch, (int)f.index.max_total_q,
                         (int)f.index.max_kv_len, large);
        }
        fixture_close(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(run_before_prepare),
        cmocka_unit_test(refused_prepare),
        cmocka_unit_test(empty_steps),
        cmocka_unit_test(empty_stateless_calls),
        cmocka_unit_test(topk_without_columns),
        cmocka_unit_test(no_pages),
        cmocka_unit_test(error_bits),
        cmocka_unit_test(error_bits_of_cu_seqlens_k),
        cmocka_unit_test(masked_values),
        cmocka_unit_test(workspace_contents),
        cmocka_unit_test(shared_workspace),
        cmocka_unit_test(workspace_is_monotone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
