/* SPDX-License-Identifier: MIT
 *
 * lanes_avx2.h - the vector of lanes.h on AVX2 and FMA: 8 lanes.
 */
#include <immintrin.h>

typedef __m256 vector;
enum { PARTS = 2 };

static inline vector v_load(const float *from)
{
    return _mm256_loadu_ps(from);
}

static inline void v_store(float *to, vector a)
{
    _mm256_storeu_ps(to, a);
}

static inline vector v_set(float a)
{
    return _mm256_set1_ps(a);
}

static inline vector v_add(vector a, vector b)
{
    return _mm256_add_ps(a, b);
}

static inline vector v_sub(vector a, vector b)
{
    return _mm256_sub_ps(a, b);
}

static inline vector v_mul(vector a, vector b)
{
    return _mm256_mul_ps(a, b);
}

static inline vector v_fma(vector a, vector b, vector c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vector v_max(vector a, vector b)
{
    return _mm256_max_ps(a, b);
}

static inline vector v_min(vector a, vector b)
{
    return _mm256_min_ps(a, b);
}

static inline vector v_power(vector a)
{
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000)));
}

static inline vector v_exponent(vector a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}

static inline vector v_add_bits(vector a, int bits)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(bits)));
}

/* A NaN stays one: it comes from 16-bit formats or from the machine, so its lower half is 0. */
static inline vector v_round_bf16(vector a)
{
    __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xFFFF0000)));
}

static inline vector v_round_fp16(vector a)
{
    return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

static inline vector v_select(vector mask, vector a, vector b)
{
    return _mm256_blendv_ps(b, a, mask);
}

static inline vector v_if_equal(vector x, vector y, vector a, vector b)
{
    return v_select(_mm256_cmp_ps(x, y, _CMP_EQ_OQ), a, b);
}

static inline vector v_lanes(unsigned mask)
{
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bit), bit));
}
