/* SPDX-License-Identifier: MIT
 *
 * faults_plans.c - mixed batches, bad lengths, capacity and workspaces, replay of one plan, leaks.
 */
#include "faults.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

/* --------------------------------------------------------------------------------------------------- mixed batches */

/* One request of a case by itself, on the same plan: other rows of the batch must not have changed its bits. */
static void alone(harness *h, attention_case *c, msa_context *context, int32_t r, uint8_t *const together[2])
{
    msa_step step = c->step;
    msa_attention_args args = c->args;
    int64_t first = c->b.cu_seqlens_q[r], rows = c->b.cu_seqlens_q[r + 1] - first, q_heads = c->spec.q_heads;
    const int32_t offsets[] = {0, (int32_t)rows};
    int64_t q_row = oracle_row_bytes(c->spec.q_dtype, D) * q_heads, out_row = 2 * D * q_heads, lse_row = 4 * q_heads;
    arena memory = {0};
    step.batch = 1;
    step.total_q = rows;
    step.cu_seqlens_q = arena_copy(&memory, offsets, sizeof offsets, 4);
    step.kv_lens += r;
    step.page_table += r * c->b.table_pitch;
    step.topk += first * c->spec.topk;
    step.topk_head_stride = 4 * c->spec.topk * c->b.total_q;
    args.q = (const uint8_t *)args.q + first * q_row;
    args.out = arena_region(&memory, (size_t)(rows * out_row), 16)->data;
    args.lse = (float *)(void *)arena_region(&memory, (size_t)(rows * lse_row), 4)->data;
    msa_plan *plan = NULL;
    CHECK_OK(h, (c->spec.decode ? msa_decode_plan : msa_prefill_plan)(context, &c->desc, &plan));
    if (plan) {
        step.workspace_bytes = msa_plan_workspace(plan);
        step.workspace = arena_region(&memory, step.workspace_bytes, 256)->data;
        CHECK_OK(h, (c->spec.decode ? msa_decode_prepare : msa_prefill_prepare)(plan, &step, NULL));
        CHECK_OK(h, (c->spec.decode ? msa_decode_run : msa_prefill_run)(plan, &args, NULL));
        msa_plan_destroy(plan);
    }
    if (memcmp(args.out, together[0] + first * out_row, (size_t)(rows * out_row)) ||
        memcmp(args.lse, together[1] + first * lse_row, (size_t)(rows * lse_row)))
        test_fail(h, "request %d alone has other bits than in the batch", r);
    arena_free(&memory);
}

static void together_and_alone(harness *h, const attention_spec *spec)
{
    attention_case *c = attention_new(h, spec);
    for (int i = 0; i < h->num_levels; i++) {
        msa_context *context = h->levels[i].two ? h->levels[i].two : h->levels[i].one;
        trial_run_once(h, &c->t, context);
        uint8_t *const together[2] = {c->t.outputs[0].region->data, c->t.outputs[1].region->data};
        for (int32_t r = 0; r < spec->requests.batch; r++)
            alone(h, c, context, r, together);
    }
    attention_free(c);
}

static void mixed_batch(harness *h, const attention_spec *spec)
{
    attention_spec large = *spec, small = *spec;
    large.kv_heads = 2;
    large.q_heads = 6;
    large.topk = 6;
    large.requests = batch_of(5, LENGTHS(1, 1, 70, 1, 23), LENGTHS(2000, 1, 70, 128, 900));
    together_and_alone(h, &large);
    small.requests = batch_of(3, LENGTHS(2, 1, 2), LENGTHS(2000, 1, 1500)); /* few rows: decode splits their lists */
    together_and_alone(h, &small);
    if (h->options.device == MSA_DEVICE_CPU)
        return;
    attention_spec room = large; /* for many new tokens: a GPU's tiles that share pages, and others that do not */
    room.q_heads = 32;
    room.topk = 16;
    if (spec->decode) {
        room.requests = batch_of(5, LENGTHS(8, 2, 1, 16, 5), LENGTHS(1500, 2000, 300, 1000, 9000));
        room.requests.max_batch = 8;
        room.requests.max_total_q = 700;
        together_and_alone(h, &room);
    } else { /* tiles that a GPU's blocks take whole, in two pieces or in three: how depends on how many there are */
        room.requests = batch_of(3, LENGTHS(300, 150, 450), LENGTHS(2000, 1500, 3000));
        together_and_alone(h, &room); /* in here, as the lengths live no longer than this block */
    }
}

