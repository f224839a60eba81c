/* SPDX-License-Identifier: MIT
 *
 * check_calls.c - the argument rules of msa.h for the calls without a plan, as check_plans.c has them for those with
 * one.
 */
#include "check.h"

msa_status check_topk_args(const msa_topk_args *caller_args, msa_topk_args *args)
{
    TRY(check_struct("args", caller_args, args, sizeof *args));
    TRY(check_range("num_heads", args->num_heads, 1, 1024));
    TRY(check_range("rows", args->rows, 0, INT32_MAX));
    TRY(check_range("columns", args->columns, 0, MSA_MAX_KV_LEN / MSA_PAGE_SIZE));
    if (args->k > MSA_MAX_TOPK)
        return UNSUPPORTED("k = %d: must be 1..32", (int)args->k);
    TRY(check_range("k", args->k, 1, MSA_MAX_TOPK));
    TRY(check_forced(args->init_pages, args->local_pages, args->k, "order", args->order));
    if (args->rows == 0)
        return MSA_SUCCESS;
    TRY(TENSOR(args, scores, 4, (size_t)args->columns * 4, INPUT, AXIS(args, scores, head, args->num_heads),
               AXIS(args, scores, row, args->rows)));
    TRY(check_pointer("valid_pages", args->valid_pages, 4));
    return TENSOR(args, topk, 4, (size_t)args->k * 4, OUTPUT, AXIS(args, topk, head, args->num_heads),
                  AXIS(args, topk, row, args->rows));
}

static msa_status check_half(const char *name, msa_dtype dtype)
{
    TRY(check_dtype(name, dtype));
    return dtype == MSA_BF16 || dtype == MSA_FP16
               ? MSA_SUCCESS
               : UNSUPPORTED("%s = %s: must be BF16 or FP16", name, dtype_name(dtype));
}

static msa_status check_float(const char *name, msa_dtype dtype)
{
    TRY(check_dtype(name, dtype));
    return dtype == MSA_BF16 || dtype == MSA_FP16 || dtype == MSA_F32
               ? MSA_SUCCESS
               : UNSUPPORTED("%s = %s: must be BF16, FP16 or F32", name, dtype_name(dtype));
}

msa_status check_combine_args(const msa_combine_args *caller_args, struct merge_job *job)
{
    msa_combine_args copy, *args = &copy;
    TRY(check_struct("args", caller_args, args, sizeof *args));
    TRY(check_range("num_splits", args->num_splits, 1, MSA_MAX_SPLITS));
    TRY(check_range("rows", args->rows, 0, INT32_MAX));
    TRY(check_range("num_q_heads", args->num_q_heads, 1, 16384));
    TRY(check_range("num_kv_heads", args->num_kv_heads, 1, 1024));
    if (args->num_q_heads % args->num_kv_heads)
        return INVALID("num_q_heads = %d: must be a multiple of num_kv_heads = %d", (int)args->num_q_heads,
                       (int)args->num_kv_heads);
    TRY(check_half("o_partial_dtype", args->o_partial_dtype));
    if (args->out_dtype == MSA_DTYPE_DEFAULT)
        args->out_dtype = args->o_partial_dtype;
    TRY(check_half("out_dtype", args->out_dtype));
    int64_t rows = args->rows, heads = args->num_q_heads;
    TRY(TENSOR(args, o_partial, 16, 256, INPUT, AXIS(args, o_partial, split, args->num_splits),
               AXIS(args, o_partial, row, rows), AXIS(args, o_partial, head, heads)));
    TRY(TENSOR(args, lse_partial, 4, 4, INPUT, AXIS(args, lse_partial, split, args->num_splits),
               AXIS(args, lse_partial, row, rows), AXIS(args, lse_partial, head, heads)));
    TRY(TENSOR(args, split_counts, 4, 4, INPUT | OPTIONAL, AXIS(args, split_counts, row, rows),
               AXIS(args, split_counts, head, args->num_kv_heads)));
    TRY(TENSOR(args, out, 16, 256, OUTPUT, AXIS(args, out, row, rows), AXIS(args, out, head, heads)));
    TRY(TENSOR(args, lse, 4, 4, OUTPUT | OPTIONAL, AXIS(args, lse, row, rows), AXIS(args, lse, head, heads)));
    *job = (struct merge_job){.num_states = args->num_splits,
                              .rows = rows,
                              .num_q_heads = args->num_q_heads,
                              .num_kv_heads = args->num_kv_heads,
                              .split_counts = args->split_counts,
                              .split_counts_row_stride = args->split_counts_row_stride,
                              .split_counts_head_stride = args->split_counts_head_stride,
                              .out_dtype = args->out_dtype,
                              .out = args->out,
                              .out_row_stride = args->out_row_stride,
                              .out_head_stride = args->out_head_stride,
                              .lse = args->lse,
                              .lse_row_stride = args->lse_row_stride,
                              .lse_head_stride = args->lse_head_stride};
    for (int s = 0; rows && s < args->num_splits; s++)
        job->states[s] = (msa_merge_state){
            .out = (const char *)args->o_partial + s * args->o_partial_split_stride,
            .out_row_stride = args->o_partial_row_stride,
            .out_head_stride = args->o_partial_head_stride,
            .out_dtype = args->o_partial_dtype,
            .lse = (const float *)((const char *)args->lse_partial + s * args->lse_partial_split_stride),
            .lse_row_stride = args->lse_partial_row_stride,
            .lse_head_stride = args->lse_partial_head_stride};
    return MSA_SUCCESS;
}

