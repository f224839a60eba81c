/* SPDX-License-Identifier: MIT
 *
 * product_c.h - the multiply-add of portable C, which sums are defined by (cpu.h): a fused one. To multiply, then to
 * add gives the same bits wherever the product is exact, and is several times as fast where the compiler may not use
 * the instruction. Products of two elements have at most 22 bits, so they are exact unless they leave FP32's normal
 * numbers, which those of BF16 can.
 */
#ifndef MSA_PRODUCT_C_H
#define MSA_PRODUCT_C_H

#include "../number.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>

/* The bits of the smallest and of the largest magnitude among some numbers; zeros do not count. NaN is above all. */
struct magnitudes {
    int32_t least, most;
};

/* n is a multiple of 8. In vectors, two of each because every step waits for the one before. */
static inline struct magnitudes magnitudes_of(const float *x, int n)
{
    typedef int32_t words __attribute__((vector_size(16), aligned(4), may_alias));
    typedef uint32_t unsigned_words __attribute__((vector_size(16)));
    const unsigned_words last =
        (unsigned_words){0} + INT32_MAX; /* added: 0 becomes the largest, others keep their order */
    words least[2] = {(words)last, (words)last}, most[2] = {{0}, {0}};
    for (int i = 0; i < n; i += 8)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            words bits = *(const words *)(x + i + 4 * j) & INT32_MAX, counted = (words)((unsigned_words)bits + last);
            words less = least[j] > counted, more = bits > most[j];
            least[j] = (counted & less) | (least[j] & ~less);
            most[j] = (bits & more) | (most[j] & ~more);
        }
    int32_t lowest = INT32_MAX;
    struct magnitudes m = {0, 0};
    for (int i = 0; i < 8; i++) {
        lowest = least[i / 4][i % 4] < lowest ? least[i / 4][i % 4] : lowest;
        m.most = most[i / 4][i % 4] > m.most ? most[i / 4][i % 4] : m.most;
    }
    m.least = lowest == INT32_MAX ? INT32_MAX : (int32_t)((uint32_t)lowest - INT32_MAX);
    return m;
}

/* Whether every product of one number of each is exact. Nothing but zeros: is, too. */
static inline bool products_are_exact(struct magnitudes a, struct magnitudes b)
{
    if (!a.most || !b.most)
        return true;
    double least = (double)f32_from_bits((uint32_t)a.least) * (double)f32_from_bits((uint32_t)b.least),
           most = (double)f32_from_bits((uint32_t)a.most) * (double)f32_from_bits((uint32_t)b.most);
    return least >= (double)FLT_MIN && most <= (double)FLT_MAX;
}

static inline __attribute__((always_inline)) float multiply_add(float sum, float a, float b, const bool exact)
{
    return exact ? sum + a * b : fmaf(a, b, sum);
}

#endif
