/* SPDX-License-Identifier: MIT
 *
 * topk_block.h - the vector top-k, for instruction sets that define four primitives before including it.
 *
 * A row is read twice. The first pass takes the largest score of each of GROUPS disjoint groups (quarters of the row,
 * so that four streams come from memory, times position modulo 16): the want-th largest of those is a bound that at
 * least `want` pages reach, whatever the order of the scores. The second pass compares blocks of 64 scores with the
 * bound; what passes goes to a pool, which is cut to its best `want` whenever it holds 64 keys. The worst of those is
 * then the bound, and equal scores no longer pass, because pages come in ascending order; a few that pass later are
 * inserted one by one. So neither rising nor equal scores cost more than random ones. Short rows (the indexer's chunks)
 * skip the first pass.
 *
 * Floor: one read of the row, 4 bytes a page. The pool is cut by counting, for each key, the keys above it. Measured
 * (2026-11-29, Xeon family 6 model 207, one thread, gcc 12), 15 of 8192 random / rising / equal scores: rows in the
 * cache 1.0 / 0.9 / 1.3 us on AVX-512 and 1.6 / 1.4 / 2.1 us on AVX2; rows in DRAM 3.0 / 2.5 / 3.1 and 3.4 / 3.0 / 3.7
 * us.
 */
#include "../number.h"
#include "kernels.h"

#include <float.h>

enum {
    GROUPS = 64,
    POOL = 128,
    LONG_ROW = 512,
    INSERTED = 6,   /* scores of a block at most, one by one: more of them are ranked together */
    PREFETCH = 128, /* scores ahead in each quarter; 512 is slower by half */
};

/* Bit i: scores[i] > bound, NaN no; not (scores[i] < bound), NaN yes. */
static inline uint64_t block_above(const float *scores, float bound);
static inline uint64_t block_not_below(const float *scores, float bound);
/* The largest of each group, of four quarters of n scores (a multiple of 16) each; NaN never, -inf where nothing else
 * is. */
static inline void group_maxima(const float *scores, int32_t n, float maxima[GROUPS]);
/* sorted[number of keys above it] = key, for all `count` keys; keys are distinct. May read up to the next multiple of 8
 * and write sorted[count]. */
static inline void sort_keys(const uint64_t *key, int32_t count, uint64_t *sorted);

struct pool {
    _Alignas(64) uint64_t key[POOL];
    int32_t want, count;
    bool sorted; /* best first, and no more than wanted */
    bool full;   /* the best `want` of what was seen are known: only scores above bound matter */
    float bound; /* before that, scores below it cannot matter */
};

/* As in topk_c.c. */
static uint64_t page_key(float score, int32_t page)
{
    uint32_t bits = f32_bits(score + 0.0f);
    bits = isnan(score) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000;
    return (uint64_t)bits << 32 | (uint32_t)~page;
}

static float key_score(uint64_t key)
{
    uint32_t bits = (uint32_t)(key >> 32);
    return bits == 0 ? -INFINITY : f32_from_bits(bits >> 31 ? bits & 0x7FFFFFFF : ~bits); /* every number beats NaN */
}

static void cut_pool(struct pool *pool)
{
    uint64_t sorted[POOL + 1];
    memset(pool->key + pool->count, 0, (-(size_t)pool->count & 7) * sizeof *pool->key);
    sort_keys(pool->key, pool->count, sorted);
    pool->count = pool->count < pool->want ? pool->count : pool->want;
    memcpy(pool->key, sorted, sizeof *sorted * (size_t)pool->count);
    pool->sorted = true;
    if (pool->count == pool->want) {
        pool->full = true;
        pool->bound = key_score(pool->key[pool->want - 1]);
    }
}

/* Into a sorted, full pool. */
static void insert_key(struct pool *pool, uint64_t key)
{
    int32_t at = pool->want - 1;
    if (key < pool->key[at])
        return;
    for (; at > 0 && pool->key[at - 1] < key; at--)
        pool->key[at] = pool->key[at - 1];
    pool->key[at] = key;
    pool->bound = key_score(pool->key[pool->want - 1]);
}

/* A score that at least `want` pages reach, or the least number. */
static float bound_of_groups(const float *scores, int32_t num_pages, int32_t want)
{
    float maxima[GROUPS];
    struct pool pool = {.want = want, .bound = -FLT_MAX};
    group_maxima(scores, num_pages / 64 * 16, maxima);
    for (int32_t i = 0; i < GROUPS; i++)
        if (maxima[i] > -INFINITY)
            pool.key[pool.count++] = page_key(maxima[i], i);
    cut_pool(&pool);
    return pool.bound;
}

static void select_best(struct cpu_best *best, const float *scores, int32_t first_page, int32_t num_pages)
{
    struct pool pool = {.want = best->want, .count = best->count, .sorted = true, .bound = -FLT_MAX};
    if (pool.want == 0)
        return;
    memcpy(pool.key, best->key, sizeof *best->key * (size_t)best->count);
    if (pool.count == pool.want) {
        pool.full = true;
        pool.bound = key_score(best->key[best->want - 1]);
    } else if (num_pages >= LONG_ROW) {
        pool.bound = bound_of_groups(scores, num_pages, pool.want);
    }
    bool changed = false;
    for (int32_t i = 0; i < num_pages; i += 64) {
        const float *block = scores + i;
        float tail[64];
        if (num_pages - i < 64) {
            for (int j = 0; j < 64; j++)
                tail[j] = j < num_pages - i ? block[j] : -INFINITY;
            block = tail;
        }
        uint64_t passed = pool.full ? block_above(block, pool.bound) : block_not_below(block, pool.bound);
        if (!passed)
            continue;
        bool insert = pool.full && pool.sorted && __builtin_popcountll(passed) <= INSERTED;
        for (; passed; passed &= passed - 1) {
            int j = __builtin_ctzll(passed);
            uint64_t key = page_key(block[j], first_page + i + j);
            if (insert)
                insert_key(&pool, key);
            else
                pool.key[pool.count++] = key;
        }
        changed = true;
        pool.sorted &= insert;
        if (pool.count >= POOL / 2)
            cut_pool(&pool);
    }
    if (!pool.sorted)
        cut_pool(&pool);
    if (changed) {
        best->count = pool.count;
        memcpy(best->key, pool.key, sizeof *best->key * (size_t)pool.count);
    }
}
