/* SPDX-License-Identifier: MIT
 *
 * check_combine.c - combine and merge: any number of states, of any type and stride, some of them empty.
 */
#include "checkkernel.h"

#include <math.h>
#include <string.h>

enum { D = MSA_HEAD_DIM };

typedef struct combine_spec {
    bool merge;
    int32_t states, rows, q_heads, kv_heads;
    msa_dtype state_dtype, out_dtype; /* merge: the states take all three types in turn */
    row_layout layout;
    bool counts, without_lse, timed;
    double empty; /* how many of the states are */
} combine_spec;

typedef struct combine_case {
    trial t;
    const combine_spec *spec;
    msa_combine_args combine;
    msa_merge_args merge;
    msa_merge_state states[MSA_MAX_SPLITS];
    int64_t out_row, out_head, lse_row, lse_head;
} combine_case;

static msa_status run(trial *t, msa_context *context)
{
    combine_case *c = (combine_case *)t;
    return c->spec->merge ? msa_merge(context, &c->merge, NULL) : msa_combine(context, &c->combine, NULL);
}

static msa_dtype out_dtype(const combine_case *c)
{
    return c->spec->out_dtype ? c->spec->out_dtype : c->spec->merge ? c->states[0].out_dtype : c->spec->state_dtype;
}

static void check(harness *h, trial *t)
{
    combine_case *c = (combine_case *)t;
    msa_dtype dtype = out_dtype(c);
    for (int64_t row = 0; row < c->spec->rows; row++)
        for (int32_t head = 0; head < c->spec->q_heads; head++) {
            oracle_state e;
            if (c->spec->merge)
                oracle_merge_row(&c->merge, row, head, &e);
            else
                oracle_combine_row(&c->combine, row, head, &e);
            const uint8_t *out = t->outputs[0].region->data + row * c->out_row + head * c->out_head;
            for (int d = 0; d < D; d++) {
                double x = oracle_value(dtype, out + oracle_row_bytes(dtype, d));
                if (!is_near(dtype, x, e.out[d], e.out_bound[d]))
                    test_fail(h, "out[row %lld, head %d, %d] = %.9g, expected %.9g +- %.2g", (long long)row, head, d, x,
                              e.out[d], e.out_bound[d]);
            }
            float lse = 0;
            if (!c->spec->without_lse)
                memcpy(&lse, t->outputs[1].region->data + row * c->lse_row + head * c->lse_head, 4);
            if (!c->spec->without_lse && !is_near(MSA_F32, (double)lse, e.lse, e.lse_bound))
                test_fail(h, "lse[row %lld, head %d] = %.9g, expected %.9g +- %.2g", (long long)row, head, (double)lse,
                          e.lse, e.lse_bound);
        }
}

/* Mostly numbers near 0; some far apart, some empty, few NaN. */
static float make_lse(const combine_spec *s, random_stream *r)
{
    if (random_chance(r, s->empty))
        return random_chance(r, 0.7) ? -INFINITY : INFINITY;
    int32_t kind = random_below(r, 40);
    return kind == 0 ? NAN : kind < 5 ? 1000 * (float)random_normal(r) : 3 * (float)random_normal(r);
}

/* One state [rows, heads, 128] and its LSE; the output of an empty state is NaN. */
static void make_state(const combine_spec *s, msa_dtype dtype, uint8_t *out, int64_t out_row, int64_t out_head,
                       uint8_t *lse, int64_t lse_row, int64_t lse_head, random_stream *r)
{
    for (int64_t row = 0; row < s->rows; row++)
        for (int32_t head = 0; head < s->q_heads; head++) {
            float l = make_lse(s, r);
            memcpy(lse + row * lse_row + head * lse_head, &l, 4);
            for (int d = 0; d < D; d++) {
                uint32_t code = oracle_encode(dtype, isinf(l) ? (double)NAN : random_normal(r));
                memcpy(out + row * out_row + head * out_head + oracle_row_bytes(dtype, d), &code,
                       (size_t)oracle_row_bytes(dtype, 1));
            }
        }
}

