/* SPDX-License-Identifier: MIT
 *
 * index_avx512bf16.c - indexer scores with BF16 operands (index_c.c defines it; bit-equal, but for sums below 2^-126,
 * which vdpbf16ps drops).
 *
 * Layout    cpu.h, OPERAND_BF16; index_few: keys as lanes, [8 slices][64 pairs][16 keys].
 * Floor     a unit of 16 rows and a page: 128*64 vdpbf16ps. index_few: the page's bytes from memory.
 * Measured  2026-11-29, Xeon family 6 model 207, share of the vdpbf16ps rate of the same second, conversion of E4M3
 *           keys included, median while other jobs ran: 256 rows and more 99 %, 16 rows 91 %. index_few, GB/s of keys
 *           in cache and out of it, 1 row: E4M3 11.5 and 8.1, BF16 26 and 11, NVFP4 5.3 and 4.5; 4 rows of E4M3: 6.2
 *           and 4.5.
 */
#include "operands_avx512bf16.h"

#include "index_zmm.h"

void index_avx512bf16(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    index_page(page, q, num_rows, scores, row_stride);
}

void index_few_avx512bf16(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    index_few(page, q, num_rows, scores, row_stride);
}
