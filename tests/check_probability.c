/* SPDX-License-Identifier: MIT
 *
 * check_probability.c - how probabilities round, seen from outside: with E4M3 queries PV multiplies
 * e4m3_rn_satfinite(448 * exp(s - m)), m the largest visible logit of the page, and the denominator adds the
 * unrounded values.
 *
 * Values are the unit vectors on one page, so that output d times its denominator is the rounded probability of that
 * page's key d; the LSE gives the denominator. Keys spell their scores in digits to base 4, which queries weigh with
 * powers of two: every score is exact in FP32, and chosen so that its probability lies just below, at or just above a
 * midpoint of E4M3, on all midpoints.
 */
#include "checkkernel.h"

#include <math.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE, HISTORY = 3, PAGES = HISTORY + 1, MIDPOINTS = 126, DIGITS = 12 };

static const float SM_SCALE = 13.2f / 256;
static const double STEP = 0x1p-16; /* of scores, and the last digit's weight; the first one's is 64 */

typedef struct setting {
    msa_dtype kv;
    int64_t unit_page; /* with unit vectors as values; all others are 0 */
} setting;

/* Digits of the keys' format: NVFP4 has 2^8 * 0.5 to 2^-9 * 0.5, nine of them. */
static int num_digits(const setting *s)
{
    return s->kv == MSA_NVFP4 ? 9 : DIGITS;
}

static double midpoint(int i) /* i: 0..125, between the i-th and the next positive value */
{
    uint8_t low = (uint8_t)i, high = (uint8_t)(i + 1);
    return (oracle_value(MSA_E4M3, &low) + oracle_value(MSA_E4M3, &high)) / 2;
}

/* Minus the score of a key in steps: that of the page's best key, key 0, and of key i+1 beyond it what midpoint i asks
 * for, in page 0 and the own one less probable, in page 2 more. */
static int64_t score_steps(const setting *s, int64_t page, int64_t token)
{
    static const int beyond[PAGES] = {16, 0, -16, 16};
    int64_t smallest = (int64_t)1 << 2 * (DIGITS - num_digits(s)), steps = smallest * (page * 700 + 3);
    if (token > MIDPOINTS)
        steps += (int64_t)1 << 23;
    else if (token > 0)
        steps += (int64_t)(-log(midpoint((int)token - 1) / 448) / ((double)SM_SCALE * STEP)) + smallest * beyond[page];
    return steps / smallest * smallest;
}

static double weight_exponent(int digit)
{
    return 6 - 2 * digit;
}

/* The queries' part of a weight: exponents 8 to -8 for NVFP4, whose keys are digits / 2. */
static double query_exponent(const setting *s, int digit)
{
    if (s->kv == MSA_NVFP4)
        return weight_exponent(digit) + 1;
    return weight_exponent(digit) < -6 ? -6 : weight_exponent(digit);
}

static double query_value(const place *where, const void *data)
{
    const setting *s = data;
    return where->d < num_digits(s) ? exp2(query_exponent(s, where->d)) : 0;
}

static double key_value(const place *where, const void *data)
{
    const setting *s = data;
    if (where->d >= num_digits(s))
        return 0;
    int64_t digit = score_steps(s, where->page, where->token) >> 2 * (DIGITS - 1 - where->d) & 3;
    return (double)-digit * exp2(weight_exponent(where->d) - query_exponent(s, where->d));
}

static double unit_value(const place *where, const void *data)
{
    return where->page == ((const setting *)data)->unit_page && where->token == where->d;
}

static double logit(const setting *s, int64_t page, int64_t token)
{
    return -(double)SM_SCALE * STEP * (double)score_steps(s, page, token);
}

/* How far the FP32 value that is rounded may lie from the exact one: 4 units in its last place, and on a GPU what FP32
 * makes of a logit on the way, a few units of its own. It decides all but the probabilities chosen to lie on a
 * midpoint. */
static double tolerance(const harness *h, double logit)
{
    return 4 * 0x1p-23 + (h->options.device == MSA_DEVICE_CPU ? 0 : fabs(logit) * 0x1p-22);
}

static void check_key(harness *h, const attention_case *c, const setting *s, int64_t row, int32_t head, int d)
{
    bool visible = s->unit_page * PAGE + d <= c->b.row_position[row];
    double out = attention_out(c, row, head, d);
    if (!visible) {
        if (out != 0)
            test_fail(h, "row %lld, head %d: key %d is masked, but adds %g", (long long)row, head, d, out);
        return;
    }
    double best = logit(s, s->unit_page, 0), own = logit(s, s->unit_page, d) - best, exact = 448 * exp(own);
    double low = oracle_round(MSA_E4M3, exact * (1 - tolerance(h, own))),
           high = oracle_round(MSA_E4M3, exact * (1 + tolerance(h, own)));
    double rounded = out * 448 * exp((double)attention_lse(c, row, head) - best); /* known within a rounding to BF16 */
    if (fabs(rounded - low) > 0.006 * low && fabs(rounded - high) > 0.006 * high)
        test_fail(h, "row %lld, head %d: probability %.9g of key %d counts as %.6g, expected %g or %g", (long long)row,
                  head, exact, d, rounded, low, high);
}

static void check_lse(harness *h, const attention_case *c, const setting *s, int64_t row, int32_t head)
{
    double sum = 0;
    for (int64_t page = 0; page < PAGES; page++)
        for (int64_t token = 0; token < PAGE && page * PAGE + token <= c->b.row_position[row]; token++)
            sum += exp(logit(s, page, token));
    double lse = (double)attention_lse(c, row, head);
    if (fabs(lse - log(sum)) > 1e-5)
        test_fail(h, "row %lld, head %d: LSE %.9g, expected %.9g of unrounded probabilities", (long long)row, head, lse,
                  log(sum));
}

static void probability_test(harness *h, msa_dtype kv, bool decode, int32_t rows)
{
    for (int64_t page = 0; page < PAGES; page++) {
        setting s = {kv, page};
        attention_spec spec = {.requests = batch_of(1, &rows, LENGTHS(HISTORY * PAGE + 100)),
                               .q_dtype = MSA_E4M3,
                               .kv_dtype = kv,
                               .out_dtype = MSA_BF16,
                               .decode = decode,
                               .q_heads = 4,
                               .kv_heads = 1,
                               .topk = PAGES,
                               .sm_scale = SM_SCALE,
                               .q = query_value,
                               .k = key_value,
                               .v = unit_value,
                               .list = list_all_pages,
                               .data = &s};
        attention_case *c = attention_new(h, &spec);
        for (int level = 0; level < h->num_levels && !h->test_failed; level++) {
            h->variant = h->levels[level].isa;
            trial_run_once(h, &c->t, h->levels[level].one);
            for (int64_t row = 0; row < rows; row++)
                for (int32_t head = 0; head < spec.q_heads; head++) {
                    check_lse(h, c, &s, row, head);
                    for (int d = 0; d < D; d++)
                        check_key(h, c, &s, row, head, d);
                }
            h->variant = "";
        }
        attention_free(c);
    }
}

void check_probability(harness *h)
{
    static const msa_dtype formats[] = {MSA_E4M3, MSA_NVFP4};
    static const int32_t rows[] = {1, 3, 64};
    for (int i = 0; i < 2; i++)
        for (int decode = 0; decode < 2; decode++)
            for (int j = 0; j < 3; j++) {
                if (!test_begin(h, "probability", "%s/%s-%d", decode ? "decode" : "prefill", format_name(formats[i]),
                                rows[j]))
                    continue;
                probability_test(h, formats[i], decode, rows[j]);
                test_end(h);
            }
}
