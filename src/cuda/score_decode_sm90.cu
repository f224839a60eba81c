/* SPDX-License-Identifier: MIT
 *
 * score_decode_sm90.cu - decode indexer scores for Hopper: score[h][i][p] = max over the page's 128 tokens of
 * dot(index_q[i][h], index_k[token]), for exactly the history pages p of each row; FP8, BF16 and NVFP4 keys.
 *
 * Arithmetic: that of index_smxx. Operands widen exactly to F16 (E4M3, NVFP4 rounded to E4M3) or stay BF16; mma.sync,
 * FP32 accumulation, d ascending by 16. Within such a step the order of d is free, so a lane takes the four elements
 * that it finds together. The bits are index_smxx's, whatever the tile. A NaN never becomes the maximum.
 *
 * The keys are the products' rows, the (query, head) pairs of a tile, 16 at a time, their columns: with one head and
 * one new token a page costs 64 products, and memory is what it waits for. prepare cuts the list of (tile, page) pairs
 * into one part of equal length for each of the GROUPS groups of four warps of every SM: few rows over a long context
 * fill the chip, many over a short one are hardly split. A group fetches its pages by the copy engine into a ring of
 * its own; each warp takes a quarter of the keys, one barrier a page exchanges the maxima and frees the slot.
 *
 * Floor: the bytes of the history pages at 4.69 TB/s.
 * Measured on an H200, 2026-11-29, us a call with selection in a chain of calls in one graph, cold inputs: FP8, 1 head:
 * batch 1 at 8K 5.7, 32K 6.4, 128K 10.3; batch 8 at 128K 42; batch 128 at 128K 534 (86 % of the read rate); 4 heads,
 * batch 32 at 32K 44. NVFP4, which spends its time in shared memory: batch 128 at 128K 644.
 */
#include "decode_sm90.cuh"
#include "step.cuh"
#include "tensor_map.cuh"

#include <math.h>

enum { GROUPS = 3, THREADS = GROUPS * GROUP, TILE_ROWS = 16, MOST_HEADS = 64, COLUMNS = 8 /* of a product */ };

/* A part of the work: `pages` pages from `first_page` of tile `tile` on, and so on in the tiles behind it. */
struct part {
    cuda_tile tile;
    int32_t index, first_page, pages, reserved;
};

struct index_job {
    cuda_index job;
    CUtensorMap map; /* E4M3, BF16 */
    bool bulk;       /* tiles are copied by the copy engine */
};

template <storage STORAGE> struct memory {
    static constexpr int SLOTS = tile<STORAGE>::NVFP4 ? 6 : 4;
    uint8_t ring[GROUPS][SLOTS][tile<STORAGE>::BYTES];
    uint2 table[tile<STORAGE>::NVFP4 ? 256 : 1];
    float part[GROUPS][2][GROUP_WARPS][MOST_HEADS]; /* maxima of the warps */
    int32_t absent[GROUPS][SLOTS];                  /* the table names no page of the cache: the score is -inf */
    uint64_t full[GROUPS][SLOTS];
};

/* ------------------------------------------------------------------------------------------------ the parts */

/* One block: the pages before each tile, to `before`; from them where each part begins. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    cut_parts(const cuda_step step, part *parts, int num_parts, int64_t *before)
{
    grid_release();
    grid_wait();
    int64_t total = 0;
    for (int64_t base = 0; base < step.num_tiles; base += SCAN_THREADS) {
        int64_t i = base + threadIdx.x, all, pages = i < step.num_tiles ? history_pages(step, step.tiles[i]) : 0;
        int64_t first = total + block_scan<sum>(pages, &all);
        if (i < step.num_tiles)
            before[i] = first;
        total += all;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < num_parts; p += SCAN_THREADS) {
        int64_t first = total * p / num_parts, end = total * (p + 1) / num_parts;
        int32_t low = 0, high = step.num_tiles; /* before[low] <= first, before[high] > first */
        while (high - low > 1) {
            int32_t middle = low + (high - low) / 2;
            if (before[middle] <= first)
                low = middle;
            else
                high = middle;
        }
        parts[p] =
            total ? part{step.tiles[low], low, (int32_t)(first - before[low]), (int32_t)(end - first), 0} : part{};
    }
}

/* ------------------------------------------------------------------------------------------------ queries */

/* Which row of the tile a column is; NULL: none. */
static __device__ inline const char *query_row(const cuda_index &job, const cuda_tile &tile, int column)
{
    int heads = job.desc.num_index_heads, query = column / heads, head = column % heads;
    return query < tile.num_rows
               ? (const char *)job.args.index_q + (tile.first_row + query) * job.args.index_q_row_stride +
                     head * job.args.index_q_head_stride
               : nullptr;
}

