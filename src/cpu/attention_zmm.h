/* SPDX-License-Identifier: MIT
 *
 * attention_zmm.h - attention on 512-bit vectors, for both operand families: attention_avx512.c and
 * attention_avx512bf16.c include it after operands_<isa>.h.
 *
 * Scores and, over them, P stay in the tile's scratch: 8 KiB a unit, in L1. The page's largest score is taken from the
 * sums while they are in registers.
 */
#include "product_zmm.h"
#include "softmax_zmm.h"

/* Steps between two fetches. A page needs 64: they are spread over all of the first group's QK, and PV's loops stay
 * whole. */
#define AHEAD_STEPS(units) ((units) == 1 ? 8 * PAIR : 16 * PAIR)

/* ------------------------------------------------------------------------------------------------ scores */

/* Scores of the keys below `keys` (and of up to rows - 1 more, which nobody uses); the largest of those of whole blocks
 * below `common`, and the smallest if they can be infinite. Returns where those blocks end. */
INLINE int page_scores(struct operands *operands, const operand *const *q, float *const *scores, int keys, int common,
                       bool infinite, __m512 *max, __m512 *min, const int rows, const int units)
{
    int ranked = 0;
    for (int j = 0; j < units; j++) {
        max[j] = _mm512_set1_ps(-INFINITY);
        min[j] = _mm512_set1_ps(INFINITY);
    }
    for (int key = 0; key < keys; key += rows) {
        const operand *k = k_slice(operands, key / SLICE) + key % SLICE * ROW;
        __m512 sums[MAX_SUMS];
        UNROLL
        for (int i = 0; i < rows * units; i++)
            sums[i] = _mm512_setzero_ps();
        for (int e = 0; e < ROW; e += AHEAD_STEPS(units)) {
            fetch_ahead(&operands->ahead);
            accumulate(sums, k, ROW, 1, q, e, e + AHEAD_STEPS(units), rows, units, 0, units);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int j = 0; j < units; j++)
                _mm512_store_ps(scores[j] + (key + i) * UNIT_LANES, sums[i * units + j]);
        }
        if (key + rows > common)
            continue;
        ranked = key + rows;
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int j = 0; j < units; j++) /* a NaN score leaves max: the operands' order counts */
                max[j] = _mm512_max_ps(sums[i * units + j], max[j]);
        }
        if (!infinite)
            continue;
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int j = 0; j < units; j++)
                min[j] = _mm512_min_ps(sums[i * units + j], min[j]);
        }
    }
    return ranked;
}

/* ------------------------------------------------------------------------------------------------ softmax */

INLINE __m512 softmax(float *scores, int keys, __m512 max, const struct exp2_scale *scale,
                      const enum cpu_rounding rounding)
{
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    softmax_pairs(scores, 0, keys & ~1, max, scale, sum, rounding);
    if (keys & 1)
        softmax_pair(scores, keys - 1, 1, max, scale, sum, rounding);
    return _mm512_add_ps(sum[0], sum[1]);
}

/* Turns a unit's scores into P and merges maximum and sum; max is that of the first `ranked` keys, and so is min where
 * scores can be infinite. */
static struct weights merge_softmax(struct cpu_tile *tile, const struct cpu_visit *visit, float *scores, int ranked,
                                    __m512 max, __m512 min)
{
    for (int key = ranked; key < visit->keys; key++) {
        __m512 score = _mm512_load_ps(scores + key * UNIT_LANES);
        max = _mm512_max_ps(score, max); /* a NaN score leaves max: the operands' order counts */
        min = _mm512_min_ps(score, min);
    }
    const struct exp2_scale scale = tile->scale;
    __m512 sum;
    if (tile->rounding == ROUND_E4M3)
        sum = softmax(scores, visit->keys, max, &scale, ROUND_E4M3);
    else if (tile->rounding == ROUND_BF16)
        sum = softmax(scores, visit->keys, max, &scale, ROUND_BF16);
    else
        sum = softmax(scores, visit->keys, max, &scale, ROUND_FP16);
    return merge_state(tile, visit, max, min, sum);
}

/* ------------------------------------------------------------------------------------------------ output */

/* Adds the pages' P*V to the accumulators. Units that see fewer keys than others of the group end earlier. */
INLINE void add_output(const struct cpu_tile *tile, struct operands *operands, const struct cpu_visit *visits,
                       const operand *const *p, const struct weights *weights, const int rows, const int units)
{
    int common = visits[0].keys / 2 * PAIR;
    for (int j = 1; j < units; j++)
        common = visits[j].keys / 2 * PAIR < common ? visits[j].keys / 2 * PAIR : common;
    for (int d = 0; d < 128; d += rows) {
        const operand *v = v_slice(operands, d / SLICE) + d % SLICE;
        __m512 sums[MAX_SUMS];
        UNROLL
        for (int i = 0; i < rows * units; i++)
            sums[i] = _mm512_setzero_ps();
        accumulate(sums, v, 1, SLICE, p, 0, common, rows, units, 0, units);
        UNROLL
        for (int j = 0; j < units; j++) {
            int end = visits[j].keys / 2 * PAIR;
            accumulate(sums, v, 1, SLICE, p, common, end, rows, units, j, j + 1);
            if (visits[j].keys & 1) {
                vector last = load(p[j] + end * UNIT_LANES);
                UNROLL
                for (int i = 0; i < rows; i++)
                    sums[i * units + j] = multiply_add(sums[i * units + j], broadcast_even(v + i + end * SLICE), last);
            }
            float *acc = tile->acc + (visits[j].unit * 128 + d) * UNIT_LANES;
            UNROLL
            for (int i = 0; i < rows; i++)
                merge_output(acc + i * UNIT_LANES, sums[i * units + j], &visits[j], &weights[j]);
        }
    }
}

INLINE void attend_group(struct cpu_tile *tile, struct operands *operands, const struct cpu_visit *visits,
                         const int rows, const int units)
{
    const operand *q[MAX_GROUP], *p[MAX_GROUP];
    float *scores[MAX_GROUP];
    struct weights weights[MAX_GROUP];
    __m512 max[MAX_GROUP], min[MAX_GROUP];
    int least = 128, most = 0;
    for (int j = 0; j < units; j++) {
        q[j] = (const operand *)tile->q + visits[j].unit * ROW * UNIT_LANES;
        scores[j] = (float *)tile->scratch + j * 128 * UNIT_LANES;
        p[j] = (const operand *)scores[j];
        least = visits[j].keys < least ? visits[j].keys : least;
        most = visits[j].keys > most ? visits[j].keys : most;
    }
    bool infinite = tile->rounding != ROUND_E4M3; /* sums of products of E4M3 numbers are far from FP32's end */
    int ranked = page_scores(operands, q, scores, most, least, infinite, max, min, rows, units);
    for (int j = 0; j < units; j++)
        weights[j] = merge_softmax(tile, &visits[j], scores[j], ranked, max[j], min[j]);
    add_output(tile, operands, visits, p, weights, rows, units);
}

INLINE void attend(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits, int num_visits)
{
    struct operands operands = {page, page->ahead, 0, 0, num_visits > 3 ? SLICE * ROW : 0};
    while (num_visits > 0) {
        int units = group_size(num_visits);
        if (units == 3)
            attend_group(tile, &operands, visits, 8, 3);
        else if (units == 2)
            attend_group(tile, &operands, visits, 8, 2);
        else
            attend_group(tile, &operands, visits, 16, 1);
        visits += units;
        num_visits -= units;
    }
}
