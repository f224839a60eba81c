/* SPDX-License-Identifier: MIT
 *
 * check_attention.c - prefill and decode: every pair of formats, ratio, list length, layout and kind of batch.
 */
#include "checkkernel.h"

#include <math.h>
#include <string.h>

static const char *op_name(const attention_spec *s)
{
    return s->decode ? "decode" : "prefill";
}

static attention_spec pair_spec(int pair, bool decode)
{
    format_pair formats = attention_pairs[pair];
    return (attention_spec){
        .q_dtype = formats.q, .kv_dtype = formats.kv, .decode = decode, .q_heads = 4, .kv_heads = 2};
}

static bool begin(harness *h, const attention_spec *s, const char *what, int number)
{
    return test_begin(h, op_name(s), "%s-%s/%s-%d", format_name(s->q_dtype), format_name(s->kv_dtype), what, number);
}

static void test(harness *h, const attention_spec *s, const char *what, int number)
{
    if (!begin(h, s, what, number))
        return;
    attention_test(h, s);
    test_end(h);
}

/* ---------------------------------------------------------------------------------------------------------- sweeps */

/* The problem that --bench times. */
static void check_typical(harness *h, int pair, bool decode)
{
    attention_spec s = pair_spec(pair, decode);
    s.q_heads = 16;
    s.requests =
        decode ? batch_of(3, LENGTHS(1, 2, 1), LENGTHS(700, 513, 130)) : batch_of(1, LENGTHS(20), LENGTHS(900));
    s.topk = 4;
    if (!begin(h, &s, "typical", 0))
        return;
    attention_case *c = attention_new(h, &s);
    c->t.timed = true;
    trial_run(h, &c->t);
    attention_free(c);
    test_end(h);
}

static void check_ratios(harness *h)
{
    for (int ratio = 1; ratio <= 16; ratio++) {
        attention_spec s = pair_spec(ratio % NUM_ATTENTION_PAIRS, ratio % 3 == 0);
        s.kv_heads = 1 + ratio % 2;
        s.q_heads = ratio * s.kv_heads;
        s.topk = 3;
        s.requests = batch_of(2, LENGTHS(7, 2), LENGTHS(260, 2));
        test(h, &s, "ratio", ratio);
    }
}

/* KV heads that share a list, between one list for all and one each. */
static void check_shared_lists(harness *h)
{
    static const int32_t heads[][2] = {{4, 2}, {6, 2}, {6, 3}, {8, 4}, {8, 1}};
    for (int i = 0; i < 10; i++) {
        attention_spec s = pair_spec(i % NUM_ATTENTION_PAIRS, i % 2);
        s.kv_heads = s.q_heads = heads[i / 2][0];
        s.lists = heads[i / 2][1];
        s.topk = 3;
        s.list_layout = (row_layout)(i % 3);
        s.requests = batch_of(2, LENGTHS(3, 2), LENGTHS(700, 260));
        test(h, &s, "lists", i);
    }
}

static void check_list_lengths(harness *h)
{
    for (int k = 1; k <= MSA_MAX_TOPK; k++) {
        attention_spec s = pair_spec(k % NUM_ATTENTION_PAIRS, k % 2);
        s.topk = k;
        s.kv_heads = 1;
        s.q_heads = 3;
        s.requests = batch_of(1, LENGTHS(2), LENGTHS(128 * (k + 1) + k));
        s.list = k % 3 ? NULL : list_all_pages;
        test(h, &s, "topk", k);
    }
}

static void check_layouts(harness *h, int pair)
{
    static const cache_layout layouts[] = {CACHE_DENSE, CACHE_GAPS, CACHE_PACKED, CACHE_TOKEN_MAJOR, CACHE_SLOTS};
    for (int i = 0; i < 10; i++) {
        attention_spec s = pair_spec(pair, (pair + i) % 3 == 0);
        s.cache_layout = layouts[i % 5];
        s.quad = i >= 5;
        if (s.kv_dtype != MSA_NVFP4 && (s.cache_layout == CACHE_SLOTS || s.quad))
            continue;
        s.q_layout = (row_layout)((pair + i) % 3);
        s.out_layout = (row_layout)((pair + i / 2) % 3);
        s.list_layout = (row_layout)((pair + i / 3) % 3);
        s.lists = 1 + i % 2;
        s.scaled = i % 2;
        s.topk = 3;
        s.requests = batch_of(2, LENGTHS(4, 3), LENGTHS(140, 300));
        s.requests.table_gap = 3 * (i % 2);
        test(h, &s, "layout", i);
    }
}

