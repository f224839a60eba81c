/* SPDX-License-Identifier: MIT
 *
 * attention_amx.c - attention on AMX's tile registers (attention_c.c defines it, but for the order of the sums).
 *
 * Layout    cpu.h, OPERAND_TILE. QK: 16 rows of K by 32 elements times 16 pairs of a unit's Q give the scores as
 *           elsewhere, [16 keys][16 lanes]. PV: 16 dimensions of V by 32 keys times P of 16 pairs of keys, stored over
 *           the scores, give [16 dimensions][16 lanes]. Softmax is softmax_zmm.h's, as for AVX-512.
 * Bits      Dot products add as tiles.h says, four steps of 32 elements, whoever shares the page. A score differs from
 *           the exact one by at most 20 * 2^-24 of the sum of |q*k|, from portable C's by 148 * 2^-24; a page's output
 *           likewise in |P*V|. Where that moves a P over a midpoint it rounds the other way: the oracle's bound
 *           (tests/oracle.c) has room for either, and the tests hold both to it, so that they differ by at most twice
 *           that bound. Sums below 2^-126 count as 0.
 * NaN       A key that a row does not see must not meet its products. Rows of K past a visit's keys give scores that
 *           nobody reads; V is masked (mask_v), and P past the keys is 0.
 * Floor     a visit of a unit to a whole page: 64 multiplications and 16 stores of tiles, 16 cycles each, 1280 cycles;
 *           some 3100 vector instructions of softmax and merging at 2 a cycle, 1550 cycles. On Sapphire Rapids the
 *           multiplier keeps one of the two vector ports busy, so that the two add up: 2830 cycles.
 * Measured  2026-11-29, Xeon family 6 model 207 shared with other work, best cycles a visit, page converted: 32 visits
 *           a page 3500, 8 visits 4200, 1 visit 5100 (AVX-512 takes 18600). Conversion of a page: E4M3 4500, BF16 2600.
 *           `msa bench prefill --pattern clustered --queries 256 --prefix 30K --q-heads 16 --kv-heads 1`, median ms,
 *           AVX-512 in the same minute in brackets: Q8KV8 9.9 (37), Q8KV4 9.8 (29), BF16 10.9 (30). 1 visit a page that
 *           is not converted, best cycles, in L2 and out of cache: E4M3 10400 and 13000, NVFP4 11500 and 13100, BF16
 *           10400 and 16700.
 * Bound by  what a visit reads and writes in L2 beside the floor: half a page's operands, its accumulators.
 */
#include "operands_avx512bf16.h"

#include "ahead_zmm.h"
#include "softmax_zmm.h"
#include "tiles.h"

#include <string.h>

enum {
    ROW = 64,                /* pairs of a row of K */
    UNIT = ROW * UNIT_LANES, /* pairs of a unit's Q */
    TILE = 16 * 16,          /* 32-bit elements */
    SCORES = 128 * UNIT_LANES,
    ROUND = 32, /* keys, or dimensions */
};

/* ------------------------------------------------------------------------------------------------ converting */

static void convert_k(const struct cpu_page *page, int slice)
{
    if (slice * SLICE < page->keys)
        page->convert_k(&page->k, slice, page->keys, (uint32_t *)page->k_operand + slice * SLICE * ROW);
    TILE_STAY_AWAKE();
}

static void convert_v(const struct cpu_page *page, int slice)
{
    if (slice / 2 * ROUND < page->keys)
        page->convert_v(&page->v, slice, page->keys, (uint32_t *)page->v_operand + slice * 4 * TILE);
    TILE_STAY_AWAKE();
}

/* Tiles of V: 32 keys by 16 dimensions, at dimension d. */
INLINE const uint32_t *v_tile(const uint32_t *v, int key, int d)
{
    return v + (key / ROUND * 8 + d / 16) * TILE;
}

/* ------------------------------------------------------------------------------------------------ tiles */

INLINE void zero_tiles(void)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

