/* SPDX-License-Identifier: MIT
 *
 * attention_lanes.h - attention with FP32 operands on vectors shorter than 16 lanes (lanes.h); attention_c.c defines
 * the results, and these are bit-equal. One visit of a unit at a time; scores and, over them, P stay in the tile's
 * scratch.
 */
#include "exp2.h"
#include "lanes.h"

/* ------------------------------------------------------------------------------------------------ softmax */

/* exp2_nonpositive of exp2.h */
INLINE vector v_exp2(vector x, const struct exp2_scale *scale, const float factor)
{
    x = v_max(v_set(scale->lowest), x);
    vector shifted = v_fma(x, v_set(scale->high), v_set(EXP2_ROUND));
    vector f = v_fma(x, v_set(scale->high), v_sub(v_set(EXP2_ROUND), shifted));
    f = v_fma(x, v_set(scale->low), f);
    vector p = v_set(EXP2_C6 * factor);
    p = v_fma(p, f, v_set(EXP2_C5 * factor));
    p = v_fma(p, f, v_set(EXP2_C4 * factor));
    p = v_fma(p, f, v_set(EXP2_C3 * factor));
    p = v_fma(p, f, v_set(EXP2_C2 * factor));
    p = v_fma(p, f, v_set(EXP2_C1 * factor));
    p = v_fma(p, f, v_set(EXP2_C0 * factor));
    return v_mul(p, v_exponent(shifted));
}

INLINE vector v_round(vector p, const enum cpu_rounding rounding)
{
    if (rounding == ROUND_BF16)
        return v_round_bf16(p);
    if (rounding == ROUND_FP16)
        return v_round_fp16(p);
    /* Adding and subtracting 2^20 times p's power of two (at least 2^-6) leaves E4M3's four bits; p is at most 448. */
    vector large = v_add_bits(v_power(v_max(p, v_set(0x1p-6f))), 20 << 23);
    return v_sub(v_add(p, large), large);
}

/* Scores become P in place; returns the sums of even and odd keys, added. */
INLINE lanes softmax(float *scores, int keys, const lanes *max, const struct exp2_scale *scale,
                     const enum cpu_rounding rounding)
{
    lanes sum[2] = {all(0), all(0)};
    for (int key = 0; key < keys; key++)
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++) {
            float *at = scores + key * UNIT_LANES + i * WIDTH;
            vector p = v_exp2(v_sub(v_load(at), max->part[i]), scale, rounding == ROUND_E4M3 ? 448.0f : 1.0f);
            sum[key & 1].part[i] = v_add(sum[key & 1].part[i], p);
            v_store(at, v_round(p, rounding));
        }
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
        sum[0].part[i] = v_add(sum[0].part[i], sum[1].part[i]);
    return sum[0];
}

/* How a page's result enters a unit's state: acc = acc*old + out*page. */
struct weights {
    lanes old, page, mask;
};

/* Turns a unit's scores into P and merges maximum and sum. */
static struct weights merge_softmax(struct cpu_tile *tile, const struct cpu_visit *visit, float *scores,
                                    const lanes *max, const lanes *min)
{
    const struct exp2_scale scale = tile->scale;
    lanes sum;
    if (tile->rounding == ROUND_E4M3)
        sum = softmax(scores, visit->keys, max, &scale, ROUND_E4M3);
    else if (tile->rounding == ROUND_BF16)
        sum = softmax(scores, visit->keys, max, &scale, ROUND_BF16);
    else
        sum = softmax(scores, visit->keys, max, &scale, ROUND_FP16);
    float *unit_max = tile->max + visit->unit * UNIT_LANES, *unit_sum = tile->sum + visit->unit * UNIT_LANES;
    struct weights w;
    for (int i = 0; i < PARTS; i++) {
        /* Finite operands give no score of -inf: whatever sees one is NaN. */
        vector page_sum = v_if_equal(min->part[i], v_set(-INFINITY), v_set(NAN), sum.part[i]);
        vector old_max = v_load(unit_max + i * WIDTH), page_max = max->part[i];
        vector old_sum = v_load(unit_sum + i * WIDTH), new_max = v_max(page_max, old_max);
        w.mask.part[i] = v_lanes(visit->lanes >> i * WIDTH);
        w.old.part[i] = v_exp2(v_sub(old_max, new_max), &scale, 1);
        w.page.part[i] = v_exp2(v_sub(page_max, new_max), &scale, 1);
        vector new_sum = v_fma(old_sum, w.old.part[i], v_mul(page_sum, w.page.part[i]));
        v_store(unit_sum + i * WIDTH, v_select(w.mask.part[i], new_sum, old_sum));
        v_store(unit_max + i * WIDTH, v_select(w.mask.part[i], new_max, old_max));
        w.page.part[i] = v_mul(w.page.part[i], v_set(tile->v_unit));
    }
    return w;
}

