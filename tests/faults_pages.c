/* SPDX-License-Identifier: MIT
 *
 * faults_pages.c - page lists, page tables, physical pages and layouts.
 */
#include "faults.h"

#include <limits.h>
#include <math.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

/* Copies the list that data points to: k ids. */
static void list_given(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    (void)list;
    (void)row;
    (void)position;
    memcpy(ids, data, (size_t)k * sizeof *ids);
}

/* Zero queries over page-coded V: element p is the share of page p. */
static void expect_shares(harness *h, const attention_spec *spec, const int32_t ids[4], double share2, double share5)
{
    attention_spec s = *spec;
    s.topk = 4;
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(1024));
    s.q = coded_zero;
    s.v = coded_page;
    s.list = list_given;
    s.data = ids;
    attention_case *c = attention_new(h, &s);
    trial_run(h, &c->t);
    for (int d = 0; d < D; d++) {
        double expected = d == 2 ? share2 : d == 5 ? share5 : 0;
        if (!(attention_out(c, 0, 0, d) == expected))
            test_fail(h, "list %d %d %d %d: share of page %d is %g", ids[0], ids[1], ids[2], ids[3], d,
                      attention_out(c, 0, 0, d));
    }
    attention_free(c);
}

static void repeated_page(harness *h, const attention_spec *spec)
{
    static const int32_t lists[][4] = {{2, 2, 5, -1}, {5, 2, 2, 2}, {2, -1, 5, 2}, {5, 5, 2, 5}};
    for (int i = 0; i < 4; i++)
        expect_shares(h, spec, lists[i], 0.5, 0.5);
    expect_shares(h, spec, (const int32_t[]){2, 2, 2, 2}, 1, 0);
}

/* The page table begins right behind a guard page: a list entry of -1 must not be looked up. */
static void before_the_table(harness *h, const attention_spec *spec)
{
    static const int32_t ids[] = {-1, 0, 1, -1};
    attention_spec s = *spec;
    s.topk = 4;
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(1024 * PAGE)); /* 4096 bytes of table */
    s.requests.order = PAGES_ONE;
    s.list = list_given;
    s.data = ids;
    attention_test(h, &s);
}

/* Ids and physical pages outside their ranges contribute nothing and set their bit. */
static void wild_ids(harness *h, const attention_spec *spec)
{
    static const int32_t good[] = {0, 2, -1, -1}, bad_ids[] = {INT_MAX, INT_MIN, 1 << 30, -2, 9};
    static const int32_t bad_pages[] = {INT_MAX, INT_MIN, -1, -5, 0};
    attention_spec s = *spec;
    s.topk = 4;
    s.requests = batch_of(1, LENGTHS(3), LENGTHS(9 * PAGE));
    s.q = s.k = s.v = coded_hash;
    s.list = list_given;
    s.data = good;
    attention_case *plain = attention_new(h, &s), *wild = attention_new(h, &s);
    wild->t.expected_error_bits = MSA_ERROR_BIT_LIST_ID;
    for (int i = 0; i < 5; i++) {
        wild->lists[2] = wild->lists[4 + 3] = bad_ids[i];
        same_bits(h, &plain->t, &wild->t, "list id out of range");
    }
    for (int row = 0; row < 3; row++) /* page 5 is listed, and lies nowhere */
        wild->lists[4 * row + 2] = wild->lists[4 * row + 3] = 5;
    wild->t.expected_error_bits = MSA_ERROR_BIT_PAGE_ID;
    for (int i = 0; i < 5; i++) {
        wild->b.page_table[5] = bad_pages[i] ? bad_pages[i] : (int32_t)wild->b.num_pages;
        same_bits(h, &plain->t, &wild->t, "physical page out of range");
    }
    attention_free(plain);
    attention_free(wild);
}

/* Ids of pages that the row cannot see are legal: their table entries hold rubbish and are not looked at. */
static void invisible_ids(harness *h, const attention_spec *spec)
{
    static const int32_t few[] = {1, 0, -1, -1}, more[] = {1, 5, 0, 4};
    attention_spec a = *spec, b = *spec;
    a.topk = b.topk = 4;
    a.requests = batch_of(1, LENGTHS(2), LENGTHS(300));
    a.requests.max_kv_len = 6 * PAGE;
    b.requests = a.requests;
    a.q = a.k = a.v = b.q = b.k = b.v = coded_hash;
    a.list = b.list = list_given;
    a.data = few;
    b.data = more;
    same_attention(h, &a, &b, "ids of pages past the length");
}

