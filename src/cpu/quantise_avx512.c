/* SPDX-License-Identifier: MIT
 *
 * quantise_avx512.c - to E4M3 and NVFP4, with the bits of quantise_c.c.
 *
 * x / factor is a division, but for powers of two: their reciprocal is exact, and so is multiplying by it.
 *
 * E4M3: adding 2^(e+20), where 2^e is a's power of two and at least 2^-6, leaves a rounded to three mantissa bits, in
 * units of 2^(e-3), at the bottom of the sum; and an even bias there is free. A NaN in 16 elements sends them to the C
 * code. BF16 over a power of two needs no FP32: its bits, less the difference of the biases, are E4M3's with four more
 * to round away; there a NaN sends the whole row the other way.
 *
 * NVFP4: a vector is a block. With s the scale and t the midpoint between two codes, s*t has at most seven significant
 * bits, so that for every FP32 number a the rounded quotient a/s lies above t (or at it) exactly when a lies above (at)
 * the product s*t. So codes come from three comparisons with s*t, not from a division: one for each bit of the code,
 * the thresholds of the lower bits chosen by the higher ones. Odd codes start above their midpoint, even ones at it.
 *
 * Floor: bytes read and written at the machine's copy rate. Measured (2026-11-30, Xeon family 6 model 207, one thread,
 * gcc 12, BF16), best cycles an element in cache: E4M3 0.30, NVFP4 0.62; where the factor is no power of two, the day
 * before, 0.72 and 1.2. Out of cache, with the copy rate beside it 19 GB/s: E4M3 66 % of the floor's rate, NVFP4 48 %.
 */
#include "../number.h"
#include "kernels.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { AHEAD = 4096 }; /* bytes */

/* 16 elements; or zeros, unread. */
INLINE __m512 load(const void *from, enum cpu_source source, bool present)
{
    __mmask16 mask = present ? 0xFFFF : 0;
    if (source == SOURCE_F32)
        return _mm512_maskz_loadu_ps(mask, from);
    __m256i words = _mm256_maskz_loadu_epi16(mask, from);
    return source == SOURCE_FP16 ? _mm512_cvtph_ps(words)
                                 : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/* Rows usually follow each other, so that what lies ahead is worth fetching even past a row's end. */
INLINE void fetch_ahead(const void *from, int bytes)
{
    for (int i = 0; i < bytes; i += 64)
        _mm_prefetch((const char *)from + AHEAD + i, _MM_HINT_T0);
}

/* Division by the factor, where it is a power of two by multiplying. */
struct divisor {
    __m512 value;
    bool inverse;
};

static struct divisor divisor_of(float factor)
{
    uint32_t bits = f32_bits(factor);
    bool power_of_two = (bits & 0x807FFFFF) == 0 && bits >= 1u << 23 && bits <= 253u << 23;
    return (struct divisor){_mm512_set1_ps(power_of_two ? 1 / factor : factor), power_of_two};
}

INLINE __m512 divide(__m512 x, struct divisor by)
{
    return by.inverse ? _mm512_mul_ps(x, by.value) : _mm512_div_ps(x, by.value);
}

/* ------------------------------------------------------------------------------------------------ E4M3 */

enum { E4M3_BIAS = 0x98 }; /* turns the low byte of the sum, plus its exponent at bit 3, into the code */

/* What to add to a, 0 <= a <= 448, to round it to E4M3. */
INLINE __m512 e4m3_rounder(__m512 a)
{
    __m512i power =
        _mm512_and_si512(_mm512_castps_si512(_mm512_max_ps(a, _mm512_set1_ps(0x1p-6f))), _mm512_set1_epi32(0x7F800000));
    return _mm512_castsi512_ps(_mm512_add_epi32(power, _mm512_set1_epi32((20 << 23) + E4M3_BIAS)));
}

/* The codes of 16 numbers, none of them NaN. */
INLINE __m128i e4m3_codes(__m512 q)
{
    __m512 a = _mm512_range_ps(q, _mm512_set1_ps(448), 0xA); /* the smaller magnitude, positive */
    __m512 rounder = e4m3_rounder(a);
    __m512i code = _mm512_add_epi32(_mm512_castps_si512(_mm512_add_ps(a, rounder)),
                                    _mm512_srli_epi32(_mm512_castps_si512(rounder), 20));
    __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(q), 24);
    code = _mm512_ternarylogic_epi32(code, sign, _mm512_set1_epi32(0x80), 0xF8); /* code | (sign & 0x80) */
    return _mm512_cvtepi32_epi8(code);
}

/* The codes of 32 BF16 numbers over a power of two, in the upper bytes; bias, the power's exponent and the difference
 * of the formats' biases, comes as what is made of it. Gathers the largest magnitude. */