static void mixed_index_batch(harness *h, const index_spec *spec)
{
    static const int32_t q_lens[] = {1, 1, 70, 1, 23}, kv_lens[] = {4000, 1, 300, 128, 900};
    index_spec s = *spec;
    s.heads = 2;
    s.q = s.k = coded_hash;
    s.requests = batch_of(5, q_lens, kv_lens);
    s.requests.share_pages = true;
    index_case *c = index_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].one);
        for (int32_t r = 0; r < 5; r++) { /* request r in front, and the others empty */
            int32_t only[5] = {0}, first = c->b.cu_seqlens_q[r];
            only[0] = q_lens[r];
            int32_t offsets[6] = {0, only[0], only[0], only[0], only[0], only[0]};
            index_case copy = *c;
            arena memory = {0};
            copy.step.cu_seqlens_q = arena_copy(&memory, offsets, sizeof offsets, 4);
            copy.step.kv_lens = arena_copy(&memory, &kv_lens[r], sizeof kv_lens[r], 4);
            copy.step.batch = 1;
            copy.step.page_table += r * c->b.table_pitch;
            copy.args.index_q = (const uint8_t *)copy.args.index_q + first * 2 * oracle_row_bytes(s.q_dtype, D);
            int32_t *topk = (int32_t *)(void *)arena_region(&memory, (size_t)(2 * c->b.total_q * 16 * 4), 4)->data;
            copy.args.topk = topk;
            copy.args.scores = (float *)(void *)arena_region(&memory, c->scores->region->bytes, 4)->data;
            copy.args.num_valid_pages = NULL;
            copy.t.num_outputs = 0; /* they are compared here */
            trial_run_once(h, &copy.t, h->levels[i].one);
            for (int32_t head = 0; head < 2; head++)
                CHECK(h,
                      !memcmp(topk + head * c->b.total_q * 16, index_topk(c, first, head), (size_t)q_lens[r] * 16 * 4));
            arena_free(&memory);
        }
    }
    index_free(c);
}

/* ----------------------------------------------------------------------------------------------------- bad lengths */

/* Lengths that make no sense set a bit; nothing outside the outputs is touched, good requests keep their answers, and
 * the next prepare starts afresh. */
static void bad_lengths(harness *h, const attention_spec *spec)
{
    static const struct {
        int32_t q[4], kv[3];
        uint32_t bits;
        int good; /* a request whose rows must be right, or -1 */
    } steps[] = {
        {{0, 2, 4, 6}, {100, -1, 300}, MSA_ERROR_BIT_LENGTHS, 0},
        {{0, 2, 4, 6}, {100, INT_MIN, INT_MAX}, MSA_ERROR_BIT_LENGTHS | MSA_ERROR_BIT_CAPACITY, 0},
        {{0, 2, 1, 6}, {100, 200, 300}, MSA_ERROR_BIT_LENGTHS, 0},
        {{0, 2, 4, 7}, {100, 200, 300}, MSA_ERROR_BIT_LENGTHS, 1},
        {{0, 2, INT_MAX, INT_MIN}, {100, 200, 300}, MSA_ERROR_BIT_LENGTHS, 0},
        {{0, -5, 4, 6}, {100, 200, 300}, MSA_ERROR_BIT_LENGTHS, -1},
        {{1, 2, 4, 6}, {100, 200, 300}, MSA_ERROR_BIT_LENGTHS, 1},
        {{0, 2, 4, 6}, {100, 200, 300}, 0, 2},
    };
    attention_spec s = *spec;
    s.requests = batch_of(3, LENGTHS(2, 2, 2), LENGTHS(100, 200, 300));
    s.list = list_all_pages;
    s.topk = 3;
    attention_case *c = attention_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].one);
        uint8_t *right = xmalloc(c->out->region->bytes);
        memcpy(right, c->out->region->data, c->out->region->bytes);
        for (int j = 0; j < (int)(sizeof steps / sizeof steps[0]); j++) {
            memcpy(c->b.cu_seqlens_q, steps[j].q, sizeof steps[j].q);
            memcpy(c->b.kv_lens, steps[j].kv, sizeof steps[j].kv);
            c->t.expected_error_bits = steps[j].bits;
            trial_run_once(h, &c->t, h->levels[i].one);
            int64_t bytes = 2 * D * s.q_heads * 2;
            if (steps[j].good >= 0 &&
                memcmp(right + steps[j].good * bytes, c->out->region->data + steps[j].good * bytes, (size_t)bytes))
                test_fail(h, "bad lengths %d changed request %d", j, steps[j].good);
        }
        free(right);
    }
    attention_free(c);
}

