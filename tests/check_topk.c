/* SPDX-License-Identifier: MIT
 *
 * check_topk.c - the stateless selection, on scores with ties, NaN, infinities and both zeros. Lists must be exact.
 */
#include "checkkernel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum score_kind {
    NORMAL,
    FEW_VALUES,
    MIXED,
    ASCENDING,
    DESCENDING,
    EQUAL,
    ZEROS,
    MOSTLY_NAN,
    MOSTLY_EMPTY,
    ALL_NAN,
    NUM_KINDS
};

typedef struct topk_spec {
    int32_t heads, rows, columns, k, init_pages, local_pages;
    msa_topk_order order;
    enum score_kind kind;
    row_layout layout;
    bool timed;
} topk_spec;

typedef struct topk_case {
    trial t;
    msa_topk_args args;
    int32_t *valid_pages;
    const uint8_t *scores;
    int64_t scores_row, scores_head, topk_row, topk_head; /* bytes */
} topk_case;

static float make_score(enum score_kind kind, int32_t page, random_stream *r)
{
    static const float mixed[] = {0.0f, -0.0f, 1.0f,   -1.0f,   INFINITY, -INFINITY,
                                  NAN,  -NAN,  1e-42f, -1e-42f, 3.4e38f,  -3.4e38f};
    switch (kind) {
    case FEW_VALUES:
        return 0.5f * (float)random_below(r, 8) - 2;
    case MIXED:
        return mixed[random_below(r, 12)];
    case ASCENDING:
        return (float)page - 100;
    case DESCENDING:
        return -(float)page;
    case EQUAL:
        return 7;
    case ZEROS:
        return random_chance(r, 0.5) ? 0.0f : -0.0f;
    case MOSTLY_NAN:
        return random_chance(r, 0.9) ? NAN : (float)random_normal(r);
    case MOSTLY_EMPTY:
        return random_chance(r, 0.9) ? -INFINITY : (float)random_normal(r);
    case ALL_NAN:
        return random_chance(r, 0.5) ? NAN : -NAN;
    default:
        return (float)random_normal(r);
    }
}

static int32_t row_pages(const topk_case *c, int64_t row)
{
    int32_t n = c->valid_pages[row];
    return n < 0 ? 0 : n > c->args.columns ? c->args.columns : n;
}

static msa_status run(trial *t, msa_context *context)
{
    return msa_topk(context, &((topk_case *)t)->args, NULL);
}

static void check(harness *h, trial *t)
{
    topk_case *c = (topk_case *)t;
    int32_t expected[MSA_MAX_TOPK], given[MSA_MAX_TOPK];
    float *scores = xmalloc(((size_t)c->args.columns + 1) * sizeof *scores);
    for (int32_t head = 0; head < c->args.num_heads; head++)
        for (int64_t row = 0; row < c->args.rows; row++) {
            int32_t n = row_pages(c, row);
            if (n > 0)
                memcpy(scores, c->scores + head * c->scores_head + row * c->scores_row, (size_t)n * sizeof *scores);
            oracle_select_row(scores, n, c->args.k, c->args.init_pages, c->args.local_pages, c->args.order, expected);
            memcpy(given, c->t.outputs[0].region->data + head * c->topk_head + row * c->topk_row,
                   (size_t)c->args.k * 4);
            for (int32_t i = 0; i < c->args.k; i++)
                if (given[i] != expected[i]) {
                    test_fail(h, "topk[head %d, row %lld, %d] = %d, expected %d (%d pages)", head, (long long)row, i,
                              given[i], expected[i], n);
                    break;
                }
        }
    free(scores);
}

/* Columns past a row's pages hold +Inf; those of the last row do not even exist. */
static void make_scores(topk_case *c, const topk_spec *s, random_stream *r)
{
    row_strides(s->layout, s->rows, s->heads, 4 * (int64_t)s->columns, 20, &c->scores_row, &c->scores_head);
    if (s->layout == ROWS_DENSE) { /* the default is [H, R, C] */
        c->scores_row = 4 * (int64_t)s->columns;
        c->scores_head = c->scores_row * s->rows;
    } else {
        c->args.scores_row_stride = c->scores_row;
        c->args.scores_head_stride = c->scores_head;
    }
    int64_t end = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t used = (s->heads - 1) * c->scores_head + row * c->scores_row + 4 * (int64_t)row_pages(c, row);
        end = used > end ? used : end;
    }
    uint8_t *data = arena_region(&c->t.inputs, (size_t)end, 4)->data;
    const float infinity = INFINITY;
    for (int64_t i = 0; i + 4 <= end; i += 4)
        memcpy(data + i, &infinity, 4);
    for (int32_t head = 0; head < s->heads; head++)
        for (int64_t row = 0; row < s->rows; row++)
            for (int32_t page = 0; page < row_pages(c, row) - 1; page++) {
                float score = make_score(s->kind, page, r);
                memcpy(data + head * c->scores_head + row * c->scores_row + 4 * page, &score, 4);
            }
    c->scores = data;
    c->args.scores = (const float *)(const void *)data;
}

