/* SPDX-License-Identifier: MIT
 *
 * attention_neon.c - attention with FP32 operands on NEON (attention_lanes.h). attention_c.c defines it; bit-equal. BFDOT
 * and BFMMLA are of no use: they round otherwise.
 *
 * Layout   cpu.h, OPERAND_F32; a unit's 16 lanes are four vectors.
 * Floor    a visit of a unit to a whole page: 2 * 128*128 FMAs of 16 lanes, at two vectors a cycle 65536 cycles. Checked
 *          under qemu-aarch64, which says nothing of the speed.
 */
#include "lanes_neon.h"

#include "attention_lanes.h"

void attention_neon(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits, int num_visits)
{
    attend(tile, page, visits, num_visits);
}