INLINE void store_tiles(float *to0, float *to1, float *to2, float *to3)
{
    TILE_STORE(0, to0, UNIT_LANES * 4);
    TILE_STORE(1, to1, UNIT_LANES * 4);
    TILE_STORE(2, to2, UNIT_LANES * 4);
    TILE_STORE(3, to3, UNIT_LANES * 4);
}

/* Largest and smallest scores, in chains: every fourth key. */
enum { CHAINS = 4 };
struct extremes {
    __m512 max[CHAINS], min[CHAINS];
};

INLINE void clear_extremes(struct extremes *e)
{
    for (int i = 0; i < CHAINS; i++) {
        e->max[i] = _mm512_set1_ps(-INFINITY);
        e->min[i] = _mm512_set1_ps(INFINITY);
    }
}

INLINE void add_extremes(struct extremes *e, const float *scores, int keys)
{
    __m512 max[CHAINS], min[CHAINS];
    memcpy(max, e->max, sizeof max);
    memcpy(min, e->min, sizeof min);
    int key = 0;
    for (; key + CHAINS <= keys; key += CHAINS) {
        UNROLL
        for (int i = 0; i < CHAINS; i++) { /* a NaN score leaves max: the operands' order counts */
            __m512 score = _mm512_load_ps(scores + (key + i) * UNIT_LANES);
            max[i] = _mm512_max_ps(score, max[i]);
            min[i] = _mm512_min_ps(score, min[i]);
        }
    }
    for (; key < keys; key++) {
        __m512 score = _mm512_load_ps(scores + key * UNIT_LANES);
        max[0] = _mm512_max_ps(score, max[0]);
        min[0] = _mm512_min_ps(score, min[0]);
    }
    memcpy(e->max, max, sizeof max);
    memcpy(e->min, min, sizeof min);
}

INLINE __m512 largest(const struct extremes *e)
{
    return _mm512_max_ps(_mm512_max_ps(e->max[0], e->max[1]), _mm512_max_ps(e->max[2], e->max[3]));
}

INLINE __m512 smallest(const struct extremes *e)
{
    return _mm512_min_ps(_mm512_min_ps(e->min[0], e->min[1]), _mm512_min_ps(e->min[2], e->min[3]));
}

/* ------------------------------------------------------------------------------------------------ one visit */

/* V of the 32 keys from `key` on, without those from `end` on, which another row sees, and which may be NaN. */
static void mask_v(const uint32_t *v, int key, int end, uint32_t *masked)
{
    __mmask32 seen = (__mmask32)((1u << (end - key)) - 1);
    for (int i = 0; i < 8 * TILE; i += 16)
        _mm512_store_si512(masked + i, _mm512_maskz_loadu_epi16(seen, v_tile(v, key, 0) + i));
}

static void one_scores(const struct cpu_page *page, struct cpu_ahead *ahead, const uint32_t *q, int keys, float *scores,
                       bool fresh)
{
    const uint32_t *k = page->k_operand;
    for (int key = 0; key < keys; key += 64) {
        for (int slice = key / SLICE; fresh && slice < key / SLICE + 4; slice++) {
            for (int i = 0; i < 3; i++)
                fetch_ahead(ahead);
            convert_k(page, slice);
        }
        zero_tiles();
        for (int step = 0; step < ROW; step += 16) {
            const uint32_t *a = k + key * ROW + step;
            TILE_LOAD(6, q + step * UNIT_LANES, UNIT_LANES * 4);
            TILE_LOAD(4, a, ROW * 4);
            TILE_MULTIPLY(0, 4, 6);
            TILE_LOAD(5, a + 16 * ROW, ROW * 4);
            TILE_MULTIPLY(1, 5, 6);
            TILE_LOAD(4, a + 32 * ROW, ROW * 4);
            TILE_MULTIPLY(2, 4, 6);
            TILE_LOAD(5, a + 48 * ROW, ROW * 4);
            TILE_MULTIPLY(3, 5, 6);
        }
        float *to = scores + key * UNIT_LANES;
        store_tiles(to, to + 16 * UNIT_LANES, to + 32 * UNIT_LANES, to + 48 * UNIT_LANES);
    }
}

