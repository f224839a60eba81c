/* SPDX-License-Identifier: MIT
 *
 * convert_c.c - storage formats to the FP32 operands of the portable kernels: K and V pages, and Q units.
 *
 * BF16 subnormals read as 0 on every instruction set, because x86's vdpbf16ps reads them so.
 */
#include "../number.h"
#include "kernels.h"

static float bf16_operand(uint16_t h)
{
    return h & 0x7F80 ? bf16_to_f32(h) : 0.0f;
}

static void convert_half(const struct cpu_rows *rows, int keys, float *operand, float (*decode)(uint16_t))
{
    for (int key = 0; key < keys; key++) {
        const uint8_t *row = rows->data + key * rows->token_stride;
        for (int d = 0; d < 128; d++) {
            uint16_t h;
            memcpy(&h, row + 2 * d, 2);
            operand[key * 128 + d] = decode(h);
        }
    }
}

void convert_bf16_c(const struct cpu_rows *rows, int keys, void *operand)
{
    convert_half(rows, keys, operand, bf16_operand);
}

void convert_fp16_c(const struct cpu_rows *rows, int keys, void *operand)
{
    convert_half(rows, keys, operand, fp16_to_f32);
}

void convert_e4m3_c(const struct cpu_rows *rows, int keys, void *operand)
{
    for (int key = 0; key < keys; key++)
        for (int d = 0; d < 128; d++)
            ((float *)operand)[key * 128 + d] = e4m3_to_f32(rows->data[key * rows->token_stride + d]);
}

static void convert_nvfp4(const struct cpu_rows *rows, int keys, float *operand, bool to_e4m3)
{
    for (int key = 0; key < keys; key++)
        for (int g = 0; g < 8; g++) {
            uint8_t scale = rows->scale_quad ? rows->scale[key / 4 * 32 + g * 4 + key % 4] : rows->scale[key * rows->scale_token_stride + g];
            float value[16]; /* of the 16 codes with this scale */
            for (int code = 0; code < 16; code++) {
                value[code] = nvfp4_to_f32((uint8_t)code, scale);
                if (to_e4m3)
                    value[code] = e4m3_to_f32(f32_to_e4m3(value[code]));
            }
            const uint8_t *codes = rows->data + key * rows->token_stride + g * 8;
            for (int i = 0; i < 8; i++) {
                operand[key * 128 + g * 16 + 2 * i] = value[codes[i] & 15];
                operand[key * 128 + g * 16 + 2 * i + 1] = value[codes[i] >> 4];
            }
        }
}

void convert_nvfp4_e4m3_c(const struct cpu_rows *rows, int keys, void *operand)
{
    convert_nvfp4(rows, keys, operand, true);
}

void convert_nvfp4_exact_c(const struct cpu_rows *rows, int keys, void *operand)
{
    convert_nvfp4(rows, keys, operand, false);
}

static void pack_half(const void *const *lanes, int num_lanes, float *unit, float (*decode)(uint16_t))
{
    memset(unit, 0, 128 * UNIT_LANES * sizeof *unit);
    for (int lane = 0; lane < num_lanes; lane++)
        for (int d = 0; d < 128; d++)
            unit[d * UNIT_LANES + lane] = decode(((const uint16_t *)lanes[lane])[d]);
}

void pack_bf16_c(const void *const *lanes, int num_lanes, void *unit)
{
    pack_half(lanes, num_lanes, unit, bf16_operand);
}

void pack_fp16_c(const void *const *lanes, int num_lanes, void *unit)
{
    pack_half(lanes, num_lanes, unit, fp16_to_f32);
}

void pack_e4m3_c(const void *const *lanes, int num_lanes, void *unit)
{
    memset(unit, 0, 128 * UNIT_LANES * sizeof(float));
    for (int lane = 0; lane < num_lanes; lane++)
        for (int d = 0; d < 128; d++)
            ((float *)unit)[d * UNIT_LANES + lane] = e4m3_to_f32(((const uint8_t *)lanes[lane])[d]);
}
