/* SPDX-License-Identifier: MIT
 *
 * product_zmm.h - the product behind QK, PV and the indexer on 512-bit vectors, and the slices of a page that it takes.
 *
 * out[i][unit] = sum over steps e of a[i][e] * b[unit][e], where a is an operand of K or V, broadcast, and b a vector
 * of 16 lanes of Q or P. A block of `rows` by `units` sums stays in registers through all steps: 16x1 where a page has
 * one visitor, 8x2 and 8x3 where more share its operands. With 16 sums or more the latency of the multiply-add (4
 * cycles, 2 a cycle; vdpbf16ps 5 to 6) is hidden, and a step loads less often than it multiplies.
 *
 * Before it, operands_<isa>.h says what an operand is.
 */
#ifndef MSA_PRODUCT_ZMM_H
#define MSA_PRODUCT_ZMM_H

#include "ahead_zmm.h"
#include "kernels.h"
#include "unroll.h"

enum { ROW = 64 * PAIR, MAX_GROUP = 4, MAX_SUMS = 24 };

/* sums[i][j] += products of the steps [from, to), for the units j in [first, last) of `units`. Each pair of elements:
 * odd first. */
INLINE void accumulate(__m512 *sums, const operand *a, const int row_stride, const int step_stride,
                       const operand *const *b, int from, int to, const int rows, const int units, const int first,
                       const int last)
{
    const operand *right_at[MAX_GROUP];
    UNROLL
    for (int j = first; j < last; j++)
        right_at[j] = b[j] + from * UNIT_LANES;
    a += from * step_stride;
    for (int pair = from; pair < to; pair += PAIR) {
        UNROLL
        for (int e = PAIR - 1; e >= 0; e--) {
            vector right[MAX_GROUP];
            UNROLL
            for (int j = first; j < last; j++)
                right[j] = load(right_at[j] + e * UNIT_LANES);
            UNROLL
            for (int i = 0; i < rows; i++) {
                vector left = broadcast(a + i * row_stride + e * step_stride);
                UNROLL
                for (int j = first; j < last; j++)
                    sums[i * units + j] = multiply_add(sums[i * units + j], left, right[j]);
            }
        }
        a += PAIR * step_stride;
        UNROLL
        for (int j = first; j < last; j++)
            right_at[j] += PAIR * UNIT_LANES;
        /* One register a pointer: an indexed operand of a multiply-add costs its own micro-operation. */
        __asm__("" : "+r"(a));
    }
}

/* How many of the units that are left to take at once. */
INLINE int group_size(int left)
{
    return left == 2 || left == 4 ? 2 : left > 2 ? 3 : 1;
}

/* The page's operands, converted slice by slice as the first group of visits gets to them. A page that one group visits
 * alone needs no more than one slice, which then never leaves L1. */
struct operands {
    const struct cpu_page *page;
    struct cpu_ahead ahead;             /* what is left of it */
    int k_ready, v_ready, slice_stride; /* slices, operands */
};

INLINE const operand *k_slice(struct operands *operands, int slice)
{
    operand *k = (operand *)operands->page->k_operand + slice * operands->slice_stride;
    if (slice >= operands->k_ready) {
        operands->page->convert_k(&operands->page->k, slice, operands->page->keys, k);
        operands->k_ready = slice + 1;
    }
    return k;
}

INLINE const operand *v_slice(struct operands *operands, int slice)
{
    operand *v = (operand *)operands->page->v_operand + slice * operands->slice_stride;
    if (slice >= operands->v_ready) {
        operands->page->convert_v(&operands->page->v, slice, operands->page->keys, v);
        operands->v_ready = slice + 1;
    }
    return v;
}

#endif
