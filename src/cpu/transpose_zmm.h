/* SPDX-License-Identifier: MIT
 *
 * transpose_zmm.h - a 16x16 matrix of 32-bit elements, turned in registers, or while it is loaded.
 */
#ifndef MSA_TRANSPOSE_ZMM_H
#define MSA_TRANSPOSE_ZMM_H

#include "unroll.h"

#include <immintrin.h>
#include <stdint.h>

/* Four stages, each exchanging what is 1, 2, 4 and 8 rows and columns apart. */
INLINE void transpose_16x16(__m512i *r)
{
    __m512i t[16];
    UNROLL
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 16; i += 4) { /* r[i + c]: column c of each 128-bit lane, rows i to i + 3 */
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL
    for (int c = 0; c < 4; c++) { /* even and odd 128-bit lanes of rows 0 to 7, and of rows 8 to 15 */
        t[c] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88);
        t[c + 4] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xDD);
        t[c + 8] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
        t[c + 12] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xDD);
    }
    UNROLL
    for (int c = 0; c < 4; c++) {
        r[c] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0x88);
        r[c + 8] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0xDD);
        r[c + 4] = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0x88);
        r[c + 12] = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0xDD);
    }
}

/* Columns [c, c + 4) of the rows g, 4 + g, 8 + g and 12 + g, one row a 128-bit lane: what the last two stages above
 * exchange is loaded into place, and half the shuffles, of which Intel starts one a cycle, remain. Rows are `stride`
 * bytes apart. */
INLINE __m512i load_part(const uint8_t *from, int64_t stride, int c, int g)
{
    const uint8_t *row = from + g * stride + 4 * c;
    __m512i part = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)row));
    part = _mm512_mask_broadcast_i32x4(part, 0x00F0, _mm_loadu_si128((const __m128i *)(row + 4 * stride)));
    part = _mm512_mask_broadcast_i32x4(part, 0x0F00, _mm_loadu_si128((const __m128i *)(row + 8 * stride)));
    return _mm512_mask_broadcast_i32x4(part, 0xF000, _mm_loadu_si128((const __m128i *)(row + 12 * stride)));
}

/* transpose_16x16 from memory. */
INLINE void transpose_load(const uint8_t *from, int64_t stride, __m512i *r)
{
    UNROLL
    for (int c = 0; c < 16; c += 4) {
        __m512i row0 = load_part(from, stride, c, 0), row1 = load_part(from, stride, c, 1);
        __m512i row2 = load_part(from, stride, c, 2), row3 = load_part(from, stride, c, 3);
        __m512i low01 = _mm512_unpacklo_epi32(row0, row1), high01 = _mm512_unpackhi_epi32(row0, row1);
        __m512i low23 = _mm512_unpacklo_epi32(row2, row3), high23 = _mm512_unpackhi_epi32(row2, row3);
        r[c] = _mm512_unpacklo_epi64(low01, low23);
        r[c + 1] = _mm512_unpackhi_epi64(low01, low23);
        r[c + 2] = _mm512_unpacklo_epi64(high01, high23);
        r[c + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
}

/* The same, but within the 128-bit lanes, which hold a column of four rows, the rows' lower halves come first, then
 * their upper halves. */
INLINE void transpose_load_halves(const uint8_t *from, int64_t stride, __m512i *r)
{
    UNROLL
    for (int c = 0; c < 16; c += 4) {
        __m512i row0 = load_part(from, stride, c, 0), row1 = load_part(from, stride, c, 1);
        __m512i row2 = load_part(from, stride, c, 2), row3 = load_part(from, stride, c, 3);
        __m512i low01 = _mm512_unpacklo_epi16(row0, row1), high01 = _mm512_unpackhi_epi16(row0, row1);
        __m512i low23 = _mm512_unpacklo_epi16(row2, row3), high23 = _mm512_unpackhi_epi16(row2, row3);
        r[c] = _mm512_unpacklo_epi32(low01, low23);
        r[c + 1] = _mm512_unpackhi_epi32(low01, low23);
        r[c + 2] = _mm512_unpacklo_epi32(high01, high23);
        r[c + 3] = _mm512_unpackhi_epi32(high01, high23);
    }
}

#endif
