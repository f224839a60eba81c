/* SPDX-License-Identifier: MIT
 *
 * convert_avx512.c - storage formats to FP32 operands (convert_c.c defines it; bit-equal): K and V slices, Q units.
 *
 * All works on blocks of 16 elements of one token: a K slice is 16 rows of 8 blocks, a V slice one block of each key.
 *
 * Floor     of a page, 1024 blocks: a store, and 1 (FP16), 2 (BF16), 3 (NVFP4) or 4 (E4M3; small 3) vector operations a
 *           block, 2 a cycle; for E4M3 half a store more.
 * Measured  2026-11-30, Xeon family 6 model 207, best cycles for 8 slices of K and of V: BF16 1630 and 1880, FP16 1170
 *           and 1180, E4M3 2770 and 3090, small E4M3 2230 and 2570, NVFP4 1780 and 2180.
 */
#include "convert_table.h"
#include "kernels.h"
#include "transpose_zmm.h"
#include "unroll.h"

#include <math.h>
#include <string.h>

/* Subnormals read as 0. */
INLINE __m512 bf16_block(const void *from)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from));
    __mmask16 normal = _mm512_test_epi32_mask(x, _mm512_set1_epi32(0x7F80));
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(normal, x, 16));
}

/* Two blocks. (A permutation of words also widens them, as one operation where two would be needed for each block.) */
INLINE void bf16_blocks(__m512i x, float *first, float *second)
{
    const __m512i pick = _mm512_setr_epi32(0, 1 << 16, 2 << 16, 3 << 16, 4 << 16, 5 << 16, 6 << 16, 7 << 16, 8 << 16,
                                           9 << 16, 10 << 16, 11 << 16, 12 << 16, 13 << 16, 14 << 16, 15 << 16);
    const __m512i pick_second = _mm512_add_epi32(pick, _mm512_set1_epi32(16 << 16));
    const __mmask32 upper = 0xAAAAAAAA;
    x = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7F80)), x);
    _mm512_store_si512(first, _mm512_maskz_permutexvar_epi16(upper, pick, x));
    _mm512_store_si512(second, _mm512_maskz_permutexvar_epi16(upper, pick_second, x));
}

INLINE __m512 fp16_block(const void *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(from));
}

/* The block's row of the table, permuted by its codes: a permutation looks at the low four bits of an index. */
INLINE __m512 nvfp4_block(const uint8_t *codes, const float *products)
{
    __mmask16 upper = 0xFF00;
    __asm__("" : "+Yk"(upper)); /* a masked load: clang makes a shuffle of one whose mask it knows */
    __m512i low = _mm512_broadcastd_epi32(_mm_loadu_si32(codes));
    __m512i both = _mm512_mask_broadcastd_epi32(low, upper, _mm_loadu_si32(codes + 4));
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), _mm512_load_ps(products));
}

/* Rows go by value: in memory they could be overlapped by what is stored. */
INLINE uint8_t scale_at(const struct cpu_rows rows, int key, int g, const bool quad)
{
    return quad ? rows.scale[key / 4 * 32 + g * 4 + key % 4] : rows.scale[key * rows.scale_token_stride + g];
}

/* Block g of a key. */
INLINE __m512 block_at(const struct cpu_rows rows, int key, int g, const bool quad, const enum cpu_format format)
{
    const uint8_t *row = rows.data + key * rows.token_stride;
    switch (format) {
    case FORMAT_BF16:
        return bf16_block(row + g * 32);
    case FORMAT_FP16:
        return fp16_block(row + g * 32);
    case FORMAT_NVFP4_E4M3:
        return nvfp4_block(row + g * 8, convert_table.nvfp4_e4m3_f32[scale_at(rows, key, g, quad)]);
    case FORMAT_NVFP4_EXACT:
        return nvfp4_block(row + g * 8, convert_table.nvfp4_exact_f32[scale_at(rows, key, g, quad)]);
    case FORMAT_E4M3_SMALL: /* as half_from_e4m3 left it */
        return fp16_block(row + g * 32);
    default:
        return _mm512_mul_ps(fp16_block(row + g * 32), _mm512_set1_ps(1 / E4M3_SMALL));
    }
}

INLINE void convert_k(const struct cpu_rows rows, int first, int last, float *operand, const enum cpu_format format)
{
    for (int key = first; key < last; key++, operand += 128) {
        UNROLL
        for (int g = 0; g < 8; g += 2) {
            if (format == FORMAT_BF16) {
                const uint8_t *from = rows.data + key * rows.token_stride + g * 32;
                bf16_blocks(_mm512_loadu_si512(from), operand + g * 16, operand + (g + 1) * 16);
            } else {
                _mm512_store_ps(operand + g * 16, block_at(rows, key, g, false, format));
                _mm512_store_ps(operand + (g + 1) * 16, block_at(rows, key, g + 1, false, format));
            }
        }
    }
}

