/* SPDX-License-Identifier: MIT
 *
 * check_shapes.c - 512 shapes as serving engines make them, each with 4 KV heads and with 1: ragged batches over long
 * contexts, 16 query heads a KV head, lists of 16 pages; prefill and decode, all formats. 64 rows of each against the
 * oracle. Long contexts lie in few physical pages. A CPU takes some of the shapes. Names begin with one of 16 numbers,
 * so that as many processes can share the work (scripts/gpu-run).
 */
#include "checkkernel.h"

enum { SHAPES = 512, MAX_BATCH = 16, MAX_PAGES = 1024, SAMPLES = 64 };

/* The own page and others that the row sees, distinct, ascending: what a selection gives. */
static void list_selected(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data)
{
    uint32_t seed = *(const uint32_t *)data;
    random_stream r = random_new(seed, (uint32_t)(row * 64 + list));
    int32_t own = position < 0 ? -1 : (int32_t)(position / MSA_PAGE_SIZE), left = own < k - 1 ? own : k - 1, count = 0;
    for (int32_t page = 0; page < own && left > 0; page++)
        if (random_below(&r, own - page) < left) { /* each set of pages is as likely */
            ids[count++] = page;
            left--;
        }
    if (own >= 0)
        ids[count++] = own;
    while (count < k)
        ids[count++] = -1;
}

static void check_shape(harness *h, int shape, int32_t kv_heads)
{
    random_stream r = random_new(h->options.seed, (uint32_t)shape);
    format_pair formats = attention_pairs[shape % NUM_ATTENTION_PAIRS];
    bool decode = shape / NUM_ATTENTION_PAIRS % 4 == 0;
    int32_t q_lens[MAX_BATCH], kv_lens[MAX_BATCH], batch = random_between(&r, 1, decode ? MAX_BATCH : 8);
    for (int32_t i = 0; i < batch; i++) {
        int32_t prefix = random_chance(&r, 0.2) ? 0 : random_below(&r, MAX_PAGES / (random_chance(&r, 0.7) ? 16 : 1));
        q_lens[i] = decode                    ? random_between(&r, 1, 4)
                    : random_chance(&r, 0.05) ? 0
                                              : random_between(&r, 1, 400 / batch);
        kv_lens[i] =
            prefix * MSA_PAGE_SIZE + (random_chance(&r, 0.5) ? 0 : random_below(&r, MSA_PAGE_SIZE)) + q_lens[i];
    }
    uint32_t seed = (uint32_t)(h->options.seed + 7919 * shape);
    attention_spec s = {.requests = batch_of(batch, q_lens, kv_lens),
                        .q_dtype = formats.q,
                        .kv_dtype = formats.kv,
                        .decode = decode,
                        .q_heads = 16 * kv_heads,
                        .kv_heads = kv_heads,
                        .topk = 16,
                        .scaled = random_chance(&r, 0.5),
                        .list = list_selected,
                        .data = &seed,
                        .samples = SAMPLES};
    s.requests.pool = 24;
    attention_case *c = attention_new(h, &s);
    trial_run_once(h, &c->t, h->levels[h->num_levels - 1].one);
    if (!h->test_failed)
        c->t.check(h, &c->t);
    attention_free(c);
}

void check_shapes(harness *h)
{
    for (int shape = 0; shape < SHAPES; shape += device_in_use() ? 1 : h->options.quick ? 256 : 60)
        for (int32_t kv_heads = 4; kv_heads > 0; kv_heads -= 3) {
            if (!test_begin(h, "shapes", "%d/%d-%d", shape % 16, shape, kv_heads))
                continue;
            check_shape(h, shape, kv_heads);
            test_end(h);
        }
}