/* Eight rows as the products' b operands: lane (g, t) holds of row g, step c, the elements 16c + 4t .. 4t+3 (8 bits) or
 * 16c + 2t, +1, +8, +9. */
template <storage STORAGE> static __device__ inline void load_columns(const char *row, uint32_t (&q)[8][2])
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        if constexpr (tile<STORAGE>::HALF) {
            q[c][0] = row ? *(const uint32_t *)(row + 32 * c + 4 * t) : 0;
            q[c][1] = row ? *(const uint32_t *)(row + 32 * c + 16 + 4 * t) : 0;
        } else {
            widen_4(row ? *(const uint32_t *)(row + 16 * c + 4 * t) : 0, q[c][0], q[c][1]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ one tile of keys */

/* 16 keys, steps 2c and 2c + 1 (8 bits) or step c (16 bits), as a operands. */
template <storage STORAGE>
static __device__ inline void load_rows(uint32_t tile_at, uint32_t table, int first_key, int c, uint32_t (&a)[2][4])
{
    using T = tile<STORAGE>;
    int lane = threadIdx.x % CUDA_WARP, g = lane / 4, t = lane % 4;
    if constexpr (T::NVFP4) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int key = first_key + 8 * r + g, block = 2 * c + i;
                uint32_t codes = load_shared_16(tile_at + key * 64 + block * 8 + 2 * t);
                uint2 entry = load_shared_64(table + load_shared_8(tile_at + SCALES + key * 8 + block) * 8);
                widen_4(widen_in_order(codes, entry), a[i][r], a[i][2 + r]);
            }
    } else {
        /* E4M3: matrices of keys 0-7 and 8-15 at chunk 2c, then at 2c + 1; 16 bits: the two chunks of a step. */
        int key = first_key + lane % 16, chunk = 2 * c + lane / 16;
        uint32_t m[4], place = key * 128 + ((chunk % 8 ^ key % 8) << 4);
        load_matrices(m, tile_at + (T::HALF ? chunk / 8 * (T::BYTES / 2) : 0) + place);
        if constexpr (T::HALF) {
            a[0][0] = m[0], a[0][1] = m[1], a[0][2] = m[2], a[0][3] = m[3];
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                widen_4(m[2 * i], a[i][0], a[i][2]);
                widen_4(m[2 * i + 1], a[i][1], a[i][3]);
            }
        }
    }
}

/* The maxima of COLUMN_BLOCKS * 8 rows over the warp's keys; a lane has those of the rows 2t and 2t + 1, over its
 * keys. */
template <storage STORAGE, int COLUMN_BLOCKS>
static __device__ inline void score_tile(uint32_t tile_at, uint32_t table, const uint32_t (&q)[2][8][2],
                                         float (&best)[2][2])
{
    using T = tile<STORAGE>;
    constexpr operand TYPE = T::HALF ? OPERAND_BF16 : OPERAND_F16;
    int first = threadIdx.x / CUDA_WARP % GROUP_WARPS * T::WARP_KEYS;
#pragma unroll
    for (int rows = 0; rows < T::WARP_KEYS; rows += 16) {
        float s[COLUMN_BLOCKS][4] = {};
#pragma unroll
        for (int c = 0; c < (T::HALF ? 8 : 4); c++) {
            uint32_t a[2][4];
            load_rows<STORAGE>(tile_at, table, first + rows, c, a);
#pragma unroll
            for (int i = 0; i < (T::HALF ? 1 : 2); i++)
#pragma unroll
                for (int n = 0; n < COLUMN_BLOCKS; n++) {
                    int step = T::HALF ? c : 2 * c + i;
                    mma_16x8x16<TYPE>(s[n], a[i], q[n][step][0], q[n][step][1]);
                }
        }
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) /* fmaxf drops NaN */
                best[n][i] = fmaxf(best[n][i], fmaxf(s[n][i], s[n][2 + i]));
    }
}

/* ------------------------------------------------------------------------------------------ the pages of a tile */

/* The first warp of a group, lane l: physical pages of logical ones; -1 past the end. */
static __device__ inline int32_t load_page_id(const int32_t *table, int32_t page, int32_t end)
{
    return page < end ? table[page] : -1;
}

/* Pages [page, end) of a tile. `slot`, `turn` and `done`, the pages so far, go on from one call to the next: maxima
 * take turns in two places, and the warp that reads one may be a page behind those that write the other. */