msa_status check_merge_args(const msa_merge_args *caller_args, struct merge_job *job)
{
    msa_merge_args copy, *args = &copy;
    TRY(check_struct("args", caller_args, args, sizeof *args));
    TRY(check_range("num_states", args->num_states, 2, MSA_MAX_SPLITS));
    TRY(check_range("rows", args->rows, 0, INT32_MAX));
    TRY(check_range("num_q_heads", args->num_q_heads, 1, 16384));
    TRY(check_pointer("states", args->states, _Alignof(msa_merge_state)));
    if (args->out_dtype == MSA_DTYPE_DEFAULT)
        args->out_dtype = args->states[0].out_dtype;
    TRY(check_float("out_dtype", args->out_dtype));
    int64_t rows = args->rows, heads = args->num_q_heads;
    *job = (struct merge_job){
        .num_states = args->num_states, .rows = rows, .num_q_heads = args->num_q_heads, .num_kv_heads = 1};
    for (int s = 0; s < args->num_states; s++) {
        msa_merge_state *state = &job->states[s];
        *state = args->states[s];
        char name[6][48];
        static const char *const fields[6] = {"out", "out_row_stride", "out_head_stride",
                                              "lse", "lse_row_stride", "lse_head_stride"};
        for (int i = 0; i < 6; i++)
            snprintf(name[i], sizeof name[i], "states[%d].%s", s, fields[i]);
        char dtype_field[48];
        snprintf(dtype_field, sizeof dtype_field, "states[%d].out_dtype", s);
        TRY(check_float(dtype_field, state->out_dtype));
        TRY(check_tensor(
            name[0], state->out, 16, dtype_row_bytes(state->out_dtype, 128),
            (const struct axis[]){{name[1], &state->out_row_stride, rows}, {name[2], &state->out_head_stride, heads}},
            2, INPUT));
        TRY(check_tensor(
            name[3], state->lse, 4, 4,
            (const struct axis[]){{name[4], &state->lse_row_stride, rows}, {name[5], &state->lse_head_stride, heads}},
            2, INPUT));
    }
    TRY(TENSOR(args, out, 16, dtype_row_bytes(args->out_dtype, 128), OUTPUT, AXIS(args, out, row, rows),
               AXIS(args, out, head, heads)));
    TRY(TENSOR(args, lse, 4, 4, OUTPUT | OPTIONAL, AXIS(args, lse, row, rows), AXIS(args, lse, head, heads)));
    job->out_dtype = args->out_dtype;
    job->out = args->out;
    job->out_row_stride = args->out_row_stride;
    job->out_head_stride = args->out_head_stride;
    job->lse = args->lse;
    job->lse_row_stride = args->lse_row_stride;
    job->lse_head_stride = args->lse_head_stride;
    return MSA_SUCCESS;
}

static msa_status check_matrix(int64_t rows, int64_t cols)
{
    TRY(check_range("rows", rows, 0, INT32_MAX));
    TRY(check_range("cols", cols, 16, 1 << 20));
    return cols % 16 ? INVALID("cols = %lld: must be a multiple of 16", (long long)cols) : MSA_SUCCESS;
}

msa_status check_quantise_args(const msa_quantise_args *caller_args, msa_quantise_args *args)
{
    TRY(check_struct("args", caller_args, args, sizeof *args));
    TRY(check_matrix(args->rows, args->cols));
    TRY(check_float("src_dtype", args->src_dtype));
    TRY(check_dtype("dst_dtype", args->dst_dtype));
    if (args->dst_dtype != MSA_E4M3 && args->dst_dtype != MSA_NVFP4)
        return UNSUPPORTED("dst_dtype = %s: must be E4M3 or NVFP4", dtype_name(args->dst_dtype));
    TRY(TENSOR(args, src, element_alignment(args->src_dtype), dtype_row_bytes(args->src_dtype, args->cols), INPUT,
               AXIS(args, src, row, args->rows)));
    TRY(TENSOR(args, dst, 1, dtype_row_bytes(args->dst_dtype, args->cols), OUTPUT, AXIS(args, dst, row, args->rows)));
    if (args->dst_dtype == MSA_NVFP4)
        TRY(TENSOR(args, scale, 1, (size_t)args->cols / 16, OUTPUT, AXIS(args, scale, row, args->rows)));
    else
        TRY(check_absent("scale", args->scale, "only NVFP4 has block scales"));
    return args->descale ? check_pointer("descale", args->descale, 4) : MSA_SUCCESS;
}

