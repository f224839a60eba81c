/* SPDX-License-Identifier: MIT
 *
 * index_amx.c - indexer scores on AMX's tile registers (index_c.c defines them, but for the order of the sums).
 *
 * Layout    cpu.h, OPERAND_TILE. 16 rows of K, as they are, are a tile of 16 keys by 32 elements; the pairs of a unit
 *           are a tile of 16 pairs by 16 lanes. Their product is [16 keys][16 lanes], as the portable sums are.
 * Order     tiles.h, over four steps of 32 elements: even and odd elements of a step apart, their sum to the sum so
 *           far.
 *           A product meets at most 20 roundings (16 in its chain, 4 of the steps), and products are exact, so a score
 *           differs from the exact one by at most 20 * 2^-24 of the sum of |q*k| (portable C: 128 * 2^-24), and from
 *           portable C's by at most 148 * 2^-24 of it. Sums below 2^-126 count as 0. Where no sum rounds, the bits
 *           are portable C's.
 * Floor     a unit and a page: 32 multiplications and 8 stores of tiles, 16 cycles each: 640 cycles. (The stores wait
 *           for the multiplier, and it for them; loads and maxima do not.)
 * Measured  2026-11-29, Xeon family 6 model 207 shared with other work, best cycles a unit, pages converted: 48 units
 *           740, 8 units 760, 1 unit 880. A page of E4M3 keys for 1 unit: in L2 4040, of which conversion takes 1840
 *           and fetching from L2 much of the rest; out of cache 5400 (8.2 GB/s).
 */
#include "ahead_zmm.h"
#include "kernels.h"
#include "tiles.h"
#include "unroll.h"

#include <immintrin.h>
#include <math.h>

enum { ROW = 64, STEP = 16, STEPS = ROW / STEP, BLOCK = 16 * UNIT_LANES, UNIT = ROW * UNIT_LANES };

INLINE __m512 block_max(const float *sums, __m512 max)
{
    UNROLL
    for (int key = 0; key < 16; key++) /* a NaN leaves max: the operands' order counts */
        max = _mm512_max_ps(_mm512_load_ps(sums + key * UNIT_LANES), max);
    return max;
}

/* Rows are less than 2^27 floats apart. (clang makes 16 branches of a loop over the lanes, and 4 % more time.) */
INLINE void write_scores(__m512 max, int num_rows, float *scores, int64_t row_stride)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 rows = num_rows < UNIT_LANES ? (__mmask16)((1 << num_rows) - 1) : 0xFFFF;
    _mm512_mask_i32scatter_ps(scores, rows, _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)row_stride)), max, 4);
}

/* With the four tiles' keys. */
INLINE void take_max(const float (*sums)[BLOCK], __m512 *max)
{
    UNROLL
    for (int i = 0; i < 4; i++)
        max[i] = block_max(sums[i], max[i]);
}

INLINE void clear_max(__m512 *max)
{
    UNROLL
    for (int i = 0; i < 4; i++)
        max[i] = _mm512_set1_ps(-INFINITY);
}

INLINE void zero_tiles(void)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

INLINE void store_tiles(float (*sums)[BLOCK])
{
    TILE_STORE(0, sums[0], UNIT_LANES * 4);
    TILE_STORE(1, sums[1], UNIT_LANES * 4);
    TILE_STORE(2, sums[2], UNIT_LANES * 4);
    TILE_STORE(3, sums[3], UNIT_LANES * 4);
}

INLINE void multiply_pair(const uint32_t *k, const uint32_t *q)
{
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        TILE_LOAD(4, k + step * STEP, ROW * 4);
        TILE_LOAD(6, q + step * STEP * UNIT_LANES, UNIT_LANES * 4);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, q + UNIT + step * STEP * UNIT_LANES, UNIT_LANES * 4);
        TILE_MULTIPLY(1, 4, 7);
        TILE_LOAD(5, k + 16 * ROW + step * STEP, ROW * 4);
        TILE_MULTIPLY(2, 5, 6);
        TILE_MULTIPLY(3, 5, 7);
    }
}

