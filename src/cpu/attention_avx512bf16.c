/* SPDX-License-Identifier: MIT
 *
 * attention_avx512bf16.c - attention with BF16 operands (attention_c.c defines it; bit-equal, but for sums below
 * 2^-126, which vdpbf16ps drops).
 *
 * Layout    cpu.h, OPERAND_BF16. A step is a pair of elements of the head dimension (QK) or of keys (PV).
 * Floor     a visit of a unit to a whole page: 2 * 64*128 vdpbf16ps. Zen 4 does one a cycle, twice its FMA rate: 16384
 *           cycles; Sapphire Rapids one in two cycles, half its FMA rate, so there attention_avx512 is faster.
 * Measured  2026-11-29, Xeon family 6 model 207, share of the vdpbf16ps rate of the same second, conversion of the page
 *           (E4M3) included, median while other jobs ran: 32 units a page 94 %, 3 units 92 %, 1 unit 86 %. Not measured
 *           on AMD.
 */
#include "operands_avx512bf16.h"

#include "attention_zmm.h"

void attention_avx512bf16(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits,
                          int num_visits)
{
    attend(tile, page, visits, num_visits);
}
