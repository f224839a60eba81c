/* SPDX-License-Identifier: MIT
 *
 * topk_avx512.c - the best pages of a row, by topk_block.h with 16 scores a vector.
 */
#include "topk_block.h"

#include <immintrin.h>

static inline uint64_t block_above(const float *scores, float bound)
{
    __m512 b = _mm512_set1_ps(bound);
    uint64_t mask = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        mask |= (uint64_t)_mm512_cmp_ps_mask(_mm512_loadu_ps(scores + 16 * i), b, _CMP_GT_OQ) << 16 * i;
    return mask;
}

static inline uint64_t block_not_below(const float *scores, float bound)
{
    __m512 b = _mm512_set1_ps(bound);
    uint64_t mask = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        mask |= (uint64_t)_mm512_cmp_ps_mask(_mm512_loadu_ps(scores + 16 * i), b, _CMP_NLT_UQ) << 16 * i;
    return mask;
}

static inline void group_maxima(const float *scores, int32_t n, float maxima[GROUPS])
{
    __m512 max[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        max[i] = _mm512_set1_ps(-INFINITY);
    for (int32_t first = 0; first < n; first += 16)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const float *from = scores + i * n + first;
            _mm_prefetch((const char *)(from + PREFETCH), _MM_HINT_T0);
            max[i] = _mm512_max_ps(_mm512_loadu_ps(from), max[i]); /* the second operand where the first is NaN */
        }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        _mm512_storeu_ps(maxima + 16 * i, max[i]);
}

static inline void sort_keys(const uint64_t *key, int32_t count, uint64_t *sorted)
{
    for (int32_t first = 0; first < count; first += 8) {
        __m512i own = _mm512_load_si512(key + first), rank = _mm512_setzero_si512();
        for (int32_t i = 0; i < count; i++) {
            __mmask8 above = _mm512_cmpgt_epu64_mask(_mm512_set1_epi64((long long)key[i]), own);
            rank = _mm512_mask_add_epi64(rank, above, rank, _mm512_set1_epi64(1));
        }
        _mm512_i64scatter_epi64(sorted, rank, own, 8);
    }
}

void topk_avx512(struct cpu_best *best, const float *scores, int32_t first_page, int32_t num_pages)
{
    select_best(best, scores, first_page, num_pages);
}
