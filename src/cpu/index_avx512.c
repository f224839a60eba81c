/* SPDX-License-Identifier: MIT
 *
 * index_avx512.c - indexer scores with FP32 operands (index_c.c defines it; bit-equal).
 *
 * Layout    cpu.h, OPERAND_F32; index_few: keys as lanes, [8 slices][128 d][16 keys].
 * Floor     a unit of 16 rows and a page: 128*128 FMAs, at 2 a cycle 8192 cycles.
 * Measured  2026-11-30, Xeon family 6 model 207, share of the FMA rate beside it, conversion of E4M3 keys included, the
 *           core's other hyperthread idle: 768 rows 97 %, 48 rows 86 %; the day before 256 rows 96 %, 64 rows 88 %, 16
 *           rows 71 %. index_few, 1 row, best cycles a page out of cache: BF16 keys 10800 (8.2 GB/s), NVFP4 7200, bound
 *           by the conversion. (E4M3 keys have a kernel of their own, index_e4m3_avx512.c.)
 */
#include "operands_avx512.h"

#include "index_zmm.h"

void index_avx512(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    index_page(page, q, num_rows, scores, row_stride);
}

void index_few_avx512(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    index_few(page, q, num_rows, scores, row_stride);
}
