/* SPDX-License-Identifier: MIT
 *
 * Every argument of combine, merge, quantise, convert and cache write, broken one at a time.
 */
#include "api_fixture.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static msa_status call_combine(struct fixture *f)
{
    return msa_combine(f->context, f->no_args ? NULL : &f->combine, NULL);
}

static msa_status call_merge(struct fixture *f)
{
    return msa_merge(f->context, f->no_args ? NULL : &f->merge, NULL);
}

static msa_status call_quantise(struct fixture *f)
{
    return msa_quantise(f->context, f->no_args ? NULL : &f->quantise, NULL);
}

static msa_status call_convert(struct fixture *f)
{
    return msa_convert(f->context, f->no_args ? NULL : &f->convert, NULL);
}

static msa_status call_write(struct fixture *f)
{
    return msa_cache_write(f->context, f->no_args ? NULL : &f->write, NULL);
}

#define HEADS(s, field, most) /* most: 1024 or 16384, written out */                                              \
    I32(s, field, 0, "must be 1.." #most), I32(s, field, -1, "must be 1.." #most),                                \
        I32(s, field, most + 1, "must be 1.." #most), I32(s, field, INT32_MAX, "must be 1.." #most)
#define COUNT(s, field)                                                                                       \
    I64(s, field, -1, "must be 0..2147483647"), I64(s, field, 1ll << 31, "must be 0..2147483647"),            \
        I64(s, field, INT64_MAX, "must be 0..2147483647"), I64(s, field, INT64_MIN, "must be 0..2147483647")
#define OUTPUT_STRIDE(s, field, align) STRIDE(s, field, align), OVERLAP(s, field, align)

#define C(field, value, rule) I32(combine, field, value, rule)

/* clang-format off */
static const struct row combine_rows[] = {
    NUL_ARG(context, "context"),
    NO_ARGS("args"),
    SIZE_FIELD(combine, msa_combine_args),
    C(num_splits, 0, "must be 1..32"), C(num_splits, -1, "must be 1..32"), C(num_splits, 33, "must be 1..32"),
    COUNT(combine, rows),
    HEADS(combine, num_q_heads, 16384), HEADS(combine, num_kv_heads, 1024), C(num_kv_heads, 3, "must be a multiple"),
    DTYPE_RANGE(combine, o_partial_dtype), DTYPE(combine, o_partial_dtype, E5M2, "not supported"),
    DTYPE(combine, o_partial_dtype, F32, "must be BF16 or FP16"),
    DTYPE(combine, o_partial_dtype, E4M3, "must be BF16 or FP16"),
    NUL(combine, o_partial), SHIFT(combine, o_partial, 8, "aligned to 16"), STRIDE(combine, o_partial_split_stride, 16),
    STRIDE(combine, o_partial_row_stride, 16), STRIDE(combine, o_partial_head_stride, 16),
    NUL(combine, lse_partial), SHIFT(combine, lse_partial, 2, "aligned to 4"),
    STRIDE(combine, lse_partial_split_stride, 4),
    STRIDE(combine, lse_partial_row_stride, 4), STRIDE(combine, lse_partial_head_stride, 4),
    SHIFT(combine, split_counts, 1, "aligned to 4"), STRIDE(combine, split_counts_row_stride, 4),
    STRIDE(combine, split_counts_head_stride, 4),
    DTYPE_RANGE(combine, out_dtype), DTYPE(combine, out_dtype, E5M2, "not supported"),
    DTYPE(combine, out_dtype, F32, "must be BF16 or FP16"), DTYPE(combine, out_dtype, NVFP4, "must be BF16 or FP16"),
    NUL(combine, out), SHIFT(combine, out, 8, "aligned to 16"), OUTPUT_STRIDE(combine, out_row_stride, 16),
    OUTPUT_STRIDE(combine, out_head_stride, 16),
    SHIFT(combine, lse, 2, "aligned to 4"), OUTPUT_STRIDE(combine, lse_row_stride, 4),
    STRIDE(combine, lse_head_stride, 4),
    I64(combine, lse_head_stride, 0, "overlap"),
};


static const struct row merge_rows[] = {
    NUL_ARG(context, "context"),
    NO_ARGS("args"),
    SIZE_FIELD(merge, msa_merge_args),
    I32(merge, num_states, 0, "must be 2..32"), I32(merge, num_states, 1, "must be 2..32"),
    I32(merge, num_states, -1, "must be 2..32"), I32(merge, num_states, 33, "must be 2..32"),
    NUL(merge, states), SHIFT(merge, states, 4, "aligned to 8"),
    COUNT(merge, rows), HEADS(merge, num_q_heads, 16384),
    DTYPE_RANGE(merge, out_dtype), DTYPE(merge, out_dtype, E5M2, "not supported"),
    DTYPE(merge, out_dtype, E4M3, "BF16, FP16 or F32"),
    NUL(merge, out), SHIFT(merge, out, 8, "aligned to 16"), OUTPUT_STRIDE(merge, out_row_stride, 16),
    OUTPUT_STRIDE(merge, out_head_stride, 16),
    SHIFT(merge, lse, 1, "aligned to 4"), OUTPUT_STRIDE(merge, lse_row_stride, 4), STRIDE(merge, lse_head_stride, 4),
    I64(merge, lse_head_stride, 0, "overlap"),
    NUL(states[1], out), SHIFT(states[1], out, 8, "aligned to 16"), STRIDE(states[1], out_row_stride, 16),
    STRIDE(states[1], out_head_stride, 16), DTYPE_RANGE(states[1], out_dtype),
    DTYPE(states[1], out_dtype, E5M2, "states[1]"), DTYPE(states[1], out_dtype, NVFP4, "states[1]"),
    I32(states[1], out_dtype, -1, "states[1]"),
    NUL(states[1], lse), SHIFT(states[1], lse, 2, "aligned to 4"), STRIDE(states[1], lse_row_stride, 4),
    STRIDE(states[1], lse_head_stride, 4), I64(states[1], lse_row_stride, -4, "states[1]"),
};
/* clang-format on */

#define COLS(s)                                                                                      \
    I64(s, cols, 0, "must be 16..1048576"), I64(s, cols, -16, "must be 16..1048576"),                \
        I64(s, cols, 8, "must be 16..1048576"), I64(s, cols, (1 << 20) + 16, "must be 16..1048576"), \
        I64(s, cols, INT64_MAX, "must be 16..1048576"), I64(s, cols, 24, "multiple of 16"),          \
        I64(s, cols, 127, "multiple of 16")

/* clang-format off */
static const struct row quantise_rows[] = {
    NUL_ARG(context, "context"),
    NO_ARGS("args"),
    SIZE_FIELD(quantise, msa_quantise_args),
    COUNT(quantise, rows), COLS(quantise),
    DTYPE_RANGE(quantise, src_dtype), DTYPE(quantise, src_dtype, E5M2, "not supported"),
    DTYPE(quantise, src_dtype, E4M3, "BF16, FP16 or F32"), DTYPE(quantise, src_dtype, NVFP4, "BF16, FP16 or F32"),
    NUL(quantise, src), SHIFT(quantise, src, 1, "aligned to 2"), STRIDE(quantise, src_row_stride, 2),
    DTYPE_RANGE(quantise, dst_dtype), DTYPE(quantise, dst_dtype, E5M2, "not supported"),
    DTYPE(quantise, dst_dtype, BF16, "must be E4M3 or NVFP4"), DTYPE(quantise, dst_dtype, F32, "must be E4M3 or NVFP4"),
    NUL(quantise, dst), I64(quantise, dst_row_stride, -1, "must not be negative"),
    I64(quantise, dst_row_stride, 0, "overlap"),
    I64(quantise, dst_row_stride, 63, "overlap"), I64(quantise, dst_row_stride, INT64_MAX, "2^63 bytes"),
    NUL(quantise, scale), I64(quantise, scale_row_stride, -1, "must not be negative"),
    I64(quantise, scale_row_stride, 0, "overlap"),
    SHIFT(quantise, descale, 2, "aligned to 4"),
};

static const struct row quantise_rows_e4m3[] = {
    ALIAS(quantise, scale, quantise.src, "only NVFP4"),
};

static const struct row convert_rows[] = {
    NUL_ARG(context, "context"),
    NO_ARGS("args"),
    SIZE_FIELD(convert, msa_convert_args),
    COUNT(convert, rows), COLS(convert),
    DTYPE_RANGE(convert, src_dtype), DTYPE(convert, src_dtype, E5M2, "not supported"),
    DTYPE(convert, src_dtype, F32, "must be"),
    DTYPE(convert, src_dtype, BF16, "must be"),
    NUL(convert, src), I64(convert, src_row_stride, -1, "must not be negative"),
    I64(convert, src_row_stride, INT64_MAX, "2^63 bytes"),
    NUL(convert, scale), I64(convert, scale_row_stride, -1, "must not be negative"),
    DTYPE_RANGE(convert, dst_dtype), DTYPE(convert, dst_dtype, E5M2, "not supported"),
    DTYPE(convert, dst_dtype, NVFP4, "must be"),
    NUL(convert, dst), SHIFT(convert, dst, 1, "aligned to 2"), STRIDE(convert, dst_row_stride, 2),
    OVERLAP(convert, dst_row_stride, 2), I64(convert, dst_row_stride, 254, "overlap"),
};

static const struct row convert_rows_e4m3[] = {
    ALIAS(convert, scale, convert.src, "only NVFP4"),
};

#define W(field, value, rule) I64(write, field, value, rule)

static const struct row write_rows[] = {
    NUL_ARG(context, "context"),
    NO_ARGS("args"),
    SIZE_FIELD(write, msa_cache_write_args),
    COUNT(write, tokens), COUNT(write, num_pages), HEADS(write, num_kv_heads, 1024),
    NUL(write, slot_mapping), SHIFT(write, slot_mapping, 4, "aligned to 8"),
    DTYPE_RANGE(write, src_dtype), DTYPE(write, src_dtype, E5M2, "not supported"),
    DTYPE(write, src_dtype, NVFP4, "must be"),
    DTYPE(write, src_dtype, E4M3, "E4M3 only"),
    DTYPE_RANGE(write, kv_dtype), DTYPE(write, kv_dtype, E5M2, "not supported"),
    DTYPE(write, kv_dtype, F32, "must be BF16"),
    DTYPE_RANGE(write, index_k_dtype), DTYPE(write, index_k_dtype, E5M2, "not supported"),
    DTYPE(write, index_k_dtype, FP16, "must be BF16"), DTYPE(write, index_k_dtype, F32, "must be BF16"),
    I32(write, v_scale_order, 2, "must be 0..1"), I32(write, v_scale_order, -1, "must be 0..1"),
    NUL(write, k_new), SHIFT(write, k_new, 1, "aligned to 2"), STRIDE(write, k_new_row_stride, 2),
    STRIDE(write, k_new_head_stride, 2),
    NUL(write, v_new), SHIFT(write, v_new, 1, "aligned to 2"), STRIDE(write, v_new_row_stride, 2),
    STRIDE(write, v_new_head_stride, 2),
    NUL(write, index_k_new), SHIFT(write, index_k_new, 1, "aligned to 2"), STRIDE(write, index_k_new_row_stride, 2),
    NUL(write, k), SHIFT(write, k, 8, "aligned to 16"), OUTPUT_STRIDE(write, k_page_stride, 16),
    OUTPUT_STRIDE(write, k_head_stride, 16), OUTPUT_STRIDE(write, k_token_stride, 16),
    NUL(write, v), SHIFT(write, v, 8, "aligned to 16"), OUTPUT_STRIDE(write, v_page_stride, 16),
    OUTPUT_STRIDE(write, v_head_stride, 16), OUTPUT_STRIDE(write, v_token_stride, 16),
    NUL(write, k_scale), SHIFT(write, k_scale, 4, "aligned to 8"), OUTPUT_STRIDE(write, k_scale_page_stride, 8),
    OUTPUT_STRIDE(write, k_scale_head_stride, 8), STRIDE(write, k_scale_token_stride, 8),
    W(k_scale_token_stride, 0, "overlap"),
    NUL(write, v_scale), SHIFT(write, v_scale, 4, "aligned to 8"), OUTPUT_STRIDE(write, v_scale_page_stride, 8),
    OUTPUT_STRIDE(write, v_scale_head_stride, 8), STRIDE(write, v_scale_token_stride, 8),
    W(v_scale_token_stride, 0, "overlap"),
    SHIFT(write, k_descale, 2, "aligned to 4"), SHIFT(write, v_descale, 2, "aligned to 4"),
    NUL(write, index_k), SHIFT(write, index_k, 8, "aligned to 16"), OUTPUT_STRIDE(write, index_k_page_stride, 16),
    OUTPUT_STRIDE(write, index_k_token_stride, 16),
    NUL(write, index_k_scale), SHIFT(write, index_k_scale, 4, "aligned to 8"),
    OUTPUT_STRIDE(write, index_k_scale_page_stride, 8),
    STRIDE(write, index_k_scale_token_stride, 8), W(index_k_scale_token_stride, 0, "overlap"),
};

/* An E4M3 cache: its own scales, and no block scales. */
static const struct row write_rows_e4m3[] = {
    ROW(write, v_scale_order, SET_I32, MSA_SCALE_QUAD, 0, MSA_ERROR_INVALID_ARGUMENT, "quad", "no block scales"),
    STRIDE(write, k_descale_stride, 4), STRIDE(write, v_descale_stride, 4),
    ALIAS(write, k_scale, write.k, "only an NVFP4"), ALIAS(write, v_scale, write.v, "only an NVFP4"),
    ALIAS(write, index_k_scale, write.index_k, "only an NVFP4"),
};

static const struct row write_rows_16_bit[] = {
    ROW(write, v_scale_order, SET_I32, MSA_SCALE_QUAD, 0, MSA_ERROR_INVALID_ARGUMENT, "quad", "no block scales"),
    ALIAS(write, k_descale, write.slot_mapping, "only E4M3 and NVFP4"),
    ALIAS(write, v_descale, write.slot_mapping, "only E4M3 and NVFP4"),
};
/* clang-format on */

/* ------------------------------------------------------------------------------------------------ the tests */

static int open_fixture(void **state)
{
    static struct fixture f;

    fixture_open(&f);
    *state = &f;
    return 0;
}

static int close_fixture(void **state)
{
    fixture_close(*state);
    return 0;
}

static void combine_arguments(void **state)
{
    struct fixture *f = *state;

    CHECK_ROWS(f, call_combine, combine_rows);
    f->combine.lse = NULL;
    f->combine.split_counts = NULL;
    assert_int_equal(call_combine(f), MSA_SUCCESS);
}

static void merge_arguments(void **state)
{
    struct fixture *f = *state;

    CHECK_ROWS(f, call_merge, merge_rows);
    f->merge.lse = NULL;
    assert_int_equal(call_merge(f), MSA_SUCCESS);
}

static void quantise_arguments(void **state)
{
    struct fixture *f = *state;

    CHECK_ROWS(f, call_quantise, quantise_rows);
    f->quantise.descale = NULL;
    assert_int_equal(call_quantise(f), MSA_SUCCESS);
    f->quantise.dst_dtype = MSA_E4M3;
    f->quantise.dst = fixture_place(f, FIX_ROWS * 128);
    f->quantise.scale = NULL;
    CHECK_ROWS(f, call_quantise, quantise_rows_e4m3);
}

static void convert_arguments(void **state)
{
    struct fixture *f = *state;

    CHECK_ROWS(f, call_convert, convert_rows);
    f->convert.src_dtype = MSA_E4M3;
    f->convert.src = fixture_place(f, FIX_ROWS * 128);
    f->convert.scale = NULL;
    CHECK_ROWS(f, call_convert, convert_rows_e4m3);
}

static void cache_write_arguments(void **state)
{
    struct fixture *f = *state;
    const size_t cache = FIX_PAGES * FIX_KV_HEADS * 128 * 256;

    CHECK_ROWS(f, call_write, write_rows);
    f->write.k_scale = f->write.v_scale = f->write.index_k_scale = NULL;
    f->write.k = fixture_place(f, cache);
    f->write.v = fixture_place(f, cache);
    f->write.index_k = fixture_place(f, cache);
    f->write.kv_dtype = f->write.index_k_dtype = MSA_E4M3;
    CHECK_ROWS(f, call_write, write_rows_e4m3);
    f->write.kv_dtype = MSA_BF16;
    f->write.k_descale = f->write.v_descale = NULL;
    CHECK_ROWS(f, call_write, write_rows_16_bit);
}

/* Any of the three caches may be left out, and no token or page at all is fine with NULL everywhere. */
static void cache_write_parts(void **state)
{
    struct fixture *f = *state;
    const msa_cache_write_args all = f->write;

    for (int parts = 0; parts < 8; parts++) {
        f->write = all;
        if (!(parts & 1)) {
            f->write.k_new = NULL;
            f->write.k = f->write.k_scale = NULL;
        }
        if (!(parts & 2)) {
            f->write.v_new = NULL;
            f->write.v = f->write.v_scale = NULL;
        }
        if (!(parts & 4)) {
            f->write.index_k_new = NULL;
            f->write.index_k = f->write.index_k_scale = NULL;
        }
        assert_int_equal(call_write(f), MSA_SUCCESS);
    }
    f->write = (msa_cache_write_args)MSA_CACHE_WRITE_ARGS_INIT;
    assert_int_equal(call_write(f), MSA_SUCCESS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(combine_arguments, open_fixture, close_fixture),
        cmocka_unit_test_setup_teardown(merge_arguments, open_fixture, close_fixture),
        cmocka_unit_test_setup_teardown(quantise_arguments, open_fixture, close_fixture),
        cmocka_unit_test_setup_teardown(convert_arguments, open_fixture, close_fixture),
        cmocka_unit_test_setup_teardown(cache_write_arguments, open_fixture, close_fixture),
        cmocka_unit_test_setup_teardown(cache_write_parts, open_fixture, close_fixture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
