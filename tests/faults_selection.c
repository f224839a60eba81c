/* SPDX-License-Identifier: MIT
 *
 * faults_selection.c - the indexer and the selection: short and very long contexts, ties, NaN, precision, slices.
 */
#include "faults.h"

#include <math.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

/* -------------------------------------------------------------------------------------------- lists of the indexer */

static void expect_list(harness *h, const int32_t *given, const int32_t expected[16], const char *what)
{
    for (int i = 0; i < 16; i++)
        if (given[i] != expected[i]) {
            test_fail(h, "%s: id %d is %d, expected %d", what, i, given[i], expected[i]);
            return;
        }
}

/* All pages, as long as they fit the list. */
static void few_pages(harness *h, const index_spec *spec)
{
    static const int32_t lens[] = {1, 127, 128, 129, 640, 1920, 2047, 2048};
    for (int i = 0; i < 8; i++) {
        index_spec s = *spec;
        s.requests = batch_of(1, LENGTHS(1), &lens[i]);
        index_case *c = index_new(h, &s);
        trial_run(h, &c->t);
        for (int j = 0; j < 16; j++)
            CHECK(h, index_topk(c, 0, 0)[j] == (j * PAGE < lens[i] ? j : -1));
        index_free(c);
    }
}

/* Scores fall from page to page, so the row's own page has the lowest: 448, 416, ... all the way down E4M3. */
static double falling_query(const place *where, const void *data)
{
    (void)data;
    uint8_t code = (uint8_t)(0x7E - where->d % 0x60);
    return oracle_value(MSA_E4M3, &code);
}

/* One page more than fits: the own page stays, the worst of the others goes. And attention on that list sees just
 * that. */
static void one_page_too_many(harness *h, const index_spec *spec)
{
    static const int32_t lens[] = {2048, 2049, 2176, 4097, 12000};
    for (int i = 0; i < 5; i++) {
        index_spec s = *spec;
        s.requests = batch_of(1, LENGTHS(1), &lens[i]);
        s.q = falling_query;
        s.k = coded_page;
        index_case *c = index_new(h, &s);
        trial_run(h, &c->t);
        int32_t expected[16], own = (lens[i] - 1) / PAGE;
        for (int j = 0; j < 16; j++)
            expected[j] = j < 15 ? j : own;
        expect_list(h, index_topk(c, 0, 0), expected, "falling scores");
        index_free(c);
    }
}

