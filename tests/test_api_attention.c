/* SPDX-License-Identifier: MIT
 *
 * Every argument of prefill and decode, broken one at a time: status, words of the message, nothing written.
 */
#include "api_fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Calls of either operation, chosen by the test. */
static plan_attention_fn *plan_fn;
static prepare_fn *prepare_function;
static msa_status (*run_fn)(msa_plan *, const msa_attention_args *, msa_stream);

static void use_operation(bool decode)
{
    plan_fn = decode ? msa_decode_plan : msa_prefill_plan;
    prepare_function = decode ? msa_decode_prepare : msa_prefill_prepare;
    run_fn = decode ? msa_decode_run : msa_prefill_run;
}

static void open_operation(struct fixture *f, bool decode, msa_dtype q, msa_dtype kv, int partials)
{
    use_operation(decode);
    fixture_open(f);
    assert_int_equal((decode ? msa_prefill_plan : msa_decode_plan)(
                         f->context, &(msa_attention_desc)MSA_ATTENTION_DESC_INIT, &f->other_plan),
                     MSA_SUCCESS);
    fixture_attention(f, q, kv, partials, plan_fn, prepare_function);
}

static msa_status call_plan(struct fixture *f)
{
    msa_plan *plan = NULL;
    const msa_status status = plan_fn(f->context, f->no_args ? NULL : &f->attention, f->plan_out ? &plan : NULL);

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
    return run_fn(f->plan, f->no_args ? NULL : &f->attend, NULL);
}

#define D(field, value, rule) I32(attention, field, value, rule)
#define D64(field, value, rule) I64(attention, field, value, rule)
#define D_NO_CODE(field, value, rule) NO_CODE(attention, field, value, rule)
#define D_DTYPE(field, dtype, rule) DTYPE(attention, field, dtype, rule)

/* clang-format off */
static const struct row plan_rows[] = {
    NUL_ARG(context, "context"),
    NUL_ARG(plan_out, "plan"),
    NO_ARGS("desc"),
    SIZE_FIELD(attention, msa_attention_desc),
    DTYPE_RANGE(attention, q_dtype), D_DTYPE(q_dtype, E5M2, "only E4M3"), D_DTYPE(q_dtype, F32, "must be E4M3 with"),
    D_DTYPE(q_dtype, NVFP4, "must be E4M3 with"),
    DTYPE_RANGE(attention, kv_dtype), D_DTYPE(kv_dtype, E5M2, "only E4M3"), D_DTYPE(kv_dtype, F32, "must be E4M3 with"),
    D_DTYPE(kv_dtype, BF16, "must be E4M3 with"), D_DTYPE(kv_dtype, FP16, "must be E4M3 with"),
    DTYPE_RANGE(attention, out_dtype), D_DTYPE(out_dtype, E5M2, "only E4M3"),
    D_DTYPE(out_dtype, F32, "must be BF16 or FP16"),
    D_DTYPE(out_dtype, E4M3, "must be BF16 or FP16"), D_DTYPE(out_dtype, NVFP4, "must be BF16 or FP16"),
    D(num_q_heads, 0, "must be 1.."), D(num_q_heads, -4, "must be 1.."), D(num_q_heads, INT32_MAX, "must be 1.."),
    D(num_q_heads, 3, "multiple of num_kv_heads = 2"), D(num_q_heads, 1, "multiple of num_kv_heads = 2"),
    D_NO_CODE(num_q_heads, 34, "must be 1..16"), D_NO_CODE(num_q_heads, 64, "must be 1..16"),
    D(num_kv_heads, 0, "must be 1.."), D(num_kv_heads, -1, "must be 1.."), D(num_kv_heads, INT32_MAX, "must be 1.."),
    D(num_kv_heads, 3, "multiple of num_kv_heads"), D(num_kv_heads, 8, "multiple of num_kv_heads"),
    D(num_lists, -1, "divisor of num_kv_heads = 2"), D(num_lists, 3, "divisor of num_kv_heads = 2"),
    D(num_lists, 4, "divisor of num_kv_heads = 2"), D(num_lists, INT32_MAX, "divisor of num_kv_heads = 2"),
    D_NO_CODE(head_dim, 0, "only 128"), D_NO_CODE(head_dim, 64, "only 128"), D_NO_CODE(head_dim, 96, "only 128"),
    D_NO_CODE(head_dim, 127, "only 128"), D_NO_CODE(head_dim, 129, "only 128"), D_NO_CODE(head_dim, 192, "only 128"),
    D_NO_CODE(head_dim, 256, "only 128"), D_NO_CODE(head_dim, -128, "only 128"),
    D_NO_CODE(page_size, 0, "only 128"), D_NO_CODE(page_size, 1, "only 128"), D_NO_CODE(page_size, 16, "only 128"),
    D_NO_CODE(page_size, 64, "only 128"), D_NO_CODE(page_size, 127, "only 128"), D_NO_CODE(page_size, 129, "only 128"),
    D_NO_CODE(page_size, 256, "only 128"), D_NO_CODE(page_size, 640, "only 128"),
    D_NO_CODE(page_size, -128, "only 128"),
    D_NO_CODE(causal, 0, "only causal"), D_NO_CODE(causal, 2, "only causal"), D_NO_CODE(causal, -1, "only causal"),
    D(topk, 0, "must be 1..32"), D_NO_CODE(topk, 33, "must be 1..32"), D(topk, -1, "must be 1..32"),
    D_NO_CODE(topk, INT32_MAX, "must be 1..32"),
    F32(attention, sm_scale, NAN, "nan", "must be finite and > 0"),
    F32(attention, sm_scale, 0, "0", "must be finite and > 0"),
    F32(attention, sm_scale, -1, "-1", "must be finite and > 0"),
    F32(attention, sm_scale, INFINITY, "inf", "must be finite and > 0"),
    F32(attention, sm_scale, -INFINITY, "-inf", "must be finite and > 0"),
    D(precision, 2, "must be 0..1"), D(precision, -1, "must be 0..1"),
    D(strategy, 3, "must be 0..2"), D(strategy, -1, "must be 0..2"),
    ROW(attention, strategy, SET_I32, MSA_STRATEGY_PAGE_MAJOR, 0, MSA_ERROR_UNSUPPORTED, "page-major", "CPU"),
    D(v_scale_order, 2, "must be 0..1"), D(v_scale_order, -1, "must be 0..1"),
    D(partials, 2, "must be 0..1"), D(partials, -1, "must be 0..1"),
    D(max_batch, 0, "must be 1.."), D(max_batch, -1, "must be 1.."), D(max_batch, INT32_MIN, "must be 1.."),
    D64(max_total_q, 0, "must be 1..2147483647"), D64(max_total_q, -1, "must be 1..2147483647"),
    D64(max_total_q, 1ll << 31, "must be 1..2147483647"), D64(max_total_q, INT64_MAX, "must be 1..2147483647"),
    D64(max_total_q, INT64_MIN, "must be 1..2147483647"),
    D64(max_kv_len, 0, "must be 1..1048576"), D64(max_kv_len, -1, "must be 1..1048576"),
    D64(max_kv_len, MSA_MAX_KV_LEN + 1, "must be 1..1048576"), D64(max_kv_len, INT64_MAX, "must be 1..1048576"),
};

