/* SPDX-License-Identifier: MIT
 *
 * score_decode_sm90.cu - decode indexer scores for Hopper: score[h][i][p] = max over the page's 128 tokens of
 * dot(index_q[i][h], index_k[token]), for exactly the history pages p of each row; FP8, BF16 and NVFP4 keys.
 *
 * Arithmetic: operands widen exactly to F16 (E4M3, NVFP4 rounded to E4M3) or stay BF16; mma.sync, FP32 accumulation in
 * steps of 16. E4M3 and BF16: d ascending; the order within a step is free, so a lane takes the four elements that it
 * finds together. NVFP4: a lane finds 32 codes together, and step i takes the elements 32c + 4i .. 4i+3, c = 0..3. The
 * bits are those of score_sm90 in `exact`, whatever the tile. A NaN never becomes the maximum.
 * `fast`: FP8 wgmma in steps of 32, the keys in registers, which drops what lies below 2^-13 of a step's largest term.
 *
 * The keys are the products' rows, the (query, head) pairs of a tile, 16 at a time, their columns: with one head and
 * one new token a page costs 64 products, and memory is what it waits for. prepare cuts the list of (tile, page) pairs
 * into one part of equal length for each of the GROUPS groups of four warps of every SM: few rows over a long context
 * fill the chip, many over a short one are hardly split. A group fetches its pages by the copy engine into a ring of
 * its own; each warp takes a quarter of the keys, one barrier a page exchanges the maxima and frees the slot. Long
 * parts with NVFP4 keys in `exact` go by whole pages to the warps (score_warps_sm90.cuh), same products, same bits.
 *
 * Floor: the bytes of the history pages at 4.69 TB/s.
 * Measured on an H200, 2026-11-30, us a call with selection in a chain of calls in one graph, cold inputs, exact but
 * where it says fast: FP8, 1 head: batch 1 at 8K 4.7, 32K 5.7, 128K 9.3; batch 8 at 128K 40; batch 128 there 517 (89 %
 * of the read rate); 4 heads, batch 32 at 32K 41, fast 40. NVFP4, batch 128 at 128K 310 (84 %; 395 by groups, whose
 * conversions, 11 operations for 8 elements, half as many a cycle as others, with all else they do once a page and warp
 * take 490 of the 695 cycles of a page), fast 305; batch 8 there 31 (34 by groups).
 */
#include "score_warps_sm90.cuh"
#include "tensor_map.cuh"

enum { MOST_HEADS = 64 };

/* Whether parts that are long enough are the warps', not their group's. */
template <storage STORAGE, bool FAST> constexpr bool BY_WARPS = tile<STORAGE>::NVFP4 && !FAST;

/* Of a group. */
template <storage STORAGE, bool FAST> struct alignas(1024) group_memory {
    static constexpr int SLOTS = tile<STORAGE>::NVFP4 ? 5 : 2; /* more than 2 of 16 KB make the first ones late */
    static_assert(SLOTS <= CUDA_PART_IDS);
    union {
        struct {
            uint8_t ring[SLOTS][tile<STORAGE>::BYTES];
            float part[2][GROUP_WARPS][MOST_HEADS]; /* maxima of the warps */
        };
        warp_ring warps[BY_WARPS<STORAGE, FAST> ? GROUP_WARPS : 1];
    };
};

template <storage STORAGE, bool FAST> struct memory {
    static constexpr int SLOTS = group_memory<STORAGE, FAST>::SLOTS;
    group_memory<STORAGE, FAST> group[GROUPS];
    uint8_t q[FAST ? GROUPS : 0][MOST_HEADS * 128]; /* rows of a tile as operands of FP8 products */
    uint2 table[tile<STORAGE>::NVFP4 ? 256 : 1];
    int32_t absent[GROUPS][SLOTS]; /* the table names no page of the cache: the score is -inf */
    uint64_t full[GROUPS][SLOTS];
    uint32_t touched; /* see score_parts */
};

/* ------------------------------------------------------------------------------------------------ FP8 products */