static void make_merge_states(combine_case *c, random_stream *r)
{
    static const msa_dtype dtypes[] = {MSA_F32, MSA_BF16, MSA_FP16};
    const combine_spec *s = c->spec;
    for (int32_t i = 0; i < s->states; i++) {
        msa_merge_state *state = &c->states[i];
        *state = (msa_merge_state)MSA_MERGE_STATE_INIT;
        row_layout layout = (row_layout)((s->layout + (unsigned)i) % 3);
        int64_t out_row, out_head, lse_row, lse_head;
        state->out_dtype = dtypes[((int)s->state_dtype + i) % 3];
        int64_t bytes =
            row_strides(layout, s->rows, s->q_heads, oracle_row_bytes(state->out_dtype, D), 16, &out_row, &out_head);
        uint8_t *out = arena_region(&c->t.inputs, (size_t)bytes, 16)->data;
        bytes = row_strides(layout, s->rows, s->q_heads, 4, 4, &lse_row, &lse_head);
        uint8_t *lse = arena_region(&c->t.inputs, (size_t)bytes, 4)->data;
        make_state(s, state->out_dtype, out, out_row, out_head, lse, lse_row, lse_head, r);
        state->out = out;
        state->lse = (const float *)(const void *)lse;
        if (layout == ROWS_DENSE)
            continue;
        state->out_row_stride = out_row;
        state->out_head_stride = out_head;
        state->lse_row_stride = lse_row;
        state->lse_head_stride = lse_head;
    }
}

static void make_splits(combine_case *c, random_stream *r)
{
    const combine_spec *s = c->spec;
    msa_combine_args *a = &c->combine;
    int64_t out_row, out_head, lse_row, lse_head, gap = s->layout == ROWS_DENSE ? 0 : 4;
    int64_t out_bytes =
        row_strides(s->layout, s->rows, s->q_heads, oracle_row_bytes(s->state_dtype, D), 16, &out_row, &out_head);
    int64_t lse_bytes = row_strides(s->layout, s->rows, s->q_heads, 4, 4, &lse_row, &lse_head);
    int64_t out_split = out_bytes + 16 * gap, lse_split = lse_bytes + 4 * gap;
    uint8_t *out = arena_region(&c->t.inputs, (size_t)((s->states - 1) * out_split + out_bytes), 16)->data;
    uint8_t *lse = arena_region(&c->t.inputs, (size_t)((s->states - 1) * lse_split + lse_bytes), 4)->data;
    for (int32_t i = 0; i < s->states; i++)
        make_state(s, s->state_dtype, out + i * out_split, out_row, out_head, lse + i * lse_split, lse_row, lse_head,
                   r);
    a->o_partial = out;
    a->lse_partial = (const float *)(const void *)lse;
    if (s->layout != ROWS_DENSE) {
        a->o_partial_split_stride = out_split;
        a->o_partial_row_stride = out_row;
        a->o_partial_head_stride = out_head;
        a->lse_partial_split_stride = lse_split;
        a->lse_partial_row_stride = lse_row;
        a->lse_partial_head_stride = lse_head;
    }
    if (!s->counts)
        return;
    int64_t counts_row, counts_head,
        bytes = row_strides(s->layout, s->rows, s->kv_heads, 4, 4, &counts_row, &counts_head);
    uint8_t *counts = arena_region(&c->t.inputs, (size_t)bytes, 4)->data;
    for (int64_t row = 0; row < s->rows; row++)
        for (int32_t head = 0; head < s->kv_heads; head++) {
            int32_t count = random_between(r, -1, s->states + 1);
            memcpy(counts + row * counts_row + head * counts_head, &count, 4);
        }
    a->split_counts = (const int32_t *)(const void *)counts;
    if (s->layout != ROWS_DENSE) {
        a->split_counts_row_stride = counts_row;
        a->split_counts_head_stride = counts_head;
    }
}