INLINE void convert_v(const struct cpu_rows rows, int slice, int keys, float *operand, const bool quad,
                      const enum cpu_format format)
{
    int key = 0;
    for (; format == FORMAT_BF16 && key + 2 <= keys; key += 2) {
        const uint8_t *from = rows.data + key * rows.token_stride + slice * 32;
        __m256i second = _mm256_loadu_si256((const void *)(from + rows.token_stride));
        __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)from));
        bf16_blocks(_mm512_inserti64x4(first, second, 1), operand + key * SLICE, operand + (key + 1) * SLICE);
    }
    for (; key < keys; key++)
        _mm512_store_ps(operand + key * SLICE, block_at(rows, key, slice, quad, format));
}

INLINE int slice_end(int slice, int keys)
{
    return (slice + 1) * SLICE < keys ? (slice + 1) * SLICE : keys;
}

#define CONVERT(name, format)                                                                       \
    void convert_k_##name##_avx512(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                               \
        convert_k(*rows, slice *SLICE, slice_end(slice, keys), operand, format);                    \
    }                                                                                               \
    void convert_v_##name##_avx512(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                               \
        if (rows->scale_quad)                                                                       \
            convert_v(*rows, slice, keys, operand, true, format);                                   \
        else                                                                                        \
            convert_v(*rows, slice, keys, operand, false, format);                                  \
    }
CONVERT(bf16, FORMAT_BF16)
CONVERT(fp16, FORMAT_FP16)
CONVERT(nvfp4_e4m3, FORMAT_NVFP4_E4M3)
CONVERT(nvfp4_exact, FORMAT_NVFP4_EXACT)

/* ------------------------------------------------------------------------------------------------ E4M3 */

/* E4M3 is FP16 with 4 instead of 5 exponent bits: shifted into place it is 2^-8 times the value, subnormals included.
 * The way leads through memory, because there vcvtph2ps finds its 16 elements without a shuffle; a few keys at a time,
 * whose halves take no room in L1 from the units that multiply. Only the NaN codes would look like numbers: whoever
 * meets one leaves the work to the portable code. */
enum { K_AT_ONCE = 4, V_AT_ONCE = 16 };

INLINE __m512i half_from_e4m3(__m256i codes)
{
    return _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7), _mm512_set1_epi16((short)0xBF80));
}

/* Gathers codes that are NaN, 0x7F or 0xFF: adding 1 carries through the seven ones and changes bit 7, there alone. */
INLINE __m512i look_for_nan(__m512i seen, __m512i codes)
{
    return _mm512_ternarylogic_epi32(seen, codes, _mm512_add_epi8(codes, _mm512_set1_epi8(1)),
                                     0xF6); /* seen | (b ^ c) */
}

INLINE bool found_nan(__m512i seen)
{
    return _mm512_movepi8_mask(seen) != 0;
}

/* 64 elements. */
INLINE __m512i half_row_from_e4m3(const uint8_t *from, uint16_t *to, __m512i seen)
{
    _mm512_store_si512(to, half_from_e4m3(_mm256_loadu_si256((const void *)from)));
    _mm512_store_si512(to + 32, half_from_e4m3(_mm256_loadu_si256((const void *)(from + 32))));
    return look_for_nan(seen, _mm512_loadu_si512(from));
}

/* `count` keys. */
INLINE __m512i convert_k_rows(const uint8_t *row, int64_t stride, const int count, float *operand, __m512i seen,
                              const enum cpu_format format)
{
    _Alignas(64) uint16_t half[K_AT_ONCE][128];
    const struct cpu_rows halves = {.data = (const uint8_t *)half, .token_stride = sizeof half[0]};
    UNROLL
    for (int i = 0; i < 2 * count; i++)
        seen = half_row_from_e4m3(row + i / 2 * stride + i % 2 * 64, half[i / 2] + i % 2 * 64, seen);
    convert_k(halves, 0, count, operand, format);
    return seen;
}

INLINE bool convert_k_e4m3(const struct cpu_rows *rows, int slice, int keys, float *operand,
                           const enum cpu_format format)
{
    __m512i seen = _mm512_setzero_si512();
    int key = slice * SLICE, last = slice_end(slice, keys);
    const int64_t stride = rows->token_stride;
    const uint8_t *row = rows->data + key * stride;
    for (; key + K_AT_ONCE <= last; key += K_AT_ONCE, row += K_AT_ONCE * stride, operand += K_AT_ONCE * 128)
        seen = convert_k_rows(row, stride, K_AT_ONCE, operand, seen, format);
    for (; key < last; key++, row += stride, operand += 128)
        seen = convert_k_rows(row, stride, 1, operand, seen, format);
    return !found_nan(seen);
}

/* Blocks of two keys. */
INLINE __m256i two_blocks(const uint8_t *first, const uint8_t *second)
{
    return _mm256_set_m128i(_mm_loadu_si128((const void *)second), _mm_loadu_si128((const void *)first));
}

