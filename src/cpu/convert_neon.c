/* SPDX-License-Identifier: MIT
 *
 * convert_neon.c - storage formats to FP32 operands (convert_c.c defines it; bit-equal): K and V slices. Q units are
 * left to the portable code, which runs once a tile.
 *
 * All works on 16 elements of one token at a time: a K slice is 16 rows of 8 such blocks, a V slice one block of each
 * key.
 */
#include "convert_table.h"
#include "kernels.h"

#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))

/* Subnormals read as 0. */
INLINE void bf16_block(const uint8_t *from, float *to)
{
    for (int i = 0; i < 16; i += 4) {
        uint32x4_t x = vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from + 2 * i)), 16);
        x = vandq_u32(x, vtstq_u32(x, vdupq_n_u32(0x7F800000)));
        vst1q_f32(to + i, vreinterpretq_f32_u32(x));
    }
}

INLINE void fp16_block(const uint8_t *from, float *to)
{
    for (int i = 0; i < 16; i += 4)
        vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * i))));
}

/* E4M3 is FP16 with 4 instead of 5 exponent bits: shifted into place it is 2^-8 times the value, subnormals included.
 * Only the NaN code looks like a number, 480: it is noted, and whoever finds one converts again. */
INLINE void e4m3_block(const uint8_t *from, float *to, uint8x16_t *nan, const bool small)
{
    uint8x16_t codes = vld1q_u8(from), magnitude = vdupq_n_u8(0x7F);
    *nan = vorrq_u8(*nan, vceqq_u8(vandq_u8(codes, magnitude), magnitude));
    int16x8_t half[2] = {vshll_n_s8(vget_low_s8(vreinterpretq_s8_u8(codes)), 7),
                         vshll_high_n_s8(vreinterpretq_s8_u8(codes), 7)};
    for (int i = 0; i < 2; i++) {
        float16x8_t x = vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(half[i]), vdupq_n_u16(0xBF80)));
        float32x4_t low = vcvt_f32_f16(vget_low_f16(x)), high = vcvt_high_f32_f16(x);
        vst1q_f32(to + 8 * i, small ? low : vmulq_n_f32(low, 1 / E4M3_SMALL));
        vst1q_f32(to + 8 * i + 4, small ? high : vmulq_n_f32(high, 1 / E4M3_SMALL));
    }
}

/* The 64 bytes of the block's row of the table, looked up four bytes a code. */
INLINE void nvfp4_block(const uint8_t *from, float *to, const float *products)
{
    static const uint8_t byte_in_float[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
    static const uint8_t code_of_byte[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    uint8x16x4_t table = vld1q_u8_x4((const uint8_t *)products);
    uint8x8_t codes = vld1_u8(from);
    uint8x8x2_t each = vzip_u8(vand_u8(codes, vdup_n_u8(15)), vshr_n_u8(codes, 4));
    uint8x16_t first_byte = vshlq_n_u8(vcombine_u8(each.val[0], each.val[1]), 2);
    for (int i = 0; i < 16; i += 4) {
        uint8x16_t index = vqtbl1q_u8(first_byte, vaddq_u8(vld1q_u8(code_of_byte), vdupq_n_u8((uint8_t)i)));
        vst1q_u8((uint8_t *)(to + i), vqtbl4q_u8(table, vaddq_u8(index, vld1q_u8(byte_in_float))));
    }
}

INLINE uint8_t scale_at(const struct cpu_rows *rows, int key, int g)
{
    return rows->scale_quad ? rows->scale[key / 4 * 32 + g * 4 + key % 4]
                            : rows->scale[key * rows->scale_token_stride + g];
}

/* Block g of a key. */
INLINE void block_to(float *to, const struct cpu_rows *rows, int key, int g, const enum cpu_format format,
                     uint8x16_t *nan)
{
    const uint8_t *row = rows->data + key * rows->token_stride;
    switch (format) {
    case FORMAT_BF16:
        bf16_block(row + g * 32, to);
        return;
    case FORMAT_FP16:
        fp16_block(row + g * 32, to);
        return;
    case FORMAT_E4M3:
    case FORMAT_E4M3_SMALL:
        e4m3_block(row + g * 16, to, nan, format == FORMAT_E4M3_SMALL);
        return;
    case FORMAT_NVFP4_E4M3:
        nvfp4_block(row + g * 8, to, convert_table.nvfp4_e4m3_f32[scale_at(rows, key, g)]);
        return;
    default:
        nvfp4_block(row + g * 8, to, convert_table.nvfp4_exact_f32[scale_at(rows, key, g)]);
    }
}

INLINE void convert_k(const struct cpu_rows *rows, int slice, int keys, float *operand, const enum cpu_format format)
{
    int first = slice * SLICE, last = first + SLICE < keys ? first + SLICE : keys;
    uint8x16_t nan = vdupq_n_u8(0);
    for (int key = first; key < last; key++)
        for (int g = 0; g < 8; g++)
            block_to(operand + (key - first) * 128 + g * 16, rows, key, g, format, &nan);
    if (format == FORMAT_E4M3 && vmaxvq_u8(nan))
        convert_k_e4m3_c(rows, slice, keys, operand);
    if (format == FORMAT_E4M3_SMALL && vmaxvq_u8(nan))
        convert_k_e4m3_small_c(rows, slice, keys, operand);
}

INLINE void convert_v(const struct cpu_rows *rows, int slice, int keys, float *operand, const enum cpu_format format)
{
    uint8x16_t nan = vdupq_n_u8(0);
    for (int key = 0; key < keys; key++)
        block_to(operand + key * SLICE, rows, key, slice, format, &nan);
    if (format == FORMAT_E4M3 && vmaxvq_u8(nan))
        convert_v_e4m3_c(rows, slice, keys, operand);
    if (format == FORMAT_E4M3_SMALL && vmaxvq_u8(nan))
        convert_v_e4m3_small_c(rows, slice, keys, operand);
}

#define CONVERT(name, format)                                                                     \
    void convert_k_##name##_neon(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                             \
        convert_k(rows, slice, keys, operand, format);                                            \
    }                                                                                             \
    void convert_v_##name##_neon(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                             \
        convert_v(rows, slice, keys, operand, format);                                            \
    }
CONVERT(bf16, FORMAT_BF16)
CONVERT(fp16, FORMAT_FP16)
CONVERT(e4m3, FORMAT_E4M3)
CONVERT(e4m3_small, FORMAT_E4M3_SMALL)
CONVERT(nvfp4_e4m3, FORMAT_NVFP4_E4M3)
CONVERT(nvfp4_exact, FORMAT_NVFP4_EXACT)