msa_status check_convert_args(const msa_convert_args *caller_args, msa_convert_args *args)
{
    TRY(check_struct("args", caller_args, args, sizeof *args));
    TRY(check_matrix(args->rows, args->cols));
    TRY(check_dtype("src_dtype", args->src_dtype));
    TRY(check_dtype("dst_dtype", args->dst_dtype));
    bool widens;
    switch (args->src_dtype) {
    case MSA_NVFP4:
        widens = args->dst_dtype == MSA_E4M3 || args->dst_dtype == MSA_BF16 || args->dst_dtype == MSA_FP16 ||
                 args->dst_dtype == MSA_F32;
        break;
    case MSA_E4M3:
        widens = args->dst_dtype == MSA_E4M3 || args->dst_dtype == MSA_BF16 || args->dst_dtype == MSA_FP16 ||
                 args->dst_dtype == MSA_F32;
        break;
    case MSA_BF16:
    case MSA_FP16:
        widens = args->dst_dtype == args->src_dtype || args->dst_dtype == MSA_F32;
        break;
    default:
        widens = false;
    }
    if (!widens)
        return UNSUPPORTED(
            "src_dtype = %s with dst_dtype = %s: must be E4M3 or NVFP4 to E4M3, BF16, FP16 or F32, or BF16 or FP16 to "
            "itself or F32",
            dtype_name(args->src_dtype), dtype_name(args->dst_dtype));
    TRY(TENSOR(args, src, element_alignment(args->src_dtype), dtype_row_bytes(args->src_dtype, args->cols), INPUT,
               AXIS(args, src, row, args->rows)));
    if (args->src_dtype == MSA_NVFP4)
        TRY(TENSOR(args, scale, 1, (size_t)args->cols / 16, INPUT, AXIS(args, scale, row, args->rows)));
    else
        TRY(check_absent("scale", args->scale, "only NVFP4 has block scales"));
    return TENSOR(args, dst, element_alignment(args->dst_dtype), dtype_row_bytes(args->dst_dtype, args->cols), OUTPUT,
                  AXIS(args, dst, row, args->rows));
}

/* One cache with its source: both given or both left out. */
static msa_status check_pair(const char *source_name, const void *source, const char *cache_name, const void *cache)
{
    if (source && !cache)
        return INVALID("%s = NULL: must be given with %s", cache_name, source_name);
    return !source && cache ? INVALID("%s = NULL: must be given with %s", source_name, cache_name) : MSA_SUCCESS;
}

static msa_status check_cache_dtype(const char *name, msa_dtype dtype, msa_dtype src_dtype, bool fp16)
{
    TRY(check_dtype(name, dtype));
    if (dtype != MSA_BF16 && !(fp16 && dtype == MSA_FP16) && dtype != MSA_E4M3 && dtype != MSA_NVFP4)
        return UNSUPPORTED("%s = %s: must be BF16, %sE4M3 or NVFP4", name, dtype_name(dtype), fp16 ? "FP16, " : "");
    if (src_dtype == MSA_E4M3 && dtype != MSA_E4M3)
        return UNSUPPORTED("src_dtype = E4M3 with %s = %s: E4M3 goes to E4M3 only", name, dtype_name(dtype));
    return MSA_SUCCESS;
}

