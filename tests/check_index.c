/* SPDX-License-Identifier: MIT
 *
 * check_index.c - the indexer: scores, and the lists chosen from them.
 */
#include "checkkernel.h"

#include <string.h>

static index_spec pair_spec(int pair)
{
    return (index_spec){.q_dtype = index_pairs[pair].q, .k_dtype = index_pairs[pair].kv};
}

static bool begin(harness *h, const index_spec *s, const char *what, int number)
{
    return test_begin(h, "index", "%s-%s/%s-%d", format_name(s->q_dtype), format_name(s->k_dtype), what, number);
}

static void test(harness *h, const index_spec *s, const char *what, int number)
{
    if (!begin(h, s, what, number))
        return;
    index_test(h, s);
    test_end(h);
}

/* The problem that --bench times. */
static void check_typical(harness *h, int pair)
{
    index_spec s = pair_spec(pair);
    s.heads = 2;
    s.requests = batch_of(1, LENGTHS(24), LENGTHS(5000));
    if (!begin(h, &s, "typical", 0))
        return;
    index_case *c = index_new(h, &s);
    c->t.timed = true;
    trial_run(h, &c->t);
    index_free(c);
    test_end(h);
}

static void check_batches(harness *h, int pair)
{
    static const struct {
        int32_t batch, q_lens[8], kv_lens[8], padding;
    } batches[] = {
        {1, {0}, {0}, 0},
        {3, {0, 0, 0}, {0, 200, 0}, 0},
        {4, {1, 1, 1, 1}, {0, 0, 0, 0}, 0},
        {5, {0, 3, 0, 0, 5}, {0, 130, 64, 0, 257}, 0},
        {3, {5, 4, 3}, {2, 0, 3}, 2},
        {6, {1, 33, 0, 2, 1, 17}, {128, 160, 5, 2529, 1, 2400}, 7},
        {2, {130, 1}, {129, 127}, 1},
        {8, {1, 2, 3, 4, 5, 6, 7, 9}, {127, 128, 129, 256, 257, 258, 383, 384}, 0},
    };
    for (int i = 0; i < (int)(sizeof batches / sizeof batches[0]); i++) {
        index_spec s = pair_spec(pair);
        s.decode = (i + pair) % 2;
        s.heads = 1 + i % 3;
        s.topk = 3 + i;
        s.without_counts = i % 4 == 3;
        s.requests = batch_of(batches[i].batch, batches[i].q_lens, batches[i].kv_lens);
        s.requests.padding_rows = batches[i].padding;
        s.requests.by_offsets = (i + pair) % 3 == 0;
        s.requests.share_pages = i % 2;
        s.requests.max_kv_len = i == 3 ? 4000 : 0;
        test(h, &s, "batch", i);
    }
}

/* Every list length, with all kinds of forced pages, both orders and all outputs. */
static void check_selection(harness *h)
{
    for (int k = 1; k <= MSA_MAX_TOPK; k++) {
        index_spec s = pair_spec(k % NUM_INDEX_PAIRS);
        s.decode = k % 2;
        s.topk = k;
        s.init_pages = k % 4 < k ? k % 4 : 0;
        s.local_pages = 1 + k % 3 + s.init_pages <= k ? 1 + k % 3 : 1;
        s.order = k % 3 ? MSA_TOPK_ORDER_PAGE : MSA_TOPK_ORDER_SCORE;
        s.outputs = 1 + (k + 1) % 3;
        s.heads = 1 + k % 4;
        s.requests = batch_of(2, LENGTHS(3, 2), LENGTHS(128 * k - 5, 128 * k + 600));
        test(h, &s, "topk", k);
    }
}

static void check_layouts(harness *h, int pair)
{
    for (int i = 0; i < 6; i++) {
        index_spec s = pair_spec(pair);
        s.decode = i % 2;
        s.heads = 3;
        s.topk = 5;
        s.gaps = i % 3 == 1;
        s.slots = i % 3 == 2 && s.k_dtype == MSA_NVFP4;
        s.q_layout = (row_layout)(i % 3);
        s.scores_layout = (row_layout)((i + 1) % 3);
        s.list_layout = (row_layout)((i + 2) % 3);
        s.requests = batch_of(2, LENGTHS(3, 4), LENGTHS(1000, 1500));
        s.requests.table_gap = i;
        test(h, &s, "layout", i);
    }
}

