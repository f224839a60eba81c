/* SPDX-License-Identifier: MIT
 *
 * convert_avx512bf16.c - storage formats to BF16 operands: K and V slices, and Q units.
 *
 * K rows are BF16 rows. V interleaves the rows of two keys, so that a 32-bit operand holds an even key's element and
 * the odd key's; a key that is not there reads as zeros. E4M3 goes through a table of the two bytes of each
 * magnitude's BF16 value, by vpermi2b; NVFP4 permutes the block scale's row of products by the codes, by vpermw.
 *
 * Floor     of a page, 16384 elements, on Intel, which starts one shuffle a cycle: 7 (K) or 9 (V) shuffles for 64 E4M3
 *           elements, 1800 and 2300 cycles; 3 and 4 for 32 NVFP4 elements, 1500 and 2050 cycles.
 * Measured  2026-11-29, Xeon family 6 model 207, cycles for 8 slices of K and of V: BF16 590 and 1800, E4M3 1830 and
 *           2350, NVFP4 1600 and 2640.
 */
#include "bf16_zmm.h"
#include "kernels.h"
#include "transpose_zmm.h"
#include "unroll.h"

#include <string.h>

static const uint8_t no_row[256];

INLINE const uint8_t *row_at(const struct cpu_rows rows, int key, int keys)
{
    return key < keys ? rows.data + key * rows.token_stride : no_row;
}

INLINE int slice_end(int slice, int keys)
{
    return (slice + 1) * SLICE < keys ? (slice + 1) * SLICE : keys;
}

/* ------------------------------------------------------------------------------------------------ BF16 */

void convert_k_bf16_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    uint8_t *to = operand;
    for (int key = slice * SLICE; key < slice_end(slice, keys); key++, to += 256)
        memcpy(to, rows->data + key * rows->token_stride, 256);
}

void convert_v_bf16_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    const struct cpu_rows r = *rows; /* a copy: in memory it could be overlapped by what is stored */
    for (int key = 0; key < keys; key += 2) {
        __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(row_at(r, key, keys) + slice * 32)));
        __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(row_at(r, key + 1, keys) + slice * 32)));
        _mm512_store_si512((uint32_t *)operand + key / 2 * SLICE, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

/* ------------------------------------------------------------------------------------------------ E4M3 */

/* A row of 128. The bytes of the two planes meet within 128-bit lanes: the codes are put in that order first. */
INLINE void bf16_row_from_e4m3(const uint8_t *from, uint16_t *to)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    UNROLL
    for (int d = 0; d < 128; d += 64) {
        struct planes p = planes_from_e4m3(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + d)));
        _mm512_store_si512(to + d, _mm512_unpacklo_epi8(p.low, p.high));
        _mm512_store_si512(to + d + 32, _mm512_unpackhi_epi8(p.low, p.high));
    }
}

void convert_k_e4m3_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    uint16_t *to = operand;
    for (int key = slice * SLICE; key < slice_end(slice, keys); key++, to += 128)
        bf16_row_from_e4m3(rows->data + key * rows->token_stride, to);
}

/* Blocks of the keys `key`, + 2, + 4 and + 6, one a 128-bit lane, then with rows and columns of 32 bits exchanged: the
 * unpacking that follows takes a quarter of every lane at a time. */
INLINE __m512i four_blocks(const struct cpu_rows rows, int slice, int key, int keys)
{
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(row_at(rows, key, keys) + slice * SLICE)));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(row_at(rows, key + 2, keys) + slice * SLICE)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(row_at(rows, key + 4, keys) + slice * SLICE)), 2);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(row_at(rows, key + 6, keys) + slice * SLICE)), 3);
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

void convert_v_e4m3_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    const struct cpu_rows r = *rows;
    for (int key = 0; key < keys; key += 8) {
        struct planes even = planes_from_e4m3(four_blocks(r, slice, key, keys));
        struct planes odd = planes_from_e4m3(four_blocks(r, slice, key + 1, keys));
        __m512i even_low = _mm512_unpacklo_epi8(even.low, even.high),
                even_high = _mm512_unpackhi_epi8(even.low, even.high);
        __m512i odd_low = _mm512_unpacklo_epi8(odd.low, odd.high), odd_high = _mm512_unpackhi_epi8(odd.low, odd.high);
        uint32_t *to = (uint32_t *)operand + key / 2 * SLICE;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even_low, odd_low));
        _mm512_store_si512(to + SLICE, _mm512_unpackhi_epi16(even_low, odd_low));
        _mm512_store_si512(to + 2 * SLICE, _mm512_unpacklo_epi16(even_high, odd_high));
        _mm512_store_si512(to + 3 * SLICE, _mm512_unpackhi_epi16(even_high, odd_high));
    }
}

/* ------------------------------------------------------------------------------------------------ NVFP4 */

INLINE void convert_k_nvfp4(const struct cpu_rows rows, int slice, int keys, uint16_t *operand,
                            const uint16_t (*table)[16])
{
    for (int key = slice * SLICE; key < slice_end(slice, keys); key++, operand += 128) {
        const uint8_t *codes = rows.data + key * rows.token_stride,
                      *scales = rows.scale + key * rows.scale_token_stride;
        UNROLL
        for (int g = 0; g < 8; g += 2) {
            _mm512_store_si512(operand + g * 16, two_blocks(codes + g * 8, table[scales[g]], table[scales[g + 1]]));
        }
    }
}