static void one_output(struct cpu_tile *tile, const struct cpu_page *page, struct cpu_ahead *ahead,
                       const struct cpu_visit *visit, const uint32_t *p, const struct weights *weights, bool fresh)
{
    _Alignas(64) float sums[4 * TILE];
    _Alignas(64) uint32_t masked[8 * TILE];
    const uint32_t *v = page->v_operand;
    int cut = visit->keys % ROUND && visit->keys < page->keys ? visit->keys / ROUND * ROUND : 128;
    if (cut < 128) {
        for (int slice = cut / ROUND * 2; fresh && slice < cut / ROUND * 2 + 2; slice++)
            convert_v(page, slice);
        mask_v(v, cut, visit->keys, masked);
    }
    for (int d = 0; d < 128; d += 64) {
        zero_tiles();
        for (int key = 0; key < visit->keys; key += ROUND) {
            for (int i = 0; fresh && i < 3; i++)
                fetch_ahead(ahead);
            if (fresh)
                convert_v(page, key / ROUND * 2 + d / 64);
            const uint32_t *a = key == cut ? masked + d / 16 * TILE : v_tile(v, key, d);
            TILE_LOAD(6, p + key / 2 * UNIT_LANES, UNIT_LANES * 4);
            TILE_LOAD(4, a, 64);
            TILE_MULTIPLY(0, 4, 6);
            TILE_LOAD(5, a + TILE, 64);
            TILE_MULTIPLY(1, 5, 6);
            TILE_LOAD(4, a + 2 * TILE, 64);
            TILE_MULTIPLY(2, 4, 6);
            TILE_LOAD(5, a + 3 * TILE, 64);
            TILE_MULTIPLY(3, 5, 6);
        }
        store_tiles(sums, sums + TILE, sums + 2 * TILE, sums + 3 * TILE);
        float *acc = tile->acc + (visit->unit * 128 + d) * UNIT_LANES;
        for (int i = 0; i < 64; i++)
            merge_output(acc + i * UNIT_LANES, _mm512_load_ps(sums + i * UNIT_LANES), visit, weights);
    }
}

INLINE __m512 softmax_awake(float *scores, int keys, __m512 max, const struct exp2_scale *scale,
                            struct cpu_ahead *ahead, const enum cpu_rounding rounding)
{
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int key = 0, end; key + 2 <= keys; key = end) {
        end = key + ROUND < keys ? key + ROUND : keys & ~1;
        softmax_pairs(scores, key, end, max, scale, sum, rounding);
        for (int i = 0; i < 4; i++)
            fetch_ahead(ahead);
        TILE_STAY_AWAKE();
    }
    if (keys & 1)
        softmax_pair(scores, keys - 1, 1, max, scale, sum, rounding);
    return _mm512_add_ps(sum[0], sum[1]);
}

/* fresh: the page is not converted yet. */
static void attend_one(struct cpu_tile *tile, const struct cpu_page *page, struct cpu_ahead *ahead,
                       const struct cpu_visit *visit, bool fresh)
{
    float *scores = tile->scratch;
    const uint32_t *q = (const uint32_t *)tile->q + visit->unit * UNIT;
    one_scores(page, ahead, q, visit->keys, scores, fresh);
    struct extremes e;
    clear_extremes(&e);
    add_extremes(&e, scores, visit->keys);
    __m512 max = largest(&e), sum;
    const struct exp2_scale scale = tile->scale;
    if (tile->rounding == ROUND_E4M3)
        sum = softmax_awake(scores, visit->keys, max, &scale, ahead, ROUND_E4M3);
    else
        sum = softmax_awake(scores, visit->keys, max, &scale, ahead, ROUND_BF16);
    struct weights weights = merge_state(tile, visit, max, smallest(&e), sum);
    uint32_t *p = (uint32_t *)scores;
    int pairs = (visit->keys + 1) / 2, end = (visit->keys + ROUND - 1) / ROUND * ROUND / 2;
    memset(p + pairs * UNIT_LANES, 0, (size_t)(end - pairs) * UNIT_LANES * sizeof *p);
    one_output(tile, page, ahead, visit, p, &weights, fresh);
}

/* ------------------------------------------------------------------------------------------------ pairs of visits */

