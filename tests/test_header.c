/* SPDX-License-Identifier: MIT
 *
 * The public header: compiles alone (it is the first include here, and test_header.cpp compiles this file as C++), and
 * every INIT macro gives each field the default that the header documents. A byte map notices fields left out below.
 */
#include "msa.h"

#include <stdarg.h>
#include <setjmp.h>
#include <string.h>

#include <cmocka.h>

struct field_check {
    const char *name;
    size_t bytes;
    unsigned char seen[512];
};

static struct field_check begin(const char *name, size_t bytes)
{
    struct field_check check;

    memset(&check, 0, sizeof(check));
    check.name = name;
    check.bytes = bytes;
    assert_true(bytes <= sizeof(check.seen));
    return check;
}

static void expect(struct field_check *check, const char *field, size_t offset, size_t bytes, int right)
{
    if (!right)
        fail_msg("%s.%s has another default than documented", check->name, field);
    memset(check->seen + offset, 1, bytes);
}

/* Only alignment padding may be left: four bytes in front of an eight-byte field, or at the end. */
static void end(const struct field_check *check)
{
    for (size_t i = 0; i < check->bytes; i += 4) {
        if (!check->seen[i] && (i % 8 != 4 || (i + 4 < check->bytes && !check->seen[i + 4])))
            fail_msg("%s: the field at byte %u is not checked", check->name, (unsigned)i);
    }
}

