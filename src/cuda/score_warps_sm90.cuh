/* SPDX-License-Identifier: MIT
 *
 * score_warps_sm90.cuh - long parts of score_decode_sm90.cu with NVFP4 keys in `exact`, which are bound by conversions:
 * a warp takes whole pages, so that what there is to do once a page is done by one warp, not four, and none waits for
 * others. The products, and so the bits, are those of a group.
 *
 * The four warps of a group take a part's pages in turn. A warp's ring has three halves of pages: 4 KB of codes, 512
 * bytes of scales. A half's record says what it is, so that only the fetching side walks the tiles.
 */
#ifndef MSA_CUDA_SCORE_WARPS_SM90_CUH
#define MSA_CUDA_SCORE_WARPS_SM90_CUH

#include "ring_sm90.cuh"
#include "score_decode_sm90.cuh"

enum {
    MANY_PAGES = 8, /* of a part: fewer are faster by the whole group */
    HALVES = 3,     /* of a ring; 16 rings fill the shared memory */
    HALF_KEYS = MSA_PAGE_SIZE / 2,
    HALF_CODES = HALF_KEYS * 64,
    HALF_BYTES = HALF_CODES + HALF_KEYS * 8
};

/* What is in a place of a ring. */
struct half_record {
    int32_t page; /* of the tile; -1: there are no more */
    int32_t tile;
    bool absent; /* the table names no page of the cache: the score is -inf */
};

struct alignas(16) warp_ring {
    uint8_t half[HALVES][HALF_BYTES];
    half_record record[HALVES];
    uint64_t full[HALVES];
};

/* A warp's walk over every fourth page of its group's part, fetching. */
struct warp_fetcher {
    const int32_t *table;
    int32_t index, page, end, left; /* the tile, its next page and past its last one; pages of the part from there on */
    int32_t ids, next_ids, number;  /* lane l: physical pages of the walk, l and 32 + l from `number` 0 on */
    int half;

    __device__ __forceinline__ int32_t load_id(int32_t of) const
    {
        of = page + (of + (int32_t)threadIdx.x % CUDA_WARP) * GROUP_WARPS;
        return of < end ? table[of] : -1;
    }

    __device__ __forceinline__ void load_ids(void)
    {
        ids = load_id(0);
        next_ids = load_id(CUDA_WARP);
        number = 0;
    }

    __device__ __forceinline__ void set_tile(const score_job &d, const cuda_tile &t)
    {
        end = history_pages(d.max_pages, t);
        table = (const int32_t *)(d.page_table + t.request * d.page_table_stride);
    }

    /* `pages` further on. Whether that is in another tile. */
    __device__ __forceinline__ bool skip(const score_job &d, int32_t pages)
    {
        bool other = false;
        left -= pages;
        page += pages;
        while (left > 0 && page >= end) {
            page -= end;
            set_tile(d, d.tiles[++index]);
            other = true;
        }
        return other;
    }

    /* Fills the ring. */
    __device__ __forceinline__ void start(const score_job &d, const cuda_extent &p, int32_t first_ids, warp_ring &m)
    {
        int warp = threadIdx.x / CUDA_WARP % GROUP_WARPS, lane = threadIdx.x % CUDA_WARP;
        index = p.index;
        page = p.first_page;
        left = p.pages;
        half = 0;
        set_tile(d, p.tile);
        ids =
            __shfl_sync(~0u, first_ids, (warp + lane * GROUP_WARPS) % CUDA_WARP); /* enough for the ring's two pages */
        number = 0;
        if (skip(d, warp))
            load_ids();
        for (int slot = 0; slot < HALVES; slot++)
            next(d, m, slot);
        if (left > 0)
            load_ids();
    }

