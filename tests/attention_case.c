/* SPDX-License-Identifier: MIT
 *
 * attention_case.c - test problems of prefill and decode; see inputs.h.
 */
#include "inputs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

/* ----------------------------------------------------------------------------------------------------------- lists */

void list_all_pages(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    (void)list;
    (void)row;
    (void)data;
    for (int32_t i = 0; i < k; i++)
        ids[i] = i * (int64_t)PAGE <= position ? i : -1;
}

/* Any order; with holes, repeated ids, and pages past the row's position. */
static void list_random(int32_t *ids, int32_t k, int64_t position, int64_t max_pages, random_stream *random)
{
    int32_t seen = (int32_t)min_i64(position < 0 ? 0 : position / PAGE + 1, max_pages);
    for (int32_t i = 0; i < k; i++) {
        int32_t kind = random_below(random, 8);
        ids[i] = kind == 0                ? -1
                 : kind == 1 || seen == 0 ? random_below(random, (int32_t)max_pages)
                                          : random_below(random, seen);
    }
    if (seen > 0 && random_chance(random, 0.8))
        ids[random_below(random, k)] = seen - 1; /* the local page, with some keys that the row does not see */
}

static void make_lists(attention_case *c)
{
    const attention_spec *s = &c->spec;
    int64_t rows = c->b.total_q, k = s->topk, pitch = s->list_layout == ROWS_GAPS ? k + 5 : k;
    bool token_major = s->list_layout == ROWS_HEAD_MAJOR; /* [T, lists, k]; the default is [lists, T, k] */
    c->list_row = token_major ? pitch * s->lists : pitch;
    c->list_head = token_major ? pitch : pitch * rows;
    int64_t entries = rows ? (rows - 1) * c->list_row + (s->lists - 1) * c->list_head + k : 0;
    c->lists = (int32_t *)(void *)arena_region(&c->t.inputs, (size_t)entries * 4, 4)->data;
    for (int64_t i = 0; i < entries; i++)
        c->lists[i] = INT32_MIN;
    c->step.topk = c->lists;
    if (s->list_layout != ROWS_DENSE) {
        c->step.topk_row_stride = 4 * c->list_row;
        c->step.topk_head_stride = 4 * c->list_head;
    }
    for (int32_t list = 0; list < s->lists; list++)
        for (int64_t row = 0; row < rows; row++) {
            int32_t *ids = c->lists + list * c->list_head + row * c->list_row;
            if (c->b.row_request[row] >= 0 && s->list)
                s->list(ids, s->topk, list, row, c->b.row_position[row], s->data);
            else if (c->b.row_request[row] >= 0)
                list_random(ids, s->topk, c->b.row_position[row], c->b.max_pages, &c->random);
        }
}

/* Counts each row's visible pages, and marks the tokens that some row sees in visible[physical*kv_heads + head]. */
static void find_visible(attention_case *c, uint8_t *visible)
{
    const attention_spec *s = &c->spec;
    int32_t heads_a_list = s->kv_heads / s->lists;
    for (int32_t list = 0; list < s->lists; list++)
        for (int64_t row = 0; row < c->b.total_q; row++) {
            const int32_t *ids = c->lists + list * c->list_head + row * c->list_row;
            int32_t request = c->b.row_request[row];
            int64_t position = c->b.row_position[row];
            for (int32_t i = 0; request >= 0 && i < s->topk; i++) {
                int64_t page = ids[i], keys = min_i64(position - page * PAGE + 1, PAGE);
                bool repeated = false;
                for (int32_t j = 0; j < i; j++)
                    repeated |= ids[j] == ids[i];
                if (page < 0 || page >= c->b.max_pages || keys <= 0 || repeated)
                    continue;
                int64_t physical = c->b.page_table[request * c->b.table_pitch + page];
                if (physical < 0 || physical >= c->b.num_pages)
                    continue;
                c->list_counts[list * c->b.total_q + row]++;
                for (int32_t head = list * heads_a_list; head < (list + 1) * heads_a_list; head++)
                    if (visible[physical * s->kv_heads + head] < keys)
                        visible[physical * s->kv_heads + head] = (uint8_t)keys;
            }
        }
}

