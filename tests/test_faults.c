/* SPDX-License-Identifier: MIT
 *
 * test_faults - see faults.h.
 */
#include "faults.h"

#include <string.h>

double coded_zero(const place *where, const void *data)
{
    (void)where;
    (void)data;
    return 0;
}

double coded_page(const place *where, const void *data)
{
    (void)data;
    return where->d == where->page;
}

double coded_offset(const place *where, const void *data)
{
    (void)data;
    return where->d == where->token;
}

double coded_hash(const place *where, const void *data)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, -0.5, -1, -1.5};
    (void)data;
    uint64_t hash = (uint64_t)where->request << 40 ^ (uint64_t)(where->page + 1) << 24 ^ (uint64_t)where->token << 12 ^
                    (uint64_t)where->head << 8 ^ (uint64_t)where->d;
    hash = (hash + 1) * 0x9E3779B97F4A7C15;
    hash = (hash ^ hash >> 29) * 0xBF58476D1CE4E5B9;
    return values[hash >> 61];
}

void plain_test(harness *h, const char *op, const char *name, void (*body)(harness *h))
{
    if (!test_begin(h, op, "%s", name))
        return;
    body(h);
    test_end(h);
}

void each_attention(harness *h, const char *name, void (*body)(harness *h, const attention_spec *spec))
{
    for (int pair = 0; pair < NUM_ATTENTION_PAIRS; pair++)
        for (int decode = 0; decode < 2; decode++) {
            attention_spec s = {.q_dtype = attention_pairs[pair].q,
                                .kv_dtype = attention_pairs[pair].kv,
                                .decode = decode,
                                .q_heads = 2,
                                .kv_heads = 1,
                                .topk = 16};
            if (!test_begin(h, decode ? "decode" : "prefill", "%s/%s-%s", name, format_name(s.q_dtype),
                            format_name(s.kv_dtype)))
                continue;
            body(h, &s);
            test_end(h);
        }
}

void each_index(harness *h, const char *name, void (*body)(harness *h, const index_spec *spec))
{
    for (int pair = 0; pair < NUM_INDEX_PAIRS; pair++)
        for (int decode = 0; decode < 2; decode++) {
            index_spec s = {.q_dtype = index_pairs[pair].q, .k_dtype = index_pairs[pair].kv, .decode = decode};
            if (!test_begin(h, decode ? "index_decode" : "index_prefill", "%s/%s-%s", name, format_name(s.q_dtype),
                            format_name(s.k_dtype)))
                continue;
            body(h, &s);
            test_end(h);
        }
}

void same_bits_on(harness *h, trial *a, msa_context *a_context, trial *b, msa_context *b_context, const char *what)
{
    trial_run_once(h, a, a_context);
    trial_run_once(h, b, b_context);
    for (int i = 0; i < a->num_outputs; i++)
        if (memcmp(a->outputs[i].region->data, b->outputs[i].region->data, a->outputs[i].region->bytes))
            test_fail(h, "%s: other bits in %s", what, a->outputs[i].name);
}

void same_bits(harness *h, trial *a, trial *b, const char *what)
{
    for (int i = 0; i < h->num_levels; i++) {
        h->variant = h->levels[i].isa;
        same_bits_on(h, a, h->levels[i].one, b, h->levels[i].one, what);
    }
    h->variant = "";
}

void same_attention(harness *h, const attention_spec *a, const attention_spec *b, const char *what)
{
    attention_case *one = attention_new(h, a), *other = attention_new(h, b);
    same_bits(h, &one->t, &other->t, what);
    attention_free(one);
    attention_free(other);
}

msa_dtype attention_out_dtype(const attention_spec *spec)
{
    return spec->out_dtype ? spec->out_dtype : spec->q_dtype == MSA_FP16 ? MSA_FP16 : MSA_BF16;
}

int main(int argc, char **argv)
{
    harness h = harness_start(argc, argv, "Tests faults that real attention libraries had.");
    faults_masks(&h);
    faults_numbers(&h);
    faults_pages(&h);
    faults_selection(&h);
    faults_plans(&h);
    faults_calls(&h);
    faults_limits(&h);
    return harness_finish(&h);
}
