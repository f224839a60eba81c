/* SPDX-License-Identifier: MIT
 *
 * faults_numbers.c - number formats, scales, softmax and its LSE, NaN and infinities.
 */
#include "faults.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

static void expect_out(harness *h, const attention_case *c, int64_t row, int32_t head, int d, double expected)
{
    double x = attention_out(c, row, head, d);
    if (!is_near(attention_out_dtype(&c->spec), x, expected, fabs(expected) * 1e-5))
        test_fail(h, "out[row %lld, head %d, %d] = %.9g, expected %.9g", (long long)row, head, d, x, expected);
}

static void expect_lse(harness *h, const attention_case *c, int64_t row, int32_t head, double expected)
{
    double x = (double)attention_lse(c, row, head);
    if (isnan(expected) ? !isnan(x) : !(fabs(x - expected) <= 1e-6 + 1e-6 * fabs(expected)))
        test_fail(h, "lse[row %lld, head %d] = %.9g, expected %.9g", (long long)row, head, x, expected);
}

/* --------------------------------------------------------------------------------------------------------- formats */

/* Bytes of the only key of request r, which lies at the start of a page. Dense caches with one head. */
static uint8_t *key_row(const attention_case *c, const void *cache, int32_t r)
{
    int64_t page = c->b.page_table[r * c->b.table_pitch];
    return (uint8_t *)cache + page * PAGE * oracle_row_bytes(c->spec.kv_dtype, D);
}

static uint8_t *key_scales(const attention_case *c, const void *scales, int32_t r)
{
    return (uint8_t *)scales + (int64_t)c->b.page_table[r * c->b.table_pitch] * PAGE * (D / 16);
}

/* A head's query is 1 in one place, so its logit is one element of the only key. */
static double one_hot_query(const place *where, const void *data)
{
    (void)data;
    return where->d == where->token % 8 * 16 + where->head;
}

/* Every code (for NVFP4 with every scale), as an element of K through the LSE and as one of V through the output.
 * Request r of 256 has one key; the 16 heads look at the 16 elements of its block r % 8. */
static void every_code(harness *h, const attention_spec *spec)
{
    enum { REQUESTS = 256 };
    if (spec->kv_dtype != MSA_E4M3 && spec->kv_dtype != MSA_NVFP4) {
        test_leave_out(h);
        return;
    }
    int32_t ones[REQUESTS];
    for (int r = 0; r < REQUESTS; r++)
        ones[r] = 1;
    attention_spec s = *spec;
    s.q_heads = 16;
    s.sm_scale = 1;
    s.requests = batch_of(REQUESTS, ones, ones);
    s.q = one_hot_query;
    s.list = list_all_pages;
    attention_case *c = attention_new(h, &s);
    double values[REQUESTS][16];
    for (int r = 0; r < REQUESTS; r++) {
        int block = r % 8;
        bool nvfp4 = s.kv_dtype == MSA_NVFP4;
        uint8_t *k = key_row(c, c->args.k, r), *v = key_row(c, c->args.v, r);
        memset(k, 0, (size_t)oracle_row_bytes(s.kv_dtype, D));
        memset(v, 0, (size_t)oracle_row_bytes(s.kv_dtype, D));
        if (nvfp4) { /* the odd nibble is the later element */
            memset(key_scales(c, c->args.k_scale, r), 0x38, D / 16);
            memset(key_scales(c, c->args.v_scale, r), 0x38, D / 16);
            key_scales(c, c->args.k_scale, r)[block] = key_scales(c, c->args.v_scale, r)[block] = (uint8_t)r;
        }
        for (int i = 0; i < 16; i++) {
            uint8_t code = (uint8_t)(16 * (r % 16) + i), scale = (uint8_t)r;
            if (nvfp4) {
                k[block * 8 + i / 2] |= (uint8_t)(i << (i % 2 * 4));
                v[block * 8 + i / 2] |= (uint8_t)(i << (i % 2 * 4));
                values[r][i] = oracle_e2m1_value((unsigned)i) * oracle_value(MSA_E4M3, &scale);
                if (s.q_dtype == MSA_E4M3)
                    values[r][i] = oracle_round(MSA_E4M3, values[r][i]);
            } else {
                k[block * 16 + i] = v[block * 16 + i] = code;
                values[r][i] = oracle_value(MSA_E4M3, &code);
            }
        }
    }
    trial_run(h, &c->t);
    for (int r = 0; r < REQUESTS; r++)
        for (int i = 0; i < 16; i++) {
            bool nan = false; /* NaN elsewhere in the key makes 0 * NaN */
            for (int j = 0; j < 16; j++)
                nan |= isnan(values[r][j]);
            expect_lse(h, c, r, i, nan ? (double)NAN : values[r][i]);
            if (!nan)
                expect_out(h, c, r, 0, r % 8 * 16 + i, values[r][i]);
        }
    attention_free(c);
}

