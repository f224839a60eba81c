/* SPDX-License-Identifier: MIT
 *
 * convert_avx2.c - storage formats to FP32 operands (convert_c.c defines it; bit-equal): K and V slices, and Q units.
 *
 * All works on 16 elements of one token at a time: a K slice is 16 rows of 8 such blocks, a V slice one block of each
 * key. Floor: two 32-byte stores a block; the E4M3 arithmetic takes 13 instructions besides, 3 a cycle.
 */
#include "convert_table.h"
#include "kernels.h"
#include "transpose_ymm.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct block {
    __m256 low, high;
} block;

/* Subnormals read as 0. */
INLINE __m256 bf16_octet(const void *from)
{
    __m256i x = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
    __m256i exponent = _mm256_and_si256(x, _mm256_set1_epi32(0x7F800000));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()), x));
}

INLINE __m256 fp16_octet(const void *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(from));
}

/* E4M3 is FP16 with 4 instead of 5 exponent bits: shifted into place it is 2^-8 times the value, subnormals included.
 * Only the NaN code looks like a number, 480: it is noted, and whoever finds one converts again. */
INLINE block e4m3_small_block(const void *from, __m128i *nan)
{
    __m128i codes = _mm_loadu_si128(from), magnitude = _mm_set1_epi8(0x7F);
    *nan = _mm_or_si128(*nan, _mm_cmpeq_epi8(_mm_and_si128(codes, magnitude), magnitude));
    __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    x = _mm256_and_si256(x, _mm256_set1_epi16((short)0xBF80));
    return (block){_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}

INLINE block e4m3_block(const void *from, __m128i *nan)
{
    block x = e4m3_small_block(from, nan);
    __m256 factor = _mm256_set1_ps(1 / E4M3_SMALL);
    return (block){_mm256_mul_ps(x.low, factor), _mm256_mul_ps(x.high, factor)};
}

INLINE bool found_nan(__m128i nan)
{
    return _mm_movemask_epi8(nan) != 0;
}

/* Codes 0 to 7 permute the first half of the block's row of the table; the fourth bit is the sign. */
INLINE __m256 nvfp4_octet(const uint8_t *codes, __m256 products)
{
    uint32_t word;
    memcpy(&word, codes, 4);
    __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32((int)word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(index, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(products, index), _mm256_castsi256_ps(sign));
}

INLINE block nvfp4_block(const uint8_t *codes, const float *products)
{
    __m256 magnitudes = _mm256_load_ps(products);
    return (block){nvfp4_octet(codes, magnitudes), nvfp4_octet(codes + 4, magnitudes)};
}

INLINE uint8_t scale_at(const struct cpu_rows *rows, int key, int g)
{
    return rows->scale_quad ? rows->scale[key / 4 * 32 + g * 4 + key % 4]
                            : rows->scale[key * rows->scale_token_stride + g];
}

/* Block g of a key. */
INLINE block block_at(const struct cpu_rows *rows, int key, int g, const enum cpu_format format, __m128i *nan)
{
    const uint8_t *row = rows->data + key * rows->token_stride;
    switch (format) {
    case FORMAT_BF16:
        return (block){bf16_octet(row + g * 32), bf16_octet(row + g * 32 + 16)};
    case FORMAT_FP16:
        return (block){fp16_octet(row + g * 32), fp16_octet(row + g * 32 + 16)};
    case FORMAT_E4M3:
        return e4m3_block(row + g * 16, nan);
    case FORMAT_E4M3_SMALL:
        return e4m3_small_block(row + g * 16, nan);
    case FORMAT_NVFP4_E4M3:
        return nvfp4_block(row + g * 8, convert_table.nvfp4_e4m3_f32[scale_at(rows, key, g)]);
    default:
        return nvfp4_block(row + g * 8, convert_table.nvfp4_exact_f32[scale_at(rows, key, g)]);
    }
}

INLINE void store_block(float *to, block x)
{
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}

INLINE void convert_k(const struct cpu_rows *rows, int slice, int keys, float *operand, const enum cpu_format format)
{
    int first = slice * SLICE, last = first + SLICE < keys ? first + SLICE : keys;
    __m128i nan = _mm_setzero_si128();
    for (int key = first; key < last; key++)
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
            store_block(operand + (key - first) * 128 + g * 16, block_at(rows, key, g, format, &nan));
    if (format == FORMAT_E4M3 && found_nan(nan))
        convert_k_e4m3_c(rows, slice, keys, operand);
    if (format == FORMAT_E4M3_SMALL && found_nan(nan))
        convert_k_e4m3_small_c(rows, slice, keys, operand);
}

INLINE void convert_v(const struct cpu_rows *rows, int slice, int keys, float *operand, const enum cpu_format format)
{
    __m128i nan = _mm_setzero_si128();
    for (int key = 0; key < keys; key++)
        store_block(operand + key * SLICE, block_at(rows, key, slice, format, &nan));
    if (format == FORMAT_E4M3 && found_nan(nan))
        convert_v_e4m3_c(rows, slice, keys, operand);
    if (format == FORMAT_E4M3_SMALL && found_nan(nan))
        convert_v_e4m3_small_c(rows, slice, keys, operand);
}

#define CONVERT(name, format)                                                                     \
    void convert_k_##name##_avx2(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                             \
        convert_k(rows, slice, keys, operand, format);                                            \
    }                                                                                             \
    void convert_v_##name##_avx2(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                             \
        convert_v(rows, slice, keys, operand, format);                                            \
    }
CONVERT(bf16, FORMAT_BF16)
CONVERT(fp16, FORMAT_FP16)
CONVERT(e4m3, FORMAT_E4M3)
CONVERT(e4m3_small, FORMAT_E4M3_SMALL)
CONVERT(nvfp4_e4m3, FORMAT_NVFP4_E4M3)
CONVERT(nvfp4_exact, FORMAT_NVFP4_EXACT)

/* ------------------------------------------------------------------------------------------------ Q */

INLINE void pack(const void *const *lanes, int num_lanes, float *unit, const enum cpu_format format)
{
    __m128i nan = _mm_setzero_si128();
    for (int first = 0; first < UNIT_LANES; first += 8)
        for (int g = 0; g < 8; g++) {
            __m256 low[8], high[8];
            for (int i = 0; i < 8; i++) {
                struct cpu_rows row = {.data = first + i < num_lanes ? lanes[first + i] : NULL};
                block x =
                    row.data ? block_at(&row, 0, g, format, &nan) : (block){_mm256_setzero_ps(), _mm256_setzero_ps()};
                low[i] = x.low;
                high[i] = x.high;
            }
            transpose_8x8(low);
            transpose_8x8(high);
            for (int i = 0; i < 8; i++) {
                _mm256_storeu_ps(unit + (g * 16 + i) * UNIT_LANES + first, low[i]);
                _mm256_storeu_ps(unit + (g * 16 + 8 + i) * UNIT_LANES + first, high[i]);
            }
        }
    if (format == FORMAT_E4M3 && found_nan(nan))
        pack_e4m3_c(lanes, num_lanes, unit);
}

void pack_bf16_avx2(const void *const *lanes, int num_lanes, void *unit)
{
    pack(lanes, num_lanes, unit, FORMAT_BF16);
}

void pack_fp16_avx2(const void *const *lanes, int num_lanes, void *unit)
{
    pack(lanes, num_lanes, unit, FORMAT_FP16);
}

void pack_e4m3_avx2(const void *const *lanes, int num_lanes, void *unit)
{
    pack(lanes, num_lanes, unit, FORMAT_E4M3);
}