/* Two visits to a whole page on their way through the pipeline: QK, then softmax, then PV. */
struct pair {
    const struct cpu_visit *visits[2];
    const uint32_t *q[2];
    float *scores[2]; /* and then P */
    struct extremes extremes[2];
    __m512 sum[2];
    struct weights weights[2];
};

/* A round of tile products: [2 blocks of 16 rows of a][2 visits] over four steps, and where it goes. */
struct round {
    enum { NO_ROUND, SCORES_ROUND, OUTPUT_ROUND } kind;
    struct pair *pair;
    int first; /* key or dimension */
    const uint32_t *a, *b[2];
    int64_t row_bytes, step, second; /* of a: between rows, steps, and blocks, the latter two in elements */
    float *to[2];
};

static struct round scores_round(const struct cpu_page *page, struct pair *pair, int key)
{
    return (struct round){.kind = SCORES_ROUND,
                          .pair = pair,
                          .first = key,
                          .a = (const uint32_t *)page->k_operand + key * ROW,
                          .b = {pair->q[0], pair->q[1]},
                          .row_bytes = ROW * 4,
                          .step = 16,
                          .second = 16 * ROW,
                          .to = {pair->scores[0] + key * UNIT_LANES, pair->scores[1] + key * UNIT_LANES}};
}

static struct round output_round(const struct cpu_page *page, struct pair *pair, int d, float *sums)
{
    return (struct round){.kind = OUTPUT_ROUND,
                          .pair = pair,
                          .first = d,
                          .a = v_tile(page->v_operand, 0, d),
                          .b = {(const uint32_t *)pair->scores[0], (const uint32_t *)pair->scores[1]},
                          .row_bytes = 64,
                          .step = 8 * TILE,
                          .second = TILE,
                          .to = {sums, sums + 2 * TILE}};
}

INLINE void multiply_step(const struct round *r, int step)
{
    const uint32_t *a = r->a + step * r->step;
    TILE_LOAD(4, a, r->row_bytes);
    TILE_LOAD(6, r->b[0] + step * TILE, 64);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, r->b[1] + step * TILE, 64);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD(5, a + r->second, r->row_bytes);
    TILE_MULTIPLY(2, 5, 6);
    TILE_MULTIPLY(3, 5, 7);
}

/* What vector instructions do with the results of a round. */
INLINE void use_round(struct cpu_tile *tile, const struct round *r)
{
    for (int j = 0; j < 2 && r->kind != NO_ROUND; j++) {
        const struct cpu_visit *visit = r->pair->visits[j];
        if (r->kind == SCORES_ROUND) {
            add_extremes(&r->pair->extremes[j], r->to[j], ROUND);
        } else {
            float *acc = tile->acc + (visit->unit * 128 + r->first) * UNIT_LANES;
            const struct weights w = r->pair->weights[j];
            for (int i = 0; i < ROUND; i++)
                merge_output(acc + i * UNIT_LANES, _mm512_load_ps(r->to[j] + i * UNIT_LANES), visit, &w);
        }
    }
}

/* Where the next round will merge eight dimensions of this one: the accumulators of a tile do not fit L1. */
INLINE void fetch_accumulators(const struct cpu_tile *tile, const struct round *r, int first)
{
    for (int j = 0; j < 2; j++) {
        const float *acc = tile->acc + (r->pair->visits[j]->unit * 128 + r->first + first) * UNIT_LANES;
        for (int i = 0; i < 8; i++)
            __builtin_prefetch(acc + i * UNIT_LANES, 1);
    }
}

/* One round of tile products, and beside it what keeps the vector units busy meanwhile: the softmax of 32 keys of visit
 * j of `soft` (or NULL), and the results of the round before. */
