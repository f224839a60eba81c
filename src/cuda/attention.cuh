/* SPDX-License-Identifier: MIT
 *
 * attention.cuh - what attention kernels share: the factors of logits and outputs.
 */
#ifndef MSA_CUDA_ATTENTION_CUH
#define MSA_CUDA_ATTENTION_CUH

#include "ptx.cuh"

#include <float.h>

static __device__ inline float factor_at(const float *factor, int64_t stride, int64_t head)
{
    return factor ? *(const float *)((const char *)factor + head * stride) : 1.0f;
}

/* Rounds what a float cannot hold to the largest one, so that logits of 0 stay 0. */
static __host__ __device__ inline float finite_scale(double scale)
{
    return scale > FLT_MAX ? FLT_MAX : (float)scale;
}

static __device__ inline float logit_scale(const cuda_attention &job, int kv_head)
{
    const msa_attention_args &a = job.args;
    double scale = (double)job.desc.sm_scale * 1.44269504088896340736;
    scale *= factor_at(a.q_descale, a.q_descale_stride, kv_head);
    scale *= factor_at(a.k_descale, a.k_descale_stride, kv_head);
    return finite_scale(scale * factor_at(a.k_global_scale, 0, 0));
}

/* Of what a row's pages add up to; still to be divided by the sum of the probabilities. */
static __device__ inline float output_scale(const cuda_attention &job, int kv_head)
{
    const msa_attention_args &a = job.args;
    return factor_at(a.v_descale, a.v_descale_stride, kv_head) * factor_at(a.v_global_scale, 0, 0);
}

/* An infinite V that the row sees must give NaN, as every other non-finite input does. */
static __device__ inline float finish(float a, float factor)
{
    return (a + (a - a)) * factor;
}

#endif
