/* SPDX-License-Identifier: MIT
 *
 * convert_amx.c - V to tiles of AMX's left operand: cpu.h, OPERAND_TILE. (K and Q are as for AVX-512 BF16,
 * convert_avx512bf16.c, but for K in E4M3, which is the same converted with fewer shuffles.)
 *
 * A slice is 32 keys by 64 dimensions: four tiles of 16 dimensions by 16 pairs of keys. It is turned while it is
 * loaded, 16 bytes of each key at a time, even and odd keys apart; the two meet word by word. Keys that are not there
 * are zeros.
 *
 * Floor     of a page, 16384 elements, on Intel, which starts one shuffle a cycle: 3 shuffles for 32 BF16 elements,
 *           1540 cycles, 4 for 32 E4M3 elements, 2050 cycles, which all of its 8.5 operations, two a cycle, lift to
 *           2180; NVFP4, which becomes BF16 rows first, 1540 more than BF16. K in E4M3: 5 shuffles of 11 operations for
 *           64 elements, 1410 cycles.
 * Measured  2026-11-30, Xeon family 6 model 207, best cycles for 8 slices: BF16 2050, E4M3 2540 (2720 with vpermi2b,
 *           which takes two of the shuffles' cycles, for all codes), NVFP4 3260; K in E4M3 1610 (1880).
 */
#include "bf16_zmm.h"
#include "kernels.h"
#include "transpose_zmm.h"

#include <string.h>

enum { SLICE_KEYS = 32, SLICE_DIMS = 64, TILE = 16 * 16 };

/* The slice's rows: in the page, or, where keys are missing, in `copy`. */
struct slice_rows {
    const uint8_t *data;
    int64_t stride;
};

/* Row d of a slice in its tiles. */
INLINE uint32_t *tile_row(uint32_t *operand, int d)
{
    return operand + d / 16 * TILE + d % 16 * 16;
}

/* ------------------------------------------------------------------------------------------------ BF16 */

INLINE void turn_bf16(const uint8_t *from, int64_t stride, uint32_t *operand)
{
    for (int d = 0; d < SLICE_DIMS; d += 8) {
        __m512i low[4], high[4]; /* pairs of keys 4i + g; in a 128-bit lane i four dimensions each */
        UNROLL
        for (int g = 0; g < 4; g++) {
            __m512i even = load_part(from, 2 * stride, d / 2, g), odd = load_part(from + stride, 2 * stride, d / 2, g);
            low[g] = _mm512_unpacklo_epi16(even, odd);
            high[g] = _mm512_unpackhi_epi16(even, odd);
        }
        UNROLL
        for (int half = 0; half < 2; half++) {
            const __m512i *r = half ? high : low;
            __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
            __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), e = _mm512_unpackhi_epi32(r[2], r[3]);
            uint32_t *to = tile_row(operand, d + 4 * half);
            _mm512_store_si512(to, _mm512_unpacklo_epi64(a, c));
            _mm512_store_si512(to + 16, _mm512_unpackhi_epi64(a, c));
            _mm512_store_si512(to + 32, _mm512_unpacklo_epi64(b, e));
            _mm512_store_si512(to + 48, _mm512_unpackhi_epi64(b, e));
        }
    }
}

/* Bytes [first, first + bytes) of the slice's rows. */
INLINE struct slice_rows rows_of(const struct cpu_rows *rows, int slice, int keys, int first, int bytes, uint8_t *copy)
{
    const uint8_t *from = rows->data + slice / 2 * SLICE_KEYS * rows->token_stride + first;
    int here = keys - slice / 2 * SLICE_KEYS;
    if (here >= SLICE_KEYS)
        return (struct slice_rows){from, rows->token_stride};
    memset(copy, 0, (size_t)(SLICE_KEYS * bytes));
    for (int key = 0; key < here; key++)
        memcpy(copy + key * bytes, from + key * rows->token_stride, (size_t)bytes);
    return (struct slice_rows){copy, bytes};
}

void convert_v_bf16_amx(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    enum { BYTES = 2 * SLICE_DIMS };
    _Alignas(64) uint8_t copy[SLICE_KEYS * BYTES];
    struct slice_rows r = rows_of(rows, slice, keys, slice % 2 * BYTES, BYTES, copy);
    turn_bf16(r.data, r.stride, operand);
}

/* ------------------------------------------------------------------------------------------------ E4M3 */

/* planes_from_e4m3 with half of its shuffles, of which Intel starts one a cycle: 64 magnitudes are looked up, and in
 * the upper 64, all of them normal numbers, the bytes of BF16 are bits of the code, moved (the exponent's 4 bits e, at
 * least 8, become e + 120: 1, four zeros, the lower three). NaN comes out wrong: *largest, of twice the codes, is then
 * 0xFE. */
INLINE struct planes planes_of_numbers(__m512i codes, __m512i *largest)
{
    const __m512i to_low = _mm512_set1_epi64(0x0000000001020408), to_high = _mm512_set1_epi64(0x1020000000004000);
    __m512i twice = _mm512_add_epi8(codes, codes);
    *largest = _mm512_max_epu8(*largest, twice);
    __mmask64 upper = _mm512_movepi8_mask(twice);
    __m512i low = _mm512_permutexvar_epi8(codes, _mm512_load_si512(convert_table.e4m3_low));
    __m512i high = _mm512_permutexvar_epi8(codes, _mm512_load_si512(convert_table.e4m3_high));
    low = _mm512_mask_gf2p8affine_epi64_epi8(low, upper, codes, to_low, 0);
    high = _mm512_mask_gf2p8affine_epi64_epi8(high, upper, codes, to_high, 0);
    return (struct planes){
        low, _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xF8)}; /* high | codes & 0x80 */
}

