/* SPDX-License-Identifier: MIT
 *
 * transpose_ymm.h - an 8x8 matrix of 32-bit elements, turned in registers.
 */
#ifndef MSA_TRANSPOSE_YMM_H
#define MSA_TRANSPOSE_YMM_H

#include <immintrin.h>

/* Three stages, each exchanging what is 1, 2 and 4 rows and columns apart. */
static inline void transpose_8x8(__m256 *r)
{
    __m256 t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) { /* r[i + c]: column c of each 128-bit lane, rows i to i + 3 */
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        t[c] = r[c];
        r[c] = _mm256_permute2f128_ps(t[c], r[c + 4], 0x20);
        r[c + 4] = _mm256_permute2f128_ps(t[c], r[c + 4], 0x31);
    }
}

#endif
