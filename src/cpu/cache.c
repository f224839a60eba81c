/* SPDX-License-Identifier: MIT
 *
 * cache.c - cache write on the CPU: new tokens' K, V and index-K into their pages, in the cache's format.
 *
 * A work item is one head of one tensor over all tokens, so that of two tokens with one slot the later wins whatever the
 * thread count.
 */
#include "../number.h"
#include "cpu.h"

/* One tensor of the cache, with its source. */
struct destination {
    const uint8_t *source;
    int64_t source_row_stride, source_head_stride;
    msa_dtype dtype;
    uint8_t *data;
    int64_t page_stride, head_stride, token_stride;
    uint8_t *scale;
    int64_t scale_page_stride, scale_head_stride, scale_token_stride;
    bool scale_quad;
    const float *factor;
    int64_t factor_stride;
    int32_t heads;
};

struct cache_call {
    const msa_cache_write_args *args;
    const struct cpu_kernels *kernels;
    struct destination to[3];
};

static void store_half(const uint8_t *source, msa_dtype src_dtype, msa_dtype dtype, uint8_t *to)
{
    for (int d = 0; d < 128; d++) {
        float x;
        if (src_dtype == MSA_F32) {
            memcpy(&x, source + 4 * d, 4);
        } else {
            uint16_t h;
            memcpy(&h, source + 2 * d, 2);
            x = src_dtype == MSA_BF16 ? bf16_to_f32(h) : fp16_to_f32(h);
        }
        uint16_t h = dtype == MSA_BF16 ? f32_to_bf16(x) : f32_to_fp16(x);
        memcpy(to + 2 * d, &h, 2);
    }
}

static void write_token(const struct cache_call *call, const struct destination *to, int32_t head, const uint8_t *source, int64_t slot)
{
    const msa_cache_write_args *args = call->args;
    int64_t page = slot / MSA_PAGE_SIZE, token = slot % MSA_PAGE_SIZE;
    uint8_t *row = to->data + page * to->page_stride + head * to->head_stride + token * to->token_stride;
    if (args->src_dtype == to->dtype) {
        memcpy(row, source, dtype_row_bytes(to->dtype, MSA_HEAD_DIM));
    } else if (to->dtype == MSA_BF16 || to->dtype == MSA_FP16) {
        store_half(source, args->src_dtype, to->dtype, row);
    } else {
        enum cpu_source kind = cpu_source_of(args->src_dtype);
        float factor = to->factor ? *(const float *)((const char *)to->factor + head * to->factor_stride) : 1.0f;
        if (to->dtype == MSA_E4M3) {
            call->kernels->quantise_e4m3[kind](source, MSA_HEAD_DIM, factor, row, NULL);
            return;
        }
        uint8_t scales[8];
        call->kernels->quantise_nvfp4[kind](source, MSA_HEAD_DIM, factor, row, scales);
        uint8_t *scale = to->scale + page * to->scale_page_stride + head * to->scale_head_stride;
        for (int g = 0; g < 8; g++)
            if (to->scale_quad)
                scale[token / 4 * 32 + g * 4 + token % 4] = scales[g];
            else
                scale[token * to->scale_token_stride + g] = scales[g];
    }
}

static void cache_task(void *arg, size_t index, size_t thread)
{
    (void)thread;
    const struct cache_call *call = arg;
    const msa_cache_write_args *args = call->args;
    int32_t head = (int32_t)index;
    const struct destination *to = call->to;
    while (head >= to->heads)
        head -= to++->heads;
    for (int64_t token = 0; token < args->tokens; token++) {
        int64_t slot = args->slot_mapping[token];
        if (slot >= 0 && slot / MSA_PAGE_SIZE < args->num_pages)
            write_token(call, to, head, to->source + token * to->source_row_stride + head * to->source_head_stride, slot);
    }
}

msa_status cpu_cache_write(msa_context *context, const msa_cache_write_args *args, msa_stream stream)
{
    (void)stream;
    struct cache_call call = {.args = args, .kernels = cpu_kernels_of(context)};
    call.to[0] = (struct destination){
        .source = args->k_new, .source_row_stride = args->k_new_row_stride, .source_head_stride = args->k_new_head_stride,
        .dtype = args->kv_dtype, .data = args->k, .page_stride = args->k_page_stride, .head_stride = args->k_head_stride,
        .token_stride = args->k_token_stride, .scale = args->k_scale, .scale_page_stride = args->k_scale_page_stride,
        .scale_head_stride = args->k_scale_head_stride, .scale_token_stride = args->k_scale_token_stride,
        .factor = args->k_descale, .factor_stride = args->k_descale_stride, .heads = args->k ? args->num_kv_heads : 0};
    call.to[1] = (struct destination){
        .source = args->v_new, .source_row_stride = args->v_new_row_stride, .source_head_stride = args->v_new_head_stride,
        .dtype = args->kv_dtype, .data = args->v, .page_stride = args->v_page_stride, .head_stride = args->v_head_stride,
        .token_stride = args->v_token_stride, .scale = args->v_scale, .scale_page_stride = args->v_scale_page_stride,
        .scale_head_stride = args->v_scale_head_stride, .scale_token_stride = args->v_scale_token_stride,
        .scale_quad = args->v_scale_order == MSA_SCALE_QUAD, .factor = args->v_descale, .factor_stride = args->v_descale_stride,
        .heads = args->v ? args->num_kv_heads : 0};
    call.to[2] = (struct destination){
        .source = args->index_k_new, .source_row_stride = args->index_k_new_row_stride, .dtype = args->index_k_dtype,
        .data = args->index_k, .page_stride = args->index_k_page_stride, .token_stride = args->index_k_token_stride,
        .scale = args->index_k_scale, .scale_page_stride = args->index_k_scale_page_stride,
        .scale_token_stride = args->index_k_scale_token_stride, .heads = args->index_k ? 1 : 0};
    if (args->tokens == 0)
        return MSA_SUCCESS;
    return cpu_parallel(context, (size_t)(call.to[0].heads + call.to[1].heads + call.to[2].heads), cache_task, &call);
}
