/* SPDX-License-Identifier: MIT
 *
 * combine_avx2.c - merges the states of one row by log-sum-exp (combine_c.c defines it; bit-equal).
 *
 * Layout   a head's 128 elements in four chunks of 32, each of which takes all states in turn; its sums are four vectors.
 * Floor    the states read and the output written once, at the machine's read rate. Measured (2026-11-29, Xeon family 6 model
 *          207, one thread, 16 BF16 states out of cache): 64 % of the copy rate. The next head's states are prefetched:
 *          there are more streams than the machine follows by itself.
 */
#include "combine.h"

#include <immintrin.h>

enum { CHUNK = 32, VECTORS = CHUNK / 8 };

#define INLINE static inline __attribute__((always_inline))

INLINE __m256 load(const void *from, int d, const msa_dtype dtype)
{
    if (dtype == MSA_F32)
        return _mm256_loadu_ps((const float *)from + d);
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)from + d));
    if (dtype == MSA_FP16)
        return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE void add(__m256 *sums, const void *from, int d, float weight, const msa_dtype dtype)
{
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++)
        sums[i] = _mm256_fmadd_ps(_mm256_set1_ps(weight), load(from, d + 8 * i, dtype), sums[i]);
}

INLINE void store(void *to, int d, __m256 x, msa_dtype dtype)
{
    x = _mm256_blendv_ps(x, _mm256_set1_ps(NAN), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    if (dtype == MSA_F32) {
        _mm256_storeu_ps((float *)to + d, x);
        return;
    }
    __m128i half;
    if (dtype == MSA_FP16) {
        half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    } else { /* the one NaN has zeros below and rounds to itself */
        __m256i bits = _mm256_castps_si256(x),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
        half = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    }
    _mm_storeu_si128((__m128i *)(void *)((uint16_t *)to + d), half);
}

static void prefetch_head(const struct merge_job *job, int64_t row, int head)
{
    for (int s = 0; s < job->num_states; s++) {
        const msa_merge_state *state = &job->states[s];
        const char *out = (const char *)state->out + row * state->out_row_stride + head * state->out_head_stride;
        for (int byte = 0; byte < (state->out_dtype == MSA_F32 ? 512 : 256); byte += 64)
            _mm_prefetch(out + byte, _MM_HINT_T0);
    }
}

void combine_avx2(const struct merge_job *job, int64_t row)
{
    for (int head = 0; head < job->num_q_heads; head++) {
        if (head + 1 < job->num_q_heads)
            prefetch_head(job, row, head + 1);
        struct merge_weights w = merge_weights(job, row, head);
        for (int d = 0; d < 128; d += CHUNK) {
            __m256 sums[VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++)
                sums[i] = _mm256_setzero_ps();
            for (int s = 0; s < w.count; s++)
                if (w.dtype[s] == MSA_BF16)
                    add(sums, w.out[s], d, w.weight[s], MSA_BF16);
                else if (w.dtype[s] == MSA_FP16)
                    add(sums, w.out[s], d, w.weight[s], MSA_FP16);
                else
                    add(sums, w.out[s], d, w.weight[s], MSA_F32);
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++)
                store(merge_out(job, row, head), d + 8 * i, sums[i], job->out_dtype);
        }
        merge_store_lse(job, row, head, w.lse);
    }
}
