/* SPDX-License-Identifier: MIT
 *
 * case.h - a problem: one operation with all its tensors, checked, every cache layout reduced to base and strides.
 */
#ifndef MSA_CASE_H
#define MSA_CASE_H

#include "msa.h"
#include "safetensors.h"

#include <stdbool.h>

enum problem_op { OP_PREFILL, OP_DECODE, OP_INDEX, OP_LAYER };
extern const char *const op_names[];          /* indexed by problem_op, NULL at the end */
extern const char *const topk_order_names[];  /* indexed by msa_topk_order, NULL at the end */
extern const char *const scale_order_names[]; /* indexed by msa_scale_order, NULL at the end */

/* Part of a tensor, as the library addresses it (strides in bytes). tensor NULL: not there. */
struct view {
    struct tensor *tensor;
    int64_t offset;
    int64_t page_stride, head_stride, token_stride;
};

struct tolerance {
    double atol, rtol;
};

struct problem {
    const char *name; /* for messages: the path */
    enum problem_op op;

    int32_t batch;
    int64_t total_q;
    int64_t max_pages; /* width of page_table */
    int32_t topk;

    /* prefill, decode, layer */
    msa_dtype q_dtype, kv_dtype, out_dtype;
    int32_t num_q_heads, num_kv_heads;
    float sm_scale;
    msa_scale_order v_scale_order;
    int64_t num_pages;
    struct tensor *q;
    struct view k, v, k_scale, v_scale;
    struct tensor *q_descale, *k_descale, *v_descale, *k_global_scale, *v_global_scale;
    struct tensor *list; /* topk [Hkv, total_q, k]; NULL for index and layer */

    /* index, layer */
    msa_dtype index_q_dtype, index_k_dtype;
    int32_t num_index_heads, init_pages, local_pages;
    msa_topk_order topk_order;
    int32_t index_outputs; /* MSA_INDEX_SCORES | MSA_INDEX_SELECTION */
    int64_t num_index_pages;
    struct tensor *index_q;
    struct view index_k, index_k_scale; /* head_stride unused */

    struct tensor *cu_seqlens_q, *kv_lens, *cu_seqlens_k, *page_table;

    struct tolerance out_tolerance, lse_tolerance, scores_tolerance;
    const struct tensor_file *file; /* where the tensors and expected.* are */
};

static inline bool op_has_index(enum problem_op op)
{
    return op == OP_INDEX || op == OP_LAYER;
}
static inline bool op_has_attention(enum problem_op op)
{
    return op != OP_INDEX;
}

/* Checks names, dtypes, shapes and metadata of a case file in memory and fills *problem with views into it; the file
 * must outlive the problem. CLI_OK, or CLI_BAD after a message. Values inside tensors are left to the library. */
int problem_from_file(struct problem *problem, struct tensor_file *file, const char *name);

/* ---- visible.c */

/* Position of each query row (length total_q), POSITION_PADDING for rows that no request owns. Lengths that make no
 * sense own no rows. NULL after a message if there is no memory; free() it. */
#define POSITION_PADDING INT64_MIN
int64_t *problem_positions(const struct problem *problem);

/* Overwrites with `byte` all input memory that no visible key names: dead slots of pages, unused pages, page-table
 * slots past the lengths, padding rows. CLI_OK or CLI_BAD. */
int problem_poison(struct problem *problem, int byte);

#endif
