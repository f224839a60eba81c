/* SPDX-License-Identifier: MIT
 *
 * Every argument of index_prefill, index_decode and top-k, broken one at a time.
 */
#include "api_fixture.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

/* Calls of either operation, chosen by the test. */
static plan_index_fn *plan_fn;
static prepare_fn *prepare_function;
static msa_status (*run_fn)(msa_plan *, const msa_index_args *, msa_stream);

static void open_operation(struct fixture *f, bool decode, msa_dtype q, msa_dtype k, int outputs)
{
    plan_fn = decode ? msa_index_decode_plan : msa_index_prefill_plan;
    prepare_function = decode ? msa_index_decode_prepare : msa_index_prefill_prepare;
    run_fn = decode ? msa_index_decode_run : msa_index_prefill_run;
    fixture_open(f);
    assert_int_equal((decode ? msa_index_prefill_plan : msa_index_decode_plan)(
                         f->context, &(msa_index_desc)MSA_INDEX_DESC_INIT, &f->other_plan), MSA_SUCCESS);
    fixture_index(f, q, k, outputs, plan_fn, prepare_function);
}

static msa_status call_plan(struct fixture *f)
{
    msa_plan *plan = NULL;
    const msa_status status = plan_fn(f->context, f->no_args ? NULL : &f->index, f->plan_out ? &plan : NULL);

    assert_true(status ? plan == NULL : plan != NULL);
    msa_plan_destroy(plan);
    return status;
}

static msa_status call_prepare(struct fixture *f)
{
    return prepare_function(f->plan, f->no_args ? NULL : &f->step, NULL);
}

static msa_status call_run(struct fixture *f)
{
    return run_fn(f->plan, f->no_args ? NULL : &f->score, NULL);
}

static msa_status call_topk(struct fixture *f)
{
    return msa_topk(f->context, f->no_args ? NULL : &f->topk, NULL);
}

#define D(field, value, rule) I32(index, field, value, rule)
#define D64(field, value, rule) I64(index, field, value, rule)
#define D_NO_CODE(field, value, rule) NO_CODE(index, field, value, rule)

/* The forced pages: `text` is their sum, and the message names both fields. */
#define FORCED(s, field, value, text) \
    ROW(s, field, SET_I32, value, 0, MSA_ERROR_INVALID_ARGUMENT, text, "init_pages + local_pages")

/* clang-format off */
static const struct row plan_rows[] = {
    NUL_ARG(context, "context"),
    NUL_ARG(plan_out, "plan"),
    NO_ARGS("desc"),
    SIZE_FIELD(index, msa_index_desc),
    DTYPE_RANGE(index, q_dtype), DTYPE(index, q_dtype, E5M2, "only E4M3"),
    DTYPE(index, q_dtype, F32, "must be E4M3 with"),
    DTYPE(index, q_dtype, FP16, "must be E4M3 with"), DTYPE(index, q_dtype, BF16, "must be E4M3 with"),
    DTYPE_RANGE(index, k_dtype), DTYPE(index, k_dtype, E5M2, "only E4M3"),
    DTYPE(index, k_dtype, F32, "must be E4M3 with"),
    DTYPE(index, k_dtype, BF16, "must be E4M3 with"), DTYPE(index, k_dtype, FP16, "must be E4M3 with"),
    D(num_index_heads, 0, "must be 1..64"), D(num_index_heads, -1, "must be 1..64"),
    D(num_index_heads, 65, "must be 1..64"),
    D(num_index_heads, INT32_MAX, "must be 1..64"),
    D_NO_CODE(head_dim, 0, "only 128"), D_NO_CODE(head_dim, 64, "only 128"), D_NO_CODE(head_dim, 127, "only 128"),
    D_NO_CODE(head_dim, 256, "only 128"), D_NO_CODE(head_dim, -128, "only 128"),
    D_NO_CODE(page_size, 1, "only 128"), D_NO_CODE(page_size, 64, "only 128"), D_NO_CODE(page_size, 129, "only 128"),
    D_NO_CODE(page_size, 640, "only 128"), D_NO_CODE(page_size, -128, "only 128"),
    D_NO_CODE(causal, 0, "only causal"), D_NO_CODE(causal, 2, "only causal"),
    D(topk, 0, "must be 1..32"), D_NO_CODE(topk, 33, "must be 1..32"), D(topk, -1, "must be 1..32"),
    D_NO_CODE(topk, INT32_MAX, "must be 1..32"),
    D(init_pages, -1, "must be >= 0"), D(init_pages, INT32_MIN, "must be >= 0"),
    FORCED(index, init_pages, 3, "= 4"), FORCED(index, init_pages, INT32_MAX, "= 2147483648"),
    D(local_pages, 0, "must be >= 1"), D(local_pages, -1, "must be >= 1"),
    FORCED(index, local_pages, 4, "= 4"), FORCED(index, local_pages, INT32_MAX, "= 2147483647"),
    D(topk_order, 2, "must be 0..1"), D(topk_order, -1, "must be 0..1"),
    D(precision, 2, "must be 0..1"), D(precision, -1, "must be 0..1"),
    D(outputs, 0, "must be 1..3"), D(outputs, 4, "must be 1..3"), D(outputs, -1, "must be 1..3"),
    D(max_batch, 0, "must be 1.."), D(max_batch, -1, "must be 1.."),
    D64(max_total_q, 0, "must be 1..2147483647"), D64(max_total_q, -1, "must be 1..2147483647"),
    D64(max_total_q, 1ll << 31, "must be 1..2147483647"), D64(max_total_q, INT64_MAX, "must be 1..2147483647"),
    D64(max_kv_len, 0, "must be 1..1048576"), D64(max_kv_len, -1, "must be 1..1048576"),
    D64(max_kv_len, MSA_MAX_KV_LEN + 1, "must be 1..1048576"), D64(max_kv_len, INT64_MIN, "must be 1..1048576"),
};