/* A tile's rows to shared memory, rows of 128 bytes with 128-byte swizzle; by a group. Step c has the elements 32c ..
 * 32c+31 (E4M3) or, as lanes find NVFP4 codes, 32t + 8c .. 8c+3 for t = 0..3 and then those four behind each. */
template <storage STORAGE>
static __device__ inline void stage_queries(const score_job &d, const cuda_tile &t, int rows, uint8_t *q)
{
    for (int i = threadIdx.x % GROUP; i < (rows + COLUMNS - 1) / COLUMNS * COLUMNS * 32; i += GROUP) {
        int row = i / 32, word = i % 32;
        int element = tile<STORAGE>::NVFP4 ? word % 4 * 32 + word / 8 * 8 + word % 8 / 4 * 4 : 4 * word;
        const char *from = query_row(d, t, row);
        *(uint32_t *)(q + row * 128 + ((word / 4 ^ row % 8) << 4) + word % 4 * 4) =
            from ? *(const uint32_t *)(from + element) : 0;
    }
    fence_async_reads();
    barrier_meet(1 + threadIdx.x / GROUP, GROUP);
}

/* The warp's 32 keys as a operands, 16 keys and 32 elements each. */
template <storage STORAGE>
static __device__ inline void load_codes(uint32_t tile_at, uint32_t table, uint32_t one, uint32_t (&a)[2][4][4])
{
    int lane = threadIdx.x % CUDA_WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int first = threadIdx.x / CUDA_WARP % GROUP_WARPS * 32 + 16 * half;
        raw_keys raw;
        if (tile<STORAGE>::NVFP4)
            raw = load_raw(tile_at, tile_at + SCALES, table, first);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if constexpr (tile<STORAGE>::NVFP4) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint4 &codes = raw.codes[r];
                    uint2 x = widen_in_order(c == 0   ? codes.x
                                             : c == 1 ? codes.y
                                             : c == 2 ? codes.z
                                                      : codes.w,
                                             raw.entry[r][c / 2], one);
                    a[half][c][r] = x.x, a[half][c][2 + r] = x.y;
                }
            } else {
                int key = first + lane % 16, chunk = 2 * c + lane / 16;
                load_matrices(a[half][c], tile_at + key * 128 + ((chunk ^ key % 8) << 4));
            }
        }
    }
}

/* The maxima of eight rows, whose matrix descriptor is q, over the warp's keys. */
static __device__ inline void score_codes(const uint32_t (&a)[2][4][4], uint32_t q, float (&best)[2])
{
    float s[8];
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            wgmma_64x8(s + 4 * half, a[half][c], matrix_of_low(q + 2 * c), c);
    wgmma_commit();
    wgmma_wait(s);
#pragma unroll
    for (int i = 0; i < 2; i++) /* fmaxf drops NaN */
        best[i] = fmaxf(fmaxf(s[i], s[2 + i]), fmaxf(s[4 + i], s[6 + i]));
}

/* ------------------------------------------------------------------------------------------------ fetching */

/* Walks a part's pages ahead of the products, from tile to tile. By the first warp of a group, or by all its warps
 * where all threads copy. */