static double large_one_hot_query(const place *where, const void *data)
{
    (void)data;
    return where->d == (where->token * 16 + where->head) % D ? 448 : 0;
}

static double offset_keys(const place *where, const void *data)
{
    (void)data;
    return where->d == where->token ? 6 : 0;
}

/* Row r and head h see one token alone, number 16r + h of page 0: each block of V shows its own scale, in both
 * orders. */
static void scale_order(harness *h, const attention_spec *spec)
{
    if (spec->kv_dtype != MSA_NVFP4) {
        test_leave_out(h);
        return;
    }
    for (int quad = 0; quad < 2; quad++) {
        attention_spec s = *spec;
        s.quad = quad;
        s.q_heads = 16;
        s.topk = 1;
        s.sm_scale = 1;
        s.requests = batch_of(1, LENGTHS(8), LENGTHS(136));
        s.q = large_one_hot_query;
        s.k = offset_keys;
        s.list = list_all_pages; /* k = 1: page 0 only */
        attention_case *c = attention_new(h, &s);
        int64_t page = c->b.page_table[0];
        memset((uint8_t *)c->args.v + page * PAGE * D / 2, 0x22, PAGE * D / 2); /* codes 1.0 */
        for (int token = 0; token < PAGE; token++)
            for (int g = 0; g < 8; g++) {
                uint8_t *scales = (uint8_t *)c->args.v_scale + page * 1024;
                scales[quad ? token / 4 * 32 + g * 4 + token % 4 : token * 8 + g] = (uint8_t)(0x30 + token % 8 * 8 + g);
            }
        trial_run(h, &c->t);
        for (int token = 0; token < PAGE; token++)
            for (int d = 0; d < D; d++) {
                uint8_t scale = (uint8_t)(0x30 + token % 8 * 8 + d / 16);
                expect_out(h, c, token / 16, token % 16, d, oracle_value(MSA_E4M3, &scale));
            }
        attention_free(c);
    }
}

/* ---------------------------------------------------------------------------------------------------------- scales */

static double small_integers(const place *where, const void *data)
{
    (void)data;
    return where->d < 4 ? where->d + (where->page < 0 ? 1 : 0) : 0; /* q: 1 2 3 4, k and v: 0 1 2 3 */
}

/* One key: LSE is the logit, the output is V; every factor must be there, once. */
static void scales(harness *h, const attention_spec *spec)
{
    static const float half = 0.5f, four = 4, eighth = 0.125f;
    for (int given = 0; given < 2; given++) {
        attention_spec s = *spec;
        s.sm_scale = 0.1f;
        s.requests = batch_of(1, LENGTHS(1), LENGTHS(1));
        s.q = s.k = s.v = small_integers;
        s.list = list_all_pages;
        attention_case *c = attention_new(h, &s);
        double logit = (double)0.1f * 20, out = 1;
        const float *shared[] = {arena_copy(&c->t.inputs, &half, sizeof half, 4),
                                 arena_copy(&c->t.inputs, &four, sizeof four, 4),
                                 arena_copy(&c->t.inputs, &eighth, sizeof eighth, 4)};
        if (given && s.q_dtype == MSA_E4M3) {
            c->args.q_descale = shared[0];
            logit *= 0.5;
        }
        if (given && s.kv_dtype == MSA_E4M3) {
            c->args.k_descale = shared[1];
            c->args.v_descale = shared[2];
        } else if (given && s.kv_dtype == MSA_NVFP4) {
            c->args.k_global_scale = shared[1];
            c->args.v_global_scale = shared[2];
        }
        if (given && (s.kv_dtype == MSA_E4M3 || s.kv_dtype == MSA_NVFP4)) {
            logit *= 4;
            out = 0.125;
        }
        trial_run(h, &c->t);
        expect_lse(h, c, 0, 1, logit);
        for (int d = 0; d < D; d++)
            expect_out(h, c, 0, 1, d, d < 4 ? out * d : 0);
        attention_free(c);
    }
}

