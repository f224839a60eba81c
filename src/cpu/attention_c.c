/* SPDX-License-Identifier: MIT
 *
 * attention_c.c - one page of attention for the units of a tile, and the normalisation at the end. Portable C: the
 * definition of the arithmetic (docs/kernels.md), never tuned.
 *
 * Per lane (query head) and page:
 *   s[key] = dot(K[key], q), m = max s over the visible keys
 *   p[key] = 2^((s - m)*scale), P = p rounded: to E4M3 after a factor 448, or to BF16 or FP16. (s - m first, so that p
 *            of the largest key is exactly 1, however large the logits are.)
 *   l = sum of the unrounded p (even and odd keys apart), o = sum over keys of P*V
 * and merged into the state with the running maximum M: M' = max(M, m),
 *   acc = acc*2^((M-M')*scale) + o*2^((m-M')*scale), and the sum alike.
 * The maximum that P is relative to is the page's own, so P does not depend on the order or the split of pages.
 */
#include "exp2.h"
#include "kernels.h"
#include "product_c.h"

static float round_probability(float p, enum cpu_rounding rounding)
{
    switch (rounding) {
    case ROUND_E4M3:
        return e4m3_to_f32(f32_to_e4m3(p));
    case ROUND_BF16:
        return bf16_to_f32(f32_to_bf16(p));
    case ROUND_FP16:
        return fp16_to_f32(f32_to_fp16(p));
    }
    return p;
}

static inline __attribute__((always_inline)) void page_scores(const float *k, const float *q, int keys,
                                                              float (*scores)[UNIT_LANES], const bool exact)
{
    for (int key = 0; key < keys; key++) {
        float sum[UNIT_LANES] = {0};
        for (int d = 0; d < 128; d += 2)
            for (int lane = 0; lane < UNIT_LANES; lane++) {
                sum[lane] = multiply_add(sum[lane], k[key * 128 + d + 1], q[(d + 1) * UNIT_LANES + lane], exact);
                sum[lane] = multiply_add(sum[lane], k[key * 128 + d], q[d * UNIT_LANES + lane], exact);
            }
        memcpy(scores[key], sum, sizeof sum);
    }
}

/* Scores become P in place; gives the page's maximum and sum. A score of -inf cannot come from finite
 * operands: the row must not look right, so its sum turns NaN. */
static void page_softmax(float (*scores)[UNIT_LANES], int keys, struct exp2_scale scale, enum cpu_rounding rounding,
                         float *max, float *sum)
{
    float factor = rounding == ROUND_E4M3 ? 448.0f : 1.0f;
    for (int lane = 0; lane < UNIT_LANES; lane++) {
        float m = -INFINITY;
        float part[2] = {0, 0};
        for (int key = 0; key < keys; key++) {
            m = scores[key][lane] > m ? scores[key][lane] : m;
            if (scores[key][lane] == -INFINITY)
                part[0] = NAN;
        }
        for (int key = 0; key < keys; key++) {
            float p = exp2_nonpositive(scores[key][lane] - m, scale, factor);
            part[key & 1] += p;
            scores[key][lane] = round_probability(p, rounding);
        }
        max[lane] = m;
        sum[lane] = part[0] + part[1];
    }
}

/* The sums over the keys of P*V for one d. */
static inline __attribute__((always_inline)) void value_sums(const float *v, float (*p)[UNIT_LANES], int keys,
                                                             float *sums, const bool exact)
{
    for (int key = 0; key < keys; key += 2)
        for (int lane = 0; lane < UNIT_LANES; lane++) {
            if (key + 1 < keys)
                sums[lane] = multiply_add(sums[lane], v[(key + 1) * SLICE], p[key + 1][lane], exact);
            sums[lane] = multiply_add(sums[lane], v[key * SLICE], p[key][lane], exact);
        }
}

static void attend_unit(struct cpu_tile *tile, const float *k, const float *v, const struct cpu_visit *visit,
                        struct magnitudes of_k, struct magnitudes of_v)
{
    float p[128][UNIT_LANES], page_max[UNIT_LANES], page_sum[UNIT_LANES], old_weight[UNIT_LANES],
        page_weight[UNIT_LANES];
    float *max = tile->max + visit->unit * UNIT_LANES, *sum = tile->sum + visit->unit * UNIT_LANES;
    float *acc = tile->acc + visit->unit * 128 * UNIT_LANES;
    const float *q = (const float *)tile->q + visit->unit * 128 * UNIT_LANES;
    if (products_are_exact(of_k, magnitudes_of(q, 128 * UNIT_LANES)))
        page_scores(k, q, visit->keys, p, true);
    else
        page_scores(k, q, visit->keys, p, false);
    page_softmax(p, visit->keys, tile->scale, tile->rounding, page_max, page_sum);
    for (int lane = 0; lane < UNIT_LANES; lane++)
        if (visit->lanes >> lane & 1) {
            float new_max = page_max[lane] > max[lane] ? page_max[lane] : max[lane];
            old_weight[lane] = exp2_nonpositive(max[lane] - new_max, tile->scale, 1);
            page_weight[lane] = exp2_nonpositive(page_max[lane] - new_max, tile->scale, 1);
            sum[lane] = fmaf(sum[lane], old_weight[lane], page_sum[lane] * page_weight[lane]);
            max[lane] = new_max;
            page_weight[lane] *= tile->v_unit;
        }
    bool exact = products_are_exact(of_v, magnitudes_of(p[0], visit->keys * UNIT_LANES));
    for (int d = 0; d < 128; d++) {
        float out[UNIT_LANES] = {0};
        const float *values = v + d / SLICE * 128 * SLICE + d % SLICE;
        if (exact)
            value_sums(values, p, visit->keys, out, true);
        else
            value_sums(values, p, visit->keys, out, false);
        for (int lane = 0; lane < UNIT_LANES; lane++)
            if (visit->lanes >> lane & 1)
                acc[d * UNIT_LANES + lane] =
                    fmaf(acc[d * UNIT_LANES + lane], old_weight[lane], out[lane] * page_weight[lane]);
    }
}

void attention_c(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits, int num_visits)
{
    float *k = page->k_operand, *v = page->v_operand;
    struct magnitudes of_k, of_v = {INT32_MAX, 0};
    for (int slice = 0; slice < NUM_SLICES; slice++) {
        page->convert_k(&page->k, slice, page->keys, k + slice * SLICE * 128);
        page->convert_v(&page->v, slice, page->keys, v + slice * SLICE * 128);
        struct magnitudes of_slice = magnitudes_of(v + slice * SLICE * 128, page->keys * SLICE);
        of_v.least = of_slice.least < of_v.least ? of_slice.least : of_v.least;
        of_v.most = of_slice.most > of_v.most ? of_slice.most : of_v.most;
    }
    of_k = magnitudes_of(k, page->keys * 128);
    for (int i = 0; i < num_visits; i++)
        attend_unit(tile, k, v, &visits[i], of_k, of_v);
}

void finish_c(const float *acc, const float *factor, int num_lanes, msa_dtype out_dtype, void *const *out)
{
    for (int lane = 0; lane < num_lanes; lane++)
        for (int d = 0; out[lane] && d < 128; d++) {
            /* An infinite V that the row sees must give NaN, as every other non-finite input does; all NaN the same. */
            float a = acc[d * UNIT_LANES + lane], x = a * factor[lane];
            x = isfinite(a) && !isnan(x) ? x : NAN;
            ((uint16_t *)out[lane])[d] = out_dtype == MSA_FP16 ? f32_to_fp16(x) : f32_to_bf16(x);
        }
}
