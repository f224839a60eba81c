/* SPDX-License-Identifier: MIT
 *
 * index_zmm.h - indexer scores on 512-bit vectors, for both operand families: index_avx512.c and index_avx512bf16.c
 * include it after operands_<isa>.h. A lane is a (query, head) row; its largest dot product never leaves the register.
 */
#include "product_zmm.h"

#include <math.h>

INLINE void index_group(struct operands *operands, const operand *q, int num_rows, float *scores, int64_t row_stride,
                        const int rows, const int units)
{
    const operand *unit_q[MAX_GROUP];
    __m512 max[MAX_GROUP];
    for (int j = 0; j < units; j++) {
        unit_q[j] = q + j * ROW * UNIT_LANES;
        max[j] = _mm512_set1_ps(-INFINITY);
    }
    for (int key = 0; key < 128; key += rows) {
        const operand *k = k_slice(operands, key / SLICE) + key % SLICE * ROW;
        __m512 sums[MAX_SUMS];
        UNROLL
        for (int i = 0; i < rows * units; i++)
            sums[i] = _mm512_setzero_ps();
        fetch_ahead(&operands->ahead);
        accumulate(sums, k, ROW, 1, unit_q, 0, ROW, rows, units, 0, units);
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int j = 0; j < units; j++)
                max[j] = _mm512_max_ps(sums[i * units + j], max[j]); /* a NaN leaves max: the operands' order counts */
        }
    }
    float best[MAX_GROUP * UNIT_LANES];
    for (int j = 0; j < units; j++)
        _mm512_storeu_ps(best + j * UNIT_LANES, max[j]);
    for (int r = 0; r < units * UNIT_LANES && r < num_rows; r++)
        scores[r * row_stride] = best[r];
}

INLINE void index_page(const struct cpu_page *page, const operand *q, int num_rows, float *scores, int64_t row_stride)
{
    struct operands operands = {page, page->ahead, 0, 0, num_rows > 3 * UNIT_LANES ? SLICE * ROW : 0};
    while (num_rows > 0) {
        int left = (num_rows + UNIT_LANES - 1) / UNIT_LANES, units = group_size(left);
        if (units == 3)
            index_group(&operands, q, num_rows, scores, row_stride, 8, 3);
        else if (units == 2)
            index_group(&operands, q, num_rows, scores, row_stride, 8, 2);
        else
            index_group(&operands, q, num_rows, scores, row_stride, 16, 1);
        q += units * ROW * UNIT_LANES;
        scores += units * UNIT_LANES * row_stride;
        num_rows -= units * UNIT_LANES;
    }
}

/* ------------------------------------------------------------------------------------------------ few rows */

/* Here 16 keys are the lanes: the page's convert_k turns its slices, and rows of Q are what is broadcast. Four slices
 * at a time, because a single chain of multiply-adds would wait for each. */
INLINE void index_few_rows(const struct cpu_page *page, const operand *q, int num_rows, float *scores,
                           int64_t row_stride, const int rows)
{
    enum { TOGETHER = 4 };
    operand *k = page->k_operand;
    const operand *slices[TOGETHER] = {k, k + SLICE * ROW, k + 2 * SLICE * ROW, k + 3 * SLICE * ROW};
    struct cpu_ahead ahead = page->ahead;
    __m512 max[INDEX_FEW];
    for (int i = 0; i < rows; i++)
        max[i] = _mm512_set1_ps(-INFINITY);
    for (int first = 0; first < NUM_SLICES; first += TOGETHER) {
        for (int j = 0; j < TOGETHER; j++) {
            for (int i = 0; i < SLICE / AHEAD_PLACES; i++)
                fetch_ahead(&ahead);
            page->convert_k(&page->k, first + j, 128, k + j * SLICE * ROW);
        }
        __m512 sums[MAX_SUMS];
        UNROLL
        for (int i = 0; i < rows * TOGETHER; i++)
            sums[i] = _mm512_setzero_ps();
        accumulate(sums, q, 1, UNIT_LANES, slices, 0, ROW, rows, TOGETHER, 0, TOGETHER);
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int j = 0; j < TOGETHER; j++)
                max[i] = _mm512_max_ps(sums[i * TOGETHER + j], max[i]);
        }
    }
    for (int i = 0; i < rows && i < num_rows; i++)
        scores[i * row_stride] = _mm512_reduce_max_ps(max[i]);
}

INLINE void index_few(const struct cpu_page *page, const operand *q, int num_rows, float *scores, int64_t row_stride)
{
    if (num_rows == 1)
        index_few_rows(page, q, num_rows, scores, row_stride, 1);
    else
        index_few_rows(page, q, num_rows, scores, row_stride, INDEX_FEW);
}