INLINE __m512i e4m3_upper(__m512i words, __m512i bias_at_exponent, __m512i three_less_bias, __m512i *largest)
{
    __m512i a = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
    *largest = _mm512_max_epi16(*largest, a);
    __m512i t = _mm512_min_epi16(_mm512_subs_epi16(a, bias_at_exponent), _mm512_set1_epi16(0x7E0));
    /* Below E4M3's normal numbers: the whole mantissa, shifted right; further than away is 0. */
    __m512i mantissa = _mm512_ternarylogic_epi32(a, _mm512_set1_epi16(0x7F), _mm512_set1_epi16(0x80), 0xEA);
    __m512i shift = _mm512_add_epi16(_mm512_srli_epi16(a, 7), three_less_bias);
    __mmask32 small = _mm512_cmplt_epi16_mask(t, _mm512_set1_epi16(0x80));
    __m512i code = _mm512_mask_sllv_epi16(_mm512_slli_epi16(t, 4), small, mantissa, shift);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(code, 8), _mm512_set1_epi16(1));
    code = _mm512_add_epi16(_mm512_add_epi16(code, _mm512_set1_epi16(127)), odd); /* to the nearest, ties to even */
    return _mm512_ternarylogic_epi32(code, words, _mm512_set1_epi16((short)0x8000), 0xF8); /* code | (words & sign) */
}

/* BF16 over a power of two that leaves its subnormals 0. False: there is a NaN. */
INLINE bool quantise_e4m3_words(const char *from, int64_t n, float factor, uint8_t *codes)
{
    const int bias = (int)(f32_bits(factor) >> 23) - 7;
    const __m512i at_exponent = _mm512_slli_epi16(_mm512_set1_epi16((short)bias), 7);
    const __m512i three_less = _mm512_set1_epi16((short)(3 - bias));
    __m512i largest = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 32 <= n; i += 32, from += 64) {
        _mm_prefetch(from + AHEAD, _MM_HINT_T0);
        __m512i upper = e4m3_upper(_mm512_loadu_si512(from), at_exponent, three_less, &largest);
        _mm256_storeu_si256((__m256i *)(void *)(codes + i), _mm512_cvtepi16_epi8(_mm512_srli_epi16(upper, 8)));
    }
    if (i < n) {
        __m512i words = _mm512_zextsi256_si512(_mm256_loadu_si256((const void *)from));
        __m512i upper = e4m3_upper(words, at_exponent, three_less, &largest);
        __m512i low = _mm512_srli_epi16(upper, 8);
        _mm_storeu_si128((__m128i *)(void *)(codes + i), _mm256_castsi256_si128(_mm512_cvtepi16_epi8(low)));
    }
    return !_mm512_cmpgt_epi16_mask(largest, _mm512_set1_epi16(0x7F80));
}

INLINE void quantise_e4m3(const void *src, enum cpu_source source, int64_t n, float factor, uint8_t *codes)
{
    struct divisor by = divisor_of(factor);
    const char *from = src;
    if (source == SOURCE_BF16 && by.inverse && factor > 0x1p-64f && factor < 0x1p64f &&
        quantise_e4m3_words(from, n, factor, codes))
        return;
    int bytes = source == SOURCE_F32 ? 64 : 32;
    for (int64_t i = 0; i < n; i += 16, from += bytes) {
        fetch_ahead(from, bytes);
        __m512 q = divide(load(from, source, true), by);
        _mm_storeu_si128((__m128i *)(void *)(codes + i), e4m3_codes(q));
        if (__builtin_expect(_mm512_cmp_ps_mask(q, q, _CMP_UNORD_Q), 0))
            for (int j = 0; j < 16; j++)
                codes[i + j] = f32_to_e4m3(((float *)&q)[j]);
    }
}

/* ------------------------------------------------------------------------------------------------ NVFP4 */

enum { BATCH = 16, PAIRS = BATCH / 2 }; /* blocks whose scales are made together; a vector of 16-bit words holds two */

/* The largest 32-bit magnitude of each block: x[i] has eight lanes each of the blocks 2i and 2i + 1. */
INLINE __m512i maxima(const __m512i x[PAIRS])
{
    __m512i four[4], two[2]; /* lanes a block */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* in the 128-bit lanes of vector i the blocks 4i to 4i + 3 */
        four[i] = _mm512_max_epu32(_mm512_shuffle_i64x2(x[2 * i], x[2 * i + 1], 0x88),
                                   _mm512_shuffle_i64x2(x[2 * i], x[2 * i + 1], 0xDD));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        two[i] = _mm512_max_epu32(_mm512_unpacklo_epi32(four[2 * i], four[2 * i + 1]),
                                  _mm512_unpackhi_epi32(four[2 * i], four[2 * i + 1]));
    __m512i one = _mm512_max_epu32(_mm512_unpacklo_epi64(two[0], two[1]), _mm512_unpackhi_epi64(two[0], two[1]));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), one);
}

