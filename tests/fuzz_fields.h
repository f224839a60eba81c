/* SPDX-License-Identifier: MIT
 *
 * fuzz_fields.h - the fields of every argument struct of msa.h, by what their values can be, for fuzz_arguments.c.
 */
#ifndef MSA_TESTS_FUZZ_FIELDS_H
#define MSA_TESTS_FUZZ_FIELDS_H

#include <stddef.h>
#include <stdint.h>

#include "msa.h"

/* Shape of the valid calls. */
enum { ROWS = 5, KV_HEADS = 2, Q_HEADS = 4, PAGES = 3, TABLE = 2, TOPK = 3 };

enum kind { SIZE, CHOICE, NUMBER, COUNT32, COUNT64, POINTER, STRIDE };

struct field {
    enum kind kind;
    size_t offset;
    int64_t right, limit; /* COUNT: the valid call's, and the largest that the header allows */
};

#define F_SIZE(type) {SIZE, offsetof(type, size), 0, 0}
#define F(type, kind, field) {kind, offsetof(type, field), 0, 0}
#define F_COUNT(type, kind, field, right, limit) {kind, offsetof(type, field), right, limit}

/* clang-format off */

typedef msa_attention_desc AD;
static const struct field attention_desc_fields[] = {
    F_SIZE(AD), F(AD, CHOICE, q_dtype), F(AD, CHOICE, kv_dtype), F(AD, CHOICE, out_dtype), F(AD, CHOICE, num_q_heads),
    F(AD, CHOICE, num_kv_heads), F(AD, CHOICE, num_lists), F(AD, CHOICE, head_dim), F(AD, CHOICE, page_size),
    F(AD, CHOICE, causal), F(AD, CHOICE, topk), F(AD, NUMBER, sm_scale), F(AD, CHOICE, precision),
    F(AD, CHOICE, strategy),
    F(AD, CHOICE, v_scale_order), F(AD, CHOICE, partials), F(AD, CHOICE, max_batch), F(AD, STRIDE, max_total_q),
    F(AD, STRIDE, max_kv_len),
};

typedef msa_index_desc ID;
static const struct field index_desc_fields[] = {
    F_SIZE(ID), F(ID, CHOICE, q_dtype), F(ID, CHOICE, k_dtype), F(ID, CHOICE, num_index_heads), F(ID, CHOICE, head_dim),
    F(ID, CHOICE, page_size), F(ID, CHOICE, causal), F(ID, CHOICE, topk), F(ID, CHOICE, init_pages),
    F(ID, CHOICE, local_pages), F(ID, CHOICE, topk_order), F(ID, CHOICE, precision), F(ID, CHOICE, outputs),
    F(ID, CHOICE, max_batch), F(ID, STRIDE, max_total_q), F(ID, STRIDE, max_kv_len),
};

typedef msa_step ST;
static const struct field step_fields[] = {
    F_SIZE(ST), F_COUNT(ST, COUNT32, batch, 2, 2), F_COUNT(ST, COUNT64, total_q, ROWS, ROWS),
    F(ST, POINTER, cu_seqlens_q),
    F(ST, POINTER, kv_lens), F(ST, POINTER, cu_seqlens_k), F(ST, POINTER, page_table), F(ST, STRIDE, page_table_stride),
    F(ST, POINTER, topk), F(ST, STRIDE, topk_head_stride), F(ST, STRIDE, topk_row_stride), F(ST, POINTER, workspace),
};