/* Blocks of four keys. */
INLINE __m512i half_blocks_from_e4m3(const uint8_t *const key[4], uint16_t (*to)[SLICE], __m512i seen)
{
    __m256i low = two_blocks(key[0], key[1]), high = two_blocks(key[2], key[3]);
    _mm512_store_si512(to[0], half_from_e4m3(low));
    _mm512_store_si512(to[2], half_from_e4m3(high));
    return look_for_nan(seen, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

/* `count` keys, by fours; where there are fewer, the first stands in for those that are not there. */
INLINE __m512i convert_v_rows(const uint8_t *row, int64_t stride, const int count, float *operand, __m512i seen,
                              const enum cpu_format format)
{
    _Alignas(64) uint16_t half[V_AT_ONCE][SLICE];
    const struct cpu_rows halves = {.data = (const uint8_t *)half, .token_stride = sizeof half[0]};
    UNROLL
    for (int i = 0; i < count; i += 4, row += 4 * stride) {
        const uint8_t *four[4] = {row, row, row, row};
        UNROLL
        for (int j = 1; j < 4; j++)
            four[j] += i + j < count ? j * stride : 0;
        seen = half_blocks_from_e4m3(four, half + i, seen);
    }
    convert_v(halves, 0, count, operand, false, format);
    return seen;
}

INLINE bool convert_v_e4m3(const struct cpu_rows *rows, int slice, int keys, float *operand,
                           const enum cpu_format format)
{
    __m512i seen = _mm512_setzero_si512();
    const int64_t stride = rows->token_stride;
    const uint8_t *row = rows->data + slice * SLICE;
    int key = 0;
    for (; key + V_AT_ONCE <= keys; key += V_AT_ONCE, row += V_AT_ONCE * stride, operand += V_AT_ONCE * SLICE)
        seen = convert_v_rows(row, stride, V_AT_ONCE, operand, seen, format);
    for (; key < keys; key++, row += stride, operand += SLICE)
        seen = convert_v_rows(row, stride, 1, operand, seen, format);
    return !found_nan(seen);
}

#define CONVERT_E4M3(name, format)                                                                  \
    void convert_k_##name##_avx512(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                               \
        if (!convert_k_e4m3(rows, slice, keys, operand, format))                                    \
            convert_k_##name##_c(rows, slice, keys, operand);                                       \
    }                                                                                               \
    void convert_v_##name##_avx512(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                               \
        if (!convert_v_e4m3(rows, slice, keys, operand, format))                                    \
            convert_v_##name##_c(rows, slice, keys, operand);                                       \
    }
CONVERT_E4M3(e4m3, FORMAT_E4M3)
CONVERT_E4M3(e4m3_small, FORMAT_E4M3_SMALL)

/* ------------------------------------------------------------------------------------------------ K turned */

INLINE void turn(cpu_convert_fn *convert_slice, const struct cpu_rows *rows, int slice, int keys, float *operand)
{
    _Alignas(64) float k[SLICE][128];
    convert_slice(rows, slice, keys, k);
    for (int d = 0; d < 128; d += 16) {
        __m512i block[16];
        transpose_load((const uint8_t *)(k[0] + d), sizeof k[0], block);
        UNROLL
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(operand + (d + i) * SLICE, block[i]);
    }
}

void convert_turned_bf16_avx512(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    turn(convert_k_bf16_avx512, rows, slice, keys, operand);
}

void convert_turned_nvfp4_e4m3_avx512(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    turn(convert_k_nvfp4_e4m3_avx512, rows, slice, keys, operand);
}

/* ------------------------------------------------------------------------------------------------ Q */

INLINE void pack(const void *const *lanes, int num_lanes, float *unit, const enum cpu_format format)
{
    for (int d = 0; d < 128; d += 16) {
        __m512i blocks[UNIT_LANES];
        for (int lane = 0; lane < UNIT_LANES; lane++) {
            struct cpu_rows row = {.data = lane < num_lanes ? lanes[lane] : NULL};
            blocks[lane] =
                row.data ? _mm512_castps_si512(block_at(row, 0, d / 16, false, format)) : _mm512_setzero_si512();
        }
        transpose_16x16(blocks);
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(unit + (d + i) * UNIT_LANES, blocks[i]);
    }
}

void pack_bf16_avx512(const void *const *lanes, int num_lanes, void *unit)
{
    pack(lanes, num_lanes, unit, FORMAT_BF16);
}

void pack_fp16_avx512(const void *const *lanes, int num_lanes, void *unit)
{
    pack(lanes, num_lanes, unit, FORMAT_FP16);
}

void pack_e4m3_avx512(const void *const *lanes, int num_lanes, void *unit)
{
    _Alignas(64) uint16_t half[UNIT_LANES][128];
    const void *half_lanes[UNIT_LANES];
    __m512i seen = _mm512_setzero_si512();
    for (int lane = 0; lane < num_lanes; lane++) {
        half_lanes[lane] = half[lane];
        for (int d = 0; d < 128; d += 64)
            seen = half_row_from_e4m3((const uint8_t *)lanes[lane] + d, half[lane] + d, seen);
    }
    if (found_nan(seen))
        pack_e4m3_c(lanes, num_lanes, unit);
    else
        pack(half_lanes, num_lanes, unit, FORMAT_E4M3);
}
