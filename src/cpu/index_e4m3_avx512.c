/* SPDX-License-Identifier: MIT
 *
 * index_e4m3_avx512.c - indexer scores of few rows over E4M3 keys: decode (index_c.c defines it; bit-equal).
 *
 * Layout    16 keys are the lanes, so K is turned: as bytes, with a quarter of the shuffles that FP32 values take. It
 *           stays in L1 as FP16, 4 KiB a slice, and becomes FP32 where it is multiplied.
 * Floor     a page, 16 KiB, at the rate of memory. Vector operations for 64 codes: 4 shuffles to turn them, 2 to look
 *           for NaN, 6 to FP16, and 4 conversions and multiply-adds each to use them, 2 a cycle: 2560 cycles a page.
 * Measured  2026-11-30, Xeon family 6 model 207, best cycles a page, 1 row: in L2 4050, out of cache 4900 (8.9 GB/s),
 *           with the core's other hyperthread busy 5400 and 6000; 4 rows out of cache 6300.
 * Bound by  the shuffles and conversions, then memory, which is only partly read beside them.
 */
#include "ahead_zmm.h"
#include "kernels.h"
#include "unroll.h"

#include <immintrin.h>
#include <math.h>

/* Element d of 16 keys: see convert_slice. */
typedef uint16_t turned_slice[4][16][2][SLICE];

INLINE const uint16_t *element(turned_slice slice, int d)
{
    return slice[d / 32][d % 16][d / 16 % 2];
}

/* 64 elements of 16 keys. 128-bit lanes, which hold 16 elements each, are turned by themselves: lane j of row i becomes
 * element 16j + i of all keys. Gathers codes that are NaN, 0x7F or 0xFF: adding 1 carries through the seven ones and
 * changes bit 7, there alone. */
INLINE __m512i turn_codes(const uint8_t *from, int64_t stride, uint8_t (*turned)[64], __m512i seen)
{
    __m512i r[16], t[16];
    UNROLL
    for (int i = 0; i < 16; i++) {
        r[i] = _mm512_loadu_si512(from + i * stride);
        seen = _mm512_ternarylogic_epi32(seen, r[i], _mm512_add_epi8(r[i], _mm512_set1_epi8(1)),
                                         0xF6); /* seen | (b ^ c) */
    }
    UNROLL
    for (int stage = 0; stage < 4; stage++) { /* each doubles how many keys lie side by side */
        UNROLL
        for (int i = 0; i < 8; i++) {
            t[2 * i] = _mm512_unpacklo_epi8(r[i], r[i + 8]);
            t[2 * i + 1] = _mm512_unpackhi_epi8(r[i], r[i + 8]);
        }
        UNROLL
        for (int i = 0; i < 16; i++)
            r[i] = t[i];
    }
    UNROLL
    for (int i = 0; i < 16; i++)
        _mm512_store_si512(turned[i], r[i]);
    return seen;
}

/* The products of a NaN must be NaN. */
static void put_nan(const uint8_t *from, int64_t stride, turned_slice slice)
{
    for (int key = 0; key < SLICE; key++)
        for (int d = 0; d < 128; d++)
            if ((from[key * stride + d] & 0x7F) == 0x7F)
                slice[d / 32][d % 16][d / 16 % 2][key] = 0x7E00;
}

/* 16 keys. E4M3 is FP16 with 4 instead of 5 exponent bits: shifted into place it is 2^-8 times the value (E4M3_SMALL),
 * subnormals included; only NaN would look like a number. */
static void convert_slice(const uint8_t *from, int64_t stride, turned_slice slice)
{
    _Alignas(64) uint8_t turned[2][16][64];
    __m512i seen = turn_codes(from, stride, turned[0], _mm512_setzero_si512());
    seen = turn_codes(from + 64, stride, turned[1], seen);
    for (int i = 0; i < 4; i++) {
        UNROLL
        for (int d = 0; d < 16; d++) {
            __m256i codes = _mm256_load_si256((const void *)(turned[i / 2][d] + i % 2 * 32));
            __m512i half = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
            _mm512_store_si512(slice[i][d], _mm512_and_si512(half, _mm512_set1_epi16((short)0xBF80)));
        }
    }
    if (_mm512_movepi8_mask(seen))
        put_nan(from, stride, slice);
}

/* max: of the lanes' keys in `together` slices, for each row. Pairs of elements, odd first. */
INLINE void best_keys(turned_slice *slices, const float *q, struct cpu_ahead *ahead, __m512 *max, const int together,
                      const int rows)
{
    __m512 sums[16];
    UNROLL
    for (int i = 0; i < together * rows; i++)
        sums[i] = _mm512_setzero_ps();
    for (int first = 0; first < 128; first += 16) {
        fetch_ahead(ahead);
        for (int pair = first; pair < first + 16; pair += 2) {
            UNROLL
            for (int e = 1; e >= 0; e--) {
                UNROLL
                for (int j = 0; j < together; j++) {
                    __m512 k = _mm512_cvtph_ps(_mm256_load_si256((const void *)element(slices[j], pair + e)));
                    UNROLL
                    for (int i = 0; i < rows; i++)
                        sums[j * rows + i] =
                            _mm512_fmadd_ps(k, _mm512_set1_ps(q[(pair + e) * UNIT_LANES + i]), sums[j * rows + i]);
                }
            }
        }
    }
    UNROLL
    for (int j = 0; j < together; j++) {
        UNROLL
        for (int i = 0; i < rows; i++)
            max[i] = _mm512_max_ps(sums[j * rows + i], max[i]); /* a NaN leaves max: the operands' order counts */
    }
}

/* The slices [first, first + together) of a page. One row takes all eight at once: fewer are not enough chains of
 * multiply-adds. Four rows take four, which leave L1 to the page. */
INLINE void best_of_slices(const struct cpu_page *page, int first, const float *q, struct cpu_ahead *ahead, __m512 *max,
                           const int together, const int rows)
{
    turned_slice *slices = page->k_operand;
    for (int j = 0; j < together; j++) {
        for (int i = 0; i < 3; i++)
            fetch_ahead(ahead);
        convert_slice(page->k.data + (first + j) * SLICE * page->k.token_stride, page->k.token_stride, slices[j]);
    }
    best_keys(slices, q, ahead, max, together, rows);
}

void index_few_e4m3_avx512(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    struct cpu_ahead ahead = page->ahead;
    __m512 max[INDEX_FEW];
    for (int i = 0; i < INDEX_FEW; i++)
        max[i] = _mm512_set1_ps(-INFINITY);
    if (num_rows == 1) {
        best_of_slices(page, 0, q, &ahead, max, 8, 1);
    } else {
        best_of_slices(page, 0, q, &ahead, max, 4, INDEX_FEW);
        best_of_slices(page, 4, q, &ahead, max, 4, INDEX_FEW);
    }
    for (int i = 0; i < num_rows; i++)
        scores[i * row_stride] = _mm512_reduce_max_ps(max[i]) / E4M3_SMALL;
}