static void table_pitches(harness *h, const attention_spec *spec)
{
    static const int32_t gaps[] = {58, 994};
    attention_spec a = *spec, b = *spec;
    a.requests = batch_of(3, LENGTHS(2, 1, 3), LENGTHS(129, 1, 700));
    a.list = b.list = list_all_pages;
    b.requests = a.requests;
    for (int i = 0; i < 2; i++) {
        b.requests.table_gap = gaps[i];
        same_attention(h, &a, &b, "page table pitch");
    }
}

/* Where pages lie does not matter. */
static void physical_pages(harness *h, const attention_spec *spec)
{
    static const page_order orders[] = {PAGES_REVERSED, PAGES_SHUFFLED};
    attention_spec a = *spec, b = *spec;
    a.requests = batch_of(2, LENGTHS(2, 3), LENGTHS(1500, 300));
    a.requests.order = PAGES_IN_ORDER;
    a.q = a.k = a.v = b.q = b.k = b.v = coded_hash;
    a.list = b.list = list_all_pages;
    b.requests = a.requests;
    b.requests.spare_pages = 100;
    for (int i = 0; i < 2; i++) {
        b.requests.order = orders[i];
        same_attention(h, &a, &b, "order of physical pages");
    }
}

/* Common prefixes hold the same numbers for every request. */
static double prefix_value(const place *where, const void *data)
{
    place common = *where;
    if (where->page >= 0 && where->page < 8)
        common.request = 0;
    return coded_hash(&common, data);
}

static void shared_prefix(harness *h, const attention_spec *spec)
{
    enum { REQUESTS = 12 };
    int32_t ones[REQUESTS], lens[REQUESTS];
    for (int i = 0; i < REQUESTS; i++) {
        ones[i] = 1;
        lens[i] = 8 * PAGE + 1 + 10 * i;
    }
    attention_spec apart = *spec, shared = *spec;
    apart.requests = batch_of(REQUESTS, ones, lens);
    apart.q = apart.k = apart.v = shared.q = shared.k = shared.v = prefix_value;
    apart.list = shared.list = list_all_pages;
    shared.requests = apart.requests;
    shared.requests.share_pages = true;
    same_attention(h, &apart, &shared, "shared pages");
}

static void list_by_head(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    (void)position;
    (void)data;
    for (int32_t i = 0; i < k; i++)
        ids[i] = (int32_t)(i == 0 ? list : i == 1 ? 4 + row : -1);
}

/* [lists, T, k] and [T, lists, k] where the shape cannot tell them apart. */
static void list_layouts(harness *h, const attention_spec *spec)
{
    attention_spec a = *spec, b = *spec;
    a.kv_heads = b.kv_heads = 4;
    a.q_heads = b.q_heads = 4;
    a.requests = b.requests = batch_of(1, LENGTHS(4), LENGTHS(8 * PAGE));
    a.q = a.k = a.v = b.q = b.k = b.v = coded_hash;
    a.list = b.list = list_by_head;
    static const row_layout layouts[] = {ROWS_HEAD_MAJOR, ROWS_GAPS};
    for (int i = 0; i < 2; i++) {
        b.list_layout = layouts[i];
        same_attention(h, &a, &b, "layout of the lists");
    }
}

/* Outputs of the same problem, compared element by element because their layouts differ. */
static void same_values(harness *h, const attention_case *a, const attention_case *b, const char *what)
{
    for (int64_t row = 0; row < a->b.total_q; row++)
        for (int32_t head = 0; head < a->spec.q_heads; head++) {
            bool same = attention_lse(a, row, head) == attention_lse(b, row, head);
            for (int d = 0; d < D; d++)
                same &= attention_out(a, row, head, d) == attention_out(b, row, head, d);
            if (!same)
                test_fail(h, "%s: row %lld, head %d differs", what, (long long)row, head);
        }
}

static void layouts(harness *h, const attention_spec *spec)
{
    static const cache_layout caches[] = {CACHE_GAPS, CACHE_PACKED, CACHE_TOKEN_MAJOR, CACHE_SLOTS};
    for (int heads = 1; heads <= 4; heads += heads) {
        attention_spec dense = *spec;
        dense.kv_heads = heads;
        dense.q_heads = 2 * heads;
        dense.topk = 3;
        dense.requests = batch_of(2, LENGTHS(2, 3), LENGTHS(200, 300));
        attention_case *a = attention_new(h, &dense);
        for (int i = 0; i < (spec->kv_dtype == MSA_NVFP4 ? 8 : 3); i++) {
            attention_spec other = dense;
            other.cache_layout = caches[i % 4];
            other.quad = i >= 4;
            other.q_layout = other.out_layout = i % 2 ? ROWS_GAPS : ROWS_HEAD_MAJOR;
            attention_case *b = attention_new(h, &other);
            for (int j = 0; j < h->num_levels; j++) {
                trial_run_once(h, &a->t, h->levels[j].one);
                trial_run_once(h, &b->t, h->levels[j].one);
                same_values(h, a, b, "layout");
            }
            attention_free(b);
        }
        attention_free(a);
    }
}