/* Words alternate between the even key, first row, and the odd one. */
INLINE void convert_v_nvfp4(const struct cpu_rows rows, int slice, int keys, uint16_t *operand, const bool quad,
                            const uint16_t (*table)[16])
{
    const __m512i pick = _mm512_set1_epi64(0x000C000400080000), second = _mm512_set1_epi32(16 << 16);
    for (int key = 0; key < keys; key += 2) {
        int odd_key = key + 1 < keys ? key + 1 : key;
        __m128i even = _mm_loadl_epi64((const void *)(rows.data + key * rows.token_stride + slice * 8));
        __m128i odd = _mm_loadl_epi64((const void *)(row_at(rows, key + 1, keys) + slice * 8));
        const uint8_t *even_scale =
            quad ? rows.scale + key / 4 * 32 + slice * 4 + key % 4 : rows.scale + key * rows.scale_token_stride + slice;
        const uint8_t *odd_scale = quad ? rows.scale + odd_key / 4 * 32 + slice * 4 + odd_key % 4
                                        : rows.scale + odd_key * rows.scale_token_stride + slice;
        __m512i codes = _mm512_cvtepu16_epi64(_mm_unpacklo_epi8(even, odd));
        const uint16_t *odd_row = key + 1 < keys ? table[*odd_scale] : (const uint16_t *)no_row;
        _mm512_store_si512(operand + key * SLICE, products(codes, pick, second, table[*even_scale], odd_row));
    }
}

#define CONVERT_NVFP4(name)                                                                             \
    void convert_k_##name##_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                                   \
        convert_k_nvfp4(*rows, slice, keys, operand, convert_table.name##_bf16);                        \
    }                                                                                                   \
    void convert_v_##name##_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                                   \
        if (rows->scale_quad)                                                                           \
            convert_v_nvfp4(*rows, slice, keys, operand, true, convert_table.name##_bf16);              \
        else                                                                                            \
            convert_v_nvfp4(*rows, slice, keys, operand, false, convert_table.name##_bf16);             \
    }
CONVERT_NVFP4(nvfp4_e4m3)
CONVERT_NVFP4(nvfp4_exact)

/* ------------------------------------------------------------------------------------------------ K turned */

/* All slices that are turned are whole. */
void convert_turned_bf16_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    (void)keys;
    const uint8_t *from = rows->data + slice * SLICE * rows->token_stride;
    for (int pair = 0; pair < 64; pair += 16) {
        __m512i block[16];
        transpose_load(from + 4 * pair, rows->token_stride, block);
        UNROLL
        for (int i = 0; i < 16; i++)
            _mm512_store_si512((uint32_t *)operand + (pair + i) * SLICE, block[i]);
    }
}

/* Four codes of each key are turned together. Their order, the first two of four keys and then the others, is what
 * becomes pairs of BF16 when the two planes meet. */
void convert_turned_e4m3_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    (void)keys;
    const uint8_t *from = rows->data + slice * SLICE * rows->token_stride;
    uint32_t *to = operand;
    for (int d = 0; d < 128; d += 64, to += 32 * SLICE) {
        __m512i block[16];
        transpose_load_halves(from + d, rows->token_stride, block);
        UNROLL
        for (int i = 0; i < 16; i++) {
            struct planes p = planes_from_e4m3(block[i]);
            _mm512_store_si512(to + 2 * i * SLICE, _mm512_unpacklo_epi8(p.low, p.high));
            _mm512_store_si512(to + (2 * i + 1) * SLICE, _mm512_unpackhi_epi8(p.low, p.high));
        }
    }
}

void convert_turned_nvfp4_e4m3_avx512bf16(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    _Alignas(64) uint16_t k[SLICE][128];
    convert_k_nvfp4_e4m3_avx512bf16(rows, slice, keys, k);
    struct cpu_rows bf16 = {.data = (const uint8_t *)k, .token_stride = sizeof k[0]};
    convert_turned_bf16_avx512bf16(&bf16, 0, SLICE, operand);
}

/* ------------------------------------------------------------------------------------------------ Q */

void pack_bf16_avx512bf16(const void *const *lanes, int num_lanes, void *unit)
{
    for (int pair = 0; pair < 64; pair += 16) {
        __m512i blocks[UNIT_LANES];
        for (int lane = 0; lane < UNIT_LANES; lane++)
            blocks[lane] =
                lane < num_lanes ? _mm512_loadu_si512((const uint32_t *)lanes[lane] + pair) : _mm512_setzero_si512();
        transpose_16x16(blocks);
        for (int i = 0; i < 16; i++)
            _mm512_store_si512((uint32_t *)unit + (pair + i) * UNIT_LANES, blocks[i]);
    }
}

void pack_e4m3_avx512bf16(const void *const *lanes, int num_lanes, void *unit)
{
    _Alignas(64) uint16_t rows[UNIT_LANES][128];
    const void *row_lanes[UNIT_LANES];
    for (int lane = 0; lane < num_lanes; lane++) {
        bf16_row_from_e4m3(lanes[lane], rows[lane]);
        row_lanes[lane] = rows[lane];
    }
    pack_bf16_avx512bf16(row_lanes, num_lanes, unit);
}
