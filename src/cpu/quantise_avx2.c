/* SPDX-License-Identifier: MIT
 *
 * quantise_avx2.c - to E4M3 and NVFP4, with the bits of quantise_c.c. The arithmetic is that of quantise_avx512.c: a power of
 * two divides by multiplying; E4M3 rounds by adding 2^20 times the number's power of two; E2M1 codes come from comparing
 * with scale * midpoint, which is exact, in place of a division.
 *
 * Floor: bytes read and written at the machine's copy rate. Measured (2026-11-29, Xeon family 6 model 207, one thread, gcc
 * 12, BF16 rows out of cache): E4M3 46 % of it, NVFP4 17 %.
 */
#include "../number.h"
#include "kernels.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { AHEAD = 4096 }; /* bytes: rows usually follow each other */

INLINE __m256 load(const char *from, enum cpu_source source)
{
    if (source == SOURCE_F32)
        return _mm256_loadu_ps((const float *)(const void *)from);
    __m128i words = _mm_loadu_si128((const __m128i *)(const void *)from);
    return source == SOURCE_FP16 ? _mm256_cvtph_ps(words)
                                 : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

INLINE int bytes_of(enum cpu_source source)
{
    return source == SOURCE_F32 ? 4 : 2;
}

/* Division by the factor, where it is a power of two by multiplying. */
struct divisor {
    __m256 value;
    bool inverse;
};

static struct divisor divisor_of(float factor)
{
    uint32_t bits = f32_bits(factor);
    bool power_of_two = (bits & 0x807FFFFF) == 0 && bits >= 1u << 23 && bits <= 253u << 23;
    return (struct divisor){_mm256_set1_ps(power_of_two ? 1 / factor : factor), power_of_two};
}

INLINE __m256 divide(__m256 x, struct divisor by)
{
    return by.inverse ? _mm256_mul_ps(x, by.value) : _mm256_div_ps(x, by.value);
}

INLINE __m256 magnitude(__m256 x)
{
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
}

/* ------------------------------------------------------------------------------------------------ E4M3 */

enum { E4M3_BIAS = 0x98 }; /* turns the low byte of the sum, plus its exponent at bit 3, into the code */

/* What to add to a, 0 <= a <= 448, to round it to E4M3. */
INLINE __m256 e4m3_rounder(__m256 a)
{
    __m256i power = _mm256_castps_si256(_mm256_max_ps(a, _mm256_set1_ps(0x1p-6f)));
    power = _mm256_and_si256(power, _mm256_set1_epi32(0x7F800000));
    return _mm256_castsi256_ps(_mm256_add_epi32(power, _mm256_set1_epi32((20 << 23) + E4M3_BIAS)));
}

/* The codes of 8 numbers, none of them NaN, as 32-bit words. */
INLINE __m256i e4m3_codes(__m256 q)
{
    __m256 a = _mm256_min_ps(magnitude(q), _mm256_set1_ps(448)), rounder = e4m3_rounder(a);
    __m256i code = _mm256_add_epi32(_mm256_castps_si256(_mm256_add_ps(a, rounder)),
                                    _mm256_srli_epi32(_mm256_castps_si256(rounder), 20));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(q), 24), _mm256_set1_epi32(0x80));
    return _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi32(0x7F)), sign);
}

/* 16 words of at most 255 to bytes. */
INLINE __m128i pack_bytes(__m256i first, __m256i second)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

INLINE void quantise_e4m3(const void *src, enum cpu_source source, int64_t n, float factor, uint8_t *codes)
{
    struct divisor by = divisor_of(factor);
    const char *from = src;
    for (int64_t i = 0; i < n; i += 16, from += 16 * bytes_of(source)) {
        _mm_prefetch(from + AHEAD, _MM_HINT_T0);
        __m256 q[2] = {divide(load(from, source), by), divide(load(from + 8 * bytes_of(source), source), by)};
        _mm_storeu_si128((__m128i *)(void *)(codes + i), pack_bytes(e4m3_codes(q[0]), e4m3_codes(q[1])));
        if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(q[0], q[1], _CMP_UNORD_Q)), 0))
            for (int j = 0; j < 16; j++)
                codes[i + j] = f32_to_e4m3(((float *)q)[j]);
    }
}

/* ------------------------------------------------------------------------------------------------ NVFP4 */

enum { BATCH = 8 }; /* blocks whose scales are made together */

/* The largest magnitude of a block, as bits: NaN and infinity are the largest. */
INLINE int32_t largest_of(__m256 x, __m256 y)
{
    __m256i m = _mm256_max_epu32(_mm256_castps_si256(magnitude(x)), _mm256_castps_si256(magnitude(y)));
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xB1)));
}