#define S(field, value, rule) I64(step, field, value, rule)

static const struct row prepare_rows[] = {
    NUL_ARG(plan, "plan"),
    OTHER_PLAN,
    NO_ARGS("step"),
    SIZE_FIELD(step, msa_step),
    I32(step, batch, -1, "must be 0..2"), I32(step, batch, 3, "must be 0..2"),
    I32(step, batch, INT32_MAX, "must be 0..2"),
    S(total_q, -1, "must be 0..5"), S(total_q, 6, "must be 0..5"), S(total_q, INT64_MAX, "must be 0..5"),
    S(total_q, INT64_MIN, "must be 0..5"),
    NUL(step, cu_seqlens_q), SHIFT(step, cu_seqlens_q, 2, "aligned to 4"),
    NUL(step, kv_lens), SHIFT(step, kv_lens, 1, "aligned to 4"),
    ALIAS(step, cu_seqlens_k, step.cu_seqlens_q, "must be NULL when kv_lens is given"),
    NUL(step, page_table), SHIFT(step, page_table, 3, "aligned to 4"), STRIDE(step, page_table_stride, 4),
    S(page_table_stride, 4, "at least 8 bytes"),
    NUL(step, topk), SHIFT(step, topk, 2, "aligned to 4"), STRIDE(step, topk_head_stride, 4),
    STRIDE(step, topk_row_stride, 4),
    NUL(step, workspace), SHIFT(step, workspace, 128, "aligned to 256"), SHIFT(step, workspace, 16, "aligned to 256"),
    S(workspace_bytes, 0, "must be at least"), S(workspace_bytes, 255, "must be at least"),
};

#define R(field, value, rule) I64(attend, field, value, rule)
#define R_STRIDE(field, align) STRIDE(attend, field, align)
#define R_OUTPUT(field, align) STRIDE(attend, field, align), OVERLAP(attend, field, align)

