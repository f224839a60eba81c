/* SPDX-License-Identifier: MIT
 *
 * convert_table.h - what vector conversions look up: the products of every NVFP4 code with every block scale, exact or
 * rounded to E4M3, as FP32 and as BF16 operands; and the two bytes of the BF16 value of every E4M3 magnitude.
 */
#ifndef MSA_CONVERT_TABLE_H
#define MSA_CONVERT_TABLE_H

#include <stdint.h>

struct convert_table {
    _Alignas(64) float nvfp4_exact_f32[256][16], nvfp4_e4m3_f32[256][16];
    _Alignas(64) uint16_t nvfp4_exact_bf16[256][16], nvfp4_e4m3_bf16[256][16];
    _Alignas(64) uint8_t e4m3_low[128], e4m3_high[128];
};
extern struct convert_table convert_table;

/* Before the first conversion; more calls do nothing. */
void convert_table_init(void);

#endif
