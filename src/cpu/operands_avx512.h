/* SPDX-License-Identifier: MIT
 *
 * operands_avx512.h - operands of the FP32 family (cpu.h) for product_zmm.h: one element, two to a pair.
 */
#ifndef MSA_OPERANDS_AVX512_H
#define MSA_OPERANDS_AVX512_H

#include <immintrin.h>

typedef float operand;
typedef __m512 vector;
enum { PAIR = 2 }; /* operands a pair takes */

static inline __m512 broadcast(const float *a)
{
    return _mm512_set1_ps(*a);
}

/* The even element of a pair alone. */
static inline __m512 broadcast_even(const float *a)
{
    return _mm512_set1_ps(*a);
}

static inline __m512 load(const float *b)
{
    return _mm512_load_ps(b);
}

static inline __m512 multiply_add(__m512 sum, __m512 a, __m512 b)
{
    return _mm512_fmadd_ps(a, b, sum);
}

/* P of two keys. */
static inline void store_pair(float *p, __m512 even, __m512 odd)
{
    _mm512_store_ps(p, even);
    _mm512_store_ps(p + 16, odd);
}

#endif
