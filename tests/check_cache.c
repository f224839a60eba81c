/* SPDX-License-Identifier: MIT
 *
 * check_cache.c - cache_write: every source and cache format, layout and kind of slot, byte for byte.
 */
#include "checkkernel.h"

#include <stdlib.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGES = 5, TOKENS = 60 };

typedef struct cache_spec {
    msa_dtype src, kv, index_k;
    cache_layout layout;
    row_layout rows;
    bool quad, scaled, without_k, without_v, without_index;
    int32_t heads;
} cache_spec;

typedef struct cache_case {
    trial t;
    msa_cache_write_args args;
} cache_case;

static msa_status run(trial *t, msa_context *context)
{
    return msa_cache_write(context, &((cache_case *)t)->args, NULL);
}

/* The same call on copies of the caches that hold `poison`: what the oracle makes of them. */
static void run_oracle(const cache_case *c, uint8_t poison, uint8_t *copies[MAX_OUTPUTS])
{
    msa_cache_write_args a = c->args;
    void **pointers[] = {&a.k, &a.v, &a.k_scale, &a.v_scale, &a.index_k, &a.index_k_scale};
    uint8_t *moved[6] = {NULL};
    for (int i = 0; i < c->t.num_outputs; i++) {
        const region *r = c->t.outputs[i].region;
        copies[i] = xmalloc(r->bytes);
        memset(copies[i], poison, r->bytes);
        for (int j = 0; j < 6; j++) {
            const uint8_t *p = *pointers[j];
            if (p && p >= r->data && p < r->data + r->bytes)
                moved[j] = copies[i] + (p - r->data);
        }
    }
    for (int j = 0; j < 6; j++)
        *pointers[j] = moved[j];
    oracle_cache_write(&a);
}

static void free_copies(const cache_case *c, uint8_t *copies[MAX_OUTPUTS])
{
    for (int i = 0; i < c->t.num_outputs; i++)
        free(copies[i]);
}

static void check(harness *h, trial *t)
{
    cache_case *c = (cache_case *)t;
    uint8_t *expected[MAX_OUTPUTS];
    run_oracle(c, 0xFF, expected);
    for (int i = 0; i < t->num_outputs; i++)
        for (size_t j = 0; j < t->outputs[i].region->bytes; j++)
            if (t->outputs[i].region->data[j] != expected[i][j])
                test_fail(h, "%s %d, byte %zu: 0x%02x, expected 0x%02x", t->outputs[i].name, i, j,
                          t->outputs[i].region->data[j], expected[i][j]);
    free_copies(c, expected);
}

/* What must be written is what the oracle changes, whatever was there before. */
static void mark_written(cache_case *c)
{
    uint8_t *ones[MAX_OUTPUTS], *zeros[MAX_OUTPUTS];
    run_oracle(c, 0xFF, ones);
    run_oracle(c, 0x00, zeros);
    for (int i = 0; i < c->t.num_outputs; i++)
        for (size_t j = 0; j < c->t.outputs[i].region->bytes; j++)
            c->t.outputs[i].written[j] = ones[i][j] == zeros[i][j];
    free_copies(c, ones);
    free_copies(c, zeros);
}

/* Random rows; with values that saturate, and blocks of zeros. NaN goes to the formats whose NaN has one encoding. */
static const void *make_source(cache_case *c, const cache_spec *s, int32_t heads, int64_t *row_stride,
                               int64_t *head_stride, random_stream *r)
{
    int64_t row, head, bytes = row_strides(s->rows, TOKENS, heads, oracle_row_bytes(s->src, D), 4, &row, &head);
    region *data = arena_region(&c->t.inputs, (size_t)bytes, 4);
    region_fill(data, 0xFF);
    for (int64_t token = 0; token < TOKENS; token++)
        for (int32_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < D; d++) {
                double factor = token % 5 == 0 ? 300 : d / 16 == token % 8 ? 0 : 1;
                uint32_t code = oracle_encode(s->src, factor * random_normal(r));
                memcpy(data->data + token * row + h * head + oracle_row_bytes(s->src, d), &code,
                       (size_t)oracle_row_bytes(s->src, 1));
            }
    if (s->rows != ROWS_DENSE) {
        *row_stride = row;
        *head_stride = head;
    }
    return data->data;
}

static bool is_given(const int64_t *slots, int count, int64_t slot)
{
    for (int i = 0; i < count; i++)
        if (slots[i] == slot)
            return true;
    return false;
}

/* Slots in any order; some to be skipped; on a CPU some given twice, where the later token stays (check_twice has the
 * GPU). */
