/* SPDX-License-Identifier: MIT
 *
 * cache.c - cache write on the CPU: new tokens' K, V and index-K into their pages, in the cache's format.
 *
 * A work item is some heads of one tensor over all tokens in order, so that of two tokens with one slot the later wins
 * whatever the thread count. Heads that lie together and share a factor, and tokens that follow each other without a
 * gap, are quantised by one call, GROUP rows at a time, and then copied to their pages: the kernels like long rows.
 */
#include "../number.h"
#include "cpu.h"

enum { GROUP = 32 };

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
    int32_t items; /* of each tensor, if it has that many heads */
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

static uint8_t *row_at(const struct destination *to, int32_t head, int64_t slot)
{
    return to->data + slot / MSA_PAGE_SIZE * to->page_stride + head * to->head_stride +
           slot % MSA_PAGE_SIZE * to->token_stride;
}

/* Sizes that compilers know: a call for each row would cost as much as copying it. */
static void copy_row(uint8_t *to, const uint8_t *from, msa_dtype dtype)
{
    if (dtype == MSA_E4M3)
        memcpy(to, from, MSA_HEAD_DIM);
    else if (dtype == MSA_NVFP4)
        memcpy(to, from, MSA_HEAD_DIM / 2);
    else
        memcpy(to, from, MSA_HEAD_DIM * 2);
}

static void write_scales(const struct destination *to, int32_t head, int64_t slot, const uint8_t scales[8])
{
    int64_t token = slot % MSA_PAGE_SIZE;
    uint8_t *scale = to->scale + slot / MSA_PAGE_SIZE * to->scale_page_stride + head * to->scale_head_stride;
    if (!to->scale_quad) {
        memcpy(scale + token * to->scale_token_stride, scales, 8);
        return;
    }
    for (int g = 0; g < 8; g++)
        scale[token / 4 * 32 + g * 4 + token % 4] = scales[g];
}

static bool is_slot(const struct cache_call *call, int64_t slot)
{
    return slot >= 0 && slot / MSA_PAGE_SIZE < call->args->num_pages;
}

/* Rows that lie together and share a factor: `heads` heads of each of some tokens. */
static void quantise_rows(const struct cache_call *call, const struct destination *to, int32_t first, int32_t heads,
                          const uint8_t *source, const int64_t *slots, int64_t tokens)
{
    uint8_t codes[GROUP * MSA_HEAD_DIM], scales[GROUP * MSA_HEAD_DIM / 16];
    enum cpu_source kind = cpu_source_of(call->args->src_dtype);
    float factor = to->factor ? *(const float *)((const char *)to->factor + first * to->factor_stride) : 1.0f;
    cpu_quantise_fn *quantise =
        to->dtype == MSA_E4M3 ? call->kernels->quantise_e4m3[kind] : call->kernels->quantise_nvfp4[kind];
    size_t row_bytes = dtype_row_bytes(to->dtype, MSA_HEAD_DIM);
    quantise(source, tokens * heads * MSA_HEAD_DIM, factor, codes, scales);
    const uint8_t *row = codes, *row_scales = scales;
    for (int64_t token = 0; token < tokens; token++) {
        for (int32_t head = first; head < first + heads; head++, row += row_bytes, row_scales += 8) {
            copy_row(row_at(to, head, slots[token]), row, to->dtype);
            if (to->dtype == MSA_NVFP4)
                write_scales(to, head, slots[token], row_scales);
        }
    }
}

static bool is_quantised(const struct cache_call *call, const struct destination *to)
{
    return call->args->src_dtype != to->dtype && (to->dtype == MSA_E4M3 || to->dtype == MSA_NVFP4);
}

/* The heads [first, last) of one token. */
static void write_token(const struct cache_call *call, const struct destination *to, int32_t first, int32_t last,
                        const uint8_t *source, int64_t slot, bool together)
{
    msa_dtype from = call->args->src_dtype;
    if (is_quantised(call, to)) {
        int32_t step = together ? GROUP : 1;
        for (int32_t head = first; head < last; head += step)
            quantise_rows(call, to, head, last - head < step ? last - head : step,
                          source + head * to->source_head_stride, &slot, 1);
        return;
    }
    for (int32_t head = first; head < last; head++)
        if (from == to->dtype)
            copy_row(row_at(to, head, slot), source + head * to->source_head_stride, to->dtype);
        else
            store_half(source + head * to->source_head_stride, from, to->dtype, row_at(to, head, slot));
}

