/* SPDX-License-Identifier: MIT
 *
 * combine_c.c - merges the states of one row by log-sum-exp: out = sum weight_s * o_s, s ascending, in FP32, with the
 * weights of combine.h. Every NaN is written as the same one. Portable C, the definition.
 */
#include "combine.h"

static float load(const void *from, msa_dtype dtype, int d)
{
    return dtype == MSA_F32    ? ((const float *)from)[d]
           : dtype == MSA_BF16 ? bf16_to_f32(((const uint16_t *)from)[d])
                               : fp16_to_f32(((const uint16_t *)from)[d]);
}

static void store(void *to, msa_dtype dtype, int d, float x)
{
    x = isnan(x) ? NAN : x;
    if (dtype == MSA_F32)
        ((float *)to)[d] = x;
    else
        ((uint16_t *)to)[d] = dtype == MSA_BF16 ? f32_to_bf16(x) : f32_to_fp16(x);
}

void combine_c(const struct merge_job *job, int64_t row)
{
    for (int head = 0; head < job->num_q_heads; head++) {
        struct merge_weights w = merge_weights(job, row, head);
        for (int d = 0; d < 128; d++) {
            float sum = 0;
            for (int i = 0; i < w.count; i++)
                sum = fmaf(w.weight[i], load(w.out[i], w.dtype[i], d), sum);
            store(merge_out(job, row, head), job->out_dtype, d, sum);
        }
        merge_store_lse(job, row, head, w.lse);
    }
}
