/* SPDX-License-Identifier: MIT
 *
 * page.cuh - one page of one head, from any storage format to 16-bit tensor-core operands in shared memory, and its dot
 * products with query rows.
 *
 * A block loads a page in two steps, so that what lies between them hides the memory's latency: `load_page` reads the
 * bytes into registers, 16 a chunk; `store_page` widens them to `operand` elements and writes rows of 128 of them, 272
 * bytes apart (17 chunks: the eight rows that ldmatrix reads at once lie in different banks). Rows from `keys` on are
 * written as zeros and never read: what they hold may be NaN, and 0 * NaN would reach a result.
 */
#ifndef MSA_CUDA_PAGE_CUH
#define MSA_CUDA_PAGE_CUH

#include "number.cuh"

/* NVFP4 has two meanings, as on the CPU: with E4M3 queries the product of code and scale rounds to E4M3. */
enum storage { STORAGE_HALF, STORAGE_E4M3, STORAGE_NVFP4_E4M3, STORAGE_NVFP4_EXACT };

enum { PAGE_ROW = MSA_HEAD_DIM + 8 }; /* elements between two rows in shared memory */

struct page_rows {
    const uint8_t *data;
    int64_t token_stride;
    const uint8_t *scale; /* NVFP4 */
    int64_t scale_token_stride;
    bool scale_quad;
};

template <storage STORAGE> struct chunk {
    static constexpr int ELEMENTS = STORAGE == STORAGE_HALF ? 8 : STORAGE == STORAGE_E4M3 ? 16 : 32; /* in 16 bytes */
    static constexpr int IN_ROW = MSA_HEAD_DIM / ELEMENTS;
    static constexpr bool SCALED = STORAGE == STORAGE_NVFP4_E4M3 || STORAGE == STORAGE_NVFP4_EXACT;
};

/* A thread's part of a page: chunk c of token t where t * IN_ROW + c = i * THREADS + threadIdx.x. */
template <storage STORAGE, int THREADS> struct page_part {
    static constexpr int CHUNKS = MSA_PAGE_SIZE * chunk<STORAGE>::IN_ROW / THREADS;
    uint4 data[CHUNKS];
    uint8_t scale[chunk<STORAGE>::SCALED ? CHUNKS : 1][2];
};

template <storage STORAGE, int THREADS>
static __device__ inline void load_page(const page_rows &rows, int keys, page_part<STORAGE, THREADS> &part)
{
    using C = chunk<STORAGE>;
#pragma unroll
    for (int i = 0; i < part.CHUNKS; i++) {
        int token = (i * THREADS + (int)threadIdx.x) / C::IN_ROW, c = (i * THREADS + (int)threadIdx.x) % C::IN_ROW;
        part.data[i] = make_uint4(0, 0, 0, 0);
        if (C::SCALED)
            part.scale[i][0] = part.scale[i][1] = 0;
        if (token < keys) {
            part.data[i] = *(const uint4 *)(rows.data + token * rows.token_stride + c * 16);
            if (C::SCALED && rows.scale_quad) {
                const uint8_t *scale = rows.scale + token / 4 * 32 + token % 4;
                part.scale[i][0] = scale[(2 * c) * 4];
                part.scale[i][1] = scale[(2 * c + 1) * 4];
            } else if (C::SCALED) {
                const uint8_t *scale = rows.scale + token * rows.scale_token_stride;
                part.scale[i][0] = scale[2 * c];
                part.scale[i][1] = scale[2 * c + 1];
            }
        }
    }
}

template <storage STORAGE, operand TYPE, int THREADS>
static __device__ inline void store_page(const page_part<STORAGE, THREADS> &part, uint16_t *page)
{
    using C = chunk<STORAGE>;
#pragma unroll
    for (int i = 0; i < part.CHUNKS; i++) {
        int token = (i * THREADS + (int)threadIdx.x) / C::IN_ROW, c = (i * THREADS + (int)threadIdx.x) % C::IN_ROW;
        uint4 *to = (uint4 *)(page + token * PAGE_ROW + c * C::ELEMENTS);
        const uint4 &data = part.data[i];
        if constexpr (STORAGE == STORAGE_HALF) {
            to[0] = data;
        } else if constexpr (STORAGE == STORAGE_E4M3) {
            to[0] = widen_e4m3_8<TYPE>(data.x, data.y);
            to[1] = widen_e4m3_8<TYPE>(data.z, data.w);
        } else {
            constexpr bool ROUNDED = STORAGE == STORAGE_NVFP4_E4M3;
            to[0] = widen_nvfp4_8<TYPE, ROUNDED>(data.x, part.scale[i][0]);
            to[1] = widen_nvfp4_8<TYPE, ROUNDED>(data.y, part.scale[i][0]);
            to[2] = widen_nvfp4_8<TYPE, ROUNDED>(data.z, part.scale[i][1]);
            to[3] = widen_nvfp4_8<TYPE, ROUNDED>(data.w, part.scale[i][1]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ dot products */

/* Elements d and d+1 of a query; NULL: zeros. */
template <bool E4M3> static __device__ inline uint32_t load_query_pair(const char *q, int d)
{
    if (!q)
        return 0;
    return E4M3 ? e4m3_pair_to_f16(*(const uint16_t *)(q + d)) : *(const uint32_t *)(q + 2 * d);
}

/* 16 query rows as the mma's a operand, 16 elements of d each; a lane's rows are lane/4 and that + 8. */
template <bool E4M3> static __device__ inline void load_queries(const char *const (&rows)[2], uint32_t (&q)[8][4])
{
    int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            q[k][i] = load_query_pair<E4M3>(rows[i % 2], 16 * k + 8 * (i / 2) + column);
}

/* 16 query rows times 8*TILES keys of a stored page from first_key on; d ascending by 16. */
template <operand TYPE, int TILES>
static __device__ inline void dot_keys(const uint16_t *page, int first_key, const uint32_t (&q)[8][4],
                                       float (&sum)[TILES][4])
{
    int lane = threadIdx.x % CUDA_WARP;
#pragma unroll
    for (int n = 0; n < TILES; n++)
        sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
#pragma unroll
    for (int k = 0; k < 8; k += 2)
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            uint32_t b[4];
            load_matrices(b,
                          shared_address(page + (first_key + 8 * n + lane % 8) * PAGE_ROW + 16 * k + 8 * (lane / 8)));
            mma_16x8x16<TYPE>(sum[n], q[k], b[0], b[1]);
            mma_16x8x16<TYPE>(sum[n], q[k + 1], b[2], b[3]);
        }
}

#endif