static int32_t items_of(const struct cache_call *call, const struct destination *to)
{
    return to->heads < call->items ? to->heads : call->items;
}

static void cache_task(void *arg, size_t index, size_t thread)
{
    (void)thread;
    const struct cache_call *call = arg;
    const msa_cache_write_args *args = call->args;
    const struct destination *to = call->to;
    int32_t item = (int32_t)index;
    while (item >= items_of(call, to))
        item -= items_of(call, to++);
    int32_t first = (int32_t)((int64_t)to->heads * item / items_of(call, to));
    int32_t last = (int32_t)((int64_t)to->heads * (item + 1) / items_of(call, to));
    int64_t head_bytes = (int64_t)dtype_row_bytes(args->src_dtype, MSA_HEAD_DIM);
    bool together = last - first == 1 || (to->source_head_stride == head_bytes && to->factor_stride == 0);
    int64_t at_once = 1; /* tokens */
    if (is_quantised(call, to) && together && to->source_row_stride == (last - first) * head_bytes)
        at_once = GROUP / (last - first) > 1 ? GROUP / (last - first) : 1;
    for (int64_t token = 0, count; token < args->tokens; token += count) {
        const int64_t *slots = args->slot_mapping + token;
        const uint8_t *source = to->source + token * to->source_row_stride;
        for (count = 0; count < at_once && token + count < args->tokens && is_slot(call, slots[count]);)
            count++;
        if (count > 1)
            quantise_rows(call, to, first, last - first, source + first * to->source_head_stride, slots, count);
        else if (count == 1)
            write_token(call, to, first, last, source, *slots, together);
        else
            count = 1;
    }
}

msa_status cpu_cache_write(msa_context *context, const msa_cache_write_args *args, msa_stream stream)
{
    (void)stream;
    struct cache_call call = {.args = args, .kernels = cpu_kernels_of(context), .items = context->num_threads};
    call.to[0] = (struct destination){.source = args->k_new,
                                      .source_row_stride = args->k_new_row_stride,
                                      .source_head_stride = args->k_new_head_stride,
                                      .dtype = args->kv_dtype,
                                      .data = args->k,
                                      .page_stride = args->k_page_stride,
                                      .head_stride = args->k_head_stride,
                                      .token_stride = args->k_token_stride,
                                      .scale = args->k_scale,
                                      .scale_page_stride = args->k_scale_page_stride,
                                      .scale_head_stride = args->k_scale_head_stride,
                                      .scale_token_stride = args->k_scale_token_stride,
                                      .factor = args->k_descale,
                                      .factor_stride = args->k_descale_stride,
                                      .heads = args->k ? args->num_kv_heads : 0};
    call.to[1] = (struct destination){.source = args->v_new,
                                      .source_row_stride = args->v_new_row_stride,
                                      .source_head_stride = args->v_new_head_stride,
                                      .dtype = args->kv_dtype,
                                      .data = args->v,
                                      .page_stride = args->v_page_stride,
                                      .head_stride = args->v_head_stride,
                                      .token_stride = args->v_token_stride,
                                      .scale = args->v_scale,
                                      .scale_page_stride = args->v_scale_page_stride,
                                      .scale_head_stride = args->v_scale_head_stride,
                                      .scale_token_stride = args->v_scale_token_stride,
                                      .scale_quad = args->v_scale_order == MSA_SCALE_QUAD,
                                      .factor = args->v_descale,
                                      .factor_stride = args->v_descale_stride,
                                      .heads = args->v ? args->num_kv_heads : 0};
    call.to[2] = (struct destination){.source = args->index_k_new,
                                      .source_row_stride = args->index_k_new_row_stride,
                                      .dtype = args->index_k_dtype,
                                      .data = args->index_k,
                                      .page_stride = args->index_k_page_stride,
                                      .token_stride = args->index_k_token_stride,
                                      .scale = args->index_k_scale,
                                      .scale_page_stride = args->index_k_scale_page_stride,
                                      .scale_token_stride = args->index_k_scale_token_stride,
                                      .heads = args->index_k ? 1 : 0};
    if (args->tokens == 0)
        return MSA_SUCCESS;
    int32_t items = 0;
    for (int i = 0; i < 3; i++)
        items += items_of(&call, &call.to[i]);
    return cpu_parallel(context, (size_t)items, cache_task, &call);
}
