/* SPDX-License-Identifier: MIT
 *
 * convert_table.c - fills the tables of convert_table.h.
 */
#include "convert_table.h"

#include "../number.h"

#include <pthread.h>

struct convert_table convert_table;

static void fill(void)
{
    for (int scale = 0; scale < 256; scale++)
        for (int code = 0; code < 16; code++) {
            float exact = nvfp4_to_f32((uint8_t)code, (uint8_t)scale), rounded = e4m3_to_f32(f32_to_e4m3(exact));
            convert_table.nvfp4_exact_f32[scale][code] = exact;
            convert_table.nvfp4_e4m3_f32[scale][code] = rounded;
            convert_table.nvfp4_exact_bf16[scale][code] = f32_to_bf16(exact);
            convert_table.nvfp4_e4m3_bf16[scale][code] = f32_to_bf16(rounded);
        }
    for (int code = 0; code < 128; code++) {
        uint16_t value = f32_to_bf16(e4m3_to_f32((uint8_t)code));
        convert_table.e4m3_low[code] = (uint8_t)value;
        convert_table.e4m3_high[code] = (uint8_t)(value >> 8);
    }
}

void convert_table_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill);
}
