/* SPDX-License-Identifier: MIT
 *
 * topk_avx2.c - the best pages of a row, by topk_block.h with 8 scores a vector.
 */
#include "topk_block.h"

#include <immintrin.h>

static inline uint64_t block_above(const float *scores, float bound)
{
    __m256 b = _mm256_set1_ps(bound);
    uint64_t mask = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        mask |= (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(scores + 8 * i), b, _CMP_GT_OQ)) << 8 * i;
    return mask;
}

static inline uint64_t block_not_below(const float *scores, float bound)
{
    __m256 b = _mm256_set1_ps(bound);
    uint64_t mask = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        mask |= (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(scores + 8 * i), b, _CMP_NLT_UQ)) << 8 * i;
    return mask;
}

static inline void group_maxima(const float *scores, int32_t n, float maxima[GROUPS])
{
    __m256 max[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        max[i] = _mm256_set1_ps(-INFINITY);
    for (int32_t first = 0; first < n; first += 16)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const float *from = scores + i * n + first;
            _mm_prefetch((const char *)(from + PREFETCH), _MM_HINT_T0);
            max[2 * i] =
                _mm256_max_ps(_mm256_loadu_ps(from), max[2 * i]); /* the second operand where the first is NaN */
            max[2 * i + 1] = _mm256_max_ps(_mm256_loadu_ps(from + 8), max[2 * i + 1]);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        _mm256_storeu_ps(maxima + 8 * i, max[i]);
}

static inline void sort_keys(const uint64_t *key, int32_t count, uint64_t *sorted)
{
    __m256i top = _mm256_set1_epi64x(INT64_MIN); /* AVX2 compares signed numbers only */
    for (int32_t first = 0; first < count; first += 4) {
        __m256i own = _mm256_xor_si256(_mm256_load_si256((const __m256i *)(key + first)), top),
                rank = _mm256_setzero_si256();
        for (int32_t i = 0; i < count; i++) {
            __m256i other = _mm256_xor_si256(_mm256_set1_epi64x((long long)key[i]), top);
            rank = _mm256_sub_epi64(rank, _mm256_cmpgt_epi64(other, own));
        }
        uint64_t place[4];
        _mm256_storeu_si256((__m256i *)place, rank);
        for (int lane = 0; lane < 4; lane++)
            sorted[place[lane]] = key[first + lane];
    }
}

void topk_avx2(struct cpu_best *best, const float *scores, int32_t first_page, int32_t num_pages)
{
    select_best(best, scores, first_page, num_pages);
}
