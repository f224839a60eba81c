/* SPDX-License-Identifier: MIT
 *
 * index_c.c - indexer scores of one whole page: per row the largest of 128 dot products. Portable C, the definition.
 * A NaN dot product never becomes the maximum; a page of nothing but NaN scores -inf.
 */
#include "kernels.h"
#include "product_c.h"

#include <math.h>
#include <string.h>

static inline __attribute__((always_inline)) void unit_scores(const float *keys, const float *rows, float *scores,
                                                              const bool exact)
{
    float best[UNIT_LANES];
    for (int lane = 0; lane < UNIT_LANES; lane++)
        best[lane] = -INFINITY;
    for (int key = 0; key < 128; key++) {
        float sum[UNIT_LANES] = {0};
        for (int d = 0; d < 128; d += 2)
            for (int lane = 0; lane < UNIT_LANES; lane++) {
                sum[lane] = multiply_add(sum[lane], keys[key * 128 + d + 1], rows[(d + 1) * UNIT_LANES + lane], exact);
                sum[lane] = multiply_add(sum[lane], keys[key * 128 + d], rows[d * UNIT_LANES + lane], exact);
            }
        for (int lane = 0; lane < UNIT_LANES; lane++)
            best[lane] = sum[lane] > best[lane] ? sum[lane] : best[lane];
    }
    memcpy(scores, best, sizeof best);
}

void index_c(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    float *keys = page->k_operand;
    for (int slice = 0; slice < NUM_SLICES; slice++)
        page->convert_k(&page->k, slice, 128, keys + slice * SLICE * 128);
    const struct magnitudes of_keys = magnitudes_of(keys, 128 * 128);
    for (int unit = 0; unit * UNIT_LANES < num_rows; unit++) {
        const float *rows = (const float *)q + unit * 128 * UNIT_LANES;
        float best[UNIT_LANES];
        if (products_are_exact(of_keys, magnitudes_of(rows, 128 * UNIT_LANES)))
            unit_scores(keys, rows, best, true);
        else
            unit_scores(keys, rows, best, false);
        for (int lane = 0; lane < UNIT_LANES && unit * UNIT_LANES + lane < num_rows; lane++)
            scores[(unit * UNIT_LANES + lane) * row_stride] = best[lane];
    }
}