static void make_outputs(combine_case *c)
{
    const combine_spec *s = c->spec;
    int64_t out_element = oracle_row_bytes(out_dtype(c), D);
    int64_t out_bytes = row_strides(s->layout, s->rows, s->q_heads, out_element, 16, &c->out_row, &c->out_head);
    int64_t lse_bytes = row_strides(s->layout, s->rows, s->q_heads, 4, 4, &c->lse_row, &c->lse_head);
    output *out = trial_output(&c->t, "out", (size_t)out_bytes, 16);
    output *lse = s->without_lse ? NULL : trial_output(&c->t, "lse", (size_t)lse_bytes, 4);
    for (int64_t row = 0; row < s->rows; row++)
        for (int32_t head = 0; head < s->q_heads; head++) {
            memset(out->written + row * c->out_row + head * c->out_head, 1, (size_t)out_element);
            if (lse)
                memset(lse->written + row * c->lse_row + head * c->lse_head, 1, 4);
        }
    c->merge.out = c->combine.out = out->region->data;
    c->merge.lse = c->combine.lse = lse ? (float *)(void *)lse->region->data : NULL;
    if (s->layout == ROWS_DENSE)
        return;
    c->merge.out_row_stride = c->combine.out_row_stride = c->out_row;
    c->merge.out_head_stride = c->combine.out_head_stride = c->out_head;
    c->merge.lse_row_stride = c->combine.lse_row_stride = c->lse_row;
    c->merge.lse_head_stride = c->combine.lse_head_stride = c->lse_head;
}

static void combine_test(harness *h, const combine_spec *s)
{
    combine_case c = {.t = {.run = run, .check = check, .timed = s->timed},
                      .spec = s,
                      .combine = MSA_COMBINE_ARGS_INIT,
                      .merge = MSA_MERGE_ARGS_INIT};
    random_stream r = test_random(h);
    c.merge.num_states = c.combine.num_splits = s->states;
    c.merge.rows = c.combine.rows = s->rows;
    c.merge.num_q_heads = c.combine.num_q_heads = s->q_heads;
    c.merge.out_dtype = c.combine.out_dtype = s->out_dtype;
    c.merge.states = c.states;
    c.combine.num_kv_heads = s->kv_heads;
    c.combine.o_partial_dtype = s->state_dtype;
    if (s->merge)
        make_merge_states(&c, &r);
    else
        make_splits(&c, &r);
    make_outputs(&c);
    trial_run(h, &c.t);
    trial_free(&c.t);
}

void check_combine(harness *h)
{
    static const msa_dtype outs[] = {MSA_DTYPE_DEFAULT, MSA_BF16, MSA_FP16, MSA_F32};
    for (int merge = 0; merge < 2; merge++)
        for (int states = 1 + merge; states <= MSA_MAX_SPLITS; states++) {
            if (!test_begin(h, merge ? "merge" : "combine", states == 16 ? "typical-%d" : "states-%d", states))
                continue;
            combine_spec s = {.merge = merge, .states = states, .rows = 5, .kv_heads = 1 + states % 3};
            s.q_heads = s.kv_heads * (1 + states % 4);
            s.state_dtype = states % 2 ? MSA_BF16 : MSA_FP16;
            s.out_dtype = outs[states % (merge ? 4 : 3)];
            s.layout = (row_layout)(states % 3);
            s.counts = states / 2 % 2;
            s.without_lse = states % 5 == 4;
            s.empty = 0.25 * (states % 5);
            s.timed = states == 16;
            combine_test(h, &s);
            test_end(h);
        }
    /* Enough heads for kernels that stream; their last tile is not full. */
    static const combine_spec many[] = {
        {.states = 16,
         .rows = 1000,
         .q_heads = 17,
         .kv_heads = 1,
         .state_dtype = MSA_BF16,
         .counts = true,
         .empty = 0.2},
        {.states = 3, .rows = 265, .q_heads = 64, .kv_heads = 4, .state_dtype = MSA_BF16, .out_dtype = MSA_FP16},
        {.states = 18,
         .rows = 1409,
         .q_heads = 12,
         .kv_heads = 3,
         .state_dtype = MSA_FP16,
         .counts = true,
         .without_lse = true},
        {.states = 1, .rows = 17001, .q_heads = 1, .kv_heads = 1, .state_dtype = MSA_BF16, .empty = 0.1},
    };
    for (unsigned i = 0; i < sizeof many / sizeof *many; i++)
        if (test_begin(h, "combine", "many/%dx%d-states-%d", many[i].rows, many[i].q_heads, many[i].states)) {
            combine_test(h, &many[i]);
            test_end(h);
        }
}