static void check_heads(harness *h)
{
    static const int32_t heads[] = {1, 2, 3, 4, 7, 8, 16, 17, 64};
    for (int i = 0; i < (int)(sizeof heads / sizeof heads[0]); i++) {
        index_spec s = pair_spec(i % NUM_INDEX_PAIRS);
        s.heads = heads[i];
        s.topk = 4;
        s.decode = i % 2;
        s.requests = batch_of(2, LENGTHS(5, 1), LENGTHS(777, 800));
        test(h, &s, "heads", heads[i]);
    }
}

static void check_random(harness *h, int pair, int number)
{
    random_stream r = random_new(h->options.seed, (uint32_t)(1000 * pair + number));
    int32_t q_lens[4], kv_lens[4];
    index_spec s = pair_spec(pair);
    s.decode = random_chance(&r, 0.5);
    s.heads = random_between(&r, 1, 4);
    s.topk = random_between(&r, 1, 20);
    s.init_pages = random_below(&r, s.topk < 4 ? s.topk : 4);
    s.local_pages = random_between(&r, 1, s.topk - s.init_pages < 3 ? s.topk - s.init_pages : 3);
    s.order = random_chance(&r, 0.5) ? MSA_TOPK_ORDER_PAGE : MSA_TOPK_ORDER_SCORE;
    s.outputs = random_between(&r, 1, 3);
    s.q_layout = (row_layout)random_below(&r, 3);
    s.scores_layout = (row_layout)random_below(&r, 3);
    s.list_layout = (row_layout)random_below(&r, 3);
    s.gaps = random_chance(&r, 0.5);
    s.poison = random_chance(&r, 0.5) ? 0xFF : 0x7E;
    s.requests = batch_of(random_between(&r, 1, 4), q_lens, kv_lens);
    s.requests.padding_rows = random_below(&r, 3);
    s.requests.share_pages = random_chance(&r, 0.3);
    for (int32_t i = 0; i < s.requests.batch; i++) {
        q_lens[i] = random_chance(&r, 0.15) ? 0 : random_between(&r, 1, s.decode ? 9 : 140);
        kv_lens[i] = random_chance(&r, 0.1) ? random_below(&r, 4) : random_between(&r, 1, 4000);
    }
    s.precision = random_chance(&r, 0.4) ? MSA_PRECISION_FAST : MSA_PRECISION_EXACT;
    test(h, &s, "random", number);
}

/* Enough rows that kernels which convert pages ahead do so; all head counts, both precisions. */
static void check_many_rows(harness *h, int pair)
{
    for (int heads = 1; heads <= (h->options.quick ? 1 : 8); heads++)
        for (int fast = 0; fast < 2; fast++) {
            index_spec s = pair_spec(pair);
            s.heads = heads;
            s.precision = fast ? MSA_PRECISION_FAST : MSA_PRECISION_EXACT;
            s.requests = batch_of(4, LENGTHS(1030 / heads, 0, 1, 300 / heads), LENGTHS(2200, 900, 1500, 700));
            test(h, &s, fast ? "many-rows-fast" : "many-rows", heads);
        }
}

/* Long contexts, of which a GPU's parts get many pages each: they cross tiles, and each warp may take whole pages. */
static void check_long_parts(harness *h, int pair)
{
    if (h->options.device == MSA_DEVICE_CPU)
        return;
    int32_t q_lens[48], kv_lens[48];
    for (int r = 0; r < 48; r++) {
        q_lens[r] = r % 11 == 7 ? 0 : r % 5 == 2 ? 2 : 1;
        kv_lens[r] = r % 6 == 4 ? 300 + r : 14000 + 97 * r;
    }
    for (int heads = 1; heads < 4; heads += 2) {
        index_spec s = pair_spec(pair);
        s.decode = true;
        s.heads = heads;
        s.requests = batch_of(48, q_lens, kv_lens);
        s.requests.pool = 300;
        test(h, &s, "long-parts", heads);
    }
}

static void check_many_requests(harness *h, int pair)
{
    if (h->options.device == MSA_DEVICE_CPU)
        return;
    int32_t q_lens[MANY_REQUESTS], kv_lens[MANY_REQUESTS];
    many_lengths(700, q_lens, kv_lens);
    index_spec s = pair_spec(pair);
    s.decode = true;
    s.heads = 1 + pair;
    s.topk = 4;
    s.requests = batch_of(MANY_REQUESTS, q_lens, kv_lens);
    test(h, &s, "many-requests", 0);
}

