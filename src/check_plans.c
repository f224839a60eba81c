/* SPDX-License-Identifier: MIT
 *
 * check_plans.c - the argument rules of msa.h for plans: descriptions, steps, runs. Each check fills a copy with all
 * strides resolved, so that no later code sees MSA_DENSE; a failure names the argument, its value and the rule.
 */
#include "check.h"

#include <math.h>

/* ------------------------------------------------------------------------------------------------ descriptions */

static msa_status check_geometry(int32_t head_dim, int32_t page_size, int32_t causal, int32_t topk, int32_t precision)
{
    if (head_dim != MSA_HEAD_DIM)
        return UNSUPPORTED("head_dim = %d: only 128 is supported", (int)head_dim);
    if (page_size != MSA_PAGE_SIZE)
        return UNSUPPORTED("page_size = %d: only 128 is supported", (int)page_size);
    if (causal != 1)
        return UNSUPPORTED("causal = %d: only causal attention (1) is supported", (int)causal);
    if (topk > MSA_MAX_TOPK)
        return UNSUPPORTED("topk = %d: must be 1..32", (int)topk);
    TRY(check_range("topk", topk, 1, MSA_MAX_TOPK));
    return check_range("precision", precision, MSA_PRECISION_EXACT, MSA_PRECISION_FAST);
}

static msa_status check_capacity(int32_t max_batch, int64_t max_total_q, int64_t max_kv_len)
{
    TRY(check_range("max_batch", max_batch, 1, INT32_MAX - 1));
    TRY(check_range("max_total_q", max_total_q, 1, INT32_MAX));
    return check_range("max_kv_len", max_kv_len, 1, MSA_MAX_KV_LEN);
}

msa_status check_index_desc(const msa_index_desc *caller_desc, msa_index_desc *desc)
{
    TRY(check_struct("desc", caller_desc, desc, sizeof *desc));
    TRY(check_dtype("q_dtype", desc->q_dtype));
    TRY(check_dtype("k_dtype", desc->k_dtype));
    bool pair = desc->q_dtype == MSA_E4M3 ? desc->k_dtype == MSA_E4M3 || desc->k_dtype == MSA_NVFP4
                                          : desc->q_dtype == MSA_BF16 && desc->k_dtype == MSA_BF16;
    if (!pair)
        return UNSUPPORTED("q_dtype = %s with k_dtype = %s: must be E4M3 with E4M3 or NVFP4, or BF16 with BF16",
                           dtype_name(desc->q_dtype), dtype_name(desc->k_dtype));
    TRY(check_range("num_index_heads", desc->num_index_heads, 1, 64));
    TRY(check_geometry(desc->head_dim, desc->page_size, desc->causal, desc->topk, desc->precision));
    TRY(check_forced(desc->init_pages, desc->local_pages, desc->topk, "topk_order", desc->topk_order));
    TRY(check_range("outputs", desc->outputs, MSA_INDEX_SCORES, MSA_INDEX_SCORES | MSA_INDEX_SELECTION));
    return check_capacity(desc->max_batch, desc->max_total_q, desc->max_kv_len);
}