/* --------------------------------------------------------------------------------------------------------- softmax */

static double first_is_one(const place *where, const void *data)
{
    (void)data;
    return where->d == 0;
}

/* Constant in a page: data is a number for each page. */
static double page_level(const place *where, const void *data)
{
    return where->d == 0 ? ((const double *)data)[where->page] : 0;
}

/* Maxima that fall and rise from page to page, with the whole mass in one page. */
static void running_maximum(harness *h, const attention_spec *spec)
{
    static const double levels[][4] = {{6, 4, 1, -2}, {-2, 1, 4, 6}, {1, 6, -2, 4}};
    for (int i = 0; i < 3; i++) {
        attention_spec s = *spec;
        s.sm_scale = 10;
        s.requests = batch_of(1, LENGTHS(1), LENGTHS(512));
        s.q = first_is_one;
        s.k = page_level;
        s.v = coded_page;
        s.data = levels[i];
        s.list = list_all_pages;
        attention_case *c = attention_new(h, &s);
        trial_run(h, &c->t);
        for (int page = 0; page < 4; page++)
            expect_out(h, c, 0, 0, page, exp(10 * (levels[i][page] - 6)));
        expect_lse(h, c, 0, 0, 60 + log(128));
        attention_free(c);
    }
}

static double huge_query(const place *where, const void *data)
{
    return where->d == 0 ? ((const double *)data)[0] : 0;
}

/* Key 3 of page 0 has a logit of +2^n, all others one of -2^n; or all have -2^n. */
static double huge_keys(const place *where, const void *data)
{
    const double *d = data;
    return where->d ? 0 : where->page == 0 && where->token == 3 ? d[1] * d[2] : -d[1];
}

/* There is no finite number that stands for "masked": logits of any finite size work. */
static void huge_logits(harness *h, const attention_spec *spec)
{
    bool bf16 = spec->q_dtype == MSA_BF16 && spec->kv_dtype == MSA_BF16;
    double q = bf16 ? 0x1p60 : 448, k = bf16 ? 0x1p60 : 6, scale = bf16 ? 1 : 0x1p100;
    for (int positive = 0; positive < 2; positive++) {
        const double numbers[] = {q, k, positive ? 1 : -1};
        attention_spec s = *spec;
        s.sm_scale = (float)scale;
        s.requests = batch_of(1, LENGTHS(1), LENGTHS(200));
        s.q = huge_query;
        s.k = huge_keys;
        s.v = coded_offset;
        s.data = numbers;
        s.list = list_all_pages;
        attention_case *c = attention_new(h, &s);
        trial_run(h, &c->t);
        expect_lse(h, c, 0, 0, positive ? scale * q * k : -scale * q * k);
        for (int d = 0; d < D && positive; d++)
            expect_out(h, c, 0, 0, d, d == 3);
        for (int d = 0; d < D && !positive; d++)
            expect_out(h, c, 0, 0, d, d < 72 ? 2.0 / 200 : 1.0 / 200);
        attention_free(c);
    }
}

/* The largest scale there is leaves logits of 0 alone. */
static void largest_scale(harness *h, const attention_spec *spec)
{
    attention_spec s = *spec;
    s.sm_scale = FLT_MAX;
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(200));
    s.q = coded_zero;
    s.v = coded_offset;
    s.list = list_all_pages;
    attention_case *c = attention_new(h, &s);
    trial_run(h, &c->t);
    expect_lse(h, c, 0, 0, log(200));
    for (int d = 0; d < D; d++)
        expect_out(h, c, 0, 0, d, d < 72 ? 2.0 / 200 : 1.0 / 200);
    attention_free(c);
}

static double one_large_channel(const place *where, const void *data)
{
    (void)data;
    return where->d == 0 ? 448 : 0;
}

/* All of page 1 lies 2^-124 below the other pages, and its second key 2^-16 below its first. */
static double faint_keys(const place *where, const void *data)
{
    (void)data;
    return where->d ? 0 : where->page != 1 ? 448 : where->token == 1 ? -416 : -320;
}