/* --------------------------------------------------------------------------------------------------------- tensors */

static void make_queries(attention_case *c)
{
    const attention_spec *s = &c->spec;
    int64_t row, head,
        bytes = row_strides(s->q_layout, c->b.total_q, s->q_heads, oracle_row_bytes(s->q_dtype, D), 32, &row, &head);
    region *r = arena_region(&c->t.inputs, (size_t)bytes, 16);
    region_fill(r, (uint8_t)s->poison);
    rows_fill(r->data, s->q_dtype, &c->b, s->q_heads, row, head, s->q, s->data, 1.5, &c->random);
    c->args.q = r->data;
    if (s->q_layout != ROWS_DENSE) {
        c->args.q_row_stride = row;
        c->args.q_head_stride = head;
    }
}

static void make_cache(attention_case *c)
{
    const attention_spec *s = &c->spec;
    cache_tensor k, v;
    cache_new(&c->t, s->kv_dtype, s->cache_layout, s->quad, s->kv_heads, c->b.num_pages, (uint8_t)s->poison, &k, &v);
    uint8_t *visible = xcalloc((size_t)(c->b.num_pages * s->kv_heads), 1);
    c->list_counts = xcalloc((size_t)(s->lists * c->b.total_q), 1);
    find_visible(c, visible);
    cache_fill(&k, &c->b, s->requests.batch, visible, s->k, s->data, 1.5, &c->random);
    cache_fill(&v, &c->b, s->requests.batch, visible, s->v, s->data, 1, &c->random);
    free(visible);
    msa_attention_args *a = &c->args;
    a->k = k.data;
    a->v = v.data;
    a->k_scale = k.scale;
    a->v_scale = v.scale;
    a->num_pages = c->b.num_pages;
    if (s->cache_layout == CACHE_DENSE)
        return;
    a->k_page_stride = k.page;
    a->k_head_stride = k.head;
    a->k_token_stride = k.token;
    a->v_page_stride = v.page;
    a->v_head_stride = v.head;
    a->v_token_stride = v.token;
    a->k_scale_page_stride = k.scale_page;
    a->k_scale_head_stride = k.scale_head;
    a->k_scale_token_stride = k.scale_token;
    a->v_scale_page_stride = v.scale_page;
    a->v_scale_head_stride = v.scale_head;
    a->v_scale_token_stride = s->quad ? MSA_DENSE : v.scale_token;
}

/* `count` factors, all different; count 0 is one factor with stride 0. */
static const float *make_factors(attention_case *c, float first, int32_t count)
{
    float *f = (float *)(void *)arena_region(&c->t.inputs, 4 * (size_t)(count ? count : 1), 4)->data;
    f[0] = first;
    for (int32_t i = 1; i < count; i++)
        f[i] = first * (1 + 0.25f * (float)i);
    return f;
}

static void make_scales(attention_case *c)
{
    const attention_spec *s = &c->spec;
    bool per_head = random_chance(&c->random, 0.5);
    int32_t count = per_head ? s->kv_heads : 0;
    if (s->q_dtype == MSA_E4M3) {
        c->args.q_descale = make_factors(c, 0.5f, count);
        c->args.q_descale_stride = per_head ? 4 : MSA_DENSE;
    }
    if (s->kv_dtype == MSA_E4M3) {
        c->args.k_descale = make_factors(c, 1.75f, count);
        c->args.v_descale = make_factors(c, 0.125f, count);
        c->args.k_descale_stride = c->args.v_descale_stride = per_head ? 4 : MSA_DENSE;
    }
    if (s->kv_dtype == MSA_NVFP4) {
        c->args.k_global_scale = make_factors(c, 0.75f, 0);
        c->args.v_global_scale = make_factors(c, 3.5f, 0);
    }
}