#define BEGIN(type, init)           \
    type s = init;                  \
    struct field_check check = begin(#type, sizeof(type))
#define IS(field, value) \
    expect(&check, #field, (size_t)((char *)&s.field - (char *)&s), sizeof(s.field), s.field == (value))
#define SIZE(type) IS(size, sizeof(type))
#define NUL(field) IS(field, NULL)
#define DENSE(field) IS(field, MSA_DENSE)
#define DENSE2(prefix, a, b) DENSE(prefix##_##a##_stride), DENSE(prefix##_##b##_stride)
#define DENSE3(prefix, a, b, c) DENSE2(prefix, a, b), DENSE(prefix##_##c##_stride)

static void context_structs(void **state)
{
    (void)state;
    {
        BEGIN(msa_context_options, MSA_CONTEXT_OPTIONS_INIT);
        SIZE(msa_context_options), IS(device, MSA_DEVICE_CPU), IS(num_threads, 0), NUL(isa), NUL(parallel_for);
        NUL(parallel_for_data), NUL(alloc), NUL(free), NUL(alloc_data), NUL(log), NUL(log_data);
        end(&check);
    }
    {
        BEGIN(msa_context_info, MSA_CONTEXT_INFO_INIT);
        SIZE(msa_context_info), IS(device, 0), IS(num_threads, 0), IS(compute_capability, 0), NUL(isa),
            NUL(device_name);
        end(&check);
    }
    {
        BEGIN(msa_kernel_info, MSA_KERNEL_INFO_INIT);
        SIZE(msa_kernel_info), NUL(name), NUL(operation), NUL(formats), NUL(isa), IS(available, 0);
        end(&check);
    }
    {
        BEGIN(msa_plan_info, MSA_PLAN_INFO_INIT);
        SIZE(msa_plan_info), NUL(operation), NUL(kernel), NUL(kernels), NUL(strategy), NUL(precision);
        IS(num_splits, 0), IS(query_tile, 0), IS(max_pages, 0), IS(workspace_bytes, 0u);
        end(&check);
    }
}

static void step_struct(void **state)
{
    (void)state;
    BEGIN(msa_step, MSA_STEP_INIT);
    SIZE(msa_step), IS(batch, 0), IS(total_q, 0), NUL(cu_seqlens_q), NUL(kv_lens), NUL(cu_seqlens_k), NUL(page_table);
    DENSE(page_table_stride), NUL(topk), DENSE2(topk, head, row), NUL(workspace), IS(workspace_bytes, 0u);
    end(&check);
}

static void index_structs(void **state)
{
    (void)state;
    {
        BEGIN(msa_index_desc, MSA_INDEX_DESC_INIT);
        SIZE(msa_index_desc), IS(q_dtype, MSA_E4M3), IS(k_dtype, MSA_E4M3), IS(num_index_heads, 1), IS(head_dim, 128);
        IS(page_size, 128), IS(causal, 1), IS(topk, 16), IS(init_pages, 0), IS(local_pages, 1);
        IS(topk_order, MSA_TOPK_ORDER_PAGE), IS(precision, MSA_PRECISION_EXACT);
        IS(outputs, MSA_INDEX_SCORES | MSA_INDEX_SELECTION), IS(max_batch, 1), IS(max_total_q, 1), IS(max_kv_len, 1);
        end(&check);
    }
    {
        BEGIN(msa_index_args, MSA_INDEX_ARGS_INIT);
        SIZE(msa_index_args), NUL(index_q), DENSE2(index_q, row, head), NUL(index_k), DENSE2(index_k, page, token);
        NUL(index_k_scale), DENSE2(index_k_scale, page, token), IS(num_pages, 0), NUL(scores),
            DENSE2(scores, head, row);
        NUL(topk), DENSE2(topk, head, row), NUL(num_valid_pages);
        end(&check);
    }
}

static void attention_structs(void **state)
{
    (void)state;
    {
        BEGIN(msa_attention_desc, MSA_ATTENTION_DESC_INIT);
        SIZE(msa_attention_desc), IS(q_dtype, MSA_E4M3), IS(kv_dtype, MSA_E4M3), IS(out_dtype, MSA_DTYPE_DEFAULT);
        IS(num_q_heads, 64), IS(num_kv_heads, 4), IS(num_lists, 0), IS(head_dim, 128), IS(page_size, 128),
            IS(causal, 1);
        IS(topk, 16), IS(sm_scale, MSA_DEFAULT_SM_SCALE), IS(precision, MSA_PRECISION_EXACT);
        IS(strategy, MSA_STRATEGY_AUTO), IS(v_scale_order, MSA_SCALE_LINEAR), IS(partials, 0), IS(max_batch, 1);
        IS(max_total_q, 1), IS(max_kv_len, 1);
        end(&check);
    }
    {
        BEGIN(msa_attention_args, MSA_ATTENTION_ARGS_INIT);
        SIZE(msa_attention_args), NUL(q), DENSE2(q, row, head), NUL(k), DENSE3(k, page, head, token), NUL(v);
        DENSE3(v, page, head, token), NUL(k_scale), DENSE3(k_scale, page, head, token), NUL(v_scale);
        DENSE3(v_scale, page, head, token), IS(num_pages, 0), NUL(q_descale), DENSE(q_descale_stride), NUL(k_descale);
        DENSE(k_descale_stride), NUL(v_descale), DENSE(v_descale_stride), NUL(k_global_scale), NUL(v_global_scale);
        NUL(out), DENSE2(out, row, head), NUL(lse), DENSE2(lse, row, head), NUL(o_partial);
        DENSE3(o_partial, split, row, head), NUL(lse_partial), DENSE3(lse_partial, split, row, head), NUL(split_counts);
        DENSE2(split_counts, row, head);
        end(&check);
    }
}

static void stateless_structs(void **state)
{
    (void)state;
    {
        BEGIN(msa_topk_args, MSA_TOPK_ARGS_INIT);
        SIZE(msa_topk_args), NUL(scores), DENSE2(scores, head, row), IS(num_heads, 1), IS(rows, 0), IS(columns, 0);
        NUL(valid_pages), IS(k, 16), IS(init_pages, 0), IS(local_pages, 1), IS(order, MSA_TOPK_ORDER_PAGE), NUL(topk);
        DENSE2(topk, head, row);
        end(&check);
    }
    {
        BEGIN(msa_combine_args, MSA_COMBINE_ARGS_INIT);
        SIZE(msa_combine_args), IS(num_splits, 1), IS(rows, 0), IS(num_q_heads, 1), IS(num_kv_heads, 1);
        IS(o_partial_dtype, MSA_BF16), NUL(o_partial), DENSE3(o_partial, split, row, head), NUL(lse_partial);
        DENSE3(lse_partial, split, row, head), NUL(split_counts), DENSE2(split_counts, row, head);
        IS(out_dtype, MSA_DTYPE_DEFAULT), NUL(out), DENSE2(out, row, head), NUL(lse), DENSE2(lse, row, head);
        end(&check);
    }
    {
        BEGIN(msa_merge_state, MSA_MERGE_STATE_INIT);
        NUL(out), DENSE2(out, row, head), IS(out_dtype, MSA_BF16), NUL(lse), DENSE2(lse, row, head);
        end(&check);
    }
    {
        BEGIN(msa_merge_args, MSA_MERGE_ARGS_INIT);
        SIZE(msa_merge_args), IS(num_states, 0), NUL(states), IS(rows, 0), IS(num_q_heads, 1);
        IS(out_dtype, MSA_DTYPE_DEFAULT), NUL(out), DENSE2(out, row, head), NUL(lse), DENSE2(lse, row, head);
        end(&check);
    }
    {
        BEGIN(msa_quantise_args, MSA_QUANTISE_ARGS_INIT);
        SIZE(msa_quantise_args), IS(rows, 0), IS(cols, 0), IS(src_dtype, MSA_BF16), NUL(src), DENSE(src_row_stride);
        IS(dst_dtype, MSA_E4M3), NUL(dst), DENSE(dst_row_stride), NUL(scale), DENSE(scale_row_stride), NUL(descale);
        end(&check);
    }
    {
        BEGIN(msa_convert_args, MSA_CONVERT_ARGS_INIT);
        SIZE(msa_convert_args), IS(rows, 0), IS(cols, 0), IS(src_dtype, MSA_NVFP4), NUL(src), DENSE(src_row_stride);
        NUL(scale), DENSE(scale_row_stride), IS(dst_dtype, MSA_E4M3), NUL(dst), DENSE(dst_row_stride);
        end(&check);
    }
}

static void cache_write_struct(void **state)
{
    (void)state;
    BEGIN(msa_cache_write_args, MSA_CACHE_WRITE_ARGS_INIT);
    SIZE(msa_cache_write_args), IS(tokens, 0), NUL(slot_mapping), IS(num_pages, 0), IS(num_kv_heads, 1);
    IS(src_dtype, MSA_BF16), NUL(k_new), DENSE2(k_new, row, head), NUL(v_new), DENSE2(v_new, row, head);
    NUL(index_k_new), DENSE(index_k_new_row_stride), IS(kv_dtype, MSA_BF16), NUL(k), DENSE3(k, page, head, token);
    NUL(v), DENSE3(v, page, head, token), NUL(k_scale), DENSE3(k_scale, page, head, token), NUL(v_scale);
    DENSE3(v_scale, page, head, token), IS(v_scale_order, MSA_SCALE_LINEAR), NUL(k_descale), DENSE(k_descale_stride);
    NUL(v_descale), DENSE(v_descale_stride), IS(index_k_dtype, MSA_BF16), NUL(index_k), DENSE2(index_k, page, token);
    NUL(index_k_scale), DENSE2(index_k_scale, page, token);
    end(&check);
}

static void constants(void **state)
{
    (void)state;
    assert_int_equal(MSA_PAGE_SIZE, 128);
    assert_int_equal(MSA_HEAD_DIM, 128);
    assert_int_equal(MSA_MAX_KV_LEN / MSA_PAGE_SIZE, 8192);
    assert_true(MSA_DENSE < 0);
    /* The nearest FP32 of 1/sqrt(128) = sqrt(2)/16. */
    assert_true(MSA_DEFAULT_SM_SCALE == (float)(1.4142135623730951 / 16));
    assert_int_equal(sizeof(msa_dtype), 4);
    assert_int_equal(sizeof(msa_status), 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(context_structs),   cmocka_unit_test(step_struct),        cmocka_unit_test(index_structs),
        cmocka_unit_test(attention_structs), cmocka_unit_test(stateless_structs), cmocka_unit_test(cache_write_struct),
        cmocka_unit_test(constants),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