#define S(field, value, rule) I64(step, field, value, rule)

static const struct row prepare_rows[] = {
    NUL_ARG(plan, "plan"),
    OTHER_PLAN,
    NO_ARGS("step"),
    SIZE_FIELD(step, msa_step),
    I32(step, batch, -1, "must be 0..2"), I32(step, batch, 3, "must be 0..2"),
    S(total_q, -1, "must be 0..5"), S(total_q, 6, "must be 0..5"), S(total_q, INT64_MAX, "must be 0..5"),
    NUL(step, cu_seqlens_q), SHIFT(step, cu_seqlens_q, 2, "aligned to 4"),
    NUL(step, kv_lens), SHIFT(step, kv_lens, 1, "aligned to 4"),
    ALIAS(step, cu_seqlens_k, step.cu_seqlens_q, "must be NULL when kv_lens is given"),
    NUL(step, page_table), SHIFT(step, page_table, 3, "aligned to 4"), STRIDE(step, page_table_stride, 4),
    S(page_table_stride, 4, "at least 8 bytes"),
    NUL(step, workspace), SHIFT(step, workspace, 128, "aligned to 256"), SHIFT(step, workspace, 16, "aligned to 256"),
    S(workspace_bytes, 0, "must be at least"), S(workspace_bytes, 255, "must be at least"),
};

#define R(field, value, rule) I64(score, field, value, rule)

static const struct row run_rows[] = {
    NUL_ARG(plan, "plan"),
    OTHER_PLAN,
    NO_ARGS("args"),
    SIZE_FIELD(score, msa_index_args),
    NUL(score, index_q), SHIFT(score, index_q, 8, "aligned to 16"), STRIDE(score, index_q_row_stride, 16),
    STRIDE(score, index_q_head_stride, 16),
    NUL(score, index_k), SHIFT(score, index_k, 2, "aligned to 16"), STRIDE(score, index_k_page_stride, 16),
    STRIDE(score, index_k_token_stride, 16),
    R(num_pages, -1, "must be 0.."), R(num_pages, 1ll << 31, "must be 0.."), R(num_pages, INT64_MAX, "must be 0.."),
};

static const struct row run_rows_nvfp4[] = {
    NUL(score, index_k_scale), SHIFT(score, index_k_scale, 4, "aligned to 8"),
    STRIDE(score, index_k_scale_page_stride, 8),
    STRIDE(score, index_k_scale_token_stride, 8),
};

static const struct row run_rows_outputs[] = {
    NUL(score, scores), SHIFT(score, scores, 2, "aligned to 4"), STRIDE(score, scores_head_stride, 4),
    OVERLAP(score, scores_head_stride, 4), STRIDE(score, scores_row_stride, 4), OVERLAP(score, scores_row_stride, 4),
    NUL(score, topk), SHIFT(score, topk, 1, "aligned to 4"), STRIDE(score, topk_head_stride, 4),
    OVERLAP(score, topk_head_stride, 4), STRIDE(score, topk_row_stride, 4), OVERLAP(score, topk_row_stride, 4),
    SHIFT(score, num_valid_pages, 2, "aligned to 4"),
    ALIAS(score, index_k_scale, score.index_k, "only NVFP4"),
};

static const struct row run_rows_scores_only[] = {
    ALIAS(score, topk, score.scores, "lack MSA_INDEX_SELECTION"),
    ALIAS(score, num_valid_pages, score.scores, "lack MSA_INDEX_SELECTION"),
};

static const struct row run_rows_selection_only[] = {
    ALIAS(score, scores, score.topk, "lack MSA_INDEX_SCORES"),
};

