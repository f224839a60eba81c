/* SPDX-License-Identifier: MIT
 *
 * check.c - every argument rule of msa.h. Each check fills a copy with all strides resolved, so that no later code sees
 * MSA_DENSE; a failure names the argument, its value and the rule.
 */
#include "internal.h"

#include <math.h>
#include <string.h>

#define TRY(call)                  \
    do {                           \
        msa_status try_ = (call);  \
        if (try_)                  \
            return try_;           \
    } while (0)

#define INVALID(...) fail(MSA_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
#define UNSUPPORTED(...) fail(MSA_ERROR_UNSUPPORTED, __VA_ARGS__)

/* ------------------------------------------------------------------------------------------------ building blocks */

msa_status check_struct(const char *name, const void *from, void *to, size_t expected)
{
    if (!from)
        return INVALID("%s = NULL: must point to its struct", name);
    size_t size;
    memcpy(&size, from, sizeof size);
    if (size < expected)
        return INVALID("%s.size = %zu: must be at least %zu (use the INIT macro)", name, size, expected);
    if (size > expected) {
        /* A newer caller: fine as long as it does not use what this library does not know. */
        if (size > 65536)
            return INVALID("%s.size = %zu: must be the size of the struct (use the INIT macro)", name, size);
        const unsigned char *bytes = from;
        for (size_t i = expected; i < size; i++)
            if (bytes[i])
                return INVALID("%s.size = %zu: a field past the %zu bytes this library knows is not zero", name, size,
                               expected);
    }
    memcpy(to, from, expected);
    return MSA_SUCCESS;
}

static msa_status check_range(const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
        return INVALID("%s = %lld: must be %lld..%lld", name, (long long)value, (long long)low, (long long)high);
    return MSA_SUCCESS;
}

static msa_status check_pointer(const char *name, const void *pointer, size_t alignment)
{
    if (!pointer)
        return INVALID("%s = NULL: must be given", name);
    if ((uintptr_t)pointer % alignment)
        return INVALID("%s = %p: must be aligned to %zu bytes", name, pointer, alignment);
    return MSA_SUCCESS;
}

struct axis {
    const char *stride_name;
    int64_t *stride;
    int64_t extent;
};

enum { INPUT = 0, OUTPUT = 1, OPTIONAL = 2 };

/* A tensor whose dense inner axis is row_bytes long; axes outermost first. Absent or empty: strides become 0. */
static msa_status check_tensor(const char *name, const void *data, size_t alignment, size_t row_bytes,
                               const struct axis *axes, int num_axes, int flags)
{
    bool empty = row_bytes == 0 || (!data && flags & OPTIONAL);
    for (int i = 0; i < num_axes; i++)
        empty |= axes[i].extent == 0;
    if (empty) {
        for (int i = 0; i < num_axes; i++)
            *axes[i].stride = 0;
        return MSA_SUCCESS;
    }
    TRY(check_pointer(name, data, alignment));
    int64_t span = (int64_t)row_bytes; /* bytes from the first to past the last element of the axes seen so far */
    int64_t dense = (int64_t)row_bytes;
    for (int i = num_axes - 1; i >= 0; i--) {
        int64_t *stride = axes[i].stride;
        if (axes[i].extent == 1) {
            *stride = 0;
            continue;
        }
        if (*stride == MSA_DENSE)
            *stride = dense;
        if (*stride < 0)
            return INVALID("%s = %lld: must not be negative", axes[i].stride_name, (long long)*stride);
        if (*stride % (int64_t)alignment)
            return INVALID("%s = %lld: must be a multiple of %zu bytes", axes[i].stride_name, (long long)*stride,
                           alignment);
        int64_t reach;
        if (__builtin_mul_overflow(*stride, axes[i].extent - 1, &reach) || __builtin_add_overflow(span, reach, &span) ||
            __builtin_mul_overflow(*stride, axes[i].extent, &dense))
            return INVALID("%s = %lld: the tensor passes 2^63 bytes with %lld elements on this axis",
                           axes[i].stride_name, (long long)*stride, (long long)axes[i].extent);
    }
    if ((uintptr_t)data + (uint64_t)span < (uintptr_t)data)
        return INVALID("%s = %p: %lld bytes from there pass the end of the address space", name, data, (long long)span);
    if (flags & OUTPUT) {
        /* No two elements may share a byte: in order of their strides, each axis steps over all that lies inside it. */
        int64_t covered = (int64_t)row_bytes;
        bool done[4] = {false};
        for (int round = 0; round < num_axes; round++) {
            int smallest = -1;
            for (int i = 0; i < num_axes; i++)
                if (!done[i] &&
                    (smallest < 0 || *axes[i].stride <= *axes[smallest].stride)) /* of equals the inner one */
                    smallest = i;
            done[smallest] = true;
            if (axes[smallest].extent == 1)
                continue;
            if (*axes[smallest].stride < covered)
                return INVALID("%s = %lld: must be at least %lld bytes, or rows of the output %s overlap",
                               axes[smallest].stride_name, (long long)*axes[smallest].stride, (long long)covered, name);
            covered += *axes[smallest].stride * (axes[smallest].extent - 1);
        }
    }
    return MSA_SUCCESS;
}