/* The splits lie [topk, T, Hq, 128], with a gap in the layout with gaps. */
static int64_t split_stride(const attention_spec *s, int64_t bytes)
{
    return (bytes + (s->out_layout == ROWS_GAPS ? 64 : 0)) / 16 * 16;
}

static void mark(output *o, int64_t offset, int64_t bytes)
{
    memset(o->written + offset, 1, (size_t)bytes);
}

static void make_outputs(attention_case *c)
{
    const attention_spec *s = &c->spec;
    int64_t rows = c->b.total_q, splits = s->partials ? s->topk : 1, counts_row, counts_head;
    int64_t out_bytes = row_strides(s->out_layout, rows, s->q_heads, 2 * D, 16, &c->out_row, &c->out_head);
    int64_t lse_bytes = row_strides(s->out_layout, rows, s->q_heads, 4, 8, &c->lse_row, &c->lse_head);
    c->out_split = s->out_layout == ROWS_DENSE ? out_bytes : split_stride(s, out_bytes);
    c->lse_split = s->out_layout == ROWS_DENSE ? lse_bytes : lse_bytes + 12;
    c->out = trial_output(&c->t, s->partials ? "o_partial" : "out",
                          (size_t)(rows ? (splits - 1) * c->out_split + out_bytes : 0), 16);
    if (!s->without_lse)
        c->lse = trial_output(&c->t, s->partials ? "lse_partial" : "lse",
                              (size_t)(rows ? (splits - 1) * c->lse_split + lse_bytes : 0), 4);
    if (s->partials) {
        int64_t bytes = row_strides(s->out_layout, rows, s->kv_heads, 4, 8, &counts_row, &counts_head);
        c->counts = trial_output(&c->t, "split_counts", (size_t)bytes, 4);
    }
    int32_t ratio = s->q_heads / s->kv_heads, heads_a_list = s->kv_heads / s->lists;
    for (int64_t row = 0; row < rows; row++)
        for (int32_t head = 0; head < s->q_heads && c->b.row_request[row] >= 0; head++) {
            int32_t kv_head = head / ratio;
            int32_t used = s->partials ? c->list_counts[kv_head / heads_a_list * rows + row] : 1;
            for (int32_t split = 0; split < used; split++) {
                mark(c->out, split * c->out_split + row * c->out_row + head * c->out_head, 2 * D);
                if (c->lse)
                    mark(c->lse, split * c->lse_split + row * c->lse_row + head * c->lse_head, 4);
            }
            if (s->partials)
                mark(c->counts, row * counts_row + kv_head * counts_head, 4);
        }

    msa_attention_args *a = &c->args;
    bool dense = s->out_layout == ROWS_DENSE;
    void *lse = c->lse ? c->lse->region->data : NULL;
    if (s->partials) {
        a->o_partial = c->out->region->data;
        a->lse_partial = lse;
        a->split_counts = (int32_t *)(void *)c->counts->region->data;
    } else {
        a->out = c->out->region->data;
        a->lse = lse;
    }
    if (dense)
        return;
    a->o_partial_split_stride = c->out_split;
    a->out_row_stride = a->o_partial_row_stride = c->out_row;
    a->out_head_stride = a->o_partial_head_stride = c->out_head;
    a->lse_partial_split_stride = c->lse_split;
    a->lse_row_stride = a->lse_partial_row_stride = c->lse_row;
    a->lse_head_stride = a->lse_partial_head_stride = c->lse_head;
    if (s->partials) {
        a->split_counts_row_stride = counts_row;
        a->split_counts_head_stride = counts_head;
    }
}

/* ----------------------------------------------------------------------------------------------- running, checking */