static double faint_values(const place *where, const void *data)
{
    (void)data;
    return where->page == 1 && where->token == 1 ? 0x1p-9 * (1 + where->d % 7) : 0;
}

/* What a page far below another adds is all that a result has, and a descale makes it large: the same bits from every
 * level, whatever units its operands have. */
static void faint_page(harness *h, const attention_spec *spec)
{
    if (spec->q_dtype != MSA_E4M3 || spec->kv_dtype != MSA_E4M3) {
        test_leave_out(h);
        return;
    }
    attention_spec s = *spec;
    s.scaled = true;
    s.sm_scale = 124.2f * 0.69314718f / (448 * 768);
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(257));
    s.q = one_large_channel;
    s.k = faint_keys;
    s.v = faint_values;
    s.list = list_all_pages;
    attention_case *c = attention_new(h, &s);
    float *q_descale = (float *)c->args.q_descale, *k_descale = (float *)c->args.k_descale,
          *v_descale = (float *)c->args.v_descale;
    for (int head = 0; head < (c->args.v_descale_stride == 4 ? s.kv_heads : 1); head++) {
        q_descale[head] = k_descale[head] = 1;
        v_descale[head] = 0x1p127f;
    }
    trial_run(h, &c->t);
    attention_free(c);
}

/* Two channels of q against two of k, with BF16's subnormals in one of each pair: data is their unit. */
static double faint_query(const place *where, const void *data)
{
    return where->d == 1 ? *(const double *)data * 64 : where->d == 2 ? 4 : 0;
}

static double steps(const place *where, const void *data)
{
    (void)data;
    return where->d == 1 ? where->token % 4 : 0;
}

static double steps_and_faint_keys(const place *where, const void *data)
{
    return where->d == 2 ? *(const double *)data * where->token : steps(where, data);
}

/* Scores to which BF16 subnormals add something with a large scale, and V that has them. CPUs read them as zeros. */
static void bf16_subnormals(harness *h, const attention_spec *spec)
{
    if (spec->q_dtype != MSA_BF16 || h->options.device != MSA_DEVICE_CPU) {
        test_leave_out(h);
        return;
    }
    static const double faint = 0x1p-133, zero = 0;
    attention_spec with = *spec;
    with.sm_scale = 0x1p120f;
    with.requests = batch_of(1, LENGTHS(3), LENGTHS(200));
    with.q = faint_query;
    with.k = with.v = spec->kv_dtype == MSA_BF16 ? steps_and_faint_keys : steps;
    with.data = &faint;
    with.list = list_all_pages;
    attention_spec without = with;
    without.data = &zero;
    same_attention(h, &with, &without, "BF16 subnormals");
}

/* A BF16 number of either sign and about 2^data, of the place alone; every fourth is 0. */
static double near_power(const place *where, const void *data)
{
    place scaled = *where;
    double mantissa = coded_hash(where, NULL);
    scaled.d += D;
    return mantissa * (1 + coded_hash(&scaled, NULL) / 32) * ldexp(1, *(const int *)data + where->d % 4);
}

static double element_one(const place *where, const void *data)
{
    (void)data;
    return (where->d + where->token) % 3 ? 0 : coded_hash(where, NULL);
}

/* Products and sums of BF16 numbers on both sides of 2^-126, where some instructions give 0 and others do not, and
 * past FP32's largest number: in QK, in PV for P far below 1, and in both. All levels whose sums have one order give the
 * same bits (which ones, the test of index scores says). */
static void ends_of_range(harness *h, const attention_spec *spec)
{
    static const struct {
        int power;
        float sm_scale;
    } problems[] = {{-62, 0x1p122f}, {62, 0x1p-126f}, {-124, 0x1p124f}, {0, 3}, {0, 20}};
    if (spec->q_dtype != MSA_BF16 || h->options.device != MSA_DEVICE_CPU) {
        test_leave_out(h);
        return;
    }
    for (int i = 0; i < (int)(sizeof problems / sizeof problems[0]); i++) {
        attention_spec s = *spec;
        s.requests = batch_of(2, LENGTHS(3, 1), LENGTHS(260, 131));
        s.sm_scale = problems[i].sm_scale;
        s.data = &problems[i].power;
        s.q = near_power;
        s.k = s.v = spec->kv_dtype == MSA_BF16 && i < 2 ? near_power : element_one;
        s.list = list_all_pages;
        attention_case *c = attention_new(h, &s);
        c->t.check = NULL;
        trial_run(h, &c->t);
        attention_free(c);
    }
}