/* check_tensor for a field `name` of the struct pointed to by s, with axes given as (axis name, extent) pairs. */
#define AXIS(s, name, axis, extent) {#name "_" #axis "_stride", &(s)->name##_##axis##_stride, (extent)}
#define TENSOR(s, name, alignment, row_bytes, flags, ...)                                                   \
    check_tensor(#name, (s)->name, (alignment), (row_bytes), (const struct axis[]){__VA_ARGS__},             \
                 (int)(sizeof((const struct axis[]){__VA_ARGS__}) / sizeof(struct axis)), (flags))

static size_t element_alignment(msa_dtype dtype)
{
    return dtype == MSA_F32 ? 4 : dtype == MSA_BF16 || dtype == MSA_FP16 ? 2 : 1;
}

/* Optional FP32 factor: [1] (stride 0, the default) or one a KV head. */
static msa_status check_factor(const char *name, const char *stride_name, const float *factor, int64_t *stride,
                               int32_t num_kv_heads)
{
    if (*stride == MSA_DENSE)
        *stride = 0;
    return check_tensor(name, factor, 4, 4, (const struct axis[]){{stride_name, stride, num_kv_heads}}, 1,
                        INPUT | OPTIONAL);
}

static msa_status absent(const char *name, const void *pointer, const char *rule)
{
    return pointer ? INVALID("%s = %p: must be NULL, %s", name, pointer, rule) : MSA_SUCCESS;
}

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

static msa_status check_forced(int32_t init_pages, int32_t local_pages, int32_t topk, const char *order_name,
                               int32_t order)
{
    if (init_pages < 0)
        return INVALID("init_pages = %d: must be >= 0", (int)init_pages);
    if (local_pages < 1)
        return INVALID("local_pages = %d: must be >= 1, a query's own page is always listed", (int)local_pages);
    if ((int64_t)init_pages + local_pages > topk)
        return INVALID("init_pages + local_pages = %lld: must be at most k = %d", (long long)init_pages + local_pages,
                       (int)topk);
    return check_range(order_name, order, MSA_TOPK_ORDER_PAGE, MSA_TOPK_ORDER_SCORE);
}