/* Keys past the plan's capacity are invisible, and a bit says so. */
static void over_capacity(harness *h, const attention_spec *spec)
{
    attention_spec s = *spec;
    s.requests = batch_of(3, LENGTHS(2, 2, 3), LENGTHS(100, 10 * PAGE, 3 * PAGE + 1));
    s.requests.max_kv_len = 3 * PAGE;
    s.topk = 4;
    attention_case *c = attention_new(h, &s);
    c->t.expected_error_bits = MSA_ERROR_BIT_CAPACITY;
    trial_run(h, &c->t);
    attention_free(c);
}

static void index_over_capacity(harness *h, const index_spec *spec)
{
    index_spec s = *spec;
    s.requests = batch_of(3, LENGTHS(2, 2, 3), LENGTHS(100, 60 * PAGE, 20 * PAGE + 1));
    s.requests.max_kv_len = 20 * PAGE;
    index_case *c = index_new(h, &s);
    c->t.expected_error_bits = MSA_ERROR_BIT_CAPACITY;
    trial_run(h, &c->t);
    index_free(c);
}

/* -------------------------------------------------------------------------------------------------------- capacity */

static size_t attention_bytes(harness *h, bool decode, int32_t kv_heads, int32_t max_batch, int64_t max_total_q,
                              int64_t max_kv_len)
{
    msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
    msa_plan *plan = NULL;
    desc.num_kv_heads = kv_heads;
    desc.num_q_heads = 16 * kv_heads;
    desc.max_batch = max_batch;
    desc.max_total_q = max_total_q;
    desc.max_kv_len = max_kv_len;
    CHECK_OK(h, (decode ? msa_decode_plan : msa_prefill_plan)(h->levels[0].two ? h->levels[0].two : h->levels[0].one,
                                                              &desc, &plan));
    size_t bytes = msa_plan_workspace(plan);
    msa_plan_destroy(plan);
    return bytes;
}

static size_t index_bytes(harness *h, bool decode, int32_t heads, int32_t max_batch, int64_t max_total_q,
                          int64_t max_kv_len)
{
    msa_index_desc desc = MSA_INDEX_DESC_INIT;
    msa_plan *plan = NULL;
    desc.num_index_heads = heads;
    desc.max_batch = max_batch;
    desc.max_total_q = max_total_q;
    desc.max_kv_len = max_kv_len;
    CHECK_OK(h, (decode ? msa_index_decode_plan : msa_index_prefill_plan)(
                    h->levels[0].two ? h->levels[0].two : h->levels[0].one, &desc, &plan));
    size_t bytes = msa_plan_workspace(plan);
    msa_plan_destroy(plan);
    return bytes;
}

/* A workspace that is enough for a plan is enough for every smaller one. */
static void workspace_grows(harness *h, bool decode,
                            size_t (*bytes)(harness *, bool, int32_t, int32_t, int64_t, int64_t))
{
    random_stream r = test_random(h);
    for (int i = 0; i < 1000; i++) {
        int32_t large[4], small[4]; /* heads, batch, rows, keys */
        large[0] = random_between(&r, 1, 8);
        large[1] = random_between(&r, 1, 1 << random_below(&r, 12));
        large[2] = random_between(&r, 1, 1 << random_below(&r, 16));
        large[3] = random_between(&r, 1, 1 << random_below(&r, 21));
        for (int j = 0; j < 4; j++)
            small[j] = random_between(&r, 1, large[j]);
        size_t needs = bytes(h, decode, small[0], small[1], small[2], small[3]);
        size_t has = bytes(h, decode, large[0], large[1], large[2], large[3]);
        if (needs > has)
            test_fail(h, "%zu bytes for heads %d, batch %d, rows %d, keys %d; only %zu for %d, %d, %d, %d", needs,
                      small[0], small[1], small[2], small[3], has, large[0], large[1], large[2], large[3]);
    }
}

static void workspaces_grow(harness *h)
{
    for (int decode = 0; decode < 2; decode++) {
        if (test_begin(h, decode ? "decode" : "prefill", "workspace-grows")) {
            workspace_grows(h, decode, attention_bytes);
            test_end(h);
        }
        if (test_begin(h, decode ? "index_decode" : "index_prefill", "workspace-grows")) {
            workspace_grows(h, decode, index_bytes);
            test_end(h);
        }
    }
}