/* Four channels 30 times as large as the others, as in real activations. */
static double outliers(const place *where, const void *data)
{
    return coded_hash(where, data) * (where->d % 32 == 5 ? 30 : 1);
}

static void outlier_channels(harness *h, const attention_spec *spec)
{
    attention_spec s = *spec;
    s.requests = batch_of(1, LENGTHS(2), LENGTHS(8192));
    s.sm_scale = 0.002f;
    s.q = s.k = outliers;
    s.samples = 4;
    attention_test(h, &s);
}

/* ----------------------------------------------------------------------------------------------------- NaN and Inf */

enum { NAN_REQUESTS = 2, NAN_Q0 = 3, NAN_Q1 = 140, NAN_KV0 = 200, NAN_KV1 = 300, NAN_TOKEN = 50 };

static void keep_outputs(const attention_case *c, double (*out)[2][D], float (*lse)[2])
{
    for (int64_t row = 0; row < c->b.total_q; row++)
        for (int32_t head = 0; head < 2; head++) {
            lse[row][head] = attention_lse(c, row, head);
            for (int d = 0; d < D; d++)
                out[row][head][d] = attention_out(c, row, head, d);
        }
}

static bool is_all_nan(const attention_case *c, int64_t row, int32_t head)
{
    bool all = isnan(attention_lse(c, row, head));
    for (int d = 0; d < D; d++)
        all &= isnan(attention_out(c, row, head, d));
    return all;
}

/* `seen` rows and heads must hold NaN: everywhere (logits), or in element d alone (V). All others keep their bits. */
static void expect_nan(harness *h, const attention_case *c,
                       bool (*seen)(int64_t row, int32_t head, int64_t position, int32_t request), int only_d,
                       double (*out)[2][D], float (*lse)[2], const char *what)
{
    for (int64_t row = 0; row < c->b.total_q; row++)
        for (int32_t head = 0; head < 2; head++) {
            bool sees = seen(row, head, c->b.row_position[row], c->b.row_request[row]);
            bool same = attention_lse(c, row, head) == lse[row][head];
            for (int d = 0; d < D; d++)
                same &= attention_out(c, row, head, d) == out[row][head][d] || (sees && d == only_d);
            if (!sees && !same)
                test_fail(h, "%s: row %lld, head %d changed", what, (long long)row, head);
            else if (sees && only_d < 0 && !is_all_nan(c, row, head))
                test_fail(h, "%s: row %lld, head %d sees it and is not NaN", what, (long long)row, head);
            else if (sees && only_d >= 0 && !isnan(attention_out(c, row, head, only_d)))
                test_fail(h, "%s: row %lld, head %d, element %d sees it and is not NaN", what, (long long)row, head,
                          only_d);
        }
}

static bool sees_query(int64_t row, int32_t head, int64_t position, int32_t request)
{
    (void)position;
    (void)request;
    return row == 5 && head == 1;
}

static bool sees_token(int64_t row, int32_t head, int64_t position, int32_t request)
{
    (void)row;
    (void)head;
    return request == 1 && position >= PAGE + NAN_TOKEN;
}

static void put_bad(msa_dtype dtype, uint8_t *row, int d, bool infinite)
{
    uint16_t half = dtype == MSA_BF16 ? (infinite ? 0x7F80 : 0x7FC0) : (infinite ? 0x7C00 : 0x7E00);
    if (dtype == MSA_E4M3)
        row[d] = 0xFF;
    else
        memcpy(row + 2 * d, &half, 2);
}