typedef msa_attention_args AA;
static const struct field attention_fields[] = {
    F_SIZE(AA), F(AA, POINTER, q), F(AA, STRIDE, q_row_stride), F(AA, STRIDE, q_head_stride), F(AA, POINTER, k),
    F(AA, STRIDE, k_page_stride), F(AA, STRIDE, k_head_stride), F(AA, STRIDE, k_token_stride), F(AA, POINTER, v),
    F(AA, STRIDE, v_page_stride), F(AA, STRIDE, v_head_stride), F(AA, STRIDE, v_token_stride), F(AA, POINTER, k_scale),
    F(AA, STRIDE, k_scale_page_stride), F(AA, STRIDE, k_scale_head_stride), F(AA, STRIDE, k_scale_token_stride),
    F(AA, POINTER, v_scale), F(AA, STRIDE, v_scale_page_stride), F(AA, STRIDE, v_scale_head_stride),
    F(AA, STRIDE, v_scale_token_stride), F_COUNT(AA, COUNT64, num_pages, PAGES, INT32_MAX), F(AA, POINTER, q_descale),
    F(AA, STRIDE, q_descale_stride), F(AA, POINTER, k_descale), F(AA, STRIDE, k_descale_stride),
    F(AA, POINTER, v_descale),
    F(AA, STRIDE, v_descale_stride), F(AA, POINTER, k_global_scale), F(AA, POINTER, v_global_scale),
    F(AA, POINTER, out),
    F(AA, STRIDE, out_row_stride), F(AA, STRIDE, out_head_stride), F(AA, POINTER, lse), F(AA, STRIDE, lse_row_stride),
    F(AA, STRIDE, lse_head_stride), F(AA, POINTER, o_partial), F(AA, STRIDE, o_partial_split_stride),
    F(AA, STRIDE, o_partial_row_stride), F(AA, STRIDE, o_partial_head_stride), F(AA, POINTER, lse_partial),
    F(AA, STRIDE, lse_partial_split_stride), F(AA, STRIDE, lse_partial_row_stride),
    F(AA, STRIDE, lse_partial_head_stride),
    F(AA, POINTER, split_counts), F(AA, STRIDE, split_counts_row_stride), F(AA, STRIDE, split_counts_head_stride),
};

typedef msa_index_args IA;
static const struct field index_fields[] = {
    F_SIZE(IA), F(IA, POINTER, index_q), F(IA, STRIDE, index_q_row_stride), F(IA, STRIDE, index_q_head_stride),
    F(IA, POINTER, index_k), F(IA, STRIDE, index_k_page_stride), F(IA, STRIDE, index_k_token_stride),
    F(IA, POINTER, index_k_scale), F(IA, STRIDE, index_k_scale_page_stride), F(IA, STRIDE, index_k_scale_token_stride),
    F_COUNT(IA, COUNT64, num_pages, PAGES, INT32_MAX), F(IA, POINTER, scores), F(IA, STRIDE, scores_head_stride),
    F(IA, STRIDE, scores_row_stride), F(IA, POINTER, topk), F(IA, STRIDE, topk_head_stride),
    F(IA, STRIDE, topk_row_stride),
    F(IA, POINTER, num_valid_pages),
};

typedef msa_topk_args TA;
static const struct field topk_fields[] = {
    F_SIZE(TA), F(TA, POINTER, scores), F(TA, STRIDE, scores_head_stride), F(TA, STRIDE, scores_row_stride),
    F_COUNT(TA, COUNT32, num_heads, KV_HEADS, 1024), F_COUNT(TA, COUNT64, rows, ROWS, INT32_MAX),
    F_COUNT(TA, COUNT32, columns, 16, 8192), F(TA, POINTER, valid_pages), F(TA, CHOICE, k), F(TA, CHOICE, init_pages),
    F(TA, CHOICE, local_pages), F(TA, CHOICE, order), F(TA, POINTER, topk), F(TA, STRIDE, topk_head_stride),
    F(TA, STRIDE, topk_row_stride),
};

typedef msa_combine_args CA;
static const struct field combine_fields[] = {
    F_SIZE(CA), F_COUNT(CA, COUNT32, num_splits, TOPK, 32), F_COUNT(CA, COUNT64, rows, ROWS, INT32_MAX),
    F_COUNT(CA, COUNT32, num_q_heads, Q_HEADS, 1024), F_COUNT(CA, COUNT32, num_kv_heads, KV_HEADS, 1024),
    F(CA, CHOICE, o_partial_dtype), F(CA, POINTER, o_partial), F(CA, STRIDE, o_partial_split_stride),
    F(CA, STRIDE, o_partial_row_stride), F(CA, STRIDE, o_partial_head_stride), F(CA, POINTER, lse_partial),
    F(CA, STRIDE, lse_partial_split_stride), F(CA, STRIDE, lse_partial_row_stride),
    F(CA, STRIDE, lse_partial_head_stride),
    F(CA, POINTER, split_counts), F(CA, STRIDE, split_counts_row_stride), F(CA, STRIDE, split_counts_head_stride),
    F(CA, CHOICE, out_dtype), F(CA, POINTER, out), F(CA, STRIDE, out_row_stride), F(CA, STRIDE, out_head_stride),
    F(CA, POINTER, lse), F(CA, STRIDE, lse_row_stride), F(CA, STRIDE, lse_head_stride),
};

