/* SPDX-License-Identifier: MIT
 *
 * oracle.h - right answers in double precision, written from the contract alone; shares no code with src/.
 *
 * It takes the public argument structs and computes one row at a time, so that a sample of rows of a huge problem can
 * be checked. It is slow and simple on purpose. Arguments must have passed the library's checks; tensor values may be
 * bad (they are masked as the contract says). All pointers are host pointers. Strides may be MSA_DENSE.
 *
 * Beside each answer stands a bound: how far an implementation with FP32 accumulation and an FP32 exponential may lie
 * from it before it rounds to the output type. Where a probability lies so near a rounding midpoint that FP32 may
 * round it either way, the bound has room for both.
 */
#ifndef MSA_TESTS_ORACLE_H
#define MSA_TESTS_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

#include "msa.h"

/* --------------------------------------------------------------------------------------------------------- numbers */

/* Value of one element of F32, BF16, FP16 or E4M3. */
double oracle_value(msa_dtype dtype, const void *element);
/* Value of a 4-bit E2M1 code. */
double oracle_e2m1_value(unsigned code);
/* Nearest encoding, ties to even. E4M3 and E2M1 (MSA_NVFP4) saturate, BF16, FP16 and F32 overflow to Inf; NaN gives
 * 0x7F in E4M3 and a quiet NaN in the others. */
uint32_t oracle_encode(msa_dtype dtype, double x);
/* Value of that encoding. */
double oracle_round(msa_dtype dtype, double x);
/* Element i of a row of `dtype`; NVFP4 takes the row's scales (one byte per 16 elements, `scale_step` bytes apart) and
 * gives code * scale, rounded to E4M3 (saturating) if `as_e4m3`. */
double oracle_element(msa_dtype dtype, const void *row, const uint8_t *scale, int64_t scale_step, bool as_e4m3,
                      int64_t i);
/* Bytes of `n` elements of one row (NVFP4: of its codes). */
int64_t oracle_row_bytes(msa_dtype dtype, int64_t n);

/* ----------------------------------------------------------------------------------------------------------- steps */

typedef struct oracle_place {
    int32_t request;  /* -1: a padding row, which is neither read nor written */
    int64_t position; /* may be negative */
    int64_t num_keys; /* kv length of the request */
} oracle_place;
oracle_place oracle_find_row(const msa_step *step, int64_t row);

/* ------------------------------------------------------------------------------------------------------- attention */

/* Set while the kernel under test sums products of E4M3 P and V, and with `fast` of E4M3 Q and K, in FP8 tensor cores.
 * Bounds have room for it then. */
extern bool oracle_fp8_sums;

typedef struct oracle_state {
    double out[MSA_HEAD_DIM];
    double out_bound[MSA_HEAD_DIM];
    double lse;
    double lse_bound;
} oracle_state;

/* One query head of one row. False: a padding row. */
bool oracle_attention_row(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args,
                          int64_t row, int32_t q_head, oracle_state *state);
/* The same from results of pages that were rounded to BF16 before they were merged. */
bool oracle_attention_merged(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args,
                             int64_t row, int32_t q_head, oracle_state *state);
/* The same, each visible page (ascending) by itself; returns their number, -1 for a padding row. */
int oracle_attention_partials(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args,
                              int64_t row, int32_t q_head, oracle_state states[MSA_MAX_TOPK]);

/* --------------------------------------------------------------------------------------------- index and selection */

/* Scores of the history pages of one row, and their bounds (bounds may be NULL); max_pages elements of room. Returns
 * num_valid_pages: one more than the history pages, if the plan's capacity holds that; 0 at a negative position; -1
 * for a padding row. A page with a NaN key gets NaN: its score is not specified. */
int32_t oracle_index_row(const msa_index_desc *desc, const msa_step *step, const msa_index_args *args, int64_t row,
                         int32_t head, double *scores, double *bounds);
/* The k ids chosen from n pages, -1 at the end; scores[n-1] (the own page) and the other forced pages are not read. */
void oracle_select_row(const float *scores, int32_t n, int32_t k, int32_t init_pages, int32_t local_pages,
                       msa_topk_order order, int32_t *ids);

/* -------------------------------------------------------------------------------------------- stateless operations */

void oracle_combine_row(const msa_combine_args *args, int64_t row, int32_t q_head, oracle_state *state);
void oracle_merge_row(const msa_merge_args *args, int64_t row, int32_t q_head, oracle_state *state);
/* Bits of one row: codes (cols bytes, or cols/2 for NVFP4) and scales (cols/16; NVFP4 only). */
void oracle_quantise_row(const msa_quantise_args *args, int64_t row, uint8_t *codes, uint8_t *scales);
/* Values of one row of the destination; they are exact there. */
void oracle_convert_row(const msa_convert_args *args, int64_t row, double *values);
/* Does the whole call, into the caches that args names. */
void oracle_cache_write(const msa_cache_write_args *args);

#endif /* MSA_TESTS_ORACLE_H */