static const struct row topk_rows[] = {
    NUL_ARG(context, "context"),
    NO_ARGS("args"),
    SIZE_FIELD(topk, msa_topk_args),
    NUL(topk, scores), SHIFT(topk, scores, 2, "aligned to 4"), STRIDE(topk, scores_head_stride, 4),
    STRIDE(topk, scores_row_stride, 4),
    I32(topk, num_heads, 0, "must be 1..1024"), I32(topk, num_heads, -1, "must be 1..1024"),
    I32(topk, num_heads, 1025, "must be 1..1024"), I32(topk, num_heads, INT32_MAX, "must be 1..1024"),
    I64(topk, rows, -1, "must be 0..2147483647"), I64(topk, rows, 1ll << 31, "must be 0..2147483647"),
    I64(topk, rows, INT64_MAX, "must be 0..2147483647"),
    I32(topk, columns, -1, "must be 0..8192"), I32(topk, columns, 8193, "must be 0..8192"),
    I32(topk, columns, 12289, "must be 0..8192"), I32(topk, columns, INT32_MAX, "must be 0..8192"),
    NUL(topk, valid_pages), SHIFT(topk, valid_pages, 1, "aligned to 4"),
    I32(topk, k, 0, "must be 1..32"), NO_CODE(topk, k, 33, "must be 1..32"), I32(topk, k, -1, "must be 1..32"),
    I32(topk, init_pages, -1, "must be >= 0"), FORCED(topk, init_pages, 3, "= 4"),
    I32(topk, local_pages, 0, "must be >= 1"), I32(topk, local_pages, -5, "must be >= 1"),
    FORCED(topk, local_pages, 4, "= 4"),
    I32(topk, order, 2, "must be 0..1"), I32(topk, order, -1, "must be 0..1"),
    NUL(topk, topk), SHIFT(topk, topk, 3, "aligned to 4"), STRIDE(topk, topk_head_stride, 4),
    OVERLAP(topk, topk_head_stride, 4), STRIDE(topk, topk_row_stride, 4), OVERLAP(topk, topk_row_stride, 4),
};
/* clang-format on */

/* ------------------------------------------------------------------------------------------------ the tests */

static void plan_arguments(void **state)
{
    (void)state;
    for (int decode = 0; decode < 2; decode++) {
        struct fixture f;

        open_operation(&f, decode, MSA_E4M3, MSA_NVFP4, MSA_INDEX_SCORES | MSA_INDEX_SELECTION);
        f.plan_out = &f.plan;
        CHECK_ROWS(&f, call_plan, plan_rows);
        fixture_close(&f);
    }
}

static void prepare_arguments(void **state)
{
    (void)state;
    for (int decode = 0; decode < 2; decode++) {
        struct fixture f;

        open_operation(&f, decode, MSA_E4M3, MSA_NVFP4, MSA_INDEX_SCORES | MSA_INDEX_SELECTION);
        CHECK_ROWS(&f, call_prepare, prepare_rows);
        fixture_close(&f);
    }
}

static void run_arguments(void **state)
{
    (void)state;
    for (int decode = 0; decode < 2; decode++) {
        struct fixture f;

        open_operation(&f, decode, MSA_E4M3, MSA_NVFP4, MSA_INDEX_SCORES | MSA_INDEX_SELECTION);
        CHECK_ROWS(&f, call_run, run_rows);
        CHECK_ROWS(&f, call_run, run_rows_nvfp4);
        fixture_close(&f);
        open_operation(&f, decode, MSA_BF16, MSA_BF16, MSA_INDEX_SCORES | MSA_INDEX_SELECTION);
        CHECK_ROWS(&f, call_run, run_rows);
        CHECK_ROWS(&f, call_run, run_rows_outputs);
        f.score.num_valid_pages = NULL; /* may be left out */
        assert_int_equal(call_run(&f), MSA_SUCCESS);
        fixture_close(&f);
        open_operation(&f, decode, MSA_E4M3, MSA_E4M3, MSA_INDEX_SCORES);
        CHECK_ROWS(&f, call_run, run_rows_scores_only);
        fixture_close(&f);
        open_operation(&f, decode, MSA_E4M3, MSA_E4M3, MSA_INDEX_SELECTION);
        CHECK_ROWS(&f, call_run, run_rows_selection_only);
        fixture_close(&f);
    }
}

/* The three pairs of the contract and no other. */
static void format_pairs(void **state)
{
    static const bool supported[MSA_E5M2 + 1][MSA_E5M2 + 1] = {
        [MSA_E4M3] = {[MSA_E4M3] = true, [MSA_NVFP4] = true},
        [MSA_BF16] = {[MSA_BF16] = true},
    };
    struct fixture f;

    (void)state;
    open_operation(&f, false, MSA_E4M3, MSA_E4M3, MSA_INDEX_SCORES);
    f.plan_out = &f.plan;
    for (int q = MSA_DTYPE_DEFAULT; q <= MSA_E5M2; q++) {
        for (int k = MSA_DTYPE_DEFAULT; k <= MSA_E5M2; k++) {
            f.index.q_dtype = (msa_dtype)q;
            f.index.k_dtype = (msa_dtype)k;
            if ((call_plan(&f) == MSA_SUCCESS) != supported[q][k])
                fail_msg("q dtype %d with k dtype %d is %s", q, k, supported[q][k] ? "refused" : "accepted");
        }
    }
    fixture_close(&f);
}

static void topk_arguments(void **state)
{
    struct fixture f;

    (void)state;
    fixture_open(&f);
    CHECK_ROWS(&f, call_topk, topk_rows);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan_arguments), cmocka_unit_test(prepare_arguments), cmocka_unit_test(run_arguments),
        cmocka_unit_test(format_pairs),   cmocka_unit_test(topk_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