/* --------------------------------------------------------------------------------------------- append, then attend */

/* What cache_write appends under a layout, attention reads under it: one visible key a row gives V back exactly. */
static void append_and_attend(harness *h, const attention_spec *spec)
{
    static const cache_layout caches[] = {CACHE_DENSE, CACHE_GAPS, CACHE_PACKED, CACHE_TOKEN_MAJOR, CACHE_SLOTS};
    bool nvfp4 = spec->kv_dtype == MSA_NVFP4;
    for (int i = 0; i < (nvfp4 ? 10 : 4); i++) {
        attention_spec s = *spec;
        s.kv_heads = s.q_heads = 1 + i % 4;
        s.cache_layout = caches[i % 5];
        s.quad = i >= 5;
        s.requests = batch_of(3, LENGTHS(1, 1, 1), LENGTHS(1, 1, 1));
        s.list = list_all_pages;
        attention_case *c = attention_new(h, &s);
        const msa_attention_args *a = &c->args;
        float new_rows[2][3][4][D];
        int64_t slots[3];
        random_stream r = test_random(h);
        for (int j = 0; j < 3; j++)
            slots[j] = (int64_t)c->b.page_table[j * c->b.table_pitch] * PAGE;
        for (int j = 0; j < 2 * 3 * 4 * D; j++)
            (&new_rows[0][0][0][0])[j] = (float)random_normal(&r);
        msa_cache_write_args w = MSA_CACHE_WRITE_ARGS_INIT;
        w.tokens = 3;
        w.slot_mapping = arena_copy(&c->t.inputs, slots, sizeof slots, 8);
        w.num_pages = c->b.num_pages;
        w.num_kv_heads = s.kv_heads;
        w.src_dtype = MSA_F32;
        w.k_new = arena_copy(&c->t.inputs, new_rows[0], sizeof new_rows[0], 4);
        w.v_new = arena_copy(&c->t.inputs, new_rows[1], sizeof new_rows[1], 4);
        w.k_new_row_stride = w.v_new_row_stride = sizeof new_rows[0][0];
        w.k_new_head_stride = w.v_new_head_stride = sizeof new_rows[0][0][0];
        w.kv_dtype = s.kv_dtype;
        w.v_scale_order = c->desc.v_scale_order;
        w.k = (void *)a->k;
        w.v = (void *)a->v;
        w.k_scale = (void *)a->k_scale;
        w.v_scale = (void *)a->v_scale;
        w.k_page_stride = a->k_page_stride;
        w.k_head_stride = a->k_head_stride;
        w.k_token_stride = a->k_token_stride;
        w.v_page_stride = a->v_page_stride;
        w.v_head_stride = a->v_head_stride;
        w.v_token_stride = a->v_token_stride;
        w.k_scale_page_stride = a->k_scale_page_stride;
        w.k_scale_head_stride = a->k_scale_head_stride;
        w.k_scale_token_stride = a->k_scale_token_stride;
        w.v_scale_page_stride = a->v_scale_page_stride;
        w.v_scale_head_stride = a->v_scale_head_stride;
        w.v_scale_token_stride = a->v_scale_token_stride;
        CHECK_OK(h, msa_cache_write(h->levels[0].one, &w, NULL));
        trial_run(h, &c->t); /* the oracle reads the cache */
        for (int j = 0; j < 3; j++)
            for (int32_t head = 0; head < s.kv_heads; head++)
                for (int d = 0; d < D; d++) { /* and it holds what was appended, to the precision of its format */
                    double x = attention_out(c, j, head, d), e = (double)new_rows[1][j][head][d];
                    CHECK(h, fabs(x - e) <= (nvfp4 ? 0.6 : s.kv_dtype == MSA_E4M3 ? 0.13 : 0.02));
                }
        attention_free(c);
    }
}

void faults_pages(harness *h)
{
    each_attention(h, "repeated-page", repeated_page);
    each_attention(h, "before-the-table", before_the_table);
    each_attention(h, "wild-ids", wild_ids);
    each_attention(h, "invisible-ids", invisible_ids);
    each_attention(h, "table-pitch", table_pitches);
    each_attention(h, "physical-pages", physical_pages);
    each_attention(h, "shared-prefix", shared_prefix);
    each_attention(h, "list-layout", list_layouts);
    each_attention(h, "layouts", layouts);
    each_attention(h, "append-and-attend", append_and_attend);
}