/* On a CPU prefill needs memory for its threads and tiles, whatever the number of tokens. */
static void workspace_of_prefill(harness *h)
{
    if (h->options.device != MSA_DEVICE_CPU) {
        test_leave_out(h);
        return;
    }
    size_t bytes = attention_bytes(h, false, 4, 1, 4096, 4096);
    CHECK(h, bytes == attention_bytes(h, false, 4, 1, 1 << 20, 4096));
    CHECK(h, bytes == attention_bytes(h, false, 4, 1, 4096, MSA_MAX_KV_LEN));
    CHECK(h, bytes == attention_bytes(h, false, 4, 1000, INT_MAX, MSA_MAX_KV_LEN));
    CHECK(h, bytes < 64 << 20);
}

/* A workspace in the wrong place or too small is refused, and nothing is written. */
static void bad_workspace(harness *h, const attention_spec *spec)
{
    attention_spec s = *spec;
    s.requests = batch_of(3, LENGTHS(12, 20, 5), LENGTHS(200, 100, 40)); /* odd sizes: 37 rows, 6 heads */
    s.kv_heads = 3;
    s.q_heads = 6;
    attention_case *c = attention_new(h, &s);
    trial_run(h, &c->t);
    msa_plan *plan = NULL;
    msa_step step = c->step;
    CHECK_OK(h, (s.decode ? msa_decode_plan : msa_prefill_plan)(h->levels[0].one, &c->desc, &plan));
    arena memory = {0};
    step.workspace_bytes = msa_plan_workspace(plan) + 512;
    step.workspace = arena_region(&memory, step.workspace_bytes, 256)->data + 16;
    CHECK(h, (s.decode ? msa_decode_prepare : msa_prefill_prepare)(plan, &step, NULL) == MSA_ERROR_INVALID_ARGUMENT);
    CHECK(h, strstr(msa_last_error(), "workspace"));
    step.workspace = (char *)step.workspace + 240;
    step.workspace_bytes = msa_plan_workspace(plan) - 1;
    CHECK(h, (s.decode ? msa_decode_prepare : msa_prefill_prepare)(plan, &step, NULL) == MSA_ERROR_INVALID_ARGUMENT);
    CHECK(h, strstr(msa_last_error(), "workspace_bytes"));
    msa_plan_destroy(plan);
    arena_free(&memory);
    attention_free(c);
}

/* --------------------------------------------------------------------------------------------------- replay, leaks */

/* One plan, used again and again while lengths, lists, tables and queries change in place: the bits of a fresh plan. */
static void replay(harness *h, const attention_spec *spec)
{
    enum { BATCH = 4, MOST = 2049 };
    static const int32_t lens[] = {1, 130, 2049, 513, 0, 128, 1000, 7};
    attention_spec s = *spec;
    s.topk = 17; /* all pages, so that all hold numbers */
    s.requests = batch_of(BATCH, LENGTHS(1, 1, 1, 1), LENGTHS(MOST, MOST, MOST, MOST));
    s.q = s.k = s.v = coded_hash;
    s.list = list_all_pages;
    attention_case *c = attention_new(h, &s), *fresh = attention_new(h, &s);
    random_stream r = test_random(h);
    for (int i = 0; i < h->num_levels; i++) {
        msa_context *context = h->levels[i].lent ? h->levels[i].lent : h->levels[i].one;
        arena memory = {0};
        msa_plan *plan = NULL;
        CHECK_OK(h, c->t.open(&c->t, context));
        plan = c->t.plan;
        c->t.workspace = arena_region(&memory, msa_plan_workspace(plan), 256);
        for (int step = 0; step < (h->options.quick ? 8 : 30) && plan; step++) {
            for (int b = 0; b < BATCH; b++) {
                c->b.kv_lens[b] = fresh->b.kv_lens[b] = lens[random_below(&r, 8)];
                for (int j = 0; j < s.topk; j++)
                    c->lists[b * s.topk + j] = fresh->lists[b * s.topk + j] = random_below(&r, 18) - 1;
                int32_t swap = random_below(&r, 16), page = c->b.page_table[b * 17];
                c->b.page_table[b * 17] = fresh->b.page_table[b * 17] = c->b.page_table[b * 17 + swap];
                c->b.page_table[b * 17 + swap] = fresh->b.page_table[b * 17 + swap] = page;
            }
            memset(c->out->region->data, 0xA5, c->out->region->bytes);
            CHECK_OK(h, c->t.run(&c->t, context));
            trial_run_once(h, &fresh->t, h->levels[i].one);
            CHECK(h, !memcmp(c->out->region->data, fresh->out->region->data, c->out->region->bytes));
            CHECK(h, !memcmp(c->lse->region->data, fresh->lse->region->data, c->lse->region->bytes));
            CHECK(h, c->t.error_bits == 0 && fresh->t.error_bits == 0);
        }
        msa_plan_destroy(plan);
        c->t.plan = NULL;
        arena_free(&memory);
    }
    attention_free(c);
    attention_free(fresh);
}

