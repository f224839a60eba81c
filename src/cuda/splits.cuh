/* SPDX-License-Identifier: MIT
 *
 * splits.cuh - how an attention kernel that splits rows keeps the splits' results in its own memory, in FP32, and has
 * them merged. Host code.
 */
#ifndef MSA_CUDA_SPLITS_CUH
#define MSA_CUDA_SPLITS_CUH

#include "cuda.h"

/* From `memory` on: outputs, then maxima, then sums, each [splits][rows][heads]. */
static inline cuda_result split_results(const struct cuda_attention *job, void *memory)
{
    int64_t rows = job->desc.max_total_q, heads = job->desc.num_q_heads;
    cuda_result result = {};
    result.dtype = MSA_F32;
    result.out = memory;
    result.out_head_stride = MSA_HEAD_DIM * 4;
    result.out_row_stride = heads * result.out_head_stride;
    result.out_split_stride = rows * result.out_row_stride;
    result.lse = (float *)((char *)memory + job->num_splits * result.out_split_stride);
    result.lse_head_stride = 4;
    result.lse_row_stride = heads * 4;
    result.lse_split_stride = rows * result.lse_row_stride;
    result.sum_offset = job->num_splits * result.lse_split_stride;
    return result;
}

/* after_kernel: as in struct cuda_merge. */
static inline cudaError_t merge_splits(const struct cuda_attention *job, const cuda_result &splits, bool after_kernel,
                                       cudaStream_t stream)
{
    cuda_merge merge = {};
    merge.rows = job->step.rows;
    merge.sum_offset = splits.sum_offset;
    merge.after_kernel = after_kernel;
    merge.job.num_states = job->num_splits;
    for (int s = 0; s < job->num_splits; s++)
        merge.job.states[s] = msa_merge_state{(const char *)splits.out + s * splits.out_split_stride,
                                              splits.out_row_stride,
                                              splits.out_head_stride,
                                              splits.dtype,
                                              (const float *)((const char *)splits.lse + s * splits.lse_split_stride),
                                              splits.lse_row_stride,
                                              splits.lse_head_stride};
    merge.job.rows = job->step.total_q;
    merge.job.num_q_heads = job->desc.num_q_heads;
    merge.job.num_kv_heads = job->desc.num_kv_heads;
    merge.job.split_counts = splits.counts;
    merge.job.split_counts_row_stride = splits.counts_row_stride;
    merge.job.split_counts_head_stride = splits.counts_head_stride;
    merge.job.out_dtype = job->result.dtype;
    merge.job.out = job->result.out;
    merge.job.out_row_stride = job->result.out_row_stride;
    merge.job.out_head_stride = job->result.out_head_stride;
    merge.job.lse = job->result.lse;
    merge.job.lse_row_stride = job->result.lse_row_stride;
    merge.job.lse_head_stride = job->result.lse_head_stride;
    return job->merge(&merge, stream);
}

#endif
