/* SPDX-License-Identifier: MIT
 *
 * decode_merge_sm90.cuh - a row's results from those of the warps and groups that shared its pages: through shared
 * memory, added up in a fixed order, and written.
 */
#ifndef MSA_CUDA_DECODE_MERGE_SM90_CUH
#define MSA_CUDA_DECODE_MERGE_SM90_CUH

#include "decode_page_sm90.cuh"

/* Where four elements of a warp's O lie in its part: rows of 32 chunks of 16 bytes, permuted so that neither the
 * writers nor the readers meet in a bank. */
static __device__ inline int chunk_place(int row, int quad, int j)
{
    return row * (MSA_HEAD_DIM / 4) + 8 * quad + (j ^ (2 * quad + row % 2));
}

/* The chunk of d that lies at place `place` of a row. */
static __device__ inline int chunk_at(int row, int place)
{
    return place / 8 * 8 + (place % 8 ^ (2 * (place / 8) + row % 2));
}

static __device__ inline void write_part(const state &o, float4 *part)
{
    int lane = thread_now() % CUDA_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) { /* elements 32t + 4j and the next three */
            int n = 4 * (j % 4), i = 2 * r + j / 4;
            part[chunk_place(g + 8 * r, t, j)] =
                make_float4(o.out[n][i], o.out[n + 1][i], o.out[n + 2][i], o.out[n + 3][i]);
        }
}

/* The warp's part of its group's results, for merge_groups. */
template <storage STORAGE> static __device__ inline void give_state(const state &o, group_memory<STORAGE> &group)
{
    int lane = thread_now() % CUDA_WARP, part = thread_now() / CUDA_WARP % GROUP_WARPS;
    write_part(o, (float4 *)((char *)group.ring + part * PART_BYTES));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = o.sum[r] + __shfl_xor_sync(~0u, o.sum[r], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) {
            group.sum[part][lane / 4 + 8 * r] = sum;
            group.reference[lane / 4 + 8 * r] = o.reference[r]; /* the same of all warps */
        }
    }
}

/* Of a head: four elements, and the sum, relative to the reference. */
struct merged {
    float4 out;
    float reference, sum;
};

/* The factor that moves a state to another reference; one that saw nothing, -inf, stays 0. */
static __device__ inline float move_reference(float from, float to, float scale)
{
    return from == to ? 1.0f : exp2_approx((from - to) * scale);
}

static __device__ inline void add_weighted(merged &x, float weight, float4 out, float sum)
{
    x.out.x = fmaf(weight, out.x, x.out.x);
    x.out.y = fmaf(weight, out.y, x.out.y);
    x.out.z = fmaf(weight, out.z, x.out.z);
    x.out.w = fmaf(weight, out.w, x.out.w);
    x.sum = fmaf(weight, sum, x.sum);
}

/* One warp, a lane a chunk: row `row` over the warps of `groups` groups. */
template <storage STORAGE>
static __device__ __forceinline__ merged merge_groups(const group_memory<STORAGE> *group, int groups, int row,
                                                      float scale)
{
    int lane = thread_now() % CUDA_WARP;
    merged x = {make_float4(0, 0, 0, 0), group[0].reference[row], 0};
#pragma unroll
    for (int g = 1; g < groups; g++)
        x.reference = fmaxf(x.reference, group[g].reference[row]);
#pragma unroll
    for (int g = 0; g < groups; g++) {
        float weight = groups == 1 ? 1.0f : move_reference(group[g].reference[row], x.reference, scale);
#pragma unroll
        for (int warp = 0; warp < GROUP_WARPS; warp++)
            add_weighted(
                x, weight,
                *((const float4 *)((const char *)group[g].ring + warp * PART_BYTES) + row * (MSA_HEAD_DIM / 4) + lane),
                group[g].sum[warp][row]);
    }
    return x;
}

/* Elements d ... d + 3 of head `head` of the work's 16. */
template <bool E4M3>
static __device__ inline void write_result(const decode_job &job, int64_t row, int kv_head, int head, int d,
                                           const merged &x, float scale, float out_scale)
{
    if (head >= job.ratio)
        return;
    int64_t index = (int64_t)kv_head * job.ratio + head;
    float factor = x.sum == 0 ? 0.0f : out_scale / x.sum; /* 0: the row saw nothing */
    float a = finish(x.out.x, factor), b = finish(x.out.y, factor), c = finish(x.out.z, factor),
          e = finish(x.out.w, factor);
    *(uint2 *)(job.out + row * job.out_row_stride + index * job.out_head_stride + 2 * d) =
        job.bf16_out ? make_uint2(pack_pair<OPERAND_BF16>(a, b), pack_pair<OPERAND_BF16>(c, e))
                     : make_uint2(pack_pair<OPERAND_F16>(a, b), pack_pair<OPERAND_F16>(c, e));
    if (job.lse && d == 0)
        *(float *)(job.lse + row * job.lse_row_stride + index * job.lse_head_stride) =
            x.sum == 0 ? -INFINITY : x.reference * scale * 0.693147181f + logf(x.sum / (E4M3 ? 448.0f : 1.0f));
}

#endif
