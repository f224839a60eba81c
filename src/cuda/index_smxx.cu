/* SPDX-License-Identifier: MIT
 *
 * index_smxx.cu - indexer scores for every GPU from sm_80 on: score[h][i][p] = max over the page's 128 tokens of
 * dot(index_q[i][h], index_k[token]), for exactly the history pages p of each row.
 *
 * Arithmetic: operands widen exactly to F16 (E4M3, NVFP4 rounded to E4M3) or stay BF16; mma.sync m16n8k16, FP32
 * accumulation, d ascending by 16. A NaN product never becomes the maximum. Every score is made by the same
 * instructions whatever the tile, so that prefill, decode and any batch give the same bits.
 *
 * Rows of a tile are (query, head) pairs, the head innermost: 128 for prefill; 16 for decode, where the 8 warps share
 * the page's keys instead of the rows. The (tile, page) steps of all tiles are one list, which `prepare` has counted;
 * block b of B takes the b-th part of it, so that few tiles over a long context and many over a short one fill the GPU
 * alike. The next page's bytes are loaded into registers while the tensor cores work on the current one.
 *
 * Shared memory: one widened page, 34 KB. Floor: 2*128*128 FLOP a row and page at the F16 rate of mma.sync, or the
 * pages' bytes at the read rate. Measured on an H200, 2026-11-29, with the selection: 8192 queries after 122880, 1
 * head: FP8 941 us, BF16 1020 us, NVFP4 1042 us; decode, batch 32 at 32K, 4 heads, FP8: 61 us.
 */
#include "page.cuh"
#include "step.cuh"

#include <math.h>

enum { WARPS = 8, THREADS = WARPS * CUDA_WARP, PREFILL_ROWS = 128, DECODE_ROWS = 16, BLOCKS_PER_SM = 2 };

/* ROW_WARPS: warps with rows of their own; the others share the keys. 8: 128 rows, 1: 16 rows. */
template <int ROW_WARPS> struct shape {
    static constexpr int ROWS = 16 * ROW_WARPS, KEYS = MSA_PAGE_SIZE * ROW_WARPS / WARPS; /* of the tile; of a warp */
};

struct memory {
    uint16_t page[MSA_PAGE_SIZE * PAGE_ROW];
    float part[WARPS][16]; /* maxima of the warps that share rows */
};

/* A lane's rows of the tile are lane/4 and that + 8 of its warp's 16. */
struct row {
    const char *q; /* NULL: past the tile */
    float *scores;
    int32_t history; /* pages with a score */
};

/* ------------------------------------------------------------------------------------------------ queries */

static __device__ row find_row(const cuda_index &job, const cuda_tile &tile, int r)
{
    int heads = job.desc.num_index_heads, query = r / heads, head = r % heads;
    if (query >= tile.num_rows)
        return row{nullptr, nullptr, 0};
    const msa_index_args &args = job.args;
    int64_t index = tile.first_row + query;
    int32_t position = tile.first_position + query, history = position < 0 ? 0 : position / MSA_PAGE_SIZE;
    return row{(const char *)args.index_q + index * args.index_q_row_stride + head * args.index_q_head_stride,
               (float *)((char *)args.scores + index * args.scores_row_stride + head * args.scores_head_stride),
               history < job.step.max_pages ? history : job.step.max_pages};
}

/* ------------------------------------------------------------------------------------------------ one page */

/* The maxima of a warp's 16 rows over its keys; a lane gets those of its two rows. */
template <operand TYPE, int KEYS, int MOST_TILES>
static __device__ inline void score_keys(const uint16_t *page, int first_key, const uint32_t (&q)[8][4],
                                         float (&best)[2])
{
    constexpr int TILES = KEYS / 8 < MOST_TILES ? KEYS / 8 : MOST_TILES; /* 8 keys each, in flight together */
    best[0] = best[1] = -INFINITY;
#pragma unroll 1
    for (int group = 0; group < KEYS; group += 8 * TILES) {
        float sum[TILES][4];
        dot_keys<TYPE, TILES>(page, first_key + group, q, sum);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            best[0] = fmaxf(best[0], fmaxf(sum[n][0], sum[n][1])); /* fmaxf drops NaN */
            best[1] = fmaxf(best[1], fmaxf(sum[n][2], sum[n][3]));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        best[i] = fmaxf(best[i], __shfl_xor_sync(~0u, best[i], 1));
        best[i] = fmaxf(best[i], __shfl_xor_sync(~0u, best[i], 2));
    }
}

/* Combines the maxima of warps that share rows. Afterwards warp 0 alone has something to write. */
static __device__ inline void share_maxima(float (&part)[WARPS][16], float (&best)[2])
{
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    if (lane % 4 == 0) {
        part[warp][lane / 4] = best[0];
        part[warp][lane / 4 + 8] = best[1];
    }
    __syncthreads();
    if (warp == 0)
        for (int w = 1; w < WARPS; w++) {
            best[0] = fmaxf(best[0], part[w][lane / 4]);
            best[1] = fmaxf(best[1], part[w][lane / 4 + 8]);
        }
}

