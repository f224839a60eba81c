/* SPDX-License-Identifier: MIT
 *
 * faults_calls.c - empty calls, refusals and kernel names, and the corners of combine and merge.
 */
#include "faults.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { D = MSA_HEAD_DIM };

/* ----------------------------------------------------------------------------------------------------- empty calls */

/* No request, or no row: every entry point succeeds, with NULL tensors, and writes nothing. */
static void empty_calls(harness *h)
{
    static const int32_t zeros[4] = {0};
    for (int i = 0; i < h->num_levels; i++)
        for (int32_t requests = 0; requests <= 3; requests += 3) {
            msa_context *context = h->levels[i].one;
            msa_step step = MSA_STEP_INIT;
            step.batch = requests;
            step.cu_seqlens_q = requests ? zeros : NULL;
            step.kv_lens = requests ? zeros : NULL;
            msa_attention_desc attention = MSA_ATTENTION_DESC_INIT;
            msa_index_desc index = MSA_INDEX_DESC_INIT;
            attention.max_batch = index.max_batch = 3;
            msa_attention_args attention_args = MSA_ATTENTION_ARGS_INIT;
            msa_index_args index_args = MSA_INDEX_ARGS_INIT;
            msa_plan *plan;
            CHECK_OK(h, msa_prefill_plan(context, &attention, &plan));
            CHECK_OK(h, msa_prefill_prepare(plan, &step, NULL));
            CHECK_OK(h, msa_prefill_run(plan, &attention_args, NULL));
            msa_plan_destroy(plan);
            CHECK_OK(h, msa_decode_plan(context, &attention, &plan));
            CHECK_OK(h, msa_decode_prepare(plan, &step, NULL));
            CHECK_OK(h, msa_decode_run(plan, &attention_args, NULL));
            msa_plan_destroy(plan);
            CHECK_OK(h, msa_index_prefill_plan(context, &index, &plan));
            CHECK_OK(h, msa_index_prefill_prepare(plan, &step, NULL));
            CHECK_OK(h, msa_index_prefill_run(plan, &index_args, NULL));
            msa_plan_destroy(plan);
            CHECK_OK(h, msa_index_decode_plan(context, &index, &plan));
            CHECK_OK(h, msa_index_decode_prepare(plan, &step, NULL));
            CHECK_OK(h, msa_index_decode_run(plan, &index_args, NULL));
            msa_plan_destroy(plan);
            CHECK_OK(h, msa_topk(context, &(msa_topk_args)MSA_TOPK_ARGS_INIT, NULL));
            CHECK_OK(h, msa_combine(context, &(msa_combine_args)MSA_COMBINE_ARGS_INIT, NULL));
            msa_quantise_args quantise = MSA_QUANTISE_ARGS_INIT;
            msa_convert_args convert = MSA_CONVERT_ARGS_INIT;
            quantise.cols = convert.cols = 128;
            CHECK_OK(h, msa_quantise(context, &quantise, NULL));
            CHECK_OK(h, msa_convert(context, &convert, NULL));
            CHECK_OK(h, msa_cache_write(context, &(msa_cache_write_args)MSA_CACHE_WRITE_ARGS_INIT, NULL));
            msa_merge_args merge = MSA_MERGE_ARGS_INIT;
            msa_merge_state states[2] = {MSA_MERGE_STATE_INIT, MSA_MERGE_STATE_INIT};
            merge.num_states = 2;
            merge.states = states;
            CHECK_OK(h, msa_merge(context, &merge, NULL));
        }
}

/* A step without rows reads no lengths, so bad ones set no bit. */
static void lengths_without_rows(harness *h)
{
    static const int32_t falling[2] = {3, -2}, negative[1] = {-7};
    for (int i = 0; i < h->num_levels; i++) {
        msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
        msa_plan *plan;
        uint32_t bits = ~0u;
        msa_step step = MSA_STEP_INIT;
        step.batch = 1;
        step.cu_seqlens_q = falling; /* the host's, on a GPU too */
        step.kv_lens = negative;
        CHECK_OK(h, msa_prefill_plan(h->levels[i].one, &desc, &plan));
        CHECK_OK(h, msa_prefill_prepare(plan, &step, NULL));
        CHECK_OK(h, msa_plan_error(plan, &bits, NULL));
        CHECK(h, bits == 0);
        msa_plan_destroy(plan);
    }
}

/* ------------------------------------------------------------------------------------------------- refusals, names */