static const struct row run_rows[] = {
    NUL_ARG(plan, "plan"),
    OTHER_PLAN,
    NO_ARGS("args"),
    SIZE_FIELD(attend, msa_attention_args),
    NUL(attend, q), SHIFT(attend, q, 8, "aligned to 16"), R_STRIDE(q_row_stride, 16), R_STRIDE(q_head_stride, 16),
    NUL(attend, k), SHIFT(attend, k, 4, "aligned to 16"), R_STRIDE(k_page_stride, 16), R_STRIDE(k_head_stride, 16),
    R_STRIDE(k_token_stride, 16),
    NUL(attend, v), SHIFT(attend, v, 1, "aligned to 16"), R_STRIDE(v_page_stride, 16), R_STRIDE(v_head_stride, 16),
    R_STRIDE(v_token_stride, 16),
    R(num_pages, -1, "must be 0.."), R(num_pages, 1ll << 31, "must be 0.."), R(num_pages, INT64_MAX, "must be 0.."),
    R(num_pages, INT64_MIN, "must be 0.."),
};

static const struct row run_rows_outputs[] = {
    NUL(attend, out), SHIFT(attend, out, 8, "aligned to 16"), R_OUTPUT(out_row_stride, 16),
    R_OUTPUT(out_head_stride, 16),
    SHIFT(attend, lse, 2, "aligned to 4"), R_OUTPUT(lse_row_stride, 4), STRIDE(attend, lse_head_stride, 4),
    R(lse_head_stride, 0, "overlap"),
    ALIAS(attend, o_partial, attend.out, "must be NULL, the plan has no partials"),
    ALIAS(attend, lse_partial, attend.lse, "must be NULL, the plan has no partials"),
    ALIAS(attend, split_counts, attend.lse, "must be NULL, the plan has no partials"),
};

static const struct row run_rows_partials[] = {
    NUL(attend, o_partial), SHIFT(attend, o_partial, 8, "aligned to 16"), R_OUTPUT(o_partial_split_stride, 16),
    R_OUTPUT(o_partial_row_stride, 16), R_OUTPUT(o_partial_head_stride, 16),
    NUL(attend, lse_partial), SHIFT(attend, lse_partial, 2, "aligned to 4"), R_OUTPUT(lse_partial_split_stride, 4),
    R_OUTPUT(lse_partial_row_stride, 4), STRIDE(attend, lse_partial_head_stride, 4),
    R(lse_partial_head_stride, 0, "overlap"),
    NUL(attend, split_counts), SHIFT(attend, split_counts, 1, "aligned to 4"), R_OUTPUT(split_counts_row_stride, 4),
    STRIDE(attend, split_counts_head_stride, 4), R(split_counts_head_stride, 0, "overlap"),
    ALIAS(attend, out, attend.o_partial, "must be NULL, the plan has partials"),
    ALIAS(attend, lse, attend.lse_partial, "must be NULL, the plan has partials"),
};

/* Descales belong to E4M3 tensors, block and global scales to NVFP4 ones. */
static const struct row run_rows_e4m3[] = {
    SHIFT(attend, q_descale, 2, "aligned to 4"), STRIDE(attend, q_descale_stride, 4),
    SHIFT(attend, k_descale, 1, "aligned to 4"), STRIDE(attend, k_descale_stride, 4),
    SHIFT(attend, v_descale, 3, "aligned to 4"), STRIDE(attend, v_descale_stride, 4),
    ALIAS(attend, k_scale, attend.k, "only NVFP4"), ALIAS(attend, v_scale, attend.k, "only NVFP4"),
    ALIAS(attend, k_global_scale, attend.k_descale, "only NVFP4"),
    ALIAS(attend, v_global_scale, attend.k_descale, "only NVFP4"),
};

static const struct row run_rows_nvfp4[] = {
    NUL(attend, k_scale), SHIFT(attend, k_scale, 4, "aligned to 8"), R_STRIDE(k_scale_page_stride, 8),
    R_STRIDE(k_scale_head_stride, 8), R_STRIDE(k_scale_token_stride, 8),
    NUL(attend, v_scale), SHIFT(attend, v_scale, 2, "aligned to 8"), R_STRIDE(v_scale_page_stride, 8),
    R_STRIDE(v_scale_head_stride, 8), R_STRIDE(v_scale_token_stride, 8),
    SHIFT(attend, k_global_scale, 2, "aligned to 4"), SHIFT(attend, v_global_scale, 1, "aligned to 4"),
    ALIAS(attend, k_descale, attend.q_descale, "only E4M3"), ALIAS(attend, v_descale, attend.q_descale, "only E4M3"),
};

static const struct row run_rows_16_bit[] = {
    ALIAS(attend, q_descale, attend.q, "only E4M3"), ALIAS(attend, k_descale, attend.q, "only E4M3"),
    ALIAS(attend, v_descale, attend.q, "only E4M3"), ALIAS(attend, k_global_scale, attend.q, "only NVFP4"),
    ALIAS(attend, v_global_scale, attend.q, "only NVFP4"),
};
/* clang-format on */

