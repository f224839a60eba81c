/* SPDX-License-Identifier: MIT
 *
 * maxima_sm90.cuh - the largest element of a lane's rows in the accumulator of a 64x128 product.
 */
#ifndef MSA_CUDA_MAXIMA_SM90_CUH
#define MSA_CUDA_MAXIMA_SM90_CUH

#include "ptx_sm90.cuh"

#include <math.h>

/* A lane's maxima of its two rows. As integers, floats of which one is not negative have the right maximum, three at a
 * time; a result that is negative or a NaN sends the warp to the plain way, where fmaxf drops NaN. */
template <int SUMS> static __device__ __forceinline__ void lane_maxima(const float (&sum)[SUMS], float (&best)[2])
{
    int a[2][2];
    auto bits = [&](int row, int i) { return __float_as_int(sum[4 * (i / 2) + 2 * row + i % 2]); }; /* i: 0..31 */
#pragma unroll
    for (int i = 1; i < 15; i += 2) /* four chains side by side, as each step waits for the one before it */
#pragma unroll
        for (int chain = 0; chain < 4; chain++) {
            int row = chain % 2, at = 16 * (chain / 2);
            int so_far = i == 1 ? bits(row, at) : a[row][chain / 2];
            a[row][chain / 2] = __vimax3_s32(so_far, bits(row, at + i), bits(row, at + i + 1));
        }
    int first = __vimax3_s32(a[0][0], a[0][1], max(bits(0, 15), bits(0, 31)));
    int second = __vimax3_s32(a[1][0], a[1][1], max(bits(1, 15), bits(1, 31)));
    best[0] = __int_as_float(first);
    best[1] = __int_as_float(second);
    if (__any_sync(~0u, max((uint32_t)first, (uint32_t)second) > 0x7F800000)) { /* above +inf: NaN or negative */
        best[0] = best[1] = -INFINITY;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            best[i / 2 % 2] = fmaxf(best[i / 2 % 2], sum[i]);
    }
}

#endif
