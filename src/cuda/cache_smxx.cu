/* SPDX-License-Identifier: MIT
 *
 * cache_smxx.cu - cache write: new tokens' K, V and index-K into their pages, in the cache's format; bit-equal to
 * cpu/cache.c. A thread takes 16 elements of one head of one token; 8 neighbours write a head's row.
 * Where two tokens have one slot, bytes of either stay.
 * Floor: bytes read and written at the copy rate.
 */
#include "block.cuh"

enum { THREADS = 256, ROW_BLOCKS = MSA_HEAD_DIM / BLOCK };

/* One tensor of the cache, with its source. */
struct destination {
    const char *source;
    int64_t source_row_stride, source_head_stride;
    bool source_aligned;
    msa_dtype dtype;
    char *data;
    int64_t page_stride, head_stride, token_stride;
    uint8_t *scale;
    int64_t scale_page_stride, scale_head_stride, scale_token_stride;
    bool scale_quad;
    const float *factor;
    int64_t factor_stride;
    int32_t heads;
};

struct cache_job {
    destination to[3]; /* K, V, index-K; heads 0: left out */
    const int64_t *slots;
    int64_t tokens, num_pages;
    msa_dtype src_dtype;
    int32_t heads; /* of all three */
};

static __device__ inline void write_scale(const destination &to, int64_t page, int32_t head, int token, int block,
                                          uint8_t code)
{
    uint8_t *scale = to.scale + page * to.scale_page_stride + head * to.scale_head_stride;
    if (to.scale_quad)
        scale[token / 4 * 32 + block * 4 + token % 4] = code;
    else
        scale[token * to.scale_token_stride + block] = code;
}

static __device__ void write_block(const cache_job &job, const destination &to, int32_t head, int block, int64_t index,
                                   int64_t slot)
{
    int64_t page = slot / MSA_PAGE_SIZE;
    int token = (int)(slot % MSA_PAGE_SIZE), src_bytes = job.src_dtype == MSA_F32    ? 4 * BLOCK
                                                         : job.src_dtype == MSA_E4M3 ? BLOCK
                                                                                     : 2 * BLOCK;
    const char *source = to.source + index * to.source_row_stride + head * to.source_head_stride + block * src_bytes;
    char *row = to.data + page * to.page_stride + head * to.head_stride + token * to.token_stride; /* 16-byte aligned */
    if (job.src_dtype == to.dtype) {
        if (to.dtype == MSA_E4M3)
            copy_bytes<BLOCK>(row + block * BLOCK, source, to.source_aligned);
        else
            copy_bytes<2 * BLOCK>(row + block * 2 * BLOCK, source, to.source_aligned);
        return;
    }
    float x[BLOCK];
    load_block(source, job.src_dtype, to.source_aligned, x);
    float factor = to.factor ? *(const float *)((const char *)to.factor + head * to.factor_stride) : 1.0f;
    if (to.dtype == MSA_E4M3)
        store_e4m3_block(x, factor, row + block * BLOCK, true);
    else if (to.dtype == MSA_NVFP4)
        write_scale(to, page, head, token, block, store_nvfp4_block(x, factor, row + block * (BLOCK / 2), true));
    else
        store_half_block(x, to.dtype, row + block * 2 * BLOCK, true);
}

static __global__ void __launch_bounds__(THREADS) write_tokens(const __grid_constant__ cache_job job)
{
    int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x, blocks = (int64_t)job.heads * ROW_BLOCKS;
    for (; index < job.tokens * blocks; index += (int64_t)gridDim.x * THREADS) {
        int64_t token = index / blocks, slot = job.slots[token];
        int32_t head = (int32_t)(index % blocks) / ROW_BLOCKS;
        int which = 0;
        while (head >= job.to[which].heads)
            head -= job.to[which++].heads;
        if (slot >= 0 && slot / MSA_PAGE_SIZE < job.num_pages)
            write_block(job, job.to[which], head, (int)(index % ROW_BLOCKS), token, slot);
    }
}

static bool source_aligned(const void *source, int64_t row_stride, int64_t head_stride)
{
    return rows_aligned(source, row_stride | head_stride, 16);
}

cudaError_t cache_smxx(const msa_cache_write_args *args, cudaStream_t stream)
{
    cache_job job = {};
    job.to[0] = destination{(const char *)args->k_new,
                            args->k_new_row_stride,
                            args->k_new_head_stride,
                            source_aligned(args->k_new, args->k_new_row_stride, args->k_new_head_stride),
                            args->kv_dtype,
                            (char *)args->k,
                            args->k_page_stride,
                            args->k_head_stride,
                            args->k_token_stride,
                            (uint8_t *)args->k_scale,
                            args->k_scale_page_stride,
                            args->k_scale_head_stride,
                            args->k_scale_token_stride,
                            false,
                            args->k_descale,
                            args->k_descale_stride,
                            args->k ? args->num_kv_heads : 0};
    job.to[1] = destination{(const char *)args->v_new,
                            args->v_new_row_stride,
                            args->v_new_head_stride,
                            source_aligned(args->v_new, args->v_new_row_stride, args->v_new_head_stride),
                            args->kv_dtype,
                            (char *)args->v,
                            args->v_page_stride,
                            args->v_head_stride,
                            args->v_token_stride,
                            (uint8_t *)args->v_scale,
                            args->v_scale_page_stride,
                            args->v_scale_head_stride,
                            args->v_scale_token_stride,
                            args->v_scale_order == MSA_SCALE_QUAD,
                            args->v_descale,
                            args->v_descale_stride,
                            args->v ? args->num_kv_heads : 0};
    job.to[2] = destination{(const char *)args->index_k_new,
                            args->index_k_new_row_stride,
                            0,
                            source_aligned(args->index_k_new, args->index_k_new_row_stride, 0),
                            args->index_k_dtype,
                            (char *)args->index_k,
                            args->index_k_page_stride,
                            0,
                            args->index_k_token_stride,
                            (uint8_t *)args->index_k_scale,
                            args->index_k_scale_page_stride,
                            0,
                            args->index_k_scale_token_stride,
                            false,
                            nullptr,
                            0,
                            args->index_k ? 1 : 0};
    job.slots = args->slot_mapping;
    job.tokens = args->tokens;
    job.num_pages = args->num_pages;
    job.src_dtype = args->src_dtype;
    job.heads = job.to[0].heads + job.to[1].heads + job.to[2].heads;
    if (job.heads == 0)
        return cudaSuccess;
    return launch(write_tokens, grid_blocks(job.tokens * job.heads * ROW_BLOCKS, THREADS), THREADS, 0, false, stream,
                  job);
}
