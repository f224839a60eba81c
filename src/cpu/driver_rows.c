/* SPDX-License-Identifier: MIT
 *
 * driver_rows.c - the stateless calls on the CPU: top-k, combine/merge, quantise and convert. Rows are independent; a
 * work item is ROW_BLOCK of them. cache.c has the cache write.
 */
#include "../number.h"
#include "cpu.h"

enum { ROW_BLOCK = 16 };

static size_t blocks(int64_t rows)
{
    return (size_t)((rows + ROW_BLOCK - 1) / ROW_BLOCK);
}

static int64_t block_end(size_t block, int64_t rows)
{
    int64_t end = ((int64_t)block + 1) * ROW_BLOCK;
    return end < rows ? end : rows;
}

/* ------------------------------------------------------------------------------------------------ top-k */

struct topk_call {
    const msa_topk_args *args;
    cpu_select_fn *select;
};

static void topk_task(void *arg, size_t block, size_t thread)
{
    (void)thread;
    const struct topk_call *call = arg;
    const msa_topk_args *args = call->args;
    struct cpu_selection selection = {
        .k = args->k, .init_pages = args->init_pages, .local_pages = args->local_pages, .order = args->order};
    for (int64_t row = (int64_t)block * ROW_BLOCK; row < block_end(block, args->rows); row++) {
        int32_t n = args->valid_pages[row];
        n = n < 0 ? 0 : n < args->columns ? n : args->columns;
        int32_t first = cpu_first_candidate(&selection, n), last = cpu_last_candidate(&selection, n);
        for (int64_t head = 0; head < args->num_heads; head++) {
            struct cpu_best best;
            cpu_best_init(&best, &selection, n);
            if (last > first) { /* otherwise there may be no scores at all */
                const float *scores = (const float *)((const char *)args->scores + head * args->scores_head_stride +
                                                      row * args->scores_row_stride);
                call->select(&best, scores + first, first, last - first);
            }
            cpu_best_write(
                &best, &selection, n,
                (int32_t *)((char *)args->topk + head * args->topk_head_stride + row * args->topk_row_stride));
        }
    }
}

msa_status cpu_topk(msa_context *context, const msa_topk_args *args, msa_stream stream)
{
    (void)stream;
    struct topk_call call = {args, cpu_kernels_of(context)->select};
    return cpu_parallel(context, blocks(args->rows), topk_task, &call);
}

/* ------------------------------------------------------------------------------------------------ combine, merge */

struct merge_call {
    const struct merge_job *job;
    cpu_merge_fn *merge;
};

static void merge_task(void *arg, size_t block, size_t thread)
{
    (void)thread;
    const struct merge_call *call = arg;
    for (int64_t row = (int64_t)block * ROW_BLOCK; row < block_end(block, call->job->rows); row++)
        call->merge(call->job, row);
}

msa_status cpu_merge(msa_context *context, const struct merge_job *job, msa_stream stream)
{
    (void)stream;
    struct merge_call call = {job, cpu_kernels_of(context)->merge};
    return cpu_parallel(context, blocks(job->rows), merge_task, &call);
}

/* ------------------------------------------------------------------------------------------------ quantise */

struct quantise_call {
    const msa_quantise_args *args;
    cpu_quantise_fn *quantise;
    float factor;
};

static void quantise_task(void *arg, size_t block, size_t thread)
{
    (void)thread;
    const struct quantise_call *call = arg;
    const msa_quantise_args *args = call->args;
    for (int64_t row = (int64_t)block * ROW_BLOCK; row < block_end(block, args->rows); row++)
        call->quantise((const char *)args->src + row * args->src_row_stride, args->cols, call->factor,
                       (uint8_t *)args->dst + row * args->dst_row_stride,
                       args->scale ? (uint8_t *)args->scale + row * args->scale_row_stride : NULL);
}

msa_status cpu_quantise(msa_context *context, const msa_quantise_args *args, msa_stream stream)
{
    (void)stream;
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    enum cpu_source source = cpu_source_of(args->src_dtype);
    struct quantise_call call = {
        args, args->dst_dtype == MSA_E4M3 ? kernels->quantise_e4m3[source] : kernels->quantise_nvfp4[source],
        args->descale ? *args->descale : 1.0f};
    return cpu_parallel(context, blocks(args->rows), quantise_task, &call);
}

/* ------------------------------------------------------------------------------------------------ convert */

static void convert_row(const msa_convert_args *args, const uint8_t *src, const uint8_t *scale, void *dst)
{
    for (int64_t i = 0; i < args->cols; i++) {
        float x = 0;
        switch (args->src_dtype) {
        case MSA_BF16:
            x = bf16_to_f32(((const uint16_t *)(const void *)src)[i]);
            break;
        case MSA_FP16:
            x = fp16_to_f32(((const uint16_t *)(const void *)src)[i]);
            break;
        case MSA_E4M3:
            x = e4m3_to_f32(src[i]);
            break;
        default:
            x = nvfp4_to_f32(src[i / 2] >> 4 * (i & 1) & 15, scale[i / 16]);
        }
        if (args->dst_dtype == MSA_F32)
            ((float *)dst)[i] = x;
        else if (args->dst_dtype == MSA_BF16)
            ((uint16_t *)dst)[i] = f32_to_bf16(x);
        else if (args->dst_dtype == MSA_FP16)
            ((uint16_t *)dst)[i] = f32_to_fp16(x);
        else
            ((uint8_t *)dst)[i] = f32_to_e4m3(x);
    }
}

static void convert_task(void *arg, size_t block, size_t thread)
{
    (void)thread;
    const msa_convert_args *args = arg;
    for (int64_t row = (int64_t)block * ROW_BLOCK; row < block_end(block, args->rows); row++) {
        const uint8_t *src = (const uint8_t *)args->src + row * args->src_row_stride;
        void *dst = (char *)args->dst + row * args->dst_row_stride;
        if (args->src_dtype == args->dst_dtype) /* all bits, NaN payloads too */
            memcpy(dst, src, dtype_row_bytes(args->src_dtype, args->cols));
        else
            convert_row(args, src, args->scale ? (const uint8_t *)args->scale + row * args->scale_row_stride : NULL,
                        dst);
    }
}

msa_status cpu_convert(msa_context *context, const msa_convert_args *args, msa_stream stream)
{
    (void)stream;
    msa_convert_args copy = *args;
    return cpu_parallel(context, blocks(args->rows), convert_task, &copy);
}
