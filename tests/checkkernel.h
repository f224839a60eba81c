/* SPDX-License-Identifier: MIT
 *
 * checkkernel.h - the parts of checkkernel, one function a group of operations.
 */
#ifndef MSA_TESTS_CHECKKERNEL_H
#define MSA_TESTS_CHECKKERNEL_H

#include "inputs.h"

void check_oracle(harness *h);
void check_formats(harness *h); /* convert, quantise */
void check_cache_write(harness *h);
void check_topk(harness *h);
void check_combine(harness *h); /* combine, merge */
void check_index(harness *h);
void check_attention(harness *h);
void check_probability(harness *h);                                               /* how it rounds, through attention */
void check_shapes(harness *h); /* prefill and decode of production-like shapes */ /* prefill, decode */
void check_cuda(harness *h); /* graphs, streams, the device's state */

#endif /* MSA_TESTS_CHECKKERNEL_H */