INLINE bool all_numbers(__m512i largest)
{
    return !_mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8((char)0xFE));
}

void convert_k_e4m3_amx(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* unpacking takes 8 bytes of each 16 */
    const int64_t stride = rows->token_stride;
    const uint8_t *row = rows->data + slice * SLICE * stride;
    int here = keys - slice * SLICE < SLICE ? keys - slice * SLICE : SLICE;
    __m512i largest = _mm512_setzero_si512();
    uint16_t *to = operand;
    for (int key = 0; key < here; key++, row += stride, to += 128) {
        UNROLL
        for (int d = 0; d < 128; d += 64) {
            __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(row + d));
            struct planes p = planes_of_numbers(codes, &largest);
            _mm512_store_si512(to + d, _mm512_unpacklo_epi8(p.low, p.high));
            _mm512_store_si512(to + d + 32, _mm512_unpackhi_epi8(p.low, p.high));
        }
    }
    if (!all_numbers(largest))
        convert_k_e4m3_avx512bf16(rows, slice, keys, operand);
}

INLINE bool turn_e4m3(const uint8_t *data, int64_t stride, uint32_t *operand, const bool exact)
{
    __m512i largest = _mm512_setzero_si512();
    for (int d = 0; d < SLICE_DIMS; d += 16) {
        __m512i codes[2][4]; /* even and odd keys; four dimensions, of each its four keys of the 128-bit lane */
        UNROLL
        for (int odd = 0; odd < 2; odd++) {
            const uint8_t *from = data + odd * stride;
            __m512i row[4];
            UNROLL
            for (int g = 0; g < 4; g++)
                row[g] = load_part(from, 2 * stride, d / 4, g);
            __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]), high01 = _mm512_unpackhi_epi8(row[0], row[1]);
            __m512i low23 = _mm512_unpacklo_epi8(row[2], row[3]), high23 = _mm512_unpackhi_epi8(row[2], row[3]);
            codes[odd][0] = _mm512_unpacklo_epi16(low01, low23);
            codes[odd][1] = _mm512_unpackhi_epi16(low01, low23);
            codes[odd][2] = _mm512_unpacklo_epi16(high01, high23);
            codes[odd][3] = _mm512_unpackhi_epi16(high01, high23);
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            struct planes even = exact ? planes_from_e4m3(codes[0][i]) : planes_of_numbers(codes[0][i], &largest);
            struct planes odd = exact ? planes_from_e4m3(codes[1][i]) : planes_of_numbers(codes[1][i], &largest);
            __m512i even_low = _mm512_unpacklo_epi8(even.low, even.high),
                    even_high = _mm512_unpackhi_epi8(even.low, even.high);
            __m512i odd_low = _mm512_unpacklo_epi8(odd.low, odd.high),
                    odd_high = _mm512_unpackhi_epi8(odd.low, odd.high);
            uint32_t *to = tile_row(operand, d + 4 * i);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(even_low, odd_low));
            _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(even_low, odd_low));
            _mm512_store_si512(to + 32, _mm512_unpacklo_epi16(even_high, odd_high));
            _mm512_store_si512(to + 48, _mm512_unpackhi_epi16(even_high, odd_high));
        }
    }
    return all_numbers(largest);
}

void convert_v_e4m3_amx(const struct cpu_rows *rows, int slice, int keys, void *operand)
{
    enum { BYTES = SLICE_DIMS };
    _Alignas(64) uint8_t copy[SLICE_KEYS * BYTES];
    const struct slice_rows r = rows_of(rows, slice, keys, slice % 2 * BYTES, BYTES, copy);
    if (!turn_e4m3(r.data, r.stride, operand, false))
        turn_e4m3(r.data, r.stride, operand, true);
}

/* ------------------------------------------------------------------------------------------------ NVFP4 */

INLINE void convert_v_nvfp4(const struct cpu_rows rows, int slice, int keys, uint32_t *operand, const bool quad,
                            const uint16_t (*table)[16])
{
    _Alignas(64) uint16_t v[SLICE_KEYS][SLICE_DIMS];
    int first = slice / 2 * SLICE_KEYS, here = keys - first < SLICE_KEYS ? keys - first : SLICE_KEYS;
    for (int i = 0; i < here; i++) {
        int key = first + i, g = slice % 2 * 4, step = quad ? 4 : 1;
        const uint8_t *codes = rows.data + key * rows.token_stride + g * 8;
        const uint8_t *scale =
            quad ? rows.scale + key / 4 * 32 + g * 4 + key % 4 : rows.scale + key * rows.scale_token_stride + g;
        _mm512_store_si512(v[i], two_blocks(codes, table[scale[0]], table[scale[step]]));
        _mm512_store_si512(v[i] + 32, two_blocks(codes + 16, table[scale[2 * step]], table[scale[3 * step]]));
    }
    for (int i = here; i < SLICE_KEYS; i++)
        memset(v[i], 0, sizeof v[i]);
    turn_bf16((const uint8_t *)v, sizeof v[0], operand);
}

#define CONVERT_NVFP4(name)                                                                      \
    void convert_v_##name##_amx(const struct cpu_rows *rows, int slice, int keys, void *operand) \
    {                                                                                            \
        if (rows->scale_quad)                                                                    \
            convert_v_nvfp4(*rows, slice, keys, operand, true, convert_table.name##_bf16);       \
        else                                                                                     \
            convert_v_nvfp4(*rows, slice, keys, operand, false, convert_table.name##_bf16);      \
    }
CONVERT_NVFP4(nvfp4_e4m3)
CONVERT_NVFP4(nvfp4_exact)
