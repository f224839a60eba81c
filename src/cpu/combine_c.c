/* SPDX-License-Identifier: MIT
 *
 * combine_c.c - merges the states of one row by log-sum-exp. Portable C, the definition.
 *
 *   M = max lse_s, w_s = exp(lse_s - M), lse = M + log(sum w_s), out = sum (w_s / sum w) * o_s     (s ascending, FP32)
 * An empty state (lse -inf or +inf, or past the row's count) is left out, its o unread; a NaN lse makes the row NaN.
 */
#include "../number.h"
#include "kernels.h"

static void load_row(const void *from, msa_dtype dtype, float *row)
{
    for (int d = 0; d < 128; d++)
        row[d] = dtype == MSA_F32 ? ((const float *)from)[d]
               : dtype == MSA_BF16 ? bf16_to_f32(((const uint16_t *)from)[d]) : fp16_to_f32(((const uint16_t *)from)[d]);
}

static void store_row(const float *row, msa_dtype dtype, void *to)
{
    for (int d = 0; d < 128; d++)
        if (dtype == MSA_F32)
            ((float *)to)[d] = row[d];
        else
            ((uint16_t *)to)[d] = dtype == MSA_BF16 ? f32_to_bf16(row[d]) : f32_to_fp16(row[d]);
}

static void merge_head(const struct merge_job *job, int64_t row, int head, int count)
{
    float lse[MSA_MAX_SPLITS], weight[MSA_MAX_SPLITS], max = -INFINITY, sum = 0;
    for (int s = 0; s < count; s++) {
        const msa_merge_state *state = &job->states[s];
        lse[s] = *(const float *)((const char *)state->lse + row * state->lse_row_stride + head * state->lse_head_stride);
        if (!isinf(lse[s]))
            max = lse[s] > max || isnan(lse[s]) ? lse[s] : max;
    }
    for (int s = 0; s < count; s++)
        if (!isinf(lse[s]))
            sum += weight[s] = (float)exp((double)lse[s] - max);
    float out[128] = {0};
    for (int s = 0; s < count; s++)
        if (!isinf(lse[s])) {
            const msa_merge_state *state = &job->states[s];
            float value[128];
            load_row((const char *)state->out + row * state->out_row_stride + head * state->out_head_stride, state->out_dtype, value);
            for (int d = 0; d < 128; d++)
                out[d] = fmaf(weight[s] / sum, value[d], out[d]);
        }
    store_row(out, job->out_dtype, (char *)job->out + row * job->out_row_stride + head * job->out_head_stride);
    if (job->lse)
        *(float *)((char *)job->lse + row * job->lse_row_stride + head * job->lse_head_stride) =
            sum == 0 ? -INFINITY : (float)(max + log((double)sum));
}

void combine_c(const struct merge_job *job, int64_t row)
{
    for (int head = 0; head < job->num_q_heads; head++) {
        int count = job->num_states;
        if (job->split_counts) {
            int kv_head = head / (job->num_q_heads / job->num_kv_heads);
            int32_t in_use = *(const int32_t *)((const char *)job->split_counts + row * job->split_counts_row_stride +
                                                kv_head * job->split_counts_head_stride);
            count = in_use < 0 ? 0 : in_use < count ? in_use : count;
        }
        merge_head(job, row, head, count);
    }
}
