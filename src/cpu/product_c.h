/* SPDX-License-Identifier: MIT
 *
 * product_c.h - the multiply-add of portable C, which sums are defined by (cpu.h): a fused one. To multiply, then to
 * add gives the same bits wherever the product is exact, and is several times as fast where the compiler may not use the
 * instruction. Products of two elements have at most 22 bits, so they are exact unless they leave FP32's normal numbers,
 * which those of BF16 can.
 */
#ifndef MSA_PRODUCT_C_H
#define MSA_PRODUCT_C_H

#include "../number.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>

/* The bits of the smallest and of the largest magnitude among some numbers; zeros do not count. NaN is above all. */
struct magnitudes {
    uint32_t least, most;
};
#define NO_MAGNITUDES ((struct magnitudes){0x7F800000, 0})

static inline struct magnitudes extend_magnitudes(struct magnitudes m, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits = f32_bits(x[i]) & 0x7FFFFFFF;
        m.least = bits && bits < m.least ? bits : m.least;
        m.most = bits > m.most ? bits : m.most;
    }
    return m;
}

/* Whether every product of one number of each is exact. */
static inline bool products_are_exact(struct magnitudes a, struct magnitudes b)
{
    return (double)f32_from_bits(a.least) * (double)f32_from_bits(b.least) >= (double)FLT_MIN &&
           (double)f32_from_bits(a.most) * (double)f32_from_bits(b.most) <= (double)FLT_MAX;
}

static inline __attribute__((always_inline)) float multiply_add(float sum, float a, float b, const bool exact)
{
    return exact ? sum + a * b : fmaf(a, b, sum);
}

#endif
