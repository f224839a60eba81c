/* SPDX-License-Identifier: MIT
 *
 * index_lanes.h - the indexer with FP32 operands on vectors shorter than 16 lanes (lanes.h); index_c.c defines the
 * results, and these are bit-equal. Slices are converted as the first unit gets to them; the best of the 128 keys stays
 * in registers.
 */
#include "lanes.h"

#include <math.h>

INLINE void best_rows(const float *k, const float *q, lanes *best, const int rows)
{
    lanes sums[MAX_ROWS];
    multiply(sums, k, 128, 1, q, 128, rows);
#pragma GCC unroll 5
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PARTS; j++)
            best->part[j] = v_max(sums[i].part[j], best->part[j]); /* NaN: the best so far */
}

INLINE void index_page(const struct cpu_page *page, const float *q, int num_rows, float *scores, int64_t row_stride)
{
    for (int first = 0; first < num_rows; first += UNIT_LANES, q += 128 * UNIT_LANES) {
        lanes best = all(-INFINITY);
        float *k = page->k_operand;
        for (int slice = 0; slice < NUM_SLICES; slice++, k += SLICE * 128) {
            if (first == 0)
                page->convert_k(&page->k, slice, 128, k);
            best_rows(k, q, &best, 6);
            best_rows(k + 6 * 128, q, &best, 5);
            best_rows(k + 11 * 128, q, &best, 5);
        }
        float lane[UNIT_LANES];
        store(lane, best);
        for (int i = 0; i < UNIT_LANES && first + i < num_rows; i++)
            scores[(first + i) * row_stride] = lane[i];
    }
}