/* Puts NaN or Inf in one place, runs, and puts back what was there. */
static void with_bad(harness *h, attention_case *c, const void *cache, bool values, bool infinite, double (*out)[2][D],
                     float (*lse)[2])
{
    enum { BAD_D = 37 };
    msa_dtype dtype = c->spec.kv_dtype;
    int64_t page = c->b.page_table[c->b.table_pitch + 1], row_bytes = oracle_row_bytes(dtype, D);
    uint8_t *row = (uint8_t *)cache + (page * PAGE + NAN_TOKEN) * row_bytes, kept[2 * D];
    const char *what = values ? infinite ? "Inf in V" : "NaN in V" : infinite ? "Inf in K" : "NaN in K";
    memcpy(kept, row, (size_t)row_bytes);
    put_bad(dtype, row, BAD_D, infinite);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].one);
        expect_nan(h, c, sees_token, values ? BAD_D : -1, out, lse, what);
    }
    memcpy(row, kept, (size_t)row_bytes);
}

static void with_bad_scale(harness *h, attention_case *c, const void *scales_of, bool values, double (*out)[2][D],
                           float (*lse)[2])
{
    int64_t page = c->b.page_table[c->b.table_pitch + 1];
    uint8_t *scale = (uint8_t *)scales_of + (page * PAGE + NAN_TOKEN) * 8 + 2, kept = *scale;
    *scale = 0x7F;
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].one);
        for (int64_t row = 0; row < c->b.total_q; row++)
            for (int32_t head = 0; head < 2; head++) {
                bool sees = sees_token(row, head, c->b.row_position[row], c->b.row_request[row]);
                for (int d = 0; d < D; d++) {
                    double x = attention_out(c, row, head, d);
                    bool bad = sees && (!values || d / 16 == 2);
                    if (bad ? !isnan(x) : !(x == out[row][head][d]))
                        test_fail(h, "NaN in a scale of %s: out[row %lld, head %d, %d] = %g", values ? "V" : "K",
                                  (long long)row, head, d, x);
                }
                CHECK(h, sees && !values ? isnan(attention_lse(c, row, head))
                                         : attention_lse(c, row, head) == lse[row][head]);
            }
    }
    *scale = kept;
}

static void not_finite(harness *h, const attention_spec *spec)
{
    static double out[NAN_Q0 + NAN_Q1][2][D];
    static float lse[NAN_Q0 + NAN_Q1][2];
    attention_spec s = *spec;
    s.requests = batch_of(NAN_REQUESTS, LENGTHS(NAN_Q0, NAN_Q1), LENGTHS(NAN_KV0, NAN_KV1));
    s.list = list_all_pages;
    s.topk = 3;
    s.k = s.v = coded_hash;
    attention_case *c = attention_new(h, &s);
    trial_run_once(h, &c->t, h->levels[0].one);
    keep_outputs(c, out, lse);
    bool halves = s.kv_dtype == MSA_BF16 || s.kv_dtype == MSA_FP16;
    for (int infinite = 0; infinite < 1 + halves && s.kv_dtype != MSA_NVFP4; infinite++) {
        with_bad(h, c, c->args.k, false, infinite, out, lse);
        with_bad(h, c, c->args.v, true, infinite, out, lse);
    }
    if (s.kv_dtype == MSA_NVFP4) {
        with_bad_scale(h, c, c->args.k_scale, false, out, lse);
        with_bad_scale(h, c, c->args.v_scale, true, out, lse);
    }
    for (int infinite = 0; infinite < (s.q_dtype == MSA_E4M3 ? 1 : 2); infinite++) {
        put_bad(s.q_dtype, (uint8_t *)c->args.q + (5 * 2 + 1) * oracle_row_bytes(s.q_dtype, D), 100, infinite);
        for (int i = 0; i < h->num_levels; i++) {
            trial_run_once(h, &c->t, h->levels[i].one);
            expect_nan(h, c, sees_query, -1, out, lse, infinite ? "Inf in q" : "NaN in q");
        }
    }
    attention_free(c);
}

void faults_numbers(harness *h)
{
    each_attention(h, "every-code", every_code);
    each_attention(h, "scale-order", scale_order);
    each_attention(h, "scales", scales);
    each_attention(h, "running-maximum", running_maximum);
    each_attention(h, "huge-logits", huge_logits);
    each_attention(h, "largest-scale", largest_scale);
    each_attention(h, "faint-page", faint_page);
    each_attention(h, "bf16-subnormals", bf16_subnormals);
    each_attention(h, "ends-of-range", ends_of_range);
    each_attention(h, "outlier-channels", outlier_channels);
    each_attention(h, "not-finite", not_finite);
}