msa_status check_cache_write_args(const msa_cache_write_args *caller_args, msa_cache_write_args *args)
{
    TRY(check_struct("args", caller_args, args, sizeof *args));
    TRY(check_range("tokens", args->tokens, 0, INT32_MAX));
    TRY(check_range("num_pages", args->num_pages, 0, INT32_MAX));
    TRY(check_range("num_kv_heads", args->num_kv_heads, 1, 1024));
    TRY(check_dtype("src_dtype", args->src_dtype));
    if (args->src_dtype != MSA_E4M3)
        TRY(check_float("src_dtype", args->src_dtype));
    TRY(check_range("v_scale_order", (int32_t)args->v_scale_order, MSA_SCALE_LINEAR, MSA_SCALE_QUAD));
    bool k = args->k_new || args->k, v = args->v_new || args->v, index_k = args->index_k_new || args->index_k;
    if (k || v)
        TRY(check_cache_dtype("kv_dtype", args->kv_dtype, args->src_dtype, true));
    if ((k || v) && args->v_scale_order == MSA_SCALE_QUAD && args->kv_dtype != MSA_NVFP4)
        return INVALID("v_scale_order = quad: kv_dtype = %s has no block scales", dtype_name(args->kv_dtype));
    if (index_k)
        TRY(check_cache_dtype("index_k_dtype", args->index_k_dtype, args->src_dtype, false));
    int64_t tokens = args->tokens, pages = args->num_pages, heads = args->num_kv_heads;
    if (tokens == 0 || pages == 0) {
        args->tokens = 0;
        return MSA_SUCCESS;
    }
    TRY(check_pointer("slot_mapping", args->slot_mapping, 8));
    TRY(check_pair("k_new", args->k_new, "k", args->k));
    TRY(check_pair("v_new", args->v_new, "v", args->v));
    TRY(check_pair("index_k_new", args->index_k_new, "index_k", args->index_k));

    size_t source_bytes = dtype_row_bytes(args->src_dtype, 128), source_alignment = element_alignment(args->src_dtype);
    TRY(TENSOR(args, k_new, source_alignment, source_bytes, INPUT | OPTIONAL, AXIS(args, k_new, row, tokens),
               AXIS(args, k_new, head, heads)));
    TRY(TENSOR(args, v_new, source_alignment, source_bytes, INPUT | OPTIONAL, AXIS(args, v_new, row, tokens),
               AXIS(args, v_new, head, heads)));
    TRY(TENSOR(args, index_k_new, source_alignment, source_bytes, INPUT | OPTIONAL,
               AXIS(args, index_k_new, row, tokens)));
    size_t kv_bytes = dtype_row_bytes(args->kv_dtype, 128);
    TRY(TENSOR(args, k, 16, kv_bytes, OUTPUT | OPTIONAL, AXIS(args, k, page, pages), AXIS(args, k, head, heads),
               AXIS(args, k, token, 128)));
    TRY(TENSOR(args, v, 16, kv_bytes, OUTPUT | OPTIONAL, AXIS(args, v, page, pages), AXIS(args, v, head, heads),
               AXIS(args, v, token, 128)));
    TRY(TENSOR(args, index_k, 16, dtype_row_bytes(args->index_k_dtype, 128), OUTPUT | OPTIONAL,
               AXIS(args, index_k, page, pages), AXIS(args, index_k, token, 128)));
    bool kv_scales = args->kv_dtype == MSA_NVFP4;
    if (k && kv_scales)
        TRY(TENSOR(args, k_scale, 8, 8, OUTPUT, AXIS(args, k_scale, page, pages), AXIS(args, k_scale, head, heads),
                   AXIS(args, k_scale, token, 128)));
    else
        TRY(check_absent("k_scale", args->k_scale, "only an NVFP4 K cache has block scales"));
    if (v && kv_scales && args->v_scale_order == MSA_SCALE_QUAD) {
        args->v_scale_token_stride = 0;
        TRY(TENSOR(args, v_scale, 8, 1024, OUTPUT, AXIS(args, v_scale, page, pages), AXIS(args, v_scale, head, heads)));
    } else if (v && kv_scales) {
        TRY(TENSOR(args, v_scale, 8, 8, OUTPUT, AXIS(args, v_scale, page, pages), AXIS(args, v_scale, head, heads),
                   AXIS(args, v_scale, token, 128)));
    } else {
        TRY(check_absent("v_scale", args->v_scale, "only an NVFP4 V cache has block scales"));
    }
    if (index_k && args->index_k_dtype == MSA_NVFP4)
        TRY(TENSOR(args, index_k_scale, 8, 8, OUTPUT, AXIS(args, index_k_scale, page, pages),
                   AXIS(args, index_k_scale, token, 128)));
    else
        TRY(check_absent("index_k_scale", args->index_k_scale, "only an NVFP4 index-K cache has block scales"));
    int32_t factors = args->kv_dtype == MSA_NVFP4 ? 1 : args->num_kv_heads;
    if (args->kv_dtype != MSA_E4M3 && args->kv_dtype != MSA_NVFP4) {
        TRY(check_absent("k_descale", args->k_descale, "only E4M3 and NVFP4 caches are scaled"));
        TRY(check_absent("v_descale", args->v_descale, "only E4M3 and NVFP4 caches are scaled"));
    }
    TRY(check_factor("k_descale", "k_descale_stride", args->k_descale, &args->k_descale_stride, factors));
    return check_factor("v_descale", "v_descale_stride", args->v_descale, &args->v_descale_stride, factors);
}