static void topk_test(harness *h, const topk_spec *s)
{
    topk_case c = {.t = {.run = run, .check = check, .timed = s->timed, .same_bits = true}, .args = MSA_TOPK_ARGS_INIT};
    random_stream r = test_random(h);
    c.args.num_heads = s->heads;
    c.args.rows = s->rows;
    c.args.columns = s->columns;
    c.args.k = s->k;
    c.args.init_pages = s->init_pages;
    c.args.local_pages = s->local_pages;
    c.args.order = s->order;
    c.valid_pages = (int32_t *)(void *)arena_region(&c.t.inputs, (size_t)s->rows * 4, 4)->data;
    for (int64_t row = 0; row < s->rows; row++) {
        int32_t kind = random_below(&r, 6);
        c.valid_pages[row] = kind == 0   ? s->columns + random_below(&r, 3)
                             : kind == 1 ? random_below(&r, 4) - 2
                             : s->timed  ? s->columns
                                         : random_below(&r, s->columns + 1);
    }
    c.args.valid_pages = c.valid_pages;
    make_scores(&c, s, &r);
    int64_t bytes = row_strides(s->layout, s->rows, s->heads, 4 * s->k, 12, &c.topk_row, &c.topk_head);
    if (s->layout == ROWS_DENSE) {
        c.topk_row = 4 * s->k;
        c.topk_head = c.topk_row * s->rows;
    } else {
        c.args.topk_row_stride = c.topk_row;
        c.args.topk_head_stride = c.topk_head;
    }
    output *o = trial_output(&c.t, "topk", (size_t)bytes, 4);
    c.args.topk = (int32_t *)(void *)o->region->data;
    for (int32_t head = 0; head < s->heads; head++)
        for (int64_t row = 0; row < s->rows; row++)
            memset(o->written + head * c.topk_head + row * c.topk_row, 1, 4 * (size_t)s->k);
    trial_run(h, &c.t);
    trial_free(&c.t);
}

void check_topk(harness *h)
{
    if (test_begin(h, "topk", "typical-0")) {
        topk_test(h, &(topk_spec){.heads = 1, .rows = 64, .columns = 4096, .k = 16, .local_pages = 1, .timed = true});
        test_end(h);
    }
    for (int k = 1; k <= MSA_MAX_TOPK; k++) {
        if (!test_begin(h, "topk", "k-%d", k))
            continue;
        random_stream r = test_random(h);
        topk_spec s = {.heads = random_between(&r, 1, 3),
                       .rows = random_between(&r, 1, 20),
                       .columns = random_below(&r, 100),
                       .k = k};
        s.init_pages = random_below(&r, k);
        s.local_pages = random_between(&r, 1, k - s.init_pages);
        s.order = k % 2 ? MSA_TOPK_ORDER_SCORE : MSA_TOPK_ORDER_PAGE;
        s.kind = (enum score_kind)(k % NUM_KINDS);
        s.layout = (row_layout)(k % 3);
        topk_test(h, &s);
        test_end(h);
    }
    /* Widths at which kernels change their way: rows a lane, a warp, a block. */
    static const int32_t columns[] = {17, 300, 8192, 120, 1024, 1500, 2048, 3000};
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int i = 0; i < (int)(sizeof columns / sizeof *columns); i++) {
            if (!test_begin(h, "topk", "scores-%d-%d", kind, i))
                continue;
            topk_test(h, &(topk_spec){.heads = 1 + i % 2,
                                      .rows = 9,
                                      .columns = columns[i],
                                      .k = i % 3 == 1 ? 32 : 16,
                                      .init_pages = i % 3,
                                      .local_pages = 1 + i % 3,
                                      .order = (msa_topk_order)(kind % 2),
                                      .kind = (enum score_kind)kind});
            test_end(h);
        }
    for (int i = 0; i < 24; i++) { /* many rows of each kind beside each other */
        if (!test_begin(h, "topk", "rows-%d", i))
            continue;
        topk_test(h, &(topk_spec){.heads = 1 + i % 3,
                                  .rows = 200,
                                  .columns = columns[i % 8],
                                  .k = 1 + i * 5 % 32,
                                  .local_pages = 1,
                                  .order = (msa_topk_order)(i % 2),
                                  .kind = i < 8    ? NORMAL
                                          : i < 16 ? FEW_VALUES
                                                   : MIXED,
                                  .layout = (row_layout)(i % 3)});
        test_end(h);
    }
}