/* Ragged batches: empty requests anywhere, nothing to see, more new tokens than keys, padding rows, shared pages. */
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
        {6, {1, 33, 0, 2, 1, 17}, {128, 160, 5, 129, 1, 400}, 7},
        {2, {129, 1}, {129, 127}, 1},
        {8, {1, 2, 3, 4, 5, 6, 7, 9}, {127, 128, 129, 256, 257, 258, 383, 384}, 0},
    };
    for (int i = 0; i < (int)(sizeof batches / sizeof batches[0]); i++)
        for (int decode = 0; decode < 2; decode++) {
            attention_spec s = pair_spec(pair, decode);
            s.kv_heads = 1;
            s.q_heads = 2;
            s.topk = 4;
            s.without_lse = (i + pair) % 3 == 0;
            s.requests = batch_of(batches[i].batch, batches[i].q_lens, batches[i].kv_lens);
            s.requests.padding_rows = batches[i].padding;
            s.requests.by_offsets = (i + pair) % 2;
            s.requests.share_pages = (i + pair) % 4 > 1;
            if (i == 5)
                s.requests.max_kv_len = 1500;
            test(h, &s, "batch", i);
        }
}

/* Rows enough for many tiles of a GPU's kernels, whose borders requests and ratios move. Room for more requests than
 * come makes plans that do not split a row's pages. CPUs have no tiles. */
static void check_prefill_tiles(harness *h, int pair)
{
    static const int32_t ratios[] = {16, 7, 2, 1};
    for (int i = 0; i < 8; i++) {
        attention_spec s = pair_spec(pair, false);
        s.kv_heads = 2;
        s.q_heads = 2 * ratios[i % 4];
        s.topk = 6;
        s.precision = i % 2 ? MSA_PRECISION_FAST : MSA_PRECISION_EXACT;
        s.requests = batch_of(4, LENGTHS(293, 1, 0, 206), LENGTHS(1500, 129, 7, 206));
        s.requests.max_batch = i < 4 ? 300 : 0;
        test(h, &s, "many-tiles", i);
    }
    for (int i = 8; i < 10; i++) { /* a block's first task, or only one, has queries that see nothing */
        attention_spec s = pair_spec(pair, false);
        s.kv_heads = 2;
        s.q_heads = 32;
        s.precision = i % 2 ? MSA_PRECISION_FAST : MSA_PRECISION_EXACT;
        s.requests = batch_of(3, LENGTHS(40, 200, 30), LENGTHS(0, 40, 10));
        s.requests.max_batch = 300;
        test(h, &s, "many-tiles", i);
    }
}

static void check_partials(harness *h, int pair)
{
    for (int i = 0; i < 3; i++) {
        attention_spec s = pair_spec(pair, i == 1);
        s.partials = true;
        s.topk = 4;
        s.out_layout = (row_layout)i;
        s.out_dtype = i == 2 ? MSA_FP16 : i == 1 ? MSA_BF16 : MSA_DTYPE_DEFAULT;
        s.requests = batch_of(3, LENGTHS(3, 0, 4), LENGTHS(400, 10, 2));
        s.requests.padding_rows = 1;
        test(h, &s, "partials", i);
    }
}

/* Requests of several tiles (of 16 query heads 32 rows, of 5 heads 96, of one 512), the last one with lists as full as
 * they get: 32 visible pages a row. */