/* Codes of eight blocks' scales; the values with NaN, which compares with nothing, for blocks whose codes are all 0. */
INLINE __m128i block_scales(__m256i largest, struct divisor by, __m256 *value)
{
    __m256 a = _mm256_div_ps(divide(_mm256_castsi256_ps(largest), by), _mm256_set1_ps(6));
    a = _mm256_min_ps(a, _mm256_set1_ps(448));
    __m256 rounder = e4m3_rounder(a), nan = _mm256_set1_ps(NAN);
    *value = _mm256_sub_ps(_mm256_add_ps(a, rounder), rounder);
    __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), largest);
    __m256 live = _mm256_and_ps(_mm256_cmp_ps(*value, _mm256_setzero_ps(), _CMP_GT_OQ), _mm256_castsi256_ps(finite));
    *value = _mm256_blendv_ps(nan, *value, live);
    __m256i codes = _mm256_blendv_epi8(_mm256_set1_epi32(0x7F), e4m3_codes(a), finite);
    return pack_bytes(codes, codes);
}

/* The codes of 8 elements, as 32-bit words. */
INLINE __m256i e2m1_codes(__m256 q, __m256 scale)
{
    static const float midpoint[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    __m256 a = magnitude(q);
    __m256i code = _mm256_setzero_si256();
#pragma GCC unroll 7
    for (int i = 0; i < 7; i++) { /* a midpoint belongs to the even code */
        __m256 begin = _mm256_mul_ps(scale, _mm256_set1_ps(midpoint[i]));
        __m256 reached = i % 2 ? _mm256_cmp_ps(a, begin, _CMP_GE_OQ) : _mm256_cmp_ps(a, begin, _CMP_GT_OQ);
        code = _mm256_sub_epi32(code, _mm256_castps_si256(reached));
    }
    __m256 live = _mm256_cmp_ps(scale, scale, _CMP_ORD_Q);
    __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(q, live)), 31), 3);
    return _mm256_or_si256(code, sign);
}

INLINE void quantise_nvfp4(const void *src, enum cpu_source source, int64_t n, float factor, uint8_t *codes,
                           uint8_t *scales)
{
    struct divisor by = divisor_of(factor);
    int64_t block_bytes = 16 * bytes_of(source);
    for (int64_t first = 0; first < n / 16; first += BATCH) {
        int count = n / 16 - first < BATCH ? (int)(n / 16 - first) : BATCH;
        const char *from = (const char *)src + first * block_bytes;
        _Alignas(32) int32_t largest[BATCH] = {0};
        for (int b = 0; b < count; b++) {
            _mm_prefetch(from + b * block_bytes + AHEAD, _MM_HINT_T0);
            largest[b] = largest_of(load(from + b * block_bytes, source),
                                    load(from + b * block_bytes + block_bytes / 2, source));
        }
        __m256 value;
        uint8_t scale_codes[16];
        _mm_storeu_si128((__m128i *)(void *)scale_codes,
                         block_scales(_mm256_load_si256((const __m256i *)largest), by, &value));
        memcpy(scales + first, scale_codes, (size_t)count);
        _Alignas(32) float scale[BATCH];
        _mm256_store_ps(scale, value);
        for (int b = 0; b < count; b++) {
            __m256 low = divide(load(from + b * block_bytes, source), by);
            __m256 high = divide(load(from + b * block_bytes + block_bytes / 2, source), by);
            __m128i bytes =
                pack_bytes(e2m1_codes(low, _mm256_set1_ps(scale[b])), e2m1_codes(high, _mm256_set1_ps(scale[b])));
            /* Two codes a byte: even + 16 * odd. */
            bytes = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
            _mm_storel_epi64((__m128i *)(void *)(codes + (first + b) * 8), _mm_packus_epi16(bytes, bytes));
        }
    }
}

#define QUANTISERS(source, SOURCE)                                                                                 \
    void quantise_e4m3_##source##_avx2(const void *src, int64_t n, float factor, uint8_t *codes, uint8_t *scales)  \
    {                                                                                                              \
        (void)scales;                                                                                              \
        quantise_e4m3(src, SOURCE, n, factor, codes);                                                              \
    }                                                                                                              \
    void quantise_nvfp4_##source##_avx2(const void *src, int64_t n, float factor, uint8_t *codes, uint8_t *scales) \
    {                                                                                                              \
        quantise_nvfp4(src, SOURCE, n, factor, codes, scales);                                                     \
    }

QUANTISERS(f32, SOURCE_F32)
QUANTISERS(bf16, SOURCE_BF16)
QUANTISERS(fp16, SOURCE_FP16)