typedef msa_merge_args MA;
static const struct field merge_fields[] = {
    F_SIZE(MA), F_COUNT(MA, COUNT32, num_states, 2, 32), F(MA, POINTER, states),
    F_COUNT(MA, COUNT64, rows, ROWS, INT32_MAX),
    F_COUNT(MA, COUNT32, num_q_heads, Q_HEADS, 1024), F(MA, CHOICE, out_dtype), F(MA, POINTER, out),
    F(MA, STRIDE, out_row_stride), F(MA, STRIDE, out_head_stride), F(MA, POINTER, lse), F(MA, STRIDE, lse_row_stride),
    F(MA, STRIDE, lse_head_stride),
};

typedef msa_merge_state MS;
static const struct field state_fields[] = {
    F(MS, POINTER, out), F(MS, STRIDE, out_row_stride), F(MS, STRIDE, out_head_stride), F(MS, CHOICE, out_dtype),
    F(MS, POINTER, lse), F(MS, STRIDE, lse_row_stride), F(MS, STRIDE, lse_head_stride),
};

typedef msa_quantise_args QA;
static const struct field quantise_fields[] = {
    F_SIZE(QA), F_COUNT(QA, COUNT64, rows, ROWS, INT32_MAX), F_COUNT(QA, COUNT64, cols, 128, 1 << 20),
    F(QA, CHOICE, src_dtype), F(QA, POINTER, src), F(QA, STRIDE, src_row_stride), F(QA, CHOICE, dst_dtype),
    F(QA, POINTER, dst), F(QA, STRIDE, dst_row_stride), F(QA, POINTER, scale), F(QA, STRIDE, scale_row_stride),
    F(QA, POINTER, descale),
};

typedef msa_convert_args VA;
static const struct field convert_fields[] = {
    F_SIZE(VA), F_COUNT(VA, COUNT64, rows, ROWS, INT32_MAX), F_COUNT(VA, COUNT64, cols, 128, 1 << 20),
    F(VA, CHOICE, src_dtype), F(VA, POINTER, src), F(VA, STRIDE, src_row_stride), F(VA, POINTER, scale),
    F(VA, STRIDE, scale_row_stride), F(VA, CHOICE, dst_dtype), F(VA, POINTER, dst), F(VA, STRIDE, dst_row_stride),
};

typedef msa_cache_write_args WA;
static const struct field write_fields[] = {
    F_SIZE(WA), F_COUNT(WA, COUNT64, tokens, ROWS, INT32_MAX), F(WA, POINTER, slot_mapping),
    F_COUNT(WA, COUNT64, num_pages, PAGES, INT32_MAX), F_COUNT(WA, COUNT32, num_kv_heads, KV_HEADS, 1024),
    F(WA, CHOICE, src_dtype), F(WA, POINTER, k_new), F(WA, STRIDE, k_new_row_stride), F(WA, STRIDE, k_new_head_stride),
    F(WA, POINTER, v_new), F(WA, STRIDE, v_new_row_stride), F(WA, STRIDE, v_new_head_stride),
    F(WA, POINTER, index_k_new),
    F(WA, STRIDE, index_k_new_row_stride), F(WA, CHOICE, kv_dtype), F(WA, POINTER, k), F(WA, STRIDE, k_page_stride),
    F(WA, STRIDE, k_head_stride), F(WA, STRIDE, k_token_stride), F(WA, POINTER, v), F(WA, STRIDE, v_page_stride),
    F(WA, STRIDE, v_head_stride), F(WA, STRIDE, v_token_stride), F(WA, POINTER, k_scale),
    F(WA, STRIDE, k_scale_page_stride),
    F(WA, STRIDE, k_scale_head_stride), F(WA, STRIDE, k_scale_token_stride), F(WA, POINTER, v_scale),
    F(WA, STRIDE, v_scale_page_stride), F(WA, STRIDE, v_scale_head_stride), F(WA, STRIDE, v_scale_token_stride),
    F(WA, CHOICE, v_scale_order), F(WA, POINTER, k_descale), F(WA, STRIDE, k_descale_stride), F(WA, POINTER, v_descale),
    F(WA, STRIDE, v_descale_stride), F(WA, CHOICE, index_k_dtype), F(WA, POINTER, index_k),
    F(WA, STRIDE, index_k_page_stride),
    F(WA, STRIDE, index_k_token_stride), F(WA, POINTER, index_k_scale), F(WA, STRIDE, index_k_scale_page_stride),
    F(WA, STRIDE, index_k_scale_token_stride),
};

/* clang-format on */

#endif
