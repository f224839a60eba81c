/* SPDX-License-Identifier: MIT
 *
 * score_decode_sm90.cuh - what the kernel of score_decode_sm90.cu gets, and exact products of keys in shared memory.
 */
#ifndef MSA_CUDA_SCORE_DECODE_SM90_CUH
#define MSA_CUDA_SCORE_DECODE_SM90_CUH

#include "decode_sm90.cuh"
#include "step.cuh"

#include <math.h>

enum { GROUPS = 4, THREADS = GROUPS * GROUP, TILE_ROWS = 16, COLUMNS = 8 /* of a product */ };

/* What the kernel needs of a job, in the order in which it does: a launch's first look at each line of 64 bytes of its
 * parameters takes as long as one at memory. */
struct score_job {
    const cuda_part *parts;
    const cuda_tile *tiles;
    const char *page_table, *index_q;
    int64_t page_table_stride, index_q_row_stride, index_q_head_stride;
    int32_t heads, max_pages;
    tile_source k;
    char *scores;
    int64_t scores_row_stride, scores_head_stride;
    uint32_t *error;
    int32_t num_pages;
    bool bulk;       /* tiles are copied by the copy engine */
    CUtensorMap map; /* E4M3, BF16 */
};

/* ------------------------------------------------------------------------------------------------ queries */

/* Which row of the tile a column is; NULL: none. */
static __device__ inline const char *query_row(const score_job &d, const cuda_tile &tile, int column)
{
    int heads = d.heads, query = column / heads, head = column % heads;
    return query < tile.num_rows
               ? d.index_q + (tile.first_row + query) * d.index_q_row_stride + head * d.index_q_head_stride
               : nullptr;
}

/* Eight rows as the products' b operands: lane (g, t) holds of row g, step c, the elements 16c + 4t .. 4t+3 (E4M3),
 * 32t + 4c .. 4c+3 (NVFP4) or 16c + 2t, +1, +8, +9 (16 bits). */
template <storage STORAGE> static __device__ inline void load_columns(const char *row, uint32_t (&q)[8][2])
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        if constexpr (tile<STORAGE>::HALF) {
            q[c][0] = row ? *(const uint32_t *)(row + 32 * c + 4 * t) : 0;
            q[c][1] = row ? *(const uint32_t *)(row + 32 * c + 16 + 4 * t) : 0;
        } else if constexpr (tile<STORAGE>::NVFP4) { /* in widen_key's order */
            uint32_t codes = row ? *(const uint32_t *)(row + 32 * t + 4 * c) : 0;
            widen_4(permute(codes, codes, 0x3120), q[c][0], q[c][1]);
        } else {
            widen_4(row ? *(const uint32_t *)(row + 16 * c + 4 * t) : 0, q[c][0], q[c][1]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ one tile of keys */

/* NVFP4: what a lane (g, t) takes of the keys first_key + g and + 8: 32 codes from 32t on, and the table entries of
 * their two blocks. */
struct raw_keys {
    uint4 codes[2];
    uint2 entry[2][2];
};

static __device__ inline raw_keys load_raw(uint32_t tile_at, uint32_t scales, uint32_t table, int first_key)
{
    int lane = threadIdx.x % CUDA_WARP, g = lane / 4, t = lane % 4;
    raw_keys raw;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t key = (uint32_t)(first_key + 8 * r + g);
        raw.codes[r] = load_shared_128(tile_at + key * 64 + 16 * t);
#pragma unroll
        for (int block = 0; block < 2; block++)
            raw.entry[r][block] = load_shared_64(table + load_shared_8(scales + key * 8 + 2 * t + block) * 8);
    }
    return raw;
}

/* Steps 2c and 2c + 1 of them, as a operands. */
static __device__ inline void widen_raw(const raw_keys &raw, uint32_t one, int c, uint32_t (&a)[2][4])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint4 &codes = raw.codes[r];
        uint32_t pair[4]; /* elements (0,2) (4,6) (1,3) (5,7) */
        widen_key(c == 0 ? codes.x : c == 1 ? codes.y : c == 2 ? codes.z : codes.w, raw.entry[r][c / 2], one, pair);
        a[0][r] = pair[0], a[0][2 + r] = pair[2];
        a[1][r] = pair[1], a[1][2 + r] = pair[3];
    }
}

/* E4M3, 16 bits: 16 keys, steps 2c and 2c + 1 (8 bits) or step c (16 bits), as a operands. */
template <storage STORAGE>
static __device__ inline void load_rows(uint32_t tile_at, int first_key, int c, uint32_t (&a)[2][4])
{
    using T = tile<STORAGE>;
    /* E4M3: matrices of keys 0-7 and 8-15 at chunk 2c, then at 2c + 1; 16 bits: the two chunks of a step. */
    int lane = threadIdx.x % CUDA_WARP, key = first_key + lane % 16, chunk = 2 * c + lane / 16;
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

/* The maxima of COLUMN_BLOCKS * 8 rows over KEYS keys from `first` on; a lane has those of the rows 2t and 2t + 1, over
 * its keys. scales: NVFP4. ONE_ROW: only row 0 counts. */
template <storage STORAGE, int COLUMN_BLOCKS, int KEYS, bool ONE_ROW = false>
static __device__ inline void score_keys(uint32_t tile_at, uint32_t scales, uint32_t table, uint32_t one, int first,
                                         const uint32_t (&q)[2][8][2], float (&best)[2][2])
{
    using T = tile<STORAGE>;
    constexpr operand TYPE = T::HALF ? OPERAND_BF16 : OPERAND_F16;
#pragma unroll
    for (int rows = 0; rows < KEYS; rows += 16) {
        float s[COLUMN_BLOCKS][4] = {};
        raw_keys raw;
        if (T::NVFP4)
            raw = load_raw(tile_at, scales, table, first + rows);
#pragma unroll
        for (int c = 0; c < (T::HALF ? 8 : 4); c++) {
            uint32_t a[2][4];
            if constexpr (T::NVFP4)
                widen_raw(raw, one, c, a);
            else
                load_rows<STORAGE>(tile_at, first + rows, c, a);
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
            for (int i = 0; i < (ONE_ROW ? 1 : 2); i++) /* fmaxf drops NaN */
                best[n][i] = fmaxf(best[n][i], fmaxf(s[n][i], s[n][2 + i]));
    }
}

#endif