template <storage STORAGE>
static __device__ void score_pages(const index_job &d, const cuda_tile &t, int32_t page, int32_t end,
                                   memory<STORAGE> &m, int &slot, int &turn, int &done)
{
    using T = tile<STORAGE>;
    const cuda_index &job = d.job;
    const msa_index_args &args = job.args;
    int lane = threadIdx.x % CUDA_WARP, warp = uniform(threadIdx.x / CUDA_WARP % GROUP_WARPS),
        group = threadIdx.x / GROUP;
    int heads = job.desc.num_index_heads;
    const int32_t *table =
        (const int32_t *)((const char *)job.step.page_table + t.request * job.step.page_table_stride);
    uint32_t ring = shared_address(m.ring[group]), full = shared_address(m.full[group]),
             magnitudes = shared_address(m.table);

    /* Every warp needs the page ids where all threads copy. */
    bool fetches = warp == 0 || !d.bulk;
    int32_t ids = -1, next_ids = -1;
    if (fetches) {
        ids = load_page_id(table, page + lane, end);
        next_ids = load_page_id(table, page + CUDA_WARP + lane, end);
    }
    int tiles = (end - page) * T::PER_PAGE;
    auto fetch = [&](int n, int to_slot) { /* called for n ascending, by whole warps */
                                           int i = n / T::PER_PAGE, half = n % T::PER_PAGE;
                                           int32_t physical = __shfl_sync(~0u, ids, i % CUDA_WARP);
                                           if (i % CUDA_WARP == CUDA_WARP - 1 && half == T::PER_PAGE - 1) {
                                               ids = next_ids;
                                               next_ids = load_page_id(table, page + i + 1 + CUDA_WARP + lane, end);
                                           }
                                           bool absent = physical < 0 || physical >= args.num_pages;
                                           uint32_t to = ring + to_slot * T::BYTES, barrier = full + to_slot * 8;
                                           if (threadIdx.x % GROUP == 0) {
                                               m.absent[group][to_slot] = absent;
                                               if (absent)
                                                   atomicOr(job.step.error, MSA_ERROR_BIT_PAGE_ID);
                                           }
                                           tile_source from = {(const uint8_t *)args.index_k,
                                                               (const uint8_t *)args.index_k_scale,
                                                               args.index_k_page_stride,
                                                               args.index_k_token_stride,
                                                               args.index_k_scale_page_stride,
                                                               args.index_k_scale_token_stride,
                                                               &d.map,
                                                               0};
                                           if (!d.bulk) {
                                               if (absent)
                                                   barrier_arrive(barrier);
                                               else
                                                   copy_tile_together<STORAGE>(to, from, physical, half, barrier);
                                           } else if (lane == 0) {
                                               if (absent)
                                                   barrier_arrive(barrier);
                                               else
                                                   copy_tile<STORAGE>(to, from, physical, half, barrier);
                                           }
    };
    constexpr int SLOTS = memory<STORAGE>::SLOTS;
    if (fetches)
        for (int n = 0; n < SLOTS && n < tiles; n++)
            fetch(n, (slot + n) % SLOTS);

    int rows = t.num_rows * heads;
    uint32_t q[2][8][2];
    auto load_queries_from = [&](int first) {
        load_columns<STORAGE>(query_row(job, t, first + lane / 4), q[0]);
        load_columns<STORAGE>(query_row(job, t, first + lane / 4 + COLUMNS), q[1]);
    };
    load_queries_from(0);

    /* The last warp writes: lane l the scores of the rows l and l + 32. */
    float *scores[2];
    int32_t history[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = lane + i * CUDA_WARP, query = row / heads;
        int32_t position = t.first_position + query;
        history[i] = row < rows && position > 0 ? min(position / MSA_PAGE_SIZE, end) : 0;
        scores[i] = (float *)((char *)args.scores + (t.first_row + query) * args.scores_row_stride +
                              row % heads * args.scores_head_stride);
    }

#pragma unroll 1
    for (int n = 0; n < tiles; n++) {
        int i = n / T::PER_PAGE;
        float(*part)[MOST_HEADS] = m.part[group][(done + i) % 2];
        barrier_wait(full + slot * 8, turn);
        for (int first = 0; first < rows; first += TILE_ROWS) {
            float best[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
            if (rows > TILE_ROWS)
                load_queries_from(first);
            if (rows - first > COLUMNS)
                score_tile<STORAGE, 2>(ring + slot * T::BYTES, magnitudes, q, best);
            else
                score_tile<STORAGE, 1>(ring + slot * T::BYTES, magnitudes, q, best);
#pragma unroll
            for (int b = 0; b < 2; b++) {
                if (rows - first <= b * COLUMNS)
                    continue;
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int with = 4; with < CUDA_WARP; with *= 2)
                        best[b][j] = fmaxf(best[b][j], __shfl_xor_sync(~0u, best[b][j], with));
                float2 *to = (float2 *)&part[warp][first + COLUMNS * b + 2 * lane], before = {-INFINITY, -INFINITY};
                if (lane < 4) {
                    if (n % T::PER_PAGE > 0) /* the page's first half */
                        before = *to;
                    *to = make_float2(fmaxf(before.x, best[b][0]), fmaxf(before.y, best[b][1]));
                }
            }
        }
        bool absent = m.absent[group][slot];
        barrier_meet(1 + group, GROUP); /* the slot is free, the maxima are there */
        if (fetches && n + SLOTS < tiles)
            fetch(n + SLOTS, slot);
        if (warp == GROUP_WARPS - 1 && n % T::PER_PAGE == T::PER_PAGE - 1)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (page + i < history[j]) {
                    int row = lane + j * CUDA_WARP;
                    float score = fmaxf(fmaxf(part[0][row], part[1][row]), fmaxf(part[2][row], part[3][row]));
                    scores[j][page + i] = absent ? -INFINITY : score;
                }
        if (++slot == SLOTS) {
            slot = 0;
            turn ^= 1;
        }
    }
    done += end - page;
}

