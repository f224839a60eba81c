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

/* Element d of a key. */
typedef float element_fn(const struct cpu_rows *rows, int key, int d);

static uint16_t half_at(const struct cpu_rows *rows, int key, int d)
{
    uint16_t h;
    memcpy(&h, rows->data + key * rows->token_stride + 2 * d, 2);
    return h;
}

static float bf16_at(const struct cpu_rows *rows, int key, int d)
{
    return bf16_operand(half_at(rows, key, d));
}

static float fp16_at(const struct cpu_rows *rows, int key, int d)
{
    return fp16_to_f32(half_at(rows, key, d));
}

static float e4m3_at(const struct cpu_rows *rows, int key, int d)
{
    return e4m3_to_f32(rows->data[key * rows->token_stride + d]);
}

static float e4m3_small_at(const struct cpu_rows *rows, int key, int d)
{
    return e4m3_at(rows, key, d) * E4M3_SMALL;
}

static float nvfp4_exact_at(const struct cpu_rows *rows, int key, int d)
{
    int g = d / 16;
    uint8_t scale = rows->scale_quad ? rows->scale[key / 4 * 32 + g * 4 + key % 4]
                                     : rows->scale[key * rows->scale_token_stride + g];
    uint8_t codes = rows->data[key * rows->token_stride + d / 2];
    return nvfp4_to_f32(d % 2 ? codes >> 4 : codes & 15, scale);
}

static float nvfp4_e4m3_at(const struct cpu_rows *rows, int key, int d)
{
    return e4m3_to_f32(f32_to_e4m3(nvfp4_exact_at(rows, key, d)));
}

static void convert_k(const struct cpu_rows *rows, int slice, int keys, float *operand, element_fn *at)
{
    for (int i = 0; i < SLICE && slice * SLICE + i < keys; i++)
        for (int d = 0; d < 128; d++)
            operand[i * 128 + d] = at(rows, slice * SLICE + i, d);
}

static void convert_v(const struct cpu_rows *rows, int slice, int keys, float *operand, element_fn *at)
{
    for (int key = 0; key < keys; key++)
        for (int i = 0; i < SLICE; i++)
            operand[key * SLICE + i] = at(rows, key, slice * SLICE + i);
}

void convert_k_bf16_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_k(rows, slice, keys, operand, bf16_at);
}

void convert_v_bf16_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_v(rows, slice, keys, operand, bf16_at);
}

void convert_k_fp16_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_k(rows, slice, keys, operand, fp16_at);
}

void convert_v_fp16_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_v(rows, slice, keys, operand, fp16_at);
}

void convert_k_e4m3_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_k(rows, slice, keys, operand, e4m3_at);
}

void convert_v_e4m3_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_v(rows, slice, keys, operand, e4m3_at);
}

void convert_k_e4m3_small_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_k(rows, slice, keys, operand, e4m3_small_at);
}

void convert_v_e4m3_small_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_v(rows, slice, keys, operand, e4m3_small_at);
}

void convert_k_nvfp4_e4m3_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_k(rows, slice, keys, operand, nvfp4_e4m3_at);
}

void convert_v_nvfp4_e4m3_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_v(rows, slice, keys, operand, nvfp4_e4m3_at);
}

void convert_k_nvfp4_exact_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_k(rows, slice, keys, operand, nvfp4_exact_at);
}

void convert_v_nvfp4_exact_c(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    convert_v(rows, slice, keys, operand, nvfp4_exact_at);
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
