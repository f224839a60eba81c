/* SPDX-License-Identifier: MIT
 *
 * operands_avx512bf16.h - operands of the BF16 family (cpu.h) for product_zmm.h: one pair of elements.
 */
#ifndef MSA_OPERANDS_AVX512BF16_H
#define MSA_OPERANDS_AVX512BF16_H

#include <immintrin.h>
#include <stdint.h>

typedef uint32_t operand;
typedef __m512i vector;
enum { PAIR = 1 }; /* operands a pair takes */

static inline __m512i broadcast(const uint32_t *a)
{
    return _mm512_set1_epi32((int)*a);
}

/* The even element of a pair alone. */
static inline __m512i broadcast_even(const uint32_t *a)
{
    return _mm512_set1_epi32((int)(*a & 0xFFFF));
}

static inline __m512i load(const uint32_t *b)
{
    return _mm512_load_si512(b);
}

/* Two multiply-adds, each rounded, the odd elements' first. Subnormals, in and out, count as 0. */
static inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* P of two keys, already rounded: their upper halves side by side. */
static inline void store_pair(uint32_t *p, __m512 even, __m512 odd)
{
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_store_si512(p, _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_castps_si512(odd)));
}

#endif