static const int64_t *make_slots(cache_case *c, random_stream *r)
{
    int64_t *slots = (int64_t *)(void *)arena_region(&c->t.inputs, TOKENS * sizeof(int64_t), 8)->data;
    for (int i = 0; i < TOKENS; i++) {
        int32_t kind = random_below(r, 10);
        do
            slots[i] = random_below(r, PAGES * MSA_PAGE_SIZE);
        while (is_given(slots, i, slots[i]));
        if (kind == 0)
            slots[i] = -1 - (random_chance(r, 0.5) ? INT64_MAX - 5 : 0);
        else if (kind == 1)
            slots[i] = random_chance(r, 0.5) ? PAGES * MSA_PAGE_SIZE : INT64_MAX;
        else if (kind == 2 && i > 0 && !device_in_use())
            slots[i] = slots[random_below(r, i)];
    }
    return slots;
}

static const float *make_factors(cache_case *c, float first, int32_t count)
{
    float *f = (float *)(void *)arena_region(&c->t.inputs, 4 * (size_t)count, 4)->data;
    for (int32_t i = 0; i < count; i++)
        f[i] = first + 0.3f * (float)i;
    return f;
}

static void make_kv(cache_case *c, const cache_spec *s)
{
    msa_cache_write_args *a = &c->args;
    cache_tensor k, v;
    int first = c->t.inputs.count;
    cache_new(&c->t, s->kv, s->layout, s->quad, s->heads, PAGES, 0, &k, &v);
    trial_inputs_to_outputs(&c->t, first, "K/V cache");
    a->kv_dtype = s->kv;
    a->v_scale_order = s->quad ? MSA_SCALE_QUAD : MSA_SCALE_LINEAR;
    a->k = k.data;
    a->k_scale = k.scale;
    a->v = v.data;
    a->v_scale = v.scale;
    if (s->layout == CACHE_DENSE)
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
    a->v_scale_token_stride = v.scale_token;
}

static void make_index(cache_case *c, const cache_spec *s)
{
    msa_cache_write_args *a = &c->args;
    cache_tensor k;
    int first = c->t.inputs.count;
    cache_layout layout = s->layout == CACHE_SLOTS && s->index_k == MSA_NVFP4 ? CACHE_SLOTS : CACHE_GAPS;
    cache_new(&c->t, s->index_k, layout, false, 1, PAGES, 0, &k, NULL);
    trial_inputs_to_outputs(&c->t, first, "index-K cache");
    a->index_k_dtype = s->index_k;
    a->index_k = k.data;
    a->index_k_scale = k.scale;
    a->index_k_page_stride = k.page;
    a->index_k_token_stride = k.token;
    a->index_k_scale_page_stride = k.scale_page;
    a->index_k_scale_token_stride = k.scale_token;
}

static void make_args(cache_case *c, const cache_spec *s, random_stream *r)
{
    msa_cache_write_args *a = &c->args;
    int64_t unused;
    a->tokens = TOKENS;
    a->num_pages = PAGES;
    a->num_kv_heads = s->heads;
    a->src_dtype = s->src;
    a->slot_mapping = make_slots(c, r);
    a->k_new = make_source(c, s, s->heads, &a->k_new_row_stride, &a->k_new_head_stride, r);
    a->v_new = make_source(c, s, s->heads, &a->v_new_row_stride, &a->v_new_head_stride, r);
    a->index_k_new = make_source(c, s, 1, &a->index_k_new_row_stride, &unused, r);
    make_kv(c, s);
    make_index(c, s);
    if (s->scaled && (s->kv == MSA_E4M3 || s->kv == MSA_NVFP4)) {
        int32_t count = s->kv == MSA_E4M3 ? s->heads : 1;
        a->k_descale = make_factors(c, 0.3f, count);
        a->v_descale = make_factors(c, 1.7f, count);
        a->k_descale_stride = a->v_descale_stride = count > 1 ? 4 : MSA_DENSE;
    }
    if (s->without_k)
        a->k_new = a->k = a->k_scale = NULL;
    if (s->without_v)
        a->v_new = a->v = a->v_scale = NULL;
    if (s->without_index)
        a->index_k_new = a->index_k = a->index_k_scale = NULL;
}

static void cache_test(harness *h, const cache_spec *s, bool timed)
{
    cache_case c = {.t = {.run = run, .check = check, .timed = timed, .same_bits = true},
                    .args = MSA_CACHE_WRITE_ARGS_INIT};
    random_stream r = test_random(h);
    make_args(&c, s, &r);
    mark_written(&c);
    trial_run(h, &c.t);
    trial_free(&c.t);
}

/* Slots that are given twice, on a GPU: each byte there is one of the two tokens', and all others are what they would
 * be. The oracle's first call lets the later token stay, the second has only the earlier one. */
