/* SPDX-License-Identifier: MIT
 *
 * merge_job.h - what combine and merge become once checked: one operation, S states of one row. A header of its own,
 * because kernels written in C++ take it too.
 */
#ifndef MSA_MERGE_JOB_H
#define MSA_MERGE_JOB_H

#include "msa.h"

struct merge_job {
    int32_t num_states;
    msa_merge_state states[MSA_MAX_SPLITS];
    int64_t rows;
    int32_t num_q_heads, num_kv_heads;
    const int32_t *split_counts; /* or NULL */
    int64_t split_counts_row_stride, split_counts_head_stride;
    msa_dtype out_dtype;
    void *out;
    int64_t out_row_stride, out_head_stride;
    float *lse; /* or NULL */
    int64_t lse_row_stride, lse_head_stride;
};

#endif