/* Sixteen blocks as the comparisons take them: words of two blocks each, BF16 of x / factor with the last bit set if
 * anything was cut off, which compares with a threshold as the FP32 number does. */
struct batch {
    __m512i words[PAIRS];
    __m512i largest; /* of each block's |x|, bits */
    __m512 scale;
    __mmask16 live; /* blocks with codes other than 0 */
};

/* BF16 that needs no division. */
INLINE struct batch load_words(const char *src, int count)
{
    struct batch batch;
    __m512i magnitude[PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i++) {
        int words = (count - 2 * i) * 16;
        __mmask32 present = words >= 32 ? 0xFFFFFFFF : words == 16 ? 0xFFFF : 0;
        batch.words[i] = _mm512_maskz_loadu_epi16(present, src + i * 64);
        __m512i twice = _mm512_slli_epi16(batch.words[i], 1); /* without the sign */
        magnitude[i] = _mm512_max_epu16(twice, _mm512_slli_epi32(twice, 16));
    }
    batch.largest = _mm512_slli_epi32(_mm512_srli_epi32(maxima(magnitude), 17), 16);
    return batch;
}

INLINE struct batch load_divided(const char *src, enum cpu_source source, int count, struct divisor by)
{
    int bytes = source == SOURCE_F32 ? 64 : 32;
    struct batch batch;
    __m512i magnitude[PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i++) {
        __m512i abs[2], cut[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512 x = load(src + (2 * i + j) * bytes, source, 2 * i + j < count);
            abs[j] = _mm512_castps_si512(_mm512_abs_ps(x));
            __m512i q = _mm512_castps_si512(divide(x, by)), low = _mm512_set1_epi32(0xFFFF);
            cut[j] = _mm512_or_si512(
                q, _mm512_add_epi32(_mm512_and_si512(q, low), low)); /* bit 16 joins if lower ones are set */
            cut[j] = _mm512_srli_epi32(cut[j], 16);
        }
        magnitude[i] =
            _mm512_max_epu32(_mm512_shuffle_i64x2(abs[0], abs[1], 0x44), _mm512_shuffle_i64x2(abs[0], abs[1], 0xEE));
        batch.words[i] =
            _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi32(cut[0], cut[1]));
    }
    batch.largest = maxima(magnitude);
    return batch;
}

/* Sets scale and live; returns the scales' codes. */
INLINE __m128i block_scales(struct batch *batch, struct divisor by)
{
    __m512 a = _mm512_castsi512_ps(batch->largest);
    a = _mm512_div_ps(divide(a, by), _mm512_set1_ps(6));
    __m512 scale = _mm512_min_ps(a, _mm512_set1_ps(448)), rounder = e4m3_rounder(scale);
    __mmask16 finite = _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(0x7F800000), batch->largest);
    batch->scale = _mm512_sub_ps(_mm512_add_ps(scale, rounder), rounder);
    batch->live = finite & _mm512_cmp_ps_mask(batch->scale, _mm512_setzero_ps(), _CMP_GT_OQ);
    return _mm_mask_blend_epi8(finite, _mm_set1_epi8(0x7F), e4m3_codes(scale));
}

/* `count` blocks, at most a batch, and their scales, which are written. */
INLINE struct batch load_batch(const char *src, enum cpu_source source, int count, bool whole, struct divisor by,
                               uint8_t *scales)
{
    fetch_ahead(src, (source == SOURCE_F32 ? 64 : 32) * BATCH);
    struct batch batch = whole ? load_words(src, count) : load_divided(src, source, count, by);
    _mm_mask_storeu_epi8(scales, (__mmask16)((1u << count) - 1), block_scales(&batch, by));
    return batch;
}

/* Where the codes of two blocks begin: eight 32-bit slots a block, in the order that e2m1_codes looks them up. BF16,
 * the upper half of a slot, holds them exactly. */
INLINE __m512i thresholds_of(__m512 scale, int pair)
{
    /* of the codes                           1      4      3      2      5     -  7  6 */
    const __m512 midpoints =
        _mm512_setr_ps(0.25f, 1.75f, 1.25f, 0.75f, 2.5f, 0, 5, 3.5f, 0.25f, 1.75f, 1.25f, 0.75f, 2.5f, 0, 5, 3.5f);
    __m512i block = _mm512_mask_set1_epi32(_mm512_set1_epi32(2 * pair), 0xFF00, 2 * pair + 1);
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_permutexvar_ps(block, scale), midpoints));
}