static msa_status attention_open(trial *t, msa_context *context)
{
    attention_case *c = (attention_case *)t;
    msa_plan_info info = MSA_PLAN_INFO_INIT;
    msa_status status = (c->spec.decode ? msa_decode_plan : msa_prefill_plan)(context, &c->desc, &t->plan);
    if (!status && !(status = msa_plan_get_info(t->plan, &info)))
        c->merges_pages = strcmp(info.strategy, "query-major") != 0;
    return status;
}

static msa_status attention_run(trial *t, msa_context *context)
{
    (void)context;
    attention_case *c = (attention_case *)t;
    c->step.workspace = t->workspace ? t->workspace->data : NULL;
    c->step.workspace_bytes = t->workspace ? t->workspace->bytes : 0;
    msa_status status = (c->spec.decode ? msa_decode_prepare : msa_prefill_prepare)(t->plan, &c->step, NULL);
    if (!status)
        status = (c->spec.decode ? msa_decode_run : msa_prefill_run)(t->plan, &c->args, NULL);
    return status ? status : msa_plan_error(t->plan, &t->error_bits, NULL);
}

static msa_dtype out_dtype(const attention_case *c)
{
    msa_dtype given = c->spec.out_dtype;
    return given ? given : c->spec.q_dtype == MSA_FP16 ? MSA_FP16 : MSA_BF16;
}

static double split_out(const attention_case *c, int split, int64_t row, int32_t head, int d)
{
    const uint8_t *at = c->out->region->data + split * c->out_split + row * c->out_row + head * c->out_head + 2 * d;
    return oracle_value(out_dtype(c), at);
}

static float split_lse(const attention_case *c, int split, int64_t row, int32_t head)
{
    float lse;
    memcpy(&lse, c->lse->region->data + split * c->lse_split + row * c->lse_row + head * c->lse_head, sizeof lse);
    return lse;
}

double attention_out(const attention_case *c, int64_t row, int32_t head, int d)
{
    return split_out(c, 0, row, head, d);
}

float attention_lse(const attention_case *c, int64_t row, int32_t head)
{
    return split_lse(c, 0, row, head);
}

static void check_state(harness *h, const attention_case *c, const oracle_state *e, int split, int64_t row,
                        int32_t head)
{
    for (int d = 0; d < D; d++) {
        double x = split_out(c, split, row, head, d);
        if (!is_near(out_dtype(c), x, e->out[d], e->out_bound[d]))
            test_fail(h, "out[row %lld, head %d, %d] of split %d = %.9g, expected %.9g +- %.2g before rounding",
                      (long long)row, head, d, split, x, e->out[d], e->out_bound[d]);
    }
    if (c->lse && !is_near(MSA_F32, (double)split_lse(c, split, row, head), e->lse, e->lse_bound))
        test_fail(h, "lse[row %lld, head %d] of split %d = %.9g, expected %.9g +- %.2g", (long long)row, head, split,
                  (double)split_lse(c, split, row, head), e->lse, e->lse_bound);
}

static void check_pair(harness *h, const attention_case *c, int64_t row, int32_t head)
{
    const attention_spec *s = &c->spec;
    oracle_state states[MSA_MAX_TOPK];
    if (!s->partials) {
        if ((c->merges_pages ? oracle_attention_merged : oracle_attention_row)(&c->desc, &c->step, &c->args, row, head,
                                                                               states))
            check_state(h, c, states, 0, row, head);
        return;
    }
    int count = oracle_attention_partials(&c->desc, &c->step, &c->args, row, head, states), given;
    if (count < 0)
        return;
    int64_t row_stride, head_stride;
    row_strides(s->out_layout, c->b.total_q, s->kv_heads, 4, 8, &row_stride, &head_stride);
    memcpy(&given, c->counts->region->data + row * row_stride + head / (s->q_heads / s->kv_heads) * head_stride,
           sizeof given);
    if (given != count)
        test_fail(h, "split_counts[row %lld] for head %d = %d, expected %d", (long long)row, head, given, count);
    for (int split = 0; split < count; split++)
        check_state(h, c, &states[split], split, row, head);
}

