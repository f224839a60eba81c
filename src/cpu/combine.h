/* SPDX-License-Identifier: MIT
 *
 * combine.h - the weights by which one head of one row merges its states, for all instruction sets.
 *
 *   M = max lse_s, w_s = 2^((lse_s - M) * log2 e), lse = M + log(sum w_s), weight_s = w_s / sum w
 * with s ascending, in FP32. An empty state (lse -inf or +inf, or past the row's count) is left out and its output
 * unread; a NaN lse makes the row NaN.
 */
#ifndef MSA_COMBINE_H
#define MSA_COMBINE_H

#include "exp2.h"
#include "kernels.h"

/* The states in use. */
struct merge_weights {
    int count;
    const void *out[MSA_MAX_SPLITS]; /* 128 elements each */
    msa_dtype dtype[MSA_MAX_SPLITS];
    float weight[MSA_MAX_SPLITS];
    float lse;
};

static inline int merge_count(const struct merge_job *job, int64_t row, int head)
{
    if (!job->split_counts)
        return job->num_states;
    int kv_head = head / (job->num_q_heads / job->num_kv_heads);
    int32_t in_use = *(const int32_t *)((const char *)job->split_counts + row * job->split_counts_row_stride +
                                        kv_head * job->split_counts_head_stride);
    return in_use < 0 ? 0 : in_use < job->num_states ? in_use : job->num_states;
}

static inline struct merge_weights merge_weights(const struct merge_job *job, int64_t row, int head)
{
    struct merge_weights w;
    float lse[MSA_MAX_SPLITS], max = -INFINITY, sum = 0;
    int count = merge_count(job, row, head), used = 0;
    for (int s = 0; s < count; s++) {
        const msa_merge_state *state = &job->states[s];
        float x =
            *(const float *)((const char *)state->lse + row * state->lse_row_stride + head * state->lse_head_stride);
        if (isinf(x))
            continue;
        max = x > max || isnan(x) ? x : max; /* once NaN, always NaN */
        lse[used] = x;
        w.out[used] = (const char *)state->out + row * state->out_row_stride + head * state->out_head_stride;
        w.dtype[used++] = state->out_dtype;
    }
    const struct exp2_scale log2_e = exp2_scale(1.44269504088896340736);
    for (int i = 0; i < used; i++)
        sum += w.weight[i] = exp2_nonpositive(lse[i] - max, log2_e, 1);
    for (int i = 0; i < used; i++)
        w.weight[i] /= sum;
    w.count = used;
    w.lse = used == 0 ? -INFINITY : isnan(sum) ? NAN : (float)(max + log((double)sum));
    return w;
}

static inline void *merge_out(const struct merge_job *job, int64_t row, int head)
{
    return (char *)job->out + row * job->out_row_stride + head * job->out_head_stride;
}

static inline void merge_store_lse(const struct merge_job *job, int64_t row, int head, float lse)
{
    if (job->lse)
        *(float *)((char *)job->lse + row * job->lse_row_stride + head * job->lse_head_stride) = lse;
}

#endif
