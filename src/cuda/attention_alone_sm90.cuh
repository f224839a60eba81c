/* SPDX-License-Identifier: MIT
 *
 * attention_alone_sm90.cuh - attend_page of attention_sm90.cuh in two steps, for E4M3 queries: one warpgroup makes P, a
 * second one has the results. The same numbers enter the same sums in the same order, so that a row's bits are the
 * same. P goes through shared memory as an operand there, with what the rows' sums need of the page.
 */
#ifndef MSA_CUDA_ATTENTION_ALONE_SM90_CUH
#define MSA_CUDA_ATTENTION_ALONE_SM90_CUH

#include "attention_sm90.cuh"
#include "ptx_bulk_sm90.cuh"

/* What a lane leaves for the lane that has its rows. */
struct alignas(16) page_sums {
    float max[2], sum[2]; /* as in row_state; the sum relative to the maximum */
};

/* P to shared memory, 64 rows of 128 bytes, swizzled, by the warp with number `warp`. */
static __device__ __forceinline__ void store_probabilities(const uint32_t (&p)[16], uint32_t to, uint32_t warp)
{
    uint32_t lane = thread_now() % CUDA_WARP, row = lane / 4;
    to += (warp * WARP_ROWS + row) * 128 + lane % 4 * 4;
#pragma unroll
    for (uint32_t i = 0; i < 16; i++)
        store_shared_32(to + i % 2 * (8 * 128) + ((i / 2 ^ row) * 16), p[i]);
}

/* Rows' references and sums meet a page; weight: of its products. */
static __device__ __forceinline__ void weigh_page(const page_sums &page, float scale, const page_view &view,
                                                  row_state &o, float (&weight)[2])
{
    if (!__all_sync(~0u, (page.max[0] - o.reference[0]) * scale <= MARGIN &&
                             (page.max[1] - o.reference[1]) * scale <= MARGIN))
        raise_reference(page.max, scale, view, o);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        weight[r] = exp2_approx((page.max[r] - o.reference[r]) * scale);
        float all = fmaf(page.sum[r], weight[r], o.sum[r]);
        o.sum[r] = view.selected[r] ? all : o.sum[r];
    }
}

#endif