static msa_status check_dtype(const char *name, msa_dtype dtype)
{
    if (dtype == MSA_E5M2)
        return UNSUPPORTED("%s = E5M2: not supported; of the FP8 types only E4M3 is", name);
    return check_range(name, (int32_t)dtype, MSA_DTYPE_DEFAULT, MSA_E5M2);
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
        TRY(absent("index_k_scale", args->index_k_scale, "only NVFP4 keys have block scales"));
    if (desc->outputs & MSA_INDEX_SCORES)
        TRY(TENSOR(args, scores, 4, (size_t)plan->max_pages * 4, OUTPUT, AXIS(args, scores, head, heads),
                   AXIS(args, scores, row, rows)));
    else
        TRY(absent("scores", args->scores, "the plan's outputs lack MSA_INDEX_SCORES"));
    if (desc->outputs & MSA_INDEX_SELECTION) {
        TRY(TENSOR(args, topk, 4, (size_t)desc->topk * 4, OUTPUT, AXIS(args, topk, head, heads),
                   AXIS(args, topk, row, rows)));
        if (args->num_valid_pages)
            TRY(check_pointer("num_valid_pages", args->num_valid_pages, 4));
    } else {
        TRY(absent("topk", args->topk, "the plan's outputs lack MSA_INDEX_SELECTION"));
        TRY(absent("num_valid_pages", args->num_valid_pages, "the plan's outputs lack MSA_INDEX_SELECTION"));
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
        TRY(absent("k_scale", args->k_scale, "only NVFP4 K/V has block scales"));
        TRY(absent("v_scale", args->v_scale, "only NVFP4 K/V has block scales"));
        TRY(absent("k_global_scale", args->k_global_scale, "only NVFP4 K/V has global scales"));
        TRY(absent("v_global_scale", args->v_global_scale, "only NVFP4 K/V has global scales"));
    }
    if (desc->q_dtype != MSA_E4M3)
        TRY(absent("q_descale", args->q_descale, "only E4M3 q has a descale"));
    if (desc->kv_dtype != MSA_E4M3) {
        TRY(absent("k_descale", args->k_descale, "only E4M3 K/V has descales"));
        TRY(absent("v_descale", args->v_descale, "only E4M3 K/V has descales"));
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
        TRY(absent("out", args->out, "the plan has partials"));
        return absent("lse", args->lse, "the plan has partials");
    }
    TRY(TENSOR(args, out, 16, 256, OUTPUT, AXIS(args, out, row, rows), AXIS(args, out, head, q_heads)));
    TRY(TENSOR(args, lse, 4, 4, OUTPUT | OPTIONAL, AXIS(args, lse, row, rows), AXIS(args, lse, head, q_heads)));
    TRY(absent("o_partial", args->o_partial, "the plan has no partials"));
    TRY(absent("lse_partial", args->lse_partial, "the plan has no partials"));
    return absent("split_counts", args->split_counts, "the plan has no partials");
}

/* ------------------------------------------------------------------------------------------------ stateless calls */

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
        TRY(absent("scale", args->scale, "only NVFP4 has block scales"));
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
        TRY(absent("scale", args->scale, "only NVFP4 has block scales"));
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
        TRY(absent("k_scale", args->k_scale, "only an NVFP4 K cache has block scales"));
    if (v && kv_scales && args->v_scale_order == MSA_SCALE_QUAD) {
        args->v_scale_token_stride = 0;
        TRY(TENSOR(args, v_scale, 8, 1024, OUTPUT, AXIS(args, v_scale, page, pages), AXIS(args, v_scale, head, heads)));
    } else if (v && kv_scales) {
        TRY(TENSOR(args, v_scale, 8, 8, OUTPUT, AXIS(args, v_scale, page, pages), AXIS(args, v_scale, head, heads),
                   AXIS(args, v_scale, token, 128)));
    } else {
        TRY(absent("v_scale", args->v_scale, "only an NVFP4 V cache has block scales"));
    }
    if (index_k && args->index_k_dtype == MSA_NVFP4)
        TRY(TENSOR(args, index_k_scale, 8, 8, OUTPUT, AXIS(args, index_k_scale, page, pages),
                   AXIS(args, index_k_scale, token, 128)));
    else
        TRY(absent("index_k_scale", args->index_k_scale, "only an NVFP4 index-K cache has block scales"));
    int32_t factors = args->kv_dtype == MSA_NVFP4 ? 1 : args->num_kv_heads;
    if (args->kv_dtype != MSA_E4M3 && args->kv_dtype != MSA_NVFP4) {
        TRY(absent("k_descale", args->k_descale, "only E4M3 and NVFP4 caches are scaled"));
        TRY(absent("v_descale", args->v_descale, "only E4M3 and NVFP4 caches are scaled"));
    }
    TRY(check_factor("k_descale", "k_descale_stride", args->k_descale, &args->k_descale_stride, factors));
    return check_factor("v_descale", "v_descale_stride", args->v_descale, &args->v_descale_stride, factors);
}