/* Shapes without a kernel are refused when planning, by name; the next good call works. */
static void refusals(harness *h)
{
    static const struct {
        int32_t q_heads, kv_heads, head_dim, page_size, causal, topk;
        const char *name;
    } bad[] = {
        {64, 4, 64, 128, 1, 16, "head_dim"},    {64, 4, 96, 128, 1, 16, "head_dim"},
        {64, 4, 127, 128, 1, 16, "head_dim"},   {64, 4, 129, 128, 1, 16, "head_dim"},
        {64, 4, 192, 128, 1, 16, "head_dim"},   {64, 4, 256, 128, 1, 16, "head_dim"},
        {64, 4, 128, 1, 1, 16, "page_size"},    {64, 4, 128, 16, 1, 16, "page_size"},
        {64, 4, 128, 64, 1, 16, "page_size"},   {64, 4, 128, 127, 1, 16, "page_size"},
        {64, 4, 128, 129, 1, 16, "page_size"},  {64, 4, 128, 256, 1, 16, "page_size"},
        {64, 4, 128, 640, 1, 16, "page_size"},  {64, 4, 128, 128, 0, 16, "causal"},
        {64, 4, 128, 128, 1, 0, "topk"},        {64, 4, 128, 128, 1, -1, "topk"},
        {64, 4, 128, 128, 1, 33, "topk"},       {33, 2, 128, 128, 1, 16, "num_q_heads"},
        {3, 2, 128, 128, 1, 16, "num_q_heads"}, {4, 0, 128, 128, 1, 16, "num_kv_heads"},
        {0, 1, 128, 128, 1, 16, "num_q_heads"}, {2, 4, 128, 128, 1, 16, "num_q_heads"},
        {24, 1, 128, 128, 1, 16, "1..16"},      {32, 1, 128, 128, 1, 16, "1..16"},
        {64, 1, 128, 128, 1, 16, "1..16"},
    };
    for (int i = 0; i < (int)(sizeof bad / sizeof bad[0]); i++)
        for (int decode = 0; decode < 2; decode++) {
            msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
            msa_plan *plan = (msa_plan *)&desc;
            desc.num_q_heads = bad[i].q_heads;
            desc.num_kv_heads = bad[i].kv_heads;
            desc.head_dim = bad[i].head_dim;
            desc.page_size = bad[i].page_size;
            desc.causal = bad[i].causal;
            desc.topk = bad[i].topk;
            msa_status status = (decode ? msa_decode_plan : msa_prefill_plan)(h->levels[0].one, &desc, &plan);
            if (status != MSA_ERROR_INVALID_ARGUMENT && status != MSA_ERROR_UNSUPPORTED)
                test_fail(h, "%s: status %d", bad[i].name, status);
            if (!strstr(msa_last_error(), bad[i].name) || plan)
                test_fail(h, "%s is not named in \"%s\"", bad[i].name, msa_last_error());
            msa_attention_desc good = MSA_ATTENTION_DESC_INIT;
            CHECK_OK(h, (decode ? msa_decode_plan : msa_prefill_plan)(h->levels[0].one, &good, &plan));
            msa_plan_destroy(plan);
        }
}

/* The kernel that a plan names is one of the list's, and of the context's instruction set or a weaker one. */
static void check_kernel_name(harness *h, const isa_level *l, const msa_plan *plan)
{
    msa_plan_info info = MSA_PLAN_INFO_INIT;
    msa_kernel_info kernel = MSA_KERNEL_INFO_INIT;
    bool found = false;
    CHECK_OK(h, msa_plan_get_info(plan, &info));
    for (size_t i = 0; info.kernel && !msa_kernel_get(l->one, i, &kernel); i++)
        found |= !strcmp(kernel.name, info.kernel) && kernel.available;
    if (!found)
        test_fail(h, "%s: kernel \"%s\" is not an available one of the list", l->isa, info.kernel ? info.kernel : "");
}

/* Decode and prefill of the index may each meet tiles that the other's kernel takes: where a level has one for few
 * rows, both name the two. */
static void check_index_kernels(harness *h, const isa_level *l, const msa_plan *plan)
{
    char few[64], few_e4m3[64], many[64];
    msa_plan_info info = MSA_PLAN_INFO_INIT;
    msa_kernel_info kernel = MSA_KERNEL_INFO_INIT;
    snprintf(few, sizeof few, "index_few_%s,", l->isa);
    snprintf(few_e4m3, sizeof few_e4m3, "index_few_e4m3_%s,", l->isa);
    snprintf(many, sizeof many, "index_%s,", l->isa);
    CHECK_OK(h, msa_plan_get_info(plan, &info));
    for (size_t i = 0; !msa_kernel_get(l->one, i, &kernel); i++)
        if (!strncmp(kernel.name, few, strlen(few) - 1) && !kernel.name[strlen(few) - 1] &&
            !((strstr(info.kernels, few) || strstr(info.kernels, few_e4m3)) && strstr(info.kernels, many)))
            test_fail(h, "%s: not both kernels in \"%s\"", l->isa, info.kernels);
}

static void kernel_names(harness *h)
{
    for (int i = 0; i < h->num_levels; i++) {
        const isa_level *l = &h->levels[i];
        msa_plan *plan = NULL;
        for (int pair = 0; pair < NUM_ATTENTION_PAIRS; pair++) {
            msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
            desc.q_dtype = attention_pairs[pair].q;
            desc.kv_dtype = attention_pairs[pair].kv;
            CHECK_OK(h, msa_prefill_plan(l->one, &desc, &plan));
            check_kernel_name(h, l, plan);
            msa_plan_destroy(plan);
            CHECK_OK(h, msa_decode_plan(l->one, &desc, &plan));
            check_kernel_name(h, l, plan);
            msa_plan_destroy(plan);
        }
        for (int pair = 0; pair < NUM_INDEX_PAIRS; pair++) {
            msa_index_desc desc = MSA_INDEX_DESC_INIT;
            desc.q_dtype = index_pairs[pair].q;
            desc.k_dtype = index_pairs[pair].kv;
            CHECK_OK(h, msa_index_prefill_plan(l->one, &desc, &plan));
            check_kernel_name(h, l, plan);
            check_index_kernels(h, l, plan);
            msa_plan_destroy(plan);
            CHECK_OK(h, msa_index_decode_plan(l->one, &desc, &plan));
            check_kernel_name(h, l, plan);
            check_index_kernels(h, l, plan);
            msa_plan_destroy(plan);
        }
    }
}

