/* SPDX-License-Identifier: MIT
 *
 * softmax_zmm.h - softmax of a page's scores and its merging into the state of a unit, on 512-bit vectors: a lane a
 * query head. Before it, operands_<isa>.h says how P is stored.
 */
#ifndef MSA_SOFTMAX_ZMM_H
#define MSA_SOFTMAX_ZMM_H

#include "exp2.h"
#include "kernels.h"
#include "unroll.h"

#include <immintrin.h>
#include <math.h>

/* exp2_nonpositive of exp2.h */
INLINE __m512 exp2_zmm(__m512 x, const struct exp2_scale *scale, const float factor)
{
    __m512 high = _mm512_set1_ps(scale->high), round = _mm512_set1_ps(EXP2_ROUND);
    x = _mm512_max_ps(_mm512_set1_ps(scale->lowest), x);
    __m512 shifted = _mm512_fmadd_ps(x, high, round);
    __m512 f = _mm512_fmsub_ps(x, high, _mm512_sub_ps(shifted, round));
    f = _mm512_fmadd_ps(x, _mm512_set1_ps(scale->low), f);
    __m512 p = _mm512_set1_ps(EXP2_C6 * factor);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C5 * factor));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C4 * factor));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C3 * factor));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C2 * factor));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C1 * factor));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C0 * factor));
    return _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

INLINE __m512 round_probability(__m512 p, const enum cpu_rounding rounding)
{
    if (rounding == ROUND_E4M3) {
        /* Adding and subtracting 2^20 times p's power of two (at least 2^-6) leaves E4M3's four bits; p is at most
         * 448. */
        __m512i power = _mm512_and_si512(_mm512_castps_si512(_mm512_max_ps(p, _mm512_set1_ps(0x1p-6f))),
                                         _mm512_set1_epi32(0x7F800000));
        __m512 added = _mm512_fmadd_ps(_mm512_castsi512_ps(power), _mm512_set1_ps(0x1p20f), p);
        return _mm512_fnmadd_ps(_mm512_castsi512_ps(power), _mm512_set1_ps(0x1p20f), added);
    }
    if (rounding == ROUND_FP16)
        return _mm512_cvtph_ps(_mm512_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT));
    /* A NaN stays one: it comes from 16-bit formats or from the machine, so its lower half is 0. */
    __m512i bits = _mm512_castps_si512(p), odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    return _mm512_castsi512_ps(_mm512_and_epi32(bits, _mm512_set1_epi32((int)0xFFFF0000)));
}

/* Scores become P in place: the pair of keys at `key`, of which `count` are seen. */
INLINE void softmax_pair(float *scores, int key, int count, __m512 max, const struct exp2_scale *scale, __m512 *sum,
                         const enum cpu_rounding rounding)
{
    const float factor = rounding == ROUND_E4M3 ? 448.0f : 1.0f;
    __m512 p[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    UNROLL
    for (int i = 0; i < count; i++) {
        p[i] = exp2_zmm(_mm512_sub_ps(_mm512_load_ps(scores + (key + i) * UNIT_LANES), max), scale, factor);
        sum[i] = _mm512_add_ps(sum[i], p[i]);
        p[i] = round_probability(p[i], rounding);
    }
    store_pair((operand *)scores + key / 2 * PAIR * UNIT_LANES, p[0], p[1]);
}

/* The pairs of keys in [from, to). */
INLINE void softmax_pairs(float *scores, int from, int to, __m512 max, const struct exp2_scale *scale, __m512 *sum,
                          const enum cpu_rounding rounding)
{
    for (int key = from; key < to; key += 2)
        softmax_pair(scores, key, 2, max, scale, sum, rounding);
}

/* How a page's result enters a unit's state: acc = acc*old + out*page. */
struct weights {
    __m512 old, page;
};

/* Merges a page's maximum and sum into the state; min is the page's smallest score. */
INLINE struct weights merge_state(struct cpu_tile *tile, const struct cpu_visit *visit, __m512 max, __m512 min,
                                  __m512 sum)
{
    const struct exp2_scale scale = tile->scale;
    __mmask16 overflowed = _mm512_cmp_ps_mask(min, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    sum = _mm512_mask_mov_ps(sum, overflowed, _mm512_set1_ps(NAN));

    float *unit_max = tile->max + visit->unit * UNIT_LANES, *unit_sum = tile->sum + visit->unit * UNIT_LANES;
    __m512 old_max = _mm512_load_ps(unit_max), new_max = _mm512_max_ps(max, old_max);
    struct weights w = {exp2_zmm(_mm512_sub_ps(old_max, new_max), &scale, 1.0f),
                        exp2_zmm(_mm512_sub_ps(max, new_max), &scale, 1.0f)};
    sum = _mm512_fmadd_ps(_mm512_load_ps(unit_sum), w.old, _mm512_mul_ps(sum, w.page));
    _mm512_mask_store_ps(unit_sum, visit->lanes, sum);
    _mm512_mask_store_ps(unit_max, visit->lanes, new_max);
    w.page = _mm512_mul_ps(w.page, _mm512_set1_ps(tile->v_unit));
    return w;
}

/* acc = acc*old + page's output*page, for one dimension of the visit's lanes. */
INLINE void merge_output(float *acc, __m512 out, const struct cpu_visit *visit, const struct weights *w)
{
    __m512 old = _mm512_load_ps(acc);
    _mm512_store_ps(acc, _mm512_mask_fmadd_ps(old, visit->lanes, w->old, _mm512_mul_ps(out, w->page)));
}

#endif
