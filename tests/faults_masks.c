/* SPDX-License-Identifier: MIT
 *
 * faults_masks.c - rows see the keys they must and no others: stale or unwritten slots, causal limits, empty rows.
 */
#include "faults.h"

#include <math.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

/* Slots past the length hold large numbers, NaN or zeros: the answer is the same. */
static void stale_tail(harness *h, const attention_spec *spec)
{
    static const int32_t q_lens[] = {1, 2, 130};
    for (int i = 0; i < (spec->decode ? 2 : 3); i++) {
        attention_spec zeros = *spec, stale = *spec;
        zeros.requests = stale.requests = batch_of(1, &q_lens[i], LENGTHS(130));
        zeros.list = stale.list = list_all_pages;
        zeros.poison = 0x100;
        static const int poisons[] = {0x7E, 0x7F, 0xFF, 0x70};
        for (int j = 0; j < 4; j++) {
            stale.poison = poisons[j];
            same_attention(h, &zeros, &stale, "stale slots");
        }
    }
}

/* Lists page 1, too, which lies entirely past the length. */
static void list_two(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    list_all_pages(ids, k, list, row, position, data);
    ids[0] = 1;
    ids[1] = 0;
}

/* Zero queries: weights are uniform over what a row sees, and offset-coded V shows what that was. */
static void expect_uniform(harness *h, const attention_case *c)
{
    msa_dtype dtype = attention_out_dtype(&c->spec);
    for (int64_t row = 0; row < c->b.total_q; row++) {
        int64_t keys = c->b.row_position[row] + 1;
        for (int32_t head = 0; head < c->spec.q_heads; head++) {
            for (int d = 0; d < D; d++) {
                double seen = (double)(keys / PAGE + (d < keys % PAGE));
                if (!is_near(dtype, attention_out(c, row, head, d), seen / (double)keys, 2e-7))
                    test_fail(h, "row %lld sees %g of %lld keys at offset %d", (long long)row,
                              attention_out(c, row, head, d) * (double)keys, (long long)keys, d);
            }
            if (fabs((double)attention_lse(c, row, head) - log((double)keys)) > 1e-6 * (1 + log((double)keys)))
                test_fail(h, "lse of row %lld is %g, expected ln %lld", (long long)row,
                          (double)attention_lse(c, row, head), (long long)keys);
        }
    }
}

static void uniform(harness *h, const attention_spec *spec, int32_t q_len, int32_t kv_len, list_fn *list)
{
    attention_spec s = *spec;
    s.requests = batch_of(1, &q_len, &kv_len);
    s.requests.max_kv_len = kv_len + 300;
    s.q = coded_zero;
    s.v = coded_offset;
    s.list = list;
    attention_case *c = attention_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].one);
        expect_uniform(h, c);
    }
    attention_free(c);
}

static void unwritten_slots(harness *h, const attention_spec *spec)
{
    uniform(h, spec, 1, 13, list_two);
}

/* Lengths around a page's end; new tokens at the end of the sequence, each seeing those before it. */
static void causal(harness *h, const attention_spec *spec)
{
    static const int32_t lengths[][2] = {{5, 300}, {3, 130}, {4, 260}, {4, 256}, {1, 1},
                                         {1, 4},   {1, 127}, {2, 128}, {9, 129}, {1, 2048}};
    for (int i = 0; i < (h->options.quick ? 3 : 10); i++)
        uniform(h, spec, lengths[i][0], lengths[i][1], list_all_pages);
}

static void list_none_for_some(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    list_all_pages(ids, k, list, row, position, data);
    for (int32_t i = 0; i < k && (row == 7 || row == 63); i++)
        ids[i] = -1;
}

static void expect_empty(harness *h, const attention_case *c, int64_t row)
{
    for (int32_t head = 0; head < c->spec.q_heads; head++) {
        float lse = attention_lse(c, row, head);
        uint32_t bits;
        memcpy(&bits, &lse, sizeof bits);
        if (bits != 0xFF800000)
            test_fail(h, "lse of the empty row %lld is %g", (long long)row, (double)lse);
        for (int d = 0; d < D; d++) {
            double x = attention_out(c, row, head, d);
            if (!(x == 0) || signbit(x))
                test_fail(h, "out of the empty row %lld is %g", (long long)row, x);
        }
    }
}