/* However the work on a row is cut: by the plan's capacity, by threads. */
static void cut_rows(harness *h, const index_spec *spec)
{
    static const int64_t max_total_q[] = {1, 10, 1000, 100000}, max_kv_len[] = {0, 9000, MSA_MAX_KV_LEN};
    static const int32_t lens[] = {700, 9000};
    for (int i = 0; i < 2; i++) {
        index_spec a = *spec, b = *spec;
        a.requests = batch_of(1, LENGTHS(1), &lens[i]);
        a.outputs = b.outputs = MSA_INDEX_SELECTION;
        a.q = a.k = b.q = b.k = coded_hash;
        b.requests = a.requests;
        for (int j = 0; j < 12; j++) {
            if (i == 1 && j % 3 == 1)
                continue;
            b.requests.max_total_q = max_total_q[j / 3];
            b.requests.max_kv_len = max_kv_len[j % 3];
            index_case *one = index_new(h, &a), *other = index_new(h, &b);
            same_bits(h, &one->t, &other->t, "capacity of the plan");
            if (h->levels[0].two) /* and by the number of threads */
                same_bits_on(h, &one->t, h->levels[0].one, &other->t, h->levels[0].two, "threads");
            index_free(one);
            index_free(other);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ a million tokens */

static double first_is_one(const place *where, const void *data)
{
    (void)data;
    return where->d == 0;
}

/* 8192 pages, all one physical page of zeros, but for `special` ones that score 1. Rows sit at the very end. */
static index_case *long_case(harness *h, const index_spec *spec, int32_t pages, const int32_t *special, int num_special)
{
    const int32_t kv_len = pages * PAGE;
    index_spec s = *spec;
    s.requests = batch_of(1, LENGTHS(2), &kv_len);
    s.requests.order = PAGES_ONE;
    s.outputs = MSA_INDEX_SELECTION;
    s.q = first_is_one;
    s.k = coded_zero;
    index_case *c = index_new(h, &s);
    double one[D] = {1}, zeros[D] = {0};
    for (int token = 0; token < PAGE; token++) { /* physical page 0 is free */
        int64_t row_bytes = oracle_row_bytes(s.k_dtype, D);
        uint8_t *scale = c->args.index_k_scale ? (uint8_t *)c->args.index_k_scale + token * (D / 16) : NULL;
        encode_row(s.k_dtype, token == 77 ? one : zeros, (uint8_t *)c->args.index_k + token * row_bytes, scale, 1);
    }
    for (int i = 0; i < num_special; i++)
        c->b.page_table[special[i]] = 0;
    return c;
}

static void equal_scores(harness *h, const index_spec *spec)
{
    enum { PAGES = MSA_MAX_KV_LEN / PAGE };
    static const int32_t special[] = {40, 41, 1000, 2047, 2048, 4095, 4096, 5000, 8000, 8190};
    static const int32_t ties[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 8191};
    static const int32_t mixed[] = {0, 1, 2, 3, 4, 40, 41, 1000, 2047, 2048, 4095, 4096, 5000, 8000, 8190, 8191};
    for (int i = 0; i < 2; i++) {
        index_case *c = long_case(h, spec, PAGES, special, i ? 10 : 0);
        for (int j = 0; j < h->num_levels; j++) {
            trial_run_once(h, &c->t, h->levels[j].two ? h->levels[j].two : h->levels[j].one);
            expect_list(h, index_topk(c, 0, 0), i ? mixed : ties, i ? "ten pages above the rest" : "8192 equal pages");
            expect_list(h, index_topk(c, 1, 0), i ? mixed : ties, "second row");
        }
        index_free(c);
    }
}

/* The page before the last wins at every length; a longer context than the limit is refused by name. */
static void many_pages(harness *h, const index_spec *spec)
{
    static const int32_t pages[] = {4095, 4096, 4097};
    for (int i = 0; i < 3; i++) {
        int32_t best = pages[i] - 2;
        index_case *c = long_case(h, spec, pages[i], &best, 1);
        for (int j = 0; j < h->num_levels; j++) {
            trial_run_once(h, &c->t, h->levels[j].one);
            CHECK(h, index_topk(c, 0, 0)[13] == 13 && index_topk(c, 0, 0)[14] == best &&
                         index_topk(c, 0, 0)[15] == best + 1);
        }
        index_free(c);
    }
    msa_index_desc desc = MSA_INDEX_DESC_INIT;
    msa_plan *plan = NULL;
    desc.max_kv_len = MSA_MAX_KV_LEN + 1;
    CHECK(h, msa_index_prefill_plan(h->levels[0].one, &desc, &plan) == MSA_ERROR_INVALID_ARGUMENT && !plan);
    CHECK(h, strstr(msa_last_error(), "max_kv_len") && strstr(msa_last_error(), "1048576"));
}

/* A slice of a wide buffer: only the history pages' elements change. */
static void wide_scores(harness *h, const index_spec *spec)
{
    index_spec narrow = *spec, wide = *spec;
    narrow.requests = batch_of(1, LENGTHS(5), LENGTHS(37 * PAGE));
    narrow.heads = wide.heads = 2;
    narrow.outputs = wide.outputs = MSA_INDEX_SCORES;
    narrow.q = narrow.k = wide.q = wide.k = coded_hash;
    wide.requests = narrow.requests;
    wide.requests.max_kv_len = MSA_MAX_KV_LEN;
    index_case *a = index_new(h, &narrow), *b = index_new(h, &wide);
    trial_run(h, &a->t);
    trial_run(h, &b->t);
    for (int row = 0; row < 5; row++)
        for (int head = 0; head < 2; head++)
            CHECK(h, !memcmp(index_scores(a, row, head), index_scores(b, row, head), 36 * sizeof(float)));
    index_free(a);
    index_free(b);
}

/* -------------------------------------------------------------------------------------------------- NaN, precision */

/* A NaN in one token leaves that page's score open; lists stay valid, distinct and repeatable, other scores exact. */
static void nan_key(harness *h, const index_spec *spec)
{
    index_spec s = *spec;
    s.requests = batch_of(1, LENGTHS(3), LENGTHS(25 * PAGE));
    s.q = s.k = coded_hash;
    index_case *clean = index_new(h, &s), *c = index_new(h, &s);
    uint8_t *page = (uint8_t *)c->args.index_k + c->b.page_table[7] * PAGE * oracle_row_bytes(s.k_dtype, D);
    if (s.k_dtype == MSA_NVFP4)
        ((uint8_t *)c->args.index_k_scale)[(c->b.page_table[7] * PAGE + 100) * (D / 16) + 3] = 0x7F;
    else
        memset(page + 100 * oracle_row_bytes(s.k_dtype, D) + 6, 0xFF, 2);
    trial_run_once(h, &clean->t, h->levels[0].one);
    trial_run(h, &c->t);
    for (int row = 0; row < 3; row++) {
        for (int p = 0; p < 24; p++)
            CHECK(h, p == 7 || index_scores(c, row, 0)[p] == index_scores(clean, row, 0)[p]);
        const int32_t *ids = index_topk(c, row, 0);
        for (int i = 0; i < 16; i++)
            CHECK(h, ids[i] >= 0 && ids[i] < 25 && (i == 0 || ids[i] > ids[i - 1]));
    }
    index_free(clean);
    index_free(c);
}

/* Pages whose scores are 256.0 and 256.5, neighbours that a BF16 score could not tell apart. */
static double close_key(const place *where, const void *data)
{
    (void)data;
    return where->d == 0 ? 16 : where->d == 1 && where->page % 2 ? 0.5 : 0;
}

static double close_query(const place *where, const void *data)
{
    (void)data;
    return where->d == 0 ? 16 : where->d == 1;
}

static void close_scores(harness *h, const index_spec *spec)
{
    if (spec->k_dtype == MSA_NVFP4) { /* cannot hold 16 and 0.5 in one block */
        test_leave_out(h);
        return;
    }
    index_spec s = *spec;
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(33 * PAGE));
    s.q = close_query;
    s.k = close_key;
    index_case *c = index_new(h, &s);
    trial_run(h, &c->t);
    for (int page = 0; page < 32; page++)
        CHECK(h, index_scores(c, 0, 0)[page] == (page % 2 ? 256.5f : 256.0f));
    for (int i = 0; i < 15; i++)
        CHECK(h, index_topk(c, 0, 0)[i] == 2 * i + 1);
    index_free(c);
}

/* History pages outside the cache: no candidates, never listed unless forced, and an error bit. */
static void page_outside(harness *h, const index_spec *spec)
{
    index_spec s = *spec;
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(10 * PAGE));
    s.init_pages = 1;
    s.q = s.k = coded_hash;
    index_case *c = index_new(h, &s);
    c->b.page_table[0] = -7;
    c->b.page_table[4] = (int32_t)c->b.num_pages;
    c->t.expected_error_bits = MSA_ERROR_BIT_PAGE_ID;
    trial_run(h, &c->t);
    static const int32_t expected[16] = {0, 1, 2, 3, 5, 6, 7, 8, 9, -1, -1, -1, -1, -1, -1, -1};
    expect_list(h, index_topk(c, 0, 0), expected, "pages outside the cache");
    index_free(c);
}

/* ------------------------------------------------------------------------------------------------- stateless top-k */

static void select_row(harness *h, const isa_level *l, const float *scores, int32_t pages, int32_t *ids)
{
    arena memory = {0};
    msa_topk_args a = MSA_TOPK_ARGS_INIT;
    a.scores = arena_copy(&memory, scores, (size_t)pages * sizeof *scores, 4);
    a.rows = 1;
    a.columns = pages;
    a.valid_pages = arena_copy(&memory, &pages, sizeof pages, 4);
    a.topk = (int32_t *)(void *)arena_region(&memory, 16 * sizeof *ids, 4)->data;
    CHECK_OK(h, msa_topk(l->two ? l->two : l->one, &a, NULL));
    memcpy(ids, a.topk, 16 * sizeof *ids);
    arena_free(&memory);
}

/* 4096 pages with 8 distinct scores: the same list every time, on every instruction set. */
static void repeated_ties(harness *h)
{
    static float scores[4096];
    int32_t first[16], again[16];
    random_stream r = test_random(h);
    for (int i = 0; i < 4096; i++)
        scores[i] = (float)random_below(&r, 8);
    oracle_select_row(scores, 4096, 16, 0, 1, MSA_TOPK_ORDER_PAGE, first);
    for (int i = 0; i < 100; i++) {
        select_row(h, &h->levels[i % h->num_levels], scores, 4096, again);
        CHECK(h, !memcmp(first, again, sizeof first));
    }
}

static void nan_scores(harness *h)
{
    float scores[100];
    int32_t ids[16];
    for (int i = 0; i < h->num_levels; i++) {
        for (int page = 0; page < 100; page++)
            scores[page] = page % 10 == 3 ? -(float)page : NAN;
        select_row(h, &h->levels[i], scores, 100, ids); /* ten numbers, five NaN with the lowest ids, the own page */
        static const int32_t mixed[16] = {0, 1, 2, 3, 4, 5, 13, 23, 33, 43, 53, 63, 73, 83, 93, 99};
        expect_list(h, ids, mixed, "90 NaN");
        for (int page = 0; page < 100; page++)
            scores[page] = NAN;
        select_row(h, &h->levels[i], scores, 100, ids);
        static const int32_t all_nan[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 99};
        expect_list(h, ids, all_nan, "100 NaN");
    }
}

/* Pages that score -inf leave places unused. */
static void empty_scores(harness *h)
{
    float scores[20];
    int32_t ids[16];
    for (int page = 0; page < 20; page++)
        scores[page] = page == 3 || page == 11 ? 1 : -INFINITY;
    static const int32_t expected[16] = {3, 11, 19, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    for (int i = 0; i < h->num_levels; i++) {
        select_row(h, &h->levels[i], scores, 20, ids);
        expect_list(h, ids, expected, "-inf");
    }
}

static void close_numbers(harness *h)
{
    float scores[40];
    int32_t ids[16], expected[16];
    for (int page = 0; page < 40; page++)
        scores[page] = 256 + 0.25f * (float)page;
    for (int i = 0; i < 16; i++)
        expected[i] = 24 + i;
    for (int i = 0; i < h->num_levels; i++) {
        select_row(h, &h->levels[i], scores, 40, ids);
        expect_list(h, ids, expected, "scores that BF16 cannot tell apart");
    }
}

/* Decode rows of very different lengths and a prefill chunk in one call: every row has its own limit. */
static void mixed_rows(harness *h)
{
    enum { CHUNK = 300, ROWS = 4 + CHUNK, COLUMNS = 782 };
    static float scores[ROWS][COLUMNS];
    static int32_t valid[ROWS];
    arena memory = {0};
    int32_t(*ids)[16] = (void *)arena_region(&memory, sizeof(int32_t[ROWS][16]), 4)->data;
    static const int32_t lens[] = {5, 129, 2049, 100000};
    random_stream r = test_random(h);
    for (int row = 0; row < ROWS; row++) {
        valid[row] = ((row < 4 ? lens[row] : 1001 + row - 4) + PAGE - 1) / PAGE;
        for (int page = 0; page < COLUMNS; page++)
            scores[row][page] = (float)random_normal(&r) + (page >= valid[row] ? 1000 : 0);
    }
    msa_topk_args a = MSA_TOPK_ARGS_INIT;
    a.scores = arena_copy(&memory, scores, sizeof scores, 4);
    a.rows = ROWS;
    a.columns = COLUMNS;
    a.valid_pages = arena_copy(&memory, valid, sizeof valid, 4);
    a.topk = ids[0];
    for (int i = 0; i < h->num_levels; i++) {
        CHECK_OK(h, msa_topk(h->levels[i].one, &a, NULL));
        for (int row = 0; row < ROWS; row++) {
            int32_t expected[16];
            oracle_select_row(scores[row], valid[row], 16, 0, 1, MSA_TOPK_ORDER_PAGE, expected);
            expect_list(h, ids[row], expected, "mixed lengths");
        }
    }
    arena_free(&memory);
}

/* ------------------------------------------------------------------------------------------------------- two pools */

static void list_from_index(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    (void)position;
    memcpy(ids, index_topk(data, row, list), (size_t)k * sizeof *ids);
}

/* Index-K and K/V lie on other physical pages: lists are logical ids, so page-coded V shows the pages the indexer
 * chose. */
static void two_pools(harness *h)
{
    index_spec s = {.q_dtype = MSA_E4M3, .k_dtype = MSA_E4M3, .q = falling_query, .k = coded_page};
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(5000));
    s.requests.order = PAGES_REVERSED;
    s.requests.spare_pages = 9;
    index_case *index = index_new(h, &s);
    trial_run_once(h, &index->t, h->levels[0].one);
    attention_spec t = {.q_dtype = MSA_E4M3,
                        .kv_dtype = MSA_NVFP4,
                        .q_heads = 2,
                        .kv_heads = 1,
                        .q = coded_zero,
                        .v = coded_page,
                        .list = list_from_index,
                        .data = index};
    t.requests = batch_of(1, LENGTHS(1), LENGTHS(5000));
    attention_case *c = attention_new(h, &t);
    trial_run(h, &c->t);
    for (int page = 0; page < D; page++) { /* 15 whole pages, and 8 keys of the own one */
        double expected = page < 15 ? 128.0 / 1928 : page == 39 ? 8.0 / 1928 : 0;
        CHECK(h, is_near(MSA_BF16, attention_out(c, 0, 0, page), expected, 1e-7));
    }
    attention_free(c);
    index_free(index);
}

/* --------------------------------------------------------------------------------------------- ends of FP32's range */

/* Every key of page p has, at the end, the products odd * 2^-126, then even * 2^-126; without odd, some keys have the
 * other sign. Sums on x86: below 2^-126 (after rounding) they are 0, and +0 at last. */
static const struct faint_page {
    double odd, even, score;
} faint_pages[] = {
    {0.5, 0.5, 0},   {0.5, 1, 1},      {1, 0.5, 1.5},    {2, -255.0 / 128, 0}, {1, -0x1p-7, 0},
    {-1, -0.5, -1.5}, {1, -0x1p-25, 1}, {1, -0x1p-24, 0}, {0, -0.5, 0},
};
enum { FAINT_PAGES = sizeof faint_pages / sizeof faint_pages[0] };

static double two_channels(const place *where, const void *data)
{
    (void)data;
    return where->d >= D - 2 ? 0x1p-60 : 0;
}

static double faint_channels(const place *where, const void *data)
{
    (void)data;
    const struct faint_page *page = &faint_pages[where->page % FAINT_PAGES];
    double even = page->odd == 0 && where->token % 5 == 1 ? -page->even : page->even;
    return where->d == D - 1 ? page->odd * 0x1p-66 : where->d == D - 2 ? even * 0x1p-66 : 0;
}

static void check_faint(harness *h, trial *t)
{
    const index_case *c = (const index_case *)t; /* its first member */
    msa_context_info info = MSA_CONTEXT_INFO_INIT;
    CHECK_OK(h, msa_context_get_info(t->checked, &info));
#if defined(__x86_64__)
    for (int page = 0; page < FAINT_PAGES && strcmp(info.isa, "amx"); page++) { /* which adds in another order */
        double score = (double)index_scores(c, 0, 0)[page], expected = faint_pages[page].score * 0x1p-126;
        if (score != expected || signbit(score) != signbit(expected))
            test_fail(h, "score of page %d is %g, expected %g", page, score, expected);
    }
    static const int32_t best[] = {1, 2, FAINT_PAGES};
    for (int i = 0; i < 3 && strcmp(info.isa, "amx"); i++)
        CHECK(h, index_topk(c, 0, 0)[i] == best[i]);
#else
    (void)c;
#endif
}

static void faint_scores(harness *h, const index_spec *spec)
{
    if (spec->q_dtype != MSA_BF16 || h->options.device != MSA_DEVICE_CPU) {
        test_leave_out(h);
        return;
    }
    for (int rows = 1; rows < 40; rows += 30) {
        index_spec s = *spec;
        s.requests = batch_of(1, LENGTHS(rows), LENGTHS(FAINT_PAGES * PAGE + rows));
        s.topk = 3;
        s.q = two_channels;
        s.k = faint_channels;
        index_case *c = index_new(h, &s);
        c->t.check = check_faint;
        trial_run(h, &c->t);
        index_free(c);
    }
}

/* About 2^data: products on both sides of 2^-126 or of FP32's largest number. */
static double hash_power(const place *where, const void *data)
{
    return coded_hash(where, NULL) * ldexp(1, *(const int *)data + where->d % 5);
}

static void ends_of_range(harness *h, const index_spec *spec)
{
    static const int powers[] = {-65, 61};
    if (spec->q_dtype != MSA_BF16 || h->options.device != MSA_DEVICE_CPU) {
        test_leave_out(h);
        return;
    }
    for (int i = 0; i < 4; i++) {
        index_spec s = *spec;
        s.requests = batch_of(1, LENGTHS(i < 2 ? 2 : 20), LENGTHS(600));
        s.data = &powers[i % 2];
        s.q = s.k = hash_power;
        index_case *c = index_new(h, &s);
        c->t.check = NULL;
        trial_run(h, &c->t);
        index_free(c);
    }
}

void faults_selection(harness *h)
{
    each_index(h, "few-pages", few_pages);
    each_index(h, "one-page-too-many", one_page_too_many);
    each_index(h, "cut-rows", cut_rows);
    each_index(h, "many-pages", many_pages);
    if (!h->options.quick)
        each_index(h, "equal-scores", equal_scores);
    each_index(h, "wide-scores", wide_scores);
    each_index(h, "nan-key", nan_key);
    each_index(h, "close-scores", close_scores);
    each_index(h, "faint-scores", faint_scores);
    each_index(h, "ends-of-range", ends_of_range);
    each_index(h, "page-outside", page_outside);
    plain_test(h, "topk", "repeated-ties", repeated_ties);
    plain_test(h, "topk", "nan-scores", nan_scores);
    plain_test(h, "topk", "empty-scores", empty_scores);
    plain_test(h, "topk", "close-numbers", close_numbers);
    plain_test(h, "topk", "mixed-rows", mixed_rows);
    plain_test(h, "layer", "two-pools", two_pools);
}
