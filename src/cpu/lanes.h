/* SPDX-License-Identifier: MIT
 *
 * lanes.h - a unit's 16 lanes as PARTS shorter vectors, and the product behind QK, PV and the indexer on them. Before
 * it, lanes_<isa>.h defines the vector.
 *
 * The product is out[i] = sum over steps e of a[i][e] * b[e], where a is an operand of K or V, broadcast, and b the 16
 * lanes of Q or P. A slice of a page is 16 rows of `a`: they go in blocks of 6, 5 and 5 rows, whose sums (with one row
 * of b and one operand of a) fill the registers of the smallest machine, 16 vectors of 8 lanes, and hide the latency of
 * its multiply-add.
 *
 * `vector`, PARTS; v_load, v_store, v_set, v_add, v_sub, v_mul; v_fma(a, b, c) = a*b + c; v_max(a, b) = a > b ? a : b
 * and v_min(a, b) = a < b ? a : b, so b where one is NaN; v_power(a): a's power of two; v_exponent(a): a's bits << 23;
 * v_add_bits; v_round_bf16, v_round_fp16; v_lanes(mask): all ones where a bit is set, from the lowest; v_select(mask,
 * a, b); v_if_equal(x, y, a, b) = x == y ? a : b.
 */
#ifndef MSA_LANES_H
#define MSA_LANES_H

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum { WIDTH = UNIT_LANES / PARTS, MAX_ROWS = 6 };

typedef struct lanes {
    vector part[PARTS];
} lanes;

INLINE lanes load(const float *from)
{
    lanes x;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        x.part[i] = v_load(from + i * WIDTH);
    return x;
}

INLINE void store(float *to, lanes x)
{
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        v_store(to + i * WIDTH, x.part[i]);
}

INLINE lanes all(float value)
{
    lanes x;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        x.part[i] = v_set(value);
    return x;
}

INLINE void multiply_add(lanes *sum, const float *a, const lanes *b)
{
    vector left = v_set(*a);
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        sum->part[i] = v_fma(left, b->part[i], sum->part[i]);
}

/* Loops over rows say "unroll 5": clang leaves a loop alone that is shorter than the number it is given.
 *
 * sums[i] = sum over the first `steps` steps of a[i * row_stride + e * step_stride] * b[e], each pair of steps odd
 * first. */
INLINE void multiply(lanes *sums, const float *a, const int row_stride, const int step_stride, const float *b,
                     int steps, const int rows)
{
#pragma GCC unroll 5
    for (int i = 0; i < rows; i++)
        sums[i] = all(0);
    for (int pair = 0; pair + 2 <= steps; pair += 2)
#pragma GCC unroll 2
        for (int e = 1; e >= 0; e--) {
            lanes right = load(b + (pair + e) * UNIT_LANES);
#pragma GCC unroll 5
            for (int i = 0; i < rows; i++)
                multiply_add(&sums[i], a + i * row_stride + (pair + e) * step_stride, &right);
        }
    if (steps & 1) {
        lanes right = load(b + (steps - 1) * UNIT_LANES);
#pragma GCC unroll 5
        for (int i = 0; i < rows; i++)
            multiply_add(&sums[i], a + i * row_stride + (steps - 1) * step_stride, &right);
    }
}

#endif
