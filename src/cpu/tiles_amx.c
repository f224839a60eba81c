/* SPDX-License-Identifier: MIT
 *
 * tiles_amx.c - tile registers on and off. A task of the drivers configures them when it begins and gives them back
 * when it ends, so that no thread of a caller is left with tile state, which the system would save at every switch.
 * Both together take some 300 cycles.
 */
#include "kernels.h"

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16]; /* 8 registers; the others stay 0 */
    uint8_t rows[16];
};

void begin_tiles_amx(void)
{
    static const struct tile_config config = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

void end_tiles_amx(void)
{
    __asm__ volatile("tilerelease" : : : "memory");
}
