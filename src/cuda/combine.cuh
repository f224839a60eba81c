/* SPDX-License-Identifier: MIT
 *
 * combine.cuh - what the forms of combine and merge share, so that their bits agree: which states of a (row, head)
 * count, their weights, and the sum of their elements.
 *
 *   M = max lse_s, w_s = exp(lse_s - M), lse = M + log(sum w_s), out = sum (w_s / sum w) * o_s      (s ascending, FP32)
 * An empty state (lse -inf or +inf, or past the row's count) is left out, its o unread; a NaN lse makes the row NaN.
 * Splits of an attention kernel give maximum and sum apart: w_s = sum_s * 2^(max_s - M). o_s may still have to
 * be divided by sum_s.
 */
#ifndef MSA_CUDA_COMBINE_CUH
#define MSA_CUDA_COMBINE_CUH

#include "number.cuh"

/* The states of a (row, head) that are in use. */
static __device__ inline int count_states(const merge_job &job, int64_t row, int32_t head)
{
    if (!job.split_counts)
        return job.num_states;
    int32_t kv_head = head / (job.num_q_heads / job.num_kv_heads);
    int32_t count = *(const int32_t *)((const char *)job.split_counts + row * job.split_counts_row_stride +
                                       kv_head * job.split_counts_head_stride);
    return count < 0 ? 0 : count < job.num_states ? count : job.num_states;
}

/* The same; -1: the row and head are left as they are. */
static __device__ inline int states_of(const cuda_merge &merge, int64_t row, int32_t head)
{
    const merge_job &job = merge.job;
    if (merge.rows && merge.rows[row].request < 0)
        return -1;
    if (merge.requests) {
        int32_t request = merge.rows[row].request, kv_head = head / (job.num_q_heads / job.num_kv_heads);
        const int32_t *count = (const int32_t *)((const char *)job.split_counts + row * job.split_counts_row_stride +
                                                 kv_head * job.split_counts_head_stride);
        if (request < merge.requests[0] || request >= merge.requests[1] || *count < 0)
            return -1;
    }
    return count_states(job, row, head);
}

/* Maximum of two LSEs; NaN wins. */
static __device__ inline float lse_max(float x, float y)
{
    return y > x || isnan(y) ? y : x;
}

/* A state's weight before the division by their sum. Infinite: empty. */
static __device__ inline float state_weight(float lse, float scale, float max, bool sums)
{
    return isinf(lse) ? 0.0f : (sums ? exp2f(lse - max) : expf(lse - max)) * scale;
}

/* What a state's o is multiplied with: its weight over the sum of all; negative: empty. */
static __device__ inline float state_share(const cuda_merge &merge, float lse, float weight, float max, float sum)
{
    if (merge.divides)
        weight = exp2f(lse - max);
    return isinf(lse) ? -1.0f : weight / sum;
}

/* sum is 0 only if all are empty. */
static __device__ inline float merged_lse(const cuda_merge &merge, float max, float sum, bool sums)
{
    if (merge.divides)
        sum /= exp2_approx(merge.log2_one);
    return sum == 0 ? -INFINITY : (sums ? max * 0.693147181f : max) + logf(sum);
}

/* The last steps to a result. An infinite value that the row sees gives NaN, as every other non-finite input does. */
template <int N> static __device__ inline void finish_merged(const cuda_merge &merge, int32_t head, float *out)
{
    if (!merge.divides)
        return;
    int32_t kv_head = head / (merge.job.num_q_heads / merge.job.num_kv_heads);
    float factor = merge.global_factor ? *merge.global_factor : 1.0f;
    if (merge.factor)
        factor *= *(const float *)((const char *)merge.factor + kv_head * merge.factor_stride);
#pragma unroll
    for (int i = 0; i < N; i++)
        out[i] = (out[i] + (out[i] - out[i])) * factor;
}

/* Element i of 16-byte chunks of a state. */
template <msa_dtype DTYPE> static __device__ inline float state_element(const uint32_t *word, int i)
{
    if (DTYPE == MSA_F32)
        return __uint_as_float(word[i]);
    if (DTYPE == MSA_BF16)
        return __uint_as_float(i % 2 ? word[i / 2] & 0xFFFF0000 : word[i / 2] << 16);
    return i % 2 ? __high2float(pair_of(word[i / 2])) : __low2float(pair_of(word[i / 2]));
}

/* Eight elements of a 16-bit type. */
template <operand TYPE> static __device__ inline uint4 pack_8(const float *x)
{
    return make_uint4(pack_pair<TYPE>(x[0], x[1]), pack_pair<TYPE>(x[2], x[3]), pack_pair<TYPE>(x[4], x[5]),
                      pack_pair<TYPE>(x[6], x[7]));
}

#endif