    /* The next half of a page, to a place of the ring. */
    __device__ __forceinline__ void next(const score_job &d, warp_ring &m, int slot)
    {
        int32_t physical = __shfl_sync(~0u, ids, number);
        bool absent = physical < 0 || physical >= d.num_pages;
        if (threadIdx.x % CUDA_WARP == 0) {
            m.record[slot] = half_record{left > 0 ? page : -1, index, absent};
            uint32_t to = shared_address(m.half[slot]), barrier = shared_address(m.full + slot);
            if (left > 0 && absent) {
                atomicOr(d.error, MSA_ERROR_BIT_PAGE_ID);
                barrier_arrive(barrier);
            } else if (left > 0) {
                barrier_expect(barrier, HALF_BYTES);
                copy_bulk(to, d.k.data + physical * d.k.page_stride + half * HALF_CODES, HALF_CODES, barrier);
                copy_bulk(to + HALF_CODES,
                          d.k.scale + physical * d.k.scale_page_stride + half * (HALF_BYTES - HALF_CODES),
                          HALF_BYTES - HALF_CODES, barrier);
            }
        }
        __syncwarp();
        half ^= 1;
        if (half || left <= 0)
            return;
        if (skip(d, GROUP_WARPS)) {
            load_ids();
        } else if (++number == CUDA_WARP) {
            ids = next_ids;
            next_ids = load_id(CUDA_WARP);
            number = 0;
        }
    }
};

/* A warp's pages of its group's part. */
static __device__ __forceinline__ void score_by_warp(const score_job &d, const cuda_extent &p, int32_t first_ids,
                                                     warp_ring &m, uint32_t table)
{
    int lane = threadIdx.x % CUDA_WARP;
    if (lane == 0) {
        for (int i = 0; i < HALVES; i++)
            barrier_init(shared_address(m.full + i), 1);
        fence_barriers();
    }
    __syncwarp();
    warp_fetcher f = {};
    f.start(d, p, first_ids, m);
    uint32_t one, q[2][8][2];
    asm("mov.b32 %0, 0x3C003C00;" : "=r"(one)); /* 1, 1: opaque, so that upper_half stays a product */
    int32_t index = -1, rows = 0, history = 0;
    char *scores = nullptr;
    ring_place<HALVES> at = {0};
#pragma unroll 1
    for (;;) {
        half_record record = m.record[at.stage()];
        if (record.page < 0)
            break;
        if (record.tile != index) {
            index = record.tile;
            cuda_tile t = d.tiles[index];
            rows = t.num_rows * d.heads;
            load_columns<STORAGE_NVFP4_E4M3>(query_row(d, t, lane / 4), q[0]);
            load_columns<STORAGE_NVFP4_E4M3>(query_row(d, t, lane / 4 + COLUMNS), q[1]);
            int row = lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2; /* that the lane writes: it has it anyway */
            int query = row / d.heads, position = t.first_position + query;
            history = row < rows && position > 0 ? position / MSA_PAGE_SIZE : 0;
            scores = d.scores + (t.first_row + query) * d.scores_row_stride + row % d.heads * d.scores_head_stride;
        }
        float best[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            uint32_t keys = shared_address(m.half[at.stage()]), scales = keys + HALF_CODES;
            barrier_wait(shared_address(m.full + at.stage()), at.parity());
            if (rows > COLUMNS)
                score_keys<STORAGE_NVFP4_E4M3, 2, HALF_KEYS>(keys, scales, table, one, 0, q, best);
            else if (rows > 1)
                score_keys<STORAGE_NVFP4_E4M3, 1, HALF_KEYS>(keys, scales, table, one, 0, q, best);
            else
                score_keys<STORAGE_NVFP4_E4M3, 1, HALF_KEYS, true>(keys, scales, table, one, 0, q, best);
            __syncwarp(); /* all have read */
            f.next(d, m, (int)at.stage());
            at.advance();
        }
#pragma unroll
        for (int with = 4; with < CUDA_WARP; with *= 2)
#pragma unroll
            for (int i = 0; i < 4; i++)
                best[i / 2][i % 2] = fmaxf(best[i / 2][i % 2], __shfl_xor_sync(~0u, best[i / 2][i % 2], with));
        float own_block[2] = {lane < COLUMNS ? best[0][0] : best[1][0], lane < COLUMNS ? best[0][1] : best[1][1]};
        if (record.page < history)
            ((float *)scores)[record.page] = record.absent ? -INFINITY : (lane & 4 ? own_block[1] : own_block[0]);
    }
}

#endif
