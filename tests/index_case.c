/* SPDX-License-Identifier: MIT
 *
 * index_case.c - test problems of the indexer; see inputs.h.
 */
#include "inputs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

/* --------------------------------------------------------------------------------------------------------- tensors */

/* Pages of a row, its own included; 0 where it sees nothing. */
static int32_t row_pages(const index_case *c, int64_t row)
{
    int64_t position = c->b.row_position[row];
    if (c->b.row_request[row] < 0 || position < 0)
        return 0;
    return (int32_t)min_i64(position / PAGE + 1, c->b.max_pages);
}

/* Pages with a score: those before the row's own, also where that one is past the plan's capacity. */
static int32_t row_history(const index_case *c, int64_t row)
{
    int64_t position = c->b.row_position[row];
    return row_pages(c, row) ? (int32_t)min_i64(position / PAGE, c->b.max_pages) : 0;
}

static void make_queries(index_case *c)
{
    const index_spec *s = &c->spec;
    int64_t row, head,
        bytes = row_strides(s->q_layout, c->b.total_q, s->heads, oracle_row_bytes(s->q_dtype, D), 32, &row, &head);
    region *r = arena_region(&c->t.inputs, (size_t)bytes, 16);
    region_fill(r, (uint8_t)s->poison);
    rows_fill(r->data, s->q_dtype, &c->b, s->heads, row, head, s->q, s->data, 1, &c->random);
    c->args.index_q = r->data;
    if (s->q_layout != ROWS_DENSE) {
        c->args.index_q_row_stride = row;
        c->args.index_q_head_stride = head;
    }
}

/* Only history pages hold keys; a row's own page is never read for it. */
static void make_cache(index_case *c)
{
    const index_spec *s = &c->spec;
    cache_tensor k;
    cache_new(&c->t, s->k_dtype,
              s->slots  ? CACHE_SLOTS
              : s->gaps ? CACHE_GAPS
                        : CACHE_DENSE,
              false, 1, c->b.num_pages, (uint8_t)s->poison, &k, NULL);
    uint8_t *visible = xcalloc((size_t)c->b.num_pages, 1);
    for (int64_t row = 0; row < c->b.total_q; row++)
        for (int32_t page = 0; page < row_history(c, row); page++)
            visible[c->b.page_table[c->b.row_request[row] * c->b.table_pitch + page]] = PAGE;
    cache_fill(&k, &c->b, s->requests.batch, visible, s->k, s->data, 1, &c->random);
    free(visible);
    msa_index_args *a = &c->args;
    a->index_k = k.data;
    a->index_k_scale = k.scale;
    a->num_pages = c->b.num_pages;
    if (!s->slots && !s->gaps)
        return;
    a->index_k_page_stride = k.page;
    a->index_k_token_stride = k.token;
    a->index_k_scale_page_stride = k.scale_page;
    a->index_k_scale_token_stride = k.scale_token;
}

static void mark(output *o, int64_t offset, int64_t bytes)
{
    memset(o->written + offset, 1, (size_t)bytes);
}

