/* SPDX-License-Identifier: MIT
 *
 * combine_neon.c - merges the states of one row by log-sum-exp (combine_c.c defines it; bit-equal).
 *
 * Layout   a head's 128 elements in chunks of 16, each of which takes all states in turn; its sums are four vectors.
 * Floor    the states read and the output written once, at the machine's read rate.
 */
#include "combine.h"

#include <arm_neon.h>

static inline float32x4_t load(const void *from, int d, msa_dtype dtype)
{
    if (dtype == MSA_F32)
        return vld1q_f32((const float *)from + d);
    uint16x4_t half = vld1_u16((const uint16_t *)from + d);
    return dtype == MSA_FP16 ? vcvt_f32_f16(vreinterpret_f16_u16(half)) : vreinterpretq_f32_u32(vshll_n_u16(half, 16));
}

static inline void store(void *to, int d, float32x4_t x, msa_dtype dtype)
{
    x = vbslq_f32(vceqq_f32(x, x), x, vdupq_n_f32(NAN));
    if (dtype == MSA_F32) {
        vst1q_f32((float *)to + d, x);
    } else if (dtype == MSA_FP16) {
        vst1_u16((uint16_t *)to + d, vreinterpret_u16_f16(vcvt_f16_f32(x)));
    } else { /* the one NaN has zeros below and rounds to itself */
        uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        vst1_u16((uint16_t *)to + d, vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16));
    }
}

void combine_neon(const struct merge_job *job, int64_t row)
{
    for (int head = 0; head < job->num_q_heads; head++) {
        struct merge_weights w = merge_weights(job, row, head);
        for (int d = 0; d < 128; d += 16) {
            float32x4_t sums[4];
            for (int i = 0; i < 4; i++)
                sums[i] = vdupq_n_f32(0);
            for (int s = 0; s < w.count; s++)
                for (int i = 0; i < 4; i++)
                    sums[i] = vfmaq_n_f32(sums[i], load(w.out[s], d + 4 * i, w.dtype[s]), w.weight[s]);
            for (int i = 0; i < 4; i++)
                store(merge_out(job, row, head), d + 4 * i, sums[i], job->out_dtype);
        }
        merge_store_lse(job, row, head, w.lse);
    }
}