/* ------------------------------------------------------------------------------------------------ attention */

INLINE void extend(lanes *max, lanes *min, const lanes *score)
{
#pragma GCC unroll 4
    for (int j = 0; j < PARTS; j++) {
        max->part[j] = v_max(score->part[j], max->part[j]);
        min->part[j] = v_min(score->part[j], min->part[j]);
    }
}

/* Scores of the keys [0, rows) of k, stored; `counted` of them enter the largest and the smallest. */
INLINE void score_rows(const float *k, const float *q, float *scores, int counted, lanes *max, lanes *min,
                       const int rows)
{
    lanes sums[MAX_ROWS], most = *max, least = *min; /* no registers are left for them while sums are made */
    multiply(sums, k, 128, 1, q, 128, rows);
#pragma GCC unroll 5
    for (int i = 0; i < rows; i++)
        store(scores + i * UNIT_LANES, sums[i]);
    if (counted >= rows) {
#pragma GCC unroll 5
        for (int i = 0; i < rows; i++)
            extend(&most, &least, &sums[i]);
    } else {
        for (int i = 0; i < counted; i++) {
            lanes score = load(scores + i * UNIT_LANES);
            extend(&most, &least, &score);
        }
    }
    *max = most;
    *min = least;
}

/* Adds the rows [0, rows) of P*V to the accumulators. */
INLINE void add_rows(const float *v, const float *p, int keys, const struct weights *w, float *acc, const int rows)
{
    lanes sums[MAX_ROWS];
    multiply(sums, v, 1, SLICE, p, keys, rows);
#pragma GCC unroll 5
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PARTS; j++) {
            float *at = acc + i * UNIT_LANES + j * WIDTH;
            vector old = v_load(at), merged = v_fma(old, w->old.part[j], v_mul(sums[i].part[j], w->page.part[j]));
            v_store(at, v_select(w->mask.part[j], merged, old));
        }
}

/* One visit. Slices of the page's operands are converted as the first visit gets to them. */
static void attend_unit(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visit, bool first)
{
    float *k = page->k_operand, *v = page->v_operand, *scores = tile->scratch;
    const float *q = (const float *)tile->q + visit->unit * 128 * UNIT_LANES;
    lanes max = all(-INFINITY), min = all(INFINITY);
    for (int slice = 0; slice < NUM_SLICES; slice++, k += SLICE * 128, scores += SLICE * UNIT_LANES) {
        int left = visit->keys - slice * SLICE;
        if (first)
            page->convert_k(&page->k, slice, page->keys, k);
        if (left > 0)
            score_rows(k, q, scores, left, &max, &min, 6);
        if (left > 6)
            score_rows(k + 6 * 128, q, scores + 6 * UNIT_LANES, left - 6, &max, &min, 5);
        if (left > 11)
            score_rows(k + 11 * 128, q, scores + 11 * UNIT_LANES, left - 11, &max, &min, 5);
    }
    struct weights w = merge_softmax(tile, visit, tile->scratch, &max, &min);
    float *acc = tile->acc + visit->unit * 128 * UNIT_LANES;
    for (int slice = 0; slice < NUM_SLICES; slice++, v += SLICE * 128, acc += SLICE * UNIT_LANES) {
        if (first)
            page->convert_v(&page->v, slice, page->keys, v);
        add_rows(v, tile->scratch, visit->keys, &w, acc, 6);
        add_rows(v + 6, tile->scratch, visit->keys, &w, acc + 6 * UNIT_LANES, 5);
        add_rows(v + 11, tile->scratch, visit->keys, &w, acc + 11 * UNIT_LANES, 5);
    }
}

INLINE void attend(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits, int num_visits)
{
    for (int i = 0; i < num_visits; i++)
        attend_unit(tile, page, &visits[i], i == 0);
}