/* The library may count on max_pages columns in every row of scores; columns past the history keep their bits. */
static void make_outputs(index_case *c)
{
    const index_spec *s = &c->spec;
    msa_index_args *a = &c->args;
    int64_t rows = c->b.total_q;
    if (s->outputs & MSA_INDEX_SCORES) {
        int64_t bytes =
            row_strides(s->scores_layout, rows, s->heads, 4 * c->b.max_pages, 20, &c->scores_row, &c->scores_head);
        if (s->scores_layout == ROWS_DENSE) { /* the default is [H, T, P] */
            c->scores_row = 4 * c->b.max_pages;
            c->scores_head = c->scores_row * rows;
        } else {
            a->scores_row_stride = c->scores_row;
            a->scores_head_stride = c->scores_head;
        }
        c->scores = trial_output(&c->t, "scores", (size_t)bytes, 4);
        a->scores = (float *)(void *)c->scores->region->data;
    }
    if (s->outputs & MSA_INDEX_SELECTION) {
        int64_t bytes = row_strides(s->list_layout, rows, s->heads, 4 * s->topk, 12, &c->topk_row, &c->topk_head);
        if (s->list_layout == ROWS_DENSE) {
            c->topk_row = 4 * s->topk;
            c->topk_head = c->topk_row * rows;
        } else {
            a->topk_row_stride = c->topk_row;
            a->topk_head_stride = c->topk_head;
        }
        c->topk = trial_output(&c->t, "topk", (size_t)bytes, 4);
        a->topk = (int32_t *)(void *)c->topk->region->data;
        if (!s->without_counts) {
            c->counts = trial_output(&c->t, "num_valid_pages", (size_t)(4 * rows), 4);
            a->num_valid_pages = (int32_t *)(void *)c->counts->region->data;
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        for (int32_t head = 0; head < s->heads && c->b.row_request[row] >= 0; head++) {
            if (c->scores)
                mark(c->scores, row * c->scores_row + head * c->scores_head, 4 * row_history(c, row));
            if (c->topk)
                mark(c->topk, row * c->topk_row + head * c->topk_head, 4 * s->topk);
        }
        if (c->counts && c->b.row_request[row] >= 0)
            mark(c->counts, 4 * row, 4);
    }
}

/* ----------------------------------------------------------------------------------------------- running, checking */

static msa_status index_open(trial *t, msa_context *context)
{
    index_case *c = (index_case *)t;
    return (c->spec.decode ? msa_index_decode_plan : msa_index_prefill_plan)(context, &c->desc, &t->plan);
}

static msa_status index_run(trial *t, msa_context *context)
{
    (void)context;
    index_case *c = (index_case *)t;
    c->step.workspace = t->workspace ? t->workspace->data : NULL;
    c->step.workspace_bytes = t->workspace ? t->workspace->bytes : 0;
    msa_status status =
        (c->spec.decode ? msa_index_decode_prepare : msa_index_prefill_prepare)(t->plan, &c->step, NULL);
    if (!status)
        status = (c->spec.decode ? msa_index_decode_run : msa_index_prefill_run)(t->plan, &c->args, NULL);
    return status ? status : msa_plan_error(t->plan, &t->error_bits, NULL);
}

const float *index_scores(const index_case *c, int64_t row, int32_t head)
{
    return (const float *)(const void *)(c->scores->region->data + row * c->scores_row + head * c->scores_head);
}

const int32_t *index_topk(const index_case *c, int64_t row, int32_t head)
{
    return (const int32_t *)(const void *)(c->topk->region->data + row * c->topk_row + head * c->topk_head);
}

static void check_scores(harness *h, const index_case *c, int64_t row, int32_t head)
{
    double *expected = xmalloc(2 * (size_t)c->b.max_pages * sizeof *expected), *bounds = expected + c->b.max_pages;
    oracle_index_row(&c->desc, &c->step, &c->args, row, head, expected, bounds);
    const float *scores = index_scores(c, row, head);
    for (int32_t page = 0; page < row_history(c, row); page++)
        if (!isnan(expected[page]) && !is_near(MSA_F32, (double)scores[page], expected[page], bounds[page]))
            test_fail(h, "scores[head %d, row %lld, page %d] = %.9g, expected %.9g +- %.2g", head, (long long)row, page,
                      (double)scores[page], expected[page], bounds[page]);
    free(expected);
}

/* The list must be the one that the rules choose from `scores`, exactly. */
static void check_list(harness *h, const index_case *c, const float *scores, int64_t row, int32_t head)
{
    int32_t expected[MSA_MAX_TOPK];
    const index_spec *s = &c->spec;
    oracle_select_row(scores, row_pages(c, row), s->topk, s->init_pages, s->local_pages, s->order, expected);
    for (int32_t i = 0; i < s->topk; i++)
        if (index_topk(c, row, head)[i] != expected[i]) {
            test_fail(h, "topk[head %d, row %lld, %d] = %d, expected %d", head, (long long)row, i,
                      index_topk(c, row, head)[i], expected[i]);
            return;
        }
}

/* A plan without scores must list what the plan with scores does, so its scores come from such a plan. */
static index_case *with_scores(harness *h, const index_case *c)
{
    index_spec spec = c->spec;
    spec.outputs = MSA_INDEX_SCORES;
    index_case *twin = index_new(h, &spec);
    trial_run_once(h, &twin->t, c->t.checked);
    return twin;
}

static void index_check(harness *h, trial *t)
{
    index_case *c = (index_case *)t, *twin = NULL;
    const index_spec *s = &c->spec;
    random_stream random = test_random(h);
    if (!c->scores)
        twin = with_scores(h, c);
    const index_case *scored = twin ? twin : c;
    for (int64_t row = 0; row < c->b.total_q; row++) {
        if (c->b.row_request[row] < 0)
            continue;
        int32_t pages = row_pages(c, row), given = pages;
        if (c->counts)
            memcpy(&given, c->counts->region->data + 4 * row, sizeof given);
        if (given != pages)
            test_fail(h, "num_valid_pages[%lld] = %d, expected %d", (long long)row, given, pages);
        for (int32_t head = 0; head < s->heads && c->topk; head++)
            check_list(h, c, index_scores(scored, row, head), row, head);
    }
    for (int32_t i = s->samples ? s->samples : 24; i > 0 && c->scores && c->b.total_q > 0; i--)
        check_scores(h, c, random_below(&random, (int32_t)c->b.total_q), random_below(&random, s->heads));
    if (twin)
        index_free(twin);
}

/* ---------------------------------------------------------------------------------------------------------- making */

index_case *index_new(const harness *h, const index_spec *spec)
{
    index_case *c = xcalloc(1, sizeof *c);
    c->t.open = index_open;
    c->t.run = index_run;
    c->t.check = index_check;
    c->spec = *spec;
    c->random = test_random(h);
    index_spec *s = &c->spec;
    s->heads = s->heads ? s->heads : 1;
    s->topk = s->topk ? s->topk : 16;
    s->local_pages = s->local_pages ? s->local_pages : 1;
    s->outputs = s->outputs ? s->outputs : MSA_INDEX_SCORES | MSA_INDEX_SELECTION;
    s->poison = s->poison ? s->poison : 0xFF;
    c->args = (msa_index_args)MSA_INDEX_ARGS_INIT;
    batch_new(&c->t, &c->b, &c->step, &s->requests, &c->random);
    make_queries(c);
    make_cache(c);
    make_outputs(c);
    c->desc = (msa_index_desc)MSA_INDEX_DESC_INIT;
    c->desc.q_dtype = s->q_dtype;
    c->desc.k_dtype = s->k_dtype;
    c->desc.num_index_heads = s->heads;
    c->desc.topk = s->topk;
    c->desc.init_pages = s->init_pages;
    c->desc.local_pages = s->local_pages;
    c->desc.topk_order = s->order;
    c->desc.precision = s->precision;
    c->desc.outputs = s->outputs;
    c->desc.max_batch = s->requests.max_batch ? s->requests.max_batch : s->requests.batch > 0 ? s->requests.batch : 1;
    c->desc.max_total_q = s->requests.max_total_q ? s->requests.max_total_q : c->b.total_q > 0 ? c->b.total_q : 1;
    c->desc.max_kv_len = c->b.max_kv_len;
    return c;
}

void index_free(index_case *c)
{
    batch_free(&c->b);
    trial_free(&c->t);
    free(c);
}

void index_test(harness *h, const index_spec *spec)
{
    index_case *c = index_new(h, spec);
    trial_run(h, &c->t);
    index_free(c);
}
