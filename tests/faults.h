/* SPDX-License-Identifier: MIT
 *
 * faults.h - the parts of test_faults: mistakes that real attention libraries made, each as a test of its whole kind,
 * on every pair of formats and every instruction set. Inputs are coded so that the right answer is exact.
 */
#ifndef MSA_TESTS_FAULTS_H
#define MSA_TESTS_FAULTS_H

#include "inputs.h"

void faults_masks(harness *h);     /* what a row may see */
void faults_numbers(harness *h);   /* formats, scales, softmax, LSE, NaN */
void faults_pages(harness *h);     /* lists, page tables, layouts */
void faults_selection(harness *h); /* index and top-k */
void faults_plans(harness *h);     /* mixed batches, bad lengths, capacity, replay, leaks */
void faults_calls(harness *h);     /* empty calls, refusals, kernel names, corners of combine and merge */
void faults_limits(harness *h);    /* offsets past 2^31, long contexts, large batches */

/* Coded values. */
value_fn coded_zero;
value_fn coded_page;   /* 1 where d is the logical page of the token */
value_fn coded_offset; /* 1 where d is the token's place in its page */
value_fn coded_hash;   /* some E2M1 value, of the place alone: problems that share places share values */

/* Runs `body` as one test. */
void plain_test(harness *h, const char *op, const char *name, void (*body)(harness *h));
/* Runs `body` as test `name` for every pair and for prefill and decode, with a spec of 2 query heads on 1 KV head. */
void each_attention(harness *h, const char *name, void (*body)(harness *h, const attention_spec *spec));
/* Runs `body` for every pair of the indexer. */
void each_index(harness *h, const char *name, void (*body)(harness *h, const index_spec *spec));

/* Runs each on its context, and compares their outputs bit for bit. */
void same_bits_on(harness *h, trial *a, msa_context *a_context, trial *b, msa_context *b_context, const char *what);
/* The same for both on every level. */
void same_bits(harness *h, trial *a, trial *b, const char *what);
/* The same for two specs that must not differ in their results. */
void same_attention(harness *h, const attention_spec *a, const attention_spec *b, const char *what);

msa_dtype attention_out_dtype(const attention_spec *spec);

#endif /* MSA_TESTS_FAULTS_H */