msa_status check_attention_desc(const msa_attention_desc *caller_desc, msa_attention_desc *desc)
{
    TRY(check_struct("desc", caller_desc, desc, sizeof *desc));
    TRY(check_dtype("q_dtype", desc->q_dtype));
    TRY(check_dtype("kv_dtype", desc->kv_dtype));
    TRY(check_dtype("out_dtype", desc->out_dtype));
    bool quantised = desc->kv_dtype == MSA_E4M3 || desc->kv_dtype == MSA_NVFP4;
    bool half = desc->q_dtype == MSA_BF16 || desc->q_dtype == MSA_FP16;
    if (!(desc->q_dtype == MSA_E4M3 ? quantised : half && (quantised || desc->kv_dtype == desc->q_dtype)))
        return UNSUPPORTED(
            "q_dtype = %s with kv_dtype = %s: must be E4M3 with E4M3 or NVFP4, BF16 with BF16, E4M3 or NVFP4, "
            "or FP16 with FP16, E4M3 or NVFP4",
            dtype_name(desc->q_dtype), dtype_name(desc->kv_dtype));
    if (desc->out_dtype == MSA_DTYPE_DEFAULT)
        desc->out_dtype = desc->q_dtype == MSA_FP16 ? MSA_FP16 : MSA_BF16;
    if (desc->out_dtype != MSA_BF16 && desc->out_dtype != MSA_FP16)
        return UNSUPPORTED("out_dtype = %s: must be BF16 or FP16", dtype_name(desc->out_dtype));
    TRY(check_range("num_kv_heads", desc->num_kv_heads, 1, 1024));
    TRY(check_range("num_q_heads", desc->num_q_heads, 1, 16384));
    if (desc->num_q_heads % desc->num_kv_heads)
        return INVALID("num_q_heads = %d: must be a multiple of num_kv_heads = %d", (int)desc->num_q_heads,
                       (int)desc->num_kv_heads);
    if (desc->num_q_heads / desc->num_kv_heads > MSA_MAX_GQA_RATIO)
        return UNSUPPORTED("num_q_heads = %d: with num_kv_heads = %d the ratio must be 1..16", (int)desc->num_q_heads,
                           (int)desc->num_kv_heads);
    if (desc->num_lists == 0)
        desc->num_lists = desc->num_kv_heads;
    if (desc->num_lists < 1 || desc->num_kv_heads % desc->num_lists)
        return INVALID("num_lists = %d: must be 0 or a divisor of num_kv_heads = %d", (int)desc->num_lists,
                       (int)desc->num_kv_heads);
    TRY(check_geometry(desc->head_dim, desc->page_size, desc->causal, desc->topk, desc->precision));
    if (!(isfinite(desc->sm_scale) && desc->sm_scale > 0))
        return INVALID("sm_scale = %g: must be finite and > 0", (double)desc->sm_scale);
    TRY(check_range("strategy", (int32_t)desc->strategy, MSA_STRATEGY_AUTO, MSA_STRATEGY_PAGE_MAJOR));
    TRY(check_range("v_scale_order", (int32_t)desc->v_scale_order, MSA_SCALE_LINEAR, MSA_SCALE_QUAD));
    if (desc->v_scale_order == MSA_SCALE_QUAD && desc->kv_dtype != MSA_NVFP4)
        return INVALID("v_scale_order = quad: kv_dtype = %s has no block scales", dtype_name(desc->kv_dtype));
    TRY(check_range("partials", desc->partials, 0, 1));
    return check_capacity(desc->max_batch, desc->max_total_q, desc->max_kv_len);
}

/* ------------------------------------------------------------------------------------------------ steps */