/* ------------------------------------------------------------------------------------------------ the tests */

static void plan_arguments(void **state)
{
    (void)state;
    for (int decode = 0; decode < 2; decode++) {
        struct fixture f;

        open_operation(&f, decode, MSA_E4M3, MSA_NVFP4, 0);
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

        open_operation(&f, decode, MSA_E4M3, MSA_NVFP4, 0);
        CHECK_ROWS(&f, call_prepare, prepare_rows);
        fixture_close(&f);
    }
}

static void run_arguments(void **state)
{
    (void)state;
    for (int decode = 0; decode < 2; decode++) {
        struct fixture f;

        open_operation(&f, decode, MSA_E4M3, MSA_NVFP4, 0);
        CHECK_ROWS(&f, call_run, run_rows);
        CHECK_ROWS(&f, call_run, run_rows_outputs);
        CHECK_ROWS(&f, call_run, run_rows_nvfp4);
        fixture_close(&f);
        open_operation(&f, decode, MSA_E4M3, MSA_E4M3, 0);
        CHECK_ROWS(&f, call_run, run_rows);
        CHECK_ROWS(&f, call_run, run_rows_e4m3);
        fixture_close(&f);
        open_operation(&f, decode, MSA_BF16, MSA_BF16, 0);
        CHECK_ROWS(&f, call_run, run_rows_16_bit);
        fixture_close(&f);
        open_operation(&f, decode, MSA_E4M3, MSA_E4M3, 1);
        CHECK_ROWS(&f, call_run, run_rows);
        CHECK_ROWS(&f, call_run, run_rows_partials);
        fixture_close(&f);
    }
}

/* The eight pairs of the contract and no other. */
static void format_pairs(void **state)
{
    static const bool supported[MSA_E5M2 + 1][MSA_E5M2 + 1] = {
        [MSA_E4M3] = {[MSA_E4M3] = true, [MSA_NVFP4] = true},
        [MSA_BF16] = {[MSA_BF16] = true, [MSA_E4M3] = true, [MSA_NVFP4] = true},
        [MSA_FP16] = {[MSA_FP16] = true, [MSA_E4M3] = true, [MSA_NVFP4] = true},
    };
    struct fixture f;

    (void)state;
    open_operation(&f, false, MSA_E4M3, MSA_E4M3, 0);
    f.plan_out = &f.plan;
    for (int q = MSA_DTYPE_DEFAULT; q <= MSA_E5M2; q++) {
        for (int kv = MSA_DTYPE_DEFAULT; kv <= MSA_E5M2; kv++) {
            f.attention.q_dtype = (msa_dtype)q;
            f.attention.kv_dtype = (msa_dtype)kv;
            if ((call_plan(&f) == MSA_SUCCESS) != supported[q][kv])
                fail_msg("q dtype %d with kv dtype %d is %s", q, kv, supported[q][kv] ? "refused" : "accepted");
        }
    }
    fixture_close(&f);
}

static void every_ratio_and_topk(void **state)
{
    struct fixture f;

    (void)state;
    open_operation(&f, true, MSA_E4M3, MSA_E4M3, 0);
    f.plan_out = &f.plan;
    for (int ratio = 1; ratio <= 64; ratio++) {
        f.attention.num_q_heads = ratio * FIX_KV_HEADS;
        assert_int_equal(call_plan(&f), ratio <= 16 ? MSA_SUCCESS : MSA_ERROR_UNSUPPORTED);
    }
    f.attention.num_q_heads = FIX_Q_HEADS;
    for (int k = 1; k <= 32; k++) {
        f.attention.topk = k;
        assert_int_equal(call_plan(&f), MSA_SUCCESS);
    }
    fixture_close(&f);
}

/* The tensors that may be left out, and values that extents of one make irrelevant. */
static void optional_arguments(void **state)
{
    struct fixture f;

    (void)state;
    open_operation(&f, false, MSA_E4M3, MSA_E4M3, 0);
    f.attend.q_descale = f.attend.k_descale = f.attend.v_descale = NULL;
    f.attend.lse = NULL;
    assert_int_equal(call_run(&f), MSA_SUCCESS);
    f.step.batch = 1;
    f.step.page_table_stride = -3;
    assert_int_equal(call_prepare(&f), MSA_SUCCESS);
    fixture_close(&f);
    open_operation(&f, false, MSA_E4M3, MSA_NVFP4, 0);
    f.attend.k_global_scale = f.attend.v_global_scale = NULL;
    assert_int_equal(call_run(&f), MSA_SUCCESS);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan_arguments), cmocka_unit_test(prepare_arguments),     cmocka_unit_test(run_arguments),
        cmocka_unit_test(format_pairs),   cmocka_unit_test(every_ratio_and_topk), cmocka_unit_test(optional_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