static long resident_pages(void)
{
    long total = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &total, &resident) != 2)
        resident = 0;
    if (f)
        fclose(f);
    return resident;
}

static void *counting_alloc(void *data, size_t bytes)
{
    ++*(long *)data;
    return malloc(bytes);
}

static void counting_free(void *data, void *pointer)
{
    --*(long *)data;
    free(pointer);
}

/* Plan, run, destroy; and plans that are refused: every block comes back, and the process does not grow. */
static void no_leak(harness *h)
{
    int cycles = h->options.quick ? 2000 : 100000;
    attention_spec s = {.q_dtype = MSA_E4M3, .kv_dtype = MSA_E4M3, .q_heads = 1, .kv_heads = 1, .topk = 1};
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(1));
    attention_case *c = attention_new(h, &s);
    msa_attention_desc refused = c->desc;
    refused.head_dim = 64;
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;
    msa_context *context;
    long blocks = 0, kept = 0, before = 0;
    options.device = h->options.device;
    options.num_threads = h->options.device == MSA_DEVICE_CPU;
    options.alloc = counting_alloc;
    options.free = counting_free;
    options.alloc_data = &blocks;
    CHECK_OK(h, msa_context_create(&options, &context));
    kept = blocks;
    arena memory = {0};
    c->t.workspace = arena_region(&memory, 16 << 20, 256);
    for (int i = 0; i < cycles && !h->test_failed; i++) {
        CHECK_OK(h, c->t.open(&c->t, context));
        CHECK_OK(h, c->t.run(&c->t, context));
        msa_plan_destroy(c->t.plan);
        CHECK(h, msa_prefill_plan(context, &refused, &c->t.plan) == MSA_ERROR_UNSUPPORTED && !c->t.plan);
        CHECK(h, blocks == kept);
        if (i == cycles / 10)
            before = resident_pages();
    }
    if (resident_pages() > before + 64)
        test_fail(h, "%ld pages of memory more after %d cycles", resident_pages() - before, cycles);
    msa_context_destroy(context);
    CHECK(h, blocks == 0);
    arena_free(&memory);
    attention_free(c);
}

/* Many small problems, in all shapes; a hang is a failure. */
static void small_calls(harness *h)
{
    random_stream r = test_random(h);
    alarm(300); /* SIGALRM ends the program */
    for (int i = 0; i < (h->options.quick ? 100 : 400) && !h->test_failed; i++) {
        int32_t q_len = random_between(&r, 1, 40), kv_len = random_between(&r, 1, 600);
        attention_spec s = {
            .q_dtype = attention_pairs[i % 8].q, .kv_dtype = attention_pairs[i % 8].kv, .decode = i / 8 % 2};
        s.kv_heads = 1;
        s.q_heads = random_between(&r, 1, 16);
        s.topk = random_between(&r, 1, 4);
        s.samples = 1;
        s.requests = batch_of(1, &q_len, &kv_len);
        attention_case *c = attention_new(h, &s);
        const isa_level *l = &h->levels[i % h->num_levels];
        trial_run_once(h, &c->t, l->lent && i % 4 == 0 ? l->lent : l->one);
        c->t.check(h, &c->t);
        attention_free(c);
    }
    alarm(0);
}

void faults_plans(harness *h)
{
    each_attention(h, "mixed-batch", mixed_batch);
    each_index(h, "mixed-batch", mixed_index_batch);
    each_attention(h, "bad-lengths", bad_lengths);
    each_attention(h, "over-capacity", over_capacity);
    each_index(h, "over-capacity", index_over_capacity);
    workspaces_grow(h);
    plain_test(h, "plan", "workspace-of-prefill", workspace_of_prefill);
    each_attention(h, "bad-workspace", bad_workspace);
    each_attention(h, "replay", replay);
    plain_test(h, "plan", "no-leak", no_leak);
    plain_test(h, "all", "small-calls", small_calls);
}