msa_status check_step(const msa_plan *plan, const msa_step *caller_step, msa_step *step)
{
    TRY(check_struct("step", caller_step, step, sizeof *step));
    TRY(check_range("batch", step->batch, 0, plan->max_batch));
    TRY(check_range("total_q", step->total_q, 0, plan->max_total_q));
    if (step->batch == 0 || step->total_q == 0) { /* no row belongs to a request */
        step->batch = 0;
        step->total_q = 0;
        return MSA_SUCCESS;
    }
    TRY(check_pointer("cu_seqlens_q", step->cu_seqlens_q, 4));
    if (step->kv_lens && step->cu_seqlens_k)
        return INVALID("cu_seqlens_k = %p: must be NULL when kv_lens is given", (const void *)step->cu_seqlens_k);
    if (!step->kv_lens && !step->cu_seqlens_k)
        return INVALID("kv_lens = NULL: must be given, or cu_seqlens_k in its place");
    if (step->cu_seqlens_k)
        TRY(check_pointer("cu_seqlens_k", step->cu_seqlens_k, 4));
    else
        TRY(check_pointer("kv_lens", step->kv_lens, 4));
    size_t table_bytes = (size_t)plan->max_pages * 4;
    TRY(TENSOR(step, page_table, 4, table_bytes, INPUT, {"page_table_stride", &step->page_table_stride, step->batch}));
    if (step->batch > 1 && step->page_table_stride && step->page_table_stride < (int64_t)table_bytes)
        return INVALID("page_table_stride = %lld: must be 0 or at least %zu bytes, max_pages = %d entries",
                       (long long)step->page_table_stride, table_bytes, (int)plan->max_pages);
    if (!plan_is_index(plan))
        TRY(TENSOR(step, topk, 4, (size_t)plan->attention.topk * 4, INPUT,
                   AXIS(step, topk, head, plan->attention.num_lists), AXIS(step, topk, row, step->total_q)));
    if (plan->workspace_bytes) {
        TRY(check_pointer("workspace", step->workspace, 256));
        if (step->workspace_bytes < plan->workspace_bytes)
            return INVALID("workspace_bytes = %zu: must be at least %zu, what msa_plan_workspace returns",
                           step->workspace_bytes, plan->workspace_bytes);
    }
    return MSA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------------ runs */

msa_status check_index_args(const msa_plan *plan, const msa_index_args *caller_args, msa_index_args *args)
{
    const msa_index_desc *desc = &plan->index;
    TRY(check_struct("args", caller_args, args, sizeof *args));
    int64_t rows = plan->step.total_q, heads = desc->num_index_heads;
    if (rows == 0)
        return MSA_SUCCESS;
    TRY(check_range("num_pages", args->num_pages, 0, INT32_MAX));
    TRY(TENSOR(args, index_q, 16, dtype_row_bytes(desc->q_dtype, 128), INPUT, AXIS(args, index_q, row, rows),
               AXIS(args, index_q, head, heads)));
    TRY(TENSOR(args, index_k, 16, dtype_row_bytes(desc->k_dtype, 128), INPUT,
               AXIS(args, index_k, page, args->num_pages), AXIS(args, index_k, token, 128)));
    if (desc->k_dtype == MSA_NVFP4)
        TRY(TENSOR(args, index_k_scale, 8, 8, INPUT, AXIS(args, index_k_scale, page, args->num_pages),
                   AXIS(args, index_k_scale, token, 128)));
    else
        TRY(check_absent("index_k_scale", args->index_k_scale, "only NVFP4 keys have block scales"));
    if (desc->outputs & MSA_INDEX_SCORES)
        TRY(TENSOR(args, scores, 4, (size_t)plan->max_pages * 4, OUTPUT, AXIS(args, scores, head, heads),
                   AXIS(args, scores, row, rows)));
    else
        TRY(check_absent("scores", args->scores, "the plan's outputs lack MSA_INDEX_SCORES"));
    if (desc->outputs & MSA_INDEX_SELECTION) {
        TRY(TENSOR(args, topk, 4, (size_t)desc->topk * 4, OUTPUT, AXIS(args, topk, head, heads),
                   AXIS(args, topk, row, rows)));
        if (args->num_valid_pages)
            TRY(check_pointer("num_valid_pages", args->num_valid_pages, 4));
    } else {
        TRY(check_absent("topk", args->topk, "the plan's outputs lack MSA_INDEX_SELECTION"));
        TRY(check_absent("num_valid_pages", args->num_valid_pages, "the plan's outputs lack MSA_INDEX_SELECTION"));
    }
    return MSA_SUCCESS;
}

msa_status check_attention_args(const msa_plan *plan, const msa_attention_args *caller_args, msa_attention_args *args)
{
    const msa_attention_desc *desc = &plan->attention;
    TRY(check_struct("args", caller_args, args, sizeof *args));
    int64_t rows = plan->step.total_q, q_heads = desc->num_q_heads, kv_heads = desc->num_kv_heads;
    if (rows == 0)
        return MSA_SUCCESS;
    TRY(check_range("num_pages", args->num_pages, 0, INT32_MAX));
    TRY(TENSOR(args, q, 16, dtype_row_bytes(desc->q_dtype, 128), INPUT, AXIS(args, q, row, rows),
               AXIS(args, q, head, q_heads)));
    size_t kv_bytes = dtype_row_bytes(desc->kv_dtype, 128);
    TRY(TENSOR(args, k, 16, kv_bytes, INPUT, AXIS(args, k, page, args->num_pages), AXIS(args, k, head, kv_heads),
               AXIS(args, k, token, 128)));
    TRY(TENSOR(args, v, 16, kv_bytes, INPUT, AXIS(args, v, page, args->num_pages), AXIS(args, v, head, kv_heads),
               AXIS(args, v, token, 128)));
    if (desc->kv_dtype == MSA_NVFP4) {
        TRY(TENSOR(args, k_scale, 8, 8, INPUT, AXIS(args, k_scale, page, args->num_pages),
                   AXIS(args, k_scale, head, kv_heads), AXIS(args, k_scale, token, 128)));
        if (desc->v_scale_order == MSA_SCALE_QUAD) {
            args->v_scale_token_stride = 0;
            TRY(TENSOR(args, v_scale, 8, 1024, INPUT, AXIS(args, v_scale, page, args->num_pages),
                       AXIS(args, v_scale, head, kv_heads)));
        } else {
            TRY(TENSOR(args, v_scale, 8, 8, INPUT, AXIS(args, v_scale, page, args->num_pages),
                       AXIS(args, v_scale, head, kv_heads), AXIS(args, v_scale, token, 128)));
        }
        if (args->k_global_scale)
            TRY(check_pointer("k_global_scale", args->k_global_scale, 4));
        if (args->v_global_scale)
            TRY(check_pointer("v_global_scale", args->v_global_scale, 4));
    } else {
        TRY(check_absent("k_scale", args->k_scale, "only NVFP4 K/V has block scales"));
        TRY(check_absent("v_scale", args->v_scale, "only NVFP4 K/V has block scales"));
        TRY(check_absent("k_global_scale", args->k_global_scale, "only NVFP4 K/V has global scales"));
        TRY(check_absent("v_global_scale", args->v_global_scale, "only NVFP4 K/V has global scales"));
    }
    if (desc->q_dtype != MSA_E4M3)
        TRY(check_absent("q_descale", args->q_descale, "only E4M3 q has a descale"));
    if (desc->kv_dtype != MSA_E4M3) {
        TRY(check_absent("k_descale", args->k_descale, "only E4M3 K/V has descales"));
        TRY(check_absent("v_descale", args->v_descale, "only E4M3 K/V has descales"));
    }
    TRY(check_factor("q_descale", "q_descale_stride", args->q_descale, &args->q_descale_stride, desc->num_kv_heads));
    TRY(check_factor("k_descale", "k_descale_stride", args->k_descale, &args->k_descale_stride, desc->num_kv_heads));
    TRY(check_factor("v_descale", "v_descale_stride", args->v_descale, &args->v_descale_stride, desc->num_kv_heads));
    if (desc->partials) {
        TRY(TENSOR(args, o_partial, 16, 256, OUTPUT, AXIS(args, o_partial, split, desc->topk),
                   AXIS(args, o_partial, row, rows), AXIS(args, o_partial, head, q_heads)));
        TRY(TENSOR(args, lse_partial, 4, 4, OUTPUT, AXIS(args, lse_partial, split, desc->topk),
                   AXIS(args, lse_partial, row, rows), AXIS(args, lse_partial, head, q_heads)));
        TRY(TENSOR(args, split_counts, 4, 4, OUTPUT, AXIS(args, split_counts, row, rows),
                   AXIS(args, split_counts, head, kv_heads)));
        TRY(check_absent("out", args->out, "the plan has partials"));
        return check_absent("lse", args->lse, "the plan has partials");
    }
    TRY(TENSOR(args, out, 16, 256, OUTPUT, AXIS(args, out, row, rows), AXIS(args, out, head, q_heads)));
    TRY(TENSOR(args, lse, 4, 4, OUTPUT | OPTIONAL, AXIS(args, lse, row, rows), AXIS(args, lse, head, q_heads)));
    TRY(check_absent("o_partial", args->o_partial, "the plan has no partials"));
    TRY(check_absent("lse_partial", args->lse_partial, "the plan has no partials"));
    return check_absent("split_counts", args->split_counts, "the plan has no partials");
}