template <storage STORAGE, bool FAST> struct fetcher {
    using T = tile<STORAGE>;
    const int32_t *table;
    int32_t index, base, page, end; /* the tile; its pages: where it was entered, the next one, past the last one */
    int32_t half, left;             /* left: pages of the part */
    int32_t ids, next_ids;          /* lane l: physical pages base + 32n + l, and 32 on */
    bool early;                     /* ids: only the part's first ones are there */

    __device__ int32_t load_id(int32_t of) const
    {
        of += (int32_t)threadIdx.x % CUDA_WARP;
        return of < end ? table[of] : -1;
    }

    __device__ void enter(const score_job &d, const cuda_tile &t, int32_t first)
    {
        base = page = first;
        end = min(history_pages(d.max_pages, t), first + left);
        table = (const int32_t *)(d.page_table + t.request * d.page_table_stride);
        load_ids();
    }

    __device__ void load_ids()
    {
        ids = load_id(base);
        next_ids = load_id(base + CUDA_WARP);
        early = false;
    }

    /* Fills the ring. */
    __device__ void start(const score_job &d, const cuda_extent &p, int32_t first_ids, memory<STORAGE, FAST> &m)
    {
        index = p.index;
        left = p.pages;
        half = 0;
        base = page = p.first_page;
        end = min(history_pages(d.max_pages, p.tile), page + left);
        table = (const int32_t *)(d.page_table + p.tile.request * d.page_table_stride);
        ids = first_ids;
        early = true;
        for (int slot = 0; slot < m.SLOTS && left > 0; slot++)
            next(d, m, slot);
    }

    /* The next tile of keys, into a slot. */
    __device__ void next(const score_job &d, memory<STORAGE, FAST> &m, int slot)
    {
        while (page == end)
            enter(d, d.tiles[++index], 0);
        int group = threadIdx.x / GROUP;
        int32_t physical = __shfl_sync(~0u, ids, (page - base) % CUDA_WARP);
        bool absent = physical < 0 || physical >= d.num_pages;
        uint32_t to = shared_address(m.group[group].ring[slot]), barrier = shared_address(&m.full[group][slot]);
        if (threadIdx.x % GROUP == 0) {
            m.absent[group][slot] = absent;
            if (absent)
                atomicOr(d.error, MSA_ERROR_BIT_PAGE_ID);
        }
        if (!d.bulk || threadIdx.x % GROUP == 0) {
            if (absent)
                barrier_arrive(barrier);
            else if (d.bulk)
                copy_tile<STORAGE>(to, d.k, &d.map, 0, physical, half, barrier);
            else
                copy_tile_together<STORAGE>(to, d.k, 0, physical, half, barrier, threadIdx.x);
        }
        __syncwarp();
        if (++half < T::PER_PAGE)
            return;
        half = 0;
        left--;
        if ((++page - base) % CUDA_WARP == 0) {
            ids = next_ids;
            next_ids = load_id(page + CUDA_WARP);
        }
    }
};

/* ------------------------------------------------------------------------------------------------ products */

/* Where a group is in its ring, and which of its two sets of maxima is next. They go on from tile to tile. */
struct turn {
    int slot, parity, maxima;
};