/* The first and last row of each request for some head, then random pairs. */
static void attention_check(harness *h, trial *t)
{
    attention_case *c = (attention_case *)t;
    random_stream random = test_random(h);
    int32_t samples = c->spec.samples ? c->spec.samples : 24;
    for (int64_t row = 0; row < c->b.total_q && samples > 0; row++) {
        int32_t r = c->b.row_request[row];
        if (r >= 0 && (row == c->b.cu_seqlens_q[r] || row == c->b.cu_seqlens_q[r + 1] - 1)) {
            check_pair(h, c, row, random_below(&random, c->spec.q_heads));
            samples--;
        }
    }
    for (; samples > 0 && c->b.total_q > 0; samples--)
        check_pair(h, c, random_below(&random, (int32_t)c->b.total_q), random_below(&random, c->spec.q_heads));
}

/* ---------------------------------------------------------------------------------------------------------- making */

bool prefill_has(const harness *h, msa_dtype q, msa_dtype kv, msa_strategy strategy)
{
    msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
    msa_plan *plan = NULL;
    desc.q_dtype = q;
    desc.kv_dtype = kv;
    desc.strategy = strategy;
    desc.max_total_q = 1 << 14; /* many rows, as small plans may have fewer strategies */
    bool has = msa_prefill_plan(h->levels[0].one, &desc, &plan) == MSA_SUCCESS;
    msa_plan_destroy(plan);
    return has;
}

attention_case *attention_new(const harness *h, const attention_spec *spec)
{
    attention_case *c = xcalloc(1, sizeof *c);
    c->t.open = attention_open;
    c->t.run = attention_run;
    c->t.check = attention_check;
    c->spec = *spec;
    c->random = test_random(h);
    attention_spec *s = &c->spec;
    s->lists = s->lists ? s->lists : s->kv_heads;
    s->topk = s->topk ? s->topk : 16;
    s->poison = s->poison ? s->poison : 0xFF;
    c->args = (msa_attention_args)MSA_ATTENTION_ARGS_INIT;
    batch_new(&c->t, &c->b, &c->step, &s->requests, &c->random);
    make_lists(c);
    make_queries(c);
    make_cache(c);
    if (s->scaled)
        make_scales(c);
    make_outputs(c);
    c->desc = (msa_attention_desc)MSA_ATTENTION_DESC_INIT;
    c->desc.q_dtype = s->q_dtype;
    c->desc.kv_dtype = s->kv_dtype;
    c->desc.out_dtype = s->out_dtype;
    c->desc.num_q_heads = s->q_heads;
    c->desc.num_kv_heads = s->kv_heads;
    c->desc.num_lists = s->lists;
    c->desc.topk = s->topk;
    c->desc.sm_scale = s->sm_scale > 0 ? s->sm_scale : MSA_DEFAULT_SM_SCALE;
    c->desc.precision = s->precision;
    c->desc.v_scale_order = s->quad ? MSA_SCALE_QUAD : MSA_SCALE_LINEAR;
    c->desc.partials = s->partials;
    c->desc.strategy = s->strategy;
    c->desc.max_batch = s->requests.max_batch ? s->requests.max_batch : s->requests.batch > 0 ? s->requests.batch : 1;
    c->desc.max_total_q = s->requests.max_total_q ? s->requests.max_total_q : c->b.total_q > 0 ? c->b.total_q : 1;
    if (!s->decode && c->b.total_q % 2)
        c->desc.max_total_q += 300; /* a GPU has another kernel for plans of few rows */
    c->desc.max_kv_len = c->b.max_kv_len;
    return c;
}

void attention_free(attention_case *c)
{
    batch_free(&c->b);
    free(c->list_counts);
    trial_free(&c->t);
    free(c);
}

void attention_test(harness *h, const attention_spec *spec)
{
    attention_case *c = attention_new(h, spec);
    trial_run(h, &c->t);
    attention_free(c);
}