static void check_tiles(harness *h)
{
    static const int32_t heads[] = {16, 5, 1}, rows[] = {70, 200, 600};
    for (int i = 0; i < (h->options.quick ? 2 : 3); i++)
        for (int decode = 0; decode < 2; decode++) {
            attention_spec s = pair_spec((3 * i + decode) % NUM_ATTENTION_PAIRS, decode);
            s.kv_heads = 1;
            s.q_heads = heads[i];
            s.topk = i < 2 ? 3 : MSA_MAX_TOPK;
            s.list = i < 2 ? NULL : list_all_pages;
            s.samples = 40;
            s.requests = batch_of(2, LENGTHS(rows[i], 3), LENGTHS(rows[i] + 128 * s.topk, 200));
            test(h, &s, "tiles", heads[i]);
        }
}

/* Decode plans of many capacities: on a GPU each splits a row's pages in another way, from one page a block to all of
 * them. Rows with nothing, padding, more and fewer pages than there are parts. */
static void check_capacities(harness *h, int pair)
{
    static const int64_t capacities[] = {8, 20, 33, 48, 100, 200, 700};
    for (int i = 0; i < (int)(sizeof capacities / sizeof capacities[0]); i++) {
        if (h->options.device == MSA_DEVICE_CPU && i != pair % 7)
            continue; /* a CPU's kernels do not look at capacities */
        attention_spec s = pair_spec(pair, true);
        s.kv_heads = 1;
        s.q_heads = (5 * i + 3 * pair) % MSA_MAX_GQA_RATIO + 1;
        s.topk = i % 3 == 2 ? 32 : i % 3 == 1 ? 7 : 16;
        s.list = i % 2 ? NULL : list_all_pages;
        s.scaled = i % 2;
        s.requests = batch_of(5, LENGTHS(1, 2, 0, 3, 1), LENGTHS(2048 + 77, 700, 9, 2, 4096 + 129));
        s.requests.padding_rows = 1;
        s.requests.max_total_q = capacities[i];
        test(h, &s, "capacity", i);
    }
}

/* A value that is not finite in the last page, which a request's first new tokens do not see and its last ones do. */
static double value_with_nan(const place *where, const void *data)
{
    (void)data;
    if (where->request == 0 && where->page == 15 && where->token == 83 && where->d == 70)
        return NAN;
    return (double)((where->page * 7 + where->token * 3 + where->d) % 13) / 8 - 0.75;
}

/* Several new tokens a request, mixed with one and none, in plans with room for many: a GPU's tiles of queries share
 * pages, or, where lists have little in common, do not. */
static void check_several_new(harness *h, int pair)
{
    static const int32_t ratios[] = {16, 8, 5, 4, 11, 3};
    static const cache_layout layouts[] = {CACHE_DENSE, CACHE_GAPS, CACHE_PACKED, CACHE_TOKEN_MAJOR, CACHE_SLOTS};
    for (int i = 0; i < 12; i++) {
        if (h->options.device == MSA_DEVICE_CPU && i != 1)
            continue;
        attention_spec s = pair_spec(pair, true);
        s.kv_heads = 1 + i % 2;
        s.q_heads = ratios[(pair + i) % 6] * s.kv_heads;
        s.topk = i % 4 == 3 ? 32 : i % 4 == 2 ? 5 : 16;
        s.list = i % 2 ? list_all_pages : NULL;
        s.v = i % 3 == 1 ? value_with_nan : NULL;
        s.scaled = i % 2;
        s.cache_layout = layouts[i % (s.kv_dtype == MSA_NVFP4 ? 5 : 4)];
        s.quad = s.kv_dtype == MSA_NVFP4 && i % 4 > 1;
        s.q_layout = (row_layout)(i % 3);
        s.out_layout = (row_layout)((i + 1) % 3);
        s.without_lse = i % 5 == 4;
        s.samples = 60;
        s.requests = batch_of(8, LENGTHS(8, 1, 16, 0, 35, 3, 5, 2),
                              LENGTHS(15 * 128 + 86, 300, 1000, 9, 130, 1, 60 * 128 + 3, 2000));
        s.requests.padding_rows = 2;
        s.requests.share_pages = i % 3 == 2;
        s.requests.max_batch = 8;
        s.requests.max_total_q = 700;
        test(h, &s, "several-new", i);
    }
}