static double small_integer(const place *where, const void *data)
{
    (void)data;
    uint64_t x = (uint64_t)where->d + 128 * (uint64_t)where->token + 65536 * (uint64_t)(where->page + 2) +
                 ((uint64_t)where->head << 32) + ((uint64_t)where->request << 48);
    return (double)((x * 0x9E3779B97F4A7C15u >> 40) % 7) - 3;
}

/* Scores that no order of the sums changes: the bits, and with them the lists, are the same on every level. */
static void check_exact_scores(harness *h, int pair)
{
    for (int i = 0; i < 4; i++) {
        index_spec s = pair_spec(pair);
        s.heads = 1 + 3 * (i % 2);
        s.decode = i > 1;
        s.topk = 8;
        s.q = s.k = small_integer;
        s.requests = batch_of(3, LENGTHS(1, 70, 5), LENGTHS(3000, 4100, 1500));
        if (!begin(h, &s, "exact-scores", i))
            continue;
        index_case *c = index_new(h, &s);
        c->t.exact = true;
        trial_run(h, &c->t);
        index_free(c);
        test_end(h);
    }
}

/* Few rows under a plan for many: kernels choose tiles by the step, in a workspace cut by the plan. */
static void check_few_of_many(harness *h, int pair)
{
    for (int fast = 0; fast < 2; fast++) {
        index_spec s = pair_spec(pair);
        s.heads = 2;
        s.precision = fast ? MSA_PRECISION_FAST : MSA_PRECISION_EXACT;
        s.requests = batch_of(4, LENGTHS(140, 0, 1, 130), LENGTHS(2200, 900, 1500, 700));
        s.requests.max_batch = 9;
        s.requests.max_total_q = 5000;
        s.requests.max_kv_len = 4000;
        test(h, &s, "few-of-many", fast);
    }
}

/* Decode plans with `fast`, which have sums of their own on some GPUs: every number of rows of a tile. */
static void check_fast_decode(harness *h, int pair)
{
    static const int32_t heads[] = {1, 3, 16, 64};
    for (int i = 0; i < 4; i++) {
        index_spec s = pair_spec(pair);
        s.heads = heads[i];
        s.decode = true;
        s.precision = MSA_PRECISION_FAST;
        s.gaps = i % 2;
        s.requests = batch_of(4, LENGTHS(1, 0, 9, 2), LENGTHS(2900, 900, 1300, 257));
        test(h, &s, "fast-decode", heads[i]);
    }
}

/* index_prefill and index_decode give the same bits. With many rows, a GPU's prefill converts all pages ahead. */
static void check_same_bits(harness *h, int pair, bool many)
{
    index_spec s = pair_spec(pair);
    s.heads = 3;
    s.requests = many ? batch_of(3, LENGTHS(1, 400, 3), LENGTHS(900, 1000, 128))
                      : batch_of(3, LENGTHS(1, 40, 3), LENGTHS(3000, 2800, 128));
    if (!begin(h, &s, "prefill-is-decode", many))
        return;
    index_case *prefill = index_new(h, &s);
    s.decode = true;
    index_case *decode = index_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &prefill->t, h->levels[i].one);
        trial_run_once(h, &decode->t, h->levels[i].one);
        for (int j = 0; j < prefill->t.num_outputs; j++)
            CHECK(h, !memcmp(prefill->t.outputs[j].region->data, decode->t.outputs[j].region->data,
                             prefill->t.outputs[j].region->bytes));
    }
    index_free(prefill);
    index_free(decode);
    test_end(h);
}

void check_index(harness *h)
{
    int randoms = h->options.quick ? 1 : 10;
    for (int pair = 0; pair < NUM_INDEX_PAIRS; pair++) {
        check_typical(h, pair);
        check_batches(h, pair);
        check_layouts(h, pair);
        check_exact_scores(h, pair);
        check_same_bits(h, pair, false);
        check_same_bits(h, pair, true);
        check_many_rows(h, pair);
        check_long_parts(h, pair);
        check_many_requests(h, pair);
        check_few_of_many(h, pair);
        check_fast_decode(h, pair);
        for (int i = 0; i < randoms; i++)
            check_random(h, pair, i);
    }
    check_heads(h);
    check_selection(h);
}