/* The codes of two blocks, 8 bytes each. The word of slot s is 2s + 1, plus 16 in the second block. From the highest
 * bit on, each comparison leads to the next slot; the last index, plus twice the lowest bit, has twice the code in
 * it. */
INLINE __m128i e2m1_codes(__m512i words, __m512i thresholds)
{
    const __m512i block = _mm512_maskz_set1_epi16(0xFFFF0000, 16), eight = _mm512_set1_epi16(8);
    const __m512i slot0 = _mm512_add_epi16(block, _mm512_set1_epi16(1)),
                  slot1 = _mm512_add_epi16(block, _mm512_set1_epi16(3)),
                  slot3 = _mm512_add_epi16(block, _mm512_set1_epi16(7));
    __m512i a = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
    __mmask32 bit2 = _mm512_cmpge_epi16_mask(a, _mm512_permutexvar_epi16(slot1, thresholds));
    __m512i slot = _mm512_mask_add_epi16(slot3, bit2, slot3, eight),
            last = _mm512_mask_add_epi16(slot0, bit2, slot0, eight);
    __mmask32 bit1 = _mm512_cmpge_epi16_mask(a, _mm512_permutexvar_epi16(slot, thresholds));
    last = _mm512_mask_add_epi16(last, bit1, last, _mm512_set1_epi16(4));
    __mmask32 bit0 = _mm512_cmpgt_epi16_mask(a, _mm512_permutexvar_epi16(last, thresholds));
    last = _mm512_mask_add_epi16(last, bit0, last, _mm512_set1_epi16(2));
    last = _mm512_mask_add_epi16(last, _mm512_movepi16_mask(words), last, _mm512_set1_epi16(16));
    /* An even word and 16 times an odd one, less 17 times slot0: two codes, doubled. */
    __m512i two = _mm512_madd_epi16(last, _mm512_set1_epi32(0x00100001));
    two = _mm512_sub_epi32(two, _mm512_madd_epi16(slot0, _mm512_set1_epi32(0x00100001)));
    return _mm512_cvtepi32_epi8(_mm512_srli_epi32(two, 1));
}

INLINE void write_codes(const struct batch *batch, int count, uint8_t *codes)
{
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i++) {
        __m128i two = e2m1_codes(batch->words[i], thresholds_of(batch->scale, i));
        if (2 * i + 1 < count)
            _mm_storeu_si128((__m128i *)(void *)(codes + 16 * i), two);
        else if (2 * i < count)
            _mm_storel_epi64((__m128i *)(void *)(codes + 16 * i), two);
    }
    if (__builtin_expect(batch->live != 0xFFFF, 0))
        for (int i = 0; i < count; i++)
            if (!(batch->live >> i & 1))
                memset(codes + 8 * i, 0, 8);
}

/* The next batch's scales are under way while this one's codes are made: from the largest magnitude to the thresholds
 * it takes some 100 cycles. */
INLINE void quantise_nvfp4(const void *src, enum cpu_source source, int64_t n, float factor, uint8_t *codes,
                           uint8_t *scales)
{
    struct divisor by = divisor_of(factor);
    bool whole = source == SOURCE_BF16 && factor == 1;
    const char *from = src;
    int64_t blocks = n / 16;
    int bytes = source == SOURCE_F32 ? 64 : 32, count = blocks < BATCH ? (int)blocks : BATCH;
    struct batch batch = load_batch(from, source, count, whole, by, scales);
    for (int64_t first = BATCH; first < blocks; first += BATCH) {
        int next_count = blocks - first < BATCH ? (int)(blocks - first) : BATCH;
        struct batch next = load_batch(from + first * bytes, source, next_count, whole, by, scales + first);
        write_codes(&batch, BATCH, codes + (first - BATCH) * 8);
        batch = next;
        count = next_count;
    }
    write_codes(&batch, count, codes + (blocks - count) * 8);
}

#define QUANTISERS(source, SOURCE)                                                                                   \
    void quantise_e4m3_##source##_avx512(const void *src, int64_t n, float factor, uint8_t *codes, uint8_t *scales)  \
    {                                                                                                                \
        (void)scales;                                                                                                \
        quantise_e4m3(src, SOURCE, n, factor, codes);                                                                \
    }                                                                                                                \
    void quantise_nvfp4_##source##_avx512(const void *src, int64_t n, float factor, uint8_t *codes, uint8_t *scales) \
    {                                                                                                                \
        quantise_nvfp4(src, SOURCE, n, factor, codes, scales);                                                       \
    }

QUANTISERS(f32, SOURCE_F32)
QUANTISERS(bf16, SOURCE_BF16)
QUANTISERS(fp16, SOURCE_FP16)