/* A row that lists nothing still gets its zeros. */
static void row_without_pages(harness *h, const attention_spec *spec)
{
    attention_spec s = *spec;
    s.requests = batch_of(1, LENGTHS(64), LENGTHS(100));
    s.requests.padding_rows = 2;
    s.list = list_none_for_some;
    attention_case *c = attention_new(h, &s);
    trial_run(h, &c->t);
    expect_empty(h, c, 7);
    expect_empty(h, c, 63);
    attention_free(c);
}

/* Nothing to see anywhere: kv length 0, and rows at negative positions. */
static void nothing_to_see(harness *h, const attention_spec *spec)
{
    attention_spec s = *spec;
    s.requests = batch_of(4, LENGTHS(1, 1, 3, 1), LENGTHS(0, 0, 2, 0));
    attention_case *c = attention_new(h, &s);
    trial_run(h, &c->t);
    expect_empty(h, c, 0);
    expect_empty(h, c, 1);
    expect_empty(h, c, 2); /* position -1 */
    expect_empty(h, c, 5);
    attention_free(c);
}

/* Every number of new tokens, mixed in a batch, around the ends of pages. */
static void new_tokens(harness *h, const attention_spec *spec)
{
    attention_spec s = *spec;
    s.requests = batch_of(11, LENGTHS(1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17),
                          LENGTHS(128, 129, 130, 131, 132, 260, 262, 8, 135, 384, 400));
    s.samples = 40;
    attention_test(h, &s);
}

/* A request's bits do not change when its step is padded: with requests of length 0, and with rows past the last. */
static void padded_step(harness *h, const attention_spec *spec)
{
    static const int64_t capacities[] = {2048, 4096, 100000};
    for (int i = 0; i < 3; i++) {
        attention_spec alone = *spec, padded = *spec;
        alone.requests = batch_of(5, LENGTHS(1, 1, 2, 1, 1), LENGTHS(5, 1300, 256, 2000, 1));
        padded.requests = batch_of(8, LENGTHS(1, 1, 2, 1, 1, 1, 1, 0), LENGTHS(5, 1300, 256, 2000, 1, 0, 0, 0));
        alone.requests.max_batch = padded.requests.max_batch = 8;
        alone.requests.max_total_q = padded.requests.max_total_q = 8;
        alone.requests.max_kv_len = padded.requests.max_kv_len = capacities[i];
        alone.q = alone.k = alone.v = padded.q = padded.k = padded.v = coded_hash;
        alone.list = padded.list = list_all_pages;
        attention_case *a = attention_new(h, &alone), *b = attention_new(h, &padded);
        for (int j = 0; j < h->num_levels; j++) {
            trial_run_once(h, &a->t, h->levels[j].one);
            trial_run_once(h, &b->t, h->levels[j].one);
            for (int64_t row = 0; row < 6; row++)
                for (int32_t head = 0; head < spec->q_heads; head++) {
                    CHECK(h, attention_lse(a, row, head) == attention_lse(b, row, head));
                    for (int d = 0; d < D; d++)
                        CHECK(h, attention_out(a, row, head, d) == attention_out(b, row, head, d));
                }
            expect_empty(h, b, 6);
            expect_empty(h, b, 7);
        }
        attention_free(a);
        attention_free(b);
    }
}

void faults_masks(harness *h)
{
    each_attention(h, "stale-tail", stale_tail);
    each_attention(h, "unwritten-slots", unwritten_slots);
    each_attention(h, "causal", causal);
    each_attention(h, "row-without-pages", row_without_pages);
    each_attention(h, "nothing-to-see", nothing_to_see);
    each_attention(h, "new-tokens", new_tokens);
    each_attention(h, "padded-step", padded_step);
}