INLINE void overlap(struct cpu_tile *tile, const struct round *now, const struct round *last, struct pair *soft, int j,
                    int key, struct cpu_ahead *ahead, const enum cpu_rounding rounding)
{
    const struct exp2_scale scale = tile->scale;
    __m512 max = _mm512_setzero_ps(), sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (soft) {
        max = largest(&soft->extremes[j]);
        if (key > 0)
            sum[0] = soft->sum[0], sum[1] = soft->sum[1];
    }
    if (now->kind != NO_ROUND)
        zero_tiles();
    for (int step = 0; step < 4; step++) {
        if (now->kind != NO_ROUND)
            multiply_step(now, step);
        else
            TILE_STAY_AWAKE();
        if (soft)
            softmax_pairs(soft->scores[j], key + 8 * step, key + 8 * step + 8, max, &scale, sum, rounding);
        if (step == 1)
            use_round(tile, last);
        if (now->kind == OUTPUT_ROUND)
            fetch_accumulators(tile, now, 8 * step);
        for (int i = 0; i < 2; i++)
            fetch_ahead(ahead);
    }
    if (now->kind != NO_ROUND)
        store_tiles(now->to[0], now->to[1], now->to[0] + TILE, now->to[1] + TILE);
    if (!soft)
        return;
    soft->sum[0] = sum[0], soft->sum[1] = sum[1];
    if (key + ROUND == 128)
        soft->weights[j] =
            merge_state(tile, soft->visits[j], max, smallest(&soft->extremes[j]), _mm512_add_ps(sum[0], sum[1]));
}

/* While a pair is in softmax, the next one's scores and the last one's output are multiplied. */
INLINE void attend_pairs(struct cpu_tile *tile, const struct cpu_page *page, struct cpu_ahead *ahead,
                         const struct cpu_visit *const *visits, int pairs, const enum cpu_rounding rounding)
{
    struct pair ring[4]; /* a pair's last results are merged when the third after it begins */
    float *sums = (float *)tile->scratch + 6 * SCORES;
    struct round last = {.kind = NO_ROUND};
    for (int i = -1; i <= pairs; i++) {
        struct pair *next = i + 1 < pairs ? &ring[(i + 1) % 4] : NULL;
        struct pair *soft = i >= 0 && i < pairs ? &ring[i % 4] : NULL;
        struct pair *done = i > 0 ? &ring[(i - 1) % 4] : NULL;
        for (int j = 0; j < 2 && next; j++) {
            next->visits[j] = visits[2 * (i + 1) + j];
            next->q[j] = (const uint32_t *)tile->q + next->visits[j]->unit * UNIT;
            next->scores[j] = (float *)tile->scratch + ((i + 1) % 3 * 2 + j) * SCORES;
            clear_extremes(&next->extremes[j]);
        }
        for (int slot = 0; slot < 8; slot++) {
            struct round now = {.kind = NO_ROUND};
            if (slot < 4 && next)
                now = scores_round(page, next, slot * ROUND);
            else if (slot >= 4 && done)
                now = output_round(page, done, (slot - 4) * ROUND, sums);
            if (now.kind == NO_ROUND && last.kind == NO_ROUND && !soft)
                continue;
            overlap(tile, &now, &last, soft, slot / 4, slot % 4 * ROUND, ahead, rounding);
            last = now;
        }
    }
    use_round(tile, &last);
}

void attention_amx(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits, int num_visits)
{
    const struct cpu_visit *whole[TILE_UNITS];
    struct cpu_ahead ahead = page->ahead; /* fetched once, whoever finds the time */
    int num_whole = 0;
    for (int slice = 0; num_visits > 1 && slice < NUM_SLICES; slice++) {
        convert_k(page, slice);
        convert_v(page, slice);
    }
    for (int i = 0; i < num_visits; i++) {
        if (visits[i].keys == 128 && num_whole < TILE_UNITS)
            whole[num_whole++] = &visits[i];
        else
            attend_one(tile, page, &ahead, &visits[i], num_visits == 1);
    }
    if (num_whole > 1 && tile->rounding == ROUND_E4M3)
        attend_pairs(tile, page, &ahead, whole, num_whole / 2, ROUND_E4M3);
    else if (num_whole > 1)
        attend_pairs(tile, page, &ahead, whole, num_whole / 2, ROUND_BF16);
    if (num_whole % 2)
        attend_one(tile, page, &ahead, whole[num_whole - 1], num_visits == 1);
}