/* More rows and KV heads than a GPU has multiprocessors, where a block may take several. */
static void check_rows_together(harness *h, int pair)
{
    static const int32_t requests[] = {90, 100, 140, 270}, heads[] = {3, 4, 3, 2}, ratios[] = {16, 5, 8, 11};
    static const cache_layout layouts[] = {CACHE_DENSE, CACHE_GAPS, CACHE_TOKEN_MAJOR, CACHE_SLOTS};
    attention_spec s = pair_spec(pair, true);
    if (h->options.device == MSA_DEVICE_CPU || s.kv_dtype != MSA_NVFP4)
        return;
    for (int i = 0; i < 4; i++) {
        int32_t q_lens[270], kv_lens[270];
        for (int r = 0; r < requests[i]; r++) {
            q_lens[r] = r % 9 != 4;
            kv_lens[r] = 1 + r * 53 % 900;
        }
        s.kv_heads = heads[i];
        s.q_heads = ratios[i] * heads[i];
        s.topk = i == 3 ? 32 : 4;
        s.list = i % 2 ? list_all_pages : NULL;
        s.v = i % 2 ? value_with_nan : NULL;
        s.scaled = i % 2;
        s.cache_layout = layouts[i];
        s.quad = i > 1;
        s.samples = 60;
        s.requests = batch_of(requests[i], q_lens, kv_lens);
        s.requests.padding_rows = i;
        test(h, &s, "rows-together", i);
    }
}

static void check_many_requests(harness *h, int pair)
{
    if (h->options.device == MSA_DEVICE_CPU)
        return;
    int32_t q_lens[MANY_REQUESTS], kv_lens[MANY_REQUESTS];
    many_lengths(300, q_lens, kv_lens);
    attention_spec s = pair_spec(pair, true);
    s.topk = 4;
    s.samples = 60;
    s.requests = batch_of(MANY_REQUESTS, q_lens, kv_lens);
    test(h, &s, "many-requests", 0);
}

/* 16 pages, the last one partial, at every ratio. */
static void check_decode_ratios(harness *h)
{
    for (int ratio = 1; ratio <= MSA_MAX_GQA_RATIO; ratio++)
        for (int i = 0; i < (h->options.device == MSA_DEVICE_CPU ? 1 : 3); i++) {
            attention_spec s = pair_spec((ratio + 3 * i) % NUM_ATTENTION_PAIRS, true);
            s.kv_heads = 2;
            s.q_heads = 2 * ratio;
            s.topk = 16;
            s.list = list_all_pages;
            s.requests = batch_of(2, LENGTHS(1, 4), LENGTHS(15 * 128 + 7 * ratio, 2048 - ratio));
            s.requests.max_total_q = i == 0 ? 5 : i == 1 ? 30 : 300;
            s.samples = 10;
            test(h, &s, "pages-16", 10 * ratio + i);
        }
}

/* ------------------------------------------------------------------------------------------------- random problems */

static attention_spec random_spec(random_stream *r, int pair, int32_t *q_lens, int32_t *kv_lens)
{
    attention_spec s = pair_spec(pair, random_chance(r, 0.4));
    s.kv_heads = random_between(r, 1, 3);
    s.q_heads = s.kv_heads * random_between(r, 1, 6);
    s.lists = random_chance(r, 0.5) ? s.kv_heads : 1;
    s.topk = random_between(r, 1, 6);
    s.sm_scale = random_chance(r, 0.3) ? 0.02f + 0.01f * (float)random_below(r, 20) : 0;
    s.out_dtype = (msa_dtype)(random_chance(r, 0.5) ? 0 : random_chance(r, 0.5) ? MSA_BF16 : MSA_FP16);
    s.without_lse = random_chance(r, 0.2);
    s.scaled = random_chance(r, 0.5);
    s.partials = random_chance(r, 0.15) && !s.without_lse;
    s.q_layout = (row_layout)random_below(r, 3);
    s.out_layout = (row_layout)random_below(r, 3);
    s.list_layout = (row_layout)random_below(r, 3);
    s.cache_layout = (cache_layout)random_below(r, s.kv_dtype == MSA_NVFP4 ? 5 : 4);
    s.quad = s.kv_dtype == MSA_NVFP4 && random_chance(r, 0.5);
    s.poison = random_chance(r, 0.5) ? 0xFF : 0x7E;
    s.requests = batch_of(random_between(r, 1, 4), q_lens, kv_lens);
    s.requests.padding_rows = random_below(r, 3);
    s.requests.by_offsets = random_chance(r, 0.5);
    s.requests.share_pages = random_chance(r, 0.3);
    s.requests.table_gap = random_below(r, 3);
    s.requests.max_kv_len = random_chance(r, 0.3) ? 2000 : 0;
    s.requests.max_batch = random_chance(r, 0.5) ? 200 : 0;
    s.precision = random_chance(r, 0.3) ? MSA_PRECISION_FAST : MSA_PRECISION_EXACT;
    for (int32_t i = 0; i < s.requests.batch; i++) {
        q_lens[i] = random_chance(r, 0.15) ? 0 : random_between(r, 1, s.decode ? 5 : 24);
        kv_lens[i] = random_chance(r, 0.1) ? random_below(r, 4) : random_between(r, 1, 700);
    }
    return s;
}