/* ----------------------------------------------------------------------------------------------- combine and merge */

static void combine_row(harness *h, const isa_level *l, const float *lse, int splits, float *out, float *out_lse)
{
    arena memory = {0};
    uint16_t(*partial)[D] = (void *)arena_region(&memory, sizeof(uint16_t[16][D]), 16)->data;
    uint16_t *result = (void *)arena_region(&memory, sizeof(uint16_t[D]), 16)->data;
    for (int s = 0; s < splits; s++)
        for (int d = 0; d < D; d++)
            partial[s][d] = (uint16_t)(isinf(lse[s]) ? 0x7FC0 : oracle_encode(MSA_BF16, s + 1));
    msa_combine_args a = MSA_COMBINE_ARGS_INIT;
    a.num_splits = splits;
    a.rows = 1;
    a.o_partial = partial;
    a.lse_partial = arena_copy(&memory, lse, (size_t)splits * sizeof *lse, 4);
    a.out = result;
    a.lse = (float *)(void *)arena_region(&memory, sizeof *a.lse, 4)->data;
    CHECK_OK(h, msa_combine(l->one, &a, NULL));
    for (int d = 0; d < D; d++)
        CHECK(h, result[d] == result[0]);
    *out = (float)oracle_value(MSA_BF16, result);
    *out_lse = *a.lse;
    arena_free(&memory);
}

static void combine_corners(harness *h)
{
    float lse[16], out, out_lse;
    for (int i = 0; i < h->num_levels; i++) {
        const isa_level *l = &h->levels[i];
        for (int splits = 1; splits <= 16; splits++) {
            for (int s = 0; s < splits; s++)
                lse[s] = -INFINITY;
            combine_row(h, l, lse, splits, &out, &out_lse);
            CHECK(h, out == 0 && isinf(out_lse) && out_lse < 0);
            lse[splits - 1] = 3.25f; /* one that is not empty: it comes back as it is */
            combine_row(h, l, lse, splits, &out, &out_lse);
            CHECK(h, out == (float)splits && out_lse == 3.25f);
            lse[0] = splits > 1 ? 1000 : 3.25f; /* and one that outweighs it */
            combine_row(h, l, lse, splits, &out, &out_lse);
            CHECK(h, out == 1 && out_lse == lse[0]);
            lse[splits - 1] = splits > 1 ? -1000 : 3.25f;
            combine_row(h, l, lse, splits, &out, &out_lse);
            CHECK(h, out == 1 && out_lse == lse[0]);
        }
    }
}

/* 4096 keys of V = 0 and 128 of V = 1: natural logarithms give 0.0303, base 2 would give 0.0067. */
static void lse_base(harness *h)
{
    float values[2][D] = {{0}};
    static const float lse[2] = {8.31776617f, 4.85203026f};
    for (int d = 0; d < D; d++)
        values[1][d] = 1;
    msa_merge_state states[2] = {MSA_MERGE_STATE_INIT, MSA_MERGE_STATE_INIT};
    arena memory = {0};
    for (int s = 0; s < 2; s++) {
        states[s].out = arena_copy(&memory, values[s], sizeof values[s], 16);
        states[s].lse = arena_copy(&memory, &lse[s], sizeof lse[s], 4);
        states[s].out_dtype = MSA_F32;
    }
    msa_merge_args a = MSA_MERGE_ARGS_INIT;
    a.num_states = 2;
    a.states = states;
    a.rows = 1;
    float *out = (void *)arena_region(&memory, sizeof(float[D]), 16)->data;
    a.out = out;
    a.lse = (float *)(void *)arena_region(&memory, sizeof *a.lse, 4)->data;
    for (int i = 0; i < h->num_levels; i++) {
        CHECK_OK(h, msa_merge(h->levels[i].one, &a, NULL));
        CHECK(h, fabs((double)out[5] - 128.0 / 4224) < 1e-7);
        CHECK(h, fabs((double)*a.lse - log(4224)) < 1e-6);
    }
    arena_free(&memory);
}

void faults_calls(harness *h)
{
    plain_test(h, "all", "empty-calls", empty_calls);
    plain_test(h, "all", "lengths-without-rows", lengths_without_rows);
    plain_test(h, "plan", "refusals", refusals);
    plain_test(h, "plan", "kernel-names", kernel_names);
    plain_test(h, "combine", "corners", combine_corners);
    plain_test(h, "merge", "lse-base", lse_base);
}