/* Pages [page, end) of a tile. */
template <storage STORAGE, bool FAST>
static __device__ void score_pages(const score_job &d, const cuda_tile &t, int32_t page, int32_t end,
                                   memory<STORAGE, FAST> &m, fetcher<STORAGE, FAST> &f, turn &at)
{
    using T = tile<STORAGE>;
    int lane = threadIdx.x % CUDA_WARP, warp = uniform(threadIdx.x / CUDA_WARP % GROUP_WARPS),
        group = threadIdx.x / GROUP;
    int rows = t.num_rows * d.heads, own = warp * T::WARP_KEYS;
    uint32_t q[2][8][2];
    auto load_queries_from = [&](int first) {
        load_columns<STORAGE>(query_row(d, t, first + lane / 4), q[0]);
        load_columns<STORAGE>(query_row(d, t, first + lane / 4 + COLUMNS), q[1]);
    };
    if constexpr (FAST)
        stage_queries<STORAGE>(d, t, rows, m.q[group]);
    else
        load_queries_from(0);
    uint32_t one;
    asm("mov.b32 %0, 0x3C003C00;" : "=r"(one)); /* 1, 1: opaque, so that upper_half stays a product */

    /* The last warp writes: lane l the scores of the rows l and l + 32. */
    float *scores[2];
    int32_t history[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = lane + i * CUDA_WARP, query = row / d.heads;
        int32_t position = t.first_position + query;
        history[i] = row < rows && position > 0 ? min(position / MSA_PAGE_SIZE, end) : 0;
        scores[i] =
            (float *)(d.scores + (t.first_row + query) * d.scores_row_stride + row % d.heads * d.scores_head_stride);
    }

#pragma unroll 1
    for (; page < end; page++) {
        float(*part)[MOST_HEADS] = m.group[group].part[at.maxima];
        at.maxima ^= 1;
        bool absent = false;
#pragma unroll 1
        for (int half = 0; half < T::PER_PAGE; half++) {
            barrier_wait(shared_address(&m.full[group][at.slot]), at.parity);
            uint32_t keys = shared_address(m.group[group].ring[at.slot]), table = shared_address(m.table);
            auto give = [&](int first,
                            float(&best)[2]) { /* maxima of the rows first .. first + 7 */
#pragma unroll
                                               for (int j = 0; j < 2; j++)
#pragma unroll
                                                   for (int with = 4; with < CUDA_WARP; with *= 2)
                                                       best[j] = fmaxf(best[j], __shfl_xor_sync(~0u, best[j], with));
                                               float2 *to = (float2 *)&part[warp][first + 2 * lane];
                                               if (lane < 4) {
                                                   float2 before = half ? *to : make_float2(-INFINITY, -INFINITY);
                                                   *to =
                                                       make_float2(fmaxf(before.x, best[0]), fmaxf(before.y, best[1]));
                                               }
            };
            if constexpr (FAST) {
                uint32_t a[2][4][4];
                load_codes<STORAGE>(keys, table, one, a);
                for (int first = 0; first < rows; first += COLUMNS) {
                    float best[2];
                    score_codes(a, matrix_low(shared_address(m.q[group]) + first * 128), best);
                    give(first, best);
                }
            } else {
                for (int first = 0; first < rows; first += TILE_ROWS) {
                    float best[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
                    if (rows > TILE_ROWS)
                        load_queries_from(first);
                    if (rows - first > COLUMNS)
                        score_keys<STORAGE, 2, T::WARP_KEYS>(keys, keys + SCALES, table, one, own, q, best);
                    else
                        score_keys<STORAGE, 1, T::WARP_KEYS>(keys, keys + SCALES, table, one, own, q, best);
                    give(first, best[0]);
                    if (rows - first > COLUMNS)
                        give(first + COLUMNS, best[1]);
                }
            }
            absent = m.absent[group][at.slot];
            barrier_meet(1 + group, GROUP); /* the slot is free, the maxima are there */
            if ((warp == 0 || !d.bulk) && f.left > 0) {
                if (f.early)
                    f.load_ids();
                f.next(d, m, at.slot);
            }
            if (++at.slot == m.SLOTS) {
                at.slot = 0;
                at.parity ^= 1;
            }
        }
        if (warp == GROUP_WARPS - 1)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (page < history[j]) {
                    int row = lane + j * CUDA_WARP;
                    float score = fmaxf(fmaxf(part[0][row], part[1][row]), fmaxf(part[2][row], part[3][row]));
                    scores[j][page] = absent ? -INFINITY : score;
                }
    }
}

/* ------------------------------------------------------------------------------------------------ the kernel */

template <storage STORAGE, bool FAST>
static __global__ void __launch_bounds__(THREADS, 1) score_parts(const __grid_constant__ score_job d)
{
    extern __shared__ __align__(1024) char shared[];
    memory<STORAGE, FAST> &m = *(memory<STORAGE, FAST> *)shared;
    int group = threadIdx.x / GROUP, warp = uniform(threadIdx.x / CUDA_WARP % GROUP_WARPS);
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
    if (threadIdx.x == THREADS - 1) /* brings the parameters while the launch ahead ends */
        m.touched = (uint32_t)((uintptr_t)d.parts ^ (uintptr_t)d.k.data ^ (uintptr_t)d.scores);
    const cuda_part &own = d.parts[group * gridDim.x + blockIdx.x];
    if (threadIdx.x % GROUP == 0)
        prefetch_l2(&own);
    __syncthreads();
    grid_wait();
    grid_release();
    int lane = threadIdx.x % CUDA_WARP;
    int32_t first_ids = lane < CUDA_PART_IDS ? own.ids[lane] : -1;
    cuda_extent p = own.all;
    if constexpr (BY_WARPS<STORAGE, FAST>)
        if (p.pages >= MANY_PAGES && d.bulk && d.heads <= TILE_ROWS) {
            score_by_warp(d, p, first_ids, m.group[group].warps[warp], shared_address(m.table));
            return;
        }
    fetcher<STORAGE, FAST> f = {};
    if (warp == 0 || !d.bulk)
        f.start(d, p, first_ids, m);
    turn at = {0, 0, 0};
    cuda_tile t = p.tile;
    while (p.pages > 0) {
        int32_t pages = min(history_pages(d.max_pages, t) - p.first_page, p.pages);
        score_pages<STORAGE, FAST>(d, t, p.first_page, p.first_page + pages, m, f, at);
        p.pages -= pages;
        p.first_page = 0;
        p.index++;
        if (p.pages > 0)
            t = d.tiles[p.index];
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

/* Tiles never get larger with more heads: workspaces grow with them. */
static void plan_decode(struct cuda_index *job)
{
    int32_t heads = job->desc.num_index_heads;
    job->step.query_tile = heads <= TILE_ROWS ? TILE_ROWS / heads : 1;
    job->step.num_parts = job->num_sms * GROUPS;
}

template <storage STORAGE, bool FAST = false>
static cudaError_t launch_parts(const struct cuda_index *job, cudaStream_t stream)
{
    using T = tile<STORAGE>;
    const msa_index_args &a = job->args;
    score_job d = {};
    d.parts = job->step.parts;
    d.tiles = job->step.tiles;
    d.page_table = (const char *)job->step.page_table;
    d.index_q = (const char *)a.index_q;
    d.page_table_stride = job->step.page_table_stride;
    d.index_q_row_stride = a.index_q_row_stride;
    d.index_q_head_stride = a.index_q_head_stride;
    d.heads = job->desc.num_index_heads;
    d.max_pages = job->step.max_pages;
    d.k = tile_source{(const uint8_t *)a.index_k,  (const uint8_t *)a.index_k_scale,
                      a.index_k_page_stride,       0,
                      a.index_k_scale_page_stride, 0,
                      a.index_k_token_stride,      a.index_k_scale_token_stride};
    d.scores = (char *)a.scores;
    d.scores_row_stride = a.scores_row_stride;
    d.scores_head_stride = a.scores_head_stride;
    d.error = job->step.error;
    d.num_pages = (int32_t)(a.num_pages < INT32_MAX ? a.num_pages : INT32_MAX); /* ids are 32-bit */
    tensor_layout k = {a.index_k, a.index_k_token_stride, 0, a.index_k_page_stride, 1, a.num_pages};
    tensor_layout scale = {a.index_k_scale, a.index_k_scale_token_stride, 0, a.index_k_scale_page_stride, 1,
                           a.num_pages};
    d.bulk = T::NVFP4 ? is_dense(k, 64) && is_dense(scale, 8)
                      : map_tensor(job->encode_tensor, &d.map, k, T::HALF ? 256 : 128, T::KEYS);
    auto kernel = score_parts<STORAGE, FAST>;
    constexpr int bytes = sizeof(memory<STORAGE, FAST>);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return error ? error : launch(kernel, (unsigned)job->num_sms, THREADS, bytes, true, stream, d);
}

static cudaError_t run_decode(const struct cuda_index *job, cudaStream_t stream)
{
    if (job->desc.k_dtype == MSA_BF16)
        return launch_parts<STORAGE_HALF>(job, stream);
    bool fast = job->desc.precision == MSA_PRECISION_FAST;
    if (job->desc.k_dtype == MSA_E4M3)
        return fast ? launch_parts<STORAGE_E4M3, true>(job, stream) : launch_parts<STORAGE_E4M3>(job, stream);
    return fast ? launch_parts<STORAGE_NVFP4_E4M3, true>(job, stream) : launch_parts<STORAGE_NVFP4_E4M3>(job, stream);
}

const struct cuda_index_kernel score_decode_sm90 = {plan_decode, nullptr, true, nullptr, run_decode};