static void check_random(harness *h, int pair, int number)
{
    int32_t q_lens[4], kv_lens[4];
    random_stream random = random_new(h->options.seed, (uint32_t)(1000 * pair + number));
    attention_spec s = random_spec(&random, pair, q_lens, kv_lens);
    test(h, &s, "random", number);
}

/* ----------------------------------------------------------------------------------------------------------- twins */

static void compare_cases(harness *h, const attention_case *a, const attention_case *b, const char *what)
{
    for (int i = 0; i < a->t.num_outputs; i++)
        if (memcmp(a->t.outputs[i].region->data, b->t.outputs[i].region->data, a->t.outputs[i].region->bytes))
            test_fail(h, "%s: %s changed", what, a->t.outputs[i].name);
}

/* The bytes that no row may see do not matter: NaN, or large finite numbers. */
static void check_poison(harness *h, int pair, bool decode)
{
    attention_spec s = pair_spec(pair, decode);
    s.topk = 3;
    s.requests = batch_of(3, LENGTHS(3, 1, 2), LENGTHS(130, 13, 391));
    s.requests.padding_rows = 2;
    if (!begin(h, &s, "poison", 0))
        return;
    attention_case *nan = attention_new(h, &s);
    s.poison = 0x7E;
    attention_case *large = attention_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &nan->t, h->levels[i].one);
        trial_run_once(h, &large->t, h->levels[i].one);
        compare_cases(h, nan, large, h->levels[i].isa);
    }
    attention_free(nan);
    attention_free(large);
    test_end(h);
}

/* LSE left out or not, the output is the same. */
static void check_optional_lse(harness *h, int pair, bool decode)
{
    attention_spec s = pair_spec(pair, decode);
    s.topk = 3;
    s.requests = batch_of(2, LENGTHS(2, 3), LENGTHS(200, 300));
    if (!begin(h, &s, "optional-lse", 0))
        return;
    attention_case *with = attention_new(h, &s);
    s.without_lse = true;
    attention_case *without = attention_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &with->t, h->levels[i].one);
        trial_run_once(h, &without->t, h->levels[i].one);
        compare_cases(h, without, with, h->levels[i].isa);
    }
    attention_free(with);
    attention_free(without);
    test_end(h);
}

/* -------------------------------------------------------------------------------------------- partials and combine */

/* What the rounding of the partial outputs may add: half an ulp of each, weighted. */
static double partials_bound(const oracle_state *states, int count, double lse, msa_dtype dtype, int d)
{
    double bound = 0, half_ulp = dtype == MSA_FP16 ? 0x1p-11 : 0x1p-8;
    for (int i = 0; i < count; i++)
        bound += exp(states[i].lse - lse) * (fabs(states[i].out[d]) * half_ulp + states[i].out_bound[d]);
    return bound;
}