/* ------------------------------------------------------------------------------------------------ the kernel */

template <storage STORAGE>
static __global__ void __launch_bounds__(THREADS, 1) score_parts(const __grid_constant__ index_job d)
{
    extern __shared__ __align__(1024) char shared[];
    memory<STORAGE> &m = *(memory<STORAGE> *)shared;
    int group = threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * m.SLOTS; i++)
            barrier_init(shared_address(m.full[0] + i), d.bulk ? 1 : GROUP);
        fence_barriers();
        if (!tile<STORAGE>::NVFP4 && d.bulk)
            prefetch_map(&d.map);
    }
    if (tile<STORAGE>::NVFP4)
        for (int i = threadIdx.x; i < 256; i += THREADS)
            m.table[i] = scaled_magnitudes((uint32_t)i);
    grid_wait();
    grid_release();
    part p = ((const part *)d.job.memory)[group * gridDim.x + blockIdx.x];
    __syncthreads();
    int slot = 0, turn = 0, done = 0;
    cuda_tile t = p.tile;
    while (p.pages > 0) {
        int32_t pages = min(history_pages(d.job.step, t) - p.first_page, p.pages);
        score_pages<STORAGE>(d, t, p.first_page, p.first_page + pages, m, slot, turn, done);
        p.pages -= pages;
        p.first_page = 0;
        p.index++;
        if (p.pages > 0)
            t = d.job.step.tiles[p.index];
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

static int num_parts(const struct cuda_index *job)
{
    return job->num_sms * GROUPS;
}

/* Tiles never get larger with more heads: workspaces grow with them. */
static void plan_decode(struct cuda_index *job)
{
    int32_t heads = job->desc.num_index_heads;
    job->step.query_tile = heads <= TILE_ROWS ? TILE_ROWS / heads : 1;
    int64_t tiles = job->desc.max_total_q / job->step.query_tile + job->desc.max_batch;
    job->memory_bytes = (size_t)num_parts(job) * sizeof(part) + (size_t)tiles * sizeof(int64_t);
}

static cudaError_t prepare_decode(const struct cuda_index *job, cudaStream_t stream)
{
    part *parts = (part *)job->memory;
    return launch(cut_parts, 1, SCAN_THREADS, 0, job->step.dependent_launch, stream, job->step, parts, num_parts(job),
                  (int64_t *)(parts + num_parts(job)));
}

template <storage STORAGE> static cudaError_t launch_parts(index_job &d, cudaStream_t stream)
{
    using T = tile<STORAGE>;
    const msa_index_args &a = d.job.args;
    tensor_layout k = {a.index_k, a.index_k_token_stride, 0, a.index_k_page_stride, 1, a.num_pages};
    if (T::NVFP4) {
        tensor_layout scale = {a.index_k_scale, a.index_k_scale_token_stride, 0, a.index_k_scale_page_stride, 1,
                               a.num_pages};
        d.bulk = is_dense(k, 64) && is_dense(scale, 8);
    } else {
        d.bulk = map_tensor(d.job.encode_tensor, &d.map, k, T::HALF ? 256 : 128, T::KEYS);
    }
    auto kernel = score_parts<STORAGE>;
    constexpr int bytes = sizeof(memory<STORAGE>);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return error ? error : launch(kernel, (unsigned)d.job.num_sms, THREADS, bytes, true, stream, d);
}

static cudaError_t run_decode(const struct cuda_index *job, cudaStream_t stream)
{
    index_job d = {};
    d.job = *job;
    return job->desc.k_dtype == MSA_BF16   ? launch_parts<STORAGE_HALF>(d, stream)
           : job->desc.k_dtype == MSA_E4M3 ? launch_parts<STORAGE_E4M3>(d, stream)
                                           : launch_parts<STORAGE_NVFP4_E4M3>(d, stream);
}

const struct cuda_index_kernel score_decode_sm90 = {plan_decode, nullptr, false, prepare_decode, run_decode};