static void check_twice(harness *h, trial *t)
{
    cache_case *c = (cache_case *)t;
    int64_t slots[TOKENS];
    const int64_t *given = c->args.slot_mapping;
    uint8_t *later[MAX_OUTPUTS], *earlier[MAX_OUTPUTS];
    run_oracle(c, 0xFF, later);
    for (int i = 0; i < TOKENS; i++)
        slots[i] = is_given(given, i, given[i]) ? -1 : given[i];
    c->args.slot_mapping = slots;
    run_oracle(c, 0xFF, earlier);
    c->args.slot_mapping = given;
    for (int i = 0; i < t->num_outputs; i++)
        for (size_t j = 0; j < t->outputs[i].region->bytes; j++) {
            uint8_t byte = t->outputs[i].region->data[j];
            if (byte != later[i][j] && byte != earlier[i][j])
                test_fail(h, "%s %d, byte %zu: 0x%02x is neither token's, 0x%02x or 0x%02x", t->outputs[i].name, i, j,
                          byte, earlier[i][j], later[i][j]);
        }
    free_copies(c, later);
    free_copies(c, earlier);
}

static void twice_test(harness *h, const cache_spec *s)
{
    cache_case c = {.t = {.run = run}, .args = MSA_CACHE_WRITE_ARGS_INIT};
    random_stream r = test_random(h);
    make_args(&c, s, &r);
    int64_t *slots = (int64_t *)(void *)arena_region(&c.t.inputs, TOKENS * sizeof(int64_t), 8)->data;
    for (int i = 0; i < TOKENS; i++) /* the second half repeats slots of the first, in another order */
        slots[i] = i < TOKENS / 2 ? 7 * i : 7 * (11 * i % (TOKENS / 2));
    c.args.slot_mapping = slots;
    mark_written(&c);
    trial_run_once(h, &c.t, h->levels[0].one);
    check_twice(h, &c.t);
    trial_free(&c.t);
}

void check_cache_write(harness *h)
{
    static const msa_dtype sources[] = {MSA_F32, MSA_BF16, MSA_FP16},
                           caches[] = {MSA_BF16, MSA_FP16, MSA_E4M3, MSA_NVFP4};
    static const msa_dtype index_caches[] = {MSA_BF16, MSA_E4M3, MSA_NVFP4};
    static const cache_layout layouts[] = {CACHE_DENSE, CACHE_GAPS, CACHE_PACKED, CACHE_TOKEN_MAJOR, CACHE_SLOTS};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 4; j++)
            for (int k = 0; k < 10; k++) {
                cache_spec s = {.src = sources[i],
                                .kv = caches[j],
                                .index_k = index_caches[k % 3],
                                .layout = layouts[k % 5],
                                .rows = (row_layout)((i + k) % 3),
                                .quad = k >= 5,
                                .scaled = k % 2,
                                .heads = 1 + (j + k) % 3,
                                .without_k = k == 6,
                                .without_v = k == 3,
                                .without_index = k == 4};
                bool block_scales = s.kv == MSA_NVFP4;
                if ((!block_scales && (s.quad || s.layout == CACHE_SLOTS)) ||
                    !test_begin(h, "cache_write", "%s-%s/%d", format_name(s.src), format_name(s.kv), k))
                    continue;
                cache_test(h, &s, k == 0);
                test_end(h);
            }
    for (int j = 0; j < 4 && device_in_use(); j++) {
        if (!test_begin(h, "cache_write", "twice/%s", format_name(caches[j])))
            continue;
        twice_test(h, &(cache_spec){.src = MSA_BF16, .kv = caches[j], .index_k = index_caches[j % 3], .heads = 2});
        test_end(h);
    }
    /* Heads that lie together are quantised several at a time. */
    static const cache_spec many_heads[] = {
        {.src = MSA_BF16, .kv = MSA_NVFP4, .index_k = MSA_NVFP4, .scaled = true, .heads = 8},
        {.src = MSA_FP16, .kv = MSA_NVFP4, .index_k = MSA_E4M3, .layout = CACHE_SLOTS, .quad = true, .heads = 17},
        {.src = MSA_F32, .kv = MSA_E4M3, .index_k = MSA_BF16, .layout = CACHE_TOKEN_MAJOR, .heads = 20},
        {.src = MSA_BF16, .kv = MSA_E4M3, .index_k = MSA_E4M3, .scaled = true, .rows = ROWS_GAPS, .heads = 9},
        {.src = MSA_BF16, .kv = MSA_NVFP4, .index_k = MSA_E4M3, .heads = 37},
    };
    for (int i = 0; i < (int)(sizeof many_heads / sizeof *many_heads); i++)
        if (test_begin(h, "cache_write", "many-heads/%d", many_heads[i].heads)) {
            cache_test(h, &many_heads[i], false);
            test_end(h);
        }
    for (int scaled = 0; scaled < 2; scaled++) { /* bytes as they are, NaN too, with descales and without */
        if (!test_begin(h, "cache_write", "e4m3-e4m3/%s", scaled ? "scaled" : "copy"))
            continue;
        cache_test(h,
                   &(cache_spec){.src = MSA_E4M3, .kv = MSA_E4M3, .index_k = MSA_E4M3, .heads = 2, .scaled = scaled,
                                 .rows = ROWS_GAPS},
                   false);
        test_end(h);
    }
}