static void combine_partials(harness *h, const attention_case *c, msa_context *context, msa_dtype dtype)
{
    const attention_spec *s = &c->spec;
    int64_t rows = c->b.total_q;
    arena results = {0};
    uint8_t *out = arena_region(&results, (size_t)(rows * s->q_heads * MSA_HEAD_DIM) * 2, 16)->data;
    float *lse = (float *)(void *)arena_region(&results, (size_t)(rows * s->q_heads) * sizeof *lse, 16)->data;
    msa_combine_args a = MSA_COMBINE_ARGS_INIT;
    a.num_splits = s->topk;
    a.rows = rows;
    a.num_q_heads = s->q_heads;
    a.num_kv_heads = s->kv_heads;
    a.o_partial_dtype = dtype;
    a.o_partial = c->args.o_partial;
    a.lse_partial = c->args.lse_partial;
    a.split_counts = c->args.split_counts;
    a.out = out;
    a.lse = lse;
    CHECK_OK(h, msa_combine(context, &a, NULL));
    for (int64_t row = 0; row < rows; row++)
        for (int32_t head = 0; head < s->q_heads; head++) {
            oracle_state direct, states[MSA_MAX_TOPK];
            oracle_attention_row(&c->desc, &c->step, &c->args, row, head, &direct);
            int count = oracle_attention_partials(&c->desc, &c->step, &c->args, row, head, states);
            for (int d = 0; d < MSA_HEAD_DIM; d++) {
                double x = oracle_value(dtype, out + ((row * s->q_heads + head) * MSA_HEAD_DIM + d) * 2);
                if (!is_near(dtype, x, direct.out[d], partials_bound(states, count, direct.lse, dtype, d) + 1e-6))
                    test_fail(h, "out[row %lld, head %d, %d] = %g, direct %g", (long long)row, head, d, x,
                              direct.out[d]);
            }
            double x = (double)lse[row * s->q_heads + head];
            if (!is_near(MSA_F32, x, direct.lse, direct.lse_bound + 1e-6))
                test_fail(h, "lse[row %lld, head %d] = %g, direct %g", (long long)row, head, x, direct.lse);
        }
    arena_free(&results);
}

static void check_combined(harness *h, int pair, bool decode)
{
    attention_spec s = pair_spec(pair, decode);
    s.partials = true;
    s.topk = 5;
    s.requests = batch_of(2, LENGTHS(3, 4), LENGTHS(600, 2));
    if (!begin(h, &s, "partials-combined", 0))
        return;
    attention_case *c = attention_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].one);
        combine_partials(h, c, h->levels[i].one, s.q_dtype == MSA_FP16 ? MSA_FP16 : MSA_BF16);
    }
    attention_free(c);
    test_end(h);
}

/* --------------------------------------------------------------------------------------------------- strategies */

/* Only the row's own page and page 0. */
static void list_two_pages(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    (void)list, (void)row, (void)data;
    for (int32_t i = 0; i < k; i++)
        ids[i] = -1;
    ids[0] = position < 0 ? -1 : (int32_t)(position / MSA_PAGE_SIZE);
    ids[k - 1] = 0;
}

/* Requests whose rows share all pages, some, or none, by every strategy. */
/* On Hopper: in numbers 8 and 10, partial results of 512 rows are all that is there at once; in number 9 a block of
 * prepare has rows of requests with more pages than it counts together; number 12 has so many pages of rows that a
 * thread of prepare counts several; number 13 has a request with more pages than any block counts together; number 5
 * has queries that are no tensor of the copies'. */