/* ------------------------------------------------------------------------------------------------ the kernel */

/* A page of the cache; data NULL: the table names none, its score is -inf. */
static __device__ page_rows find_page(const cuda_index &job, const int32_t *table, int32_t page)
{
    const msa_index_args &args = job.args;
    int64_t physical = table[page];
    if (physical < 0 || physical >= args.num_pages) {
        if (threadIdx.x == 0)
            atomicOr(job.step.error, MSA_ERROR_BIT_PAGE_ID);
        return page_rows{};
    }
    return page_rows{(const uint8_t *)args.index_k + physical * args.index_k_page_stride, args.index_k_token_stride,
                     (const uint8_t *)args.index_k_scale + physical * args.index_k_scale_page_stride,
                     args.index_k_scale_token_stride, false};
}

/* Pages [page, last) of a tile. */
template <storage STORAGE, operand TYPE, int ROW_WARPS>
static __device__ void score_tile(const cuda_index &job, const cuda_tile &tile, int32_t page, int32_t last, memory &m)
{
    using S = shape<ROW_WARPS>;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, row_warp = ROW_WARPS == 1 ? 0 : warp;
    int first_key = ROW_WARPS == 1 ? warp * S::KEYS : 0;
    row rows[2] = {find_row(job, tile, 16 * row_warp + lane / 4), find_row(job, tile, 16 * row_warp + lane / 4 + 8)};
    uint32_t q[8][4];
    load_queries<STORAGE != STORAGE_HALF>({rows[0].q, rows[1].q}, q);
    const int32_t *table =
        (const int32_t *)((const char *)job.step.page_table + tile.request * job.step.page_table_stride);
    page_part<STORAGE, THREADS> part;
    page_rows next = find_page(job, table, page);
    load_page(next, next.data ? MSA_PAGE_SIZE : 0, part);
    for (; page < last; page++) {
        bool there = next.data != nullptr;
        __syncthreads(); /* all have read the page before */
        store_page<STORAGE, TYPE>(part, m.page);
        __syncthreads();
        if (page + 1 < last) {
            next = find_page(job, table, page + 1);
            load_page(next, next.data ? MSA_PAGE_SIZE : 0, part);
        }
        float best[2];
        score_keys<TYPE, S::KEYS, STORAGE == STORAGE_HALF ? 2 : 4>(m.page, first_key, q, best);
        if (ROW_WARPS == 1)
            share_maxima(m.part, best);
        if (lane % 4 == 0 && (ROW_WARPS > 1 || warp == 0))
            for (int i = 0; i < 2; i++)
                if (page < rows[i].history)
                    rows[i].scores[page] = there ? best[i] : -INFINITY;
    }
}

template <storage STORAGE, operand TYPE, int ROW_WARPS>
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) score_pages(const __grid_constant__ cuda_index job)
{
    __shared__ memory m;
    const int64_t *first_step = job.step.first_step;
    int64_t steps = first_step[job.step.num_tiles];
    int64_t begin = steps * blockIdx.x / gridDim.x, end = steps * (blockIdx.x + 1) / gridDim.x;
    for (int32_t i = first_above(first_step, job.step.num_tiles, begin) - 1; begin < end; i++) {
        int64_t first = first_step[i], stop = first_step[i + 1] < end ? first_step[i + 1] : end;
        if (stop > begin)
            score_tile<STORAGE, TYPE, ROW_WARPS>(job, job.step.tiles[i], (int32_t)(begin - first),
                                                 (int32_t)(stop - first), m);
        begin = stop;
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

/* A query's heads stay together. Tiles never get larger with more heads: workspaces grow with them. */
static void plan_prefill(struct cuda_index *job)
{
    job->step.query_tile = PREFILL_ROWS / job->desc.num_index_heads;
}

static void plan_decode(struct cuda_index *job)
{
    int32_t heads = job->desc.num_index_heads;
    job->step.query_tile = heads <= DECODE_ROWS ? DECODE_ROWS / heads : 1;
}

template <int ROW_WARPS> static cudaError_t run(const struct cuda_index *job, cudaStream_t stream)
{
    auto kernel = job->desc.k_dtype == MSA_BF16   ? score_pages<STORAGE_HALF, OPERAND_BF16, ROW_WARPS>
                  : job->desc.k_dtype == MSA_E4M3 ? score_pages<STORAGE_E4M3, OPERAND_F16, ROW_WARPS>
                                                  : score_pages<STORAGE_NVFP4_E4M3, OPERAND_F16, ROW_WARPS>;
    return launch(kernel, (unsigned)(job->num_sms * BLOCKS_PER_SM), THREADS, 0, false, stream, *job);
}

static cudaError_t run_decode(const struct cuda_index *job, cudaStream_t stream)
{
    return job->desc.num_index_heads <= DECODE_ROWS ? run<1>(job, stream) : run<WARPS>(job, stream);
}

const struct cuda_index_kernel index_prefill_smxx = {plan_prefill, NULL, false, NULL, run<WARPS>};
const struct cuda_index_kernel index_decode_smxx = {plan_decode, NULL, false, NULL, run_decode};