/* Pairs of units, 32 keys a round: each tile that is loaded is multiplied twice. While a round is multiplied, vector
 * instructions take the maxima of the one before, whose tiles have reached memory by then. */
static void index_pairs(const uint32_t *k, const uint32_t *q, int pairs, int num_rows, float *scores,
                        int64_t row_stride)
{
    enum { ROUNDS = 128 / 32 };
    _Alignas(64) float sums[4][BLOCK]; /* [16 keys][unit] */
    __m512 max[4];
    clear_max(max);
    for (int round = 0; round <= pairs * ROUNDS; round++) {
        const uint32_t *a = k + round % ROUNDS * 32 * ROW, *b = q + round / ROUNDS * 2 * UNIT;
        zero_tiles();
        if (round < pairs * ROUNDS)
            multiply_pair(a, b);
        if (round > 0)
            take_max(sums, max);
        if (round > 0 && round % ROUNDS == 0) {
            int row = (round / ROUNDS - 1) * 2 * UNIT_LANES;
            write_scores(_mm512_max_ps(max[0], max[2]), num_rows - row, scores + row * row_stride, row_stride);
            write_scores(_mm512_max_ps(max[1], max[3]), num_rows - row - UNIT_LANES,
                         scores + (row + UNIT_LANES) * row_stride, row_stride);
            clear_max(max);
        }
        store_tiles(sums);
    }
}

/* Slices [first, first + count) of K, and their share of what comes next. */
static void convert_slices(const struct cpu_page *page, struct cpu_ahead *ahead, int first, int count)
{
    for (int slice = first; slice < first + count; slice++) {
        for (int i = 0; i < SLICE / AHEAD_PLACES; i++)
            fetch_ahead(ahead);
        page->convert_k(&page->k, slice, 128, (uint32_t *)page->k_operand + slice * SLICE * ROW);
        TILE_STAY_AWAKE();
    }
}

/* One unit, 64 keys a round. fresh: the page is not converted yet. */
static void index_one(const struct cpu_page *page, struct cpu_ahead *ahead, const uint32_t *q, int num_rows,
                      float *scores, int64_t row_stride, bool fresh)
{
    const uint32_t *k = page->k_operand;
    _Alignas(64) float sums[2][4][BLOCK]; /* [round][16 keys] */
    __m512 max[4];
    clear_max(max);
    for (int round = 0; round < 2; round++) {
        const uint32_t *a = k + round * 64 * ROW;
        if (fresh)
            convert_slices(page, ahead, round * 4, 4);
        zero_tiles();
        UNROLL
        for (int step = 0; step < STEPS; step++) {
            TILE_LOAD(6, q + step * STEP * UNIT_LANES, UNIT_LANES * 4);
            TILE_LOAD(4, a + step * STEP, ROW * 4);
            TILE_MULTIPLY(0, 4, 6);
            TILE_LOAD(5, a + 16 * ROW + step * STEP, ROW * 4);
            TILE_MULTIPLY(1, 5, 6);
            TILE_LOAD(4, a + 32 * ROW + step * STEP, ROW * 4);
            TILE_MULTIPLY(2, 4, 6);
            TILE_LOAD(5, a + 48 * ROW + step * STEP, ROW * 4);
            TILE_MULTIPLY(3, 5, 6);
        }
        store_tiles(sums[round]);
    }
    take_max(sums[0], max);
    take_max(sums[1], max);
    write_scores(_mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3])), num_rows, scores,
                 row_stride);
}

void index_amx(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride)
{
    int pairs = (num_rows + UNIT_LANES - 1) / UNIT_LANES / 2, paired = pairs * 2 * UNIT_LANES;
    struct cpu_ahead ahead = page->ahead;
    if (pairs) {
        convert_slices(page, &ahead, 0, NUM_SLICES);
        index_pairs(page->k_operand, q, pairs, num_rows, scores, row_stride);
    }
    if (num_rows > paired)
        index_one(page, &ahead, (const uint32_t *)q + paired / UNIT_LANES * UNIT, num_rows - paired,
                  scores + paired * row_stride, row_stride, pairs == 0);
}