#define SOME_REQUESTS 5, LENGTHS(70, 0, 25, 330, 3), LENGTHS(90, 40, 3000, 1700, 900)
static const struct strategy_problem {
    int32_t q_heads, kv_heads, topk;
    cache_layout layout;
    int32_t batch;
    const int32_t *q_lens, *kv_lens;
} strategy_problems[] = {
    {16, 1, 16, CACHE_DENSE, SOME_REQUESTS},
    {32, 2, 16, CACHE_GAPS, SOME_REQUESTS},
    {3, 1, 16, CACHE_DENSE, SOME_REQUESTS},
    {8, 8, 32, CACHE_DENSE, SOME_REQUESTS},
    {10, 2, 7, CACHE_DENSE, SOME_REQUESTS},
    {16, 1, 16, CACHE_DENSE, SOME_REQUESTS},
    {64, 4, 16, CACHE_DENSE, SOME_REQUESTS},
    {64, 4, 4, CACHE_DENSE, 5, LENGTHS(70, 0, 450, 830, 3), LENGTHS(90, 40, 3000, 1700, 900)},
    {512, 32, 16, CACHE_DENSE, 4, LENGTHS(130, 300, 20, 90), LENGTHS(130, 300, 60, 90)},
    {16, 1, 4, CACHE_DENSE, 5, LENGTHS(50, 40, 70, 30, 60), LENGTHS(30000, 28000, 32000, 31000, 20000)},
    {256, 16, 32, CACHE_TOKEN_MAJOR, 4, LENGTHS(129, 300, 20, 90), LENGTHS(257, 300, 60, 474)},
    {32, 2, 16, CACHE_REPEATED, SOME_REQUESTS},
    {16, 16, 32, CACHE_DENSE, 4, LENGTHS(170, 350, 7, 90), LENGTHS(5000, 3000, 60, 474)},
    {16, 1, 4, CACHE_DENSE, 3, LENGTHS(50, 3, 60), LENGTHS(270000, 3000, 900)},
};

static void check_strategies(harness *h, int pair)
{
    static const char *const names[] = {"auto", "query-major", "page-major"};
    int count = h->options.quick ? 7 : (int)(sizeof strategy_problems / sizeof *strategy_problems);
    for (int i = 0; i < count; i++)
        for (int strategy = MSA_STRATEGY_AUTO; strategy <= MSA_STRATEGY_PAGE_MAJOR; strategy++) {
            const struct strategy_problem *p = &strategy_problems[i];
            attention_spec s = pair_spec(pair, false);
            s.strategy = (msa_strategy)strategy;
            if (!prefill_has(h, s.q_dtype, s.kv_dtype, s.strategy))
                continue;
            s.q_heads = p->q_heads;
            s.kv_heads = p->kv_heads;
            s.precision = i % 4 == 2 ? MSA_PRECISION_FAST : MSA_PRECISION_EXACT;
            s.lists = i % 3 ? 1 : 0;
            s.topk = p->topk;
            s.cache_layout = p->layout;
            s.list = i == 5 ? list_two_pages : NULL;
            s.out_dtype = i % 2 ? MSA_FP16 : MSA_DTYPE_DEFAULT;
            s.scaled = i % 3 == 1;
            s.quad = s.kv_dtype == MSA_NVFP4 && i % 2;
            s.q_layout = s.out_layout = (row_layout)(i % 3);
            if (i == 5)
                s.q_layout = ROWS_REPEATED;
            s.without_lse = i == 2;
            s.requests = batch_of(p->batch, p->q_lens, p->kv_lens);
            s.requests.padding_rows = 5;
            s.requests.share_pages = i % 2;
            s.samples = 40;
            test(h, &s, names[strategy], i);
        }
}

void check_attention(harness *h)
{
    int randoms = h->options.quick ? 1 : 12;
    for (int pair = 0; pair < NUM_ATTENTION_PAIRS; pair++) {
        for (int decode = 0; decode < 2; decode++) {
            check_typical(h, pair, decode);
            check_poison(h, pair, decode);
            check_optional_lse(h, pair, decode);
            check_combined(h, pair, decode);
        }
        check_layouts(h, pair);
        check_batches(h, pair);
        if (device_in_use()) { /* a CPU has one strategy and its tiles change no bit */
            check_strategies(h, pair);
            check_prefill_tiles(h, pair);
        }
        check_partials(h, pair);
        check_capacities(h, pair);
        check_several_new(h, pair);
        check_many_requests(h, pair);
        check_rows_together(h, pair);
        for (int i = 0; i < randoms; i++)
            check_random(h, pair, i);
    }
    check_ratios(h);
    check_shared_lists(h);
    check_decode_ratios(h);
    check_list_lengths(h);
    check_tiles(h);
}
