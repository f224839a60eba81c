/* SPDX-License-Identifier: MIT
 *
 * random.h - reproducible inputs: Philox4x32-10 of Random123, addressed by what a number is for and where it stands,
 * so that the same seed gives the same numbers whatever the thread count, the compiler and the machine.
 */
#ifndef MSA_CLI_RANDOM_H
#define MSA_CLI_RANDOM_H

#include "msa.h"

#include <stdint.h>

/* What numbers are for; each has its own 2^64 blocks of four 32-bit words under a seed. */
enum stream {
    STREAM_Q,
    STREAM_K,
    STREAM_V,
    STREAM_INDEX_Q,
    STREAM_INDEX_K,
    STREAM_PAGES,
    STREAM_LISTS,
    STREAM_SCORES,
    STREAM_PARTIALS,
    STREAM_LSE,
    STREAM_SOURCE,
};

/* A sequence of numbers. */
struct draws {
    uint64_t seed;
    uint32_t stream, a, b; /* a and b: which sequence of the stream */
    uint32_t block, left;
    uint32_t words[4];
};
void draws_begin(struct draws *draws, uint64_t seed, enum stream stream, uint32_t a, uint32_t b);
uint32_t draw(struct draws *draws);
/* Uniform over 0..n-1, n in 1..2^32-1, with an error below n/2^32. */
uint32_t draw_below(struct draws *draws, uint32_t n);
/* 0..n-1 in random order; NULL: no memory. free() it. */
int32_t *random_permutation(int64_t n, uint64_t seed);

/* Fills `count` elements (a multiple of 16) with values from the standard normal distribution, rounded to dtype by the
 * library's rules; NVFP4: count/2 bytes of codes, and count/16 of scales into `scales`, one block after the other.
 * Element i depends on seed, stream, first + i and dtype only. The values are the 65536 quantiles of the distribution
 * at (j + 1/2)/65536, on a grid of 2^-12. */
void fill_normal(msa_dtype dtype, void *data, void *scales, int64_t first, int64_t count, uint64_t seed,
                 enum stream stream, int threads);

#endif
